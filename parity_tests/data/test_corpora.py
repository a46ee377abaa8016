"""The embedded corpus is whole; a user's text is split without leaks."""

import importlib.resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.data import corpora
from jax_transformer.data.text import ParallelText
from jax_transformer.errors import InputError


@pytest.fixture(scope="module")
def libreoffice():
    return corpora.load("libreoffice-en-de")


def numbered(count):
    return ParallelText(
        sources=tuple(f"source {i}" for i in range(count)),
        targets=tuple(f"target {i}" for i in range(count)),
    )


def pairs(text):
    return list(zip(text.sources, text.targets, strict=True))


def test_the_embedded_corpus_has_all_its_pairs(libreoffice):
    sizes = [len(part) for part in (libreoffice.train, libreoffice.valid, libreoffice.test)]
    assert sizes == [15_567, 500, 500]
    assert libreoffice.train.skipped == 0
    assert libreoffice.test.sources[1] == (
        "Switches Edit Points mode for an inserted freeform line on and off."
    )
    assert libreoffice.test.targets[1].startswith("Schaltet den Modus Punkte bearbeiten für")
    assert corpora.load() == libreoffice


def test_no_held_out_sentence_of_the_embedded_corpus_is_in_another_set(libreoffice):
    parts = (libreoffice.train, libreoffice.valid, libreoffice.test)
    sources = [source for part in parts for source in set(part.sources)]
    assert len(sources) == len(set(sources))


def test_each_embedded_corpus_comes_with_its_notice():
    for folder in corpora._FOLDERS.values():
        notice = (importlib.resources.files(corpora) / folder / "NOTICE").read_text("utf-8")
        for word in ("Origin", "Licence", "Changes", "Mozilla Public License", "Apache License"):
            assert word in notice


def test_an_unknown_corpus_is_refused_with_the_names_that_there_are():
    with pytest.raises(InputError, match=r"'libreoffice'.*libreoffice-en-de"):
        corpora.load("libreoffice")


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=3, max_size=60),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 2**64),
)
@settings(deadline=None)
def test_a_split_keeps_every_pair_once_and_no_held_out_sentence_elsewhere(
    numbers, valid, test, seed
):
    sources, targets = zip(*((f"s{s}", f"t{t}") for s, t in numbers), strict=True)
    text = ParallelText(sources=sources, targets=targets, skipped=7)
    single = [
        i
        for i in range(len(text))
        if sources.count(sources[i]) == 1 and targets.count(targets[i]) == 1
    ]
    if len(single) < 2:
        with pytest.raises(InputError, match="occur once"):
            corpora.split(text, valid=valid, test=test, seed=seed)
        return
    corpus = corpora.split(text, valid=valid, test=test, seed=seed)
    parts = (corpus.train, corpus.valid, corpus.test)
    assert sorted(pair for part in parts for pair in pairs(part)) == sorted(pairs(text))
    for held_out in (corpus.valid, corpus.test):
        assert all(sources.count(source) == 1 for source in held_out.sources)
        assert all(targets.count(target) == 1 for target in held_out.targets)
    tenth = max(1, len(text) // 10)
    assert 1 <= len(corpus.valid) <= min(valid, tenth)
    assert 1 <= len(corpus.test) <= min(test, tenth)
    assert len(corpus.train) >= 1
    assert [part.skipped for part in parts] == [7, 0, 0]


def test_a_split_of_large_text_has_the_sizes_asked_for():
    corpus = corpora.split(numbered(1000), valid=60, test=40, seed=3)
    assert [len(part) for part in (corpus.train, corpus.valid, corpus.test)] == [900, 60, 40]


def test_a_split_depends_on_the_seed_alone():
    text = numbered(300)
    same = [corpora.split(text, valid=20, test=20, seed=1) for _ in range(2)]
    assert same[0] == same[1]
    assert corpora.split(text, valid=20, test=20, seed=2) != same[0]
    # Written out, so that another version of NumPy, Python or this library cannot change it.
    corpus = corpora.split(numbered(30), valid=3, test=3, seed=0)
    assert corpus.valid.sources == ("source 2", "source 13", "source 21")
    assert corpus.test.sources == ("source 3", "source 11", "source 20")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"valid": 0, "test": 1, "seed": 0}, "valid=0: must be at least 1"),
        ({"valid": 1, "test": 0, "seed": 0}, "test=0: must be at least 1"),
        ({"valid": 1, "test": 1, "seed": -1}, "seed=-1: must be at least 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        corpora.split(numbered(30), **arguments)


def test_too_few_pairs_are_refused_with_their_number():
    with pytest.raises(InputError, match="2 sentence pairs are too few"):
        corpora.split(numbered(2), valid=1, test=1, seed=0)
    assert len(corpora.split(numbered(3), valid=500, test=500, seed=0).train) == 1
