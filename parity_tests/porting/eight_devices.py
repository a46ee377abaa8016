"""Run by `test_sharding` in a process of its own, where the CPU counts as eight devices.

Given a folder and the names of models in it, loads the first onto a mesh and measures the memory
that this takes beyond the arrays; of others it saves what a device holds and what they compute.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401  part of the interpreter's own memory

from jax_transformer.models.parameters import flatten
from jax_transformer.porting.pretrained import from_pretrained


def resident(field: str) -> int:
    """Bytes of resident memory: now (`VmRSS`), or the most since it was forgotten (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def load(path: Path, sharding: str) -> dict[str, int]:
    """The bytes of all arrays, and those that were there at the most beside them."""
    jax.device_put(np.zeros(8), jax.devices()[-1]).block_until_ready()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    model = from_pretrained(path, sharding=sharding)
    leaves = jax.block_until_ready(jax.tree.leaves(model.params))
    beside = resident("VmHWM") - before
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return {"arrays": held, "beside": beside - held}


def main(folder: Path, *measured: str) -> None:
    assert len(jax.devices()) == 8
    # First: what is freed stays with the process.
    memory = {name: load(folder / name, "model=8") for name in measured[:1]}
    (folder / f"{measured[0]}.json").write_text(json.dumps(memory[measured[0]]))
    shapes = {}
    for name, sharding in zip(measured[1:], ("model=4", "data=2,model=4"), strict=False):
        found = from_pretrained(folder / name, sharding=sharding)
        leaves = flatten(found.params)
        for leaf in leaves.values():
            assert len(leaf.sharding.device_set) == (4 if sharding == "model=4" else 8)
        parts = {n: leaf.addressable_shards[0].data.shape for n, leaf in leaves.items()}
        shapes[name] = {n: list(shape) for n, shape in parts.items()}
        np.savez(folder / f"{name}.npz", **{n: np.asarray(leaf) for n, leaf in leaves.items()})
        tokens = jnp.arange(18, dtype=jnp.int32).reshape(2, 9)
        logits = jax.jit(lambda tokens, found=found: found.model(tokens))(tokens)
        np.save(folder / f"{name}.npy", np.asarray(logits))
        (folder / "shapes.json").write_text(json.dumps(shapes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
