"""The two programs that continue prompts: one reads them all, one gives each next token."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import PAD_ID, DecoderOnlyConfig
from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.decoding.rolling import RollingCache, roll_slots
from jax_transformer.decoding.sampling import Strategy, needs_seen
from jax_transformer.layers.linear import transpose_kernels
from jax_transformer.layers.mask import create_causal_mask
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import Tree, split

EMPTY = -1
"""In place of a position, where a slot holds no token."""


class Structure:
    """A model without its arrays, as `nnx.GraphDef`, whose hash takes milliseconds: too long to be
    taken at each step."""

    def __init__(self, graphdef: nnx.GraphDef):
        self.graphdef = graphdef
        self._hash = hash(graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Structure) and self.graphdef == other.graphdef

    def merge(self, params: Tree, buffers: Tree) -> DecoderOnly:
        """The model with these arrays."""
        return nnx.merge(self.graphdef, params, buffers)


class Chosen(NamedTuple):
    """What the caller looks at, while the state goes into the next step."""

    token: Int[Array, " B"]
    """`sampling.NO_TOKEN` where none could be chosen; padding in rows that had ended before."""
    ended: Bool[Array, " B"]
    """Rows of which this is the end token, or that had ended before."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GenerationState:
    """What one step leaves to the next."""

    token: Int[Array, " B"]
    """Chosen last, not read yet; padding in rows that have ended."""
    position: Int[Array, " B"]
    """Of that token."""
    ended: Bool[Array, " B"]
    rows: Int[Array, " B"]
    """The place of each prompt among all."""
    seen: Bool[Array, "B V"] | None
    """The tokens of the prompt and those chosen, where the strategy asks for them."""
    key_positions: Int[Array, "B S"]
    """Of the tokens in the slots of the caches, or `EMPTY`."""
    caches: list[KeyValueCache]
    """One entry a layer, all of one size, squeezed."""


@functools.partial(jax.jit, static_argnames=("structure", "strategy", "slots", "end_ids"))
def prefill(
    structure: Structure,
    params: Tree,
    buffers: Tree,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    rows: Int[Array, " B"],
    *,
    strategy: Strategy,
    slots: int,
    end_ids: tuple[int, ...],
) -> tuple[GenerationState, Chosen]:
    """Read the prompts and choose the first token of each.

    Compiles for each shape of `tokens` and each of the static arguments. Padding is on the left:
    it has position 0, is seen by no token, and is in no row's count of positions.
    """
    model = structure.merge(params, buffers)
    batch, width = tokens.shape
    windows = [window for window in model.config.windows if window is not None]
    window = max(windows) if len(windows) == len(model.config.windows) else None
    real = jnp.arange(width) >= width - lengths[:, None]
    positions = jnp.maximum(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
    caches = empty_caches(model, batch, width)
    mask, local_mask = causal_masks(model.config, positions, positions, real)
    hidden = model.step(tokens, caches, mask, positions, positions, local_mask)
    logits = model.project(hidden[:, -1:])[:, 0]

    key_positions = jnp.where(real, positions, EMPTY)
    if window is not None and window < slots:
        caches: list[KeyValueCache] = [RollingCache.last_of(cache, window) for cache in caches]
        key_positions = roll_slots(key_positions, window, axis=1, fill=EMPTY)
    else:
        caches = [cache.grow(slots) for cache in caches]
        key_positions = roll_slots(key_positions, slots, axis=1, fill=EMPTY)
    seen = None
    if needs_seen(strategy):
        marks = jnp.zeros((batch, logits.shape[1]), bool)
        seen = marks.at[jnp.arange(batch)[:, None], tokens].max(real)
    state = GenerationState(
        token=jnp.zeros(batch, jnp.int32),
        position=jnp.maximum(lengths - 1, 0),
        ended=lengths == 0,
        rows=rows,
        seen=seen,
        key_positions=key_positions,
        caches=[cache.squeezed() for cache in caches],
    )
    return choose(state, logits, strategy, end_ids)


@functools.partial(
    jax.jit, static_argnames=("structure", "strategy", "end_ids"), donate_argnames="state"
)
def step(
    structure: Structure,
    params: Tree,
    buffers: Tree,
    state: GenerationState,
    *,
    strategy: Strategy,
    end_ids: tuple[int, ...],
) -> tuple[GenerationState, Chosen]:
    """Read the last token of each row and choose the next.

    The caches are overwritten in place. The caller sees to it that a slot is left: XLA would
    clamp a write past the end onto the last one.
    """
    model = structure.merge(params, buffers)
    positions = state.position[:, None]
    caches = [cache.unsqueezed() for cache in state.caches]
    key_positions = jax.lax.dynamic_update_slice_in_dim(
        state.key_positions, positions, caches[0].next_slot, axis=1
    )
    mask, local_mask = causal_masks(model.config, positions, key_positions, key_positions != EMPTY)
    hidden = model.step(state.token[:, None], caches, mask, positions, key_positions, local_mask)
    state = dataclasses.replace(
        state, key_positions=key_positions, caches=[cache.squeezed() for cache in caches]
    )
    return choose(state, model.project(hidden)[:, 0], strategy, end_ids)


def causal_masks(
    config: DecoderOnlyConfig,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    key_valid: Bool[Array, "B S"],
) -> tuple[Bool[Array, "B 1 T S"], Bool[Array, "B 1 T S"] | None]:
    """What the blocks may see, and what those with a window of their own may, if there are any."""
    mask = create_causal_mask(positions, key_positions, config.layer.window, key_valid=key_valid)
    if config.local_layer is None:
        return mask, None
    window = config.local_layer.window
    return mask, create_causal_mask(positions, key_positions, window, key_valid=key_valid)


def choose(
    state: GenerationState,
    logits: Float[Array, "B V"],
    strategy: Strategy,
    end_ids: tuple[int, ...],
) -> tuple[GenerationState, Chosen]:
    """The state with the token that follows; rows that have ended get padding."""
    position = state.position + 1
    token = strategy(logits, state.seen, state.rows, position)
    token = jnp.where(state.ended, PAD_ID, token)
    ended = state.ended | jnp.isin(token, jnp.array(end_ids, jnp.int32))
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    state = dataclasses.replace(state, token=token, position=position, ended=ended, seen=seen)
    return state, Chosen(token, ended)


def empty_caches(model: DecoderOnly, batch: int, slots: int) -> list[KeyValueCache]:
    """One entry a layer, in the dtype of its keys."""
    layer, dtype = model.config.layer, model.embedding.embedding[...].dtype
    like = jnp.zeros((batch, 0, layer.kv_heads, layer.head_width), dtype)
    return [KeyValueCache.empty(like, slots) for _ in model.layers]


def transposed(structure: Structure, params: Tree, buffers: Tree) -> tuple[Structure, Tree, Tree]:
    """The model with its kernels in the order that products of few rows read fastest."""

    def parts(params: Tree, buffers: Tree) -> tuple[nnx.GraphDef, Tree, Tree]:
        model = structure.merge(params, buffers)
        transpose_kernels(model)
        return split(model)

    graphdef, _, _ = jax.eval_shape(parts, params, buffers)
    arrays = jax.jit(lambda params, buffers: parts(params, buffers)[1:])
    return Structure(graphdef), *arrays(params, buffers)
