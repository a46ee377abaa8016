"""The score of verification on planted faults."""

import pytest

from parity_tests.planted_faults.score import evaluate, misses


@pytest.fixture(scope="module")
def score():
    return evaluate()


def test_there_are_enough_of_each(score):
    assert len(score.results) >= 60
    assert score.correct_models >= 30
    single = [kind for kind in score.known_kinds if kind not in ("logit scale", "gradient")]
    assert all(sum(r.fault.kind == kind for r in score.results) >= 2 for kind in single)


def test_every_fault_is_caught(score):
    assert [r.fault.label for r in score.results if not r.caught] == []


def test_nearly_every_fault_is_found_in_its_module(score):
    assert score.share(lambda r: r.localized) >= 0.95, "\n".join(misses(score))


def test_nearly_every_kind_is_named(score):
    assert score.named_kinds >= 0.9, "\n".join(misses(score))


def test_no_unknown_cause_is_given_a_name(score):
    unknown = [r for r in score.results if r.fault.kind == "unknown"]
    assert [r.fault.label for r in unknown if r.wrongly_named] == []


def test_no_correct_model_is_an_alarm(score):
    assert score.false_alarms == ()
