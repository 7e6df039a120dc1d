"""Rows that come and go: what a request gets does not depend on who is there with it."""

from __future__ import annotations

import dataclasses
import sys

import jax
import numpy as np
import pytest

from specjax.decode.decoder import Decoder
from specjax.decode.request import bucket, prepare, slots_for
from specjax.decode.scheduler import Scheduler
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import DataError
from specjax.models.cache import num_slots
from specjax.testing.toys import prefix_model, related
from tests import processes
from tests.cases import in_proof

TARGET = prefix_model(0, vocab_size=7, eos_ids=(3,))
DRAFT = related(TARGET, 1)


def decoders(kind: str) -> Decoder:
    drafter = {"draft": DraftModel(DRAFT, 3), "ngram": NGram(3, min_n=1), "plain": None}[kind]
    return Decoder(TARGET, drafter)


def requests(count: int, temperature: float | None) -> list:
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt = rng.integers(0, 7, rng.integers(1, 12)).tolist()
        options = {"temperature": float(rng.choice([0.0, 0.7, 1.0])) if temperature is None else temperature}
        if i % 5 == 0:
            options |= {"top_p": 0.8, "repetition_penalty": 1.3}
        made.append(prepare(TARGET, 3, [prompt], int(rng.integers(1, 40)), 100 + i, i % 3 == 0, options))
    return made


def values(row) -> dict[str, np.ndarray]:
    """Everything that is known of a finished row, without what lies behind its end."""
    end = int(row.lengths[0])
    kept = {name: getattr(row, name)[0, :end] for name in ("tokens", "origin")}
    counters = {f.name: getattr(row.counters, f.name) for f in dataclasses.fields(row.counters)}
    return kept | counters | {"finish": row.finish, "done": row.done}


@pytest.mark.parametrize(("kind", "temperature"), [("draft", None), in_proof("ngram", None), in_proof("draft", 0.0)])
def test_twenty_requests_through_four_rows_are_bit_for_bit_those_that_run_alone(kind, temperature):
    engine, params = decoders(kind).engine(temperature == 0.0)
    batches = requests(20, temperature)
    together = dict(Scheduler(engine, params, 4).run(batches))
    assert sorted(together) == list(range(20))
    assert list(together) != sorted(together), "some finish before others that came earlier"
    for number, batch in enumerate(batches):
        ((_, alone),) = Scheduler(engine, params, 4).run([batch])
        jax.tree.map(np.testing.assert_array_equal, values(together[number]), values(alone))


def test_a_row_of_the_queue_is_that_of_generate():
    decoder = decoders("draft")
    engine, params = decoder.engine(False)
    batches = requests(6, 1.0)
    for number, row in Scheduler(engine, params, 2).run(batches):
        batch, cuts = batches[number], {"top_p": 0.8, "repetition_penalty": 1.3} if number % 5 == 0 else {}
        prompt = batch.request.prompt[0, : batch.request.lengths[0]].tolist()
        sampling = {"temperature": 1.0, "seed": batch.seeds, "max_new_tokens": int(batch.request.budget[0]), **cuts}
        want = decoder.generate([prompt], ignore_eos=number % 3 == 0, **sampling)
        assert row.tokens[0, len(prompt) : int(row.lengths[0])].tolist() == want.tokens[0]


@pytest.mark.parametrize("kind", ["plain", "draft"])
def test_requests_made_from_earlier_results_get_what_they_get_alone(kind):
    """A second request goes on where the first one ended; while none has ended, there is none to give."""
    decoder, asked = decoders(kind), []
    firsts = [{"prompt": [i, 1, 2], "max_new_tokens": 5 + 7 * i, "seed": i, "temperature": 1.0} for i in range(4)]
    waiting, given = [*firsts], []

    def requests():
        while len(given) < 8:
            if waiting:
                given.append(waiting.pop(0))
                yield given[-1]
            else:
                asked.append(len(given))
                yield None

    found = {}
    for number, result in decoder.generate_each(requests(), rows=6, most_tokens=60):
        found[number] = result
        own = given[number]
        if len(own["prompt"]) == 3:
            prompt = [*own["prompt"], *result.tokens[0]]
            waiting.append({**own, "prompt": prompt, "max_new_tokens": 9, "temperature": 0.0, "ignore_eos": True})
    assert sorted(found) == [*range(8)]
    assert asked, "some rows waited"
    for number, request in enumerate(given):
        own = dict(request)
        alone = decoder.generate([own.pop("prompt")], **{**own, "seed": [own["seed"]]})
        assert found[number].tokens == alone.tokens
        assert found[number].finish_reasons == alone.finish_reasons
        assert found[number].stats == alone.stats


@pytest.mark.parametrize("kind", ["plain", "draft"])
def test_a_cache_of_a_queue_is_no_larger_than_its_requests(kind):
    """And smaller than a prompt that is padded for a batch of its own."""
    decoder, prompt = decoders(kind), [1, 2, 3, 4, 5] * 14
    assert slots_for(TARGET, 3, 75) < bucket(len(prompt))
    requests = [{"prompt": prompt[i:], "max_new_tokens": 5} for i in range(3)]
    for number, found in decoder.generate_each(requests, rows=2, most_tokens=75):
        assert found.tokens == decoder.generate([prompt[number:]], max_new_tokens=5).tokens


def test_a_queue_of_requests_refuses_what_does_not_fit():
    decoder = decoders("plain")
    with pytest.raises(DataError, match="request 1: its prompt and budget exceed most_tokens=200"):
        list(decoder.generate_each([{"prompt": [1], "max_new_tokens": n} for n in (5, 200)], rows=2, most_tokens=200))
    with pytest.raises(DataError, match="no request and no row at work"):
        list(decoder.generate_each([{"prompt": [1], "max_new_tokens": 2}, None, None], rows=2, most_tokens=9))


def test_no_finished_row_sizes_a_bucket():
    """The first row has the room for a long text and is over after 213 tokens; the other goes on in 256 slots."""
    decoder = Decoder(prefix_model(0, vocab_size=7), DraftModel(prefix_model(0, vocab_size=7), 3))
    engine, params = decoder.engine(True)
    batch = prepare(decoder.target, 3, [[1] * 40, [2, 3]], [213, 238], 0, True, {"temperature": 0.0})
    scheduler = Scheduler(engine, params, 2)
    scheduler.insert(batch)
    while not scheduler.done.all():
        scheduler.chunk(stop_after=1)
    assert scheduler.lengths.tolist() == [253, 240]
    assert num_slots(scheduler.state.cache) == 256
    want = decoder.generate([[1] * 40], max_new_tokens=213).tokens[0]
    assert scheduler.take(0).tokens[0, 40:253].tolist() == want, "what it writes on behind its end is not in its text"


def test_rows_are_cancelled_and_taken_again():
    engine, params = decoders("draft").engine(False)
    scheduler = Scheduler(engine, params, 2)
    first, second, third = (prepare(TARGET, 3, [[i, 1]], 30, i, True, {"temperature": 1.0}) for i in range(3))
    assert scheduler.insert(first) == [0]
    assert scheduler.insert(second) == [1]
    with pytest.raises(DataError, match="1 requests for 0 of 2 rows that are free"):
        scheduler.insert(third)
    scheduler.chunk(max_steps=1)
    scheduler.stop([0])
    row = scheduler.take(0)
    assert 2 < int(row.lengths[0]) < 12
    assert scheduler.insert(third) == [0]
    while not scheduler.done.all():
        scheduler.chunk()
    assert scheduler.lengths.tolist() == [32, 32]


def test_a_request_that_samples_does_not_go_among_greedy_ones():
    engine, params = decoders("plain").engine(True)
    batch = prepare(TARGET, 0, [[1]], 4, 0, True, {"temperature": 1.0})
    with pytest.raises(DataError, match="above 0 among greedy ones"):
        Scheduler(engine, params, 1).insert(batch)


def test_a_request_goes_on_after_a_ctrl_c(monkeypatch):
    """Wherever in a chunk the signal comes: before, or once the program has taken the state over."""
    engine, params = decoders("draft").engine(True)
    batch = prepare(TARGET, 3, [[1, 2]], 40, 0, True, {"temperature": 0.0})
    ((_, alone),) = Scheduler(engine, params, 4).run([batch])
    scheduler = Scheduler(engine, params, 4)
    scheduler.insert(batch)
    look, interrupted = Scheduler._look, []

    def interrupt(self):
        if len(interrupted) < 3:
            interrupted.append(True)
            raise KeyboardInterrupt
        look(self)

    monkeypatch.setattr(Scheduler, "_look", interrupt)
    while not scheduler.done[0]:
        try:
            scheduler.chunk(2)
        except KeyboardInterrupt:
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(scheduler.state))
    assert len(interrupted) == 3
    jax.tree.map(np.testing.assert_array_equal, values(scheduler.take(0)), values(alone))


def test_no_signal_finds_a_scheduler_without_a_state():
    """Real ones at any time, in a process that has its main thread to itself."""
    found = processes.run([sys.executable, "-m", "tests.decode.interrupted"])
    assert found.returncode == 0, found.output
    assert int(found.stdout) > 100
