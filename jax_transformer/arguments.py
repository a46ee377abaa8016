"""Command lines into dataclasses, by tyro; what it refuses becomes one line, as other bad input."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import tyro

from jax_transformer.errors import InputError

Settings = TypeVar("Settings")

NOT_A_NUMBER = {
    r"no type matching \{None\}\|INT could be instantiated from \[(.*)\]": "a whole number",
    r"no type matching \{None\}\|FLOAT could be instantiated from \[(.*)\]": "a number",
    r"invalid literal for int\(\) with base 10: (.*)": "a whole number",
    r"could not convert string to float: (.*)": "a number",
}
"""What tyro and Python say about a value, and what it must be."""


def parse_arguments(
    settings: Callable[..., Settings],
    arguments: Sequence[str],
    *,
    prog: str,
    default: Settings | None = None,
) -> Settings:
    """The dataclass `settings` from the flags in `arguments`; others are those of `default`.

    Raises:
        InputError: an unknown flag (with the nearest ones), or a value that cannot be used.
        SystemExit: `--help`, with code 0 when the text is printed.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    with one_line_errors(prog):
        values, unknown = tyro.cli(
            settings,
            args=with_values(settings, arguments),
            prog=prog,
            return_unknown_args=True,
            config=(tyro.conf.FlagConversionOff,),
            **given,
        )
    if unknown:
        raise InputError(unknown_argument(unknown[0], flags(settings), prog))
    return values


@contextlib.contextmanager
def one_line_errors(prog: str) -> Generator[None]:
    """Turn the box that tyro prints before it exits into an `InputError`."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            yield
    except SystemExit as exit_:
        if exit_.code == 0:
            raise
        raise (raised_by_settings(exit_) or box_error(box.getvalue(), prog)) from None


def raised_by_settings(error: BaseException | None) -> InputError | None:
    """The `InputError` of a dataclass that tyro caught, if that is why it exits."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__ or error.__context__
    return error


def box_error(box: str, prog: str) -> InputError:
    """The first paragraph in tyro's box, below its title, as one line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│╭╮╰╯─-| ") for line in box.splitlines()]
    _, *body = [line for line in lines if line] or [""]
    rows = lines[lines.index(body[0]) :] if body else ["the arguments cannot be used"]
    paragraph = rows[: rows.index("")] if "" in rows else rows
    text = " ".join(paragraph).removeprefix("Error parsing ")
    text = text.rstrip(".")
    for pattern, wanted in NOT_A_NUMBER.items():
        text = re.sub(f"{pattern}$", rf"\1 is not {wanted}", text)
    return InputError(f"{text}; {prog} --help lists all settings")


def unknown_argument(argument: str, known: Sequence[str], prog: str) -> str:
    """What to say about an argument that is no flag of the command."""
    name = argument.split("=")[0].replace("_", "-")
    if not name.startswith("-"):
        return f"unexpected argument {argument!r}: settings are flags, see {prog} --help"
    near = difflib.get_close_matches(name, known, n=3)
    # `--warmup-steps` is meant for a flag of a group, `--optimizer.warmup-steps`.
    near = [flag for flag in known if flag.endswith(f".{name.lstrip('-')}")] or near
    meant = f"did you mean {' or '.join(near)}?" if near else f"{prog} --help lists all flags"
    return f"unknown flag {name}: {meant}"


def with_values(settings: Any, arguments: Sequence[str]) -> list[str]:
    """`--dry-run` alone, as any flag that is true or false, is `--dry-run True`."""
    switches = [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(settings)
        if field.type is bool
    ]
    given: list[str] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        given.append(argument)
        if argument.replace("_", "-") in switches and following not in ("True", "False"):
            given.append("True")
    return given


def flags(settings: Any, prefix: str = "--") -> list[str]:
    """The flags of a dataclass and of the dataclasses in it: `--data.source`."""
    names = []
    for field in dataclasses.fields(settings):
        name = prefix + field.name.replace("_", "-")
        nested = dataclasses.is_dataclass(field.type)
        names += flags(field.type, f"{name}.") if nested else [name]
    return names
