"""What the options of `confide train` mean: settings, records, base; and what a run keeps of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.cli.output import spelled

if TYPE_CHECKING:
    from confide.finetune.base import PublicBase
    from confide.finetune.settings import Settings
    from confide.tasks.records import TaskData

_EXPERTS = {
    "variant": "variant",
    "layer": "layer",
    "public": "public",
    "shared_share": "shared_share",
    "expert_steps": "steps",
    "expert_learning_rate": "learning_rate",
    "expert_clipping": "clipping",
    "expert_clipping_bound": "clipping_bound",
    "record_weight": "record_weight",
    "diagnostics": "diagnostics",
}
"""Option → key of the settings of experts."""

_COLUMNS = ("text", "text_pair", "tokens", "image", "image_size", "label", "target", "language_model")


def read_options(
    options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[Settings, TaskData, PublicBase]:
    """Settings, records and base, from the files that the options name.

    Args:
        options: of `confide train`, by name; from a run that goes on, with paths as text.
        defaults: of the same options.

    Raises:
        ConfigError, DataError, ModelError: names the option.
    """
    from confide.errors import ConfigError, ReleaseError
    from confide.finetune.base import PublicBase
    from confide.finetune.idle import refuse_idle
    from confide.finetune.settings import Settings
    from confide.release.write import check_task_name
    from confide.tasks.files import read_task

    given = {name: options[name] for name in Settings.model_fields if name in options}
    given["delta"] = number_or_rule(options["delta"])
    given["trainable"] = {name: options[name] for name in ("blocks", "rank") if options[name] is not None}
    given["trainable"]["kind"] = options["trainable"]
    changed = {name for name, value in options.items() if value != defaults[name]}
    sparse = options["method"] == "raptor"
    experts = {key: options[option] for option, key in _EXPERTS.items() if options[option] is not None}
    if "public" in experts:
        experts["public"] = str(Path(experts["public"]).absolute())  # the same when the run goes on
    if sparse:
        given["experts"] = {**experts, "rank": options["rank"]}
    elif idle := [option for option in _EXPERTS if option in changed]:
        raise ConfigError(f"{spelled_option(idle[0])} has no effect here: it needs --method raptor")
    settings = Settings.of({key: value for key, value in given.items() if value is not None}, spelled_option)
    nested = {"blocks"} if sparse else {"blocks", "rank"}  # of raptor, the experts' LoRA has the rank too
    chosen = {f"trainable.{name}" for name in changed & nested}
    chosen |= {f"experts.{key}" for option, key in _EXPERTS.items() if option in changed}
    refuse_idle(settings, changed | chosen, spelled_option)
    for name, needed, acts in (
        ("rows_per_unit", "--unit", options["unit"] is not None),
        ("test_size", "no --test-data", options["test_data"] is None),
    ):
        if name in changed and not acts:
            raise ConfigError(f"{spelled_option(name)} has no effect here: it needs {needed}")
    if options["task"] is None:
        try:
            check_task_name(options["dataset"])
        except ReleaseError as error:
            raise ConfigError(
                f"--dataset names the task too, and {error}; or name the task with --task"
            ) from None
    if options["language_model"] and options["target"] is not None:
        raise ConfigError(
            "--target is what to write for --text, and --language-model the text itself; choose one"
        )
    if options["language_model"] or options["target"] is not None:
        for name in ("label", "labels", "label_range"):
            if name in changed:
                raise ConfigError(f"{spelled_option(name)} has no effect here: a language model learns texts")
    labels = options["labels"]
    records = read_task(
        Path(options["data"]),
        **{name: options[name] for name in _COLUMNS},
        label_range=_range(options["label_range"]),
        labels=labels.split(",") if labels is not None else None,
        name=options["task"] or options["dataset"],
        unit=options["unit"],
        rows_per_unit=options["rows_per_unit"],
        test_size=options["test_size"],
        test_file=Path(options["test_data"]) if options["test_data"] else None,
        seed=options["seed"],
        metric=options["metric"],
    )
    return settings, records, PublicBase.of(options["base"])


def spelled_option(key: str) -> str:
    """The option that sets a key of the settings."""
    section, _, last = key.rpartition(".")
    own = {key: option for option, key in _EXPERTS.items()}
    return spelled(own.get(last, last) if section == "experts" else last)


def stored(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON values that mean the same from any folder."""
    paths = {name: str(value.absolute()) for name, value in options.items() if isinstance(value, Path)}
    stored = {**options, **paths}
    if Path(options["base"]).expanduser().is_dir():
        stored["base"] = str(Path(options["base"]).expanduser().absolute())
    if options["ledger"] not in (None, "none") and "://" not in options["ledger"]:
        stored["ledger"] = str(Path(options["ledger"]).expanduser().absolute())
    if options["key"] not in (None, "none"):
        stored["key"] = str(Path(options["key"]).expanduser().absolute())
    return stored


def _range(said: str | None) -> tuple[float, float] | None:
    from confide.errors import ConfigError

    if said is None:
        return None
    try:
        low, high = map(float, said.split(","))
    except ValueError:
        raise ConfigError(f"--label-range: two numbers with a comma between them, not {said}") from None
    return low, high


def number_or_rule(delta: str) -> float | str:
    """What --delta means.

    Raises:
        ConfigError: neither a number nor a rule.
    """
    from confide.errors import ConfigError

    if delta in ("auto", "1/n", "n^-1.1"):
        return delta
    try:
        value = float(delta)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ConfigError(f"--delta: a number between 0 and 1, auto, 1/n or n^-1.1, not {delta}")
    return value
