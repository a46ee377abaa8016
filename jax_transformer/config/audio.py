"""Sound as the source of an encoder-decoder."""

import dataclasses

from jax_transformer.config.checks import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """Log-mel features in place of source tokens, read by two convolutions of which the second
    halves the length, with a fixed table of positions (Whisper)."""

    num_mel_bins: int = 80
    """Features of a frame."""
    max_len: int = 1500
    """Rows of the table: half the most frames."""

    def __post_init__(self) -> None:
        check_positive(self, "num_mel_bins", "max_len")
