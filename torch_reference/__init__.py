"""The mirror of `jax_transformer` in PyTorch, to be read and compared with it."""
