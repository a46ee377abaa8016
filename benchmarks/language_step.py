"""The training step of a Llama-like language model of 30M parameters against PyTorch.

Eager and under `torch.compile`, both with its fused AdamW, the faster one; the same model, packed
batch and float32 on the same CPU; the full step: forward, loss, backward, clipping, AdamW. Each in
a process of its own, all with the allocator's huge pages that `train.py` asks for.

    pip install -e '.[test]' && python benchmarks/language_step.py
"""

import argparse
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from processes import Contender
from timing import compare, print_timings
from train_step import print_ratios

import jax_transformer.training.step as ours
import torch_reference.models.decoder_only as reference
import torch_reference.training.step as theirs
from jax_transformer.config import DecoderOnlyConfig, LayerConfig, RotaryConfig
from jax_transformer.data.packing import PackedBatch
from jax_transformer.huge_pages import restart_with_huge_pages
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import count_parameters, split
from jax_transformer.training.optimizer import adam

CONFIG = DecoderOnlyConfig(
    vocab_size=8192,
    num_layers=8,
    position="rotary",
    max_len=1024,
    tied=True,
    layer=LayerConfig(
        d_model=512,
        num_heads=8,
        num_kv_heads=4,
        d_ff=1536,
        norm="rms",
        norm_epsilon=1e-5,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        activation="silu",
        gated=True,
        rotary=RotaryConfig(),
        causal=True,
    ),
)
RATE, DECAY, MAX_NORM = 3e-4, 0.1, 1.0


def make_batch(rows: int, length: int) -> PackedBatch:
    """Two documents a row."""
    rng = np.random.default_rng(0)
    ids = rng.integers(4, CONFIG.vocab_size, (rows, length + 1)).astype(np.int32)
    borders = rng.integers(length // 4, 3 * length // 4, (rows, 1))
    index = np.arange(length, dtype=np.int32)[None]
    second = index >= borders
    return PackedBatch(
        tokens=ids[:, :-1],
        labels=ids[:, 1:],
        positions=np.where(second, index - borders, index).astype(np.int32),
        segments=(1 + second).astype(np.int32),
    )


def jax_step(batch: PackedBatch) -> Callable[[], object]:
    graphdef, params, buffers = split(DecoderOnly(CONFIG, rngs=nnx.Rngs(0)))
    optimizer = adam(lambda count: RATE, b2=0.95, max_norm=MAX_NORM, weight_decay=DECAY)
    train_step = ours.make_train_step(
        graphdef,
        optimizer,
        label_smoothing=0.0,
        dropout_key=jax.random.key(1),
        loss=ours.language_loss,
    )
    state = ours.start_state(params, optimizer)
    arrays = jax.tree.map(jnp.asarray, batch)

    def step() -> None:
        nonlocal state
        state, metrics = train_step(state, buffers, arrays)
        jax.block_until_ready((state, metrics))

    return step


def torch_step(batch: PackedBatch, compiled: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    model = reference.DecoderOnly(CONFIG).train()
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=1e-9,
        fused=True,
    )
    loss = torch.compile(theirs.language_loss) if compiled else theirs.language_loss
    tensors = PackedBatch(*map(torch.from_numpy, batch))

    def step() -> None:
        optimizer.zero_grad()
        loss(model, tensors).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    batch = make_batch(arguments.rows, arguments.length)
    size = count_parameters(nnx.eval_shape(lambda: DecoderOnly(CONFIG, rngs=nnx.Rngs(0))))
    print(
        f"{size:,} parameters, {arguments.rows} x {arguments.length} tokens, "
        f"{torch.get_num_threads()} threads, GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '')}"
    )
    contenders = {
        "JAX": Contender(jax_step, batch),
        "PyTorch eager": Contender(torch_step, batch, False),
        "PyTorch compiled": Contender(torch_step, batch, True),
    }
    steps = compare(contenders, rounds=arguments.rounds, timer=Contender.timed)
    for contender in contenders.values():
        contender.close()
    print_timings("Training step", steps)
    peer = min((name for name in steps if name != "JAX"), key=lambda name: steps[name].best)
    print_ratios(f"JAX against the fastest, {peer}", steps["JAX"], steps[peer])


if __name__ == "__main__":
    restart_with_huge_pages()
    main()
