"""Rules: patterns with named parts, first match, both directions."""

import pytest

from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Rule, translate


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
    assert rule.match("a.3.weight") == "b.3.kernel"
    assert rule.inverse().match("b.3.kernel") == "a.3.weight"
    assert rule.inverse().inverse() == rule
