"""Known differences between implementations, each as remedies that can be applied."""

from jax_transformer.verification.catalogue import attention, blocks, layers, weights

CATALOGUE = (*layers.ENTRIES, *attention.ENTRIES, *weights.ENTRIES, *blocks.ENTRIES)
