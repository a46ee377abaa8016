"""Rotary positions: queries and keys turned by their positions, so that scores see differences."""

import math
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_transformer.config import RotaryConfig, RotaryPairing
from jax_transformer.errors import InputError


def inverse_frequencies(
    config: RotaryConfig, head_dim: int, length: int | Int[Tensor, "..."] | None = None
) -> tuple[Float[Tensor, "... R"], float]:
    """The angle per position of each pair, `[R/2]`, and what cosines and sines are multiplied by.

    Pair r turns by `base^(-2r/R)`, and with a scaling:

    - `linear`: that / factor (Chen et al. 2023);
    - `dynamic`: `base (factor length / original_max_len - (factor - 1))^(R / (R - 2))` is the base
      where `length`, that of the sequence, is above original_max_len: `[..., R/2]` for tensors of
      lengths;
    - `llama3`: between that and that / factor, by how often it turns in original_max_len;
    - `yarn`: likewise, by the place of the pair between those that turn beta_fast and beta_slow
      times (Peng et al. 2023); with an attention factor;
    - `longrope`: that / the factor of the pair in long_factors where `length` is above
      original_max_len, in short_factors elsewhere (Ding et al. 2024); with an attention factor.

    In float64. Raises:
        InputError: more features to rotate than a head has, or an odd number of them.
    """
    width = rotated_width(config, head_dim)
    plain = config.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if config.scaling == "linear":
        return plain / config.factor, 1.0
    if config.scaling == "dynamic":
        return grown_base(config, plain, width, length), 1.0
    if config.scaling == "llama3":
        turns = cast(int, config.original_max_len) * plain / (2 * math.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        kept = torch.clip((turns - low) / (high - low), 0.0, 1.0)
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
    config: RotaryConfig, plain: Tensor, width: int, length: int | Int[Tensor, "..."] | None
) -> Float[Tensor, "... R"]:
    """The frequencies of the `dynamic` scaling from the plain ones."""
    original = cast(int, config.original_max_len)
    powers = -torch.arange(0, width, 2, dtype=torch.float64) / (width - 2)
    length = torch.as_tensor(original if length is None else length)
    beyond = (length - original).clamp(min=0)[..., None]
    growth = 1.0 + beyond * (config.factor / original)
    return plain * growth.double() ** powers


def yarn_ramp(config: RotaryConfig, width: int) -> Float[Tensor, " R"]:
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
    return torch.clip((torch.arange(width // 2).double() - low) / (high - low), 0.0, 1.0)


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
    config: RotaryConfig, plain: Tensor, length: int | Int[Tensor, "..."] | None
) -> Float[Tensor, "... R"]:
    """The frequencies of the `longrope` scaling from the plain ones."""
    factors = (config.short_factors or (), config.long_factors or ())
    short, long = (plain / torch.tensor(each, dtype=torch.float64) for each in factors)
    length = torch.as_tensor(0 if length is None else length).cpu()
    return torch.where((length > cast(int, config.original_max_len))[..., None], long, short)


def longrope_attention_factor(config: RotaryConfig) -> float:
    """The given one, or `sqrt(1 + ln(factor) / ln(original_max_len))`."""
    if config.attention_factor is not None:
        return config.attention_factor
    log_factor = max(math.log(config.factor), 0.0)
    return math.sqrt(1 + log_factor / math.log(cast(int, config.original_max_len)))


def rotary_tables(
    config: RotaryConfig,
    head_dim: int,
    positions: Int[Tensor, "B T"],
    dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "B T R"], Float[Tensor, "B T R"]]:
    """Cosine and sine of the angle of each pair at each position, times the attention factor.

    In `dtype`, None for float32, as exact as that is at any position, and there is no last one. The
    length of `dynamic` and `longrope` is each row's highest position + 1, so that a batch equals
    its rows: a cache keeps the keys of shorter lengths as they were turned then.
    """
    dtype = dtype or torch.float32
    length = positions.amax(dim=1) + 1 if config.scaling in ("dynamic", "longrope") else None
    frequencies, attention_factor = inverse_frequencies(config, head_dim, length)
    frequencies = frequencies.to(positions.device)
    angles = make_angles(positions, frequencies, torch.float64)
    if config.scaling == "dynamic":
        # As exact as lengths that are known only when the program runs allow.
        angles = make_angles(positions, frequencies, dtype)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return cos.to(dtype), sin.to(dtype)


def make_angles(
    positions: Int[Tensor, "B T"], frequencies: Float[Tensor, "... R"], dtype: torch.dtype
) -> Float[Tensor, "B T R"]:
    """`positions * frequencies`, those of all rows or of each."""
    if frequencies.dim() == 2:
        frequencies = frequencies[:, None]
    return positions[..., None].to(dtype) * frequencies.to(dtype)


def apply_rotary(
    x: Float[Tensor, "B T N H"],
    cos: Float[Tensor, "#B T R"],
    sin: Float[Tensor, "#B T R"],
    pairing: RotaryPairing,
) -> Float[Tensor, "B T N H"]:
    """Each pair (a, b) of the leading features becomes `(a cos - b sin, b cos + a sin)`.

    In float32 or wider, rounded once to the dtype of x; the features beyond stay as they are.
    """
    half = cos.shape[-1]
    dtype = torch.promote_types(cos.dtype, torch.float32)
    cos, sin = cos[:, :, None].to(dtype), sin[:, :, None].to(dtype)
    wide = x[..., : 2 * half].to(dtype)
    if pairing == "half":
        first, second = wide[..., :half], wide[..., half:]
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if pairing == "half":
        rotated = torch.cat(turned, dim=-1)
    else:
        rotated = torch.stack(turned, dim=-1).reshape(wide.shape)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def half_from_adjacent(head_dim: int, width: int | None = None) -> Int[Tensor, " H"]:
    """The permutation p of a head's features with `half(x[p]) = adjacent(x)[p]`, `[H]`.

    Projections whose rows are permuted so (queries' and keys', biases too) give under the `half`
    pairing the scores that they gave under the `adjacent` one.
    """
    width = head_dim if width is None else width
    order = torch.arange(head_dim)
    return torch.cat([order[0:width:2], order[1:width:2], order[width:]])


def adjacent_from_half(head_dim: int, width: int | None = None) -> Int[Tensor, " H"]:
    """The inverse of `half_from_adjacent`."""
    return torch.argsort(half_from_adjacent(head_dim, width))


def permute_heads(weight: Tensor, num_heads: int, permutation: Int[Tensor, " H"]) -> Tensor:
    """The rows of each head in another order: `[N*H, D]` (PyTorch's layout), biases `[N*H]`.

    `num_heads` is K for the projection of keys.
    """
    heads = weight.reshape(num_heads, len(permutation), *weight.shape[1:])
    return heads[:, permutation].reshape(weight.shape)


class RotaryPositionalEncoding(nn.Module):
    """`q_m, k_n -> R_m q_m, R_n k_n`, so that scores `q_m^T R_(n-m) k_n` see positions relatively.

    R_p turns each pair of features by an angle of p (`inverse_frequencies`). It has no parameters.
    Source: Su et al. 2021; lecture section 4.4.
    """

    def __init__(self, head_dim: int, config: RotaryConfig):
        super().__init__()
        rotated_width(config, head_dim)
        self.head_dim = head_dim
        self.config = config

    def forward(
        self,
        q: Float[Tensor, "B T N H"],
        k: Float[Tensor, "B T K H"],
        positions: Int[Tensor, "#B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T N H"], Float[Tensor, "B T K H"]]:
        """Queries and keys of the same tokens, turned to `positions` (default 0, 1, ...)."""
        if positions is None:
            positions = torch.arange(q.shape[1], device=q.device)[None]
        wide = torch.promote_types(q.dtype, torch.float32)
        cos, sin = rotary_tables(self.config, self.head_dim, positions, wide)
        pairing = self.config.pairing
        return apply_rotary(q, cos, sin, pairing), apply_rotary(k, cos, sin, pairing)
