"""Keys and values of the last W tokens only: all that attention with a sliding window reads."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_transformer.decoding.cache import KeyValueCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class RollingCache(KeyValueCache):
    """W slots, written in turn: token number `n` is in slot `n mod W`, over token `n - W`.

    `length` counts the tokens that have left, too. Slots are in no order of positions, which
    attention does not need: masks and biases are made from the positions of the tokens in them.
    """

    @classmethod
    def last_of(cls, cache: KeyValueCache, size: int) -> "RollingCache":
        """The last `size` tokens of a full cache all of whose slots are taken."""
        key, value = (roll_slots(held, size, axis=2) for held in (cache.key, cache.value))
        return cls(key, value, cache.length)

    @property
    def next_slot(self) -> Int[Array, ""]:
        """The slot of the next token."""
        return self.length % self.size

    def update(
        self, key: Float[Array, "B T N H"], value: Float[Array, "B T N H"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """Write one token over the oldest and return all slots.

        Raises:
            TypeError: several tokens: the later ones would overwrite what the earlier ones see.
        """
        if key.shape[1] != 1:
            raise TypeError(f"{key.shape[1]} tokens at once: a rolling cache takes one at a time")
        return super().update(key, value)

    def grow(self, size: int) -> "RollingCache":
        """Refused: the window is the size.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a rolling cache of {self.size} slots does not grow to {size}")


def roll_slots(slots: Array, size: int, axis: int, fill: int = 0) -> Array:
    """The last `size` of all slots of a full cache, each at its index modulo `size`; `fill` in
    those that are left."""
    held = slots.shape[axis]
    if held < size:
        free = [(0, size - held if each == axis else 0) for each in range(slots.ndim)]
        return jnp.pad(slots, free, constant_values=fill)
    last = jax.lax.slice_in_dim(slots, held - size, held, axis=axis)
    return jnp.roll(last, held % size, axis=axis)
