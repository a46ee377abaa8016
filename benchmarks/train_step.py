"""The training step against PyTorch, eager and under `torch.compile`, each with both its Adams.

Same model, batch and float32 on the same CPU, dropout on, the full step: forward, loss, backward,
clipping, Adam, learning rate. First the step, then its phases, then its parts by themselves.

    pip install -e '.[test]' && python benchmarks/train_step.py --size small
"""

import argparse
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from pieces import measure_pieces
from timing import Timing, compare, print_table, print_timings

import jax_transformer.training.step as ours
import torch_reference.models.encoder_decoder as reference
import torch_reference.training.step as theirs
from jax_transformer.config import BOS_ID, EOS_ID, IGNORED_LABEL, PAD_ID, ModelConfig
from jax_transformer.data.batches import Batch
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import split
from jax_transformer.training.config import PRESETS
from jax_transformer.training.optimizer import adam
from jax_transformer.training.schedule import noam_schedule
from torch_reference.training.schedule import TransformerLRScheduler

# Rows, tokens a row, vocabulary: the commonest bucket of `train.py`; one that a CPU can hold.
SHAPES = {"small": (32, 32, 2000), "original": (32, 32, 8000)}
SMOOTHING = 0.1
MAX_NORM = 1.0

Call = Callable[[], object]


def make_batch(rows: int, length: int, vocab_size: int) -> Batch:
    """Random sentences that fill three quarters of their bucket or more."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3 * length // 4, length + 1, rows).astype(np.int32)
    real = np.arange(length) < lengths[:, None]
    ids = rng.integers(EOS_ID + 1, vocab_size, (2, rows, length)).astype(np.int32)
    source, target = np.where(real, ids, PAD_ID)
    start = np.full((rows, 1), BOS_ID, np.int32)
    return Batch(
        source=source,
        source_lengths=lengths,
        decoder_input=np.concatenate([start, target[:, :-1]], axis=1),
        labels=np.where(real, target, IGNORED_LABEL),
        target_lengths=lengths,
    )


def jax_calls(config: ModelConfig, batch: Batch) -> tuple[Call, dict[str, Call]]:
    """The step, and its phases."""
    graphdef, params, buffers = split(Transformer.from_config(config, rngs=nnx.Rngs(0)))
    optimizer = adam(noam_schedule(config.d_model), max_norm=MAX_NORM)
    key = jax.random.key(1)
    batch = jax.tree.map(jnp.asarray, batch)
    train_step = ours.make_train_step(
        graphdef, optimizer, label_smoothing=SMOOTHING, dropout_key=key
    )
    # The step reuses the memory of its state: each user of it has a state of its own.
    state = ours.start_state(jax.tree.map(jnp.copy, params), optimizer)
    updated = (jax.tree.map(jnp.copy, params), optimizer.init(params))

    def step() -> None:
        nonlocal state
        state, metrics = train_step(state, buffers, batch)
        jax.block_until_ready((state, metrics))

    def mean_loss(params: Any) -> jax.Array:
        return ours.batch_loss(
            graphdef, params, buffers, batch, label_smoothing=SMOOTHING, dropout_key=key
        ).mean()

    def update(gradients: Any, params: Any, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    forward, gradient = jax.jit(mean_loss), jax.jit(jax.grad(mean_loss))
    update = jax.jit(update, donate_argnums=(1, 2))
    gradients = gradient(params)

    def run_update() -> None:
        nonlocal updated
        updated = jax.block_until_ready(update(gradients, *updated))

    return step, {
        "forward": lambda: forward(params).block_until_ready(),
        "forward + backward": lambda: jax.block_until_ready(gradient(params)),
        "clipping + Adam": run_update,
    }


def torch_calls(
    config: ModelConfig, batch: Batch, *, compiled: bool, fused: bool
) -> tuple[Call, dict[str, Call]]:
    """The step, and its phases."""
    torch.manual_seed(0)
    model = reference.Transformer.from_config(config).train()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=fused
    )
    scheduler = TransformerLRScheduler(optimizer, config.d_model)
    batch = jax.tree.map(torch.from_numpy, batch)
    batch_loss = torch.compile(theirs.batch_loss) if compiled else theirs.batch_loss

    def forward() -> torch.Tensor:
        return batch_loss(model, batch, label_smoothing=SMOOTHING).mean()

    def forward_backward() -> None:
        optimizer.zero_grad()
        forward().backward()

    def update() -> None:
        scheduler.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    def step() -> None:
        forward_backward()
        update()

    return step, {
        "forward": forward,
        "forward + backward": forward_backward,
        "clipping + Adam": update,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--step-only", action="store_true", help="no phases, no parts")
    arguments = parser.parse_args()

    rows, length, vocab_size = SHAPES[arguments.size]
    architecture = dataclasses.replace(PRESETS[arguments.size].model, dropout=0.1)
    config = ModelConfig(
        **dataclasses.asdict(architecture), src_vocab_size=vocab_size, tgt_vocab_size=vocab_size
    )
    batch = make_batch(rows, length, vocab_size)
    print(
        f"{arguments.size}: {rows} x {length} tokens a side, vocabulary {vocab_size}, "
        f"{torch.get_num_threads()} threads, GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}"
    )
    calls = {"JAX": jax_calls(config, batch)}
    for mode in ("eager", "compiled"):
        for name in ("Adam", "fused Adam"):
            calls[f"PyTorch {mode}, {name}"] = torch_calls(
                config, batch, compiled=mode == "compiled", fused=name == "fused Adam"
            )

    steps = compare({name: step for name, (step, _) in calls.items()}, rounds=arguments.rounds)
    print_timings("Training step", steps)
    peer = min((name for name in steps if name != "JAX"), key=lambda name: steps[name].best)
    print_ratios(f"JAX against the fastest, {peer}", steps["JAX"], steps[peer])
    if arguments.step_only:
        return

    for phase in calls["JAX"][1]:
        phases = {name: calls[name][1][phase] for name in ("JAX", peer)}
        print_timings(phase.capitalize(), compare(phases, rounds=arguments.rounds))
    measure_pieces(config, rows, length, rounds=arguments.rounds)


def print_ratios(title: str, jax_timing: Timing, torch_timing: Timing) -> None:
    ratios = [theirs / ours for ours, theirs in zip(jax_timing, torch_timing, strict=True)]
    print_table(
        f"{title}: speed of JAX / speed of PyTorch",
        ("", "min", "median", "cpu"),
        [("", *(f"{ratio:.2f}" for ratio in ratios))],
    )


if __name__ == "__main__":
    main()
