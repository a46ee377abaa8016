"""`python -m parity_tests.planted_faults`: the score as a table."""

from rich.console import Console

from parity_tests.planted_faults.score import evaluate, misses, table


def main() -> None:
    console = Console(highlight=False)
    with console.status("") as status:
        score = evaluate(status.update)
    console.print(table(score))
    for line in misses(score):
        console.print(line, markup=False)
    console.print(
        f"{score.named_kinds:.0%} of {len(score.known_kinds)} kinds named in every place; "
        f"{len(score.false_alarms)} false alarms on {score.correct_models} correct models"
        f"{': ' if score.false_alarms else ''}{', '.join(score.false_alarms)}; "
        f"{score.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
