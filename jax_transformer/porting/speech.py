"""What a checkpoint of Whisper says of its texts: language, task, time stamps.

The decoder is given, after the start token, a token of the language and one of the task where the
model knows several, and one that says that no time stamps are wanted. Source: Radford et al. 2023,
section 2.3; `transformers`' `WhisperGenerationMixin`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_transformer.config import GenerationConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.generation import FILE, generation_values, rules_of
from jax_transformer.porting.identify import Identified


def speech_rules(source: Identified, language: str | None, task: str | None) -> GenerationConfig:
    """Our rules for texts in that language.

    Raises:
        InputError: what the files say cannot be followed, or they do not know language or task.
    """
    values = generation_values(source)
    try:
        prompt = prompt_of(values, language, task)
    except InputError as error:
        raise InputError(f"{source.checkpoint.path}: {error}") from None
    # Either counts from the prompt on: `transformers` adds its length to that of Whisper's texts.
    most = values.get("max_new_tokens") or values.get("max_length")
    return dataclasses.replace(rules_of(source), prompt=prompt, max_tokens=most)


def prompt_of(
    values: Mapping[str, Any], language: str | None = None, task: str | None = None
) -> tuple[int, ...]:
    """The tokens after the start token.

    Raises:
        InputError: a language or task that is not known, or a language that must be given; what is
            not built here.
    """
    for name in ("return_timestamps", "no_speech_threshold"):
        if values.get(name):
            raise InputError(f"{FILE} has {name}={values[name]!r}, which is not built: take it out")
    languages = {name.strip("<|>"): id for name, id in (values.get("lang_to_id") or {}).items()}
    tasks = values.get("task_to_id") or {}
    forced = forced_tokens(values) if language is None and task is None else []
    if language is not None:
        forced = [known("language", language, languages)]
    elif languages and (task is not None or not forced or forced[0] is None):
        codes = ", ".join(languages)
        raise InputError(f"it knows several languages: give language=..., one of {codes}")
    if task is not None or (language is not None and tasks):
        forced = [*forced, known("task", task or "transcribe", tasks)]
    plain = values.get("no_timestamps_token_id")
    if plain is not None and plain not in forced:
        forced = [*forced, plain]
    return tuple(token for token in forced if token is not None)


def forced_tokens(values: Mapping[str, Any]) -> list[int | None]:
    """What old files have in place of language and task; None: the model is to find the language.

    Raises:
        InputError: they are not for the first places after the start token.
    """
    forced = values.get("forced_decoder_ids") or []
    pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in forced)
    if not pairs or [place for place, _ in forced] != list(range(1, len(forced) + 1)):
        raise InputError(f"forced_decoder_ids={forced!r}: must be tokens of the places 1, 2, ...")
    return [token for _, token in forced]


def known(what: str, name: str, ids: Mapping[str, int]) -> int:
    """The token of that name.

    Raises:
        InputError: there is none.
    """
    if name in ids:
        return ids[name]
    choice = f"must be one of {', '.join(ids)}" if ids else f"it has no choice of {what}"
    raise InputError(f"{what}={name!r}: {choice}")
