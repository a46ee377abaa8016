"""The optimizer of PyTorch: where its names come from, and what cannot be carried."""

import copy
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as by_name

from jax_transformer.cli import main
from jax_transformer.porting.families import llama
from parity_tests.porting.training_checkpoints import LLAMA, by_dimension, save, trained


def expected_moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}


def check_moments(path: Path, out: Path, expected: dict[str, torch.Tensor]) -> None:
    """They are those of the parameters of their names."""
    main(["port", str(path), str(out), "--with-optimizer"])
    main(["port", str(out), str(out.with_suffix(".pt")), "--with-optimizer"])
    found = torch.load(out.with_suffix(".pt"), weights_only=True)["optimizer"]["state"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name]["exp_avg"], tensor), name


def test_moments_follow_the_names_of_parameters_in_any_order(tmp_path):
    """As PyTorch has names: of parameters in reverse, of a compiled model, as keys."""
    model, optimizer = trained(lambda model: list(model.named_parameters())[::-1], weight_decay=0.0)
    expected = expected_moments(model, optimizer)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["param_names"] = [f"module._orig_mod.{name}" for name in group["param_names"]]
    contents = {
        "a": {"model_state_dict": model.state_dict(), "optimizer_state_dict": state},
        "b": {
            "state_dict": model.state_dict(),
            "optimizer_states": [by_name.get_optimizer_state_dict(model, optimizer)],
            "global_step": 1,
        },
    }
    for name, content in contents.items():
        file = save(tmp_path / name / "x.pt", **content)
        check_moments(file, tmp_path / f"ours{name}", expected)


def test_nameless_groups_of_matrices_and_of_the_rest_are_in_the_order_of_the_model(tmp_path):
    model, optimizer = trained(by_dimension)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = save(tmp_path / "a" / "x.pt", **content)
    check_moments(file, tmp_path / "ours", expected_moments(model, optimizer))


def test_the_folder_of_a_trainer_has_its_optimizer_beside_the_weights(tmp_path):
    model, optimizer = trained(by_dimension)
    model.save_pretrained(tmp_path / "folder")
    torch.save(optimizer.state_dict(), tmp_path / "folder" / "optimizer.pt")
    check_moments(tmp_path / "folder", tmp_path / "ours", expected_moments(model, optimizer))


def test_an_optimizer_whose_order_is_unknown_is_loaded_by_name_only(tmp_path, monkeypatch):
    model, optimizer = trained(lambda model: model.named_parameters(), weight_decay=0.0)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = save(tmp_path / "a" / "x.pt", **content)
    main(["port", str(file), str(tmp_path / "ours"), "--with-optimizer"])
    unknown = dataclasses.replace(llama.FAMILY, order=())
    monkeypatch.setattr("jax_transformer.porting.families.FAMILIES", (unknown,))
    monkeypatch.setattr("jax_transformer.porting.identify.FAMILIES", (unknown,))
    (tmp_path / "ours" / "manifest.json").unlink()
    main(["port", str(tmp_path / "ours"), str(tmp_path / "b.pt"), "--with-optimizer"])
    found = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        fresh.load_state_dict(found)
    by_name.set_optimizer_state_dict(model, fresh, found)
    for name, tensor in expected_moments(model, optimizer).items():
        assert torch.equal(fresh.state[model.get_parameter(name)]["exp_avg"], tensor), name


@pytest.fixture(scope="module")
def content():
    """A training checkpoint that can be carried."""
    model, optimizer = trained(by_dimension)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture
def refused(tmp_path, capsys):
    """The line with which a file is refused; nothing is written."""
    numbers = itertools.count()

    def call(content: Any, to: str = "out", **values: Any) -> str:
        file = save(tmp_path / str(next(numbers)) / "a.pt", LLAMA.values | values, **content)
        with pytest.raises(SystemExit) as ended:
            main(["port", str(file), str(tmp_path / to), "--with-optimizer"])
        assert ended.value.code == 2
        assert not (tmp_path / to).exists()
        printed = capsys.readouterr().err
        assert re.fullmatch(r"error: [^\n]+\n", printed)
        return printed

    return call


def changed(content: Any, index: int, **state: Any) -> Any:
    """With other numbers for one parameter."""
    new = copy.deepcopy(content)
    new["optimizer"]["state"][index] |= state
    return new


def grouped(content: Any, index: int, **settings: Any) -> Any:
    """With other settings of one group."""
    new = copy.deepcopy(content)
    new["optimizer"]["param_groups"][index] |= settings
    return new


def test_an_optimizer_that_is_not_built_here_is_refused(refused, content):
    def of(kind: Any, **settings: Any) -> Any:
        model, optimizer = trained(by_dimension, kind, **settings)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    assert "has momentum_buffer: only Adam and AdamW" in refused(of(torch.optim.SGD, momentum=0.9))
    assert "has max_exp_avg_sq: only" in refused(of(torch.optim.AdamW, amsgrad=True))
    assert "maximize=True: only losses" in refused(of(torch.optim.AdamW, maximize=True))
    assert "weight_decay=0.1 of Adam passes through the moments" in refused(of(torch.optim.Adam))
    everywhere = grouped(content, 1, weight_decay=0.1)
    assert "weight_decay=0.1 falls on model.layers.0.input_layernorm" in refused(everywhere)
    assert "lr is 0.1 of model.embed_tokens.weight, but 0.2 of" in refused(
        grouped(content, 1, lr=0.2)
    )
    assert "betas is (0.9, 0.999) of" in refused(grouped(content, 1, betas=(0.9, 0.99)))
    assert "step is 1.0 of" in refused(changed(content, 3, step=torch.tensor(2.0)))
    assert "is no optimizer: save optimizer.state_dict()" in refused(content | {"optimizer": {}})


def test_parameters_that_cannot_be_named_or_are_not_all_there_are_refused(refused, content):
    model, optimizer = trained(lambda model: list(model.parameters())[1:], weight_decay=0.0)
    nameless = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = refused(nameless)
    assert "has 19 parameters and does not name them, the model has 20: give the optimizer" in found
    model, optimizer = trained(lambda model: list(model.named_parameters())[1:], weight_decay=0.0)
    partly = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert "model.embed_tokens.weight has no exp_avg" in refused(partly)
    renamed = grouped(partly, 0, param_names=["x", *(n for n, _ in model.named_parameters())][:19])
    assert "optimizer: x: the model has no such tensor" in refused(renamed)
    three = copy.deepcopy(content)
    first = three["optimizer"]["param_groups"][0]
    three["optimizer"]["param_groups"].append(first | {"params": [first["params"].pop()]})
    assert "has 3 groups and does not name what is in them" in refused(three)
    unused = copy.deepcopy(content)
    unused["optimizer"]["state"].pop(2)
    assert "has no state of parameter 2: all are trained here" in refused(unused)
    assert "exp_avg.model.embed_tokens.weight is [3], but its weight [19, 16]" in refused(
        changed(content, 0, exp_avg=torch.zeros(3), exp_avg_sq=torch.zeros(3))
        | {"optimizer": names(changed(content, 0, exp_avg=torch.zeros(3)), model)}
    )
    assert "ema lacks model.embed_tokens.weight" in refused(
        content | {"ema": {"model.norm.weight": 1}}
    )


def names(content: Any, model: Any) -> Any:
    """The optimizer with the names of its parameters."""
    for group, ndim in zip(content["optimizer"]["param_groups"], (2, 1), strict=True):
        group["param_names"] = [n for n, p in model.named_parameters() if p.ndim == ndim]
    return content["optimizer"]


def test_no_optimizer_or_no_place_for_it_is_refused(refused, content):
    assert "holds no optimizer: a run has it in" in refused({"model": content["model"]})
    assert "of PyTorch already, copy it" in refused(content, "b.pt")
    assert "safetensors has no place for an optimizer" in refused(content, "b.safetensors")
