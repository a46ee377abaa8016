"""Masks as literal tables: True may attend, built from lengths, the same in both frameworks."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.errors import InputError
from jax_transformer.layers import mask
from parity_tests.harness import Case, check_float64, declare
from parity_tests.inputs import SOURCE, SOURCE_MASK, TARGET
from torch_reference.layers import mask as reference

LENGTHS = np.array([5, 2, 0], np.int32)
PLACES = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]], np.int32)
DOCUMENTS = np.array([[1, 1, 1, 1, 1], [1, 1, 2, 2, 0]], np.int32)

CASES = declare(
    *(
        Case(
            name=name,
            jax=getattr(mask, name),
            torch=getattr(reference, name),
            inputs=inputs,
            options=options,
        )
        for name, inputs, options in (
            ("create_padding_mask", {"seq": SOURCE}, {}),
            ("create_padding_mask", {"seq": SOURCE}, {"pad_idx": 3}),
            ("create_look_ahead_mask", {}, {"size": 6}),
            ("create_look_ahead_mask", {}, {"size": 1}),
            ("create_decoder_mask", {"tgt": TARGET}, {}),
            ("create_length_mask", {"lengths": LENGTHS}, {"size": 5}),
            ("create_decoder_length_mask", {"lengths": LENGTHS}, {"size": 5}),
            ("positions_from_padding_mask", {"mask": SOURCE_MASK}, {}),
            ("create_causal_mask", {"query_positions": PLACES[:, 3:], "key_positions": PLACES}, {}),
            (
                "create_causal_mask",
                {
                    "query_positions": PLACES,
                    "key_positions": PLACES,
                    "window": None,
                    "query_segments": DOCUMENTS,
                    "key_segments": DOCUMENTS,
                    "key_valid": DOCUMENTS > 0,
                },
                {},
            ),
        )
    )
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_build_the_same_mask(case):
    check_float64(case, "op by op")


def both(name, *arrays, **options):
    """The function's value, after a check that the frameworks agree on it and its dtype."""
    ours = [array if array is None else jnp.asarray(array) for array in arrays]
    ours = np.asarray(getattr(mask, name)(*ours, **options))
    tensors = [array if array is None else torch.as_tensor(array) for array in arrays]
    theirs = getattr(reference, name)(*tensors, **options).numpy()
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    return ours


def test_look_ahead_shows_each_position_itself_and_what_came_before():
    table = [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
    ]
    np.testing.assert_array_equal(both("create_look_ahead_mask", size=3), [[table]])


def test_padding_hides_keys_whichever_query_asks():
    seq = np.array([[5, 6, 0], [0, 7, 8], [0, 0, 0]])
    table = [[[[1, 1, 0]]], [[[0, 1, 1]]], [[[0, 0, 0]]]]
    np.testing.assert_array_equal(both("create_padding_mask", seq), table)


def test_a_decoder_mask_hides_padding_and_the_future():
    seq = np.array([[5, 6, 0], [0, 7, 8], [0, 0, 0]])
    right_padded = [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 0],
    ]
    left_padded = [
        [0, 0, 0],
        [0, 1, 0],
        [0, 1, 1],
    ]
    table = [[right_padded], [left_padded], [np.zeros((3, 3))]]
    np.testing.assert_array_equal(both("create_decoder_mask", seq), table)


def test_lengths_tell_padding_even_where_its_id_is_a_real_token():
    # A padding id that is also the end of sentence: 0 below is a token of both sentences.
    seq = np.array([[5, 0, 0, 0], [5, 6, 0, 0]])
    lengths = np.array([2, 3], np.int32)
    table = [[[[1, 1, 0, 0]]], [[[1, 1, 1, 0]]]]
    np.testing.assert_array_equal(both("create_length_mask", lengths, size=4), table)
    assert not np.array_equal(both("create_padding_mask", seq), table)


def test_a_decoder_mask_of_lengths_is_the_two_at_once():
    lengths = np.array([2, 0], np.int32)
    table = [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 0],
    ]
    masks = both("create_decoder_length_mask", lengths, size=3)
    np.testing.assert_array_equal(masks, [[table], [np.zeros((3, 3))]])


def test_queries_that_follow_cached_keys_see_all_of_them():
    # Aligned at the bottom right: jax.nn's own causal mask would show the first two keys.
    mask = both("create_causal_mask", np.array([[3, 4]]), np.arange(5)[None])
    np.testing.assert_array_equal(mask, [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]])


def test_a_window_shows_the_last_keys_only_the_querys_own_among_them():
    places = np.arange(4)[None]
    table = [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(both("create_causal_mask", places, places, window=2), [[table]])
    for size in (4, 9):
        wide = both("create_causal_mask", places, places, window=size)
        np.testing.assert_array_equal(wide, both("create_look_ahead_mask", size=4))


def test_positions_and_not_places_say_who_comes_first():
    # A rolling cache of 4 slots after 6 tokens; slots not written yet are at no position.
    slots = np.array([[4, 5, 2, 3]])
    mask = both("create_causal_mask", np.array([[5]]), slots, window=3)
    np.testing.assert_array_equal(mask, [[[[1, 1, 0, 1]]]])
    later = both("create_causal_mask", np.array([[5]]), np.array([[4, 5, 2**30, 2**30]]))
    np.testing.assert_array_equal(later, [[[[1, 1, 0, 0]]]])


def test_documents_packed_into_a_row_see_themselves_only():
    segments = np.array([[7, 7, 9, 9, 9]])
    table = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    for places in ([[0, 1, 2, 3, 4]], [[0, 1, 0, 1, 2]]):
        places = np.array(places)
        mask = both("create_causal_mask", places, places, None, segments, segments)
        np.testing.assert_array_equal(mask, [[table]])


def test_keys_that_are_not_valid_are_hidden_on_either_side():
    places = np.array([[0, 1, 2], [0, 0, 1], [0, 1, 2]])
    valid = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)
    right = [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    # Padding on the left shares the first token's position, and sees it.
    left = [[0, 1, 0], [0, 1, 0], [0, 1, 1]]
    mask = both("create_causal_mask", places, places, None, None, None, valid)
    np.testing.assert_array_equal(mask, [[right], [left], [np.zeros((3, 3))]])


def test_positions_count_real_tokens_from_either_side():
    real = np.array([[1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)[:, None, None, :]
    positions = both("positions_from_padding_mask", real)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 2], [0, 0, 0, 1], [0, 0, 0, 0]])
    assert positions.dtype == np.int32


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_numbers_are_refused_in_place_of_truth_values(dtype):
    mask.check_boolean(jnp.ones(3, bool))
    reference.check_boolean(torch.ones(3, dtype=torch.bool))
    with pytest.raises(InputError, match=f"{dtype}: must be boolean"):
        mask.check_boolean(jnp.ones(3, dtype))
    with pytest.raises(InputError, match=f"{dtype}: must be boolean"):
        reference.check_boolean(torch.ones(3, dtype=getattr(torch, dtype)))
