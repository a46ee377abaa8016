"""Affine maps and embedding tables, with the initialisers of the lecture document set explicitly."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

xavier_uniform = nnx.initializers.xavier_uniform()


def uniform(bound: float) -> nnx.Initializer:
    """Initialiser: U(-bound, bound)."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def linear(in_features: int, out_features: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """`y = x W + b` with kernel W `[in, out]` (PyTorch keeps its transpose) and bias b `[out]`.

    W is drawn from U(+-sqrt(6 / (in + out))) (Glorot and Bengio 2010), b from
    U(+-1 / sqrt(in)): what the lecture document's `_init_parameters` leaves of `nn.Linear`.
    """
    return nnx.Linear(
        in_features,
        out_features,
        kernel_init=xavier_uniform,
        bias_init=uniform(in_features**-0.5),
        rngs=rngs,
    )


class Embedding(nnx.Module):
    """Row `ids` of a table `[V, D]`, drawn like the kernels from U(+-sqrt(6 / (V + D))).

    Ids are checked before they reach the device: here one past the table reads NaN.
    (`nnx.Embed` would keep computing in the dtype that it was made in.)
    """

    def __init__(self, num_embeddings: int, features: int, *, rngs: nnx.Rngs):
        table = xavier_uniform(rngs.params(), (num_embeddings, features), jnp.float32)
        self.embedding = nnx.Param(table)

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.embedding[...], ids, axis=0, mode="fill", fill_value=jnp.nan)


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
        if (self.kernel is None) == (table is None):
            raise TypeError(
                "a tied projection needs the embedding table, an untied one has its own"
            )
        kernel = table.T if self.kernel is None else self.kernel[...]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.matmul(x, kernel, preferred_element_type=wide) + self.bias[...].astype(wide)
