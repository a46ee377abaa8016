"""The projection to logits. Every other affine map is an `nn.Linear` as it is."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class OutputProjection(nn.Linear):
    """Logits `x W^T + b` in float32 or wider, W `[V, D]` its own or an embedding table; without
    `bias` no b.

    To tie, assign the table's parameter to `weight`. Source: Press and Wolf 2017.
    """

    def __init__(self, d_model: int, vocab_size: int, *, bias: bool = True):
        super().__init__(d_model, vocab_size, bias=bias)

    def forward(self, input: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        wide = torch.promote_types(input.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return nn.functional.linear(input.to(wide), self.weight.to(wide), bias)
