"""The privacy card: every fact of the statement is on it, nothing runs or loads, nothing escapes."""

from __future__ import annotations

import dataclasses
import datetime
from html.parser import HTMLParser

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from confide.privacy.composition import compose, training_statement, worst_case
from confide.privacy.events import queries
from confide.privacy.meaning import advantage
from confide.privacy.queries import Query
from confide.privacy.signature import fingerprint, public_text, sign
from confide.privacy.statement import Base, LedgerEntry, OwnersChecked, Statement
from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream
from confide.privacy.words import round_up
from confide.release.verify import Check
from confide.report.privacy_card import Card, _percent, card, html

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
CHECKS = (Check("weights", "ok", "as stated"), Check("ledger", "note", "not compared"))


def _run(dataset: str, sigma: float = 4.0) -> Statement:
    stream = Stream(
        name="all",
        groups=(ParameterGroup("encoder", ("w",), 1e-3, anchored=False),),
        steps=50,
        draw="all",
        sampling_rate=0.2,
        clipping=Clipping("flat", 1.5),
        noise_multiplier=sigma,
        denominator=20.0,
        ascent="paired",
        ascent_radius=0.1,
        ascent_noise=7.5,
    )
    return training_statement(
        Schedule((stream,), queries=(Query("energy", "gram", (90.0, 95.0)),)),
        delta=1e-6,
        dataset=dataset,
        units=12345,
        run=f"run-{dataset}",
        base=Base(name="base", hash="0" * 64),
        steps_run={"all": 49},
        ledger=LedgerEntry(entry="a" * 64, head="b" * 64),
    )


@pytest.fixture(scope="module")
def merged() -> Statement:
    checked = OwnersChecked(how="hashed ids compared", when=datetime.date(2026, 11, 30))
    parts = [sign(_run("clinic"), KEY), _run("ward", 5.0)]
    return sign(compose(parts, disjoint=checked, base=parts[0].base), KEY)


@pytest.fixture(scope="module")
def found(merged: Statement) -> Card:
    return card(merged, CHECKS, ["triage", "letters"])


def text(card: Card) -> str:
    parts = [card.title, card.headline, card.summary]
    for section in card.sections:
        parts += [section.title, *section.paragraphs, *(part for point in section.points for part in point)]
        parts += [cell for table in section.tables for row in (table.header, *table.rows) for cell in row]
    return "\n".join(parts)


def test_every_fact_is_there(merged: Statement, found: Card) -> None:
    assert merged.claim is not None
    together = worst_case(merged)
    assert together is not None
    said = text(found)
    for fact in (
        "triage, letters",
        f"ε = {round_up(merged.claim.epsilon, 4)}, δ = 1e-06",
        _percent((1 + advantage(merged.claim)) / 2),
        "12,345",
        "7.5, 4",
        "1.5",
        "hashed ids compared, 2026-11-30",
        f"ε would be {round_up(together.epsilon, 4)}",
        fingerprint(public_text(KEY)),
        public_text(KEY),
        "nobody asserts that noise was added",
        "a" * 64,
        "b" * 64,
        "not compared",
        *merged.assumptions,
    ):
        assert fact in said, fact
    titles = [section.title for section in found.sections]
    assert titles[:3] == ["What an attacker can gain", "Against whom", "What is not protected"]
    for table in (table for section in found.sections for table in section.tables):
        assert all(len(row) == len(table.header) for row in table.rows)


def test_the_queries_are_counted(found: Card) -> None:
    streams = next(s for s in found.sections if s.title == "What was asked of the records").tables[1]
    assert [dict(zip(streams.header, row, strict=True))["queries"] for row in streams.rows] == [
        "100",
        "2",
    ] * 2
    assert [row[-3:-1] for row in streams.rows] == [("50", "49"), ("1", "–")] * 2
    spent = _run("clinic").spendings[0].event
    assert spent is not None
    assert queries(spent) == 102


def test_no_claim_promises_nothing(merged: Statement) -> None:
    nothing = compose([_run("clinic"), None], disjoint=True, base=merged.base)
    found = card(nothing, CHECKS, [])
    assert found.headline == "No claim"
    assert "may reveal the records" in found.summary
    assert not any("attacker" in section.title for section in found.sections)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_says_the_same_and_loads_nothing(found: Card) -> None:
    hostile = dataclasses.replace(found, title="<script>alert(1)</script> & Söhne")
    page = html(hostile)
    read = _Page()
    read.feed(page)
    assert "script" not in read.tags
    assert read.links == []
    assert "url(" not in page
    assert "@import" not in page
    assert "@media print" in page
    assert "size: A4" in page
    shown = "".join(read.words)
    assert "<script>alert(1)</script> & Söhne" in shown
    for line in text(found).splitlines()[1:]:
        assert line in shown, line


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.5, "50 %"),
        (0.12345, "12.4 %"),
        (0.9995, "99.95 %"),
        (0.99999, "99.999 %"),
        (1.0, "100 %"),
        (0.0, "0 %"),
    ],
)
def test_shares_are_rounded_up(share: float, shown: str) -> None:
    assert _percent(share) == shown
