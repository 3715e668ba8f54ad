"""Under what a claim holds: sentences that follow from a statement's fields, and no others.

A statement carries its assumptions as sentences, so that whoever has only the file can read them. They are
no free text: whoever checks a statement derives them again, and one that is missing or that says something
else is refused. Four depend on what isn't in the statement (labels that were read from a file, bounds of
labels that are numbers, public text that was routed or that a merge looked at). Each claims less, so each
may stand there, in its own words only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from confide.errors import PrivacyError
from confide.privacy import words
from confide.privacy.calibration import delta_warning
from confide.privacy.statement import OwnersChecked, Published, Spending, Statement

_LONGEST = 400  # letters of a name of public text
_HOLE = "@@"


def of_training(
    spending: Spending,
    published: Sequence[Published],
    labels_from: Literal["declared", "file"] = "declared",
    label_range: tuple[float, float] | None = None,
    routed_text: bool = False,
) -> tuple[str, ...]:
    """What the claim of one training run assumes."""
    sentences = words.assumptions(
        dataset=spending.dataset,
        units=spending.units,
        unit=spending.unit,
        delta=spending.delta,
        labels_from=labels_from,
        label_range=label_range,
        routed_text=routed_text,
    )
    return sentences + words.test_units(spending.dataset, published)


def of_merge(
    inputs: Sequence[Statement],
    spendings: Sequence[Spending],
    delta: float,
    disjoint: Literal["declared"] | OwnersChecked | None,
) -> tuple[str, ...]:
    """What the claim of a merge assumes: all that its inputs do, a weak δ, and that they share no unit."""
    sentences = dict.fromkeys(line for statement in inputs for line in statement.assumptions)
    warnings = [(spending.dataset, delta_warning(delta, spending.units)) for spending in spendings]
    sentences.update({f"{name}: {warning}.": None for name, warning in warnings if warning})
    if disjoint and len({spending.dataset for spending in spendings}) > 1:
        owners = [tuple(dict.fromkeys(s.dataset for s in part.spendings)) for part in inputs]
        checked = disjoint if isinstance(disjoint, OwnersChecked) else None
        sentences[words.disjointness(owners, checked)] = None
    return tuple(sentences)


def check(statement: Statement, inputs: Sequence[Statement]) -> None:
    """Whether a statement assumes what follows from it, and says nothing else.

    Args:
        statement: its spendings are checked.
        inputs: of a merge; their own assumptions are checked.

    Raises:
        PrivacyError: an assumption is left out, or one doesn't follow from the fields.
    """
    if statement.claim is None:
        needed: tuple[str, ...] = ()
    elif statement.kind == "merge":
        needed = of_merge(inputs, statement.spendings, statement.claim.delta, statement.disjoint)
    else:
        needed = of_training(statement.spendings[0], statement.published)
    for sentence in needed:
        if sentence not in statement.assumptions:
            raise PrivacyError(f"the {statement.kind} statement leaves out an assumption: {sentence}")
    for sentence in dict.fromkeys(statement.assumptions):
        if sentence not in needed and not (statement.claim and _may_stand(sentence, statement)):
            raise PrivacyError(
                f"the {statement.kind} statement holds a sentence that doesn't follow from its fields: "
                f"{sentence[:_LONGEST]!r}"
            )


def _may_stand(sentence: str, statement: Statement) -> bool:
    if statement.kind == "merge":
        before, after = words.public_statistics([_HOLE]).split(_HOLE)
        middle = sentence.removeprefix(before).removesuffix(after)
        named = middle.isprintable() and 0 < len(middle) <= _LONGEST and ". " not in middle
        return named and sentence == f"{before}{middle}{after}"
    dataset = statement.spendings[0].dataset
    if sentence in (words.labels_read(dataset), words.text_routed(dataset)):
        return True
    before = words.labels_between(dataset, 0, 1).split(" 0 to ", 1)[0]
    found = re.match(r" (\S+) to (\S+); this range", sentence.removeprefix(before))
    try:
        low, high = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
    except ValueError:
        return False
    return low < high and sentence == words.labels_between(dataset, low, high)
