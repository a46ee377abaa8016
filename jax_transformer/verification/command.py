"""`jax-transformer verify`: two models side by side, as a table and as JSON."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from jax_transformer.errors import InputError

Dtype = Literal["float32", "bfloat16", "float16", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Say whether two models compute the same numbers, and if not, where and why not.

    Exit code 0: the same, 1: different, 2: they could not be compared.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_PORTED_DIR")]
    """A run, a ported directory, or what `port` takes."""
    reference: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="REFERENCE")]
    """A `.pt` of the lecture document's script, a Hugging Face folder, or another run."""
    dtype: Dtype = "float32"
    """In which accuracy is measured; `none`: compare in float64 alone."""
    backward: bool = False
    """Compare gradients too."""
    steps: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: none)")
    ] = None
    """Train both sides for N steps in float64, from the same state on the same batches."""
    decode: bool = False
    """Continue prompts on both sides, with caches and without, and compare token by token."""
    json: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """New file for all numbers."""
    html: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """New file for a page to read."""


def verify_command(options: Verify) -> None:
    """Compare, and print what was found.

    Raises:
        InputError: models that cannot be compared, no step to train, a file that is there already.
        SystemExit: code 1, the models are different.
    """
    if options.steps is not None and options.steps < 1:
        raise InputError(f"--steps {options.steps}: must be at least 1; leave it out not to train")
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and path.exists():
            raise InputError(f"{flag} {path} is there already: choose another name")
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{flag} {path}: {path.parent} is no directory: make it")
    # Only now: a wrong flag needs no JAX.
    from jax_transformer.verification.face import verify
    from jax_transformer.verification.table import (
        as_json,
        decoding_table,
        differences_table,
        module_table,
        steps_table,
        summary,
    )

    console = Console(highlight=False)
    with console.status("") as status:
        report = verify(
            options.model,
            options.reference,
            dtype=None if options.dtype == "none" else options.dtype,
            backward=options.backward,
            steps=options.steps or 0,
            decode=options.decode,
            progress=status.update,
        )
    console.print(module_table(report))
    if report.trajectory is not None:
        console.print(steps_table(report.trajectory))
    if report.decoding is not None:
        console.print(decoding_table(report.decoding))
        if (differences := differences_table(report.decoding)) is not None:
            console.print(differences)
    for line in summary(report):
        console.print(line, markup=False, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(report), indent=2) + "\n", encoding="utf-8")
    if options.html is not None:
        from jax_transformer.verification.report import page

        title = f"{options.model.name} and {options.reference.name}"
        options.html.write_text(page(report, title), encoding="utf-8")
    if not report.same:
        raise SystemExit(1)
