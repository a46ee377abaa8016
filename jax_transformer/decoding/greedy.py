"""Greedy decoding: one compiled program that runs until every row has ended."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import (
    BOS_ID,
    EOS_ID,
    EncoderDecoderConfig,
    GenerationConfig,
    ModelConfig,
)
from jax_transformer.decoding.cache import DecoderLayerCache, grow_cache, start_cache
from jax_transformer.decoding.restrict import restrict
from jax_transformer.decoding.sampling import first_highest
from jax_transformer.errors import InputError
from jax_transformer.layers.linear import transpose_kernels
from jax_transformer.layers.mask import create_causal_mask
from jax_transformer.models.encoder_decoder import EncoderDecoder
from jax_transformer.models.parameters import Tree, split

FIRST_SEGMENT = 64
"""Slots of the first cache. Attention reads all slots at each step, so the cache starts small
and doubles: time stays proportional to what has been decoded, and each size is one loop."""

TABLES = ("learned", "sinusoidal")
"""Positions of which there are as many as a table has rows."""


class DecodeState(NamedTuple):
    """The carry of the loop."""

    length: Int[Array, ""]
    """Tokens so far, the start token included."""
    tokens: Int[Array, "B T"]
    ended: Bool[Array, " B"]
    caches: list[DecoderLayerCache]


def greedy_decode(
    model: EncoderDecoder,
    src: Int[Array, "B S"] | Float[Array, "B frames mels"],
    max_len: int = 50,
    bos_idx: int = BOS_ID,
    eos_idx: int = EOS_ID,
    src_mask: Bool[Array, "B 1 1 S"] | None = None,
) -> Int[Array, "B T"]:
    """Start token and up to `max_len` most likely tokens, `[B, 1 + max_len]`.

    A row that has ended stays ended: padding follows its end token, and decoding stops when all
    rows have. A row without any source token has ended at once. Equal logits: the lowest id.

    Raises:
        InputError: `max_len` is beyond the position table, if the model has one.
    """
    graphdef, params, buffers = split(model)
    src_mask = model.make_src_mask(src) if src_mask is None else src_mask
    check_length(max_len, table_rows(model.config))
    rules = GenerationConfig(start_id=bos_idx, end_ids=(eos_idx,))
    return decode(graphdef, params, buffers, src, src_mask, max_len=max_len, rules=rules)


def table_rows(config: EncoderDecoderConfig | ModelConfig) -> int | None:
    """The rows of a model's position table; None where it has none, as any length will do."""
    if isinstance(config, EncoderDecoderConfig) and config.position not in TABLES:
        return None
    return config.max_len


def check_length(max_len: int, table: int | None) -> None:
    """Refuse to decode more tokens than there are positions.

    Raises:
        InputError: as said.
    """
    if table is None:
        if max_len < 1:
            raise InputError(f"max_len={max_len}: must be at least 1")
    elif not 1 <= max_len <= table:
        raise InputError(
            f"max_len={max_len}: the model decodes 1 to {table} tokens, the rows of its "
            f"position table"
        )


@functools.partial(jax.jit, static_argnames=("graphdef", "max_len", "rules"))
def decode(
    graphdef: nnx.GraphDef,
    params: Tree,
    buffers: Tree,
    src: Int[Array, "B S"] | Float[Array, "B frames mels"],
    src_mask: Bool[Array, "B 1 1 S"],
    *,
    max_len: int,
    rules: GenerationConfig,
) -> Int[Array, "B T"]:
    """`greedy_decode` over split parameters, of the tokens that `rules` allow; compiles for each
    `max_len`, `rules` and shape of `src`."""
    if rules.start_id is None:
        raise TypeError("a decoder begins with a token: rules.start_id")
    model = nnx.merge(graphdef, params, buffers)
    enc_output = model.encode(src, src_mask)
    batch = src.shape[0]
    state = DecodeState(
        length=jnp.int32(1),
        tokens=jnp.full((batch, 1 + max_len), rules.pad_id, jnp.int32).at[:, 0].set(rules.start_id),
        ended=~src_mask.any(axis=(1, 2, 3)),
        caches=start_cache(model.decoder, enc_output, min(FIRST_SEGMENT, max_len)),
    )
    if batch > 1:  # A single row is limited by the memory that it reads, in either order.
        transpose_kernels(model.decoder)

    def step(state: DecodeState) -> DecodeState:
        index = state.length - 1
        token = jax.lax.dynamic_slice_in_dim(state.tokens, index, 1, axis=1)
        logits = next_logits(model, token, index, state.caches, src_mask)
        best = first_highest(restrict(logits, state.tokens, state.length, rules))
        best = jnp.where(state.ended, rules.pad_id, best)
        tokens = jax.lax.dynamic_update_slice_in_dim(
            state.tokens, best[:, None], state.length, axis=1
        )
        ended = state.ended | jnp.isin(best, jnp.array(rules.end_ids, jnp.int32))
        return DecodeState(state.length + 1, tokens, ended, state.caches)

    for size in segment_sizes(max_len):
        state = state._replace(caches=grow_cache(state.caches, size))
        state = jax.lax.while_loop(
            lambda state, size=size: (state.length <= size) & ~state.ended.all(), step, state
        )
    return state.tokens


def next_logits(
    model: EncoderDecoder,
    token: Int[Array, "B 1"],
    index: Int[Array, ""],
    caches: list,
    src_mask: Bool[Array, "B 1 1 S"],
) -> Float[Array, "B V"]:
    """What follows a token at the position `index` of all rows; it joins those in `caches`
    (`DecoderLayerCache`)."""
    batch, slots = len(token), caches[0].self_attn.size
    positions = jnp.broadcast_to(index, (batch, 1))
    slot_positions = jnp.broadcast_to(jnp.arange(slots), (batch, slots))
    tgt_mask = create_causal_mask(positions[:1], slot_positions[:1])
    dec_output = model.decoder.step(token, caches, src_mask, tgt_mask, positions, slot_positions)
    return model.project(dec_output)[:, 0]


def segment_sizes(max_len: int) -> list[int]:
    """Cache sizes that double from `FIRST_SEGMENT` up to `max_len`."""
    sizes = []
    size = FIRST_SEGMENT
    while size < max_len:
        sizes.append(size)
        size *= 2
    return [*sizes, max_len]
