"""Rotary positions: both pairings, every scaling, exact at any position, and the way between."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jax_transformer.config import RotaryConfig
from jax_transformer.errors import InputError
from jax_transformer.layers import rotary
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    to_numpy,
)
from parity_tests.inputs import SOURCE_POSITIONS, B, S, normal
from torch_reference.layers import rotary as reference

N, K, H = 4, 2, 8

SCALINGS = {
    "none": RotaryConfig(),
    "linear": RotaryConfig(scaling="linear", factor=4.0),
    "dynamic": RotaryConfig(scaling="dynamic", factor=2.0, original_max_len=16),
    "llama3": RotaryConfig(scaling="llama3", factor=8.0, original_max_len=64, base=500000.0),
    "yarn": RotaryConfig(scaling="yarn", factor=4.0, original_max_len=64),
}
LONGROPE = RotaryConfig(
    scaling="longrope",
    factor=16.0,
    original_max_len=64,
    short_factors=(1.0, 1.1, 1.5, 2.0),
    long_factors=(1.0, 2.5, 8.0, 20.0),
)
CONFIGS = SCALINGS | {
    "longrope, short": LONGROPE,
    "longrope, long or short": dataclasses.replace(LONGROPE, original_max_len=4),
    "adjacent": RotaryConfig(pairing="adjacent"),
    "partial, adjacent": RotaryConfig(pairing="adjacent", width=4),
    "partial, half": RotaryConfig(width=6, base=1000.0),
    "yarn, adjacent": dataclasses.replace(
        SCALINGS["yarn"], pairing="adjacent", mscale=1.0, mscale_all_dim=0.8
    ),
}
QUERIES_AND_KEYS = {
    "q": normal(B, S, N, H),
    "k": normal(B, S, K, H, seed=1),
    "positions": SOURCE_POSITIONS,
}

CASES = declare(
    *(
        Case(
            name=f"rotary positions: {name}",
            jax=rotary.RotaryPositionalEncoding,
            torch=reference.RotaryPositionalEncoding,
            arguments=(H, config),
            inputs=QUERIES_AND_KEYS,
            place="rotary",
        )
        for name, config in CONFIGS.items()
    ),
    Case(
        name="rotary positions from 0 on",
        jax=rotary.RotaryPositionalEncoding,
        torch=reference.RotaryPositionalEncoding,
        arguments=(H, RotaryConfig()),
        inputs=QUERIES_AND_KEYS | {"positions": None},
        place="rotary",
    ),
    *(
        Case(
            name=f"rotation of {pairing} pairs",
            jax=rotary.apply_rotary,
            torch=reference.apply_rotary,
            inputs={"x": normal(B, S, N, H), "cos": normal(B, S, 3), "sin": normal(1, S, 3)},
            options={"pairing": pairing},
        )
        for pairing in ("adjacent", "half")
    ),
)


@pytest.mark.parametrize("mode", ["quick", "op by op"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case, mode):
    check_float64(case, mode)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "jit")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_bfloat16_jax_is_as_accurate_as_pytorch(case):
    check_bfloat16(case, "quick")


def rotate(x: Any, position: int, config: RotaryConfig) -> list[np.ndarray]:
    """One vector at one position, by both frameworks, in float64."""
    row = np.asarray(x, np.float64)[None, None, None]
    width = row.shape[-1]
    with jax.enable_x64(True):
        module = rotary.RotaryPositionalEncoding(width, config)
        where = jnp.full((1, 1), position, jnp.int32)
        ours = to_numpy(module(jnp.asarray(row), jnp.asarray(row), where)[0])
    theirs = reference.RotaryPositionalEncoding(width, config)
    turned = theirs(torch.from_numpy(row), torch.from_numpy(row), torch.full((1, 1), position))
    return [ours[0, 0, 0], turned[0].numpy()[0, 0, 0]]


ADJACENT = RotaryConfig(pairing="adjacent")


def test_the_lecture_s_example():
    q, k = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
    for shift in (0, 10):
        turned = zip(rotate(q, 1 + shift, ADJACENT), rotate(k, 3 + shift, ADJACENT), strict=True)
        for at_1, at_3 in turned:
            if shift == 0:
                np.testing.assert_allclose(at_1, [-1.1426, 1.9221, 2.9599, 4.0298], atol=5e-5)
                np.testing.assert_allclose(at_3, [-4.3833, -2.4055, 1.9691, 1.0595], atol=5e-5)
            assert at_1 @ at_3 == pytest.approx(10.4830, abs=5e-5)
    # q^T R_2 k.
    for at_2 in rotate(k, 2, ADJACENT):
        assert np.asarray(q) @ at_2 == pytest.approx(10.4830, abs=5e-5)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
@pytest.mark.parametrize(("m", "n"), [(0, 0), (5, 2), (1, 3), (1000, 4000)])
def test_a_score_is_the_lecture_s_expansion_in_the_difference_of_positions(pairing, m, n):
    (a, b), (c, d) = (1.3, -0.4), (0.7, 2.1)
    config = RotaryConfig(pairing=pairing)
    expected = (a * c + b * d) * math.cos(n - m) + (b * c - a * d) * math.sin(n - m)
    for q, k in zip(rotate([a, b], m, config), rotate([c, d], n, config), strict=True):
        assert q @ k == pytest.approx(expected, rel=1e-12)


def test_the_two_pairings_turn_different_features():
    for x in rotate([1, 2, 3, 4], 1, ADJACENT):
        np.testing.assert_allclose(x, [-1.14264, 1.92208, 2.95985, 4.0298], atol=5e-6)
    for x in rotate([1, 2, 3, 4], 1, RotaryConfig(pairing="half")):
        np.testing.assert_allclose(x, [-1.98411, 1.9599, 2.46238, 4.0198], atol=5e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shift", [10, 4000])
def test_scores_see_differences_of_positions_only(config, shift):
    if config.scaling in ("dynamic", "longrope"):
        config = dataclasses.replace(config, original_max_len=8000)
    q, k = normal(H), normal(H, seed=1)
    scores = [
        [q @ k for q, k in zip(rotate(q, m, config), rotate(k, n, config), strict=True)]
        for m, n in ((7, 2), (7 + shift, 2 + shift))
    ]
    np.testing.assert_allclose(*scores, rtol=1e-10)


@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 2), (4, 4), (3, 1)])
def test_permuted_projections_give_the_same_scores_under_the_other_pairing(heads, kv_heads, width):
    # Heads of 12 features, with biases; 8 or all of them turned.
    head_dim, x = 12, normal(1, S, 10).astype(np.float64)
    adjacent = RotaryConfig(pairing="adjacent", width=width)
    half = RotaryConfig(pairing="half", width=width)
    forth = rotary.half_from_adjacent(head_dim, width)
    back = rotary.adjacent_from_half(head_dim, width)
    np.testing.assert_array_equal(reference.half_from_adjacent(head_dim, width), forth)
    np.testing.assert_array_equal(reference.adjacent_from_half(head_dim, width), back)
    weights = {
        (count, kind): normal(*shape, seed=seed).astype(np.float64)
        for seed, (count, kind, shape) in enumerate(
            (count, kind, shape)
            for count in {heads, kv_heads}
            for kind, shape in (
                ("weight", (count * head_dim, 10)),
                ("bias", (count * head_dim,)),
            )
        )
    }

    def scores(config: RotaryConfig, permutation: np.ndarray | None) -> np.ndarray:
        projected = []
        for count in (heads, kv_heads):
            weight, bias = weights[count, "weight"], weights[count, "bias"]
            if permutation is not None:
                weight, bias = (
                    rotary.permute_heads(array, count, permutation) for array in (weight, bias)
                )
            projected.append((x @ weight.T + bias).reshape(1, S, count, head_dim))
        with jax.enable_x64(True):
            module = rotary.RotaryPositionalEncoding(head_dim, config)
            q, k = (to_numpy(a) for a in module(*(jnp.asarray(array) for array in projected)))
        k = np.repeat(k, heads // kv_heads, axis=2)
        return np.einsum("btnh,bsnh->bnts", q, k)

    expected = scores(adjacent, None)
    np.testing.assert_allclose(scores(half, forth), expected, rtol=0, atol=1e-11)
    assert np.abs(scores(half, None) - expected).max() > 0.1
    np.testing.assert_allclose(
        scores(adjacent, back), scores(half, None), rtol=0, atol=1e-11, err_msg="the way back"
    )
    for (count, kind), array in weights.items():
        there = rotary.permute_heads(array, count, forth)
        np.testing.assert_array_equal(rotary.permute_heads(there, count, back), array)
        theirs = reference.permute_heads(
            torch.from_numpy(array), count, reference.half_from_adjacent(head_dim, width)
        )
        np.testing.assert_array_equal(theirs.numpy(), there, err_msg=kind)


def test_the_permutation_of_four_features():
    np.testing.assert_array_equal(rotary.half_from_adjacent(4), [0, 2, 1, 3])
    np.testing.assert_array_equal(rotary.half_from_adjacent(8, 6), [0, 2, 4, 1, 3, 5, 6, 7])
    x, order = np.array([1.0, 2.0, 3.0, 4.0]), rotary.half_from_adjacent(4)
    pairs = zip(
        rotate(x[order], 1, RotaryConfig(pairing="half")), rotate(x, 1, ADJACENT), strict=True
    )
    for half, adjacent in pairs:
        np.testing.assert_allclose(half, adjacent[order], rtol=1e-14)


def theirs_of(config: RotaryConfig, head_dim: int, length: int | None) -> tuple[np.ndarray, float]:
    """The frequencies and the attention factor of `transformers` (in float32)."""
    parameters: dict[str, Any] = {"rope_type": config.scaling, "rope_theta": config.base}
    parameters["factor"] = config.factor
    if config.scaling in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = config.original_max_len
    if config.scaling == "llama3":
        parameters["low_freq_factor"] = config.low_freq_factor
        parameters["high_freq_factor"] = config.high_freq_factor
    if config.scaling == "longrope":
        parameters["short_factor"] = list(config.short_factors)
        parameters["long_factor"] = list(config.long_factors)
    if config.scaling == "yarn":
        for name in ("beta_fast", "beta_slow", "truncate"):
            parameters[name] = getattr(config, name)
    if config.scaling in ("yarn", "longrope"):
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(config, name) is not None:
                parameters[name] = getattr(config, name)
    if config.width is not None:
        parameters["partial_rotary_factor"] = config.width / head_dim
    theirs = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=config.original_max_len or 2048,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[config.scaling](theirs, "cpu", seq_len=length)
    return frequencies.numpy(), factor


YARN = {"scaling": "yarn", "original_max_len": 4096}
LONG = {
    "scaling": "longrope",
    "original_max_len": 2048,
    "width": 48,
    "short_factors": tuple(np.linspace(1, 3, 24).tolist()),
    "long_factors": tuple(np.linspace(1, 60, 24).tolist()),
}
PUBLISHED = [
    RotaryConfig(scaling="linear", factor=4.0),
    RotaryConfig(scaling="linear", factor=2.5, width=32),
    RotaryConfig(scaling="dynamic", factor=2.0, original_max_len=2048),
    RotaryConfig(scaling="dynamic", factor=8.0, original_max_len=128, width=32, base=500000.0),
    RotaryConfig(scaling="llama3", factor=32.0, original_max_len=8192, base=500000.0),
    RotaryConfig(
        scaling="llama3", factor=8.0, original_max_len=1024, low_freq_factor=2.0, width=48
    ),
    RotaryConfig(**YARN, factor=4.0),
    RotaryConfig(**YARN, factor=40.0, mscale=1.0, mscale_all_dim=0.707, width=32),
    RotaryConfig(**YARN, factor=16.0, attention_factor=1.5, truncate=False),
    RotaryConfig(**YARN, factor=0.5, beta_fast=16.0, beta_slow=2.0, base=1e6),
    RotaryConfig(scaling="yarn", original_max_len=4, factor=2.0),
    RotaryConfig(**LONG, factor=32.0),
    RotaryConfig(**LONG, factor=0.5),
    RotaryConfig(**LONG, factor=32.0, attention_factor=1.25),
]


LENGTHS = [None, 1, 100, 128, 129, 2048, 2049, 30000]
AT_LENGTHS = [
    pytest.param(config, length, id=f"{config.scaling} {index} at {length}")
    for index, config in enumerate(PUBLISHED)
    for length in (LENGTHS if config.scaling in ("dynamic", "longrope") else LENGTHS[:1])
]


@pytest.mark.parametrize(("config", "length"), AT_LENGTHS)
def test_scalings_are_those_of_transformers_at_any_length(config, length):
    expected, factor = theirs_of(config, 64, length)
    ours, our_factor = rotary.inverse_frequencies(config, 64, length)
    theirs, their_factor = reference.inverse_frequencies(config, 64, length)
    # Theirs are rounded at each step in float32.
    np.testing.assert_allclose(ours, expected, rtol=2e-6)
    np.testing.assert_allclose(theirs, ours, rtol=1e-14)
    assert our_factor == their_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("length", [64, 65, 100000])
def test_longrope_takes_the_long_factors_for_the_whole_row_beyond_the_original_length(length):
    # Each row for itself, as exactly as without a scaling; frequencies of a traced length too.
    positions = np.array([[3, length - 1], [63, 2]], np.int32)
    expected = np.stack(
        [
            row[:, None] * (RotaryConfig().base ** (-np.arange(4) / 4) / factors)
            for row, factors in zip(
                positions,
                (
                    LONGROPE.long_factors if length > 64 else LONGROPE.short_factors,
                    LONGROPE.short_factors,
                ),
                strict=True,
            )
        ]
    )
    factor = math.sqrt(1 + math.log(16) / math.log(64))
    ours = jax.jit(lambda positions: rotary.rotary_tables(LONGROPE, H, positions))(positions)
    theirs = reference.rotary_tables(LONGROPE, H, torch.from_numpy(positions))
    for tables in (ours, theirs):
        for table, function in zip(tables, (np.cos, np.sin), strict=True):
            np.testing.assert_allclose(table, factor * function(expected), rtol=0, atol=4e-7)
    lengths = positions.max(axis=1) + 1
    traced, _ = jax.jit(lambda n: rotary.inverse_frequencies(LONGROPE, H, n))(lengths)
    found, _ = reference.inverse_frequencies(LONGROPE, H, torch.from_numpy(lengths))
    np.testing.assert_allclose(traced, found, rtol=1e-6)


def test_llama3_divides_the_long_waves_alone():
    # Llama 3.2 1B: heads of 64.
    config = PUBLISHED[4]
    for module in (rotary, reference):
        plain, _ = module.inverse_frequencies(RotaryConfig(base=500000.0), 64)
        scaled, _ = module.inverse_frequencies(config, 64)
        ratio = to_numpy(scaled) / to_numpy(plain)
        np.testing.assert_allclose(ratio[:15], 1.0, rtol=1e-14)
        np.testing.assert_allclose(ratio[15:18], [0.60557, 0.30374, 0.10345], atol=5e-6)
        np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-14)


# Those of the dynamic scaling are frequencies of a length that is known only when a program runs.
STATIC = [config for config in [*SCALINGS.values(), *PUBLISHED] if config.scaling != "dynamic"]


@pytest.mark.parametrize("config", STATIC, ids=lambda config: config.scaling)
@pytest.mark.parametrize("position", [2047, 20000, 1000000, 2**31 - 2])
def test_tables_in_float32_are_exact_at_any_position(config, position):
    positions = np.array([[position - 1, position]], np.int32)
    frequencies, factor = rotary.inverse_frequencies(config, 64, position + 1)
    angles = positions[..., None].astype(np.float64) * frequencies
    cos, sin = jax.jit(lambda p: rotary.rotary_tables(config, 64, p))(positions)
    theirs = reference.rotary_tables(config, 64, torch.from_numpy(positions))
    assert cos.dtype == sin.dtype == jnp.float32
    # The angle, at most pi, is rounded twice in float32, cosine and product once more; at 2**31
    # the angle in float64 is itself off by up to 2**31 * 2**-53.
    limit = factor * ((2 * math.pi + 3) * 2.0**-24 + position * 2.0**-52)
    for found, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        np.testing.assert_allclose(found, factor * exact, rtol=0, atol=limit)
    for found, exact in zip(theirs, (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(found, factor * exact, rtol=0, atol=limit)


def test_negative_positions_turn_back():
    positions = np.array([[-1, -700, 0, 1, 700]], np.int32)
    frequencies, _ = rotary.inverse_frequencies(RotaryConfig(), 64)
    cos, sin = rotary.rotary_tables(RotaryConfig(), 64, jnp.asarray(positions))
    angles = positions[..., None] * frequencies
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=10 * 2.0**-24)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=10 * 2.0**-24)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_a_bfloat16_model_turns_by_the_same_angles(pairing):
    config = RotaryConfig(pairing=pairing)
    x = jnp.asarray(normal(1, 2, 1, 64), jnp.bfloat16)
    positions = jnp.asarray([[2047, 100000]], jnp.int32)
    module = rotary.RotaryPositionalEncoding(64, config)
    found, _ = module(x, x, positions)
    exact, _ = module(x.astype(jnp.float32), x.astype(jnp.float32), positions)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(to_numpy(found), to_numpy(exact.astype(jnp.bfloat16)))
    theirs = reference.RotaryPositionalEncoding(64, config).bfloat16()
    rows = torch.from_numpy(to_numpy(x)).bfloat16()
    turned, _ = theirs(rows, rows, torch.tensor([[2047, 100000]]))
    np.testing.assert_allclose(to_numpy(turned), to_numpy(exact), rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
@pytest.mark.parametrize("module", [rotary, reference])
def test_features_beyond_the_rotated_width_stay_bit_for_bit(module, pairing):
    config = RotaryConfig(pairing=pairing, width=4)
    frequencies, _ = module.inverse_frequencies(config, 8)
    np.testing.assert_allclose(frequencies, [1.0, 0.01], rtol=1e-15)
    for position in (0, 1, 4095):
        for x in rotate(np.arange(1.0, 9.0), position, config):
            np.testing.assert_array_equal(x[4:], [5, 6, 7, 8])
            if position:
                assert (x[:4] != [1, 2, 3, 4]).all()


@pytest.mark.parametrize("config", SCALINGS.values(), ids=SCALINGS)
def test_a_token_is_turned_by_its_own_position_whatever_is_computed_with_it(config):
    # A step of decoding: the key at its place equals that of the whole sequence, bit for bit.
    if config.scaling == "dynamic":
        config = dataclasses.replace(config, original_max_len=5000)
    module = jax.jit(lambda q, k, p: rotary.RotaryPositionalEncoding(H, config)(q, k, p))
    q, k, positions = (jnp.asarray(array) for array in QUERIES_AND_KEYS.values())
    whole = module(q, k, positions)
    for step in range(S):
        one = slice(step, step + 1)
        for found, expected in zip(
            module(q[:, one], k[:, one], positions[:, one]), whole, strict=True
        ):
            np.testing.assert_array_equal(found[:, 0], expected[:, step])


def dynamic_tables(lengths: list[int], config: RotaryConfig) -> list[np.ndarray]:
    """Cosines of a batch of sequences of those lengths, padded on the right with position 0."""
    positions = np.zeros((len(lengths), max(lengths)), np.int32)
    for row, length in enumerate(lengths):
        positions[row, :length] = np.arange(length)
    theirs = reference.rotary_tables(config, H, torch.from_numpy(positions))
    return [
        to_numpy(rotary.rotary_tables(config, H, jnp.asarray(positions))[0]),
        to_numpy(theirs[0]),
    ]


def test_the_dynamic_base_is_that_of_each_row_s_own_length():
    config = SCALINGS["dynamic"]
    together = dynamic_tables([40, 8, 17], config)
    for row, length in enumerate([40, 8, 17]):
        frequencies, _ = rotary.inverse_frequencies(config, H, length)
        exact = np.cos(np.arange(length)[:, None] * frequencies)
        for batch, alone in zip(together, dynamic_tables([length], config), strict=True):
            np.testing.assert_array_equal(batch[row, :length], alone[0])
            np.testing.assert_allclose(alone[0], exact, atol=40 * 2.0**-22)


def test_the_dynamic_base_is_the_plain_one_up_to_the_original_length_and_after_a_longer_call():
    config = SCALINGS["dynamic"]
    plain, _ = rotary.inverse_frequencies(RotaryConfig(), H)
    for module in (rotary, reference):
        for length in (None, 1, 16):
            found, _ = module.inverse_frequencies(config, H, length)
            np.testing.assert_array_equal(found, module.inverse_frequencies(RotaryConfig(), H)[0])
    dynamic_tables([40], config)
    for found in dynamic_tables([8], config):
        np.testing.assert_allclose(
            found[0], np.cos(np.arange(8)[:, None] * plain), atol=8 * 2.0**-23
        )


def test_a_cached_key_keeps_the_dynamic_base_of_its_own_step():
    # As everywhere that turned keys are cached: the whole sequence at once gives other ones.
    config, k = SCALINGS["dynamic"], jnp.asarray(normal(1, 20, 1, H))
    module = rotary.RotaryPositionalEncoding(H, config)
    positions = jnp.arange(20, dtype=jnp.int32)[None]
    whole = module(k, k)[1]
    steps = [
        module(k[:, [step]], k[:, [step]], positions[:, [step]])[1][:, 0] for step in range(20)
    ]
    differ = [not np.allclose(step, whole[:, index], atol=1e-3) for index, step in enumerate(steps)]
    # Those of the original length were turned by the plain base; the last one by the whole's.
    first = module(k[:, :16], k[:, :16])[1]
    np.testing.assert_allclose(np.stack(steps[:16], 1), first, atol=1e-6)
    np.testing.assert_allclose(steps[-1], whole[:, -1], atol=1e-6)
    assert any(differ)


def test_a_table_has_all_columns_and_no_end():
    cos, sin = rotary.rotary_tables(RotaryConfig(), 32, jnp.asarray([[0, 8, 5000]], jnp.int32))
    assert cos.shape == sin.shape == (1, 3, 16)
    np.testing.assert_array_equal(cos[0, 0], np.ones(16))
    assert jnp.isfinite(cos).all()


@pytest.mark.parametrize("module", [rotary, reference])
@pytest.mark.parametrize(
    ("config", "head_dim", "message"),
    [
        (RotaryConfig(width=16), 8, "width=16 is more than the head's 8"),
        (RotaryConfig(), 7, "heads of 7 features"),
        (SCALINGS["dynamic"], 2, "no base to grow"),
        (LONGROPE, 6, "4 short_factors: must be 3"),
    ],
)
def test_widths_that_a_head_has_not_are_refused(module, config, head_dim, message):
    with pytest.raises(InputError, match=message):
        module.RotaryPositionalEncoding(head_dim, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "su"}, "scaling='su': must be one of none, linear, dynamic, llama3"),
        ({"scaling": "default"}, "scaling='default': must be one of"),
        ({"pairing": "interleaved"}, "must be one of adjacent, half"),
        ({"base": 0.0}, "base=0.0"),
        ({"base": 1.0}, "base=1.0: must be above 1"),
        ({"width": 3}, "width=3"),
        ({"width": 0}, "width=0"),
        ({"factor": 2.0}, "factor=2.0 with scaling='none'"),
        ({"scaling": "linear", "factor": 0.0}, "factor=0.0"),
        ({"scaling": "linear", "factor": True}, "factor=True"),
        ({"scaling": "linear", "factor": math.nan}, "factor=nan"),
        ({"scaling": "linear", "original_max_len": 8}, "original_max_len=8 with scaling='linear'"),
        ({"scaling": "dynamic", "factor": 2.0}, "original_max_len=None with scaling='dynamic'"),
        ({"scaling": "llama3", "factor": 2.0}, "original_max_len=None with scaling='llama3'"),
        ({"scaling": "yarn", "factor": 2.0}, "original_max_len=None with scaling='yarn'"),
        ({"scaling": "dynamic", "factor": 0.5, "original_max_len": 8}, "factor=0.5"),
        (
            {"scaling": "llama3", "original_max_len": 8, "low_freq_factor": 4.0},
            "low_freq_factor=4.0 is not below high_freq_factor=4.0",
        ),
        ({"scaling": "linear", "mscale": 1.0}, "mscale=1.0 with scaling='linear'"),
        ({"short_factors": (1.0,)}, r"short_factors=\(1.0,\) with scaling='none'"),
        ({"scaling": "longrope", "original_max_len": 8}, "short_factors=None: give a finite"),
        (
            {"scaling": "longrope", "original_max_len": 8, "short_factors": (1.0, -1.0)},
            "give a finite number above 0",
        ),
        (
            {
                "scaling": "longrope",
                "original_max_len": 8,
                "short_factors": (1.0,),
                "long_factors": (1.0, 2.0),
            },
            "2 long_factors and 1 short_factors",
        ),
        (
            {
                "scaling": "longrope",
                "original_max_len": 1,
                "short_factors": (1.0,),
                "long_factors": (1.0,),
            },
            "must be at least 2",
        ),
        (
            {"scaling": "yarn", "original_max_len": 8, "mscale": 1.0},
            "mscale=1.0 with mscale_all_dim=None",
        ),
        (
            {"scaling": "yarn", "original_max_len": 8, "beta_slow": 40.0},
            "beta_slow=40.0 is not below beta_fast=32.0",
        ),
        (
            {"scaling": "llama3", "original_max_len": 8, "truncate": False},
            "truncate=False with scaling='llama3': only yarn read it",
        ),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        RotaryConfig(**fields)


def test_the_module_has_no_parameters():
    module = rotary.RotaryPositionalEncoding(H, RotaryConfig())
    assert jax.tree.leaves(nnx.state(module)) == []
    assert reference.RotaryPositionalEncoding(H, RotaryConfig()).state_dict() == {}
