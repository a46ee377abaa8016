"""Trajectories: where they part is where the fault is; what is recorded is what was done.

The causes of the catalogue are planted in `planted_faults.training_faults`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_transformer.config import IGNORED_LABEL
from jax_transformer.errors import InputError
from jax_transformer.porting.operations import AddConstant, Transpose
from jax_transformer.porting.plan import make_plan
from jax_transformer.porting.rules import Rule
from jax_transformer.training.loss import cross_entropy
from jax_transformer.verification import Batch, Recipe, Training, compare_modules, verify
from jax_transformer.verification.face import carrier
from jax_transformer.verification.pairs import verify_pair
from jax_transformer.verification.solve import tidied
from jax_transformer.verification.training.formula import Formula
from jax_transformer.verification.training.objective import (
    Objective,
    changed_labels,
    token_losses,
    token_weights,
)
from jax_transformer.verification.training.recipe import reference_trainer
from jax_transformer.verification.training.recorded import State, Step, recorded_steps
from jax_transformer.verification.training.trajectory import limit
from parity_tests.harness import unchecked
from parity_tests.planted_faults import plant
from parity_tests.planted_faults.models import trained
from parity_tests.planted_faults.training_faults import trained_by
from parity_tests.verification.test_face import INPUTS, MAPPING, TheirNet, ours


def check(pair):
    with unchecked():
        return verify_pair(pair, dtype=None, most=1)


def test_a_correct_pair_stays_together():
    report = check(trained("llama"))
    trajectory = report.trajectory
    assert report.same
    assert report.verdict == "the same function, trained alike for 3 steps"
    assert trajectory.parting is None
    names = {"loss", "gradient norm", "first moment", "second moment", "parameter"}
    assert len(trajectory.errors) == len(trajectory.losses) == 3
    for errors in trajectory.errors:
        assert errors.keys() == names
        assert len(errors["parameter"]) == len(errors["second moment"]) == 21
        assert max(max(of.values()) for of in errors.values()) < 1e-12
    assert len(set(trajectory.losses)) == 3


def test_a_gradient_of_rounding_errors_is_no_difference():
    trajectory = check(trained("gpt2")).trajectory
    name = "layers.0.self_attn.k_proj.bias"
    assert trajectory.same
    assert trajectory.errors[0]["first moment"][name] > 1e-3
    assert trajectory.worst(1, "first moment")[1] < 1e-12


def test_the_parting_is_the_step_the_quantity_and_the_parameter():
    """The rate of one parameter is another from the second step on."""

    def trainer(model, loss, recipe):
        step, count = reference_trainer(model, loss, recipe), 0

        def take(batch):
            nonlocal count
            found, count = step(batch), count + 1
            if count == 2:
                with torch.no_grad():
                    model.layers[1].norm2.weight[0] *= 1.001
            return found

        return take

    pair = trained("llama")
    training = dataclasses.replace(pair.training, torch_trainer=trainer)
    report = check(dataclasses.replace(pair, training=training))
    parting = report.trajectory.parting
    assert (parting.step, parting.quantity, parting.name) == (
        2,
        "parameter",
        "layers.1.norm2.scale",
    )
    assert 1e-5 < parting.error < 1e-3
    assert parting.rounding < 1e-14
    assert report.same_function
    assert not report.same
    (diagnosis,) = report.causes
    assert (diagnosis.module, diagnosis.kinds) == ("optimizer, update", ())
    assert diagnosis.point == "step 2, update of layers.1.norm2.scale"
    assert report.verdict.startswith(
        "different: training parts at step 2, parameter of layers.1.norm2.scale, off by"
    )


def test_models_that_differ_need_no_cause_in_their_training():
    fault = plant.both(plant.setting("layers.0.ffn", activation="gelu"), trained_by(b2=0.5))
    report = check(fault(trained("llama")))
    assert [(each.module, each.kinds) for each in report.causes] == [
        ("layers.0.ffn", ("activation",)),
        ("optimizer, moments", ("Adam betas",)),
    ]
    assert report.trajectory.parting.step == 1


def test_a_wrong_derivative_parts_the_trajectories():
    report = check(plant.gradient("layers.1.norm1")(trained("gpt2")))
    assert [each.module for each in report.causes] == ["layers.1.norm1"]
    assert report.trajectory.parting.quantity == "gradient norm"


def test_rounding_explains_a_thousand_times_itself():
    assert limit(0.0) == 1e-12
    assert limit(1e-9) == pytest.approx(1e-6)


def test_the_formula_is_the_optimizer_of_the_project():
    recipe = Recipe(max_norm=0.7)
    generator = np.random.default_rng(0)
    shapes = {"a.kernel": (3, 4), "a.bias": (4,)}
    params, gradients = (
        {name: generator.standard_normal(shape) for name, shape in shapes.items()} for _ in "ab"
    )
    zeros = {name: np.zeros(shape) for name, shape in shapes.items()}
    before = State(parameters=params, first=zeros, second=zeros)
    formula = Formula.of(recipe, 2)
    with jax.enable_x64(True):
        optimizer = recipe.optimizer()
        state = optimizer.init(params)
        for number in (1, 2):
            updates, state = optimizer.update(gradients, state, before.parameters)
            after = optax.apply_updates(before.parameters, updates)
            given = formula.clipped(gradients)
            first, second = formula.moments(given, before)
            found = State(parameters=after, first=first, second=second)
            step = Step(
                number=number,
                batch=Batch((), None),
                loss=0.0,
                before=before,
                gradients=gradients,
                given=given,
                after=found,
            )
            for name in shapes:
                mu, nu = (optax.tree_utils.tree_get(state, each)[name] for each in ("mu", "nu"))
                np.testing.assert_allclose(first[name], mu, rtol=1e-14)
                np.testing.assert_allclose(second[name], nu, rtol=1e-14)
                taken = before.parameters[name] - after[name]
                np.testing.assert_allclose(formula.taken(step, name), taken, rtol=1e-11)
            before = found


def test_the_objective_is_the_loss_of_the_project():
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((3, 5, 7))
    labels = generator.integers(0, 7, (3, 5))
    labels[1, 2:] = labels[2, 4] = IGNORED_LABEL
    with jax.enable_x64(True):
        expected = cross_entropy(jnp.asarray(logits), jnp.asarray(labels), label_smoothing=0.1)
        weights = token_weights(labels, "tokens", 1)
        losses = token_losses(jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(0.1))
        found = (weights * losses).sum()
        np.testing.assert_allclose(found, expected.mean(), rtol=1e-14)


def test_weights_of_tokens():
    labels = np.array([[4, 5], [4, IGNORED_LABEL], [6, 6], [7, IGNORED_LABEL]])
    forms = {
        "tokens": np.array([[1, 1], [1, 0], [1, 1], [1, 0]]) / 6,
        "sum": np.array([[1, 1], [1, 0], [1, 1], [1, 0]]),
        "rows": np.array([[1, 1], [1, 0], [1, 1], [1, 0]]) / 4,
        "places": np.array([[1, 1], [1, 0], [1, 1], [1, 0]]) / 8,
        "sentences": np.array([[1, 1], [2, 0], [1, 1], [2, 0]]) / 8,
        "sums of means": np.array([[1, 1], [1, 0], [1, 1], [1, 0]]) / 3,
        "means of parts": np.array([[1, 1], [1, 0], [1, 1], [1, 0]]) / 6,
    }
    for form, expected in forms.items():
        np.testing.assert_allclose(token_weights(labels, form, 2), expected, err_msg=form)


def test_labels_are_moved_and_padding_is_predicted():
    labels = np.array([[4, 5, IGNORED_LABEL]])
    later = changed_labels(labels, Objective(smoothing=0.0, shift=1))
    assert later.tolist() == [[5, IGNORED_LABEL, IGNORED_LABEL]]
    earlier = changed_labels(labels, Objective(smoothing=0.0, shift=-1))
    assert earlier.tolist() == [[IGNORED_LABEL, 4, 5]]
    padded = changed_labels(labels, Objective(smoothing=0.0, padding=True))
    assert padded.tolist() == [[4, 5, 0]]


def test_solved_values_are_the_shortest_that_are_near():
    assert tidied(0.10000000003, 1e-9) == 0.1
    assert tidied(0.0123, 1e-15) == 0.0123
    assert tidied(-3e-17, 1e-16) == 0.0
    assert tidied(1 / 3, 0.0) == 1 / 3


def linear(width=3):
    torch.manual_seed(0)
    return torch.nn.Linear(width, 2, dtype=torch.float64)


def test_what_is_recorded_are_the_sums_of_gradients_and_what_the_optimizer_gets():
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(batch):
        (x,) = batch.inputs
        optimizer.zero_grad()
        for row in x:
            model(row).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torch.tensor(7.0)

    x = np.arange(6.0).reshape(2, 3)
    weight = model.weight.detach().numpy().copy()
    (found,) = recorded_steps(model, step, (Batch((x,), None),), dict)
    assert found.loss == 7
    np.testing.assert_array_equal(found.before.parameters["weight"], weight)
    np.testing.assert_array_equal(found.before.second["weight"], 0)
    np.testing.assert_allclose(found.gradients["weight"], [[3, 5, 7], [3, 5, 7]])
    np.testing.assert_allclose(found.gradients["bias"], [2, 2])
    norm = np.sqrt(2 * (9 + 25 + 49) + 8)
    assert found.gradient_norm == pytest.approx(norm)
    np.testing.assert_allclose(found.given["bias"], 2 / (norm + 1e-6))
    np.testing.assert_allclose(found.after.first["bias"], 0.1 * found.given["bias"])
    np.testing.assert_array_equal(found.after.parameters["weight"], model.weight.detach())
    assert not model.weight._post_accumulate_grad_hooks


def test_an_optimizer_without_the_moments_of_adam_is_refused():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(*batch.inputs).sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(InputError, match="leaves no moments of Adam: train it with"):
        next(recorded_steps(model, step, (Batch((np.ones((2, 3)),), None),), dict))


def test_gradients_go_where_parameters_go_and_nothing_is_added_to_them():
    rules = (Rule("a", "b", (Transpose(), AddConstant(1.0))), Rule("c", "d"))
    tensors = {"a": np.ones((2, 3)), "c": np.ones(2)}
    carry = carrier(make_plan(rules, tensors, None))
    assert carry({"a": 1e-9 * np.arange(6.0).reshape(2, 3)})["b"][2, 1] == 5e-9


def mean_square(output, labels):
    """For either framework."""
    return ((output - labels) ** 2).mean()


def test_a_pair_and_a_loop_of_ones_own():
    generator = np.random.default_rng(1)
    labels = generator.standard_normal((2, 5, 3))
    batches = tuple(Batch((INPUTS[0] + shift,), labels) for shift in (0, 1))

    def trainer(model, loss, recipe):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(batch):
            optimizer.zero_grad()
            found = torch.nn.functional.mse_loss(model(*batch.inputs), batch.labels)
            found.backward()
            optimizer.step()
            return found

        return step

    recipe = Recipe(
        peak_rate=1e-2, warmup_steps=0, b2=0.999, eps=1e-8, max_norm=1e9, weight_decay=0.0
    )
    training = Training(
        batches=batches,
        recipe=recipe,
        loss=mean_square,
        torch_loss=mean_square,
    )
    plain = compare_modules(TheirNet(), ours(), MAPPING, INPUTS, dtype=None, training=training)
    assert plain.same
    own = dataclasses.replace(training, torch_trainer=trainer)
    report = compare_modules(TheirNet(), ours(), MAPPING, INPUTS, dtype=None, training=own)
    assert [(each.module, each.kinds) for each in report.causes] == [
        ("optimizer, update", ("learning rate",))
    ]


def test_a_negative_number_of_steps_is_refused(tmp_path):
    with pytest.raises(InputError, match="steps=-1: must be at least 1, or 0"):
        verify(tmp_path, tmp_path, steps=-1)
