"""Training in both frameworks from the same weights on the same batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_transformer.config import BOS_ID, IGNORED_LABEL, ModelConfig
from jax_transformer.data.batches import Batch
from jax_transformer.models.parameters import split
from jax_transformer.training.optimizer import adam
from jax_transformer.training.schedule import noam_document_schedule, noam_schedule
from jax_transformer.training.step import batch_loss, make_train_step, start_state
from parity_tests.harness import QUICK, carry_back, make_pair, parameters_of, to_numpy
from torch_reference.training import step as reference
from torch_reference.training.schedule import TransformerLRScheduler

UPDATES = 50
WARMUP = 100
"""The rate reaches 0.0125. At ten times that training is chaotic: it makes 1e-8 of the last bit."""
CONFIG = ModelConfig(
    src_vocab_size=13,
    tgt_vocab_size=13,
    d_model=16,
    num_heads=4,
    d_ff=24,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_len=32,
    dropout=0.0,
    norm_placement="pre",
    tied_tables="all",
)


def batch(seed, source_lengths=(9, 5, 1, 0), target_lengths=(7, 1, 6, 0)):
    """Rows of different lengths, the last one empty."""
    generator = np.random.default_rng(seed)
    width, height = max(source_lengths), max(target_lengths)
    source = generator.integers(4, 13, (4, width), dtype=np.int32)
    target = generator.integers(4, 13, (4, height), dtype=np.int32)
    real = np.arange(height) < np.array(target_lengths)[:, None]
    shifted = np.concatenate([np.full((4, 1), BOS_ID, np.int32), target[:, :-1]], axis=1)
    return Batch(
        source=np.where(np.arange(width) < np.array(source_lengths)[:, None], source, 0),
        source_lengths=np.array(source_lengths, np.int32),
        decoder_input=np.where(real, shifted, 0),
        labels=np.where(real, target, IGNORED_LABEL).astype(np.int32),
        target_lengths=np.array(target_lengths, np.int32),
    )


BATCHES = [batch(seed) for seed in range(5)]


def train_torch(dtype, *, document_order):
    """Parameters and both moments after 50 updates, and the losses."""
    model = make_pair(CONFIG)[0].to(dtype).train()
    optimizer = reference.adam(model)
    scheduler = TransformerLRScheduler(optimizer, CONFIG.d_model, WARMUP)
    losses = []
    for update in range(UPDATES):
        tensors = Batch(*map(torch.from_numpy, BATCHES[update % len(BATCHES)]))
        metrics = reference.train_step(
            model, optimizer, scheduler, tensors, document_order=document_order
        )
        losses.append(float(metrics.loss.mean()))
    results = {}
    for name, parameter in parameters_of(model).items():
        state = optimizer.state[parameter]
        for kind, value in (
            ("parameter", parameter),
            ("first moment", state["exp_avg"]),
            ("second moment", state["exp_avg_sq"]),
        ):
            results[f"{kind} of {name}"] = to_numpy(value)
    return results, losses


def train_jax(dtype, *, document_order):
    """As `train_torch`."""
    make = noam_document_schedule if document_order else noam_schedule
    with jax.enable_x64(dtype == jnp.float64):
        reference_model, model = make_pair(CONFIG, dtype)
        graphdef, params, buffers = split(model)
        optimizer = adam(make(CONFIG.d_model, WARMUP))
        train_step = make_train_step(graphdef, optimizer, label_smoothing=0.1)
        state = start_state(params, optimizer)
        losses = []
        for update in range(UPDATES):
            state, metrics = train_step(state, buffers, BATCHES[update % len(BATCHES)])
            losses.append(float(metrics.loss.mean()))
        trees = {
            "parameter": state.params,
            "first moment": optax.tree_utils.tree_get(state.opt_state, "mu"),
            "second moment": optax.tree_utils.tree_get(state.opt_state, "nu"),
        }
        results = {
            f"{kind} of {name}": value
            for kind, tree in trees.items()
            for name, value in carry_back(tree, reference_model, "").items()
        }
        return results, losses


@pytest.mark.parametrize("document_order", [False, True], ids=["noam", "noam-document"])
def test_fifty_updates_stay_together(document_order):
    expected, expected_losses = train_torch(torch.float64, document_order=document_order)
    found, losses = train_jax(jnp.float64, document_order=document_order)
    assert found.keys() == expected.keys()
    # The key biases' true gradient is 0: what Adam makes of its rounding errors, divided by
    # their own size, is noise in both, and reaches nothing else (softmax does not see it).
    compared = [name for name in expected if "k_proj.bias" not in name]
    for name in compared:
        error = np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])
        assert error <= 1e-9, f"{name}: {error:.3g}"
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    assert losses[-1] < 0.9 * losses[0]


def test_fifty_losses_in_float32_are_as_accurate():
    _, true_losses = train_torch(torch.float64, document_order=False)
    _, theirs = train_torch(torch.float32, document_order=False)
    _, ours = train_jax(jnp.float32, document_order=False)
    allowed = np.abs(np.subtract(theirs, true_losses)).max()
    found = np.abs(np.subtract(ours, true_losses)).max()
    # Twice PyTorch's own distance from float64, plus 4 ulp of a loss of order 4.
    assert found <= 2 * allowed + 4 * np.spacing(np.float32(4.0))


def gradients(batch):
    _, model = make_pair(CONFIG)
    graphdef, params, buffers = split(model)
    on_device = jax.tree.map(jnp.asarray, batch)
    return jax.jit(
        jax.grad(lambda tree: batch_loss(graphdef, tree, buffers, on_device).mean()),
        compiler_options=QUICK,
    )(params)


def test_an_empty_row_changes_no_gradient():
    full = BATCHES[0]
    three = Batch(*(part[:3] for part in full))
    with_empty, without = gradients(full), gradients(three)
    for found, expected in zip(jax.tree.leaves(with_empty), jax.tree.leaves(without), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_dropout_masks_are_a_function_of_seed_and_step():
    config = ModelConfig(**(CONFIG.to_dict() | {"dropout": 0.5}))
    _, model = make_pair(config)
    graphdef, params, buffers = split(model)
    optimizer = adam(optax.constant_schedule(0.0))
    step = make_train_step(graphdef, optimizer, dropout_key=jax.random.key(3))

    def losses():
        state = start_state(jax.tree.map(jnp.copy, params), optimizer)
        found = []
        for _ in range(3):
            state, metrics = step(state, buffers, BATCHES[0])
            found.append(float(metrics.loss.mean()))
        return found

    first = losses()
    assert len(set(first)) == 3  # with rate 0 the masks alone differ
    assert losses() == first


def test_average_follows_the_parameters():
    _, model = make_pair(CONFIG)
    graphdef, params, buffers = split(model)
    optimizer = adam(optax.constant_schedule(0.01))
    step = make_train_step(graphdef, optimizer, average_decay=0.5)
    state = start_state(params, optimizer, average_decay=0.5)
    expected = np.array(state.average["output_proj"]["bias"])
    for update in range(4):
        state, _ = step(state, buffers, BATCHES[0])
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * np.asarray(state.params["output_proj"]["bias"])
    np.testing.assert_allclose(state.average["output_proj"]["bias"], expected, rtol=1e-5)


def test_bfloat16_computes_narrow_and_keeps_float32():
    _, model = make_pair(CONFIG)
    graphdef, params, buffers = split(model)
    optimizer = adam(optax.constant_schedule(1e-3))
    step = make_train_step(graphdef, optimizer, compute_dtype=jnp.bfloat16)
    program = step.lower(start_state(params, optimizer), buffers, BATCHES[0]).as_text()
    assert "bf16" in program
    state, metrics = step(start_state(params, optimizer), buffers, BATCHES[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert metrics.loss.total.dtype == jnp.float32
