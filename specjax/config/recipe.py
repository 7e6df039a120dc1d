"""The config of a draft for a chat model of which nothing is given but the model: `specjax distill`."""

from __future__ import annotations

from typing import Any, Literal, get_args

Kind = Literal["eagle3", "dspark", "glide", "draft_model"]
KINDS = get_args(Kind)
WRITING, TRAINING = 0.4, 0.42
"""Shares of the time for the target's chats, and for training with the target's passes before it. The rest is for
compiling, for the figures and for the export."""
_FIRST = 128
"""Number of chats by which the pace of writing is measured."""
_FEW_IDS = 16_384
"""Size of a vocabulary that a draft proposes whole; of a larger one it proposes the most frequent half as many ids."""


def recipe(
    target: str,
    out: str,
    kind: Kind,
    sizes: Any,
    own: str | None = None,
    share: float = 0.5,
    chats: str | None = None,
    rounds: bool = False,
) -> dict[str, Any]:
    """Sections of a config, all that is not by default.

    Args:
        target: directory, hub id or GGUF file of the target.
        out: directory of the run.
        kind: kind of the draft.
        sizes: the target's `ModelConfig`.
        own: text of the user's own to mix in, as `data.path`; None: there is none.
        share: share of that text, as `data.mixed`.
        chats: directory of the target's chats, which several jobs may share; None: in ``out``.
        rounds: True for a processor that multiplies matrices of bfloat16 faster, see `distill.matmul_dtype`.

    Returns:
        The sections, as a YAML file has them. How many chats and steps there are is filled in as time allows.
    """
    mixed = {} if own is None else {"path": own, "mixed": share}
    cached = kind in ("eagle3", "dspark")
    return {
        "target": {"path": target},
        "data": {
            "kind": "self_chat",
            "seq_len": 512,
            "held_out": 0.04,
            "prompt_weight": 1.0,  # the target wrote the questions too
            "self_chat": {"chats": _FIRST, "shard_size": _FIRST, **({} if chats is None else {"path": chats})},
            **mixed,
        },
        "draft": {
            "kind": kind,
            "init": "target",
            "pretrain": {"loss": "cross_entropy", "steps": 0, "batch_size": 4},
            **_fields(kind, sizes),
        },
        "distill": {
            "loss": "forward_kl",
            "batch_size": 2 if kind == "eagle3" else 4,
            "epochs": 1,
            # Shared with what the first weights are made from.
            **({"teacher": "cached", "teacher_path": f"{out}/streams"} if cached else {}),
            **({"matmul_dtype": "bfloat16"} if rounds else {}),
            "optimizer": {"learning_rate": {"eagle3": 3e-4, "dspark": 2e-3}.get(kind, 1e-3)},
            "eval_every": 1_000_000,
        },
        "control": {"learning_rates": []},
        "selection": {"prompts": 0},
        "eval": {"positions": 8_192},
        "bench": {
            "prompts": 12,
            "prompt_tokens": 127,
            "new_tokens": 128,
            "ignore_eos": False,
            "batch_sizes": [1],
            "ks": [1, 3],  # a deep target takes long to compile for each
            "repeats": 1,  # more prompts say more than more turns
            "drafters": ["ngram", "hybrid"],
        },
        "verifier": "block",
        "out": out,
    }


def _fields(kind: Kind, sizes: Any) -> dict[str, Any]:
    few = {"draft_vocab_size": _FEW_IDS // 2} if sizes.vocab_size > _FEW_IDS else {}
    if kind == "eagle3":
        # Through fewer key-value heads than these the token's part of a prediction does not pass.
        return {"depths": 2, "num_kv_heads": sizes.num_heads, **few}
    if kind == "dspark":
        return {"layers": 1, "block_size": 5, "anchors": 64, "markov_rank": 64, **few}
    layers = max(1, sizes.num_layers // (15 if kind == "glide" else 8))
    width = sizes.hidden_size if kind == "glide" else max(sizes.head_dim, sizes.hidden_size // 2)
    inside = sizes.intermediate_size * width // sizes.hidden_size // 8 * 8
    return {"architecture": {"num_layers": layers, "hidden_size": width, "intermediate_size": inside}, **few}
