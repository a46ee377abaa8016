"""Checkpoints of a run: the latest state to resume from, and the best model to use.

Written by orbax beside their final names and renamed when complete, so that a killed save
leaves the one before. Layers are saved as a list, however they were trained.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from jax_transformer.errors import InputError

Tree = Any

# Orbax logs each save that waits for the one before, and tracebacks of what it raises as well,
# across the progress line.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class CheckpointStore:
    """The two newest checkpoints under one directory, by step, or the two of the highest score:
    one is complete at any moment.

    Args:
        directory: of the checkpoints.
        write: make the directory, and clear away what a killed save has left in it. A reader
            changes nothing: the run may be writing at the same time.
        by_score: keep and restore by score, not by step.
    """

    def __init__(self, directory: Path, *, write: bool = False, by_score: bool = False):
        self._directory = directory.absolute()
        with readable_errors(self._directory):
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=2,
                    create=write,
                    cleanup_tmp_directories=write,
                    best_fn=(lambda metrics: metrics["score"]) if by_score else None,
                    # In the background a directory that cannot be made is a hang of minutes.
                    async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                ),
                item_handlers=ocp.StandardCheckpointHandler(),
            )

    def save(self, step: int, tree: Tree, *, score: float | None = None) -> None:
        """Save in the background; an error of the save before is raised here.

        A checkpoint of that step which is there already stays: it was saved between the one that
        this run was resumed from and a kill, and steps repeat exactly.

        Raises:
            InputError: this checkpoint, or the one before, could not be written.
        """
        with readable_errors(self._directory):
            self._manager.check_for_errors()
            if step not in self._manager.all_steps():
                self._manager.save(
                    step,
                    args=ocp.args.StandardSave(tree),
                    metrics=None if score is None else {"score": score},
                    force=True,
                )

    def chosen_step(self) -> int | None:
        """The step of the complete checkpoint that `restore` reads: the newest, or the best."""
        return self._manager.best_step()

    def best_score(self) -> float | None:
        """The score of the best checkpoint."""
        step = self.chosen_step()
        metrics = None if step is None else self._manager.metrics(step)
        return None if metrics is None else metrics["score"]

    def restore(self, like: Tree) -> Tree:
        """The newest or best checkpoint, on the devices and in the layout of `like`.

        Args:
            like: arrays or `jax.ShapeDtypeStruct`s of the names, shapes and dtypes expected.

        Raises:
            InputError: there is none, or it cannot be read, or what it holds has another name,
                shape or dtype (which orbax would fill or cast without a word).
        """
        step = self.chosen_step()
        if step is None:
            raise InputError(f"{self._directory} holds no complete checkpoint")
        with readable_errors(self._directory):
            saved = self._manager.item_metadata(step)
            check_same_leaves(saved, like, place=f"{self._directory}/{step}")
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))

    def close(self) -> None:
        """Wait for the saves under way.

        Raises:
            InputError: one of them could not be written.
        """
        with readable_errors(self._directory):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextmanager
def readable_errors(directory: Path) -> Generator[None]:
    """What goes wrong in orbax and below, by its place: disk full, no permission, files damaged.

    Raises:
        InputError: instead of any other error.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(
            f"{directory}: checkpoints cannot be written or read here ({reason}): see that it is "
            f"a directory with free space that you may write to, and its files are whole"
        ) from error


def check_same_leaves(saved: Tree, expected: Tree, *, place: str) -> None:
    """Compare names, shapes and dtypes.

    Raises:
        InputError: the differences, in one line.
    """
    found, wanted = leaf_types(saved), leaf_types(expected)
    problems = [f"unexpected {name}" for name in found if name not in wanted]
    problems += [f"missing {name}" for name in wanted if name not in found]
    problems += [
        f"{name} is {found[name]}, must be {wanted[name]}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputError(
            f"{place} does not fit its run's config: {'; '.join(problems[:3])}{more}; restore "
            f"config.json or the checkpoint from a copy"
        )


def leaf_types(tree: Tree) -> dict[str, str]:
    """`float32[2, 3]` of each leaf, by dotted name."""
    return {
        ".".join(str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree.flatten_with_path(tree)[0]
    }
