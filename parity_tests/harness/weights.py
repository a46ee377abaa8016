"""Weights under which faults show, carried from PyTorch to JAX and back by the porting rules."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import torch
from flax import nnx

from jax_transformer.config import ModelConfig
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import cast, flatten, split, unflatten
from jax_transformer.porting.families.transformer import RULES
from jax_transformer.porting.plan import convert, convert_back
from jax_transformer.porting.rules import Alias, Rule
from torch_reference.models import encoder_decoder as reference_model

Tensors = dict[str, np.ndarray]


def randomize(reference: torch.nn.Module, seed: int = 0) -> None:
    """Weights under which faults show: nothing 0 or 1, attention scores and logits of order 1
    to 10, every number exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() == 1:
                centre = 1.0 if name.endswith("weight") else 0.0
                parameter.copy_(centre + 0.3 * noise)
            else:
                parameter.copy_(gain(name) * parameter.shape[1] ** -0.5 * noise)


def gain(name: str) -> float:
    """The size of a matrix: 1 keeps that of its input, 2 makes scores and logits that matter (an
    embedding table may be tied to them); learned positions weigh as much as scaled embeddings."""
    if "pos_embedding" in name:
        return 8.0
    if "relative_attention_bias" in name:
        return 4.0
    sharp = any(part in name for part in ("q_proj", "k_proj", "output_proj", "embedding"))
    return 2.0 if sharp else 1.0


def make_pair(
    config: ModelConfig, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[reference_model.Transformer, Transformer]:
    """The two models of a configuration with the same weights, in evaluation mode."""
    return pair(
        reference_model.Transformer.from_config(config),
        lambda: Transformer.from_config(config, rngs=nnx.Rngs(0)),
        dtype,
        seed,
    )


Reference = TypeVar("Reference", bound=torch.nn.Module)
Module = TypeVar("Module", bound=nnx.Module)


def pair(
    reference: Reference, build: Callable[[], Module], dtype: Any = jnp.float32, seed: int = 0
) -> tuple[Reference, Module]:
    """The PyTorch model with new weights, and the JAX model of `build` with the same ones, in
    evaluation mode."""
    randomize(reference.eval(), seed)
    model = carry(reference, nnx.eval_shape(build), "", dtype)
    return reference.to(torch.float64 if dtype == jnp.float64 else torch.float32), model


def fresh(build: Callable[[], nnx.Module], dtype: Any = jnp.float32) -> nnx.Module:
    """The JAX module with random numbers of order 1 for parameters, without compiling its
    initialisers."""
    generator = np.random.default_rng(0)
    graphdef, *trees = split(nnx.eval_shape(build))
    filled = jax.tree.map(
        lambda leaf: jnp.asarray(generator.standard_normal(leaf.shape) / 2, dtype), trees
    )
    return nnx.merge(graphdef, *filled)


def carry(reference: torch.nn.Module, skeleton: nnx.Module, place: str, dtype: Any) -> nnx.Module:
    """The JAX module of the structure of `skeleton` (of `nnx.eval_shape`, say) with the weights
    and buffers of `reference`, through the porting rules."""
    graphdef, params, buffers = split(skeleton)
    tensors = {name: to_numpy(tensor) for name, tensor in reference.state_dict().items()}
    shapes = {name: leaf.shape for name, leaf in (flatten(params) | flatten(buffers)).items()}
    converted = convert(
        rules_of(reference), with_prefix(tensors, place), with_prefix(shapes, place)
    )
    leaves = {name: jnp.asarray(array) for name, array in without_prefix(converted, place).items()}
    params, buffers = (
        cast(unflatten({name: leaves[name] for name in flatten(tree)}, tree), dtype)
        for tree in (params, buffers)
    )
    return nnx.merge(graphdef, params, buffers)


def carry_back(
    tree: dict[Any, Any], reference: torch.nn.Module, place: str, *, aliases: bool = False
) -> Tensors:
    """A tree like the parameters (gradients, moments) under the names of `reference`."""
    family = [rule for rule in rules_of(reference) if aliases or isinstance(rule, Rule)]
    shapes = {name: parameter.shape for name, parameter in parameters_of(reference).items()}
    tensors = {name: to_numpy(leaf) for name, leaf in flatten(tree).items()}
    back = convert_back(family, with_prefix(tensors, place), with_prefix(shapes, place))
    return without_prefix(back, place)


def parameters_of(reference: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters by name; a table with several names under the one that the rules carry."""
    second = {rule.source for rule in rules_of(reference) if isinstance(rule, Alias)}
    named = reference.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name not in second}


def rules_of(reference: torch.nn.Module) -> tuple[Rule | Alias, ...]:
    """The porting table of the module: a parameter with several names has its place in JAX under
    the last one that is an embedding table's."""
    names: dict[int, list[str]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    aliases = []
    for group in names.values():
        if len(group) > 1:
            first = [name for name in group if name.endswith("embedding.weight")][-1]
            aliases += [Alias(name, first) for name in group if name != first]
    return (*aliases, *RULES)


def with_prefix(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    return {f"{place}.{name}" if place else name: value for name, value in values.items()}


def without_prefix(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    return {name.removeprefix(f"{place}."): value for name, value in values.items()}


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Without the checks of shapes: as users run it, and several times as fast."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def to_numpy(value: Any) -> np.ndarray:
    """A tensor or array of either framework; narrow floats widened to float32, exactly."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    value = np.array(value)
    return value.astype(np.float32) if value.dtype.itemsize == 2 else value
