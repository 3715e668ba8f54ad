"""Experts out of a dense encoder: copies of its feed-forward networks, and a router that clusters tokens.

Sparse upcycling (Komatsuzaki et al. 2023) with a router that needs no training. The copies are equal until
they are trained, so the new model computes exactly what the old one did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from confide.errors import ModelError
from confide.files import new_folder

_ITERATIONS = 50
_STARTS = 3


def upcycle(
    dense: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    *,
    blocks: Sequence[int],
    experts: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
) -> nn.Module:
    """A `MoeBertModel` whose outputs are the dense model's.

    Each block's router holds the directions of clusters of its feed-forward inputs on public texts, so that
    like tokens meet the same expert from the start. A token goes to the one expert nearest to it, with
    weight 1.

    Args:
        dense: a `BertModel`.
        batches: public texts as `input_ids` and `attention_mask`.
        blocks: which blocks get experts, from 0.
        experts: E of each.
        seed: of the clustering; public.
        progress: called with the number of rows read since the last call.

    Raises:
        ModelError: not a BERT, a block that it hasn't, or fewer tokens than experts.
    """
    from confide.models.moe.bert import MoeBertConfig, MoeBertModel

    own: Any = dense
    _check(own, blocks, experts)
    inputs = feed_forward_inputs(own, batches, blocks, progress)
    fields = own.config.to_dict()
    for name in ("model_type", "architectures"):
        fields.pop(name, None)
    config = MoeBertConfig(
        **fields, num_experts=experts, num_experts_per_tok=1, sparse_blocks=sorted(set(blocks))
    )
    with torch.random.fork_rng(devices=[]):
        sparse: nn.Module = MoeBertModel(config, add_pooling_layer=own.pooler is not None)
    state = own.state_dict()
    for block in config.sparse_blocks:
        prefix = f"encoder.layer.{block}"
        for old, new in (("intermediate.dense", "up_proj"), ("output.dense", "down_proj")):
            for part, suffix in (("weight", ""), ("bias", "_bias")):
                value = state.pop(f"{prefix}.{old}.{part}")
                state[f"{prefix}.mlp.experts.{new}{suffix}"] = value.expand(experts, *value.shape)
        state[f"{prefix}.mlp.gate.weight"] = directions(inputs[block], experts, seed).to(value.dtype)
    sparse.load_state_dict(state)
    return sparse.to(own.dtype).eval()


def save(sparse: nn.Module, tokenizer: Any, out: Path) -> None:
    """Write model and tokenizer as a folder that is a base like any other; all of it or nothing.

    Raises:
        ReleaseError: the folder exists, or can't be written.
    """
    own: Any = sparse
    with new_folder(out) as folder:
        own.config.architectures = [type(sparse).__name__]
        own.config.save_pretrained(folder)
        state = {name: value.contiguous() for name, value in own.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)


def feed_forward_inputs(
    dense: Any, batches: Iterable[dict[str, Tensor]], blocks: Sequence[int], progress: Callable[[int], None]
) -> dict[int, Tensor]:
    """(tokens, width) by block, padding left out."""
    seen: dict[int, Tensor] = {}
    kept: dict[int, list[Tensor]] = {block: [] for block in blocks}

    def watch(block: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(_: Any, args: tuple[Tensor, ...]) -> None:
            seen[block] = args[0]

        return hook

    handles = [
        dense.encoder.layer[block].intermediate.register_forward_pre_hook(watch(block)) for block in blocks
    ]
    dense.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                dense(**batch)
                for block in blocks:
                    kept[block].append(seen[block][batch["attention_mask"] != 0])
                progress(len(batch["input_ids"]))
    finally:
        for handle in handles:
            handle.remove()
    return {block: torch.cat(parts) if parts else torch.empty(0, 0) for block, parts in kept.items()}


def directions(tokens: Tensor, count: int, seed: int) -> Tensor:
    """Centres of spherical k-means (Dhillon and Modha 2001): unit vectors, nearest by inner product.

    Args:
        tokens: (n, width).
        count: how many.
        seed: of the starting points, which k-means++ spreads; the best of three starts is kept.

    Returns:
        (count, width) of length 1.

    Raises:
        ModelError: fewer distinct tokens than centres.
    """
    unit = functional.normalize(tokens.float(), dim=-1)
    distinct = len(torch.unique(unit, dim=0)) if 0 < len(unit) < 64 * count else len(unit)
    if distinct < count:
        raise ModelError(
            f"{distinct} distinct tokens can't be told apart into {count} experts; give more text"
        )
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, Tensor] | None = None
    for _ in range(_STARTS):
        score, centres = _cluster(unit, _spread(unit, count, generator))
        if best is None or score > best[0]:
            best = score, centres
    assert best is not None
    return best[1]


def _spread(unit: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii 2007): each start far from those before."""
    chosen = [int(torch.randint(len(unit), (1,), generator=generator))]
    near = torch.full((len(unit),), torch.inf)
    for _ in range(count - 1):
        near = torch.minimum(near, (1 - unit @ unit[chosen[-1]]).clamp(min=0))
        near[chosen] = 0
        cumulative = near.double().cumsum(0)
        at = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
        chosen.append(int(torch.searchsorted(cumulative, at).clamp(max=len(unit) - 1)))
    return unit[chosen]


def _cluster(unit: Tensor, centres: Tensor) -> tuple[float, Tensor]:
    """Mean inner product with the nearest centre, and the centres, when assignments no longer change."""
    before = None
    for _ in range(_ITERATIONS):
        closeness, nearest = (unit @ centres.T).max(1)
        if before is not None and torch.equal(nearest, before):
            break
        before = nearest
        sums = torch.zeros_like(centres).index_add_(0, nearest, unit)
        empty = torch.bincount(nearest, minlength=len(centres)) == 0
        if bool(empty.any()):  # an empty centre moves to the tokens that are served worst
            sums[empty] = unit[closeness.argsort()[: int(empty.sum())]]
        centres = functional.normalize(sums, dim=-1)
    return float((unit @ centres.T).max(1).values.mean()), centres


def _check(dense: Any, blocks: Sequence[int], experts: int) -> None:
    kind = getattr(getattr(dense, "config", None), "model_type", type(dense).__name__)
    if kind != "bert" or not hasattr(dense, "encoder"):
        raise ModelError(f"experts can be made of a BERT encoder only, not of a {kind!r} model")
    count = dense.config.num_hidden_layers
    missing = sorted(block for block in blocks if not 0 <= block < count)
    if missing or not blocks:
        raise ModelError(
            f"the base has blocks 0 to {count - 1}; there is no block {missing[0]}"
            if missing
            else "no block was named that should get experts"
        )
    if experts < 2:
        raise ModelError(f"{experts} expert(s) leave nothing to choose; use at least 2")
