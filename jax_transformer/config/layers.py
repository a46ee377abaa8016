"""One Transformer block, and the rotary positions in it."""

import dataclasses
from typing import Literal

from jax_transformer.config.checks import (
    check_above_zero,
    check_choice,
    check_fraction,
    check_optional_above_zero,
    check_optional_positive,
    check_positive,
)
from jax_transformer.config.rotary import RotaryConfig
from jax_transformer.errors import InputError

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "quick_gelu", "sigmoid"]
Norm = Literal["layer", "rms"]
Placement = Literal["post", "pre", "output", "sandwich", "parallel"]
QueryKeyNorm = Literal["none", "head", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One Transformer block: attention, feed-forward, norms and where they sit."""

    d_model: int
    """Width D of the residual stream."""
    num_heads: int
    """Query heads N."""
    num_kv_heads: int | None = None
    """Key-value heads K, a divisor of N; None: N of them."""
    head_dim: int | None = None
    """Width H of a head; None: D/N."""
    d_ff: int
    """Inner width F of the feed-forward layer."""
    norm: Norm = "layer"
    """`layer`: LayerNorm. `rms`: RMSNorm."""
    norm_epsilon: float = 1e-5
    """Epsilon of every norm."""
    norm_bias: bool = True
    """Whether a LayerNorm adds a bias (an RMSNorm has none)."""
    norm_unit_offset: bool = False
    """RMSNorm multiplies by 1 + weight (Gemma)."""
    norm_scale_in_float32: bool = False
    """RMSNorm multiplies by the weight before the cast back to the dtype of x, not after."""
    placement: Placement = "pre"
    """`post`: Norm(x + f(x)). `pre`: x + f(Norm(x)). `output`: x + Norm(f(x)).
    `sandwich`: x + Norm(f(Norm(x))). `parallel`: x + attention(Norm(x)) + feed-forward(Norm(x))."""
    parallel_norms: int = 1
    """`parallel` reads 1 norm twice (GPT-J), or 2 norms (GPT-NeoX)."""
    query_key_norm: QueryKeyNorm = "none"
    """RMSNorm on queries and keys: on each `head`, or on the `full` projection."""
    qkv_bias: bool = True
    """Whether the query, key and value projections add a bias."""
    key_bias: bool = True
    """Whether the key projection is one of those that do (Whisper: not)."""
    out_bias: bool = True
    """Whether the output projection adds a bias."""
    attention_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(H)."""
    attention_soft_cap: float | None = None
    """Scores become cap tanh(score / cap); None: they stay."""
    window: int | None = None
    """Query i sees the keys i - window < j <= i (of causal blocks); None: all up to its own."""
    rotary: RotaryConfig | None = None
    """Rotary positions of queries and keys."""
    activation: Activation = "gelu"
    """The nonlinearity of the feed-forward layer."""
    gated: bool = False
    """W_down(activation(W_gate x) * W_up x) in place of W2 activation(W1 x)."""
    ffn_bias: bool = True
    """Whether the feed-forward layer's projections add biases."""
    dropout: float = 0.0
    """Probability of zeroing an element: of attention weights, of the feed-forward layer's inner
    activations, and of what each sublayer adds to the residual stream."""
    causal: bool
    """Whether a query sees only the keys up to its own position."""

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "num_heads", "d_ff")
        check_optional_positive(self, "num_kv_heads", "head_dim", "window")
        check_above_zero(self, "norm_epsilon")
        check_optional_above_zero(self, "attention_scale", "attention_soft_cap")
        check_fraction(self, "dropout")
        check_choice(self, "norm", Norm)
        check_choice(self, "placement", Placement)
        check_choice(self, "query_key_norm", QueryKeyNorm)
        check_choice(self, "activation", Activation)
        if self.head_dim is None and self.d_model % self.num_heads:
            raise InputError(
                f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: "
                f"choose a width that is a multiple of the number of heads, or give head_dim"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads="
                f"{self.num_kv_heads}: each key-value head serves equally many query heads"
            )
        if not (self.key_bias or self.qkv_bias):
            raise InputError("key_bias=False with qkv_bias=False: no projection has one, leave it")
        if self.window is not None and not self.causal:
            raise InputError(f"window={self.window}: only causal attention has a sliding window")
        if self.parallel_norms not in (1, 2):
            raise InputError(f"parallel_norms={self.parallel_norms!r}: must be 1 or 2")
        if self.norm == "layer" and (self.norm_unit_offset or self.norm_scale_in_float32):
            raise InputError(
                "norm_unit_offset and norm_scale_in_float32 belong to norm='rms': leave them False"
            )
        width = self.head_width if self.rotary is None else self.rotary.width
        if width is not None and width > self.head_width:
            raise InputError(
                f"rotary.width={width}: a head is only {self.head_width} wide; rotate at most that"
            )
        if self.rotary is not None and width is None and self.head_width % 2:
            raise InputError(
                f"a head is {self.head_width} wide: rotary positions turn pairs, so give "
                f"rotary.width, an even number"
            )

    @property
    def head_width(self) -> int:
        """H."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads
