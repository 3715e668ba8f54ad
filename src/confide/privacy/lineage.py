"""The statements in a statement: a merge carries those of its inputs, and they may be merges too.

One statement often comes in by several ways, as in a merge of two merges of one model. Statements of equal
content are one `Lineage`, so whatever is looked at once in each is looked at once for each content, and the
time grows with what there is to read and not with the number of ways through it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from confide.errors import PrivacyError
from confide.privacy.chain import canonical
from confide.privacy.disjointness import Pairs, apart
from confide.privacy.disjointness import canonical as canonical_name
from confide.privacy.statement import Said, Statement, parse

DEEPEST = 32
"""Most merges of merges of …: an honest chain has a few, and nothing deeper is followed."""
MOST = 2000
"""Most different statements in one."""
_TOO_DEEP = (
    f"merges of merges are nested more than {DEEPEST} deep, and no statement that deep is read; merge the "
    "models that they were made of at once"
)


@dataclass(frozen=True, eq=False)
class Lineage:
    """A statement and those of its inputs, read.

    Attributes:
        inputs: in the order of the merge; one object where two have the same content.
        depth: 0 for a training run, and 1 more than its deepest input for a merge.
    """

    statement: Statement
    inputs: tuple[Lineage, ...] = ()
    depth: int = 0

    @cached_property
    def names(self) -> frozenset[str]:
        """Canonical names of all data sets."""
        return frozenset(canonical_name(spending.dataset) for spending in self.statement.spendings)

    @cached_property
    def pairs(self) -> Pairs:
        """Data sets that were said to share no unit, here or in an input."""
        return apart_in(self.inputs, disjoint=self.statement.disjoint is not None)

    def every(self) -> Iterator[Lineage]:
        """This one and all below, each content once, inputs first."""
        seen: set[Lineage] = set()

        def below(part: Lineage) -> Iterator[Lineage]:
            if part not in seen:
                seen.add(part)
                for one in part.inputs:
                    yield from below(one)
                yield part

        yield from below(self)


def apart_in(inputs: Sequence[Lineage], *, disjoint: bool) -> Pairs:
    """Pairs of data sets of a merge that were said to share no unit."""
    return apart([part.names for part in inputs], [part.pairs for part in inputs], disjoint=disjoint)


def merged(statement: Statement, inputs: tuple[Lineage, ...]) -> Lineage:
    """The lineage of a statement whose inputs are known.

    Raises:
        PrivacyError: it is nested deeper than `DEEPEST`.
    """
    depth = 1 + max(part.depth for part in inputs) if inputs else 0
    if depth > DEEPEST:
        raise PrivacyError(_TOO_DEEP)
    return Lineage(statement, inputs, depth)


class Reader:
    """Reads statements within one another, each content once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Lineage] = {}
        self._contents: dict[int, tuple[Said, bytes]] = {}  # held, so that no other object gets its id

    def trace(self, statement: Statement) -> Lineage:
        """A statement with those of its inputs, at any depth.

        Raises:
            PrivacyError: one can't be read (the message says which), or there are too many or too deep.
        """
        parts = [self._input(said, number) for number, said in enumerate(statement.inputs, start=1)]
        return merged(statement, tuple(parts))

    def _input(self, said: Said, number: int) -> Lineage:
        content = self._content(said, 1)
        if content not in self._known:
            if len(self._known) >= MOST:
                raise PrivacyError(f"more than {MOST} statements are nested in one, and no more are read")
            part = parse(said, f"the statement of input {number}")
            try:
                self._known[content] = self.trace(part)
            except PrivacyError as error:
                raise PrivacyError(f"input {number}: {error}") from None
        return self._known[content]

    def _content(self, said: Said, depth: int) -> bytes:
        """A hash of everything in it, made of those of its inputs: no level is read again for the next."""
        if id(said) in self._contents:
            return self._contents[id(said)][1]
        if depth > DEEPEST:
            raise PrivacyError(_TOO_DEEP)
        inputs = said.get("inputs")
        if isinstance(inputs, list | tuple) and all(isinstance(part, dict) for part in inputs):
            own = b"inputs" + b"".join(self._content(part, depth + 1) for part in inputs)
            rest = {name: value for name, value in said.items() if name != "inputs"}
        else:
            own, rest = b"", said
        content = hashlib.sha256(hashlib.sha256(own).digest() + canonical(rest).encode()).digest()
        self._contents[id(said)] = (said, content)
        return content


def trace(statement: Statement) -> Lineage:
    """A statement with those of its inputs, at any depth.

    Raises:
        PrivacyError: one can't be read (the message says which), or there are too many or too deep.
    """
    return Reader().trace(statement)
