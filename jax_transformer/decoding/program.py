"""The two programs that continue prompts: one reads them all, one gives each next token."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import PAD_ID, DecoderOnlyConfig, LayerConfig
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
    local_key_positions: Int[Array, "B W"] | None
    """Of those in the caches of the blocks of `local_layer`, if there are any."""
    caches: list[KeyValueCache]
    """One entry a layer, squeezed; those of the blocks with a window roll."""


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
    state, logits = read_prompts(
        model, tokens, lengths, rows, slots=slots, with_seen=needs_seen(strategy)
    )
    return choose(state, logits, strategy, end_ids)


def read_prompts(
    model: DecoderOnly,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    rows: Int[Array, " B"],
    *,
    slots: int,
    with_seen: bool = False,
) -> tuple[GenerationState, Float[Array, "B V"]]:
    """The state after the prompts, and the logits of what follows them."""
    config = model.config
    batch, width = tokens.shape
    real = jnp.arange(width) >= width - lengths[:, None]
    positions = jnp.maximum(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
    caches = empty_caches(model, batch, width)
    key_positions = jnp.where(real, positions, EMPTY)
    local_key_positions = None if config.local_layer is None else key_positions
    hidden = model.step(
        tokens,
        caches,
        seen_slots(config.layer, positions, key_positions),
        positions,
        positions,
        local_slots(config, positions, local_key_positions),
    )
    logits = model.project(hidden[:, -1:])[:, 0]

    key_positions = roll_slots(key_positions, kept(config.layer, slots), axis=1, fill=EMPTY)
    if config.local_layer is not None and local_key_positions is not None:
        local_key_positions = roll_slots(
            local_key_positions, kept(config.local_layer, slots), axis=1, fill=EMPTY
        )
    seen = None
    if with_seen:
        marks = jnp.zeros((batch, logits.shape[1]), bool)
        seen = marks.at[jnp.arange(batch)[:, None], tokens].max(real)
    state = GenerationState(
        token=jnp.zeros(batch, jnp.int32),
        position=jnp.maximum(lengths - 1, 0),
        ended=lengths == 0,
        rows=rows,
        seen=seen,
        key_positions=key_positions,
        local_key_positions=local_key_positions,
        caches=[
            hold(cache, config.layer_at(index), slots).squeezed()
            for index, cache in enumerate(caches)
        ],
    )
    return state, logits


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
    state, logits = read_token(structure.merge(params, buffers), state)
    return choose(state, logits, strategy, end_ids)


def read_token(
    model: DecoderOnly, state: GenerationState
) -> tuple[GenerationState, Float[Array, "B V"]]:
    """The state after its token, and the logits of what follows it."""
    config = model.config
    positions = state.position[:, None]
    caches = [cache.unsqueezed() for cache in state.caches]
    key_positions = with_position(state.key_positions, positions, caches, config, local=False)
    local_key_positions = state.local_key_positions
    if local_key_positions is not None:
        local_key_positions = with_position(
            local_key_positions, positions, caches, config, local=True
        )
    hidden = model.step(
        state.token[:, None],
        caches,
        seen_slots(config.layer, positions, key_positions),
        positions,
        key_positions,
        local_slots(config, positions, local_key_positions),
        local_key_positions,
    )
    state = dataclasses.replace(
        state,
        key_positions=key_positions,
        local_key_positions=local_key_positions,
        caches=[cache.squeezed() for cache in caches],
    )
    return state, model.project(hidden)[:, 0]


def kept(layer: LayerConfig, slots: int) -> int:
    """The slots that a block needs: those of its window, if it has one, or all."""
    return slots if layer.window is None else min(layer.window, slots)


def hold(cache: KeyValueCache, layer: LayerConfig, slots: int) -> KeyValueCache:
    """Of the keys and values of the prompt those that a block's steps read, with room for more."""
    size = kept(layer, slots)
    return RollingCache.last_of(cache, size) if size < slots else cache.grow(slots)


def with_position(
    key_positions: Int[Array, "B S"],
    position: Int[Array, "B 1"],
    caches: list[KeyValueCache],
    config: DecoderOnlyConfig,
    *,
    local: bool,
) -> Int[Array, "B S"]:
    """`key_positions` with that of the next token, where its blocks will write it."""
    slot = next(
        (
            cache.next_slot
            for index, cache in enumerate(caches)
            if (index in config.local_layers) == local
        ),
        0,  # all blocks are of the other kind
    )
    return jax.lax.dynamic_update_slice_in_dim(key_positions, position, slot, axis=1)


def seen_slots(
    layer: LayerConfig, positions: Int[Array, "B T"], key_positions: Int[Array, "B S"]
) -> Bool[Array, "B 1 T S"]:
    """Which slots a block may see."""
    return create_causal_mask(
        positions, key_positions, layer.window, key_valid=key_positions != EMPTY
    )


def local_slots(
    config: DecoderOnlyConfig,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B W"] | None,
) -> Bool[Array, "B 1 T W"] | None:
    """Which slots the blocks of `local_layer` may see, if there are any."""
    if config.local_layer is None or key_positions is None:
        return None
    return seen_slots(config.local_layer, positions, key_positions)


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
