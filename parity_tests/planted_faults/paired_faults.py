"""Two faults at once: in one module, in two, in a model and in what is done with it."""

from collections.abc import Iterator

import torch

from jax_transformer.decoding import program
from jax_transformer.verification.decoding.ways import CACHED
from parity_tests.planted_faults import decoding_faults, plant, training_faults
from parity_tests.planted_faults.fault import Fault
from parity_tests.planted_faults.faults import exchanged_gate, turned
from parity_tests.planted_faults.models import T


def pair_faults() -> Iterator[Fault]:
    place = "layers.1.self_attn"
    causal = plant.argument(
        place, 3, "mask", lambda m: m.any(dim=2, keepdim=True).expand(-1, -1, T, T)
    )
    yield Fault(
        "attention scale + not causal",
        "gpt2",
        place,
        plant.both(causal, plant.setting(place, scale=1.0)),
    )
    sign = plant.argument("layers.0.self_attn", 4, "bias", lambda bias: -bias)
    yield Fault(
        "attention scale + position bias sign",
        "bloom",
        "layers.0.self_attn",
        plant.both(sign, plant.setting("layers.0.self_attn", scale=1.0)),
    )
    rotary = f"{place}.rotary"
    yield Fault(
        "rotary base + rotary pairing",
        "llama",
        rotary,
        plant.config(rotary, pairing="adjacent", base=500000.0),
    )
    yield Fault(
        "norm epsilon + norm offset",
        "llama",
        "layers.0.norm2",
        plant.setting("layers.0.norm2", epsilon=1e-5, unit_offset=True),
    )
    yield Fault(
        "activation + gate and up",
        "llama",
        "layers.1.ffn",
        plant.both(
            plant.setting("layers.1.ffn", activation="gelu"),
            plant.forward("layers.1.ffn", exchanged_gate),
        ),
    )


def faults_in_two_modules() -> Iterator[Fault]:
    yield Fault(
        "norm epsilon",
        "llama",
        "layers.0.norm1",
        plant.both(
            plant.setting("layers.0.norm1", epsilon=1e-5),
            plant.config("layers.1.self_attn.rotary", base=500000.0),
        ),
        also=(("layers.1.self_attn.rotary", "rotary base"),),
    )
    hidden = plant.argument("layers.0.self_attn", 3, "mask", torch.ones_like)
    yield Fault(
        "no mask",
        "gpt2",
        "layers.0.self_attn",
        plant.both(hidden, plant.port(turned("layers.1.self_attn.out_proj.kernel"))),
        also=(("layers.1.self_attn.out_proj", "transposed kernel"),),
    )
    yield Fault(
        "activation",
        "document",
        "encoder.layers.1.ffn",
        plant.both(
            plant.setting("encoder.layers.1.ffn", activation="relu"),
            plant.output("decoder.layers.0.norm2", lambda x: x + 0.1 * x.sin()),
        ),
        also=(("decoder.layers.0.norm2", "unknown"),),
    )
    sign = plant.argument("layers.1.self_attn", 4, "bias", lambda bias: -bias)
    yield Fault(
        "attention scale",
        "bloom",
        "layers.0.self_attn",
        plant.both(plant.setting("layers.0.self_attn", scale=1.0), sign),
        also=(("layers.1.self_attn", "position bias sign"),),
    )
    yield Fault(
        "embedding scale",
        "gemma",
        "",
        plant.both(
            plant.setting("", scale=1.0), plant.setting("layers.1.norm1", unit_offset=False)
        ),
        also=(("layers.1.norm1", "norm offset"),),
    )


def faults_in_model_and_use() -> Iterator[Fault]:
    gelu = plant.setting("layers.0.ffn", activation="gelu")
    yield Fault(
        "activation",
        "llama",
        "layers.0.ffn",
        plant.both(gelu, training_faults.trained_by(b2=0.999)),
        task="all",
        also=(("optimizer, moments", "Adam betas"),),
    )
    lost = (program, "read_prompts", decoding_faults.fewer_slots)
    yield Fault(
        "activation",
        "gpt2",
        "layers.0.ffn",
        plant.both(gelu, decoding_faults.ours(lost)),
        task="all",
        also=((CACHED, "cache too short"),),
    )


FAULTS = (*pair_faults(), *faults_in_two_modules(), *faults_in_model_and_use())
