"""RoBERTa and XLM-RoBERTa: BERT with two rows skipped in the table of positions."""

import dataclasses

from jax_transformer.config import EncoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families import bert
from jax_transformer.porting.families.base import Config, Family, Map, Values, choice, get
from jax_transformer.porting.families.bert import affine, body, norm
from jax_transformer.porting.families.entries import Architectures
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules


@dataclasses.dataclass(frozen=True)
class PositionRows:
    """`max_position_embeddings` counts all rows of the table; the first position's is the one after
    that of padding, `pad_token_id`."""

    rows: int = 512
    padding: int = 1

    @property
    def fields(self) -> tuple[str, ...]:
        return ("max_position_embeddings", "pad_token_id")

    def read(self, values: Values) -> Values:
        padding = values.get("pad_token_id", self.padding)
        if not isinstance(padding, int):
            raise InputError(f"pad_token_id={padding!r}: must be a number, positions follow it")
        rows = values.get("max_position_embeddings", self.rows)
        return {"position_offset": padding + 1, "max_len": rows - padding - 1}

    def write(self, config: Config) -> Values:
        offset = get(config, "position_offset")
        return {
            "max_position_embeddings": get(config, "max_len") + offset,
            "pad_token_id": offset - 1,
        }


FIELDS = (
    *bert.BODY,
    Map("vocab_size", "vocab_size"),  # The two have different defaults.
    PositionRows(),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "gelu"),
    Architectures(
        {
            "RobertaForMaskedLM": {"token_head": True, "pooler": False},
            "RobertaModel": {"token_head": False, "pooler": True},
            "XLMRobertaForMaskedLM": {"token_head": True, "pooler": False},
            "XLMRobertaModel": {"token_head": False, "pooler": True},
        },
        "RobertaForMaskedLM",
    ),
)

FIXED = bert.FIXED | {"head_activation": "gelu"}


def rules(config: EncoderOnlyConfig) -> Rules:
    """Tensor names of `RobertaForMaskedLM`, or of `RobertaModel`, which lack the `roberta.`."""
    if not config.token_head:
        headless = Ignore("lm_head.{rest*}", "the architecture has no head")
        return (*body(config, ""), *body(config, "roberta."), headless)
    return (
        Alias("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
        Alias("lm_head.decoder.bias", "lm_head.bias"),
        *body(config, "roberta."),
        *body(config, ""),
        *affine("lm_head.dense", "token_head.dense"),
        *norm("lm_head.layer_norm", "token_head.norm"),
        Rule("lm_head.bias", "token_head.output_proj.bias"),
    )


FAMILY = Family(
    name="roberta",
    model_types=("roberta", "xlm-roberta"),
    architecture="RobertaForMaskedLM",
    config=EncoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
