"""Lines of config tables that families of encoder-decoders share."""

import dataclasses

from jax_transformer.porting.families.base import Config, Map, Skip, Values, get
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Rule, Rules


def both(name: str) -> tuple[str, str]:
    """That setting of the blocks of either half."""
    return f"encoder.{name}", f"decoder.{name}"


@dataclasses.dataclass(frozen=True)
class Pair:
    """`second` is what `first` is where it is None or absent."""

    first: Map
    second: Map

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.first.fields, *self.second.fields)

    def read(self, values: Values) -> Values:
        second = values.get(self.second.source)
        if second is None:
            second = values.get(self.first.source, self.first.default)
        return self.first.read(values) | self.second.read({self.second.source: second})

    def write(self, config: Config) -> Values:
        return self.first.write(config) | self.second.write(config)


@dataclasses.dataclass(frozen=True)
class Dropouts:
    """As `entries.Dropouts`, of both halves."""

    fields: tuple[str, ...]
    default: float

    def read(self, values: Values) -> Values:
        return dict.fromkeys(both("dropout"), float(values.get(self.fields[0], self.default)))

    def write(self, config: Config) -> Values:
        return dict.fromkeys(self.fields, get(config, "encoder.dropout"))


OLD = (
    Skip(
        ("early_stopping", "length_penalty", "min_length", "no_repeat_ngram_size", "prefix",
         "num_return_sequences", "do_sample", "diversity_penalty"),
        "about generation, not about the model",
    ),
    Skip(("output_past", "torchscript", "use_bfloat16"), "about how old versions ran the model"),
    Skip(("classifier_dropout", "classif_dropout"), "about a head for classes, not built here"),
    Skip(("num_labels",), "about a head for classes, not built here"),
)  # fmt: skip
"""What files of encoder-decoders say beyond the model."""


def affine(source: str, target: str) -> Rules:
    """A matrix and a bias."""
    return (
        Rule(source + ".weight", target + ".kernel", (Transpose(),)),
        Rule(source + ".bias", target + ".bias"),
    )


def norm(source: str, target: str) -> Rules:
    """A LayerNorm."""
    return (
        Rule(source + ".weight", target + ".scale"),
        Rule(source + ".bias", target + ".bias"),
    )
