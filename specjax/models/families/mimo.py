"""MiMo (2505.07608): Qwen 2 with an additional head for multi-token prediction, which `specjax.formats.native`
reads."""

from __future__ import annotations

import dataclasses

from specjax.models.families.qwen2 import QWEN2

MTP_LAYERS = "model.mtp_layers.{}"
"""Name of the stored tensors of one head for multi-token prediction."""
MIMO = dataclasses.replace(
    QWEN2, model_type="mimo", architecture="MiMoForCausalLM", others=(*QWEN2.others, r"^model\.mtp_layers\.")
)
