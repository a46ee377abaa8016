"""Models of `transformers`, run in float64 throughout, and their weights under our names.

Each architecture is a table of names, written by hand from its modelling file: it shares nothing
with the porting rules.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any

import torch
from transformers import modeling_rope_utils
from transformers.models.bert import modeling_bert
from transformers.models.bloom import modeling_bloom
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from jax_transformer.verification.oracle import widened

MODULES = (
    modeling_bert,
    modeling_bloom,
    modeling_gpt2,
    modeling_gpt_neox,
    modeling_gptj,
    modeling_llama,
    modeling_qwen3,
    modeling_rope_utils,
)

Tensors = dict[str, torch.Tensor]
Names = Sequence[tuple[str | tuple[str, ...], str]]


@contextlib.contextmanager
def float64(modules: Sequence[ModuleType] = MODULES) -> Generator[None]:
    """Inside, the models of those modules compute every norm, angle and softmax in float64, and
    quotients of whole numbers too."""
    narrow = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with widened(modules):
            yield
    finally:
        torch.set_default_dtype(narrow)


def make_model(build: Callable[[Any], torch.nn.Module], config: Any) -> torch.nn.Module:
    """The model in float64 and evaluation mode, with weights under which faults show."""
    config._attn_implementation = "eager"
    with float64():
        model = build(config).double().eval()
    for module in model.modules():
        if isinstance(module, modeling_bloom.BloomMLP):
            # Theirs has sqrt(2 / pi) to eight digits.
            module.register_module("gelu_impl", torch.nn.GELU(approximate="tanh"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                parameter.copy_(float(name.endswith("weight")) + 0.3 * noise)
            else:
                parameter.copy_(1.5 * config.hidden_size**-0.5 * noise)
    return model


def thirds(fused: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Rows `[Q | K | V]`."""
    return list(fused.chunk(3))


def per_head(fused: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Rows `[q_0 k_0 v_0 | q_1 k_1 v_1 | ...]`."""
    parts = fused.unflatten(0, (heads, 3, -1))
    return [parts[:, part].flatten(0, 1) for part in range(3)]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Names of modules here and there; several names here: a fused projection there."""

    names: Names
    split: Callable[[torch.Tensor, int], list[torch.Tensor]] = thirds
    transposed: bool = False
    """Matrices of the layers are `[in, out]` (GPT-2's `Conv1D`)."""

    def weights(self, model: torch.nn.Module, layers: int, heads: int) -> Tensors:
        """The parameters of `model` under our names; every one, once."""
        theirs = dict(model.named_parameters())
        ours: Tensors = {}
        left = set(theirs)
        for layer in range(layers):
            for here, there in self.names:
                for kind in ("weight", "bias"):
                    name = f"{there.format(layer)}.{kind}"
                    if name not in left:
                        continue
                    left.remove(name)
                    tensor = theirs[name].detach()
                    if self.transposed and "{}" in there and tensor.dim() == 2:
                        tensor = tensor.T
                    fused = not isinstance(here, str)
                    parts = self.split(tensor, heads) if fused else [tensor]
                    for place, part in zip(here if fused else [here], parts, strict=True):
                        ours[f"{place.format(layer)}.{kind}"] = part
        assert not left, f"not copied: {sorted(left)}"
        return ours


QKV = tuple(f"layers.{{}}.self_attn.{part}_proj" for part in "qkv")

LLAMA = Architecture(
    (
        ("embedding", "model.embed_tokens"),
        ("layers.{}.norm1", "model.layers.{}.input_layernorm"),
        ("layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.q_proj"),
        ("layers.{}.self_attn.k_proj", "model.layers.{}.self_attn.k_proj"),
        ("layers.{}.self_attn.v_proj", "model.layers.{}.self_attn.v_proj"),
        ("layers.{}.self_attn.out_proj", "model.layers.{}.self_attn.o_proj"),
        ("layers.{}.self_attn.q_norm", "model.layers.{}.self_attn.q_norm"),
        ("layers.{}.self_attn.k_norm", "model.layers.{}.self_attn.k_norm"),
        ("layers.{}.norm2", "model.layers.{}.post_attention_layernorm"),
        ("layers.{}.ffn.gate_proj", "model.layers.{}.mlp.gate_proj"),
        ("layers.{}.ffn.up_proj", "model.layers.{}.mlp.up_proj"),
        ("layers.{}.ffn.down_proj", "model.layers.{}.mlp.down_proj"),
        ("norm", "model.norm"),
        ("output_proj", "lm_head"),
    )
)

GPT2 = Architecture(
    (
        ("embedding", "transformer.wte"),
        ("pos_encoding.pos_embedding", "transformer.wpe"),
        ("layers.{}.norm1", "transformer.h.{}.ln_1"),
        (QKV, "transformer.h.{}.attn.c_attn"),
        ("layers.{}.self_attn.out_proj", "transformer.h.{}.attn.c_proj"),
        ("layers.{}.norm2", "transformer.h.{}.ln_2"),
        ("layers.{}.ffn.linear1", "transformer.h.{}.mlp.c_fc"),
        ("layers.{}.ffn.linear2", "transformer.h.{}.mlp.c_proj"),
        ("norm", "transformer.ln_f"),
        ("output_proj", "lm_head"),
    ),
    transposed=True,
)

BLOOM = Architecture(
    (
        ("embedding", "transformer.word_embeddings"),
        ("embedding_norm", "transformer.word_embeddings_layernorm"),
        ("layers.{}.norm1", "transformer.h.{}.input_layernorm"),
        (QKV, "transformer.h.{}.self_attention.query_key_value"),
        ("layers.{}.self_attn.out_proj", "transformer.h.{}.self_attention.dense"),
        ("layers.{}.norm2", "transformer.h.{}.post_attention_layernorm"),
        ("layers.{}.ffn.linear1", "transformer.h.{}.mlp.dense_h_to_4h"),
        ("layers.{}.ffn.linear2", "transformer.h.{}.mlp.dense_4h_to_h"),
        ("norm", "transformer.ln_f"),
        ("output_proj", "lm_head"),
    ),
    split=per_head,
)

GPT_NEOX = Architecture(
    (
        ("embedding", "gpt_neox.embed_in"),
        ("layers.{}.norm1", "gpt_neox.layers.{}.input_layernorm"),
        (QKV, "gpt_neox.layers.{}.attention.query_key_value"),
        ("layers.{}.self_attn.out_proj", "gpt_neox.layers.{}.attention.dense"),
        ("layers.{}.norm2", "gpt_neox.layers.{}.post_attention_layernorm"),
        ("layers.{}.ffn.linear1", "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        ("layers.{}.ffn.linear2", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
        ("norm", "gpt_neox.final_layer_norm"),
        ("output_proj", "lm_head"),
    ),
    split=per_head,
)

GPTJ = Architecture(
    (
        ("embedding", "transformer.wte"),
        ("layers.{}.norm1", "transformer.h.{}.ln_1"),
        ("layers.{}.self_attn.q_proj", "transformer.h.{}.attn.q_proj"),
        ("layers.{}.self_attn.k_proj", "transformer.h.{}.attn.k_proj"),
        ("layers.{}.self_attn.v_proj", "transformer.h.{}.attn.v_proj"),
        ("layers.{}.self_attn.out_proj", "transformer.h.{}.attn.out_proj"),
        ("layers.{}.ffn.linear1", "transformer.h.{}.mlp.fc_in"),
        ("layers.{}.ffn.linear2", "transformer.h.{}.mlp.fc_out"),
        ("norm", "transformer.ln_f"),
        ("output_proj", "lm_head"),
    )
)

BERT = Architecture(
    (
        ("embedding", "bert.embeddings.word_embeddings"),
        ("pos_encoding.pos_embedding", "bert.embeddings.position_embeddings"),
        ("token_type_embedding", "bert.embeddings.token_type_embeddings"),
        ("embedding_norm", "bert.embeddings.LayerNorm"),
        ("layers.{}.self_attn.q_proj", "bert.encoder.layer.{}.attention.self.query"),
        ("layers.{}.self_attn.k_proj", "bert.encoder.layer.{}.attention.self.key"),
        ("layers.{}.self_attn.v_proj", "bert.encoder.layer.{}.attention.self.value"),
        ("layers.{}.self_attn.out_proj", "bert.encoder.layer.{}.attention.output.dense"),
        ("layers.{}.norm1", "bert.encoder.layer.{}.attention.output.LayerNorm"),
        ("layers.{}.ffn.linear1", "bert.encoder.layer.{}.intermediate.dense"),
        ("layers.{}.ffn.linear2", "bert.encoder.layer.{}.output.dense"),
        ("layers.{}.norm2", "bert.encoder.layer.{}.output.LayerNorm"),
        ("pooler", "bert.pooler.dense"),
        ("token_head.dense", "cls.predictions.transform.dense"),
        ("token_head.norm", "cls.predictions.transform.LayerNorm"),
        ("token_head.output_proj", "cls.predictions"),
        ("next_sentence", "cls.seq_relationship"),
    )
)
