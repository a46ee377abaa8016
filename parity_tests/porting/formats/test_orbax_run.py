"""The project's own directories: read as training wrote them, written as it restores them."""

import jax
import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import header_of
from jax_transformer.porting.formats.orbax_run import FolderWriter, read
from jax_transformer.training.checkpoint import CheckpointStore
from parity_tests.porting.formats.tensors import (
    assert_same,
    assortment,
    leftovers,
    random_bits,
    read_all,
    write,
)

PARAMS = {
    "encoder.layers.0.k": random_bits((2, 3), np.float32, 0),
    "encoder.layers.1.k": random_bits((2, 3), "bfloat16", 1),
    "scale": random_bits((), np.float16, 2),
}
BUFFERS = {"pe": random_bits((3, 2), np.float32, 3)}


def tree(tensors):
    root = {}
    for name, value in tensors.items():
        node = root
        *parents, leaf = name.split(".")
        for parent in parents:
            node = node.setdefault(int(parent) if parent.isdecimal() else parent, {})
        node[leaf] = value
    return root


def trained(path, scores=(1.0,), kind="best"):
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.json").write_text('{"model": {"d_model": 2}}')
    (path / "tokenizer.json").write_text("{}")
    with CheckpointStore(path / "checkpoints" / kind, write=True, by_score=kind == "best") as store:
        for step, score in enumerate(scores):
            params = {name: array + np.asarray(step, array.dtype) for name, array in PARAMS.items()}
            content = {"params": tree(params), "buffers": tree(BUFFERS)}
            if kind == "latest":
                content |= {"step": np.int32(step), "mu": tree(params)}
            with np.errstate(all="ignore"):
                store.save(step, jax.tree.map(np.asarray, content), score=score)
    return path


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("scores", "best"), [((1.0,), 0), ((1.0, 3.0), 1), ((3.0, 1.0), 0)])
def test_the_best_model_of_a_run_is_read(tmp_path, scores, best):
    checkpoint = read(trained(tmp_path / "run", scores))
    expected = {name: array + np.asarray(best, array.dtype) for name, array in PARAMS.items()}
    assert_same(read_all(checkpoint), expected | BUFFERS)
    assert checkpoint.config == {"model": {"d_model": 2}}
    assert checkpoint.metadata["step"] == str(best)
    assert [path.name for path in checkpoint.companions] == ["tokenizer.json"]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_rest_of_a_training_state_is_kept_apart(tmp_path):
    checkpoint = read(trained(tmp_path / "run", (None, None), "latest"))
    assert checkpoint.tensors.keys() == PARAMS.keys() | BUFFERS.keys()
    assert checkpoint.metadata["step"] == "1"
    rest = checkpoint.metadata["rest"]
    assert rest.keys() == {"step"} | {f"mu.{name}" for name in PARAMS}
    assert rest["step"].read() == 1


def test_a_ported_directory_is_restored_like_a_run(tmp_path):
    tensors = PARAMS | BUFFERS
    write(FolderWriter, tmp_path / "m", tensors, config={"model": {}}, buffers=["pe"])
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        {"params": tree(PARAMS), "buffers": tree(BUFFERS)},
    )
    with CheckpointStore(tmp_path / "m" / "checkpoints" / "best", by_score=True) as store:
        assert store.chosen_step() == 0
        restored = store.restore(like)
    for name, array in PARAMS.items():
        node = restored["params"]
        for part in name.split("."):
            node = node[int(part) if part.isdecimal() else part]
        assert np.asarray(node).tobytes() == array.tobytes(), name
    assert np.asarray(restored["buffers"]["pe"]).tobytes() == BUFFERS["pe"].tobytes()


def test_every_dtype_and_shape_goes_there_and_back(tmp_path, monkeypatch):
    tensors = {name.replace(".", "_"): array for name, array in assortment().items()}
    tensors |= {"zeros": np.zeros((2, 3), np.float32), "minus": np.full(3, -0.0, np.float32)}
    assert_same(read_all(read(write(FolderWriter, tmp_path / "a", tensors, config={}))), tensors)
    # In chunks of one row as well.
    monkeypatch.setattr("jax_transformer.porting.formats.orbax_run.BLOCK", 8)
    assert_same(read_all(read(write(FolderWriter, tmp_path / "b", tensors, config={}))), tensors)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    writer = FolderWriter(tmp_path / "m", dict.fromkeys("ab", header_of(np.ones(3))), config={})
    with pytest.raises(ValueError, match="b has not been added"):
        add_one(writer)
    assert not list(tmp_path.iterdir())


def add_one(writer):
    with writer:
        writer.add("a", np.ones(3))
        assert leftovers(writer.path.parent)


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        read(tmp_path)
    (tmp_path / "checkpoints" / "best" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        read(tmp_path)


def test_damaged_files_are_one_line(tmp_path):
    path = write(FolderWriter, tmp_path / "m", PARAMS, config={})
    for file in path.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match="cannot be read or written here") as refusal:
        read_all(read(path))
    assert "\n" not in str(refusal.value)
