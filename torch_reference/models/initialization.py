"""GPT-2's initialisation."""

import math

from torch import nn

STD = 0.02

RESIDUAL = ("out_proj", "linear2", "down_proj")
"""The projections that end a sublayer: what they give is added to the residual stream."""


def residual_std(num_layers: int) -> float:
    """`0.02 / sqrt(2L)` for the projections that end the 2L sublayers, so that the residual stream
    is as large after any number of layers. Source: Radford et al. 2019, section 2.3."""
    return STD / math.sqrt(2 * num_layers)


def initialize_normal(
    model: nn.Module, *, embedding_std: float = STD, residual_std: float = STD
) -> None:
    """Draw every matrix and table of `model` anew, N(0, 0.02^2), and set the biases of its affine
    maps to zero; norms stay.

    The table `embedding` has a deviation of its own, tied to a projection or not, and so have the
    projections that end a sublayer. Source: OpenAI's gpt-2 code.
    """
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for name, module in linear:
        residual = name.rpartition(".")[2] in RESIDUAL
        nn.init.normal_(module.weight, std=residual_std if residual else STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    tables = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    for name, module in tables:
        nn.init.normal_(module.weight, std=embedding_std if name == "embedding" else STD)
