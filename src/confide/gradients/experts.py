"""The experts of one layer, so run that every unit's gradient with respect to them can be had.

Knows no model family: whoever attaches it says which parameter is which and how a call is to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.errors import ModelError


@dataclass(frozen=True)
class Form:
    """What an expert computes: y = W₂·φ(W₁x + b₁) + b₂, its weights stacked over the E experts.

    Attributes:
        up, down: names of W₁ and W₂.
        up_bias, down_bias: names of b₁ and b₂ (E, out), or None.
        transposed: weights are stored (E, in, out), not (E, out, in).
        activation: φ, row by row.
    """

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    transposed: bool
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of the experts.

    Attributes:
        inputs: (rows, width), one or more rows per token.
        expert: (rows, k) which experts read a row; E for none.
        weight: (rows, k) by how much each one's answer counts.
        tokens: T; row i is of token i mod T, tokens are those of a (batch, length) array, row by row.
    """

    inputs: Tensor
    expert: Tensor
    weight: Tensor
    tokens: int


@dataclass(frozen=True)
class Lora:
    """Low-rank updates ΔW = (alpha / rank)·B·A of every expert's W₁ and W₂; biases stay.

    Attributes:
        rank: r.
        alpha: LoRA's scale is alpha / rank.
        seed: of the initial A (B starts at 0, so the layer is unchanged); public.
    """

    rank: int
    alpha: float
    seed: int = 0

    @property
    def scale(self) -> float:
        """s of ΔW = s·B·A."""
        return self.alpha / self.rank


@dataclass
class Pairs:
    """Pairs of a token and an expert, by expert; all private.

    Attributes:
        inputs: (n, width) x.
        hidden: (n, ·) W₁x + b₁, LoRA included.
        weight: (n,).
        place: (n,) row of the layer's output that the pair adds to.
        row: (n,) row of the batch, that is, which record.
        starts: (E + 1,) pairs of expert e are starts[e] … starts[e + 1] − 1.
    """

    inputs: Tensor
    hidden: Tensor
    weight: Tensor
    place: Tensor
    row: Tensor
    starts: list[int]


@dataclass
class Watch:
    """What one forward pass is to keep, and what it kept.

    Attributes:
        rows: rows of the batch.
        owner: (rows,) the one expert of which a row's gradient is wanted; None for all experts. Private.
        mask: (rows, length), 0 at padding; None for no padding.
        length: tokens of a row, padding included, as the forward pass found it.
        pairs: what was kept.
        output: the layer's output, to differentiate the losses by.
    """

    rows: int
    owner: Tensor | None
    mask: Tensor | None
    length: int = 0
    pairs: Pairs | None = None
    output: Tensor | None = None


class OwnerExperts(nn.Module):
    """Stands in for a layer's experts: the same outputs, and what is needed for per-unit gradients.

    The parameters are those of the experts it replaces, under the same names, so that a model's tensors
    keep theirs; with LoRA there are `{weight}_lora_A` (E, r, in) and `{weight}_lora_B` (E, out, r) besides.
    Rows are computed one expert after the other, in the order of transformers' `eager` implementation, and
    agree with it bit for bit.

    Args:
        base: the experts that are replaced; kept, not registered.
        parameters: stacked over experts, by name.
        form: which parameter is which.
        read: turns the arguments of a call into a `Call`.
        lora: low-rank updates, or None to train the weights themselves.
    """

    def __init__(
        self,
        base: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        form: Form,
        read: Callable[[tuple[Any, ...], dict[str, Any]], Call],
        lora: Lora | None,
    ) -> None:
        super().__init__()
        self._kept = (base,)  # in a tuple, so that it is no submodule and adds no names
        self.form = form
        self.lora = lora
        self.watch: Watch | None = None
        self._read = read
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.experts = len(self.get_parameter(form.up))
        if lora is not None:
            self._add_lora(lora)
        self.train(base.training)

    @property
    def base(self) -> nn.Module:
        """The experts that were replaced."""
        return self._kept[0]

    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained, by name: LoRA's factors, or every parameter of the experts."""
        parameters = dict(self.named_parameters())
        return {name: value for name, value in parameters.items() if self.lora is None or "_lora_" in name}

    def delta(self, name: str) -> Tensor:
        """ΔW of `form.up` or `form.down`, (E, …) as that weight is stored."""
        assert self.lora is not None
        a, b = self.get_parameter(f"{name}_lora_A"), self.get_parameter(f"{name}_lora_B")
        with torch.no_grad():
            # PEFT merges with this very expression, so that both give the same bits.
            form = "o r e, e r i -> e i o" if self.form.transposed else "o r e, e r i -> e o i"
            return torch.einsum(form, b.permute(1, 2, 0).contiguous(), a) * self.lora.scale

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' output for each row of their input."""
        call = self._read(args, kwargs)
        watch = self.watch if torch.is_grad_enabled() else None
        if watch is not None and torch.is_autocast_enabled(call.inputs.device.type):
            raise ModelError("experts are trained in float32 or wider: autocast's rounding flips routing")
        wanted = None if watch is None else _wanted(watch, call)
        order = torch.argsort(call.expert.T.reshape(-1), stable=True)
        ends = torch.bincount(call.expert.reshape(-1), minlength=self.experts).cumsum(0).tolist()
        place = order % len(call.inputs)
        weight = call.weight.T.reshape(-1)[order]
        out = torch.zeros_like(call.inputs)
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        starts = [0]
        for expert, (low, high) in enumerate(zip([0, *ends], ends[: self.experts], strict=False)):
            if low < high:
                at = place[low:high]
                x = call.inputs[at]
                u = self._product(self.form.up, self.form.up_bias, expert, x)
                y = self._product(self.form.down, self.form.down_bias, expert, self.form.activation(u))
                out.index_add_(0, at, (y * weight[low:high, None]).to(out.dtype))
                if wanted is not None:
                    own = wanted(expert, at)
                    with torch.no_grad():
                        kept.append((low + own, x[own], u[own]))
                    starts.append(starts[-1] + len(own))
                    continue
            starts.append(starts[-1])
        if watch is None:
            return out
        if watch.output is not None:
            raise ModelError("the experts were called twice before their gradients were taken")
        if kept:
            index, inputs, hidden = (torch.cat(parts) for parts in zip(*kept, strict=True))
        else:
            index, inputs = place[:0], call.inputs[:0]
            hidden = self._product(self.form.up, self.form.up_bias, 0, inputs)
        at = place[index]
        row = at % call.tokens // watch.length
        watch.pairs = Pairs(inputs.detach(), hidden.detach(), weight[index].detach(), at, row, starts)
        if not out.requires_grad:
            out = out.detach().requires_grad_()
        watch.output = out
        return out

    def _product(self, name: str, bias: str | None, expert: int, x: Tensor) -> Tensor:
        weight = self.get_parameter(name)[expert]
        b = None if bias is None else self.get_parameter(bias)[expert]
        if self.form.transposed:
            y = x @ weight if b is None else x @ weight + b
        else:
            y = functional.linear(x, weight, b)
        if self.lora is not None:
            low = functional.linear(x, self.get_parameter(f"{name}_lora_A")[expert])
            up = functional.linear(low, self.get_parameter(f"{name}_lora_B")[expert])
            y = torch.add(y, up, alpha=self.lora.scale)
        return y

    def _add_lora(self, lora: Lora) -> None:
        generator = torch.Generator().manual_seed(lora.seed)
        for name in (self.form.up, self.form.down):
            weight = self.get_parameter(name)
            _, outputs, inputs = weight.mT.shape if self.form.transposed else weight.shape
            a = torch.empty(self.experts, lora.rank, inputs).uniform_(
                -(inputs**-0.5), inputs**-0.5, generator=generator
            )
            self.register_parameter(f"{name}_lora_A", nn.Parameter(a.to(weight)))
            b = torch.zeros(self.experts, outputs, lora.rank).to(weight)
            self.register_parameter(f"{name}_lora_B", nn.Parameter(b))


def _wanted(watch: Watch, call: Call) -> Callable[[int, Tensor], Tensor]:
    """(expert, its rows of the input) → positions among them whose gradient is wanted."""
    if not watch.rows or call.tokens % watch.rows:
        raise ModelError(
            f"the experts were called on {call.tokens} tokens in a batch of {watch.rows} rows; the tokens of "
            "every row must be there, row by row, or clipping would bound something else than a record"
        )
    length = watch.length = call.tokens // watch.rows
    if watch.mask is not None and watch.mask.shape != (watch.rows, length):
        raise ModelError(
            f"the mask has shape {tuple(watch.mask.shape)}, but the experts were called on {watch.rows} rows "
            f"of {length} tokens"
        )
    owner = None if watch.owner is None else watch.owner.repeat_interleave(length)
    inside = None if watch.mask is None else watch.mask.reshape(-1) != 0

    def positions(expert: int, at: Tensor) -> Tensor:
        token = at % call.tokens
        chosen = torch.ones_like(token, dtype=torch.bool) if inside is None else inside[token]
        if owner is not None:
            chosen = chosen & (owner[token] == expert)
        return chosen.nonzero()[:, 0]

    return positions
