"""The draft's own sequences as training data: of the weights of the last refresh, and the same after every restart."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from specjax import config
from specjax.data.rows import Batches, ConcatenatedRows
from specjax.decode.decoder import Decoder
from specjax.decode.request import derive_seeds
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.errors import TrainingError
from specjax.interfaces import Batch
from specjax.runtime import artifact
from specjax.training.init.first_weights import SharedEnds
from specjax.training.layout import ONE_DEVICE
from specjax.training.sources.on_policy import Mixed, OnPolicy, draft_sampler
from tests import processes
from tests.drafters.test_glide import glide_of, predicted, target_of
from tests.training import toys
from tests.training.toys import LENGTH, VOCAB, BigramDraft, Interrupt, assert_same, interrupt_after, train_stage

STEPS, EVERY = 12, 4
DATA = {"kind": "on_policy", "share": 0.5, "every": EVERY, "prompt_tokens": 2, "new_tokens": 6}
KILLED_AFTER_7 = """
import os, signal, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from tests.training import test_on_policy
def kill(step, record):
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
test_on_policy.train(Path(sys.argv[1]), kill)
"""


def text() -> ConcatenatedRows:
    """40 rows of documents of 48 tokens."""
    stream = np.random.default_rng(0).integers(0, VOCAB - 1, 40 * LENGTH + 1).astype(np.int32)
    return ConcatenatedRows(stream, np.arange(0, len(stream), 48), LENGTH)


def mixed(prompt_weight: float = 1.0) -> Mixed:
    """As many rows as the text has, until a pool is sampled."""
    return Mixed(text(), prompt_weight)


def sample(params, prompts, seeds, settings) -> list[list[int]]:
    """By the bigram draft, a token at a time."""
    table, bias = np.asarray(params["table"], np.float64), np.asarray(params["bias"], np.float64)
    continuations = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        rng, tokens = np.random.default_rng(seed), list(prompt)
        for _ in range(settings.new_tokens):
            logits = table[tokens[-1]] + bias
            distribution = np.exp(logits - logits.max())
            tokens.append(int(rng.choice(VOCAB, p=distribution / distribution.sum())))
        continuations.append(tokens[len(prompt) :])
    return continuations


def train(
    directory: Path, progress=None, sampler=sample, layout=ONE_DEVICE, prompt_weight: float = 1.0, **changes
) -> Any:
    """12 steps of 4 rows, half of them on-policy, saved every 5: refreshed at 0, 4 and 8."""
    stage = toys.stage(**{"data": DATA, **changes})
    start = (BigramDraft(), toys.bigram_params(1), toys.target(), mixed(prompt_weight), toys.rows(8, 1), 3)
    return train_stage(directory, stage, *start, progress, sampler, layout=layout)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(directory, final weights)."""
    directory = tmp_path_factory.mktemp("on-policy") / "stage"
    return directory, train(directory)


@pytest.mark.parametrize("step", [2, 11])
def test_an_interrupted_stage_resumes_to_the_same_weights(step, uninterrupted, tmp_path):
    with pytest.raises(Interrupt):
        train(tmp_path / "stage", interrupt_after(step))
    assert_same(train(tmp_path / "stage"), uninterrupted[1])


def test_a_stage_killed_by_the_system_resumes_to_the_same_weights(uninterrupted, tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED_AFTER_7, str(tmp_path / "stage")]
    killed = processes.run(command, root, {**os.environ, "PYTHONPATH": str(root)})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert_same(train(tmp_path / "stage"), uninterrupted[1])


def test_a_restart_inside_a_period_samples_nothing_that_was_sampled(tmp_path):
    begun = []

    def counted(params, prompts, seeds, settings):
        begun.append(len(prompts))
        return sample(params, prompts, seeds, settings)

    with pytest.raises(Interrupt):
        train(tmp_path / "stage", interrupt_after(7), counted)
    assert begun == [8, 8]
    train(tmp_path / "stage", None, counted)
    # From step 5, in the period that began at 4.
    assert begun == [8, 8, 8]


def batches(directory: Path, sampler=sample, **changes) -> Any:
    settings = OnPolicy(**{**DATA, **changes})
    return settings.batches(Batches(mixed(), 4, 3), directory, sampler, STEPS)


def refreshed_pools() -> dict[int, list[list[int]]]:
    """What stands in the on-policy rows of the first step of each period, with weights that change in between."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        made = batches(Path(directory))
        for step in range(STEPS):
            made.refresh(step, toys.bigram_params(step), None)
            if step % EVERY == 0:
                found[step] = made[step].tokens[np.asarray(made.indices(step)) >= len(text())].tolist()
    return found


def test_every_period_trains_on_sequences_of_the_weights_it_began_with():
    numbered = batches(Path("unused"))._prompts.shuffled(3)
    for step, rows in refreshed_pools().items():
        numbers = [2 * step, 2 * step + 1]
        prompts, seeds = [numbered(g) for g in numbers], [derive_seeds(3, g + 1)[g] for g in numbers]
        continued = sample(toys.bigram_params(step), prompts, seeds, OnPolicy(**DATA))
        assert rows == [[*prompt, *new][:LENGTH] for prompt, new in zip(prompts, continued, strict=True)]


@pytest.mark.parametrize(("share", "count"), [(0.5, 2.0), (1.0, 4.0), (0.3, 1.2), (0.05, 0.2)])
def test_the_share_of_rows_is_exact_over_a_period_and_the_others_are_text(share, count, tmp_path):
    made, plain = batches(tmp_path, share=share, every=STEPS), Batches(text(), 4, 3)
    made.refresh(0, toys.bigram_params(0), None)
    sampled, numbers = 0, []
    for step in range(STEPS):
        indices, batch = made.indices(step), made[step]
        own = indices >= len(text())
        sampled, numbers = sampled + own.sum(), [*numbers, *indices[own]]
        np.testing.assert_array_equal(indices[~own], plain.indices(step)[~own])
        np.testing.assert_array_equal(batch.tokens[~own], plain[step].tokens[~own])
        # The prompt's second token is predicted, what the draft said, and no more.
        np.testing.assert_array_equal(batch.weight[own], np.tile([1, 1, 1, 1, 1, 1, 1, 0], (own.sum(), 1)))
    assert sampled == int(count * STEPS)
    # Each sequence once, in order.
    assert numbers == list(range(len(text()), len(text()) + sampled))


def test_pools_that_no_kept_checkpoint_needs_are_removed(uninterrupted, tmp_path):
    def pools(directory):
        return sorted(int(file.stem) for file in (directory / "pools").glob("*.safetensors"))

    # Of 12 steps saved every 5, those of 10 and 12 are kept; when the last pool was made, that of 5 was the oldest.
    assert pools(uninterrupted[0]) == [4, 8]
    made = batches(tmp_path / "pools")
    for step, oldest, left in ((0, None, [0]), (4, 3, [0, 4]), (8, 4, [4, 8]), (11, 4, [4, 8])):
        made.refresh(step, toys.bigram_params(0), oldest)
        assert pools(tmp_path) == left


def test_a_damaged_pool_costs_its_sequences_and_not_the_stage(uninterrupted, tmp_path, caplog):
    stage = tmp_path / "stage"
    with pytest.raises(Interrupt):
        train(stage, interrupt_after(7))
    pool = stage / "pools" / "00000004.safetensors"
    before = pool.read_bytes()
    pool.write_bytes(before[:-1])
    with pytest.raises(Interrupt):
        train(stage, interrupt_after(7))
    assert "00000004.safetensors: damaged or gone, and so is the draft of step 4" in caplog.text
    assert "is sampled from that of step 5: the weights will not be bit for bit" in caplog.text
    # From then on a restart changes nothing.
    again = pool.read_bytes()
    assert again != before
    shutil.copytree(stage, tmp_path / "same" / "stage")
    assert_same(train(tmp_path / "same" / "stage"), train(stage))


def test_a_damaged_pool_is_made_again_as_it_was_where_its_period_begins(uninterrupted, tmp_path):
    with pytest.raises(Interrupt):
        train(tmp_path / "stage", interrupt_after(6), save_every=4)
    (tmp_path / "stage" / "pools" / "00000004.safetensors").write_bytes(b"")
    assert_same(train(tmp_path / "stage", save_every=4), uninterrupted[1])


def test_a_pool_of_other_weights_is_not_used(tmp_path):
    first, again = batches(tmp_path), batches(tmp_path)
    first.refresh(0, toys.bigram_params(0), None)
    again.refresh(0, toys.bigram_params(5), None)
    own = first.indices(0) >= len(text())
    assert (first[0].tokens[own] != again[0].tokens[own]).any()


def test_a_model_is_sampled_from_as_decoding_does_it(tiny_draft):
    settings = OnPolicy(prompt_tokens=3, new_tokens=4, batch_size=4)
    prompts, seeds = [[5, 6, 7], [8, 9, 10], [11, 12, 13]], derive_seeds(1, 3)
    sample: Any = draft_sampler(TrainedDraftModel(tiny_draft.spec), tiny_draft)
    found = sample(tiny_draft.params, prompts, seeds, settings)
    expected = Decoder(tiny_draft).generate(prompts, max_new_tokens=4, seed=seeds, temperature=1.0)
    assert found == expected.tokens


def test_a_draft_that_shares_weights_is_sampled_from_whole(tiny_draft):
    prompts, seeds, settings = [[5, 6, 7]], derive_seeds(3, 1), OnPolicy(prompt_tokens=3, new_tokens=5)
    shared = {"embedding": tiny_draft.params["embedding"]}
    own = {name: value for name, value in tiny_draft.params.items() if name not in shared}
    sample: Any = draft_sampler(SharedEnds(tiny_draft.spec, shared=tuple(shared)), tiny_draft)
    decoder = Decoder(tiny_draft)
    expected = decoder.generate(prompts, max_new_tokens=5, seed=seeds, temperature=1.0)
    assert sample(own, prompts, seeds, settings) == expected.tokens


def test_a_loss_without_a_target_and_data_without_a_draft_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="would teach the draft what it says already"):
        config.Stage(data="on_policy", loss="cross_entropy")
    with pytest.raises(TrainingError, match="needs a draft that can be sampled from"):
        train(tmp_path / "stage", None, None)


def test_a_stage_is_prolonged_where_its_last_pool_is_whole(tmp_path):
    settings: dict[str, Any] = {"optimizer": config.Optimizer(learning_rate=0.1, schedule="constant")}
    longer = train(tmp_path / "longer", steps=16, **settings)
    train(tmp_path / "whole", steps=12, **settings)
    assert_same(train(tmp_path / "whole", steps=16, **settings), longer)
    train(tmp_path / "part", steps=10, **settings)
    with pytest.raises(TrainingError, match=r"steps \(10 then, 16 now\); data\.every=4 does not divide them"):
        train(tmp_path / "part", steps=16, **settings)


def test_a_stage_whose_prompts_counted_otherwise_is_refused(uninterrupted):
    with pytest.raises(TrainingError, match="changed since it was made: the training text"):
        train(uninterrupted[0], prompt_weight=0.0)


def test_other_data_in_the_same_directory_is_refused(uninterrupted):
    with pytest.raises(TrainingError, match=r"stage\.data"):
        train(uninterrupted[0], data={**DATA, "every": 3})
    assert artifact.FILE in {file.name for file in uninterrupted[0].iterdir()}


def test_what_a_drafter_writes_alone_are_its_own_blocks():
    """At temperature 0 every token is the best of the training forward over the text so far, by turns as the first and
    as the second of a block."""
    target = target_of(num_layers=2)
    trained = glide_of(target, (0, 1), 2, hidden_size=16)
    params = jax.tree.map(lambda x: x * 3.0, trained.init_params(jax.random.key(1), target))
    prompts, new = [[1, 2, 3], [7, 8]], 12
    sample = draft_sampler(trained, target)
    assert sample is not None
    settings = OnPolicy(prompt_tokens=4, new_tokens=new, temperature=0.0)
    written = sample(params, prompts, [5, 6], settings)
    assert written != Decoder(target).generate(prompts, max_new_tokens=new, ignore_eos=True).tokens
    for prompt, tokens in zip(prompts, written, strict=True):
        text = jnp.asarray([[*prompt, *tokens]], jnp.int32)
        batch = Batch(text, jnp.roll(text, -1, axis=1), jnp.ones(text.shape))
        places = [np.asarray(p.logits)[0].argmax(-1) for p in predicted(trained, params, target, batch)]
        root = len(prompt) - 1
        assert tokens == [int(places[i % 2][root + i]) for i in range(new)]
