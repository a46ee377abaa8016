"""Known differences between implementations, each as remedies that can be applied."""

from jax_transformer.verification.catalogue import attention, blocks, layers, rotary, weights

CATALOGUE = (
    *layers.ENTRIES,
    *rotary.ENTRIES,
    *attention.ENTRIES,
    *weights.ENTRIES,
    *blocks.ENTRIES,
)
