"""Seconds to find the noise for a budget, and how much more than needed is found: confide and its peers.

    python benchmarks/calibration.py                  two tables
    python benchmarks/calibration.py --two-streams    the second one only
    python benchmarks/calibration.py --json           the same as JSON

The first setting is a paper's: 60,000 records, batches of 16, 37,500 steps, δ = 1/60000, for ε = 1, 4 and 8.
Time is processor seconds of one call. `excess` is by how much the noise found is above a noise that is
certainly too little (by the certified lower bound), so it overstates by that bound's own looseness, under
5·10⁻⁵ here. Peers that aren't installed are named as absent: opacus (extra `bench`), prv-accountant.
prv-accountant finds no noise itself; a root-finder asks for its upper bound.

The second table divides one budget between two streams with draws of their own, 90 % of μ² to the first, as
RAPTOR does; no peer does that. `prices` and `tests` count evaluations: of the accountant, which decides, and
of the certified lower bound, which finds the place.
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
from collections.abc import Callable, Iterator
from typing import Any

from scipy import optimize

from confide.privacy import distinguisher, losses
from confide.privacy.accountant import epsilon
from confide.privacy.calibration import noise_multiplier
from confide.privacy.distinguisher import epsilon_lower
from confide.privacy.events import PoissonGaussian
from confide.privacy.splits import split
from confide.privacy.streams import Budget, Clipping, ParameterGroup, Schedule, Stream

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


SETTINGS = {
    "demo, fast": (75 / 600, 4, 1e-6),
    "demo": (512 / 20000, 18, 1e-6),
    "RAPTOR's SST-2": (1000 / 67349, 1347, 67349**-1.1),
}
"""Name → rate, steps of each stream, δ."""


def two_streams(rate: float, steps: int) -> Schedule:
    """Both with noise 1."""
    streams = (
        Stream(
            name=name,
            groups=(ParameterGroup(name, (name,), 1.0, anchored=False),),
            steps=steps,
            draw=name,
            sampling_rate=rate,
            clipping=Clipping("flat", 1.0),
            noise_multiplier=1.0,
            denominator=1.0,
        )
        for name in ("shared", "experts")
    )
    return Schedule(tuple(streams))


def divided() -> list[dict[str, Any]]:
    """A row for each setting and ε."""
    rows = []
    for name, (rate, steps, delta) in SETTINGS.items():
        for target in (1.0, 8.0):
            with counted() as counts:
                started = time.process_time()
                found = split(
                    two_streams(rate, steps), Budget(target, delta), {"shared": 0.9, "experts": 0.1}
                )
                seconds = time.process_time() - started

            def excess(
                log_factor: float, found: Schedule = found, delta: float = delta, target: float = target
            ) -> float:
                return epsilon_lower(found.with_noise(math.exp(log_factor)).event(), delta) - target

            rows.append(
                {
                    "setting": name,
                    "epsilon": target,
                    "seconds": seconds,
                    **counts,
                    "noise_multipliers": [stream.noise_multiplier for stream in found.streams],
                    "excess": math.exp(-optimize.brentq(excess, -0.01, 0.0, xtol=1e-8)) - 1,
                    "epsilon_at_answer": epsilon(found.event(), delta).epsilon,
                }
            )
    return rows


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Evaluations of the accountant's PLD and of the lower bound within the block."""
    counts = {"prices": 0, "tests": 0}
    price, test = losses.epsilon, distinguisher.epsilon_lower

    def priced(*given: Any) -> Any:
        counts["prices"] += 1
        return price(*given)

    def tested(*given: Any) -> float:
        counts["tests"] += 1
        return test(*given)

    losses.epsilon, distinguisher.epsilon_lower = priced, tested
    try:
        yield counts
    finally:
        losses.epsilon, distinguisher.epsilon_lower = price, test


def main() -> None:
    """Run every solver that is installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--two-streams", action="store_true", help="leave the comparison with peers out")
    arguments = parser.parse_args()
    found = [] if arguments.two_streams else compared(quiet=arguments.json)
    epsilon(event(1.0), 0.5)  # loads what the first call loads
    rows = divided()
    if arguments.json:
        print(
            json.dumps({"python": platform.python_version(), "results": found, "two_streams": rows}, indent=2)
        )
        return
    print(
        f"\n{'two streams':16} {'ε':>3} {'seconds':>8} {'prices':>6} {'tests':>5} {'σ shared':>9} "
        f"{'σ experts':>9} {'excess':>9} {'ε at σ':>9}"
    )
    for row in rows:
        shared, experts = row["noise_multipliers"]
        print(
            f"{row['setting']:16} {row['epsilon']:3g} {row['seconds']:8.2f} {row['prices']:6} "
            f"{row['tests']:5} {shared:9.5f} {experts:9.5f} {row['excess']:9.1e} "
            f"{row['epsilon_at_answer']:9.5f}"
        )


def compared(quiet: bool) -> list[dict[str, Any]]:
    """A row for each solver and ε, printed as they come unless `quiet`."""
    found: list[dict[str, Any]] = []
    if not quiet:
        print(f"{'solver':26} {'ε':>3} {'seconds':>8} {'σ':>9} {'excess':>9} {'ε at σ':>9}")
    floors = {target: too_little(target) for target in TARGETS}
    for name, solver in SOLVERS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append({"solver": name, "absent": True})
            if not quiet:
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
            if not quiet:
                print(
                    f"{name + ' ' + version:26} {target:3g} {row['seconds']:8.1f} {sigma:9.5f} "
                    f"{row['excess']:9.1e} {row['epsilon_at_answer']:9.5f}",
                    flush=True,
                )
    return found


if __name__ == "__main__":
    main()
