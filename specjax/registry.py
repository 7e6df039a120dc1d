"""kind -> frozen config class, one line each; imported only when asked for, so the table depends on nothing of ours."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

from specjax.errors import ConfigError

DRAFTERS = {
    "draft_model": "specjax.drafters.draft_model:DraftModel",
    "ngram": "specjax.drafters.ngram:NGram",
}
VERIFIERS = {
    "block": "specjax.verifiers.block:Block",
    "coupled": "specjax.verifiers.coupled:Coupled",
    "greedy": "specjax.verifiers.greedy:Greedy",
    "lenient": "specjax.verifiers.lenient:Lenient",
    "speculative": "specjax.verifiers.speculative:Speculative",
    "top_k": "specjax.verifiers.top_k:TopK",
    "typical": "specjax.verifiers.typical:Typical",
}
LOSSES = {
    "cross_entropy": "specjax.distill.losses:CrossEntropy",
    "forward_kl": "specjax.distill.losses:ForwardKL",
}


def resolve(table: Mapping[str, str], kind: str, what: str) -> type:
    """The class registered under ``kind``. Raises `ConfigError` with the known kinds and the nearest match."""
    if kind not in table:
        near = difflib.get_close_matches(str(kind), table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{what}: {kind!r} is unknown, known are {', '.join(sorted(table))}{hint}")
    module, _, name = table[kind].partition(":")
    return getattr(importlib.import_module(module), name)
