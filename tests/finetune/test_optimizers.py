"""Learning rates against transformers' schedulers; bias correction against its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from confide.errors import PrivacyError
from confide.finetune.loop import train
from confide.finetune.optimizers import rate_at
from confide.gradients.keys import Keys
from confide.gradients.noise import add_noise
from confide.privacy.streams import Clipping, Stream

from .conftest import Line, line_schedule

MakeLine = Callable[..., Line]


def only(**fields: Any) -> Stream:
    return line_schedule(**fields).streams[0]


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_rates_are_those_of_transformers(decay: str, warmup: int) -> None:
    steps = 17
    stream = only(decay=decay, warmup=warmup, steps=steps)
    name = "constant_with_warmup" if decay == "constant" else decay
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    for step in range(steps):
        assert rate_at(stream, step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("adaptive", [False, True])
def test_bias_correction_is_the_formula(line: MakeLine, adaptive: bool) -> None:
    """On empty draws the noisy gradient is the noise alone, which the keys give."""
    keys, width, steps = Keys.fixed(3), 50, 6
    sigma, batch, floor, decay = 1.7, 4.0, 0.05, 0.1
    clipping = Clipping("flat", 0.6)
    if adaptive:  # grows by e^0.5 a step
        clipping = Clipping("adaptive", 0.6, quantile=1.0, quantile_rate=1.0, count_noise=1e-12)
    plan = line_schedule(
        clipping=clipping,
        optimizer="adamw",
        bias_correction=floor,
        weight_decay=decay,
        noise_multiplier=sigma,
        denominator=batch,
        sampling_rate=1e-12,
        steps=steps,
    )
    model = line(torch.ones(3, width, dtype=torch.double))
    model.module.weight.data.fill_(0.3)
    train(model.binding, plan, keys)
    w = torch.full((2, width), 0.3, dtype=torch.double)
    gradients, variances, floored = [], [], []
    for step in range(steps):
        bound = 0.6 * math.exp(0.5 * step) if adaptive else 0.6
        address = keys.noise.generator("all", step, "descent")
        noise = add_noise({"w": torch.zeros_like(w)}, sigma * bound, address)
        gradients.append(noise["w"] / batch)
        variances.append((sigma * bound / batch) ** 2)
        n = step + 1
        m = sum(0.1 * 0.9 ** (step - i) * g for i, g in enumerate(gradients)) / (1 - 0.9**n)
        v = sum(0.001 * 0.999 ** (step - i) * g**2 for i, g in enumerate(gradients)) / (1 - 0.999**n)
        phi = sum(0.001 * 0.999 ** (step - i) * p for i, p in enumerate(variances)) / (1 - 0.999**n)
        assert isinstance(v, torch.Tensor)
        floored.append(float((v - phi < floor).double().mean()))
        w = w * (1 - decay) - m / (v - phi).clamp(min=floor).sqrt()  # at rate 1
    assert min(floored) > 0 or adaptive
    assert max(floored) < 1 or not adaptive
    torch.testing.assert_close(model.weight, w, rtol=1e-9, atol=1e-12)


def test_the_corrected_moment_is_unbiased(line: MakeLine) -> None:
    """Σ over 40,000 values: v̂ − Φ̂ of pure noise is 0 within its standard error."""
    keys, sigma = Keys.fixed(4), 2.0
    plan = line_schedule(
        optimizer="adamw",
        bias_correction=1e-9,
        noise_multiplier=sigma,
        denominator=8.0,
        sampling_rate=1e-12,
        steps=5,
    )
    states: list[dict[str, torch.Tensor]] = []
    model = line(torch.ones(3, 20_000, dtype=torch.double))
    train(model.binding, plan, keys, after_step=lambda state: states.append(state().tensors))
    tensors = states[-1]
    v, noise = tensors["optimizer/exp_avg_sq/weight"], tensors["optimizer/noise/weight"]
    phi = (sigma / 8.0) ** 2
    whole = 1 - 0.999 ** float(tensors["optimizer/step/weight"])
    assert float(noise) / whole == pytest.approx(phi)
    assert float(v.mean()) / whole == pytest.approx(phi, rel=5 * (2 / (4 * 40_000)) ** 0.5)


def test_only_adamw_is_corrected() -> None:
    with pytest.raises(PrivacyError, match="sgd has no second moment"):
        only(optimizer="sgd", bias_correction=1e-8)
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(PrivacyError, match="floor"):
            only(optimizer="adamw", bias_correction=bad)


def test_a_warmup_must_end() -> None:
    with pytest.raises(PrivacyError, match="warmup of 5 steps doesn't fit into 5"):
        only(steps=5, warmup=5)
