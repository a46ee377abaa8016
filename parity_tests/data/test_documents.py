import gzip
import itertools
import json
import re

import pytest

from jax_transformer.data import corpora
from jax_transformer.data.documents import (
    PARTS,
    Documents,
    Split,
    jsonl_documents,
    text_documents,
)
from jax_transformer.errors import InputError


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize(
    ("separator", "documents"),
    [
        ("none", ["a\n\nb\nc\n<|endoftext|>\n\n d"]),
        ("blank-line", ["a\n", "b\nc\n<|endoftext|>\n", " d"]),
        ("endoftext", ["a\n\nb\nc\n", "\n d"]),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_file_is_a_document_or_is_cut_where_it_is_asked_for(tmp_path, name, separator, documents):
    path = write(tmp_path / name, "\ufeffa\r\n\nb\nc\n<|endoftext|>\n\n d")
    found = text_documents([path], separator)
    assert list(found) == documents
    assert list(found) == documents  # read anew


def test_a_folder_is_the_text_files_in_it_in_order(tmp_path):
    for name in ("b.txt", "a.md", "sub/c", "sub/d.text.gz", "blank.txt"):
        write(tmp_path / name, " \n" if name == "blank.txt" else name)
    for name in ("picture.png", ".hidden.txt", ".git/x.txt", "archive.zip"):
        write(tmp_path / name, b"\xff")
    assert list(text_documents([tmp_path])) == ["a.md", "b.txt", "sub/c", "sub/d.text.gz"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\nb\xc3d\n", r"a\.txt:2: byte 0xc3 \(byte 2 of the line\) is not valid UTF-8"),
        (b"", r"a\.txt: no text is in it"),
        (b" \n\n", r"a\.txt: no text is in it"),
    ],
)
def test_text_that_cannot_be_used_is_refused_by_its_place(tmp_path, content, message):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(InputError, match=message) as refused:
        list(text_documents([path]))
    assert "\n" not in str(refused.value)


def test_paths_are_checked_before_anything_is_read(tmp_path):
    write(tmp_path / "a.png", b"")
    with pytest.raises(InputError, match=r"missing\.txt: no such file"):
        text_documents([tmp_path / "missing.txt"])
    with pytest.raises(InputError, match=r"holds no text files \(\.txt, "):
        text_documents([tmp_path])
    with pytest.raises(InputError, match="is a folder: name a file"):
        jsonl_documents(tmp_path, "text")
    broken = tmp_path / "a.txt.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(InputError, match=r"a\.txt\.gz is not a whole gzip file"):
        list(text_documents([broken]))


def test_json_lines_are_the_texts_of_a_field(tmp_path):
    rows = [{"text": "a\nb", "id": 1}, {"text": " "}, {"text": "\u00e9"}]
    lines = [json.dumps(row) for row in rows]
    path = write(tmp_path / "a.jsonl", lines[0] + "\n\n" + "\n".join(lines[1:]))
    assert list(jsonl_documents(path, "text")) == ["a\nb", "\u00e9"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: not valid JSON \(.*\): one object a line is needed"),
        ("[1]", r"a\.jsonl:2: must be a JSON object with the field 'text'"),
        ('{"body": "x", "id": 3}', r"2: field 'text' is missing \(there are 'body', 'id'\)"),
        ('{"text": 3}', r"a\.jsonl:2: field 'text' must be text, not 3"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: byte 0xff \(byte 11 of the line\) is not valid UTF"),
    ],
)
def test_json_lines_that_cannot_be_used_are_refused_by_their_place(tmp_path, line, message):
    line = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(InputError, match=message) as refused:
        list(jsonl_documents(path, "text"))
    assert "\n" not in str(refused.value)


def of(texts):
    return Documents(lambda: iter(texts), "here")


def test_of_many_documents_some_are_held_out_whole():
    texts = [f"document {i}" for i in range(40)]
    split = Split.of(of(texts), share=0.05, seed=0)
    parts = {part: list(split.part(part)) for part in PARTS}
    assert [len(part) for part in parts.values()] == [36, 2, 2]
    assert sorted(itertools.chain(*parts.values())) == sorted(texts)
    # For ever: a user's run can be repeated.
    assert parts["valid"] + parts["test"] == [
        "document 13", "document 20", "document 3", "document 11",
    ]  # fmt: skip
    other = Split.of(of(texts), share=0.05, seed=1)
    assert list(other.part("test")) != parts["test"]


def test_of_few_documents_the_end_of_each_is_held_out():
    texts = ["".join(chr(97 + i % 26) for i in range(100)), "0123456789" * 4]
    split = Split.of(of(texts), share=0.1, seed=0)
    parts = {part: list(split.part(part)) for part in PARTS}
    assert [parts[part][0] for part in PARTS] == [texts[0][:80], texts[0][80:90], texts[0][90:]]
    assert [parts[part][1] for part in PARTS] == [texts[1][:32], texts[1][32:36], texts[1][36:]]


def test_a_split_that_leaves_a_part_empty_is_refused():
    with pytest.raises(InputError, match=r"the valid part of here: no text is in it"):
        list(Split.of(of(["abc"]), share=0.05, seed=0).part("valid"))
    with pytest.raises(InputError, match=r"share=0\.5"):
        Split.of(of(["abc"]), share=0.5, seed=0)


def test_the_works_of_shakespeare_are_embedded_whole_and_apart():
    parts = corpora.load_documents("shakespeare")
    assert {name: len(part) for name, part in parts.items()} == {"train": 38, "valid": 2, "test": 2}
    works = [*itertools.chain(*parts.values())]
    assert sum(map(len, works)) == 5_057_239
    assert all(work.isascii() for work in works)
    titles = {work.splitlines()[0] for work in works}
    assert len(titles) == 42
    assert {work.splitlines()[0] for work in parts["valid"]} == {
        "MACBETH", "TWELFTH NIGHT; OR, WHAT YOU WILL",
    }  # fmt: skip
    assert all(re.search("(?i)by William Shakespeare", work[:200]) for work in works)
    with pytest.raises(InputError, match="no embedded corpus 'milton': there is shakespeare"):
        corpora.load_documents("milton")
