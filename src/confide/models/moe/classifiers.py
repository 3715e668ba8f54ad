"""Mixtures of experts with a head for whole texts, where transformers has none for the family.

Importing this module makes the Auto classes of transformers know them. Their encoders are transformers' own,
under the names that its classes give them, so that these load without confide; the whole classifier doesn't.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    GraniteMoeConfig,
    Llama4TextConfig,
    OlmoeConfig,
    SwitchTransformersConfig,
    SwitchTransformersEncoderModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoePreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4PreTrainedModel
from transformers.models.olmoe.modeling_olmoe import OlmoePreTrainedModel
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersPreTrainedModel,
)


class OlmoeForSequenceClassification(GenericForSequenceClassification, OlmoePreTrainedModel):  # type: ignore[misc]
    """OLMoE with a linear head on its last token."""

    config_class = OlmoeConfig
    _can_set_experts_implementation_cached_value = True  # else asked of this file, which has no experts


class GraniteMoeForSequenceClassification(GenericForSequenceClassification, GraniteMoePreTrainedModel):  # type: ignore[misc]
    """Granite-MoE with a linear head on its last token."""

    config_class = GraniteMoeConfig
    _can_set_experts_implementation_cached_value = True


class Llama4ForSequenceClassification(GenericForSequenceClassification, Llama4PreTrainedModel):  # type: ignore[misc]
    """Llama 4's language model with a linear head on its last token."""

    config_class = Llama4TextConfig


class SwitchTransformersForSequenceClassification(SwitchTransformersPreTrainedModel):  # type: ignore[misc]
    """Switch's encoder with a linear head on the mean of its tokens."""

    config_class = SwitchTransformersConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.switch_transformers = SwitchTransformersEncoderModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SequenceClassifierOutput:
        """(rows, length) token ids and their mask → `logits` (rows, labels)."""
        hidden = self.switch_transformers(input_ids, attention_mask=attention_mask).last_hidden_state
        if attention_mask is None:
            return SequenceClassifierOutput(logits=self.score(hidden.mean(1)))
        mask = attention_mask[..., None].to(hidden.dtype)
        return SequenceClassifierOutput(logits=self.score((hidden * mask).sum(1) / mask.sum(1)))


for _class in (
    OlmoeForSequenceClassification,
    GraniteMoeForSequenceClassification,
    Llama4ForSequenceClassification,
    SwitchTransformersForSequenceClassification,
):
    AutoModelForSequenceClassification.register(_class.config_class, _class, exist_ok=True)
