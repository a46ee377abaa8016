"""Sound to vectors: Whisper's convolutions over log-mel features."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.layers.feedforward import activate
from jax_transformer.layers.linear import affine, default_bias, xavier_uniform

WIDTH = 3
"""Frames that a convolution reads for one of its outputs."""


class Conv1d(nnx.Module):
    """`y_t = b + sum_w x_(s t + w - 1) W_w` over w = 0, 1, 2, with zeros beyond both ends.

    The kernel W is `[3, in, out]` (PyTorch keeps its transpose), the stride s makes the length
    `ceil(T / s)`. W is drawn from U(+-sqrt(6 / (3 in + 3 out))), b from U(+-1 / sqrt(3 in)), as the
    kernels of affine maps.
    """

    def __init__(self, in_features: int, out_features: int, stride: int = 1, *, rngs: nnx.Rngs):
        shape = (WIDTH, in_features, out_features)
        self.kernel = nnx.Param(xavier_uniform(rngs.params(), shape, jnp.float32))
        self.bias = default_bias(WIDTH * in_features, out_features, rngs)
        self.stride = stride

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B S out"]:
        # One product: all that an output reads, side by side.
        padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        last = padded.shape[1] - WIDTH
        windows = [padded[:, w : last + w + 1 : self.stride] for w in range(WIDTH)]
        kernel = self.kernel[...]
        flat = kernel.reshape(-1, kernel.shape[-1])
        return affine(jnp.concatenate(windows, axis=-1), flat, self.bias[...])


class AudioEmbedding(nnx.Module):
    """`gelu(conv2(gelu(conv1(x))))`: log-mel features to vectors of width D, half as many, in the
    dtype of the parameters.

    Source: Radford et al. 2023, section 2.2. (There features are `[B, mels, frames]`.)
    """

    def __init__(self, d_model: int, num_mel_bins: int, *, rngs: nnx.Rngs):
        self.conv1 = Conv1d(num_mel_bins, d_model, rngs=rngs)
        self.conv2 = Conv1d(d_model, d_model, stride=2, rngs=rngs)

    def __call__(self, features: Float[Array, "B frames mels"]) -> Float[Array, "B S D"]:
        features = features.astype(self.conv1.kernel[...].dtype)
        x = activate(self.conv1(features), "gelu")
        return activate(self.conv2(x), "gelu")
