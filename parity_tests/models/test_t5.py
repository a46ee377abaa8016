"""T5 by configuration, both variants: the logits and the greedy tokens of `transformers`."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.t5 import modeling_t5

from jax_transformer.config import EncoderDecoderConfig, LayerConfig
from jax_transformer.decoding import greedy_decode
from jax_transformer.models import encoder_decoder
from jax_transformer.verification.oracle import WideTorch
from parity_tests.harness import QUICK, carry, to_numpy
from parity_tests.models import third_party
from torch_reference.models import encoder_decoder as reference

L, D, N, H, F, V = 2, 16, 4, 6, 24, 29
B, S, T = 3, 30, 25
BUCKETS = {"relative_buckets": 8, "relative_max_distance": 20}
START, END = 0, 1

# Sources of all lengths, targets padded on the right; distances beyond the last bucket.
SOURCE = np.random.default_rng(0).integers(2, V, (B, S)).astype(np.int32)
TARGET = np.random.default_rng(1).integers(2, V, (B, T)).astype(np.int32)
SOURCE_REAL = np.arange(S) < np.array([S, 11, 1])[:, None]
TARGET_REAL = np.arange(T) < np.array([T, 9, T])[:, None]
MASKS = (
    SOURCE_REAL[:, None, None, :],
    TARGET_REAL[:, None, None, :] & np.tril(np.ones((T, T), bool)),
)


def config(version):
    """Raffel et al. 2020: ReLU, one table for all and scaled logits; v1.1: gated, a head of its
    own."""
    encoder, decoder = (
        LayerConfig(
            d_model=D,
            num_heads=N,
            head_dim=H,
            d_ff=F,
            norm="rms",
            norm_epsilon=1e-6,
            qkv_bias=False,
            out_bias=False,
            attention_scale=1.0,
            activation="relu" if version == "1.0" else "gelu_tanh",
            gated=version == "1.1",
            ffn_bias=False,
            dropout=0.1,
            causal=causal,
        )
        for causal in (False, True)
    )
    return EncoderDecoderConfig(
        src_vocab_size=V,
        tgt_vocab_size=V,
        encoder=encoder,
        decoder=decoder,
        num_encoder_layers=L,
        num_decoder_layers=L,
        position="t5",
        **BUCKETS,
        final_dropout=True,
        shared_embedding=True,
        tied=version == "1.0",
        head_bias=False,
        logit_scale=D**-0.5 if version == "1.0" else 1.0,
    )


def their_config(version):
    return transformers.T5Config(
        vocab_size=V,
        d_model=D,
        d_kv=H,
        d_ff=F,
        num_layers=L,
        num_decoder_layers=L,
        num_heads=N,
        relative_attention_num_buckets=BUCKETS["relative_buckets"],
        relative_attention_max_distance=BUCKETS["relative_max_distance"],
        feed_forward_proj="relu" if version == "1.0" else "gated-gelu",
        tie_word_embeddings=version == "1.0",
        decoder_start_token_id=START,
        eos_token_id=END,
        pad_token_id=0,
        layer_norm_epsilon=1e-6,
    )


def names():
    """Ours and theirs of every module."""
    yield "decoder.embedding", "shared"
    yield "output_proj", "lm_head"
    for half, sublayers in (("encoder", 2), ("decoder", 3)):
        bias = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias"
        yield f"{half}.position_bias.relative_attention_bias", bias
        yield f"{half}.norm", f"{half}.final_layer_norm"
        here, there = f"{half}.layers.{{}}", f"{half}.block.{{}}.layer"
        for ours, theirs in zip("qkv", "qkv", strict=True):
            yield f"{here}.self_attn.{ours}_proj", f"{there}.0.SelfAttention.{theirs}"
            yield f"{here}.cross_attn.{ours}_proj", f"{there}.1.EncDecAttention.{theirs}"
        yield f"{here}.self_attn.out_proj", f"{there}.0.SelfAttention.o"
        yield f"{here}.cross_attn.out_proj", f"{there}.1.EncDecAttention.o"
        for ours, theirs in (
            ("linear1", "wi"),
            ("linear2", "wo"),
            ("gate_proj", "wi_0"),
            ("up_proj", "wi_1"),
            ("down_proj", "wo"),
        ):
            yield f"{here}.ffn.{ours}", f"{there}.{sublayers - 1}.DenseReluDense.{theirs}"
        for sublayer in range(sublayers):
            yield f"{here}.norm{sublayer + 1}", f"{there}.{sublayer}.layer_norm"


def build(config):
    """Theirs; it ties the head of v1.1, too, before a checkpoint is loaded."""
    model = transformers.T5ForConditionalGeneration(config)
    if not config.scale_decoder_outputs:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(V, D))
    return model


def float64():
    return mock.patch.object(modeling_t5, "torch", WideTorch())


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def models(request):
    """Theirs, ours in PyTorch, ours in JAX: the same weights in float64."""
    version = request.param
    with float64():
        theirs = third_party.make_model(build, their_config(version))
    weights = dict(theirs.named_parameters())
    model = reference.EncoderDecoder(config(version)).double().eval()
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for here, there in names():
            for layer in range(L if "{}" in here else 1):
                name = f"{here.format(layer)}.weight"
                if name in ours and f"{there.format(layer)}.weight" in weights:
                    ours.pop(name).copy_(weights.pop(f"{there.format(layer)}.weight"))
    # `encoder.embedding` is the first name of the shared table.
    with torch.no_grad():
        model.encoder.embedding.weight.copy_(theirs.shared.weight)
    left = set(ours) - {"encoder.embedding.weight"}, set(weights) - {"shared.weight"}
    assert left == (set(), set())
    with jax.enable_x64(True):
        skeleton = nnx.eval_shape(
            lambda: encoder_decoder.EncoderDecoder(config(version), rngs=nnx.Rngs(0))
        )
        return theirs, model, carry(model, skeleton, "", jnp.float64)


def test_both_frameworks_give_the_logits_of_transformers(models):
    theirs, in_torch, in_jax = models
    with float64(), third_party.float64(), torch.no_grad():
        expected = theirs(
            input_ids=torch.from_numpy(SOURCE),
            attention_mask=torch.from_numpy(SOURCE_REAL).long(),
            decoder_input_ids=torch.from_numpy(TARGET),
            decoder_attention_mask=torch.from_numpy(TARGET_REAL).long(),
        ).logits.numpy()
    assert 0.3 < expected.std() < 10
    inputs = (SOURCE, TARGET, *MASKS)
    with torch.no_grad():
        found = in_torch(*map(torch.from_numpy, inputs)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    with jax.enable_x64(True):
        run = jax.jit(lambda *inputs: in_jax(*inputs), compiler_options=QUICK)
        np.testing.assert_allclose(to_numpy(run(*inputs)), expected, rtol=0, atol=1e-10)


def test_greedy_decoding_with_a_cache_gives_the_tokens_of_transformers(models):
    # Longer than the first cache: each slot's bias is that of its position.
    theirs, in_torch, in_jax = models
    length = 70
    with float64(), third_party.float64(), torch.no_grad():
        expected = theirs.generate(
            input_ids=torch.from_numpy(SOURCE).long(),
            attention_mask=torch.from_numpy(SOURCE_REAL).long(),
            max_new_tokens=length,
            do_sample=False,
            num_beams=1,
        ).numpy()
    uncached = in_torch.greedy_decode(
        torch.from_numpy(SOURCE), length, START, END, torch.from_numpy(MASKS[0])
    ).numpy()
    with jax.enable_x64(True):
        found = np.asarray(
            greedy_decode(in_jax, jnp.asarray(SOURCE), length, START, END, jnp.asarray(MASKS[0]))
        )
    assert len(np.unique(expected)) > 5
    np.testing.assert_array_equal(uncached, expected)
    np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
    np.testing.assert_array_equal(found[:, expected.shape[1] :], 0)
