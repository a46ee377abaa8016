"""Meta's own layout of Llama, to the model and on to the layout of `transformers`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import LlamaConfig, LlamaForCausalLM

from jax_transformer.errors import InputError
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import flatten, unflatten
from jax_transformer.porting.families import family_of, llama
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.llama_meta import FAMILY, inner_width
from jax_transformer.porting.operations import RopePairing
from jax_transformer.porting.plan import convert, convert_back
from parity_tests.harness import QUICK
from parity_tests.porting.families.harness import float64, skeleton, tokens

HEADS = [(6, 2), (8, 2)]


def params(heads, kv_heads, **settings):
    """A `params.json`, of heads of 4."""
    small = {"dim": 4 * heads, "n_layers": 2, "n_heads": heads, "n_kv_heads": kv_heads}
    return small | {"vocab_size": 31, "multiple_of": 8, "norm_eps": 1e-3, **settings}


def tensors(values, seed=0):
    """What `consolidated.00.pth` holds, in float64, and in an order of its own."""
    generator = np.random.default_rng(seed)
    dim, head = values["dim"], values["dim"] // values["n_heads"]
    inner = inner_width(dim, values["multiple_of"], values.get("ffn_dim_multiplier"))
    keys = values["n_kv_heads"] * head
    shapes = {"tok_embeddings.weight": (31, dim), "norm.weight": (dim,), "output.weight": (31, dim)}
    for index in range(values["n_layers"]):
        layer = f"layers.{index}."
        shapes |= {
            layer + "attention.wq.weight": (dim, dim),
            layer + "attention.wk.weight": (keys, dim),
            layer + "attention.wv.weight": (keys, dim),
            layer + "attention.wo.weight": (dim, dim),
            layer + "feed_forward.w1.weight": (inner, dim),
            layer + "feed_forward.w2.weight": (dim, inner),
            layer + "feed_forward.w3.weight": (inner, dim),
            layer + "attention_norm.weight": (dim,),
            layer + "ffn_norm.weight": (dim,),
        }
    return {
        name: ("norm" in name) + 0.3 * generator.standard_normal(shape)
        for name, shape in shapes.items()
    }


def shapes_of(config):
    return {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}


def as_transformers_converts(meta, values):
    """The order of `convert_llama_weights_to_hf.py`: the rows of a head, by pairs of neighbours,
    become the first of each pair, then the second."""

    def permute(weight, heads):
        return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    theirs = {
        "model.embed_tokens.weight": meta["tok_embeddings.weight"],
        "model.norm.weight": meta["norm.weight"],
        "lm_head.weight": meta["output.weight"],
    }
    for index in range(values["n_layers"]):
        here, there = f"layers.{index}.", f"model.layers.{index}."
        wq, wk = (meta[f"{here}attention.w{name}.weight"] for name in "qk")
        theirs |= {
            there + "self_attn.q_proj.weight": permute(wq, values["n_heads"]),
            there + "self_attn.k_proj.weight": permute(wk, values["n_kv_heads"]),
            there + "self_attn.v_proj.weight": meta[here + "attention.wv.weight"],
            there + "self_attn.o_proj.weight": meta[here + "attention.wo.weight"],
            there + "mlp.gate_proj.weight": meta[here + "feed_forward.w1.weight"],
            there + "mlp.down_proj.weight": meta[here + "feed_forward.w2.weight"],
            there + "mlp.up_proj.weight": meta[here + "feed_forward.w3.weight"],
            there + "input_layernorm.weight": meta[here + "attention_norm.weight"],
            there + "post_attention_layernorm.weight": meta[here + "ffn_norm.weight"],
        }
    return theirs


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_from_meta_to_transformers_the_tensors_are_those_of_its_own_conversion(heads, kv_heads):
    values = params(heads, kv_heads, rope_theta=5e5)
    meta, config = tensors(values), read_config(FAMILY, values)
    leaves = convert(FAMILY.rules(config), meta, shapes_of(config))
    expected = as_transformers_converts(meta, values)
    found = convert_back(
        llama.FAMILY.rules(config), leaves, {name: array.shape for name, array in expected.items()}
    )
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    there = write_config(llama.FAMILY, config)
    assert there["num_key_value_heads"] == kv_heads
    assert there["rope_parameters"]["rope_theta"] == 5e5
    back = convert_back(FAMILY.rules(config), leaves, {n: a.shape for n, a in meta.items()})
    for name, array in meta.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_model_is_that_of_pairs_of_neighbours_and_of_transformers(heads, kv_heads):
    values = params(heads, kv_heads)
    meta, config = tensors(values), read_config(FAMILY, values)
    neighbours = dataclasses.replace(
        config,
        layer=dataclasses.replace(
            config.layer, rotary=dataclasses.replace(config.layer.rotary, pairing="adjacent")
        ),
    )
    unchanged = tuple(
        dataclasses.replace(
            rule, operations=tuple(o for o in rule.operations if not isinstance(o, RopePairing))
        )
        if hasattr(rule, "operations")
        else rule
        for rule in FAMILY.rules(config)
    )
    ids = tokens(31)
    logits = []
    with jax.enable_x64(True):
        for each, rules in ((config, FAMILY.rules(config)), (neighbours, unchanged)):
            leaves = convert(rules, meta, shapes_of(each))
            graphdef, state, _ = skeleton(each)
            state = unflatten({n: jnp.asarray(a) for n, a in leaves.items()}, state)
            model: DecoderOnly = nnx.merge(graphdef, state, {})
            run = jax.jit(lambda ids, model=model: model(ids), compiler_options=QUICK)
            logits.append(np.asarray(run(jnp.asarray(ids))))
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-12)

    made = write_config(llama.FAMILY, config)
    theirs = LlamaConfig(**{k: v for k, v in made.items() if k != "architectures"})
    with float64(LlamaForCausalLM), torch.no_grad():
        model = LlamaForCausalLM(theirs).double().eval()
        state = as_transformers_converts(meta, values)
        model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in state.items()})
        expected = model(input_ids=torch.from_numpy(ids).long()).logits.numpy()
    assert 0.5 < expected.std() < 20
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=1e-10)


# As published: D, L, N, K, F, V, the rotary base, and the factor.
PUBLISHED = {
    "Llama 7B": (
        {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-06,
         "vocab_size": -1},
        (4096, 32, 32, 32, 11008, 32000, 1e4, None),
    ),
    "Llama 2 70B": (
        {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64,
         "n_kv_heads": 8, "n_layers": 80, "norm_eps": 1e-05, "vocab_size": -1},
        (8192, 80, 64, 8, 28672, 32000, 1e4, None),
    ),
    "Llama 3 8B": (
        {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
         "multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0},
        (4096, 32, 32, 8, 14336, 128256, 5e5, None),
    ),
    "Llama 3.1 405B": (
        {"dim": 16384, "ffn_dim_multiplier": 1.2, "multiple_of": 4096, "n_heads": 128,
         "n_kv_heads": 8, "n_layers": 126, "norm_eps": 1e-05, "rope_theta": 500000.0,
         "use_scaled_rope": True, "vocab_size": 128256},
        (16384, 126, 128, 8, 53248, 128256, 5e5, 8.0),
    ),
    "Llama 3.2 1B": (
        {"dim": 2048, "ffn_dim_multiplier": 1.5, "multiple_of": 256, "n_heads": 32, "n_kv_heads": 8,
         "n_layers": 16, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
         "vocab_size": 128256},
        (2048, 16, 32, 8, 8192, 128256, 5e5, 32.0),
    ),
    "Llama 3.2 3B": (
        {"dim": 3072, "ffn_dim_multiplier": 1.0, "multiple_of": 256, "n_heads": 24, "n_kv_heads": 8,
         "n_layers": 28, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
         "vocab_size": 128256},
        (3072, 28, 24, 8, 8192, 128256, 5e5, 32.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_parameters_are_read_as_transformers_converts_them(values, expected):
    assert family_of(values, "params.json") is FAMILY
    config = read_config(FAMILY, values)
    layer = config.layer
    rotary = layer.rotary
    sizes = (layer.d_model, config.num_layers, layer.num_heads, layer.kv_heads, layer.d_ff)
    factor = rotary.factor if rotary.scaling == "llama3" else None
    assert (*sizes, config.vocab_size, rotary.base, factor) == expected
    assert config.tied == (factor == 32.0)
    # Back again: as they were, and from nothing but the config.
    assert write_config(FAMILY, config, values) == values
    fresh = json.loads(json.dumps(write_config(FAMILY, config)))
    assert read_config(FAMILY, fresh) == config
    assert "model_type" not in fresh


@pytest.mark.parametrize("inner", [1, 40, 63, 64, 65, 1000, 4097])
def test_any_inner_width_can_be_written(inner):
    config = read_config(FAMILY, params(6, 2))
    config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, d_ff=inner))
    assert read_config(FAMILY, write_config(FAMILY, config)) == config


def test_tied_tables_are_written_twice_and_checked():
    small = PUBLISHED["Llama 3.2 1B"][0] | {"n_layers": 16}
    rules = FAMILY.rules(read_config(FAMILY, small))
    table = np.ones((4, 2))
    same = {"tok_embeddings.weight": table, "output.weight": table.copy()}
    wanted = {"embedding.embedding": table.shape}
    assert convert(rules, same, wanted).keys() == wanted.keys()
    back = convert_back(rules, {"embedding.embedding": table}, {n: (4, 2) for n in same})
    assert back.keys() == same.keys()
    with pytest.raises(InputError, match="hold different numbers"):
        convert(rules, same | {"output.weight": table + 1}, wanted)


def test_a_stray_field_and_a_stray_tensor_are_refused():
    values = params(6, 2)
    with pytest.raises(InputError, match="'stray' is not known"):
        read_config(FAMILY, values | {"stray": 1})
    with pytest.raises(InputError, match="dim=0"):
        read_config(FAMILY, values | {"dim": 0})
    config = read_config(FAMILY, values)
    meta = tensors(values) | {"layers.0.attention.inner_attention.rope.freqs": np.ones(2)}
    assert convert(FAMILY.rules(config), meta, shapes_of(config))
    with pytest.raises(InputError, match=r"layers\.0\.attention\.stray"):
        convert(
            FAMILY.rules(config), meta | {"layers.0.attention.stray": np.ones(2)}, shapes_of(config)
        )
