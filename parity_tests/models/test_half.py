"""Encoder-decoders of every option: positions, norms of embeddings and outputs, tables."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer import config as values
from jax_transformer.config import AudioConfig, EncoderDecoderConfig, LayerConfig, RotaryConfig
from jax_transformer.decoding import greedy_decode
from jax_transformer.decoding.cache import start_cache
from jax_transformer.errors import InputError
from jax_transformer.models import encoder_decoder, half
from jax_transformer.models.parameters import count_parameters, split
from parity_tests.harness import (
    QUICK,
    Case,
    carry,
    check_float32,
    check_float64,
    declare,
    make_skeleton,
    parameters_of,
    randomize,
    to_numpy,
)
from parity_tests.inputs import (
    SOURCE,
    SOURCE_MASK,
    SOURCE_POSITIONS,
    TARGET,
    TARGET_MASK,
    B,
    D,
    F,
    N,
    S,
    T,
    V,
    normal,
    padding,
)
from torch_reference.models import encoder_decoder as reference
from torch_reference.models import half as reference_half

MAX_LEN = 20
# Counted from the first real token; only a table has an end.
POSITIONS = [np.maximum(np.cumsum(padding(n), 1) - 1, 0).astype(np.int32) for n in (S, T)]
FAR = [SOURCE_POSITIONS, POSITIONS[1] + 4000]


def config(position, layer=None, **options):
    rotary = RotaryConfig(pairing="half") if position == "rotary" else None
    encoder, decoder = (
        LayerConfig(d_model=D, num_heads=N, d_ff=F, causal=causal, rotary=rotary, **(layer or {}))
        for causal in (False, True)
    )
    sizes = {"src_vocab_size": V, "tgt_vocab_size": V, "max_len": MAX_LEN}
    return EncoderDecoderConfig(
        encoder=encoder,
        decoder=decoder,
        num_encoder_layers=1,
        num_decoder_layers=1,
        position=position,
        **sizes | options,
    )


CONFIGS = {
    "BART": config(
        "learned",
        {"placement": "post"},
        position_offset=2,
        embedding_norm=True,
        final_norm=False,
        shared_embedding=True,
        tied=True,
    ),
    "Marian": config(
        "sinusoidal",
        {"placement": "post", "activation": "silu"},
        sinusoid_halves=True,
        embedding_scale=True,
        final_norm=False,
        shared_embedding=True,
        tied=True,
    ),
    "T5": config(
        "t5",
        {"norm": "rms", "qkv_bias": False, "attention_scale": 1.0, "num_kv_heads": 2},
        relative_buckets=6,
        relative_max_distance=5,
        shared_embedding=True,
        head_bias=False,
        final_dropout=True,
        logit_scale=0.5,
    ),
    "ALiBi": config("alibi", {"placement": "sandwich"}, embedding_scale=1.5, tied=True),
    "rotary": config("rotary", {"num_kv_heads": 1, "gated": True, "placement": "output"}),
    "none": config("none"),
    "Whisper": config(
        "learned",
        {"key_bias": False},
        src_vocab_size=None,
        audio=AudioConfig(num_mel_bins=5, max_len=S),
        tied=True,
        head_bias=False,
    ),
}

FRAMES = normal(B, 2 * S - 1, 5)


def source_of(name):
    return FRAMES if CONFIGS[name].audio else SOURCE


def whole_case(name):
    positions = POSITIONS if CONFIGS[name].position in ("learned", "sinusoidal") else FAR
    return Case(
        name=name,
        jax=encoder_decoder.EncoderDecoder,
        torch=reference.EncoderDecoder,
        arguments=(CONFIGS[name],),
        inputs={
            "src": source_of(name),
            "tgt": TARGET,
            "src_mask": SOURCE_MASK,
            "tgt_mask": TARGET_MASK,
            "src_positions": positions[0],
            "tgt_positions": positions[1],
        },
        place="",
    )


WHOLE = declare(*map(whole_case, CONFIGS))
HALVES = declare(
    Case(
        name="encoder",
        jax=encoder_decoder.Encoder,
        torch=reference.Encoder,
        arguments=(CONFIGS["ALiBi"],),
        inputs={"src": SOURCE, "src_mask": SOURCE_MASK, "positions": None},
        place="encoder",
    ),
    Case(
        name="decoder",
        jax=encoder_decoder.Decoder,
        torch=reference.Decoder,
        arguments=(CONFIGS["T5"],),
        inputs={
            "tgt": TARGET,
            "enc_output": normal(B, S, D),
            "src_mask": SOURCE_MASK,
            "tgt_mask": TARGET_MASK,
            "positions": None,
        },
        place="decoder",
    ),
)


@pytest.mark.parametrize("case", WHOLE + HALVES, ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("case", [WHOLE[0], WHOLE[2]], ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "quick")


def test_the_models_have_every_value_of_every_option():
    assert {config.position for config in CONFIGS.values()} == set(get_args(values.Position))
    sizes = {"src_vocab_size", "tgt_vocab_size", "max_len"}
    depths = {"num_encoder_layers", "num_decoder_layers"}
    for field in dataclasses.fields(EncoderDecoderConfig):
        found = {getattr(config, field.name) for config in CONFIGS.values()}
        assert len(found) > 1 or field.name in sizes | depths, field.name


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_both_frameworks_have_the_same_number_of_parameters(case):
    theirs = parameters_of(case.torch(*case.arguments))
    expected = sum(parameter.numel() for parameter in theirs.values())
    assert count_parameters(make_skeleton(case)) == expected


def test_helpers_say_the_same():
    for name, config in CONFIGS.items():
        scale = half.embedding_scale(config, D)
        assert scale == reference_half.embedding_scale(config, D)
        assert scale == {"Marian": 4.0, "ALiBi": 1.5}.get(name, 1.0)


@pytest.fixture(scope="module", params=[name for name in CONFIGS if name != "Marian"])
def pair(request):
    """A model of each kind in both frameworks, the same weights in float64."""
    (case,) = (case for case in WHOLE if case.name == request.param)
    theirs = case.torch(*case.arguments).eval()
    randomize(theirs)
    with jax.enable_x64(True):
        ours = carry(theirs, make_skeleton(case), "", jnp.float64)
    return theirs.double(), ours


def test_cached_is_uncached_at_every_position(pair):
    # Rows padded on neither side, on the right, on the left, and empty.
    _, ours = pair
    graphdef, params, buffers = split(ours)
    source, source_mask, target, target_mask = map(
        jnp.asarray, (FRAMES if ours.config.audio else SOURCE, SOURCE_MASK, TARGET, TARGET_MASK)
    )
    source_places, places = map(jnp.asarray, POSITIONS)

    def merged(params):
        return nnx.merge(graphdef, params, buffers)

    def start(params):
        model = merged(params)
        enc_output = model.encode(source, source_mask, source_places)
        whole = model.decoder(target, enc_output, source_mask, target_mask, places)
        return whole, start_cache(model.decoder, enc_output, T)

    def step(params, tokens, mask, at, cache):
        model = merged(params)
        return model.decoder.step(tokens, cache, source_mask, mask, at, places), cache

    step = jax.jit(step, compiler_options=QUICK)
    with jax.enable_x64(True):
        whole, cache = jax.jit(start, compiler_options=QUICK)(params)
        for i in range(T):
            at = slice(i, i + 1)
            out, cache = step(params, target[:, at], target_mask[:, :, at], places[:, at], cache)
            np.testing.assert_allclose(out, whole[:, at], rtol=0, atol=1e-12)


def test_greedy_decoding_with_a_cache_gives_the_tokens_without_one(pair):
    # As far as the table goes; without one there is no end.
    theirs, ours = pair
    has_table = ours.config.position in ("learned", "sinusoidal")
    length = MAX_LEN if has_table else MAX_LEN + 1
    source, mask = SOURCE, None
    if ours.config.audio:
        source, mask = FRAMES, SOURCE_MASK
    masks = None if mask is None else torch.from_numpy(mask)
    expected = theirs.greedy_decode(torch.from_numpy(source), length, src_mask=masks).numpy()
    with jax.enable_x64(True):
        masks = None if mask is None else jnp.asarray(mask)
        found = np.asarray(greedy_decode(ours, jnp.asarray(source), length, src_mask=masks))
    np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
    assert len(np.unique(expected)) > 3
    if has_table:
        with pytest.raises(InputError, match=f"decodes 1 to {MAX_LEN} tokens"):
            greedy_decode(ours, jnp.asarray(source), MAX_LEN + 1, src_mask=masks)


# (A convolution reads the padding beside a token.)
@pytest.mark.parametrize("pair", sorted(CONFIGS.keys() - {"Marian", "Whisper"}), indirect=True)
def test_a_padded_row_gives_the_logits_of_its_sentence_alone(pair):
    theirs, ours = pair
    real_source, real_target = padding(S)[2], padding(T)[2]
    length = int(real_target.sum())
    alone = (
        SOURCE[2:3, real_source],
        TARGET[2:3, real_target],
        np.ones((1, 1, 1, real_source.sum()), bool),
        np.tril(np.ones((1, 1, length, length), bool)),
    )
    batch = (SOURCE, TARGET, SOURCE_MASK, TARGET_MASK, *POSITIONS)
    with jax.enable_x64(True):
        run = jax.jit(lambda *inputs: ours(*inputs), compiler_options=QUICK)
        found, expected = (to_numpy(run(*inputs)) for inputs in (batch, alone))
    np.testing.assert_allclose(found[2:3, real_target], expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        found, expected = (
            theirs(*map(torch.from_numpy, inputs)).numpy() for inputs in (batch, alone)
        )
    np.testing.assert_allclose(found[2:3, real_target], expected, rtol=0, atol=1e-12)


def test_a_bias_between_positions_asks_for_those_of_the_cache():
    for name in ("T5", "ALiBi"):
        model = nnx.eval_shape(
            lambda name=name: encoder_decoder.Decoder(CONFIGS[name], rngs=nnx.Rngs(0))
        )
        with pytest.raises(TypeError, match="key_positions"):
            model.step(jnp.zeros((1, 1), int), [], None, None, jnp.zeros((1, 1), int))
