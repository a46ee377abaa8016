import dataclasses

import numpy as np
import pytest

from jax_transformer.data.text import ParallelText
from jax_transformer.training.evaluate import TranslationEvaluator, corpus_bleu
from jax_transformer.training.mesh import data_mesh, replicated
from jax_transformer.training.run import load_best
from parity_tests import tiny


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


@pytest.fixture(scope="module")
def model():
    return load_best(tiny.finished().path, replicated(data_mesh()))


def evaluator(model, text, **options):
    return TranslationEvaluator(
        model.graphdef, model.buffers, model.config, model.tokenizer, text, **options
    )


def text_of(*lengths):
    """Sentences of these numbers of words, the target the reverse of the source."""
    words = [(tiny.SOURCE_WORDS * 4)[length : 2 * length] for length in lengths]
    return ParallelText(
        sources=tuple(" ".join(word) for word in words),
        targets=tuple(" ".join(reversed(word)) for word in words),
    )


def test_the_held_out_loss_is_a_mean_over_tokens_whatever_the_batches(model):
    lengths = range(1, 11)
    text = text_of(*lengths)
    # Of rows 32 wide: 1, 4 and all 10 sentences at once, the last two with empty rows.
    losses = [
        evaluator(model, text, tokens_per_batch=32 * rows).loss(model.params) for rows in (1, 4, 16)
    ]
    # float32 sums of at most ten sentences in another order.
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    single = [
        evaluator(model, text_of(length), tokens_per_batch=32).loss(model.params)
        for length in lengths
    ]
    tokens = np.array([len(model.tokenizer.encode(target)) + 1 for target in text.targets])
    assert losses[0] == pytest.approx(np.average(single, weights=tokens), rel=1e-6)
    # Which is another number than the mean over sentences.
    assert abs(losses[0] - np.mean(single)) > 1e-3


def test_bleu_is_that_of_sacrebleu_and_says_how_it_was_computed():
    references = ["the cat sat on the mat", "a stitch in time saves nine"]
    assert corpus_bleu(references, references).bleu == pytest.approx(100.0)
    score = corpus_bleu(["the cat sat on a mat", "a stitch in time"], references)
    # By hand: 9/10, 6/8, 4/6, 2/4 n-grams and exp(1 - 12/10): the product's root times 0.8187.
    expected = 100 * (9 / 10 * 6 / 8 * 4 / 6 * 2 / 4) ** 0.25 * np.exp(1 - 12 / 10)
    assert score.bleu == pytest.approx(expected, rel=1e-9)
    assert score.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_samples_are_the_first_sentences_with_their_translations(model):
    text = text_of(*range(1, 11))
    held = evaluator(model, text)
    evaluation = held(model.params)
    assert [sample["source"] for sample in evaluation.samples] == list(text.sources[:3])
    assert [sample["reference"] for sample in evaluation.samples] == list(text.targets[:3])
    hypotheses = held.translate(model.params)
    assert [sample["hypothesis"] for sample in evaluation.samples] == hypotheses[:3]
    score = corpus_bleu(hypotheses, text.targets)
    assert evaluation.score == score.bleu
    assert evaluation.numbers == {"bleu": score.bleu, "signature": score.signature}
    assert held.test(model.params) == evaluation.numbers
    assert evaluation.loss == held.loss(model.params)


def test_attention_is_spread_over_the_tokens_of_the_source_alone(model):
    held = evaluator(model, text_of(3))
    attention = held.attention(model.params, "a b c", "U T S W")
    assert attention["source_tokens"] == ["▁a", "▁b", "▁c", "<eos>"]
    assert attention["target_tokens"] == ["▁U", "▁T", "▁S", "▁W"]
    weights = np.array(attention["weights"])
    assert weights.shape == (4, 4)
    assert (weights >= 0.0).all()
    # Rounded to four digits each.
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=4 * 0.5e-4)
    assert attention["layer"] == 1


def test_attention_of_other_sentences_compiles_nothing_new(model):
    held = evaluator(model, text_of(3))
    held.attention(model.params, "a b c", "U T S W")
    compiled = tiny.quick_attention._cache_size()
    held.attention(model.params, "h g f e d", "S")
    assert tiny.quick_attention._cache_size() == compiled


def test_attention_survives_a_translation_that_is_longer_than_the_position_table(model):
    short = dataclasses.replace(model.config, max_len=8)
    held = TranslationEvaluator(model.graphdef, model.buffers, short, model.tokenizer, text_of(3))
    attention = held.attention(model.params, "a b c", "S " * 50)
    assert len(attention["target_tokens"]) == len(attention["weights"]) == 7
