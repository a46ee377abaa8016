"""Sentences in, sentences out: tokens, batches of a few shapes, greedy decoding."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from jax_transformer.config import (
    EOS_ID,
    OWN_RULES,
    EncoderDecoderConfig,
    GenerationConfig,
    ModelConfig,
)
from jax_transformer.data.batches import source_batches
from jax_transformer.decoding.greedy import check_length, decode, table_rows
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree


@runtime_checkable
class SentenceCodec(Protocol):
    """Sentences to token ids and back (`data.tokenizer.Tokenizer`)."""

    def encode_batch(
        self, texts: Iterable[str], *, max_length: int | None = None
    ) -> list[list[int]]:
        """The ids of each, with or without an end.

        Raises:
            InputError: a text of more than `max_length` tokens, its end included.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        ...


class Translator:
    """A trained encoder-decoder and its tokenizer.

    Args:
        graphdef, buffers: the model without its parameters, as `models.parameters.split` gives it.
        config: of the model.
        tokenizer: of both languages.
        rules: what a translation begins and ends with, and may hold.
        source_end_id: put after the tokens of a sentence; None if the tokenizer does that.
        tokens_per_batch: the most padded source tokens in one batch.

    Raises:
        InputError: a model of sound, rules about tokens that the model does not have.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        buffers: Tree,
        config: ModelConfig | EncoderDecoderConfig,
        tokenizer: SentenceCodec,
        *,
        rules: GenerationConfig = OWN_RULES,
        source_end_id: int | None = EOS_ID,
        tokens_per_batch: int = 4096,
    ):
        if config.src_vocab_size is None:
            raise InputError("the model reads sound, not text")
        rules.check_ids(config.tgt_vocab_size)
        self.graphdef = graphdef
        self.buffers = buffers
        self.config = config
        self.src_vocab_size = config.src_vocab_size
        self.tokenizer = tokenizer
        self.rules = rules
        self.source_end_id = source_end_id
        self.tokens_per_batch = tokens_per_batch

    def __call__(
        self, params: Tree, sentences: Sequence[str], *, max_len: int | None = None
    ) -> list[str]:
        """The most likely translation, token by token, of each sentence.

        Args:
            params: of the model.
            sentences: one sentence each. A blank one has a blank translation.
            max_len: the most tokens of a translation; by default as many as the rules say, else
                twice the length that the source is padded to (32, 64, 128, ...), within the
                position table.

        Raises:
            InputError: a sentence, or `max_len`, longer than the position table.
        """
        table = table_rows(self.config)
        if max_len is not None:
            check_length(max_len, table)
        translations = [""] * len(sentences)
        places = [place for place, sentence in enumerate(sentences) if sentence.strip()]
        if not places:
            return translations
        tokens = self.tokenizer.encode_batch(
            [sentences[place] for place in places], max_length=table
        )
        for batch in source_batches(
            tokens,
            tokens_per_batch=self.tokens_per_batch,
            vocab_size=self.src_vocab_size,
            max_length=table,
            end_id=self.source_end_id,
        ):
            width = batch.source.shape[1]
            most = max_len or self.rules.max_tokens or 2 * width
            decoded = decode(
                self.graphdef,
                params,
                self.buffers,
                batch.source,
                (np.arange(width) < batch.source_lengths[:, None])[:, None, None, :],
                max_len=most if table is None else min(most, table),
                rules=self.rules,
            )
            for row, ids in zip(batch.rows, jax.device_get(decoded), strict=False):
                translations[places[row]] = self.tokenizer.decode(self.until_end(ids[1:]))
        return translations

    def until_end(self, ids: np.ndarray) -> list[int]:
        """The ids before the first end token."""
        ends = np.flatnonzero(np.isin(ids, self.rules.end_ids))
        return ids[: ends[0] if len(ends) else len(ids)].tolist()
