"""What a checkpoint says of generating, in the words of `generation_config.json`, as our rules.

`transformers` follows that file, and the same words in `config.json` where there is none. What
forces, forbids or ends is followed here; how tokens are searched for (`do_sample`, `num_beams`,
`temperature`, ...) is the caller's choice.
"""

import json
from collections.abc import Mapping
from typing import Any

from jax_transformer.config import OWN_RULES, PAD_ID, DecoderOnlyConfig, GenerationConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families import transformer
from jax_transformer.porting.families.base import Values
from jax_transformer.porting.formats.base import Companion, Made, read_json
from jax_transformer.porting.identify import OWN, Identified

FILE = "generation_config.json"

PART = "generation"
"""The name in our `config.json`."""

IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""The same in the metadata of GGUF."""

FOLLOWED = (
    *IDS, "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "min_length", "min_new_tokens",
    "max_length", "max_new_tokens", "no_repeat_ngram_size", "repetition_penalty",
    # Of speech: see `speech`.
    "forced_decoder_ids", "no_timestamps_token_id", "is_multilingual", "lang_to_id", "task_to_id",
    "return_timestamps", "no_speech_threshold",
)  # fmt: skip

NEUTRAL = {
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
}
"""What is not built here, and the value with which it does nothing."""


def generation_values(source: Identified) -> Values:
    """What a checkpoint says, in their words: its file, else ours, else its config."""
    checkpoint = source.checkpoint
    for file in checkpoint.companions:
        if file.name == FILE:
            return relevant(read_json(file))
    if PART in checkpoint.config:
        return dict(checkpoint.config[PART])
    if checkpoint.format == "gguf":
        return from_metadata(checkpoint.config)
    original = source.originals.get("config.json")
    return {} if original is None else relevant(read_json(original))


def missing(source: Identified) -> tuple[Companion, ...]:
    """The file, where values are known but no file has them."""
    values = generation_values(source)
    if not values or any(file.name == FILE for file in source.checkpoint.companions):
        return ()
    text = json.dumps(values, indent=2) + "\n"
    return (Made(FILE, lambda: text, source.checkpoint.path),)


def relevant(values: Mapping[str, Any]) -> Values:
    """What is followed here, or would have to be."""
    names = (*FOLLOWED, *NEUTRAL)
    return {name: values[name] for name in names if values.get(name) is not None}


def from_metadata(metadata: Mapping[str, Any]) -> Values:
    """The same of GGUF, where a turn of a conversation may have an end of its own."""
    values = {name: metadata[of] for name, of in IDS.items() if of in metadata}
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != values.setdefault("eos_token_id", turn):
        values["eos_token_id"] = [values["eos_token_id"], turn]
    return values


def is_own(source: Identified) -> bool:
    """Whether the model was trained here from the beginning, or is the lecture document's: its
    tokenizer is one of ours."""
    checkpoint = source.checkpoint
    run = checkpoint.format == OWN and "task" in checkpoint.config
    return (run and PART not in checkpoint.config) or source.family is transformer.FAMILY


def rules_of(source: Identified) -> GenerationConfig:
    """Our rules.

    Raises:
        InputError: a value that is none, or that asks for what is not built.
    """
    checkpoint = source.checkpoint
    if is_own(source):
        return OWN_RULES
    values = generation_values(source)
    try:
        return translated(values, encoder=not isinstance(source.config, DecoderOnlyConfig))
    except InputError as error:
        raise InputError(f"{checkpoint.path}: by its {FILE}, {error}") from None


def translated(values: Values, *, encoder: bool) -> GenerationConfig:
    """Our rules of their words.

    Args:
        values: in their words.
        encoder: whether there is one; the lengths of texts are then those of what is generated,
            and of a start token.

    Raises:
        InputError: a value that is none, or that asks for what is not built.
    """
    for name, neutral in NEUTRAL.items():
        if values.get(name, neutral) != neutral:
            raise InputError(f"{name}={values[name]!r} is not built here: take it out")
    ends = ids(values.get("eos_token_id"))
    suppressed = ids(values.get("suppress_tokens"))
    for word in values.get("bad_words_ids") or ():
        if len(word) != 1:
            raise InputError(f"bad_words_ids has {word}: only single tokens are built here")
        suppressed += tuple(token for token in word if token not in ends)
    rules: Values = {
        "end_ids": ends,
        "suppressed_ids": suppressed,
        "suppressed_first_ids": ids(values.get("begin_suppress_tokens")),
        "first_id": values.get("forced_bos_token_id"),
        "last_id": values.get("forced_eos_token_id"),
        "min_tokens": values.get("min_new_tokens", 0),
        "max_tokens": values.get("max_new_tokens"),
        "no_repeat_ngram": values.get("no_repeat_ngram_size", 0),
        "repetition_penalty": values.get("repetition_penalty", 1.0),
        "pad_id": values.get("pad_token_id", ends[0] if ends else PAD_ID),
    }
    if not encoder:
        return GenerationConfig(**rules)
    rules["start_id"] = values.get("decoder_start_token_id", values.get("bos_token_id"))
    if rules["start_id"] is None:
        raise InputError("there is no decoder_start_token_id: add what a decoder begins with")
    rules["min_tokens"] = max(rules["min_tokens"], values.get("min_length", 0) - 1)
    if "max_length" in values and rules["max_tokens"] is None:
        rules["max_tokens"] = max(values["max_length"] - 1, 1)
    return GenerationConfig(**rules)


def ids(value: Any) -> tuple[int, ...]:
    """One, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
