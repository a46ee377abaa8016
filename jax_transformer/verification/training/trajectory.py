"""Two trainings side by side: step by step, how far they are apart."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jax_transformer.models.parameters import Tree, flatten, split
from jax_transformer.training.step import TrainState, make_train_step, start_state
from jax_transformer.verification.compare import SAME_FUNCTION, relative_error
from jax_transformer.verification.diagnose import Diagnosis
from jax_transformer.verification.inputs import Batch
from jax_transformer.verification.oracle import float64_throughout
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.training.causes import explain_steps
from jax_transformer.verification.training.compiled import Shapes, as_arrays, quickly
from jax_transformer.verification.training.recipe import Recipe, Training
from jax_transformer.verification.training.recorded import Step, recorded_steps

ULP = 1e-15
"""The relative change of each weight, a draw, under which a second run of ours begins: a few units
in the last place of float64."""

ROUNDING = 1000.0
"""How many times as far as this second run the reference may be away, as `SAME_FUNCTION` is 1000
times `ULP`. (Measured on the models of the planted faults: up to 60 times. Where a gradient is
nothing but rounding errors, as that of a key bias, moments and updates mean nothing: there both
runs are off by as much as the values themselves.)"""

Values = dict[str, dict[str, Any]]
"""By quantity and name: "parameter" and so on by parameter, "loss" and "gradient norm" under ""."""

QUANTITIES = ("loss", "gradient norm", "first moment", "second moment", "parameter")
"""In the order in which a step makes them."""


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where two trainings part."""

    step: int
    """From 1."""
    quantity: str
    name: str
    """Of the parameter; "" for the loss and the gradient norm."""
    error: float
    rounding: float
    """How far two runs of ours are apart there that begin a few ulp apart."""

    @property
    def place(self) -> str:
        """`step 2, second moment of norm.scale`."""
        of = f" of {self.name}" if self.name else ""
        return f"step {self.step}, {self.quantity}{of}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What came of training both sides in float64 from the same state on the same batches."""

    losses: tuple[float, ...]
    """The reference's, a step."""
    gradient_norms: tuple[float, ...]
    errors: tuple[dict[str, dict[str, float]], ...]
    """A step: relative error of each quantity, after the step, by name."""
    rounding: tuple[dict[str, dict[str, float]], ...]
    """Likewise of a second run of ours from weights a few ulp away."""
    parting: Parting | None
    """The first quantity that differs by more than rounding explains."""
    diagnoses: tuple[Diagnosis, ...]
    """What differs in the reference's steps, each taken alone: in order."""

    def worst(self, step: int, *quantities: str) -> tuple[str, float]:
        """Where quantities are off the most after a step (from 1), for what rounding explains, and
        how much they are off there: but for those that are nothing but rounding errors."""
        errors, rounding = self.errors[step - 1], self.rounding[step - 1]
        found = [
            (error / limit(rounding[quantity][name]), name, error)
            for quantity in quantities
            for name, error in errors[quantity].items()
            if limit(rounding[quantity][name]) < 1 or error == math.inf
        ]
        _, name, error = max(found, default=(0.0, "", 0.0))
        return name, error

    @property
    def same(self) -> bool:
        """The two stay together."""
        return self.parting is None

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.parting is None:
            count = len(self.losses)
            return f"trained alike for {count} step{'s' if count > 1 else ''}"
        where = f"training parts at {self.parting.place}, off by {self.parting.error:.1e}"
        causes = [f"`{each.module}`: {each.sentence}" for each in self.diagnoses]
        return f"different: {'; '.join([where, *causes])}"


def limit(rounding: float) -> float:
    """The largest difference that rounding explains."""
    return max(SAME_FUNCTION, ROUNDING * rounding)


class OurRun:
    """The JAX side, trained by the step of `training.step`."""

    def __init__(self, model: nnx.Module, training: Training, noise: float = 0.0):
        self.graphdef, params, self.buffers = split(model)
        self.training = training
        generator = np.random.default_rng(0)
        params = jax.tree.map(
            lambda leaf: leaf * (1 + noise * generator.standard_normal(leaf.shape)), params
        )
        self.state = start_state(params, training.recipe.optimizer())

    def step(self, batch: Batch) -> Values:
        """What one more step leaves."""
        arguments = (self.state, self.buffers, as_arrays(batch))
        recipe, loss = self.training.recipe, self.training.loss
        take = compiled_step(self.graphdef, recipe, loss, Shapes(*arguments))
        self.state, metrics = take(*arguments)
        return {
            "loss": {"": np.asarray(metrics.loss.mean())},
            "gradient norm": {"": np.asarray(metrics.gradient_norm)},
            **moments_of(self.state),
        }


def moments_of(state: TrainState) -> Values:
    """Parameters and moments of Adam, by name."""
    trees = {
        "first moment": optax.tree_utils.tree_get(state.opt_state, "mu"),
        "second moment": optax.tree_utils.tree_get(state.opt_state, "nu"),
        "parameter": state.params,
    }
    return {
        quantity: {name: np.asarray(leaf) for name, leaf in flatten(tree).items()}
        for quantity, tree in trees.items()
    }


@functools.lru_cache(maxsize=8)
def compiled_step(graphdef: nnx.GraphDef, recipe: Recipe, loss: Any, shapes: Shapes) -> Any:
    """The training step of the JAX side; pairs that differ in the reference alone share it."""
    training = Training(batches=(), recipe=recipe, loss=loss)

    def summed(graphdef: Any, params: Tree, buffers: Tree, batch: Batch, **options: Any) -> Any:
        model: Any = nnx.merge(graphdef, params, buffers)
        return training.our_loss(model(*batch.inputs), batch.labels)

    step = make_train_step(graphdef, recipe.optimizer(), loss=summed, label_smoothing=0.0)
    return quickly(step, shapes)


def compare_training(
    pair: Pair, model: nnx.Module, *, models_differ: bool, progress: Callable[[str], None]
) -> Trajectory:
    """Train both sides of a pair in float64, from the weights of `model` and the reference's.

    Args:
        pair: with a `training`.
        model: our side in float64, under `jax.enable_x64`.
        models_differ: what is wrong before any training, which then needs no cause in it.
        progress: is told which step is taken.

    Raises:
        InputError: what `recorded_steps` refuses.
    """
    training = pair.training
    assert training is not None
    ours, nearby = OurRun(model, training), OurRun(model, training, ULP)
    found: list[Step] = []
    losses, norms, errors, rounding = [], [], [], []
    parting = None
    for theirs in reference_steps(pair):
        progress(f"training step {theirs.number}")
        mine, noisy = ours.step(theirs.batch), nearby.step(theirs.batch)
        losses.append(theirs.loss)
        norms.append(theirs.gradient_norm)
        errors.append(between(mine, values_of(theirs)))
        rounding.append(between(mine, noisy))
        # For the diagnosis: the step before the first that differs, and two after it.
        if parting is None:
            parting = first_difference(theirs.number, errors[-1], rounding[-1])
            found = [*found[-1:], theirs]
        elif len(found) < MOST_STEPS:
            found.append(theirs)
    diagnoses = []
    if parting is not None:
        progress("looking for causes in the training step")
        diagnoses = explain_steps(model, training, found, models_differ=models_differ)
    return Trajectory(
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        errors=tuple(errors),
        rounding=tuple(rounding),
        parting=parting,
        diagnoses=tuple(diagnoses),
    )


MOST_STEPS = 4
"""Steps of the reference that a cause is tried on."""


def reference_steps(pair: Pair) -> Iterator[Step]:
    """The reference's steps, in float64."""
    import torch

    training = pair.training
    assert training is not None
    model = copy.deepcopy(pair.theirs).to(torch.float64).eval()

    def loss(batch: Batch) -> Any:
        return training.their_loss(pair.torch_call(model, *batch.inputs), batch.labels)

    with float64_throughout(model):
        step = training.torch_trainer(model, loss, training.recipe)
        yield from recorded_steps(model, step, training.batches, pair.carry)


def values_of(step: Step) -> Values:
    """What a step of the reference leaves."""
    return {
        "loss": {"": np.asarray(step.loss)},
        "gradient norm": {"": np.asarray(step.gradient_norm)},
        "first moment": step.after.first,
        "second moment": step.after.second,
        "parameter": step.after.parameters,
    }


def between(found: Values, expected: Values) -> dict[str, dict[str, float]]:
    """Relative errors of what both have."""
    return {
        quantity: {
            name: relative_error(found[quantity][name], value)
            for name, value in values.items()
            if name in found[quantity]
        }
        for quantity, values in expected.items()
    }


def first_difference(
    step: int, errors: dict[str, dict[str, float]], rounding: dict[str, dict[str, float]]
) -> Parting | None:
    """The first quantity that is off by more than rounding explains, where it is off the most."""
    for quantity in QUANTITIES:
        wrong = {
            name: error
            for name, error in errors[quantity].items()
            if not error <= limit(rounding[quantity][name])
        }
        if wrong:
            name = max(wrong, key=lambda name: wrong[name])
            return Parting(step, quantity, name, wrong[name], rounding[quantity][name])
    return None
