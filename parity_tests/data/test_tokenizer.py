"""The tokenizer: text comes back exactly, special tokens never come out of text."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from jax_transformer.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from jax_transformer.errors import InputError

TEXTS = [
    "Choose the file to open.",
    "Choose the file to save.",
    "Wählen Sie die zu öffnende Datei.",
    "The <eos> and <pad> tokens; <eos> <eos><eos> <bos> <unk>.",
    "Größe 12 und Größe 14",
    "選択したファイルを開く",
] * 3

texts = st.text(st.characters(blacklist_categories=["Cs"]))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, vocab_size=320)


@settings(deadline=None, max_examples=500)
@given(texts)
def test_every_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(max(SPECIAL_TOKENS.values()) < token < tokenizer.vocab_size for token in ids)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces  ",
        "👩\u200d👩\u200d👧\u200d👦 🇩🇪",
        "選択したファイルを開く",
        "\u05e9\u05dc\u05d5\u05dd \u200f\u0639\u0627\u0644\u0645",
        "\x00\x01\x1b[0m\x7f\t\r\n",
        "e\u0301 is not \xe9",
        "\ufeff\u2028\u00a0\U0010ffff",
        "<pad><unk><bos><eos>",
        " ".join(SPECIAL_TOKENS),
    ],
)
def test_difficult_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_the_name_of_a_special_token_in_a_text_is_letters(tokenizer, special):
    for text in (special, f"a{special}b", f"{special} {special}"):
        assert not set(tokenizer.encode(text)) & set(SPECIAL_TOKENS.values())
    # Even where such names are the most frequent words of the text that it was trained on.
    trained_on_names = Tokenizer.train([special, f"{special} {special}"] * 50, vocab_size=400)
    assert not set(trained_on_names.encode(special)) & set(SPECIAL_TOKENS.values())
    assert trained_on_names.decode(trained_on_names.encode(special)) == special


def test_special_tokens_have_the_ids_of_the_config(tokenizer):
    assert tokenizer.pieces([PAD_ID, UNK_ID, BOS_ID, EOS_ID]) == [
        "<pad>",
        "<unk>",
        "<bos>",
        "<eos>",
    ]


def test_a_word_has_the_same_tokens_at_the_beginning_and_in_the_middle(tokenizer):
    assert tokenizer.encode("file file") == 2 * tokenizer.encode("file")


def test_a_batch_is_encoded_as_its_texts_one_by_one(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 319)))
def test_any_ids_of_the_vocabulary_decode_to_unicode_text(tokenizer, ids):
    ids = [token % tokenizer.vocab_size for token in ids]
    tokenizer.decode(ids).encode("utf-8")
    assert len(tokenizer.pieces(ids)) == len(ids)


def test_special_tokens_are_left_out_and_end_nothing(tokenizer):
    first, second = tokenizer.encode("open"), tokenizer.encode("file")
    ids = [BOS_ID, *first, EOS_ID, PAD_ID, UNK_ID, *second, EOS_ID]
    assert tokenizer.decode(ids) == "open file"
    assert tokenizer.decode([PAD_ID, EOS_ID]) == ""


def test_bytes_that_are_not_utf8_become_the_replacement_character(tokenizer):
    ids = tokenizer.encode("a\u20ac")  # three bytes, in no merge of the small vocabulary
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"
    assert tokenizer.decode([*ids[:-1], *tokenizer.encode("b")]) == "a\ufffd b"


def test_ids_of_arrays_decode_as_their_numbers(tokenizer):
    ids = tokenizer.encode("open file")
    assert tokenizer.decode(np.array(ids, np.int32)) == "open file"


@pytest.mark.parametrize("bad", [-1, 320, 2**70, 1.0, "7", None, np.float32(5)])
@pytest.mark.parametrize("method", ["decode", "pieces"])
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(tokenizer, method, bad):
    with pytest.raises(InputError, match="at position 1: must be a whole number from 0 to"):
        getattr(tokenizer, method)([5, bad])


def test_pieces_mark_the_space_before_a_word(tokenizer):
    assert "".join(tokenizer.pieces(tokenizer.encode("Choose the file"))) == "▁Choose▁the▁file"


def test_the_vocabulary_has_the_size_asked_for_or_fewer_when_the_text_is_small():
    assert Tokenizer.train(TEXTS, vocab_size=290).vocab_size == 290
    # "ab" twice: the merges "a b" and "space ab"; nothing else occurs twice.
    assert Tokenizer.train(["ab", "ab", "cd"], vocab_size=5000).vocab_size == 260 + 2


@pytest.mark.parametrize("vocab_size", [0, 259])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(vocab_size):
    with pytest.raises(InputError, match=f"vocab_size={vocab_size}: must be at least 260"):
        Tokenizer.train(TEXTS, vocab_size)


@pytest.mark.parametrize("nothing", [[], ["", ""]])
def test_training_on_no_text_is_refused(nothing):
    with pytest.raises(InputError, match="no text"):
        Tokenizer.train(nothing, 300)


def test_a_lone_surrogate_is_refused(tokenizer):
    # What Python makes of an argument that is not UTF-8.
    for call in (tokenizer.encode, lambda text: Tokenizer.train([text], 300)):
        with pytest.raises(InputError, match=r"'caf\\udce9' .* character 4") as caught:
            call("caf\udce9")
        str(caught.value).encode("utf-8")


def test_a_text_longer_than_the_model_accepts_is_quoted(tokenizer):
    text = "Choose the file\nto open." + " and so on" * 20
    length = len(tokenizer.encode(text)) + 1
    assert tokenizer.encode_batch([text], max_length=length) == [tokenizer.encode(text)]
    with pytest.raises(InputError, match=rf"Choose the file.*has {length} tokens") as caught:
        tokenizer.encode_batch(["fine", text], max_length=length - 1)
    assert "\n" not in str(caught.value)


def test_a_saved_tokenizer_is_the_same_after_loading(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    assert loaded.vocab_size == tokenizer.vocab_size
    for text in [*TEXTS, "<eos>"]:  # what a text may not become is not in the file
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_a_file_that_is_no_tokenizer_of_ours_is_refused(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read: No such file"):
        Tokenizer.load(path)
    for content in (b"", b"{}", b"[1, 2]", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer file"):
            Tokenizer.load(path)
    tokenizer.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["<eos>"], vocab["<bos>"] = vocab["<bos>"], vocab["<eos>"]
    for token in content["added_tokens"]:
        token["id"] = vocab[token["content"]]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer\.json: <bos> has id 3, not 2"):
        Tokenizer.load(path)


def test_training_gives_the_same_tokenizer_in_every_process(tmp_path):
    script = (
        "import sys; from jax_transformer.data import Tokenizer, corpora\n"
        "text = corpora.load().valid\n"
        "Tokenizer.train(text.sources + text.targets, 1000).save(sys.argv[1])\n"
    )
    files = []
    for hash_seed, threads in (("1", "true"), ("2", "false")):
        files.append(tmp_path / f"{hash_seed}.json")
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "TOKENIZERS_PARALLELISM": threads,
        }
        subprocess.run([sys.executable, "-c", script, files[-1]], env=environment, check=True)
    assert files[0].read_bytes() == files[1].read_bytes()
