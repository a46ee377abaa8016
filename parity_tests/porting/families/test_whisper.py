import json
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

from jax_transformer.cli import main
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.whisper import FAMILY
from jax_transformer.porting.identify import leaf_shapes
from jax_transformer.porting.plan import convert
from parity_tests.harness import QUICK
from parity_tests.porting.families.encoder_decoders import TARGET_REAL, T
from parity_tests.porting.families.encoders import check_close
from parity_tests.porting.families.harness import (
    B,
    Example,
    buffers_of,
    check_defaults,
    check_way_back,
    float64,
    ported,
    tensors_of,
    tokens,
)
from parity_tests.porting.test_port import bits_of

S, MELS = 10, 7

SIZES: dict[str, Any] = {
    "vocab_size": 31, "num_mel_bins": MELS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 3, "decoder_attention_heads": 2, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36, "max_source_positions": S, "max_target_positions": T,
    "pad_token_id": 30, "bos_token_id": 30, "eos_token_id": 30, "decoder_start_token_id": 29,
    "begin_suppress_tokens": [3, 30],
}  # fmt: skip


def example(name, **settings):
    config = WhisperConfig(**SIZES | settings)
    build = WhisperForConditionalGeneration
    return Example(name=name, family=FAMILY, build=build, config=config)


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        tie_word_embeddings=False,
        scale_embedding=True,
        activation_function="relu",
        dropout=0.2,
        attention_dropout=0.3,
        activation_dropout=0.4,
        encoder_layerdrop=0.1,
        decoder_layerdrop=0.1,
        apply_spec_augment=True,
        mask_time_prob=0.1,
        mask_time_length=11,
        mask_time_min_masks=1,
        mask_feature_prob=0.1,
        mask_feature_length=11,
        mask_feature_min_masks=1,
        use_weighted_layer_sum=True,
        classifier_proj_size=8,
        median_filter_width=5,
        suppress_tokens=[1, 2],
    ),
]


def features():
    """As the feature extractor gives them, `[B, mels, frames]`."""
    return np.random.default_rng(0).standard_normal((B, MELS, 2 * S)).astype(np.float32)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    model, heard = example.model(), features().astype(np.float64)
    target = tokens(example.config.vocab_size, T)
    with float64(example.build), torch.no_grad():
        theirs = model(
            input_features=torch.from_numpy(heard),
            decoder_input_ids=torch.from_numpy(target).long(),
            decoder_attention_mask=torch.from_numpy(TARGET_REAL).long(),
        ).logits
    masks = (
        np.ones((1, 1, 1, S), bool),
        TARGET_REAL[:, None, None, :] & np.tril(np.ones((T, T), bool)),
    )
    with jax.enable_x64(True):
        ours = ported(example, model)
        run = jax.jit(lambda *a: ours(*a), compiler_options=QUICK)
        found = run(*map(jnp.asarray, (heard.swapaxes(1, 2), target, *masks)))
    check_close(example, "logits", found, theirs, TARGET_REAL)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, WhisperConfig())


def test_the_bare_model_has_no_prefix():
    values = EXAMPLES[0].values | {"architectures": ["WhisperModel"]}
    config: Any = read_config(FAMILY, values)
    assert write_config(FAMILY, config, values) == values
    tensors = {
        name.removeprefix("model."): array
        for name, array in tensors_of(EXAMPLES[0].model()).items()
        if name != "proj_out.weight"
    }
    shapes = leaf_shapes(config)
    assert convert(FAMILY.rules(config), tensors, shapes).keys() == shapes.keys()
    with pytest.raises(InputError, match="stray"):
        convert(FAMILY.rules(config), tensors | {"encoder.stray": np.zeros(2)}, shapes)


def test_the_encoders_positions_are_those_of_the_file_to_the_bit():
    example = EXAMPLES[0]
    tensors = tensors_of(example.model(torch.float16))
    config: Any = read_config(FAMILY, example.values)
    leaves = convert(FAMILY.rules(config), tensors, leaf_shapes(config))
    theirs = tensors["model.encoder.embed_positions.weight"]
    np.testing.assert_array_equal(leaves["encoder.pos_encoding.pe"][0], theirs)


def test_a_new_model_has_the_positions_of_a_new_one_of_transformers():
    example = EXAMPLES[0]
    config: Any = read_config(FAMILY, example.values)
    theirs = WhisperForConditionalGeneration(example.config).model.encoder.embed_positions.weight
    pe = buffers_of(config)["encoder"]["pos_encoding"]["pe"][0]
    # Angles in float32 there.
    np.testing.assert_allclose(pe, theirs.detach(), rtol=0, atol=S * 2.0**-23)


def test_old_files_say_the_same_in_more_words():
    values = EXAMPLES[0].values
    old = {
        "num_hidden_layers": 2, "forced_decoder_ids": [[1, 28]], "max_length": 12,
        "suppress_tokens": [1, 2], "torch_dtype": "float32", "init_std": 0.02,
    }  # fmt: skip
    assert read_config(FAMILY, values | old) == read_config(FAMILY, values)


@pytest.mark.parametrize(
    "field",
    [
        {"architectures": ["WhisperForAudioClassification"]},
        {"activation_function": "tanh"},
        {"num_hidden_layers": 3},
        {"stray": 1},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, EXAMPLES[0].values | field)


COMPANIONS = ("generation_config.json", "preprocessor_config.json", "tokenizer.json", "vocab.json")


@pytest.fixture(scope="module", params=EXAMPLES, ids=str)
def folders(request, tmp_path_factory):
    """A folder by `transformers`, the port of it and the port back, in half precision."""
    path = tmp_path_factory.mktemp("whisper")
    model: Any = request.param.model(torch.float16)
    model.save_pretrained(path / "theirs")
    WhisperFeatureExtractor(feature_size=MELS).save_pretrained(path / "theirs")
    for name in ("tokenizer.json", "vocab.json"):
        tokens_only = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
        (path / "theirs" / name).write_text(json.dumps(tokens_only))
    main(["port", str(path / "theirs"), str(path / "ours")])
    main(["port", str(path / "ours"), str(path / "back")])
    return request.param, path


def test_there_and_back_every_tensor_and_file_is_identical(folders):
    _, path = folders
    assert bits_of(path / "back") == bits_of(path / "theirs")
    for name in ("config.json", *COMPANIONS):
        for folder in ("back",) if name == "config.json" else ("ours", "back"):
            assert (path / folder / name).read_bytes() == (path / "theirs" / name).read_bytes()


def test_what_comes_back_is_loaded_by_transformers_without_a_word(folders):
    example, path = folders
    build: Any = example.build
    model, report = build.from_pretrained(path / "back", output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in example.model(torch.float16).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize("folders", EXAMPLES[1:], ids=str, indirect=True)
def test_the_pytorch_model_of_this_project_is_verified_to_be_the_same(folders, tmp_path, capsys):
    _, path = folders
    wide = str(tmp_path / "wide")
    main(["port", str(path / "ours"), wide, "--to", "orbax", "--dtype", "float32"])
    main(["verify", wide, wide, "--dtype", "none"])
    assert "the same function" in capsys.readouterr().out


@pytest.mark.parametrize("folders", EXAMPLES[:1], ids=str, indirect=True)
def test_the_command_line_says_how_sound_is_read(folders, capsys):
    _, path = folders
    for flag in ("--text", "--prompt"):
        with pytest.raises(SystemExit) as ended:
            main(["generate", str(path / "ours"), flag, "hello"])
        assert ended.value.code == 2
        assert "ours reads sound: docs/porting.md says how" in capsys.readouterr().err
