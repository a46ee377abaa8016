"""BERT: with its head for masked tokens, or bare with a pooler (sentence embeddings, MiniLM)."""

from jax_transformer.config import EncoderOnlyConfig
from jax_transformer.porting.families.base import Family, Map, Require, Skip, choice
from jax_transformer.porting.families.entries import Architectures, Dropouts
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules

BODY = (
    Map("hidden_size", "layer.d_model", 768),
    Map("num_hidden_layers", "num_layers", 12),
    Map("num_attention_heads", "layer.num_heads", 12),
    Map("intermediate_size", "layer.d_ff", 3072),
    Map("type_vocab_size", "token_types", 2),
    Map("layer_norm_eps", "layer.norm_epsilon", 1e-12),
    Dropouts(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1),
    Require("tie_word_embeddings", True, "logits of masked tokens are through the embeddings"),
    Require("position_embedding_type", "absolute", "relative positions are not built in here"),
    Require("is_decoder", False, "an encoder that sees only earlier tokens is not built"),
    Require("add_cross_attention", False, "attention to another encoder is not built"),
    Require("pruned_heads", {}, "layers with different numbers of heads are not built"),
    Skip(("classifier_dropout",), "about a head for classes, which is not built"),
    Skip(("output_past", "torchscript", "use_bfloat16"), "about how old versions ran the model"),
    Skip(
        ("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
         "pooler_size_per_head", "pooler_type"),
        "never read",
    ),
)  # fmt: skip
"""What RoBERTa's config says in the same words."""

FIELDS = (
    *BODY,
    Map("vocab_size", "vocab_size", 30522),
    Map("max_position_embeddings", "max_len", 512),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "gelu"),
    choice("hidden_act", "head_activation", ACTIVATIONS, "gelu"),
    Architectures(
        {
            "BertForMaskedLM": {"token_head": True, "pooler": False},
            "BertModel": {"token_head": False, "pooler": True},
        },
        "BertForMaskedLM",
    ),
)

FIXED = {
    "position": "learned",
    "embedding_norm": True,
    "final_norm": False,
    "layer.causal": False,
    "layer.placement": "post",
}


def rules(config: EncoderOnlyConfig) -> Rules:
    """Tensor names of `BertForMaskedLM`, or of `BertModel`, which lack the `bert.`."""
    head = "cls.predictions."
    if not config.token_head:
        headless = Ignore("cls.{rest*}", "the architecture has no head")
        return (*body(config, ""), *body(config, "bert."), headless)
    return (
        Alias(head + "decoder.weight", "bert.embeddings.word_embeddings.weight"),
        Alias(head + "decoder.bias", head + "bias"),
        *body(config, "bert."),
        *body(config, ""),
        *affine(head + "transform.dense", "token_head.dense"),
        *norm(head + "transform.LayerNorm", "token_head.norm"),
        Rule(head + "bias", "token_head.output_proj.bias"),
        Ignore("cls.seq_relationship.{kind}", "the head for the next sentence is not built"),
    )


def body(config: EncoderOnlyConfig, prefix: str) -> Rules:
    """What comes before a head, under names with that prefix."""
    tables, layer, ours = prefix + "embeddings.", prefix + "encoder.layer.{i}.", "layers.{i}."
    attention = layer + "attention."
    table: Rules = (
        Rule(tables + "word_embeddings.weight", "embedding.embedding"),
        Rule(tables + "position_embeddings.weight", "pos_encoding.pos_embedding.embedding"),
        Rule(tables + "token_type_embeddings.weight", "token_type_embedding.embedding"),
        *norm(tables + "LayerNorm", "embedding_norm"),
        *affine(attention + "self.query", ours + "self_attn.q_proj"),
        *affine(attention + "self.key", ours + "self_attn.k_proj"),
        *affine(attention + "self.value", ours + "self_attn.v_proj"),
        *affine(attention + "output.dense", ours + "self_attn.out_proj"),
        *norm(attention + "output.LayerNorm", ours + "norm1"),
        *affine(layer + "intermediate.dense", ours + "ffn.linear1"),
        *affine(layer + "output.dense", ours + "ffn.linear2"),
        *norm(layer + "output.LayerNorm", ours + "norm2"),
        Ignore(tables + "position_ids", "0, 1, 2, ..."),
        Ignore(tables + "token_type_ids", "zeros"),
    )
    if config.pooler:
        return (*table, *affine(prefix + "pooler.dense", "pooler"))
    return (*table, Ignore(prefix + "pooler.dense.{kind}", "the architecture has no pooler"))


def affine(source: str, target: str) -> Rules:
    """A matrix and a bias."""
    return (
        Rule(source + ".weight", target + ".kernel", (Transpose(),)),
        Rule(source + ".bias", target + ".bias"),
    )


def norm(source: str, target: str) -> Rules:
    """A LayerNorm; files made of TensorFlow's call its parameters gamma and beta."""
    return (
        Rule(source + ".weight", target + ".scale"),
        Rule(source + ".bias", target + ".bias"),
        Rule(source + ".gamma", target + ".scale"),
        Rule(source + ".beta", target + ".bias"),
    )


FAMILY = Family(
    name="bert",
    model_types=("bert",),
    architecture="BertForMaskedLM",
    config=EncoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
