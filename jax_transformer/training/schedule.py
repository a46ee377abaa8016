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
