"""Every setting of a language model's run, and its presets."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from jax_transformer.config import (
    DecoderOnlyConfig,
    LayerConfig,
    RotaryConfig,
    check_choice,
    check_positive,
)
from jax_transformer.data.characters import TokenizerName
from jax_transformer.data.documents import Separator
from jax_transformer.errors import InputError
from jax_transformer.training.settings import OptimizerConfig, RunConfig, TaskName

ArchitectureName = Literal["llama", "gpt2"]

TextPaths = Annotated[
    tuple[Path, ...],
    tyro.conf.arg(metavar="PATH...", help_behavior_hint="(default: the works of Shakespeare)"),
]
OneFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageDataConfig:
    """What to train on: by default the works of Shakespeare, which are embedded."""

    text: TextPaths = ()
    """Text files, or folders of them (`.gz` too). Each file is a document."""
    separator: Separator = "none"
    """What ends a document inside a text file: `blank-line`, `endoftext` (a line
    `<|endoftext|>`) or nothing."""
    jsonl: OneFile = None
    """Or a file with a JSON object on each line, each a document."""
    field: str = "text"
    """The field of it that holds the text."""
    tokens: OneFile = None
    """Or a file of tokens by `jax-transformer tokenize`: for more text than memory holds."""
    held_out: float = 0.05
    """Part of your documents held out for validation, and as much again for the final test."""
    tokenizer: TokenizerName = "bpe"
    """`bpe`: byte-level byte-pair encoding, learnt from the text. `bytes`, `chars`: one token
    each. (A file of tokens has its own.)"""
    vocab_size: int = 4000
    """Tokens of the `bpe` vocabulary."""

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size")
        check_choice(self, "separator", Separator)
        check_choice(self, "tokenizer", TokenizerName)
        given = {
            "--data.text": self.text,
            "--data.jsonl": self.jsonl,
            "--data.tokens": self.tokens,
        }
        names = [name for name, value in given.items() if value]
        if len(names) > 1:
            raise InputError(f"{' and '.join(names)}: give one of them")
        if not 0.0 < self.held_out <= 0.25:
            raise InputError(f"held_out={self.held_out!r}: must be above 0 and at most 0.25")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageArchitecture:
    """Form and size of a decoder-only model."""

    architecture: ArchitectureName = "llama"
    """`llama`: RMSNorm, rotary positions, SwiGLU, no biases. `gpt2`: LayerNorm, learned
    positions, GELU, biases."""
    d_model: int = 256
    """Width D of the residual stream."""
    num_layers: int = 6
    """Blocks of the model."""
    num_heads: int = 8
    """Query heads N; each is D/N wide."""
    num_kv_heads: int | None = None
    """Key-value heads, a divisor of N; by default N of them."""
    d_ff: int | None = None
    """Inner width of the feed-forward layers; by default 4D, of `llama` 8D/3 rounded up to a
    multiple of 32."""
    context: int = 256
    """Tokens of a row: the longest text that the model is trained to read."""
    dropout: float = 0.0
    """Probability of zeroing an element."""
    tied: bool = True
    """The output projection is the transpose of the embedding table."""

    def __post_init__(self) -> None:
        check_positive(self, "context")
        check_choice(self, "architecture", ArchitectureName)
        self.config(1)

    def config(self, vocab_size: int) -> DecoderOnlyConfig:
        """The model for so many tokens.

        Raises:
            InputError: as `DecoderOnlyConfig`.
        """
        check_positive(self, "d_model")
        is_llama = self.architecture == "llama"
        d_ff = -(-8 * self.d_model // 96) * 32 if is_llama else 4 * self.d_model
        layer = LayerConfig(
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            d_ff=d_ff if self.d_ff is None else self.d_ff,
            norm="rms" if is_llama else "layer",
            qkv_bias=not is_llama,
            out_bias=not is_llama,
            ffn_bias=not is_llama,
            activation="silu" if is_llama else "gelu_tanh",
            gated=is_llama,
            rotary=RotaryConfig(pairing="half") if is_llama else None,
            dropout=self.dropout,
            causal=True,
        )
        return DecoderOnlyConfig(
            vocab_size=vocab_size,
            layer=layer,
            num_layers=self.num_layers,
            position="rotary" if is_llama else "learned",
            max_len=self.context,
            tied=self.tied,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(RunConfig):
    """Train a decoder-only language model."""

    task: ClassVar[TaskName] = "language"

    preset: Annotated[str, tyro.conf.arg(metavar="{shakespeare,tiny}")] = "shakespeare"
    """Where the other settings start from: `shakespeare` (minutes on a CPU) or `tiny` (seconds,
    for trying things out)."""
    sample_tokens: int = 200
    """Tokens that the model writes at each evaluation, as far as its context has room."""
    prompt: str = ""
    """What it begins with; by default the first words of the held-out text."""
    data: LanguageDataConfig = dataclasses.field(default_factory=LanguageDataConfig)
    """What to train on."""
    model: LanguageArchitecture = dataclasses.field(default_factory=LanguageArchitecture)
    """Form and size of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "sample_tokens")
        if self.tokens_per_batch < self.model.context:
            raise InputError(
                f"tokens_per_batch={self.tokens_per_batch}: a row alone has model.context="
                f"{self.model.context} tokens; raise one or lower the other"
            )

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self.tokens_per_batch // self.model.context


LANGUAGE_PRESETS: dict[str, LanguageConfig] = {
    "shakespeare": LanguageConfig(
        preset="shakespeare",
        steps=2000,
        tokens_per_batch=2048,
        evaluate_every=500,
        data=LanguageDataConfig(vocab_size=2000),
        model=LanguageArchitecture(d_model=128, num_layers=4, num_heads=4, context=128),
        optimizer=OptimizerConfig(
            schedule="cosine",
            learning_rate=2e-3,
            warmup_steps=100,
            b2=0.99,
            eps=1e-8,
            weight_decay=0.1,
            label_smoothing=0.0,
        ),
    ),
    "tiny": LanguageConfig(
        preset="tiny",
        steps=200,
        tokens_per_batch=1024,
        evaluate_every=100,
        checkpoint_every=100,
        sample_tokens=60,
        data=LanguageDataConfig(tokenizer="bytes"),
        model=LanguageArchitecture(d_model=64, num_layers=2, num_heads=4, context=64),
        optimizer=OptimizerConfig(
            schedule="wsd",
            learning_rate=3e-3,
            warmup_steps=20,
            b2=0.99,
            eps=1e-8,
            weight_decay=0.1,
            label_smoothing=0.0,
        ),
    ),
}
