"""Faults that show when the models are trained: in the loss, its gradients and the optimizer."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jax_transformer.config import IGNORED_LABEL, PAD_ID
from jax_transformer.verification.inputs import Batch
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.training.recipe import Recipe
from parity_tests.planted_faults.fault import Fault
from parity_tests.planted_faults.models import V
from parity_tests.planted_faults.plant import Plant, in_theirs, setting
from torch_reference.training.loss import LossSum, cross_entropy
from torch_reference.training.schedule import cosine_rate

MODELS = ("llama", "gpt2")


class Adam(torch.optim.Optimizer):
    """AdamW, and what it is taken for."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        *,
        eps_in_root: bool = False,
        correct: tuple[bool, bool] = (True, True),
        decay_by_rate: bool = True,
        decay_vectors: bool = False,
        update: Callable[[torch.Tensor], torch.Tensor] = lambda update: update,
    ):
        super().__init__(model.parameters(), {"lr": 0.0})
        self.recipe, self.eps_in_root, self.correct = recipe, eps_in_root, correct
        self.decay_by_rate, self.decay_vectors = decay_by_rate, decay_vectors
        self.update = update
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        recipe = self.recipe
        (group,) = self.param_groups
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            first, second = state["exp_avg"], state["exp_avg_sq"]
            first.mul_(recipe.b1).add_((1 - recipe.b1) * parameter.grad)
            second.mul_(recipe.b2).add_((1 - recipe.b2) * parameter.grad.square())
            m = first / (1 - recipe.b1**self.count) if self.correct[0] else first
            v = second / (1 - recipe.b2**self.count) if self.correct[1] else second
            root = (v + recipe.eps).sqrt() if self.eps_in_root else v.sqrt() + recipe.eps
            decay = 0.0
            if self.decay_vectors or parameter.ndim >= 2:
                decay = recipe.weight_decay * parameter
            rate = group["lr"] if self.decay_by_rate else 1.0
            parameter.sub_(group["lr"] * self.update(m / root) + rate * decay)


def clip_together(model: torch.nn.Module, recipe: Recipe) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)


def mean_loss(model: torch.nn.Module, batch: Batch, recipe: Recipe) -> torch.Tensor:
    """The loss, after its gradients have been computed."""
    return backward(summed(model, batch, recipe).mean())


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


def summed(model: Any, batch: Batch, recipe: Recipe, **changes: Any) -> LossSum:
    labels = changes.pop("labels", batch.labels)
    smoothing = changes.pop("smoothing", recipe.label_smoothing)
    return cross_entropy(model(*batch.inputs), labels, label_smoothing=smoothing)


def trained_by(
    *,
    loss: Callable[..., torch.Tensor] = mean_loss,
    clip: Callable[[torch.nn.Module, Recipe], None] = clip_together,
    optimizer: Callable[..., torch.optim.Optimizer] = Adam,
    shift: int = 0,
    factor: float = 1.0,
    **recipe_changes: Any,
) -> Plant:
    """The reference trained by a loop of one's own."""

    def trainer(model: Any, _: Any, recipe: Recipe) -> Callable[[Batch], torch.Tensor]:
        recipe = dataclasses.replace(recipe, **recipe_changes)
        chosen, count = optimizer(model, recipe), 0

        def step(batch: Batch) -> torch.Tensor:
            nonlocal count
            count += 1
            chosen.zero_grad()
            found = loss(model, batch, recipe)
            clip(model, recipe)
            for group in chosen.param_groups:
                group["lr"] = factor * cosine_rate(
                    count + shift, recipe.peak_rate, recipe.decay_steps, recipe.warmup_steps, 0.1
                )
            chosen.step()
            return found

        return step

    def plant(pair: Pair) -> Pair:
        assert pair.training is not None
        training = dataclasses.replace(pair.training, torch_trainer=trainer)
        return dataclasses.replace(pair, training=training)

    return plant


def fault(kind: str, model: str, part: str, **changes: Any) -> Fault:
    return Fault(kind, model, part, trained_by(**changes), task="training")


def loss_faults() -> Iterator[Fault]:
    for kind, loss in {
        "mean over sentences": mean_over_sentences,
        "sum over tokens": sum_over_tokens,
        "padding in the mean": mean_over_places,
        "mean of micro-batches": functools.partial(in_parts, divide=True),
        "accumulation not divided": functools.partial(in_parts, divide=False),
        "padding in the loss": padding_predicted,
        "label shift": functools.partial(shifted_labels, by=1),
        "gradient scale": functools.partial(scaled_gradients, factor=2.0),
    }.items():
        for model in (*MODELS, "document") if kind == "mean over sentences" else MODELS:
            yield fault(kind, model, "loss", loss=loss)
    # Spread over the V - 1 other classes, 0.1 is 0.1 V / (V - 1).
    for model, value in zip((*MODELS, "document"), (0.0, 0.05, 0.1 * V / (V - 1)), strict=True):
        other = functools.partial(smoothed, smoothing=value)
        yield fault("label smoothing", model, "loss", loss=other)
    yield fault("label shift", "document", "loss", loss=functools.partial(shifted_labels, by=-1))
    yield fault("sum over tokens", "document", "loss", loss=told_as_sum)
    yield fault(
        "gradient scale", "document", "loss", loss=functools.partial(scaled_gradients, factor=0.5)
    )
    for model in ("llama", "gpt2, untied"):
        row = setting("embedding", padding_idx=5)
        yield Fault("untrained parameters", model, "loss", row, task="training")
    frozen = in_theirs("layers.0.norm1.weight", lambda weight: weight.requires_grad_(False))
    yield Fault("untrained parameters", "gpt2", "loss", frozen, task="training")
    for model in MODELS:
        yield fault("unknown", model, "loss", loss=penalised)


def losses_of_tokens(model: Any, batch: Batch, recipe: Recipe) -> tuple[torch.Tensor, Any]:
    logits = model(*batch.inputs)
    losses = torch.nn.functional.cross_entropy(
        logits.swapaxes(1, 2),
        batch.labels.long(),
        label_smoothing=recipe.label_smoothing,
        reduction="none",
    )
    return losses, batch.labels != IGNORED_LABEL


def mean_over_sentences(model: Any, batch: Batch, recipe: Recipe) -> torch.Tensor:
    losses, real = losses_of_tokens(model, batch, recipe)
    return backward((losses.sum(1) / real.sum(1)).mean())


def sum_over_tokens(model: Any, batch: Batch, recipe: Recipe) -> torch.Tensor:
    return backward(summed(model, batch, recipe).total)


def told_as_sum(model: Any, batch: Batch, recipe: Recipe) -> torch.Tensor:
    found = summed(model, batch, recipe)
    backward(found.mean())
    return found.total.detach()


def mean_over_places(model: Any, batch: Batch, recipe: Recipe) -> torch.Tensor:
    return backward(losses_of_tokens(model, batch, recipe)[0].mean())


def in_parts(model: Any, batch: Batch, recipe: Recipe, divide: bool) -> torch.Tensor:
    """Two micro-batches."""
    total = torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 2), slice(2, 4)):
        inputs = tuple(None if x is None else x[part] for x in batch.inputs)
        mean = summed(model, Batch(inputs, batch.labels[part]), recipe).mean()
        total += backward(mean / 2 if divide else mean)
    return total


def padding_predicted(model: Any, batch: Batch, recipe: Recipe) -> torch.Tensor:
    labels = torch.where(batch.labels == IGNORED_LABEL, PAD_ID, batch.labels)
    return backward(summed(model, batch, recipe, labels=labels).mean())


def shifted_labels(model: Any, batch: Batch, recipe: Recipe, by: int) -> torch.Tensor:
    labels = batch.labels.roll(-by, 1)
    labels[:, -1 if by > 0 else 0] = IGNORED_LABEL
    return backward(summed(model, batch, recipe, labels=labels).mean())


def scaled_gradients(model: Any, batch: Batch, recipe: Recipe, factor: float) -> torch.Tensor:
    loss = summed(model, batch, recipe).mean()
    backward(factor * loss)
    return loss.detach()


def smoothed(model: Any, batch: Batch, recipe: Recipe, smoothing: float) -> torch.Tensor:
    return backward(summed(model, batch, recipe, smoothing=smoothing).mean())


def penalised(model: Any, batch: Batch, recipe: Recipe) -> torch.Tensor:
    """A loss with another term."""
    loss = summed(model, batch, recipe).mean()
    return backward(loss + 1e-3 * sum(p.square().sum() for p in model.parameters()))


def clip_faults() -> Iterator[Fault]:
    for kind, clip in {
        "no clipping": lambda model, recipe: None,
        "clip epsilon": clip_without_epsilon,
        "clip each": clip_each,
        "clip values": clip_values,
    }.items():
        for model in MODELS:
            yield fault(kind, model, "clipping", clip=clip)
    for model, norm in zip(MODELS, (0.5, 5.0), strict=True):
        yield fault("clip norm", model, "clipping", max_norm=norm)
    for model in MODELS:
        yield fault("unknown", model, "clipping", clip=clip_matrices)


def clip_without_epsilon(model: torch.nn.Module, recipe: Recipe) -> None:
    gradients = [p.grad for p in model.parameters()]
    norm = torch.sqrt(sum(g.square().sum() for g in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, recipe.max_norm / float(norm)))


def clip_each(model: torch.nn.Module, recipe: Recipe) -> None:
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_([parameter], recipe.max_norm)


def clip_values(model: torch.nn.Module, recipe: Recipe) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), recipe.max_norm)


def clip_matrices(model: torch.nn.Module, recipe: Recipe) -> None:
    chosen = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    torch.nn.utils.clip_grad_norm_(chosen, recipe.max_norm)


def optimizer_faults() -> Iterator[Fault]:
    moments, update = "optimizer, moments", "optimizer, update"
    for model, betas in zip(MODELS, ({"b2": 0.999}, {"b1": 0.8, "b2": 0.95}), strict=True):
        yield fault("Adam betas", model, moments, **betas)
    for model, groups in zip(MODELS, (every_parameter, matrices_alone), strict=True):
        plain = functools.partial(plain_adam, groups=groups)
        yield fault("decay in the gradient", model, moments, optimizer=plain)
    for kind, settings in {
        "epsilon in the root": {"eps_in_root": True},
        "decay on vectors": {"decay_vectors": True},
        "decay without the rate": {"decay_by_rate": False},
    }.items():
        for model in MODELS:
            yield fault(kind, model, update, optimizer=functools.partial(Adam, **settings))
    for model, correct in zip(
        (*MODELS, "document"), ((False, False), (True, False), (False, True)), strict=True
    ):
        uncorrected = functools.partial(Adam, correct=correct)
        yield fault("no bias correction", model, update, optimizer=uncorrected)
    for model, eps in zip((*MODELS, "document"), (1e-8, 3.5e-7, 1e-6), strict=True):
        yield fault("Adam epsilon", model, update, eps=eps)
    for model, decay in zip(MODELS, (0.0, 0.0123), strict=True):
        yield fault("weight decay", model, update, weight_decay=decay)
    for model, shift in zip(MODELS, (-1, 1), strict=True):
        yield fault("schedule off by one", model, update, shift=shift)
    for model, factor in zip(MODELS, (2.0, 0.01), strict=True):
        yield fault("learning rate", model, update, factor=factor)
    many = {"eps": 1e-8, "weight_decay": 0.01, "peak_rate": 3e-3}
    yield fault("optimizer settings", "llama", update, **many)
    vectors = functools.partial(Adam, decay_vectors=True)
    yield fault("optimizer settings", "gpt2", update, optimizer=vectors, **many)
    for model in MODELS:
        signs = functools.partial(Adam, update=torch.sign)
        yield fault("unknown", model, update, optimizer=signs)


def plain_adam(model: torch.nn.Module, recipe: Recipe, groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        groups(model),
        lr=0.0,
        betas=(recipe.b1, recipe.b2),
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
    )


def every_parameter(model: torch.nn.Module) -> Any:
    return model.parameters()


def matrices_alone(model: torch.nn.Module) -> Any:
    parameters = list(model.parameters())
    vectors = [each for each in parameters if each.ndim < 2]
    return [
        {"params": [each for each in parameters if each.ndim >= 2]},
        {"params": vectors, "weight_decay": 0.0},
    ]


def paired_faults() -> Iterator[Fault]:
    root = functools.partial(Adam, eps_in_root=True)
    yield Fault(
        "no clipping",
        "llama",
        "clipping",
        trained_by(clip=lambda model, recipe: None, optimizer=root),
        task="training",
        also=(("optimizer, update", "epsilon in the root"),),
    )
    yield Fault(
        "accumulation not divided",
        "gpt2",
        "loss",
        trained_by(loss=functools.partial(in_parts, divide=False), b2=0.999),
        task="training",
        also=(("optimizer, moments", "Adam betas"),),
    )
    decays = functools.partial(Adam, decay_vectors=True)
    yield fault(
        "decay on vectors + schedule off by one",
        "gpt2",
        "optimizer, update",
        optimizer=decays,
        shift=-1,
    )


FAULTS = (*loss_faults(), *clip_faults(), *optimizer_faults(), *paired_faults())
