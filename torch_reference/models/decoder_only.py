"""The causal language model: GPT-2, Llama, BLOOM or Gemma by configuration."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import DecoderOnlyConfig
from torch_reference.layers.block import Block
from torch_reference.layers.linear import OutputProjection
from torch_reference.layers.mask import create_causal_mask
from torch_reference.layers.normalization import make_norm
from torch_reference.layers.position_bias import alibi_bias
from torch_reference.models.half import (
    embedding_scale,
    position_bias_layer,
    position_encoding_layer,
)
from torch_reference.models.initialization import STD, initialize_normal, residual_std


class DecoderOnly(nn.Module):
    """`logits = output_proj(norm(layers(dropout(embedding_norm(embedding(tokens) + pe)))))`.

    Each part but the embedding, the layers and the projection is there or not by configuration.
    Matrices are N(0, 0.02^2), those that end a sublayer N(0, (0.02 / sqrt(2L))^2); the embedding
    table is N(0, 0.02^2), or N(0, 1/D) where `embedding_scale` multiplies it. Source: Radford et
    al. 2019 (GPT-2), Touvron et al. 2023 (Llama), BigScience 2022 (BLOOM); lecture section 4.2.

    Raises:
        InputError: a hyperparameter out of range (see `DecoderOnlyConfig`).
    """

    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        layer, d_model = config.layer, config.layer.d_model
        self.config = config
        self.scale = embedding_scale(config, d_model)
        self.embedding = nn.Embedding(config.vocab_size, d_model)
        self.pos_encoding = position_encoding_layer(config, d_model)
        self.embedding_norm = make_norm(layer, d_model) if config.embedding_norm else None
        self.dropout = nn.Dropout(layer.dropout)
        self.position_bias = position_bias_layer(config, layer)
        self.layers = nn.ModuleList(
            [Block(config.layer_at(index)) for index in range(config.num_layers)]
        )
        self.norm = make_norm(layer, d_model) if config.final_norm else None
        self.output_proj = OutputProjection(d_model, config.vocab_size, bias=config.head_bias)
        if config.tied:
            self.output_proj.weight = self.embedding.weight
        initialize_normal(
            self,
            embedding_std=d_model**-0.5 if config.embedding_scale else STD,
            residual_std=residual_std(config.num_layers),
        )

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Bool[Tensor, "#B 1 #T T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits for the token after each of `tokens`, in float32 or wider.

        Args:
            tokens: ids.
            mask: what else may not be seen (False), padding say. No token sees a later one.
            positions: default 0, 1, ... in each row, and in each segment.
            segments: the number of the document, for several packed into a row; none sees another.
        """
        return self.project(self.hidden(tokens, mask, positions, segments))

    def hidden(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Bool[Tensor, "#B 1 #T T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What the projection to logits reads."""
        index = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)[None]
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
        x = self.embed(tokens, positions)
        for index, layer in enumerate(self.layers):
            allowed = masks[self.config.layer_at(index).window]
            x, _ = layer(x, self_mask=allowed, bias=bias, positions=positions)
        return x if self.norm is None else self.norm(x)

    def embed(
        self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """What goes into the first layer."""
        x = self.embedding(tokens)
        x = x * torch.tensor(self.scale, dtype=x.dtype)
        if self.pos_encoding is not None:
            x = self.pos_encoding(x, positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x)

    def bias(
        self, query_positions: Int[Tensor, "#B T"], key_positions: Int[Tensor, "#B S"]
    ) -> Float[Tensor, "#B N T S"] | None:
        """What the positions add to the scores, in every layer the same."""
        if self.config.position == "alibi":
            wide = torch.promote_types(self.embedding.weight.dtype, torch.float32)
            return alibi_bias(query_positions, key_positions, self.config.layer.num_heads, wide)
        if self.position_bias is not None:
            return self.position_bias(query_positions, key_positions)
        return None

    def project(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Logits, through the embedding table where it is tied: `cap tanh(logits / cap)` with a
        `logit_soft_cap`."""
        logits = self.output_proj(hidden)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def segment_positions(segments: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """0, 1, ... in each run of equal numbers: `[5 5 5 6 6] -> [0 1 2 0 1]`."""
    index = torch.arange(segments.shape[1], dtype=torch.int32, device=segments.device)
    first = torch.diff(segments, dim=1, prepend=segments[:, :1] - 1) != 0
    return index - torch.where(first, index, 0).cummax(dim=1).values
