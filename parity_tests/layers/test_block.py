"""Blocks in every placement of their norms and with every option; the document's layers."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer import config as values
from jax_transformer.config import LayerConfig, RotaryConfig
from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.errors import InputError
from jax_transformer.layers import block
from jax_transformer.layers.mask import create_causal_mask
from jax_transformer.models.parameters import split
from parity_tests.harness import (
    QUICK,
    Case,
    carry,
    check_float32,
    check_float64,
    declare,
    fresh,
    make_skeleton,
    randomize,
    to_numpy,
)
from parity_tests.inputs import (
    SOURCE_MASK,
    TARGET_MASK,
    TARGET_POSITIONS,
    B,
    D,
    F,
    N,
    S,
    T,
    normal,
    padding,
)
from torch_reference.layers import block as reference

ENCODER_INPUTS = {"x": normal(B, S, D), "src_mask": SOURCE_MASK}
DECODER_INPUTS = {
    "x": normal(B, T, D),
    "enc_output": normal(B, S, D, seed=1),
    "src_mask": SOURCE_MASK,
    "tgt_mask": TARGET_MASK,
}

ROTARY = RotaryConfig(pairing="half")


def layer_config(**options):
    return LayerConfig(d_model=D, num_heads=N, d_ff=F, causal=True, **options)


def block_case(config, cross_attention=False, name=None, bias=None):
    return Case(
        name=name or config.placement,
        jax=block.Block,
        torch=reference.Block,
        arguments=(config,),
        options={"cross_attention": cross_attention},
        inputs={
            "x": normal(B, T, D),
            "enc_output": normal(B, S, D, seed=1) if cross_attention else None,
            "self_mask": TARGET_MASK,
            "cross_mask": SOURCE_MASK if cross_attention else None,
            "bias": bias,
            "positions": TARGET_POSITIONS,
        },
        place="decoder.layers.0",
    )


# Each value of each option that no layer of the document has.
LAYERS = {
    "llama": layer_config(
        norm="rms",
        norm_epsilon=1e-3,
        num_kv_heads=2,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        gated=True,
        activation="silu",
        rotary=ROTARY,
    ),
    "gemma": layer_config(
        norm="rms",
        placement="sandwich",
        norm_unit_offset=True,
        norm_scale_in_float32=True,
        head_dim=6,
        num_kv_heads=1,
        attention_scale=0.7,
        attention_soft_cap=3.0,
        query_key_norm="head",
        gated=True,
        activation="gelu_tanh",
        rotary=ROTARY,
    ),
    "olmo": layer_config(norm="rms", placement="output", query_key_norm="full", activation="silu"),
    "gpt-j": layer_config(
        placement="parallel",
        qkv_bias=False,
        out_bias=False,
        activation="gelu_tanh",
        rotary=RotaryConfig(pairing="adjacent", width=2),
    ),
    "gpt-neox": layer_config(placement="parallel", parallel_norms=2, norm_epsilon=0.1),
    "without norm biases": layer_config(norm_bias=False, activation="quick_gelu"),
    "post, gated": layer_config(placement="post", norm="rms", gated=True, activation="sigmoid"),
}

BLOCKS = declare(
    *(block_case(config, name=name) for name, config in LAYERS.items()),
    block_case(layer_config(activation="relu"), name="bias", bias=normal(1, N, T, T)),
    block_case(LAYERS["gemma"], True, "cross-attention, sandwich"),
    block_case(LAYERS["olmo"], True, "cross-attention, output", normal(B, N, T, T)),
    block_case(layer_config(key_bias=False), True, "cross-attention, no bias of keys"),
)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_with_every_option_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("case", [BLOCKS[0], BLOCKS[1], BLOCKS[8]], ids=str)
def test_with_options_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "quick")


def test_the_blocks_have_every_value_of_every_option():
    configs = [case.arguments[0] for case in BLOCKS]
    for name, choices in (
        ("placement", values.Placement),
        ("norm", values.Norm),
        ("query_key_norm", values.QueryKeyNorm),
        ("activation", values.Activation),
    ):
        missing = set(get_args(choices)) - {getattr(config, name) for config in configs}
        assert missing <= ({"post", "gelu"} if name == "placement" else {"gelu"}), missing
    fields = {field.name for field in dataclasses.fields(LayerConfig)}
    # The mask is made outside of a block; dropout has a test of its own.
    for name in fields - {"d_model", "num_heads", "d_ff", "causal", "window", "dropout"}:
        assert len({getattr(config, name) for config in configs}) > 1, name


@st.composite
def configs(draw):
    """Any options together."""
    norm = draw(st.sampled_from(get_args(values.Norm)))
    scaled = st.booleans() if norm == "rms" else st.just(False)
    head_dim = draw(st.sampled_from([None, 6]))
    qkv_bias = draw(st.booleans())
    return layer_config(
        norm=norm,
        norm_epsilon=draw(st.sampled_from([1e-6, 0.1])),
        norm_bias=draw(st.booleans()),
        norm_unit_offset=draw(scaled),
        norm_scale_in_float32=draw(scaled),
        placement=draw(st.sampled_from(get_args(values.Placement))),
        parallel_norms=draw(st.sampled_from([1, 2])),
        num_kv_heads=draw(st.sampled_from([None, 1, 2])),
        head_dim=head_dim,
        query_key_norm=draw(st.sampled_from(get_args(values.QueryKeyNorm))),
        qkv_bias=qkv_bias,
        key_bias=not qkv_bias or draw(st.booleans()),
        out_bias=draw(st.booleans()),
        attention_scale=draw(st.sampled_from([None, 1.0])),
        attention_soft_cap=draw(st.sampled_from([None, 3.0])),
        rotary=draw(
            st.none()
            | st.builds(
                RotaryConfig,
                pairing=st.sampled_from(get_args(values.RotaryPairing)),
                width=st.sampled_from([None, 2]),
            )
        ),
        activation=draw(st.sampled_from(get_args(values.Activation))),
        gated=draw(st.booleans()),
        ffn_bias=draw(st.booleans()),
    )


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(configs(), st.booleans(), st.booleans())
def test_any_options_together_both_frameworks_compute_the_same_function(config, cross, biased):
    cross = cross and config.placement != "parallel"
    bias = normal(1, N, T, T) if biased else None
    check_float64(block_case(config, cross, bias=bias), "quick")


def parts(layer, x, enc_output):
    """The sublayers of a block as functions of one array."""
    mask = torch.from_numpy(TARGET_MASK)
    return (
        lambda x: layer.self_attn(x, x, x, mask)[0],
        lambda x: layer.cross_attn(x, enc_output, enc_output)[0],
        layer.ffn,
    )


@pytest.mark.parametrize(
    ("placement", "cross"),
    [
        (placement, cross)
        for placement in get_args(values.Placement)
        for cross in (False, True)
        if placement != "parallel" or not cross
    ],
)
def test_norms_are_where_the_placement_says(placement, cross):
    for count in (1, 2) if placement == "parallel" else (1,):
        config = layer_config(placement=placement, parallel_norms=count)
        layer = reference.Block(config, cross_attention=cross).double().eval()
        randomize(layer)
        x, enc_output = (torch.from_numpy(normal(B, n, D, seed=n)).double() for n in (T, S))
        attend, attend_to_encoder, feed = parts(layer, x, enc_output)
        sublayers = [attend, *([attend_to_encoder] if cross else []), feed]
        norms = [layer.norm1, layer.norm2, layer.norm3][: len(sublayers)]
        after = [layer.post_norm1, layer.post_norm2, layer.post_norm3][: len(sublayers)]
        expected = x
        for f, norm, post_norm in zip(sublayers, norms, after, strict=True):
            if placement == "post":
                expected = norm(expected + f(expected))
            elif placement == "pre":
                expected = expected + f(norm(expected))
            elif placement == "output":
                expected = expected + norm(f(expected))
            elif placement == "sandwich":
                expected = expected + post_norm(f(norm(expected)))
        if placement == "parallel":
            second = layer.norm1 if count == 1 else layer.norm2
            expected = x + attend(layer.norm1(x)) + feed(second(x))
            assert (layer.norm2 is None) == (count == 1)
        found, _ = layer(x, enc_output, torch.from_numpy(TARGET_MASK))
        np.testing.assert_allclose(to_numpy(found), to_numpy(expected), rtol=0, atol=1e-13)


def test_every_norm_has_the_epsilon_of_the_configuration():
    config = dataclasses.replace(LAYERS["gemma"], norm_epsilon=0.5)
    ours = nnx.eval_shape(lambda: block.Block(config, cross_attention=True, rngs=nnx.Rngs(0)))
    theirs = reference.Block(config, cross_attention=True)
    found = [part.epsilon for _, part in nnx.iter_modules(ours) if hasattr(part, "epsilon")]
    expected = [part.epsilon for part in theirs.modules() if hasattr(part, "epsilon")]
    assert found == expected == [0.5] * 10


def test_a_parallel_block_has_no_cross_attention():
    with pytest.raises(InputError, match="with cross-attention"):
        block.Block(LAYERS["gpt-j"], cross_attention=True, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="with cross-attention"):
        reference.Block(LAYERS["gpt-j"], cross_attention=True)


@pytest.mark.parametrize("name", ["llama", "gemma", "olmo", "gpt-j", "gpt-neox"])
def test_cached_is_uncached_at_every_position(name):
    config = LAYERS[name]
    model = fresh(lambda: block.Block(config, rngs=nnx.Rngs(0)))
    graphdef, params, _ = split(model)

    def run(params, x, mask, places, cache):
        layer = nnx.merge(graphdef, params)
        return layer(x, self_mask=mask, positions=places, cache=cache)[0], cache

    run = jax.jit(run, compiler_options=QUICK)
    index = jnp.broadcast_to(jnp.arange(T), (B, T))
    mask = create_causal_mask(index, index, 4, None, None, jnp.asarray(padding(T)))
    x, places = normal(B, T, D), TARGET_POSITIONS
    whole, _ = run(params, x, mask, places, None)
    cache = KeyValueCache.empty(jnp.zeros((B, 1, config.kv_heads, config.head_width)), T)
    for i in range(T):
        at = slice(i, i + 1)
        out, cache = run(params, x[:, at], mask[:, :, at], places[:, at], cache)
        np.testing.assert_allclose(out, whole[:, at], rtol=0, atol=1e-5)


def test_weights_are_those_of_the_last_attention_where_they_are_needed():
    for cross, width in ((False, T), (True, S)):
        case = BLOCKS[8 if cross else 0]
        theirs = case.torch(*case.arguments, **case.options).eval()
        randomize(theirs)
        ours = carry(theirs, make_skeleton(case), case.place, jnp.float32)
        inputs = [case.inputs[name] for name in case.inputs]
        tensors = [value if value is None else torch.from_numpy(value) for value in inputs]
        arrays = [value if value is None else jnp.asarray(value) for value in inputs]
        run = jax.jit(
            lambda *arrays, ours=ours: [ours(*arrays, need_weights=need) for need in (True, False)],
            compiler_options=QUICK,
        )
        (_, found), (_, nothing) = run(*arrays)
        _, expected = theirs(*tensors, need_weights=True)
        assert nothing is None
        assert found.shape == expected.shape == (B, N, T, width)
        np.testing.assert_allclose(found, to_numpy(expected), rtol=0, atol=1e-5)


CASES = declare(
    *(
        Case(
            name=name,
            jax=getattr(block, name),
            torch=getattr(reference, name),
            arguments=(D, N, F),
            options={"activation": activation},
            inputs=DECODER_INPUTS if "Decoder" in name else ENCODER_INPUTS,
            place="decoder.layers.0" if "Decoder" in name else "encoder.layers.0",
        )
        for name, activation in (
            ("EncoderLayer", "gelu"),
            ("PreNormEncoderLayer", "relu"),
            ("DecoderLayer", "relu"),
            ("PreNormDecoderLayer", "gelu"),
        )
    )
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_op_by_op_they_compute_the_same_function(case):
    check_float64(case, "op by op")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "jit" if case in (CASES[0], CASES[3]) else "quick")


# What PyTorch's own layers call the parameters; its attention keeps q, k and v in one matrix.
NAMES = {
    "self_attn.out_proj": "self_attn.out_proj",
    "multihead_attn.out_proj": "cross_attn.out_proj",
    "linear1": "ffn.linear1",
    "linear2": "ffn.linear2",
    **{f"norm{i}": f"norm{i}" for i in (1, 2, 3)},
}


def copy_weights(layer, peer):
    """Into PyTorch's own layer."""
    ours, theirs = layer.state_dict(), {}
    for name in peer.state_dict():
        module, _, kind = name.rpartition(".")
        if kind.startswith("in_proj_"):
            attention = {"self_attn": "self_attn", "multihead_attn": "cross_attn"}[module]
            kind = kind.removeprefix("in_proj_")
            parts = [ours[f"{attention}.{part}_proj.{kind}"] for part in "qkv"]
            theirs[name] = torch.cat(parts)
        else:
            theirs[name] = ours[f"{NAMES[module]}.{kind}"]
    peer.load_state_dict(theirs, strict=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_pytorchs_own_layer(case):
    # An oracle that the two packages, written by the same hand, do not share.
    layer = case.torch(*case.arguments, **case.options).double().eval()
    randomize(layer)
    peer_class = (
        torch.nn.TransformerDecoderLayer
        if "Decoder" in case.name
        else (torch.nn.TransformerEncoderLayer)
    )
    peer = peer_class(
        D,
        N,
        F,
        dropout=0.0,
        activation=case.options["activation"],
        batch_first=True,
        norm_first="PreNorm" in case.name,
        dtype=torch.float64,
    )
    copy_weights(layer, peer)
    # Rows where every query sees a key: PyTorch's layer gives NaN elsewhere.
    rows = slice(0, 2)
    inputs = [torch.from_numpy(case.inputs[name][rows]) for name in case.inputs]
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    output, _ = layer(*inputs)
    hidden_source = torch.from_numpy(~padding(S)[rows])
    if "Decoder" in case.name:
        expected = peer(
            *inputs[:2],
            tgt_mask=~torch.tril(torch.ones(T, T, dtype=torch.bool)),
            tgt_key_padding_mask=torch.from_numpy(~padding(T)[rows]),
            memory_key_padding_mask=hidden_source,
        )
    else:
        expected = peer(inputs[0], src_key_padding_mask=hidden_source)
    np.testing.assert_allclose(output.detach(), expected.detach(), rtol=0, atol=1e-12)
