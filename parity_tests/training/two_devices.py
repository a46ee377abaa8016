"""Run by `test_mesh` in a process of its own, where the CPU counts as two devices, in float64.

Trains on the same batch with one device and with both, and saves what came out of each, and of
the checkpoints that the other one restored, under the names that the test reads.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_transformer.config import IGNORED_LABEL, ModelConfig
from jax_transformer.data.batches import Batch
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import cast, split
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.mesh import data_mesh, replicated, shard_rows
from jax_transformer.training.optimizer import adam
from jax_transformer.training.run import on_device
from jax_transformer.training.schedule import noam_schedule
from jax_transformer.training.step import make_train_step, start_state
from parity_tests.tiny import named

CONFIG = ModelConfig(
    src_vocab_size=20, tgt_vocab_size=20, d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1,
    num_decoder_layers=1, max_len=16, dropout=0.3, tied_tables="all",
)  # fmt: skip


def make_batch(*lengths: int) -> Batch:
    """A row of each length, on both sides, ten positions wide."""
    generator = np.random.default_rng(sum(lengths))
    inside = np.arange(10) < np.array(lengths)[:, None]
    source, decoder_input, labels = generator.integers(4, 20, (3, len(lengths), 10), dtype=np.int32)
    counts = np.array(lengths, np.int32)
    return Batch(
        source=np.where(inside, source, 0),
        source_lengths=counts,
        decoder_input=np.where(inside, decoder_input, 0),
        labels=np.where(inside, labels, IGNORED_LABEL),
        target_lengths=counts,
    )


# Of two devices one gets 1 token, the other 9; the odd number of rows is filled up.
BATCH = make_batch(1, 0, 9)


def initial_state(mesh: jax.sharding.Mesh, optimizer: optax.GradientTransformation):
    """The same on any mesh."""
    graphdef, params, buffers = split(Transformer.from_config(CONFIG, rngs=nnx.Rngs(0)))
    state = start_state(cast(params, jnp.float64), optimizer, average_decay=0.9)
    state, buffers = jax.device_put((state, cast(buffers, jnp.float64)), replicated(mesh))
    return graphdef, state, buffers


def train(mesh: jax.sharding.Mesh, directory: Path) -> dict[str, np.ndarray]:
    """State and metrics after the first and the last of some updates; the last is saved."""
    optimizer = adam(noam_schedule(CONFIG.d_model, 10))
    graphdef, state, buffers = initial_state(mesh, optimizer)
    step = make_train_step(graphdef, optimizer, dropout_key=jax.random.key(7), average_decay=0.9)
    batch = shard_rows(mesh, BATCH)
    rows = len(batch.source) // mesh.devices.size
    for field in batch:
        assert {shard.device for shard in field.addressable_shards} == set(mesh.devices)
        assert all(len(shard.data) == rows for shard in field.addressable_shards)
    results = {}
    for number in range(3):
        state, metrics = step(state, buffers, batch)
        for leaf in jax.tree.leaves((state, metrics)):
            assert leaf.sharding.is_fully_replicated
            assert leaf.sharding.device_set == set(mesh.devices)
        # The moments after the first update are the gradients and their squares.
        if number != 1:
            results |= {f"{number}{key}": leaf for key, leaf in named((state, metrics)).items()}
    # One program: what a step gives back lies where the next one expects it.
    assert step._cache_size() == 1
    with CheckpointStore(directory, write=True) as store:
        store.save(3, state._asdict())
    return results


def restore(mesh: jax.sharding.Mesh, directory: Path, like: dict) -> dict[str, np.ndarray]:
    """The state that `train` has saved, put on `mesh`."""
    with CheckpointStore(directory) as store:
        state = store.restore(on_device(like, replicated(mesh)))
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.device_set == set(mesh.devices)
    return named(state)


def main(directory: Path) -> None:
    assert len(jax.devices()) == 2
    one, two = data_mesh(jax.devices()[:1]), data_mesh()
    results = {"one": train(one, directory / "ck1"), "two": train(two, directory / "ck2")}
    _, like, _ = initial_state(one, adam(noam_schedule(CONFIG.d_model, 10)))
    like = like._asdict()
    results["one on two"] = restore(two, directory / "ck1", like)
    results["two on one"] = restore(one, directory / "ck2", like)
    results["one on one"] = restore(one, directory / "ck1", like)
    results["two on two"] = restore(two, directory / "ck2", like)
    for name, arrays in results.items():
        np.savez(directory / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
