"""Every fault."""

from parity_tests.planted_faults import (
    attention_faults,
    decoding_faults,
    faults,
    paired_faults,
    position_faults,
    training_faults,
)

FAULTS = (
    *faults.FAULTS,
    *position_faults.FAULTS,
    *attention_faults.FAULTS,
    *training_faults.FAULTS,
    *decoding_faults.FAULTS,
    *paired_faults.FAULTS,
)
