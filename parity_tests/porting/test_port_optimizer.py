"""`port --with-optimizer`: training goes on in the other framework as if it had never moved."""

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from jax_transformer.cli import main
from jax_transformer.config import ModelConfig
from jax_transformer.errors import InputError
from jax_transformer.porting import optimizer as porting_optimizer
from jax_transformer.porting.families import gemma2, olmo2, qwen3, transformer
from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.operations import AddConstant, Slice, Transpose
from jax_transformer.porting.plan import make_plan
from jax_transformer.porting.port_optimizer import registered
from jax_transformer.porting.rules import Rule
from jax_transformer.porting.stream import stream
from parity_tests import tiny
from parity_tests.porting.checkpoints import GPT2
from parity_tests.porting.families.harness import Example
from parity_tests.porting.training_checkpoints import LLAMA
from torch_reference.models import Transformer


def halfway(settings: Any) -> Path:
    """A run that was stopped at step 4, between two lines of its metrics."""
    with pytest.raises(InputError, match="interrupted at step 4"):
        tiny.train(settings, before_step=3, action=tiny.press_ctrl_c)
    return settings.out


@pytest.fixture(scope="module", params=["translation", "language"])
def stopped(request, tmp_path_factory):
    """The settings of a stopped run; that of the translator keeps a running average."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "translation":
        settings: Any = tiny.config(path)
    else:
        settings = tiny.language_config(path)
        model = dataclasses.replace(settings.model, dropout=0.0)
        settings = dataclasses.replace(settings, model=model)
    halfway(settings)
    return settings


def tensors_of(content: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in a file, by its path."""
    if isinstance(content, torch.Tensor):
        return {prefix: content}
    found: dict[str, torch.Tensor] = {}
    if isinstance(content, dict):
        for name, value in content.items():
            found |= tensors_of(value, f"{prefix}/{name}")
    return found


@pytest.fixture(scope="module")
def there_and_back(stopped, tmp_path_factory):
    """The run as a file of PyTorch, that as a run again, and that as a file."""
    path = tmp_path_factory.mktemp("port")
    folder = path / "theirs"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(stopped.out / name, folder)
    main(["port", str(stopped.out), str(folder / "a.pt"), "--with-optimizer"])
    main(["port", str(folder / "a.pt"), str(path / "moved"), "--with-optimizer"])
    main(["port", str(path / "moved"), str(path / "b.pt"), "--with-optimizer"])
    return folder / "a.pt", path / "moved", path / "b.pt"


def test_weights_moments_and_average_are_the_same_bits_there_and_back(stopped, there_and_back):
    there, _, back = (
        torch.load(path, weights_only=True) if path.suffix else None for path in there_and_back
    )
    one, other = tensors_of(there), tensors_of(back)
    assert one.keys() == other.keys()
    average = 1 if stopped.optimizer.average_decay else 0
    assert len(one) == 2 * len(there["optimizer"]["state"]) + (1 + average) * len(there["model"])
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert there["optimizer"]["param_groups"] == back["optimizer"]["param_groups"]
    assert there["step"] == back["step"] == 4


def test_a_run_that_came_back_goes_on_as_the_run_itself(stopped, there_and_back, tmp_path):
    _, run, _ = there_and_back
    moved, stayed = (shutil.copytree(path, tmp_path / path.name) for path in (run, stopped.out))
    for path in (moved, stayed):
        tiny.train(dataclasses.replace(stopped, resume=path))
    assert tiny.saved(moved, "latest")[0] == 10
    tiny.assert_same_bits(tiny.saved(moved, "latest")[1], tiny.saved(stayed, "latest")[1])
    tiny.assert_same_bits(tiny.saved(moved, "best")[1], tiny.saved(stayed, "best")[1])


def test_a_dry_run_lists_the_optimizers_tensors_and_writes_nothing(
    stopped, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "250")
    main(["port", str(stopped.out), str(tmp_path / "a.pt"), "--with-optimizer", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    targets = [row[1] for row in rows if len(row) == 5]
    weights = [name for name in targets if not name.startswith(("exp_avg", "ema."))]
    for name in weights:
        trained = not name.endswith(".pe")
        assert (f"exp_avg.{name}" in targets) == (f"exp_avg_sq.{name}" in targets) == trained
        assert (f"ema.{name}" in targets) == (trained and stopped.optimizer.average_decay > 0)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_best_model_is_ported_too(stopped, tmp_path):
    main(["port", str(stopped.out), str(tmp_path / "a.pt")])
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    main(["port", str(stopped.out), str(tmp_path / "b.pt"), "--with-optimizer"])
    expected = torch.load(tmp_path / "b.pt", weights_only=True)["model"]
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_run_of_other_settings_or_without_its_tokenizer_is_refused(
    there_and_back, tmp_path, capsys
):
    content = torch.load(there_and_back[0], weights_only=True)
    wide = copy.deepcopy(content)
    wide["model"] = {name: tensor.double() for name, tensor in wide["model"].items()}
    other = copy.deepcopy(content)
    for group in other["optimizer"]["param_groups"]:
        group["eps"] = 1e-8
    contents = {
        "its optimizer has eps=1e-08, the run that its config is of 1e-09": other,
        "in float32 and float64, a run in float32: give --dtype float32": wide,
        "a run needs its tokenizer.json: copy it beside the file": content,
    }
    folder = shutil.copytree(there_and_back[0].parent, tmp_path / "folder")
    for line, each in contents.items():
        torch.save(each, folder / "a.pt")
        if each is content:
            (folder / "tokenizer.json").unlink()
        with pytest.raises(SystemExit) as ended:
            main(["port", str(folder / "a.pt"), str(tmp_path / "run"), "--with-optimizer"])
        assert ended.value.code == 2
        assert line in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_a_learning_rate_that_the_schedule_does_not_give_is_worth_a_word(
    there_and_back, tmp_path, capsys
):
    folder = shutil.copytree(there_and_back[0].parent, tmp_path / "folder")
    content = torch.load(folder / "a.pt", weights_only=True)
    for group in content["optimizer"]["param_groups"]:
        group["lr"] = 0.5
    torch.save(content | {"step": 7}, folder / "a.pt")
    arguments = [str(folder / "a.pt"), str(tmp_path / "run"), "--with-optimizer", "--dry-run"]
    main(["port", *arguments])
    printed = capsys.readouterr().out
    assert "note: its learning rate is 0.5, the run's schedule goes on with" in printed
    assert "note: step is 7, but Adam has made 4 updates: those count" in printed


ORDERS = (
    GPT2,
    LLAMA,
    Example(
        name="qwen3", family=qwen3.FAMILY, build=Qwen3ForCausalLM,
        config=Qwen3Config(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=11,
            num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        ),
    ),
    Example(
        name="gemma2", family=gemma2.FAMILY, build=Gemma2ForCausalLM,
        config=Gemma2Config(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        ),
    ),
    Example(
        name="olmo2", family=olmo2.FAMILY, build=Olmo2ForCausalLM,
        config=Olmo2Config(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1,
        ),
    ),
)  # fmt: skip


@pytest.mark.parametrize("example", ORDERS, ids=str)
def test_parameters_are_in_the_order_of_transformers(example):
    check_order(example.build(example.config), example.family)


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_parameters_are_in_the_order_of_the_reference(position):
    config = ModelConfig(
        src_vocab_size=8,
        tgt_vocab_size=8,
        d_model=8,
        num_heads=2,
        d_ff=8,
        max_len=8,
        position_encoding=position,
    )
    check_order(Transformer.from_config(config), transformer.FAMILY)


def check_order(model: torch.nn.Module, family: Any) -> None:
    names = [name for name, _ in model.named_parameters()]
    assert registered(family.order, sorted(names)) == tuple(names)
    assert registered(family.order, [*names, "adapter.weight"]) is None


def test_what_is_added_to_a_weight_is_not_added_to_its_moments():
    rules = (Rule("a", "b", (AddConstant(1.0), Transpose(), Slice(0, 1, 0, 1.0))),)
    weight = np.ones((2, 3), np.float32)
    weight[:, :2] = [[2.0, 3.0], [4.0, 5.0]]
    weight -= 1.0
    held = {"a": lazy(weight)}
    moment = np.array([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]], np.float32)
    state = porting_optimizer.AdamState(
        tensors={"first": {"a": lazy(moment)}, "second": {"a": lazy(moment**2)}, "average": held},
        updates=3,
        settings=porting_optimizer.AdamSettings(
            b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.0, learning_rate=0.1
        ),
    )
    plan = make_plan(rules, held, {"b": (2, 2)})
    whole, tensors = porting_optimizer.with_moments(plan, held, state, source="pt", target="orbax")
    found = dict(stream(whole, tensors))
    np.testing.assert_array_equal(found["b"], [[2.0, 4.0], [3.0, 5.0]])
    np.testing.assert_array_equal(found["average.b"], found["b"])
    np.testing.assert_array_equal(found["mu.b"], [[1.0, 3.0], [2.0, 4.0]])
    np.testing.assert_array_equal(found["nu.b"], [[1.0, 9.0], [4.0, 16.0]])


def lazy(array: np.ndarray) -> LazyTensor:
    return LazyTensor(array.shape, array.dtype, lambda: array)
