"""Sound to vectors: Whisper's convolutions over log-mel features."""

from jaxtyping import Float
from torch import Tensor, nn

from torch_reference.layers.feedforward import activate

WIDTH = 3
"""Frames that a convolution reads for one of its outputs."""


class Conv1d(nn.Conv1d):
    """`y_t = b + sum_w x_(s t + w - 1) W_w` over w = 0, 1, 2, with zeros beyond both ends.

    The weight W is `[out, in, 3]`, the stride s makes the length `ceil(T / s)`. Inputs and outputs
    are `[B, T, in]` and `[B, S, out]`, as activations are elsewhere.
    """

    def __init__(self, in_features: int, out_features: int, stride: int = 1):
        super().__init__(in_features, out_features, WIDTH, stride, padding=1)

    def forward(self, input: Float[Tensor, "B T in"]) -> Float[Tensor, "B S out"]:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


class AudioEmbedding(nn.Module):
    """`gelu(conv2(gelu(conv1(x))))`: log-mel features to vectors of width D, half as many, in the
    dtype of the parameters.

    Source: Radford et al. 2023, section 2.2. (There features are `[B, mels, frames]`.)
    """

    def __init__(self, d_model: int, num_mel_bins: int):
        super().__init__()
        self.conv1 = Conv1d(num_mel_bins, d_model)
        self.conv2 = Conv1d(d_model, d_model, stride=2)

    def forward(self, features: Float[Tensor, "B frames mels"]) -> Float[Tensor, "B S D"]:
        features = features.to(self.conv1.weight.dtype)
        x = activate(self.conv1(features), "gelu")
        return activate(self.conv2(x), "gelu")
