"""The verdict on whole models."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.verification.pairs import verify_pair
from parity_tests.harness import unchecked
from parity_tests.planted_faults import plant
from parity_tests.planted_faults.models import correct

NAME = "layers.1.self_attn.out_proj.kernel"


def check(pair, dtype=None, *, backward=False):
    with unchecked():
        return verify_pair(pair, dtype=dtype, backward=backward, most=1)


def changed(change):
    """One weight of ours changed."""

    def of_all(arrays):
        array = arrays[NAME].copy()
        array[0, 0] = change(array[0, 0])
        return {NAME: array}

    return plant.weights(of_all)(correct("llama"))


def test_a_correct_pair_is_the_same_and_as_accurate():
    report = check(correct("llama"), dtype="float32", backward=True)
    assert report.same
    assert report.verdict == "the same function, as accurate in float32"
    assert report.parameters[0] == report.parameters[1]
    assert report.distributions is not None
    assert report.distributions.top1 == 1
    assert report.distributions.kl < 1e-10
    assert len(report.gradients) > 20
    assert jnp.zeros(1).dtype == jnp.float32


def test_one_ulp_of_a_weight_is_no_difference():
    assert check(changed(lambda weight: np.nextafter(weight, np.float32(9)))).same


def test_a_thousandth_of_one_weight_is():
    report = check(changed(lambda weight: weight * np.float32(1.001)))
    assert not report.same
    assert report.diagnoses[0].module == "layers.1.self_attn.out_proj"
    assert report.diagnoses[0].kinds == ("other weights",)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_a_difference_on_either_side(bad):
    theirs = plant.output("layers.0.ffn", lambda x: x + bad)(correct("llama"))
    assert not check(theirs).same
    ours = plant.weights(lambda all: {NAME: all[NAME] * np.float32(bad)})(correct("llama"))
    assert not check(ours).same
    assert not check(dataclasses.replace(theirs, ours=ours.ours)).same


def test_what_padded_tokens_hold_does_not_count():
    pair = correct("llama")
    assert pair.valid is not None
    noise = torch.from_numpy(np.where(pair.valid, 0.0, 1.0))[..., None]
    quiet = plant.output("output_proj", lambda x: x + noise)(pair)
    assert check(quiet).same
    assert not check(dataclasses.replace(quiet, valid=None)).same


def test_an_unknown_cause_is_called_so_with_its_module():
    pair = plant.output("layers.0.ffn.down_proj", lambda x: x + 0.1 * x.sin())(correct("llama"))
    (diagnosis,) = check(pair).diagnoses
    assert diagnosis.module == "layers.0.ffn.down_proj"
    assert diagnosis.kinds == ()
    assert "unknown cause" in check(pair).verdict


def test_a_wrong_derivative_is_found_in_its_module():
    pair = plant.gradient("layers.1.norm1")(correct("gpt2"))
    assert check(pair).same
    report = check(pair, backward=True)
    assert [each.module for each in report.diagnoses] == ["layers.1.norm1"]
    assert "gradient" in report.verdict


def test_a_missing_parameter_and_another_shape_are_problems():
    pair = correct("llama")
    theirs = dict(pair.their_weights)
    del theirs["norm.scale"]
    theirs["extra"] = np.zeros(3)
    theirs[NAME] = np.zeros((2, 2))
    report = check(dataclasses.replace(pair, their_weights=theirs))
    assert not report.same
    assert set(report.problems) == {
        "norm.scale is not in the reference",
        "extra is only in the reference",
        f"{NAME} is [24, 24] here, [2, 2] in the reference",
    }
