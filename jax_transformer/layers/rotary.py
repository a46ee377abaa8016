"""Rotary positions: queries and keys turned by their positions, so that scores see differences."""

import math
from typing import cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from jax_transformer.config import RotaryConfig, RotaryPairing
from jax_transformer.errors import InputError
from jax_transformer.layers.fusion import materialize

Frequencies = np.ndarray | Float[Array, "... R"]


def inverse_frequencies(
    config: RotaryConfig, head_dim: int, length: int | Int[Array, "..."] | None = None
) -> tuple[Frequencies, float]:
    """The angle per position of each pair, `[R/2]`, and what cosines and sines are multiplied by.

    Pair r turns by `base^(-2r/R)`, and with a scaling:

    - `linear`: that / factor (Chen et al. 2023);
    - `dynamic`: `base (factor length / original_max_len - (factor - 1))^(R / (R - 2))` is the base
      where `length`, that of the sequence, is above original_max_len: `[..., R/2]` for traced
      lengths;
    - `llama3`: between that and that / factor, by how often it turns in original_max_len;
    - `yarn`: likewise, by the place of the pair between those that turn beta_fast and beta_slow
      times (Peng et al. 2023); with an attention factor;
    - `longrope`: that / the factor of the pair in long_factors where `length` is above
      original_max_len, in short_factors elsewhere (Ding et al. 2024); with an attention factor.

    In float64, but for traced lengths. Raises:
        InputError: more features to rotate than a head has, or an odd number of them.
    """
    width = rotated_width(config, head_dim)
    plain = config.base ** (-np.arange(0, width, 2) / width)
    if config.scaling == "linear":
        return plain / config.factor, 1.0
    if config.scaling == "dynamic":
        return grown_base(config, plain, width, length), 1.0
    if config.scaling == "llama3":
        turns = cast(int, config.original_max_len) * plain / (2 * math.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * plain + (1 - kept) * plain / config.factor, 1.0
    if config.scaling == "yarn":
        kept = 1.0 - yarn_ramp(config, width)
        return kept * plain + (1 - kept) * plain / config.factor, yarn_attention_factor(config)
    if config.scaling == "longrope":
        return longrope_frequencies(config, plain, length), longrope_attention_factor(config)
    return plain, 1.0


def rotated_width(config: RotaryConfig, head_dim: int) -> int:
    """The rotated features R of a head.

    Raises:
        InputError: more than the head has, or an odd number of them; a base that cannot grow; not
            as many factors as pairs.
    """
    width = head_dim if config.width is None else config.width
    if width > head_dim:
        raise InputError(f"rotary width={width} is more than the head's {head_dim} features")
    if width % 2:
        raise InputError(
            f"heads of {width} features: rotary positions turn pairs, set an even rotary width"
        )
    if config.scaling == "dynamic" and width == 2:
        raise InputError("scaling='dynamic' with 2 rotated features: there is no base to grow")
    factors = config.short_factors
    if factors is not None and len(factors) != width // 2:
        raise InputError(f"{len(factors)} short_factors: must be {width // 2}, one a pair")
    return width


def grown_base(
    config: RotaryConfig, plain: np.ndarray, width: int, length: int | Int[Array, "..."] | None
) -> Frequencies:
    """The frequencies of the `dynamic` scaling from the plain ones."""
    original = cast(int, config.original_max_len)
    powers = -np.arange(0, width, 2) / (width - 2)
    if length is None or isinstance(length, int):
        longest = max(length or 0, original)
        return plain * (config.factor * longest / original - (config.factor - 1)) ** powers
    # Integers are subtracted first: exactly 1 where the length is not above the original one.
    beyond = jnp.maximum(length - original, 0)[..., None]
    growth = 1.0 + beyond * (config.factor / original)
    return jnp.asarray(plain) * growth ** jnp.asarray(powers)


def yarn_ramp(config: RotaryConfig, width: int) -> np.ndarray:
    """0 for pairs that turn often, 1 for those that turn rarely, `[R/2]`."""

    def place(turns: float) -> float:
        """The pair (a fraction of one, too) that turns so often in the original length."""
        wave = cast(int, config.original_max_len) / (turns * 2 * math.pi)
        return width * math.log(wave) / (2 * math.log(config.base))

    low, high = place(config.beta_fast), place(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)


def yarn_attention_factor(config: RotaryConfig) -> float:
    """The given one, or 0.1 ln(factor) + 1, or the quotient of two of its kind."""
    if config.attention_factor is not None:
        return config.attention_factor
    log_factor = max(math.log(config.factor), 0.0)
    if config.mscale is not None and config.mscale_all_dim is not None:
        return (0.1 * config.mscale * log_factor + 1) / (
            0.1 * config.mscale_all_dim * log_factor + 1
        )
    return 0.1 * log_factor + 1


def longrope_frequencies(
    config: RotaryConfig, plain: np.ndarray, length: int | Int[Array, "..."] | None
) -> Frequencies:
    """The frequencies of the `longrope` scaling from the plain ones."""
    factors = (config.short_factors or (), config.long_factors or ())
    short, long = (plain / np.asarray(each) for each in factors)
    original = cast(int, config.original_max_len)
    if length is None or isinstance(length, int):
        return long if (length or 0) > original else short
    return jnp.where((length > original)[..., None], long, short)


def longrope_attention_factor(config: RotaryConfig) -> float:
    """The given one, or `sqrt(1 + ln(factor) / ln(original_max_len))`."""
    if config.attention_factor is not None:
        return config.attention_factor
    log_factor = max(math.log(config.factor), 0.0)
    return math.sqrt(1 + log_factor / math.log(cast(int, config.original_max_len)))


def rotary_tables(
    config: RotaryConfig,
    head_dim: int,
    positions: Int[Array, "B T"],
    dtype: jnp.dtype | type | None = None,
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Cosine and sine of the angle of each pair at each position, times the attention factor.

    In `dtype`, None for float32, as exact as that is at any position, and there is no last one. The
    length of `dynamic` and `longrope` is each row's highest position + 1, so that a batch equals
    its rows: a cache keeps the keys of shorter lengths as they were turned then.
    """
    dtype = jnp.dtype(dtype or jnp.float32)
    length = positions.max(axis=1) + 1
    if config.scaling == "longrope":
        original = cast(int, config.original_max_len)
        short, attention_factor = inverse_frequencies(config, head_dim, original)
        long, _ = inverse_frequencies(config, head_dim, original + 1)
        angles = jnp.where(
            (length > original)[:, None, None],
            make_angles(positions, long, dtype),
            make_angles(positions, short, dtype),
        )
    else:
        given = length if config.scaling == "dynamic" else None
        frequencies, attention_factor = inverse_frequencies(config, head_dim, given)
        angles = make_angles(positions, frequencies, dtype)
    # In one array: XLA's CPU compiler would compute two again for each head and pair of features.
    tables = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1) * attention_factor
    cos, sin = jnp.split(materialize(tables), 2, axis=-1)
    return cos, sin


def make_angles(
    positions: Int[Array, "B T"], frequencies: Frequencies, dtype: jnp.dtype
) -> Float[Array, "B T R"]:
    """`positions * frequencies`, or less whole turns."""
    if not isinstance(frequencies, np.ndarray):
        return positions[..., None].astype(dtype) * frequencies[:, None].astype(dtype)
    if dtype == jnp.float64:
        return positions[..., None].astype(dtype) * jnp.asarray(frequencies)
    return reduced_angles(positions, frequencies).astype(dtype)


def reduced_angles(positions: Int[Array, "B T"], frequencies: np.ndarray) -> Float[Array, "B T R"]:
    """`positions * frequencies` less whole turns, in [-pi, pi), to float32's own precision.

    A product of thousands of radians in float32 is off by 1e-4 and more. As 64-bit fractions of a
    turn the frequencies are multiplied in integers, which drop whole turns by themselves.
    """
    turns = [int(fraction * 2**64) % 2**64 for fraction in frequencies / (2 * math.pi)]
    high = np.array([turn >> 32 for turn in turns], np.uint32)
    low = np.array([turn & 0xFFFFFFFF for turn in turns], np.uint32)
    count = jnp.abs(positions)[..., None].astype(jnp.uint32)
    product = count * high + high_word(count, low)
    angles = product.astype(jnp.int32).astype(jnp.float32) * (math.pi * 2.0**-31)
    return angles * jnp.sign(positions)[..., None].astype(jnp.float32)


def high_word(a: UInt32[Array, "..."], b: np.ndarray) -> UInt32[Array, "..."]:
    """The upper 32 bits of the 64-bit product of two words, at most 2 too low."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    return a_high * b_high + ((a_high * b_low) >> 16) + ((a_low * b_high) >> 16)


def apply_rotary(
    x: Float[Array, "B T N H"],
    cos: Float[Array, "#B T R"],
    sin: Float[Array, "#B T R"],
    pairing: RotaryPairing,
) -> Float[Array, "B T N H"]:
    """Each pair (a, b) of the leading features becomes `(a cos - b sin, b cos + a sin)`.

    In float32 or wider, rounded once to the dtype of x; the features beyond stay as they are.
    """
    half = cos.shape[-1]
    dtype = jnp.promote_types(cos.dtype, jnp.float32)
    cos, sin = cos[:, :, None].astype(dtype), sin[:, :, None].astype(dtype)
    wide = x[..., : 2 * half].astype(dtype)
    if pairing == "half":
        first, second = wide[..., :half], wide[..., half:]
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if pairing == "half":
        rotated = jnp.concatenate(turned, axis=-1)
    else:
        rotated = jnp.stack(turned, axis=-1).reshape(wide.shape)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def half_from_adjacent(head_dim: int, width: int | None = None) -> np.ndarray:
    """The permutation p of a head's features with `half(x[p]) = adjacent(x)[p]`, `[H]`.

    Projections whose rows are permuted so (queries' and keys', biases too) give under the `half`
    pairing the scores that they gave under the `adjacent` one.
    """
    width = head_dim if width is None else width
    order = np.arange(head_dim)
    return np.concatenate([order[0:width:2], order[1:width:2], order[width:]])


def adjacent_from_half(head_dim: int, width: int | None = None) -> np.ndarray:
    """The inverse of `half_from_adjacent`."""
    return np.argsort(half_from_adjacent(head_dim, width))


def permute_heads(weight: np.ndarray, num_heads: int, permutation: np.ndarray) -> np.ndarray:
    """The rows of each head in another order: `[N*H, D]` (PyTorch's layout), biases `[N*H]`.

    `num_heads` is K for the projection of keys.
    """
    heads = weight.reshape(num_heads, len(permutation), *weight.shape[1:])
    return heads[:, permutation].reshape(weight.shape)


class RotaryPositionalEncoding(nnx.Module):
    """`q_m, k_n -> R_m q_m, R_n k_n`, so that scores `q_m^T R_(n-m) k_n` see positions relatively.

    R_p turns each pair of features by an angle of p (`inverse_frequencies`). It has no parameters.
    Source: Su et al. 2021; lecture section 4.4.
    """

    def __init__(self, head_dim: int, config: RotaryConfig):
        rotated_width(config, head_dim)
        self.head_dim = head_dim
        self.config = config

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        positions: Int[Array, "#B T"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Queries and keys of the same tokens, turned to `positions` (default 0, 1, ...)."""
        if positions is None:
            positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        wide = jnp.promote_types(q.dtype, jnp.float32)
        cos, sin = rotary_tables(self.config, self.head_dim, positions, wide)
        pairing = self.config.pairing
        return apply_rotary(q, cos, sin, pairing), apply_rotary(k, cos, sin, pairing)
