"""The data sets that come with the library, and the split of a user's own.

Each embedded corpus lies in a folder beside this file, with a NOTICE that says where it is from,
its licence and what was done to it.
"""

import dataclasses
import gzip
import importlib.resources

import numpy as np

from jax_transformer.data.documents import PARTS, Part, split_end_of_text
from jax_transformer.data.text import ParallelText, read_tsv
from jax_transformer.errors import InputError

_FOLDERS = {"libreoffice-en-de": "libreoffice_help_en_de"}
_DOCUMENT_FOLDERS = {"shakespeare": "shakespeare"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sentence pairs to learn from (`train`), to choose by (`valid`) and to quote (`test`)."""

    train: ParallelText
    valid: ParallelText
    test: ParallelText


def load(name: str = "libreoffice-en-de") -> Corpus:
    """The embedded corpus `name`, split as it was published.

    `libreoffice-en-de`: 15,567 + 500 + 500 English-German sentences of 4 to 30 words from the
    help of LibreOffice 7.4 (MPL-2.0, parts Apache-2.0). No validation or test sentence has a near
    copy elsewhere in the corpus.

    Raises:
        InputError: there is no corpus of that name.
    """
    if name not in _FOLDERS:
        raise InputError(f"no embedded corpus {name!r}: there is {', '.join(sorted(_FOLDERS))}")
    folder = importlib.resources.files(__name__) / _FOLDERS[name]
    parts = {}
    for part in ("train", "valid", "test"):
        with importlib.resources.as_file(folder / f"{part}.tsv.gz") as path:
            parts[part] = read_tsv(path)
    return Corpus(**parts)


def load_documents(name: str = "shakespeare") -> dict[Part, tuple[str, ...]]:
    """The documents of the embedded corpus `name`, split by whole documents.

    `shakespeare`: 38 + 2 + 2 works of William Shakespeare, 5.06 MB of ASCII (public domain).

    Raises:
        InputError: there is no corpus of that name.
    """
    if name not in _DOCUMENT_FOLDERS:
        raise InputError(
            f"no embedded corpus {name!r}: there is {', '.join(sorted(_DOCUMENT_FOLDERS))}"
        )
    folder = importlib.resources.files(__name__) / _DOCUMENT_FOLDERS[name]
    return {
        part: tuple(
            split_end_of_text(gzip.decompress((folder / f"{part}.txt.gz").read_bytes()).decode())
        )
        for part in PARTS
    }


def split(text: ParallelText, *, valid: int, test: int, seed: int) -> Corpus:
    """Take `valid` and `test` pairs out of `text` at random; the others are the training set.

    Only pairs are taken whose source and whose target occur once in `text`, so that no held-out
    sentence can be learnt by heart. Of small data each held-out set takes at most a tenth of the
    pairs (and at least one). The order of `text` is kept inside each set, its `skipped` goes with
    the training set. The same arguments give the same split with every version of NumPy.

    Raises:
        InputError: `valid` or `test` below 1, a negative seed, fewer than three pairs, or fewer
            than two whose sentences occur once.
    """
    for name, value, least in (("valid", valid, 1), ("test", test, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")
    if len(text) < 3:
        raise InputError(
            f"{len(text)} sentence pairs are too few to train, validate and test with: "
            f"give at least 3"
        )
    single = np.flatnonzero(_occurs_once(text.sources) & _occurs_once(text.targets))
    if len(single) < 2:
        raise InputError(
            f"{len(single)} of {len(text)} sentence pairs occur once, and validation and test "
            f"need one each: remove duplicates or give more pairs"
        )
    # Raw output of PCG64 is the same in all NumPy versions; `Generator.permutation` need not be.
    order = single[np.argsort(np.random.PCG64(seed).random_raw(len(single)), kind="stable")]
    most = min(max(1, len(text) // 10), len(single) // 2)
    test, valid = min(test, most), min(valid, most)
    held_out = order[: test + valid]
    rest = np.setdiff1d(np.arange(len(text)), held_out)
    return Corpus(
        train=_select(text, rest, skipped=text.skipped),
        valid=_select(text, np.sort(held_out[test:])),
        test=_select(text, np.sort(held_out[:test])),
    )


def _occurs_once(sentences: tuple[str, ...]) -> np.ndarray:
    counts: dict[str, int] = {}
    for sentence in sentences:
        counts[sentence] = counts.get(sentence, 0) + 1
    return np.array([counts[sentence] == 1 for sentence in sentences])


def _select(text: ParallelText, rows: np.ndarray, skipped: int = 0) -> ParallelText:
    return ParallelText(
        sources=tuple(text.sources[row] for row in rows),
        targets=tuple(text.targets[row] for row in rows),
        skipped=skipped,
    )
