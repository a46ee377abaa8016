"""Faults of positions: rotations, biases, and what shows far from the first position alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from jax_transformer.config import RotaryConfig
from parity_tests.planted_faults import plant
from parity_tests.planted_faults.fault import Fault
from parity_tests.planted_faults.models import LONGROPE
from torch_reference.layers import rotary


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
    for index in (0, 1):
        place = f"encoder.layers.{index}.self_attn"
        turned = plant.argument(place, 4, "bias", changes["position bias axis"])
        yield Fault("position bias axis", "t5", place, turned)


def long_faults() -> Iterator[Fault]:
    """At positions up to 4095."""
    first, second = "layers.0.self_attn.rotary", "layers.1.self_attn.rotary"

    def moved(model: str, place: str, kind: str, change: Callable[[Any], Any]) -> Fault:
        return Fault(kind, model, place, plant.argument(place, 2, "positions", change))

    yield moved("llama, long", first, "rotary table length", lambda p: p.clamp(max=2047))
    yield moved("llama, long", second, "rotary table length", lambda p: p % 1024)
    yield moved("llama", second, "rotary table length", lambda p: p.clamp(max=31))
    bfloat16 = torch.bfloat16
    rounded = "rounded rotation"
    yield moved("llama, long", second, rounded, lambda p: p.to(bfloat16).long())
    for model, place, stage, dtype in (
        ("llama, long", first, "frequencies", bfloat16),
        ("llama, adjacent pairs", second, "angles", torch.float16),
        ("llama", first, "tables", bfloat16),
        ("gptj", second, "tables", torch.float32),
        ("llama, YaRN", first, "frequencies", torch.float16),
    ):
        yield Fault(rounded, model, place, plant.forward(place, rounded_rotation(stage, dtype)))
    for model, place, changes in (
        ("llama, YaRN", first, {"factor": 8.0}),
        ("llama, llama3", second, {"original_max_len": 32}),
        ("llama, dynamic", first, {"factor": 4.0}),
        ("llama, longrope", first, {"long_factors": LONGROPE["short_factors"]}),
        ("llama, longrope", second, {"short_factors": LONGROPE["long_factors"]}),
    ):
        yield Fault("rotary scaling", model, place, plant.config(place, **changes))
    same = plant.setting(second, config=RotaryConfig())
    yield Fault("rotary scaling", "llama, dynamic", second, same)
    for model, place in (("llama, YaRN", second), ("llama, longrope", first)):
        plain = plant.config(place, attention_factor=1.0)
        yield Fault("rotary attention factor", model, place, plain)
    for index, dtype in enumerate((bfloat16, torch.float16)):
        place = f"layers.{index}.self_attn"
        change = plant.argument(place, 4, "bias", lambda b, dtype=dtype: b.to(dtype).to(b))
        yield Fault("rounded position bias", "bloom, long", place, change)


def rounded_rotation(stage: str, dtype: torch.dtype) -> Callable[..., Any]:
    """A rotation with one stage in a narrow dtype."""

    def forward(module: Any, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> Any:
        def kept(name: str, values: torch.Tensor) -> torch.Tensor:
            return values.to(dtype).double() if name == stage else values

        config, width = module.config, module.head_dim
        frequencies, factor = rotary.inverse_frequencies(config, width)
        frequencies = kept("frequencies", torch.as_tensor(frequencies, dtype=torch.float64))
        angles = kept("angles", positions[..., None].double() * frequencies)
        cos, sin = (kept("tables", table * factor) for table in (angles.cos(), angles.sin()))
        return tuple(rotary.apply_rotary(x, cos, sin, config.pairing) for x in (q, k))

    return forward


FAULTS = (*rotary_faults(), *bias_faults(), *long_faults())
