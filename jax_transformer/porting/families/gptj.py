"""GPT-J."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families.base import Family, Map, choice
from jax_transformer.porting.families.entries import Dropouts, Spelled, Widths, with_prefix
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules

FIELDS = (
    Map("vocab_size", "vocab_size", 50400),
    Spelled(Map("n_positions", "max_len", 2048), {"max_position_embeddings": "n_positions"}),
    Spelled(Widths("n_embd", "n_inner", 4096), {"hidden_size": "n_embd"}),
    Spelled(Map("n_layer", "num_layers", 28), {"num_hidden_layers": "n_layer"}),
    Spelled(Map("n_head", "layer.num_heads", 16), {"num_attention_heads": "n_head"}),
    Map("rotary_dim", "layer.rotary.width", 64),
    choice("activation_function", "layer.activation", ACTIVATIONS, "gelu_new"),
    Map("layer_norm_epsilon", "layer.norm_epsilon", 1e-5),
    Dropouts(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    Map("tie_word_embeddings", "tied", False),
)

FIXED = {
    "position": "rotary",
    "head_bias": True,
    "layer.causal": True,
    "layer.placement": "parallel",
    "layer.qkv_bias": False,
    "layer.out_bias": False,
    "layer.rotary.pairing": "adjacent",
}


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `GPTJForCausalLM`."""
    layer, ours = "transformer.h.{i}.", "layers.{i}."
    table: Rules = (
        Rule("transformer.wte.weight", "embedding.embedding"),
        Rule("transformer.ln_f.weight", "norm.scale"),
        Rule("transformer.ln_f.bias", "norm.bias"),
        Rule(layer + "attn.{name}.weight", ours + "self_attn.{name}.kernel", (Transpose(),)),
        Rule(layer + "ln_1.weight", ours + "norm1.scale"),
        Rule(layer + "ln_1.bias", ours + "norm1.bias"),
        Rule(layer + "mlp.fc_in.weight", ours + "ffn.linear1.kernel", (Transpose(),)),
        Rule(layer + "mlp.fc_in.bias", ours + "ffn.linear1.bias"),
        Rule(layer + "mlp.fc_out.weight", ours + "ffn.linear2.kernel", (Transpose(),)),
        Rule(layer + "mlp.fc_out.bias", ours + "ffn.linear2.bias"),
        Ignore(layer + "attn.bias", "the causal mask, which needs no table here"),
        Ignore(layer + "attn.masked_bias", "what masked scores were set to"),
        Ignore(layer + "attn.embed_positions", "the config determines it"),
    )
    bias = Rule("lm_head.bias", "output_proj.bias")
    if config.tied:
        head: Rules = (Alias("lm_head.weight", "transformer.wte.weight"), bias)
    else:
        head = (Rule("lm_head.weight", "output_proj.kernel", (Transpose(),)), bias)
    return (*head, *with_prefix(table, "transformer."))


FAMILY = Family(
    name="gptj",
    model_types=("gptj",),
    architecture="GPTJForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
