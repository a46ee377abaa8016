"""The bidirectional encoder: BERT by configuration."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_transformer.config import EncoderOnlyConfig
from jax_transformer.layers.block import Block
from jax_transformer.layers.dropout import Dropout, fold_keys
from jax_transformer.layers.feedforward import activate
from jax_transformer.layers.linear import Embedding, Linear, OutputProjection
from jax_transformer.layers.normalization import make_norm
from jax_transformer.layers.position_bias import alibi_bias
from jax_transformer.layers.stack import apply_layers
from jax_transformer.models.decoder_only import segment_positions
from jax_transformer.models.half import (
    embedding_scale,
    position_bias_layer,
    position_encoding_layer,
)
from jax_transformer.models.initialization import STD, initialize_normal


class EncoderOutput(NamedTuple):
    """What `EncoderOnly` gives; None where the configuration has no such part."""

    hidden: Float[Array, "B T D"]
    """The last block's output."""
    pooled: Float[Array, "B D"] | None
    """The first token's, through the pooler: of the row as a whole."""
    logits: Float[Array, "B T V"] | None
    """For the token that a mask stands for, in float32 or wider."""


class TokenHead(nnx.Module):
    """`logits = norm(activation(W h + b)) E^T + c` with the embedding table E `[V, D]`.

    Source: Devlin et al. 2019; Google's bert code, `get_masked_lm_output`.
    """

    def __init__(self, config: EncoderOnlyConfig, *, rngs: nnx.Rngs):
        d_model = config.layer.d_model
        self.activation = config.head_activation
        self.dense = Linear(d_model, d_model, rngs=rngs)
        self.norm = make_norm(config.layer, d_model)
        self.output_proj = OutputProjection(d_model, config.vocab_size, tied=True, rngs=rngs)

    def __call__(
        self, hidden: Float[Array, "B T D"], table: Float[Array, "V D"]
    ) -> Float[Array, "B T V"]:
        """The logits."""
        return self.output_proj(self.norm(activate(self.dense(hidden), self.activation)), table)


class EncoderOnly(nnx.Module):
    """`hidden = norm(layers(dropout(embedding_norm(embedding(tokens) + type + pe))))`.

    Each part but the embedding and the layers is there or not by configuration. Matrices and
    tables are N(0, 0.02^2). Source: Devlin et al. 2019 (BERT).

    Raises:
        InputError: a hyperparameter out of range (see `EncoderOnlyConfig`).
    """

    def __init__(self, config: EncoderOnlyConfig, *, rngs: nnx.Rngs):
        layer, d_model = config.layer, config.layer.d_model
        self.config = config
        self.scale = embedding_scale(config, d_model)
        self.embedding = Embedding(config.vocab_size, d_model, rngs=rngs)
        self.token_type_embedding = (
            Embedding(config.token_types, d_model, rngs=rngs) if config.token_types else None
        )
        self.pos_encoding = position_encoding_layer(config, d_model, rngs=rngs)
        self.embedding_norm = make_norm(layer, d_model) if config.embedding_norm else None
        self.dropout = Dropout(layer.dropout)
        self.position_bias = position_bias_layer(config, layer, rngs=rngs)
        self.layers = nnx.List([Block(layer, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = make_norm(layer, d_model) if config.final_norm else None
        self.pooler = Linear(d_model, d_model, rngs=rngs) if config.pooler else None
        self.token_head = TokenHead(config, rngs=rngs) if config.token_head else None
        initialize_normal(
            self,
            embedding_std=d_model**-0.5 if config.embedding_scale else STD,
            rngs=rngs,
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "#B 1 #T T"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> EncoderOutput:
        """Hidden states, the pooled first token, and logits for masked tokens.

        Args:
            tokens: ids; one outside the vocabulary reads NaN (they are checked on the host).
            mask: which tokens each may see (True): those that are not padding, say.
            token_types: default all 0.
            positions: default 0, 1, ... in each row, and in each segment.
            segments: the number of the document, for several packed into a row; none sees another.
        """
        keys = fold_keys(dropout_key, 2)
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if segments is not None and positions is None:
            positions = segment_positions(segments)
        allowed = segment_mask(mask, segments)
        places = index if positions is None else positions
        bias = self.bias(places)
        x = apply_layers(
            self.layers,
            lambda layer, x, key: layer(
                x, self_mask=allowed, bias=bias, positions=positions, dropout_key=key
            )[0],
            self.embed(tokens, token_types, positions, dropout_key=keys[0]),
            keys[1],
        )
        hidden = x if self.norm is None else self.norm(x)
        return EncoderOutput(hidden, self.pool(hidden), self.project(hidden))

    def bias(self, positions: Int[Array, "#B T"]) -> Float[Array, "#B N T T"] | None:
        """What the positions add to the scores, in every layer the same."""
        if self.config.position == "alibi":
            wide = jnp.promote_types(self.embedding.embedding.dtype, jnp.float32)
            return alibi_bias(positions, positions, self.config.layer.num_heads, wide)
        if self.position_bias is not None:
            return self.position_bias(positions, positions)
        return None

    def embed(
        self,
        tokens: Int[Array, "B T"],
        token_types: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """What goes into the first layer."""
        x = self.embedding(tokens) * self.scale
        if self.token_type_embedding is not None:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            x = x + self.token_type_embedding(types)
        if self.pos_encoding is not None:
            x = self.pos_encoding(x, positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x, dropout_key)

    def pool(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B D"] | None:
        """`tanh(W h_0 + b)` of the first token."""
        return None if self.pooler is None else jnp.tanh(self.pooler(hidden[:, 0]))

    def project(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"] | None:
        """Logits for masked tokens."""
        if self.token_head is None:
            return None
        return self.token_head(hidden, self.embedding.embedding[...])


def segment_mask(
    mask: Bool[Array, "#B 1 #T T"] | None, segments: Int[Array, "B T"] | None
) -> Bool[Array, "#B 1 #T T"] | None:
    """`mask`, and that a token sees only those of its own segment."""
    if segments is None:
        return mask
    same = (segments[:, :, None] == segments[:, None])[:, None]
    return same if mask is None else mask & same
