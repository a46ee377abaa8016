"""`materialize` tells the compiler something and changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.layers.fusion import materialize


def test_values_and_gradients_stay_as_they_are():
    x = jnp.linspace(-1.0, 1.0, 5)
    np.testing.assert_array_equal(materialize(x), x)
    np.testing.assert_array_equal(jax.jit(materialize)(x), x)
    first, second = materialize((x, 2 * x))
    np.testing.assert_array_equal(second, 2 * first)
    gradient = jax.jit(jax.grad(lambda x: (materialize(x * x) * x).sum()))(x)
    np.testing.assert_allclose(gradient, 3 * x * x, rtol=1e-6)
