"""Set before any test module is imported: checked shapes, full matrix precision, one thread.

The import hook wraps every annotated function of `CHECKED` in a jaxtyping and beartype check, so
that each test also tests shapes and dtypes. It sees only modules that are imported after it.
"""

import sys

from jaxtyping import install_import_hook

import parity_tests.typechecker  # noqa: F401  the hook names it and does not import it

CHECKED = (
    "jax_transformer.layers",
    "jax_transformer.models",
    "jax_transformer.decoding",
    "jax_transformer.training.loss",
    "jax_transformer.training.schedule",
    "jax_transformer.training.optimizer",
    "jax_transformer.training.step",
    "torch_reference",
)

early = sorted(name for name in sys.modules if name.startswith(CHECKED))
if early:
    raise RuntimeError(f"imported before their shapes could be checked: {', '.join(early)}")
install_import_hook(CHECKED, "parity_tests.typechecker.check")

import jax  # noqa: E402
import torch  # noqa: E402

# The defaults may round the factors of a product to bfloat16 (TPU) or TF32 (GPU).
jax.config.update("jax_default_matmul_precision", "highest")
torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.allow_tf32 = False

# The tensors are tiny: a second thread costs more than it does, and sums stay in one order.
torch.set_num_threads(1)
