"""Speculative decoding in JAX: distill a draft, decode with it, lose nothing. Public names are loaded on first use, so
that `import specjax` and the command line's help do not wait for JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.config import RunConfig, load_config
    from specjax.decode.decoder import Decoder
    from specjax.decode.result import Event, GenerationResult
    from specjax.drafters.draft_model import DraftModel
    from specjax.drafters.hybrid import Hybrid
    from specjax.drafters.ngram import NGram
    from specjax.errors import SpecjaxError
    from specjax.formats.loading import load_drafter
    from specjax.models.hf import LoadedModel, load_model, quantize_model, save_model

__all__ = [
    "Decoder",
    "DraftModel",
    "Event",
    "GenerationResult",
    "Hybrid",
    "LoadedModel",
    "NGram",
    "RunConfig",
    "SpecjaxError",
    "load_config",
    "load_drafter",
    "load_model",
    "quantize_model",
    "save_model",
]

_HOMES = {
    "Decoder": "specjax.decode.decoder",
    "DraftModel": "specjax.drafters.draft_model",
    "Event": "specjax.decode.result",
    "GenerationResult": "specjax.decode.result",
    "Hybrid": "specjax.drafters.hybrid",
    "LoadedModel": "specjax.models.hf",
    "NGram": "specjax.drafters.ngram",
    "RunConfig": "specjax.config",
    "SpecjaxError": "specjax.errors",
    "load_config": "specjax.config",
    "load_drafter": "specjax.formats.loading",
    "load_model": "specjax.models.hf",
    "quantize_model": "specjax.models.hf",
    "save_model": "specjax.models.hf",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
