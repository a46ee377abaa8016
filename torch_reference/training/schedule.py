"""Learning rates: that of the original Transformer, cosine, and warmup-stable-decay."""

import math

import torch


class LRScheduler:
    """Counts steps and sets the rate of every parameter group; derived classes say which.

    Called before the optimiser's step the first update has `rate(1)`; called after it, as in the
    lecture document's loop, the first update has whatever rate the optimiser was made with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.step_num = 0

    def rate(self, step: int) -> float:
        """The rate of the update `step`, counted from 1."""
        raise NotImplementedError

    def step(self) -> float:
        """The rate of the next step, set and returned."""
        self.step_num += 1
        lr = self.rate(self.step_num)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


class TransformerLRScheduler(LRScheduler):
    """`scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)`.

    Source: Vaswani et al. 2017, section 5.3.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        d_model: float,
        warmup_steps: int = 4000,
        scale: float = 1.0,
    ):
        super().__init__(optimizer)
        self.d_model = d_model
        self.warmup_steps = warmup_steps
        self.scale = scale

    def rate(self, step: int) -> float:
        decay = min(step**-0.5, step * self.warmup_steps**-1.5)
        return self.scale * self.d_model**-0.5 * decay


class CosineLRScheduler(LRScheduler):
    """`cosine_rate`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        peak: float,
        steps: int,
        warmup_steps: int,
        final_fraction: float = 0.1,
    ):
        super().__init__(optimizer)
        self.peak = peak
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.final_fraction = final_fraction

    def rate(self, step: int) -> float:
        return cosine_rate(step, self.peak, self.steps, self.warmup_steps, self.final_fraction)


class WSDLRScheduler(LRScheduler):
    """`wsd_rate`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        peak: float,
        steps: int,
        warmup_steps: int,
        decay_steps: int,
        final_fraction: float = 0.1,
    ):
        super().__init__(optimizer)
        self.peak = peak
        self.steps = steps
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.final_fraction = final_fraction

    def rate(self, step: int) -> float:
        return wsd_rate(
            step, self.peak, self.steps, self.warmup_steps, self.decay_steps, self.final_fraction
        )


def cosine_rate(
    step: int, peak: float, steps: int, warmup_steps: int, final_fraction: float
) -> float:
    """Linear warm-up to `peak`, then half a cosine down to `peak * final_fraction`.

        step <= warmup:  peak * step / warmup
        after it:        peak * (f + (1 - f) (1 + cos(pi (step - warmup) / (steps - warmup))) / 2)

    and the final rate from `steps` on. Written as `sin^2` of what is left, which keeps its
    digits near the end. Source: Loshchilov and Hutter 2017, equation 5, without restarts.
    """
    left = fraction(steps - step, steps - warmup_steps)
    decay = final_fraction + (1.0 - final_fraction) * math.sin(0.5 * math.pi * left) ** 2
    return peak * min(fraction(step, warmup_steps), decay)


def wsd_rate(
    step: int,
    peak: float,
    steps: int,
    warmup_steps: int,
    decay_steps: int,
    final_fraction: float,
) -> float:
    """Warm-up, stable, decay: linear to `peak`, constant, over the last `decay_steps` of `steps`
    linear down to `peak * final_fraction`, which it then keeps.

    Source: Hu et al. 2024 (MiniCPM), section 4.3; linear as in Haegele et al. 2024.
    """
    left = fraction(steps - step, decay_steps)
    decay = final_fraction + (1.0 - final_fraction) * left
    return peak * min(fraction(step, warmup_steps), decay)


def fraction(part: int, whole: int) -> float:
    """`part / whole` between 0 and 1; where `whole` is 0, 1 if any `part` is left."""
    return min(max(part / max(whole, 1), 0.0), 1.0)
