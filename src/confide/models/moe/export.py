"""LoRA of experts as a PEFT adapter, alone or with all else that was trained, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from confide.errors import ModelError, ReleaseError
from confide.files import new_folder
from confide.gradients.experts import OwnerExperts
from confide.models.adapters import Adapted, lora_factors, lora_scale
from confide.models.moe.attach import attached
from confide.models.moe.layers import SparseLayer
from confide.release import format

_CONFIG, _WEIGHTS = format.ADAPTER_CONFIG, format.ADAPTER_WEIGHTS
_PREFIX = "base_model.model."


def to_peft(layer: SparseLayer, out: Path) -> None:
    """Write the attached experts' LoRA as an adapter of the plain model (PEFT's `target_parameters`).

    PEFT stacks experts inside two matrices: A (E·r, in) by expert, B (out, r·E) by rank and then expert.
    Every number is written as it is.

    Args:
        layer: with LoRA attached.
        out: folder, which must not exist.

    Raises:
        ModelError: no LoRA is attached.
        ReleaseError: the folder exists, or can't be written.
    """
    experts = _lora_experts(layer)
    with new_folder(out) as folder:
        _config(layer, experts).save_pretrained(folder)
        _write(_tensors(layer, experts), folder)


def write_adapter(adapted: Adapted, folder: Path) -> None:
    """Write all that was trained, the head and LoRA of dense layers and experts, as one adapter of the base.

    What is adapted is named as parameters and not as modules, because PEFT takes names of modules in some
    mixtures for others. So `PeftModel` computes with the very weights of the merged release.

    Args:
        adapted: with `is_adapter`.
        folder: must exist.
    """
    from peft import LoraConfig

    layers = [(layer, _lora_experts(layer)) for layer in adapted.experts]
    lora = layers[0][1].lora
    assert lora is not None
    tensors: dict[str, Tensor] = {}
    for layer, experts in layers:
        tensors |= _tensors(layer, experts)
    rank, alpha = {}, {}
    for name, module in adapted.lora.items():
        path = name.removesuffix(".weight")
        a, b = lora_factors(module)
        tensors |= {f"{_PREFIX}{path}.lora_A.weight": a, f"{_PREFIX}{path}.lora_B.weight": b}
        if (len(a), lora_scale(module)) != (lora.rank, lora.scale):
            rank[name], alpha[name] = len(a), len(a) * lora_scale(module)
    model = adapted.classifier.model
    tensors |= {f"{_PREFIX}{name}": model.get_parameter(name) for name in adapted.head}
    parameters = [name for layer, experts in layers for name in _parameters(layer, experts)]
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=[],
        target_parameters=[*parameters, *adapted.lora],
        rank_pattern=rank,
        alpha_pattern=alpha,
        modules_to_save=sorted({name.rsplit(".", 1)[0] for name in adapted.head}),
        inference_mode=True,
    ).save_pretrained(folder)
    _write(tensors, folder)


def is_adapter(adapted: Adapted) -> bool:
    """Whether all that was trained is LoRA, some of it of experts, and the head."""
    return (
        bool(adapted.experts)
        and all(attached(layer).lora is not None for layer in adapted.experts)
        and all(".lora_" in name for name in adapted.encoder)
    )


def from_peft(layer: SparseLayer, folder: Path) -> None:
    """Read the numbers of an adapter that `to_peft` wrote into attached experts of the same rank.

    Raises:
        ModelError: no LoRA is attached, or of another rank or scale.
        ReleaseError: not such an adapter; names what is missing or has another shape.
    """
    experts = _lora_experts(layer)
    folder = Path(folder)
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        stored = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ReleaseError(f"{folder} is no PEFT adapter that can be read: {error}") from error
    lora = experts.lora
    assert lora is not None
    if config.get("peft_type") != "LORA" or (config.get("r"), config.get("lora_alpha")) != (
        lora.rank,
        lora.alpha,
    ):
        raise ModelError(
            f"{folder} holds LoRA of rank {config.get('r')} and alpha {config.get('lora_alpha')}; the "
            f"attached experts have rank {lora.rank} and alpha {lora.alpha:g}"
        )
    wanted = _tensors(layer, experts)
    for name, value in wanted.items():
        if name not in stored or stored[name].shape != value.shape:
            found = list(stored[name].shape) if name in stored else "nothing"
            raise ReleaseError(f"{folder}: {name} should be {list(value.shape)}, but there is {found}")
    unknown = sorted(stored.keys() - wanted.keys())
    if unknown:
        raise ReleaseError(f"{folder} adapts more than the experts of {layer.name}: {unknown[0]}")
    with torch.no_grad():
        for name, value in _factors(layer, experts, stored).items():
            experts.get_parameter(name).copy_(value)


def _lora_experts(layer: SparseLayer) -> OwnerExperts:
    experts = layer.block.get_submodule("experts")
    if not isinstance(experts, OwnerExperts) or experts.lora is None:
        raise ModelError(f"{layer.name} has no LoRA attached to its experts")
    return experts


def _config(layer: SparseLayer, experts: OwnerExperts) -> Any:
    from peft import LoraConfig

    assert experts.lora is not None
    options: dict[str, Any] = {"r": experts.lora.rank, "lora_alpha": experts.lora.alpha, "lora_dropout": 0.0}
    return LoraConfig(target_modules=[], target_parameters=_parameters(layer, experts), **options)


def _parameters(layer: SparseLayer, experts: OwnerExperts) -> list[str]:
    path = f"{layer.name}.experts"
    if layer.kind == "listed":
        return [f"{path}.expert_{e}.{name}.weight" for e in range(layer.experts) for name in _names(experts)]
    return [f"{path}.{name}" for name in _names(experts)]


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    save_file(plain, folder / _WEIGHTS, metadata={"format": "pt"})


def _names(experts: OwnerExperts) -> tuple[str, str]:
    return experts.form.up, experts.form.down


def _places(layer: SparseLayer, experts: OwnerExperts) -> dict[str, str]:
    """Where PEFT keeps each weight's pair: it wraps the experts once per weight, the last one outside."""
    path = f"{_PREFIX}{layer.name}.experts"
    return {experts.form.up: f"{path}.base_layer", experts.form.down: path}


def _tensors(layer: SparseLayer, experts: OwnerExperts) -> dict[str, Tensor]:
    found = {}
    if layer.kind == "listed":
        for name in _names(experts):
            for end in "AB":
                for number, value in enumerate(experts.get_parameter(f"{name}_lora_{end}")):
                    found[f"{_PREFIX}{layer.name}.experts.expert_{number}.{name}.lora_{end}.weight"] = value
        return found
    for name, place in _places(layer, experts).items():
        a: Tensor = experts.get_parameter(f"{name}_lora_A")
        b: Tensor = experts.get_parameter(f"{name}_lora_B")
        if _swapped(layer):
            a, b = b.mT, a.mT
        found[f"{place}.lora_A.weight"] = a.flatten(0, 1)
        found[f"{place}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return found


def _factors(layer: SparseLayer, experts: OwnerExperts, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_tensors`."""
    found = {}
    if layer.kind == "listed":
        for name in _names(experts):
            for end in "AB":
                found[f"{name}_lora_{end}"] = torch.stack(
                    [
                        stored[f"{_PREFIX}{layer.name}.experts.expert_{e}.{name}.lora_{end}.weight"]
                        for e in range(layer.experts)
                    ]
                )
        return found
    for name, place in _places(layer, experts).items():
        a, b = stored[f"{place}.lora_A.weight"], stored[f"{place}.lora_B.weight"]
        a = a.reshape(layer.experts, -1, a.shape[1])
        b = b.reshape(len(b), -1, layer.experts).permute(2, 0, 1)
        if _swapped(layer):
            a, b = b.mT, a.mT
        found[f"{name}_lora_A"], found[f"{name}_lora_B"] = a, b
    return found


def _swapped(layer: SparseLayer) -> bool:
    """Experts that store (in, out) without saying so: PEFT takes their inputs for outputs."""
    return layer.kind == "scaled"
