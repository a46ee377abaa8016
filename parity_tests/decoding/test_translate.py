import pytest

from jax_transformer.decoding.translate import Translator
from jax_transformer.errors import InputError
from jax_transformer.training.run import load_best
from parity_tests import tiny

SENTENCES = [
    "a b c d e f", "h", "c c", "g f e d", "a b c d e f g h a b c d e f g h", "b a", "d", "e h e",
    "f f", "b c d",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


@pytest.fixture(scope="module")
def model():
    return load_best(tiny.finished().path)


@pytest.fixture(scope="module")
def translator(model):
    return Translator(model.graphdef, model.buffers, model.config, model.tokenizer)


@pytest.fixture(scope="module")
def translations(model, translator):
    return translator(model.params, SENTENCES)


def test_sentences_of_any_lengths_are_translated_as_each_alone(model, translator, translations):
    assert translations == [translator(model.params, [each])[0] for each in SENTENCES]
    # The model has learnt something about its source, so that a row mixed up would show.
    assert len(set(translations)) > 3


def test_translations_are_in_the_order_of_the_sentences(model, translator, translations):
    assert translator(model.params, SENTENCES[::-1]) == translations[::-1]


def test_many_batches_give_the_same_translations(model, translations):
    narrow = Translator(
        model.graphdef, model.buffers, model.config, model.tokenizer, tokens_per_batch=32
    )
    assert narrow(model.params, SENTENCES) == translations


def test_a_second_batch_of_the_same_shape_compiles_nothing(model, translator, translations):
    compiled = tiny.quick_decode._cache_size()
    translator(model.params, [f"{each} a" for each in SENTENCES])
    assert tiny.quick_decode._cache_size() == compiled


def test_a_blank_sentence_has_a_blank_translation_in_its_place(model, translator, translations):
    assert translator(model.params, [SENTENCES[0], "", *SENTENCES[1:], " \t"]) == [
        translations[0], "", *translations[1:], "",
    ]  # fmt: skip
    assert translator(model.params, [""]) == [""]
    assert translator(model.params, []) == []


def test_max_len_bounds_the_tokens_of_a_translation(model, translator, translations):
    (cut,) = translator(model.params, SENTENCES[:1], max_len=2)
    assert len(cut.split()) == 2
    assert translations[0].startswith(cut)


@pytest.mark.parametrize("max_len", [0, -1, 33])
def test_max_len_outside_the_position_table_is_refused(model, translator, max_len):
    with pytest.raises(InputError, match=f"^max_len={max_len}: the model decodes 1 to 32 tokens"):
        translator(model.params, ["a"], max_len=max_len)


def test_a_sentence_longer_than_the_position_table_is_named(model, translator):
    with pytest.raises(InputError, match=r"^the text 'h h h .*' has 41 tokens with its <eos>, more "
                       r"than the 32 that the model accepts: cut it into sentences$"):  # fmt: skip
        translator(model.params, ["a b", " ".join("h" * 40)])
