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
    """`y = x W + b` with kernel W `[in, out]` (PyTorch keeps its transpose) and bias b `[out]`, or
    none.

    W is drawn from U(+-sqrt(6 / (in + out))) (Glorot and Bengio 2010), b from
    U(+-1 / sqrt(in)): what the lecture document's `_init_parameters` leaves of `nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, rngs: nnx.Rngs):
        kernel = xavier_uniform(rngs.params(), (in_features, out_features), jnp.float32)
        self.kernel = nnx.Param(kernel)
        self.bias = default_bias(in_features, out_features, rngs) if bias else None
        self.transposed = False

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        bias = None if self.bias is None else self.bias[...]
        product = affine_transposed if self.transposed else affine
        return product(x, self.kernel[...], bias)

    def transpose(self) -> None:
        """Keep W as `[out, in]` from now on: the order that a product of few rows reads fastest
        on a CPU. For a model inside a decoding program; saved parameters are never so."""
        self.kernel = nnx.Param(materialize(self.kernel[...].T))
        self.transposed = True


def default_bias(in_features: int, out_features: int, rngs: nnx.Rngs) -> nnx.Param:
    """PyTorch's: U(+-1 / sqrt(in))."""
    return nnx.Param(uniform(in_features**-0.5)(rngs.params(), (out_features,), jnp.float32))


def transpose_kernels(module: nnx.Module) -> None:
    """`Linear.transpose` for every one in `module`."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Linear):
            part.transpose()


@jax.custom_vjp
def affine(
    x: Float[Array, "... in"], kernel: Float[Array, "in out"], bias: Float[Array, " out"] | None
) -> Float[Array, "... out"]:
    """`x W + b`, without b for None, summed in float32 or wider and rounded once to the dtype of
    x, with a derivative that is fast on a CPU."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.matmul(x, kernel, preferred_element_type=wide)
    return add_bias(product, bias).astype(x.dtype)


def add_bias(
    product: Float[Array, "... out"], bias: Float[Array, " out"] | None
) -> Float[Array, "... out"]:
    """`product + b` in the dtype of the product."""
    return product if bias is None else product + bias.astype(product.dtype)


# The inputs that the derivative needs, and the bias: whether there is one, and of which dtype.
Saved = tuple[Array, Array, Array | None]
Gradients = tuple[Array, Array, Array | None]


def _affine_forward(
    x: Float[Array, "... in"], kernel: Float[Array, "in out"], bias: Float[Array, " out"] | None
) -> tuple[Float[Array, "... out"], Saved]:
    return affine(x, kernel, bias), (x, kernel, bias)


def _affine_backward(saved: Saved, gradient: Float[Array, "... out"]) -> Gradients:
    """`dx = dy W^T`, `dW = x^T dy`, `db = sum(dy)`; the narrower of x and dy is transposed in
    memory first: XLA's CPU product of two matrices that both run along the summed axis is half
    as fast."""
    x, kernel, bias = saved
    rows, outs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    if rows.shape[1] <= outs.shape[1]:
        d_kernel = materialize(rows.T) @ outs
    else:
        d_kernel = (materialize(outs.T) @ rows).T
    d_bias = None
    if bias is not None:
        # XLA sums in the dtype of the terms: in bfloat16 a sum over tokens stalls at 256 of them.
        wide = jnp.promote_types(gradient.dtype, jnp.float32)
        d_bias = outs.astype(wide).sum(axis=0).astype(gradient.dtype)
    return gradient @ kernel.T, d_kernel, d_bias


affine.defvjp(_affine_forward, _affine_backward)


@jax.custom_vjp
def affine_transposed(
    x: Float[Array, "... in"], table: Float[Array, "out in"], bias: Float[Array, " out"] | None
) -> Float[Array, "... out"]:
    """`x E^T + b`, as `affine` with `W = E^T`, from E as it lies: XLA's CPU compiler would
    transpose it first for a single row, at each step of a decoding loop.

    One token a row, as a decoding step has, is `(E x^T)^T`: for 16 rows 43 to 57 GFLOP/s on one
    core, `x E^T` 24 to 29, `x W` 15 to 30.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if x.ndim == 3 and x.shape[1] == 1:
        product = jnp.einsum("oi,bi->ob", table, x[:, 0], preferred_element_type=wide)
        product = materialize(product).T[:, None]  # or XLA makes it `x E^T` again
    else:
        product = jnp.einsum("...i,oi->...o", x, table, preferred_element_type=wide)
    return add_bias(product, bias).astype(x.dtype)


def _affine_transposed_forward(
    x: Float[Array, "... in"], table: Float[Array, "out in"], bias: Float[Array, " out"] | None
) -> tuple[Float[Array, "... out"], Saved]:
    return affine_transposed(x, table, bias), (x, table, bias)


def _affine_transposed_backward(saved: Saved, gradient: Float[Array, "... out"]) -> Gradients:
    x, table, bias = saved
    d_x, d_kernel, d_bias = _affine_backward((x, table.T, bias), gradient)
    return d_x, d_kernel.T, d_bias


affine_transposed.defvjp(_affine_transposed_forward, _affine_transposed_backward)


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
    # Widened so that the derivative adds up in float32 what many tokens give to one row.
    wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
    return jnp.take(wide, ids, axis=0, mode="fill", fill_value=jnp.nan).astype(table.dtype)


class OutputProjection(nnx.Module):
    """Logits `x W + b` in float32 or wider, W `[D, V]` its own or the transpose of a table.

    Tied (`W = E^T`) it owns at most the bias and is given the embedding table E `[V, D]` at each
    call: one Variable under two names would be two leaves to `jax.tree`. Source: Press and
    Wolf 2017.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        tied: bool = False,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.bias = default_bias(d_model, vocab_size, rngs) if bias else None
        if tied:
            self.kernel = None
        else:
            kernel = xavier_uniform(rngs.params(), (d_model, vocab_size), jnp.float32)
            self.kernel = nnx.Param(kernel)

    def __call__(
        self, x: Float[Array, "B T D"], table: Float[Array, "V D"] | None = None
    ) -> Float[Array, "B T V"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = x.astype(wide)
        bias = None if self.bias is None else self.bias[...].astype(wide)
        if table is not None:
            return affine_transposed(x, table.astype(wide), bias)
        if self.kernel is None:
            raise TypeError("a tied projection has no kernel: give it the embedding table")
        return affine(x, self.kernel[...].astype(wide), bias)
