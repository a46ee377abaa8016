"""Tokens in, text out as soon as it is certain."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jax_transformer.errors import InputError

CONTEXT = 8
"""Tokens, or a few more, before the new ones that are decoded with them: what a token says may
depend on whether it is the first."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet a whole one."""


@runtime_checkable
class TextCodec(Protocol):
    """Text to token ids and back (`data.tokenizer.Tokenizer`)."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; U+FFFD for bytes that are no character."""
        ...


class TextStream:
    """The text that follows one prompt.

    A piece of text is given out when nothing that may follow can change or cut it: not the
    beginning of a character of several bytes, nor what may become a stop string. The text ends
    before the first stop string in it, wherever tokens begin and end. Prompts hold no stops: only
    new text is searched.

    Raises:
        InputError: an empty stop string.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stops: Sequence[str] = ()):
        if "" in stops:
            raise InputError("a stop string is empty: give the text to stop at, or leave it out")
        self.codec = codec
        self.stops = tuple(stops)
        self.stopped = False
        """Whether a stop string has come."""
        self.text = ""
        """All that has been given out."""
        self._decoded = ""
        """All that is certain but for stop strings."""
        self._open: list[int] = []
        """Tokens decoded together: some that are in `_decoded`, then those that are not."""
        self._open_from = 0
        """Where the text of the latter begins."""
        self._close([*prompt])

    def push(self, token: int) -> str:
        """What is certain with one more token."""
        self._open.append(token)
        new = self._open_text()
        # The last one may be the beginning of a character; where tokens of bytes become text only
        # all together, so are those before it.
        if not new.endswith(INCOMPLETE):
            self._decoded += new
            self._close(self._open)
            return self._give(self._decoded, last=False)
        return self._give(self._decoded + new.rstrip(INCOMPLETE), last=False)

    def finish(self) -> str:
        """What was held back, once no token follows."""
        return self._give(self._decoded + self._open_text(), last=True)

    def _open_text(self) -> str:
        return self.codec.decode(self._open)[self._open_from :]

    def _close(self, ids: list[int]) -> None:
        """Go on after `ids`, of which the text is certain."""
        text = self.codec.decode(ids)
        for start in range(max(len(ids) - CONTEXT, 0), -1, -1):
            self._open = ids[start:]
            kept = self.codec.decode(self._open)
            # Not from within a character on, which would change those after it.
            if text.endswith(kept):
                break
        self._open_from = len(kept)

    def _give(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        end = len(text)
        # Before that there is no beginning of a stop string that was not held back.
        start = len(self.text)
        found = [place for stop in self.stops if (place := text.find(stop, start)) >= 0]
        if found:
            self.stopped, end = True, min(found)
        elif not last:
            end -= self._possible_beginning(text)
        piece = text[start:end]
        self.text += piece
        return piece

    def _possible_beginning(self, text: str) -> int:
        """How many characters at the end of the text are the beginning of a stop string."""
        new = text[len(self.text) :]
        return max(
            (
                size
                for stop in self.stops
                for size in range(1, min(len(stop), len(new) + 1))
                if new.endswith(stop[:size])
            ),
            default=0,
        )
