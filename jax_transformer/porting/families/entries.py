"""Lines of config tables that several families share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import REQUIRED, Config, Entry, Values, get
from jax_transformer.porting.operations import Split, Transpose
from jax_transformer.porting.rules import Ignore, Rule, Rules


@dataclasses.dataclass(frozen=True)
class Spelled:
    """`entry`, whose fields also go by other names (name -> the entry's)."""

    entry: Entry
    names: Mapping[str, str]

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.entry.fields, *self.names)

    def read(self, values: Values) -> Values:
        renamed = {name: value for name, value in values.items() if name not in self.names}
        for other, name in self.names.items():
            if other in values and renamed.setdefault(name, values[other]) != values[other]:
                raise InputError(
                    f"{other}={values[other]!r} and {name}={renamed[name]!r} are one setting: "
                    f"leave one out"
                )
        return self.entry.read(renamed)

    def write(self, config: Config) -> Values:
        return self.entry.write(config)


@dataclasses.dataclass(frozen=True)
class Widths:
    """`source` is D; `inner`, or 4 D where that is None, absent or has no name, is F."""

    source: str
    inner: str | None
    default: Any = REQUIRED

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.source,) if self.inner is None else (self.source, self.inner)

    def read(self, values: Values) -> Values:
        width = values.get(self.source, self.default)
        if not isinstance(width, int):
            raise InputError(f"{self.source} must be a whole number")
        inner = None if self.inner is None else values.get(self.inner)
        return {"layer.d_model": width, "layer.d_ff": 4 * width if inner is None else inner}

    def write(self, config: Config) -> Values:
        width, inner = get(config, "layer.d_model"), get(config, "layer.d_ff")
        if self.inner is None:
            return {self.source: width}
        return {self.source: width, self.inner: None if inner == 4 * width else inner}


@dataclasses.dataclass(frozen=True)
class Dropouts:
    """`sources` are our one rate of dropout, which is that of the first where they differ: that
    of what the sublayers add. It matters to training only."""

    sources: tuple[str, ...]
    default: float

    @property
    def fields(self) -> tuple[str, ...]:
        return self.sources

    def read(self, values: Values) -> Values:
        return {"layer.dropout": float(values.get(self.sources[0], self.default))}

    def write(self, config: Config) -> Values:
        rate = get(config, "layer.dropout")
        return dict.fromkeys(self.sources, rate or 0)  # MPT's class takes whole numbers only


@dataclasses.dataclass(frozen=True)
class Architectures:
    """The class that the checkpoint is of says which parts the model has.

    Args:
        names: of classes; several may have the same parts, of which the first is written.
        default: where the file says none, as old ones do.
    """

    names: Mapping[str, Values]
    default: str

    @property
    def fields(self) -> tuple[str, ...]:
        return ("architectures",)

    def read(self, values: Values) -> Values:
        (name, *others) = values.get("architectures") or [self.default]
        if others or name not in self.names:
            raise InputError(
                f"architectures={values['architectures']!r}: must be one of {', '.join(self.names)}"
            )
        return dict(self.names[name])

    def write(self, config: Config) -> Values:
        for name, parts in self.names.items():
            if all(get(config, part) == value for part, value in parts.items()):
                return {"architectures": [name]}
        parts = ", ".join(f"{part}={get(config, part)}" for part in self.names[self.default])
        raise InputError(f"no class of {', '.join(self.names)} has {parts}")


def query_key_value(
    source: str, target: str, width: int, *, groups: int = 1, conv1d: bool = False
) -> Rules:
    """The fused projection `source`, weight and bias, as `target.q_proj`, `k_proj` and `v_proj`.

    Args:
        width: D.
        groups: 1 for `[Q | K | V]`; N for the `q, k, v` of each head in turn.
        conv1d: the weight is `[D, 3 D]` as a kernel is, not `[3 D, D]`.
    """
    sizes = (width // groups,) * 3
    weights = [f"{target}.{name}_proj.kernel" for name in "qkv"]
    biases = [f"{target}.{name}_proj.bias" for name in "qkv"]
    split = Split(sizes, axis=int(conv1d), groups=groups)
    return (
        Rule(source + ".weight", tuple(weights), (split,) if conv1d else (split, Transpose())),
        Rule(source + ".bias", tuple(biases), (Split(sizes, groups=groups),)),
    )


def with_prefix(rules: Rules, prefix: str) -> Rules:
    """`rules`, and the same again for files that lack `prefix`, which the bare model's do."""
    bare: Rules = tuple(
        dataclasses.replace(rule, source=without(rule.source, prefix))
        for rule in rules
        if isinstance(rule, Rule | Ignore)
    )
    return (*rules, *(rule for rule in bare if rule not in rules))


def without(source: str | tuple[str, ...], prefix: str) -> str | tuple[str, ...]:
    """Names without the prefix."""
    if isinstance(source, str):
        return source.removeprefix(prefix)
    return tuple(name.removeprefix(prefix) for name in source)
