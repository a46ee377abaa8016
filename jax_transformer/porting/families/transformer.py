"""`torch_reference.Transformer`, and with it every checkpoint of the lecture document's script."""

from jax_transformer.config import ModelConfig
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Rule

KERNEL = (Transpose(),)

RULES = (
    Rule("{stack}.embedding.weight", "{stack}.embedding.embedding"),
    Rule("{stack}.pos_encoding.pe", "{stack}.pos_encoding.pe"),
    Rule(
        "{stack}.pos_encoding.pos_embedding.weight",
        "{stack}.pos_encoding.pos_embedding.embedding",
    ),
    Rule(
        "{stack}.layers.{layer}.{sublayer}.{linear}.weight",
        "{stack}.layers.{layer}.{sublayer}.{linear}.kernel",
        KERNEL,
    ),
    Rule(
        "{stack}.layers.{layer}.{sublayer}.{linear}.bias",
        "{stack}.layers.{layer}.{sublayer}.{linear}.bias",
    ),
    Rule("{stack}.layers.{layer}.{norm}.weight", "{stack}.layers.{layer}.{norm}.scale"),
    Rule("{stack}.layers.{layer}.{norm}.bias", "{stack}.layers.{layer}.{norm}.bias"),
    Rule("{stack}.norm.weight", "{stack}.norm.scale"),
    Rule("{stack}.norm.bias", "{stack}.norm.bias"),
    Rule("output_proj.weight", "output_proj.kernel", KERNEL),
    Rule("output_proj.bias", "output_proj.bias"),
)


def rules(config: ModelConfig) -> tuple[Rule | Alias, ...]:
    """The table for a model of this configuration: `RULES`, and its tied names."""
    tied: tuple[Alias, ...] = ()
    if config.tied_tables != "none":
        tied += (Alias("output_proj.weight", "decoder.embedding.weight"),)
    if config.tied_tables == "all":
        tied += (Alias("encoder.embedding.weight", "decoder.embedding.weight"),)
    return tied + RULES
