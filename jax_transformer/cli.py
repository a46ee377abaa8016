"""`jax-transformer generate`: use what `train.py` has saved."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jax_transformer.errors import InputError


@contextlib.contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn an `InputError` into one line on standard error and exit code 2."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Translate with the best model of a run, greedily."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Directory that `train.py` saved."""
    text: str | None = None
    """One sentence to translate."""
    input: Path | None = None
    """Text file with a sentence on each line."""
    output: Path | None = None
    """Where to write the translations, a line each; by default standard output."""
    max_len: int | None = None
    """The most tokens of a translation; by default twice the padded length of the source."""


def generate(options: Generate) -> None:
    """Translate `text`, or the lines of `input`.

    Raises:
        InputError: neither or both of them, a file that cannot be read, an output that is there
            already, a run without a model, a sentence that is too long.
    """
    from jax_transformer.data.text import read_lines
    from jax_transformer.decoding.translate import Translator
    from jax_transformer.training.run import load_best

    if (options.text is None) == (options.input is None):
        raise InputError("give either --text with a sentence or --input with a file of them")
    if options.output is not None and options.output.exists():
        raise InputError(f"--output {options.output} is there already: choose another name")
    if options.output is not None and not options.output.parent.is_dir():
        raise InputError(
            f"--output {options.output}: the directory {options.output.parent} is not there"
        )
    sentences = [options.text or ""] if options.input is None else read_lines(options.input)
    model = load_best(options.run_dir)
    translator = Translator(model.graphdef, model.buffers, model.config, model.tokenizer)
    translations = translator(model.params, sentences, max_len=options.max_len)
    # One line each, so that line n of the output translates line n of the input.
    lines = "".join(" ".join(translation.split()) + "\n" for translation in translations)
    if options.output is None:
        sys.stdout.write(lines)
    else:
        partial = options.output.with_name(f"{options.output.name}.partial")
        partial.write_text(lines, encoding="utf-8")
        partial.replace(options.output)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `jax-transformer` command."""
    with exit_on_bad_input():
        command = tyro.extras.subcommand_cli_from_dict(
            {"generate": Generate}, args=arguments, prog="jax-transformer"
        )
        generate(command)
