import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.data.characters import (
    ByteTokenizer,
    CharacterTokenizer,
    load_tokenizer,
    make_tokenizer,
)
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError

TEXTS = ["To be, or not to be", "naïve 🦉\n"]
NAMES = ("bpe", "bytes", "chars")


def make(name):
    return make_tokenizer(name, iter(TEXTS), 280)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=50, deadline=None)
def test_bytes_bring_back_every_text(text):
    ids = ByteTokenizer().encode(text)
    assert ids == [4 + byte for byte in text.encode()]
    assert ByteTokenizer().decode(ids) == text


def test_characters_are_numbered_in_order():
    tokenizer = CharacterTokenizer.of(["cab", "b\n"])
    assert tokenizer.characters == "\nabc"
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("abc\n") == [5, 6, 7, 4]
    assert tokenizer.pieces([2, 4, 7]) == ["<bos>", "\n", "c"]
    assert ByteTokenizer().pieces([3, 4 + 65, 4 + 0xC3]) == ["<eos>", "A", "<0xC3>"]


@pytest.mark.parametrize("name", NAMES)
def test_all_tokenizers_do_the_same_things(tmp_path, name):
    tokenizer = make(name)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.decode([2, *tokenizer.encode("be"), 3, 0, 1]) == "be"
    assert len(tokenizer.pieces(tokenizer.encode("be"))) == len(tokenizer.encode("be"))
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert isinstance(make("bpe"), Tokenizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ids", [[-1], [10**6], ["a"], [1.5]])
def test_ids_that_are_none_are_refused(name, ids):
    tokenizer = make(name)
    for call in (tokenizer.decode, tokenizer.pieces):
        with pytest.raises(InputError, match="at position 0: must be a whole number from 0 to"):
            call(ids)


def test_bytes_that_are_no_text_are_marked():
    assert ByteTokenizer().decode([4 + 0xC3, 4 + 65]) == "\N{REPLACEMENT CHARACTER}A"


@pytest.mark.parametrize("name", NAMES)
def test_half_a_surrogate_pair_is_refused(name):
    with pytest.raises(InputError, match=r"half a surrogate pair|does not occur"):
        make(name).encode("\ud800")


def test_what_no_character_tokenizer_can_be_is_refused():
    with pytest.raises(InputError, match=r"the character 'z' does not occur in the text"):
        make("chars").encode("zoo")
    for characters in ("", "aa"):
        with pytest.raises(InputError, match="a vocabulary of characters needs each of them once"):
            CharacterTokenizer(characters)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "is not a tokenizer file"),
        (b"\xff", "is not a tokenizer file"),
        (b'{"type": "chars", "characters": "aa"}', "each of them once"),
        (b'{"type": "words"}', "is not a tokenizer file"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused_by_its_name(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=rf"tokenizer\.json.*{message}"):
        load_tokenizer(path)
