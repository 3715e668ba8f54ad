"""Names bound to tensors: what the loop needs to execute a schedule on one task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.finetune.experts import BoundExperts
from confide.gradients import losses
from confide.models.adapters import Adapted, lora_factors, lora_scale
from confide.models.moe.attach import attached
from confide.privacy.units import UnitMap

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Binding:
    """A model and the records it is trained on.

    Attributes:
        module: whose forward is differentiated; holds every trained parameter.
        forward: batch → outputs, through `module`; (rows, classes) for classes.
        parameters: trained parameters by name.
        batch: row numbers → inputs.
        micro_batches: (rows, their units' positions) → parts that fit in memory, no unit split.
        labels: (rows, …) what `loss` compares the outputs with. Private.
        units: which rows belong to which unit.
        anchor_gradient: names → gradient of ‖w − w₀‖² at the current weights, by name.
        loss: (outputs, labels) of some rows → (rows,) losses, each of its own row alone.
        rows: of every micro-batch: what is missing is filled up with rows that add nothing. 0 for as many as
            there are.
        experts: those among the parameters, with the records' owners; None for a dense model.
        diagnose: keep norms and times of every step.
    """

    module: nn.Module
    forward: Callable[[Batch], Tensor]
    parameters: dict[str, nn.Parameter]
    batch: Callable[[npt.NDArray[np.int64]], Batch]
    micro_batches: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]]
    labels: Tensor
    units: UnitMap
    anchor_gradient: Callable[[tuple[str, ...]], dict[str, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = losses.classification
    rows: int = 0
    experts: BoundExperts | None = None
    diagnose: bool = False


class Anchor:
    """Gradient of the squared distance to the base, ‖w − w₀‖² (DP-Merging, equation 7, without its λ).

    Under LoRA the distance is ‖ΔW‖² with ΔW = s·B·A: pulling A and B to their own initial values would pull
    towards a point that has nothing to do with the base. For experts ΔW is that of all of them.

    Args:
        adapted: at its base, before the first step.
        anchored: names of what is pulled (`Schedule.anchored`); only such weights are kept twice.
    """

    def __init__(self, adapted: Adapted, anchored: Iterable[str]) -> None:
        parameters = dict(adapted.classifier.model.named_parameters())
        self._pairs = _lora_pairs(adapted)
        plain = set(anchored) - self._pairs.keys()
        self._now = {name: parameters[name] for name in plain}
        self._base = {name: parameters[name].detach().clone() for name in plain}

    def gradient(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """2(w − w₀) for plain weights; 2s²·BᵀBA and 2s²·BAAᵀ for a pair of LoRA factors."""
        with torch.no_grad():
            return {name: self._one(name) for name in names}

    def _one(self, name: str) -> Tensor:
        pair = self._pairs.get(name)
        if pair is None:
            return (self._now[name] - self._base[name]).mul_(2)
        a, b, scale = pair
        return 2 * scale**2 * (b.mT @ b @ a if "lora_A" in name else b @ (a @ a.mT))


def _lora_pairs(adapted: Adapted) -> dict[str, tuple[Tensor, Tensor, float]]:
    """By the name of either factor: A (…, r, in), B (…, out, r) and s."""
    pairs: dict[str, tuple[Tensor, Tensor, float]] = {}
    for weight, layer in adapted.lora.items():
        module = weight.removesuffix(".weight")
        for factor in "AB":
            pairs[f"{module}.lora_{factor}.default.weight"] = (*lora_factors(layer), lora_scale(layer))
    for sparse in adapted.experts:
        experts = attached(sparse)
        if experts.lora is None:
            continue
        for weight in (experts.form.up, experts.form.down):
            a, b = (experts.get_parameter(f"{weight}_lora_{factor}") for factor in "AB")
            for factor in "AB":
                pairs[f"{sparse.name}.experts.{weight}_lora_{factor}"] = (a, b, experts.lora.scale)
    return pairs
