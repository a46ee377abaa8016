"""Token by token: which way chooses another one, and whether that is a tie or a fault."""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jax_transformer.models.parameters import cast_model
from jax_transformer.verification.compare import SAME_FUNCTION, relative_error
from jax_transformer.verification.decoding.causes import explain_decoding
from jax_transformer.verification.decoding.task import Layout, most_likely
from jax_transformer.verification.decoding.ways import all_at_once
from jax_transformer.verification.diagnose import Diagnosis
from jax_transformer.verification.oracle import float64_throughout, in_dtype
from jax_transformer.verification.pair import Pair


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where a way chooses another token than the leading one."""

    row: int
    """The prompt, from 1."""
    step: int
    """The token after it, from 1."""
    tokens: tuple[int, int]
    """Of this way, of the leading one."""
    margins: tuple[float, float]
    """On each side the most likely token's logit over the next one's."""
    gap: float
    """How much the two sides contradict each other: the logit of this way's token over that of the
    other on this side, plus the reverse on the other side."""
    error: float
    """How far the four logits are from their float64 values, together."""

    @property
    def tie(self) -> bool:
        """Whether the numerical error explains it: of one function, evaluated twice, the gap is
        never larger."""
        return self.gap <= self.error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """What one way of decoding gives."""

    name: str
    error: float
    """Float64: of all its logits against those of our side without a cache."""
    tokens: tuple[tuple[int, ...], ...]
    """Chosen, a row each, after the tokens that the leading way had chosen before."""
    agreement: float
    """Fraction of tokens that are those of the leading way."""
    differences: tuple[Choice, ...]
    """The first one of each row that has any."""

    @property
    def same(self) -> bool:
        """The same function, and the same tokens but for ties."""
        return self.error <= SAME_FUNCTION and all(each.tie for each in self.differences)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingReport:
    """What came of continuing the same prompts in several ways."""

    dtype: str
    """In which tokens are chosen."""
    prompts: tuple[tuple[int, ...], ...]
    ways: tuple[Decoded, ...]
    diagnoses: tuple[Diagnosis, ...]
    """Of the ways whose logits differ in float64."""

    @property
    def same(self) -> bool:
        """All ways give the same, but for ties."""
        return all(way.same for way in self.ways)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.same:
            count = sum(map(len, self.ways[0].tokens))
            ties = sum(len(way.differences) for way in self.ways)
            text = f"the same {count} tokens decoded, with cache and without"
            return text if not ties else f"{text}, but for {ties} tie{'s' if ties > 1 else ''}"
        if self.diagnoses:
            causes = [f"`{each.module}`: {each.sentence}" for each in self.diagnoses]
            return f"different: {'; '.join(causes)}"
        wrong = next(way for way in self.ways if not way.same)
        return f"different: `{wrong.name}`: {self.fault(wrong)}"

    def fault(self, way: Decoded) -> str:
        """What is wrong with a way, in a sentence."""
        choice = next((each for each in way.differences if not each.tie), None)
        if choice is None:
            return f"decodes the same tokens, but its logits are off by {way.error:.1e}"
        return (
            f"chooses {choice.tokens[0]}, not {choice.tokens[1]}, as token {choice.step} after "
            f"prompt {choice.row}, by margins of {choice.margins[0]:.2g} and "
            f"{choice.margins[1]:.2g}, where rounding explains {choice.error:.2g}"
        )


def compare_decoding(
    pair: Pair,
    model: nnx.Module,
    *,
    dtype: str | None,
    models_differ: bool,
    progress: Callable[[str], None],
) -> DecodingReport:
    """Decode on both sides, with caches and without.

    The reference's first way chooses tokens in `dtype`; all others are given these, so that each is
    asked the same at each token. Then the same in float64, for the numerical error.

    Args:
        pair: with a `decoding`.
        model: our side in float64, made under `jax.enable_x64`.
        dtype: in which tokens are chosen; None: float64.
        models_differ: then the logits of the reference do, too, which is no fault of decoding.
        progress: is told what is done next.
    """
    decoding = pair.decoding
    assert decoding is not None
    narrow: Logits = {}
    tokens = None
    if dtype is not None:
        progress(f"decoding in {dtype}")
        narrow, tokens = run_all(pair, cast_model(pair.ours, dtype), dtype, None)
    with jax.enable_x64(True):
        progress("decoding in float64")
        wide, tokens = run_all(pair, model, "float64", tokens)
        base = all_at_once(model, decoding, Layout.of(decoding, tokens))
        progress("looking for causes in decoding")
        chosen = {n: w for n, w in wide.items() if n in decoding.ours or not models_differ}
        diagnoses = explain_decoding(model, decoding, tokens, chosen, base)
    narrow = narrow or wide
    leading = next(iter(decoding.theirs))
    return DecodingReport(
        dtype=dtype or "float64",
        prompts=decoding.prompts,
        ways=tuple(
            Decoded(
                name=name,
                error=relative_error(wide[name], base),
                tokens=tuple(tuple(map(int, row)) for row in most_likely(logits)),
                agreement=float((most_likely(logits) == tokens).mean()),
                differences=first_differences(
                    (narrow[leading], wide[leading]), (logits, wide[name])
                ),
            )
            for name, logits in narrow.items()
        ),
        diagnoses=tuple(diagnoses),
    )


Logits = dict[str, np.ndarray]
"""`[B, n, V]`, by way."""


def run_all(
    pair: Pair, model: nnx.Module, dtype: str, tokens: np.ndarray | None
) -> tuple[Logits, np.ndarray]:
    """What each way gives in a dtype, the leading one first, and the tokens that were chosen.

    Args:
        pair: with a `decoding`.
        model: our side in that dtype.
        dtype: of the reference.
        tokens: chosen already; None: by the leading way.
    """
    import torch

    decoding = pair.decoding
    assert decoding is not None
    found: Logits = {}
    with in_dtype(pair.theirs, getattr(torch, dtype)) as theirs, contextlib.ExitStack() as stack:
        if dtype == "float64":
            stack.enter_context(float64_throughout(theirs))
        for name, way in decoding.theirs.items():
            found[name] = way(theirs, decoding, tokens)
            tokens = most_likely(found[name]) if tokens is None else tokens
    assert tokens is not None
    for name, way in decoding.ours.items():
        found[name] = np.asarray(way(model, decoding, tokens))
    return found, tokens


def first_differences(
    leading: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
) -> tuple[Choice, ...]:
    """The first token of each row that another way chooses otherwise; of both ways the logits in
    the dtype and in float64."""
    tokens = [most_likely(logits) for logits, _ in (other, leading)]
    differ = tokens[0] != tokens[1]
    found = []
    for row in np.flatnonzero(differ.any(axis=1)):
        step = int(differ[row].argmax())
        mine, yours = (int(each[row, step]) for each in tokens)
        # Both sides' logits of both tokens, each side's own first.
        here = [
            logits[row, step].astype(np.float64) for pair in (other, leading) for logits in pair
        ]
        ours, ours_wide, theirs, theirs_wide = here
        ids = [mine, yours]
        error = np.abs(ours - ours_wide)[ids].sum() + np.abs(theirs - theirs_wide)[ids].sum()
        least = 4 * SAME_FUNCTION * np.abs(theirs_wide).max()
        found.append(
            Choice(
                row=int(row) + 1,
                step=step + 1,
                tokens=(mine, yours),
                margins=(margin(ours), margin(theirs)),
                gap=float(ours[mine] - ours[yours] + theirs[yours] - theirs[mine]),
                error=float(error + least),
            )
        )
    return tuple(found)


def margin(logits: np.ndarray) -> float:
    """The most likely token's logit over the next one's."""
    second, first = np.sort(logits)[-2:]
    return float(first - second)
