"""What a claim means to people whose records were used: what an attacker can gain, and what isn't covered."""

from __future__ import annotations

import math

from confide.privacy.statement import Claim, Statement, common_adjacency
from confide.privacy.words import round_up

ADVERSARY = (
    "Anybody who has every file of this release, knows all other records, the code and the settings, and "
    "computes without limit. The accounting even grants them every noisy update of the training."
)
NO_ADVERSARY = (
    "Not against somebody who sees the machine during training, its noise or keys, or the folders private/ "
    "and report/ of whoever ran it."
)


def advantage(claim: Claim) -> float:
    """How much better than guessing an attacker can be: the largest (true minus false positive rate).

    For a test whether one unit was in the data (under replace-one: which of two values it had), from any
    (ε, δ)-DP result: (e^ε − 1 + 2δ)/(e^ε + 1) (Kairouz, Oh and Viswanath 2015, theorem 2.1; Humphries et al.
    2020, theorem 3).
    """
    return min(1.0, math.tanh(claim.epsilon / 2) + claim.delta * (1 - math.tanh(claim.epsilon / 2)))


def found(claim: Claim, false_alarms: float) -> float:
    """Largest share of members that a test can find which accuses this share of outsiders.

    min(e^ε·α + δ, 1 − e^−ε·(1 − δ − α)) (Kairouz, Oh and Viswanath 2015, theorem 2.1).
    """
    steep = math.exp(min(claim.epsilon, 700.0)) * false_alarms + claim.delta
    flat = 1 - math.exp(-claim.epsilon) * (1 - claim.delta - false_alarms)
    return max(0.0, min(1.0, steep, flat))


def of_group(claim: Claim, size: int) -> tuple[float, float]:
    """(ε, δ) for `size` units that change together.

    k·ε and δ·(e^kε − 1)/(e^ε − 1), by going through the k − 1 data sets between (Dwork and Roth 2014, 2.3).
    """
    if claim.epsilon * size > 700:
        return size * claim.epsilon, 1.0
    factor = math.fsum(math.exp(claim.epsilon * number) for number in range(size))
    return size * claim.epsilon, min(1.0, claim.delta * factor)


def promise(claim: Claim, statement: Statement) -> str:
    """The claim as one sentence."""
    units: dict[str, list[str]] = {}
    for spending in statement.spendings:
        names = units.setdefault(spending.unit, [])
        names += [spending.dataset] if spending.dataset not in names else []
    changed = " or ".join(f"{_one(unit)} of {' or '.join(names)}" for unit, names in units.items())
    replaced = common_adjacency(statement.spendings) == "replace-one"
    change = "replaced by another" if replaced else "added or removed"
    return (
        f"Whether {changed} was {change} changes the probability of whatever anybody may do or conclude with "
        f"this release by at most a factor e^ε = {round_up(math.exp(min(claim.epsilon, 700.0)), 3)}, plus "
        f"δ = {round_up(claim.delta, 3)}."
    )


def not_protected(statement: Statement) -> tuple[tuple[str, str], ...]:
    """What the claim doesn't cover: a heading and a sentence each."""
    unit = unit_word(statement)
    return (
        (
            "Choices made by hand",
            "Hyper-parameters, or a merge's settings, that were picked by looking at results on the same "
            "records. Nothing accounts for such a choice.",
        ),
        (
            "What was declared public",
            "The names of the data sets, the number of units n and what follows from it, the label names "
            "(also where they were read from the file), the settings, and the tokenizer.",
        ),
        (
            "The base model",
            "It is public. If the data it was pretrained on held these records, this claim says nothing "
            "about that.",
        ),
        (
            "Timing and aborts",
            "How long training took, its memory, runs that were aborted, and error messages.",
        ),
        (
            "Scores",
            "Accuracy on test records, as in a report/ folder, is not noised. It is no part of the release.",
        ),
        (
            "Other releases",
            "Each has a claim of its own; what several reveal together about one data set adds up, and its "
            "owner's ledger knows how much.",
        ),
        (
            f"Groups, and traces in others' {unit}s",
            f"Several {unit}s that belong together, as of a family, are protected less (see the table of "
            f"the privacy card). What somebody else's {unit} tells about a person is not hidden with that "
            "person's.",
        ),
        (
            "What is true of the population",
            "If the model learns that smoking harms lungs, that concerns a smoker whose record was never "
            "used.",
        ),
        (
            "Floating point",
            "The bound is for exact arithmetic. Noise is drawn and added in float64, which leaves a "
            "residue that no theorem covers.",
        ),
    )


def unit_word(statement: Statement) -> str:
    """`record`, or `unit` where somebody's unit is more than that."""
    return "unit" if {spending.unit for spending in statement.spendings} - {"record"} else "record"


def _one(unit: str) -> str:
    return "one record" if unit == "record" else f"all that belongs to one {unit}"
