"""Do two models compute the same numbers, and if not, where and why not."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.models.parameters import cast_model, flatten, split, unflatten
from jax_transformer.verification.capture import (
    Record,
    as_numpy,
    first,
    intercepted,
    parent_of,
    torch_record,
)
from jax_transformer.verification.catalogue import CATALOGUE
from jax_transformer.verification.compare import (
    SAME_FUNCTION,
    Accuracy,
    Distributions,
    compare_logits,
    relative_error,
)
from jax_transformer.verification.decoding.compare import compare_decoding
from jax_transformer.verification.diagnose import Diagnosis, Evidence, Finding, diagnose
from jax_transformer.verification.histogram import Histogram, make_histogram
from jax_transformer.verification.localize import (
    Comparison,
    FedCall,
    compare_backward,
    compare_forward,
    culprit,
)
from jax_transformer.verification.oracle import float64_throughout, in_dtype
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.result import Report
from jax_transformer.verification.training.trajectory import compare_training


def verify_pair(
    pair: Pair,
    *,
    dtype: str | None = "float32",
    backward: bool = False,
    most: int = 3,
    progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Run both sides and compare.

    Args:
        dtype: of the run that errors are measured in; None: none.
        backward: gradients too; a pair with a `training` has them compared in any case.
        most: diagnose at most so many modules.
        progress: is told what is done next.
    """
    problems = accounts(pair)
    backward = backward or pair.training is not None
    progress("reference in float64")
    wide, record = reference_run(pair, backward=backward)
    with jax.enable_x64(True):
        progress("JAX in float64")
        model = with_their_rounding(cast_model(pair.ours, jnp.float64), pair.their_weights)
        inputs = [as_jax(each, jnp.float64) for each in pair.inputs]

        def run(model: nnx.Module) -> jax.Array:
            return pair.jax_call(model, *inputs)

        output_error = relative_error(run(model), wide, pair.valid)
        _, comparison = compare_forward(model, run, record, pair.valid)
        comparison.calls[""] = FedCall(model, tuple(inputs), {})
        progress("looking for causes")
        diagnoses = tuple(explain(pair, model, record, comparison, most))
        gradients: dict[str, float] = {}
        if backward and not diagnoses:
            progress("gradients")
            gradients, diagnoses = explain_backward(pair, model, run, record)
        trajectory = None
        if pair.training is not None:
            trajectory = compare_training(
                pair, model, models_differ=bool(diagnoses), progress=progress
            )
    decoding = None
    if pair.decoding is not None:
        decoding = compare_decoding(
            pair, model, dtype=dtype, models_differ=bool(diagnoses), progress=progress
        )
    accuracy: dict[str, Accuracy] = {}
    distributions, histogram = None, None
    fault = diagnoses[0].point if diagnoses else None
    if dtype is not None:
        progress(f"both in {dtype}")
        accuracy, distributions, histogram = narrow_runs(pair, record, wide, dtype, fault)
    elif fault in record.points:
        with jax.enable_x64(True):
            ours, _ = own_points(pair, "float64")
        truth = record.points[fault]
        histogram = make_histogram(fault, "float64", truth, ours[fault], truth, pair.valid)
    return Report(
        parameters=sizes(pair),
        problems=tuple(problems),
        errors=comparison.errors,
        gradients=gradients,
        output_error=output_error,
        dtype=dtype,
        accuracy=accuracy,
        distributions=distributions,
        diagnoses=diagnoses,
        histogram=histogram,
        trajectory=trajectory,
        decoding=decoding,
    )


def with_their_rounding(model: nnx.Module, theirs: Mapping[str, np.ndarray]) -> nnx.Module:
    """The model with the reference's weights where ours are within one ulp of float32 of them: a
    weight that was rounded once more is no other function."""
    graphdef, params, buffers = split(model)
    ours = flatten(params)
    for name, weight in theirs.items():
        if name in ours and ours[name].shape == weight.shape:
            apart = np.abs(np.asarray(ours[name], np.float64) - weight)
            ulp = np.spacing(np.abs(weight).astype(np.float32))
            if apart.any() and (apart <= ulp).all():
                ours[name] = jnp.asarray(weight, ours[name].dtype)
    return nnx.merge(graphdef, unflatten(ours, params), buffers)


def accounts(pair: Pair) -> list[str]:
    """Parameters that one side has and the other lacks, or in another shape or dtype."""
    ours = parameters(pair.ours)
    buffers = flatten(split(pair.ours)[2])
    if not pair.their_weights:
        return []
    problems = [
        f"{name} is not in the reference" for name in ours if name not in pair.their_weights
    ]
    for name, theirs in pair.their_weights.items():
        if name in buffers:
            continue  # a table that is no parameter here: what it does is compared
        if name not in ours:
            problems.append(f"{name} is only in the reference")
        elif ours[name].shape != theirs.shape:
            shapes = f"{list(ours[name].shape)} here, {list(theirs.shape)} in the reference"
            problems.append(f"{name} is {shapes}")
    return problems


def parameters(model: nnx.Module) -> dict[str, Any]:
    """By dotted name."""
    return flatten(split(model)[1])


def sizes(pair: Pair) -> tuple[int, int]:
    """Scalars on both sides; a tied tensor counts once."""
    ours = sum(leaf.size for leaf in parameters(pair.ours).values())
    return ours, sum(parameter.numel() for parameter in pair.theirs.parameters())


def as_jax(array: np.ndarray | None, dtype: Any) -> jax.Array | None:
    """An input, floating-point ones in `dtype`."""
    if array is None:
        return None
    floating = np.issubdtype(array.dtype, np.floating)
    return jnp.asarray(array, dtype) if floating else jnp.asarray(array)


def as_torch(array: np.ndarray | None, dtype: Any) -> Any:
    """An input, floating-point ones in `dtype`."""
    import torch

    if array is None:
        return None
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cotangent(shape: tuple[int, ...]) -> np.ndarray:
    """What outputs are multiplied with before they are summed to one number: a fixed draw."""
    return np.random.default_rng(0).standard_normal(shape)


def reference_run(pair: Pair, *, backward: bool) -> tuple[np.ndarray, Record]:
    """The reference's output in float64, and all its points."""
    import torch

    inputs = [as_torch(each, torch.float64) for each in pair.inputs]
    outputs: list[Any] = []

    def run(model: Any) -> Any:
        output = pair.torch_call(model, *inputs)
        outputs.append(as_numpy(output))
        if not backward:
            return output
        weights = torch.from_numpy(cotangent(tuple(output.shape)))
        return (output * (weights if pair.valid is None else at_valid(weights, pair.valid))).sum()

    with in_dtype(pair.theirs, torch.float64) as model, float64_throughout(model):
        _, record = torch_record(model, lambda: run(model), pair.rename, backward=backward)
    record.points[":out"] = outputs[0]
    return record.points[":out"], record


def at_valid(weights: Any, valid: np.ndarray) -> Any:
    """Zero at the tokens that do not count."""
    import torch

    return weights * torch.from_numpy(valid)[..., None]


def explain(
    pair: Pair, model: nnx.Module, record: Record, comparison: Comparison, most: int
) -> list[Diagnosis]:
    """A diagnosis of each module that differs, up to `most`."""
    weights = {name: np.asarray(leaf) for name, leaf in parameters(model).items()}
    found: list[Diagnosis] = []
    differing = [p for p, error in comparison.errors.items() if not error <= SAME_FUNCTION]
    for point in differing:
        call = call_of(point, comparison)
        name = call.partition("#")[0]
        if any(each.module == name for each in found):
            continue
        finding = Finding(
            point=point,
            error=comparison.errors[point],
            name=call,
            call=comparison.calls[call],
            differing=differing,
            excused=[each for each in differing if call_of(each, comparison) != call],
        )
        diagnosis = diagnose(
            finding,
            record,
            Evidence(weights, dict(pair.their_weights), name, record.points.get(f"{call}:out")),
            CATALOGUE,
            pair.valid,
        )
        # A module gives several results, of which one is a point: what is wrong with the others
        # shows around it.
        if diagnosis.kinds and any(is_inside(each, diagnosis) for each in found):
            continue
        found.append(diagnosis)
        if len(found) == most:
            break
    return found


def is_inside(one: Diagnosis, other: Diagnosis) -> bool:
    """Whether a module is a part of another, and the cause is the same."""
    return one.kinds == other.kinds and one.module.startswith(f"{other.module}.")


def call_of(point: str, comparison: Comparison) -> str:
    """The call that computed a point: for what goes into a module, the one around it."""
    call, _, side = point.rpartition(":")
    if side == "out":
        return call
    module, _, number = call.partition("#")
    around = parent_of(module)
    while around and around not in comparison.calls:
        around = parent_of(around)  # a list of layers is no module that is called
    numbered = f"{around}#{number}" if number else around
    return numbered if numbered in comparison.calls else around


def explain_backward(
    pair: Pair, model: nnx.Module, run: Callable[[nnx.Module], jax.Array], record: Record
) -> tuple[dict[str, float], tuple[Diagnosis, ...]]:
    """Errors of gradients, and the first module whose derivative differs."""

    def loss(model: nnx.Module) -> jax.Array:
        output = run(model)
        weights = cotangent(output.shape)
        if pair.valid is not None:
            weights = weights * pair.valid[..., None]
        return (output * weights).sum()

    errors, _ = compare_backward(model, loss, record, pair.valid)
    for point, error in errors.items():
        if not error <= SAME_FUNCTION:
            # The gradient of an input is wrong in the module that reads it, that of an output in
            # what reads that.
            module = culprit(
                point.replace(":in", ":out") if ":in" in point else point.replace(":out", ":in")
            )
            sentence = "its values agree, its gradient does not: look at its derivative"
            return errors, (
                Diagnosis(module, f"gradient of {point}", error, ("gradient",), sentence),
            )
    return errors, ()


def narrow_runs(
    pair: Pair, wide: Record, output: np.ndarray, dtype: str, fault: str | None
) -> tuple[dict[str, Accuracy], Distributions | None, Histogram | None]:
    """Each side by itself in `dtype`, against the reference in float64; the histogram is of the
    point `fault`, or of the one where ours is the least accurate beside theirs."""
    import torch

    inputs = [as_torch(each, getattr(torch, dtype)) for each in pair.inputs]
    with in_dtype(pair.theirs, getattr(torch, dtype)) as model:
        result, theirs = torch_record(
            model, lambda: pair.torch_call(model, *inputs), pair.rename, backward=False
        )
    theirs.points[":out"] = result
    ours, found = own_points(pair, dtype)
    accuracy = {}
    for point, truth in wide.points.items():
        if point in ours and point in theirs.points and np.issubdtype(truth.dtype, np.floating):
            accuracy[point] = Accuracy(
                relative_error(ours[point], truth, pair.valid),
                relative_error(theirs.points[point], truth, pair.valid),
                dtype,
            )
    worst = fault or max(accuracy, key=lambda point: accuracy[point].ratio, default=None)
    histogram = None
    if worst in accuracy:
        sides = ours[worst], theirs.points[worst]
        histogram = make_histogram(worst, dtype, wide.points[worst], *sides, pair.valid)
    distributions = compare_logits(found, output, pair.valid) if output.ndim == 3 else None
    return accuracy, distributions, histogram


def own_points(pair: Pair, dtype: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The points of our side by itself, and its output."""
    model = cast_model(pair.ours, dtype)
    points: dict[str, np.ndarray] = {}

    def handle(name: str, module: Any, call: Any, args: Any, kwargs: Any) -> Any:
        if args and args[0] is not None:
            points[f"{name}:in"] = np.asarray(args[0])
        result = call(*args, **kwargs)
        points[f"{name}:out"] = np.asarray(first(result))
        return result

    with intercepted(model, handle):
        output = pair.jax_call(model, *[as_jax(each, dtype) for each in pair.inputs])
    points[":out"] = np.asarray(output)
    return points, points[":out"].astype(np.float64)
