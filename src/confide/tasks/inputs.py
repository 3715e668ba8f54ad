"""What a model reads of a record, by its problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confide.models.backbones import Classifier
from confide.models.tail import Source
from confide.tasks.images import Images
from confide.tasks.language import encode_language
from confide.tasks.records import Text
from confide.tasks.text import Normalised, encode


def source(classifier: Classifier, inputs: Sequence[Text] | Images, max_length: int) -> Source:
    """What a model reads of some inputs; of a language model, with what it is asked for.

    Raises:
        DataError: as `encode`, or `encode_language`.
    """
    if isinstance(inputs, Images):
        assert classifier.colours is not None
        config: Any = classifier.model.config
        return Normalised(inputs, *classifier.colours, (inputs.size // int(config.patch_size)) ** 2 + 1)
    if classifier.problem.target == "text":
        start = getattr(classifier.model.config, "decoder_start_token_id", None)
        return encode_language(classifier.tokenizer, inputs, max_length, classifier.problem, start)
    return encode(classifier.tokenizer, inputs, max_length, classifier.problem)
