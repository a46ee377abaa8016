"""`layer_types` and its older spellings: which blocks have a sliding window."""

import dataclasses
from collections.abc import Callable, Sequence

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config, Values

FULL, SLIDING = "full_attention", "sliding_attention"

Types = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Windows:
    """`sliding_window` and `layer_types`.

    Where some blocks have the window and others not, those that do are our `local_layer`; where all
    do, it is our `layer`'s. Both count alike (`transformers.masking_utils.sliding_window_overlay`):
    query i sees the keys `i - window < j <= i`, by their places in the row.

    Args:
        pattern: the types where the file does not list them: number of blocks -> types.
        default: of `sliding_window`, where the file lacks it.
        other_fields: what else `pattern` reads.
    """

    pattern: Callable[[Values], Types]
    default: int | None = 4096
    other_fields: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return ("layer_types", "sliding_window", *self.other_fields)

    def read(self, values: Values) -> Values:
        local = sliding_layers(values, self.pattern)
        window = values.get("sliding_window", self.default)
        if not local:
            return {"layer.window": None, "local_layers": ()}
        if window is None:
            raise InputError(f"sliding_window is missing, but layer_types has {SLIDING!r}")
        if len(local) == values["num_hidden_layers"]:
            return {"layer.window": window, "local_layers": ()}
        return {"layer.window": None, "local_layers": local, "local_layer.window": window}

    def write(self, config: Config) -> Values:
        window = window_of(config)
        # Some classes make the mask of a window even where no block has one.
        window = self.default if window is None else window
        return {"sliding_window": window, "layer_types": types_of(config)}


@dataclasses.dataclass(frozen=True)
class SwitchedWindows:
    """As `Windows`, if `use_sliding_window`: from block `max_window_layers` on (Qwen)."""

    layers: int = 28
    """Default of `max_window_layers`."""

    @property
    def fields(self) -> tuple[str, ...]:
        return ("use_sliding_window", *self.windows.fields)

    @property
    def windows(self) -> Windows:
        """The entry that reads the rest."""
        return Windows(self.pattern, other_fields=("max_window_layers",))

    def pattern(self, values: Values) -> Types:
        """The types where the file does not list them."""
        first = values.get("max_window_layers", self.layers)
        on = values.get("use_sliding_window") and values.get("sliding_window", 4096) is not None
        return [SLIDING if on and i >= first else FULL for i in range(values["num_hidden_layers"])]

    def read(self, values: Values) -> Values:
        if not values.get("use_sliding_window"):
            values = values | {"sliding_window": None}
        return self.windows.read(values)

    def write(self, config: Config) -> Values:
        fields = self.windows.write(config)
        types = fields["layer_types"]
        first = types.index(SLIDING) if SLIDING in types else len(types)
        return {"use_sliding_window": SLIDING in types, "max_window_layers": first, **fields}


def sliding_layers(values: Values, pattern: Callable[[Values], Types]) -> tuple[int, ...]:
    """The blocks that have a window.

    Raises:
        InputError: another type of attention, or too many or few of them.
    """
    count = values.get("num_hidden_layers")
    if not isinstance(count, int):
        raise InputError("num_hidden_layers must be a whole number: layer_types is as long")
    types = values.get("layer_types") or pattern(values)
    other = [name for name in types if name not in (FULL, SLIDING)]
    if other:
        raise InputError(f"layer_types has {other[0]!r}: must be {FULL} or {SLIDING}")
    if len(types) != count:
        raise InputError(f"layer_types has {len(types)} entries for num_hidden_layers={count}")
    return tuple(index for index, name in enumerate(types) if name == SLIDING)


def types_of(config: Config) -> list[str]:
    """`layer_types` of our config."""
    assert isinstance(config, DecoderOnlyConfig)
    layers = (config.layer_at(index) for index in range(config.num_layers))
    return [FULL if layer.window is None else SLIDING for layer in layers]


def window_of(config: Config) -> int | None:
    """`sliding_window` of our config."""
    assert isinstance(config, DecoderOnlyConfig)
    return next((window for window in config.windows if window is not None), None)
