"""What is heard is what `transformers` hears: prompts, tokens that may not come, ends of texts."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import WhisperConfig, WhisperForConditionalGeneration

from jax_transformer import from_pretrained, save_pretrained
from jax_transformer.config import EncoderDecoderConfig, GenerationConfig, LayerConfig
from jax_transformer.decoding import Transcriber, transcribe
from jax_transformer.errors import InputError
from parity_tests import tiny
from parity_tests.porting.families.harness import Example
from parity_tests.porting.families.test_whisper import FAMILY, MELS, SIZES, S

ROWS, MOST = 3, 24
START, GERMAN, ENGLISH, WRITE, TRANSLATE, END, PLAIN = range(24, 31)
# The last: what comes after it is a time to `transformers`, which cuts texts there.
LANGUAGES = {"lang_to_id": {"<|de|>": GERMAN, "<|en|>": ENGLISH}, "is_multilingual": True}
TASKS = {"task_to_id": {"transcribe": WRITE, "translate": TRANSLATE}}
SPECIAL = [START, GERMAN, ENGLISH, WRITE, TRANSLATE, PLAIN]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing but a start token": ({}, {}),
    "one language": (
        {"no_timestamps_token_id": PLAIN, "is_multilingual": False, "suppress_tokens": SPECIAL},
        {},
    ),
    "an old file of one language": ({"forced_decoder_ids": [[1, PLAIN]]}, {}),
    "an old file of several": (
        {"forced_decoder_ids": [[1, GERMAN], [2, WRITE], [3, PLAIN]], **LANGUAGES, **TASKS},
        {},
    ),
    "several languages": (
        {"no_timestamps_token_id": PLAIN, "forced_decoder_ids": [[1, None], [2, WRITE]],
         "suppress_tokens": SPECIAL, **LANGUAGES, **TASKS},
        {"language": "de"},
    ),
    "translation": (
        {"no_timestamps_token_id": PLAIN, "max_new_tokens": 9, **LANGUAGES, **TASKS},
        {"language": "en", "task": "translate"},
    ),
    "few tokens": ({"no_timestamps_token_id": PLAIN, "max_length": 7}, {}),
}  # fmt: skip

RULES = {
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "max_length": MOST,
    "begin_suppress_tokens": [3, END],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def float64_compiled_quickly():
    """In which two logits that differ never tie."""
    quick = jax.jit(
        transcribe.decode.__wrapped__,
        static_argnames=("graphdef", "max_len", "rules"),
        compiler_options=tiny.QUICK,
    )
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(transcribe, "decode", quick)
        yield


@pytest.fixture(scope="module")
def model():
    config = WhisperConfig(**SIZES | {"max_target_positions": MOST, "tie_word_embeddings": False})
    build = WhisperForConditionalGeneration
    made: Any = Example(name="whisper", family=FAMILY, build=build, config=config).model()
    return made


def features() -> np.ndarray:
    """`[B, frames, mels]`."""
    return np.random.default_rng(0).standard_normal((ROWS, 2 * S, MELS))


def save(model, path, **values):
    """A folder with these words in its `generation_config.json`, and a tokenizer."""
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(RULES | values))
    words = {f"w{number}": number for number in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens([f"w{number}" for number in (*SPECIAL, END)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def heard_by_transformers(path, **said):
    """The tokens of each row, up to its end."""
    theirs = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float64).eval()
    heard = torch.from_numpy(features().swapaxes(1, 2).copy())
    with torch.no_grad():
        rows = theirs.generate(heard, do_sample=False, num_beams=1, **said).tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]


@pytest.mark.filterwarnings("ignore")  # Their deprecations, of files as they are.
@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_transformers(model, name, tmp_path):
    values, said = CASES[name]
    path = save(model, tmp_path / "model", **values)
    expected = heard_by_transformers(path, **said)
    transcriber = from_pretrained(path).transcriber(**said)
    assert transcriber.tokens(features()) == expected
    assert len({token for row in expected for token in row}) > 4
    texts = [" ".join(f"w{token}" for token in row if token not in SPECIAL) for row in expected]
    assert transcriber(features()) == texts


def test_a_text_ends_where_its_end_comes_whatever_the_other_rows_do(model, tmp_path):
    free = from_pretrained(save(model, tmp_path / "free")).transcriber().tokens(features())
    end = next(token for token in free[0][3:] if token not in free[1])
    path = save(model, tmp_path / "model", eos_token_id=[END, end])
    transcriber = from_pretrained(path).transcriber()
    found = transcriber.tokens(features())
    assert found[0] == free[0][: free[0].index(end)]
    assert found[1] == free[1]
    for row in range(ROWS):
        assert transcriber.tokens(features()[row : row + 1]) == [found[row]]
    assert transcriber.tokens(features(), max_tokens=2) == [row[:2] for row in found]


@pytest.fixture(scope="module")
def several(model, tmp_path_factory):
    """One that knows several languages."""
    path = tmp_path_factory.mktemp("several") / "model"
    return from_pretrained(
        save(model, path, no_timestamps_token_id=PLAIN, **LANGUAGES, **TASKS), dtype="float32"
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, r"it knows several languages: give language=\.\.\., one of de, en"),
        ({"task": "transcribe"}, "it knows several languages"),
        ({"language": "fr"}, "language='fr': must be one of de, en"),
        ({"language": "de", "task": "sing"}, "task='sing': must be one of transcribe, translate"),
    ],
)
def test_what_the_model_does_not_know_is_refused(several, said, message):
    with pytest.raises(InputError, match=f"/model: {message}"):
        several.transcriber(**said)


@pytest.mark.parametrize(
    ("values", "said", "message"),
    [
        ({}, {"language": "de"}, "language='de': it has no choice of language"),
        ({}, {"task": "translate"}, "task='translate': it has no choice of task"),
        ({"return_timestamps": True}, {}, "return_timestamps=True, which is not built"),
        ({"no_speech_threshold": 0.6}, {}, r"no_speech_threshold=0\.6, which is not built"),
        ({"forced_decoder_ids": [1, 5]}, {}, "forced_decoder_ids=.*places 1, 2"),
        ({"forced_decoder_ids": [[2, 5]]}, {}, "forced_decoder_ids=.*places 1, 2"),
        ({"no_timestamps_token_id": 31}, {}, r"prompt=\(31,\): the model has the tokens 0 to 30"),
        ({"forced_decoder_ids": [[1, END]]}, {}, "one of these ends a text"),
        ({"forced_decoder_ids": [[n, 5] for n in range(1, MOST)]}, {}, "leaves no room for text"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(several, tmp_path, values, said, message):
    path = save_again(several, tmp_path / "model", values)
    with pytest.raises(InputError, match=message) as caught:
        from_pretrained(path, dtype="float32").transcriber(**said)
    assert "\n" not in str(caught.value)


def save_again(found, path, values):
    save_pretrained(found, path)
    (path / "generation_config.json").write_text(json.dumps(RULES | values))
    return path


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        (
            np.zeros((1, MELS, 2 * S)),
            {},
            rf"must be rows of {2 * S} frames with {MELS} numbers each: features\.swapaxes",
        ),
        (
            np.zeros((1, S, MELS)),
            {},
            rf"features of shape \[1, {S}, {MELS}\]: .*: fill the sound up",
        ),
        (np.zeros((2 * S, MELS)), {}, "features of shape"),
        (np.zeros((0, 2 * S, MELS)), {}, "features of shape"),
        (np.full((1, 2 * S, MELS), np.nan), {}, "not all finite"),
        (np.zeros((1, 2 * S, MELS)), {"max_tokens": 0}, "max_tokens=0: there is room for 1 to 20"),
        (np.zeros((1, 2 * S, MELS)), {"max_tokens": 21}, "max_tokens=21: there is room"),
    ],
)
def test_what_cannot_be_heard_or_written_is_refused(several, features, options, message):
    transcriber = several.transcriber("de")
    with pytest.raises(InputError, match=message) as caught:
        transcriber(features, **options)
    assert "\n" not in str(caught.value)


def test_a_model_that_reads_text_hears_nothing(several):
    with pytest.raises(InputError, match="the model reads sound, not text"):
        several.translator()
    layer = LayerConfig(d_model=8, num_heads=2, d_ff=8, causal=False)
    config = EncoderDecoderConfig(
        src_vocab_size=9,
        tgt_vocab_size=9,
        encoder=layer,
        decoder=dataclasses.replace(layer, causal=True),
        num_encoder_layers=1,
        num_decoder_layers=1,
        position="learned",
    )
    parts = several.graphdef, several.params, several.buffers
    with pytest.raises(InputError, match="the model reads text, not sound"):
        Transcriber(*parts, config, several.tokenizer, rules=GenerationConfig(start_id=1))
