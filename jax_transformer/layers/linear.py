"""Affine maps and embedding tables, with the lecture document's initialisers set explicitly."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_transformer.layers.fusion import materialize

xavier_uniform = nnx.initializers.xavier_uniform()


def uniform(bound: float) -> nnx.Initializer:
    """Initialiser: U(-bound, bound)."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nnx.Module):
    """`y = x W + b` with kernel W `[in, out]` (PyTorch keeps its transpose) and bias b `[out]`.

    W is drawn from U(+-sqrt(6 / (in + out))) (Glorot and Bengio 2010), b from
    U(+-1 / sqrt(in)): what the lecture document's `_init_parameters` leaves of `nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        kernel = xavier_uniform(rngs.params(), (in_features, out_features), jnp.float32)
        bias = uniform(in_features**-0.5)(rngs.params(), (out_features,), jnp.float32)
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(bias)

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        return matmul(x, self.kernel[...]) + self.bias[...]


@jax.custom_vjp
def matmul(x: Float[Array, "... in"], kernel: Float[Array, "in out"]) -> Float[Array, "... out"]:
    """`x W`, with a derivative that is fast on a CPU."""
    return x @ kernel


def _matmul_forward(
    x: Float[Array, "... in"], kernel: Float[Array, "in out"]
) -> tuple[Float[Array, "... out"], tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _matmul_backward(
    saved: tuple[Array, Array], gradient: Float[Array, "... out"]
) -> tuple[Array, Array]:
    """`dx = dy W^T`, `dW = x^T dy` with the narrower of x and dy transposed in memory first:
    XLA's CPU product of two matrices that both run along the summed axis is half as fast."""
    x, kernel = saved
    rows, outs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    if rows.shape[1] <= outs.shape[1]:
        d_kernel = materialize(rows.T) @ outs
    else:
        d_kernel = (materialize(outs.T) @ rows).T
    return gradient @ kernel.T, d_kernel


matmul.defvjp(_matmul_forward, _matmul_backward)


class Embedding(nnx.Module):
    """Row `ids` of a table `[V, D]`, drawn like the kernels from U(+-sqrt(6 / (V + D))).

    Ids are checked before they reach the device: here one outside the table reads NaN.
    (`nnx.Embed` would keep computing in the dtype that it was made in.)
    """

    def __init__(self, num_embeddings: int, features: int, *, rngs: nnx.Rngs):
        table = xavier_uniform(rngs.params(), (num_embeddings, features), jnp.float32)
        self.embedding = nnx.Param(table)

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return table_rows(self.embedding[...], ids)


def table_rows(table: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Row `ids` of a table, NaN where there is no such row: XLA itself would read the last row
    for an id past the end, and count a negative one from there."""
    ids = jnp.where(ids < 0, table.shape[0], ids)
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)


class OutputProjection(nnx.Module):
    """Logits `x W + b` in float32 or wider, W `[D, V]` its own or the transpose of a table.

    Tied (`W = E^T`) it owns the bias only and is given the embedding table E `[V, D]` at each
    call: one Variable under two names would be two leaves to `jax.tree`. Source: Press and
    Wolf 2017.
    """

    def __init__(self, d_model: int, vocab_size: int, *, tied: bool = False, rngs: nnx.Rngs):
        # PyTorch's default bias, as in `linear`.
        bias = uniform(d_model**-0.5)(rngs.params(), (vocab_size,), jnp.float32)
        self.bias = nnx.Param(bias)
        if tied:
            self.kernel = None
        else:
            kernel = xavier_uniform(rngs.params(), (d_model, vocab_size), jnp.float32)
            self.kernel = nnx.Param(kernel)

    def __call__(
        self, x: Float[Array, "B T D"], table: Float[Array, "V D"] | None = None
    ) -> Float[Array, "B T V"]:
        if table is not None:
            kernel = table.T
        elif self.kernel is not None:
            kernel = self.kernel[...]
        else:
            raise TypeError("a tied projection has no kernel: give it the embedding table")
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return matmul(x.astype(wide), kernel.astype(wide)) + self.bias[...].astype(wide)
