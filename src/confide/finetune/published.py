"""The accuracy that a release publishes: one noisy count of the test units, charged with the training."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from confide.finetune.prepare import Prepared, forward_of
from confide.gradients.keys import Key
from confide.gradients.noise import add_noise
from confide.models.adapters import Adapted
from confide.privacy.statement import Published
from confide.privacy.streams import Schedule
from confide.privacy.units import UnitMap
from confide.tasks.evaluate import logits


def noisy_accuracy(
    prepared: Prepared, adapted: Adapted, schedule: Schedule, key: Key
) -> tuple[Published, ...]:
    """Answer the schedule's accuracy query on the trained model; nothing where there is none.

    One unit changes the count by at most 1, whatever the weights, which are answers of earlier queries. The
    noise has an address of its own, so a run that goes on gives the same answer.

    Args:
        key: the run's noise key.
    """
    asked = [query for query in schedule.queries if query.purpose == "accuracy"]
    if not asked:
        return ()
    inputs = prepared.inputs(adapted.classifier, adapted.first_block, "test")
    _, forward = forward_of(adapted.classifier, adapted.first_block, inputs)
    test = prepared.task.test
    predicted = logits(forward, inputs).argmax(axis=1)
    count = right_units(predicted == prepared.labels("test"), test.units)
    answers = []
    for query in asked:
        (noise,) = query.noise_multipliers
        values = {"count": torch.tensor([count], dtype=torch.float64)}
        noisy = float(add_noise(values, noise, key.generator(query.name, 0, query.purpose))["count"])
        units = test.units.count
        answers.append(
            Published(query=query.name, metric="accuracy", value=noisy / units, units=units, noise=noise)
        )
    return tuple(answers)


def right_units(right: npt.NDArray[np.bool_], units: UnitMap) -> float:
    """Σ over units of the share of their rows that are right; each unit adds between 0 and 1. Private."""
    rows = np.bincount(units.unit_of_row, minlength=units.count)
    hits = np.bincount(units.unit_of_row, weights=right, minlength=units.count)
    return float((hits / np.maximum(rows, 1)).sum())
