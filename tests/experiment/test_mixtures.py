"""What a study notes of a mixture's diagnostics."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from confide.experiment.mixtures import _record_facts
from confide.finetune.diagnostics import Diagnostics
from confide.finetune.owner_estimator import Estimator, Simulated

NOTHING = np.zeros(3)
FOUND = Diagnostics(
    layer="block",
    records=9,
    roles=(),
    mismatch=None,
    imbalance=None,
    estimator=Estimator(np.array([0.5, 1.0, 1.5]), NOTHING, NOTHING, NOTHING),
    simulated=Simulated(2, np.array([0.6, np.nan, 1.0]), np.array([0.05, np.nan, 0.0]), NOTHING, NOTHING),
    silent=None,
    stability=None,
    drift=None,
    transfer=None,
    seconds={},
    peak_bytes=0,
    parameters={},
)


def test_the_gap_to_simulation_is_finite_as_json_has_to_be() -> None:
    """One expert owns nobody, and the draws of another don't differ."""
    facts = _record_facts(FOUND, (1,))
    assert facts.scales == (0.5, 1.5)
    assert facts.scale_gap == pytest.approx(2.0)
    none = Simulated(2, np.ones(3), NOTHING, NOTHING, NOTHING)
    assert _record_facts(dataclasses.replace(FOUND, simulated=none), (1,)).scale_gap is None
