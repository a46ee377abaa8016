"""The score of verification on planted faults."""

import collections

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_transformer.models.parameters import cast_model
from jax_transformer.verification.catalogue import CATALOGUE
from jax_transformer.verification.decoding.remedies import remedies
from jax_transformer.verification.decoding.task import Layout
from jax_transformer.verification.diagnose import Evidence
from jax_transformer.verification.localize import FedCall, compare_forward
from jax_transformer.verification.pairs import as_jax, parameters, reference_run
from jax_transformer.verification.training.causes import PARTS
from jax_transformer.verification.training.recorded import State, Step
from parity_tests.harness import unchecked
from parity_tests.planted_faults.all_faults import FAULTS
from parity_tests.planted_faults.models import correct, decoded, trained
from parity_tests.planted_faults.score import evaluate, misses


@pytest.fixture(scope="module")
def score():
    return evaluate()


def test_there_are_enough_of_each(score):
    assert len(score.results) >= 250
    assert score.correct_models >= 30


def test_each_cause_of_the_catalogue_is_planted_in_two_places():
    planted = collections.Counter(
        kind for fault in FAULTS for kinds in fault.causes.values() for kind in kinds
    )
    known = module_causes() | training_causes() | decoding_causes()
    assert {kind: planted[kind] for kind in known if planted[kind] < 2} == {}
    assert planted.keys() - known == {"gradient"}


def module_causes():
    """Of the modules of a few models."""
    kinds = set()
    for name in ("llama", "gpt2, untied", "gemma", "bloom", "t5", "document", "llama, YaRN"):
        pair = correct(name)
        with unchecked(), jax.enable_x64(True):
            _, record = reference_run(pair, backward=False)
            model = cast_model(pair.ours, jnp.float64)
            inputs = [as_jax(each, jnp.float64) for each in pair.inputs]
            _, comparison = compare_forward(model, lambda m, i=inputs: m(*i), record)
            comparison.calls[""] = FedCall(model, tuple(inputs), {})
            ours = {n: np.asarray(leaf) for n, leaf in parameters(model).items()}
            others = [
                {n: 2 * value for n, value in ours.items()},
                {n: value.astype(ml_dtypes.bfloat16).astype(float) for n, value in ours.items()},
            ]
            for place, call in comparison.calls.items():
                output = record.points.get(f"{place}:out")
                output = None if output is None else 0.9 * output
                for theirs in others:
                    evidence = Evidence(ours, theirs, place.partition("#")[0], output)
                    for entry in CATALOGUE:
                        kinds |= {remedy.kind for remedy in entry(call.module, call, evidence)}
    return kinds


def training_causes():
    batch = trained("llama").training.batches[0]
    nothing = State(parameters={}, first={}, second={})
    step = Step(
        number=1, batch=batch, loss=0.0, before=nothing, gradients={}, given={}, after=nothing
    )
    return {remedy.kind for part in PARTS for remedy in part.remedies([step])}


def decoding_causes():
    kinds = set()
    for name in ("llama", "document"):
        decoding = decoded(name).decoding
        tokens = np.zeros((len(decoding.prompts), decoding.count), np.int32)
        kinds |= {remedy.kind for remedy in remedies(Layout.of(decoding, tokens), decoding)}
    return kinds


def test_every_fault_is_caught(score):
    assert [r.fault.label for r in score.results if not r.caught] == []


def test_nearly_every_fault_is_found_in_its_module(score):
    assert score.share(lambda r: r.localized) >= 0.95, "\n".join(misses(score))


def test_nearly_every_kind_is_named(score):
    assert score.named_kinds >= 0.9, "\n".join(misses(score))


def test_no_unknown_cause_is_given_a_name(score):
    unknown = [r for r in score.results if r.fault.kind == "unknown"]
    assert [r.fault.label for r in unknown if r.wrongly_named] == []


def test_no_correct_model_is_an_alarm(score):
    assert score.false_alarms == ()
