import json

import numpy as np
import pytest

from jax_transformer.data.characters import ByteTokenizer, CharacterTokenizer
from jax_transformer.data.documents import PARTS
from jax_transformer.data.packing import PackedBatches
from jax_transformer.data.tokens import open_tokens, tokenize, write_tokens
from jax_transformer.errors import InputError

TEXTS = {
    "train": ["first text", "", "naïve"],
    "valid": ["held out"],
    "test": ["the", "last"],
}


@pytest.fixture
def written(tmp_path):
    write_tokens(tmp_path / "corpus.bin", TEXTS, ByteTokenizer())
    return tmp_path / "corpus.bin"


def texts_of(documents):
    tokenizer = ByteTokenizer()
    return [tokenizer.decode(documents.slice(index, 0, 10**6)) for index in range(len(documents))]


@pytest.mark.parametrize("part", PARTS)
def test_what_is_written_is_mapped_and_what_it_would_be_in_memory(written, part):
    file = open_tokens(written)
    mapped, held = file.parts[part], tokenize(TEXTS[part], ByteTokenizer())
    assert isinstance(mapped.ids, np.memmap)
    assert mapped.ids.dtype == np.uint16
    assert texts_of(mapped) == texts_of(held) == TEXTS[part]
    assert mapped.num_bytes == held.num_bytes == sum(len(text.encode()) for text in TEXTS[part])
    np.testing.assert_array_equal(mapped.lengths, held.lengths)
    assert file.tokenizer.vocab_size == 260
    for ours, theirs in zip(
        *(PackedBatches(each, row_length=6, rows=2, seed=0).at(1) for each in (mapped, held)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_slice_never_reaches_into_the_next_document(written):
    documents = open_tokens(written).parts["train"]
    assert len(documents.slice(0, 5, 100)) == 5
    assert len(documents.slice(1, 0, 100)) == 0


def test_large_vocabularies_take_four_bytes(tmp_path):
    tokenizer = CharacterTokenizer("".join(map(chr, range(0x10000, 0x10000 + 70_000))))
    text = chr(0x10000 + 69_999)
    write_tokens(tmp_path / "a.bin", {part: [text] for part in PARTS}, tokenizer)
    documents = open_tokens(tmp_path / "a.bin").parts["test"]
    assert documents.ids.dtype == np.uint32
    assert documents.slice(0, 0, 9).tolist() == [70_003]


def test_the_digest_changes_with_a_token_or_an_end(tmp_path):
    digests = set()
    for name, first in (("a", ["xy", "z"]), ("b", ["x", "yz"]), ("c", ["xy", "y"])):
        path = tmp_path / f"{name}.bin"
        write_tokens(path, {**TEXTS, "train": first}, ByteTokenizer())
        digests.add(open_tokens(path).sha256)
    assert len(digests) == 3


def spoil_header(path, **changes):
    header = path.with_suffix(".json")
    header.write_text(json.dumps(json.loads(header.read_text()) | changes))


def spoil_token(path):
    ids = np.memmap(path, np.uint16, mode="r+")
    ids[7] = 260
    ids.flush()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_token, r"corpus\.bin: token 7 is 260: must be from 0 to 259"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), r"corpus\.bin must hold the \d+ u"),
        (lambda path: path.unlink(), r"corpus\.bin must hold .* and is missing"),
        (lambda path: path.with_suffix(".json").unlink(), r"corpus\.json is missing: a file of t"),
        (lambda path: path.with_suffix(".json").write_text("{"), r"corpus\.json cannot be read"),
        (lambda path: spoil_header(path, dtype="int8"), r"corpus\.json: must hold dtype"),
        (
            lambda path: spoil_header(path, vocab_size=261),
            r"has 260 tokens, but .*written with 261",
        ),
        (lambda path: path.with_suffix(".documents.npy").unlink(), r"documents\.npy cannot be rea"),
        (
            lambda path: np.save(path.with_suffix(".documents.npy"), np.zeros((3, 2), np.int64)),
            r"documents\.npy: must hold the ends of 6 documents",
        ),
        (lambda path: path.with_suffix(".tokenizer.json").unlink(), r"tokenizer\.json: no such f"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_their_names(written, spoil, message):
    spoil(written)
    with pytest.raises(InputError, match=message) as refused:
        open_tokens(written)
    assert "\n" not in str(refused.value)


def test_nothing_is_written_over_or_in_a_wrong_place(written, tmp_path):
    for path, message in (
        (written, "is there already"),
        (tmp_path / "a.npy", r"ends in \.bin"),
        (tmp_path / "no" / "a.bin", "the directory .*no is not there"),
    ):
        with pytest.raises(InputError, match=message):
            write_tokens(path, TEXTS, ByteTokenizer())
