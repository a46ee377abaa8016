"""Normalisation over the features of each token."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jax_transformer.config import LayerConfig


class LayerNorm(nn.LayerNorm):
    """`y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` over the last axis, or without
    the bias.

    `eps` is 1e-5. PyTorch's kernel takes mean and variance in float32 or wider whatever the dtype
    of x. Source: Ba et al. 2016; lecture section 4.1.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True):
        super().__init__(d_model, eps=eps, bias=bias)

    def forward(self, input: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return super().forward(input)


class RMSNorm(nn.Module):
    """`y = weight * x / sqrt(mean(x^2) + epsilon)` over the last axis, with no bias.

    The mean is taken in float32 or wider whatever the dtype of x. With `unit_offset` the factor is
    `1 + weight`, added in float32 (Gemma), and `weight` starts at 0. The quotient is rounded to the
    dtype of x before the factor (Llama), or after it with `scale_in_float32` (Gemma).
    Source: Zhang and Sennrich 2019; lecture section 4.1.
    """

    def __init__(
        self,
        d_model: int,
        epsilon: float = 1e-8,
        unit_offset: bool = False,
        scale_in_float32: bool = False,
    ):
        super().__init__()
        self.epsilon = epsilon
        self.unit_offset = unit_offset
        self.scale_in_float32 = scale_in_float32
        self.weight = nn.Parameter(torch.zeros(d_model) if unit_offset else torch.ones(d_model))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = self.weight.to(wide)
        if self.unit_offset:
            scale = 1.0 + scale
        mean_square = x.to(wide).square().mean(dim=-1, keepdim=True)
        normed = x.to(wide) * torch.rsqrt(mean_square + self.epsilon)
        if not self.scale_in_float32:
            normed = normed.to(x.dtype).to(wide)
        return (normed * scale).to(x.dtype)


def make_norm(config: LayerConfig, width: int) -> LayerNorm | RMSNorm:
    """The norm of that configuration, over `width` features."""
    if config.norm == "layer":
        return LayerNorm(width, config.norm_epsilon, bias=config.norm_bias)
    return RMSNorm(
        width,
        config.norm_epsilon,
        unit_offset=config.norm_unit_offset,
        scale_in_float32=config.norm_scale_in_float32,
    )
