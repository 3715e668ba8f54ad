"""How predictions are scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import ConfigError, DataError
from confide.release.format import Metric

Classes = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.floating]

METRICS: Mapping[str, tuple[Metric, ...]] = {
    "class": ("accuracy", "macro-f1"),
    "number": ("pearson", "spearman", "rmse"),
    "tokens": ("accuracy", "macro-f1"),
    "text": ("perplexity", "accuracy"),
}
"""What each target can be scored with; the first is the default. Of tokens, every labelled word is a row; of
a text, every token that is asked for."""


def accuracy(predictions: Classes, labels: Classes) -> float:
    """Share of rows whose predicted class is right."""
    return float(np.mean(predictions == labels))


def macro_f1(predictions: Classes, labels: Classes) -> float:
    """Mean of F1 = 2·right / (predicted + true) over the classes that are predicted or true in some row."""
    classes = np.union1d(predictions, labels)
    right = np.array([np.sum((predictions == c) & (labels == c)) for c in classes])
    either = np.array([np.sum(predictions == c) + np.sum(labels == c) for c in classes])
    return float(np.mean(2 * right / either))


def pearson(predictions: Numbers, labels: Numbers) -> float:
    """Correlation in [-1, 1]; 0 where either is constant, which says nothing about the other."""
    one, other = (
        values.astype(np.float64) - values.mean(dtype=np.float64) for values in (predictions, labels)
    )
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / length if length > 0 else 0.0


def spearman(predictions: Numbers, labels: Numbers) -> float:
    """Correlation of the ranks; equal values share the mean of theirs."""
    from scipy.stats import rankdata

    return pearson(rankdata(predictions), rankdata(labels))


def rmse(predictions: Numbers, labels: Numbers) -> float:
    """Square root of the mean squared error, in the unit of the labels; lower is better."""
    return float(np.sqrt(np.mean((predictions.astype(np.float64) - labels) ** 2)))


def score(metric: Metric, predictions: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """The metric's value. Higher is better, except for `rmse`; perplexity is none of predictions.

    Args:
        predictions, labels: (n,) classes, or numbers, n ≥ 1.

    Raises:
        ConfigError: an unknown metric.
        DataError: no rows, or not as many predictions as labels.
    """
    if predictions.shape != labels.shape or labels.ndim != 1 or not len(labels):
        raise DataError(
            f"predictions of shape {predictions.shape} can't be scored on labels of shape {labels.shape}"
        )
    match metric:
        case "accuracy":
            return accuracy(predictions, labels)
        case "macro-f1":
            return macro_f1(predictions, labels)
        case "pearson":
            return pearson(predictions, labels)
        case "spearman":
            return spearman(predictions, labels)
        case "rmse":
            return rmse(predictions, labels)
    raise ConfigError(f"unknown metric {metric!r}; use one of {', '.join(_ALL)}")


def in_words(metric: Metric, value: float) -> str:
    """A score as people read it: shares in percent, correlations and errors as they are."""
    plain = metric == "perplexity" or metric in METRICS["number"]
    return f"{metric} {value:.4g}" if plain else f"{metric} {100 * value:.1f} %"


_ALL = dict.fromkeys(name for names in METRICS.values() for name in names)
