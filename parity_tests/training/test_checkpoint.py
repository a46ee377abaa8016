import random
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.training.checkpoint import CheckpointStore
from parity_tests.tiny import assert_same_bits, named


def tree(value=1):
    """Lists of layers, tuples of optimiser states, an average that is not kept, a scalar."""
    return {
        "params": {"encoder": {"layers": {0: {"w": jnp.full((2, 3), value, jnp.float32)}}}},
        "opt_state": ({"mu": jnp.full(3, value, jnp.float32)}, {"count": jnp.int32(7)}),
        "average": None,
        "step": jnp.int32(value),
    }


def save(directory, *steps, **options):
    with CheckpointStore(directory, write=True) as store:
        for step in steps:
            store.save(step, tree(step), **options)


def test_the_newest_checkpoint_is_restored_and_two_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3)
    with CheckpointStore(tmp_path) as store:
        assert store.chosen_step() == 3
        assert_same_bits(named(store.restore(tree())), named(tree(3)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_by_score_the_best_is_kept_and_restored_and_the_later_of_equals(tmp_path):
    with CheckpointStore(tmp_path, write=True, by_score=True) as store:
        for step, score in ((1, 5.0), (2, 20.0), (3, 10.0)):
            store.save(step, tree(step), score=score)
    with CheckpointStore(tmp_path, write=True, by_score=True) as store:
        assert (store.chosen_step(), store.best_score()) == (2, 20.0)
        assert_same_bits(named(store.restore(tree())), named(tree(2)))
        store.save(4, tree(4), score=20.0)
        store.save(5, tree(5), score=0.0)
    with CheckpointStore(tmp_path, by_score=True) as store:
        assert store.chosen_step() == 4


def test_a_step_that_is_saved_already_stays_as_it_is(tmp_path):
    save(tmp_path, 3)
    with CheckpointStore(tmp_path, write=True) as store:
        store.save(3, tree(9))
        assert_same_bits(named(store.restore(tree())), named(tree(3)))


def test_a_checkpoint_holds_its_step_though_the_next_ones_reuse_the_memory(tmp_path):
    @jax.jit(donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda leaf: leaf * 1.5 + 1.0, state)

    # Large enough that the save is still under way when the memory is written to.
    state = {"w": jnp.arange(4_000_000.0), "v": jnp.arange(1000.0)}
    with CheckpointStore(tmp_path, write=True) as store:
        expected = {name: np.array(leaf) for name, leaf in state.items()}
        store.save(1, state)
        for _ in range(10):
            state = step(state)
    with CheckpointStore(tmp_path) as store:
        restored = store.restore(state)
    assert all((restored[name] == expected[name]).all() for name in expected)


def test_a_round_trip_keeps_every_bit_of_every_dtype(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**16, 4096, np.uint16)
    state = {
        "bfloat16": jnp.asarray(bits.view(jnp.bfloat16)),  # NaNs and subnormal numbers too
        "float16": jnp.asarray(bits.view(np.float16)),
        "float32": jnp.asarray(np.float32([np.nan, -0.0, 1e-45, np.inf, 1 / 3])),
        "int32": jnp.int32(-(2**31)),
        "bool": jnp.asarray([True, False]),
    }
    with CheckpointStore(tmp_path, write=True) as store:
        store.save(1, state)
    with CheckpointStore(tmp_path) as store:
        assert_same_bits(named(store.restore(state)), named(state))


def changed(**leaves):
    return tree() | leaves


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (changed(step=jnp.float32(1)), r"step is int32\[\], must be float32\[\]"),
        (changed(params={"encoder": {"layers": {0: {"w": jnp.ones((3, 2))}}}}),
         r"params\.encoder\.layers\.0\.w is float32\[2, 3\], must be float32\[3, 2\]"),
        (changed(params={"encoder": {"layers": {0: {"w": jnp.ones((2, 3), jnp.bfloat16)}}}}),
         r"layers\.0\.w is float32\[2, 3\], must be bfloat16\[2, 3\]"),
        (changed(params={"encoder": {"layers": {i: {"w": jnp.ones((2, 3))} for i in (0, 1)}}}),
         r"missing params\.encoder\.layers\.1\.w"),
        (changed(params={}), r"unexpected params\.encoder\.layers\.0\.w"),
        (changed(average={"w": jnp.ones(3)}), r"missing average\.w"),
    ],
)  # fmt: skip
def test_another_name_shape_or_dtype_is_refused_not_cast_or_filled(tmp_path, like, message):
    save(tmp_path, 1)
    with (
        CheckpointStore(tmp_path) as store,
        pytest.raises(
            InputError, match=rf"^{tmp_path}/1 does not fit its run's config: .*{message}"
        ),
    ):
        store.restore(like)


def test_a_save_into_what_is_no_directory_any_more_is_told_at_once(tmp_path):
    directory = tmp_path / "latest"
    save(directory, 1)
    store = CheckpointStore(directory, write=True)
    directory.rename(tmp_path / "elsewhere")
    directory.write_text("in the way")
    with pytest.raises(InputError, match=rf"^{directory}: checkpoints cannot be written or read"):
        store.save(2, tree(2))
    assert directory.read_text() == "in the way"


@pytest.fixture
def full_disk():
    """No file can grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_fails_in_the_background_is_told_at_the_next_one(tmp_path, full_disk):
    store = CheckpointStore(tmp_path, write=True)
    store.save(1, tree(1))
    store.save(2, too_large())
    with pytest.raises(InputError, match=rf"^{tmp_path}: checkpoints cannot be written or read"):
        store.save(3, tree(3))
    with CheckpointStore(tmp_path) as reader:
        assert reader.chosen_step() == 1


def test_a_last_save_that_fails_in_the_background_is_told_at_the_end(tmp_path, full_disk):
    store = CheckpointStore(tmp_path, write=True)
    store.save(1, too_large())
    with pytest.raises(InputError, match=rf"^{tmp_path}: checkpoints cannot be written or read"):
        store.close()


def too_large():
    """4 MB that do not compress."""
    return {"w": jax.random.normal(jax.random.key(0), (1_000_000,))}


def test_damaged_files_are_told_by_their_place(tmp_path):
    # One array: reads of others would go on after the first has failed.
    state = {"w": jnp.ones(3)}
    with CheckpointStore(tmp_path, write=True) as store:
        store.save(1, state)
    for path in (tmp_path / "1").rglob("*"):
        if path.is_file() and "ocdbt" in str(path):
            path.write_bytes(b"")
    with (
        CheckpointStore(tmp_path) as store,
        pytest.raises(InputError, match=rf"^{tmp_path}: .*its files are whole$"),
    ):
        store.restore(state)


def test_a_reader_changes_nothing(tmp_path):
    save(tmp_path, 1)
    # What a save under way looks like to others.
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    with CheckpointStore(tmp_path) as store:
        assert store.chosen_step() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.orbax-checkpoint-tmp"]
    with CheckpointStore(tmp_path / "none") as store:
        assert store.chosen_step() is None
    assert not (tmp_path / "none").exists()


SAVE_FOREVER = """
import sys, itertools, pathlib
import jax.numpy as jnp
from jax_transformer.training.checkpoint import CheckpointStore

directory = pathlib.Path(sys.argv[1])
with CheckpointStore(directory, write=True) as store:
    first = (store.chosen_step() or 0) + 1
    for step in itertools.count(first):
        store.save(step, {"w": jnp.full(100_000, float(step)), "step": jnp.int32(step)})
        print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    like = {"w": jnp.zeros(100_000), "step": jnp.int32(0)}
    moments, reached = random.Random(0), 0
    for _ in range(3):
        command = [sys.executable, "-c", SAVE_FOREVER, tmp_path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(5):
                started = int(process.stdout.readline())
            time.sleep(moments.uniform(0.0, 0.3))
            process.kill()
        with CheckpointStore(tmp_path) as store:
            restored = store.restore(like)
        # A save waits for the one before: those before the last that was begun are complete.
        assert reached < started - 1 <= int(restored["step"]) == store.chosen_step()
        assert (restored["w"] == float(restored["step"])).all()
        reached = int(restored["step"])
