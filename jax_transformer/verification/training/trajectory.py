"""Two trainings side by side: step by step, how far they are apart."""

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jax_transformer.models.parameters import Tree, flatten, split
from jax_transformer.training.step import TrainState, make_train_step, start_state
from jax_transformer.verification.compare import SAME_FUNCTION, relative_error
from jax_transformer.verification.compiled import PROGRAMS, as_arrays
from jax_transformer.verification.diagnose import Diagnosis
from jax_transformer.verification.inputs import Batch
from jax_transformer.verification.oracle import float64_throughout
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.training.causes import explain_steps
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
    untrained: tuple[str, ...]
    """Parameters of one side that the other does not have as such (a buffer, or a table that it
    computes): they stay as they are on both."""
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
    """The JAX side, trained by the step of `training.step`.

    Args:
        model: in float64.
        pair: what it is trained for.
        trained: names of the parameters that are.
        noise: relative size of a draw that the weights begin with.
    """

    def __init__(self, model: nnx.Module, pair: Pair, trained: Collection[str], noise: float = 0.0):
        training = pair.training
        assert training is not None
        self.graphdef, params, buffers = split(model)
        self.structure = jax.tree.structure(params)
        self.settings = (training.recipe, training.loss, pair.jax_call)
        generator = np.random.default_rng(0)
        leaves = {
            name: leaf * (1 + noise * generator.standard_normal(leaf.shape))
            for name, leaf in flatten(params).items()
        }
        mine = {name: leaf for name, leaf in leaves.items() if name in trained}
        self.fixed = {name: leaf for name, leaf in leaves.items() if name not in trained}, buffers
        self.state = start_state(mine, training.recipe.optimizer())

    def step(self, batch: Batch) -> Values:
        """What one more step leaves."""
        arguments = (self.state, self.fixed, as_arrays(batch))
        settings = (self.graphdef, self.structure, *self.settings)
        self.state, metrics = PROGRAMS.run(training_step, settings, *arguments)
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
        quantity: {name: np.asarray(leaf) for name, leaf in tree.items()}
        for quantity, tree in trees.items()
    }


def training_step(
    graphdef: nnx.GraphDef, structure: Any, recipe: Recipe, loss: Any, call: Callable[..., Any]
) -> Any:
    """That of the JAX side, of a state, what is not trained, and a batch."""
    training = Training(batches=(), recipe=recipe, loss=loss)

    def summed(graphdef: Any, trained: Tree, fixed: Any, batch: Batch, **options: Any) -> Any:
        leaves, buffers = fixed
        # In the order of the tree, which is not that of the names.
        order = flatten(jax.tree.unflatten(structure, range(structure.num_leaves)))
        params = jax.tree.unflatten(structure, [(trained | leaves)[name] for name in order])
        model: Any = nnx.merge(graphdef, params, buffers)
        return training.our_loss(call(model, *batch.inputs), batch.labels)

    return make_train_step(graphdef, recipe.optimizer(), loss=summed, label_smoothing=0.0)


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
    theirs, trained, untrained = same_parameters(pair, model)
    ours, nearby = (OurRun(model, pair, trained, noise) for noise in (0.0, ULP))
    found: list[Step] = []
    losses, norms, errors, rounding = [], [], [], []
    parting = None
    for taken in reference_steps(pair, theirs):
        progress(f"training step {taken.number}")
        mine, noisy = ours.step(taken.batch), nearby.step(taken.batch)
        losses.append(taken.loss)
        norms.append(taken.gradient_norm)
        errors.append(between(mine, values_of(taken)))
        rounding.append(between(mine, noisy))
        # For the diagnosis: the step before the first that differs, and two after it.
        if parting is None:
            parting = first_difference(taken.number, errors[-1], rounding[-1])
            found = [*found[-1:], taken]
        elif len(found) < MOST_STEPS:
            found.append(taken)
    diagnoses = []
    if parting is not None:
        progress("looking for causes in the training step")
        diagnoses = explain_steps(model, pair, found, models_differ=models_differ)
    return Trajectory(
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        errors=tuple(errors),
        rounding=tuple(rounding),
        parting=parting,
        untrained=untrained,
        diagnoses=tuple(diagnoses),
    )


MOST_STEPS = 4
"""Steps of the reference that a cause is tried on."""


def same_parameters(pair: Pair, model: nnx.Module) -> tuple[Any, frozenset[str], tuple[str, ...]]:
    """The reference in float64, with what is trained on both sides, under our names; and what one
    side alone has, which the reference then does not train."""
    import torch

    theirs = copy.deepcopy(pair.theirs).to(torch.float64).eval()
    named = dict(theirs.named_parameters(remove_duplicate=False))
    numbers = {id(parameter): float(n) for n, parameter in enumerate(named.values(), 1)}
    marks = {n: np.full(tuple(p.shape), numbers[id(p)]) for n, p in named.items()}
    mine = flatten(split(model)[1])
    carried = {name: mark for name, mark in pair.carry(marks).items() if name in mine}
    seen = {float(number) for mark in carried.values() for number in np.unique(mark)}
    untrained = [name for name in mine if name not in carried]
    for name, parameter in named.items():
        if numbers[id(parameter)] not in seen:
            parameter.requires_grad_(False)
            untrained.append(name)
    return theirs, frozenset(carried), tuple(untrained)


def reference_steps(pair: Pair, model: Any) -> Iterator[Step]:
    """The reference's steps, in float64."""
    training = pair.training
    assert training is not None

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
