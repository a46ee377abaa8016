"""Tokenizers without merges: a token for each byte, or for each character of a text.

They do what `Tokenizer`, the byte-level BPE, does: `TextTokenizer` is what all three have in
common. Ids 0 to 3 are `<pad>`, `<unk>`, `<bos>` and `<eos>`, which no text becomes.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

from jax_transformer.data.tokenizer import (
    SMALLEST_VOCAB_SIZE,
    SPECIAL_TOKENS,
    Tokenizer,
    check_ids,
    check_unicode,
)
from jax_transformer.errors import InputError

TokenizerName = Literal["bpe", "bytes", "chars"]

_OFFSET = len(SPECIAL_TOKENS)


class TextTokenizer(Protocol):
    """Text to ids in [0, V) and back; `save` writes what `load_tokenizer` reads."""

    @property
    def vocab_size(self) -> int:
        """The number V of tokens, the four special ones included."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""
        ...

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text."""
        ...

    def decode(self, ids: Iterable[Any]) -> str:
        """The text of any ids; special tokens are left out."""
        ...

    def pieces(self, ids: Iterable[Any]) -> list[str]:
        """The text of each id by itself, to label tokens with."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as JSON."""
        ...


class ByteTokenizer:
    """The UTF-8 bytes of a text, byte b with the id 4 + b."""

    vocab_size = SMALLEST_VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        """As `Tokenizer.encode`."""
        (text,) = check_unicode([text])
        return [byte + _OFFSET for byte in text.encode("utf-8")]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[Any]) -> str:
        """As `Tokenizer.decode`: bytes that are no text become U+FFFD."""
        known = check_ids(ids, self.vocab_size)
        return bytes(i - _OFFSET for i in known if i >= _OFFSET).decode("utf-8", errors="replace")

    def pieces(self, ids: Iterable[Any]) -> list[str]:
        """ASCII characters, `<0xC3>` for other bytes."""
        names = list(SPECIAL_TOKENS)
        return [
            names[i]
            if i < _OFFSET
            else chr(i - _OFFSET)
            if i - _OFFSET < 128
            else f"<0x{i - _OFFSET:02X}>"
            for i in check_ids(ids, self.vocab_size)
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `{"type": "bytes"}`."""
        _save(path, {"type": "bytes"})


class CharacterTokenizer:
    """The characters of a text, each with an id by its place in `characters`.

    Raises:
        InputError: no character, one that is there twice, or half a surrogate pair.
    """

    def __init__(self, characters: str) -> None:
        (characters,) = check_unicode([characters])
        if not characters or len(set(characters)) < len(characters):
            raise InputError(
                "a vocabulary of characters needs each of them once, and at least one: make it "
                "from a text"
            )
        self.characters = characters
        self._ids = {character: _OFFSET + i for i, character in enumerate(characters)}

    @classmethod
    def of(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """Of all characters in `texts`, sorted."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls("".join(sorted(found)))

    @property
    def vocab_size(self) -> int:
        """Special tokens and characters."""
        return _OFFSET + len(self.characters)

    def encode(self, text: str) -> list[int]:
        """The ids of the characters.

        Raises:
            InputError: a character that is not in the vocabulary.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(
                f"the character {error.args[0]!a} does not occur in the text that the "
                f"vocabulary was made from: leave it out, or train with bytes or bpe"
            ) from None

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[Any]) -> str:
        """As `Tokenizer.decode`."""
        known = check_ids(ids, self.vocab_size)
        return "".join(self.characters[i - _OFFSET] for i in known if i >= _OFFSET)

    def pieces(self, ids: Iterable[Any]) -> list[str]:
        """The characters, special tokens by their names."""
        names = [*SPECIAL_TOKENS, *self.characters]
        return [names[i] for i in check_ids(ids, self.vocab_size)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `{"type": "chars", "characters": ...}`."""
        _save(path, {"type": "chars", "characters": self.characters})


def make_tokenizer(name: TokenizerName, texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """The tokenizer of that name; `bpe` and `chars` are made from `texts`, read once.

    Raises:
        InputError: as `Tokenizer.train`; no text.
    """
    if name == "bytes":
        return ByteTokenizer()
    return CharacterTokenizer.of(texts) if name == "chars" else Tokenizer.train(texts, vocab_size)


def load_tokenizer(path: str | os.PathLike[str]) -> TextTokenizer:
    """Read what one of the three has saved.

    Raises:
        InputError: the file is missing, or is not a tokenizer of this library.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is not a tokenizer file ({error}): name a tokenizer.json"
        ) from None
    match values:
        case {"type": "bytes"}:
            return ByteTokenizer()
        case {"type": "chars", "characters": str(characters)}:
            try:
                return CharacterTokenizer(characters)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
    return Tokenizer.load(path)


def _save(path: str | os.PathLike[str], values: dict[str, Any]) -> None:
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(values, ensure_ascii=True, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
