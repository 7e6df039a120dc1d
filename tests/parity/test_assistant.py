"""A saved draft as transformers' `assistant_model`: the same text, and the same number of accepted tokens in every
block, as of the decoder here. Needs the `parity` extra (torch)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import peers
import pytest

torch = pytest.importorskip("torch")

import transformers
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import specjax

TARGET = Path(__file__).parents[2] / "models" / "demo-target"
NOISE = 0.2
"""Of the draft's weights, in standard deviations of each tensor: blocks are accepted in part."""
NEW = 48
PROMPTS = ["def read_lines(path):\n    ", "class Stack:\n    def __init__(self):\n", "import os\n\n\ndef walk("]


@dataclasses.dataclass(frozen=True)
class Both:
    target: specjax.LoadedModel
    draft: specjax.LoadedModel
    their_target: Any
    their_draft: Any
    saved: tuple[Path, Path]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    """Target and draft, saved and loaded again by each side."""
    target = specjax.load_model(TARGET)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + NOISE * x.std() * rng.standard_normal(x.shape, dtype=np.float32), target.params)
    saved = []
    for name, model in (("target", target), ("draft", dataclasses.replace(target, params=params))):
        saved.append(tmp_path_factory.mktemp("saved") / name)
        specjax.save_model(model, saved[-1])
    ours = [specjax.load_model(directory) for directory in saved]
    theirs = [transformers.AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32).eval() for x in saved]
    return Both(*ours, *theirs, (saved[0], saved[1]))


def assisted(both: Both, prompt: list[int], k: int) -> tuple[list[int], list[int]]:
    """(new tokens, accepted tokens of every block) of transformers."""
    accepted: list[int] = []
    real = AssistedCandidateGenerator.update_candidate_strategy

    def counting(self, input_ids, scores, num_matches):
        accepted.append(int(num_matches))
        return real(self, input_ids, scores, num_matches)

    settings = both.their_draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
    settings.assistant_confidence_threshold = 0
    ids = torch.tensor([prompt])
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", counting)
        out = both.their_target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=both.their_draft,
            do_sample=False,
            max_new_tokens=NEW,
        )
    return out[0, len(prompt) :].tolist(), accepted


@pytest.mark.parametrize("k", [3, 5])
def test_a_saved_draft_assists_transformers_block_by_block_as_it_drafts_here(both, k):
    decoder, seen = specjax.Decoder(both.target, specjax.DraftModel(both.draft, k)), []
    for prompt in (both.target.tokenizer(text)["input_ids"] for text in PROMPTS):
        expected, accepted = assisted(both, prompt, k)
        blocks = [event.tokens for event in decoder.stream(prompt, max_new_tokens=NEW)]
        assert [token for block in blocks for token in block] == expected
        # In the last block transformers drafts no more than what remains.
        assert [len(block) - 1 for block in blocks][:-1] == accepted[:-1]
        seen += accepted[:-1]
    assert set(seen) >= {0, 1, k}, "blocks are accepted in part"


def test_each_way_that_questions_are_asked_of_transformers_gives_the_same_greedy_tokens(both):
    decoder = specjax.Decoder(both.target)
    found = dict(peers.transformers_of(*both.saved, ["float32"]))
    assert [*found] == [f"transformers float32{how}" for how in ("", ", prompt lookup", ", assisted")]
    for text in PROMPTS:
        prompt = both.target.tokenizer(text)["input_ids"]
        expected = decoder.generate([prompt], max_new_tokens=NEW).tokens
        for peer in found.values():
            assert peer.generate([prompt], seed=0, max_new_tokens=NEW, temperature=0.0).tokens == expected
