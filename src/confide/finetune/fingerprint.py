"""What must stay the same for a run to go on with the same result: records, base, settings, versions."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from confide.finetune.prepare import Prepared
from confide.finetune.settings import Settings
from confide.gradients.keys import Key
from confide.privacy.statement import Base
from confide.release.hashes import file_hash

PRIVATE = ("records", "tokens")
"""Names whose values are keyed hashes of records, which say nothing to anybody."""

_LONGEST = 100  # letters of a value that fits a message

_PACKAGES = ("confide", "torch", "transformers", "peft", "numpy")


def fingerprint(
    prepared: Prepared,
    settings: Settings,
    base: Base,
    folder: Path,
    dataset: str,
    simulate: int | None,
    key: Key,
) -> dict[str, str]:
    """Name → value, the records first.

    Args:
        folder: of the base.
        key: the run's sampling key; records are hashed under it.
    """
    # An agreement is compared by its content, wherever the file lies (`finetune.run`).
    chosen = settings.model_dump(mode="json", exclude={"agreement"})
    return {
        "records": _keyed(key, _records(prepared)),
        "tokens": _keyed(key, prepared.tokens()),
        "dataset": dataset,
        "base": f"{base.name} ({base.hash})",
        "base's config.json": file_hash(folder / "config.json"),
        **{name: json.dumps(value) for name, value in chosen.items()},
        "simulate": str(simulate),
        **{f"the version of {name}": version(name) for name in _PACKAGES},
        "the number of threads (OMP_NUM_THREADS)": str(torch.get_num_threads()),
        "the processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def difference(began: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """What of `now` isn't as it began, in words; None where all is."""
    for name, value in now.items():
        if began.get(name) == value:
            continue
        if name in PRIVATE:
            return (
                f"the {name} are not those it began with. Noise that was drawn for one set of records must "
                "never meet another"
            )
        before = began.get(name)
        if len(f"{before}{value}") > _LONGEST:
            return f"{name} isn't what it was when it began, so the result would be another"
        return f"{name} was {before} when it began and is {value} now, so the result would be another"
    return None


def _records(prepared: Prepared) -> Iterator[bytes]:
    task = prepared.task
    yield json.dumps([task.name, task.labels, task.labels_from, task.metric]).encode()
    yield task.problem.model_dump_json().encode()
    for records in (task.train, task.test):
        units = records.units
        yield json.dumps([len(records), units.name, units.count, units.rows_per_unit]).encode()
        yield from records.content()


def _keyed(key: Key, parts: Iterator[bytes]) -> str:
    hashed = hashlib.blake2b(key=key.secret, person=b"confide.records", digest_size=32)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.hexdigest()
