"""Models' configurations refuse what does not go together, and are read as they were saved."""

import dataclasses
import json

import pytest

from jax_transformer.config import (
    AudioConfig,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    LayerConfig,
    ModelConfig,
    RotaryConfig,
    from_dict,
)
from jax_transformer.errors import InputError

CAUSAL = LayerConfig(d_model=16, num_heads=4, d_ff=8, causal=True)
BOTH_WAYS = dataclasses.replace(CAUSAL, causal=False)
ROTARY = dataclasses.replace(CAUSAL, rotary=RotaryConfig(pairing="half"))

DECODER_ONLY = DecoderOnlyConfig(vocab_size=9, layer=CAUSAL, num_layers=2, position="learned")
ENCODER_ONLY = EncoderOnlyConfig(vocab_size=9, layer=BOTH_WAYS, num_layers=2)
ENCODER_DECODER = EncoderDecoderConfig(
    src_vocab_size=9,
    tgt_vocab_size=8,
    encoder=BOTH_WAYS,
    decoder=CAUSAL,
    num_encoder_layers=1,
    num_decoder_layers=1,
    position="none",
)

LISTENING = dataclasses.replace(
    ENCODER_DECODER, src_vocab_size=None, audio=AudioConfig(num_mel_bins=5), position="learned"
)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DECODER_ONLY, {"vocab_size": 0}, "vocab_size=0: must be a whole number"),
        (DECODER_ONLY, {"position": "relative"}, "position='relative': must be one of none"),
        (DECODER_ONLY, {"position": "rotary"}, "position='rotary' with a layer of rotary=None"),
        (DECODER_ONLY, {"layer": ROTARY}, "position='learned' with a layer of rotary=Rotary"),
        (DECODER_ONLY, {"layer": BOTH_WAYS}, r"layer\.causal=False: must be True there"),
        (DECODER_ONLY, {"position_offset": -1}, "position_offset=-1: must be a whole number"),
        (DECODER_ONLY, {"embedding_scale": -2.0}, r"embedding_scale=-2\.0: must be a finite"),
        (DECODER_ONLY, {"logit_soft_cap": 0.0}, r"logit_soft_cap=0\.0: must be a finite"),
        (DECODER_ONLY, {"max_len": 0}, "max_len=0: must be a whole number"),
        (
            DECODER_ONLY,
            {"position": "alibi", "position_offset": 2},
            "position_offset=2 with position='alibi': only a learned table",
        ),
        (ENCODER_ONLY, {"layer": CAUSAL}, r"layer\.causal=True: must be False there"),
        (ENCODER_ONLY, {"token_types": -1}, "token_types=-1: must be a whole number of at least 0"),
        (ENCODER_ONLY, {"head_activation": "x"}, "head_activation='x': must be one of gelu"),
        (ENCODER_DECODER, {"encoder": CAUSAL}, r"encoder\.causal=True: must be False there"),
        (ENCODER_DECODER, {"decoder": BOTH_WAYS}, r"decoder\.causal=False: must be True there"),
        (ENCODER_DECODER, {"decoder": ROTARY}, "position='none' with a layer of rotary"),
        (ENCODER_DECODER, {"logit_scale": 0}, "logit_scale=0: must be a finite number above 0"),
        (
            ENCODER_DECODER,
            {"decoder": dataclasses.replace(CAUSAL, d_model=32)},
            r"encoder\.d_model=16, decoder\.d_model=32: the decoder reads",
        ),
        (
            ENCODER_DECODER,
            {"decoder": dataclasses.replace(CAUSAL, placement="parallel")},
            r"decoder\.placement='parallel': not with attention to an encoder",
        ),
        (
            ENCODER_DECODER,
            {"decoder": dataclasses.replace(CAUSAL, window=4)},
            r"decoder\.window=4: an encoder-decoder has no sliding window",
        ),
        (
            ENCODER_DECODER,
            {"sinusoid_halves": True},
            "sinusoid_halves with position='none': only a sinusoidal table",
        ),
        (
            ENCODER_DECODER,
            {"shared_embedding": True},
            "shared_embedding with src_vocab_size=9 and tgt_vocab_size=8: one table needs",
        ),
        (ENCODER_DECODER, {"src_vocab_size": None}, "src_vocab_size=None: must be a whole number"),
        (LISTENING, {"src_vocab_size": 9}, "audio with src_vocab_size=9: the source is one of"),
        (LISTENING, {"position": "sinusoidal"}, "audio with position='sinusoidal': a decoder"),
        (LISTENING, {"shared_embedding": True}, "shared_embedding with src_vocab_size=None"),
        (LISTENING.audio, {"num_mel_bins": 0}, "num_mel_bins=0: must be a whole number"),
        (LISTENING.audio, {"max_len": 1.5}, r"max_len=1\.5: must be a whole number"),
    ],
)
def test_what_does_not_go_together_is_refused(config, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        dataclasses.replace(config, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        DECODER_ONLY,
        dataclasses.replace(DECODER_ONLY, layer=ROTARY, position="rotary", embedding_scale=True),
        dataclasses.replace(
            DECODER_ONLY,
            layer=dataclasses.replace(CAUSAL, window=4),
            local_layer=CAUSAL,
            local_layers=(0,),
            embedding_scale=2.5,
        ),
        ENCODER_ONLY,
        ENCODER_DECODER,
        LISTENING,
        ModelConfig(src_vocab_size=9, tgt_vocab_size=9, tied_tables="all").layers(),
    ],
)
def test_a_saved_configuration_is_the_same_when_read(config):
    saved = json.loads(json.dumps(config.to_dict()))
    read = from_dict(type(config), saved, place="here")
    assert read == config
    assert hash(read) == hash(config)


def test_a_number_and_a_truth_value_may_both_scale_embeddings():
    for value in (True, 2.0, 3):
        saved = dataclasses.replace(DECODER_ONLY, embedding_scale=value).to_dict()
        assert from_dict(DecoderOnlyConfig, saved, place="here").embedding_scale is value
    with pytest.raises(InputError, match="here: embedding_scale='2': must be a number"):
        from_dict(DecoderOnlyConfig, saved | {"embedding_scale": "2"}, place="here")


@pytest.mark.parametrize("tied_tables", ["none", "decoder", "all"])
def test_the_documents_model_is_one_of_the_encoder_decoders(tied_tables):
    config = ModelConfig(
        src_vocab_size=9,
        tgt_vocab_size=9,
        d_model=16,
        num_heads=4,
        norm_placement="pre",
        activation="relu",
        position_encoding="learned",
        tied_tables=tied_tables,
        max_len=7,
        dropout=0.3,
        num_decoder_layers=2,
    ).layers()
    assert (config.tied, config.shared_embedding) == {
        "none": (False, False),
        "decoder": (True, False),
        "all": (True, True),
    }[tied_tables]
    assert (config.position, config.max_len, config.embedding_scale) == ("learned", 7, True)
    assert (config.num_encoder_layers, config.num_decoder_layers) == (6, 2)
    for layer in (config.encoder, config.decoder):
        assert (layer.placement, layer.activation, layer.dropout) == ("pre", "relu", 0.3)
        assert (layer.norm, layer.norm_epsilon, layer.gated) == ("layer", 1e-5, False)
