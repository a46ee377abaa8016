"""What the reference's steps do, seen from outside: any loop whose optimizer is PyTorch's."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.verification.inputs import Batch

Tensors = dict[str, np.ndarray]
Carry = Callable[[Mapping[str, np.ndarray]], Tensors]


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Parameters and the moments of Adam, under our names."""

    parameters: Tensors
    first: Tensors
    second: Tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the reference."""

    number: int
    """From 1."""
    batch: Batch
    loss: float
    before: State
    gradients: Tensors
    """As the backward pass left them."""
    given: Tensors
    """As the optimizer was given them."""
    after: State

    @property
    def gradient_norm(self) -> float:
        """Before clipping."""
        return norm_of(self.gradients)


def norm_of(tensors: Tensors) -> float:
    """The Euclidean norm over all."""
    return float(np.sqrt(sum(np.vdot(each, each) for each in tensors.values())))


class Recorder:
    """Follows the gradients and moments of a PyTorch model while it is trained."""

    def __init__(self, model: Any, carry: Carry):
        self.names = dict(model.named_parameters(remove_duplicate=False))
        self.carry = carry
        self.gradients: dict[int, Any] = {}
        self.given: dict[int, Any] = {}
        self.moments: dict[str, dict[int, Any]] = {"exp_avg": {}, "exp_avg_sq": {}}

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Inside, what backward passes and optimizers leave is seen."""
        from torch.optim import optimizer as optim

        unique = {id(parameter): parameter for parameter in self.names.values()}
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._see_gradient)
            for parameter in unique.values()
            if parameter.requires_grad
        ]
        hooks.append(optim.register_optimizer_step_pre_hook(self._before))
        hooks.append(optim.register_optimizer_step_post_hook(self._after))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see_gradient(self, parameter: Any) -> None:
        # Of several backward passes before a step the last one leaves their sum.
        self.gradients[id(parameter)] = parameter.grad.clone()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.given[id(parameter)] = parameter.grad.clone()

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, state in optimizer.state.items():
            for name, found in self.moments.items():
                if name in state:
                    found[id(parameter)] = state[name].clone()

    def named(self, values: Mapping[int, Any] | None = None) -> Tensors:
        """Tensors by parameter under our names, zero for the rest; None: the parameters."""
        tensors = {}
        for name, parameter in self.names.items():
            tensor = parameter if values is None else values.get(id(parameter))
            found = parameter.new_zeros(parameter.shape) if tensor is None else tensor.detach()
            tensors[name] = found.numpy().copy()
        return self.carry(tensors)

    def trained(self, values: Mapping[int, Any]) -> Tensors:
        """Likewise, without those that have none."""
        names = {name for name, each in self.names.items() if id(each) in values}
        marks = {
            id(each): each.new_ones(each.shape) for n, each in self.names.items() if n in names
        }
        known = self.named(marks)
        return {name: value for name, value in self.named(values).items() if known[name].any()}

    def state(self) -> State:
        """As it is now."""
        first, second = (self.named(each) for each in self.moments.values())
        return State(parameters=self.named(), first=first, second=second)


def recorded_steps(
    model: Any, step: Callable[[Batch], Any], batches: Sequence[Batch], carry: Carry
) -> Iterator[Step]:
    """The steps of a PyTorch model, one for each batch.

    Raises:
        InputError: a step that no optimizer of PyTorch takes, or one without the moments of Adam.
    """
    recorder = Recorder(model, carry)
    after = recorder.state()
    for number, batch in enumerate(batches, 1):
        before = after
        recorder.gradients.clear()
        recorder.given.clear()
        with recorder.watching():
            loss = as_number(step(as_tensors(batch)))
        if not recorder.given or not recorder.moments["exp_avg_sq"]:
            raise InputError(
                "the reference's training step leaves no moments of Adam: train it with a "
                "torch.optim.Optimizer that keeps exp_avg and exp_avg_sq"
            )
        after = recorder.state()
        yield Step(
            number=number,
            batch=batch,
            loss=loss,
            before=before,
            gradients=recorder.named(recorder.gradients),
            given=recorder.trained(recorder.given),
            after=after,
        )


def as_tensors(batch: Batch) -> Batch:
    """With floating-point numbers in float64."""
    import torch

    def tensor(array: np.ndarray | None) -> Any:
        if array is None:
            return None
        found = torch.from_numpy(np.array(array))
        return found.double() if found.is_floating_point() else found

    return Batch(tuple(map(tensor, batch.inputs)), tensor(batch.labels))


def as_number(loss: Any) -> float:
    """Of a tensor or a number."""
    return float(loss.detach() if hasattr(loss, "detach") else loss)
