"""Seconds to find the noise for a budget, and how much more than needed is found: confide and its peers.

    python benchmarks/calibration.py            a table
    python benchmarks/calibration.py --json     the same as JSON

The setting is a paper's: 60,000 records, batches of 16, 37,500 steps, δ = 1/60000, for ε = 1, 4 and 8. Time
is processor seconds of one call. `excess` is by how much the noise found is above a noise
that is certainly too little (by the certified lower bound), so it overstates by that bound's own looseness,
under 5·10⁻⁵ here. Peers that aren't installed are named as absent: opacus (extra `bench`), prv-accountant.
prv-accountant finds no noise itself; a root-finder asks for its upper bound.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import math
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

from scipy import optimize

from confide.privacy.accountant import epsilon
from confide.privacy.calibration import noise_multiplier
from confide.privacy.distinguisher import epsilon_lower
from confide.privacy.events import PoissonGaussian
from confide.privacy.streams import Budget

RATE, STEPS, DELTA = 16 / 60000, 37500, 1 / 60000
TARGETS = (1.0, 4.0, 8.0)
Solver = Callable[[float], float]
"""ε → noise multiplier."""


def event(sigma: float) -> PoissonGaussian:
    """The setting with a noise multiplier."""
    return PoissonGaussian(RATE, (sigma,), STEPS)


def confide(target: float) -> float:
    """This package."""
    return noise_multiplier(RATE, STEPS, Budget(target, DELTA))


def dp_accounting(target: float) -> float:
    """Google's calibration on its PLD accountant: default grid and bracket, tolerance 1e-5."""
    import dp_accounting as library
    from dp_accounting import pld

    def made(sigma: float) -> Any:
        gaussian = library.GaussianDpEvent(sigma)
        return library.SelfComposedDpEvent(library.PoissonSampledDpEvent(RATE, gaussian), STEPS)

    return float(library.calibrate_dp_mechanism(pld.PLDAccountant, made, target, DELTA, tol=1e-5))


def opacus(target: float) -> float:
    """Opacus's `get_noise_multiplier` with its PRV accountant, as its privacy engine calls it."""
    from opacus.accountants.utils import get_noise_multiplier

    return float(
        get_noise_multiplier(
            target_epsilon=target, target_delta=DELTA, sample_rate=RATE, steps=STEPS, accountant="prv"
        )
    )


def prv_accountant(target: float) -> float:
    """Brent's method on Microsoft's upper bound, at its usual error of 0.01 in ε."""
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    def excess(log_sigma: float) -> float:
        mechanism = PoissonSubsampledGaussianMechanism(
            sampling_probability=RATE, noise_multiplier=math.exp(log_sigma)
        )
        accountant = PRVAccountant(
            prvs=[mechanism], max_self_compositions=[STEPS], eps_error=0.01, delta_error=DELTA / 1000
        )
        return float(accountant.compute_epsilon(DELTA, [STEPS])[2] - target)

    return math.exp(optimize.brentq(excess, math.log(0.3), math.log(1.0), xtol=1e-5))


SOLVERS: dict[str, Solver] = {
    "confide": confide,
    "dp-accounting": dp_accounting,
    "opacus": opacus,
    "prv-accountant": prv_accountant,
}


def too_little(target: float) -> float:
    """A noise multiplier that certainly doesn't meet the target, as large as can be shown."""

    def excess(log_sigma: float) -> float:
        return epsilon_lower(event(math.exp(log_sigma)), DELTA) - target

    return math.exp(optimize.brentq(excess, math.log(0.3), math.log(1.0), xtol=1e-7))


def main() -> None:
    """Run every solver that is installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    if not arguments.json:
        print(f"{'solver':26} {'ε':>3} {'seconds':>8} {'σ':>9} {'excess':>9} {'ε at σ':>9}")
    floors = {target: too_little(target) for target in TARGETS}
    for name, solver in SOLVERS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append({"solver": name, "absent": True})
            if not arguments.json:
                print(f"{name:26} not installed")
            continue
        for target in TARGETS:
            started = time.process_time()
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                sigma = solver(target)
            row = {
                "solver": name,
                "version": version,
                "epsilon": target,
                "seconds": time.process_time() - started,
                "noise_multiplier": sigma,
                "excess": sigma / floors[target] - 1,
                "epsilon_at_answer": epsilon(event(sigma), DELTA).epsilon,
            }
            found.append(row)
            if not arguments.json:
                print(
                    f"{name + ' ' + version:26} {target:3g} {row['seconds']:8.1f} {sigma:9.5f} "
                    f"{row['excess']:9.1e} {row['epsilon_at_answer']:9.5f}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "results": found}, indent=2))


if __name__ == "__main__":
    main()
