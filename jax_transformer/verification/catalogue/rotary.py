"""Rotary positions: pairs, frequencies, scalings, and what rounding makes of them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_transformer.config import RotaryConfig
from jax_transformer.layers import rotary as rotary_layer
from jax_transformer.layers.attention import MultiHeadAttention
from jax_transformer.layers.rotary import RotaryPositionalEncoding
from jax_transformer.verification.catalogue.calls import argument, set_positions
from jax_transformer.verification.diagnose import Evidence, Remedy, Trial
from jax_transformer.verification.localize import FedCall

LENGTHS = tuple(2**power for power in range(4, 18))
"""Of contexts and tables, as configs have them."""

BASES = (10000.0, 500000.0, 1000000.0, 100000.0, 1000.0, 5000000.0)


def rotary_pairing(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """The other pairs of features."""
    if (found := rotation(module)) is not None:
        other = "adjacent" if found.config.pairing == "half" else "half"
        what = {
            "adjacent": "query and key are rotated in adjacent pairs: the checkpoint is in Meta's "
            "order; port it with pairing=adjacent",
            "half": "query and key are rotated in half-split pairs: the checkpoint is in the order "
            "of transformers; port it with pairing=half",
        }[other]
        yield Remedy("rotary pairing", what, rotary(pairing=other))


def rotary_base(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Another base."""
    if (found := rotation(module)) is not None:
        for base in BASES:
            if base != found.config.base:
                yield Remedy(
                    "rotary base",
                    f"the rotary base is {base:g}, not {found.config.base:g}: the "
                    f"reference's rope_theta was not read",
                    rotary(base=base),
                )


def rotary_scaling(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """No scaling, a linear one, or other numbers of the one there is."""
    if (found := rotation(module)) is None:
        return
    config = found.config

    def other(sentence: str, **changes: Any) -> Remedy:
        changed = dataclasses.replace(config, **changes)
        return Remedy("rotary scaling", sentence, lambda trial: set_rotary(trial, changed))

    if config.scaling != "none":
        yield Remedy(
            "rotary scaling",
            f"frequencies are not scaled: the reference ignores scaling={config.scaling!r}",
            lambda trial: set_rotary(trial, unscaled(config)),
        )
    for factor in (2.0, 4.0, 8.0, 16.0, 32.0, 0.5):
        if config.scaling in ("none", "linear") and factor != config.factor:
            linear = dataclasses.replace(unscaled(config), scaling="linear", factor=factor)
            yield Remedy(
                "rotary scaling",
                f"frequencies are divided by {factor:g}: the reference scales positions, read its "
                f"rope_scaling",
                lambda trial, linear=linear: set_rotary(trial, linear),
            )
        elif config.scaling not in ("none", "linear") and factor > 1 and factor != config.factor:
            text = f"the factor of the scaling is {factor:g}, not {config.factor:g}"
            yield other(f"{text}: read the reference's rope_scaling", factor=factor)
    if config.original_max_len is not None:
        for length in LENGTHS:
            if length != config.original_max_len:
                text = f"the original length is {length}, not {config.original_max_len}"
                yield other(
                    f"{text}: read original_max_position_embeddings of the reference's config",
                    original_max_len=length,
                )
    if config.scaling == "longrope":
        for name, wanted in (("long", config.short_factors), ("short", config.long_factors)):
            text = f"the {name} factors are not used, the others are at any length"
            yield other(f"{text}: choose by the length", **{f"{name}_factors": wanted})


def rotary_attention_factor(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """What YaRN and LongRoPE multiply cosines and sines with, left out."""
    found = rotation(module)
    if found is not None and found.config.scaling in ("yarn", "longrope"):
        yield Remedy(
            "rotary attention factor",
            "cosines and sines are not multiplied by the attention factor: the reference leaves it "
            "out, or its config says 1",
            rotary(attention_factor=1.0),
        )


def rotary_table(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """A table of cosines and sines that is too short."""
    positions = positions_of(module, call)
    if positions is None:
        return
    for length in LENGTHS:
        if length <= positions.max():
            yield Remedy(
                "rotary table length",
                f"positions from {length} on are turned as the one before: the reference's table "
                f"has {length} rows, make it as long as the context",
                lambda trial, length=length: set_positions(
                    trial, jnp.minimum(positions, length - 1)
                ),
            )
            yield Remedy(
                "rotary table length",
                f"positions begin again at {length}: the reference's table has {length} rows, make "
                f"it as long as the context",
                lambda trial, length=length: set_positions(trial, positions % length),
            )


def rotary_rounding(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Positions, frequencies, angles or tables in a narrow dtype."""
    positions, found = positions_of(module, call), rotation(module)
    if positions is None or found is None or found.config.scaling == "dynamic":
        return
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
        narrow = np.dtype(dtype).name
        for stage in STAGES[dtype == np.float32 :]:
            yield Remedy(
                "rounded rotation",
                f"{stage} of the rotation are in {narrow}: keep them in float32, or compute them "
                f"anew where a model was cast",
                lambda trial, stage=stage, dtype=dtype: trial.patches.append(
                    (rotary_layer, "rotary_tables", rounded_tables(stage, dtype))
                ),
            )


STAGES = ("positions", "frequencies", "angles", "cosines and sines")
"""What may be rounded; positions are exact in float32."""


def rounded_tables(stage: str, dtype: Any) -> Callable[..., Any]:
    """`rotary_tables` with one stage, and all that follows from it, rounded on the way."""

    def tables(config: RotaryConfig, head_dim: int, positions: Any, wide: Any) -> Any:
        def kept(name: str, values: Any) -> np.ndarray:
            values = np.asarray(values, np.float64)
            return values.astype(dtype).astype(np.float64) if name == stage else values

        length = int(positions.max()) + 1
        frequencies, factor = rotary_layer.inverse_frequencies(config, head_dim, length)
        places = kept("positions", positions)[..., None]
        angles = kept("angles", places * kept("frequencies", frequencies))
        both = (np.cos(angles) * factor, np.sin(angles) * factor)
        return tuple(jnp.asarray(kept("cosines and sines", each), wide) for each in both)

    return tables


def positions_of(module: Any, call: FedCall) -> Any:
    """Those of a rotation's call, if there are any."""
    if rotation(module) is None:
        return None
    return argument(Trial(module, call.args, dict(call.kwargs)), "positions")


def rotary_width(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """More or less of each head turns, or nothing."""
    if (found := rotation(module)) is None:
        return
    width = found.head_dim if found.config.width is None else found.config.width
    for other in sorted({found.head_dim // 4, found.head_dim // 2, found.head_dim}):
        if other != width and other and other % 2 == 0:
            yield Remedy(
                "rotary width",
                f"{other} of {found.head_dim} features of a head are rotated, not {width}: read "
                f"the reference's partial_rotary_factor",
                rotary(width=other),
            )
    yield Remedy(
        "no rotation",
        "queries and keys are not rotated: the reference has no rotary positions there",
        unrotated,
    )


def unrotated(trial: Trial) -> None:
    """Turn nothing."""
    trial.patches.append((rotary_layer, "apply_rotary", lambda x, cos, sin, pairing: x))


def rotary_offset(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Positions that count from elsewhere: only absolute ones show it, or those of padded rows."""
    if rotation(module) is None:
        return
    yield Remedy(
        "padding counted",
        "positions count all tokens of a row, padding too: one side lacks position ids",
        lambda trial: set_positions(trial, None),
    )


def rotation(module: Any) -> RotaryPositionalEncoding | None:
    """What turns queries and keys: the module itself, or what an attention has."""
    if isinstance(module, MultiHeadAttention):
        return module.rotary
    return module if isinstance(module, RotaryPositionalEncoding) else None


def unscaled(config: RotaryConfig) -> RotaryConfig:
    """The same without a scaling."""
    return RotaryConfig(pairing=config.pairing, base=config.base, width=config.width)


def rotary(**changes: Any) -> Callable[[Trial], None]:
    """The change that gives the module another rotation."""

    def change(trial: Trial) -> None:
        found = rotation(trial.module)
        assert found is not None
        found.config = dataclasses.replace(found.config, **changes)

    return change


def set_rotary(trial: Trial, config: RotaryConfig) -> None:
    """Give the module that rotation."""
    found = rotation(trial.module)
    assert found is not None
    found.config = config


ENTRIES = (
    rotary_pairing,
    rotary_base,
    rotary_scaling,
    rotary_attention_factor,
    rotary_width,
    rotary_offset,
    rotary_table,
    rotary_rounding,
)
