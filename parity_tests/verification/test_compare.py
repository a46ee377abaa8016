"""How far arrays are apart."""

import numpy as np
import pytest

from jax_transformer.verification.compare import Accuracy, compare_logits, relative_error


def test_the_error_is_that_of_norms():
    assert relative_error(np.array([3.0, 4.0]), np.array([3.0, 4.0])) == 0
    assert relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.ones(2), np.zeros(2)) == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1, 2])
def test_nan_and_infinity_on_either_side_or_both_are_a_difference(bad, side):
    good, broken = np.ones(3), np.array([1.0, bad, 1.0])
    pair = [(broken, good), (good, broken), (broken, broken)][side]
    assert relative_error(*pair) == np.inf


def test_shapes_and_whole_numbers_must_be_equal():
    assert relative_error(np.ones(3), np.ones(4)) == np.inf
    assert relative_error(np.ones((2, 3)), np.ones((3, 2))) == np.inf
    assert relative_error(np.ones((2, 4)), np.ones((2, 2, 2))) == 0
    assert relative_error(np.arange(3), np.arange(3)) == 0
    assert relative_error(np.arange(3), np.array([0, 1, 3])) == np.inf


def test_padded_tokens_do_not_count():
    valid = np.array([[True, True, False]])
    expected = np.ones((1, 3, 2))
    found = expected.copy()
    found[0, 2] = np.nan
    assert relative_error(found, expected, valid) == 0
    assert relative_error(found, expected) == np.inf
    found[0, 1, 0] = 2
    assert relative_error(found, expected, valid) > 0


def test_accuracy_is_twice_theirs_and_four_ulp():
    ulp = 2.0**-23
    assert Accuracy(4 * ulp, 0.0, "float32").passed
    assert not Accuracy(5 * ulp, 0.0, "float32").passed
    assert Accuracy(2e-5, 1e-5, "float32").passed
    assert not Accuracy(2.1e-5, 1e-5, "float32").passed
    assert not Accuracy(np.inf, 1e-5, "float32").passed
    assert Accuracy(2.0, 1.0, "float32").ratio == 2
    assert Accuracy(0.0, 0.0, "float32").ratio == 1


def test_divergence_is_summed_over_the_vocabulary_in_nats():
    expected = np.log(np.array([[[0.5, 0.25, 0.25]]]))
    found = np.log(np.array([[[0.25, 0.5, 0.25]]]))
    compared = compare_logits(found, expected)
    assert compared.kl == pytest.approx(0.25 * np.log(2))
    assert compared.top1 == 0
    assert compare_logits(found + 7.0, found).kl == pytest.approx(0, abs=1e-15)
    assert compare_logits(found, found).top1 == 1
