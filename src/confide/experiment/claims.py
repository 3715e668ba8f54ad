"""What a study claims, in sentences."""

from __future__ import annotations

from collections.abc import Mapping

from confide.experiment.plan import Plan
from confide.privacy.composition import compose, per_dataset
from confide.privacy.statement import Claim, Statement
from confide.privacy.words import round_up


def largest_of(statements: list[Statement]) -> Claim | None:
    """What holds for each of several task models; None if one of them claims nothing."""
    claims = [statement.claim for statement in statements if statement.claim is not None]
    if len(claims) < len(statements):
        return None
    worst = max(claims, key=lambda claim: claim.epsilon)
    return worst.model_copy(update={"delta": max(claim.delta for claim in claims)})


def claims_of(plan: Plan, statements: Mapping[tuple[str, int], list[Statement]]) -> tuple[str, ...]:
    """Sentences: what the private models of a study guarantee, and a merge of them, and all of them together.

    Args:
        statements: by method and seed, those of its tasks.
    """
    largest = {key: largest_of(each) for key, each in statements.items()}
    claims = {key: claim for key, claim in largest.items() if claim is not None}
    if not claims:
        return ("No method of this study is private, so nothing is claimed.",)
    methods = ", ".join(dict.fromkeys(method for method, _ in claims))
    epsilon = round_up(max(claim.epsilon for claim in claims.values()))
    delta = round_up(max(claim.delta for claim in claims.values()), 3)
    lines = [
        f"Every model of {methods} is (ε, δ)-differentially private for adding or removing any one unit of "
        f"its task's training data, with ε at most {epsilon} and δ at most {delta}. The statement in each "
        "release says what a unit is, and holds the events from which anybody can recompute this.",
    ]
    if plan.merges:
        lines.append(
            "A merge costs each unit what its own task's model cost: the tasks are declared to share no "
            "record, and this run found no text of one in another."
            if plan.disjoint
            else "The tasks are not declared disjoint, so a merge costs the sum of its models' losses."
        )
    together = compose(
        [statement for key in claims for statement in statements[key]],
        disjoint=plan.disjoint is not None,
        base=statements[next(iter(claims))][0].base,
        weights={},
    )
    costs = per_dataset(together)
    if len(claims) > 1 and costs:
        most = max(costs.values(), key=lambda claim: claim.epsilon)
        spent = f"{round_up(most.epsilon)} at δ = {round_up(most.delta, 3)}"
        lines.append(
            f"The claim is for one model of a task. Whoever publishes all {len(claims)} private ones of a "
            f"task spends up to ε = {spent} on its records."
        )
    return tuple(lines)
