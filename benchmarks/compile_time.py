"""Compile time and speed of the train step against depth: layers listed, and stacked in a scan.

The `small` preset with more layers, as many in the encoder as in the decoder. Which layout
`train.py --layers auto` takes is printed beside each depth.

    python benchmarks/compile_time.py --depths 2 4 8 12 24
"""

import argparse
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from timing import compare, print_table, timed
from train_step import make_batch

from jax_transformer.config import ModelConfig
from jax_transformer.data.batches import Batch
from jax_transformer.layers.stack import stack_layers, stack_template
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import split
from jax_transformer.training.config import PRESETS, TrainConfig
from jax_transformer.training.optimizer import adam
from jax_transformer.training.schedule import noam_schedule
from jax_transformer.training.setup import stacks
from jax_transformer.training.step import make_train_step, start_state

ROWS, LENGTH, VOCAB_SIZE = 64, 32, 4000


def deep(depth: int) -> TrainConfig:
    small = PRESETS["small"]
    model = dataclasses.replace(
        small.model, num_encoder_layers=depth, num_decoder_layers=depth, dropout=0.1
    )
    return dataclasses.replace(small, model=model)


def model_of(config: TrainConfig) -> ModelConfig:
    return ModelConfig(
        **dataclasses.asdict(config.model), src_vocab_size=VOCAB_SIZE, tgt_vocab_size=VOCAB_SIZE
    )


def compile_step(
    config: TrainConfig, batch: Batch, *, stacked: bool
) -> tuple[tuple[float, float], Callable[[], object]]:
    """Wall and processor seconds to trace and compile, and a call of the step."""
    model_config = model_of(config)
    model = Transformer.from_config(model_config, rngs=nnx.Rngs(0))
    graphdef, params, buffers = split(model)
    if stacked:
        params = stack_layers(params)
        graphdef, _, _ = split(stack_template(model))
    optimizer = adam(noam_schedule(model_config.d_model))
    train_step = make_train_step(graphdef, optimizer, dropout_key=jax.random.key(1))
    state = start_state(params, optimizer)
    batch = jax.tree.map(jnp.asarray, batch)

    compiled, wall, cpu = timed(lambda: train_step.lower(state, buffers, batch).compile())

    def step() -> None:
        nonlocal state
        state, metrics = compiled(state, buffers, batch)
        jax.block_until_ready((state, metrics))

    return (wall, cpu), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 12, 24])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    batch = make_batch(ROWS, LENGTH, VOCAB_SIZE)
    compile_seconds: dict[int, dict[str, tuple[float, float]]] = {}
    lines = []
    for depth in arguments.depths:
        config = deep(depth)
        compiled = {
            layout: compile_step(config, batch, stacked=layout == "stacked")
            for layout in ("listed", "stacked")
        }
        seconds = {layout: taken for layout, (taken, _) in compiled.items()}
        steps = compare(
            {layout: step for layout, (_, step) in compiled.items()}, rounds=arguments.rounds
        )
        compile_seconds[depth] = seconds
        lines.append(
            (
                f"{depth} + {depth}",
                *(f"{wall:.1f}" for wall, _ in seconds.values()),
                *(f"{ROWS * LENGTH / timing.best:,.0f}" for timing in steps.values()),
                f"{steps['stacked'].best / steps['listed'].best:.2f}",
                "stacked" if stacks("auto", model_of(config)) else "listed",
            )
        )
    print_table(
        "Train step, layers listed or stacked (target tokens a second, padding included)",
        (
            "layers",
            "compile s, listed",
            "stacked",
            "tokens/s, listed",
            "stacked",
            "listed / stacked",
            "default",
        ),
        lines,
    )
    shallow, deepest = min(compile_seconds, key=lambda depth: abs(depth - 4)), max(compile_seconds)
    ratios = {
        layout: [
            f"{deep / flat:.2f}"
            for deep, flat in zip(
                compile_seconds[deepest][layout], compile_seconds[shallow][layout], strict=True
            )
        ]
        for layout in ("listed", "stacked")
    }
    print_table(
        f"Compile time, {deepest} layers / {shallow} layers",
        ("", "wall", "cpu"),
        [(layout, *ratio) for layout, ratio in ratios.items()],
    )


if __name__ == "__main__":
    main()
