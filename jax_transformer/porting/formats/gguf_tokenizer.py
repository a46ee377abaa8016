"""The tokenizer in the metadata of a GGUF file as a `tokenizer.json`.

Two kinds are known, as llama.cpp has them: `gpt2`, byte-level pairs with merges, cut up before by
an expression that `tokenizer.ggml.pre` names; and `llama`, SentencePiece's pairs with scores, whose
merges are those of the vocabulary's own pieces.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import Made

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of tokens (`gguf.TokenType`) that are more than text."""


class Split(NamedTuple):
    """How text is cut before it is merged; whole words first (`ignore_merges`), and whether a text
    has a start token where the file says nothing."""

    pattern: str | None
    digits: bool = False
    whole: bool = False
    start: bool = False


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "gigachat"), Split(None)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Split(None, True)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        Split(LLAMA3, whole=True, start=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Split(QWEN2)),
    "tekken": Split(TEKKEN, whole=True, start=True),
}
"""`tokenizer.ggml.pre` (`llm_tokenizer_bpe` of llama.cpp) -> how it cuts; None: as GPT-2."""


def problem(metadata: Mapping[str, Any]) -> str | None:
    """Why there is no `tokenizer.json` of this file; None where there is one."""
    tokens, kind = metadata.get(f"{PREFIX}tokens"), metadata.get(f"{PREFIX}model")
    if not tokens:
        return "the file has none"
    if kind not in ("gpt2", "llama"):
        return f"{PREFIX}model is {kind!r}: gpt2 and llama are known"
    if len(set(tokens)) != len(tokens):
        return f"{PREFIX}tokens has a token twice"
    if kind == "gpt2" and metadata.get(f"{PREFIX}pre") not in SPLITS:
        return f"{PREFIX}pre is {metadata.get(f'{PREFIX}pre')!r}: known are {', '.join(SPLITS)}"
    needed = ["merges"] if kind == "gpt2" or f"{PREFIX}scores" not in metadata else []
    needed += [f"{name}_token_id" for name in around(metadata)]
    missing = [name for name in needed if PREFIX + name not in metadata]
    return f"{PREFIX}{missing[0]} is missing" if missing else None


def companions(path: Path, metadata: Mapping[str, Any]) -> tuple[Made, ...]:
    """The files of the tokenizer that `transformers` has, made when they are asked for."""
    if problem(metadata) is not None:
        return ()
    make = functools.cache(lambda: make_tokenizer(path, metadata).to_str(pretty=True) + "\n")
    return (
        Made("tokenizer.json", make, path),
        Made(
            "tokenizer_config.json", lambda: json.dumps(settings(metadata), indent=2) + "\n", path
        ),
    )


def settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: the special tokens by their roles, and the template of a chat."""
    tokens = metadata[f"{PREFIX}tokens"]
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    values: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in roles.items():
        number = metadata.get(f"{PREFIX}{name}_token_id")
        if number is not None and number < len(tokens):
            values[f"{role}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    return values if template is None else values | {"chat_template": template}


def make_tokenizer(path: Path, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer.

    Raises:
        InputError: merges of what are no tokens, or ids of no token.
    """
    kind = metadata[f"{PREFIX}model"]
    try:
        backend = byte_level(metadata) if kind == "gpt2" else sentencepiece(metadata)
        special, defined = added(metadata)
        backend.add_special_tokens(special)
        backend.add_tokens(defined)
        backend.post_processor = template(metadata)
    except Exception as error:  # `tokenizers` raises nothing narrower.
        raise InputError(f"{path}: its tokenizer is damaged ({error}): copy it again") from None
    return backend


def byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Pairs of bytes."""
    split = SPLITS[metadata[f"{PREFIX}pre"]]
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{PREFIX}merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary(metadata), merges=merges, ignore_merges=split.whole)
    )
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split.pattern), behavior="isolated"))
    own = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Pairs of pieces; what no piece is of becomes bytes, or the unknown token."""
    tokens = metadata[f"{PREFIX}tokens"]
    unknown = metadata.get(f"{PREFIX}unknown_token_id")
    if f"{PREFIX}merges" in metadata:
        merges = [tuple(merge.split(" ")) for merge in metadata[f"{PREFIX}merges"]]
    else:
        merges = implied_merges(tokens, metadata[f"{PREFIX}scores"])
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary(metadata),
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = metadata.get(f"{PREFIX}add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if space else [])])
    return backend


def implied_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, the best piece first, then the shortest left part."""
    places = {token: place for place, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in places and pair[1] in places]
        known.sort(key=lambda pair: (places[pair[0]], places[pair[1]]))
        found += [(score, pair) for pair in known]
    found.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [pair for _, pair in found]


def vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id."""
    return {token: number for number, token in enumerate(metadata[f"{PREFIX}tokens"])}


def added(metadata: Mapping[str, Any]) -> tuple[list[AddedToken], list[AddedToken]]:
    """Tokens that are never cut: special ones, of which texts are free, and others."""
    kinds = metadata.get(f"{PREFIX}token_type") or ()
    special, defined = [], []
    for token, kind in zip(metadata[f"{PREFIX}tokens"], kinds, strict=False):
        if kind in (UNKNOWN, CONTROL):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            defined.append(AddedToken(token, normalized=False, special=False))
    return special, defined


def around(metadata: Mapping[str, Any]) -> list[str]:
    """Which of `bos` and `eos` are put around a text."""
    kind = metadata[f"{PREFIX}model"]
    start = kind == "llama" or SPLITS[metadata[f"{PREFIX}pre"]].start
    implied = {"bos": start, "eos": False}
    return [name for name in implied if metadata.get(f"{PREFIX}add_{name}_token", implied[name])]


def template(metadata: Mapping[str, Any]) -> processors.TemplateProcessing:
    """What is put around a text."""
    numbers = {name: metadata[f"{PREFIX}{name}_token_id"] for name in around(metadata)}
    tokens = {name: metadata[f"{PREFIX}tokens"][number] for name, number in numbers.items()}
    single = [tokens.get("bos"), "$A", tokens.get("eos")]
    return processors.TemplateProcessing(
        single=[part for part in single if part is not None],
        special_tokens=[(tokens[name], number) for name, number in numbers.items()],
    )
