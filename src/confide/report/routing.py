"""A figure of a model's routing on public text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from confide.errors import ConfigError
from confide.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from confide.models.moe.selection import Selection

_CHOSEN, _OTHER, _LINE = "#d55e00", "#8c8c8c", "#0072b2"
_FORMATS = ("png", "svg", "pdf")


def check_format(path: Path) -> str:
    """The format that a file's ending asks for.

    Raises:
        ConfigError: none that can be drawn.
    """
    ending = path.suffix.lstrip(".").lower()
    if ending not in _FORMATS:
        raise ConfigError(f"{path}: a figure's name ends with one of {', '.join(_FORMATS)}")
    return ending


def draw_routing(selection: Selection, path: Path) -> None:
    """Owner shares, evenness by layer, and how large a corpus the choice needs, side by side.

    Raises:
        ConfigError: the file's ending is no format of a figure.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ending = check_format(path)
    height = max(2.9, 0.3 * len(selection.layers) + 1.3)
    with rc_context({"font.size": 9, "font.family": ["DejaVu Sans"], "svg.hashsalt": "routing"}):
        figure = Figure(figsize=(11, height), layout="constrained")
        shares, evenness, stability = figure.subplots(1, 3, width_ratios=(1.15, 1, 1))
        _shares(shares, selection)
        _evenness(evenness, selection)
        _stability(stability, selection)
        buffer = io.BytesIO()
        metadata = {"Date": None} if ending == "svg" else None
        figure.savefig(buffer, format=ending, dpi=150, metadata=metadata)
    write_bytes(path, buffer.getvalue())


def _shares(axes: Axes, selection: Selection) -> None:
    widest = max(len(layer.counts) for layer in selection.layers)
    table = np.full((len(selection.layers), widest), np.nan)
    for row, layer in enumerate(selection.layers):
        counts = np.sort(np.array(layer.counts))[::-1]
        table[row, : len(counts)] = 100 * counts / counts.sum()
    image = axes.imshow(table, aspect="auto", cmap="cividis", vmin=0)
    axes.figure.colorbar(image, ax=axes, label="percent of the texts", shrink=0.9)
    axes.set_xticks([0, widest - 1], ["most texts", "fewest"])
    _name_rows(axes, selection)
    axes.set_title("Texts owned, expert by expert", loc="left")


def _evenness(axes: Axes, selection: Selection) -> None:
    for row, layer in enumerate(selection.layers):
        axes.barh(row, layer.evenness, 0.7, color=_CHOSEN if layer.block == selection.chosen else _OTHER)
        axes.annotate(
            f"{layer.evenness:.2f}", (layer.evenness, row), (3, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, 1.13)
    axes.set_ylim(len(selection.layers) - 0.5, -0.5)
    axes.set_xticks([0, 0.5, 1])
    axes.set_xlabel("owner entropy H / log E (1 is even)")
    _name_rows(axes, selection)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Most even: block {selection.chosen}", loc="left", color=_CHOSEN)


def _stability(axes: Axes, selection: Selection) -> None:
    sizes, shares = zip(*selection.stability, strict=True)
    axes.plot(sizes, [100 * share for share in shares], marker="o", markersize=4, color=_LINE)
    axes.axhline(95, color=_OTHER, linewidth=1, linestyle="--")
    axes.annotate("95", (sizes[0], 95), (0, 3), textcoords="offset points", color=_OTHER)
    axes.set_xscale("log")
    axes.set_xticks([sizes[0], sizes[-1]], [f"{sizes[0]:,}", f"{sizes[-1]:,}"])
    axes.minorticks_off()
    axes.set_ylim(0, 104)
    axes.set_xlabel("texts")
    axes.set_ylabel("percent of redrawn corpora")
    axes.spines[["top", "right"]].set_visible(False)
    least = selection.stable_from
    found = "No certain choice here" if least is None else f"Choice certain from {least:,}"
    axes.set_title(found, loc="left")


def _name_rows(axes: Axes, selection: Selection) -> None:
    axes.set_yticks(range(len(selection.layers)), [f"block {layer.block}" for layer in selection.layers])
