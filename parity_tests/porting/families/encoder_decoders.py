"""What must hold of families of encoder-decoders (see `harness`)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.harness import QUICK
from parity_tests.porting.families.encoders import check_close
from parity_tests.porting.families.harness import B, Example, float64, ported, tokens

S, T = 14, 12
SOURCE_REAL, TARGET_REAL = np.ones((B, S), bool), np.ones((B, T), bool)
SOURCE_REAL[1, 8:] = SOURCE_REAL[2, :5] = False
TARGET_REAL[1, :4] = TARGET_REAL[2, 7:] = False
"""Rows that are full, or padded on one side, source and target on different ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(Example):
    """A small encoder-decoder of `transformers`."""

    def model(self, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
        """As `Example.model`; the logits' bias, a buffer, is drawn too, and what is no parameter
        but is one in name is made again."""
        model: Any = super().model(dtype)
        generator = torch.Generator().manual_seed(1)

        def noise(shape: torch.Size, scale: float) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(dtype)

        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(noise(buffer.shape, 0.3))
        for module in model.modules():
            create_weight: Any = getattr(module, "create_weight", None)
            if create_weight is not None:
                module.weight.data.copy_(create_weight())
        scaled = getattr(model.config, "scale_decoder_outputs", None)
        if scaled:
            model.shared.weight.data.mul_(4)
        if scaled is False:
            # The class ties the head of T5 1.1, too, until a file with both is loaded.
            shape = model.lm_head.weight.shape
            model.lm_head.weight = torch.nn.Parameter(noise(shape, 1.5 * shape[-1] ** -0.5))
        return model


def check_same_translation(example: Translation) -> None:
    """Float64 logits to 1e-10 under padding on both sides of source and target, at every position
    of a table of S rows."""
    model = example.model()
    config = example.config
    source = tokens(config.vocab_size, S)
    target = tokens(getattr(config, "decoder_vocab_size", config.vocab_size), T, seed=1)
    with float64(example.build), torch.no_grad():
        theirs = model(
            input_ids=torch.from_numpy(source).long(),
            attention_mask=torch.from_numpy(SOURCE_REAL).long(),
            decoder_input_ids=torch.from_numpy(target).long(),
            decoder_attention_mask=torch.from_numpy(TARGET_REAL).long(),
        ).logits
    masks = (
        SOURCE_REAL[:, None, None, :],
        TARGET_REAL[:, None, None, :] & np.tril(np.ones((T, T), bool)),
    )
    with jax.enable_x64(True):
        ours = ported(example, model)
        run = jax.jit(lambda *a: ours(*a), compiler_options=QUICK)
        found = run(*map(jnp.asarray, (source, target, *masks)))
    check_close(example, "logits", found, theirs, TARGET_REAL)
