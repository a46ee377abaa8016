"""Each filter against that of `transformers`; draws against their probabilities."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as processors

from jax_transformer.decoding.sampling import (
    NO_TOKEN,
    Greedy,
    MinP,
    RepetitionPenalty,
    Sample,
    Temperature,
    TopK,
    TopP,
    first_highest,
    make_strategy,
)
from jax_transformer.errors import InputError
from parity_tests.inputs import normal

B, V = 4, 50
LOGITS = 3.0 * normal(B, V, seed=1).astype(np.float64)
PROMPT = np.array([[1, 2, 2], [3, 4, 5], [0, 49, 7], [8, 8, 8]])
ROWS = np.arange(B, dtype=np.int32)
POSITIONS = np.full(B, 3, np.int32)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def seen(tokens):
    marks = np.zeros((len(tokens), V), bool)
    np.put_along_axis(marks, tokens, True, axis=1)
    return marks


def ours(filters, logits, tokens=PROMPT):
    """As one compiled program, as in decoding."""

    def apply(logits, seen):
        for each in filters:
            logits = each(logits, seen)
        return logits

    return np.asarray(jax.jit(apply)(jnp.asarray(logits), jnp.asarray(seen(tokens))))


def theirs(filters, logits, tokens=PROMPT):
    logits = torch.from_numpy(np.array(logits))
    for each in filters:
        logits = each(torch.from_numpy(tokens), logits)
    return logits.numpy()


PAIRS = {
    "temperature": (Temperature(0.7), lambda: processors.TemperatureLogitsWarper(0.7)),
    "hot": (Temperature(1.9), lambda: processors.TemperatureLogitsWarper(1.9)),
    "top-1": (TopK(1), lambda: processors.TopKLogitsWarper(1)),
    "top-5": (TopK(5), lambda: processors.TopKLogitsWarper(5)),
    "top-V": (TopK(V), lambda: processors.TopKLogitsWarper(V)),
    "top-beyond-V": (TopK(V + 9), lambda: processors.TopKLogitsWarper(V + 9)),
    "top-p": (TopP(0.8), lambda: processors.TopPLogitsWarper(0.8)),
    "little-top-p": (TopP(0.01), lambda: processors.TopPLogitsWarper(0.01)),
    "much-top-p": (TopP(0.999), lambda: processors.TopPLogitsWarper(0.999)),
    "all-top-p": (TopP(1.0), lambda: processors.TopPLogitsWarper(1.0)),
    "min-p": (MinP(0.1), lambda: processors.MinPLogitsWarper(0.1)),
    "no-min-p": (MinP(0.0), lambda: processors.MinPLogitsWarper(0.0)),
    "all-min-p": (MinP(1.0), lambda: processors.MinPLogitsWarper(1.0)),
    "penalty": (RepetitionPenalty(1.3), lambda: processors.RepetitionPenaltyLogitsProcessor(1.3)),
    "reward": (RepetitionPenalty(0.6), lambda: processors.RepetitionPenaltyLogitsProcessor(0.6)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_filter_does_what_that_of_transformers_does(name):
    ours_, theirs_ = PAIRS[name]
    found, expected = ours([ours_], LOGITS), theirs([theirs_()], LOGITS)
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_all_filters_together_in_the_order_of_transformers():
    strategy = make_strategy(
        temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2
    )
    expected = theirs(
        [
            processors.RepetitionPenaltyLogitsProcessor(1.2),
            processors.TemperatureLogitsWarper(0.9),
            processors.TopKLogitsWarper(20),
            processors.TopPLogitsWarper(0.9),
            processors.MinPLogitsWarper(0.02),
        ],
        LOGITS,
    )
    found = ours(strategy.filters, LOGITS)
    assert 0 < np.isfinite(found).sum() < 20 * B
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_the_penalty_counts_tokens_once_however_often_and_leaves_forbidden_ones():
    logits = np.array([[2.0, -2.0, 0.0, -np.inf, 2.0]])
    tokens = np.array([[0, 0, 1, 2, 3]])
    marks = np.zeros((1, 5), bool)
    marks[0, tokens] = True
    found = RepetitionPenalty(2.0)(jnp.asarray(logits), jnp.asarray(marks))
    np.testing.assert_array_equal(found, [[1.0, -4.0, 0.0, -np.inf, 2.0]])


@pytest.mark.parametrize("each", [TopK(2), TopP(0.5), MinP(1.0)], ids=repr)
def test_tokens_as_likely_as_the_last_kept_one_are_kept(each):
    logits = np.log([[0.1, 0.4, 0.1, 0.4], [0.4, 0.2, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]])
    kept = np.isfinite(np.asarray(each(jnp.asarray(logits), None)))
    expected = {
        "TopK(k=2)": [[0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
        "TopP(p=0.5)": [[0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
        "MinP(p=1.0)": [[0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]],
    }[repr(each)]
    np.testing.assert_array_equal(kept, np.array(expected, bool))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0: .* leave the temperature out"),
        ({"temperature": -1.0}, r"temperature=-1\.0: must be above 0"),
        ({"temperature": float("nan")}, r"temperature=nan: must be above 0"),
        ({"temperature": float("inf")}, r"temperature=inf: must be above 0"),
        ({"top_k": 0}, r"top_k=0: must be at least 1"),
        ({"top_p": 0.0}, r"top_p=0\.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p=1\.5: must be above 0 and at most 1"),
        ({"top_p": float("nan")}, r"top_p=nan: must be above 0"),
        ({"min_p": -0.1}, r"min_p=-0\.1: must be from 0"),
        ({"min_p": 1.1}, r"min_p=1\.1: must be from 0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0: must be above 0"),
        ({"repetition_penalty": float("nan")}, r"repetition_penalty=nan: must be above 0"),
        ({"seed": -1}, r"seed=-1: must be a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, r"seed=4294967296: must be a whole number"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message):
    with pytest.raises(InputError, match=f"^{message}"):
        make_strategy(**options)


def test_it_is_greedy_unless_a_setting_asks_for_a_draw():
    assert make_strategy() == Greedy()
    assert make_strategy(repetition_penalty=1.1) == Greedy(filters=(RepetitionPenalty(1.1),))
    drawn: list[dict[str, Any]] = [
        {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}
    ]  # fmt: skip
    for options in drawn:
        assert isinstance(make_strategy(**options), Sample)
    assert make_strategy(seed=7) == Sample(seed=7)
    # A part of the compiled program.
    assert hash(make_strategy(top_k=5, top_p=0.9)) == hash(make_strategy(top_p=0.9, top_k=5))


def choose(strategy, logits, rows=ROWS, positions=POSITIONS):
    marks = jnp.zeros(logits.shape, bool)
    return np.asarray(
        strategy(
            jnp.asarray(logits),
            marks,
            jnp.asarray(rows[: len(logits)], jnp.int32),
            jnp.asarray(positions[: len(logits)], jnp.int32),
        )
    )


def test_greedy_takes_the_highest_logit_and_of_equal_ones_the_lowest_id():
    logits = np.array([[1.0, 3.0, 3.0], [3.0, 1.0, 3.0], [-np.inf, -1.0, -np.inf]])
    np.testing.assert_array_equal(choose(Greedy(), logits), [1, 0, 1])
    np.testing.assert_array_equal(choose(Greedy(), LOGITS), LOGITS.argmax(axis=1))


@pytest.mark.parametrize(
    "strategy",
    [
        Greedy(),
        make_strategy(temperature=0.5, seed=1),
        make_strategy(top_k=2, top_p=0.9, min_p=0.05, repetition_penalty=1.1),
        make_strategy(top_p=0.5),
        make_strategy(top_k=1),
        make_strategy(min_p=0.5),
    ],
    ids=repr,
)
def test_nan_is_never_chosen_unnoticed(strategy):
    logits = np.array([[0.0, np.nan, 1.0], [0.0, 1.0, 2.0], [-np.inf] * 3, [np.nan] * 3])
    chosen = choose(strategy, logits)
    np.testing.assert_array_equal(chosen[[0, 2, 3]], NO_TOKEN)
    assert chosen[1] in (0, 1, 2)


def test_draws_have_the_probabilities_of_the_filtered_logits():
    # 20,000 draws: the standard error of a frequency is at most 0.0035.
    count, probabilities = 20_000, np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.broadcast_to(np.log(probabilities), (count, 4))
    rows, positions = np.arange(count), np.arange(count) % 7
    drawn = choose(Sample(seed=3), logits, rows, positions)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / count, probabilities, atol=0.014)
    drawn = choose(make_strategy(top_k=2, seed=3), logits, rows, positions)
    frequencies = np.bincount(drawn, minlength=4) / count
    np.testing.assert_allclose(frequencies, [0.625, 0.375, 0, 0], atol=0.014)


def test_a_draw_depends_on_seed_row_and_position_and_not_on_the_batch():
    logits = np.zeros((64, V))
    rows, positions = np.arange(64), np.arange(64) % 5
    drawn = choose(Sample(seed=1), logits, rows, positions)
    for place in (0, 17, 63):
        alone = choose(Sample(seed=1), logits[:1], rows[place:], positions[place:])
        assert alone[0] == drawn[place]
    for other in (
        choose(Sample(seed=2), logits, rows, positions),
        choose(Sample(seed=1), logits, rows + 1, positions),
        choose(Sample(seed=1), logits, rows, positions + 1),
    ):
        assert (other != drawn).mean() > 0.8


def test_draws_are_the_same_in_any_precision():
    draws = []
    for dtype in (np.float32, np.float64):
        logits = np.zeros((64, V), dtype)
        draws.append(choose(Sample(seed=5), logits, np.arange(64), np.arange(64)))
    np.testing.assert_array_equal(*draws)


def test_the_first_of_the_highest_is_that_of_numpy():
    rows = np.random.default_rng(0).integers(-3, 4, (50, 9)).astype(np.float32)
    rows[3] = -np.inf
    rows[4, 5] = np.inf
    rows[5, 2:4] = np.nan
    found = jax.jit(first_highest)(jnp.asarray(rows))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, rows.argmax(axis=-1))
