"""LoRA of experts, with all else that was trained, as a PEFT adapter of the plain model."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from confide.errors import ModelError
from confide.gradients.experts import OwnerExperts
from confide.models.adapters import Adapted, lora_factors, lora_scale
from confide.models.moe.attach import attached
from confide.models.moe.layers import SparseLayer
from confide.release import format

_PREFIX = "base_model.model."


def write_adapter(adapted: Adapted, folder: Path) -> None:
    """Write all that was trained, the head and LoRA of dense layers and experts, as one adapter of the base.

    What is adapted is named as parameters and not as modules, because PEFT takes names of modules in some
    mixtures for others. So `PeftModel` computes with the very weights of the merged release. PEFT stacks
    experts inside two matrices: A (E·r, in) by expert, B (out, r·E) by rank and then expert; every number is
    written as it is.

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


def _lora_experts(layer: SparseLayer) -> OwnerExperts:
    experts = layer.block.get_submodule("experts")
    if not isinstance(experts, OwnerExperts) or experts.lora is None:
        raise ModelError(f"{layer.name} has no LoRA attached to its experts")
    return experts


def _parameters(layer: SparseLayer, experts: OwnerExperts) -> list[str]:
    path = f"{layer.name}.experts"
    if layer.kind == "listed":
        return [f"{path}.expert_{e}.{name}.weight" for e in range(layer.experts) for name in _names(experts)]
    return [f"{path}.{name}" for name in _names(experts)]


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    save_file(plain, folder / format.ADAPTER_WEIGHTS, metadata={"format": "pt"})


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


def _swapped(layer: SparseLayer) -> bool:
    """Experts that store (in, out) without saying so: PEFT takes their inputs for outputs."""
    return layer.kind == "scaled"
