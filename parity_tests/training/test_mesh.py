import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jax_transformer.config import IGNORED_LABEL
from jax_transformer.data.batches import Batch
from jax_transformer.training.mesh import data_mesh, shard_rows
from parity_tests.tiny import QUICK_FLAGS, TWO_DEVICES, assert_same_bits


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `two_devices` has computed, by name."""
    directory = tmp_path_factory.mktemp("devices")
    flags = f"{TWO_DEVICES} {QUICK_FLAGS}"
    subprocess.run(
        [sys.executable, "-m", "parity_tests.training.two_devices", directory],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_ENABLE_X64": "1"},
        check=True,
    )
    return {path.stem: dict(np.load(path)) for path in directory.glob("*.npz")}


def test_two_devices_train_as_one_does_however_the_tokens_are_spread(results):
    one, two = results["one"], results["two"]
    assert one.keys() == two.keys()
    assert one["0[1].loss.count"] == 10
    for name, expected in one.items():
        if np.issubdtype(expected.dtype, np.integer):
            np.testing.assert_array_equal(two[name], expected, err_msg=name)
            continue
        assert two[name].dtype == expected.dtype
        # The gradient of a key bias is zero but for rounding: its own norm is no scale for it,
        # and Adam makes a whole update of any number.
        if "k_proj" in name and "bias" in name:
            continue
        error = np.linalg.norm(two[name] - expected)
        assert error <= 1e-12 * np.linalg.norm(expected), name


def test_a_checkpoint_is_restored_onto_another_number_of_devices(results):
    assert_same_bits(results["one on two"], results["one on one"])
    assert_same_bits(results["two on one"], results["two on two"])
    for name, array in results["one on one"].items():
        trained = results["one"][_in_state(name)]
        assert array.tobytes() == trained.tobytes(), name


def _in_state(name):
    """`['params']['a']` as a path into the pair of state and metrics after update 2."""
    field, rest = name.removeprefix("['").split("']", 1)
    return f"2[0].{field}{rest}"


def test_a_batch_is_filled_up_with_rows_that_say_nothing():
    devices = data_mesh().devices.size
    rows = devices + 1
    ones = np.ones((rows, 3), np.int32)
    counts = np.full(rows, 3, np.int32)
    batch = shard_rows(data_mesh(), Batch(ones, counts, ones, ones, counts))
    assert batch.source.shape[0] % devices == 0
    assert (np.asarray(batch.labels)[rows:] == IGNORED_LABEL).all()
    for field in (batch.source, batch.decoder_input, batch.source_lengths, batch.target_lengths):
        assert (np.asarray(field)[rows:] == 0).all()
    for found, expected in zip(batch, (ones, counts, ones, ones, counts), strict=True):
        np.testing.assert_array_equal(np.asarray(found)[:rows], expected)
        assert isinstance(found, jax.Array)
