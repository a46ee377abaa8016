"""The parts of a training step by themselves, forward and backward, in JAX and PyTorch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from timing import compare, print_table

import jax_transformer.layers.attention as jax_attention
import torch_reference.layers.attention as torch_attention
from jax_transformer.config import ModelConfig
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.linear import affine
from jax_transformer.layers.normalization import LayerNorm
from jax_transformer.training.loss import cross_entropy as jax_cross_entropy
from torch_reference.training.loss import cross_entropy as torch_cross_entropy

Pair = tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]


def pieces(config: ModelConfig, rows: int, length: int) -> dict[str, Pair]:
    """A function in each framework and the arrays that it is given and differentiated in."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tokens, width, inner = (rows, length), config.d_model, config.d_ff
    heads = (*tokens, config.num_heads, width // config.num_heads)
    labels = rng.integers(0, config.tgt_vocab_size, tokens)
    rate, key = config.dropout, jax.random.key(0)
    jax_norm, torch_norm = LayerNorm(width), torch.nn.LayerNorm(width)
    linear = (affine, lambda x, kernel, bias: torch.nn.functional.linear(x, kernel.T, bias))
    return {
        f"dense {width} -> {width}": (
            *linear,
            [draw(*tokens, width), draw(width, width), draw(width)],
        ),
        f"dense {width} -> {inner}": (
            *linear,
            [draw(*tokens, width), draw(width, inner), draw(inner)],
        ),
        f"dense {inner} -> {width}": (
            *linear,
            [draw(*tokens, inner), draw(inner, width), draw(width)],
        ),
        "attention of projected heads": (
            lambda *heads: jax_attention.dot_product_attention(*heads)[0],
            lambda *heads: torch_attention.dot_product_attention(*heads)[0],
            [draw(*heads) for _ in range(3)],
        ),
        f"dropout of {inner}": (
            lambda x: Dropout(rate)(x, key),
            lambda x: torch.nn.functional.dropout(x, rate),
            [draw(*tokens, inner)],
        ),
        f"LayerNorm of {width}": (jax_norm, torch_norm, [draw(*tokens, width)]),
        f"projection and loss over {config.tgt_vocab_size}": (
            lambda x, kernel, bias: (
                jax_cross_entropy(
                    affine(x, kernel, bias), jnp.asarray(labels), label_smoothing=0.1
                ).total
            ),
            lambda x, kernel, bias: (
                torch_cross_entropy(
                    linear[1](x, kernel, bias), torch.from_numpy(labels), label_smoothing=0.1
                ).total
            ),
            [draw(*tokens, width), draw(width, config.tgt_vocab_size), draw(config.tgt_vocab_size)],
        ),
    }


def measure_pieces(config: ModelConfig, rows: int, length: int, *, rounds: int) -> None:
    """Print the least time of each part, forward and backward."""
    lines = []
    for name, (jax_function, torch_function, arrays) in pieces(config, rows, length).items():
        timings = compare(
            {
                "JAX": jax_gradients(jax_function, arrays),
                "PyTorch": torch_gradients(torch_function, arrays),
            },
            rounds=rounds,
        )
        ours, theirs = timings["JAX"], timings["PyTorch"]
        cells = (ours.best, theirs.best, ours.cpu, theirs.cpu)
        lines.append(
            (
                name,
                *(f"{1e3 * seconds:.2f}" for seconds in cells),
                f"{theirs.best / ours.best:.2f}",
            )
        )
    print_table(
        "Parts, forward and backward (PyTorch eager)",
        ("", "JAX ms", "PyTorch ms", "JAX cpu", "PyTorch cpu", "PyTorch / JAX"),
        lines,
    )


def jax_gradients(function: Callable[..., Any], arrays: list[np.ndarray]) -> Callable[[], object]:
    inputs = tuple(jnp.asarray(array) for array in arrays)

    def run(inputs: tuple[jax.Array, ...], seed: jax.Array) -> Any:
        out, backward = jax.vjp(function, *inputs)
        return out, backward(seed)

    seed = jnp.ones_like(jax.eval_shape(function, *inputs))
    compiled = jax.jit(run)
    return lambda: jax.block_until_ready(compiled(inputs, seed))


def torch_gradients(function: Callable[..., Any], arrays: list[np.ndarray]) -> Callable[[], object]:
    inputs = [torch.from_numpy(array).requires_grad_() for array in arrays]
    with torch.no_grad():
        seed = torch.ones_like(function(*inputs))

    def run() -> Any:
        for leaf in inputs:
            leaf.grad = None
        out = function(*inputs)
        out.backward(seed)
        return out

    return run
