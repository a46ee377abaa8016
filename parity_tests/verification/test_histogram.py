"""Elements by the size of their error."""

import numpy as np

from jax_transformer.verification.charts import histogram_chart
from jax_transformer.verification.histogram import make_histogram

TRUTH = np.array([[2.0, -2.0], [2.0, 2.0]])


def test_elements_are_counted_by_their_error_over_the_rms():
    ours = TRUTH + np.array([[2e-3, 0.0], [-2e-3, 2e-8]])
    found = make_histogram("a:out", "float32", TRUTH, ours, TRUTH)
    assert found is not None
    assert (found.exact, found.broken) == ((1, 4), (0, 0))
    assert sum(found.theirs) == 0
    filled = {found.borders[i]: n for i, n in enumerate(found.ours) if n}
    # An error that is a border up to rounding may be on either side of it.
    assert sum(n for low, n in filled.items() if low in (-3.5, -3.0)) == 2
    assert sum(n for low, n in filled.items() if low in (-8.5, -8.0)) == 1


def test_what_is_no_number_and_what_is_out_of_bounds_is_counted_too():
    ours = np.array([[np.nan, np.inf], [2e9, 2.0 + 1e-20]])
    found = make_histogram("a:out", "float32", TRUTH, ours, TRUTH * (1 + 1e-15))
    assert found is not None
    assert found.broken == (2, 0)
    assert found.exact == (1, 0)
    assert found.ours[-1] == 1
    assert "NaN or infinite: 2 and 0" in histogram_chart(found)


def test_tokens_that_do_not_count_are_left_out():
    valid = np.array([True, False])
    found = make_histogram("a:out", "float32", TRUTH, TRUTH, TRUTH, valid)
    assert found is not None
    assert found.exact == (2, 2)


def test_there_is_none_of_tensors_that_cannot_be_compared():
    assert make_histogram("a:out", "float32", TRUTH, TRUTH[0], TRUTH) is None
    assert make_histogram("a:out", "float32", TRUTH * 0, TRUTH, TRUTH) is None
