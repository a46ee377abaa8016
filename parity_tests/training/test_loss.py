"""Cross-entropy with ignored labels and smoothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.config import IGNORED_LABEL
from jax_transformer.training.loss import LossSum, cross_entropy
from parity_tests.harness import QUICK, Case, check_float32, check_float64, declare
from parity_tests.inputs import LABELS, B, T, V, normal
from torch_reference.training import loss as reference

LOGITS = 5.0 * normal(B, T, V, seed=4)
CASES = declare(
    *(
        Case(
            name=f"cross-entropy, smoothing {smoothing}, ignored {ignored}",
            jax=cross_entropy,
            torch=reference.cross_entropy,
            inputs={
                "logits": LOGITS,
                "labels": np.where(LABELS == IGNORED_LABEL, ignored, LABELS).astype(np.int32),
            },
            options={"label_smoothing": smoothing, "ignore_index": ignored},
        )
        for smoothing in (0.0, 0.1)
        for ignored in (IGNORED_LABEL, 0)
    )
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "jit")


def test_op_by_op_the_same_holds():
    check_float64(CASES[2], "op by op")
    check_float32(CASES[2], "op by op")


def mean_of(module, logits, labels, **options):
    if module is reference:
        loss = reference.cross_entropy(torch.tensor(logits), torch.tensor(labels), **options)
    else:
        run = functools.partial(cross_entropy, **options)
        loss = jax.jit(run, compiler_options=QUICK)(jnp.asarray(logits), jnp.asarray(labels))
    return float(loss.mean())


@pytest.mark.parametrize("module", [None, reference], ids=["jax", "torch"])
def test_smoothing_is_spread_over_all_classes_and_padding_changes_nothing(module):
    row = [2.0, 0.0, -1.0, 0.5, 1.0]
    assert mean_of(module, [[row]], [[0]], label_smoothing=0.1) == pytest.approx(0.724438, abs=1e-6)
    padded = mean_of(module, [[row, row]], [[0, IGNORED_LABEL]], label_smoothing=0.1)
    assert padded == pytest.approx(0.724438, abs=1e-6)


@pytest.mark.parametrize("module", [None, reference], ids=["jax", "torch"])
def test_no_label_at_all_is_no_loss(module):
    assert mean_of(module, np.ones((1, 2, 3), np.float32), np.full((1, 2), IGNORED_LABEL)) == 0.0


def test_no_label_at_all_is_no_gradient():
    labels = jnp.full((1, 2), IGNORED_LABEL)
    gradient = jax.grad(lambda x: cross_entropy(x, labels).mean())(jnp.ones((1, 2, 3)))
    np.testing.assert_array_equal(gradient, 0.0)
    logits = torch.ones(1, 2, 3, requires_grad=True)
    reference.cross_entropy(logits, torch.full((1, 2), IGNORED_LABEL)).mean().backward()
    np.testing.assert_array_equal(logits.grad, 0.0)


def test_logits_of_ignored_labels_are_never_read():
    logits = jnp.asarray(LOGITS)
    poisoned = jnp.where((LABELS == IGNORED_LABEL)[..., None], jnp.nan, logits)

    def mean(x):
        return cross_entropy(x, jnp.asarray(LABELS), label_smoothing=0.1).mean()

    assert float(mean(poisoned)) == float(mean(logits))


def test_sums_of_parts_are_the_sum_of_the_whole():
    logits, labels = jnp.asarray(LOGITS), jnp.asarray(LABELS)
    whole = cross_entropy(logits, labels)
    parts = [cross_entropy(logits[i : i + 1], labels[i : i + 1]) for i in range(B)]
    joined = LossSum(sum(part.total for part in parts), sum(part.count for part in parts))
    assert int(joined.count) == int(whole.count)
    # Sums of 15 numbers of order 5 in another order.
    assert float(joined.mean()) == pytest.approx(float(whole.mean()), rel=1e-6)


def test_bfloat16_logits_are_reduced_in_float32():
    logits = np.random.default_rng(0).standard_normal((1, 1, 50_000)).astype(np.float32)
    logits[0, 0, 7] = 8.0
    narrow = jnp.asarray(logits, jnp.bfloat16)
    loss = cross_entropy(narrow, jnp.array([[7]]))
    assert loss.total.dtype == jnp.float32
    exact = cross_entropy(narrow.astype(jnp.float32), jnp.array([[7]]))
    assert float(loss.total) == float(exact.total)


def test_labels_are_replaced_before_they_are_read():
    # Class 2 of [0, 1, 3]; the ignored label is no class at all, and NaN times 0 is NaN.
    logits = np.array([[[5.0, 5.0, 5.0], [0.0, 1.0, 3.0]]], np.float32)
    expected = np.log(np.exp([0.0, 1.0, 3.0]).sum()) - 3.0
    for module in (None, reference):
        assert mean_of(module, logits, [[IGNORED_LABEL, 2]]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("label", [-1, V, -99, 2**31 - 1])
def test_a_label_outside_the_vocabulary_is_not_another_class(label):
    labels = np.where(np.arange(T) == 2, label, LABELS).astype(np.int32)
    loss = jax.jit(cross_entropy)(jnp.asarray(LOGITS), jnp.asarray(labels))
    assert np.isnan(float(loss.total))
    with pytest.raises((IndexError, RuntimeError), match=f"{label}"):
        reference.cross_entropy(torch.from_numpy(LOGITS), torch.from_numpy(labels))


def test_large_logits_stay_finite():
    loss = cross_entropy(jnp.array([[[1e4, -1e4, 0.0]]]), jnp.array([[1]]))
    assert float(loss.total) == pytest.approx(2e4)
