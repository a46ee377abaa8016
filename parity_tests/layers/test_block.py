"""Encoder and decoder layers in both norm placements."""

import numpy as np
import pytest
import torch

from jax_transformer.layers import block
from parity_tests.harness import Case, check_float32, check_float64, declare, randomize
from parity_tests.inputs import SOURCE_MASK, TARGET_MASK, B, D, F, N, S, T, normal, padding
from torch_reference.layers import block as reference

ENCODER_INPUTS = {"x": normal(B, S, D), "src_mask": SOURCE_MASK}
DECODER_INPUTS = {
    "x": normal(B, T, D),
    "enc_output": normal(B, S, D, seed=1),
    "src_mask": SOURCE_MASK,
    "tgt_mask": TARGET_MASK,
}

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
