"""Known faults of decoding, each as a change to what a model without a cache is given."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jax_transformer.verification.decoding.task import Decoding, Layout


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change under which the logits may agree."""

    kind: str
    """The name of the catalogue's entry."""
    sentence: str
    """What it means: it follows "agrees when"."""
    change: Callable[[Layout], Layout]


def remedies(layout: Layout, decoding: Decoding) -> Iterator[Remedy]:
    """The catalogue."""
    yield from other_positions(layout)
    yield from padded_prompts(layout)
    yield from lost_slots(layout)
    yield from other_starts(layout, decoding)
    if decoding.source is not None:
        yield Remedy(
            "source padding seen",
            "padded source tokens are seen: the steps lack the source's mask",
            lambda layout: dataclasses.replace(
                layout, source_mask=np.ones_like(layout.source_mask)
            ),
        )


def moved(
    change: Callable[[np.ndarray, np.ndarray, Layout], np.ndarray],
) -> Callable[[Layout], Layout]:
    """Other positions `change(positions, columns, layout)`."""

    def changed(layout: Layout) -> Layout:
        columns = np.arange(layout.tokens.shape[1])
        positions = np.maximum(change(layout.positions, columns, layout), 0)
        return dataclasses.replace(layout, positions=positions.astype(np.int32))

    return changed


def hidden(
    lost: Callable[[np.ndarray, np.ndarray, Layout], np.ndarray],
) -> Callable[[Layout], Layout]:
    """No sight of the keys where `lost(queries, keys, layout)`, `[T, T]` of columns, holds."""

    def changed(layout: Layout) -> Layout:
        columns = np.arange(layout.tokens.shape[1])
        gone = lost(columns[:, None], columns, layout)
        return dataclasses.replace(layout, seen=layout.seen & ~gone)

    return changed


def other_positions(layout: Layout) -> Iterator[Remedy]:
    """Of the tokens that are read one at a time."""
    for offset in (1, -1, 2):
        yield Remedy(
            "position under the cache",
            f"tokens after the prompt have positions {abs(offset)} too "
            f"{'high' if offset > 0 else 'low'}: the first one has the prompt's length",
            moved(lambda p, columns, of, offset=offset: p + offset * (columns >= of.width)),
        )
    yield Remedy(
        "cache length not added",
        "each token after the prompt has position 0: add the number of tokens in the cache",
        moved(lambda p, columns, of: p * (columns < of.width)),
    )
    yield Remedy(
        "cache length not added",
        "tokens after the prompt count from 0 again: add the length of the prompt",
        moved(lambda p, columns, of: np.where(columns < of.width, p, columns - of.width)),
    )


def padded_prompts(layout: Layout) -> Iterator[Remedy]:
    """What padding of prompts does that are continued together."""
    if not layout.padding.any():
        return
    for text, counted in {
        "positions count padding": lambda columns, of: columns >= 0,
        "positions of prompts count padding": lambda columns, of: columns < of.width,
        "positions after the prompt count padding": lambda columns, of: columns >= of.width,
    }.items():
        yield Remedy(
            "padded prompts",
            f"{text}: make position ids of the mask",
            moved(lambda p, columns, of, counted=counted: p + of.padding * counted(columns, of)),
        )
    for text, blind in {
        "padding of prompts is seen": lambda queries, of: queries < 0,
        "padding of prompts is seen by the tokens after them": lambda queries, of: (
            queries < of.width
        ),
    }.items():
        yield Remedy(
            "prompt padding seen",
            f"{text}: the mask is left out",
            lambda layout, blind=blind: seeing_padding(layout, blind),
        )


def seeing_padding(layout: Layout, blind: Callable[[np.ndarray, Layout], np.ndarray]) -> Layout:
    """Padding is seen, but by the queries that are `blind`."""
    columns = np.arange(layout.tokens.shape[1])
    causal = columns[:, None] >= columns
    still = blind(columns[:, None], layout)
    return dataclasses.replace(layout, seen=np.where(still, layout.seen, causal))


def lost_slots(layout: Layout) -> Iterator[Remedy]:
    """Slots of the cache that are written over, or not read."""
    last = layout.tokens.shape[1]
    yield Remedy(
        "cache slot overwritten",
        "the first token after the prompt is written over the prompt's last one: it goes to the "
        "slot after it",
        hidden(lambda q, k, of: (q >= of.width) & (k == of.width - 1)),
    )
    yield Remedy(
        "cache slot overwritten",
        "each token after the prompt is written over the one before: the cache's length does not "
        "grow",
        hidden(lambda q, k, of: (k >= of.width) & (k < q)),
    )
    for size in range(layout.width, last):
        yield Remedy(
            "cache too short",
            f"the cache has {size} slots, the last of which is written again and again: "
            f"dynamic_update_slice clamps, give it {last} slots",
            hidden(lambda q, k, of, size=size: (k >= size - 1) & (k < q) & (q >= size)),
        )
    yield Remedy(
        "own key not read",
        "tokens after the prompt do not see their own key: the cache is read before it is written, "
        "or its mask is one slot short",
        hidden(lambda q, k, of: (q >= of.width) & (k == q)),
    )
    for window in range(1, last):
        yield Remedy(
            "cache window",
            f"tokens after the prompt see the last {window} tokens alone: the cache keeps no more",
            hidden(lambda q, k, of, window=window: (q >= of.width) & (q - k >= window)),
        )


def other_starts(layout: Layout, decoding: Decoding) -> Iterator[Remedy]:
    """What prompts begin with."""
    first = np.array([[width] for width in layout.padding[:, 0]])

    def begin(layout: Layout, token: int) -> Layout:
        tokens = layout.tokens.copy()
        np.put_along_axis(tokens, first, token, axis=1)
        return dataclasses.replace(layout, tokens=tokens)

    usual = {prompt[0] for prompt in decoding.prompts}
    for token in decoding.start_ids:
        if usual != {token}:
            was = ", ".join(map(str, sorted(usual)))
            yield Remedy(
                "start token",
                f"the start token is {token}, not {was}: read decoder_start_token_id, or "
                f"bos_token_id, of the reference's config",
                lambda layout, token=token: begin(layout, token),
            )
    if decoding.source is None:
        yield Remedy(
            "start token missing",
            "the first token of each prompt is left out: one side puts a start token before "
            "prompts, the other does not",
            without_first,
        )


def without_first(layout: Layout) -> Layout:
    """The first real token of each row is not there."""
    columns = np.arange(layout.tokens.shape[1])
    gone = (columns == layout.padding)[:, None, None]
    return dataclasses.replace(
        layout,
        seen=layout.seen & ~gone,
        positions=np.maximum(layout.positions - 1, 0),
    )
