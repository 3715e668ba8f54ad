"""`nn.LayerNorm`, `nn.GroupNorm` and plain scaling: per-row gradients are small, so they are formed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from confide.gradients.contributions import Contribution, PerRow


def layer_norm(
    module: nn.LayerNorm, names: Mapping[str, str], x: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """Σ g·x̂ for the weight and Σ g for the bias, over all positions of a row.

    Args:
        module: the layer.
        names: attribute → parameter name.
        x: (rows·k, …, *normalized_shape).
        g: same shape.
        rows: number of rows.
    """

    def over_positions(values: Tensor) -> Tensor:
        return values.reshape(rows, -1, *module.normalized_shape).sum(1)

    found: list[Contribution] = []
    if "weight" in names:
        normal = functional.layer_norm(x, module.normalized_shape, eps=module.eps)
        found.append(PerRow(names["weight"], over_positions(normal.mul_(g))))
    if "bias" in names:
        found.append(PerRow(names["bias"], over_positions(g)))
    return found


def group_norm(
    module: nn.GroupNorm, names: Mapping[str, str], x: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """Σ g·x̂ and Σ g over a row's positions, per channel; x and g are (rows·k, channels, …)."""

    def over_positions(values: Tensor) -> Tensor:
        return values.reshape(rows, -1, module.num_channels, values[0, 0].numel()).sum((1, 3))

    found: list[Contribution] = []
    if "weight" in names:
        normal = functional.group_norm(x, module.num_groups, eps=module.eps)
        found.append(PerRow(names["weight"], over_positions(normal * g)))
    if "bias" in names:
        found.append(PerRow(names["bias"], over_positions(g)))
    return found


def scaling(
    module: nn.Module, names: Mapping[str, str], x: Tensor, g: Tensor, rows: int
) -> list[Contribution]:
    """Σ g·x over all positions of a row, where the module returns x·weight: layer scales of vision models.

    Args:
        module: the layer.
        names: of its one parameter, whose shape is that of x's last dimensions.
        x: (rows·k, …, *shape).
        g: same shape.
        rows: number of rows.
    """
    ((attribute, name),) = names.items()
    shape = module.get_parameter(attribute).shape
    return [PerRow(name, (x * g).reshape(rows, -1, *shape).sum(1))]
