"""The sampling transform against transformers' own processors, in their order. Needs the `parity` extra (torch)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from specjax import sampling
from specjax.testing.toys import context, neutral_sampling

SIZE, PROMPT, LENGTH = 50, 5, 9
SETTINGS = [
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.6},
    {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"min_p": 0.3, "repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "top_p": 0.8, "min_new_tokens": 6},
    {"min_new_tokens": 4, "top_k": 3},
    {"temperature": 0.3, "min_p": 0.9, "top_p": 0.1},
]


def processors(settings, bias):
    """As `GenerationMixin._get_logits_processor` orders them."""
    found = hf.LogitsProcessorList([hf.SequenceBiasLogitsProcessor([[[t], float(b)] for t, b in enumerate(bias) if b])])
    if "repetition_penalty" in settings:
        found.append(hf.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    found.append(hf.NoBadWordsLogitsProcessor([[11], [12]]))
    if "min_new_tokens" in settings:
        found.append(hf.MinNewTokensLengthLogitsProcessor(PROMPT, settings["min_new_tokens"], [3, 7], device="cpu"))
    for name, warper in (("temperature", hf.TemperatureLogitsWarper), ("top_k", hf.TopKLogitsWarper),
                         ("top_p", hf.TopPLogitsWarper), ("min_p", hf.MinPLogitsWarper)):  # fmt: skip
        if name in settings:
            found.append(warper(settings[name]))
    return found


def test_the_transform_is_that_of_transformers():
    rng = np.random.default_rng(0)
    rows = len(SETTINGS)
    logits = rng.normal(size=(rows, 1, SIZE)).astype(np.float32) * 3
    tokens = rng.integers(0, 20, (rows, LENGTH))
    bias = np.where(rng.random((rows, SIZE)) < 0.1, rng.normal(size=(rows, SIZE)), 0.0).astype(np.float32)
    ours = bias.copy()
    ours[:, [11, 12]] = -np.inf
    names = {name for settings in SETTINGS for name in settings}
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    fields = {name: np.asarray([s.get(name, neutral[name]) for s in SETTINGS]) for name in names}
    at = context(np.pad(tokens, ((0, 0), (0, 4))), [LENGTH] * rows, neutral_sampling(rows, SIZE, bias=ours, **fields),
                 None, [PROMPT] * rows, stop_ids=(3, 7))  # fmt: skip
    got = np.asarray(jax.jit(sampling.transform)(jnp.asarray(logits), at, jnp.zeros((rows, 0), jnp.int32)))[:, 0]
    for i, settings in enumerate(SETTINGS):
        ids = torch.tensor(tokens[i : i + 1])
        want = processors(settings, bias[i])(ids, torch.tensor(logits[i])).numpy()[0]
        np.testing.assert_array_equal(np.isfinite(got[i]), np.isfinite(want), err_msg=str(settings))
        kept = np.isfinite(want)
        np.testing.assert_allclose(got[i][kept], want[kept], rtol=1e-5, atol=1e-5)


def test_the_names_are_those_of_its_generation_config():
    known = GenerationConfig().to_dict()
    assert {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens"} <= set(known)
