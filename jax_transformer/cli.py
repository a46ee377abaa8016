"""`jax-transformer generate`: use what `train.py` has saved."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jax_transformer.arguments import parse_arguments
from jax_transformer.errors import InputError


@contextlib.contextmanager
def exit_on_bad_input() -> Generator[None]:
    """Turn bad input, Ctrl-C and a file that cannot be read or written into one line on standard
    error and exit code 2."""
    try:
        yield
    except InputError as error:
        message = str(error)
    except KeyboardInterrupt:
        message = "interrupted"
    except BrokenPipeError:
        # The reader of a pipe has seen enough; nothing may be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        message = str(error)
    else:
        return
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Translate with the best model of a run, greedily."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Directory that `train.py` saved."""
    text: Annotated[str | None, tyro.conf.arg(metavar="SENTENCE", help_behavior_hint="")] = None
    """The sentence to translate."""
    input: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Or a text file with a sentence on each line (`.gz` too)."""
    output: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: standard output)"),
    ] = None
    """New file for the translations, a line each."""
    max_len: Annotated[
        int | None,
        tyro.conf.arg(metavar="TOKENS", help_behavior_hint="(default: about twice the source's)"),
    ] = None
    """The most tokens of a translation."""


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


COMMANDS: dict[str, tuple[Callable[..., Any], Callable[[Any], None]]] = {
    "generate": (Generate, generate)
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The `jax-transformer` command."""
    with exit_on_bad_input():
        command, options = parse_command(sys.argv[1:] if arguments is None else arguments)
        COMMANDS[command][1](options)


def parse_command(arguments: Sequence[str]) -> tuple[str, Any]:
    """The name of the command and its options.

    Raises:
        InputError: no such command, or options that it cannot use.
        SystemExit: `--help`.
    """
    classes = {name: options for name, (options, _) in COMMANDS.items()}
    if arguments and arguments[0] in ("-h", "--help"):
        tyro.extras.subcommand_cli_from_dict(classes, args=["--help"], prog="jax-transformer")
    if not arguments or arguments[0] not in COMMANDS:
        found = f"{arguments[0]!r} is no command" if arguments else "no command"
        raise InputError(f"{found}: give one of {', '.join(COMMANDS)}, see jax-transformer --help")
    command, *rest = arguments
    return command, parse_arguments(classes[command], rest, prog=f"jax-transformer {command}")
