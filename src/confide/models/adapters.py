"""Which parameters of a classifier are trained, and turning LoRA back into plain weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from confide.choices import Trained
from confide.errors import ConfigError
from confide.models.backbones import Classifier
from confide.models.moe.attach import merged_experts, trained_names
from confide.models.moe.layers import SparseLayer, sparse_layers

_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|block)\.(\d+)\.")
_UNREAD = (
    "mask_token"  # of image models; only pretraining reads it, so that it would be trained on noise alone
)


class Trainable(BaseModel):
    """What is trained beside the head, which always is. A language model's counts as a layer of the base.

    Attributes:
        kind: `head` (the encoder stays untouched), `lora`, `blocks` (whole top blocks), or `all`.
        blocks: how many blocks from the top, for `lora` and `blocks`; 0 means every block. Of an encoder and
            of a decoder, where there are both.
        rank: r of LoRA.
        alpha: LoRA's scale is alpha / rank.
        train_a: whether LoRA's A is trained too. False keeps it at its public random value: half as much to
            add noise to, and ΔW linear in what is trained (FFA-LoRA, Sun et al. 2024); worse where measured.
        targets: ends of the names of the Linear layers that LoRA adapts, whole components: `value`, or
            `attention.output.dense`; by default what families call the projections of queries and values.
            Some families have them in one layer with the keys, as GPT-2 in `c_attn`.
    """

    kind: Trained = "lora"
    blocks: int = Field(default=1, ge=0)
    rank: int = Field(default=8, gt=0)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    train_a: bool = True
    targets: tuple[str, ...] = (
        *("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "q", "v"),
        *("c_attn", "query_key_value", "qkv_proj", "Wqkv"),
    )

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Adapted:
    """A classifier whose trainable parameters have been chosen.

    Attributes:
        classifier: with adapters injected in place, for LoRA.
        encoder: names of trainable encoder parameters (adapter weights under LoRA).
        head: names of the head's parameters; none of a language model, whose head is the base's.
        first_block: index of the lowest block that is trained; everything below is frozen and its output
            can be cached. The number of blocks when only the head is trained, 0 when embeddings are.
        lora: adapted layers by the name of their weight in the plain model.
        experts: layers whose experts are attached and trained, apart from `encoder`.
    """

    classifier: Classifier
    encoder: tuple[str, ...]
    head: tuple[str, ...]
    first_block: int
    lora: dict[str, nn.Module]
    experts: tuple[SparseLayer, ...] = ()

    @property
    def expert_parameters(self) -> tuple[str, ...]:
        """Names of the trained parameters of attached experts."""
        return tuple(name for layer in self.experts for name in trained_names(layer))


def adapt(
    classifier: Classifier, trainable: Trainable, seed: int, experts: Sequence[SparseLayer] | None = None
) -> Adapted:
    """Choose what is trained; everything else gets `requires_grad = False`.

    Args:
        experts: layers whose experts are attached, so that they are trained apart. Routers and the experts of
            other layers then stay frozen, also where none are attached. None of a method that knows no
            experts.
        seed: fixes LoRA's initial A (B starts at zero, so the model is unchanged); public.

    Raises:
        ConfigError: more blocks than the model has, LoRA targets that it hasn't, or a language model's head
            alone.
    """
    model = classifier.model
    head = () if classifier.problem.target == "text" else classifier.head
    if trainable.kind == "head" and not head:
        raise ConfigError(
            "a language model has no head of its own to train: its output layer belongs to the base; "
            "train lora, blocks or all"
        )
    stacks = _stacks(model)
    count = max(stacks.values(), default=0)
    if trainable.kind in ("lora", "blocks") and trainable.blocks > count:
        raise ConfigError(f"trainable.blocks is {trainable.blocks}, but the base has {count} blocks")
    lowest = count - (trainable.blocks or count)
    tops = {stack: own - min(trainable.blocks or own, own) for stack, own in stacks.items()}
    lora: dict[str, nn.Module] = {}
    sparse = [] if experts is None else sparse_layers(model)
    apart = tuple(f"{layer.name}.{part}." for layer in sparse for part in ("experts", "router", "gate"))
    if trainable.kind == "lora":
        lora = _inject(model, trainable, tops, seed, apart)
        factors = ("lora_A", "lora_B") if trainable.train_a else ("lora_B",)
        wanted = {f"{name}.{factor}.default.weight" for name in lora for factor in factors}
        encoder = tuple(name for name, _ in model.named_parameters() if name in wanted)
        lora = {f"{name}.weight": layer for name, layer in lora.items()}
    else:
        encoder = tuple(
            name
            for name, _ in model.named_parameters()
            if name not in head and _is_trained(name, trainable.kind, tops) and not name.startswith(apart)
        )
    first = {"head": count, "all": 0}.get(trainable.kind, lowest)
    first = min([first, *(layer.number for layer in experts or ())])
    trained = {*encoder, *head}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return Adapted(classifier, encoder, head, first, lora, tuple(experts or ()))


def plain_state(adapted: Adapted) -> dict[str, Tensor]:
    """The classifier's tensors under their plain names, LoRA merged: W + (alpha/r)·B·A."""
    state: dict[str, Tensor] = {}
    merged = {name: value for layer in adapted.experts for name, value in merged_experts(layer).items()}
    apart = tuple(f"{layer.name}.experts." for layer in adapted.experts)
    for name, value in adapted.classifier.model.state_dict().items():
        if ".lora_A." in name or ".lora_B." in name or name.startswith(apart):
            continue
        plain = name.replace(".base_layer.", ".")
        layer = adapted.lora.get(plain)
        value = value.detach()
        state[plain] = (value + lora_delta(layer) if layer is not None else value).contiguous().clone()
    state |= {name: value.detach().contiguous().clone() for name, value in merged.items()}
    return state


def lora_delta(layer: nn.Module) -> Tensor:
    """ΔW = s·B·A of one adapted layer, shaped like its weight; GPT-2's are (in, out)."""
    a, b = lora_factors(layer)
    with torch.no_grad():
        delta = lora_scale(layer) * (b @ a)
        return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


def lora_factors(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """(A, B) of an adapted Linear: (r, in) and (out, r)."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight  # type: ignore[index,union-attr]


def lora_scale(layer: nn.Module) -> float:
    """s of ΔW = s·B·A, as PEFT applies it."""
    return float(layer.scaling["default"])  # type: ignore[index]


def _stacks(model: nn.Module) -> dict[str, int]:
    """What stands before the blocks' numbers → how many; an encoder and a decoder have their own."""
    counts: dict[str, int] = {}
    for name, _ in model.named_parameters():
        if match := _BLOCK.search(name):
            stack = name[: match.start(1)]
            counts[stack] = max(counts.get(stack, 0), int(match[1]) + 1)
    return counts


def _is_on_top(name: str, tops: Mapping[str, int]) -> bool:
    """Whether a block holds this parameter or module that is one of those asked for."""
    match = _BLOCK.search(name)
    return match is not None and int(match[1]) >= tops[name[: match.start(1)]]


def _is_trained(name: str, kind: str, tops: Mapping[str, int]) -> bool:
    if kind == "all":
        return not name.endswith(_UNREAD)
    return kind == "blocks" and _is_on_top(name, tops)


def _inject(
    model: nn.Module, trainable: Trainable, tops: Mapping[str, int], seed: int, apart: tuple[str, ...]
) -> dict[str, nn.Module]:
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    endings = tuple(f".{target}" for target in trainable.targets)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and name.endswith(endings)
        and _is_on_top(name, tops)
        and not f"{name}.".startswith(apart)
    ]
    if not names:
        linear = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        raise ConfigError(
            f"trainable.targets {list(trainable.targets)} match no layer; there are {sorted(linear)}"
        )
    # Inside another module, PEFT doesn't see which family it is: in some mixtures it would take always-active
    # experts for the others, whose old names end alike, and adapt those instead.
    inside = nn.ModuleDict({"model": model})
    config = LoraConfig(
        r=trainable.rank,
        lora_alpha=trainable.alpha,
        lora_dropout=0.0,
        target_modules=[f"model.{name}" for name in names],
        fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, inside)
    model.eval()
    return {name: model.get_submodule(name) for name in names}
