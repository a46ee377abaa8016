"""The family of `torch_reference.Transformer`: all of it, bit for bit, for every kind of model."""

import itertools
from typing import get_args

import numpy as np
import pytest
from flax import nnx

from jax_transformer import config as options
from jax_transformer.config import ModelConfig
from jax_transformer.errors import InputError
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import flatten, split
from jax_transformer.porting.families.transformer import rules
from jax_transformer.porting.plan import convert, convert_back
from parity_tests.harness import randomize, to_numpy
from torch_reference.models.encoder_decoder import Transformer as ReferenceTransformer

KINDS = list(
    itertools.product(
        get_args(options.NormPlacement),
        get_args(options.PositionEncoding),
        get_args(options.TiedTables),
    )
)


def make(norm_placement, position_encoding, tied_tables):
    config = ModelConfig(
        src_vocab_size=7,
        tgt_vocab_size=7,
        d_model=6,
        num_heads=2,
        d_ff=5,
        # More than ten: layer 10 comes after layer 9, not after layer 1.
        num_encoder_layers=11,
        num_decoder_layers=2,
        max_len=8,
        norm_placement=norm_placement,
        position_encoding=position_encoding,
        tied_tables=tied_tables,
    )
    reference = ReferenceTransformer.from_config(config)
    randomize(reference)
    tensors = {name: to_numpy(tensor) for name, tensor in reference.state_dict().items()}
    model = nnx.eval_shape(lambda: Transformer.from_config(config, rngs=nnx.Rngs(0)))
    _, params, buffers = split(model)
    shapes = {name: leaf.shape for name, leaf in (flatten(params) | flatten(buffers)).items()}
    return rules(config), tensors, shapes


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_model_goes_there_and_back_bit_for_bit(kind):
    family, tensors, shapes = make(*kind)
    converted = convert(family, tensors, shapes)
    assert {name: array.shape for name, array in converted.items()} == shapes
    back = convert_back(family, converted, {name: a.shape for name, a in tensors.items()})
    assert back.keys() == tensors.keys()
    for name, array in tensors.items():
        assert back[name].dtype == array.dtype
        assert back[name].tobytes() == array.tobytes(), name


def test_kernels_are_transposed_and_everything_else_is_as_it_was():
    family, tensors, shapes = make("post", "sinusoidal", "none")
    converted = convert(family, tensors, shapes)
    layer = "encoder.layers.10.self_attn.q_proj"
    for ours, theirs, transposed in (
        (f"{layer}.kernel", f"{layer}.weight", True),
        ("decoder.layers.1.ffn.linear1.kernel", "decoder.layers.1.ffn.linear1.weight", True),
        ("output_proj.kernel", "output_proj.weight", True),
        ("encoder.embedding.embedding", "encoder.embedding.weight", False),
        ("decoder.layers.0.norm3.scale", "decoder.layers.0.norm3.weight", False),
        ("decoder.norm.bias", "decoder.norm.bias", False),
        ("encoder.pos_encoding.pe", "encoder.pos_encoding.pe", False),
    ):
        expected = tensors[theirs].T if transposed else tensors[theirs]
        np.testing.assert_array_equal(converted[ours], expected, err_msg=ours)


@pytest.mark.parametrize("place", ["encoder.layers.0.norm1.weight", "output_proj.bias"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(place):
    family, tensors, shapes = make("post", "sinusoidal", "none")
    del tensors[place]
    with pytest.raises(InputError, match="nothing fills"):
        convert(family, tensors, shapes)


def test_a_checkpoint_with_a_tensor_too_many_is_refused():
    family, tensors, shapes = make("post", "sinusoidal", "none")
    extra = {"encoder.layers.11.norm1.weight": tensors["encoder.layers.0.norm1.weight"]}
    with pytest.raises(InputError, match="encoder.layers.11.norm1.weight .* has no place"):
        convert(family, tensors | extra, shapes)


def test_untied_weights_do_not_pass_for_a_tied_model():
    _, tensors, _ = make("post", "sinusoidal", "none")
    family, _, shapes = make("post", "sinusoidal", "all")
    with pytest.raises(InputError, match="hold different numbers"):
        convert(family, tensors, shapes)


def test_jax_trees_count_layers_by_number():
    _, _, shapes = make("post", "sinusoidal", "none")
    layers = [name.split(".")[2] for name in shapes if "encoder.layers" in name]
    assert list(dict.fromkeys(layers)) == [str(index) for index in range(11)]
