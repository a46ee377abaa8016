import numpy as np
import pytest

from jax_transformer.decoding.prompts import bucket, check_prompts, prompt_batches
from jax_transformer.errors import InputError


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 16), (5, 16), (7, 16), (16, 16), (17, 32), (32, 32), (33, 64), (1000, 1024)],
)
def test_prompts_are_padded_to_a_few_lengths(length, expected):
    assert bucket(length) == expected


def test_each_prompt_ends_in_the_last_column_and_knows_its_place():
    prompts = [[5, 6], list(range(1, 18)), [7], [8, 9, 10]]
    batches = prompt_batches(prompts, 8)
    assert [batch.tokens.shape for batch in batches] == [(4, 16), (1, 32)]
    for batch in batches:
        for row, length, place in zip(batch.tokens, batch.lengths, batch.rows, strict=True):
            if length:
                assert row[-length:].tolist() == prompts[place]
            np.testing.assert_array_equal(row[: len(row) - length], 0)
    # The last row of the first fills it up to a power of two.
    np.testing.assert_array_equal(batches[0].lengths, [2, 1, 3, 0])
    np.testing.assert_array_equal(batches[0].rows[:3], [0, 2, 3])


@pytest.mark.parametrize(
    ("count", "most", "heights"),
    [(1, 16, [1]), (5, 16, [8]), (16, 16, [16]), (19, 16, [16, 4]), (5, 3, [3, 2]), (6, 5, [5, 1])],
)
def test_batches_have_few_heights(count, most, heights):
    batches = prompt_batches([[1]] * count, most)
    assert [len(batch.tokens) for batch in batches] == heights
    places = np.concatenate([batch.rows[batch.lengths > 0] for batch in batches])
    np.testing.assert_array_equal(places, np.arange(count))


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([[1]], 0, r"max_tokens=0: must be at least 1"),
        ([[1], []], 5, r"prompt 2 has no token: give at least one character"),
        ([[1], [2, 9]], 5, r"prompt 2, token 2 is 9: must be a whole number from 0 to 8"),
        ([[-1]], 5, r"prompt 1, token 1 is -1: must be a whole number from 0 to 8"),
        ([[0.5]], 5, r"prompt 1, token 1 is 0\.5: must be a whole number"),
        ([[True]], 5, r"prompt 1, token 1 is True: must be a whole number"),
        ([[1] * 8], 3, r"prompt 1 has 8 tokens, with max_tokens=3 more than the 10 of the model: "
                       r"shorten it, or generate at most 2$"),
        ([[1] * 10], 1, r"prompt 1 has 10 tokens, .*: shorten it$"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_continued_are_refused(prompts, max_tokens, message):
    with pytest.raises(InputError, match=f"^{message}"):
        check_prompts(prompts, vocab_size=9, max_tokens=max_tokens, max_len=10)


def test_a_prompt_may_fill_the_model():
    check_prompts([[0, np.int32(8)] * 4], vocab_size=9, max_tokens=2, max_len=10)
