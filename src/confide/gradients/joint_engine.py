"""Clipped sums over dense layers and experts together: one norm per unit, and one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ModelError
from confide.gradients.engine import Engine
from confide.gradients.expert_engine import check_independence, trained_names, watch_for
from confide.gradients.expert_parts import expert_parts
from confide.gradients.experts import OwnerExperts, Watch
from confide.gradients.parts import Part, Rows, Sums
from confide.privacy.streams import Clipping


class JointEngine(Engine):
    """`Engine` for a model of which experts are trained as well, clipped as one vector with the rest.

    Used as `ExpertEngine`: `expect` announces the rows of the next call of the model. With several layers of
    experts and no owners this is the exact norm over all (record, expert) pairs that a monolithic baseline
    needs.

    Args:
        model: as in `Engine`; holds the experts.
        parameters: what is trained, by name; some of them are the experts', and some are not.
        experts: attached to layers of the model, each of which has parameters among those.

    Raises:
        ModelError: a parameter that can't be clipped exactly.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], experts: Sequence[OwnerExperts]
    ) -> None:
        owned = [{id(value) for value in layer.trained().values()} for layer in experts]
        sparse = [{n: p for n, p in parameters.items() if id(p) in own} for own in owned]
        held = {name for names in sparse for name in names}
        super().__init__(model, {name: p for name, p in parameters.items() if name not in held})
        self._layers = [
            (layer, trained_names(model, layer, own)) for layer, own in zip(experts, sparse, strict=True)
        ]
        self._sums = Sums(parameters)
        self._pending: list[Watch] = []

    def __enter__(self) -> Self:
        super().__enter__()
        # After the engine's own hook, which plans in calls of its own.
        self._handle = self._model.register_forward_pre_hook(self._arm)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()
        self._disarm()
        super().__exit__(*error)

    def expect(
        self,
        rows: int,
        owner: npt.NDArray[np.int64] | Tensor | None = None,
        mask: npt.NDArray[Any] | Tensor | None = None,
    ) -> None:
        """Announce the rows of the next call of the model; see `ExpertEngine.expect`."""
        if not self._active:
            raise ModelError("JointEngine.expect needs the block `with engine:` around it")
        self._pending = [watch_for(layer, rows, owner, mask) for layer, _ in self._layers]

    def add(
        self, losses: Tensor, unit_of_row: npt.NDArray[np.int64] | Tensor, units: int, clipping: Clipping
    ) -> Tensor:
        """Add the clipped gradients of one micro-batch; see `Engine.add`."""
        try:
            return super().add(losses, unit_of_row, units, clipping)
        finally:
            self._disarm()

    def _arm(self, *call: object) -> None:
        if self.sites and self._pending:
            for (layer, _names), watch in zip(self._layers, self._pending, strict=True):
                layer.watch = watch
            self._pending = []

    def _disarm(self) -> None:
        self._pending = []
        for layer, _ in self._layers:
            layer.watch = None

    def _check_independence(self, losses: Tensor) -> None:
        super()._check_independence(losses)
        self._watch.listen(lambda use, gradient, index: None)
        try:
            for layer, _ in self._layers:
                if layer.watch is not None and layer.watch.output is not None:
                    check_independence(losses, layer.watch)
        finally:
            self._watch.listen(None)

    def _parts(self, losses: Tensor, rows: Rows) -> list[Part]:
        watches = [layer.watch for layer, _ in self._layers]
        for (layer, _names), watch in zip(self._layers, watches, strict=True):
            layer.watch = None
            if watch is None or watch.rows != len(losses):
                raise ModelError(f"JointEngine.expect({len(losses)}, …) must come before the forward pass")
            if watch.output is None or watch.pairs is None:
                raise ModelError("the losses don't depend on the experts that are trained")
        found: dict[int, Tensor] = {}
        handles = []
        for number, watch in enumerate(watches):
            assert watch is not None and watch.output is not None  # noqa: PT018
            self._watch.leaves.append(watch.output)  # so that the backward pass reaches it

            def keep(gradient: Tensor, number: int = number) -> None:
                found[number] = gradient

            handles.append(watch.output.register_hook(keep))  # type: ignore[no-untyped-call]
        try:
            parts = super()._parts(losses, rows)
        finally:
            for handle in handles:
                handle.remove()
        with torch.no_grad():
            for number, (layer, names) in enumerate(self._layers):
                watch = watches[number]
                assert watch is not None and watch.pairs is not None  # noqa: PT018
                parts += expert_parts(layer, names, watch.pairs, found[number], rows)
        return parts
