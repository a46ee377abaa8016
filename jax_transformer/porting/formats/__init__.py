"""File formats: names and lazy tensors to read, a stream of tensors to write.

Each module has `read(path) -> Checkpoint` and, where the format is written, a `Writer`. They know
no model: N formats and M families meet in a plan.
"""

from jax_transformer.porting.formats.base import Checkpoint, LazyTensor, Writer

__all__ = ["Checkpoint", "LazyTensor", "Writer"]
