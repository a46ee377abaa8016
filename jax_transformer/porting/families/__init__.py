"""The families of checkpoints that can be ported, each one table."""

from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.porting.families import (
    bart,
    bert,
    bloom,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gptj,
    llama,
    llama_meta,
    marian,
    mistral,
    mpt,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    roberta,
    t5,
    whisper,
)
from jax_transformer.porting.families.base import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    olmo2.FAMILY,
    gpt2.FAMILY,
    gptj.FAMILY,
    gpt_neox.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    bert.FAMILY,
    roberta.FAMILY,
    t5.FAMILY,
    bart.FAMILY,
    marian.FAMILY,
    whisper.FAMILY,
)


def family_of(values: dict[str, Any], place: str) -> Family:
    """The family of a `config.json`, by its `model_type`, or of Meta's `params.json`.

    Raises:
        InputError: there is none of that type.
    """
    kind = values.get("model_type")
    if kind is None and {"dim", "n_heads", "n_layers"} <= values.keys():
        return llama_meta.FAMILY
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise InputError(f"{place}: model_type={kind!r} is no known family: it must be one of {known}")
