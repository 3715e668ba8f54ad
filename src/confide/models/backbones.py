"""Public pretrained encoders, with a head put on top."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confide.errors import ModelError
from confide.models.language import body_prefix, head_of, padded, tied, with_objective
from confide.models.moe.families import MIXTURES, refuse
from confide.release import vl2
from confide.release.format import PREPROCESSOR, TEXT_CLASSES, Problem, preprocessor
from confide.release.names import CLASSES, DECODERS, PREFIXES, canonical, model_config
from confide.release.tensors import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Classifier:
    """An encoder with a freshly initialised head.

    Attributes:
        model: transformers' own class for the problem, in evaluation mode: dropout is off, because a mask
            that records share would tie one record's gradient to the others'.
        tokenizer: the base's own; None for images.
        prefix: what the classifier puts before the encoder's parameter names, such as `bert.`.
        head: names of the head's parameters; of a language model, of all tensors outside its body that
            aren't tied to it.
        problem: what it reads and says; of a language model, with its objective.
        colours: mean and deviation of each colour that images are normalised by.
        unused: tensors of the base that this class has no use for (a pooler, where the head reads something
            else); released as they are, so that releases for different problems can be merged.
    """

    model: nn.Module
    tokenizer: Any
    prefix: str
    head: tuple[str, ...]
    problem: Problem = TEXT_CLASSES
    colours: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    unused: Mapping[str, Tensor] = field(default_factory=dict)


def load_classifier(
    folder: Path, labels: tuple[str, ...], seed: int, problem: Problem | None = None
) -> Classifier:
    """Load the base with a new head.

    Args:
        folder: from `resolve`.
        labels: class names in the order of the logits; none for a number.
        seed: fixes the head's initial weights; public.
        problem: what it is for; classes of texts if left out.

    Raises:
        ModelError: not an encoder that transformers has such a head for, or weights are missing from it.
    """
    import torch

    classifier, stored = _load(folder, labels, problem or TEXT_CLASSES)
    if classifier.problem.target == "text":  # its head is the base's
        if missing := sorted(set(classifier.head) - stored):
            raise _lacks(folder, missing, "the language model's output layer")
        return classifier
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


def load_trained(folder: Path, labels: tuple[str, ...], problem: Problem | None = None) -> Classifier:
    """Load a classifier that was trained, with its own head.

    Raises:
        ModelError: as `load_classifier`, or the head for these labels is not there.
    """
    classifier, stored = _load(folder, labels, problem or TEXT_CLASSES)
    absent = sorted(set(classifier.head) - stored)
    if absent:
        raise ModelError(
            f"{folder} holds no head for {f'{len(labels)} labels' if labels else 'a number'}: {absent[0]} is "
            "missing or has another shape"
        )
    return classifier


def load_body(folder: Path, labels: tuple[str, ...], problem: Problem) -> Classifier:
    """Load one task's model out of a merge, whose own file holds no head: that is still to be filled in.

    Raises:
        ModelError: as `load_classifier`.
    """
    return _load(folder, labels, problem)[0]


def load_encoder(folder: Path) -> tuple[nn.Module, Any]:
    """The base without a head, in float32 and evaluation mode, and its tokenizer; of two parts the encoder.

    Raises:
        ModelError: it can't be loaded, or weights are missing.
    """
    import torch
    import transformers

    config = _config(folder)
    name = "SwitchTransformersEncoderModel" if config.model_type == "switch_transformers" else "AutoModel"
    with torch.random.fork_rng(devices=[]), _quiet():
        model, found = _weights(getattr(transformers, name), folder, config)
        tokenizer = _tokenizer(folder, config, TEXT_CLASSES)
    if found["missing_keys"]:
        raise ModelError(
            f"{folder} lacks {len(found['missing_keys'])} tensors of the model, starting with "
            f"{sorted(found['missing_keys'])[0]}"
        )
    if name == "AutoModel" and model.config.is_encoder_decoder:
        model = model.get_encoder()
    return model.eval(), tokenizer


def answer_in(classifier: Classifier, label_range: tuple[float, float]) -> None:
    """Scale a head that was trained to answer in [-1, 1] back to the range of the labels, in place."""
    import torch

    low, high = label_range
    last = next(name for name in reversed(classifier.head) if name.endswith(".weight"))
    with torch.no_grad():
        classifier.model.get_parameter(last).mul_((high - low) / 2)
        bias = classifier.model.get_parameter(last.removesuffix("weight") + "bias")
        bias.mul_((high - low) / 2).add_((high + low) / 2)


def stored_names(classifier: Classifier, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors under the names that transformers writes, which are those that the base's file has.

    In memory, version 5 calls the parameters of some families otherwise. What is tied is written once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    twice = tied(classifier.model)
    once = {name: tensor for name, tensor in state.items() if name not in twice}
    return revert_weight_conversion(classifier.model, once)  # type: ignore[no-any-return]


def _load(folder: Path, labels: tuple[str, ...], problem: Problem) -> tuple[Classifier, set[str]]:
    """The classifier, and the names of the parameters that the folder holds."""
    import torch
    import transformers

    config = _config(folder)
    problem = with_objective(problem, config, folder)
    if problem.target != "text":
        _require_encoder(config, folder, problem)
    if problem.target == "number":
        config.num_labels, config.problem_type = 1, "regression"
    elif problem.target != "text":
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
        config.problem_type = "single_label_classification"
    with torch.random.fork_rng(devices=[]), _quiet():
        loader = getattr(transformers, problem.loader)
        model, found = _weights(loader, folder, config, ignore_mismatched_sizes=True)
    prefix = body_prefix(model)
    absent = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    head = head_of(model, prefix, problem)
    missing = sorted(name for name in absent if name.startswith(prefix) and name not in head)
    if missing:
        raise _lacks(folder, missing, "the encoder")
    images = problem.inputs == "image"
    if config.model_type in MIXTURES:
        model.config.use_cache = False
    classifier = Classifier(
        model.eval(),
        None if images else padded(_tokenizer(folder, config, problem), model, folder),
        prefix,
        head,
        problem,
        _colours(folder) if images else None,
        _unused(folder, prefix, found["unexpected_keys"]),
    )
    return classifier, set(model.state_dict()) - absent


def _lacks(folder: Path, missing: list[str], what: str) -> ModelError:
    return ModelError(
        f"{folder} lacks {len(missing)} tensors of {what} (or has them in another shape), starting with "
        f"{missing[0]}; training from random layers is not fine-tuning, so this base is refused"
    )


def _config(folder: Path) -> Any:
    """The configuration of a base; the Auto classes then know its family.

    Raises:
        ModelError: it can't be read, weights are quantised, or the family can't be trained.
    """
    from transformers import AutoConfig

    said = model_config(folder)
    kind = said["model_type"]
    refuse(kind)
    if kind in CLASSES:
        import_module(CLASSES[kind])
    if _holds_more(folder):
        try:
            config = AutoConfig.for_model(**said)
        except Exception as error:  # a class for each kind of wrong value
            raise ModelError(
                f"{folder / 'config.json'} describes no language model that can be built: {error}"
            ) from error
    else:
        config = _read(AutoConfig, folder)
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{folder} holds quantised weights, whose gradients aren't those of the model that is released; "
            "save it dequantised, in float32 or bfloat16, and train that"
        )
    return config


def _weights(factory: Any, folder: Path, config: Any, **options: Any) -> tuple[Any, Any]:
    """The model in float32, and what transformers says of the tensors that it found."""
    import torch

    inside = _holds_more(folder)
    model, found = _read(
        factory,
        folder,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        key_mapping={f"^{re.escape(vl2.PREFIX)}": ""} if inside else None,
        **options,
    )
    if inside:
        model._weight_conversions = None  # else a release's names would begin with that prefix, too
    return model, found


def _holds_more(folder: Path) -> bool:
    """Whether a folder's model reads images too, and only its language model is used here."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(config["model_type"] == vl2.MODEL_TYPE)


def _tokenizer(folder: Path, config: Any, problem: Problem) -> Any:
    from transformers import AutoTokenizer

    # Byte-level vocabularies tell a word from the rest of one by the space before it.
    spaced = (
        {"add_prefix_space": True} if problem.target == "tokens" and config.model_type in _BYTE_LEVEL else {}
    )
    tokenizer = _read(AutoTokenizer, folder, config=config, **spaced)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers makes up an empty one
        raise ModelError(f"{folder} holds no tokenizer; copy the files of the one that it was trained with")
    return tokenizer


_LEFT_OVER = re.compile(r"\.attn\.(masked_)?bias$|\.EncDecAttention\.relative_attention_bias\.weight$")
_BYTE_LEVEL = ("roberta", "longformer", "modernbert", "deberta")


def _colours(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    file = folder / PREPROCESSOR
    try:
        base = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found = preprocessor(base, 1)
        mean, std = (tuple(float(value) for value in found[name]) for name in ("image_mean", "image_std"))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} can't be read: {error}") from error
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ModelError(
            f"{file}: image_mean and image_std need a value for each of 3 colours, above 0 for std"
        )
    return mean, std


def _unused(folder: Path, prefix: str, names: Any) -> dict[str, Tensor]:
    """The body's own among the tensors that a model class left out: a pooler, old constants."""
    import torch

    checkpoint = Checkpoint.open(folder)
    inner = prefix if any(name.startswith(prefix) for name in checkpoint.names) else ""
    left_out = {name for name in names if name.removeprefix(inner).startswith("pooler.")}
    left_out |= {name for name in checkpoint.names if name.startswith(inner) and _LEFT_OVER.search(name)}
    return {
        prefix + canonical(name.removeprefix(inner)): torch.from_numpy(checkpoint.numpy(name).copy())
        for name in sorted(left_out)
        if name in checkpoint
    }


def _read(factory: Any, folder: Path, **options: Any) -> Any:
    try:
        return factory.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises a different class for each way of being broken
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{folder} can't be loaded with {factory.__name__}: {first}") from error


def _require_encoder(config: Any, folder: Path, problem: Problem) -> None:
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    if problem.inputs == "image":
        if _holds_more(folder):
            raise ModelError(
                f"{folder} holds a DeepSeek-VL2, of which only the language model is used here, for texts"
            )
        if kind not in PREFIXES or kind not in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
            raise ModelError(
                f"{folder} holds a {kind!r} model, which does not read images; use a ViT, DeiT or DINOv2"
            )
        assert problem.image_size is not None
        _require_size(config, folder, problem.image_size)
        return
    if kind == "moe_bert" and problem.target != "tokens":
        return
    if kind in MIXTURES:
        if problem != TEXT_CLASSES:  # most decoders put nothing between the texts of a pair
            raise ModelError(f"a {kind!r} model is trained here for single texts with one class each")
        return
    pretrained = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in DECODERS
    mapping = (
        auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
        if problem.target == "tokens"
        else auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    )
    whole = config.is_encoder_decoder or getattr(config, "is_decoder", False)
    if not (pretrained and kind in mapping) or whole:
        raise ModelError(
            f"{folder} holds a {kind!r} model, which is not an encoder for classification; "
            "use an encoder such as BERT, or a decoder such as Llama"
        )


def _require_size(config: Any, folder: Path, size: int) -> None:
    if size % config.patch_size:
        raise ModelError(
            f"{folder} reads patches of {config.patch_size} pixels; the image size {size} is no multiple"
        )
    if config.model_type != "dinov2" and size != config.image_size:
        raise ModelError(
            f"{folder} has positions for images of {config.image_size} pixels only, not {size}; "
            f"use --image-size {config.image_size}"
        )


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
