"""The families of checkpoints that can be ported, each one table."""

from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.porting.families import (
    bert,
    bloom,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    mpt,
    roberta,
)
from jax_transformer.porting.families.base import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    gpt2.FAMILY,
    gptj.FAMILY,
    gpt_neox.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    bert.FAMILY,
    roberta.FAMILY,
)


def family_of(values: dict[str, Any], place: str) -> Family:
    """The family of a `config.json`, by its `model_type`.

    Raises:
        InputError: there is none of that type.
    """
    kind = values.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise InputError(f"{place}: model_type={kind!r} is no known family: it must be one of {known}")
