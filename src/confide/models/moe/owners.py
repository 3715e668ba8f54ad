"""Who owns a record: the expert that its tokens are sent to most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from confide.choices import Vote
from confide.errors import ModelError
from confide.models.moe.layers import SparseLayer
from confide.models.moe.routing import Routing, routings

Owners = npt.NDArray[np.int64]


def owner_maps(
    layers: Sequence[SparseLayer],
    forward: Callable[[dict[str, Tensor]], Any],
    batches: Iterable[tuple[Owners, dict[str, Tensor]]],
    count: int,
    vote: Vote = "plurality",
) -> dict[str, Owners]:
    """The owner of every record in each of some layers.

    A record's owner is a function of that record and of public weights; in a batch also of rounding, which
    follows the batch's shape and how many of its tokens meet in an expert, and may break a near tie the other
    way. Where one record must not change another's owner, hand records over one at a time (`alone`). Owners
    are computed once, before training, and kept. Of private records they are private.

    Args:
        layers: of the model that `forward` calls.
        forward: runs the hardened model on a batch; it is left at the highest of the layers.
        batches: (numbers of records, `input_ids` and `attention_mask`) that together cover all records.
        count: how many records there are.
        vote: how a token votes. `plurality`: with its gate weights, normalised over its experts (RAPTOR,
            equation 5). `majority`: one vote for its first expert.

    Returns:
        Layer name → (count,) numbers of experts. Padding doesn't vote; of equal experts the lowest wins, and
        so does expert 0 where no token voted.

    Raises:
        ModelError: the experts saw other tokens than the batch has, or a record is in no batch.
    """
    owners = {layer.name: np.full(count, -1, dtype=np.int64) for layer in layers}
    for layer, rows, cast in _ballots(layers, forward, batches, vote):
        owners[layer.name][rows] = winners(cast).cpu().numpy()
    for name, found in owners.items():
        if (found < 0).any():
            raise ModelError(f"{int((found < 0).sum())} record(s) were in no batch, so {name} has no owner")
    return owners


def alone(
    batch: Callable[[Owners], dict[str, Tensor]], count: int
) -> Iterator[tuple[Owners, dict[str, Tensor]]]:
    """Records one at a time, as `owner_maps` reads them: nothing of a forward pass then depends on another.

    Args:
        batch: the inputs for some numbers of records, without needless padding.
    """
    for rows in np.arange(count, dtype=np.int64)[:, None]:
        yield rows, batch(rows)


def vote_tables(
    layers: Sequence[SparseLayer],
    forward: Callable[[dict[str, Tensor]], Any],
    batches: Iterable[tuple[Owners, dict[str, Tensor]]],
    count: int,
    vote: Vote = "plurality",
) -> dict[str, npt.NDArray[np.float64]]:
    """The votes that `owner_maps` counts: layer name → (count, E). Of private records they are private."""
    tables = {layer.name: np.zeros((count, layer.experts)) for layer in layers}
    for layer, rows, cast in _ballots(layers, forward, batches, vote):
        tables[layer.name][rows] = cast.cpu().numpy()
    return tables


def _ballots(
    layers: Sequence[SparseLayer],
    forward: Callable[[dict[str, Tensor]], Any],
    batches: Iterable[tuple[Owners, dict[str, Tensor]]],
    vote: Vote,
) -> Iterator[tuple[SparseLayer, Owners, Tensor]]:
    """(layer, numbers of records, their votes), batch by batch."""
    highest = max(layers, key=lambda layer: layer.number).block.get_submodule("experts")
    with torch.no_grad(), routings(layers) as seen:
        handle = highest.register_forward_pre_hook(_stop)  # after the hooks that read what the routers chose
        try:
            for rows, batch in batches:
                seen.clear()
                with suppress(_EnoughSeenError):
                    forward(batch)
                for layer in layers:
                    if layer.name not in seen:
                        raise ModelError(f"the model did not call the experts of {layer.name}")
                    yield layer, rows, votes(seen[layer.name], batch["attention_mask"], layer, vote)
        finally:
            handle.remove()


class _EnoughSeenError(Exception):
    """Ends a forward pass whose rest has no say in the votes."""


def _stop(*_: Any) -> None:
    raise _EnoughSeenError


def votes(routing: Routing, mask: Tensor, layer: SparseLayer, vote: Vote = "plurality") -> Tensor:
    """Σ over a record's tokens of their votes.

    Args:
        routing: of one batch.
        mask: (rows, length), 0 at padding.

    Returns:
        (rows, E) float64; sums of float32 gates, which float64 adds exactly, so that their order is nothing.
    """
    rows, length = mask.shape
    if len(routing.expert) != rows * length:
        raise ModelError(
            f"the experts of {layer.name} saw {len(routing.expert)} tokens in a batch of {rows} × {length}: "
            "which token is whose record's can't be told"
        )
    weight = routing.weight.to(torch.float32)
    weight = weight / weight.sum(-1, keepdim=True)
    expert = routing.expert
    if vote == "majority":
        first = weight.nan_to_num(-1).argmax(-1, keepdim=True)
        expert, weight = expert.gather(1, first), torch.ones_like(first, dtype=torch.float32)
    heard = (mask.reshape(-1, 1) != 0) & (expert < layer.experts)
    cast = torch.where(heard & weight.isfinite(), weight, 0.0).double()
    record = torch.arange(rows, device=mask.device).repeat_interleave(length)[:, None].expand_as(expert)
    total = cast.new_zeros(rows, layer.experts)
    return total.index_put_((record, expert.clamp(max=layer.experts - 1)), cast, accumulate=True)


def winners(cast: Tensor) -> Tensor:
    """(rows, E) votes → (rows,) the expert with most, the lowest of equals."""
    numbers = torch.arange(cast.shape[1], device=cast.device).expand_as(cast)
    best = cast == cast.max(1, keepdim=True).values
    return torch.where(best, numbers, cast.shape[1]).min(1).values
