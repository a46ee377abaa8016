"""What float64 cannot show: in which order a family rounds, in bfloat16."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from jax_transformer.layers.normalization import make_norm
from jax_transformer.models.parameters import cast_model, flatten, unflatten
from jax_transformer.porting.families import (
    gemma,
    gemma2,
    gemma3,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    t5,
)
from jax_transformer.porting.families.base import read_config
from parity_tests.harness import QUICK
from parity_tests.porting.families.harness import skeleton

WIDTH = 256
SIZES = {
    "vocab_size": 24, "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
}  # fmt: skip

NORMS: tuple[tuple[Any, Any], ...] = (
    (llama, LlamaRMSNorm), (mistral, MistralRMSNorm), (qwen2, Qwen2RMSNorm), (qwen3, Qwen3RMSNorm),
    (phi3, Phi3RMSNorm), (olmo2, Olmo2RMSNorm), (gemma, GemmaRMSNorm), (gemma2, Gemma2RMSNorm),
    (gemma3, Gemma3RMSNorm), (t5, T5LayerNorm),
)  # fmt: skip


def bits(array) -> np.ndarray:
    return np.asarray(jnp.asarray(array, jnp.bfloat16)).view(np.uint16)


@pytest.mark.parametrize(("module", "build"), NORMS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_norm_rounds_where_that_of_transformers_does(module, build):
    values = SIZES if module is not t5 else {"d_model": 24, "num_heads": 2}
    if module is phi3:
        values = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config: Any = read_config(module.FAMILY, values)
    layer = config.encoder if module is t5 else config.layer
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, WIDTH)).astype(np.float32)
    weight = 15.8125 * rng.standard_normal(WIDTH).astype(np.float32)
    theirs = build(WIDTH, eps=layer.norm_epsilon).to(torch.bfloat16)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(weight))
        expected = theirs(torch.from_numpy(x).to(torch.bfloat16)).view(torch.uint16).numpy()
    ours = cast_model(make_norm(layer, WIDTH), jnp.bfloat16)
    ours.scale[...] = jnp.asarray(weight, jnp.bfloat16)
    found = bits(ours(jnp.asarray(x, jnp.bfloat16)))
    # Float32 before the rounding differs by an ulp here and there; another order does in a quarter.
    assert (found != expected).mean() < 1e-3


@pytest.mark.parametrize("module", [gemma, gemma2, gemma3])
def test_the_scale_of_embeddings_is_rounded_first(module):
    # Of a model whose layers add nothing and whose logits are what they are given.
    config: Any = read_config(module.FAMILY, SIZES | {"tie_word_embeddings": False})
    config = dataclasses.replace(config, final_norm=False, logit_soft_cap=None)
    table = torch.randn(24, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    graphdef, shapes, buffers = skeleton(config)
    leaves = {name: np.zeros(leaf.shape) for name, leaf in flatten(shapes).items()}
    leaves |= {"embedding.embedding": table.float().numpy(), "output_proj.kernel": np.eye(24)}
    bits = {name: jnp.asarray(leaf, jnp.bfloat16) for name, leaf in leaves.items()}
    model = nnx.merge(graphdef, unflatten(bits, shapes), buffers)
    expected = table * torch.tensor(24**0.5, dtype=torch.bfloat16)
    assert not torch.equal(expected, (table.float() * 24**0.5).to(torch.bfloat16))
    run = jax.jit(lambda ids: model(ids), compiler_options=QUICK)
    found = run(jnp.arange(24, dtype=jnp.int32)[None])[0]
    np.testing.assert_array_equal(np.asarray(found), expected.float().numpy())
