"""What was found, as a table in the terminal and as JSON."""

import dataclasses
from typing import Any

from rich.table import Table

from jax_transformer.verification.capture import module_of
from jax_transformer.verification.compare import SAME_FUNCTION
from jax_transformer.verification.decoding.compare import Decoded, DecodingReport
from jax_transformer.verification.face import explanation
from jax_transformer.verification.result import Report
from jax_transformer.verification.training.trajectory import Trajectory


def module_table(report: Report) -> Table:
    """The tree of modules: float64 error, each side's error in the narrow dtype, verdict."""
    table = Table(title="modules", title_justify="left")
    table.add_column("module", overflow="fold")
    names = ("float64", *([] if report.dtype is None else ("ours", "theirs", "ratio")))
    for name in names:
        table.add_column(name, justify="right")
    if report.gradients:
        table.add_column("gradient", justify="right")
    table.add_column("verdict")
    for row in rows(report):
        indent = "  " * row.module.count(".")
        cells = [f"{indent}{label(row.module)}", f"{row.error:.1e}"]
        if report.dtype is not None:
            cells += [shown(row.ours), shown(row.theirs), shown(row.ratio, "{:.2f}")]
        if report.gradients:
            cells.append(shown(row.gradient))
        style = "" if row.verdict == "same" else "bold red"
        table.add_row(*cells, row.verdict, style=style)
    return table


def steps_table(trajectory: Trajectory) -> Table:
    """The training steps: the reference's loss and gradient norm, and how far ours are off."""
    table = Table(title="training in float64", title_justify="left")
    for name in ("step", "loss", "off by", "gradient norm", "off by", "moments", "parameters"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    parting = trajectory.parting
    for step, (loss, norm) in enumerate(
        zip(trajectory.losses, trajectory.gradient_norms, strict=True), 1
    ):
        apart = parting is not None and step >= parting.step
        table.add_row(
            str(step),
            f"{loss:.4f}",
            shown(trajectory.worst(step, "loss")[1]),
            f"{norm:.4g}",
            shown(trajectory.worst(step, "gradient norm")[1]),
            shown(trajectory.worst(step, "first moment", "second moment")[1]),
            shown(trajectory.worst(step, "parameter")[1]),
            "apart" if apart else "together",
            style="bold red" if apart else "",
        )
    return table


def decoding_table(report: DecodingReport) -> Table:
    """The ways of decoding: how far their logits are off in float64, how many tokens they choose as
    the leading way does."""
    rows, count = len(report.prompts), len(report.ways[0].tokens[0])
    title = f"decoding in {report.dtype}, {count} tokens after each of {rows} prompts"
    table = Table(title=title, title_justify="left")
    table.add_column("way")
    for name in ("logits in float64", "tokens alike"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for way in report.ways:
        style = "" if way.same else "bold red"
        table.add_row(way.name, shown(way.error), f"{way.agreement:.0%}", verdict(way), style=style)
    return table


def verdict(way: Decoded) -> str:
    """In a word."""
    if way.same:
        return "ties" if way.differences else "same"
    return "other tokens" if any(not each.tie for each in way.differences) else "other logits"


def differences_table(report: DecodingReport) -> Table | None:
    """Where ways choose another token than the leading one, with the margins on both sides beside
    the numerical error; None if they do not."""
    table = Table(
        title="first other token of each prompt (this way's, the leading one's)",
        title_justify="left",
    )
    table.add_column("way")
    for name in ("at", "tokens", "margins", "error"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for way in report.ways:
        for choice in way.differences:
            table.add_row(
                way.name,
                f"{choice.row}/{choice.step}",
                f"{choice.tokens[0]}, {choice.tokens[1]}",
                ", ".join(map(shown, choice.margins)),
                shown(choice.error),
                "tie" if choice.tie else "fault",
                style="" if choice.tie else "bold red",
            )
    return table if table.row_count else None


def label(module: str) -> str:
    """The last part of a name, of one in a list with the list's: `layers.0`."""
    last = module.split(".")[-2:]
    return ".".join(last) if last[-1].isdigit() else last[-1] or "model"


def shown(value: float | None, form: str = "{:.1e}") -> str:
    """A number, or nothing."""
    return "" if value is None else form.format(value)


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of a module: the largest of its calls and points."""

    module: str
    error: float
    ours: float | None
    theirs: float | None
    ratio: float | None
    gradient: float | None
    verdict: str


def rows(report: Report) -> list[Row]:
    """A row for each module, in the order in which they are called."""
    found: list[Row] = []
    causes = {each.module: each for each in report.diagnoses}
    for module in dict.fromkeys(map(module_of, report.errors)):
        points = [p for p in report.errors if module_of(p) == module and p.endswith(":out")]
        if not points:
            continue
        error = max(report.errors[p] for p in points)
        accuracy = [report.accuracy[p] for p in points if p in report.accuracy]
        worst = max(accuracy, key=lambda each: each.ours, default=None)
        gradients = [e for p, e in report.gradients.items() if module_of(p) == module]
        verdict = "same"
        if module in causes:
            verdict = " + ".join(causes[module].kinds) or "unknown cause"
        elif not error <= SAME_FUNCTION:
            verdict = "different"
        elif not all(each.passed for each in accuracy):
            verdict = "less accurate"
        found.append(
            Row(
                module,
                error,
                None if worst is None else worst.ours,
                None if worst is None else worst.theirs,
                None if worst is None else worst.ratio,
                max(gradients, default=None),
                verdict,
            )
        )
    return found


def summary(report: Report) -> list[str]:
    """What is said below the table."""
    ours, theirs = report.parameters
    lines = [f"parameters {ours:,}, the reference's {theirs:,}"]
    lines.append(f"output, each side by itself in float64: off by {report.output_error:.1e}")
    if (next_token := report.distributions) is not None:
        lines.append(
            f"next tokens in {report.dtype}: KL {next_token.kl:.1e} nats (at most "
            f"{next_token.worst_kl:.1e}), same most likely token {next_token.top1:.1%}"
        )
    if report.trajectory is not None and report.trajectory.untrained:
        names = ", ".join(report.trajectory.untrained)
        lines.append(f"not trained, as one side alone has it as a parameter: {names}")
    return [*lines, explanation(report)]


def as_json(report: Report) -> dict[str, Any]:
    """All numbers, infinite ones as words."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        finite = not isinstance(value, float) or abs(value) < float("inf")
        return value if finite else str(value)

    values = dataclasses.asdict(report)
    return plain({"verdict": report.verdict, "same": report.same, **values})
