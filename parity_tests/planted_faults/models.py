"""Tiny models of many configurations, each a correct pair on inputs under which faults show."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.config import (
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    LayerConfig,
    ModelConfig,
    RotaryConfig,
)
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.encoder_decoder import EncoderDecoder, Transformer
from jax_transformer.verification.decoding.task import Decoding, Source
from jax_transformer.verification.decoding.ways import OURS, REFERENCE, row_by_row
from jax_transformer.verification.face import carrier
from jax_transformer.verification.inputs import Batch, next_tokens
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.pairs import parameters
from jax_transformer.verification.reference import names_of_modules, plan_of
from jax_transformer.verification.training.recipe import Training
from parity_tests.harness import carry, randomize
from torch_reference.models import decoder_only as reference_decoder_only
from torch_reference.models import encoder_decoder as reference_encoder_decoder

D, V, B, T, MAX_LEN = 24, 31, 3, 9, 64

REAL = np.ones((B, T), bool)
REAL[1, 6:] = False
REAL[2, :4] = False

PLAIN = LayerConfig(
    d_model=D, num_heads=6, d_ff=40, causal=True, placement="pre", activation="gelu_tanh"
)
LLAMA = LayerConfig(
    d_model=D,
    num_heads=6,
    num_kv_heads=2,
    d_ff=40,
    norm="rms",
    norm_epsilon=1e-6,
    causal=True,
    gated=True,
    activation="silu",
    qkv_bias=False,
    out_bias=False,
    ffn_bias=False,
    rotary=RotaryConfig(),
)


def decoder_only(
    layer: LayerConfig, position: Any, max_len: int = MAX_LEN, **options: Any
) -> DecoderOnlyConfig:
    return DecoderOnlyConfig(
        vocab_size=V, layer=layer, num_layers=2, position=position, max_len=max_len, **options
    )


def llama(
    *, rotary: dict[str, Any] | None = None, max_len: int = MAX_LEN, **changes: Any
) -> DecoderOnlyConfig:
    rotation = RotaryConfig(**rotary) if rotary else LLAMA.rotary
    return decoder_only(dataclasses.replace(LLAMA, rotary=rotation, **changes), "rotary", max_len)


def gpt2(position: Any = "learned", *, layer: dict[str, Any] | None = None, **options: Any) -> Any:
    changed = dataclasses.replace(PLAIN, **(layer or {}))
    return decoder_only(changed, position, **options)


def document(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "src_vocab_size": V,
        "tgt_vocab_size": V,
        "d_model": D,
        "num_heads": 4,
        "d_ff": 40,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "max_len": MAX_LEN,
        "dropout": 0.0,
    }
    return ModelConfig(**settings | changes)


def t5() -> EncoderDecoderConfig:
    encoder = dataclasses.replace(PLAIN, norm="rms", activation="relu", causal=False)
    return EncoderDecoderConfig(
        src_vocab_size=V,
        tgt_vocab_size=V,
        encoder=encoder,
        decoder=dataclasses.replace(encoder, causal=True),
        num_encoder_layers=2,
        num_decoder_layers=2,
        position="t5",
        max_len=MAX_LEN,
        final_norm=True,
        shared_embedding=True,
        tied=True,
        logit_scale=D**-0.5,
    )


YARN = {"scaling": "yarn", "factor": 4.0, "original_max_len": 16}
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_max_len": 16}

LONGROPE = {
    "scaling": "longrope",
    "factor": 4.0,
    "original_max_len": 16,
    "short_factors": (1.0, 1.5),
    "long_factors": (2.0, 8.0),
}

AnyConfig = DecoderOnlyConfig | EncoderDecoderConfig | ModelConfig

CONFIGS: dict[str, AnyConfig] = {
    "llama": llama(),
    "llama, adjacent pairs": llama(rotary={"pairing": "adjacent"}),
    "llama, another base": llama(rotary={"base": 500000.0}),
    "llama, half rotated": llama(rotary={"width": 2}),
    "llama, linear": llama(rotary={"scaling": "linear", "factor": 4.0}),
    "llama, llama3": llama(rotary=LLAMA3),
    "llama, YaRN": llama(rotary=YARN),
    "llama, dynamic": llama(rotary={"scaling": "dynamic", "factor": 2.0, "original_max_len": 16}),
    "llama, longrope": llama(rotary=LONGROPE),
    "llama, long": llama(max_len=4096),
    "llama, window": llama(window=3),
    "llama, wide heads": llama(head_dim=8),
    "llama, head norm": llama(query_key_norm="head"),
    "llama, full norm": llama(query_key_norm="full", placement="output"),
    "llama, multi-query": llama(num_kv_heads=1),
    "llama, biases": llama(qkv_bias=True),
    "llama, soft cap": llama(attention_soft_cap=30.0),
    "gemma": decoder_only(
        dataclasses.replace(
            LLAMA, norm_unit_offset=True, activation="gelu_tanh", placement="sandwich"
        ),
        "rotary",
        embedding_scale=True,
        tied=True,
        logit_soft_cap=20.0,
    ),
    "neox": llama(placement="parallel", parallel_norms=2, gated=False, activation="gelu"),
    "gptj": llama(rotary={"pairing": "adjacent"}, placement="parallel", gated=False, norm="layer"),
    "gpt2": gpt2(tied=True),
    "gpt2, untied": gpt2(head_bias=True),
    "gpt2, offset": gpt2(position_offset=2),
    "gpt2, no final norm": gpt2(final_norm=False),
    "gpt2, sinusoids": gpt2("sinusoidal", embedding_scale=True),
    "gpt2, no positions": gpt2("none"),
    "gpt2, relu": gpt2(layer={"activation": "relu"}),
    "gpt2, post": gpt2(layer={"placement": "post", "activation": "quick_gelu"}),
    "gpt2, scale 1": gpt2(layer={"attention_scale": 1.0}),
    "bloom": gpt2("alibi", embedding_norm=True),
    "bloom, long": gpt2("alibi", embedding_norm=True, max_len=4096),
    "t5 bias": gpt2("t5", layer={"norm": "rms", "activation": "relu"}),
    "t5": t5(),
    "document": document(norm_placement="post"),
    "document, pre": document(norm_placement="pre"),
    "document, tied": document(norm_placement="pre", tied_tables="all"),
}


TRAINED_AND_DECODED = (
    "llama, half rotated",
    "llama, dynamic",
    "llama, window",
    "gemma",
    "bloom",
    "t5 bias",
    "document, tied",
)
"""Correct models of which training and decoding are verified, too."""


@functools.cache
def correct(name: str, seed: int = 0) -> Pair:
    """The pair of that configuration; not to be changed."""
    config = CONFIGS[name]
    if isinstance(config, ModelConfig):
        reference = reference_encoder_decoder.Transformer.from_config(config).eval()
        build = lambda: Transformer.from_config(config, rngs=nnx.Rngs(0))  # noqa: E731
    elif isinstance(config, EncoderDecoderConfig):
        reference = reference_encoder_decoder.EncoderDecoder(config).eval()
        build = lambda: EncoderDecoder(config, rngs=nnx.Rngs(0))  # noqa: E731
    else:
        reference = reference_decoder_only.DecoderOnly(config).eval()
        build = lambda: DecoderOnly(config, rngs=nnx.Rngs(0))  # noqa: E731
    randomize(reference, seed)
    ours = carry(reference, nnx.eval_shape(build), "", jnp.float32)
    return Pair(
        ours=ours,
        theirs=reference,
        inputs=inputs_of(config),
        rename=names_of_modules(reference),
        valid=REAL,
        their_weights={
            name: np.asarray(leaf, np.float64) for name, leaf in parameters(ours).items()
        },
        carry=carrier(plan_of(reference)),
    )


@functools.cache
def trained(name: str) -> Pair:
    """The same with a training of a few steps."""
    pair = correct(name)
    return dataclasses.replace(pair, training=Training(batches=batches_of(CONFIGS[name])))


PROMPTS = ((5, 9), (3, 17, 4, 22, 8, 30, 11), (12, 7, 25, 2))
START_ID = 2


@functools.cache
def decoded(name: str) -> Pair:
    """The same with prompts to continue, or sources to translate."""
    pair, config = correct(name), CONFIGS[name]
    source = None
    if not isinstance(config, DecoderOnlyConfig):
        tokens = np.random.default_rng(1).integers(1, V, (B, T)).astype(np.int32)
        mask = (np.arange(T) < np.array([T, 6, 3])[:, None])[:, None, None]
        source = Source(tokens=tokens, mask=mask)
    decoding = Decoding(
        prompts=PROMPTS if source is None else ((START_ID,),) * B,
        count=6,
        ours=OURS,
        theirs={REFERENCE: row_by_row(pair.torch_call)},
        source=source,
        start_ids=tuple(range(4)),
    )
    return dataclasses.replace(pair, decoding=decoding)


def whole(name: str) -> Pair:
    """The pair with all that can be compared of it."""
    return dataclasses.replace(trained(name), decoding=decoded(name).decoding)


def batches_of(config: AnyConfig, steps: int = 3) -> tuple[Batch, ...]:
    """Four rows each, the last of three tokens."""
    real = np.concatenate([REAL, np.arange(T)[None] < 3])
    batches = []
    for seed in range(1, steps + 1):
        inputs = inputs_of(config, real, seed)
        written = inputs[0 if isinstance(config, DecoderOnlyConfig) else 1]
        batches.append(Batch(inputs, next_tokens(written, real)))
    return tuple(batches)


def inputs_of(
    config: AnyConfig, real: np.ndarray = REAL, seed: int = 0
) -> tuple[np.ndarray | None, ...]:
    """Padding on both sides, and a row that goes on near the end of the position table (not at it,
    so that positions may be moved by two)."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, V, real.shape).astype(np.int32)
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    positions[0, T // 2 :] += config.max_len - T - 2
    positions = positions.astype(np.int32)
    padding = real[:, None, None]
    if isinstance(config, DecoderOnlyConfig):
        return tokens, padding, positions
    target = generator.integers(1, V, real.shape).astype(np.int32)
    causal = padding & np.tril(np.ones((T, T), bool))
    return tokens, target, padding, causal, positions, positions
