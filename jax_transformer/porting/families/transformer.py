"""Any module of `torch_reference`, and with it every checkpoint of the lecture document's script.

The two packages have the same names but for the last part: what PyTorch calls `weight` goes by what
its module is, and that is in the module's name.
"""

from jax_transformer.config import ModelConfig
from jax_transformer.porting.families.base import Family
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Rule

RULES = (
    Rule("{path*}norm.weight", "{path*}norm.scale"),
    Rule("{path*}norm{number}.weight", "{path*}norm{number}.scale"),
    Rule("{path*}embedding.weight", "{path*}embedding.embedding"),
    Rule(
        "{path*}relative_attention_bias.weight",
        "{path*}relative_attention_bias.embedding",
    ),
    Rule("{path*}.weight", "{path*}.kernel", (Transpose(),)),
    Rule("{path*}.bias", "{path*}.bias"),
    Rule("{path*}.pe", "{path*}.pe"),
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
SUBLAYERS = {
    "encoder": ("self_attn", "ffn", "norm1", "norm2"),
    "decoder": ("self_attn", "norm1", "cross_attn", "norm2", "ffn", "norm3"),
}
PARTS = {"self_attn": ATTENTION, "cross_attn": ATTENTION, "ffn": ("linear1", "linear2")}

ORDER = (
    *(
        name
        for half, sublayers in SUBLAYERS.items()
        for name in (
            f"{half}.embedding",
            f"{half}.pos_encoding.pos_embedding",
            *(
                f"{half}.layers.{{i}}.{sublayer}" + (part and f".{part}")
                for sublayer in sublayers
                for part in PARTS.get(sublayer, ("",))
            ),
            f"{half}.norm",
        )
    ),
    "output_proj",
)


def rules(config: ModelConfig) -> tuple[Rule | Alias, ...]:
    """The table for a model of this configuration: `RULES`, and its tied names."""
    tied: tuple[Alias, ...] = ()
    if config.tied_tables != "none":
        tied += (Alias("output_proj.weight", "decoder.embedding.weight"),)
    if config.tied_tables == "all":
        tied += (Alias("encoder.embedding.weight", "decoder.embedding.weight"),)
    return tied + RULES


FAMILY = Family(
    name="transformer",
    model_types=(),
    architecture="",
    config=ModelConfig,
    fields=(),
    fixed={},
    rules=rules,
    order=ORDER,
)
