"""Every name of a nonlinearity is the function that `transformers` has under it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from jax_transformer.layers.feedforward import activate
from jax_transformer.porting.families.llama import ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_name_means_what_it_means_to_transformers(name):
    x = np.linspace(-4, 4, 801)
    with torch.no_grad():
        expected = ACT2FN[name](torch.from_numpy(x)).numpy()
    with jax.enable_x64(True):
        found = np.asarray(activate(jnp.asarray(x), ACTIVATIONS[name]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
