"""MiMo (2505.07608): Qwen 2 with a head for multi-token prediction beside it, which `specjax.drafters.formats.native`
reads."""

from __future__ import annotations

import dataclasses

from specjax.models.families.qwen2 import QWEN2

MTP_LAYERS = "model.mtp_layers.{}"
"""Its heads' tensors."""
MIMO = dataclasses.replace(
    QWEN2, model_type="mimo", architecture="MiMoForCausalLM", others=(*QWEN2.others, r"^model\.mtp_layers\.")
)
