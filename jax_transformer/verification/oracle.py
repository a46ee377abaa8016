"""Float64 on both sides: the judge of which is right."""

import contextlib
import copy
import sys
from collections.abc import Generator, Iterable
from types import ModuleType
from typing import Any
from unittest import mock


class WideTorch:
    """`torch`, but float32 is float64: models that cast to float32 by name stay in float64."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.float = self.float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


@contextlib.contextmanager
def in_dtype(model: Any, dtype: Any) -> Generator[Any]:
    """Inside, the PyTorch `model` in that dtype and in evaluation mode; after it, as it was.

    A float32 model is widened where it is, and narrowed again, which is exact: there is never a
    second one in memory. Of others a copy is made.
    """
    import torch

    floats = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    exact = dtype in (torch.float32, torch.float64)
    if not (exact and all(tensor.dtype == torch.float32 for tensor in floats)):
        yield copy.deepcopy(model).to(dtype).eval()
        return
    training = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield model.to(dtype).eval()
    finally:
        model.to(torch.float32)
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def widened(modules: Iterable[ModuleType]) -> Generator[None]:
    """Inside, the code of those modules computes in float64 what it casts to float32."""
    import torch

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "torch", WideTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


@contextlib.contextmanager
def float64_throughout(model: Any) -> Generator[None]:
    """Inside, the PyTorch `model` computes in float64 what its code casts to float32: norms, angles
    and softmax of `transformers`."""
    import torch

    names = {type(module).__module__ for module in model.modules()}
    names |= {name for name in sys.modules if name == "transformers.modeling_rope_utils"}
    modules = [sys.modules[name] for name in names if not name.startswith("torch.")]
    with widened(module for module in modules if getattr(module, "torch", None) is torch):
        compute_frequencies_anew(model)
        yield


def compute_frequencies_anew(model: Any) -> None:
    """Rotary frequencies that a model of `transformers` computed in float32 when it was made, in
    float64: inside `float64_throughout` its modules make them so."""
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        if any(name.endswith("inv_freq") for name in names) and hasattr(module, "config"):
            for name, buffer in type(module)(module.config).named_buffers(recurse=False):
                setattr(module, name, buffer.double())
