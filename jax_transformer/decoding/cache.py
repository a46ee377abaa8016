"""Keys and values of the tokens decoded so far, in arrays of static size.

A cache is a pytree with methods that assign to its fields. Inside a traced function that is
functional all the same: each trace unflattens an object of its own, and what the function
returns is its final state.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_transformer.layers.fusion import materialize
from jax_transformer.models.encoder_decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KeyValueCache:
    """The first `length` of S slots hold keys and values; the rest is zero and must be masked.

    Keys and values are kept as projected but for their order in memory, `[B, N, S, H]`: what the
    products of attention read without a copy, one matrix a head. (XLA's CPU compiler transposes
    a cache in the order of `[B, S, N, H]` at each step, which is most of a step's attention.)
    Between two compiled steps those of a single row are best kept `squeezed`.
    """

    key: Float[Array, "*B N S H"]
    value: Float[Array, "*B N S H"]
    length: Int[Array, ""]

    @classmethod
    def empty(cls, like: Float[Array, "B _ N H"], size: int) -> "KeyValueCache":
        """A cache of `size` free slots, in the dtype of `like`."""
        batch, _, heads, width = like.shape
        zeros = jnp.zeros((batch, heads, size, width), like.dtype)
        return cls(zeros, zeros, jnp.int32(0))

    @classmethod
    def full(cls, key: Float[Array, "B S N H"], value: Float[Array, "B S N H"]) -> "KeyValueCache":
        """A cache that holds exactly these."""
        # Or XLA moves the exchange of axes into the loop, to be done again at each step.
        key, value = materialize((swap(key), swap(value)))
        return cls(key, value, jnp.int32(key.shape[2]))

    @property
    def size(self) -> int:
        """The number of slots S."""
        return self.key.shape[-2]

    @property
    def next_slot(self) -> Int[Array, ""]:
        """The slot of the next token."""
        return self.length

    def update(
        self, key: Float[Array, "B T N H"], value: Float[Array, "B T N H"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """Write T tokens after those held and return all slots.

        The caller keeps `length + T` within the slots: XLA would clamp the place of a write
        past the end and overwrite the last ones.
        """
        self.key = write(self.key, swap(key), self.next_slot)
        self.value = write(self.value, swap(value), self.next_slot)
        self.length = self.length + key.shape[1]
        return self.read()

    def read(self) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """All slots."""
        return swap(self.key), swap(self.value)

    def squeezed(self) -> "KeyValueCache":
        """A cache of one row without the axis of rows: with it XLA's CPU compiler does not write
        in place what a compiled step is given and returns, but copies all slots four times."""
        if self.key.shape[0] != 1:
            return self
        return dataclasses.replace(self, key=self.key[0], value=self.value[0])

    def unsqueezed(self) -> "KeyValueCache":
        """The inverse of `squeezed`."""
        if self.key.ndim == 4:
            return self
        return dataclasses.replace(self, key=self.key[None], value=self.value[None])

    def grow(self, size: int) -> "KeyValueCache":
        """The same with `size` slots."""
        free = [(0, 0), (0, 0), (0, size - self.size), (0, 0)]
        return dataclasses.replace(
            self, key=jnp.pad(self.key, free), value=jnp.pad(self.value, free)
        )


def swap(heads: Float[Array, "B _ _ H"]) -> Float[Array, "B _ _ H"]:
    """`[B, S, N, H] <-> [B, N, S, H]`."""
    return heads.swapaxes(1, 2)


def write(
    slots: Float[Array, "B N S H"], new: Float[Array, "B N T H"], start: Int[Array, ""]
) -> Float[Array, "B N S H"]:
    """`slots` with `new` from slot `start` on, in place; of a single row see `squeezed`."""
    if slots.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(slots[0], new[0], start, axis=1)[None]
    return jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DecoderLayerCache:
    """What one decoder layer remembers: its own tokens, and the encoder's output projected."""

    self_attn: KeyValueCache
    cross_attn: KeyValueCache


def start_cache(
    decoder: Decoder, enc_output: Float[Array, "B S D"], size: int
) -> list[DecoderLayerCache]:
    """One entry a layer: `size` free slots, and the cross-attention's keys and values, computed
    here once."""
    caches = []
    for layer in decoder.layers:
        if layer.cross_attn is None:
            raise TypeError("a decoder without cross-attention has no encoder to remember")
        key, value = layer.cross_attn.project_key_value(enc_output, enc_output)
        self_attn = KeyValueCache.empty(key, size)
        caches.append(DecoderLayerCache(self_attn, KeyValueCache.full(key, value)))
    return caches


def grow_cache(caches: list[DecoderLayerCache], size: int) -> list[DecoderLayerCache]:
    """The same with `size` slots for tokens."""
    return [dataclasses.replace(cache, self_attn=cache.self_attn.grow(size)) for cache in caches]
