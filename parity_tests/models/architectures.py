"""Small configurations of every architecture, by name, and any combination of options."""

from hypothesis import strategies as st

from jax_transformer.config import DecoderOnlyConfig, LayerConfig, RotaryConfig
from parity_tests.inputs import MAX_LEN, D, F, N, V

ROTARY = RotaryConfig(pairing="half")
BARE = {"qkv_bias": False, "out_bias": False, "ffn_bias": False}
GATED = {"norm": "rms", "activation": "silu", "gated": True, **BARE}
OFFSET = {"norm_unit_offset": True, "norm_scale_in_float32": True}
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_max_len": 64}


GEMMA_3 = {"placement": "sandwich", "query_key_norm": "head", "rotary": ROTARY}
LOCAL_ROTARY = RotaryConfig(pairing="half", base=20.0)


def layer_of(settings):
    """A block of the sizes of all cases."""
    sizes = {"d_model": D, "num_heads": N, "d_ff": F, "causal": True}
    return LayerConfig(**{**sizes, **dict(settings)})


def decoder(layer=(), *, num_layers=1, **model):
    """A configuration of the sizes of all cases."""
    model = {"vocab_size": V, "num_layers": num_layers, "max_len": MAX_LEN, **model}
    return DecoderOnlyConfig(**model, layer=layer_of(layer))


CONFIGS = {
    "GPT-2": decoder({"activation": "gelu_tanh"}, position="learned", tied=True, num_layers=2),
    "OPT": decoder({"activation": "relu"}, position="learned", tied=True, position_offset=2),
    "GPT of 2018": decoder({"placement": "post"}, position="learned", final_norm=False),
    "sinusoidal": decoder(position="sinusoidal", embedding_scale=3.0, head_bias=True),
    "no positions": decoder(position="none"),
    "Llama": decoder(
        {**GATED, "num_kv_heads": 2, "rotary": ROTARY}, position="rotary", num_layers=2
    ),
    "Llama 3.1": decoder(
        {**GATED, "num_kv_heads": 1, "head_dim": 6, "rotary": RotaryConfig(**LLAMA3)},
        position="rotary",
        tied=True,
    ),
    "Qwen 3": decoder(
        {**GATED, "num_kv_heads": 2, "head_dim": 8, "query_key_norm": "head", "rotary": ROTARY},
        position="rotary",
        tied=True,
    ),
    "OLMo 2": decoder(
        {**GATED, "placement": "output", "query_key_norm": "full", "rotary": ROTARY},
        position="rotary",
    ),
    "Mistral": decoder(
        {**GATED, "num_kv_heads": 2, "window": 3, "rotary": ROTARY}, position="rotary"
    ),
    "Gemma 2": decoder(
        {
            **GATED,
            **OFFSET,
            "placement": "sandwich",
            "activation": "gelu_tanh",
            "attention_soft_cap": 5.0,
            "attention_scale": 0.6,
            "rotary": ROTARY,
        },
        position="rotary",
        embedding_scale=True,
        tied=True,
        logit_soft_cap=6.0,
    ),
    "Gemma 3": decoder(
        {**GATED, **OFFSET, **GEMMA_3},
        position="rotary",
        num_layers=3,
        local_layer=layer_of({**GATED, **OFFSET, **GEMMA_3, "window": 2, "rotary": LOCAL_ROTARY}),
        local_layers=(0, 2),
    ),
    "GPT-J": decoder(
        {
            "placement": "parallel",
            "qkv_bias": False,
            "out_bias": False,
            "activation": "gelu_tanh",
            "rotary": RotaryConfig(pairing="adjacent", width=2),
        },
        position="rotary",
        head_bias=True,
    ),
    "GPT-NeoX": decoder(
        {"placement": "parallel", "parallel_norms": 2, "rotary": RotaryConfig(width=2)},
        position="rotary",
    ),
    "BLOOM": decoder(position="alibi", tied=True, embedding_norm=True, num_layers=2),
    "BLOOM of 6 heads": decoder({"d_model": 18, "num_heads": 6}, position="alibi"),
    "T5's bias": decoder(
        {**BARE, "norm": "rms", "attention_scale": 1.0},
        position="t5",
        relative_buckets=8,
        relative_max_distance=6,
    ),
}


@st.composite
def configs(draw):
    """Any combination of options."""
    position = draw(st.sampled_from(["none", "sinusoidal", "learned", "rotary", "alibi", "t5"]))
    norm = draw(st.sampled_from(["layer", "rms"]))
    rms = norm == "rms"
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    rotary = RotaryConfig(
        pairing=draw(st.sampled_from(["adjacent", "half"])),
        width=draw(st.sampled_from([None, 2, 4])),
        **draw(
            st.sampled_from(
                [
                    {},
                    {"scaling": "linear", "factor": 2.0},
                    {"scaling": "yarn", "factor": 4.0, "original_max_len": 64},
                    LLAMA3,
                ]
            )
        ),
    )
    flag = st.booleans()
    qkv_bias = draw(flag)
    return decoder(
        {
            "num_kv_heads": kv_heads,
            "head_dim": draw(st.sampled_from([4, 6])),
            "norm": norm,
            "norm_bias": draw(flag),
            "norm_unit_offset": rms and draw(flag),
            "norm_scale_in_float32": rms and draw(flag),
            "placement": draw(st.sampled_from(["post", "pre", "output", "sandwich", "parallel"])),
            "parallel_norms": draw(st.sampled_from([1, 2])),
            "query_key_norm": draw(st.sampled_from(["none", "head", "full"])),
            "qkv_bias": qkv_bias,
            "key_bias": not qkv_bias or draw(flag),
            "out_bias": draw(flag),
            "ffn_bias": draw(flag),
            "attention_scale": draw(st.sampled_from([None, 0.7])),
            "attention_soft_cap": draw(st.sampled_from([None, 4.0])),
            "window": draw(st.sampled_from([None, 3])),
            "activation": draw(
                st.sampled_from(["gelu", "gelu_tanh", "relu", "silu", "quick_gelu", "sigmoid"])
            ),
            "gated": draw(flag),
            "rotary": rotary if position == "rotary" else None,
        },
        position=position,
        embedding_norm=draw(flag),
        final_norm=draw(flag),
        tied=draw(flag),
        head_bias=draw(flag),
        logit_soft_cap=draw(st.sampled_from([None, 5.0])),
        embedding_scale=draw(st.sampled_from([False, True, 3.0])),
    )
