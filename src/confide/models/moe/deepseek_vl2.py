"""The language model of DeepSeek-VL2-Tiny: DeepSeek-V2's mixture under plain attention, with a head.

transformers has its body as a part of DeepSeek-OCR-2. Importing this module makes the Auto classes know it.
"""

from __future__ import annotations

from transformers import AutoModel, AutoModelForSequenceClassification, DeepseekOcr2TextConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import (
    DeepseekOcr2TextModel,
    DeepseekOcr2TextPreTrainedModel,
)

_FAMILY = "deepseek_ocr2_text"


class DeepseekOcr2TextForSequenceClassification(
    GenericForSequenceClassification,  # type: ignore[misc]
    DeepseekOcr2TextPreTrainedModel,  # type: ignore[misc]
):
    """DeepSeek-VL2-Tiny's language model with a linear head on its last token."""

    config_class = DeepseekOcr2TextConfig
    _can_set_experts_implementation_cached_value = True  # else asked of this file, which has no experts


AutoModel.register(DeepseekOcr2TextConfig, DeepseekOcr2TextModel, exist_ok=True)
AutoModelForSequenceClassification.register(
    DeepseekOcr2TextConfig, DeepseekOcr2TextForSequenceClassification, exist_ok=True
)
if get_checkpoint_conversion_mapping(_FAMILY) is None:
    # Stored one by one, in memory stacked, as DeepSeek-V2's experts are.
    register_checkpoint_conversion_mapping(_FAMILY, get_checkpoint_conversion_mapping("qwen2_moe"))
