"""Ways of decoding: ties are told from faults; what is fed to them is what it has to be.

The causes of the catalogue are planted in `planted_faults.decoding_faults`."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.config import GenerationConfig
from jax_transformer.decoding import program
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.decoding.greedy import greedy_decode
from jax_transformer.decoding.prompts import prompt_batches
from jax_transformer.models.parameters import split
from jax_transformer.verification.decoding.compare import Choice, first_differences
from jax_transformer.verification.decoding.task import Decoding, Layout, most_likely
from jax_transformer.verification.decoding.ways import (
    CACHED,
    REFERENCE,
    UNCACHED,
    beginning_with,
    cached,
)
from jax_transformer.verification.inputs import revealing_prompts
from jax_transformer.verification.pairs import verify_pair
from parity_tests.harness import unchecked
from parity_tests.planted_faults import plant
from parity_tests.planted_faults.decoding_faults import ours
from parity_tests.planted_faults.models import CONFIGS, PROMPTS, decoded

TASK = Decoding(prompts=((7,), (4, 5, 6)), count=3, ours={}, theirs={})
TOKENS = np.array([[1, 2, 3], [8, 9, 1]], np.int32)


def check(pair, dtype=None):
    with unchecked():
        return verify_pair(pair, dtype=dtype, most=1)


def test_prompts_are_padded_on_the_left_and_padding_is_not_counted():
    layout = Layout.of(TASK, TOKENS)
    assert layout.tokens.tolist() == [[0, 0, 7, 1, 2], [4, 5, 6, 8, 9]]
    assert layout.positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert layout.seen[0, 0].astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert layout.seen[1, 0].tolist() == np.tril(np.ones((5, 5), bool)).tolist()
    assert (layout.width, layout.padding.tolist()) == (3, [[2], [0]])


def test_all_ways_of_a_correct_pair_agree():
    report = check(decoded("llama"), "float32")
    assert report.same
    assert report.verdict.endswith(", the same 18 tokens decoded, with cache and without")
    assert [way.name for way in report.decoding.ways] == [REFERENCE, CACHED, UNCACHED]
    assert all(way.error < 1e-14 and way.agreement == 1 for way in report.decoding.ways)
    assert all(way.tokens == report.decoding.ways[0].tokens for way in report.decoding.ways)


def test_the_cached_way_chooses_what_the_generator_chooses():
    pair = decoded("llama")
    with unchecked():
        found = most_likely(cached(pair.ours, pair.decoding, None))
        config = CONFIGS["llama"]
        generator = TextGenerator(*split(pair.ours), config, codec=None, rules=GenerationConfig())
        (batch,) = prompt_batches(PROMPTS, 4)
        tokens = np.stack(list(generator.tokens(batch, pair.decoding.count)), axis=1)
    np.testing.assert_array_equal(found, tokens[batch.rows[batch.lengths > 0]])


def test_the_cached_way_chooses_what_greedy_decoding_chooses():
    pair = decoded("document")
    source = pair.decoding.source
    with unchecked():
        found = most_likely(cached(pair.ours, pair.decoding, None))
        tokens = greedy_decode(
            pair.ours,
            jnp.asarray(source.tokens),
            max_len=pair.decoding.count,
            eos_idx=99,
            src_mask=jnp.asarray(source.mask),
        )
    np.testing.assert_array_equal(found, np.asarray(tokens)[:, 1:])


def logits(*rows):
    """One token after each of several prompts."""
    return np.array(rows, np.float64)[:, None]


def test_a_tie_is_a_contradiction_that_the_errors_of_both_sides_explain():
    wide = logits([3.0, 3.01, 0.0], [1.0, 0.0, 0.0])
    theirs = logits([3.02, 3.0, 0.0], [1.0, 0.0, 0.0])
    mine = logits([3.0, 3.02, 0.0], [1.0, 0.0, 0.0])
    (choice,) = first_differences((theirs, wide), (mine, wide))
    assert (choice.row, choice.step, choice.tokens) == (1, 1, (1, 0))
    assert choice.margins == pytest.approx((0.02, 0.02))
    assert choice.gap == pytest.approx(0.04)
    assert choice.error == pytest.approx(0.04)  # 0.01 and 0.00 here, 0.02 and 0.01 there
    assert choice.tie
    # The same choices, more exactly made: no rounding explains both.
    (choice,) = first_differences((theirs, theirs + 0.001), (mine, mine - 0.001))
    assert choice.error == pytest.approx(0.004)
    assert not choice.tie
    assert first_differences((theirs, wide), (theirs, wide)) == ()


def test_a_gap_that_is_just_the_error_is_a_tie():
    assert Choice(1, 1, (0, 1), (0.0, 0.0), 1e-3, 1e-3).tie
    assert not Choice(1, 1, (0, 1), (0.0, 0.0), 1e-3, 0.999e-3).tie


def test_ties_in_bfloat16_are_no_fault():
    """Of 144 tokens some are nearly as likely as another."""
    pair = decoded("gpt2, untied")
    longer = dataclasses.replace(pair.decoding, count=48)
    report = check(dataclasses.replace(pair, decoding=longer), "bfloat16")
    differences = [each for way in report.decoding.ways for each in way.differences]
    assert differences
    assert all(each.tie and each.error > 1e-3 for each in differences)
    assert all(way.error < 1e-13 for way in report.decoding.ways)
    assert report.same
    assert "but for" in report.verdict


def test_a_fault_that_chooses_the_same_tokens_is_one():
    pair = decoded("gpt2")
    original = program.read_token

    def off(model, state):
        state, logits = original(model, state)
        return state, logits * (1 + 1e-9)

    report = check(ours((program, "read_token", off))(pair))
    way = next(way for way in report.decoding.ways if way.name == CACHED)
    assert way.agreement == 1
    assert not report.same
    assert report.decoding.diagnoses[0].kinds == ()
    assert report.decoding.diagnoses[0].point == "token 2 after prompt 1"


def test_models_that_differ_are_not_explained_by_their_decoding():
    fault = plant.setting("layers.0.ffn", activation="gelu")
    report = check(fault(decoded("llama")))
    assert [each.module for each in report.causes] == ["layers.0.ffn"]
    assert report.decoding.diagnoses == ()
    assert not report.decoding.same


def test_another_start_token_of_the_reference():
    pair = decoded("document")
    way = beginning_with(3, pair.decoding.theirs[REFERENCE])
    decoding = dataclasses.replace(pair.decoding, theirs={REFERENCE: way})
    report = check(dataclasses.replace(pair, decoding=decoding))
    assert report.verdict == (
        "different: `reference`: agrees when the start token is 3, not 2: read "
        "decoder_start_token_id, or bos_token_id, of the reference's config"
    )


def test_prompts_stay_where_a_cache_gives_what_the_model_gives():
    prompts, count = revealing_prompts(CONFIGS["llama"])
    assert max(map(len, prompts)) + count <= 64
    assert len({len(prompt) for prompt in prompts}) == 3
    prompts, count = revealing_prompts(CONFIGS["llama, dynamic"])
    assert max(map(len, prompts)) + count <= 16
