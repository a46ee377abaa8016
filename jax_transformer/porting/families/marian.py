"""Marian (OPUS-MT): a fixed table of sines before cosines, norms after the sublayers."""

from jax_transformer.config import EncoderDecoderConfig
from jax_transformer.porting.families.bart import BODY, half, head
from jax_transformer.porting.families.base import Family, Map, Require, Skip
from jax_transformer.porting.families.halves import Pair
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules

FIELDS = (
    *BODY,
    Pair(
        Map("vocab_size", "src_vocab_size", 58101),
        Map("decoder_vocab_size", "tgt_vocab_size"),
    ),
    Map("share_encoder_decoder_embeddings", "shared_embedding", True),
    Require("tie_word_embeddings", True, "a head of its own is not built in here"),
    Require("normalize_embedding", False, "the embeddings have no norm"),
    Require("static_position_embeddings", True, "positions are sinusoidal"),
    Skip(("extra_pos_embeddings",), "never read: the first row is that of position 0"),
)

FIXED = {
    "position": "sinusoidal",
    "sinusoid_halves": True,
    "final_norm": False,
    "tied": True,
    "encoder.causal": False,
    "decoder.causal": True,
    "encoder.placement": "post",
    "decoder.placement": "post",
}


def rules(config: EncoderDecoderConfig) -> Rules:
    """Tensor names of `MarianMTModel`."""
    if config.shared_embedding:
        table = "model.shared.weight"
        tables: Rules = (
            Rule(table, "decoder.embedding.embedding"),
            Alias("model.encoder.embed_tokens.weight", table),
            Alias("model.decoder.embed_tokens.weight", table),
        )
    else:
        table = "model.decoder.embed_tokens.weight"
        tables = (
            Rule("model.encoder.embed_tokens.weight", "encoder.embedding.embedding"),
            Rule(table, "decoder.embedding.embedding"),
        )
    return (
        *tables,
        *head(config.tgt_vocab_size, table),
        *half("model.encoder", "encoder"),
        *half("model.decoder", "decoder"),
        Ignore("model.{half}.embed_positions.weight", "the config determines the table"),
    )


FAMILY = Family(
    name="marian",
    model_types=("marian",),
    architecture="MarianMTModel",
    config=EncoderDecoderConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
