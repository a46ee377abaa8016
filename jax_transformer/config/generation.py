"""What a model's files say of generating: where a text begins and ends, which tokens may come."""

import dataclasses
import math

from jax_transformer.config.checks import is_number, is_whole
from jax_transformer.config.ids import BOS_ID, EOS_ID, PAD_ID
from jax_transformer.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The rules that every search keeps; how tokens are searched for is the caller's choice.

    Positions are counted in tokens that are generated: the start token of a decoder is none, nor
    are those of its prompt.

    Raises:
        InputError: a value out of range.
    """

    start_id: int | None = None
    """The token that a decoder with an encoder begins with, or that is put before each prompt."""
    end_ids: tuple[int, ...] = ()
    """The tokens that end a text."""
    pad_id: int = PAD_ID
    """What follows the end of a row, where other rows go on."""
    prompt: tuple[int, ...] = ()
    """Tokens that a decoder with an encoder is given after the first, whatever else is said here
    (Whisper: language and task)."""
    first_id: int | None = None
    """The token that must come first (a language's, say)."""
    last_id: int | None = None
    """The token that must come last of as many as are allowed."""
    suppressed_ids: tuple[int, ...] = ()
    """Tokens that never come."""
    suppressed_first_ids: tuple[int, ...] = ()
    """Tokens that do not come first, or first after `first_id`."""
    min_tokens: int = 0
    """Tokens before an end token may come."""
    max_tokens: int | None = None
    """The most tokens, unless the caller says otherwise."""
    no_repeat_ngram: int = 0
    """No sequence of so many tokens comes twice; 0: any may."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have come become less likely (`sampling.RepetitionPenalty`)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "repetition_penalty":
                if not is_number(value) or not 0 < value < math.inf:
                    raise InputError(f"repetition_penalty={value!r}: must be a number above 0")
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            optional = value is None and field.default is None
            if not optional and not all(is_whole(number) for number in numbers):
                raise InputError(f"{field.name}={value!r}: must be whole, at least 0")
        if self.max_tokens == 0:
            raise InputError("max_tokens=0: must be at least 1")
        if not set(self.prompt).isdisjoint(self.end_ids):
            raise InputError(f"prompt={self.prompt}: one of these ends a text, leave it out")

    def check_ids(self, vocab_size: int) -> None:
        """Refuse tokens that the model would have to give or read but does not have.

        Raises:
            InputError: there are some.
        """
        for name in ("start_id", "pad_id", "prompt", "first_id", "last_id"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            if any(number >= vocab_size for number in numbers):
                raise InputError(f"{name}={value}: the model has the tokens 0 to {vocab_size - 1}")


OWN_RULES = GenerationConfig(start_id=BOS_ID, end_ids=(EOS_ID,))
"""The lecture document's, and those of all that is trained here."""
