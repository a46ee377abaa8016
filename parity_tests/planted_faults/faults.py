"""The faults: each a small change to a correct pair, with the module and the cause to be named."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from parity_tests.planted_faults import plant
from parity_tests.planted_faults.fault import Fault
from parity_tests.planted_faults.models import D
from torch_reference.layers import feedforward


def layer_faults() -> Iterator[Fault]:
    at = "layers.0.norm1", "layers.1.norm2"
    yield Fault("norm epsilon", "llama", at[1], plant.setting(at[1], epsilon=1e-5))
    yield Fault("norm epsilon", "gpt2", at[0], plant.setting(at[0], eps=1e-6))
    yield Fault("norm epsilon", "gpt2", "norm", plant.setting("norm", eps=1e-12))
    for model, place, name, value in (
        ("llama", "norm", "epsilon", 0.037),
        ("bloom", "embedding_norm", "eps", 3.3e-5),
        ("llama, head norm", "layers.0.self_attn.q_norm", "epsilon", 0.0),
        ("document", "decoder.layers.1.norm2", "eps", 1.25e-3),
    ):
        yield Fault("norm epsilon", model, place, plant.setting(place, **{name: value}))
    yield Fault("norm offset", "llama", at[0], plant.setting(at[0], unit_offset=True))
    yield Fault("norm offset", "gemma", at[1], plant.setting(at[1], unit_offset=False))
    yield Fault("norm kind", "llama", at[1], plant.forward(at[1], plant.centred_norm))
    yield Fault("norm kind", "bloom", "norm", plant.forward("norm", plant.mean_square_norm))
    for place in ("layers.0.ffn.linear1", "layers.1.self_attn.q_proj", "layers.1.norm1"):
        yield Fault("missing bias", "gpt2", place, plant.setting(place, bias=None))
    for model, place, name in (
        ("gpt2", "layers.0.ffn", "gelu"),
        ("gpt2", "layers.1.ffn", "relu"),
        ("llama", "layers.1.ffn", "gelu_tanh"),
        ("document", "encoder.layers.1.ffn", "gelu_tanh"),
        ("gpt2, post", "layers.0.ffn", "silu"),
    ):
        yield Fault("activation", model, place, plant.setting(place, activation=name))
    for model, place in (("llama", "layers.0.ffn"), ("gemma", "layers.1.ffn")):
        yield Fault("gate and up", model, place, plant.forward(place, exchanged_gate))


def exchanged_gate(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(feedforward.activate(up, module.activation) * gate)


def weight_faults() -> Iterator[Fault]:
    for model, place in (
        ("llama", "layers.0.self_attn.out_proj"),
        ("gpt2", "layers.1.self_attn.q_proj"),
        ("document", "decoder.layers.0.cross_attn.v_proj"),
    ):
        name = f"{place}.kernel"
        yield Fault("transposed kernel", model, place, plant.port(turned(name)))
    for place in ("layers.0.self_attn.v_proj", "layers.1.self_attn.q_proj"):
        yield Fault("head order", "gpt2", place, plant.port(reordered(place, heads_inside)))
    for model, place in (
        ("llama", "layers.0.self_attn.q_proj"),
        ("llama", "layers.1.self_attn.k_proj"),
    ):
        yield Fault("rotary row order", model, place, plant.port(reordered(place, adjacent)))
    for layer in (0, 1):
        place = f"layers.{layer}.self_attn"
        yield Fault("fused layout", "gpt2", f"{place}.q_proj", plant.port(fused(place)))
    for model, one, two in (
        ("llama", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"),
        ("llama", "layers.1.ffn.gate_proj", "layers.1.ffn.up_proj"),
        ("gpt2", "layers.0.norm1", "layers.0.norm2"),
    ):
        yield Fault("swapped tensors", model, one, plant.port(exchanged(one, two)))
    for model in ("llama", "gpt2, untied"):
        tie = plant.in_theirs(
            "", lambda model: setattr(model.output_proj, "weight", model.embedding.weight)
        )
        yield Fault("tied head", model, "output_proj", tie)
    for place, dtype in (
        ("layers.0.ffn.linear1", ml_dtypes.bfloat16),
        ("layers.1.self_attn.out_proj", np.float16),
    ):
        name = f"{place}.kernel"
        rounded = plant.weights(lambda all, n=name, d=dtype: {n: all[n].astype(d)})
        yield Fault("rounded weights", "gpt2", place, rounded)
    for model, place in (("llama", "layers.1.ffn.down_proj"), ("document", "output_proj")):
        name = f"{place}.kernel"
        changed = plant.weights(lambda all, n=name: {n: all[n] * scaled_once(all[n].shape)})
        yield Fault("other weights", model, place, changed)


def turned(name: str) -> Any:
    return lambda all: {name: all[name].T}


def scaled_once(shape: tuple[int, ...]) -> np.ndarray:
    """1 but for one element."""
    factors = np.ones(shape)
    factors.flat[3] = 1.001
    return factors


def exchanged(one: str, two: str) -> Any:
    """All parameters of two modules."""

    def change(all: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        leaves = [name.rpartition(".")[2] for name in all if name.startswith(f"{one}.")]
        pairs = ((one, two), (two, one))
        return {f"{a}.{leaf}": all[f"{b}.{leaf}"] for leaf in leaves for a, b in pairs}

    return change


def heads_inside(size: int) -> np.ndarray:
    return np.arange(size).reshape(6, -1).T.ravel()


def adjacent(size: int) -> np.ndarray:
    """Heads of 4, their halves interleaved."""
    return (np.arange(0, size, 4)[:, None] + np.array([0, 2, 1, 3])).ravel()


def reordered(place: str, order: Any) -> Any:
    def change(all: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [name for name in all if name.startswith(f"{place}.")]
        return {name: all[name][..., order(all[name].shape[-1])] for name in names}

    return change


def fused(place: str) -> Any:
    """The three projections cut head by head out of a matrix that has them in thirds."""

    def change(all: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = ("q_proj", "k_proj", "v_proj")
        changed = {}
        for leaf in ("kernel", "bias"):
            joined = np.concatenate([all[f"{place}.{name}.{leaf}"] for name in names], axis=-1)
            heads = joined.reshape(*joined.shape[:-1], 6, 3, -1)
            for index, name in enumerate(names):
                part = heads[..., index, :]
                changed[f"{place}.{name}.{leaf}"] = part.reshape(*joined.shape[:-1], -1)
        return changed

    return change


def block_faults() -> Iterator[Fault]:
    for model, place, other in (
        ("llama", "layers.0", "post"),
        ("gpt2", "layers.1", "output"),
        ("gpt2, post", "layers.1", "pre"),
        ("document", "encoder.layers.0", "pre"),
    ):
        yield Fault("norm placement", model, place, plant.config(place, placement=other))
    for model, value in (("gpt2, untied", D**0.5), ("gemma", 1.0)):
        yield Fault("embedding scale", model, "", plant.setting("", scale=value))
    yield Fault("embedding scale", "document", "encoder", plant.setting("encoder", scale=1.0))
    for model, value in (("document", D**-0.5), ("t5", 1.0)):
        yield Fault("logit scale", model, "", plant.setting("", logit_scale=value))
    for model in ("gpt2", "llama"):
        yield Fault("final norm", model, "", plant.setting("", norm=None))
    for model, value in (("gpt2", 30.0), ("gemma", None)):
        yield Fault("logit soft cap", model, "", plant.config("", logit_soft_cap=value))
    for model, offset in (("gpt2", 2), ("gpt2, sinusoids", 1)):
        place = "pos_encoding"

        def moved(positions: Any, offset: int = offset) -> Any:
            return positions + offset

        moved_plant = plant.argument(place, 1, "positions", moved)
        yield Fault("position offset", model, place, moved_plant)
    for model in ("gpt2", "gpt2, sinusoids"):
        lost = plant.argument("pos_encoding", 1, "positions", lambda positions: None)
        yield Fault("padding counted", model, "pos_encoding", lost)


def unknown_faults() -> Iterator[Fault]:
    for model, place, change in (
        ("llama", "layers.0.ffn.down_proj", lambda x: 1.1 * x),
        ("gpt2", "layers.1.self_attn.out_proj", lambda x: x + 0.01),
        ("gpt2", "layers.0.norm2", lambda x: x.clamp(-1, 1)),
        ("bloom", "embedding_norm", lambda x: x + 0.01 * x.square()),
        ("document", "decoder.layers.1.cross_attn.q_proj", lambda x: x.flip(1)),
        ("llama", "output_proj", lambda x: x - x.mean(-1, keepdim=True)),
        ("llama", "layers.1.self_attn.rotary", lambda x: x * 1.5),
        ("gpt2", "embedding", lambda x: x.round(decimals=2)),
    ):
        yield Fault("unknown", model, place, plant.output(place, change))
    noise = np.random.default_rng(0).standard_normal((D, D)) / 100
    for model, place in (
        ("gpt2", "layers.0.self_attn.k_proj"),
        ("llama", "layers.1.self_attn.out_proj"),
    ):
        name = f"{place}.kernel"
        yield Fault("unknown", model, place, plant.port(lambda all, n=name: {n: all[n] + noise}))
    for model, place in (("gpt2", "layers.0.self_attn"), ("llama", "layers.1.self_attn")):
        yield Fault("unknown", model, place, plant.setting(place, scale=0.3))


def gradient_faults() -> Iterator[Fault]:
    for model, place in (
        ("llama", "layers.1.norm1"),
        ("llama", "layers.0.ffn.down_proj"),
        ("gpt2", "layers.1.self_attn.v_proj"),
        ("gpt2", "norm"),
        ("document", "decoder.layers.0.norm2"),
    ):
        yield Fault("gradient", model, place, plant.gradient(place))
    # Half of the gradient is cut off: through the queries, through what a norm divides by, through
    # the encoder's output.
    for model, place, change in (
        ("llama", "layers.0.self_attn.q_proj", torch.Tensor.detach),
        ("bloom", "embedding_norm", lambda x: x.detach() + 0.5 * (x - x.detach())),
        ("document", "encoder.norm", lambda x: x - 0.5 * (x - x.detach())),
    ):
        yield Fault("gradient", model, place, plant.output(place, change))
    yield Fault("gradient", "llama", "layers.1.norm2", plant.forward("layers.1.norm2", cut_norm))


def cut_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """An RMSNorm whose mean square has no gradient."""
    square = x.detach().square().mean(-1, keepdim=True)
    return x * torch.rsqrt(square + module.epsilon) * module.weight


FAULTS = (
    *layer_faults(),
    *weight_faults(),
    *block_faults(),
    *unknown_faults(),
    *gradient_faults(),
)
