"""Plans: every tensor goes exactly one way, or nothing is touched."""

from typing import Any

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.porting.operations import Concatenate, Each, Split, Stack, Transpose
from jax_transformer.porting.plan import Header, convert, convert_back, make_plan, make_plan_back
from jax_transformer.porting.rules import Alias, Computed, Ignore, Rule, numbered

RULES = (
    Alias("head.weight", "table.weight"),
    Rule("table.weight", "table.embedding"),
    Rule("{layer}.weight", "{layer}.kernel", (Transpose(),)),
    Rule("{layer}.bias", "{layer}.bias"),
)

SOURCE = {"table.weight": (5, 2), "head.weight": (5, 2), "fc.weight": (3, 2), "fc.bias": (3,)}
TARGET = {"table.embedding": (5, 2), "fc.kernel": (2, 3), "fc.bias": (3,)}


FLOAT = np.dtype(np.float32)


def headers(shapes, dtype=FLOAT):
    return {name: Header(shape, dtype) for name, shape in shapes.items()}


def without(shapes, name):
    return {key: value for key, value in shapes.items() if key != name}


def test_the_first_rule_that_matches_counts():
    plan = make_plan(RULES, headers(SOURCE), TARGET)
    moves = {move.sources: move for move in plan.moves}
    assert moves["table.weight",].targets == ("table.embedding",)
    assert moves["table.weight",].operations == ()
    assert moves["fc.weight",].targets == ("fc.kernel",)
    assert ("head.weight",) not in moves
    assert plan.tied == {"head.weight": "table.weight"}
    assert plan.headers() == {name: Header(shape, FLOAT) for name, shape in TARGET.items()}


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
        """Has a header and nothing else."""

        def __init__(self, shape):
            self.shape = shape
            self.dtype = FLOAT

    tensors: Any = {name: Untouchable(shape) for name, shape in source.items()}
    with pytest.raises(InputError) as refusal:
        convert(RULES, tensors, target)
    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_two_tensors_for_one_place_are_refused():
    rules = (Rule("a", "x"), Rule("b", "x"))
    with pytest.raises(InputError, match="x is filled twice"):
        make_plan(rules, headers({"a": (1,), "b": (1,)}), {"x": (1,)})


def test_all_problems_are_named_at_once():
    with pytest.raises(InputError) as refusal:
        make_plan(RULES, headers({"extra": (1,), "fc.weight": (9, 9)}), TARGET)
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


def test_only_the_second_name_of_a_tied_table_is_as_good_as_the_first():
    values = tensors()
    del values["table.weight"]
    converted = convert(RULES, values, TARGET)
    np.testing.assert_array_equal(converted["table.embedding"], values["head.weight"])
    # The way back writes the first name, and the second one too if it is asked for.
    first = make_plan_back(RULES, converted)
    both = make_plan_back(RULES, converted, aliases=True)
    assert "head.weight" not in first.headers()
    assert both.headers() == first.headers() | {"head.weight": Header((5, 2), FLOAT)}


def test_tied_names_in_different_dtypes_are_refused():
    values = tensors()
    values["head.weight"] = values["head.weight"].astype(np.float64)
    with pytest.raises(InputError, match=r"head\.weight and table\.weight are one table"):
        convert(RULES, values, TARGET)


def test_ignored_tensors_leave_a_reason_and_others_like_them_do_not_pass():
    rules = (Ignore("h.{layer}.attn.bias", "the causal mask"), *RULES)
    buffer = {"h.0.attn.bias": (1, 1, 4, 4)}
    plan = make_plan(rules, headers(SOURCE | buffer), TARGET)
    assert plan.ignored == {"h.0.attn.bias": "the causal mask"}
    assert plan.moves == make_plan(rules, headers(SOURCE), TARGET).moves
    with pytest.raises(InputError, match=r"h\.0\.attn\.masked_bias"):
        make_plan(rules, headers(SOURCE | {"h.0.attn.masked_bias": ()}), TARGET)


def test_what_the_model_computes_need_not_be_in_the_file():
    rules = (*RULES, Computed("table.pe", "the sinusoids"))
    target = TARGET | {"table.pe": (4, 2)}
    plan = make_plan(rules, headers(SOURCE), target)
    assert plan.computed == {"table.pe": "the sinusoids"}
    assert "table.pe" not in plan.headers()
    back = make_plan_back(rules, headers(target))
    assert back.ignored == {"table.pe": "the sinusoids"}


FUSED = (
    Rule(
        "{layer}.qkv.bias", tuple(f"{{layer}}.{part}.bias" for part in "qkv"), (Split((4, 2, 2)),)
    ),
    Rule(
        "{layer}.qkv.weight",
        tuple(f"{{layer}}.{part}.kernel" for part in "qkv"),
        (Split((4, 2, 2)), Each(((Transpose(),), (Transpose(),), (Transpose(),)))),
    ),
)
PARTS = {
    "a.q.bias": (4,), "a.k.bias": (2,), "a.v.bias": (2,),
    "a.q.kernel": (3, 4), "a.k.kernel": (3, 2), "a.v.kernel": (3, 2),
}  # fmt: skip


def test_a_fused_tensor_fills_several_targets_and_comes_back():
    weight = np.arange(24, dtype=np.float32).reshape(8, 3)
    fused = {"a.qkv.weight": weight, "a.qkv.bias": np.arange(8, dtype=np.float32)}
    converted = convert(FUSED, fused, PARTS)
    np.testing.assert_array_equal(converted["a.k.kernel"], weight[4:6].T)
    np.testing.assert_array_equal(converted["a.v.bias"], [6, 7])
    back = convert_back(FUSED, converted, {name: array.shape for name, array in fused.items()})
    for name, array in fused.items():
        np.testing.assert_array_equal(back[name], array)


def test_a_part_of_a_fused_tensor_that_is_missing_is_named():
    inverse = [rule.inverse() for rule in FUSED]
    with pytest.raises(InputError, match=r"a\.qkv\.bias needs a\.k\.bias, which is not there"):
        make_plan(inverse, headers(without(PARTS, "a.k.bias")), None)


def test_parts_of_a_fused_tensor_in_different_dtypes_are_refused():
    parts = headers(PARTS) | {"a.v.bias": Header((2,), np.dtype(np.float16))}
    with pytest.raises(InputError, match=r"in different dtypes: .*a\.v\.bias is float16"):
        make_plan([rule.inverse() for rule in FUSED], parts, None)


def test_a_fused_tensor_of_another_size_is_refused_with_the_sizes():
    shapes = {"a.qkv.weight": (9, 3), "a.qkv.bias": (8,)}
    with pytest.raises(InputError, match=r"axis 0 of \[9, 3\] is not 1 x \(4 \+ 2 \+ 2\)"):
        make_plan(FUSED, headers(shapes), PARTS)


def test_layers_are_stacked_in_the_order_of_their_numbers():
    rules = (Rule(numbered("layers.{layer}.{x}", "layer", 11), "stack.{x}", (Stack(11),)),)
    values = {f"layers.{i}.w": np.full(2, i) for i in (10, *range(10))}
    stacked = convert(rules, values, {"stack.w": (11, 2)})
    np.testing.assert_array_equal(stacked["stack.w"][:, 0], range(11))
    back = convert_back(rules, stacked, {name: (2,) for name in values})
    for name, array in values.items():
        np.testing.assert_array_equal(back[name], array)


def test_names_that_are_nearly_right_are_pointed_out():
    with pytest.raises(InputError) as refusal:
        make_plan(
            RULES[:2] + RULES[3:], headers({"tabel.weight": (5, 2)}), {"table.embedding": (5, 2)}
        )
    assert "tabel.weight [5, 2] has no place in the target, did you mean table.weight" in str(
        refusal.value
    )
    assert "nothing fills table.embedding (made of table.weight), did you mean tabel.weight" in str(
        refusal.value
    )


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "model.", "_orig_mod.module.", "module._orig_mod.", "model.module."],
)
def test_the_prefixes_of_wrappers_are_seen_through(prefix):
    shapes = {prefix + name: shape for name, shape in SOURCE.items()}
    plan = make_plan(RULES, headers(shapes), TARGET)
    assert plan.headers() == make_plan(RULES, headers(SOURCE), TARGET).headers()
    assert plan.moves[0].sources == (f"{prefix}table.weight",)
    assert plan.tied == {f"{prefix}head.weight": f"{prefix}table.weight"}


def test_wrappers_within_a_name_are_seen_through():
    shapes = without(SOURCE, "fc.bias") | {"fc._orig_mod.bias": (3,)}
    assert make_plan(RULES, headers(shapes), TARGET).headers().keys() == TARGET.keys()


def test_a_prefix_that_belongs_to_the_names_stays():
    rules = (Rule("model.{x}", "{x}"),)
    assert make_plan(rules, headers({"model.a": ()}), None).moves[0].targets == ("a",)


def test_a_prefix_on_some_of_the_names_only_is_refused():
    shapes = {f"module.{name}": shape for name, shape in SOURCE.items()}
    shapes["fc.bias"] = shapes.pop("module.fc.bias")
    with pytest.raises(InputError, match=r"module\.fc\.weight .* has no place"):
        make_plan(RULES, headers(shapes), TARGET)


def test_names_that_become_one_without_their_wrappers_are_refused():
    shapes = SOURCE | {"fc._orig_mod.bias": (3,)}
    with pytest.raises(InputError, match=r"two tensors are called fc\.bias"):
        make_plan(RULES, headers(shapes), TARGET)


def test_a_file_of_which_the_rules_know_nothing_is_refused():
    rules = (Rule("a.{x}", "{x}"),)
    with pytest.raises(InputError, match="has no place"):
        make_plan(rules, headers({"b.c": (1,)}), None)


def test_concatenation_is_the_way_back_of_a_split():
    assert FUSED[0].inverse().operations == (Concatenate((4, 2, 2)),)
