"""How far the engine is from autograd on one record at a time, architecture by architecture.

python -m tests.gradients.matrix docs/architectures.md      measures all, and rewrites the page's table
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.gradients.conftest import difference, norm_of, reference_gradients
from tests.gradients.families import FAMILIES, Family, adapted
from torch import Tensor, nn

from confide.gradients.engine import Engine
from confide.privacy.streams import Clipping

KINDS = ("full", "LoRA")


@dataclass(frozen=True)
class Finding:
    """Largest relative error of norms and sums, and the modules that had to be run again."""

    error: float
    recomputed: tuple[str, ...]


def measure(family: Family, trained: str) -> Finding:
    """Train all of it (`full`) or LoRA: the plain sum, a clipped one, and units of several records."""
    model = family.build()
    if trained == "LoRA":
        model = adapted(family, model)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    count = len(family.records)
    gradients = list(
        reference_gradients(parameters, lambda row: family.loss(model, family.batch([row])), range(count))
    )
    assert all(
        bool(torch.stack([g[name].abs().sum() for g in gradients]).isfinite().all()) for name in parameters
    )
    engine = Engine(model, parameters)
    middle = sorted(norm_of(gradient) for gradient in gradients)[count // 2]
    several = [0, 1, 0, 2, 1][:count]
    error = max(
        _error(engine, family, model, gradients, unit_of_row, bound)
        for unit_of_row, bound in (
            (list(range(count)), 1e9),
            (list(range(count)), middle),
            (several, middle / 3),
        )
    )
    recomputed = {type(site.module).__name__ for site in engine.sites if site.rule is None}
    return Finding(error, tuple(sorted(recomputed)))


def _error(
    engine: Engine,
    family: Family,
    model: nn.Module,
    gradients: Sequence[dict[str, Tensor]],
    unit_of_row: Sequence[int],
    bound: float,
) -> float:
    units = max(unit_of_row) + 1
    expected = {name: torch.zeros_like(value) for name, value in gradients[0].items()}
    norms = []
    for unit in range(units):
        own = [gradient for gradient, of in zip(gradients, unit_of_row, strict=True) if of == unit]
        mean = {name: torch.stack([gradient[name] for gradient in own]).mean(0) for name in expected}
        norms.append(norm_of(mean))
        for name, value in mean.items():
            expected[name] += min(1.0, bound / norms[-1]) * value
    with engine:
        losses = family.loss(model, family.batch(range(len(gradients))))
        found = engine.add(losses, torch.tensor(unit_of_row), units, Clipping("flat", bound))
    true = torch.tensor(norms, dtype=torch.float64)
    sums = engine.take()
    # A key's bias has no gradient but rounding, since a softmax ignores it: relative to 1e-6 of the whole.
    floor = 1e-6 * norm_of(expected)
    each = max(
        float((sums[name] - value).norm()) / max(float(value.norm()), floor)
        for name, value in expected.items()
    )
    return max(float(((found - true) / true).abs().max()), difference(sums, expected), each)


def table(findings: Mapping[tuple[str, str], Finding]) -> str:
    """The findings in Markdown, by (architecture, what is trained)."""
    lines = ["| model | trained for | full | LoRA | run again, row by row |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        cells = []
        again = []
        for trained in KINDS:
            finding = findings[str(family), trained]
            digits = next((n for n in (9, 7) if finding.error <= 10.0**-n), None)
            cells.append("not exact" if digits is None else f"exact to 1e-{digits}")
            names = ", ".join(f"`{name}`" for name in finding.recomputed)
            again += [f"{trained}: {names}"] if names else []
        lines.append(f"| {family.name} | {family.task} | {' | '.join(cells)} | {'; '.join(again) or '–'} |")
    return "\n".join(lines) + "\n"


def main(page: Path) -> None:
    """Measure everything, and replace the table of the page."""
    torch.set_num_threads(1)
    found = {(str(family), trained): measure(family, trained) for family in FAMILIES for trained in KINDS}
    text = page.read_text(encoding="utf-8")
    start, end = (
        text.index("| model | trained for |"),
        text.index("\n\n", text.index("| model | trained for |")),
    )
    page.write_text(text[:start] + table(found) + text[end + 1 :], encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
