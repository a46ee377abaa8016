"""Training that goes on in the other framework, against training that has never moved."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict as by_name
from transformers import LlamaForCausalLM

from jax_transformer.cli import main
from jax_transformer.config import IGNORED_LABEL, ModelConfig
from jax_transformer.models.parameters import split
from jax_transformer.porting.families import llama
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.identify import make_model
from jax_transformer.porting.pretrained import from_pretrained
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.config import TrainConfig
from jax_transformer.training.language_config import LanguageArchitecture, LanguageConfig
from jax_transformer.training.optimizer import adam, moved_in
from jax_transformer.training.settings import OptimizerConfig, to_json
from jax_transformer.training.setup import checkpoint_tree, make_schedule
from jax_transformer.training.step import (
    TrainState,
    batch_loss,
    language_loss,
    make_train_step,
    start_state,
)
from jax_transformer.training.window import LogWindow
from parity_tests.harness import QUICK, make_pair, scale_of, to_numpy, unchecked
from parity_tests.porting.families.harness import float64
from parity_tests.porting.training_checkpoints import LLAMA, packed, save
from parity_tests.training.test_step import BATCHES
from torch_reference.training import step as reference
from torch_reference.training.loss import cross_entropy
from torch_reference.training.schedule import TransformerLRScheduler, WSDLRScheduler

UPDATES = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model in both frameworks, and how it is trained."""

    name: str
    config: Any
    """Of the model in JAX."""
    values: dict[str, Any]
    """The `config.json` that goes with the files of PyTorch."""
    build: Callable[[], torch.nn.Module]
    """The model in PyTorch, float64."""
    loss: Callable[..., Any]
    torch_loss: Callable[..., Any]
    batches: tuple[Any, ...]
    settings: Any
    """Of the run in JAX."""
    scheduler: Callable[[torch.optim.Optimizer], Any]

    def __str__(self) -> str:
        return self.name

    def run(self, decay: float) -> Any:
        """The settings of the run with that weight decay."""
        optimizer = dataclasses.replace(self.settings.optimizer, weight_decay=decay)
        return dataclasses.replace(self.settings, optimizer=optimizer)


TRANSLATOR = ModelConfig(
    src_vocab_size=13, tgt_vocab_size=13, d_model=16, num_heads=4, d_ff=24, num_encoder_layers=1,
    num_decoder_layers=1, max_len=32, dropout=0.0, norm_placement="pre", tied_tables="all",
)  # fmt: skip


def llama_loss(model: Any, batch: Any, *, label_smoothing: float) -> Any:
    """The loss of a model of `transformers` on whole rows."""
    with float64(LlamaForCausalLM):
        logits = model(input_ids=batch.tokens.long(), use_cache=False).logits
    return cross_entropy(
        logits, batch.labels, ignore_index=IGNORED_LABEL, label_smoothing=label_smoothing
    )


CASES = (
    Case(
        name="transformer",
        config=TRANSLATOR,
        values={"task": "translation", "family": "transformer", "model": TRANSLATOR.to_dict()},
        build=lambda: make_pair(TRANSLATOR)[0].double().train(),
        loss=batch_loss,
        torch_loss=reference.batch_loss,
        batches=tuple(BATCHES[:5]),
        settings=TrainConfig(optimizer=OptimizerConfig(warmup_steps=100)),
        scheduler=lambda optimizer: TransformerLRScheduler(optimizer, 16, 100),
    ),
    Case(
        name="llama",
        config=read_config(llama.FAMILY, LLAMA.values),
        values=LLAMA.values,
        build=lambda: LLAMA.model().train(),
        loss=language_loss,
        torch_loss=llama_loss,
        batches=tuple(packed(seed) for seed in range(5)),
        settings=LanguageConfig(
            steps=3 * UPDATES,
            model=LanguageArchitecture(d_model=16, num_heads=4, context=16),
            optimizer=OptimizerConfig(
                schedule="wsd", learning_rate=0.01, warmup_steps=5, decay_fraction=0.5
            ),
        ),
        scheduler=lambda optimizer: WSDLRScheduler(optimizer, 0.01, 60, 5, 30),
    ),
)


@functools.cache
def program(case: Case, decay: float) -> tuple[Any, Any, Any]:
    """The optimizer, the buffers and the compiled step in float64."""
    told = case.run(decay).optimizer
    optimizer = adam(
        make_schedule(case.run(decay), 16), b1=told.b1, b2=told.b2, eps=told.eps, weight_decay=decay
    )
    graphdef, params, buffers = split(jax.tree.map(jnp.float64, make_model(case.config)))
    step = make_train_step(graphdef, optimizer, label_smoothing=0.1, loss=case.loss)
    lowered = step.lower(start_state(params, optimizer), buffers, case.batches[0])
    return optimizer, buffers, lowered.compile(compiler_options=QUICK)


def train_jax(case: Case, decay: float, state: TrainState, buffers: Any) -> TrainState:
    """20 updates."""
    _, _, step = program(case, decay)
    for _ in range(UPDATES):
        state, _ = step(state, buffers, case.batches[int(state.step) % 5])
    return state


def train_torch(case: Case, model: Any, optimizer: Any, updates: int) -> None:
    """20 updates after so many."""
    scheduler = case.scheduler(optimizer)
    scheduler.step_num = updates
    for update in range(updates, updates + UPDATES):
        batch = case.batches[update % 5]
        tensors = type(batch)(*(torch.from_numpy(np.array(field)) for field in batch))
        with unchecked():
            reference.train_step(model, optimizer, scheduler, tensors, loss=case.torch_loss)


def make_optimizer(model: torch.nn.Module, decay: float) -> torch.optim.Optimizer:
    """Of nameless parameters for Adam, of named ones for AdamW."""
    if not decay:
        return torch.optim.Adam(model.parameters(), lr=0.0)
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
        {"params": [(n, p) for n, p in named if p.ndim >= 2], "weight_decay": decay},
    ]
    return torch.optim.AdamW(groups, lr=0.0)


def save_run(case: Case, decay: float, state: TrainState, buffers: Any, path: Path) -> Path:
    """The directory of a run that has come so far."""
    run = case.run(decay)
    path.mkdir()
    values = {"task": run.task, "training": to_json(run), "model": case.config.to_dict()}
    (path / "config.json").write_text(json.dumps(values))
    with CheckpointStore(path / "checkpoints" / "latest", write=True) as store:
        tree = checkpoint_tree(state, LogWindow.empty()) | {"buffers": buffers}
        store.save(int(state.step), tree)
    return path


def assert_together(found: Any, expected: Any) -> None:
    """Weights and moments, by name, are off by 1e-9 of their norm at most."""
    assert found["step"] == expected["step"]
    kinds: dict[str, tuple[Any, Any]] = {"model": (found["model"], expected["model"])}
    for moment in ("exp_avg", "exp_avg_sq"):
        kinds[moment] = tuple(
            {name: state[moment] for name, state in each["optimizer"]["state"].items()}
            for each in (found, expected)
        )
    for kind, (one, other) in kinds.items():
        assert one.keys() == other.keys()
        arrays = {name: to_numpy(tensor) for name, tensor in other.items()}
        for name, array in arrays.items():
            error = np.linalg.norm(to_numpy(one[name]) - array)
            limit = 1e-9 * np.linalg.norm(scale_of(name, arrays))
            assert error <= limit, f"{kind} of {name}: off by {error:.3g}, limit {limit:.3g}"


def state_by_name(model: torch.nn.Module, optimizer: Any, step: int) -> dict[str, Any]:
    """A training checkpoint as PyTorch makes it."""
    optimizer_state = by_name.get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer_state, "step": step}


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["adam", "adamw"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_goes_on_in_pytorch_and_back_in_jax_along_the_same_way(case, decay, tmp_path):
    """20 updates in JAX, 20 in PyTorch, 20 in JAX, against 60 in JAX."""
    with jax.enable_x64(True):
        optimizer, buffers, _ = program(case, decay)
        start = save(tmp_path / "start" / "a.pt", case.values, model=case.build().state_dict())
        params = from_pretrained(start).params
        states = [start_state(params, optimizer)]
        for number in range(3):
            # The state's memory is used again.
            copy = jax.tree.map(jnp.copy, states[-1])
            states.append(train_jax(case, decay, copy, buffers))
            path = save_run(case, decay, states[-1], buffers, tmp_path / f"run{number}")
            main(["port", str(path), str(tmp_path / f"{number}.pt"), "--with-optimizer"])
    first, second, third = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in range(3))
    model = case.build()
    model.load_state_dict(first["model"])
    torch_optimizer = make_optimizer(model, decay)
    if decay:  # Groups in another order than those of the file.
        by_name.set_optimizer_state_dict(model, torch_optimizer, first["optimizer"])
    else:
        torch_optimizer.load_state_dict(first["optimizer"])
    train_torch(case, model, torch_optimizer, UPDATES)
    assert_together(state_by_name(model, torch_optimizer, 2 * UPDATES), second)

    content = {"model": model.state_dict(), "optimizer": torch_optimizer.state_dict()}
    file = save(tmp_path / "theirs" / "b.pt", case.values, **content, step=2 * UPDATES)
    main(["port", str(file), str(tmp_path / "ours"), "--with-optimizer"])
    with jax.enable_x64(True):
        found = from_pretrained(tmp_path / "ours", with_optimizer=True)
        moments = found.optimizer
        assert moments is not None
        assert moments.settings.weight_decay == decay
        fresh = optimizer.init(found.params)
        opt_state = moved_in(fresh, moments.first, moments.second, moments.updates)
        state = TrainState(found.params, opt_state, jnp.int32(moments.updates), None)
        state = train_jax(case, decay, state, found.buffers)
        path = save_run(case, decay, state, found.buffers, tmp_path / "end")
    main(["port", str(path), str(tmp_path / "end.pt"), "--with-optimizer"])
    assert_together(torch.load(tmp_path / "end.pt", weights_only=True), third)
