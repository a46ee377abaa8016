"""A checkpoint of a script written from the lecture document loads, name for name."""

import inspect
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.config import ModelConfig
from jax_transformer.models.encoder_decoder import Transformer
from parity_tests.harness import QUICK, carry, to_numpy
from torch_reference.models.encoder_decoder import Transformer as ReferenceTransformer

# src_vocab_size=11, tgt_vocab_size=13, d_model=8, num_heads=2, d_ff=12, one layer of each kind,
# max_len=10: what `Transformer(...).state_dict()` of the document's classes holds. Its
# MultiHeadAttention is not shown; the projections have the names of its GroupedQueryAttention.
EXPECTED = {
    "encoder.embedding.weight": (11, 8),
    "encoder.pos_encoding.pe": (1, 10, 8),
    "encoder.layers.0.self_attn.q_proj.weight": (8, 8),
    "encoder.layers.0.self_attn.q_proj.bias": (8,),
    "encoder.layers.0.self_attn.k_proj.weight": (8, 8),
    "encoder.layers.0.self_attn.k_proj.bias": (8,),
    "encoder.layers.0.self_attn.v_proj.weight": (8, 8),
    "encoder.layers.0.self_attn.v_proj.bias": (8,),
    "encoder.layers.0.self_attn.out_proj.weight": (8, 8),
    "encoder.layers.0.self_attn.out_proj.bias": (8,),
    "encoder.layers.0.ffn.linear1.weight": (12, 8),
    "encoder.layers.0.ffn.linear1.bias": (12,),
    "encoder.layers.0.ffn.linear2.weight": (8, 12),
    "encoder.layers.0.ffn.linear2.bias": (8,),
    "encoder.layers.0.norm1.weight": (8,),
    "encoder.layers.0.norm1.bias": (8,),
    "encoder.layers.0.norm2.weight": (8,),
    "encoder.layers.0.norm2.bias": (8,),
    "encoder.norm.weight": (8,),
    "encoder.norm.bias": (8,),
    "decoder.embedding.weight": (13, 8),
    "decoder.pos_encoding.pe": (1, 10, 8),
    "decoder.layers.0.self_attn.q_proj.weight": (8, 8),
    "decoder.layers.0.self_attn.q_proj.bias": (8,),
    "decoder.layers.0.self_attn.k_proj.weight": (8, 8),
    "decoder.layers.0.self_attn.k_proj.bias": (8,),
    "decoder.layers.0.self_attn.v_proj.weight": (8, 8),
    "decoder.layers.0.self_attn.v_proj.bias": (8,),
    "decoder.layers.0.self_attn.out_proj.weight": (8, 8),
    "decoder.layers.0.self_attn.out_proj.bias": (8,),
    "decoder.layers.0.norm1.weight": (8,),
    "decoder.layers.0.norm1.bias": (8,),
    "decoder.layers.0.cross_attn.q_proj.weight": (8, 8),
    "decoder.layers.0.cross_attn.q_proj.bias": (8,),
    "decoder.layers.0.cross_attn.k_proj.weight": (8, 8),
    "decoder.layers.0.cross_attn.k_proj.bias": (8,),
    "decoder.layers.0.cross_attn.v_proj.weight": (8, 8),
    "decoder.layers.0.cross_attn.v_proj.bias": (8,),
    "decoder.layers.0.cross_attn.out_proj.weight": (8, 8),
    "decoder.layers.0.cross_attn.out_proj.bias": (8,),
    "decoder.layers.0.norm2.weight": (8,),
    "decoder.layers.0.norm2.bias": (8,),
    "decoder.layers.0.ffn.linear1.weight": (12, 8),
    "decoder.layers.0.ffn.linear1.bias": (12,),
    "decoder.layers.0.ffn.linear2.weight": (8, 12),
    "decoder.layers.0.ffn.linear2.bias": (8,),
    "decoder.layers.0.norm3.weight": (8,),
    "decoder.layers.0.norm3.bias": (8,),
    "decoder.norm.weight": (8,),
    "decoder.norm.bias": (8,),
    "output_proj.weight": (13, 8),
    "output_proj.bias": (13,),
}

ARGUMENTS = {
    "src_vocab_size": 11,
    "tgt_vocab_size": 13,
    "d_model": 8,
    "num_heads": 2,
    "d_ff": 12,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "max_len": 10,
    "dropout": 0.1,
    "pad_idx": 0,
}


def checkpoint():
    """Such a file, as that script saves it."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in EXPECTED.items()}
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return file


def test_a_checkpoint_of_the_document_loads_strictly():
    model = ReferenceTransformer(*ARGUMENTS.values())
    state = torch.load(checkpoint(), weights_only=True)
    assert model.load_state_dict(state, strict=True) == ([], [])
    # In the document's order: an optimiser's state is by number, not by name.
    assert list(model.state_dict()) == list(EXPECTED)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_its_weights_give_the_same_logits_in_jax():
    reference = ReferenceTransformer(*ARGUMENTS.values()).eval()
    reference.load_state_dict(torch.load(checkpoint(), weights_only=True))
    source = np.array([[4, 5, 0], [0, 6, 7], [0, 0, 0]], np.int32)
    target = np.array([[2, 8, 9, 0], [2, 4, 0, 0], [2, 0, 0, 0]], np.int32)
    with jax.enable_x64(True):
        skeleton = nnx.eval_shape(lambda: Transformer(*ARGUMENTS.values(), rngs=nnx.Rngs(0)))
        model = carry(reference, skeleton, "", jnp.float64)

        def run(src, tgt):
            return model(src, tgt, model.make_src_mask(src), model.make_tgt_mask(tgt))

        logits = jax.jit(run, compiler_options=QUICK)(source, target)
    with torch.no_grad():
        expected = reference.double()(torch.from_numpy(source), torch.from_numpy(target))
    np.testing.assert_allclose(
        to_numpy(logits), expected, rtol=0, atol=1e-12 * float(expected.abs().max())
    )


@pytest.mark.parametrize("name", ["encoder.norm.bias", "output_proj.weight"])
def test_a_checkpoint_that_lacks_or_adds_a_name_is_refused(name):
    state = torch.load(checkpoint(), weights_only=True)
    model = ReferenceTransformer(*ARGUMENTS.values())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state | {"encoder.extra": torch.zeros(1)}, strict=True)
    del state[name]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        model.load_state_dict(state, strict=True)


def test_both_models_take_the_documents_arguments_with_its_defaults():
    document = {
        "src_vocab_size": inspect.Parameter.empty,
        "tgt_vocab_size": inspect.Parameter.empty,
        "d_model": 512,
        "num_heads": 8,
        "d_ff": 2048,
        "num_encoder_layers": 6,
        "num_decoder_layers": 6,
        "max_len": 5000,
        "dropout": 0.1,
        "pad_idx": 0,
    }
    for model in (ReferenceTransformer, Transformer):
        parameters = inspect.signature(model.__init__).parameters
        positional = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name != "self"
        }
        assert positional == document
        assert list(positional) == list(document)
    fields = ModelConfig(src_vocab_size=1, tgt_vocab_size=1).to_dict()
    for name, value in document.items():
        assert name == "pad_idx" or value in (fields[name], inspect.Parameter.empty)


def test_the_documents_loop_finds_the_width_in_the_encoders_scale():
    assert ReferenceTransformer(*ARGUMENTS.values()).encoder.scale ** 2 == pytest.approx(8)
