"""Text that follows prompts."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from jax_transformer.config import DecoderOnlyConfig, GenerationConfig
from jax_transformer.decoding.program import Structure, prefill, step, transposed
from jax_transformer.decoding.prompts import PromptBatch, check_prompts, prompt_batches
from jax_transformer.decoding.sampling import (
    NO_TOKEN,
    Filter,
    Greedy,
    RepetitionPenalty,
    Strategy,
    Suppress,
    needs_seen,
)
from jax_transformer.decoding.text_stream import TextCodec, TextStream
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree

GREEDY = Greedy()
NO_RULES = GenerationConfig()

MAX_TOKENS = 256
"""The most tokens of a continuation, unless told otherwise."""

SLOT_MULTIPLE = 16
"""Caches have a multiple of this number of slots."""


class Completion(NamedTuple):
    """What follows a prompt."""

    text: str
    """Without the stop string or the end token."""
    tokens: list[int]
    """All that were chosen: with the end token, and those of the stop string."""
    reason: Literal["end", "stop", "length"]
    """An end token, a stop string, or as many tokens as were allowed."""


class Continuation:
    """The tokens and the text that follow one prompt, as they come."""

    def __init__(self, stream: TextStream, end_ids: tuple[int, ...]):
        self.stream = stream
        self.end_ids = end_ids
        self.tokens: list[int] = []
        self.over = False

    def push(self, token: int) -> str:
        """Add a token; the text that is certain with it. Nothing once it is over."""
        if self.over:
            return ""
        self.tokens.append(token)
        if token in self.end_ids:
            self.over = True
            return ""
        piece = self.stream.push(token)
        self.over = self.stream.stopped
        return piece

    def completion(self) -> Completion:
        """The whole, once no token follows."""
        self.stream.finish()
        reason = "stop" if self.stream.stopped else "end" if self.over else "length"
        return Completion(self.stream.text, self.tokens, reason)


class TextGenerator:
    """A trained language model and its tokenizer.

    The steps are called from Python, so that text can be shown as it comes; each runs while the
    caller looks at the tokens of the one before. Several rows are decoded with kernels in another
    order, for which the parameters are kept a second time.

    Args:
        graphdef, params, buffers: the model, as `models.parameters.split` gives it.
        config: of the model.
        codec: text to tokens and back.
        rules: what is put before each prompt, ends a text, and may not come.
        rows_per_batch: the most prompts that are continued at the same time.

    Raises:
        InputError: rules that only a `Translator` keeps.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Tree,
        buffers: Tree,
        config: DecoderOnlyConfig,
        codec: TextCodec,
        *,
        rules: GenerationConfig = NO_RULES,
        rows_per_batch: int = 16,
    ):
        self.model = Structure(graphdef), params, buffers
        self.config = config
        self.codec = codec
        check_rules(rules, config.vocab_size)
        self.rules = rules
        self.rows_per_batch = rows_per_batch
        self._transposed: tuple[Structure, Tree, Tree] | None = None

    def __call__(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int | None = None,
        strategy: Strategy = GREEDY,
        stops: Sequence[str] = (),
    ) -> list[Completion]:
        """What follows each prompt: what would follow it alone.

        Args:
            prompts: one text each.
            max_tokens: the most tokens of a continuation; by default those of the rules, or 256,
                or as many as the model has room for after the longest prompt.
            strategy: how tokens are chosen (`sampling.make_strategy`). The draws for prompt n
                depend on the seed and on n. A repetition penalty replaces that of the rules.
            stops: texts that end a continuation and are cut from it.

        Raises:
            InputError: a prompt without tokens, or one too long to be continued by `max_tokens`,
                before anything runs; a model that gives NaN.
        """
        ids, max_tokens = self.encode(prompts, max_tokens)
        results = [
            Continuation(TextStream(self.codec, row, stops), self.rules.end_ids) for row in ids
        ]
        for batch in prompt_batches(ids, self.rows_per_batch):
            rows = [results[place] for place in batch.rows[batch.lengths > 0]]
            for tokens in self.tokens(batch, max_tokens, strategy):
                for row, token in zip(rows, tokens, strict=False):
                    row.push(int(token))
                if all(row.over for row in rows):
                    break
        return [result.completion() for result in results]

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int | None = None,
        strategy: Strategy = GREEDY,
        stops: Sequence[str] = (),
    ) -> Iterator[str]:
        """The text of `__call__` for one prompt, in pieces, each as soon as it is certain.

        Raises:
            InputError: as `__call__`; bad arguments before the first piece is asked for.
        """
        (ids,), most = self.encode([prompt], max_tokens)
        result = Continuation(TextStream(self.codec, ids, stops), self.rules.end_ids)
        (batch,) = prompt_batches([ids], 1)

        def pieces() -> Iterator[str]:
            for tokens in self.tokens(batch, most, strategy):
                yield result.push(int(tokens[0]))
                if result.over:
                    break
            yield result.stream.finish()

        return filter(None, pieces())

    def encode(self, prompts: Sequence[str], max_tokens: int | None) -> tuple[list[list[int]], int]:
        """The tokens of each prompt, and the most that may follow, checked.

        Raises:
            InputError: as `check_prompts`.
        """
        start = [] if self.rules.start_id is None else [self.rules.start_id]
        ids = [start + list(self.codec.encode(prompt)) for prompt in prompts]
        vocab_size, max_len = self.config.vocab_size, self.config.max_len
        if max_tokens is None:
            room = max_len - max(map(len, ids), default=0)
            max_tokens = max(min(room, self.rules.max_tokens or MAX_TOKENS), 1)
        check_prompts(ids, vocab_size=vocab_size, max_tokens=max_tokens, max_len=max_len)
        return ids, max_tokens

    def tokens(
        self, batch: PromptBatch, max_tokens: int, strategy: Strategy = GREEDY
    ) -> Iterator[Int[np.ndarray, " B"]]:
        """The next token of each row, then the next, until all rows have ended or have
        `max_tokens`. A row that has ended gets padding.

        Raises:
            InputError: a row of which no token can be chosen.
        """
        height, width = batch.tokens.shape
        # The last token chosen is not read any more.
        slots = -(-(width + max_tokens - 1) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        options = {"strategy": self.restricted(strategy), "end_ids": self.rules.end_ids}
        state, chosen = prefill(*self.model, *batch, slots=slots, **options)
        model = self.model if height == 1 else self.transposed_model()
        for count in range(1, max_tokens + 1):
            following = chosen
            if count < max_tokens:
                state, following = step(*model, state, **options)
            # Waits for these alone: the step above goes on.
            tokens, ended = jax.device_get(chosen)
            for row in np.flatnonzero(tokens == NO_TOKEN):
                raise InputError(
                    f"prompt {batch.rows[row] + 1}: the model gives no number for what follows "
                    f"after {count - 1} tokens: its parameters, or its logits, are NaN"
                )
            yield tokens
            if ended.all():
                return
            chosen = following

    def restricted(self, strategy: Strategy) -> Strategy:
        """The strategy, of the tokens that the rules allow."""
        filters: list[Filter] = []
        if self.rules.repetition_penalty != 1.0 and not needs_seen(strategy):
            filters.append(RepetitionPenalty(self.rules.repetition_penalty))
        if self.rules.suppressed_ids:
            filters.append(Suppress(self.rules.suppressed_ids))
        return dataclasses.replace(strategy, filters=(*filters, *strategy.filters))

    def transposed_model(self) -> tuple[Structure, Tree, Tree]:
        """The model for steps of several rows."""
        if self._transposed is None:
            self._transposed = transposed(*self.model)
        return self._transposed


def check_rules(rules: GenerationConfig, vocab_size: int) -> None:
    """Refuse what counts tokens from the beginning of a text, which prompts have no single one of.

    Raises:
        InputError: there is such a rule, or one about a token that the model does not have.
    """
    rules.check_ids(vocab_size)
    counted = "prompt", "first_id", "last_id", "suppressed_first_ids", "min_tokens"
    for name in (*counted, "no_repeat_ngram"):
        if (value := getattr(rules, name)) != getattr(NO_RULES, name):
            raise InputError(f"{name}={value!r}: only encoder-decoders keep that, leave it out")
