"""`inspect` says what is there, and reads no tensor for it."""

import io

import numpy as np
import pytest
from rich.console import Console

from jax_transformer.cli import main
from jax_transformer.porting.formats import base, huggingface, safetensors_file, torch_file
from jax_transformer.porting.inspect import common, plan_table, shorten, span
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.plan import Header, make_plan
from jax_transformer.porting.rules import Alias, Computed, Ignore, Rule
from parity_tests.porting.formats.tensors import write

LAYER = ("self_attn.q_proj", "mlp.gate_proj")
TENSORS: dict[str, np.ndarray] = {
    f"model.layers.{layer}.{name}.weight": np.ones((4, 4), np.float16)
    for name in LAYER
    for layer in range(12)
}
TENSORS["lm_head.weight"] = np.ones((7, 4), np.float32)


@pytest.fixture
def inspect(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def forbidden(*arguments):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(base, "map_tensor", forbidden)
    monkeypatch.setattr(safetensors_file, "map_tensor", forbidden)
    monkeypatch.setattr(torch_file, "map_tensor", forbidden)

    def command(*arguments):
        main(["inspect", *map(str, arguments)])
        return capsys.readouterr().out

    return command


def test_layers_are_one_line(tmp_path, inspect):
    config = {"model_type": "llama", "hidden_size": 4, "eos_token_id": [1, 2]}
    printed = inspect(write(huggingface.FolderWriter, tmp_path / "m", TENSORS, config=config))
    assert "format huggingface, family llama" in printed
    assert "25 tensors, 412 numbers, 880 bytes once read: float16, float32" in printed
    rows = [[cell.strip() for cell in line.split("│")] for line in printed.splitlines()]
    assert [
        "",
        "model.layers.0-11.mlp.gate_proj.weight",
        "12",
        "[4, 4]",
        "float16",
        "384",
        "",
    ] in rows
    assert ["", "lm_head.weight", "1", "[7, 4]", "float32", "112", ""] in rows
    assert ["", "hidden_size", "4", ""] in rows


def test_every_tensor_has_a_line_if_asked_for(tmp_path, inspect):
    printed = inspect(write(torch_file.FileWriter, tmp_path / "a.pt", TENSORS), "--every", True)
    for name in TENSORS:
        assert f" {name} " in printed


def test_what_is_no_checkpoint_is_one_line(tmp_path, capsys):
    (tmp_path / "a").write_text("hello, world")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "a")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'a'} begins like no file")


def test_a_plan_is_a_table_of_everything_in_it():
    rules = (
        Alias("head", "table"),
        Ignore("mask", "a buffer"),
        Rule("table", "embedding"),
        Rule("w", "kernel", (Transpose(),)),
        Computed("pe", "sinusoids"),
    )
    shapes = {"table": (5, 2), "head": (5, 2), "w": (3, 2), "mask": (4,)}
    headers = {name: Header(shape, np.dtype(np.float16)) for name, shape in shapes.items()}
    target = {"embedding": (5, 2), "kernel": (2, 3), "pe": (9,)}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan_table(make_plan(rules, headers, target)))
    lines = [line.split() for line in console.export_text().replace("│", " ").splitlines()]
    assert ["w", "kernel", "Transpose()", "[2,", "3]", "float16"] in lines
    assert ["table", "embedding", "as", "it", "is", "[5,", "2]", "float16"] in lines
    assert ["head", "the", "same", "as", "table"] in lines
    assert ["mask", "ignored:", "a", "buffer"] in lines
    assert ["pe", "computed:", "sinusoids"] in lines


def test_numbers_become_ranges():
    assert span([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert common(["a.0.b.1.c", "a.1.b.1.c"]) == "a.0-1.b.1.c"
    assert common(["a.7"]) == "a.7"


def test_long_values_are_shortened():
    assert shorten(list(range(50000))) == "50,000 values: 0, 1, 2, ..."
    assert shorten("a\nb") == "a b"
    assert len(shorten("x" * 1000)) == 60
