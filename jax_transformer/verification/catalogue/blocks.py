"""Where norms sit, and what whole models do to their embeddings, positions and logits."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_args

from jax_transformer.config import Placement
from jax_transformer.layers.block import Block
from jax_transformer.layers.linear import Embedding
from jax_transformer.verification.diagnose import Evidence, Remedy, Trial
from jax_transformer.verification.localize import FedCall


def placement(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """The norms elsewhere."""
    if not isinstance(module, Block):
        return
    for other in get_args(Placement):
        if other != module.config.placement and fits(module, other):
            yield Remedy(
                "norm placement",
                f"the norms are placed {other!r}, not {module.config.placement!r}: set placement",
                lambda trial, other=other: setattr(
                    trial.module,
                    "config",
                    dataclasses.replace(trial.module.config, placement=other),
                ),
            )


def fits(block: Block, other: str) -> bool:
    """Whether the block has the parts that a placement needs."""
    if other == "sandwich":
        return block.post_norm1 is not None
    return other != "parallel" or block.cross_attn is None


def embedding_scale(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Embeddings multiplied or not."""
    scale = getattr(module, "scale", None)
    d_model = width_of(module)
    if d_model is None:
        return
    for value in (1.0, math.sqrt(d_model)):
        if isinstance(scale, float) and not math.isclose(scale, value):
            yield Remedy(
                "embedding scale",
                f"embeddings are multiplied by {value:.4g}, not {scale:.4g}: set embedding_scale",
                lambda trial, value=value: setattr(trial.module, "scale", value),
            )
    config = getattr(module, "config", None)
    if config is not None and hasattr(config, "embedding_scale") and not isinstance(scale, float):
        for setting in (False, True):
            if config.embedding_scale is not setting:
                yield Remedy(
                    "embedding scale",
                    f"embeddings are {'' if setting else 'not '}multiplied by sqrt(D): set "
                    f"embedding_scale={setting}",
                    lambda trial, setting=setting: set_config(trial, embedding_scale=setting),
                )


def width_of(module: Any) -> int | None:
    """D of a model or of a half of one."""
    table = getattr(module, "embedding", None)
    table = (
        table if table is not None else getattr(getattr(module, "decoder", None), "embedding", None)
    )
    return table.embedding.shape[1] if isinstance(table, Embedding) else None


def set_config(trial: Trial, **changes: Any) -> None:
    """Give a model another config."""
    trial.module.config = dataclasses.replace(trial.module.config, **changes)


def logit_scale(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Logits multiplied or capped."""
    scale = getattr(module, "logit_scale", None)
    d_model = width_of(module)
    if scale is not None and d_model is not None:
        for value in (1.0, d_model**-0.5):
            if not math.isclose(scale, value):
                yield Remedy(
                    "logit scale",
                    f"the decoder's output is multiplied by {value:.4g} before the projection, not "
                    f"by {scale:.4g}: T5 does so when its tables are tied",
                    lambda trial, value=value: setattr(trial.module, "logit_scale", value),
                )


def logit_soft_cap(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Another cap on logits, or none."""
    config = getattr(module, "config", None)
    if not hasattr(config, "logit_soft_cap") or not hasattr(module, "output_proj"):
        return
    for cap in (None, 20.0, 30.0, 50.0):
        if cap != config.logit_soft_cap:
            yield Remedy(
                "logit soft cap",
                f"the soft cap of logits is {cap}, not {config.logit_soft_cap}: set logit_soft_cap",
                lambda trial, cap=cap: set_config(trial, logit_soft_cap=cap),
            )


def final_norm(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """The norm after the last block left out."""
    if getattr(module, "norm", None) is not None and hasattr(module, "layers"):
        yield Remedy(
            "final norm",
            "the norm after the last block is left out: set final_norm=False",
            lambda trial: setattr(trial.module, "norm", None),
        )


def shifted_positions(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Positions that begin elsewhere, or count padding."""
    if (
        not hasattr(module, "layers")
        and not hasattr(module, "pos_embedding")
        and not hasattr(module, "pe")
    ):
        return
    trial = Trial(module, call.args, dict(call.kwargs))
    place = position_of(trial)
    if place is None:
        return
    found = trial.args[place] if isinstance(place, int) else trial.kwargs[place]
    if found is None:
        return
    for offset in (1, -1, 2, -2):
        yield Remedy(
            "position offset",
            f"positions are {abs(offset)} {'higher' if offset > 0 else 'lower'}: the reference "
            f"counts from {offset if offset > 0 else 'elsewhere'}, set position_offset",
            lambda trial, offset=offset: put(trial, place, found + offset),
        )
    yield Remedy(
        "padding counted",
        "positions count all tokens of a row, padding too: one side lacks position ids",
        lambda trial: put(trial, place, None),
    )


def position_of(trial: Trial) -> int | str | None:
    """Where the call has its positions: whole numbers `[B, T]` after the first argument."""
    for index, value in enumerate(trial.args[1:], 1):
        if value is not None and getattr(value, "ndim", 0) == 2 and value.dtype.kind == "i":
            return index
    for name in ("positions",):
        if trial.kwargs.get(name) is not None:
            return name
    return None


def put(trial: Trial, place: int | str, value: Any) -> None:
    """Call with another argument."""
    if isinstance(place, int):
        trial.args = (*trial.args[:place], value, *trial.args[place + 1 :])
    else:
        trial.kwargs[place] = value


ENTRIES = (placement, embedding_scale, logit_scale, logit_soft_cap, final_norm, shifted_positions)
