"""What may come next: the logits processors of `transformers`, one by one and together."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from jax_transformer.config import GenerationConfig
from jax_transformer.decoding.restrict import restrict
from jax_transformer.errors import InputError

V, MOST = 7, 8
"""Tokens, and the most that are generated."""

TOKENS = np.array(
    [[2, 1, 4, 1, 4, 1, 3, 6, 0], [2, 5, 5, 5, 5, 0, 5, 5, 5], [2, 3, 1, 2, 3, 1, 2, 3, 1]],
    np.int32,
)
"""A start token and eight more: repetitions of one token, two and three."""

RULES = {
    "nothing": ({}, []),
    "repetition_penalty": (
        {"repetition_penalty": 1.7},
        [theirs.RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "no sequence of 1": ({"no_repeat_ngram": 1}, [theirs.NoRepeatNGramLogitsProcessor(1)]),
    "no sequence of 2": ({"no_repeat_ngram": 2}, [theirs.NoRepeatNGramLogitsProcessor(2)]),
    "no sequence of 3": ({"no_repeat_ngram": 3}, [theirs.NoRepeatNGramLogitsProcessor(3)]),
    "no end so soon": (
        {"min_tokens": 3, "end_ids": (6, 0)},
        [theirs.MinNewTokensLengthLogitsProcessor(1, 3, [6, 0], device="cpu")],
    ),
    "the first": ({"first_id": 5}, [theirs.ForcedBOSTokenLogitsProcessor(5)]),
    "the last": (
        {"last_id": 6},
        [theirs.ForcedEOSTokenLogitsProcessor(MOST + 1, 6, device="cpu")],
    ),
    "never": (
        {"suppressed_ids": (1, 4)},
        [theirs.SuppressTokensLogitsProcessor([1, 4], device="cpu")],
    ),
    "not at first": (
        {"suppressed_first_ids": (1, 4)},
        [theirs.SuppressTokensAtBeginLogitsProcessor([1, 4], 1, device="cpu")],
    ),
    "not after the first": (
        {"suppressed_first_ids": (1, 4), "first_id": 5},
        [
            theirs.ForcedBOSTokenLogitsProcessor(5),
            theirs.SuppressTokensAtBeginLogitsProcessor([1, 4], 2, device="cpu"),
        ],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_the_same_may_come_as_in_transformers(name):
    settings, processors = RULES[name]
    changed = set()
    for length in range(1, MOST + 1):
        logits = np.random.default_rng(length).standard_normal((3, V)).astype(np.float32)
        found = restrict(
            jnp.asarray(logits),
            jnp.asarray(TOKENS),
            jnp.int32(length),
            GenerationConfig(start_id=2, **settings),
        )
        expected = theirs.LogitsProcessorList(processors)(
            torch.from_numpy(TOKENS[:, :length]).long(), torch.from_numpy(logits.copy())
        ).numpy()
        forced = np.isneginf(expected).sum(axis=1) == V - 1
        # A forced token has 0 there; it is the only one in either.
        expected[forced] = np.where(np.isneginf(expected), expected, logits)[forced]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        if not np.array_equal(expected, logits):
            changed.add(length)
    assert bool(changed) == (name != "nothing")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"end_ids": (1, -1)}, r"end_ids=\(1, -1\): must be whole, at least 0"),
        ({"start_id": 1.5}, "start_id=1.5: must be whole"),
        ({"pad_id": None}, "pad_id=None: must be whole"),
        ({"prompt": (3, 4), "end_ids": (4,)}, r"prompt=\(3, 4\): one of these ends a text"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be a number above 0"),
    ],
)
def test_values_out_of_range_are_refused(field, message):
    with pytest.raises(InputError, match=f"^{message}"):
        GenerationConfig(**field)


def test_tokens_that_a_model_lacks_are_refused_where_it_would_give_or_read_them():
    GenerationConfig(end_ids=(V,), suppressed_ids=(V,)).check_ids(V)
    for name in ("start_id", "pad_id", "first_id", "last_id"):
        with pytest.raises(InputError, match=f"^{name}=7: the model has the tokens 0 to 6"):
            GenerationConfig(**{name: V}).check_ids(V)
    with pytest.raises(InputError, match=r"^prompt=\(1, 7\): the model has the tokens 0 to 6"):
        GenerationConfig(prompt=(1, V)).check_ids(V)


def test_a_prompt_is_given_whatever_else_is_said_and_counts_as_no_text():
    rules = GenerationConfig(
        start_id=2, prompt=(1, 4), suppressed_ids=(1,), suppressed_first_ids=(3,), first_id=5,
        min_tokens=2, end_ids=(6,),
    )  # fmt: skip
    logits = jnp.zeros((3, V))
    never = [[0, 2, 3, 4, 5, 6], [0, 1, 2, 3, 5, 6], [1, 3, 6], [1, 6], [1], [1]]
    for length, missing in enumerate(never, 1):
        found = restrict(logits, jnp.asarray(TOKENS), jnp.int32(length), rules)
        for row in np.asarray(found):
            assert np.flatnonzero(np.isneginf(row)).tolist() == missing
