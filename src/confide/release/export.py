"""One task of a merge as a whole model for plain transformers; LoRA of a release as an adapter for PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from confide import files
from confide.errors import ReleaseError
from confide.privacy import statement as statements
from confide.privacy.statement import Statement
from confide.release import format
from confide.release.shards import SHARD_SIZE, Values, write_shards
from confide.release.tensors import STORAGE, Array, Checkpoint
from confide.release.write import copy_reader, verify, write_release

_PIECE = 1 << 20
_OUTPUT = "lm_head.weight"
_CLASSIFIERS = {
    "albert": "AlbertForSequenceClassification",
    "bert": "BertForSequenceClassification",
    "camembert": "CamembertForSequenceClassification",
    "deberta": "DebertaForSequenceClassification",
    "deberta-v2": "DebertaV2ForSequenceClassification",
    "gemma": "GemmaForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "opt": "OPTForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "electra": "ElectraForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
    "mpnet": "MPNetForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
}
_IMAGES = {
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "vit": "ViTForImageClassification",
}


def export(
    folder: Path, task: str | None, out: Path, *, overwrite: bool = False, shard_size: int = SHARD_SIZE
) -> Statement:
    """Write one task of a merge as a model of its own: body and head under the classifier's names.

    It is computed from the merge alone, so it claims what the merge claims.

    Args:
        folder: a merge.
        task: which head; may be left out when there is only one.
        out: the folder to make.
        overwrite: swap out a folder that is there.
        shard_size: largest file of weights in bytes.

    Raises:
        ReleaseError: not a merge, altered, no such head; `out` exists or can't be written.
        PrivacyError: no valid statement.
    """
    folder = Path(folder)
    info = format.read(folder)
    if info.kind != "merged":
        raise ReleaseError(f"{folder} is one task's model already; copy it, or take its LoRA with --peft")
    statement = verify(folder)
    head = info.head(task) if task is not None else info.only_head()
    body, own = Checkpoint.open(folder), Checkpoint.open(folder / "heads" / head.task / format.WEIGHTS)
    tensors: dict[str, Values] = {info.encoder_prefix + name: _stored(body, name) for name in body.names}
    tensors |= {name: _stored(own, name) for name in own.names}

    def save(side: Path) -> None:
        write_shards(side, tensors, shard_size)
        files.write_json(side / "config.json", task_config(folder, head))
        copy_reader(folder, side, head)

    whole = format.ReleaseInfo(kind="model", encoder_prefix=info.encoder_prefix, heads=(head,))
    return write_release(Path(out), save=save, info=whole, statement=statement, overwrite=overwrite)


def export_adapter(folder: Path, out: Path) -> Statement:
    """Write a release's LoRA and head as a PEFT adapter of its base, with the statement that has their hash.

    Args:
        folder: a release of `confide train --method raptor`.
        out: the folder to make.

    Raises:
        ReleaseError: not a release, altered, or without LoRA; `out` exists or can't be written.
        PrivacyError: no valid statement.
    """
    folder = Path(folder)
    statement = verify(folder)
    if not (folder / format.ADAPTER).is_dir():
        raise ReleaseError(
            f"{folder} holds no LoRA: only releases of `confide train --method raptor` do, and only where "
            "nothing but LoRA and the head was trained"
        )
    with files.new_folder(Path(out)) as side:
        for name in (format.ADAPTER_CONFIG, format.ADAPTER_WEIGHTS):
            shutil.copyfile(folder / format.ADAPTER / name, side / name)
        shutil.copyfile(folder / statements.FILE_NAME, side / statements.FILE_NAME)
    return statement


def _stored(checkpoint: Checkpoint, name: str) -> Values:
    def pieces() -> Iterator[Array]:
        for piece in checkpoint.pieces(name):
            yield np.frombuffer(piece, STORAGE[checkpoint.dtype(name)])

    return checkpoint.dtype(name), checkpoint.shape(name), pieces()


def task_config(folder: Path, head: format.Head) -> dict[str, Any]:
    """What config.json says of a merge's model with one head on top.

    Args:
        folder: the merge, whose own config.json is of the plain body.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    said = format.head_config(head)
    family = str(config.get("model_type"))
    classifier = _IMAGES.get(family) if head.problem.inputs == "image" else _CLASSIFIERS.get(family)
    if head.problem.target == "tokens" and classifier:
        classifier = classifier.replace("ForSequenceClassification", "ForTokenClassification")
    if classifier and said:
        said["architectures"] = [classifier]
    if said and config.get("pad_token_id") is None and (end := config.get("eos_token_id")) is not None:
        # As training does: a decoder's classifier looks for the last token before padding.
        said["pad_token_id"] = end[0] if isinstance(end, list) else end
    if _OUTPUT in head.tensors:  # transformers would write the embeddings over a task's own output layer
        said["tie_word_embeddings"] = False
    return {**config, **said}
