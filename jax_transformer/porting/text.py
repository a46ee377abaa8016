"""The tokenizers that models come with."""

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jax_transformer.data.characters import TextTokenizer, load_tokenizer
from jax_transformer.data.tokenizer import check_length, check_unicode
from jax_transformer.errors import InputError
from jax_transformer.porting.families import transformer
from jax_transformer.porting.families.base import Family
from jax_transformer.porting.formats.base import Companion, read_json, readable_errors
from jax_transformer.porting.generation import is_own
from jax_transformer.porting.identify import OWN, Identified


class PretrainedTokenizer:
    """A `tokenizer.json` of the `tokenizers` package, as `transformers` uses it.

    Args:
        path: of the file.
        special: put the special tokens around a text that the file says.

    Raises:
        InputError: a file that is none.
    """

    def __init__(self, path: Companion, *, special: bool = True):
        with readable_errors(path):
            text = path.read_text(encoding="utf-8")
        try:
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The package raises nothing narrower.
            raise InputError(f"{path} is no tokenizer ({error}): copy it again") from None
        # What a file says of batches would cut texts off or fill them up.
        self.backend.no_truncation()
        self.backend.no_padding()
        self._path, self._special = path, special

    def bare(self) -> "PretrainedTokenizer":
        """The same without special tokens around a text."""
        return PretrainedTokenizer(self._path, special=False)

    @property
    def vocab_size(self) -> int:
        """The number V of tokens; every id is in [0, V)."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts around it."""
        return self.encode_batch([text])[0]

    def encode_batch(
        self, texts: Iterable[str], *, max_length: int | None = None
    ) -> list[list[int]]:
        """The ids of each text, as `encode`.

        Raises:
            InputError: a text that is not valid Unicode, or of more than `max_length` tokens.
        """
        texts = list(check_unicode(texts))
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=self._special)
        found = [encoding.ids for encoding in encodings]
        for text, ids in zip(texts, found, strict=True):
            check_length(text, len(ids), max_length)
        return found

    def encode_targets(
        self, texts: Iterable[str], *, max_length: int | None = None
    ) -> list[list[int]]:
        """The ids of what a decoder writes: the same."""
        return self.encode_batch(texts, max_length=max_length)

    def decode(self, ids: Iterable[Any]) -> str:
        """The text of ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def pieces(self, ids: Iterable[Any]) -> list[str]:
        """The name of each token, to label tokens with."""
        return [str(self.backend.id_to_token(int(i))) for i in ids]

    source_pieces = pieces

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file as it was."""
        with readable_errors(self._path):
            content = self._path.read_bytes()
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(content)
        partial.replace(path)


class MarianTokenizer:
    """Marian's files: pieces of SentencePiece for either language, and the ids of these.

    A text may begin with the code of a language, `>>fra<<`, which is one token. After each text
    comes `</s>`.

    Args:
        files: `source.spm`, `target.spm`, `vocab.json`, and `target_vocab.json` if the languages
            have vocabularies of their own.

    Raises:
        InputError: files that are damaged, or lack `</s>` or `<unk>`; the package `sentencepiece`
            is not installed.
    """

    FILES = ("source.spm", "target.spm", "vocab.json")

    def __init__(self, files: dict[str, Companion]):
        self.ids = read_json(files["vocab.json"])
        own = "target_vocab.json" in files
        self.target_ids = read_json(files["target_vocab.json"]) if own else self.ids
        self._pieces = {number: piece for piece, number in self.target_ids.items()}
        self._source_pieces = {number: piece for piece, number in self.ids.items()}
        missing = [token for token in ("</s>", "<unk>") if token not in self.ids]
        if missing:
            raise InputError(f"{files['vocab.json']} has no {missing[0]}: copy it again")
        self.source = processor(files["source.spm"])
        self.written = processor(files["target.spm"])
        self.target = self.written if own else self.source

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the source."""
        return len(self.ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, and of its end."""
        return self.encode_batch([text])[0]

    def encode_batch(
        self, texts: Iterable[str], *, max_length: int | None = None
    ) -> list[list[int]]:
        """The ids of each text, as `encode`.

        Raises:
            InputError: as `PretrainedTokenizer.encode_batch`.
        """
        return self._encode(texts, self.source, self.ids, max_length)

    def encode_targets(
        self, texts: Iterable[str], *, max_length: int | None = None
    ) -> list[list[int]]:
        """The ids of what a decoder writes, in the vocabulary of the target.

        Raises:
            InputError: as `encode_batch`.
        """
        return self._encode(texts, self.written, self.target_ids, max_length)

    def _encode(
        self,
        texts: Iterable[str],
        processor: Any,
        numbers: Mapping[str, int],
        max_length: int | None,
    ) -> list[list[int]]:
        found = []
        for text in check_unicode(texts):
            code, mark, rest = text.partition("<<") if text.startswith(">>") else ("", "", text)
            if not mark:
                code, rest = "", text
            pieces = [code + mark] * bool(mark) + processor.encode(rest, out_type=str)
            ids = [numbers.get(piece, numbers["<unk>"]) for piece in (*pieces, "</s>")]
            check_length(text, len(ids), max_length)
            found.append(ids)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        special = ("</s>", "<unk>", "<pad>", None)
        pieces = [piece for number in ids if (piece := self._pieces.get(number)) not in special]
        return self.target.decode_pieces(pieces).replace("▁", " ").strip()

    def pieces(self, ids: Iterable[Any]) -> list[str]:
        """The piece of each token of a target, to label tokens with."""
        return [self._pieces[int(i)] for i in ids]

    def source_pieces(self, ids: Iterable[Any]) -> list[str]:
        """The piece of each token of a source."""
        return [self._source_pieces[int(i)] for i in ids]


def processor(file: Companion) -> Any:
    """A model of SentencePiece.

    Raises:
        InputError: the file is none; the package is not installed.
    """
    try:
        package: Any = importlib.import_module("sentencepiece")
    except ImportError:
        raise InputError(
            f"{file} is a vocabulary of SentencePiece: install what reads it, "
            f"pip install 'jax-transformer[port]'"
        ) from None
    with readable_errors(file):
        content = file.read_bytes()
    try:
        return package.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # The package raises nothing narrower.
        raise InputError(f"{file} is no model of SentencePiece ({error}): copy it again") from None


AnyTokenizer = PretrainedTokenizer | MarianTokenizer | TextTokenizer


def tokenizer_of(source: Identified) -> AnyTokenizer | None:
    """The tokenizer of a checkpoint, if it has one.

    Raises:
        InputError: it is damaged.
    """
    path, files = source.checkpoint.path, source.checkpoint.companions
    if source.checkpoint.format == OWN and is_own(source):
        from jax_transformer.training.run import RunDirectory  # It needs tokenizers itself.

        run = RunDirectory(path)
        return run.load_tokenizer(run.load_model_config()) if run.tokenizer.exists() else None
    lone = next((file for file in files if file.name == "tokenizer.json"), None)
    if source.family is transformer.FAMILY and isinstance(lone, Path):
        return load_tokenizer(lone)
    return tokenizer_from(files, source.family)


def tokenizer_from(
    companions: Iterable[Companion], family: Family
) -> PretrainedTokenizer | MarianTokenizer | None:
    """The tokenizer that is in the files of a model that was made elsewhere.

    Raises:
        InputError: it is damaged.
    """
    files = {file.name: file for file in companions}
    if "tokenizer.json" in files:
        return PretrainedTokenizer(files["tokenizer.json"])
    marian = family.name == "marian" and all(name in files for name in MarianTokenizer.FILES)
    return MarianTokenizer(files) if marian else None
