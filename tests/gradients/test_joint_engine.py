"""Dense layers and experts in one clip, against autograd on one record at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from confide.errors import ModelError
from confide.gradients.experts import Lora, OwnerExperts
from confide.gradients.joint_engine import JointEngine
from confide.models.adapters import Trainable, adapt
from confide.models.backbones import load_classifier
from confide.models.moe.attach import attach
from confide.models.moe.layers import sparse_layers
from confide.privacy.streams import Clipping

LENGTHS = (3, 9, 5, 7, 2)
LABELS = torch.tensor([0, 1, 1, 0, 1])
UNIT = np.array([0, 1, 1, 2, 3])


class Case:
    def __init__(self, folder: Path, trainable: Trainable, layers: slice, lora: Lora | None) -> None:
        classifier = load_classifier(folder, ("neg", "pos"), seed=0)
        self.model: Any = classifier.model.double()
        self.layers = sparse_layers(self.model)[layers]
        self.experts: list[OwnerExperts] = [attach(layer, lora) for layer in self.layers]
        adapted = adapt(classifier, trainable, seed=0)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator).double()
        own = {id(value) for experts in self.experts for value in experts.trained().values()}
        names = {*adapted.encoder, *adapted.head}
        self.parameters = {n: p for n, p in self.model.named_parameters() if n in names or id(p) in own}
        random = np.random.default_rng(0)
        self.rows = [torch.from_numpy(random.integers(5, 40, length)) for length in LENGTHS]
        self.ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
        for number, row in enumerate(self.rows):
            self.ids[number, : len(row)] = row
        self.mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()

    def losses(self) -> Tensor:
        logits = self.model(input_ids=self.ids, attention_mask=self.mask).logits
        return torch.nn.functional.cross_entropy(logits, LABELS, reduction="none")

    def alone(self, row: int, owner: int | None) -> dict[str, Tensor]:
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        logits = self.model(input_ids=self.rows[row][None]).logits
        loss = torch.nn.functional.cross_entropy(logits, LABELS[row : row + 1])
        values = torch.autograd.grad(loss, list(self.parameters.values()))
        found = dict(zip(self.parameters, values, strict=True))
        for name, value in found.items():
            if ".experts." in name and owner is not None:
                kept = value[owner].clone()
                value.zero_()
                value[owner] = kept
        return found


CASES = {
    "attention and one layer": (
        Trainable(kind="lora", blocks=0, rank=2, targets=("query", "key", "value", "attention.output.dense")),
        slice(1, None),
        Lora(2, 4.0),
    ),
    "both layers": (Trainable(kind="lora", blocks=0, rank=2), slice(None), Lora(2, 4.0)),
    "weights": (Trainable(kind="lora", blocks=0, rank=2), slice(None), None),
    "a head above": (Trainable(kind="head"), slice(0, 1), Lora(2, 4.0)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("owned", [False, True])
def test_sums_and_norms_are_those_of_autograd(sparse_base: Path, case: str, owned: bool) -> None:
    made = Case(sparse_base, *CASES[case])
    owner = np.array([0, 3, 1, 1, 2]) if owned else None
    singles = [made.alone(row, None if owner is None else int(owner[row])) for row in range(len(LENGTHS))]
    units = []
    for unit in range(4):
        rows = [singles[row] for row in np.flatnonzero(unit == UNIT)]
        units.append({name: sum(row[name] for row in rows) / len(rows) for name in made.parameters})
    norms = torch.stack(
        [torch.cat([torch.as_tensor(v).flatten() for v in unit.values()]).norm() for unit in units]
    )
    bound = float(norms.median())
    engine = JointEngine(made.model, made.parameters, made.experts)
    for _ in range(2):  # the first pass plans
        with engine:
            engine.expect(len(LENGTHS), owner, made.mask)
            found_norms = engine.add(made.losses(), UNIT, 4, Clipping("flat", bound))
            found = engine.take()
        assert torch.allclose(found_norms, norms, rtol=1e-9)
        for name in made.parameters:
            want = sum(unit[name] * min(1.0, bound / float(norms[i])) for i, unit in enumerate(units))
            assert isinstance(want, Tensor)
            assert float((found[name] - want).abs().max()) <= 1e-9 * float(norms.max()), name
    assert all(experts.watch is None for experts in made.experts)


def test_a_forward_pass_that_was_not_announced_is_refused(sparse_base: Path) -> None:
    made = Case(sparse_base, *CASES["both layers"])
    engine = JointEngine(made.model, made.parameters, made.experts)
    with pytest.raises(ModelError, match="needs the block"):
        engine.expect(5)
    with engine, pytest.raises(ModelError, match="must come before the forward pass"):
        engine.add(made.losses(), UNIT, 4, Clipping("flat", 1.0))
