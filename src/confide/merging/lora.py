"""PEFT adapters as models: θ = θ₀ + s·B·A, computed where it is read and written nowhere.

A folder of `adapter_config.json` and `adapter_model.safetensors` is read as PEFT applies it: the scale s is
α/r, or α/√r under rank-stabilised LoRA (Kalajdzievski 2023), with α and r of a layer's own pattern where one
matches. Whatever would make ΔW something else is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from confide.errors import ModelError
from confide.merging.vectors import Encoder
from confide.release.names import canonical, offset
from confide.release.tensors import Checkpoint

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_HARMLESS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""Keys that say nothing about ΔW, or that are taken into account here; any other must be off."""

_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", None)
"""Ways to initialise A and B that leave the base's own weights alone."""

_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.weight)?")
_WRAPPER = "base_model.model."


@dataclass(frozen=True)
class _Pair:
    """A and B of one layer, by their names in the file, and s."""

    a: str
    b: str
    scale: float
    turned: bool


class Adapter:
    """A base with a low-rank change, read piece by piece like any other model.

    Attributes:
        label: what messages call it.
        names: the base's.
        heads: tensors that the adapter brings and the base hasn't: name → name in the file.
        checkpoint: the adapter's file.
        prefix: what the adapted model puts before the base's names.
    """

    def __init__(self, folder: Path, base: Encoder) -> None:
        """Read an adapter's configuration and look at its tensors; no values are read yet.

        Args:
            folder: of `adapter_config.json`.
            base: the model that it adapts.

        Raises:
            ModelError: no adapter there, or one whose ΔW isn't exactly s·B·A.
        """
        self.label = str(folder)
        self.names: Collection[str] = base.names
        self.base = base
        self.config = _read_config(Path(folder))
        self.checkpoint = Checkpoint.open(Path(folder) / WEIGHTS)
        plain = {_plain(stored): stored for stored in self.checkpoint.names}
        layers = [match["layer"] for name in plain if (match := _FACTOR.fullmatch(name))]
        whole = [name for name in plain if "lora_" not in name]
        self.prefix = offset([*whole, *(f"{layer}.weight" for layer in layers)], base.names)
        self._pairs: dict[str, _Pair] = {}
        self._whole: dict[str, str] = {}
        self.heads: dict[str, str] = {}
        self._loaded: tuple[str, npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None
        factors: dict[str, dict[str, str]] = {layer: {} for layer in layers}
        for name, stored in plain.items():
            if match := _FACTOR.fullmatch(name):
                factors[match["layer"]][(match["kind"] or "") + match["side"]] = stored
            elif "lora_" in name:
                raise ModelError(f"{folder}: tensor {stored} makes ΔW more than s·B·A; it can't be merged")
            elif (inner := self._inner(name)) in base.names:
                self._whole[inner] = stored
            else:
                self.heads[name] = stored
        for layer, sides in factors.items():
            self._pair(layer, sides)

    @property
    def held(self) -> int:
        """Bytes of factors in memory at most: one layer's as they are read, scaled, and the last one's."""
        sizes = (self.checkpoint.size(p.a) + self.checkpoint.size(p.b) for p in self._pairs.values())
        return 3 * 8 * max(sizes, default=0)

    def dtype(self, name: str) -> str:
        return self.checkpoint.dtype(self._whole[name]) if name in self._whole else self.base.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(self._whole[name]) if name in self._whole else self.base.shape(name)

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        if name in self._whole:
            return self.checkpoint.read(self._whole[name], start, stop)
        values = self.base.read(name, start, stop)
        if name not in self._pairs:
            return values
        left, right = self._factors(name)
        width = right.shape[1]
        first = start // width
        rows = left[first : -(-stop // width)] @ right
        piece: npt.NDArray[np.float64] = rows.reshape(-1)[start - first * width :][: len(values)]
        piece += values
        return piece

    def _factors(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """ΔW = left @ right in the layout of the base's tensor; kept until another tensor is read."""
        if self._loaded is None or self._loaded[0] != name:
            pair = self._pairs[name]
            a = self.checkpoint.numpy(pair.a).astype(np.float64)
            b = self.checkpoint.numpy(pair.b).astype(np.float64)
            left, right = (a.T, b.T) if pair.turned else (b, a)
            self._loaded = (name, np.ascontiguousarray(left * pair.scale), np.ascontiguousarray(right))
        return self._loaded[1], self._loaded[2]

    def _pair(self, layer: str, sides: Mapping[str, str]) -> None:
        embedding = "embedding_A" in sides or "embedding_B" in sides
        wanted = {"embedding_A", "embedding_B"} if embedding else {"A", "B"}
        if set(sides) != wanted:
            raise ModelError(f"{self.label}: layer {layer} needs lora_A and lora_B, but has {sorted(sides)}")
        a, b = (sides[side] for side in sorted(wanted))
        name = self._inner(f"{layer}.weight")
        if name not in self.names:
            raise ModelError(
                f"{self.label}: layer {layer} is adapted, but base {self.base.label} has no such tensor"
            )
        first, second = self.checkpoint.shape(a), self.checkpoint.shape(b)
        if len(first) != 2 or len(second) != 2:
            raise ModelError(f"{self.label}: layer {layer} is no matrix (A {list(first)}, B {list(second)})")
        rank, shape = first[0], self.base.shape(name)
        straight, crossed = (second[0], first[1]), (first[1], second[0])
        # PEFT flips its own fan_in_fan_out to suit a layer, so the shape knows better, where it isn't square.
        turned = embedding or (
            bool(self.config.get("fan_in_fan_out")) if straight == crossed else shape == crossed
        )
        if second[1] != rank or shape != (crossed if turned else straight):
            raise ModelError(
                f"{self.label}: layer {layer} has A {list(first)} and B {list(second)}, which don't fit "
                f"{name} of shape {list(shape)} in base {self.base.label}"
            )
        declared = _pattern(self.config, "rank_pattern", layer, self.config.get("r"))
        if declared != rank:
            raise ModelError(
                f"{self.label}: layer {layer} has rank {rank}, but {CONFIG} says {declared}, so its scale is "
                "unknown"
            )
        alpha = float(_pattern(self.config, "alpha_pattern", layer, self.config.get("lora_alpha")))
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        self._pairs[name] = _Pair(a, b, scale, turned)

    def _inner(self, plain: str) -> str:
        """The base's name of an adapted model's tensor, if the base has it."""
        return canonical(plain.removeprefix(self.prefix))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (Path(folder) / CONFIG).exists()


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{file} can't be read as the configuration of a PEFT adapter") from None
    if kind != "LORA":
        raise ModelError(f"{folder} is a {kind} adapter; only LORA is merged, because only its ΔW is s·B·A")
    for key, value in config.items():
        # Off is None, False, an empty list or table; an index of 0 in a list is not.
        if key not in _HARMLESS and value not in (None, False, [], {}, ""):
            raise ModelError(
                f"{folder}: {key} is set in {CONFIG} ({value!r}), so the model isn't W + s·B·A; merge it "
                "into a model folder with PEFT (merge_and_unload), and merge that"
            )
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise ModelError(
            f"{folder}: init_lora_weights is {start!r}, which changes the base's own weights too; save it "
            "with path_initial_model_for_weight_conversion, which makes it a plain adapter"
        )
    return dict(config)


def _pattern(config: Mapping[str, Any], key: str, layer: str, default: Any) -> Any:
    """A layer's own value: the first pattern that matches the end of its name, as PEFT matches them."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _plain(stored: str) -> str:
    """A tensor's name in the adapted model, without what PEFT wraps around it."""
    name = stored.removeprefix(_WRAPPER)
    return re.sub(r"\.(base_layer|original_module|modules_to_save)(?=\.)", "", name)
