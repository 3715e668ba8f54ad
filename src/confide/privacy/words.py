"""A claim in words: what is protected, against whom, and under which assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Literal

from confide.privacy.calibration import delta_warning
from confide.privacy.events import (
    Composed,
    Mechanism,
    PoissonGaussian,
    RandomSelection,
    RepeatAndSelect,
    TruncatedPoissonGaussian,
    leaves,
)
from confide.privacy.statement import OwnersChecked, Published, Spending, Statement, common_adjacency
from confide.privacy.streams import Adjacency

_NEIGHBOURS: dict[Adjacency, str] = {
    "add-or-remove-one": "adding or removing",
    "replace-one": "replacing",
}


_LONGEST_NAME, _MOST_NAMES = 60, 5


def round_up(value: float, digits: int = 5) -> str:
    """Significant digits, rounded up: what is printed must not promise more than was computed."""
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(value))
    return f"{float(rounded):.{digits}g}"


def round_down(value: float, digits: int = 5) -> str:
    """Significant digits, rounded down: what is left must not look like more than it is."""
    rounded = Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(Decimal(value))
    return f"{float(rounded):.{digits}g}"


def assumptions(
    *,
    dataset: str,
    units: int,
    unit: str,
    delta: float | None,
    labels_from: Literal["declared", "file"],
    label_range: tuple[float, float] | None = None,
    routed_text: bool = False,
) -> tuple[str, ...]:
    """Sentences under which the claim of one training run holds."""
    sentences = [
        "Noise was drawn and added as the schedule says. Whoever ran the training asserts this; others can "
        "recompute the claim, but not see the noise.",
        "Hyper-parameters were not chosen privately: trying several settings on the same records, and "
        "keeping the best, is not accounted for.",
        f"The number of units of {dataset} ({units}) is public, and so is what follows from it: sampling "
        f"rate, steps and delta. {dataset} is what the model was trained on; if a test part was split off "
        "before, which records are in which part is public too.",
        "The claim holds against somebody who sees every noisy update; who sees only the final model sees "
        "less than the accounting assumes.",
        "The base model and its tokenizer are public and were not chosen or changed by looking at these "
        "records. If the base's own training data held these records, this claim doesn't cover it.",
        "Running time, memory, aborted runs and error messages are not protected.",
        "Scores on test records are not noised; they are no part of the release, and the claim doesn't cover "
        "them.",
        "The bound is for exact arithmetic on the noisy sums; noise is drawn and added in float64, and the "
        "rounding of floating point is not part of it. Nor is what it does, in a mixture of experts, to a "
        "token that is all but tied between two of them.",
    ]
    if unit != "record":
        sentences.append(
            f"A unit of {dataset} is everything that shares a value of column {unit}; the column tells units "
            "apart correctly."
        )
    if labels_from == "file":
        sentences.append(labels_read(dataset))
    if label_range is not None:
        sentences.append(labels_between(dataset, *label_range))
    if routed_text:
        sentences.append(text_routed(dataset))
    if delta is not None and (warning := delta_warning(delta, units)):
        sentences.append(f"{dataset}: {warning}.")
    return tuple(sentences)


def labels_read(dataset: str) -> str:
    """What is assumed where nobody declared the labels."""
    return f"The names of the labels of {dataset} were read from its file and count as public."


def text_routed(dataset: str) -> str:
    """What is assumed where a layer was chosen by how a mixture of experts routes public text."""
    return (
        "The text by whose routing the layers of a mixture of experts were compared is public, as whoever "
        f"named it declares, and none of it is a record of {dataset}."
    )


def labels_between(dataset: str, low: float, high: float) -> str:
    """What is assumed of labels that are numbers."""
    return (
        f"The labels of {dataset} are numbers from {_number(low)} to {_number(high)}; this range was "
        "declared without looking at the records, and counts as public."
    )


def _number(value: float) -> str:
    """All digits that tell the number apart, as a person writes it."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def test_units(dataset: str, published: Sequence[Published]) -> tuple[str, ...]:
    """What a published number assumes."""
    return tuple(
        f"The number of test units of {dataset}, {number.units}, is a public constant, as is which units are "
        "for test."
        for number in published
    )


def publication(number: Published) -> str:
    """A published number as a sentence."""
    return (
        f"{number.metric.capitalize()} on {number.units} test units, with noise: {100 * number.value:.1f} % "
        f"(the noise has a standard deviation of {100 * number.noise / number.units:.2g} points)."
    )


def disjointness(inputs: Sequence[tuple[str, ...]], checked: OwnersChecked | None) -> str:
    """What a merge assumes that says that no unit is in data sets of two inputs.

    Args:
        inputs: names of the data sets of each.
        checked: how the owners found out; None if they only declared it.
    """
    apart = [_list(names) if len(names) == 1 else f"({_list(names)})" for names in inputs if names]
    said = "Their owners declared it" if checked is None else f"Their owners checked it ({checking(checked)})"
    return (
        f"The data sets {_list(tuple(dict.fromkeys(apart)))} share no unit, and which data set a unit "
        f"belongs to is fixed. {said}; if it is wrong, the claim is too small."
    )


def public_statistics(sources: Sequence[str]) -> str:
    """What a merge assumes that weighs its models by statistics of a text that somebody calls public.

    A name is a part of a sentence here, so it gets no sentence of its own into the statement.
    """
    named = [
        "".join(filter(str.isprintable, source)).replace(". ", ".")[:_LONGEST_NAME] for source in sources
    ]
    if len(named) > _MOST_NAMES:
        named = [*named[:_MOST_NAMES], f"{len(named) - _MOST_NAMES} more"]
    return (
        f"The models were weighed by statistics of {_list(tuple(named))}, which is public: it holds no "
        "record of the data sets above. If it does, the claim doesn't cover what they show of that record."
    )


def apart(statement: Statement) -> str:
    """What is said about the data sets of a merge, as the start of a sentence."""
    match statement.disjoint:
        case None:
            return "Nobody declared that the data sets of different inputs share no unit"
        case OwnersChecked() as checked:
            return f"The owners checked that no unit is in data sets of two inputs ({checking(checked)})"
        case _:
            return "It was declared that no unit is in data sets of two inputs"


def checking(checked: OwnersChecked) -> str:
    """How and when owners compared their data sets."""
    return f"{checked.how.rstrip('. ')}, {checked.when.isoformat()}"


def describe(statement: Statement) -> tuple[str, ...]:
    """The statement as sentences, for the terminal and the card."""
    lines = []
    claim = statement.claim
    datasets = tuple(dict.fromkeys(spending.dataset for spending in statement.spendings))
    if claim is None:
        lines.append(f"No privacy is claimed: {statement.no_claim or 'no reason is given'}")
    else:
        change = _NEIGHBOURS[common_adjacency(statement.spendings)]
        names = {spending.unit for spending in statement.spendings}
        unit = "record" if names == {"record"} else "unit"
        budget = f"ε = {round_up(claim.epsilon)}, δ = {round_up(claim.delta, 3)}"
        lines.append(
            f"The weights are ({budget})-differentially private for "
            f"{change} any one {unit} of {_list(datasets)}. The bound is {claim.accountant}"
            + (f"; by RDP it is ε = {round_up(claim.epsilon_rdp)}." if claim.epsilon_rdp is not None else ".")
        )
        if statement.disjoint and len(datasets) > 1:
            lines.append(
                f"{apart(statement)}, so the claim is that of the data set that costs most, or of those that "
                "one unit may be in."
            )
    lines += [_spending(spending) for spending in statement.spendings]
    lines += [publication(number) for number in statement.published]
    return tuple(lines)


def _spending(spending: Spending) -> str:
    start = (
        f"Run {spending.run} on {spending.dataset} ({spending.units} units; a unit is one {_unit(spending)})"
    )
    return f"{start}: {asked(spending)}."


def asked(spending: Spending) -> str:
    """What one run asked of its records, and how much of it ran."""
    if spending.event is None:
        return f"no claim, {spending.no_claim or 'no reason is given'}"
    ran = ", ".join(f"{name} {steps}" for name, steps in spending.steps_run.items())
    return f"{queries_in_words(spending.event)}. Steps run: {ran}"


def queries_in_words(event: Mechanism | Composed) -> str:
    """What looked at the records, mechanism by mechanism."""
    return "; ".join(_query(leaf) for leaf in leaves(event)) or "nothing was asked"


def _query(leaf: Mechanism) -> str:
    match leaf:
        case PoissonGaussian():
            sigmas = " and ".join(f"{sigma:.4g}" for sigma in leaf.noise_multipliers)
            if leaf.sampling_rate == 1:
                return f"all records, {leaf.steps} times, noise multiplier {sigmas}"
            return f"{leaf.steps} draws at sampling rate {leaf.sampling_rate:.4g}, noise multiplier {sigmas}"
        case TruncatedPoissonGaussian():
            return (
                f"{leaf.steps} draws at sampling rate {leaf.sampling_rate:.4g} cut to {leaf.cap} of "
                f"{leaf.units} units, noise multiplier {leaf.noise_multiplier:.4g}"
            )
        case RandomSelection():
            parts = zip(leaf.probabilities, leaf.events, strict=True)
            return "one of " + ", or ".join(
                f"({queries_in_words(part)}) with probability {p:.4g}" for p, part in parts
            )
        case RepeatAndSelect():
            return f"the best of {leaf.mean:g} runs on average, each: {queries_in_words(leaf.event)}"


def _unit(spending: Spending) -> str:
    return "record" if spending.unit == "record" else f"value of {spending.unit}"


def _list(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
