"""Weights that stand still stop the run, by name; every setup here is broken on purpose, or only looks so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.finetune import loop
from confide.finetune.binding import Binding
from confide.finetune.history import State
from confide.finetune.loop import train
from confide.finetune.optimizers import optimizer_of
from confide.gradients.keys import Keys
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
from confide.privacy.units import UnitMap

ROWS = 6


class Model(nn.Module):
    """Two layers that are used, and one that no loss reaches."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.spare = nn.Linear(4, 2)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.spare(x[:, :4])
        return self.last(torch.tanh(self.first(x)))


def bound(model: nn.Module, forward: Callable[[Any], Tensor] | None = None) -> Binding:
    dtype = next(model.parameters()).dtype
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    call = forward or model
    return Binding(
        module=model,
        forward=lambda batch: call(batch["x"]),
        parameters=dict(model.named_parameters()),
        batch=lambda rows: {"x": x[torch.from_numpy(rows)]},
        micro_batches=lambda rows, position: [position],
        labels=torch.arange(ROWS) % 3,
        units=UnitMap.records(ROWS),
        anchor_gradient=lambda names: {},
    )


def schedule(model: nn.Module, sigma: float = 1.0, rate: float = 0.01, **fields: Any) -> Schedule:
    names = tuple(name for name, _ in model.named_parameters())
    values: dict[str, Any] = {
        "name": "all",
        "groups": (ParameterGroup("encoder", names, rate, anchored=False),),
        "steps": 3,
        "draw": "all",
        "sampling_rate": 1.0,
        "clipping": Clipping("flat" if sigma else "none", 1.0),
        "noise_multiplier": sigma,
        "denominator": float(ROWS),
    }
    return Schedule((Stream(**(values | fields)),))


@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_sound_run_passes(sigma: float, optimizer: str) -> None:
    """Noise moves the layer that no loss reaches; without noise it may stand still."""
    model = Model()
    before = model.spare.weight.detach().clone()
    if not sigma:
        model.spare.requires_grad_(False)
    planned = schedule(model, sigma, optimizer=optimizer)
    if not sigma:
        names = tuple(n for n in planned.parameters if not n.startswith("spare"))
        groups = (ParameterGroup("encoder", names, 0.01, anchored=False),)
        planned = Schedule((replace(planned.streams[0], groups=groups),))
    train(bound(model), planned, Keys.fixed(0))
    assert torch.equal(model.spare.weight, before) == (not sigma)


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_an_optimizer_that_lacks_a_weight(monkeypatch: pytest.MonkeyPatch, sigma: float) -> None:
    def forgetful(stream: Stream, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer_of(stream, parameters)
        made.param_groups[0]["params"] = made.param_groups[0]["params"][1:]
        return made

    monkeypatch.setattr(loop, "optimizer_of", forgetful)
    model = Model()
    del model.spare
    model.forward = lambda x: model.last(torch.tanh(model.first(x)))  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"first\.weight isn't among what the optimizer moves"):
        train(bound(model), schedule(model, sigma), Keys.fixed(0))


def test_an_optimizer_that_steps_over_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(stream: Stream, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        made = optimizer_of(stream, parameters)

        def drop(*_: object) -> None:
            parameters["last.weight"].grad = None

        made.register_step_pre_hook(drop)
        return made

    monkeypatch.setattr(loop, "optimizer_of", lazy)
    model = Model()
    with pytest.raises(ModelError, match=r"last\.weight doesn't move: after step 1 of stream 'all', 0 of 12"):
        train(bound(model), schedule(model), Keys.fixed(0))


def test_a_weight_whose_place_is_taken_by_a_copy() -> None:
    """As by a change of device after wrapping, or by tying again."""
    model = Model()

    def converted(x: Tensor) -> Tensor:
        answer: Tensor = model(x)
        model.last.weight = nn.Parameter(model.last.weight.detach().clone())
        return answer

    with pytest.raises(ModelError, match=r"last\.weight isn't part of the model any more \(after step 1"):
        train(bound(model, converted), schedule(model), Keys.fixed(0))


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_a_weight_that_every_forward_pass_puts_back(sigma: float) -> None:
    model = Model()
    kept = model.first.weight.detach().clone()

    def restored(x: Tensor) -> Tensor:
        model.first.weight.data.copy_(kept)
        return model.last(torch.tanh(model.first(x)))

    del model.spare
    model.forward = restored  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"first\.weight doesn't move: after step 1 .* 0 of \d+"):
        train(bound(model), schedule(model, sigma), Keys.fixed(0))


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 1e-12), (torch.float64, 1e-22)])
def test_steps_that_the_dtype_cannot_hold(dtype: torch.dtype, rate: float) -> None:
    model = Model(dtype)
    with pytest.raises(ModelError, match=f"smaller than {str(dtype)[6:]} can hold"):
        train(bound(model), schedule(model, rate=rate, optimizer="sgd"), Keys.fixed(0))


def test_a_warmup_is_waited_for() -> None:
    """1e-6 is enough at the full rate, and lost at a thousandth of it."""
    model = Model()
    nn.init.ones_(model.first.weight)
    reached: list[int] = []
    planned = schedule(model, rate=1e-6, steps=2002, warmup=2000)
    with pytest.raises(KeyboardInterrupt):
        train(bound(model), planned, Keys.fixed(0), after_step=_until(3, reached))
    assert reached == [1, 2, 3]

    planned = schedule(model, rate=1e-10, steps=9, warmup=6)
    with pytest.raises(ModelError, match=r"first\.weight doesn't move: after step 4"):
        train(bound(model), planned, Keys.fixed(0))


def test_a_run_that_goes_on_is_looked_at_again_unless_its_rate_is_low() -> None:
    model = Model()
    states: dict[int, State] = {}

    def keep(state: Callable[[], State]) -> None:
        now = state()
        states[now.step] = State(now.step, {n: v.clone() for n, v in now.tensors.items()}, now.history)

    planned = schedule(model, decay="linear", steps=8)
    train(bound(model), planned, Keys.fixed(0), after_step=keep)
    low = schedule(model, rate=1e-12, decay="linear", steps=8)
    with pytest.raises(ModelError, match="doesn't move: after step 2 "):
        train(bound(Model()), low, Keys.fixed(0), start=states[1])
    train(bound(Model()), low, Keys.fixed(0), start=states[6])


def _until(step: int, reached: list[int]) -> Callable[[Callable[[], State]], None]:
    def after(state: Callable[[], State]) -> None:
        reached.append(state().step)
        if reached[-1] == step:
            raise KeyboardInterrupt

    return after
