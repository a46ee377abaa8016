"""Named configurations with the sizes that were published."""

import difflib

from jax_transformer.config.language import (
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
)
from jax_transformer.config.layers import LayerConfig
from jax_transformer.config.rotary import RotaryConfig
from jax_transformer.config.translation import ModelConfig
from jax_transformer.errors import InputError

Preset = ModelConfig | DecoderOnlyConfig | EncoderOnlyConfig | EncoderDecoderConfig


def original(d_model: int, num_heads: int, d_ff: int, dropout: float) -> ModelConfig:
    """Vaswani et al. 2017, table 3, English to German: one vocabulary of 37,000, tied thrice."""
    return ModelConfig(
        src_vocab_size=37_000,
        tgt_vocab_size=37_000,
        d_model=d_model,
        num_heads=num_heads,
        d_ff=d_ff,
        dropout=dropout,
        activation="relu",
        tied_tables="all",
    )


def gpt2(d_model: int, num_heads: int, num_layers: int) -> DecoderOnlyConfig:
    """Radford et al. 2019, table 2."""
    return DecoderOnlyConfig(
        vocab_size=50_257,
        num_layers=num_layers,
        position="learned",
        max_len=1024,
        tied=True,
        layer=LayerConfig(
            d_model=d_model,
            num_heads=num_heads,
            d_ff=4 * d_model,
            activation="gelu_tanh",
            dropout=0.1,
            causal=True,
        ),
    )


def llama(
    *,
    vocab_size: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    d_ff: int,
    max_len: int,
    rotary_base: float,
    tied: bool = False,
) -> DecoderOnlyConfig:
    """Touvron et al. 2023: pre-norm RMSNorm, rotary positions, SwiGLU, no biases."""
    return DecoderOnlyConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        position="rotary",
        max_len=max_len,
        tied=tied,
        layer=LayerConfig(
            d_model=d_model,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            d_ff=d_ff,
            norm="rms",
            norm_epsilon=1e-5,
            qkv_bias=False,
            out_bias=False,
            ffn_bias=False,
            activation="silu",
            gated=True,
            rotary=RotaryConfig(pairing="half", base=rotary_base),
            causal=True,
        ),
    )


def qwen3_600m() -> DecoderOnlyConfig:
    """Qwen team 2025: as Llama, with RMSNorm on each head of queries and keys, heads of width
    128 whatever the model's."""
    return DecoderOnlyConfig(
        vocab_size=151_936,
        num_layers=28,
        position="rotary",
        max_len=40_960,
        tied=True,
        layer=LayerConfig(
            d_model=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            d_ff=3072,
            norm="rms",
            norm_epsilon=1e-6,
            query_key_norm="head",
            qkv_bias=False,
            out_bias=False,
            ffn_bias=False,
            activation="silu",
            gated=True,
            rotary=RotaryConfig(pairing="half", base=1e6),
            causal=True,
        ),
    )


def bloom_560m() -> DecoderOnlyConfig:
    """BigScience 2022: ALiBi, and a norm after the embeddings."""
    return DecoderOnlyConfig(
        vocab_size=250_880,
        num_layers=24,
        position="alibi",
        max_len=2048,
        tied=True,
        embedding_norm=True,
        layer=LayerConfig(
            d_model=1024, num_heads=16, d_ff=4096, activation="gelu_tanh", causal=True
        ),
    )


def bert_base() -> EncoderOnlyConfig:
    """Devlin et al. 2019, section 3, without the head for masked tokens."""
    return EncoderOnlyConfig(
        vocab_size=30_522,
        num_layers=12,
        token_head=False,
        layer=LayerConfig(
            d_model=768,
            num_heads=12,
            d_ff=3072,
            norm_epsilon=1e-12,
            placement="post",
            dropout=0.1,
            causal=False,
        ),
    )


def t5_small() -> EncoderDecoderConfig:
    """Raffel et al. 2020, section 3.7: unscaled scores, biases of relative position, RMSNorm."""

    def layer(*, causal: bool) -> LayerConfig:
        return LayerConfig(
            d_model=512,
            num_heads=8,
            head_dim=64,
            d_ff=2048,
            norm="rms",
            norm_epsilon=1e-6,
            qkv_bias=False,
            out_bias=False,
            attention_scale=1.0,
            activation="relu",
            ffn_bias=False,
            dropout=0.1,
            causal=causal,
        )

    return EncoderDecoderConfig(
        src_vocab_size=32_128,
        tgt_vocab_size=32_128,
        encoder=layer(causal=False),
        decoder=layer(causal=True),
        num_encoder_layers=6,
        num_decoder_layers=6,
        position="t5",
        max_len=512,
        final_dropout=True,
        shared_embedding=True,
        tied=True,
        head_bias=False,
        logit_scale=512**-0.5,
    )


PRESETS: dict[str, Preset] = {
    "original-base": original(512, 8, 2048, 0.1),
    "original-big": original(1024, 16, 4096, 0.3),
    "gpt2-small": gpt2(768, 12, 12),
    "gpt2-medium": gpt2(1024, 16, 24),
    "gpt2-large": gpt2(1280, 20, 36),
    "gpt2-xl": gpt2(1600, 25, 48),
    "llama-2-7b": llama(
        vocab_size=32_000,
        d_model=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        d_ff=11_008,
        max_len=4096,
        rotary_base=1e4,
    ),
    "llama-3-8b": llama(
        vocab_size=128_256,
        d_model=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        d_ff=14_336,
        max_len=8192,
        rotary_base=5e5,
    ),
    "llama-3-70b": llama(
        vocab_size=128_256,
        d_model=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        d_ff=28_672,
        max_len=8192,
        rotary_base=5e5,
    ),
    "smollm2-135m": llama(
        vocab_size=49_152,
        d_model=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        d_ff=1536,
        max_len=8192,
        rotary_base=1e5,
        tied=True,
    ),
    "qwen3-0.6b": qwen3_600m(),
    "bloom-560m": bloom_560m(),
    "bert-base": bert_base(),
    "t5-small": t5_small(),
}
"""Every preset by name. Another size is `dataclasses.replace` away."""


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: there is none, with the nearest names.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3)
        known = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PRESETS)}"
        raise InputError(f"unknown preset {name!r}: {known}")
    return PRESETS[name]
