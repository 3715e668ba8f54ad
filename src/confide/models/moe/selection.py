"""Which layer's experts are trained: the one whose owners are spread most evenly on public text.

Everything here is computed from public text, so that the choice costs no budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import ModelError
from confide.models.moe.layers import SparseLayer, choose
from confide.models.moe.owners import Owners

LEAST_TEXTS = 1000
LEAST_MARGIN = 0.05
_RESAMPLES = 200
_SURE = 0.95


@dataclass(frozen=True)
class LayerRouting:
    """How evenly a layer's experts own public texts.

    Attributes:
        block: number of the transformer block.
        name: path of the sparse layer.
        counts: (E,) texts that each expert owns.
    """

    block: int
    name: str
    counts: tuple[int, ...]

    @property
    def entropy(self) -> float:
        """H of the shares, in nats; log E when every expert owns as many texts."""
        shares = np.array(self.counts) / max(sum(self.counts), 1)
        shares = shares[shares > 0]
        return float(-(shares * np.log(shares)).sum()) + 0.0

    @property
    def evenness(self) -> float:
        """H / log E, between 0 and 1."""
        return self.entropy / math.log(len(self.counts))

    @property
    def deficit(self) -> float:
        """log E − H, in nats: the divergence of the shares from even ones."""
        return math.log(len(self.counts)) - self.entropy

    @property
    def chi_square(self) -> float:
        """Pearson's χ² of even ownership, E − 1 degrees of freedom."""
        counts = np.array(self.counts, dtype=np.float64)
        expected = counts.mean()
        return float(((counts - expected) ** 2).sum() / expected)

    @property
    def variation(self) -> float:
        """Standard deviation of the counts over their mean."""
        counts = np.array(self.counts, dtype=np.float64)
        return float(counts.std() / counts.mean())


@dataclass(frozen=True)
class Selection:
    """The chosen layer, and how sure the corpus makes it.

    Attributes:
        layers: from the bottom.
        chosen: block of the layer with the highest entropy, the lowest of equals.
        margin: nats between its entropy and the next; 0 where there is only one layer.
        stability: (texts, share): of corpora of that many texts, redrawn from this one, how many choose the
            same layer.
        stable_from: the least of those sizes from which on at least 95 % do; None if even the whole corpus
            doesn't reach it.
    """

    layers: tuple[LayerRouting, ...]
    chosen: int
    margin: float
    stability: tuple[tuple[int, float], ...]
    stable_from: int | None

    @property
    def texts(self) -> int:
        """Size of the corpus."""
        return sum(self.layers[0].counts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the choice may be an accident of this corpus."""
        found = []
        if self.texts < LEAST_TEXTS:
            found.append(
                f"{self.texts} public texts are few; use at least {LEAST_TEXTS}, or the choice may be chance"
            )
        if len(self.layers) > 1 and self.margin < LEAST_MARGIN:
            found.append(
                f"the best layer leads by {self.margin:.3f} nats, less than {LEAST_MARGIN}; another corpus "
                "may choose another one"
            )
        return tuple(found)


def measure(layers: Sequence[SparseLayer], owners: Mapping[str, Owners], seed: int = 0) -> Selection:
    """Entropies of all layers on a public corpus, and how stable the choice between them is.

    Args:
        layers: from the bottom.
        owners: layer name → (texts,) owner of each, from `owner_maps`.
        seed: of the resampling; public.
    """
    sizes = [layer.experts for layer in layers]
    table = np.stack([owners[layer.name] for layer in layers])
    found = tuple(
        LayerRouting(
            layer.number, layer.name, tuple(np.bincount(row, minlength=layer.experts).astype(int).tolist())
        )
        for layer, row in zip(layers, table, strict=True)
    )
    entropies = np.array([layer.entropy for layer in found])
    best = int(entropies.argmax())
    others = np.delete(entropies, best)
    stability = tuple(_stability(table, sizes, best, np.random.default_rng(seed)))
    return Selection(
        layers=found,
        chosen=found[best].block,
        margin=float(entropies[best] - others.max()) if len(others) else 0.0,
        stability=stability,
        stable_from=_stable_from(stability),
    )


def select(layers: Sequence[SparseLayer], wish: str, selection: Selection | None = None) -> SparseLayer:
    """The layer that a setting asks for.

    Args:
        wish: `entropy` (needs a selection on public text), `first`, `last`, or the number of a block.

    Raises:
        ModelError: an unknown wish, a block without experts, or `entropy` without a selection.
    """
    if wish == "first":
        return layers[0]
    if wish == "last":
        return layers[-1]
    if wish == "entropy":
        if selection is None:
            raise ModelError("layer: entropy is measured on public text; name a corpus, or choose a block")
        return choose(layers, selection.chosen)
    if not wish.isdecimal():
        raise ModelError(f"layer {wish!r} is none of: entropy, first, last, or the number of a block")
    return choose(layers, int(wish))


def _stability(
    table: npt.NDArray[np.int64], experts: Sequence[int], best: int, rng: np.random.Generator
) -> Any:
    """(size, share of resamples with replacement whose highest entropy is `best`'s) for growing sizes."""
    texts = table.shape[1]
    sizes = sorted({min(size, texts) for size in (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, texts)})
    for size in sizes:
        hits = 0
        for _ in range(_RESAMPLES):
            drawn = table[:, rng.integers(0, texts, size)]
            entropy = [
                _entropy(np.bincount(row, minlength=count)) for row, count in zip(drawn, experts, strict=True)
            ]
            hits += int(np.argmax(entropy)) == best
        yield size, hits / _RESAMPLES


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _stable_from(stability: Sequence[tuple[int, float]]) -> int | None:
    least = None
    for size, share in reversed(stability):
        if share < _SURE:
            break
        least = size
    return least
