"""Learning rates against PyTorch's scheduler and against literal numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.training.schedule import (
    cosine_schedule,
    noam_document_schedule,
    noam_schedule,
    wsd_schedule,
)
from torch_reference.training.schedule import (
    CosineLRScheduler,
    TransformerLRScheduler,
    WSDLRScheduler,
)

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


@pytest.mark.parametrize(
    "schedule",
    [
        noam_schedule(16, 10),
        noam_document_schedule(16, 10),
        cosine_schedule(1.0, 10, 0),
        wsd_schedule(1.0, 10, 0, 0),
    ],
)
@pytest.mark.parametrize("zero", [0, np.int32(0)])
def test_count_zero_is_finite_in_every_form(schedule, zero):
    assert np.isfinite(float(schedule(zero)))
    # Compiled, products and sums are rounded once.
    assert float(jax.jit(schedule)(zero)) == pytest.approx(float(schedule(zero)), rel=2.0**-22)


# Peak, steps, warm-up, (decay,) final fraction. The 10,000 rates reach past the end of each but
# the last; no warm-up, no decay, nothing between them.
COSINE = [(1e-3, 5000, 400, 0.1), (3.0, 9000, 1, 0.0), (0.5, 101, 100, 0.3), (1.0, 20000, 0, 0.1)]
WSD = [
    (1e-3, 5000, 400, 1000, 0.1),
    (3.0, 9000, 1, 8000, 0.0),
    (0.5, 500, 100, 400, 0.3),
    (1.0, 20000, 0, 0, 0.1),
]


def cosine_by_hand(count, peak, steps, warmup_steps, final_fraction):
    """The published formula, in the form of a factor for PyTorch's LambdaLR."""
    step = count + 1
    if step <= warmup_steps:
        return step / warmup_steps
    if step >= steps:
        return final_fraction
    ratio = (step - warmup_steps) / (steps - warmup_steps)
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * ratio))


def wsd_by_hand(count, peak, steps, warmup_steps, decay_steps, final_fraction):
    step = count + 1
    if step <= warmup_steps:
        return step / warmup_steps
    if step <= steps - decay_steps and step < steps:
        return 1.0
    if step >= steps:
        return final_fraction
    return 1 - (1 - final_fraction) * (step - (steps - decay_steps)) / decay_steps


def lambda_lr_rates(factor, peak):
    """The rates with which a loop makes its first updates under PyTorch's own LambdaLR."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


@pytest.mark.parametrize(
    ("make", "reference", "by_hand", "arguments"),
    [
        *((cosine_schedule, CosineLRScheduler, cosine_by_hand, each) for each in COSINE),
        *((wsd_schedule, WSDLRScheduler, wsd_by_hand, each) for each in WSD),
    ],
)
def test_cosine_and_wsd_are_those_of_lambda_lr_and_of_the_reference(
    make, reference, by_hand, arguments
):
    expected = lambda_lr_rates(lambda count: by_hand(count, *arguments), arguments[0])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = reference(optimizer, *arguments)
    rates = np.array([scheduler.step() for _ in range(STEPS)])
    assert optimizer.param_groups[0]["lr"] == rates[-1]
    # The published cosine loses the digits of 1 + cos near pi: a few ulp of the peak.
    peak = arguments[0]
    np.testing.assert_allclose(rates, expected, rtol=1e-13, atol=4e-16 * peak)
    schedule = make(*arguments)
    with jax.enable_x64(True):
        ours = np.asarray(jax.vmap(schedule)(jnp.arange(STEPS)))
    np.testing.assert_allclose(ours, rates, rtol=1e-14, atol=0)
    # float32: a quotient, a sine squared, and three more roundings.
    ours = np.asarray(jax.vmap(schedule)(jnp.arange(STEPS)))
    np.testing.assert_allclose(ours, rates, rtol=8 * 2.0**-23, atol=0)


def test_rates_of_cosine_and_wsd_at_the_borders_of_their_phases():
    cosine = cosine_schedule(1.0, 110, 10, 0.1)
    assert [float(cosine(step - 1)) for step in (1, 5, 10, 60, 110, 111, 10**6)] == pytest.approx(
        [0.1, 0.5, 1.0, 0.55, 0.1, 0.1, 0.1], rel=1e-6
    )
    wsd = wsd_schedule(1.0, 110, 10, 20, 0.0)
    assert [float(wsd(step - 1)) for step in (1, 10, 50, 90, 91, 100, 110, 111)] == pytest.approx(
        [0.1, 1.0, 1.0, 1.0, 0.95, 0.5, 0.0, 0.0], rel=1e-6
    )
