"""The causal language model: GPT-2, Llama, BLOOM or Gemma by configuration."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.layers.attention import KeyValueStore
from jax_transformer.layers.block import Block
from jax_transformer.layers.dropout import Dropout, fold_keys
from jax_transformer.layers.linear import Embedding, OutputProjection
from jax_transformer.layers.mask import create_causal_mask
from jax_transformer.layers.normalization import make_norm
from jax_transformer.layers.position_bias import alibi_bias
from jax_transformer.layers.stack import apply_layers
from jax_transformer.models.half import (
    embedding_scale,
    position_bias_layer,
    position_encoding_layer,
)
from jax_transformer.models.initialization import STD, initialize_normal, residual_std


class DecoderOnly(nnx.Module):
    """`logits = output_proj(norm(layers(dropout(embedding_norm(embedding(tokens) + pe)))))`.

    Each part but the embedding, the layers and the projection is there or not by configuration.
    Matrices are N(0, 0.02^2), those that end a sublayer N(0, (0.02 / sqrt(2L))^2); the embedding
    table is N(0, 0.02^2), or N(0, 1/D) where `embedding_scale` multiplies it. Source: Radford et
    al. 2019 (GPT-2), Touvron et al. 2023 (Llama), BigScience 2022 (BLOOM); lecture section 4.2.

    Raises:
        InputError: a hyperparameter out of range (see `DecoderOnlyConfig`).
    """

    def __init__(self, config: DecoderOnlyConfig, *, rngs: nnx.Rngs):
        layer, d_model = config.layer, config.layer.d_model
        self.config = config
        self.scale = embedding_scale(config, d_model)
        self.embedding = Embedding(config.vocab_size, d_model, rngs=rngs)
        self.pos_encoding = position_encoding_layer(config, d_model, rngs=rngs)
        self.embedding_norm = make_norm(layer, d_model) if config.embedding_norm else None
        self.dropout = Dropout(layer.dropout)
        self.position_bias = position_bias_layer(config, layer, rngs=rngs)
        self.layers = nnx.List(
            [Block(config.layer_at(index), rngs=rngs) for index in range(config.num_layers)]
        )
        self.norm = make_norm(layer, d_model) if config.final_norm else None
        self.output_proj = OutputProjection(
            d_model, config.vocab_size, bias=config.head_bias, tied=config.tied, rngs=rngs
        )
        initialize_normal(
            self,
            embedding_std=d_model**-0.5 if config.embedding_scale else STD,
            residual_std=residual_std(config.num_layers),
            rngs=rngs,
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "#B 1 #T T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits for the token after each of `tokens`, in float32 or wider.

        Args:
            tokens: ids; one outside the vocabulary reads NaN (they are checked on the host).
            mask: what else may not be seen (False), padding say. No token sees a later one.
            positions: default 0, 1, ... in each row, and in each segment.
            segments: the number of the document, for several packed into a row; none sees another.
        """
        return self.project(self.hidden(tokens, mask, positions, segments, dropout_key=dropout_key))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "#B 1 #T T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """What the projection to logits reads."""
        keys = fold_keys(dropout_key, 2)
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if segments is not None and positions is None:
            positions = segment_positions(segments)
        masks = {
            window: create_causal_mask(index, index, window, segments, segments)
            for window in self.config.windows
        }
        if mask is not None:
            masks = {window: allowed & mask for window, allowed in masks.items()}
        places = index if positions is None else positions
        bias = self.bias(places, places)
        x = apply_layers(
            self.layers,
            lambda layer, x, key: layer(
                x,
                self_mask=masks[layer.config.window],
                bias=bias,
                positions=positions,
                dropout_key=key,
            )[0],
            self.embed(tokens, positions, dropout_key=keys[0]),
            keys[1],
        )
        return x if self.norm is None else self.norm(x)

    def step(
        self,
        tokens: Int[Array, "B T"],
        caches: Sequence[KeyValueStore],
        mask: Bool[Array, "#B 1 #T S"] | None,
        positions: Int[Array, "B T"],
        key_positions: Int[Array, "#B S"] | None = None,
        local_mask: Bool[Array, "#B 1 #T W"] | None = None,
        local_key_positions: Int[Array, "#B W"] | None = None,
    ) -> Float[Array, "B T D"]:
        """As `hidden`, for tokens that follow those in `caches`, one entry a layer.

        Args:
            mask: which of the S slots each token may see, its own among them; causality, window
                and padding are the caller's.
            key_positions: those of the tokens in the slots; only ALiBi and T5's bias read them.
            local_mask: in place of `mask` in the blocks of `local_layer`, whose caches may have
                W slots instead.
            local_key_positions: those of the tokens in these, if they are not `key_positions`.
        """
        if key_positions is None and self.config.position in ("alibi", "t5"):
            raise TypeError("a bias between positions needs those of the keys: key_positions")
        bias = None if key_positions is None else self.bias(positions, key_positions)
        local_bias = bias
        if local_key_positions is not None:
            local_bias = self.bias(positions, local_key_positions)
        x = self.embed(tokens, positions)
        if local_mask is None and self.config.local_layers:
            raise TypeError(
                "blocks with a window of their own need a mask of their own: local_mask"
            )
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            local = index in self.config.local_layers
            x, _ = layer(
                x,
                self_mask=local_mask if local else mask,
                bias=local_bias if local else bias,
                positions=positions,
                cache=cache,
            )
        return x if self.norm is None else self.norm(x)

    def embed(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """What goes into the first layer."""
        x = self.embedding(tokens) * self.scale
        if self.pos_encoding is not None:
            x = self.pos_encoding(x, positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x, dropout_key)

    def bias(
        self, query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]
    ) -> Float[Array, "#B N T S"] | None:
        """What the positions add to the scores, in every layer the same."""
        if self.config.position == "alibi":
            wide = jnp.promote_types(self.embedding.embedding.dtype, jnp.float32)
            return alibi_bias(query_positions, key_positions, self.config.layer.num_heads, wide)
        if self.position_bias is not None:
            return self.position_bias(query_positions, key_positions)
        return None

    def project(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits, through the embedding table where it is tied: `cap tanh(logits / cap)` with a
        `logit_soft_cap`."""
        table = self.embedding.embedding[...] if self.config.tied else None
        logits = self.output_proj(hidden, table)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """0, 1, ... in each run of equal numbers: `[5 5 5 6 6] -> [0 1 2 0 1]`."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    first = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)
