"""The arguments of calls, and how to change them."""

from typing import Any

from jax_transformer.layers.attention import MultiHeadAttention
from jax_transformer.layers.rotary import RotaryPositionalEncoding
from jax_transformer.verification.diagnose import Trial

ARGUMENTS = {
    MultiHeadAttention: ("query", "key", "value", "mask", "bias", "positions"),
    RotaryPositionalEncoding: ("q", "k", "positions"),
}


def names_of(module: Any) -> tuple[str, ...]:
    """The arguments of a call in their order."""
    return next(names for cls, names in ARGUMENTS.items() if isinstance(module, cls))


def argument(trial: Trial, name: str) -> Any:
    """The argument of a call."""
    index = names_of(trial.module).index(name)
    return trial.args[index] if index < len(trial.args) else trial.kwargs.get(name)


def set_argument(trial: Trial, name: str, value: Any) -> None:
    """Call with another one."""
    index = names_of(trial.module).index(name)
    if index < len(trial.args):
        trial.args = (*trial.args[:index], value, *trial.args[index + 1 :])
    else:
        trial.kwargs[name] = value


def set_positions(trial: Trial, positions: Any) -> None:
    """Call with other positions."""
    set_argument(trial, "positions", positions)
