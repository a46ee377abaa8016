"""Checks of configurations, and configurations from what JSON holds."""

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from jax_transformer.errors import InputError


def check_positive(config: Any, *names: str) -> None:
    """Raise InputError unless each field is a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value!r}: must be a whole number of at least 1")


def check_optional_positive(config: Any, *names: str) -> None:
    """As `check_positive`, where None says that there is no such number."""
    check_positive(config, *(name for name in names if getattr(config, name) is not None))


def check_above_zero(config: Any, *names: str) -> None:
    """Raise InputError unless each field is a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0 < value < math.inf:
            raise InputError(f"{name}={value!r}: must be a finite number above 0")


def check_optional_above_zero(config: Any, *names: str) -> None:
    """As `check_above_zero`, where None says that there is no such number."""
    check_above_zero(config, *(name for name in names if getattr(config, name) is not None))


def check_fraction(config: Any, *names: str) -> None:
    """Raise InputError unless each field is at least 0 and below 1."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0.0 <= value < 1.0:
            raise InputError(f"{name}={value!r}: must be at least 0 and below 1")


def is_number(value: Any) -> bool:
    """Whether the value is a number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether the value is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_choice(config: Any, name: str, choices: Any) -> None:
    """Raise InputError unless the field is one of the values of a `Literal`."""
    value = getattr(config, name)
    if value not in get_args(choices):
        raise InputError(f"{name}={value!r}: must be one of {', '.join(get_args(choices))}")


Config = TypeVar("Config")


def from_dict(cls: type[Config], values: Any, *, place: str) -> Config:
    """Build the dataclass `cls` from `values`, which JSON holds as `dataclasses.asdict` gives them.

    Fields that are dataclasses themselves are built from nested dicts, paths from their names.

    Raises:
        InputError: an unknown key (with the nearest names), a missing key, a value of another
            type or out of range. No key has a default here: what was saved says everything.
    """
    if not isinstance(values, dict):
        raise InputError(f"{place}: must be an object with named values, not {values!r}")
    kinds: dict[str, Any] = {
        name: kind
        for name, kind in get_type_hints(cls).items()
        if name in {field.name for field in dataclasses.fields(cast(Any, cls))}
    }
    for key in values:
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=3)
            known = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(kinds)}"
            raise InputError(f"{place}: unknown key {key!r}: {known}")
    for name in kinds:
        if name not in values:
            raise InputError(f"{place}: key {name!r} is missing: restore the file from a copy")
    fields = {name: from_json_value(values[name], kinds[name], place, name) for name in kinds}
    try:
        return cls(**fields)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def from_json_value(value: Any, kind: Any, place: str, name: str) -> Any:
    """`value` as the type `kind` of a setting: a number, a truth value, text, a path, a choice, a
    dataclass, a tuple of one of these (a list in JSON), or None where `kind` allows it.

    Raises:
        InputError: it is of another type. Ranges and choices are the dataclass's business.
    """
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return from_options(value, get_args(kind), place, name)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{place}: {name}={value!r}: must be a list")
        each = get_args(kind)[0]
        return tuple(from_json_value(one, each, place, name) for one in value)
    if dataclasses.is_dataclass(kind):
        return from_dict(cast(type, kind), value, place=f"{place}.{name}")
    if kind is bool and not isinstance(value, bool):
        raise InputError(f"{place}: {name}={value!r}: must be true or false")
    if kind is int and not (is_number(value) and isinstance(value, int)):
        raise InputError(f"{place}: {name}={value!r}: must be a whole number")
    if kind is float and not is_number(value):
        raise InputError(f"{place}: {name}={value!r}: must be a number")
    if kind not in (bool, int, float) and not isinstance(value, str):
        raise InputError(f"{place}: {name}={value!r}: must be text")
    return Path(value) if kind is Path else value


def from_options(value: Any, kinds: Sequence[Any], place: str, name: str) -> Any:
    """`value` as the first of several types that it can be; the complaint is that of the last."""
    if value is None and type(None) in kinds:
        return None
    *others, last = (kind for kind in kinds if kind is not type(None))
    for kind in others:
        with contextlib.suppress(InputError):
            return from_json_value(value, kind, place, name)
    return from_json_value(value, last, place, name)
