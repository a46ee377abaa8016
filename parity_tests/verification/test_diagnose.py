"""Causes are named by what makes a module agree; the faults of the catalogue are planted in
`planted_faults`."""

import numpy as np
import pytest

from jax_transformer.verification.diagnose import Evidence, Remedy, pairs_of
from jax_transformer.verification.pairs import verify_pair
from parity_tests.harness import unchecked
from parity_tests.planted_faults import plant
from parity_tests.planted_faults.models import correct


def causes(pair):
    with unchecked():
        return verify_pair(pair, dtype=None).diagnoses


def test_the_sentence_says_what_to_do():
    place = "layers.1.self_attn.rotary"
    (found,) = causes(plant.config(place, pairing="adjacent")(correct("llama")))
    assert found.module == place
    assert found.kinds == ("rotary pairing",)
    assert found.sentence == (
        "agrees when query and key are rotated in adjacent pairs: the checkpoint is in Meta's "
        "order; port it with pairing=adjacent"
    )


def test_two_faults_in_one_module_are_named_together():
    change = plant.setting("layers.0.norm2", epsilon=1e-5, unit_offset=True)
    (found,) = causes(change(correct("llama")))
    assert set(found.kinds) == {"norm epsilon", "norm offset"}


def test_faults_in_two_modules_are_each_named():
    change = plant.both(
        plant.setting("layers.0.norm1", epsilon=1e-5),
        plant.setting("layers.1.ffn", activation="gelu"),
    )
    found = causes(change(correct("llama")))
    assert [(each.module, each.kinds) for each in found] == [
        ("layers.0.norm1", ("norm epsilon",)),
        ("layers.1.ffn", ("activation",)),
    ]


def test_a_fault_inside_does_not_hide_one_of_the_module_around():
    change = plant.both(
        plant.setting("layers.0.self_attn", scale=1.0),
        plant.output("layers.0.self_attn.out_proj", lambda x: 1.1 * x),
    )
    found = causes(change(correct("gpt2")))
    assert {each.module: each.kinds for each in found} == {
        "layers.0.self_attn": ("attention scale",),
        "layers.0.self_attn.out_proj": (),
    }


def test_pairs_are_of_two_entries_the_first_of_each_before_others():
    a, a2, b, c = (Remedy(kind, "", lambda trial: None) for kind in ("a", "a", "b", "c"))
    assert pairs_of([a, a2, b, c]) == [(a, b), (a, c), (b, c), (a2, b), (a2, c)]


def test_a_sibling_is_a_parameter_of_the_module_around():
    evidence = Evidence({"a.k_proj.kernel": np.ones(1), "k": np.zeros(1)}, {}, "a.q_proj")
    assert evidence.sibling("k_proj.kernel") is evidence.ours["a.k_proj.kernel"]
    assert evidence.sibling("v_proj.kernel") is None
    assert Evidence({"k": np.zeros(1)}, {}, "q").sibling("k") is not None


@pytest.mark.parametrize("module", ["layers.0.self_attn", "layers.1.norm2"])
def test_a_change_that_no_entry_knows_is_an_unknown_cause(module):
    (found,) = causes(plant.output(module, lambda x: x + 0.1 * x.cos())(correct("gpt2")))
    assert (found.module, found.kinds) == (module, ())
    assert found.sentence == "differs from an unknown cause"
