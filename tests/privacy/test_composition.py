from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from confide.errors import PrivacyError
from confide.privacy import lineage, words
from confide.privacy import statement as statements
from confide.privacy.accountant import epsilon
from confide.privacy.composition import (
    check,
    compose,
    new_run,
    per_dataset,
    recompute,
    training_statement,
    worst_case,
)
from confide.privacy.events import Composed
from confide.privacy.statement import Base, OwnersChecked, Statement
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream

BASE = Base(name="some-base", hash="0" * 64)


def _statement(dataset: str = "a", sigma: float = 4.0, **options: Any) -> Statement:
    schedule = Schedule(
        (
            Stream(
                name="all",
                groups=(ParameterGroup("encoder", ("w",), 1e-3, anchored=False),),
                steps=options.pop("steps", 50),
                draw="all",
                sampling_rate=0.2,
                clipping=Clipping("flat", 1.0),
                noise_multiplier=sigma,
                denominator=20.0,
            ),
        ),
        options.pop("unit", "record"),
        options.pop("adjacency", "add-or-remove-one"),
    )
    defaults: dict[str, Any] = {"delta": 1e-5, "units": 1000, "run": new_run(), "base": BASE}
    return training_statement(schedule, dataset=dataset, steps_run={"all": 50}, **(defaults | options))


def _merge(*inputs: Statement | None, disjoint: bool) -> Statement:
    return compose(inputs, disjoint=disjoint, base=BASE)


def _claimed(statement: Statement) -> float:
    assert statement.claim is not None, statement.no_claim
    return statement.claim.epsilon


def _altered(statement: Statement, *path: str | int, to: Any) -> Statement:
    """The statement with one value of its JSON replaced, as a forger would."""
    values = statement.to_json()
    place: Any = values
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return Statement.model_validate_json(json.dumps(values))


def test_training_claims_what_its_schedule_costs() -> None:
    statement = _statement()
    schedule = statement.spendings[0].schedule
    assert schedule is not None
    assert statement.claim == epsilon(schedule.event(), 1e-5)
    assert recompute(statement) == statement.claim
    check(statement)
    assert any("Hyper-parameters" in line for line in statement.assumptions)
    assert any("final model" in line for line in statement.assumptions)


def test_planned_steps_are_charged_whatever_ran() -> None:
    short = _statement().model_copy(deep=True)
    stopped = _altered(short, "spendings", 0, "steps_run", to={"all": 3})
    check(stopped)
    assert recompute(stopped) == short.claim


def test_round_trip(tmp_path: Path) -> None:
    merged = _merge(_statement("a"), _statement("b", sigma=3.7312345678901234), disjoint=True)
    (tmp_path / statements.FILE_NAME).write_text(json.dumps(merged.to_json()))
    again = statements.read(tmp_path)
    assert again == merged
    check(again)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "confide.statement/2"}'])
def test_truncated_or_newer_statement(tmp_path: Path, text: str) -> None:
    (tmp_path / statements.FILE_NAME).write_text(text)
    with pytest.raises(PrivacyError, match="not a valid statement"):
        statements.read(tmp_path)
    with pytest.raises(PrivacyError, match="no privacy is claimed"):
        statements.read(tmp_path / "nowhere")


def test_no_noise_or_fixed_keys_claim_nothing() -> None:
    plain = _statement(sigma=0.0, delta=None)
    assert plain.claim is None
    assert "no noise" in (plain.no_claim or "")
    simulated = _statement(simulated=True)
    assert simulated.claim is None
    assert "simulation" in (simulated.no_claim or "")
    for statement in (plain, simulated):
        check(statement)
        assert recompute(statement) is None
        merged = _merge(statement, _statement("b"), disjoint=True)
        assert merged.claim is None
        assert "a" in (merged.no_claim or "")
        check(merged)
    with pytest.raises(PrivacyError, match="no delta"):
        _statement(delta=None)
    with pytest.raises(PrivacyError, match="were planned"):
        _statement(steps=20)


def test_disjoint_is_the_maximum_at_the_largest_delta() -> None:
    cheap, dear = _statement("a", sigma=8.0, delta=1e-6), _statement("b", sigma=3.0, delta=1e-5)
    merged = _merge(cheap, dear, disjoint=True)
    assert merged.claim == dear.claim
    assert merged.disjoint == "declared"
    assert any("share no unit" in line for line in merged.assumptions)
    swapped = _merge(_statement("a", sigma=3.0, delta=1e-6), _statement("b", sigma=8.0), disjoint=True)
    assert swapped.claim is not None
    assert swapped.claim.delta == 1e-5
    assert swapped.claim.epsilon == pytest.approx(_claimed(dear), rel=1e-9)
    assert set(per_dataset(swapped)) == {"a", "b"}
    check(merged)


def test_undeclared_data_sets_compose() -> None:
    a, b = _statement("a"), _statement("b")
    merged = _merge(a, b, disjoint=False)
    events = [spending.event for spending in merged.spendings]
    assert _claimed(merged) == pytest.approx(
        epsilon(Composed(tuple(e for e in events if e)), 1e-5).epsilon, rel=1e-9
    )
    assert _claimed(merged) > 1.2 * _claimed(a)
    declared = _merge(a, b, disjoint=True)
    together = worst_case(declared)
    assert together is not None
    assert together.epsilon == pytest.approx(_claimed(merged))


def test_two_runs_on_one_data_set_are_never_disjoint() -> None:
    merged = _merge(_statement("a"), _statement("a"), disjoint=True)
    assert _claimed(merged) == pytest.approx(
        _claimed(_merge(_statement("a"), _statement("b"), disjoint=False)), rel=1e-9
    )


def test_one_run_counts_once_through_merges_of_merges() -> None:
    a, b, c = _statement("a"), _statement("b"), _statement("c")
    once = _merge(a, b, c, disjoint=False)
    nested = _merge(_merge(a, b, disjoint=False), _merge(b, c, disjoint=False), a, disjoint=False)
    assert len(nested.spendings) == 3
    assert _claimed(nested) == pytest.approx(_claimed(once), rel=1e-9)
    assert _claimed(_merge(a, a, disjoint=False)) == _claimed(a)
    check(nested)


def test_overlap_in_an_earlier_merge_stays_composed() -> None:
    inner = _merge(_statement("a"), _statement("b"), disjoint=True)
    outer = _merge(inner, _statement("c"), disjoint=False)
    assert _claimed(outer) > 1.4 * _claimed(inner)


def test_what_an_earlier_merge_left_undeclared_stays_composed() -> None:
    """Who declares that two models share nobody says nothing about the data sets within one of them."""
    a, b, c = _statement("a"), _statement("b"), _statement("c", sigma=6.0)
    inner = _merge(a, b, disjoint=False)
    outer = _merge(inner, c, disjoint=True)
    assert _claimed(outer) == pytest.approx(_claimed(inner), rel=1e-9)
    assert _claimed(outer) > _claimed(_merge(a, b, c, disjoint=True))
    check(outer)


def test_what_an_earlier_merge_declared_holds_on() -> None:
    """A unit is in a or in b, and perhaps in c too: the dearer of both pairs, not all three."""
    a, b, c = _statement("a"), _statement("b", sigma=5.0), _statement("c", sigma=6.0)
    outer = _merge(_merge(a, b, disjoint=True), c, disjoint=False)
    assert _claimed(outer) == pytest.approx(_claimed(_merge(a, c, disjoint=False)), rel=1e-9)
    assert _claimed(outer) < _claimed(_merge(a, b, c, disjoint=False))
    assert any("a and b share no unit" in line for line in outer.assumptions)
    check(outer)


def test_a_data_set_in_two_inputs_is_apart_from_nothing_by_that() -> None:
    a, b, c = _statement("a"), _statement("b"), _statement("c", sigma=9.0)
    inner = _merge(a, b, disjoint=False)
    outer = _merge(inner, a, c, disjoint=True)
    assert _claimed(outer) == pytest.approx(_claimed(inner), rel=1e-9)


def test_data_sets_that_one_input_keeps_together_are_together() -> None:
    """Where two declarations contradict each other, the one that claims less holds."""
    a, c = _statement("a"), _statement("c", sigma=5.0)
    left_open = _merge(a, c, disjoint=False)
    for outer in (
        _merge(a, c, left_open, disjoint=True),
        _merge(_merge(a, c, disjoint=True), left_open, disjoint=False),
    ):
        assert _claimed(outer) == pytest.approx(_claimed(left_open), rel=1e-9)
        check(outer)


TREE = st.recursive(
    st.sampled_from("abcd"),
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=3), st.booleans()),
    max_leaves=5,
)
RUNS = {
    name: _statement(name, sigma=sigma) for name, sigma in zip("abcd", (3.0, 4.0, 5.0, 12.0), strict=True)
}


@settings(max_examples=12, deadline=None)
@example((["a", "c", (["a", "c"], False)], True))
@example(([(["a", "c"], True), (["a", "c"], False)], False))
@given(TREE)
def test_no_merge_claims_less_than_any_of_its_inputs(tree: Any) -> None:
    """The invariant of composition: more inputs never cost less, and everything together is never passed."""

    def build(node: Any) -> Statement:
        if isinstance(node, str):
            return RUNS[node]
        parts = [build(part) for part in node[0]]
        merged = _merge(*parts, disjoint=node[1])
        assert _claimed(merged) >= max(_claimed(part) for part in parts) * (1 - 1e-6)
        together = worst_case(merged)
        assert together is not None
        assert _claimed(merged) <= together.epsilon * (1 + 1e-6)
        return merged

    found = build(tree)
    check(found)
    again = Statement.model_validate_json(json.dumps(found.to_json()))
    assert again == found
    check(again)


def test_owners_who_checked_are_named() -> None:
    checked = OwnersChecked(how="hashed ids compared", when=datetime.date(2026, 11, 30))
    merged = compose([_statement("a"), _statement("b")], disjoint=checked, base=BASE)
    assert merged.disjoint == checked
    assert merged.claim == _merge(_statement("a"), _statement("b"), disjoint=True).claim
    assert any("owners checked it (hashed ids compared, 2026-11-30)" in line for line in merged.assumptions)
    again = Statement.model_validate_json(json.dumps(merged.to_json()))
    assert again == merged
    check(again)


def test_a_merge_says_what_its_inputs_say() -> None:
    a, b = _statement("a"), _statement("b", sigma=5.0)
    honest = _merge(a, b, disjoint=False)
    quieter = _statement("b", sigma=50.0, run=b.spendings[0].run)
    other_base = Base(name="other", hash="1" * 64)
    forgeries = {
        "doesn't carry its inputs": honest.model_copy(update={"inputs": ()}),
        "spendings aren't those of its inputs": honest.model_copy(
            update={"inputs": (a.to_json(), quieter.to_json())}
        ),
        "aren't those": honest.model_copy(update={"inputs": (a.to_json(),)}),
        "input 2: the claim doesn't hold": _altered(honest, "inputs", 1, "claim", "epsilon", to=0.01),
        "its input 1 claims nothing": _altered(
            _altered(_altered(honest, "inputs", 0, "claim", to=None), "inputs", 0, "no_claim", to="no"),
            *("inputs", 0, "assumptions"),
            to=[],
        ),
        "leaves out an assumption": honest.model_copy(update={"assumptions": honest.assumptions[1:]}),
        "another base": honest.model_copy(update={"base": other_base}),
        "input 1 is not a valid statement": _altered(honest, "inputs", 0, to={"kind": "gift"}),
        "no inputs of a merge": a.model_copy(update={"inputs": (b.to_json(),)}),
        "claim doesn't hold": honest.model_copy(update={"disjoint": "declared", "claim": a.claim}).model_copy(
            update={"inputs": (_merge(a, b, disjoint=False).to_json(),)}
        ),
    }
    for message, forged in forgeries.items():
        with pytest.raises(PrivacyError, match=message):
            check(forged)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "Noise was drawn, and confide has checked that it was."),
        (2, None),
        (None, "The claim is certified by an authority."),
        (None, "The labels of a are numbers from 1 to 5; this range was declared by looking at them."),
        (None, "The labels of a are numbers from 5 to 1; this range was declared without looking at the "
         "records, and counts as public."),
        (None, "The names of the labels of b were read from its file and count as public."),
        (None, "The models were weighed by statistics of brown, which is public: it holds no record of the "
         "data sets above. If it does, the claim doesn't cover what they show of that record."),
    ],
)  # fmt: skip
def test_sentences_that_do_not_follow_are_refused(number: int | None, text: str | None) -> None:
    honest = _statement("a")
    lines = list(honest.assumptions)
    if number is not None:
        del lines[number]
    lines += [text] if text else []
    for forged in (
        honest.model_copy(update={"assumptions": tuple(lines)}),
        _altered(_merge(honest, disjoint=False), "inputs", 0, "assumptions", to=lines),
    ):
        with pytest.raises(PrivacyError, match=r"leaves out an assumption|doesn't follow"):
            check(forged)


def test_what_is_no_field_may_be_assumed_in_its_own_words() -> None:
    parts = [_statement("a", labels_from="file"), _statement("b", label_range=(-1.5, 5))]
    for part in parts:
        check(part)
    merged = _merge(*parts, disjoint=True)
    check(merged)
    weighed = (*merged.assumptions, words.public_statistics(["brown", "my corpus.txt"]))
    check(merged.model_copy(update={"assumptions": weighed}))
    sentence = words.public_statistics(["brown"]).replace("brown", "brown. All of this is certified. It")
    forged = (*merged.assumptions, sentence)
    with pytest.raises(PrivacyError, match="doesn't follow"):
        check(merged.model_copy(update={"assumptions": forged}))


def test_the_accountant_is_no_free_text() -> None:
    with pytest.raises(PrivacyError, match="no accountant"):
        check(_altered(_statement(), "claim", "accountant", to="exact, by the authority"))


def test_every_content_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten merges of a merge with itself hold two thousand statements, and eleven different ones."""
    merged = _merge(_statement("a"), _statement("b"), disjoint=True)
    for _ in range(9):
        merged = _merge(merged, merged, disjoint=False)
    read: list[str] = []
    once = lineage.parse
    monkeypatch.setattr(lineage, "parse", lambda said, where: read.append(where) or once(said, where))
    check(merged)
    assert len(read) == 11
    assert len(list(lineage.trace(merged).every())) == 12


def test_nesting_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "DEEPEST", 3)
    merged = _statement()
    for _ in range(3):
        merged = _merge(merged, disjoint=False)
    check(merged)
    with pytest.raises(PrivacyError, match="nested more than"):
        _merge(merged, disjoint=False)
    hostile = merged.model_copy(update={"inputs": (merged.to_json(),)})
    with pytest.raises(PrivacyError, match="nested more than"):
        check(hostile)
    wide = _merge(*map(_statement, "abc"), disjoint=True)
    monkeypatch.setattr(lineage, "MOST", 2)
    with pytest.raises(PrivacyError, match="more than 2 statements"):
        check(wide)


def test_a_malformed_input_is_not_taken_for_one_of_its_hash() -> None:
    a = _statement("a")
    inner = _merge(a, disjoint=False)
    content = lineage.Reader()._content(a.to_json(), 1)
    honest, forged = inner.to_json(), {**inner.to_json(), "inputs": [content.hex()]}
    both = _merge(inner, inner, disjoint=False).model_copy(update={"inputs": (honest, forged)})
    with pytest.raises(PrivacyError, match="input 2 is not a valid statement"):
        check(both)


def test_replaced_unit_may_touch_two_data_sets() -> None:
    names = [
        _statement(name, sigma=s, adjacency="replace-one") for name, s in (("a", 4), ("b", 4.8), ("c", 12))
    ]
    merged = _merge(*names, disjoint=True)
    pair = _merge(*names[:2], disjoint=False)
    assert _claimed(merged) == pytest.approx(_claimed(pair), rel=1e-9)
    assert _claimed(merged) > _claimed(names[0])
    check(merged)


def test_mixed_adjacencies_are_priced_under_the_dearer() -> None:
    usual, replaced = _statement("a"), _statement("b", adjacency="replace-one")
    merged = _merge(usual, replaced, disjoint=False)
    both = _merge(_statement("a", adjacency="replace-one"), replaced, disjoint=False)
    assert _claimed(merged) == pytest.approx(_claimed(both), rel=1e-9)


def test_mixed_units_have_no_common_claim() -> None:
    merged = _merge(_statement("a"), _statement("b", unit="user"), disjoint=False)
    assert merged.claim is None
    assert "different units" in (merged.no_claim or "")
    assert _merge(_statement("a"), _statement("b", unit="user"), disjoint=True).claim is not None
    same = _merge(_statement("a"), _statement("a", unit="user"), disjoint=True)
    assert same.claim is None


def test_missing_statement_means_no_claim_for_good() -> None:
    merged = _merge(_statement("a"), None, disjoint=True)
    assert merged.claim is None
    assert "input 2" in (merged.no_claim or "")
    again = _merge(merged, _statement("b"), disjoint=True)
    assert again.claim is None
    assert again.assumptions == ()
    with pytest.raises(PrivacyError, match="nothing"):
        compose([], disjoint=True, base=BASE)


def test_inputs_that_disagree_about_a_run() -> None:
    honest = _statement("a")
    other = _altered(honest, "spendings", 0, "units", to=2000)
    with pytest.raises(PrivacyError, match="altered"):
        _merge(honest, other, disjoint=True)


def test_forgeries_are_refused() -> None:
    honest = _statement("a")
    event = ("spendings", 0, "event", "events", 0)
    forgeries = {
        "claim doesn't hold": _altered(honest, "claim", "epsilon", to=_claimed(honest) * 0.999),
        "by RDP": _altered(honest, "claim", "epsilon_rdp", to=0.01),
        "isn't what its schedule": _altered(honest, *event, "steps", to=5),
        "differ from the schedule": _altered(honest, "spendings", 0, "unit", to="user"),
        "claims nothing": _altered(
            _altered(honest, "spendings", 0, "event", to=None), "spendings", 0, "no_claim", to="x"
        ),
        "doesn't say why": _altered(honest, "spendings", 0, "event", to=None),
        "holds one spending": _altered(honest, "spendings", to=[]),
        "no delta": _altered(honest, "spendings", 0, "delta", to=None),
        "were planned": _altered(honest, "spendings", 0, "steps_run", to={"all": 51}),
    }
    for message, forged in forgeries.items():
        with pytest.raises(PrivacyError, match=message):
            check(forged)
    merged = _merge(honest, _statement("b"), disjoint=False)
    with pytest.raises(PrivacyError, match="claim doesn't hold"):
        check(merged.model_copy(update={"claim": honest.claim}))
    with pytest.raises(PrivacyError, match="twice"):
        check(merged.model_copy(update={"spendings": merged.spendings * 2}))
    with pytest.raises(PrivacyError, match="say why"):
        check(merged.model_copy(update={"claim": None}))
    smaller_delta = _altered(honest, "claim", "delta", to=1e-9)
    with pytest.raises(PrivacyError, match="claims something at delta = 1e-09"):
        check(smaller_delta)


def test_negative_or_infinite_claims_are_no_statements() -> None:
    for value in (-1.0, "Infinity"):
        with pytest.raises(ValueError, match="epsilon"):
            _altered(_statement(), "claim", "epsilon", to=value)


@pytest.mark.parametrize(
    "bounds", [(0.0, 1.0), (1700000000.0, 1700000100.0), (0.12345678, 0.12345679), (-1e300, 1e300)]
)
def test_any_range_of_labels_may_stand(bounds: tuple[float, float]) -> None:
    """All digits are printed, so that bounds that are near each other stay two."""
    named = _statement("x are numbers from 5 to 1; this range", label_range=bounds)
    check(named)
    assert sum("this range was declared" in line for line in named.assumptions) == 1


@pytest.mark.parametrize("sources", [["wiki. v2.txt"], ["a" * 500], [f"corpus-{n}" * 9 for n in range(40)]])
def test_any_source_of_public_statistics_may_be_named(sources: list[str]) -> None:
    merged = _merge(_statement(), _statement("b"), disjoint=True)
    sentence = words.public_statistics(sources)
    check(merged.model_copy(update={"assumptions": (*merged.assumptions, sentence)}))


def test_the_claim_is_at_the_delta_of_the_runs() -> None:
    """At a larger one ε is smaller, and nothing would say that δ is weak."""
    honest = _statement()
    assert honest.claim is not None
    cheap = epsilon(honest.spendings[0].event, 0.05, "add-or-remove-one")  # type: ignore[arg-type]
    claim = honest.claim.model_copy(
        update={"epsilon": cheap.epsilon, "epsilon_rdp": None, "epsilon_lower": None, "delta": 0.05}
    )
    with pytest.raises(PrivacyError, match=r"claims something at delta = 0\.05"):
        check(honest.model_copy(update={"claim": claim}))


def test_every_weak_delta_of_a_merge_is_named() -> None:
    """Two runs on one data set may count its units otherwise."""
    big, small = _statement(units=100_000, delta=1e-6), _statement(units=100, delta=1e-2)
    for order in ((big, small), (small, big)):
        merged = _merge(*order, disjoint=False)
        assert sum(line.startswith("a: delta = 0.01") for line in merged.assumptions) == 2


def test_public_text_that_was_routed_is_an_assumption() -> None:
    plain, routed = _statement(), _statement(routed_text=True)
    (sentence,) = set(routed.assumptions) - set(plain.assumptions)
    assert "is public, as whoever named it declares" in sentence
    check(routed)
    altered = sentence.replace("none of it", "some of it")
    lines = tuple(altered if line == sentence else line for line in routed.assumptions)
    with pytest.raises(PrivacyError, match="doesn't follow from its fields"):
        check(routed.model_copy(update={"assumptions": lines}))


def test_assumptions_name_what_was_read_and_a_weak_delta() -> None:
    lines = " ".join(_statement(labels_from="file", delta=1e-3, unit="user").assumptions)
    assert "read from its file" in lines
    assert "random record" in lines
    assert "column user" in lines


@settings(max_examples=5, deadline=None)
@given(order=st.permutations([("a", 4.0), ("b", 6.0), ("a", 8.0)]), disjoint=st.booleans())
def test_order_of_inputs_is_irrelevant(order: list[tuple[str, float]], disjoint: bool) -> None:
    first = _merge(*(_statement(*item) for item in [("a", 4.0), ("b", 6.0), ("a", 8.0)]), disjoint=disjoint)
    other = _merge(*(_statement(*item) for item in order), disjoint=disjoint)
    assert _claimed(other) == pytest.approx(_claimed(first), rel=1e-6)
    assert _claimed(other) >= max(claim.epsilon for claim in per_dataset(other).values()) * (1 - 1e-9)


def test_every_run_has_its_own_name() -> None:
    assert len({new_run() for _ in range(100)}) == 100


def test_private_schedule_round_trips_through_json(schedule: Callable[..., Schedule]) -> None:
    spent = schedule(ascent="paired", ascent_radius=0.05, ascent_noise=2.0, noise_multiplier=0.1 + 0.2)
    statement = training_statement(
        spent, delta=1e-6, dataset="x", units=10, run="r", base=BASE, steps_run={"all": 1}
    )
    again = Statement.model_validate_json(json.dumps(statement.to_json()))
    assert again.spendings[0].schedule == spent
    check(again)


def test_names_that_differ_in_case_or_blanks_are_one_data_set() -> None:
    one, other = _statement("reviews 2026"), _statement(" Reviews  2026")
    assert _claimed(_merge(one, other, disjoint=True)) == _claimed(_merge(one, other, disjoint=False))


def test_a_merge_warns_when_its_delta_is_large_for_a_data_set() -> None:
    merged = _merge(_statement("small"), _statement("large", units=10**8), disjoint=True)
    assert any(line.startswith("large: delta") for line in merged.assumptions)


def test_an_event_in_which_nothing_was_asked_is_refused() -> None:
    forged = _altered(_statement(), "spendings", 0, "event", to={"events": [], "kind": "composed"})
    forged = _altered(forged, "spendings", 0, "schedule", to=None)
    with pytest.raises(PrivacyError, match="nothing was asked"):
        check(forged)


def test_one_data_set_under_two_spellings_is_never_apart() -> None:
    both = _merge(_statement("caf\u00e9"), _statement("cafe\u0301"), disjoint=True)
    assert _claimed(both) == _claimed(_merge(_statement("a"), _statement("a"), disjoint=True))
    with pytest.raises(PrivacyError, match="can't name a data set"):
        _statement("a\u200b")


def test_a_claim_beside_a_reason_why_there_is_none() -> None:
    good = _statement()
    (spending,) = good.spendings
    said = spending.model_copy(update={"no_claim": "its noise comes from a fixed key"})
    with pytest.raises(PrivacyError, match="has an event, but says that it claims nothing"):
        check(good.model_copy(update={"spendings": (said,)}))
    with pytest.raises(PrivacyError, match="claims something, and says that it doesn't"):
        check(good.model_copy(update={"no_claim": "none"}))
