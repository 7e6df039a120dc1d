"""Drafts that are known and not read. Each is refused with its reason, instead of an error that it is no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.errors import ModelError
from specjax.formats import torch_file
from specjax.models import hf
from specjax.models.files import INDEX, WEIGHTS
from specjax.models.weights import opened

_MLA = "an EAGLE-3 draft with a layer of DeepSeek's (latent attention)"
_GEMMA = "a DeepSpec draft with layers of Gemma 4's"
CLASSES = {
    "Eagle3DeepseekV2ForCausalLM": _MLA,
    "Eagle3DeepseekV3ForCausalLM": _MLA,
    "DeepseekV3ForCausalLMEagle3": _MLA,
    "Gemma4DSparkModel": _GEMMA,
    "Gemma4Eagle3Model": _GEMMA,
    "DominoDraftModel": "a Domino draft, blocks with a recurrent head",
    "QwenDFlareDraftModel": "a DFlare draft, which reads another layer of its target in each of its own",
    "CosyVoice3Eagle3LlamaForCausalLM": "an EAGLE-3 draft of speech tokens",
    "EAGLEModel": "an EAGLE 1 or 2 draft",
    "EagleLlamaForCausalLM": "an EAGLE 1 or 2 draft",
    "LlamaForCausalLMEagle": "an EAGLE 1 or 2 draft",
    "MedusaModel": "a Medusa draft as vLLM stores it",
    "MLPSpeculatorPreTrainedModel": "an MLP speculator",
}
"""Class named in config.json -> description of the draft."""
READ = (
    "EAGLE-3 (LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, Qwen3Eagle3Model, and LlamaForCausalLM with "
    "draft_vocab_size), P-EAGLE (PEagleDraftModel), blocks (DFlashDraftModel, DFlash2DraftModel, DSparkDraftModel, "
    "Qwen3DSparkModel), Medusa, and what speculators writes"
)


def refuse_unread(settings: Mapping[str, Any]) -> None:
    """Raises `ModelError` for the config.json of a draft that no form reads."""
    told = settings.get("architectures")
    named = [str(name) for name in told] if isinstance(told, (list, tuple)) else []
    for name in named:
        if name in CLASSES:
            raise ModelError(f"config.json: architectures={named}: is {CLASSES[name]}, which is not read; {_REMEDY}")
    of_blocks = settings.get("dflash_config")
    if isinstance(of_blocks, dict) and of_blocks.get("projector_type") is not None:
        told = f"dflash_config.projector_type={of_blocks['projector_type']!r}"
        raise ModelError(f"config.json: {told} of architectures={named} is not read; {_REMEDY}")
    marks = sorted(name for name in hf.OF_DRAFTS & settings.keys() if settings[name] is not None)
    if marks and settings.get(hf.DRAFTER) is None:
        raise ModelError(
            f"config.json: is a draft ({', '.join(marks)}) of architectures={named}, which is not read; of other "
            f"makers' drafts are: {READ}"
        )


_REMEDY = "use a draft of another kind of the same target, or distill one"


def refuse_by_weights(directory: Path) -> None:
    """Raises `ModelError` for a draft whose config.json is that of a model and whose weights are not. EAGLE 1 and 2
    have ``fc``, which mixes token and state, beside one layer."""
    of_torch, names = directory / "pytorch_model.bin", set()
    if any((directory / name).exists() for name in (WEIGHTS, INDEX)):
        with opened(directory) as stored:
            names = set(stored)
    elif of_torch.exists():
        names = torch_file.tensor_names(of_torch)
    if "fc.weight" in names:
        raise ModelError(f"{directory}: holds fc.weight: is an EAGLE 1 or 2 draft, which is not read; {_REMEDY}")
