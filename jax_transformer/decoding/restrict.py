"""Which tokens may come next, by a model's `GenerationConfig` and the tokens so far."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import GenerationConfig
from jax_transformer.decoding.sampling import RepetitionPenalty, Suppress


def restrict(
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B T"],
    length: Int[Array, ""],
    rules: GenerationConfig,
) -> Float[Array, "B V"]:
    """`logits` with -inf for what may not come, in the order of `transformers`.

    Args:
        logits: of the next token.
        tokens: the start token and `T - 1` more, of which the first `length` are there.
        length: of all rows.
        rules: of the model.
    """
    vocabulary = jnp.arange(logits.shape[1])
    begin = 1 + len(rules.prompt)
    if rules.repetition_penalty != 1.0:
        seen = marked(tokens, (jnp.arange(tokens.shape[1]) < length)[None], logits.shape[1])
        logits = RepetitionPenalty(rules.repetition_penalty)(logits, seen)
    if rules.no_repeat_ngram:
        repeated = would_repeat(tokens, length, rules.no_repeat_ngram, logits.shape[1])
        logits = jnp.where(repeated, -jnp.inf, logits)
    if rules.min_tokens and rules.end_ids:
        early = length - begin < rules.min_tokens
        ends = jnp.isin(vocabulary, jnp.array(rules.end_ids))
        logits = jnp.where(early & ends, -jnp.inf, logits)
    if rules.first_id is not None:
        other = (length == 1) & (vocabulary != rules.first_id)
        logits = jnp.where(other, -jnp.inf, logits)
    if rules.last_id is not None:
        other = (length == tokens.shape[1] - 1) & (vocabulary != rules.last_id)
        logits = jnp.where(other, -jnp.inf, logits)
    logits = Suppress(rules.suppressed_ids)(logits, None)
    if rules.suppressed_first_ids:
        first = length == (begin if rules.prompt or rules.first_id is None else 2)
        suppressed = Suppress(rules.suppressed_first_ids)(logits, None)
        logits = jnp.where(first, suppressed, logits)
    if rules.prompt:
        given = jnp.array(rules.prompt)[jnp.minimum(length, len(rules.prompt)) - 1]
        logits = jnp.where(length >= begin, logits, jnp.where(vocabulary == given, 0.0, -jnp.inf))
    return logits


def marked(
    tokens: Int[Array, "B T"], valid: Bool[Array, "#B T"], vocab_size: int
) -> Bool[Array, "B V"]:
    """The ids among the valid tokens of each row."""
    rows = jnp.arange(len(tokens))[:, None]
    marks = jnp.zeros((len(tokens), vocab_size), bool)
    return marks.at[rows, tokens].max(jnp.broadcast_to(valid, tokens.shape))


def would_repeat(
    tokens: Int[Array, "B T"], length: Int[Array, ""], size: int, vocab_size: int
) -> Bool[Array, "B V"]:
    """The ids that, as the next token, end a sequence of `size` tokens that the row has already."""
    places = jnp.arange(tokens.shape[1])[None]
    # Of a sequence that ends at each place, whether it begins as the one that would end next.
    same = (places >= size - 1) & (places < length)
    for back in range(1, size):
        last = jnp.take(tokens, length - back, axis=1, mode="clip")[:, None]
        same = same & (jnp.roll(tokens, back, axis=1) == last)
    return marked(tokens, same, vocab_size)
