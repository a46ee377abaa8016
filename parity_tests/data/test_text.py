"""Text files: what is read is what was written, and every fault is named by its place."""

import gzip
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.data.text import ParallelText, read_lines, read_parallel, read_tsv
from jax_transformer.errors import InputError

# Everything but the line end; surrogates cannot be written as UTF-8.
lines_of_text = st.lists(
    st.text(st.characters(blacklist_characters="\n", blacklist_categories=["Cs"])), min_size=1
).filter(lambda lines: lines != [""] and not lines[0].startswith("\ufeff"))


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@settings(deadline=None)
@given(lines_of_text, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_lines_are_the_stripped_lines_of_the_file(
    tmp_path_factory, lines, line_end, ends_with_line_end, compressed
):
    text = line_end.join(lines) + (line_end if ends_with_line_end or lines[-1] == "" else "")
    path = tmp_path_factory.getbasetemp() / ("lines.gz" if compressed else "lines.txt")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    assert read_lines(path) == tuple(line.strip() for line in lines)


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\r"])
def test_only_a_line_feed_ends_a_line(tmp_path, separator):
    path = write(tmp_path / "a.txt", f"one{separator}still one\ntwo\n")
    assert read_lines(path) == (f"one{separator}still one", "two")


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    assert read_lines(write(tmp_path / "a.txt", b"\xef\xbb\xbfHallo\n")) == ("Hallo",)


def test_pairs_with_a_blank_side_are_left_out_and_counted(tmp_path):
    source = write(tmp_path / "a.en", "one\n\ntwo\n \t\nthree\n\n")
    target = write(tmp_path / "a.de", "eins\nnichts\n\n \ndrei \n\n")
    expected = ParallelText(sources=("one", "three"), targets=("eins", "drei"), skipped=4)
    assert read_parallel(source, target) == expected
    pairs = "one\teins\n\tnichts\ntwo\t\n \t \nthree\tdrei \n\n"
    assert read_tsv(write(tmp_path / "a.tsv", pairs)) == expected


def test_parallel_text_has_as_many_targets_as_sources():
    with pytest.raises(InputError, match="2 sources but 1 targets"):
        ParallelText(sources=("a", "b"), targets=("c",))


def test_files_of_different_lengths_are_refused_with_both_counts(tmp_path):
    source, target = write(tmp_path / "a.en", "a\nb\n"), write(tmp_path / "a.de", "c\nd\ne\n")
    with pytest.raises(InputError, match=r"a\.en has 2 lines but .*a\.de has 3"):
        read_parallel(source, target)


@pytest.mark.parametrize(("line", "tabs"), [("no tab", 0), ("three\tcolumns\there", 2)])
def test_a_tsv_line_without_exactly_one_tab_is_named(tmp_path, line, tabs):
    path = write(tmp_path / "a.tsv", f"a\tb\n{line}\n")
    with pytest.raises(InputError, match=rf"a\.tsv:2: {tabs} tabs"):
        read_tsv(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_invalid_utf8_is_named_by_file_line_and_byte(tmp_path, name):
    data = b"fine\nalso fine\nM\xc3\xbcll \xff here\n"
    path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(InputError, match=rf"{re.escape(name)}:3: byte 0xff \(byte 7 of the line\)"):
        read_lines(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("mark.txt", b"\xef\xbb\xbf", "is empty"),
        ("empty.txt.gz", gzip.compress(b"", mtime=0), "is empty"),
        ("plain.gz", b"not compressed", "not a whole gzip file"),
        ("cut.gz", gzip.compress(b"some text" * 99, mtime=0)[:-9], "not a whole gzip file"),
        (
            "damaged.gz",
            gzip.compress(b"some text" * 99, mtime=0)[:12] + b"\xff" * 40,
            "not a whole gzip",
        ),
    ],
)
def test_a_file_without_readable_text_is_refused(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message):
        read_lines(write(tmp_path / name, content))


def test_a_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"missing\.txt: no such file"):
        read_lines(tmp_path / "missing.txt")
    with pytest.raises(InputError, match="is a folder"):
        read_lines(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_lines(write(tmp_path / "file", "text") / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(tmp_path):
    path = write(tmp_path / "secret.txt", "text")
    path.chmod(0)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        read_lines(path)


def test_pairs_that_are_all_blank_are_refused(tmp_path):
    with pytest.raises(InputError, match="no line has text on both sides"):
        read_tsv(write(tmp_path / "a.tsv", "\tb\na\t\n"))


def test_every_message_is_one_line(tmp_path):
    write(tmp_path / "bad.txt", b"\xff\n")
    write(tmp_path / "bad.gz", b"\x1f\x8b")
    for name in ("bad.txt", "bad.gz", "missing.txt", "."):
        with pytest.raises(InputError) as caught:
            read_lines(tmp_path / name)
        assert "\n" not in str(caught.value)
