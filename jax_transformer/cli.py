"""`jax-transformer`: use what `train.py` has saved, and look into checkpoints."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jax_transformer.arguments import parse_arguments
from jax_transformer.errors import InputError
from jax_transformer.porting.inspect import Inspect, inspect
from jax_transformer.porting.port import Port, port_command
from jax_transformer.training.tokenize import Tokenize, tokenize
from jax_transformer.verification.command import Verify, verify_command


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


def optional(metavar: str, default: str = "") -> Any:
    """How the help shows a flag that may be left out."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=default and f"(default: {default})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts with the best language model of a run, or translate with a translator.

    The most likely token is taken, unless a flag asks for a draw. A ported model begins, ends and
    leaves out what its generation_config.json says.
    """

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Directory that `train.py` saved, a ported model, or a folder or file that `port` takes."""
    prompt: Annotated[str | None, optional("TEXT")] = None
    """The text to continue. What follows is shown as it comes."""
    text: Annotated[str | None, optional("SENTENCE")] = None
    """The sentence to translate, or what else an encoder-decoder is to read."""
    input: Annotated[Path | None, optional("FILE")] = None
    """Or a text file with a prompt, or a sentence, on each line (`.gz` too)."""
    output: Annotated[Path | None, optional("FILE", "standard output")] = None
    """New file with a line for each: the translation, or a JSON object with prompt and text."""
    max_tokens: Annotated[int | None, optional("TOKENS", "256, or what there is room for")] = None
    """The most tokens that follow a prompt."""
    temperature: Annotated[float | None, optional("T")] = None
    """Draw tokens, logits divided by this: below 1 the likely ones gain, above 1 the others."""
    top_k: Annotated[int | None, optional("K")] = None
    """Draw from the K most likely tokens."""
    top_p: Annotated[float | None, optional("P")] = None
    """Draw from the most likely tokens that have this probability together."""
    min_p: Annotated[float | None, optional("P")] = None
    """Draw from the tokens that are at least this fraction as likely as the most likely one."""
    repetition_penalty: Annotated[float | None, optional("X")] = None
    """Above 1: tokens of the prompt and of the text so far become less likely."""
    stop: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], optional("TEXT")]] = ()
    """End before this text; may be given several times."""
    seed: Annotated[int | None, optional("N", "0")] = None
    """Of the draws: the same seed gives the same text."""
    max_len: Annotated[
        int | None, optional("TOKENS", "as its files say, or about twice the source's")
    ] = None
    """The most tokens of a translation."""


OF_TRANSLATION = {"text": "--prompt", "max_len": "--max-tokens"}
"""Flags that a language model has no use for, and those to give in their place."""

OF_LANGUAGE = {
    "prompt": "--text",
    "max_tokens": "--max-len",
    **dict.fromkeys(
        ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed")
    ),
}
"""And those that a translator has no use for."""


def generate(options: Generate) -> None:
    """Continue `prompt`, translate `text`, or do so with the lines of `input`.

    Raises:
        InputError: neither or both of them, a flag that does not fit the kind of run, a file that
            cannot be read, an output that is there already, a run without a model, a text that is
            too long.
    """
    from jax_transformer.data.text import read_lines
    from jax_transformer.training.run import RunDirectory

    ported = is_ported(options.run_dir)
    task = ported_task(options.run_dir) if ported else RunDirectory(options.run_dir).load_task()
    check_flags(options, task)
    given = options.prompt if task == "language" else options.text
    if (given is None) == (options.input is None):
        flag, name = ("--prompt", "text") if task == "language" else ("--text", "a sentence")
        raise InputError(f"give either {flag} with {name} or --input with a file of them")
    if options.output is not None and options.output.exists():
        raise InputError(f"--output {options.output} is there already: choose another name")
    if options.output is not None and not options.output.parent.is_dir():
        raise InputError(
            f"--output {options.output}: the directory {options.output.parent} is not there"
        )
    texts = [given or ""] if options.input is None else list(read_lines(options.input))
    write = continue_prompts if task == "language" else translate
    lines = write(options, texts)
    if options.output is None:
        for piece in lines:
            print(piece, end="", flush=True)
    else:
        partial = options.output.with_name(f"{options.output.name}.partial")
        partial.write_text("".join(lines), encoding="utf-8")
        partial.replace(options.output)


def is_ported(path: Path) -> bool:
    """Whether a folder holds a model that was made elsewhere: as it came, ported, or trained here
    further; a file of weights (GGUF, say) does."""
    from jax_transformer.porting.formats.base import read_json
    from jax_transformer.porting.generation import PART

    if path.is_file():
        return True
    config = path / "config.json"
    if not config.is_file():
        return False
    values = read_json(config)
    if "task" in values:
        return PART in values
    return not {"family", "model_type"}.isdisjoint(values)


def ported_task(path: Path) -> str:
    """What such a model does.

    Raises:
        InputError: it writes no text, or is none that is known.
    """
    from jax_transformer.config import DecoderOnlyConfig, EncoderOnlyConfig
    from jax_transformer.porting.identify import identify
    from jax_transformer.porting.recognise import open_checkpoint

    config = identify(open_checkpoint(path)).config
    if isinstance(config, EncoderOnlyConfig):
        raise InputError(f"{path} holds an encoder, which writes no text: give a language model")
    if getattr(config, "audio", None) is not None:
        raise InputError(f"{path} reads sound: docs/porting.md says how, in Python")
    return "language" if isinstance(config, DecoderOnlyConfig) else "translation"


def check_flags(options: Generate, task: str) -> None:
    """Refuse flags that the run has no use for.

    Raises:
        InputError: one of them is given.
    """
    kind, unfit = "translator", OF_LANGUAGE
    if task == "language":
        kind, unfit = "language model", OF_TRANSLATION
    for name, instead in unfit.items():
        if getattr(options, name) not in (None, ()):
            remedy = f"give {instead}" if instead else "leave it out"
            raise InputError(
                f"--{name.replace('_', '-')}: {options.run_dir} holds a {kind}, {remedy}"
            )


def translate(options: Generate, sentences: Sequence[str]) -> Iterator[str]:
    """A line for each sentence."""
    translator, params = make_translator(options.run_dir)
    for translation in translator(params, sentences, max_len=options.max_len):
        # One line each, so that line n of the output translates line n of the input.
        yield " ".join(translation.split()) + "\n"


def make_translator(path: Path) -> tuple[Any, Any]:
    """The translator of a run or of a ported directory, and its parameters."""
    if is_ported(path):
        from jax_transformer.porting.pretrained import from_pretrained

        found = from_pretrained(path)
        return found.translator(), found.params
    from jax_transformer.config import ModelConfig
    from jax_transformer.data.tokenizer import Tokenizer
    from jax_transformer.decoding.translate import Translator
    from jax_transformer.training.run import load_best

    model = load_best(path)
    assert isinstance(model.config, ModelConfig)
    assert isinstance(model.tokenizer, Tokenizer)
    translator = Translator(model.graphdef, model.buffers, model.config, model.tokenizer)
    return translator, model.params


def make_generator(path: Path) -> Any:
    """The language model of a run or of a ported directory."""
    if is_ported(path):
        from jax_transformer.porting.pretrained import from_pretrained

        return from_pretrained(path).generator()
    from jax_transformer.config import OWN_RULES, DecoderOnlyConfig
    from jax_transformer.decoding.generate import TextGenerator
    from jax_transformer.training.run import load_best

    model = load_best(path)
    assert isinstance(model.config, DecoderOnlyConfig)
    return TextGenerator(
        model.graphdef,
        model.params,
        model.buffers,
        model.config,
        model.tokenizer,
        rules=OWN_RULES,
    )


def continue_prompts(options: Generate, prompts: Sequence[str]) -> Iterator[str]:
    """What follows the one prompt, in pieces as they come, or a line for each of several."""
    from jax_transformer.decoding.sampling import make_strategy

    strategy = make_strategy(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    generator = make_generator(options.run_dir)
    settings: Any = {
        "max_tokens": options.max_tokens,
        "strategy": strategy,
        "stops": options.stop,
    }
    if options.input is None and options.output is None:
        yield from generator.stream(prompts[0], **settings)
        yield "\n"
        return
    for prompt, found in zip(prompts, generator(prompts, **settings), strict=True):
        yield json.dumps({"prompt": prompt, "text": found.text}, ensure_ascii=False) + "\n"


COMMANDS: dict[str, tuple[Callable[..., Any], Callable[[Any], None]]] = {
    "generate": (Generate, generate),
    "inspect": (Inspect, inspect),
    "port": (Port, port_command),
    "tokenize": (Tokenize, tokenize),
    "verify": (Verify, verify_command),
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
