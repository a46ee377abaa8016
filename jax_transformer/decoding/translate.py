"""Sentences in, sentences out: tokens, batches of a few shapes, greedy decoding."""

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from jax_transformer.config import EOS_ID, ModelConfig
from jax_transformer.data.batches import source_batches
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.decoding.greedy import check_length, decode
from jax_transformer.models.parameters import Tree


class Translator:
    """A trained model and its tokenizer.

    Args:
        graphdef, buffers: the model without its parameters, as `models.parameters.split` gives it.
        config: of the model.
        tokenizer: of both languages.
        tokens_per_batch: the most padded source tokens in one batch.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        buffers: Tree,
        config: ModelConfig,
        tokenizer: Tokenizer,
        *,
        tokens_per_batch: int = 4096,
    ):
        self.graphdef = graphdef
        self.buffers = buffers
        self.config = config
        self.tokenizer = tokenizer
        self.tokens_per_batch = tokens_per_batch

    def __call__(
        self, params: Tree, sentences: Sequence[str], *, max_len: int | None = None
    ) -> list[str]:
        """The most likely translation, token by token, of each sentence.

        Args:
            params: of the model.
            sentences: one sentence each. A blank one has a blank translation.
            max_len: the most tokens of a translation; by default twice the length that the
                source is padded to (32, 64, 128, ...), within the position table.

        Raises:
            InputError: a sentence, or `max_len`, longer than the position table.
        """
        if max_len is not None:
            check_length(max_len, self.config.max_len)
        translations = [""] * len(sentences)
        places = [place for place, sentence in enumerate(sentences) if sentence.strip()]
        if not places:
            return translations
        tokens = self.tokenizer.encode_batch(
            [sentences[place] for place in places], max_length=self.config.max_len
        )
        for batch in source_batches(
            tokens,
            tokens_per_batch=self.tokens_per_batch,
            vocab_size=self.config.src_vocab_size,
            max_length=self.config.max_len,
        ):
            width = batch.source.shape[1]
            decoded = decode(
                self.graphdef,
                params,
                self.buffers,
                batch.source,
                (np.arange(width) < batch.source_lengths[:, None])[:, None, None, :],
                max_len=max_len or min(2 * width, self.config.max_len),
            )
            for row, ids in zip(batch.rows, jax.device_get(decoded), strict=False):
                translations[places[row]] = self.tokenizer.decode(until_end(ids[1:]))
        return translations


def until_end(ids: np.ndarray) -> list[int]:
    """The ids before the first end token."""
    ends = np.flatnonzero(ids == EOS_ID)
    return ids[: ends[0] if len(ends) else len(ids)].tolist()
