import numpy as np
import pytest

from jax_transformer.config import IGNORED_LABEL, ModelConfig
from jax_transformer.data.batches import Batch, Batches
from jax_transformer.errors import InputError
from jax_transformer.training.step import check_batch

CONFIG = ModelConfig(src_vocab_size=10, tgt_vocab_size=12, d_model=8, num_heads=2, max_len=6)


def batch(**changes):
    """Two rows: full ones at the ends of the vocabularies, and an empty one."""
    fields = {
        "source": np.array([[4, 9, 3], [0, 0, 0]], np.int32),
        "source_lengths": np.array([3, 0], np.int32),
        "decoder_input": np.array([[2, 11], [0, 0]], np.int32),
        "labels": np.array([[11, 3], [IGNORED_LABEL, IGNORED_LABEL]], np.int32),
        "target_lengths": np.array([2, 0], np.int32),
    }
    return Batch(**(fields | changes))


def put(name, place, value):
    """The batch with one number changed."""
    array = getattr(batch(), name).copy()
    array[place] = value
    return batch(**{name: array})


def test_batches_of_the_library_and_of_other_integer_types_pass():
    check_batch(batch(), CONFIG)
    check_batch(batch(labels=batch().labels.astype(np.int64)), CONFIG)
    made = Batches([[4, 5], [6]], [[7], [8, 9]], tokens_per_batch=6, seed=0, vocab_size=10,
                   max_length=6)  # fmt: skip
    for step in range(len(made)):
        check_batch(made.at(step), CONFIG)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (put("source", (1, 2), 10), r"batch\.source\[1, 2\] is 10: must be a whole number fr"),
        (put("source", (0, 0), -1), r"batch\.source\[0, 0\] is -1: must be"),
        (put("decoder_input", (0, 1), 12), r"batch\.decoder_input\[0, 1\] is 12: .* from 0 to 11"),
        (put("labels", (0, 1), 12), r"batch\.labels\[0, 1\] is 12: .* from 0 to 11, or -100"),
        (put("labels", (1, 0), -1), r"batch\.labels\[1, 0\] is -1: .* from 0 to 11, or -100"),
        (put("labels", (1, 0), -99), r"batch\.labels\[1, 0\] is -99"),
        (put("source_lengths", 0, 4), r"batch\.source_lengths\[0\] is 4: .* from 0 to 3"),
        (put("target_lengths", 1, -2), r"batch\.target_lengths\[1\] is -2: .* from 0 to 2"),
        (batch(labels=np.ones((2, 2))), r"batch\.labels has dtype float64: each value must be a w"),
        (batch(labels=np.ones((2, 3), int)), r"batch\.decoder_input is \[2, 2\], must be \[2, 3\]"),
        (batch(source_lengths=np.ones(3, int)), r"batch\.source_lengths is \[3\], must be \[2\]"),
        (batch(source=np.ones((2, 7), int)),
         r"batch\.source has rows of 7 tokens, more than the 6 of the position table"),
        (batch(labels=np.ones((2, 7), int), decoder_input=np.ones((2, 7), int)),
         r"batch\.labels has rows of 7 tokens, more than the 6"),
    ],
)  # fmt: skip
def test_a_value_the_model_would_read_nonsense_from_is_named(spoilt, message):
    with pytest.raises(InputError, match=f"^{message}") as refused:
        check_batch(spoilt, CONFIG)
    assert "\n" not in str(refused.value)
