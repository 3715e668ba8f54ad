"""What a plan says of models before they are merged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from confide.merging.plan import Plan
from confide.privacy.composition import new_run, training_statement
from confide.privacy.statement import Base, Statement
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream


def trained(*blocks: int) -> Statement:
    """What a run states whose owners trained the experts of these blocks; of none, a dense one."""
    names = tuple(f"bert.encoder.layer.{block}.mlp.experts.up_proj" for block in blocks) or ("w",)
    stream = Stream(
        name="experts",
        groups=(ParameterGroup("encoder", names, 1e-3, anchored=False),),
        steps=2,
        draw="own",
        sampling_rate=0.1,
        clipping=Clipping("flat", 1.0),
        noise_multiplier=4.0,
        denominator=2.0,
        ownership="owner" if blocks else "all",
        experts=8 if blocks else 0,
    )
    return training_statement(
        Schedule((stream,)),
        delta=1e-5,
        dataset="a",
        units=100,
        run=new_run(),
        base=Base(name="base", hash="0" * 64),
        steps_run={"experts": 2},
    )


def disagreements(*statements: Statement | None) -> tuple[str, ...]:
    inputs = [SimpleNamespace(tasks=f"task-{n}", statement=each) for n, each in enumerate(statements)]
    plan: Any = SimpleNamespace(inputs=inputs)
    plan._experts = lambda: Plan._experts(plan)
    return Plan.disagreements(plan)


def test_experts_of_other_layers_are_told_without_an_agreement() -> None:
    assert disagreements(trained(3), trained(3)) == ()
    assert disagreements(trained(), trained()) == ()
    assert disagreements(trained(3), None) == ()
    (said,) = disagreements(trained(3), trained(5), trained())
    assert said == "blocks whose experts were trained: 3 (task-0), 5 (task-1), none (task-2)"
