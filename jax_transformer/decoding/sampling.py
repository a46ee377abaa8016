"""How the next token is chosen from logits: filters, then the best one or one drawn at random."""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.errors import InputError

NO_TOKEN = -1
"""In place of a token where no logit of the row can be chosen: one is NaN, or all are -inf."""


@runtime_checkable
class Filter(Protocol):
    """Logits to logits; -inf is never chosen. Frozen and hashable: a part of the program."""

    def __call__(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None
    ) -> Float[Array, "B V"]:
        """`seen` marks the tokens of the prompt and those generated so far."""
        ...


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """`x / penalty` for positive logits and `x * penalty` for others, of tokens seen before.

    Source: Keskar et al. 2019, section 4.1, in the form of `transformers`. Padding is no token.

    Raises:
        InputError: a penalty that is not positive and finite.
    """

    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise InputError(
                f"repetition_penalty={self.penalty}: must be above 0; 1 changes nothing, more "
                f"makes repetitions less likely"
            )

    def __call__(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None
    ) -> Float[Array, "B V"]:
        if seen is None:
            raise TypeError("a repetition penalty needs the tokens seen so far")
        penalised = jnp.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return jnp.where(seen, penalised, logits)


@dataclasses.dataclass(frozen=True)
class Suppress:
    """These tokens never come."""

    ids: tuple[int, ...]

    def __call__(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None
    ) -> Float[Array, "B V"]:
        return logits.at[:, list(self.ids)].set(-jnp.inf) if self.ids else logits


@dataclasses.dataclass(frozen=True)
class Temperature:
    """`x / temperature`: below 1 the likely tokens gain, above 1 the unlikely ones.

    Raises:
        InputError: a temperature that is not positive and finite.
    """

    temperature: float

    def __post_init__(self) -> None:
        if self.temperature == 0:
            raise InputError(
                "temperature=0: logits cannot be divided by it; leave the temperature out to take "
                "the most likely token"
            )
        if not 0 < self.temperature < math.inf:
            raise InputError(f"temperature={self.temperature}: must be above 0, such as 0.8")

    def __call__(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None
    ) -> Float[Array, "B V"]:
        return logits / self.temperature


@dataclasses.dataclass(frozen=True)
class TopK:
    """Keep the k most likely tokens, and those as likely as the last of them.

    Source: Fan et al. 2018, section 5.4. More than V keeps all.

    Raises:
        InputError: k below 1.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"top_k={self.k}: must be at least 1, the most likely token")

    def __call__(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None
    ) -> Float[Array, "B V"]:
        if self.k >= logits.shape[-1]:
            return logits
        last = jax.lax.top_k(logits, self.k)[0][:, -1:]
        return jnp.where(logits < last, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class TopP:
    """Keep the fewest most likely tokens whose probabilities add up to p or more, and those as
    likely as the last of them.

    Source: Holtzman et al. 2020, section 3.1. (Of equally likely tokens at the border
    `transformers` keeps some, whichever its sort puts last.)

    Raises:
        InputError: p outside (0, 1].
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise InputError(f"top_p={self.p}: must be above 0 and at most 1, which keeps all")

    def __call__(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None
    ) -> Float[Array, "B V"]:
        if self.p == 1:
            return logits
        descending = -jnp.sort(-logits, axis=-1)
        # A token is kept while those before it have not reached p: the first one always is.
        before = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)[:, :-1]
        last = (before < self.p).sum(axis=-1, keepdims=True)
        last = jnp.take_along_axis(descending, last, axis=-1)
        return jnp.where(logits < last, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class MinP:
    """Keep the tokens at least p times as likely as the most likely one.

    Source: Nguyen et al. 2024, section 3.

    Raises:
        InputError: p outside [0, 1].
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise InputError(
                f"min_p={self.p}: must be from 0, which keeps all, to 1, which keeps the most "
                f"likely token"
            )

    def __call__(
        self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None
    ) -> Float[Array, "B V"]:
        likelihood = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        return jnp.where(likelihood < self.p, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
    """The most likely token; of equally likely ones the lowest id."""

    filters: tuple[Filter, ...] = ()

    def __call__(
        self,
        logits: Float[Array, "B V"],
        seen: Bool[Array, "B V"] | None,
        rows: Int[Array, " B"],
        positions: Int[Array, " B"],
    ) -> Int[Array, " B"]:
        """As `Sample.__call__`."""
        return best_token(filtered(logits, self.filters, seen))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A token drawn with the probabilities `softmax(filtered logits)`.

    The draw for a row depends on the seed, the row's number and the position of the token, and
    on nothing else: not on the batch that the row is in, nor on its padding.

    Raises:
        InputError: a seed outside 32 bits.
    """

    filters: tuple[Filter, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed}: must be a whole number from 0 to {2**32 - 1}")

    def __call__(
        self,
        logits: Float[Array, "B V"],
        seen: Bool[Array, "B V"] | None,
        rows: Int[Array, " B"],
        positions: Int[Array, " B"],
    ) -> Int[Array, " B"]:
        """The next token of each row, `NO_TOKEN` where none can be chosen.

        Args:
            logits: in float32 or wider.
            seen: the tokens of the prompt and those generated so far; None if no filter asks.
            rows: numbers of the rows, for the draw.
            positions: of the tokens to choose.
        """
        key = jax.random.key(jnp.uint32(self.seed))

        def noise(row: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, " V"]:
            place = jax.random.fold_in(jax.random.fold_in(key, row), position)
            return jax.random.gumbel(place, logits.shape[-1:], jnp.float32)

        # argmax(x + Gumbel noise) has the distribution softmax(x); -inf stays below all.
        return best_token(filtered(logits, self.filters, seen) + jax.vmap(noise)(rows, positions))


Strategy = Greedy | Sample


def needs_seen(strategy: Strategy) -> bool:
    """Whether a filter asks for the tokens seen so far."""
    return any(isinstance(each, RepetitionPenalty) for each in strategy.filters)


def filtered(
    logits: Float[Array, "B V"], filters: tuple[Filter, ...], seen: Bool[Array, "B V"] | None
) -> Float[Array, "B V"]:
    """All filters, one after the other."""
    for each in filters:
        logits = each(logits, seen)
    return logits


def best_token(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The lowest id of those with the highest logit; `NO_TOKEN` in a row with a NaN, which XLA's
    argmax would choose, and in a row of nothing but -inf."""
    highest = logits.max(axis=-1)
    return jnp.where(highest > -jnp.inf, first_highest(logits), NO_TOKEN)


def first_highest(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """`argmax`: the first of the highest, or the first NaN. XLA's CPU compiler makes no vector
    instructions of an argmax: 16 rows of 49152 take 3.5 ms on one core, these two passes 0.4."""
    highest = logits.max(axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    found = (logits == highest) | jnp.isnan(logits)
    return jnp.where(found, ids, logits.shape[-1]).min(axis=-1)


def make_strategy(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> Strategy:
    """The strategy of these settings: greedy unless one of them asks for a draw.

    Filters work in the order of `transformers`: repetition penalty, temperature, top-k, top-p,
    min-p.

    Raises:
        InputError: a value out of range.
    """
    penalty = () if repetition_penalty is None else (RepetitionPenalty(repetition_penalty),)
    if all(setting is None for setting in (temperature, top_k, top_p, min_p, seed)):
        return Greedy(filters=penalty)
    filters: list[Filter] = [*penalty]
    if temperature is not None:
        filters.append(Temperature(temperature))
    if top_k is not None:
        filters.append(TopK(top_k))
    if top_p is not None:
        filters.append(TopP(top_p))
    if min_p is not None:
        filters.append(MinP(min_p))
    return Sample(filters=tuple(filters), seed=0 if seed is None else seed)
