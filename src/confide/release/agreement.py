"""What organisations that will merge agree on before they train: one small public file.

Its hash stands in every statement that was made under it, and the file itself in the release, so that a merge
can say what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from confide.errors import ConfigError
from confide.privacy.chain import canonical

FILE_NAME = "agreement.json"


class Agreement(BaseModel):
    """Everything in which models that are merged should be alike.

    Attributes:
        base: the public model's name.
        base_hash: of its encoder's content.
        tokenizer: hash of its tokenizer's files.
        max_length: tokens of a text.
        trainable: what is trained, with LoRA's shape.
        clipping, clipping_bound: how a unit's gradient is bounded.
        anchor, anchor_form: the pull to the base.
        experts: of mixtures of experts: whose experts are trained, and how; None of dense models.
        tasks: labels by task, in the order of the logits; empty leaves tasks open.
    """

    format: Literal["confide.agreement/1"] = "confide.agreement/1"
    base: str
    base_hash: str
    tokenizer: str
    max_length: int = Field(gt=2)
    trainable: dict[str, Any]
    clipping: str
    clipping_bound: float
    anchor: float
    anchor_form: str
    experts: dict[str, Any] | None = None
    tasks: dict[str, tuple[str, ...]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON, whatever the file's layout."""
        return "sha256:" + hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as the file holds them; of dense models nothing about experts."""
        return self.model_dump(mode="json", exclude={"experts"} if self.experts is None else None)

    def terms(self) -> dict[str, Any]:
        """Key → value, all but the tasks; parts of `trainable` and `experts` by themselves.

        The base goes by its hash.
        """
        value = self.model_dump(mode="json", exclude={"format", "base", "tasks", "trainable", "experts"})
        parts = {"trainable": self.trainable, "experts": self.experts or {}}
        nested = {f"{name}.{key}": own[key] for name, own in parts.items() for key in sorted(own)}
        return {**value, **nested}


def read(path: Path) -> Agreement:
    """Read an agreement.

    Raises:
        ConfigError: no such file, or not an agreement; names the key.
    """
    try:
        return Agreement.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"can't read the agreement {path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path} is no agreement: {where}: {first['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no agreement: it isn't JSON ({error})") from None


def differences(agreements: Mapping[str, Agreement]) -> tuple[str, ...]:
    """What isn't the same in all of them, a sentence for each key, with who has what.

    Args:
        agreements: by what messages call the model.
    """
    terms = {name: agreement.terms() for name, agreement in agreements.items()}
    for name, agreement in agreements.items():
        terms[name] |= {f"tasks.{task}": list(labels) for task, labels in agreement.tasks.items()}
    found = []
    for key in sorted({key for each in terms.values() for key in each}):
        values = {name: each.get(key) for name, each in terms.items()}
        if len({json.dumps(value) for value in values.values()}) > 1:
            found.append(f"{key}: " + ", ".join(f"{value} ({name})" for name, value in values.items()))
    return tuple(found)
