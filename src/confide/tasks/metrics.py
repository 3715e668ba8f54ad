"""How predictions are scored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from confide.errors import ConfigError, DataError
from confide.tasks.records import Metric

Classes = npt.NDArray[np.integer]


def accuracy(predictions: Classes, labels: Classes) -> float:
    """Share of rows whose predicted class is right."""
    return float(np.mean(predictions == labels))


def macro_f1(predictions: Classes, labels: Classes) -> float:
    """Mean of F1 = 2·right / (predicted + true) over the classes that are predicted or true in some row."""
    classes = np.union1d(predictions, labels)
    right = np.array([np.sum((predictions == c) & (labels == c)) for c in classes])
    either = np.array([np.sum(predictions == c) + np.sum(labels == c) for c in classes])
    return float(np.mean(2 * right / either))


def score(metric: Metric, predictions: Classes, labels: Classes) -> float:
    """Score in [0, 1], higher is better.

    Args:
        predictions, labels: (n,) classes, n ≥ 1.

    Raises:
        ConfigError: an unknown metric.
        DataError: no rows, or not as many predictions as labels.
    """
    if predictions.shape != labels.shape or labels.ndim != 1 or not len(labels):
        raise DataError(
            f"predictions of shape {predictions.shape} can't be scored on labels of shape {labels.shape}"
        )
    if metric == "accuracy":
        return accuracy(predictions, labels)
    if metric == "macro-f1":
        return macro_f1(predictions, labels)
    raise ConfigError(f"unknown metric {metric!r}; use 'accuracy' or 'macro-f1'")
