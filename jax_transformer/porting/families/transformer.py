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
)
