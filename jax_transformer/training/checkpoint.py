"""Checkpoints of a run: the latest state to resume from, and the best model to use.

Written by orbax beside their final names and renamed when complete, so that a killed save
leaves the one before. Layers are saved as a list, however they were trained.
"""

from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from jax_transformer.errors import InputError

Tree = Any


class CheckpointStore:
    """The two newest checkpoints under one directory, by step: one is complete at any moment."""

    def __init__(self, directory: Path):
        self._directory = directory.absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True),
            item_handlers=ocp.StandardCheckpointHandler(),
        )

    def save(self, step: int, tree: Tree) -> None:
        """Save in the background; an error of the save before is raised here.

        A checkpoint of that step which is there already stays: it was saved between the one that
        this run was resumed from and a kill, and steps repeat exactly.
        """
        self._manager.check_for_errors()
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(tree), force=True)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def restore(self, like: Tree) -> Tree:
        """The newest checkpoint, on the devices and in the layout of `like`.

        Args:
            like: arrays or `jax.ShapeDtypeStruct`s of the names, shapes and dtypes expected.

        Raises:
            InputError: there is none, or what it holds has another name, shape or dtype (which
                orbax would fill or cast without a word).
        """
        step = self.latest_step()
        if step is None:
            raise InputError(
                f"{self._directory} holds no complete checkpoint: the run was stopped before its "
                f"first one; start it again"
            )
        saved = self._manager.item_metadata(step)
        check_same_leaves(saved, like, place=f"{self._directory}/{step}")
        return self._manager.restore(step, args=ocp.args.StandardRestore(like))

    def close(self) -> None:
        """Wait for the saves under way; an error of theirs is raised here."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
