"""Text files to sentence pairs, to token ids, to batches."""

from jax_transformer.data.batches import (
    Batch,
    Batches,
    EvaluationBatch,
    SourceBatch,
    evaluation_batches,
    source_batches,
)
from jax_transformer.data.buckets import Bucket
from jax_transformer.data.text import ParallelText, read_lines, read_parallel, read_tsv
from jax_transformer.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Batches",
    "Bucket",
    "EvaluationBatch",
    "ParallelText",
    "SourceBatch",
    "Tokenizer",
    "evaluation_batches",
    "read_lines",
    "read_parallel",
    "read_tsv",
    "source_batches",
]
