"""The family of `torch_reference.Transformer`: all of it, bit for bit, for every kind of model."""

import functools
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

KINDS = list(itertools.product(get_args(options.PositionEncoding), get_args(options.TiedTables)))


@functools.cache
def make(position_encoding="sinusoidal", tied_tables="none", norm_placement="post", layers=1):
    """The porting table, PyTorch's tensors and JAX's shapes."""
    config = ModelConfig(
        src_vocab_size=7,
        tgt_vocab_size=7,
        d_model=6,
        num_heads=2,
        d_ff=5,
        num_encoder_layers=layers,
        num_decoder_layers=1,
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


# More than ten layers once: number 10 comes after 9, not after 1.
@pytest.mark.parametrize("kind", [*KINDS, ("learned", "all", "pre", 11)], ids=str)
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
    family, tensors, shapes = make()
    converted = convert(family, tensors, shapes)
    layer = "encoder.layers.0.self_attn.q_proj"
    for ours, theirs, transposed in (
        (f"{layer}.kernel", f"{layer}.weight", True),
        ("decoder.layers.0.ffn.linear1.kernel", "decoder.layers.0.ffn.linear1.weight", True),
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
    family, tensors, shapes = make()
    rest = {name: array for name, array in tensors.items() if name != place}
    with pytest.raises(InputError, match="nothing fills"):
        convert(family, rest, shapes)


def test_a_checkpoint_with_a_tensor_too_many_is_refused():
    family, tensors, shapes = make()
    extra = {"encoder.layers.1.norm1.weight": tensors["encoder.layers.0.norm1.weight"]}
    with pytest.raises(InputError, match=r"encoder\.layers\.1\.norm1\.weight .* has no place"):
        convert(family, tensors | extra, shapes)


def test_untied_weights_do_not_pass_for_a_tied_model():
    _, tensors, _ = make()
    family, _, shapes = make(tied_tables="all")
    with pytest.raises(InputError, match="hold different numbers"):
        convert(family, tensors, shapes)


def test_jax_trees_count_layers_by_number():
    _, _, shapes = make("learned", "all", "pre", 11)
    layers = [name.split(".")[2] for name in shapes if "encoder.layers" in name]
    assert list(dict.fromkeys(layers)) == [str(index) for index in range(11)]
