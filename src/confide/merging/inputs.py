"""What can be merged: releases, merges, plain model folders, and adapters, all read under the base's names.

Only a release carries a claim. A plain folder or an adapter is read as it is, and its merge claims nothing.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from confide.errors import MergeError
from confide.merging.fit import LOGITS, check_base, check_heads, check_vocabulary
from confide.merging.lora import Adapter, is_adapter
from confide.merging.vectors import CHUNK, Encoder, TaskVectors
from confide.privacy import statement as statements
from confide.privacy.composition import check
from confide.privacy.statement import Base, Said, Statement
from confide.release import format
from confide.release.format import Head, ReleaseInfo
from confide.release.hashes import encoder_hash, tensors_hash
from confide.release.names import PREFIXES, encoder_prefix, encoder_tensors, model_type, offset
from confide.release.tensors import Checkpoint
from confide.release.write import check_task_name, verify

HEADS = ("classifier", "score")
"""What heads are called where the family doesn't tell: a name begins with one of these."""

_OUTPUT = "lm_head.weight"
_TIED = (_OUTPUT, "cls.predictions.decoder.weight")
_CONV1D = re.compile(r"\.(c_attn|q_attn|c_proj|c_fc)\.weight$")
_STACKED = re.compile(r"\.experts\.(gate_up|down)_proj$")
_TURNED = {
    **dict.fromkeys(("gpt2", "imagegpt", "decision_transformer", "openai-gpt"), _CONV1D),
    **dict.fromkeys(("gpt_oss", "llama4_text"), _STACKED),
}
"""Families that keep weights as (in, out), and of which layers: transformers' Conv1D, or stacked experts."""
_LONGEST = 512


@dataclass(frozen=True)
class PublicBase:
    """The model that all inputs were trained from.

    Attributes:
        folder: config.json, weights, tokenizer.
        family: its `model_type`.
        prefix: what its own folder puts before the names.
        weights: of its body, under canonical names.
        hash: of the body's content.
    """

    folder: Path
    family: str
    prefix: str
    weights: Encoder
    hash: str

    @property
    def turned(self) -> frozenset[str]:
        """Weights of layers that are kept as (in, out), where all others are (out, in)."""
        names = _TURNED.get(self.family)
        return frozenset(name for name in self.weights.names if names and names.search(name))


@dataclass(frozen=True)
class Input:
    """A model that is merged.

    Attributes:
        path: its folder.
        kind: what the folder holds.
        name: what the report calls it where it has no head.
        prefix: what its whole model puts before the body's names.
        statement: its claim; None if it came without one, so that nothing can be claimed for the merge.
        said: the statement as it was written and signed.
        weights: of the body, under the base's names.
        heads: each with the tensors that it consists of.
    """

    path: Path
    kind: str
    name: str
    prefix: str
    statement: Statement | None
    said: Said | None
    weights: Encoder | Adapter
    heads: tuple[tuple[Head, Encoder], ...]

    @property
    def tasks(self) -> str:
        """What the merge report calls it: a path would tell where its owner keeps it."""
        return "+".join(head.task for head, _ in self.heads) or self.name


def read_inputs(
    models: Sequence[Path],
    base: Path,
    heads: Sequence[str] | None = None,
    tasks: Sequence[str | None] | None = None,
) -> tuple[PublicBase, tuple[Input, ...]]:
    """Open the models and their base, checked against each other as far as names, families and hashes go.

    Args:
        models: folders of releases, merges, transformers models, or PEFT adapters.
        base: folder of the public base.
        heads: patterns of tensors that stay per task in plain folders (`score`, `lm_head`, `*.decoder.*`); a
            name that begins with one matches too. None: what stands outside the family's encoder.
        tasks: what to call each model's head; None leaves a release's own name, or the folder's.

    Raises:
        MergeError, ModelError, ReleaseError: an input can't be read, isn't what its statement says, or was
            trained from another base; the message names it.
        PrivacyError: a statement is altered, or claims less than its events cost.
    """
    public = _open_base(Path(base), heads)
    folders = [Path(model) for model in models]
    names = list(tasks or [None] * len(folders))
    releases = {
        path: _read_release(path, task)
        for path, task in zip(folders, names, strict=True)
        if (path / format.FILE_NAME).exists()
    }
    for item in releases.values():
        public = _under_names_of(public, item)
    inputs = tuple(
        releases[path] if path in releases else _read_plain(path, task, public, heads)
        for path, task in zip(folders, names, strict=True)
    )
    present = {name for item in inputs for name in item.weights.names}
    if _OUTPUT in public.weights.names and _OUTPUT not in present:
        body = _select(public.weights, set(public.weights.names) - {_OUTPUT})
        public = replace(public, weights=body, hash=tensors_hash(body.checkpoint, body.stored))
    check_heads(inputs)
    check_base(inputs, public)
    check_vocabulary(inputs, public.folder)
    return public, inputs


def task_vectors(inputs: Sequence[Input], public: PublicBase) -> TaskVectors:
    """What each model adds to the base.

    Raises:
        MergeError: a tensor that doesn't fit (`TaskVectors`).
    """
    return TaskVectors(public.weights, [item.weights for item in inputs], public.turned)


def identity(inputs: Sequence[Input], public: PublicBase) -> Base:
    """The base as a statement names it."""
    names = [item.statement.base.name for item in inputs if item.statement]
    return Base(name=names[0] if names else public.folder.resolve().name, hash=public.hash)


def statement_of(item: Input, base: Base) -> Statement:
    """What an input states; for one that came without a statement, that nothing is claimed."""
    return item.statement or Statement(
        kind="training",
        confide=version("confide"),
        claim=None,
        no_claim=f"the model for {item.tasks} came without a statement",
        base=base,
        weights={},
        spendings=(),
        assumptions=(),
    )


def _open_base(folder: Path, heads: Sequence[str] | None) -> PublicBase:
    checkpoint, family = Checkpoint.open(folder), model_type(folder)
    prefix, own = _layout(checkpoint, family, heads)
    weights = _body(folder, checkpoint, prefix, own)
    return PublicBase(folder, family, prefix, weights, tensors_hash(checkpoint, weights.stored))


def _layout(checkpoint: Checkpoint, family: str, heads: Sequence[str] | None) -> tuple[str, set[str]]:
    """What stands before the body's names, and which tensors are a head's."""
    if heads is None and family in PREFIXES:
        prefix = encoder_prefix(checkpoint, family)
        return prefix, {name for name in checkpoint.names if not name.startswith(prefix)}
    patterns = HEADS if heads is None else heads
    return "", {name for name in checkpoint.names if any(_matches(name, p) for p in patterns)}


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern + ".") or fnmatch.fnmatchcase(name, pattern)


def _body(folder: Path, checkpoint: Checkpoint, prefix: str, heads: Collection[str]) -> Encoder:
    weights = Encoder(str(folder), checkpoint, encoder_tensors(checkpoint, prefix, heads))
    twice = {name for name in _TIED if name in weights.names and _is_tied(weights, name, folder)}
    return _select(weights, set(weights.names) - twice) if twice else weights


def _select(weights: Encoder, names: Collection[str]) -> Encoder:
    return Encoder(
        weights.label, weights.checkpoint, {n: stored for n, stored in weights.stored.items() if n in names}
    )


def _is_tied(weights: Encoder, output: str, folder: Path) -> bool:
    """Whether an output layer is the embedding, saved a second time; transformers ties it when it loads."""
    if not _config(folder).get("tie_word_embeddings", False):
        return False
    same = [
        name
        for name in weights.names
        if name != output and "embed" in name and weights.shape(name) == weights.shape(output)
    ]
    if any(_equal(weights, output, name) for name in same):
        return True
    raise MergeError(
        f"{folder}: config.json ties {output} to the embeddings (tie_word_embeddings), but its values "
        "are others"
    )


def _equal(weights: Encoder, one: str, other: str) -> bool:
    size = int(np.prod(weights.shape(one)))
    return all(
        np.array_equal(weights.read(one, start, start + CHUNK), weights.read(other, start, start + CHUNK))
        for start in range(0, size, CHUNK)
    )


def _under_names_of(public: PublicBase, item: Input) -> PublicBase:
    """The base under a release's names: a decoder's base is saved whole, with `model.` before its body."""
    prefix = offset(public.weights.names, item.weights.names)
    if not prefix:
        return public
    inner = {n.removeprefix(prefix): s for n, s in public.weights.stored.items() if n.startswith(prefix)}
    weights = Encoder(public.weights.label, public.weights.checkpoint, inner)
    return replace(public, prefix=prefix, weights=weights, hash=tensors_hash(weights.checkpoint, inner))


def _read_release(path: Path, task: str | None) -> Input:
    info = format.read(path)
    # A statement that is there but wrong is an error; only its absence is "nothing is claimed".
    statement = verify(path) if (path / statements.FILE_NAME).exists() else None
    if statement:
        check(statement)
    checkpoint = Checkpoint.open(path)
    own = [name for head in info.heads for name in head.tensors] if info.kind == "model" else []
    for name in checkpoint.names:
        if name not in own and not name.startswith(info.weights_prefix):
            raise MergeError(f"tensor {name} of {path} is neither the encoder's nor a declared head's")
    stored = encoder_tensors(checkpoint, info.weights_prefix, own)
    return Input(
        path,
        "merge" if info.kind == "merged" else "release",
        path.resolve().name,
        info.encoder_prefix,
        statement,
        statements.load(path) if statement else None,
        Encoder(str(path), checkpoint, stored),
        _release_heads(path, info, checkpoint, task),
    )


def _release_heads(
    path: Path, info: ReleaseInfo, checkpoint: Checkpoint, task: str | None
) -> tuple[tuple[Head, Encoder], ...]:
    if task is not None and len(info.heads) != 1:
        raise MergeError(f"{path} has {len(info.heads)} heads, so `task: {task}` can't name one of them")
    found = []
    for head in info.heads:
        source = checkpoint
        if info.kind == "merged":
            source = Checkpoint.open(path / "heads" / head.task / format.WEIGHTS)
        for name in head.tensors:
            if name not in source:
                raise MergeError(f"tensor {name} of the head for task {head.task!r} is missing from {path}")
        weights = Encoder(str(path), source, {name: name for name in head.tensors})
        found.append((head.model_copy(update={"task": task}) if task else head, weights))
    return tuple(found)


def _read_plain(path: Path, task: str | None, public: PublicBase, heads: Sequence[str] | None) -> Input:
    if not path.is_dir():
        raise MergeError(f"{path} doesn't exist, or is no folder; a model is a folder")
    name = task or path.resolve().name
    if is_adapter(path):
        adapter = Adapter(path, public.weights)
        _check_adapters_base(adapter, public)
        return Input(
            path,
            "adapter",
            name,
            adapter.prefix,
            None,
            None,
            adapter,
            _plain_heads(path, name, adapter.checkpoint, adapter.heads),
        )
    checkpoint, family = Checkpoint.open(path), model_type(path)
    if family != public.family:
        raise MergeError(
            f"the models are of different families: {path} is a {family!r}, base {public.folder} a "
            f"{public.family!r}"
        )
    prefix, own = _layout(checkpoint, family, heads)
    weights = _body(path, checkpoint, prefix, own)
    if more := offset(weights.names, public.weights.names):
        inner = {n.removeprefix(more): s for n, s in weights.stored.items() if n.startswith(more)}
        odd = sorted(n for n in weights.names if not n.startswith(more))
        if odd:
            raise MergeError(f"tensor {odd[0]} of {path} is not in base {public.folder}, nor called a head")
        weights, prefix = Encoder(str(path), checkpoint, inner), more
    whole = PREFIXES.get(family, prefix) if heads is None else prefix
    stored = {head: head for head in sorted(own)}
    return Input(
        path, "folder", name, whole, None, None, weights, _plain_heads(path, name, checkpoint, stored)
    )


def _plain_heads(
    path: Path, task: str, checkpoint: Checkpoint, stored: Mapping[str, str]
) -> tuple[tuple[Head, Encoder], ...]:
    if not stored:
        return ()
    check_task_name(task)
    weights = Encoder(str(path), checkpoint, stored)
    logits = next((name for name in LOGITS if name in stored), None)
    config = _config(path)
    count = weights.shape(logits)[0] if logits else 0
    named = config.get("id2label")
    labels = (
        tuple(str(named[key]) for key in sorted(named, key=int))
        if isinstance(named, dict)
        else tuple(f"LABEL_{number}" for number in range(count))
    )
    head = Head(
        task=task,
        labels=labels if logits else (),
        labels_from="declared",
        max_length=_max_length(path, config),
        tensors=tuple(sorted(stored)),
    )
    return ((head, weights),)


def _max_length(folder: Path, config: Mapping[str, Any]) -> int:
    tokenizer = _json(folder / "tokenizer_config.json").get("model_max_length")
    places = config.get("max_position_embeddings")
    known = [int(n) for n in (tokenizer, places) if isinstance(n, int | float) and n > 2]
    return min([*known, _LONGEST])


def _config(folder: Path) -> dict[str, Any]:
    return _json(folder / "config.json")


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise MergeError(f"{file} can't be read as JSON")
    return content


def _check_adapters_base(adapter: Adapter, public: PublicBase) -> None:
    """An adapter only names its base; where that is a folder here, its content is compared."""
    named = adapter.config.get("base_model_name_or_path")
    folder = Path(named) if isinstance(named, str) and named else None
    if folder is None or not (folder / "config.json").exists() or folder.resolve() == public.folder.resolve():
        return
    checkpoint = Checkpoint.open(folder)
    prefix, own = _layout(checkpoint, model_type(folder), None)
    theirs = encoder_hash(checkpoint, prefix, own)
    if theirs != public.hash:
        raise MergeError(
            f"{adapter.label} adapts {folder} ({theirs}), but the base of this merge is {public.folder} "
            f"({public.hash}); models of different bases can't be merged"
        )
