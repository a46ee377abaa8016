"""Models that are read straight onto a mesh: each device its part, none of them all."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_transformer.cli import main
from jax_transformer.config import DecoderOnlyConfig, LayerConfig, RotaryConfig
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families import llama
from jax_transformer.porting.families.base import write_config
from jax_transformer.porting.formats import orbax_run
from jax_transformer.porting.formats.safetensors_file import FileWriter
from jax_transformer.porting.identify import leaf_shapes
from jax_transformer.porting.plan import Header, make_plan_back
from jax_transformer.porting.pretrained import from_pretrained
from jax_transformer.training.mesh import make_mesh, parse_axes, parts_of, spec_of
from parity_tests.harness import QUICK
from parity_tests.porting.checkpoints import GPT2, LLAMA, save

LARGE = DecoderOnlyConfig(
    vocab_size=4000,
    layer=LayerConfig(
        d_model=512, num_heads=8, d_ff=2048, norm="rms", qkv_bias=False, out_bias=False,
        ffn_bias=False, activation="silu", gated=True, rotary=RotaryConfig(pairing="half"),
        causal=True,
    ),
    num_layers=4,
    position="rotary",
    tied=True,
)  # fmt: skip
"""75 MB in 38 tensors, of which the largest has 8 MB."""


def write_large(folder: Path) -> None:
    """That model as the folder of `transformers`."""
    headers = {n: Header(s, np.dtype(np.float32)) for n, s in leaf_shapes(LARGE).items()}
    theirs = make_plan_back(llama.FAMILY.rules(LARGE), headers).headers()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_config(llama.FAMILY, LARGE)))
    generator = np.random.default_rng(0)
    with FileWriter(folder / "model.safetensors", theirs) as writer:
        for name, header in theirs.items():
            writer.add(name, generator.standard_normal(header.shape, np.float32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `eight_devices` has found."""
    path = tmp_path_factory.mktemp("sharding")
    save(LLAMA, path / "theirs")
    main(["port", str(path / "theirs"), str(path / "ours"), "--sharding", "data=2,model=4"])
    write_large(path / "large")
    main(["port", str(path / "large"), str(path / "large_in_parts"), "--sharding", "model=8"])
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    for names in (("large", "theirs", "ours"), ("large_in_parts",)):
        command = [sys.executable, "-m", "parity_tests.porting.eight_devices", str(path), *names]
        subprocess.run(command, check=True, env=os.environ | {"XLA_FLAGS": flags})
    return path


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_values_are_those_without_a_mesh(folder, name):
    expected = from_pretrained(folder / name)
    found = np.load(folder / f"{name}.npz")
    leaves = flatten(expected.params)
    assert set(found.files) == leaves.keys()
    for leaf, array in leaves.items():
        np.testing.assert_array_equal(found[leaf], array, err_msg=leaf)
    run = jax.jit(lambda tokens: expected.model(tokens), compiler_options=QUICK)
    logits = run(jnp.arange(18, dtype=jnp.int32).reshape(2, 9))
    # Sums over the parts of the devices, in float32.
    np.testing.assert_allclose(np.load(folder / f"{name}.npy"), logits, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_each_device_holds_its_part(folder, name):
    shapes = json.loads((folder / "shapes.json").read_text())[name]
    assert shapes == {
        "embedding.embedding": [304, 6],
        "norm.scale": [24],
        "output_proj.kernel": [6, 304],
    } | {
        f"layers.{i}.{part}": shape
        for i in range(2)
        for part, shape in {
            "norm1.scale": [24],
            "norm2.scale": [24],
            "self_attn.q_proj.kernel": [24, 6],
            "self_attn.k_proj.kernel": [24, 3],
            "self_attn.v_proj.kernel": [24, 3],
            "self_attn.out_proj.kernel": [6, 24],
            "ffn.gate_proj.kernel": [24, 10],
            "ffn.up_proj.kernel": [24, 10],
            "ffn.down_proj.kernel": [10, 24],
        }.items()
    }


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is Linux's to tell")
@pytest.mark.parametrize("name", ["large", "large_in_parts"])
def test_no_copy_of_all_is_on_the_host(folder, name):
    """Beside the arrays themselves, which on a CPU are in the same memory."""
    memory = json.loads((folder / f"{name}.json").read_text())
    whole = sum(4 * math.prod(shape) for shape in leaf_shapes(LARGE).values())
    assert memory["arrays"] < 1.01 * whole
    assert memory["beside"] < 0.5 * whole


def test_a_directory_is_laid_out_as_its_devices_read_it(folder):
    arrays = folder / "large_in_parts" / "checkpoints" / "best" / "0" / "default"
    parts = parts_of(leaf_shapes(LARGE), {"model": 8})
    for name, shape in leaf_shapes(LARGE).items():
        store = orbax_run.open_array(arrays, f"params.{name}", {"open": True})
        chunks = store.chunk_layout.read_chunk.shape
        part = [size // count for size, count in zip(shape, parts[name], strict=True)]
        assert all(size % chunk == 0 for size, chunk in zip(part, chunks, strict=True)), name
    manifest = json.loads((folder / "large_in_parts" / "manifest.json").read_text())
    assert manifest["sharding"] == {"data": 1, "model": 8}


def test_a_spec_goes_by_the_end_of_a_name():
    assert spec_of("encoder.layers.3.cross_attn.q_proj.kernel") == PartitionSpec(None, "model")
    assert spec_of("mu.layers.0.ffn.linear1.bias") == PartitionSpec("model")
    assert spec_of("decoder.pos_encoding.pos_embedding.embedding") == PartitionSpec()
    assert spec_of("layers.0.norm1.scale") == PartitionSpec()


def test_meshes_that_do_not_fit_are_refused_in_a_line(folder, tmp_path, capsys):
    for text in ("model8", "tensor=2", "model=0", "model=2,model=2", "data=1;model=2", ""):
        with pytest.raises(InputError, match=r"sharding=.*(must name sizes|names an axis twice)"):
            parse_axes(text)
    with pytest.raises(InputError, match=r"data=64,model=2 needs 128 devices, JAX finds \d+: "):
        make_mesh(parse_axes("data=64,model=2"))
    line = r"axis 1 of embedding.embedding [304, 24] is not divisible by model=7; axis 0 of "
    with pytest.raises(InputError) as refused:
        from_pretrained(folder / "theirs", sharding="model=7")
    assert line in str(refused.value)
    assert "more: choose a divisor of all" in str(refused.value)
    calls = {
        ("--sharding", "model=7"): "is not divisible by model=7",
        ("--sharding", "model=2", "--to", "huggingface"): "only our directories are laid out for",
        ("--sharding", "x"): "must name sizes of the axes data and model",
    }
    for options, message in calls.items():
        with pytest.raises(SystemExit) as ended:
            main(["port", str(folder / "theirs"), str(tmp_path / "out"), *options])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_a_vocabulary_that_nothing_divides_is_no_hindrance():
    assert GPT2.config.vocab_size == 300
    shapes = {"embedding.embedding": (50257, 768), "output_proj.kernel": (768, 50257)}
    assert parts_of(shapes, {"model": 8}) == {
        "embedding.embedding": (1, 8),
        "output_proj.kernel": (8, 1),
    }
