"""Whether a tokenizer and a model speak of the same tokens."""

from collections.abc import Iterator

from jax_transformer.config import DecoderOnlyConfig, EncoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import Companion, read_json, readable_errors
from jax_transformer.porting.formats.gguf_file import NO_TOKENIZER
from jax_transformer.porting.identify import Identified


def check_vocabulary(model: Identified) -> tuple[str, ...]:
    """A vocabulary must have no token that the model has no row for; the model may have more rows.

    Returns:
        What a user should know: tokens that were added to the vocabulary and have no row, as some
        models for text have of those for pictures; why there is no tokenizer.

    Raises:
        InputError: there is such a token.
    """
    notes = []
    if isinstance(model.config, DecoderOnlyConfig | EncoderOnlyConfig):
        source = target = model.config.vocab_size
    else:
        source, target = model.config.src_vocab_size, model.config.tgt_vocab_size
    for file in model.checkpoint.companions:
        # A model of sound has tokens on one side only.
        size = target if file.name == "target_vocab.json" else source or target
        highest, added = highest_ids(file)
        if highest >= size:
            raise InputError(
                f"{file} has a token with the id {highest}, but the model has {size} of them: copy "
                f"the tokenizer of this model"
            )
        if added >= size:
            notes.append(
                f"{file} adds tokens up to id {added} to its vocabulary, but the model has {size}: "
                f"texts with them are refused"
            )
    if reason := model.checkpoint.metadata.get(NO_TOKENIZER):
        notes.append(f"no tokenizer.json, since {reason}; copy that of the model there")
    return tuple(notes)


def highest_ids(file: Companion) -> tuple[int, int]:
    """The highest id in the vocabulary of a file, and of tokens added to it; -1 for none.

    Raises:
        InputError: a file that is damaged.
    """
    if file.name == "tokenizer.json":
        values = read_json(file)
        vocabulary = (values.get("model") or {}).get("vocab") or {}
        count = len(vocabulary) - 1
        highest = max(whole(vocabulary), default=-1) if isinstance(vocabulary, dict) else count
        added = [token["id"] for token in values.get("added_tokens") or ()]
        return highest, max(added, default=-1)
    if file.name in ("vocab.json", "target_vocab.json"):
        return max(whole(read_json(file)), default=-1), -1
    if file.name == "added_tokens.json":
        return -1, max(whole(read_json(file)), default=-1)
    if file.name == "vocab.txt":
        with readable_errors(file):
            return len(file.read_bytes().splitlines()) - 1, -1
    return -1, -1


def whole(vocabulary: dict[str, object]) -> Iterator[int]:
    """The ids of a vocabulary."""
    return (number for number in vocabulary.values() if isinstance(number, int))
