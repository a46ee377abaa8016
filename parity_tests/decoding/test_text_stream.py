"""Text comes out as soon as it is certain, and no sooner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.decoding.text_stream import TextStream
from jax_transformer.errors import InputError


class Bytes:
    """Each byte is a token."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class FallbackBytes:
    """Likewise, as SentencePiece's tokens of bytes: they become text all together or not at all."""

    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return self.decoder.decode([f"<0x{byte:02X}>" for byte in ids])


BPE = Tokenizer.train(["the cat sat on the mat, the cat", "naïve café, 😀 日本語"] * 3, 320)
CODECS = {"bytes": Bytes(), "bpe": BPE, "fallback": FallbackBytes()}


def pieces(codec, prompt, ids, stops=()):
    """What each token gives, and what comes at the end."""
    stream = TextStream(codec, codec.encode(prompt), stops)
    found = [stream.push(token) for token in ids]
    return [*found, stream.finish()], stream


def test_a_character_of_several_bytes_comes_whole_with_its_last_one():
    found, stream = pieces(Bytes(), "a", "é日😀x".encode())
    assert found == ["", "é", "", "", "日", "", "", "", "😀", "x", ""]
    assert stream.text == "é日😀x"


def test_bytes_that_are_no_character_do_not_hold_back_what_follows():
    found, stream = pieces(Bytes(), "a", b"\xff\xff\xe6\x97a")
    assert "".join(found) == stream.text == b"\xff\xff\xe6\x97a".decode(errors="replace")
    assert found[-2].endswith("a")
    # One that never becomes whole comes at the end.
    found, _ = pieces(Bytes(), "a", b"b\xe6\x97")
    assert found == ["b", "", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_space_before_the_first_new_word_is_kept(codec):
    # Alone, the decoder takes it for that of a first word, and drops it.
    whole = codec.encode("the cat sat")
    count = len(codec.encode("the cat"))
    stream = TextStream(codec, whole[:count])
    text = "".join(stream.push(token) for token in whole[count:]) + stream.finish()
    assert text == " sat"


def test_a_stop_string_is_found_across_tokens_and_cut():
    found, stream = pieces(Bytes(), "a", b"one\n\ntwo", stops=("\n\n",))
    assert found == ["o", "n", "e", "", "", "", "", "", ""]
    assert (stream.text, stream.stopped) == ("one", True)


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not():
    found, stream = pieces(Bytes(), "a", b"xENx END", stops=("END",))
    assert found == ["x", "", "", "ENx", " ", "", "", "", ""]
    assert (stream.text, stream.stopped) == ("xENx ", True)
    found, stream = pieces(Bytes(), "a", b"xEN", stops=("END",))
    assert found == ["x", "", "", "EN"]
    assert (stream.text, stream.stopped) == ("xEN", False)


def test_the_first_of_several_stop_strings_ends_the_text():
    _, stream = pieces(Bytes(), "a", b"1 ab 2 b", stops=("b", "ab"))
    assert stream.text == "1 "
    # A longer one that begins earlier, once a shorter one has come, is too late.
    _, stream = pieces(Bytes(), "a", b"xabcd", stops=("abcd", "b"))
    assert stream.text == "xa"


def test_stops_that_repeat_their_beginning_are_found():
    _, stream = pieces(Bytes(), "a", b"aaab", stops=("aab",))
    assert stream.text == "a"
    _, stream = pieces(Bytes(), "ab", b"cab", stops=("abc",))
    assert stream.text == "cab", "a prompt's text ends nothing"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InputError, match=r"^a stop string is empty"):
        TextStream(Bytes(), [1], ("x", ""))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(list(CODECS)),
    st.text(alphabet="ab é日😀\n", min_size=1, max_size=8),
    st.text(alphabet="ab é日😀\n", max_size=30),
    st.lists(st.text(alphabet="ab é日\n", min_size=1, max_size=4), max_size=3),
)
def test_pieces_joined_are_the_text_before_the_first_stop(name, prompt, text, stops):
    codec = CODECS[name]
    prompt_ids = codec.encode(prompt)
    ids = codec.encode(prompt + text)
    if ids[: len(prompt_ids)] != prompt_ids:  # a token across the border of the prompt
        ids = [*prompt_ids, *codec.encode(text)]
    new = ids[len(prompt_ids) :]
    expected = codec.decode(ids)[len(codec.decode(prompt_ids)) :]
    stream = TextStream(codec, prompt_ids, stops)
    found = ""
    for token in new:
        found += stream.push(token)
        assert found == stream.text
        assert expected.startswith(found)
        if stream.stopped:
            break
    found += stream.finish()
    ends = [expected.find(stop) for stop in stops if stop in expected]
    assert stream.stopped == bool(ends)
    if not ends:
        assert found == expected
    else:
        # Of two that overlap the one that is whole first ends the text.
        assert min(ends) <= len(found) <= max(ends) + 4
        assert any(expected.startswith(stop, len(found)) for stop in stops)
        assert not any(stop in found for stop in stops)
