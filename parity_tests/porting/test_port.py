"""`jax-transformer port`: there and back again, and what it refuses."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

from jax_transformer.cli import main
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.formats import orbax_run
from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.port import format_for
from jax_transformer.porting.pretrained import from_pretrained
from jax_transformer.porting.recognise import open_checkpoint
from parity_tests import tiny
from parity_tests.porting.checkpoints import GPT2, LLAMA, TEXT, save, tokenizer
from parity_tests.porting.families import test_bert, test_roberta
from parity_tests.porting.families.harness import float64, tokens

EXAMPLES = (LLAMA, GPT2)


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


@pytest.fixture(scope="module", params=EXAMPLES, ids=str)
def folders(request, tmp_path_factory):
    """A model, its folder by `transformers`, the port of that and the port back, in bfloat16."""
    path = tmp_path_factory.mktemp(str(request.param))
    theirs = save(request.param, path / "theirs", torch.bfloat16, max_shard_size="8KB")
    main(["port", str(theirs), str(path / "ours")])
    main(["port", str(path / "ours"), str(path / "back")])
    return request.param, theirs, path / "ours", path / "back"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder in float32."""
    return save(LLAMA, tmp_path_factory.mktemp("llama") / "theirs")


@pytest.fixture
def refused(tmp_path, capsys):
    """The line with which the command is refused; nothing is written."""

    def call(*arguments: Any) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main(["port", *map(str, arguments)])
        assert ended.value.code == 2
        assert sorted(tmp_path.rglob("*")) == before
        printed = capsys.readouterr()
        assert re.fullmatch(r"error: [^\n]+\n", printed.err)
        return printed.err.removeprefix("error: ").strip()

    return call


def bits_of(path: Path) -> dict[str, tuple[Any, ...]]:
    """Every tensor of a folder, for comparison."""
    tensors = open_checkpoint(path).tensors
    return {n: (t.dtype, t.shape, np.asarray(t.read()).tobytes()) for n, t in tensors.items()}


def test_there_and_back_every_tensor_and_file_is_identical(folders):
    _, theirs, _, back = folders
    assert bits_of(back) == bits_of(theirs)
    kept = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for name in kept:
        assert (back / name).read_bytes() == (theirs / name).read_bytes(), name


def test_what_comes_back_is_loaded_by_transformers_without_a_word(folders):
    example, _, _, back = folders
    build: Any = example.build
    model, report = build.from_pretrained(back, output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in example.model(torch.bfloat16).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_logits_are_those_of_transformers(folders):
    example, _, ours, _ = folders
    ids = tokens(example.config.vocab_size)
    build: Any = example.build
    weights = build.from_pretrained(folders[1]).double().state_dict()
    with float64(build), torch.no_grad():
        model = build(example.config).eval()  # Its angles are computed when it is made.
        model.load_state_dict(weights)
        expected = model(torch.from_numpy(ids).long()).logits.numpy()
    with jax.enable_x64(True):
        found = from_pretrained(ours, dtype=jnp.float64)
        logits = np.asarray(jax.jit(lambda ids: found.model(ids))(jnp.asarray(ids)))
    assert 0.5 < expected.std() < 20
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_greedy_text_is_that_of_transformers(example, tmp_path, capsys):
    theirs = save(example, tmp_path / "theirs")
    main(["port", str(theirs), str(tmp_path / "ours")])
    build: Any = example.build
    model = build.from_pretrained(theirs).eval()
    words: Any = tokenizer()
    ids = torch.tensor([words.encode(TEXT[1])])
    with torch.no_grad():
        new = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    expected = words.decode(new, skip_special_tokens=True)
    assert len(expected) > 4
    for path in (theirs, tmp_path / "ours"):
        capsys.readouterr()
        main(["generate", str(path), "--prompt", TEXT[1], "--max-tokens", "12"])
        assert capsys.readouterr().out == expected + "\n"


def test_a_manifest_says_what_became_of_each_tensor(folders):
    example, theirs, ours, _ = folders
    manifest = json.loads((ours / "manifest.json").read_text())
    assert manifest["source"] == {
        "name": "theirs", "format": "huggingface", "family": example.name,
    }  # fmt: skip
    sources = {name for entry in manifest["tensors"] for name in entry["sources"]}
    assert sources == bits_of(theirs).keys()


def test_a_dry_run_shows_the_plan_and_writes_nothing(theirs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(LazyTensor, "read", lambda tensor: pytest.fail("a tensor was read"))
    arguments = ("--dry-run", "--dtype", "bfloat16")
    main(["port", str(theirs), str(tmp_path / "ours"), *arguments])
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    assert [
        "model.layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.k_proj.kernel",
        "Transpose(), cast(bfloat16)",
        "[24, 12]",
        "bfloat16",
    ] in rows
    assert "format huggingface, family llama; to orbax" in printed
    assert not list(tmp_path.iterdir())


def test_a_dtype_is_that_of_tensors_and_config(theirs, tmp_path):
    main(["port", str(theirs), str(tmp_path / "a"), "--to", "huggingface", "--dtype", "bfloat16"])
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config == json.loads((theirs / "config.json").read_text()) | {"dtype": "bfloat16"}
    for name, tensor in open_checkpoint(tmp_path / "a").tensors.items():
        assert tensor.dtype.name == "bfloat16"
        expected = open_checkpoint(theirs).tensors[name].read().astype(tensor.dtype)
        np.testing.assert_array_equal(tensor.read(), expected)


def test_every_format_leads_back_to_the_same_tensors(theirs, tmp_path):
    """By way of one file, and of Meta's names with rows in another order."""
    steps = ("a.safetensors", "b", "c.pt", "d", "meta", "e", "meta2", "f")
    to = {"b": "orbax", "d": "huggingface", "meta": "meta", "e": "orbax", "meta2": "meta"}
    path = theirs
    for step in steps:
        if step in ("b", "d"):  # A file alone does not say what model it is of.
            (tmp_path / "config.json").write_bytes((theirs / "config.json").read_bytes())
        options = ["--to", to[step]] if step in to else []
        if step == "f":
            options = ["--to", "huggingface"]
        main(["port", str(path), str(tmp_path / step), *options])
        path = tmp_path / step
    expected = bits_of(theirs)
    for step in ("a.safetensors", "c.pt", "d", "f"):
        assert bits_of(tmp_path / step) == expected, step
    assert bits_of(tmp_path / "b") == bits_of(tmp_path / "e")
    assert bits_of(tmp_path / "meta") == bits_of(tmp_path / "meta2")
    name = "layers.0.attention.wq.weight"
    assert bits_of(tmp_path / "meta")[name] != expected["model.layers.0.self_attn.q_proj.weight"]


def test_a_run_becomes_a_state_dict_and_a_directory_again(tmp_path):
    run = tiny.finished().path
    main(["port", str(run), str(tmp_path / "a.pt")])
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert "output_proj.weight" in state
    main(["port", str(tmp_path / "a.pt"), str(tmp_path / "b")])
    assert bits_of(tmp_path / "b") == bits_of(run)


def test_unfit_sources_are_refused(theirs, tmp_path, refused):
    def copy(name: str, **fields: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in theirs.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((theirs / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    out = tmp_path / "out"
    unknown = copy("unknown", rms_norm_epsilon=1e-5, num_experts=4)
    found = refused(unknown, out)
    assert found.startswith(f"{unknown}: config of family llama: field 'rms_norm_epsilon'")
    assert "near rms_norm_eps" in found
    assert "field 'num_experts'" in found
    found = refused(copy("wide", intermediate_size=48), out)
    assert "mlp.gate_proj.weight gives [24, 40], but layers.0.ffn.gate_proj.kernel is [24, 48]" in (
        found
    )
    assert "has a token with the id" in refused(copy("few", vocab_size=8), out)
    assert refused(theirs, out, "--family", "gpt2").startswith(f"{theirs}: config of family gpt2:")
    assert "family 'lama' is not known: must be one of" in refused(theirs, out, "--family", "lama")
    assert "family 'falcon' is not known" in refused(copy("falcon", model_type="falcon"), out)
    assert refused(theirs, theirs).endswith("is there already: choose another name")
    assert "cannot be read" in refused(tmp_path / "none", out)
    lone = tmp_path / "lone.safetensors"
    lone.write_bytes((theirs / "model.safetensors").read_bytes())
    assert "has no config.json beside it" in refused(lone, out)
    assert "transformers has no family transformer" in (
        refused(tiny.finished().path, out, "--to", "huggingface")
    )


def test_a_missing_shard_and_tensors_of_another_model_are_refused(folders, tmp_path, refused):
    _, theirs, _, _ = folders
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in theirs.iterdir():
        if not file.name.startswith("model-00002"):
            (folder / file.name).write_bytes(file.read_bytes())
    assert "model-00002" in refused(folder, tmp_path / "out")


DAMAGED = {
    "huggingface": ("model.safetensors", "is cut off"),
    "safetensors": ("", "is cut off"),
    "pt": ("", "is cut off or damaged"),
    "meta": ("consolidated.00.pth", "is cut off or damaged"),
    "orbax": ("checkpoints/best/0/default/d/*", "cannot be read"),
    "orbax, its list": ("checkpoints/best/0/default/_METADATA", "is not valid JSON"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_cut_off_is_refused_and_nothing_is_left(name, theirs, tmp_path, capsys):
    file, message = DAMAGED[name]
    source = tmp_path / "source"
    (tmp_path / "config.json").write_bytes((theirs / "config.json").read_bytes())
    main(["port", str(theirs), str(source), "--to", name.split(",")[0]])
    for path in tmp_path.glob(f"source/{file}" if file else "source"):
        path.write_bytes(path.read_bytes()[:-20])
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["port", str(source), str(tmp_path / "out"), "--to", "huggingface"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_ignored_is_printed_with_its_reason(theirs, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    tensors = safetensors.numpy.load_file(theirs / "model.safetensors")
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[buffer] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((theirs / "config.json").read_bytes())
    main(["port", str(folder), str(tmp_path / "out")])
    line = f"ignored {buffer}: the config determines it"
    assert line in capsys.readouterr().out.splitlines()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["ignored"] == {buffer: "the config determines it"}


def test_the_config_of_a_file_goes_with_it(theirs, tmp_path):
    main(["port", str(theirs), str(tmp_path / "a.safetensors")])
    main(["port", str(tmp_path / "a.safetensors"), str(tmp_path / "b.pt")])
    main(["port", str(tmp_path / "b.pt"), str(tmp_path / "c")])
    assert bits_of(tmp_path / "c").keys() == flatten(from_pretrained(theirs).params).keys()


@pytest.mark.parametrize("example", [test_bert.HEAD, test_roberta.EXAMPLES[0]], ids=str)
def test_encoders_that_come_back_are_loaded_by_transformers_without_a_word(example, tmp_path):
    build: Any = example.build
    example.model(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    main(["port", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    main(["port", str(tmp_path / "ours"), str(tmp_path / "back")])
    assert bits_of(tmp_path / "back") == bits_of(tmp_path / "theirs")
    _, report = build.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize("to", ["orbax", "huggingface", "safetensors", "pt", "meta"])
def test_what_is_written_is_shown(to, theirs, tmp_path, capsys):
    main(["port", str(theirs), str(tmp_path / "out"), "--to", to])
    capsys.readouterr()
    main(["inspect", str(tmp_path / "out")])
    assert f"format {to}, family llama" in capsys.readouterr().out


def test_names_that_do_not_fit_come_with_the_nearest(theirs, tmp_path, refused):
    folder = tmp_path / "folder"
    folder.mkdir()
    tensors = safetensors.numpy.load_file(theirs / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((theirs / "config.json").read_bytes())
    found = refused(folder, tmp_path / "out")
    assert "nothing fills layers.0.ffn.gate_proj.kernel" in found
    assert "did you mean model.layers.0.mlp.gate.weight" in found


@pytest.mark.parametrize("to", ["orbax", "huggingface", "safetensors", "pt", "meta"])
def test_an_interrupted_port_leaves_nothing(theirs, tmp_path, monkeypatch, capsys, to):
    read = LazyTensor.read
    left = iter(range(7))

    def interrupted(tensor: LazyTensor) -> np.ndarray:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return read(tensor)

    monkeypatch.setattr(LazyTensor, "read", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["port", str(theirs), str(tmp_path / "out"), "--to", to])
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from jax_transformer.cli import main
from jax_transformer.porting.formats.base import LazyTensor
read, left = LazyTensor.read, iter(range(7))
def killing(tensor):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(tensor)
LazyTensor.read = killing
main(["port", *sys.argv[1:]])
"""


def test_a_killed_port_leaves_nothing_that_looks_finished(theirs, tmp_path):
    command = [sys.executable, "-c", KILLED, str(theirs), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.")
    assert left.name.endswith(".partial")
    with pytest.raises(InputError):
        orbax_run.read(left)
    main(["port", str(theirs), str(tmp_path / "out")])
    assert (tmp_path / "out" / "manifest.json").exists()


def test_the_format_follows_from_the_name_and_the_source(theirs):
    checkpoint = open_checkpoint(theirs)
    assert format_for(Path("a.safetensors"), checkpoint) == "safetensors"
    assert format_for(Path("a.bin"), checkpoint) == "pt"
    assert format_for(Path("a"), checkpoint) == "orbax"
