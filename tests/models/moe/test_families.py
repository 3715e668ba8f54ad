"""Every family against plain autograd, and the table that the guide prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.models.moe.bases import save_base
from tests.models.moe.exactness import COLUMNS, KINDS, measure
from tests.models.moe.families import FAMILIES, build
from torch import nn

from confide.finetune.expert_settings import SHARED
from confide.models.adapters import Trainable, adapt
from confide.models.backbones import load_classifier
from confide.models.moe.attach import attach
from confide.models.moe.layers import sparse_layers

GUIDE = Path(__file__).parents[3] / "docs" / "moe-measured.md"


def printed() -> dict[tuple[str, str], dict[str, float]]:
    rows = {}
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        family, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        kind = cells.pop(0) if cells else ""
        if family in FAMILIES and kind in KINDS:
            rows[family, kind] = dict(zip(COLUMNS, map(float, cells), strict=True))
    return rows


def cases() -> list[Any]:
    """One kind per family in the quick suite, both in the whole one."""
    pairs = [(family, kind) for family in FAMILIES for kind in KINDS]
    quick = [(family, list(KINDS)[number % 2]) for number, family in enumerate(FAMILIES)]
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(("family", "kind"), cases())
def test_owner_gradients_are_autograds(family: str, kind: str) -> None:
    found = measure(family, KINDS[kind])
    assert found.output == 0.0
    assert max(found.right, found.left, found.everyone, found.shared) <= 1e-9
    # Tables of rotary positions and some routers are float32 whatever the model is.
    single = family.startswith("DeepSeek") or family == "Llama-4"
    assert found.alone_right <= (1e-6 if single else 1e-9)
    assert found.alone_left <= (1e-9 if family == "Switch" else 1e-6)
    for name, bound in printed()[family, kind].items():
        assert getattr(found, name) <= bound, name


ALWAYS_ACTIVE = {
    "Qwen2-MoE": 3 * 2,
    "Llama-4": 3 * 2,
    **{family: 3 for family in FAMILIES if family.startswith("DeepSeek")},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_every_token_meets_are_shared(family: str) -> None:
    """As many Linear layers as the family has of them; those of Qwen2 and Llama 4 see flattened rows."""
    endings = tuple(f".{target}" for target in SHARED)
    names = [name for name, module in build(family).named_modules() if isinstance(module, nn.Linear)]
    shared = [name for name in names if name.endswith(endings)]
    assert sum(".shared_expert" in name for name in shared) == ALWAYS_ACTIVE.get(family, 0)
    assert not any("experts.expert_" in name or "router" in name or name.endswith("gate") for name in shared)
    blocks = 4 if family == "Switch" else 2
    projections = 5 if family in ("DeepSeek-V2", "DeepSeek-V3") else 4
    assert len(shared) == blocks * projections + ALWAYS_ACTIVE.get(family, 0)


def test_without_lora_they_are_trained_with_the_rest_of_their_block(tmp_path: Path) -> None:
    base = save_base("Qwen2-MoE", ["a fine play"], tmp_path / "base")
    classifier = load_classifier(base, ("a", "b"), seed=0)
    layer = sparse_layers(classifier.model)[-1]
    attach(layer)
    adapted = adapt(classifier, Trainable(kind="blocks", blocks=2), 0, (layer,))
    names = [name for name in adapted.encoder if ".mlp." in name]
    assert len(names) == 2 * 4
    assert all(".mlp.shared_expert" in name for name in names)
    assert all(f"{layer.name}.experts." in name for name in adapted.expert_parameters)


def test_routers_and_unattached_experts_get_no_lora(tmp_path: Path) -> None:
    """Their names may be asked for, as in Switch; the stream of all records must not train them."""
    base = save_base("Switch", ["a fine play"], tmp_path / "base")
    classifier = load_classifier(base, ("a", "b"), seed=0)
    layers = sparse_layers(classifier.model)
    asked = Trainable(blocks=0, rank=2, targets=("wi", "wo", "classifier", "SelfAttention.q"))
    adapted = adapt(classifier, asked, 0, (layers[-1],))
    assert any(name.endswith(".2.layer.1.mlp.wi.weight") for name in adapted.lora)
    assert any(name.endswith("SelfAttention.q.weight") for name in adapted.lora)
    apart = tuple(f"{layer.name}." for layer in layers)
    assert not [name for name in adapted.lora if name.startswith(apart)]


def test_the_guide_names_every_family_with_finite_bounds() -> None:
    rows = printed()
    assert rows.keys() == {(family, kind) for family in FAMILIES for kind in KINDS}
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert all(
        max(row["right"], row["left"], row["everyone"], row["shared"]) <= 1e-9 for row in rows.values()
    )
