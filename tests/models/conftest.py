"""A Llama directory written without specjax, and a Llama in float64 numpy on Hugging Face's own tensor names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 3,
}


def llama_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names; norms are not all ones, so that none can be left out or swapped."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(out: int, into: int) -> np.ndarray:
        return (rng.normal(size=(out, into)) * 1.5 * into**-0.5).astype(np.float32)

    def scale() -> np.ndarray:
        return rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": scale(),
            prefix + "post_attention_layernorm.weight": scale(),
            prefix + "self_attn.q_proj.weight": matrix(queries, hidden),
            prefix + "self_attn.k_proj.weight": matrix(keys, hidden),
            prefix + "self_attn.v_proj.weight": matrix(keys, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, queries),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    tensors["model.norm.weight"] = scale()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def reference_logits(tensors: dict[str, np.ndarray], config: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence, in float64, with loops over heads and a rotate-half as Hugging Face writes it."""
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    length = len(tokens)
    frequency = 1.0 / config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    angle = np.outer(np.arange(length), frequency)
    cos, sin = (np.concatenate([f(angle), f(angle)], axis=1) for f in (np.cos, np.sin))

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config["rms_norm_eps"]) * scale

    def rotated(x):
        half = np.concatenate([-x[:, head_dim // 2 :], x[:, : head_dim // 2]], axis=1)
        return x * cos + half * sin

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        w = {n.split(f"layers.{layer}.")[1]: v for n, v in weights.items() if f"layers.{layer}." in n}
        y = norm(x, w["input_layernorm.weight"])
        q, k, v = (y @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        attended = []
        for head in range(heads):
            mine = slice(head * head_dim, (head + 1) * head_dim)
            shared = head // (heads // kv_heads)
            theirs = slice(shared * head_dim, (shared + 1) * head_dim)
            scores = rotated(q[:, mine]) @ rotated(k[:, theirs]).T / np.sqrt(head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(attended, axis=1) @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, weights["model.norm.weight"]) @ head.T


class LlamaDirectory:
    """A directory whose config and tensors a test may change before it is read."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()

    def write(self, config: dict | None = None, tensors: dict | None = None, **changes) -> Path:
        """``changes`` go into config.json; None removes the key."""
        self.config = {k: v for k, v in {**(config or BASE), **changes}.items() if v is not None}
        self.tensors = llama_tensors(self.config) if tensors is None else tensors
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "model.safetensors", metadata={"format": "pt"})
        return self.path

    def reference(self, tokens: np.ndarray) -> np.ndarray:
        return np.stack([reference_logits(self.tensors, self.config, row) for row in tokens])


@pytest.fixture
def llama(tmp_path) -> LlamaDirectory:
    return LlamaDirectory(tmp_path / "llama")
