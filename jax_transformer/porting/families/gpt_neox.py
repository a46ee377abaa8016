"""GPT-NeoX and Pythia."""

import dataclasses
import math

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config, Family, Map, Skip, Values, choice, get
from jax_transformer.porting.families.entries import Dropouts, query_key_value
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.families.rotary import Rope
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules


@dataclasses.dataclass(frozen=True)
class PartialRope:
    """The rotation of the leading `partial_rotary_factor` of each head, once called `rotary_pct`,
    with a base that was once called `rotary_emb_base`."""

    rope: Rope = dataclasses.field(default_factory=Rope)
    factor: float = 0.25

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.rope.fields, "rotary_pct", "rotary_emb_base")

    def read(self, values: Values) -> Values:
        parameters = values.get("rope_parameters") or {}
        factor = parameters.get("partial_rotary_factor", values.get("rotary_pct", self.factor))
        base = values.get("rope_theta", values.get("rotary_emb_base"))
        head = values.get("hidden_size", 6144) // values.get("num_attention_heads", 64)
        if not isinstance(factor, int | float) or not 0 < factor <= 1:
            raise InputError(f"rotary_pct={factor!r}: must be above 0, and at most 1")
        renamed = values if base is None else values | {"rope_theta": base}
        return self.rope.read(renamed) | {"layer.rotary.width": int(head * factor)}

    def write(self, config: Config) -> Values:
        layer = get(config, "layer")
        width = layer.rotary.width or layer.head_width
        factor = width / layer.head_width
        while int(layer.head_width * factor) < width:  # a quotient that was rounded down
            factor = math.nextafter(factor, math.inf)
        written = self.rope.write(config)
        return {"rope_parameters": written["rope_parameters"] | {"partial_rotary_factor": factor}}


FIELDS = (
    Map("vocab_size", "vocab_size", 50432),
    Map("hidden_size", "layer.d_model", 6144),
    Map("intermediate_size", "layer.d_ff", 24576),
    Map("num_hidden_layers", "num_layers", 44),
    Map("num_attention_heads", "layer.num_heads", 64),
    Map("max_position_embeddings", "max_len", 2048),
    Map("layer_norm_eps", "layer.norm_epsilon", 1e-5),
    Map("attention_bias", ("layer.qkv_bias", "layer.out_bias"), True),
    Map("tie_word_embeddings", "tied", False),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "gelu"),
    choice("use_parallel_residual", "layer.placement", {True: "parallel", False: "pre"}, True),
    PartialRope(),
    Dropouts(("hidden_dropout", "attention_dropout"), 0.0),
    Skip(("classifier_dropout",), "about a head for classes, which is not built"),
)

FIXED = {
    "position": "rotary",
    "layer.causal": True,
    "layer.parallel_norms": 2,
    "layer.rotary.pairing": "half",
}


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `GPTNeoXForCausalLM`."""
    layer, ours = "gpt_neox.layers.{i}.", "layers.{i}."
    table: Rules = (
        Rule("gpt_neox.embed_in.weight", "embedding.embedding"),
        Rule("gpt_neox.final_layer_norm.weight", "norm.scale"),
        Rule("gpt_neox.final_layer_norm.bias", "norm.bias"),
        Rule(layer + "input_layernorm.weight", ours + "norm1.scale"),
        Rule(layer + "input_layernorm.bias", ours + "norm1.bias"),
        Rule(layer + "post_attention_layernorm.weight", ours + "norm2.scale"),
        Rule(layer + "post_attention_layernorm.bias", ours + "norm2.bias"),
        *query_key_value(
            layer + "attention.query_key_value",
            ours + "self_attn",
            config.layer.d_model,
            groups=config.layer.num_heads,
        ),
        Rule(layer + "attention.dense.weight", ours + "self_attn.out_proj.kernel", (Transpose(),)),
        Rule(layer + "attention.dense.bias", ours + "self_attn.out_proj.bias"),
        Rule(layer + "mlp.dense_h_to_4h.weight", ours + "ffn.linear1.kernel", (Transpose(),)),
        Rule(layer + "mlp.dense_h_to_4h.bias", ours + "ffn.linear1.bias"),
        Rule(layer + "mlp.dense_4h_to_h.weight", ours + "ffn.linear2.kernel", (Transpose(),)),
        Rule(layer + "mlp.dense_4h_to_h.bias", ours + "ffn.linear2.bias"),
        Ignore(layer + "attention.bias", "the causal mask, which needs no table here"),
        Ignore(layer + "attention.masked_bias", "what masked scores were set to"),
        Ignore("{path*}rotary_emb.inv_freq", "the config determines it"),
    )
    # `embed_out` in files, `lm_head` within `transformers`.
    if config.tied:
        names = ("embed_out.weight", "lm_head.weight")
        return (*(Alias(name, "gpt_neox.embed_in.weight") for name in names), *table)
    return (
        *table,
        Rule("embed_out.weight", "output_proj.kernel", (Transpose(),)),
        Rule("lm_head.weight", "output_proj.kernel", (Transpose(),)),
    )


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    architecture="GPTNeoXForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
