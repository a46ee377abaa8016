"""Marian (OPUS-MT): a fixed table of sines before cosines, norms after the sublayers."""

import dataclasses

from jax_transformer.config import EncoderDecoderConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.bart import BODY, half, head
from jax_transformer.porting.families.base import Config, Family, Map, Require, Skip, Values, get
from jax_transformer.porting.families.halves import Pair
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules


@dataclasses.dataclass(frozen=True)
class Tables:
    """Which of the source's table, the target's and the head are one.

    Where the halves share a table and the head does not, `transformers` 5 gives each half one of
    its own all the same, and its files no longer say which is meant.
    """

    fields: tuple[str, ...] = ("share_encoder_decoder_embeddings", "tie_word_embeddings")

    def read(self, values: Values) -> Values:
        shared, tied = (values.get(name, True) for name in self.fields)
        if shared and not tied:
            raise InputError(
                "tie_word_embeddings=False with share_encoder_decoder_embeddings=True: "
                "transformers 5 does not share then, older ones do, and files do not say which"
            )
        return {"shared_embedding": shared, "tied": tied}

    def write(self, config: Config) -> Values:
        found = (get(config, "shared_embedding"), get(config, "tied"))
        return dict(zip(self.fields, found, strict=True))


FIELDS = (
    *BODY,
    Pair(
        Map("vocab_size", "src_vocab_size", 58101),
        Map("decoder_vocab_size", "tgt_vocab_size"),
    ),
    Tables(),
    Require("normalize_embedding", False, "the embeddings have no norm"),
    Require("static_position_embeddings", True, "positions are sinusoidal"),
    Skip(("extra_pos_embeddings",), "never read: the first row is that of position 0"),
)

FIXED = {
    "position": "sinusoidal",
    "sinusoid_halves": True,
    "final_norm": False,
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
        *head(config.tgt_vocab_size, table if config.tied else None),
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
