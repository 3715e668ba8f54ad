"""`nn.Embedding`: a row's gradient touches only the table rows that its tokens name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from confide.gradients.contributions import Contribution, Lookup


def embedding(
    module: nn.Embedding, names: Mapping[str, str], ids: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """Output gradients at the ids; those of the padding id are zero, as in torch.

    Args:
        module: the layer.
        names: attribute → parameter name.
        ids: (rows·k, …) integers.
        g: (rows·k, …, width).
        rows: number of rows.
    """
    ids, values = ids.reshape(rows, -1), g.reshape(rows, -1, g.shape[-1])
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx)[..., None], 0)
    return [Lookup(names["weight"], ids.long(), values, module.num_embeddings)]


def obstacle(module: nn.Embedding) -> str | None:
    """Options that change the table in the forward pass, or scale by counts over the whole batch."""
    if module.max_norm is not None:
        return "max_norm changes the table in every forward pass"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts tokens across records"
    return None
