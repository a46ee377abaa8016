"""Language modelling as a task: documents, a decoder-only model, bits per byte."""

import dataclasses
import hashlib
import math
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jax_transformer.config import OWN_RULES, DecoderOnlyConfig, GenerationConfig
from jax_transformer.data import corpora
from jax_transformer.data.characters import TextTokenizer, make_tokenizer
from jax_transformer.data.documents import (
    PARTS,
    Part,
    Split,
    jsonl_documents,
    text_documents,
)
from jax_transformer.data.packing import (
    OWN_ENDS,
    Ends,
    PackedBatch,
    PackedBatches,
    evaluation_packs,
)
from jax_transformer.data.tokens import TokenDocuments, open_tokens, tokenize
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.decoding.sampling import make_strategy
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree
from jax_transformer.porting.text import MarianTokenizer, PretrainedTokenizer
from jax_transformer.training.initial import Given
from jax_transformer.training.language_config import LanguageConfig, LanguageDataConfig
from jax_transformer.training.loss import LossSum
from jax_transformer.training.run import RunDirectory
from jax_transformer.training.step import check_packed_batch, language_loss
from jax_transformer.training.task import Evaluation

PROMPT_TOKENS = 8
"""Of the validation text, to begin samples with."""

TEMPERATURE = 0.8
"""Of samples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageTask:
    """The `Task` of a `LanguageConfig`."""

    parts: Mapping[Part, TokenDocuments]
    text_digest: str
    tokenizer: TextTokenizer
    model_config: DecoderOnlyConfig
    batches: PackedBatches
    config: LanguageConfig
    around: Ends
    rules: GenerationConfig

    testing = "Measuring the loss of the best model on the test text ..."

    @classmethod
    def read(cls, config: LanguageConfig, run: RunDirectory, given: Given | None) -> "LanguageTask":
        """Read the documents; make tokenizer and model config, if they are not given.

        Raises:
            InputError: data that cannot be used; files of a run that do not fit each other.
        """
        saved = None if given is None else given.tokenizer
        assert not isinstance(saved, MarianTokenizer)
        parts, tokenizer, text_digest = read_documents(config.data, config.seed, saved)
        if config.resume is not None:
            run.check_digest(text_digest)
        if given is None:
            model_config = config.model.config(tokenizer.vocab_size)
        else:
            assert isinstance(given.model_config, DecoderOnlyConfig)
            model_config = given.model_config
        if config.model.context > model_config.max_len:
            raise InputError(
                f"model.context={config.model.context}: the model of --init-from reads at most "
                f"{model_config.max_len} tokens: give --model.context {model_config.max_len}"
            )
        if len(tokenizer.encode(config.prompt)) + 2 > config.model.context:
            raise InputError(
                f"--prompt has more tokens than the {config.model.context - 2} that leave room "
                f"for one in model.context={config.model.context}: shorten it"
            )
        if tokenizer.vocab_size > model_config.vocab_size:
            for part in parts.values():
                check_rows(part, model_config.vocab_size)
        around = OWN_ENDS if given is None else given.around_documents()
        batches = PackedBatches(
            parts["train"],
            row_length=config.model.context,
            rows=config.rows,
            seed=config.seed,
            around=around,
        )
        return cls(
            parts=parts,
            text_digest=text_digest,
            tokenizer=tokenizer,
            model_config=model_config,
            batches=batches,
            config=config,
            around=around,
            rules=OWN_RULES if given is None else given.rules,
        )

    @property
    def loss(self) -> Callable[..., LossSum]:
        return language_loss

    def check(self, batch: Any) -> None:
        check_packed_batch(batch, self.model_config)

    def tokens(self, batch: Any) -> int:
        return int((batch.segments > 0).sum())

    def digest(self) -> str:
        return self.text_digest

    def summary(self) -> str:
        counts = {name: int(part.lengths.sum()) for name, part in self.parts.items()}
        return (
            f"{counts['train']:,} tokens in {len(self.parts['train']):,} documents to train on, "
            f"{counts['valid']:,} tokens to validate, {counts['test']:,} to test\n"
            f"{self.tokenizer.vocab_size:,} tokens in the vocabulary, {len(self.batches):,} "
            f"batches an epoch, {100 * self.batches.padding:.1f} % padding"
        )

    def evaluators(
        self, graphdef: nnx.GraphDef, buffers: Tree
    ) -> tuple["LanguageEvaluator", "LanguageEvaluator"]:
        prompt = self.prompt("valid")
        valid, test = (
            LanguageEvaluator(
                graphdef,
                buffers,
                self.model_config,
                self.tokenizer,
                self.parts[part],
                prompt=prompt,
                sample_tokens=self.config.sample_tokens,
                rows=self.config.rows,
                context=self.config.model.context,
                around=self.around,
                rules=self.rules,
            )
            for part in PARTS[1:]
        )
        return valid, test

    def prompt(self, part: Part) -> str:
        """What samples begin with: the user's, or the first words of a part."""
        length = min(PROMPT_TOKENS, self.config.model.context // 2)
        first = self.tokenizer.decode(self.parts[part].slice(0, 0, length))
        words, space, _ = first.rpartition(" ")
        first = words if space else first.rstrip("\N{REPLACEMENT CHARACTER}")
        return self.config.prompt or first

    def closing(self, path: Path, numbers: Mapping[str, float | str]) -> tuple[str, str]:
        prompt = shlex.quote(self.prompt("test"))
        return (
            f"Test loss {numbers['loss']:.3f} nats per token, {numbers['bits_per_byte']:.3f} bits "
            f"per byte",
            f"Let it write:\n\n"
            f"    jax-transformer generate {shlex.quote(str(path))} --prompt {prompt}\n",
        )


def read_documents(
    data: LanguageDataConfig, seed: int, tokenizer: TextTokenizer | None
) -> tuple[Mapping[Part, TokenDocuments], TextTokenizer, str]:
    """The tokens of each part, the tokenizer, and a hash of the text.

    Args:
        data: where the text is.
        seed: of the split.
        tokenizer: that of the model; None makes one.

    Raises:
        InputError: as they are read; a file of tokens by another tokenizer.
    """
    if data.tokens is not None:
        file = open_tokens(data.tokens)
        if tokenizer is not None and not same_tokenizer(file.tokenizer, tokenizer):
            raise InputError(
                f"--data.tokens {data.tokens}: its tokenizer is not that of the model: give the "
                f"text itself"
            )
        return file.parts, file.tokenizer, file.sha256
    texts = split_texts(data, seed)
    if tokenizer is None:
        tokenizer = make_tokenizer_of(data, texts)
    bare = tokenizer.bare() if isinstance(tokenizer, PretrainedTokenizer) else tokenizer
    hashed = hashlib.sha256()
    found: dict[Part, TokenDocuments] = {}
    for part in PARTS:
        documents = list(texts[part])
        hashed.update(repr(documents).encode())
        found[part] = tokenize(documents, bare)
    return found, tokenizer, hashed.hexdigest()


def check_rows(documents: TokenDocuments, vocab_size: int) -> None:
    """Refuse text with tokens that a model does not have, though its tokenizer does.

    Raises:
        InputError: naming the first document.
    """
    for index, (start, end) in enumerate(zip(documents.starts, documents.ends, strict=True)):
        highest = int(documents.ids[start:end].max(initial=0))
        if highest >= vocab_size:
            raise InputError(
                f"document {index} has the token {highest}, but the model has {vocab_size} of "
                f"them: leave that text out"
            )


def same_tokenizer(one: TextTokenizer, other: TextTokenizer) -> bool:
    """Whether two tokenizers are saved as the same file."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "one"), Path(folder, "other")
        one.save(paths[0])
        other.save(paths[1])
        return paths[0].read_bytes() == paths[1].read_bytes()


def make_tokenizer_of(
    data: LanguageDataConfig, texts: Mapping[Part, Iterable[str]]
) -> TextTokenizer:
    """The tokenizer that the settings ask for, from the documents to train on (`chars` from all).

    Raises:
        InputError: as `make_tokenizer`, or as the documents are read.
    """
    parts = PARTS if data.tokenizer == "chars" else PARTS[:1]
    text = (document for part in parts for document in texts[part])
    return make_tokenizer(data.tokenizer, text, data.vocab_size)


def split_texts(data: LanguageDataConfig, seed: int) -> Mapping[Part, Iterable[str]]:
    """The documents of each part: the user's, split, or those of the embedded corpus.

    Raises:
        InputError: a path that is missing; others as they are read.
    """
    if data.text:
        documents = text_documents(data.text, data.separator)
    elif data.jsonl is not None:
        documents = jsonl_documents(data.jsonl, data.field)
    else:
        return corpora.load_documents()
    split = Split.of(documents, share=data.held_out, seed=seed)
    return {part: split.part(part) for part in PARTS}


class LanguageEvaluator:
    """Evaluates parameters on documents: loss, bits per byte, a sample."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        buffers: Tree,
        config: DecoderOnlyConfig,
        tokenizer: TextTokenizer,
        documents: TokenDocuments,
        *,
        prompt: str,
        sample_tokens: int,
        rows: int,
        context: int,
        around: Ends = OWN_ENDS,
        rules: GenerationConfig = OWN_RULES,
    ):
        self.graphdef = graphdef
        self.buffers = buffers
        self.config = config
        self.tokenizer = tokenizer
        self.num_bytes = documents.num_bytes
        self.prompt = prompt
        self.sample_tokens = sample_tokens
        self.rules = rules
        self._documents = documents
        self._rows = rows
        self._context = context
        self._around = around

    def __call__(self, params: Tree) -> Evaluation:
        """Loss, bits per byte, what the model writes after the prompt."""
        loss, bits = self.measure(params)
        return Evaluation(
            loss=loss,
            score=-loss,
            numbers={"bits_per_byte": bits},
            samples=[{"prompt": self.prompt, "continuation": self.sample(params)}],
        )

    def files(self, params: Tree, evaluation: Evaluation) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def test(self, params: Tree) -> Mapping[str, float | str]:
        """Loss and bits per byte."""
        loss, bits = self.measure(params)
        return {"loss": loss, "bits_per_byte": bits}

    def measure(self, params: Tree) -> tuple[float, float]:
        """Nats per token, and `nats of all / (ln 2 * bytes of the text)`: that does not depend on
        the tokens. Ends of documents count among the former, not among the bytes."""
        # Batch by batch: the documents may be a file larger than memory.
        total = count = 0.0
        for batch in self.batches():
            loss = jax.device_get(loss_sum(self.graphdef, params, self.buffers, batch))
            total, count = total + float(loss.total), count + int(loss.count)
        return total / count, total / (math.log(2.0) * self.num_bytes)

    def batches(self) -> Iterable[PackedBatch]:
        """All documents once, in batches of one shape."""
        return evaluation_packs(
            self._documents, row_length=self._context, rows=self._rows, around=self._around
        )

    def sample(self, params: Tree) -> str:
        """What the model writes after the prompt, drawn at temperature 0.8; the same draws each
        time."""
        generator = TextGenerator(
            self.graphdef,
            params,
            self.buffers,
            self.config,
            self.tokenizer,
            rules=self.rules,
        )
        room = self.config.max_len - 1 - len(self.tokenizer.encode(self.prompt))
        strategy = make_strategy(temperature=TEMPERATURE, seed=0)
        try:
            (completion,) = generator(
                [self.prompt], max_tokens=min(self.sample_tokens, room), strategy=strategy
            )
        except InputError as error:
            return f"({error})"  # a model that has diverged has nothing to say
        return completion.text


loss_sum = jax.jit(language_loss, static_argnames="graphdef")
