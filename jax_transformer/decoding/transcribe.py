"""Sound in, text out: log-mel features, greedy decoding."""

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from jax_transformer.config import EncoderDecoderConfig, GenerationConfig
from jax_transformer.decoding.greedy import decode
from jax_transformer.decoding.text_stream import TextCodec
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree


class Transcriber:
    """A trained encoder-decoder that reads sound, and its tokenizer.

    Args:
        graphdef, params, buffers: the model, as `models.parameters.split` gives it.
        config: of the model.
        tokenizer: of the text.
        rules: what a text begins and ends with, and may hold; its prompt says the language.

    Raises:
        InputError: a model that reads no sound, rules about tokens that it does not have, or a
            prompt that leaves no room for text.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Tree,
        buffers: Tree,
        config: EncoderDecoderConfig,
        tokenizer: TextCodec,
        *,
        rules: GenerationConfig,
    ):
        if config.audio is None:
            raise InputError("the model reads text, not sound")
        rules.check_ids(config.tgt_vocab_size)
        # The last token is not read any more, but transformers ends where the table does.
        self.room = config.max_len - 1 - len(rules.prompt)
        if self.room < 1:
            raise InputError(
                f"a prompt of {len(rules.prompt)} tokens leaves no room for text in the "
                f"{config.max_len} of the model: shorten it"
            )
        self.model = graphdef, params, buffers
        self.shape = (2 * config.audio.max_len, config.audio.num_mel_bins)
        self.tokenizer = tokenizer
        self.rules = rules

    def __call__(self, features: np.ndarray, *, max_tokens: int | None = None) -> list[str]:
        """The text of each row.

        Args:
            features: `[B, frames, mels]`, as many frames as the model was trained with, in Whisper
                those of 30 seconds. (The feature extractor of `transformers` gives
                `[B, mels, frames]`.)
            max_tokens: the most of a text; by default what the rules say, and what there is room
                for.

        Raises:
            InputError: features of another shape or not finite, more tokens than there is room for.
        """
        return [self.tokenizer.decode(ids) for ids in self.tokens(features, max_tokens=max_tokens)]

    def tokens(self, features: np.ndarray, *, max_tokens: int | None = None) -> list[list[int]]:
        """The tokens of each text, without those of the prompt and the end. Arguments and errors
        are those of `__call__`; compiles for each number of rows and `max_tokens`."""
        features = np.asarray(features)
        self.check(features, max_tokens)
        most = min(max_tokens or self.rules.max_tokens or self.room, self.room)
        begin = 1 + len(self.rules.prompt)
        seen = np.ones((len(features), 1, 1, self.shape[0] // 2), bool)
        decoded = decode(*self.model, features, seen, max_len=begin - 1 + most, rules=self.rules)
        return [self.until_end(ids[begin:]) for ids in jax.device_get(decoded)]

    def check(self, features: np.ndarray, max_tokens: int | None) -> None:
        """Refuse what cannot be read or written.

        Raises:
            InputError: as `__call__`.
        """
        shape = features.shape
        if len(shape) != 3 or shape[1:] != self.shape or not shape[0]:
            frames, mels = self.shape
            turned = shape[1:] == (mels, frames)
            remedy = "features.swapaxes(1, 2)" if turned else "fill the sound up, or cut it"
            raise InputError(
                f"features of shape {list(shape)}: must be rows of {frames} frames with {mels} "
                f"numbers each: {remedy}"
            )
        if not np.isfinite(features).all():
            raise InputError("features that are not all finite: see that the sound was read well")
        if max_tokens is not None and not 1 <= max_tokens <= self.room:
            raise InputError(f"max_tokens={max_tokens}: there is room for 1 to {self.room}")

    def until_end(self, ids: Int[np.ndarray, " T"]) -> list[int]:
        """The ids before the first end token."""
        ends = np.flatnonzero(np.isin(ids, self.rules.end_ids))
        return ids[: ends[0] if len(ends) else len(ids)].tolist()
