"""What must hold of every family: the same function as `transformers`, and the way back exact."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import modeling_rope_utils

from jax_transformer.config import DecoderOnlyConfig, EncoderOnlyConfig
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.encoder_decoder import EncoderDecoder
from jax_transformer.models.encoder_only import EncoderOnly
from jax_transformer.models.parameters import cast, flatten, split, unflatten
from jax_transformer.porting.families.base import Config, Family, read_config, write_config
from jax_transformer.porting.identify import leaf_shapes
from jax_transformer.porting.plan import convert, convert_back
from parity_tests.harness import QUICK, to_numpy
from parity_tests.models import third_party

B, T = 3, 9
REAL = np.ones((B, T), bool)
REAL[1, 6:] = REAL[2, :4] = False
"""A full row, one padded on the right, one on the left."""


def tokens(vocab_size: int, length: int = T, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (B, length)).astype(np.int32)


def positions(last: int) -> np.ndarray:
    """Counted from the first real token; the first row ends at `last`."""
    counted = np.maximum(np.cumsum(REAL, axis=1) - 1, 0)
    counted[0] += last - T + 1
    return counted.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A small model of `transformers`."""

    name: str
    family: Family
    build: Callable[[Any], torch.nn.Module]
    config: Any

    def __str__(self) -> str:
        return self.name

    @property
    def values(self) -> dict[str, Any]:
        """What `save_pretrained` writes as `config.json`."""
        return json.loads(self.config.to_json_string())

    def model(self, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
        """In evaluation mode, with weights under which faults show: nothing 0 or 1, logits of order
        1 to 10."""
        self.config._attn_implementation = "eager"
        with float64(self.build):
            model = self.build(self.config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() == 1:
                    parameter.copy_(float(name.endswith("weight")) + 0.3 * noise)
                else:
                    parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)
        model.tie_weights()
        return model.to(dtype)


def float64(build: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, models of that class compute every norm, angle and softmax in float64."""
    return third_party.float64((sys.modules[build.__module__], modeling_rope_utils))


def build(config: Config) -> nnx.Module:
    """Our model."""
    kinds: dict[Any, Any] = {DecoderOnlyConfig: DecoderOnly, EncoderOnlyConfig: EncoderOnly}
    return kinds.get(type(config), EncoderDecoder)(config, rngs=nnx.Rngs(0))


def skeleton(config: Config) -> tuple[nnx.GraphDef, Any, Any]:
    """`split` of our model, with shapes for leaves."""
    return split(nnx.eval_shape(lambda: build(config)))


def buffers_of(config: Config) -> Any:
    """The buffers of our model, without the time for its parameters."""
    return jax.jit(lambda: split(build(config))[2], compiler_options=QUICK)()


def tensors_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The state dict."""
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}


def ported(example: Example, model: torch.nn.Module, dtype: Any = jnp.float64) -> nnx.Module:
    """Our model with those weights."""
    config = read_config(example.family, example.values)
    graphdef, params, buffers = skeleton(config)
    leaves = convert(example.family.rules(config), tensors_of(model), leaf_shapes(config))
    arrays = {name: jnp.asarray(leaf) for name, leaf in leaves.items()}
    params = unflatten({name: arrays.pop(name) for name in flatten(params)}, params)
    if arrays:
        buffers = unflatten(arrays, buffers)
    elif jax.tree.leaves(buffers):
        buffers = buffers_of(config)
    return nnx.merge(graphdef, cast(params, dtype), cast(buffers, dtype))


def check_same_function(example: Example, last: int, mask_name: str = "attention_mask") -> None:
    """Float64 logits to 1e-10 under padding on both sides and at the last positions; of a decoder
    or encoder."""
    model = example.model()
    ids, places = tokens(example.config.vocab_size), positions(last)
    with float64(example.build), torch.no_grad():
        theirs = model(
            input_ids=torch.from_numpy(ids).long(),
            position_ids=torch.from_numpy(places).long(),
            **{mask_name: torch.from_numpy(REAL.astype(np.int64))},
        ).logits.numpy()
    with jax.enable_x64(True):
        ours = ported(example, model)
        run = jax.jit(lambda *a: ours(*a), compiler_options=QUICK)
        logits = np.asarray(
            run(jnp.asarray(ids), jnp.asarray(REAL[:, None, None]), jnp.asarray(places))
        )
    assert 0.5 < theirs[REAL].std() < 20
    error = np.linalg.norm((logits - theirs)[REAL]) / np.linalg.norm(theirs[REAL])
    assert error < 1e-10, f"{example}: off by {error:.3g}"


def check_way_back(example: Example, dtype: torch.dtype = torch.bfloat16) -> None:
    """Every tensor and the config are identical, bit for bit."""
    model = example.model(dtype)
    names = model.state_dict()
    raw = {
        n: t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()
        for n, t in names.items()
    }
    config = read_config(example.family, example.values)
    rules = example.family.rules(config)
    there = convert(rules, raw, leaf_shapes(config))
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        raw.pop(name, None)  # what `save_pretrained` leaves out
    back = convert_back(rules, there, {name: array.shape for name, array in raw.items()})
    assert back.keys() == raw.keys()
    for name, array in raw.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    assert write_config(example.family, config, example.values) == example.values
    written = write_config(example.family, config)
    assert read_config(example.family, written) == config
    # Without the file that it came from, too, it is what the class takes.
    fields = {name: value for name, value in written.items() if name != "model_type"}
    taken = type(example.config)(**fields)
    assert read_config(example.family, json.loads(taken.to_json_string())) == config


def check_defaults(family: Family, config: Any) -> None:
    """What the class writes for a model with no setting given is what an empty file is read as."""
    written = json.loads(config.to_json_string(use_diff=False))
    assert read_config(family, written) == read_config(family, {})
