"""Text to token ids and back: byte-level BPE, trained on the user's own text."""

import itertools
import operator
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jax_transformer.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from jax_transformer.errors import InputError

SPECIAL_TOKENS = {"<pad>": PAD_ID, "<unk>": UNK_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}

# The special tokens, then one token for each byte: any text can be written in these.
SMALLEST_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256


class Tokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes: Radford et al. 2019).

    Text is cut into words, numbers, punctuation and white space; the UTF-8 bytes of each piece
    are merged by the learnt rules. As every byte is a token, nothing is ever unknown, and
    `decode(encode(text)) == text` for every text. A space is put before the text and taken off
    again in decoding, so that a word has the same tokens at the beginning as in the middle.

    Ids 0 to 3 are `<pad>`, `<unk>`, `<bos>` and `<eos>`. Text never becomes one of them: these
    names in a text are encoded by their letters.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wrap `backend`; use `Tokenizer.train` or `Tokenizer.load` to make one.

        Raises:
            InputError: a special token does not have its id.
        """
        for token, token_id in SPECIAL_TOKENS.items():
            if backend.token_to_id(token) != token_id:
                raise InputError(
                    f"{token} has id {backend.token_to_id(token)}, not {token_id}: "
                    f"use a tokenizer that was trained by this library"
                )
        # Treat "<eos>" in a text as five letters. The backend does not save this setting.
        backend.encode_special_tokens = True
        self._backend = backend

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn merges from `texts`, read once, until there are `vocab_size` tokens.

        There may be fewer tokens when the text is small: a pair of tokens that occurs only once
        is not merged. The same texts and size give the same tokenizer.

        Raises:
            InputError: `vocab_size` below 260 (special tokens and bytes); no text, or text with
                lone surrogates.
        """
        if vocab_size < SMALLEST_VOCAB_SIZE:
            raise InputError(
                f"vocab_size={vocab_size}: must be at least {SMALLEST_VOCAB_SIZE}, "
                f"{len(SPECIAL_TOKENS)} special tokens and 256 bytes"
            )
        texts = filter(None, check_unicode(texts))
        first = next(texts, None)
        if first is None:
            raise InputError("no text to train a tokenizer on: give at least one sentence")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = normalizers.Prepend(" ")
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(itertools.chain([first], texts), trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer that `save` wrote to `path`.

        Raises:
            InputError: the file is missing, unreadable, not a tokenizer, or one whose special
                tokens are others.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is not a tokenizer file: it is not UTF-8 text") from None
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare `Exception`
            raise InputError(
                f"{path} is not a tokenizer file ({error}): name a tokenizer.json"
            ) from None
        try:
            return cls(backend)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as a `tokenizer.json` of the `tokenizers` package.

        The file is whole or absent: it is written under another name and then renamed.
        """
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        partial.replace(path)

    @property
    def vocab_size(self) -> int:
        """The number V of tokens; every id is in [0, V)."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens.

        Raises:
            InputError: `text` holds a lone surrogate, as an argument with invalid UTF-8 does.
        """
        return self.encode_batch([text])[0]

    def encode_batch(
        self, texts: Iterable[str], *, max_length: int | None = None
    ) -> list[list[int]]:
        """The ids of each text, as `encode`; the texts are shared out among the CPU's cores.

        Raises:
            InputError: as `encode`; a text of more than `max_length` tokens, `<eos>` included.
        """
        texts = list(check_unicode(texts))
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        for text, tokens in zip(texts, ids, strict=True):
            check_length(text, len(tokens) + 1, max_length)
        return ids

    def decode(self, ids: Iterable[Any]) -> str:
        """The text of `ids`, whatever they are: a model may emit any sequence.

        Special tokens are left out, and do not end the text. Bytes that are not valid UTF-8
        become U+FFFD.

        Raises:
            InputError: an id outside [0, V), or one that is not a whole number.
        """
        return self._backend.decode(check_ids(ids, self.vocab_size), skip_special_tokens=True)

    def pieces(self, ids: Iterable[Any]) -> list[str]:
        """The text of each id by itself, to label tokens with: "▁" for the space before a word.

        Special tokens have their names. A part of a character is U+FFFD.

        Raises:
            InputError: as `decode`.
        """
        byte_level = decoders.ByteLevel()
        pieces = []
        for token_id in check_ids(ids, self.vocab_size):
            token = str(self._backend.id_to_token(token_id))
            is_special = token in SPECIAL_TOKENS
            pieces.append(token if is_special else byte_level.decode([token]).replace(" ", "▁"))
        return pieces


def check_ids(ids: Iterable[Any], vocab_size: int) -> list[int]:
    """`ids` as Python's own numbers.

    Raises:
        InputError: an id outside [0, V), or one that is not a whole number.
    """
    checked = []
    for position, token_id in enumerate(ids):
        try:
            number = operator.index(token_id)
        except TypeError:
            number = -1
        if not 0 <= number < vocab_size:
            raise InputError(
                f"token {token_id!r} at position {position}: must be a whole number from 0 "
                f"to {vocab_size - 1}"
            )
        checked.append(number)
    return checked


def check_length(text: str, length: int, most: int | None) -> None:
    """Refuse a text of more than `most` tokens, its end included.

    Raises:
        InputError: it has more.
    """
    if most is not None and length > most:
        raise InputError(
            f"the text {_shorten(text)} has {length} tokens with its <eos>, "
            f"more than the {most} that the model accepts: cut it into sentences"
        )


def check_unicode(texts: Iterable[str]) -> Iterator[str]:
    """The texts, each checked as it is read.

    Raises:
        InputError: a lone surrogate, as an argument with invalid UTF-8 has.
    """
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text {_shorten(text)} is not valid Unicode: character {error.start + 1} is "
                f"half a surrogate pair; give it as UTF-8"
            ) from None
        yield text


def _shorten(text: str) -> str:
    """`text` in quotes, on one line, its middle left out where it is long."""
    return ascii(text) if len(text) <= 60 else ascii(f"{text[:40]}...{text[-15:]}")
