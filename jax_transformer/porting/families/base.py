"""A family of checkpoints: its config as a table of fields, its tensors as a table of rules.

A config table says something about every field of `config.json`: what it becomes here (`Map`), what
it must be (`Require`), or why it changes no number (`Skip`). Any other field is an error.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax_transformer.config import (
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    ModelConfig,
    from_dict,
)
from jax_transformer.errors import InputError
from jax_transformer.porting.rules import Rules

Config = DecoderOnlyConfig | EncoderOnlyConfig | EncoderDecoderConfig | ModelConfig
Values = dict[str, Any]

REQUIRED: Any = object()
"""In place of a default: the field must be there."""


class Entry(Protocol):
    """One line of a config table."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that it answers for."""
        ...

    def read(self, values: Values) -> Values:
        """Dotted names of our config -> values.

        Raises:
            InputError: a value that has no counterpart here.
        """
        ...

    def write(self, config: Config) -> Values:
        """Fields -> values: the inverse of `read`."""
        ...


@dataclasses.dataclass(frozen=True)
class Map:
    """`source` is our `target` (dotted; or several that are all the same), through `to` and `back`.

    `default` is what the `transformers` class takes where the file lacks the field. Where that
    lets a missing field be None, but not one that is there, `optional` leaves a None out.
    """

    source: str
    target: str | tuple[str, ...]
    default: Any = REQUIRED
    to: Callable[[Any], Any] = lambda value: value
    back: Callable[[Any], Any] = lambda value: value
    optional: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, values: Values) -> Values:
        value = values.get(self.source, self.default)
        if value is REQUIRED:
            raise InputError(f"{self.source} is missing")
        return dict.fromkeys(self.targets, self.to(value))

    def write(self, config: Config) -> Values:
        value = self.back(get(config, self.targets[0]))
        return {} if value is None and self.optional else {self.source: value}

    @property
    def targets(self) -> tuple[str, ...]:
        """Our names."""
        return (self.target,) if isinstance(self.target, str) else self.target


def choice(source: str, target: str, names: Mapping[Any, Any], default: Any = REQUIRED) -> Map:
    """A `Map` between names: theirs -> ours. Of several of theirs for one of ours the first is
    written, unless the checkpoint's own config is at hand (see `write_config`)."""
    ours: dict[Any, Any] = {}
    for theirs, name in names.items():
        ours.setdefault(name, theirs)

    def to(value: Any) -> Any:
        if value not in names:
            raise InputError(f"{source}={value!r}: must be one of {', '.join(map(str, names))}")
        return names[value]

    def back(value: Any) -> Any:
        if value not in ours:
            raise InputError(f"{target}={value!r} has no name in {source}")
        return ours[value]

    return Map(source, target, default, to, back)


@dataclasses.dataclass(frozen=True)
class Require:
    """`source` must be `value` (or absent, or one of `others`, which say the same): anything else
    computes what is not built here."""

    source: str
    value: Any
    reason: str
    others: tuple[Any, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, values: Values) -> Values:
        found = values.get(self.source, self.value)
        if found != self.value and found not in self.others:
            raise InputError(f"{self.source}={found!r}: must be {self.value!r}, {self.reason}")
        return {}

    def write(self, config: Config) -> Values:
        return {self.source: self.value}


@dataclasses.dataclass(frozen=True)
class Skip:
    """`sources` change no number that the model computes, for `reason`."""

    sources: tuple[str, ...]
    reason: str

    @property
    def fields(self) -> tuple[str, ...]:
        return self.sources

    def read(self, values: Values) -> Values:
        return {}

    def write(self, config: Config) -> Values:
        return {}


COMMON = (
    Skip(("architectures", "model_type", "transformers_version", "_name_or_path"), "names"),
    Skip(("torch_dtype", "dtype"), "tensors say their own dtype"),
    Skip(
        ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
         "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "max_length", "num_beams",
         "suppress_tokens", "begin_suppress_tokens"),
        "about generation, not about the model",
    ),
    Skip(
        ("use_cache", "return_dict", "output_attentions", "output_hidden_states", "problem_type",
         "id2label", "label2id", "is_encoder_decoder", "chunk_size_feed_forward", "is_decoder",
         "add_cross_attention", "task_specific_params", "use_return_dict", "_attn_implementation",
         "attn_implementation", "finetuning_task", "cache_implementation"),
        "about how the model is run",
    ),
    Skip(("initializer_range", "initializer_factor", "init_std"), "about new weights"),
    Skip(("gradient_checkpointing", "pretraining_tp"), "about training"),
)  # fmt: skip
"""What any `config.json` may hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One table that fits on a screen."""

    name: str
    model_types: tuple[str, ...]
    """The `model_type` in `config.json`; the first is written. None: that file has another form."""
    architecture: str
    """The `transformers` class, for `architectures`."""
    config: type[Config]
    """What our config is."""
    fields: Sequence[Entry]
    """The config table; `COMMON` is added."""
    fixed: Mapping[str, Any]
    """Our settings (dotted) that hold for the whole family."""
    rules: Callable[[Any], Rules]
    """The tensor table of our config: source names are those of the checkpoint, targets those of
    `models.parameters.flatten`."""
    order: Sequence[str] = ()
    """The modules in the order in which the class in PyTorch registers them, which is that of its
    optimizer; `{i}` is the number of a layer. Empty: not known here."""


def read_config(family: Family, values: Values) -> Config:
    """Our config of a `config.json`.

    Raises:
        InputError: fields that the table does not know, and values that it refuses; all of them in
            one line.
    """
    entries = (*family.fields, *COMMON)
    known = [name for entry in entries for name in entry.fields]
    problems = [unknown_field(name, known) for name in values if name not in known]
    settings: Values = dict(family.fixed)
    for entry in entries:
        try:
            settings |= entry.read(values)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError(f"config of family {family.name}: {'; '.join(problems)}")
    return from_settings(family, settings)


def from_settings(family: Family, settings: Values) -> Config:
    """Our config from dotted names; what they leave out has its default."""
    nested = nest(settings)
    if "local_layer" in nested:  # It says only in what it differs.
        nested["local_layer"] = nested["layer"] | nested["local_layer"]
    return from_dict(
        family.config,
        with_defaults(family.config, nested),
        place=f"config of family {family.name}",
    )


def write_config(family: Family, config: Config, source: Values | None = None) -> Values:
    """The `config.json` of our config.

    Args:
        source: the `config.json` that the model once came from. It is kept where it says the same:
            a field that `family` skips, or that has several spellings of one meaning. A rate of
            dropout that the family cannot say is left out: it matters to training only.

    Raises:
        InputError: a setting of ours that the family cannot express.
    """
    fields: Values = {}
    position = family.fixed.get("position")
    # Entries of another kind of position have nothing to read then.
    if position is not None and get(config, "position") != position:
        raise InputError(
            f"the family {family.name} has no config for this model: "
            f"position={get(config, 'position')!r}, must be {position!r}"
        )
    for entry in family.fields:
        fields |= entry.write(config)
    values: Values = {}
    if family.model_types:
        values = {"architectures": [family.architecture], "model_type": family.model_types[0]}
    again = read_config(family, values | fields)
    if difference := first_difference(config, again):
        raise InputError(f"the family {family.name} has no config for this model: {difference}")
    if source is None:
        return values | fields
    before = read_config(family, source)
    kept = dict(source)
    for entry in family.fields:
        settings = entry.read(source) | entry.read(fields)
        if any(get(before, name) != get(config, name) for name in settings):
            kept = {name: value for name, value in kept.items() if name not in entry.fields}
            kept |= entry.write(config)
    return kept


def unknown_field(name: str, known: Sequence[str]) -> str:
    """What to say about a field that no entry answers for."""
    near = difflib.get_close_matches(name, known, n=2)
    meant = f", near {' and '.join(near)}" if near else ""
    return f"field {name!r} is not known{meant}: add it to the family's table"


def first_difference(config: Config, other: Config) -> str | None:
    """The first setting in which they differ, but for rates of dropout."""
    ours, theirs = unnest(config.to_dict()), unnest(other.to_dict())
    for name, value in ours.items():
        if theirs.get(name) != value and not name.endswith("dropout"):
            return f"{name}={value!r} would become {theirs.get(name)!r}"
    return None if ours.keys() == theirs.keys() else "they differ in which settings they have"


def get(config: Any, path: str) -> Any:
    """The setting of a dotted name; None below an optional part that is not there."""
    for name in path.split("."):
        config = None if config is None else getattr(config, name)
    return config


def nest(settings: Values) -> Values:
    """`{"layer.d_model": 8} -> {"layer": {"d_model": 8}}`."""
    nested: Values = {}
    for path, value in settings.items():
        *parents, name = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return nested


def unnest(values: Values, prefix: str = "") -> Values:
    """The inverse of `nest`."""
    flat: Values = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= unnest(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def with_defaults(config: Any, values: Values) -> Values:
    """`values`, and the defaults of the dataclass (and of those in it) for what they leave out."""
    full: Values = {}
    for field in dataclasses.fields(config):
        inner = dataclass_of(field.type)
        if isinstance(values.get(field.name), dict) and inner is not None:
            full[field.name] = with_defaults(inner, values[field.name])
        elif field.name in values:
            full[field.name] = values[field.name]
        elif field.default is not dataclasses.MISSING:
            full[field.name] = field.default
    unknown = values.keys() - {field.name for field in dataclasses.fields(config)}
    return full | {name: values[name] for name in unknown}


def dataclass_of(kind: Any) -> Any:
    """The dataclass that a field holds, perhaps as an option."""
    options = [kind, *getattr(kind, "__args__", ())]
    return next((each for each in options if dataclasses.is_dataclass(each)), None)
