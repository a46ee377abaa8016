"""Learning rates against PyTorch's scheduler and against literal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.training.schedule import noam_document_schedule, noam_schedule
from torch_reference.training.schedule import TransformerLRScheduler

STEPS = 10_000


def reference_rates(*, document_order, d_model, warmup_steps, scale):
    """The rates with which a PyTorch loop makes its first updates."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = TransformerLRScheduler(optimizer, d_model, warmup_steps, scale)
    rates = []
    for _ in range(STEPS):
        if not document_order:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if document_order:
            scheduler.step()
    return np.array(rates)


@pytest.mark.parametrize("warmup_steps", [1, 400, 4000])
@pytest.mark.parametrize(
    ("make", "document_order"), [(noam_schedule, False), (noam_document_schedule, True)]
)
def test_first_ten_thousand_rates_are_those_of_the_scheduler(make, document_order, warmup_steps):
    expected = reference_rates(
        document_order=document_order, d_model=512, warmup_steps=warmup_steps, scale=2.0
    )
    schedule = make(512, warmup_steps, 2.0)
    with jax.enable_x64(True):
        rates = np.asarray(jax.vmap(schedule)(jnp.arange(STEPS)))
    np.testing.assert_allclose(rates, expected, rtol=1e-14, atol=0)
    # float32: one power (2 ulp) and three products.
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(STEPS)))
    np.testing.assert_allclose(rates, expected, rtol=5 * 2.0**-23, atol=0)


def test_first_update_moves_and_the_peak_is_at_the_end_of_warmup():
    schedule = noam_schedule(512, 4000)
    rates = np.asarray(jax.vmap(schedule)(jnp.arange(STEPS)))
    assert rates[0] == pytest.approx(1.7469e-7, rel=1e-4)
    assert rates.argmax() + 1 == 4000
    assert rates.max() == pytest.approx(6.9877e-4, rel=1e-4)


def test_document_schedule_is_one_update_late():
    schedule, late = noam_schedule(512, 4000), noam_document_schedule(512, 4000)
    assert float(late(0)) == 0.0
    for count in (0, 1, 3999, 4000, 9000):
        assert float(late(count + 1)) == float(schedule(count))


@pytest.mark.parametrize("make", [noam_schedule, noam_document_schedule])
@pytest.mark.parametrize("zero", [0, np.int32(0)])
def test_count_zero_is_finite_in_every_form(make, zero):
    schedule = make(16, 10)
    assert np.isfinite(float(schedule(zero)))
    assert float(jax.jit(schedule)(zero)) == float(schedule(zero))
