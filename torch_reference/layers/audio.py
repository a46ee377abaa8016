"""Sound to vectors: Whisper's convolutions over log-mel features."""

from jaxtyping import Float
from torch import Tensor, nn

from torch_reference.layers.feedforward import activate

WIDTH = 3
"""Frames that a convolution reads for one of its outputs."""


class AudioEmbedding(nn.Module):
    """`gelu(conv2(gelu(conv1(x))))`: log-mel features to vectors of width D, half as many, in the
    dtype of the parameters.

    Source: Radford et al. 2023, section 2.2. (There features are `[B, mels, frames]`.)
    """

    def __init__(self, d_model: int, num_mel_bins: int):
        super().__init__()
        self.conv1 = nn.Conv1d(num_mel_bins, d_model, WIDTH, padding=1)
        self.conv2 = nn.Conv1d(d_model, d_model, WIDTH, stride=2, padding=1)

    def forward(self, features: Float[Tensor, "B frames mels"]) -> Float[Tensor, "B S D"]:
        features = features.to(self.conv1.weight.dtype)
        x = activate(self.conv1(features.transpose(1, 2)), "gelu")
        return activate(self.conv2(x), "gelu").transpose(1, 2)
