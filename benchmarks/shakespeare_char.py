"""The nanoGPT CPU recipe on a megabyte of Shakespeare, in JAX and in PyTorch side by side.

    python benchmarks/shakespeare_char.py [--steps 2000] [--threads 2]

A GPT-2 of 4 layers, 4 heads, width 128 and context 64 on single characters, batches of 12 rows,
AdamW (0.9, 0.99, decay 0.1) at 1e-3 with 100 steps of warm-up and a cosine down to 1e-4, clipping
at 1, no dropout: the settings that the README of karpathy/nanoGPT gives for a CPU, where 2,000
steps on tiny Shakespeare end at a validation loss of 1.88 nats in about 3 minutes. The text is of
that size: the first 1,115,394 characters of the embedded Shakespeare, nine tenths to train on.

Both frameworks start from the same weights and see the same batches. They must end at the same
validation loss to 1e-3.
"""

import argparse
import json
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_transformer.config import DecoderOnlyConfig, LayerConfig
from jax_transformer.data import corpora
from jax_transformer.data.characters import CharacterTokenizer
from jax_transformer.data.packing import PackedBatch
from jax_transformer.huge_pages import restart_with_huge_pages
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import flatten, split, unflatten
from jax_transformer.porting.families.transformer import RULES
from jax_transformer.porting.plan import convert
from jax_transformer.porting.rules import Alias
from jax_transformer.training.optimizer import adam
from jax_transformer.training.schedule import cosine_schedule
from jax_transformer.training.step import language_loss, make_train_step, start_state
from torch_reference.models.decoder_only import DecoderOnly as ReferenceModel
from torch_reference.training import step as reference
from torch_reference.training.schedule import CosineLRScheduler

CHARACTERS = 1_115_394
CONTEXT, ROWS = 64, 12
EVALUATION_ROWS = 256
PEAK, FINAL_FRACTION, WARMUP = 1e-3, 0.1, 100
OPTIMIZER = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


class Text(NamedTuple):
    """Ids to train on and to validate with."""

    train: np.ndarray
    valid: np.ndarray
    vocab_size: int


def read_text() -> Text:
    parts = corpora.load_documents()
    text = "".join(document for part in parts.values() for document in part)[:CHARACTERS]
    tokenizer = CharacterTokenizer.of([text])
    ids = np.array(tokenizer.encode(text), np.int32)
    border = len(ids) * 9 // 10
    return Text(ids[:border], ids[border:], tokenizer.vocab_size)


def windows(ids: np.ndarray, starts: np.ndarray) -> PackedBatch:
    """Rows of the text that begin at these places, as nanoGPT draws them."""
    rows = ids[starts[:, None] + np.arange(CONTEXT + 1)]
    positions = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), rows[:, 1:].shape)
    return PackedBatch(rows[:, :-1], rows[:, 1:], positions, np.ones_like(positions))


def training_batch(ids: np.ndarray, step: int) -> PackedBatch:
    return windows(ids, np.random.default_rng([0, step]).integers(0, len(ids) - CONTEXT - 1, ROWS))


def validation_batches(ids: np.ndarray) -> list[PackedBatch]:
    """The whole text once, but for what does not fill a row."""
    starts = np.arange(0, len(ids) - CONTEXT - 1, CONTEXT)
    starts = starts[: len(starts) // EVALUATION_ROWS * EVALUATION_ROWS]
    return [windows(ids, each) for each in starts.reshape(-1, EVALUATION_ROWS)]


def model_config(vocab_size: int) -> DecoderOnlyConfig:
    layer = LayerConfig(
        d_model=128,
        num_heads=4,
        d_ff=512,
        norm_bias=False,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        activation="gelu",
        causal=True,
    )
    return DecoderOnlyConfig(
        vocab_size=vocab_size,
        layer=layer,
        num_layers=4,
        position="learned",
        max_len=CONTEXT,
        tied=True,
    )


class Result(NamedTuple):
    """The end of a training run."""

    train: float
    """Nats per token, mean over the last 100 steps."""
    valid: float
    seconds: float
    """Of all steps but those that compile."""


def train_jax(model: DecoderOnly, text: Text, steps: int) -> Result:
    graphdef, params, buffers = split(model)
    schedule = cosine_schedule(PEAK, steps, WARMUP, FINAL_FRACTION)
    optimizer = adam(schedule, max_norm=1.0, **OPTIMIZER)
    step = make_train_step(graphdef, optimizer, loss=language_loss, label_smoothing=0.0)
    state = start_state(params, optimizer)
    step(jax.tree.map(jnp.copy, state), buffers, training_batch(text.train, 0))  # compiles
    losses = []
    began = time.perf_counter()
    for index in range(steps):
        state, metrics = step(state, buffers, training_batch(text.train, index))
        losses.append(metrics.loss.mean())
    recent = float(np.mean(jax.device_get(losses[-100:])))
    seconds = time.perf_counter() - began
    evaluate = jax.jit(lambda params, batch: language_loss(graphdef, params, buffers, batch))
    sums = [evaluate(state.params, batch) for batch in validation_batches(text.valid)]
    total, count = (sum(float(x) for x in each) for each in zip(*sums, strict=True))
    return Result(recent, total / count, seconds)


def train_torch(model: ReferenceModel, text: Text, steps: int) -> Result:
    optimizer = reference.adamw(model, **OPTIMIZER)
    scheduler = CosineLRScheduler(optimizer, PEAK, steps, WARMUP, FINAL_FRACTION)
    losses = []
    model.train()
    began = time.perf_counter()
    for index in range(steps):
        metrics = reference.train_step(
            model,
            optimizer,
            scheduler,
            tensors(training_batch(text.train, index)),
            label_smoothing=0.0,
            loss=reference.language_loss,
        )
        losses.append(float(metrics.loss.mean()))
    seconds = time.perf_counter() - began
    model.eval()
    with torch.no_grad():
        sums = [
            reference.language_loss(model, tensors(batch))
            for batch in validation_batches(text.valid)
        ]
    total, count = (sum(float(x) for x in each) for each in zip(*sums, strict=True))
    return Result(float(np.mean(losses[-100:])), total / count, seconds)


def tensors(batch: PackedBatch) -> Any:
    fields: list[Any] = [torch.from_numpy(np.array(field)) for field in batch]
    return PackedBatch(*fields)


def same_weights(config: DecoderOnlyConfig) -> tuple[DecoderOnly, ReferenceModel]:
    """Both models, with the weights that PyTorch draws."""
    torch.manual_seed(0)
    theirs = ReferenceModel(config)
    graphdef, params, buffers = split(nnx.eval_shape(lambda: DecoderOnly(config, rngs=nnx.Rngs(0))))
    tensors = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    shapes = {name: leaf.shape for name, leaf in flatten(params).items()}
    tied = Alias("output_proj.weight", "embedding.weight")
    arrays = convert((tied, *RULES), tensors, shapes)
    leaves = {name: jnp.asarray(array) for name, array in arrays.items()}
    return nnx.merge(graphdef, unflatten(leaves, params), buffers), theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = read_text()
    ours, theirs = same_weights(model_config(text.vocab_size))
    print(f"{len(text.train):,} characters to train on, {len(text.valid):,} to validate")
    results = {
        "jax": train_jax(ours, text, arguments.steps),
        "torch": train_torch(theirs, text, arguments.steps),
    }
    for name, result in results.items():
        print(
            f"{name:<6} train {result.train:.4f}  validation {result.valid:.4f} nats per "
            f"character  {result.seconds:.1f} s, "
            f"{1000 * result.seconds / arguments.steps:.1f} ms a step"
        )
    difference = abs(results["jax"].valid - results["torch"].valid)
    speed = results["torch"].seconds / results["jax"].seconds
    print(
        json.dumps(
            {
                "steps": arguments.steps,
                **{f"{name}_{key}": value for name, result in results.items()
                   for key, value in result._asdict().items()},
                "difference": difference,
                "speed_over_torch": speed,
            }
        )
    )  # fmt: skip
    print(f"validation losses differ by {difference:.1e}; speed {speed:.2f}x that of PyTorch")
    if not difference <= 1e-3:
        sys.exit("the two frameworks end at different losses: they must agree to 1e-3")


if __name__ == "__main__":
    restart_with_huge_pages()
    main()
