"""Plans: every tensor goes exactly one way, or nothing is touched."""

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.plan import convert, convert_back, make_plan
from jax_transformer.porting.rules import Alias, Rule

RULES = (
    Alias("head.weight", "table.weight"),
    Rule("table.weight", "table.embedding"),
    Rule("{layer}.weight", "{layer}.kernel", (Transpose(),)),
    Rule("{layer}.bias", "{layer}.bias"),
)

SOURCE = {"table.weight": (5, 2), "head.weight": (5, 2), "fc.weight": (3, 2), "fc.bias": (3,)}
TARGET = {"table.embedding": (5, 2), "fc.kernel": (2, 3), "fc.bias": (3,)}


def without(shapes, name):
    return {key: value for key, value in shapes.items() if key != name}


def test_the_first_rule_that_matches_counts():
    plan = {move.source: move for move in make_plan(RULES, SOURCE, TARGET)}
    assert plan["table.weight"].target == "table.embedding"
    assert plan["table.weight"].operations == ()
    assert plan["fc.weight"].target == "fc.kernel"
    assert "head.weight" not in plan


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        (SOURCE | {"extra": (1,)}, TARGET, "extra [1] has no place in the target"),
        (SOURCE, without(TARGET, "fc.bias"), "fc.bias [3] has no place in the target"),
        (without(SOURCE, "fc.bias"), TARGET, "nothing fills fc.bias"),
        (SOURCE | {"fc.weight": (2, 3)}, TARGET, "fc.weight gives [3, 2], but fc.kernel is [2, 3]"),
        (SOURCE | {"fc.bias": (1,)}, TARGET, "fc.bias gives [1], but fc.bias is [3]"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_tensor_is_touched(source, target, problem):
    class Untouchable:
        """Has a shape and nothing else."""

        def __init__(self, shape):
            self.shape = shape

    tensors = {name: Untouchable(shape) for name, shape in source.items()}
    with pytest.raises(InputError) as refusal:
        convert(RULES, tensors, target)
    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_two_tensors_for_one_place_are_refused():
    rules = (Rule("a", "x"), Rule("b", "x"))
    with pytest.raises(InputError, match="x is filled twice"):
        make_plan(rules, {"a": (1,), "b": (1,)}, {"x": (1,)})


def test_all_problems_are_named_at_once():
    with pytest.raises(InputError) as refusal:
        make_plan(RULES, {"extra": (1,), "fc.weight": (9, 9)}, TARGET)
    for name in ("extra", "fc.weight", "table.embedding", "fc.bias"):
        assert name in str(refusal.value)


def tensors():
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in SOURCE.items()}
    return values | {"head.weight": values["table.weight"].copy()}


def test_there_and_back_every_bit_is_the_same():
    values = tensors()
    # Bits that arithmetic would lose: a NaN with a payload, a negative zero, a subnormal.
    values["fc.bias"].view(np.uint32)[:] = [0x7FC12345, 0x80000000, 0x00000001]
    converted = convert(RULES, values, TARGET)
    assert {name: array.shape for name, array in converted.items()} == TARGET
    back = convert_back(RULES, converted, SOURCE)
    assert back.keys() == values.keys()
    for name, array in values.items():
        assert back[name].dtype == array.dtype
        assert back[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8"])
def test_no_dtype_changes(dtype):
    values = {name: array.astype(dtype) for name, array in tensors().items()}
    converted = convert(RULES, values, TARGET)
    assert {array.dtype for array in converted.values()} == {np.dtype(dtype)}


def test_a_tied_tensor_may_be_there_once():
    values = tensors()
    del values["head.weight"]
    converted = convert(RULES, values, TARGET)
    np.testing.assert_array_equal(converted["table.embedding"], values["table.weight"])
    assert "head.weight" not in convert_back(RULES, converted, without(SOURCE, "head.weight"))


def test_tied_names_with_different_numbers_are_refused():
    values = tensors()
    values["head.weight"][0, 0] += 1
    with pytest.raises(InputError, match=r"head\.weight and table\.weight are one table"):
        convert(RULES, values, TARGET)


def test_tied_names_are_written_as_copies():
    back = convert_back(RULES, convert(RULES, tensors(), TARGET), SOURCE)
    assert not np.shares_memory(back["head.weight"], back["table.weight"])
