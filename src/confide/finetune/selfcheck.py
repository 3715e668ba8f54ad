"""Before training, on the real model and made-up rows: are rows independent, gradients and noise right?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import ModelError, PrivacyError
from confide.finetune.prepare import loss_of, made_up, made_up_targets
from confide.gradients.engine import Engine
from confide.gradients.keys import Keys
from confide.gradients.noise import add_noise
from confide.models.adapters import Adapted
from confide.models.backbones import Classifier
from confide.models.moe.selfcheck import self_check
from confide.models.tail import Features, Source
from confide.privacy.streams import Clipping

_TOLERANCE = 1e-4  # relative; rounding moves a logit by about 1e-6 when a batch's shape changes
_GRADIENT = 1e-3  # relative; float32 gradients of a deep model agree to about 1e-5
_SHORT, _LONG = 6, 20
_NOISE = 20_000  # values, whose standard deviation is within 5/√(2·20000) of the true one


def check_rows_are_independent(
    classifier: Classifier, forward: Callable[[dict[str, Tensor]], Tensor], inputs: Source
) -> None:
    """Compare a row alone, again, and padded beside a longer one.

    Per-record clipping bounds nothing if a record's gradient depends on whom it is batched with: through
    padding that isn't masked, statistics of the batch, or randomness that is left on. No record is used,
    so whether this refuses says nothing about any.

    Raises:
        ModelError: the outputs differ.
    """
    rows = _public_rows(classifier, inputs)
    with torch.no_grad():
        alone = forward(rows.batch(np.array([0])))
        again = forward(rows.batch(np.array([0])))
        beside = forward(rows.batch(np.array([0, 1])))[:1]
    if alone.ndim == 3:  # outputs for tokens; those for padding mean nothing
        beside = beside[:, : alone.shape[1]]
    scale = float(alone.abs().max()) + torch.finfo(alone.dtype).tiny
    for what, other in (("run twice", again), ("padded beside a longer one", beside)):
        difference = float((other - alone).abs().max()) / scale
        if not difference <= _TOLERANCE:
            raise ModelError(
                f"a row's output changes by {difference:.1e} (relative) when it is {what}, so a record's "
                "gradient would depend on other records and clipping would bound nothing; this base can't be "
                "trained privately"
            )


def check_finite(classifier: Classifier, forward: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Run two made-up rows: a base whose loss is NaN from the start never learns, and each step is charged.

    Args:
        forward: through the whole model: frozen blocks, whose outputs may be cached, can be broken too.

    Raises:
        ModelError: an output isn't finite.
    """
    rows = made_up(classifier, np.array([_SHORT, _LONG]))
    with torch.no_grad():
        if not bool(forward(rows.batch(np.arange(len(rows)))).isfinite().all()):
            raise ModelError(
                "the base's outputs on made-up rows aren't finite, so losses would be NaN from the start; "
                "its weights or its configuration are broken"
            )


def check_all_gradients(
    adapted: Adapted,
    module: nn.Module,
    forward: Callable[[dict[str, Tensor]], Tensor],
    trained: Mapping[str, nn.Parameter],
    inputs: Source,
) -> None:
    """`check_gradients` of dense parameters, and `self_check` of experts.

    Args:
        trained: all that will be trained, by name.

    Raises:
        ModelError: as these.
    """
    classifier, apart = adapted.classifier, set(adapted.expert_parameters)
    dense = {name: parameter for name, parameter in trained.items() if name not in apart}
    if dense:
        check_gradients(classifier, module, forward, dense, inputs)
    config: Any = classifier.model.config
    whole: Any = classifier.model  # made-up tokens go through all of it, whatever of it is trained
    for layer in adapted.experts:
        assert classifier.tokenizer is not None  # experts are of texts
        vocabulary, pad = int(config.vocab_size), int(classifier.tokenizer.pad_token_id)
        self_check(whole, lambda batch: whole(**batch).logits, layer, vocabulary=vocabulary, pad=pad)


def check_gradients(
    classifier: Classifier,
    module: nn.Module,
    forward: Callable[[dict[str, Tensor]], Tensor],
    parameters: Mapping[str, nn.Parameter],
    inputs: Source,
    tolerance: float = _GRADIENT,
) -> None:
    """Compare the engine on two rows in one batch with autograd on each alone, unclipped and clipped.

    Args:
        module: what the engine watches; `forward` calls it.
        parameters: all that will be trained, by name.
        tolerance: relative.

    Raises:
        ModelError: names the parameter that differs most, or what the engine refuses.
    """
    rows = _public_rows(classifier, inputs)

    def loss(which: list[int]) -> Tensor:
        return made_up_losses(classifier, forward(rows.batch(np.array(which))), rows, np.array(which))

    alone = []
    for row in (0, 1):
        grads = torch.autograd.grad(loss([row]).sum(), list(parameters.values()), allow_unused=True)
        alone.append(
            {
                name: torch.zeros_like(parameter) if grad is None else grad
                for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
            }
        )
    norms = [_norm(gradient) for gradient in alone]
    if not np.isfinite(norms).all():
        raise ModelError("the gradient of a made-up row isn't finite, so neither would any be in training")
    engine = Engine(module, parameters)
    for bound in (2 * max(norms), min(norms) / 2):
        if not bound:
            continue
        expected = {
            name: alone[0][name] * min(1.0, bound / norms[0]) + alone[1][name] * min(1.0, bound / norms[1])
            for name in parameters
        }
        with engine:
            engine.add(loss([0, 1]), torch.arange(2), 2, Clipping("flat", bound))
        _compare(engine.take(), expected, tolerance)


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    whole = _norm(expected)
    errors = {name: float((found[name] - value).double().norm()) for name, value in expected.items()}
    name, error = max(errors.items(), key=lambda item: item[1])
    if error <= tolerance * whole:
        return
    raise ModelError(
        f"the clipped gradient of {name} is off by {error / whole:.1e} of the whole, compared with "
        "autograd on one made-up row at a time; freeze it, and please report this"
    )


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return float(torch.stack([value.double().square().sum() for value in gradient.values()]).sum().sqrt())


def check_noise(std: float) -> None:
    """Draw noise as training does, under a key of its own, and measure its standard deviation.

    Raises:
        PrivacyError: it isn't `std`.
    """
    drawn = add_noise({"noise": torch.zeros(_NOISE)}, std, Keys.fixed(0).noise.generator("check", 0, "check"))
    measured = float(drawn["noise"].double().std())
    if not abs(measured / std - 1) <= 5 / (2 * _NOISE) ** 0.5:
        raise PrivacyError(f"noise came out with a standard deviation of {measured:.4g} instead of {std:.4g}")


def _public_rows(classifier: Classifier, inputs: Source) -> Source:
    """Two made-up rows, a short and a long one, of the kind that training reads."""
    return rows_like(classifier, inputs, np.array([_SHORT, _LONG]))


def made_up_losses(
    classifier: Classifier, outputs: Tensor, rows: Source, which: npt.NDArray[np.int64]
) -> Tensor:
    """Loss of each of these rows of `rows`, against made-up targets.

    Args:
        outputs: the model's, of these rows.
    """
    lengths = torch.from_numpy(rows.lengths[which])
    targets = made_up_targets(classifier.problem, outputs, torch.from_numpy(which), lengths)
    return loss_of(classifier.problem)(outputs, targets.to(outputs.device))


def rows_like(classifier: Classifier, inputs: Source, lengths: npt.NDArray[np.int64]) -> Source:
    """Made-up rows of these lengths, of the kind of `inputs`: tokens, features or images."""
    if isinstance(inputs, Features):
        rng = np.random.default_rng(0)
        if int(inputs.lengths.max(initial=1)) == 1:  # the pooler's input: one token a row
            lengths = np.ones_like(lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        hidden = rng.standard_normal((int(offsets[-1]), inputs.hidden.shape[1]))
        return Features(torch.from_numpy(hidden).to(inputs.hidden.dtype), offsets)
    return made_up(classifier, lengths)
