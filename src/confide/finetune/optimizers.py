"""What a noisy gradient does to the weights: learning rates by step, and AdamW that knows its noise.

Everything here is a function of noisy answers and public numbers, so it spends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from confide.privacy.streams import Stream

_BETAS = (0.9, 0.999)


def rate_at(stream: Stream, step: int) -> float:
    """By what the learning rates are multiplied at a step; those of transformers' `get_scheduler`.

    In the warmup they rise from 0 at step 0, as there: its first step moves nothing but the moments.
    """
    if step < stream.warmup:
        return step / stream.warmup
    if stream.decay == "constant":
        return 1.0
    left = (stream.steps - step) / (stream.steps - stream.warmup)
    return left if stream.decay == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def optimizer_of(stream: Stream, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The stream's optimizer, with a parameter group for each of the stream's."""
    groups = [
        {"params": [parameters[name] for name in group.parameters], "lr": group.learning_rate}
        for group in stream.groups
    ]
    if stream.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, weight_decay=stream.weight_decay)
    if stream.bias_correction:
        return CorrectedAdamW(groups, weight_decay=stream.weight_decay, floor=stream.bias_correction)
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=stream.weight_decay)


class CorrectedAdamW(torch.optim.Optimizer):
    """AdamW whose second moment is freed of the noise's variance (DP-AdamBC; Tang et al. 2024, algorithm 1).

    w ← w − η·m̂/√max(v̂ − Φ̂, γ′), where Φ̂ is the bias-corrected running mean of the noise's variance
    Φ = (σC/B)², with the weights that v̂ gives the squared gradients; so it stays right where C moves.

    Each parameter group has `noise_variance`, Φ of the gradient at hand.

    Args:
        weight_decay: decoupled.
        floor: γ′.
    """

    def __init__(self, groups: list[dict[str, Any]], *, weight_decay: float, floor: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay, "noise_variance": 0.0})
        self._floor = floor

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        first, second = _BETAS
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float64)
                    state["noise"] = torch.zeros((), dtype=torch.float64)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["noise"].mul_(second).add_((1 - second) * group["noise_variance"])
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                done = float(state["step"])
                whole = 1 - second**done
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                variance = (state["exp_avg_sq"] - float(state["noise"])).div_(whole)
                length = variance.clamp_(min=self._floor).sqrt_()
                parameter.addcdiv_(state["exp_avg"], length, value=-group["lr"] / (1 - first**done))
