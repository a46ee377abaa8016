"""T5 1.0 (ReLU, one table, scaled logits) and 1.1, Flan-T5 (gated, a head of its own)."""

import dataclasses

from jax_transformer.config import EncoderDecoderConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config, Family, Map, Values, get
from jax_transformer.porting.families.entries import Spelled
from jax_transformer.porting.families.halves import OLD, Pair, both
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """`feed_forward_proj`: a nonlinearity, `gated-` before it or not; `gated-gelu` is that of tanh.

    The other two fields are what `transformers` makes of it, and must be.
    """

    fields: tuple[str, ...] = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(self, values: Values) -> Values:
        whole = values.get("feed_forward_proj", "relu")
        gated, name = whole.startswith("gated-"), whole.removeprefix("gated-")
        name = "gelu_new" if whole == "gated-gelu" else name
        if name not in ACTIVATIONS:
            raise InputError(f"feed_forward_proj={whole!r} is not known")
        for field, value in (("dense_act_fn", name), ("is_gated_act", gated)):
            if values.get(field, value) != value:
                raise InputError(
                    f"{field}={values[field]!r} contradicts feed_forward_proj={whole!r}"
                )
        settings = {"activation": ACTIVATIONS[name], "gated": gated}
        return {path: value for key, value in settings.items() for path in both(key)}

    def write(self, config: Config) -> Values:
        activation, gated = get(config, "encoder.activation"), get(config, "encoder.gated")
        if (activation, gated) == ("gelu_tanh", True):
            return {"feed_forward_proj": "gated-gelu"}
        if (activation, gated) == ("gelu", True):
            raise InputError("encoder.activation='gelu', gated: feed_forward_proj has no name")
        name = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)
        return {"feed_forward_proj": f"gated-{name}" if gated else name}


@dataclasses.dataclass(frozen=True)
class Head:
    """1.0 multiplies by D^-0.5 and projects by its table, 1.1 does neither.

    Old files say so by `tie_word_embeddings` alone. `transformers` 5 writes
    `scale_decoder_outputs`, and of every model that it is tied.
    """

    fields: tuple[str, ...] = ("scale_decoder_outputs", "tie_word_embeddings")

    def read(self, values: Values) -> Values:
        tie = values.get("tie_word_embeddings", True)
        scaled = values.get("scale_decoder_outputs", tie)
        if scaled and not tie:
            raise InputError(
                "tie_word_embeddings=False with scale_decoder_outputs=True: no T5 is so"
            )
        width = values.get("d_model", values.get("hidden_size", 512))
        return {"tied": scaled, "logit_scale": width**-0.5 if scaled else 1.0}

    def write(self, config: Config) -> Values:
        return dict.fromkeys(self.fields, get(config, "tied"))


FIELDS = (
    Map("vocab_size", ("src_vocab_size", "tgt_vocab_size"), 32128),
    Spelled(Map("d_model", both("d_model"), 512), {"hidden_size": "d_model"}),
    Spelled(Map("d_kv", both("head_dim"), 64), {"head_dim": "d_kv"}),
    Map("d_ff", both("d_ff"), 2048),
    Spelled(
        Pair(
            Map("num_layers", "num_encoder_layers", 6),
            Map("num_decoder_layers", "num_decoder_layers"),
        ),
        {"num_hidden_layers": "num_layers"},
    ),
    Spelled(Map("num_heads", both("num_heads"), 8), {"num_attention_heads": "num_heads"}),
    Map("relative_attention_num_buckets", "relative_buckets", 32),
    Map("relative_attention_max_distance", "relative_max_distance", 128),
    Map("n_positions", "max_len", 512),
    Map("dropout_rate", both("dropout"), 0.1, float),
    Map("layer_norm_epsilon", both("norm_epsilon"), 1e-6),
    FeedForward(),
    Head(),
    *OLD,
)

BLOCKS = {
    "norm": "rms",
    "placement": "pre",
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "attention_scale": 1.0,
}

FIXED = {
    "position": "t5",
    "encoder.causal": False,
    "decoder.causal": True,
    "final_dropout": True,
    "shared_embedding": True,
    "head_bias": False,
    **{path: value for name, value in BLOCKS.items() for path in both(name)},
}


def rules(config: EncoderDecoderConfig) -> Rules:
    """Tensor names of `T5ForConditionalGeneration`."""
    table: Rules = (
        Rule("shared.weight", "decoder.embedding.embedding"),
        Alias("encoder.embed_tokens.weight", "shared.weight"),
        Alias("decoder.embed_tokens.weight", "shared.weight"),
        *half("encoder", 2),
        *half("decoder", 3),
        Ignore(
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            "old files have it, but attention to the encoder knows no positions",
        ),
    )
    if config.tied:
        return (*table, Alias("lm_head.weight", "shared.weight"))
    return (*table, Rule("lm_head.weight", "output_proj.kernel", (Transpose(),)))


def half(name: str, sublayers: int) -> Rules:
    """The blocks of one half, and what surrounds them."""
    theirs, ours = name + ".block.{i}.layer.", name + ".layers.{i}."
    feed_forward = f"{theirs}{sublayers - 1}.DenseReluDense."
    table: Rules = (
        Rule(
            name + ".block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            name + ".position_bias.relative_attention_bias.embedding",
        ),
        Rule(name + ".final_layer_norm.weight", name + ".norm.scale"),
        *attention(theirs + "0.SelfAttention.", ours + "self_attn."),
        *(
            Rule(feed_forward + there + ".weight", ours + "ffn." + here + ".kernel", (Transpose(),))
            for there, here in (
                ("wi_0", "gate_proj"),
                ("wi_1", "up_proj"),
                ("wi", "linear1"),
                ("wo", "linear2"),
                ("wo", "down_proj"),
            )
        ),
        *(
            Rule(f"{theirs}{number}.layer_norm.weight", f"{ours}norm{number + 1}.scale")
            for number in range(sublayers)
        ),
    )
    if name == "encoder":
        return table
    return (*table, *attention(theirs + "1.EncDecAttention.", ours + "cross_attn."))


def attention(source: str, target: str) -> Rules:
    """The four projections."""
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    return tuple(
        Rule(source + there + ".weight", target + here + ".kernel", (Transpose(),))
        for there, here in names.items()
    )


FAMILY = Family(
    name="t5",
    model_types=("t5",),
    architecture="T5ForConditionalGeneration",
    config=EncoderDecoderConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
