"""Rules: patterns with named parts, first match, both directions."""

import pytest

from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Ignore, Rule, numbered, translate


@pytest.mark.parametrize(
    ("pattern", "replacement", "name", "expected"),
    [
        ("a.{layer}.weight", "b.{layer}.kernel", "a.7.weight", "b.7.kernel"),
        ("{x}.{y}", "{y}.{x}", "p.q", "q.p"),
        ("a.weight", "b", "a.weight", "b"),
        ("{path*}norm{n}.weight", "{path*}norm{n}.scale", "a.0.norm1.weight", "a.0.norm1.scale"),
        ("{path*}norm.weight", "{path*}norm.scale", "norm.weight", "norm.scale"),
        ("{path*}norm.weight", "{path*}norm.scale", "a.q_norm.weight", "a.q_norm.scale"),
        ("{path*}.bias", "{path*}.b", "a.1.bias", "a.1.b"),
        ("{path*}.bias", "{path*}.b", "bias", None),
        ("{path*}norm{n}.weight", "x", "norm.a.weight", None),
        # A part has no dots, a pattern is the whole name, and a dot is a dot.
        ("a.{layer}.weight", "b", "a.1.2.weight", None),
        ("a.{layer}", "b", "a.1.weight", None),
        ("a.weight", "b", "x.a.weight", None),
        ("a.weight", "b", "a_weight", None),
        ("a.{layer}", "b", "a.", None),
    ],
)
def test_names_are_translated_part_by_part(pattern, replacement, name, expected):
    assert translate(pattern, replacement, name) == expected


def test_the_inverse_of_a_rule_leads_back():
    rule = Rule("a.{layer}.weight", "b.{layer}.kernel", (Transpose(),))
    assert rule.match("a.3.weight") == (("a.3.weight",), ("b.3.kernel",))
    assert rule.inverse().match("b.3.kernel") == (("b.3.kernel",), ("a.3.weight",))
    assert rule.inverse().inverse() == rule


def test_any_part_of_a_fused_tensor_stands_for_all():
    rule = Rule("{n}.qkv", ("{n}.q", "{n}.k", "{n}.v")).inverse()
    for name in ("5.q", "5.k", "5.v"):
        assert rule.match(name) == (("5.q", "5.k", "5.v"), ("5.qkv",))
    assert rule.match("5.qkv") is None


def test_names_with_different_parts_are_refused():
    with pytest.raises(ValueError, match="different parts in braces"):
        Rule("a.{layer}.weight", "b.kernel")
    with pytest.raises(ValueError, match="different parts in braces"):
        Rule("a.{layer}.weight", ("b.{layer}.q", "b.{index}.k"))


def test_what_is_ignored_one_way_is_computed_the_other():
    rule = Ignore("{layer}.attn.bias", "the causal mask")
    assert rule.inverse().target == rule.source
    assert rule.inverse().inverse() == rule


def test_numbered_names_count_from_zero():
    assert numbered("a.{layer}.{x}", "layer", 3) == ("a.0.{x}", "a.1.{x}", "a.2.{x}")
