"""Translation as a task: sentence pairs, an encoder-decoder model, BLEU."""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from jax_transformer.config import (
    BOS_ID,
    EOS_ID,
    OWN_RULES,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    GenerationConfig,
    ModelConfig,
)
from jax_transformer.data import corpora
from jax_transformer.data.batches import Batches
from jax_transformer.data.corpora import Corpus
from jax_transformer.data.text import read_parallel, read_tsv
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.decoding.greedy import table_rows
from jax_transformer.models.parameters import Tree
from jax_transformer.training.config import DataConfig, TrainConfig
from jax_transformer.training.evaluate import (
    PairTokenizer,
    TranslationEvaluator,
    encode_targets,
)
from jax_transformer.training.initial import Given
from jax_transformer.training.loss import LossSum
from jax_transformer.training.run import AnyModelConfig, RunDirectory
from jax_transformer.training.step import batch_loss, check_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationTask:
    """The `Task` of a `TrainConfig`."""

    corpus: Corpus
    tokenizer: PairTokenizer
    model_config: ModelConfig | EncoderDecoderConfig
    batches: Batches
    around: tuple[int, int | None]
    """What a decoder begins with, and what is put after a sentence, if the tokenizer does not."""
    rules: GenerationConfig

    testing = "Translating the test sentences with the best model ..."

    @classmethod
    def read(cls, config: TrainConfig, run: RunDirectory, given: Given | None) -> "TranslationTask":
        """Read the data; make tokenizer and model config, if they are not given.

        Raises:
            InputError: data that cannot be used; files of a run that do not fit each other.
        """
        corpus = load_corpus(config.data, config.seed)
        if config.resume is not None:
            run.check_digest(digest(corpus))
        around: tuple[int, int | None] = (BOS_ID, EOS_ID)
        rules = OWN_RULES
        if given is None:
            text = [*corpus.train.sources, *corpus.train.targets]
            tokenizer: PairTokenizer = Tokenizer.train(text, config.data.vocab_size)
            model_config: AnyModelConfig = ModelConfig(
                **dataclasses.asdict(config.model),
                src_vocab_size=tokenizer.vocab_size,
                tgt_vocab_size=tokenizer.vocab_size,
            )
        else:
            model_config, rules, around = given.model_config, given.rules, given.around_sentences()
            assert isinstance(given.tokenizer, PairTokenizer)
            tokenizer = given.tokenizer
        assert not isinstance(model_config, DecoderOnlyConfig)
        max_length = table_rows(model_config)
        batches = Batches(
            tokenizer.encode_batch(corpus.train.sources, max_length=max_length),
            encode_targets(tokenizer, corpus.train.targets, max_length),
            tokens_per_batch=config.tokens_per_batch,
            seed=config.seed,
            vocab_size=model_config.src_vocab_size or 0,
            target_vocab_size=model_config.tgt_vocab_size,
            max_length=max_length,
            start_id=around[0],
            end_id=around[1],
        )
        return cls(
            corpus=corpus,
            tokenizer=tokenizer,
            model_config=model_config,
            batches=batches,
            around=around,
            rules=rules,
        )

    @property
    def loss(self) -> Callable[..., LossSum]:
        return batch_loss

    def check(self, batch: Any) -> None:
        check_batch(batch, self.model_config)

    def tokens(self, batch: Any) -> int:
        return int(batch.target_lengths.sum())

    def digest(self) -> str:
        return digest(self.corpus)

    def summary(self) -> str:
        corpus = self.corpus
        skipped = f" ({corpus.train.skipped:,} with a blank side left out)"
        return (
            f"{len(corpus.train):,} sentence pairs to train on"
            f"{skipped if corpus.train.skipped else ''}, {len(corpus.valid):,} to validate, "
            f"{len(corpus.test):,} to test\n"
            f"{self.tokenizer.vocab_size:,} tokens in the vocabulary, "
            f"{len(self.batches):,} batches an epoch"
        )

    def evaluators(
        self, graphdef: nnx.GraphDef, buffers: Tree
    ) -> tuple[TranslationEvaluator, TranslationEvaluator]:
        valid, test = (
            TranslationEvaluator(
                graphdef,
                buffers,
                self.model_config,
                self.tokenizer,
                text,
                around=self.around,
                rules=self.rules,
            )
            for text in (self.corpus.valid, self.corpus.test)
        )
        return valid, test

    def closing(self, path: Path, numbers: Mapping[str, float | str]) -> tuple[str, str]:
        directory = shlex.quote(str(path))
        sentence = shlex.quote(self.corpus.test.sources[0])
        return (
            f"Test BLEU {numbers['bleu']:.1f} on {len(self.corpus.test)} sentences, greedy "
            f"({numbers['signature']})",
            f"Translate your own sentence:\n\n"
            f"    jax-transformer generate {directory} --text {sentence}\n",
        )


def digest(corpus: Corpus) -> str:
    """A hash of all sentences."""
    parts = [(text.sources, text.targets) for text in (corpus.train, corpus.valid, corpus.test)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load_corpus(data: DataConfig, seed: int) -> Corpus:
    """The user's files, split, or the embedded corpus.

    Raises:
        InputError: a file that cannot be used (see `data.text`).
    """
    if data.tsv is not None:
        text = read_tsv(data.tsv)
    elif data.source is not None and data.target is not None:
        text = read_parallel(data.source, data.target)
    else:
        return corpora.load()
    return corpora.split(text, valid=data.valid_size, test=data.test_size, seed=seed)
