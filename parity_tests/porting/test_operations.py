"""Operations change the layout of a tensor and nothing else, and can be undone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jax_transformer.porting.operations import Transpose

matrices = st.sampled_from([np.float32, np.float16, np.int32]).flatmap(
    lambda dtype: arrays(dtype, st.tuples(st.integers(0, 5), st.integers(0, 5)))
)


@given(matrices)
def test_the_inverse_gives_back_every_bit(matrix):
    back = Transpose().inverse().apply(Transpose().apply(matrix))
    assert back.dtype == matrix.dtype
    assert back.shape == matrix.shape
    assert back.tobytes() == matrix.tobytes()


@given(matrices)
def test_the_shape_rule_is_what_applying_does(matrix):
    assert Transpose().apply(matrix).shape == Transpose().shape(matrix.shape)


@given(matrices)
def test_a_transposed_tensor_is_contiguous_in_memory(matrix):
    # Writers that store raw memory would store a view's as it was.
    transposed = Transpose().apply(matrix)
    assert transposed.flags.c_contiguous
    assert transposed.tobytes() == matrix.tobytes(order="F")
