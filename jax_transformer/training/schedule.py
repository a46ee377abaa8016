"""Learning rates as optax schedules: functions of the number of updates made before."""

import jax
import jax.numpy as jnp
import optax


def noam_schedule(d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> optax.Schedule:
    """`scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)` with `step = count + 1`.

    optax gives count 0 to the first update, so that one already moves. Source: Vaswani et al.
    2017, section 5.3.
    """

    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        return scale * noam_rate(jnp.asarray(count) + 1, d_model, warmup_steps)

    return schedule


def noam_document_schedule(
    d_model: int, warmup_steps: int = 4000, scale: float = 1.0
) -> optax.Schedule:
    """`noam_schedule` one update late: the lecture document's loop.

    There the optimiser starts with rate 0 and the scheduler steps after it, so that the first
    update moves nothing and update k has the rate of step k - 1.
    """

    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        return scale * noam_rate(count, d_model, warmup_steps)

    return schedule


def noam_rate(step: jax.typing.ArrayLike, d_model: int, warmup_steps: int) -> jax.typing.ArrayLike:
    """The formula, 0 at step 0."""
    step = jnp.asarray(step, dtype=jnp.result_type(float))
    decay = jnp.maximum(step, 1.0) ** -0.5
    return d_model**-0.5 * jnp.minimum(decay, step * warmup_steps**-1.5)


def cosine_schedule(
    peak: float, steps: int, warmup_steps: int, final_fraction: float = 0.1
) -> optax.Schedule:
    """`cosine_rate` with `step = count + 1`: the first update moves, update `warmup_steps` has
    the peak and update `steps` the final rate."""

    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        return cosine_rate(jnp.asarray(count) + 1, peak, steps, warmup_steps, final_fraction)

    return schedule


def wsd_schedule(
    peak: float, steps: int, warmup_steps: int, decay_steps: int, final_fraction: float = 0.1
) -> optax.Schedule:
    """`wsd_rate` with `step = count + 1`: update `steps - decay_steps` is the last one at the
    peak and update `steps` has the final rate."""

    def schedule(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        step = jnp.asarray(count) + 1
        return wsd_rate(step, peak, steps, warmup_steps, decay_steps, final_fraction)

    return schedule


def cosine_rate(
    step: jax.typing.ArrayLike, peak: float, steps: int, warmup_steps: int, final_fraction: float
) -> jax.typing.ArrayLike:
    """Linear warm-up to `peak`, then half a cosine down to `peak * final_fraction`.

        step <= warmup:  peak * step / warmup
        after it:        peak * (f + (1 - f) (1 + cos(pi (step - warmup) / (steps - warmup))) / 2)

    and the final rate from `steps` on. Written as `sin^2` of what is left, which keeps its
    digits near the end. Source: Loshchilov and Hutter 2017, equation 5, without restarts.
    """
    left = fraction(steps - jnp.asarray(step), steps - warmup_steps)
    decay = final_fraction + (1.0 - final_fraction) * jnp.sin(0.5 * jnp.pi * left) ** 2
    return peak * jnp.minimum(fraction(step, warmup_steps), decay)


def wsd_rate(
    step: jax.typing.ArrayLike,
    peak: float,
    steps: int,
    warmup_steps: int,
    decay_steps: int,
    final_fraction: float,
) -> jax.typing.ArrayLike:
    """Warm-up, stable, decay: linear to `peak`, constant, over the last `decay_steps` of `steps`
    linear down to `peak * final_fraction`, which it then keeps.

    Source: Hu et al. 2024 (MiniCPM), section 4.3; linear as in Haegele et al. 2024.
    """
    left = fraction(steps - jnp.asarray(step), decay_steps)
    decay = final_fraction + (1.0 - final_fraction) * left
    return peak * jnp.minimum(fraction(step, warmup_steps), decay)


def fraction(part: jax.typing.ArrayLike, whole: int) -> jax.Array:
    """`part / whole` between 0 and 1; where `whole` is 0, 1 if any `part` is left."""
    part = jnp.asarray(part, dtype=jnp.result_type(float))
    return jnp.clip(part / max(whole, 1), 0.0, 1.0)
