"""How good a translation model is on sentences that it does not train on."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import sacrebleu
from flax import nnx

from jax_transformer.config import (
    BOS_ID,
    EOS_ID,
    OWN_RULES,
    EncoderDecoderConfig,
    GenerationConfig,
    ModelConfig,
)
from jax_transformer.data.batches import EvaluationBatch, evaluation_batches
from jax_transformer.data.text import ParallelText
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.decoding.greedy import table_rows
from jax_transformer.decoding.translate import Translator
from jax_transformer.layers.mask import create_length_mask, create_look_ahead_mask
from jax_transformer.models.parameters import Tree
from jax_transformer.porting.text import MarianTokenizer, PretrainedTokenizer
from jax_transformer.training.report import ATTENTION_FILE
from jax_transformer.training.step import batch_loss
from jax_transformer.training.task import Evaluation

SAMPLES = 3

PairTokenizer = Tokenizer | PretrainedTokenizer | MarianTokenizer
"""Of both languages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """BLEU of a set of translations."""

    bleu: float
    """0 to 100."""
    signature: str
    """sacreBLEU's: how it was computed."""


class TranslationEvaluator:
    """Evaluates parameters on `text` with programs that are compiled once."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        buffers: Tree,
        config: ModelConfig | EncoderDecoderConfig,
        tokenizer: PairTokenizer,
        text: ParallelText,
        *,
        around: tuple[int, int | None] = (BOS_ID, EOS_ID),
        rules: GenerationConfig = OWN_RULES,
        tokens_per_batch: int = 4096,
    ):
        self.graphdef = graphdef
        self.buffers = buffers
        self.config = config
        self.tokenizer = tokenizer
        self.text = text
        self.around = around
        self.translator = Translator(
            graphdef,
            buffers,
            config,
            tokenizer,
            rules=rules,
            source_end_id=around[1],
            tokens_per_batch=tokens_per_batch,
        )
        self._batches: list[EvaluationBatch] = list(
            self.batches(
                tokenizer.encode_batch(text.sources),
                encode_targets(tokenizer, text.targets),
                tokens_per_batch,
            )
        )

    def batches(
        self, sources: list[list[int]], targets: list[list[int]], tokens_per_batch: int
    ) -> Iterator[EvaluationBatch]:
        """Batches of tokens."""
        start_id, end_id = self.around
        return evaluation_batches(
            sources,
            targets,
            tokens_per_batch=tokens_per_batch,
            vocab_size=self.config.src_vocab_size or 0,
            target_vocab_size=self.config.tgt_vocab_size,
            max_length=table_rows(self.config),
            start_id=start_id,
            end_id=end_id,
        )

    def __call__(self, params: Tree) -> Evaluation:
        """Loss, BLEU of greedy translations, samples."""
        hypotheses = self.translate(params)
        samples = [
            {"source": source, "reference": reference, "hypothesis": hypothesis}
            for source, reference, hypothesis in zip(
                self.text.sources[:SAMPLES],
                self.text.targets[:SAMPLES],
                hypotheses[:SAMPLES],
                strict=True,
            )
        ]
        score = corpus_bleu(hypotheses, self.text.targets)
        return Evaluation(
            loss=self.loss(params),
            score=score.bleu,
            numbers={"bleu": score.bleu, "signature": score.signature},
            samples=samples,
        )

    def files(self, params: Tree, evaluation: Evaluation) -> dict[str, Any]:
        """The attention of the first sample's translation."""
        sample = evaluation.samples[0]
        if not sample["hypothesis"]:
            return {}
        weights = self.attention(params, sample["source"], sample["hypothesis"])
        return {ATTENTION_FILE: weights}

    def test(self, params: Tree) -> dict[str, float | str]:
        """BLEU of greedy translations, with its signature."""
        score = corpus_bleu(self.translate(params), self.text.targets)
        return {"bleu": score.bleu, "signature": score.signature}

    def translate(self, params: Tree) -> list[str]:
        """Greedy translations of all sources."""
        return self.translator(params, self.text.sources)

    def loss(self, params: Tree) -> float:
        """Nats per token: the sum over all tokens by their number, whatever the batches."""
        sums = jax.device_get(
            [loss_sum(self.graphdef, params, self.buffers, held.batch) for held in self._batches]
        )
        return sum(float(loss.total) for loss in sums) / sum(int(loss.count) for loss in sums)

    def attention(self, params: Tree, source: str, hypothesis: str) -> dict[str, Any]:
        """Cross-attention of the last layer, mean over heads, for a translation: the picture in
        the report."""
        source_ids = self.tokenizer.encode(source)
        # Bytes that are no text can come back as more tokens than the model wrote.
        table = table_rows(self.config)
        (target_ids,) = encode_targets(self.tokenizer, [hypothesis])
        target_ids = target_ids[: None if table is None else table - 1]
        (held,) = self.batches([source_ids], [target_ids], 1)
        source_ids = held.batch.source[0, : held.batch.source_lengths[0]]
        weights = cross_attention(self.graphdef, params, self.buffers, held.batch)
        # Row t is where the model looked when it chose token t, which it reads from t - 1.
        rows = np.asarray(weights)[: len(target_ids), : len(source_ids)]
        own = isinstance(self.tokenizer, Tokenizer)
        source_pieces = self.tokenizer.pieces if own else self.tokenizer.source_pieces
        return {
            "source": source,
            "hypothesis": hypothesis,
            "source_tokens": source_pieces(source_ids),
            "target_tokens": self.tokenizer.pieces(target_ids),
            "weights": rows.round(4).tolist(),
            "layer": self.config.num_decoder_layers,
        }


loss_sum = jax.jit(batch_loss, static_argnames="graphdef")


@jax.jit(static_argnames="graphdef")
def cross_attention(graphdef: nnx.GraphDef, params: Tree, buffers: Tree, batch: Any) -> jax.Array:
    """`[T, S]` of the one row of `batch`, a `data.batches.Batch` as arrays."""
    model = nnx.merge(graphdef, params, buffers)
    src_mask = create_length_mask(batch.source_lengths, batch.source.shape[1])
    tgt_mask = create_look_ahead_mask(batch.decoder_input.shape[1])
    enc_output = model.encode(batch.source, src_mask)
    weights = model.decoder.cross_attention(batch.decoder_input, enc_output, src_mask, tgt_mask)
    return weights[-1][0].mean(axis=0)


def encode_targets(
    tokenizer: PairTokenizer, texts: Sequence[str], max_length: int | None = None
) -> list[list[int]]:
    """The ids of each text in the language that is translated into.

    Raises:
        InputError: a text of more than `max_length` tokens.
    """
    own = isinstance(tokenizer, Tokenizer)
    encode = tokenizer.encode_batch if own else tokenizer.encode_targets
    return encode(texts, max_length=max_length)


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """sacreBLEU with its defaults (Post 2018): 13a tokenisation, mixed case, one reference."""
    metric = sacrebleu.BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Score(bleu=score, signature=str(metric.get_signature()))
