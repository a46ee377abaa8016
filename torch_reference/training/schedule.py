"""The learning rate of the original Transformer."""

import torch


class TransformerLRScheduler:
    """`scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)`.

    Each `step()` counts one up, sets the rate of every parameter group and returns it. Called
    before the optimiser's step the first update moves; called after it, as in the lecture
    document's loop, the first update has whatever rate the optimiser was made with (0 there).
    Source: Vaswani et al. 2017, section 5.3.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        d_model: float,
        warmup_steps: int = 4000,
        scale: float = 1.0,
    ):
        self.optimizer = optimizer
        self.d_model = d_model
        self.warmup_steps = warmup_steps
        self.scale = scale
        self.step_num = 0

    def step(self) -> float:
        """The rate of the next step."""
        self.step_num += 1
        decay = min(self.step_num**-0.5, self.step_num * self.warmup_steps**-1.5)
        lr = self.scale * self.d_model**-0.5 * decay
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr
