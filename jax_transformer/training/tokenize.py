"""`jax-transformer tokenize`: text to a file of tokens, once, for more text than memory holds."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from jax_transformer.errors import InputError
from jax_transformer.training.language_config import LanguageDataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Write text as a file of tokens, which `train.py lm --data.tokens FILE` trains on."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.bin")]
    """New file; three others are written beside it."""
    seed: int = 0
    """Of the choice of documents that are held out."""
    data: LanguageDataConfig = dataclasses.field(default_factory=LanguageDataConfig)
    """The text, as `train.py lm` reads it."""


def tokenize(options: Tokenize) -> None:
    """Read the text (twice: to learn the tokens and to write them) and write the files.

    Raises:
        InputError: text that cannot be used, or an output that is there already.
    """
    from jax_transformer.data.tokens import check_output, write_tokens
    from jax_transformer.training.language import make_tokenizer_of, split_texts

    if options.data.tokens is not None:
        raise InputError("--data.tokens: that is a file of tokens already; give text")
    check_output(options.file)
    texts = split_texts(options.data, options.seed)
    write_tokens(options.file, texts, make_tokenizer_of(options.data, texts))
    print(f"Train on it:\n\n    python train.py lm --data.tokens {options.file}\n")
