"""The bidirectional encoder: BERT by configuration."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import EncoderOnlyConfig
from torch_reference.layers.block import Block
from torch_reference.layers.feedforward import activate
from torch_reference.layers.linear import OutputProjection
from torch_reference.layers.normalization import make_norm
from torch_reference.layers.position_bias import alibi_bias
from torch_reference.models.decoder_only import segment_positions
from torch_reference.models.half import (
    embedding_scale,
    position_bias_layer,
    position_encoding_layer,
)
from torch_reference.models.initialization import STD, initialize_normal


class EncoderOutput(NamedTuple):
    """What `EncoderOnly` gives; None where the configuration has no such part."""

    hidden: Float[Tensor, "B T D"]
    """The last block's output."""
    pooled: Float[Tensor, "B D"] | None
    """The first token's, through the pooler: of the row as a whole."""
    logits: Float[Tensor, "B T V"] | None
    """For the token that a mask stands for, in float32 or wider."""


class TokenHead(nn.Module):
    """`logits = norm(activation(W h + b)) E^T + c` with the embedding table E `[V, D]`, assigned
    to `output_proj.weight`.

    Source: Devlin et al. 2019; Google's bert code, `get_masked_lm_output`.
    """

    def __init__(self, config: EncoderOnlyConfig):
        super().__init__()
        d_model = config.layer.d_model
        self.activation = config.head_activation
        self.dense = nn.Linear(d_model, d_model)
        self.norm = make_norm(config.layer, d_model)
        self.output_proj = OutputProjection(d_model, config.vocab_size)

    def forward(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """The logits."""
        return self.output_proj(self.norm(activate(self.dense(hidden), self.activation)))


class EncoderOnly(nn.Module):
    """`hidden = norm(layers(dropout(embedding_norm(embedding(tokens) + type + pe))))`.

    Each part but the embedding and the layers is there or not by configuration. Matrices and
    tables are N(0, 0.02^2). Source: Devlin et al. 2019 (BERT).

    Raises:
        InputError: a hyperparameter out of range (see `EncoderOnlyConfig`).
    """

    def __init__(self, config: EncoderOnlyConfig):
        super().__init__()
        layer, d_model = config.layer, config.layer.d_model
        self.config = config
        self.scale = embedding_scale(config, d_model)
        self.embedding = nn.Embedding(config.vocab_size, d_model)
        self.token_type_embedding = (
            nn.Embedding(config.token_types, d_model) if config.token_types else None
        )
        self.pos_encoding = position_encoding_layer(config, d_model)
        self.embedding_norm = make_norm(layer, d_model) if config.embedding_norm else None
        self.dropout = nn.Dropout(layer.dropout)
        self.position_bias = position_bias_layer(config, layer)
        self.layers = nn.ModuleList([Block(layer) for _ in range(config.num_layers)])
        self.norm = make_norm(layer, d_model) if config.final_norm else None
        self.pooler = nn.Linear(d_model, d_model) if config.pooler else None
        self.token_head = TokenHead(config) if config.token_head else None
        if self.token_head is not None:
            self.token_head.output_proj.weight = self.embedding.weight
        initialize_normal(self, embedding_std=d_model**-0.5 if config.embedding_scale else STD)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Bool[Tensor, "#B 1 #T T"] | None = None,
        token_types: Int[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> EncoderOutput:
        """Hidden states, the pooled first token, and logits for masked tokens.

        Args:
            tokens: ids.
            mask: which tokens each may see (True): those that are not padding, say.
            token_types: default all 0.
            positions: default 0, 1, ... in each row, and in each segment.
            segments: the number of the document, for several packed into a row; none sees another.
        """
        index = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)[None]
        if segments is not None and positions is None:
            positions = segment_positions(segments)
        allowed = segment_mask(mask, segments)
        places = index if positions is None else positions
        bias = self.bias(places)
        x = self.embed(tokens, token_types, positions)
        for layer in self.layers:
            x, _ = layer(x, self_mask=allowed, bias=bias, positions=positions)
        hidden = x if self.norm is None else self.norm(x)
        return EncoderOutput(hidden, self.pool(hidden), self.project(hidden))

    def bias(self, positions: Int[Tensor, "#B T"]) -> Float[Tensor, "#B N T T"] | None:
        """What the positions add to the scores, in every layer the same."""
        if self.config.position == "alibi":
            wide = torch.promote_types(self.embedding.weight.dtype, torch.float32)
            return alibi_bias(positions, positions, self.config.layer.num_heads, wide)
        if self.position_bias is not None:
            return self.position_bias(positions, positions)
        return None

    def embed(
        self,
        tokens: Int[Tensor, "B T"],
        token_types: Int[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What goes into the first layer."""
        x = self.embedding(tokens)
        x = x * torch.tensor(self.scale, dtype=x.dtype)
        if self.token_type_embedding is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + self.token_type_embedding(types)
        if self.pos_encoding is not None:
            x = self.pos_encoding(x, positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x)

    def pool(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"] | None:
        """`tanh(W h_0 + b)` of the first token."""
        return None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))

    def project(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"] | None:
        """Logits for masked tokens."""
        return None if self.token_head is None else self.token_head(hidden)


def segment_mask(
    mask: Bool[Tensor, "#B 1 #T T"] | None, segments: Int[Tensor, "B T"] | None
) -> Bool[Tensor, "#B 1 #T T"] | None:
    """`mask`, and that a token sees only those of its own segment."""
    if segments is None:
        return mask
    same = (segments[:, :, None] == segments[:, None])[:, None]
    return same if mask is None else mask & same
