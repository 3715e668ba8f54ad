"""Schedules that several files of this room test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from confide.privacy.streams import Clipping, ParameterGroup, Schedule, Stream

MakeStream = Callable[..., Stream]


@pytest.fixture
def stream() -> MakeStream:
    """A small stream; keywords replace its fields."""

    def make(name: str = "all", **fields: object) -> Stream:
        parameters = fields.pop("parameters", (f"{name}.weight",))
        values: dict[str, object] = {
            "name": name,
            "groups": (ParameterGroup("encoder", parameters, 1e-3, anchored=False),),  # type: ignore[arg-type]
            "steps": 50,
            "draw": name,
            "sampling_rate": 0.02,
            "clipping": Clipping("flat", 1.0),
            "noise_multiplier": 1.0,
            "denominator": 20.0,
        }
        return Stream(**(values | fields))  # type: ignore[arg-type]

    return make


@pytest.fixture
def schedule(stream: MakeStream) -> Callable[..., Schedule]:
    """A schedule of one stream; keywords replace the stream's fields."""

    def make(unit: str = "record", adjacency: str = "add-or-remove-one", **fields: object) -> Schedule:
        return Schedule((stream(**fields),), unit, adjacency)  # type: ignore[arg-type]

    return make
