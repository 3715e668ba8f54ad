"""Grams and Fisher diagonals of a released model on public text, for the operators that weigh by them.

Nothing here is noised, so no text may be private: what is written says that its origin is `public`. Of
private records they are a query, reserved before training and listed in the statement (`finetune.released`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from confide.errors import DataError, MergeError
from confide.merging.statistics import SUFFIX, Kind, write_statistics
from confide.models.backbones import Classifier
from confide.models.releases import load_release
from confide.release import format
from confide.release.format import TEXT_CLASSES
from confide.release.hashes import encoder_hash
from confide.release.names import canonical, encoder_prefix, encoder_tensors, model_type
from confide.release.tensors import Checkpoint
from confide.tasks.corpus import read_corpus, sample
from confide.tasks.text import Encoded, encode

Array = npt.NDArray[np.float64]
_BATCH_TOKENS = 8192
TEXTS = 2000
"""How many texts of a corpus are used at most, where nobody says otherwise."""


def write_public_statistics(
    release: Path,
    texts: Sequence[str],
    out: Path,
    kind: Kind,
    *,
    source: str,
    task: str | None = None,
    base: Path | None = None,
    beside: Sequence[Path] = (),
) -> None:
    """Compute statistics of one released model on public text and write them to a file.

    Args:
        release: folder of a release; its weights are checked against its statement.
        texts: public. Texts of the task's kind give better merges.
        out: the file, such as `statistics.safetensors`; replaced if it exists.
        kind: `grams` for RegMean, `fisher` for Fisher-weighted averaging.
        source: which text, in words; goes into the file.
        task: which head of a merge.
        base: folder of the public base: only tensors that differ from it get statistics, which is all that a
            merge looks at. None: every tensor.
        beside: releases that it will be merged with: tensors in which one of them differs count too.

    Raises:
        DataError: no text.
        ReleaseError, ModelError: the release can't be opened.
    """
    if not len(texts):
        raise DataError("statistics need at least one public text")
    classifier, head = load_release(release, task)
    if head.problem != TEXT_CLASSES:
        raise DataError(
            f"{head.task} is no classifier of single texts; statistics are computed for those only"
        )
    checkpoint, prefix, heads = _encoder(release)
    model = encoder_hash(checkpoint, prefix, heads)
    only = None
    if base is not None:
        only = {name for folder in (release, *beside) for name in _changed(folder, base)}
        if not only:
            raise DataError(f"the encoder of {release} is the base's, so a merge needs no statistics of it")
    encoded = encode(classifier.tokenizer, texts, head.max_length)
    compute = grams if kind == "grams" else fisher
    write_statistics(out, kind, "public", model, compute(classifier, encoded, only), source)


@contextmanager
def statistics_on(
    corpus: Path, models: Sequence[Path], kind: Kind | None, base: Path
) -> Iterator[list[Path]]:
    """A file of statistics on a public text for each model, for the time of the block.

    Args:
        corpus: one text a line; whoever names it says that it is public. At most `TEXTS` of them are used,
            picked at random with seed 0.
        models: folders of releases.
        kind: what the operator needs; None if it needs none.
        base: folder of the public base.

    Raises:
        DataError: no text; a model that isn't a classifier of texts.
        MergeError: a text for an operator that needs no statistics.
        ReleaseError, ModelError: a model that is no release, or can't be opened.
    """
    if kind is None:
        raise MergeError(f"the operator needs no statistics; leave the public text {corpus} out")
    chosen = sample(read_corpus(corpus), TEXTS, seed=0)
    source = f"{len(chosen)} texts, {corpus.name}"
    with tempfile.TemporaryDirectory() as folder:
        named = {str(number): model for number, model in enumerate(models)}
        yield public_statistics(named, chosen, Path(folder), kind, source=source, base=base)


def public_statistics(
    models: Mapping[str, Path], texts: Sequence[str], folder: Path, kind: Kind, *, source: str, base: Path
) -> list[Path]:
    """A file of statistics on public text for each model, in a folder; those that are there are kept.

    Args:
        models: releases by name, which the files are told apart by; they will be merged together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, model in models.items():
        files.append(folder / f"{kind}-{name}{SUFFIX}")
        if not files[-1].exists():
            write_public_statistics(
                model, texts, files[-1], kind, source=source, base=base, beside=tuple(models.values())
            )
    return files


def _encoder(release: Path) -> tuple[Checkpoint, str, list[str]]:
    """A release's weights, what stands before its encoder's names, and the tensors that are a head's."""
    info = format.read(release)
    heads = [name for each in info.heads for name in each.tensors] if info.kind == "model" else []
    return Checkpoint.open(release), info.weights_prefix, heads


def _changed(release: Path, base: Path) -> set[str]:
    """Canonical names of the encoder's tensors that aren't the base's."""
    checkpoint, prefix, heads = _encoder(release)
    public = Checkpoint.open(base)
    stored = encoder_tensors(public, encoder_prefix(public, model_type(base)))
    return {
        name
        for name, own in encoder_tensors(checkpoint, prefix, heads).items()
        if name not in stored or not np.array_equal(checkpoint.numpy(own), public.numpy(stored[name]))
    }


def grams(classifier: Classifier, encoded: Encoded, only: Collection[str] | None = None) -> dict[str, Array]:
    """Mean of x xᵀ over the tokens that enter each Linear layer of the encoder.

    A batch holds texts of one length, so that no padding is ever seen.

    Args:
        only: canonical names of the weights; None for all.

    Returns:
        Canonical name of the weight (out, in) → (in, in).
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            tokens = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + tokens.T @ tokens
            counts[name] = counts.get(name, 0) + len(tokens)

        return hook

    linear = {
        canonical(f"{path}.weight".removeprefix(classifier.prefix)): module
        for path, module in classifier.model.named_modules()
        if isinstance(module, nn.Linear) and path.startswith(classifier.prefix)
    }
    handles = [
        module.register_forward_pre_hook(watch(name))
        for name, module in linear.items()
        if only is None or name in only
    ]
    try:
        with torch.inference_mode():
            for rows in _same_length(encoded.lengths):
                classifier.model(**encoded.batch(rows))
    finally:
        for handle in handles:
            handle.remove()
    return {name: (total / counts[name]).cpu().numpy() for name, total in sums.items()}


def fisher(classifier: Classifier, encoded: Encoded, only: Collection[str] | None = None) -> dict[str, Array]:
    """Diagonal of the Fisher information of the encoder's parameters, exact per text and class.

    The mean over texts of Σ_y p(y|x) (∂ log p(y|x))² (Matena and Raffel 2022, section 2), one backward pass
    for each text and class: squaring the gradient of a batch would make the answer depend on its size.

    Args:
        only: canonical names of the tensors; None for all. Others are frozen.

    Returns:
        Canonical name → array in the parameter's shape.
    """
    named = {
        canonical(name.removeprefix(classifier.prefix)): parameter
        for name, parameter in classifier.model.named_parameters()
        if name.startswith(classifier.prefix) and parameter.requires_grad
    }
    named = {name: parameter for name, parameter in named.items() if only is None or name in only}
    chosen = {id(parameter) for parameter in named.values()}
    for parameter in classifier.model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    sums = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in named.items()}
    for row in range(len(encoded)):
        logits = classifier.model(**encoded.batch(np.array([row]))).logits[0]
        for total, value in zip(sums.values(), diagonal(logits, list(named.values())), strict=True):
            total.add_(value, alpha=1 / len(encoded))
    return {name: total.cpu().numpy() for name, total in sums.items()}


def diagonal(logits: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Σ_y p(y|x) (∂ log p(y|x))² of one text, in each parameter's shape, float64.

    Args:
        logits: (classes,), a function of the parameters.
    """
    logs = logits.log_softmax(0)
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for label, log in enumerate(logs):
        gradients = torch.autograd.grad(
            log, list(parameters), retain_graph=label + 1 < len(logs), allow_unused=True
        )
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient.double().square_(), alpha=float(log.detach().exp()))
    return sums


def _same_length(lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        size = max(1, _BATCH_TOKENS // max(int(length), 1))
        for start in range(0, len(rows), size):
            yield rows[start : start + size]
