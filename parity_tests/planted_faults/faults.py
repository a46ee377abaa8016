"""The faults: each a small change to a correct pair, with the module and the cause to be named."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from jax_transformer.config import RotaryConfig
from parity_tests.planted_faults import decoding_faults, plant, training_faults
from parity_tests.planted_faults.fault import Fault
from parity_tests.planted_faults.models import D, T
from torch_reference.layers import attention, feedforward


def layer_faults() -> Iterator[Fault]:
    at = "layers.0.norm1", "layers.1.norm2"
    yield Fault("norm epsilon", "llama", at[1], plant.setting(at[1], epsilon=1e-5))
    yield Fault("norm epsilon", "gpt2", at[0], plant.setting(at[0], eps=1e-6))
    yield Fault("norm epsilon", "gpt2", "norm", plant.setting("norm", eps=1e-12))
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


def rotary_faults() -> Iterator[Fault]:
    first, second = "layers.0.self_attn.rotary", "layers.1.self_attn.rotary"

    def other(kind: str, model: str, place: str, **values: Any) -> Fault:
        return Fault(kind, model, place, plant.config(place, **values))

    yield other("rotary pairing", "llama", second, pairing="adjacent")
    yield other("rotary pairing", "gptj", first, pairing="half")
    yield other("rotary base", "llama", first, base=500000.0)
    yield other("rotary base", "llama, another base", second, base=10000.0)
    yield other("rotary scaling", "llama", second, scaling="linear", factor=8.0)
    for model, place in (("llama, llama3", first), ("llama, YaRN", second)):
        yield Fault("rotary scaling", model, place, plant.setting(place, config=RotaryConfig()))
    yield other("rotary width", "llama, wide heads", first, width=4)
    yield other("rotary width", "llama, half rotated", second, width=None)
    for model, place in (("llama", first), ("gptj", second)):
        same = plant.forward(place, lambda module, q, k, positions=None: (q, k))
        yield Fault("no rotation", model, place, same)
        lost = plant.argument(place, 2, "positions", lambda positions: None)
        yield Fault("padding counted", model, place, lost)


def attention_faults() -> Iterator[Fault]:
    first, second = "layers.0.self_attn", "layers.1.self_attn"
    encoder, cross = "encoder.layers.0.self_attn", "decoder.layers.1.cross_attn"
    for model, place, value in (
        ("llama", first, 1.0),
        ("gpt2", second, D**-0.5),
        ("gpt2, scale 1", first, None),
        ("document", cross, 1.0),
    ):
        yield Fault("attention scale", model, place, plant.setting(place, scale=value))
    for model, value in (("llama", 50.0), ("llama, soft cap", None)):
        yield Fault("attention soft cap", model, second, plant.setting(second, soft_cap=value))
    for place in (first, second):
        yield Fault("key-value groups", "llama", place, plant.forward(place, tiled_groups))
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    seen = torch.ones(T, T, dtype=torch.bool).tril
    distance = torch.arange(T)[:, None] - torch.arange(T)

    def keys(mask: torch.Tensor) -> torch.Tensor:
        return mask.any(dim=2, keepdim=True)

    masks = {
        "mask polarity": lambda mask: ~mask,
        "no mask": torch.ones_like,
        "not causal": lambda mask: keys(mask).expand(-1, -1, T, T),
        "padding ignored": lambda mask: causal[None, None],
        "own key hidden": lambda mask: mask & ~torch.eye(T, dtype=torch.bool),
        "next key seen": lambda mask: keys(mask) & seen(1),
        "mask axis": lambda mask: mask.swapaxes(-1, -2),
        "window": lambda mask: mask & (distance < 4),
    }
    for kind, change in masks.items():
        for model, place in (("llama", first), ("gpt2", second)):
            yield Fault(kind, model, place, plant.argument(place, 3, "mask", change))
    for model, place in (("document", encoder), ("document, pre", "encoder.layers.1.self_attn")):
        only = plant.argument(place, 3, "mask", lambda mask: mask & causal)
        yield Fault("causal", model, place, only)
    lost = plant.argument(cross, 3, "mask", torch.ones_like)
    yield Fault("no mask", "document", cross, lost)
    for model, place in (("llama, window", first), ("llama, window", second)):
        wider = plant.argument(place, 3, "mask", lambda mask: keys(mask) & causal & (distance < 5))
        yield Fault("window", model, place, wider)


def tiled_groups(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any = None,
    bias: Any = None,
    positions: Any = None,
    **options: Any,
) -> Any:
    q = module.split_heads(module.q_proj(query), module.q_norm)
    k, v = module.project_key_value(key, value)
    q, k = module.rotary(q, k, positions)
    times = q.shape[2] // k.shape[2]
    k, v = k.repeat(1, 1, times, 1), v.repeat(1, 1, times, 1)
    out, weights = attention.dot_product_attention(q, k, v, mask, **options)
    return module.out_proj(out.reshape(*query.shape[:2], -1)), weights


def bias_faults() -> Iterator[Fault]:
    slopes = 2.0 ** (-8.0 * torch.arange(1, 7, dtype=torch.float64) / 6)
    right = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    changes = {
        "position bias missing": torch.zeros_like,
        "position bias sign": lambda bias: -bias,
        "ALiBi slopes": lambda bias: bias * (slopes / right)[None, :, None, None].to(bias),
        "position bias heads": lambda bias: bias.flip(1),
        "position bias axis": lambda bias: bias.swapaxes(-1, -2),
    }
    for kind, change in changes.items():
        # ALiBi's bias is the same with its axes exchanged.
        models = {
            "ALiBi slopes": ("bloom", "bloom"),
            "position bias axis": ("t5 bias", "t5 bias"),
        }.get(kind, ("bloom", "t5 bias"))
        for index, model in enumerate(models):
            place = f"layers.{index}.self_attn"
            yield Fault(kind, model, place, plant.argument(place, 4, "bias", change))


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
    yield Fault("logit scale", "document", "", plant.setting("", logit_scale=D**-0.5))
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


def pair_faults() -> Iterator[Fault]:
    place = "layers.1.self_attn"
    causal = plant.argument(
        place, 3, "mask", lambda m: m.any(dim=2, keepdim=True).expand(-1, -1, T, T)
    )
    yield Fault(
        "attention scale + not causal",
        "gpt2",
        place,
        plant.both(causal, plant.setting(place, scale=1.0)),
    )
    sign = plant.argument("layers.0.self_attn", 4, "bias", lambda bias: -bias)
    yield Fault(
        "attention scale + position bias sign",
        "bloom",
        "layers.0.self_attn",
        plant.both(sign, plant.setting("layers.0.self_attn", scale=1.0)),
    )
    rotary = f"{place}.rotary"
    yield Fault(
        "rotary base + rotary pairing",
        "llama",
        rotary,
        plant.config(rotary, pairing="adjacent", base=500000.0),
    )
    yield Fault(
        "norm epsilon + norm offset",
        "llama",
        "layers.0.norm2",
        plant.setting("layers.0.norm2", epsilon=1e-5, unit_offset=True),
    )
    yield Fault(
        "activation + gate and up",
        "llama",
        "layers.1.ffn",
        plant.both(
            plant.setting("layers.1.ffn", activation="gelu"),
            plant.forward("layers.1.ffn", exchanged_gate),
        ),
    )


def gradient_faults() -> Iterator[Fault]:
    for model, place in (
        ("llama", "layers.1.norm1"),
        ("llama", "layers.0.ffn.down_proj"),
        ("gpt2", "layers.1.self_attn.v_proj"),
        ("gpt2", "norm"),
        ("document", "decoder.layers.0.norm2"),
    ):
        yield Fault("gradient", model, place, plant.gradient(place))


FAULTS = (
    *layer_faults(),
    *rotary_faults(),
    *attention_faults(),
    *bias_faults(),
    *weight_faults(),
    *block_faults(),
    *unknown_faults(),
    *pair_faults(),
    *gradient_faults(),
    *training_faults.FAULTS,
    *decoding_faults.FAULTS,
)
