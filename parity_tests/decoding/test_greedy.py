"""Greedy decoding: token for token what the uncached reference gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.config import BOS_ID, OWN_RULES, PAD_ID, ModelConfig
from jax_transformer.decoding import greedy
from jax_transformer.decoding.greedy import greedy_decode
from jax_transformer.errors import InputError
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import split
from parity_tests.harness import QUICK, make_pair, to_numpy
from parity_tests.inputs import SOURCE, SOURCE_MASK, B, D, F, N, V

NEVER = V + 1
"""An end token that no model chooses."""

LENGTH = 40
"""Tokens to decode: within the first cache, so that one loop is compiled."""


def config(**options):
    return ModelConfig(
        src_vocab_size=V,
        tgt_vocab_size=V,
        d_model=D,
        num_heads=N,
        d_ff=F,
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_len=200,
        **options,
    )


# With seeds of weights under which the models say many different things.
CONFIGS = {
    "post": (config(position_encoding="learned"), 3),
    "pre": (config(norm_placement="pre", tied_tables="decoder"), 5),
}

END = 4
"""A token that rows 0, 1 and 2 of the "post" model choose first after so many steps:"""
STEPS = (8, 2, 5)


@pytest.fixture(autouse=True)
def float64():
    """In which two logits that differ never tie."""
    with jax.enable_x64(True):
        yield


quick_decode = jax.jit(
    greedy.decode.__wrapped__,
    static_argnames=("graphdef", "max_len", "rules"),
    compiler_options=QUICK,
)


@pytest.fixture
def quick(monkeypatch):
    """Decoding, compiled in a third of the time."""
    monkeypatch.setattr(greedy, "decode", quick_decode)


@functools.cache
def models(name):
    config, seed = CONFIGS[name]
    return make_pair(config, jnp.float64, seed)


def ours(name, source, max_len, mask=None, **options):
    _, model = models(name)
    mask = None if mask is None else jnp.asarray(mask)
    return to_numpy(greedy_decode(model, jnp.asarray(source), max_len, src_mask=mask, **options))


def theirs(name, source, max_len, mask=None, **options):
    """As long as `ours`: the reference stops with the last row, and what follows is padding."""
    reference, _ = models(name)
    mask = None if mask is None else torch.from_numpy(mask)
    decoded = reference.greedy_decode(
        torch.from_numpy(source), max_len, src_mask=mask, **options
    ).numpy()
    rest = np.full((len(source), 1 + max_len - decoded.shape[1]), PAD_ID)
    return np.concatenate([decoded, rest], axis=1)


@pytest.mark.usefixtures("quick")
def test_the_reference_never_decides_by_rounding():
    # What makes "token for token" a fair demand: no two best logits within the tolerance.
    reference, _ = models("post")
    tokens = torch.from_numpy(ours("post", SOURCE, LENGTH, SOURCE_MASK, eos_idx=NEVER)[:3])
    with torch.no_grad():
        causal = torch.tril(torch.ones(1, 1, LENGTH + 1, LENGTH + 1, dtype=torch.bool))
        mask = torch.from_numpy(SOURCE_MASK[:3])
        best = reference(torch.from_numpy(SOURCE[:3]), tokens, mask, causal).topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > 1e-6
    assert len(tokens.unique()) > 8, "the model says the same all the time"
    # Padding ids among them: what the model itself says is no padding to it.
    assert (tokens == PAD_ID).any()


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_those_of_the_reference(name):
    found = ours(name, SOURCE, LENGTH, SOURCE_MASK)
    np.testing.assert_array_equal(found, theirs(name, SOURCE, LENGTH, SOURCE_MASK))
    assert found.dtype == np.int32
    assert found.shape == (B, LENGTH + 1)
    np.testing.assert_array_equal(found[:, 0], BOS_ID)


@pytest.mark.usefixtures("quick")
def test_by_default_the_mask_is_that_of_the_padding_id():
    source = np.where(SOURCE_MASK[:, 0, 0], np.maximum(SOURCE, 1), PAD_ID).astype(np.int32)
    found = ours("post", source, LENGTH)
    np.testing.assert_array_equal(found, ours("post", source, LENGTH, SOURCE_MASK))
    np.testing.assert_array_equal(found, theirs("post", source, LENGTH))


@pytest.mark.usefixtures("quick")
def test_a_cache_that_grew_twice_decodes_like_the_reference():
    assert len(greedy.segment_sizes(200)) == 3
    found = ours("post", SOURCE, 200, SOURCE_MASK, eos_idx=NEVER)
    np.testing.assert_array_equal(found, theirs("post", SOURCE, 200, SOURCE_MASK, eos_idx=NEVER))


@pytest.mark.parametrize(
    ("max_len", "sizes"), [(1, [1]), (64, [64]), (65, [64, 65]), (300, [64, 128, 256, 300])]
)
def test_cache_sizes_double_up_to_the_length(max_len, sizes):
    assert greedy.segment_sizes(max_len) == sizes


@pytest.mark.usefixtures("quick")
def test_an_ended_row_stays_ended_with_padding_after_its_end():
    endless = ours("post", SOURCE, LENGTH, SOURCE_MASK, eos_idx=NEVER)
    decoded = ours("post", SOURCE, LENGTH, SOURCE_MASK, eos_idx=END)
    for row, raw, end in zip(decoded[:3], endless[:3], STEPS, strict=True):
        # The end token is there, and that the others go on changes nothing.
        assert list(raw).index(END) == end
        np.testing.assert_array_equal(row[: end + 1], raw[: end + 1])
        np.testing.assert_array_equal(row[end + 1 :], PAD_ID)
    np.testing.assert_array_equal(decoded, theirs("post", SOURCE, LENGTH, SOURCE_MASK, eos_idx=END))


@pytest.mark.usefixtures("quick")
def test_a_row_without_a_source_ends_at_once():
    decoded = ours("post", SOURCE, LENGTH, SOURCE_MASK)
    np.testing.assert_array_equal(decoded[3], [BOS_ID] + [PAD_ID] * LENGTH)


@pytest.mark.usefixtures("quick")
def test_decoding_stops_when_all_rows_have_ended(monkeypatch):
    steps = []
    project = Transformer.project

    def counted(self, dec_output):
        jax.debug.callback(lambda: steps.append(1))
        return project(self, dec_output)

    monkeypatch.setattr(Transformer, "project", counted)
    # A length that nothing else here is compiled for.
    ours("post", SOURCE, LENGTH - 1, SOURCE_MASK, eos_idx=END)
    jax.effects_barrier()
    assert len(steps) == max(STEPS)


@pytest.mark.usefixtures("quick")
def test_a_ragged_batch_gives_what_its_rows_give_alone():
    row = 1
    length = int(SOURCE_MASK[row].sum())
    alone = SOURCE[row : row + 1, :length]
    found = ours("post", alone, LENGTH, np.ones((1, 1, 1, length), bool), eos_idx=NEVER)
    batch = ours("post", SOURCE, LENGTH, SOURCE_MASK, eos_idx=NEVER)
    np.testing.assert_array_equal(found[0], batch[row])


@pytest.mark.usefixtures("quick")
def test_of_equal_logits_the_lowest_id_wins():
    reference, model = make_pair(CONFIGS["post"][0], jnp.float64)
    bias = np.zeros(V)
    bias[[5, 7, 9]] = 3.0
    model.output_proj.kernel[...] = jnp.zeros_like(model.output_proj.kernel[...])
    model.output_proj.bias[...] = jnp.asarray(bias)
    with torch.no_grad():
        reference.output_proj.weight.zero_()
        reference.output_proj.bias.copy_(torch.from_numpy(bias))
    source = np.full((1, 3), 4, np.int32)
    expected = [[BOS_ID, 5, 5, 5]]
    np.testing.assert_array_equal(greedy_decode(model, jnp.asarray(source), 3), expected)
    decoded = reference.greedy_decode(torch.from_numpy(source), 3)
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("max_len", [0, -1, 201])
def test_more_tokens_than_positions_are_refused_before_anything_runs(max_len, monkeypatch):
    monkeypatch.setattr(greedy, "decode", None)
    with pytest.raises(InputError, match=f"max_len={max_len}: .* 1 to 200 tokens"):
        ours("post", SOURCE, max_len, SOURCE_MASK)


@pytest.mark.usefixtures("quick")
def test_as_many_tokens_as_positions_are_decoded():
    assert ours("post", SOURCE, 200, SOURCE_MASK, eos_idx=NEVER).shape == (B, 201)


def test_a_source_longer_than_the_position_table_is_refused():
    source = np.full((1, 201), 4, np.int32)
    with pytest.raises(InputError, match="201 tokens is longer than the position table of 200"):
        ours("post", source, 5)
    with pytest.raises(InputError, match="201 tokens is longer than the position table of 200"):
        theirs("post", source, 5)


def test_a_second_call_of_the_same_shapes_compiles_nothing():
    _, model = models("post")
    graphdef, params, buffers = split(model)
    ours("post", SOURCE, LENGTH, SOURCE_MASK)
    compiled = greedy.decode._cache_size()
    ours("post", (SOURCE + 1) % V, LENGTH, np.roll(SOURCE_MASK, 1, axis=0))
    other = jax.tree.map(lambda leaf: leaf * 0.5, params)
    greedy.decode(
        graphdef,
        other,
        buffers,
        jnp.asarray(SOURCE),
        jnp.asarray(SOURCE_MASK),
        max_len=LENGTH,
        rules=OWN_RULES,
    )
    assert greedy.decode._cache_size() == compiled
