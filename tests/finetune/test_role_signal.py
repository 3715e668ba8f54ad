"""Signal and noise of either role, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from confide.finetune.history import StepRecord
from confide.finetune.role_signal import role_mismatch, role_norms, role_signals, role_sizes
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream

FIRST, SECOND = "layers.1.mlp", "layers.3.mlp"


def stream(name: str, *groups: tuple[str, tuple[str, ...]], bound: float = 1.0, noise: float = 2.0) -> Stream:
    return Stream(
        name=name,
        groups=tuple(ParameterGroup(group, names, 0.1, anchored=False) for group, names in groups),
        steps=8,
        draw=name,
        sampling_rate=0.1,
        clipping=Clipping("flat", bound),
        noise_multiplier=noise,
        denominator=4.0,
    )


def step(
    name: str, number: int, clipped: float = 0.5, bound: float = 1.0, **norms: list[float]
) -> StepRecord:
    return StepRecord(name, number, 10, 0.7, clipped, bound, 3, norms, 0.25)


def test_norms_of_all_parts() -> None:
    joint = stream(
        "all",
        ("encoder", ("a",)),
        ("head", ("h",)),
        ("experts", (f"{FIRST}.experts.up", f"{FIRST}.experts.down", f"{SECOND}.experts.up")),
    )
    sums = {
        "a": torch.tensor([[3.0]]),
        "h": torch.tensor([4.0, 0.0]),
        f"{FIRST}.experts.up": torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]]),
        f"{FIRST}.experts.down": torch.tensor([[[2.0]], [[5.0]]]),
        f"{SECOND}.experts.up": torch.tensor([[1.0, 0.0], [0.0, 7.0]]),
    }
    assert role_norms(joint, sums) == {"shared": [5.0], "experts": [3.0, 5.0, 1.0, 7.0]}
    assert role_sizes(Schedule((joint,)), sums) == {"all": {"shared": [3], "experts": [3, 3, 2, 2]}}


def test_signal_over_noise_shares_and_mismatch() -> None:
    shared, experts = stream("shared", ("encoder", ("a",))), stream("experts", ("experts", ("x",)), bound=0.5)
    sizes = {"shared": {"shared": [16]}, "experts": {"experts": [4, 4]}}
    steps = [step("shared", number, shared=[12.0]) for number in range(8)]
    steps += [step("experts", number, bound=0.5, experts=[5.0, 0.0]) for number in range(4)]
    steps += [step("experts", number, clipped=0.0, bound=0.5, experts=[3.0, 4.0]) for number in range(4, 8)]
    first, second = role_signals(Schedule((shared, experts)), steps, sizes)
    assert (first.role, first.stream, first.parameters, first.steps) == ("shared", "shared", 16, 8)
    assert first.snr == (pytest.approx(12 / (2 * math.sqrt(16))),)
    assert second.snr == (pytest.approx(4 / 2), pytest.approx(2 / 2))  # means of 5, 3 and 0, 4 over σCᵉ√4
    assert second.mean_snr == pytest.approx(1.5)
    assert second.snr_variation == pytest.approx(1 / 3)
    assert (first.clipped, second.clipped, second.seconds) == (0.5, 0.25, 0.25)
    assert first.share == pytest.approx([144 / 169] * 4)
    assert second.share == pytest.approx([25 / 169] * 4)
    assert role_mismatch((first, second)) == pytest.approx(1.0)


def test_what_is_missing_is_none() -> None:
    alone = stream("shared", ("encoder", ("a",)))
    (found,) = role_signals(
        Schedule((alone,)), [step("shared", 0, shared=[1.0])], {"shared": {"shared": [4]}}
    )
    assert found.share is None
    assert role_mismatch((found,)) is None
    silent = stream("shared", ("encoder", ("a",)), noise=0.0)
    (found,) = role_signals(
        Schedule((silent,)), [step("shared", 0, shared=[1.0])], {"shared": {"shared": [4]}}
    )
    assert (found.snr, found.mean_snr, found.snr_variation) == (None, None, None)
