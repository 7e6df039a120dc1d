"""Each controller in the compiled loop: the output is that of plain decoding, whatever it chooses, and it chooses what
its calibration makes the best."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import registry
from specjax.controllers.confidence import Confidence
from specjax.controllers.pooled import Pooled
from specjax.decode.decoder import Decoder
from specjax.decode.programs import compiled_chunk
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.interfaces import Calibration, Draft
from specjax.runtime.compile_cache import count_compiles
from specjax.testing.inhabitants import HiddenReader
from specjax.testing.toys import context, exact_distribution, neutral_sampling, prefix_model, related
from tests.cases import in_proof, transformer
from tests.controllers.choices import of_batch, of_rows, of_total
from tests.decode import distributions, test_lossless

TARGET = prefix_model(0, vocab_size=5, eos_ids=(4,))
DRAFT = related(TARGET, 1, 0.5)
PROMPTS = [[1], [1, 2, 3], [3, 1, 2, 0, 2], [2] * 9]
OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
QUICK = {"decay": 0.6, "trust": 1.0, "margin": 0.0, "probe": 3}
CONTROLLERS: dict[str, Any] = {
    "batch": of_batch(**QUICK),
    "rows": of_rows(**QUICK),
    "total": of_total(6, **QUICK),
    "confidence": Confidence(0.5),
    "adaptive": {"kind": "adaptive", **QUICK},
}
DRAFTERS = {"draft": DraftModel(DRAFT, 5), "ngram": NGram(5, 3, 1), "hidden": HiddenReader(3)}
MODES = {"greedy": ("speculative", 0.0), "coupled": ("coupled", 1.0)}


CHEAP = Calibration(np.asarray([1.0, 1.1, 1.3, 1.4, 1.6, 1.9], np.float32), np.full(5, 0.6, np.float32))  # type: ignore[arg-type]
"""Of blocks that pay as soon as half of their tokens are kept."""


def adaptive(drafter: str, verifier: str, controller: Any) -> Decoder:
    """To which blocks are cheap."""
    decoder = Decoder(TARGET, DRAFTERS[drafter], verifier, controller)
    depth = DRAFTERS[drafter].k
    for greedy in (True, False):
        for rows in (1, 4):
            decoder.calibrations[greedy, rows] = Calibration(CHEAP.seconds[: depth + 1], CHEAP.acceptance[:depth])
    return decoder


def of(stats, name):
    return np.asarray([getattr(row, name) for row in stats])


QUICK_CHOICES = [("rows", "draft", "coupled"), ("confidence", "draft", "greedy")]
QUICK_CHOICES += [("adaptive", "draft", "coupled"), ("batch", "ngram", "greedy")]
CHOICES = [(controller, "draft") for controller in CONTROLLERS]
CHOICES += [("batch", "ngram"), ("total", "ngram"), ("confidence", "ngram")]
CHOICES += [("rows", "hidden"), ("confidence", "hidden")]


@pytest.mark.parametrize(
    ("controller", "drafter", "mode"),
    [
        *QUICK_CHOICES,
        *(in_proof(*pair, mode) for pair in CHOICES for mode in MODES if (*pair, mode) not in QUICK_CHOICES),
    ],
)
def test_no_choice_of_a_length_changes_a_token(controller, drafter, mode):
    verifier, temperature = MODES[mode]
    decoder = adaptive(drafter, verifier, CONTROLLERS[controller])
    found = decoder.generate(PROMPTS, **OPTIONS, temperature=temperature)
    plain = Decoder(TARGET, None, verifier).generate(PROMPTS, **OPTIONS, temperature=temperature)
    assert found.tokens == plain.tokens
    assert of(found.stats, "accepted").sum() > 0


def forced(decoder: Decoder, greedy: bool, rows: int, seconds) -> None:
    """As if blocks had been measured to cost so much."""
    acceptance = np.full(len(seconds) - 1, 0.7, np.float32)
    decoder.calibrations[greedy, rows] = Calibration(np.asarray(seconds, np.float32), acceptance)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_the_only_length_that_can_be_paid_is_chosen_and_drafted_no_further(k):
    decoder = Decoder(TARGET, DRAFTERS["draft"], controller=of_batch(**QUICK))
    seconds = np.where(np.arange(6) == k, 1.0, np.inf)
    forced(decoder, True, 4, seconds)
    found = decoder.generate(PROMPTS, **OPTIONS, temperature=0.0)
    for proposals, origins in zip(found.proposals, found.origins, strict=True):
        before = [0, *itertools.accumulate(sizes_of_blocks(origins))]
        # The last token of a row's budget is the target's own.
        assert proposals == [min(k, OPTIONS["max_new_tokens"] - 1 - tokens) for tokens in before[:-1]]
    short = Decoder(TARGET, DraftModel(DRAFT, k)) if k else Decoder(TARGET)
    same = short.generate(PROMPTS, **OPTIONS, temperature=0.0)
    assert [stats.blocks for stats in found.stats] == [stats.blocks for stats in same.stats]
    assert found.tokens == same.tokens


def sizes_of_blocks(origins: list[str]) -> list[int]:
    """Tokens of each block; the last one may end without a token of the target's own."""
    ends = [i for i, origin in enumerate(origins, 1) if origin != "accepted"]
    ends += [len(origins)] * (ends[-1] < len(origins))
    return np.diff([0, *ends]).tolist()


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
@pytest.mark.parametrize("controller", ["adaptive", of_batch(), of_rows(), of_total(6), Confidence(0.01)])
def test_nothing_is_drafted_past_the_budget(controller, drafter):
    decoder = adaptive(drafter, "speculative", controller)
    for new in (1, 2, 4):
        found = decoder.generate([[1, 1, 1, 1]] * 4, max_new_tokens=new, temperature=0.0, ignore_eos=True)
        assert all(proposals[0] <= new - 1 for proposals in found.proposals)
    assert sum(stats.drafted for stats in found.stats) > 0


@pytest.mark.parametrize("controller", [of_batch(probe=4, longest_wait=8), of_rows(probe=4, longest_wait=8)])
def test_a_draft_that_does_not_pay_is_left_and_looked_at_rarely(controller):
    decoder = Decoder(TARGET, DraftModel(TARGET, 3), controller=controller)
    forced(decoder, True, 4, [1.0, 1.9, 3.5, 5.5])
    found = decoder.generate(PROMPTS, **OPTIONS, temperature=0.0)
    for stats in found.stats:
        assert 0 < stats.drafted_at[0] < stats.blocks
        assert stats.drafted_at[1] == 0


@pytest.mark.parametrize("controller", ["adaptive", of_batch(), of_rows()])
def test_nobody_looks_at_a_draft_that_cannot_pay(controller):
    """Not even one that equals its target: each of its tokens costs more than the pass that it saves."""
    decoder = Decoder(TARGET, DraftModel(TARGET, 3), controller=controller)
    forced(decoder, True, 4, [1.0, 2.05, 3.1, 4.1])
    found = decoder.generate(PROMPTS, **OPTIONS, temperature=0.0)
    assert [stats.drafted for stats in found.stats] == [0] * 4


@pytest.mark.parametrize(
    ("drafter", "temperature"), [("draft", 1.0), ("ngram", 0.0), in_proof("draft", 0.0), in_proof("ngram", 1.0)]
)
def test_a_batch_that_would_never_be_drafted_for_is_decoded_by_the_plain_program(drafter, temperature, monkeypatch):
    """And gets what the program of all lengths would give it, stats and all."""
    options: dict[str, Any] = {**OPTIONS, "temperature": temperature}
    decoder = Decoder(TARGET, DRAFTERS[drafter], controller=of_batch())
    forced(decoder, temperature == 0, 4, [1.0, 2.05, 3.1, 4.1, 5.1, 6.1])
    with monkeypatch.context() as patch:
        patch.setattr(Pooled, "never_proposes", lambda self, calibration: False)
        slow = decoder.generate(PROMPTS, **options)
    plain = Decoder(TARGET).generate(PROMPTS, **options)
    with count_compiles() as count:
        fast = decoder.generate(PROMPTS, **options)
    assert count.programs == 0
    assert fast.tokens == slow.tokens == plain.tokens
    assert fast.stats == slow.stats
    assert fast.proposals == slow.proposals


@pytest.mark.parametrize("controller", ["batch", "row"])
def test_nobody_looks_where_reading_what_was_missed_takes_more_than_could_be_found(controller):
    for catch_up, looks in ((0.0, True), (0.2, False)):
        decoder = Decoder(
            TARGET,
            DraftModel(TARGET, 3),
            controller={"kind": "adaptive", "per": controller, "probe": 4, "looks_cost": 1.0},
        )
        forced(decoder, True, 4, [1.0, 1.9, 2.5, 3.0])  # a third more for what is always kept
        cost = decoder.calibrations[True, 4]
        doubtful, catch_up = np.full(3, 0.1, np.float32), np.float32(catch_up)
        decoder.calibrations[True, 4] = dataclasses.replace(cost, acceptance=doubtful, catch_up=catch_up)
        found = decoder.generate(PROMPTS, **OPTIONS, temperature=0.0)
        assert all((stats.drafted > 0) == looks for stats in found.stats)


@pytest.mark.parametrize(("seconds", "read"), [([1.0, 1.2, 1.4], True), ([1.0, 2.9, 4.9], False)])
def test_a_draft_that_is_not_asked_at_first_does_not_read_the_prompts(seconds, read):
    decoder = Decoder(TARGET, DraftModel(DRAFT, 2), controller=of_batch())
    forced(decoder, True, 4, seconds)
    state = decoder.prefilled(PROMPTS, max_new_tokens=8, temperature=0.0)
    held = [len(prompt) - 1 for prompt in PROMPTS]
    assert state.drafter.lengths.tolist() == (held if read else [0] * 4)


def test_a_draft_that_was_left_has_read_everything_when_it_comes_back():
    """A draft that equals its target is accepted after any pause, of which some are longer than a piece."""
    decoder = Decoder(
        TARGET,
        DraftModel(TARGET, 2),
        controller=of_batch(ks=(0, 1, 2), probe=40, longest_wait=80, margin=0.0, looks_cost=1.0),
    )
    forced(decoder, True, 4, [1.0, 1.9, 9.0])
    calibration = decoder.calibrations[True, 4]
    doubtful = dataclasses.replace(calibration, acceptance=np.full(2, 0.2, np.float32))
    decoder.calibrations[True, 4] = doubtful
    found = decoder.generate(PROMPTS, max_new_tokens=150, ignore_eos=True, temperature=0.0)
    for stats in found.stats:
        assert stats.blocks > 40
        assert stats.accepted == stats.drafted > 5


def test_rows_choose_for_themselves_and_replay_alone():
    decoder = adaptive("draft", "speculative", CONTROLLERS["rows"])
    together = decoder.generate(PROMPTS, **OPTIONS, temperature=1.0)
    assert len({stats.drafted for stats in together.stats}) > 1
    for i, prompt in enumerate(PROMPTS):
        alone = decoder.generate([prompt], **OPTIONS, temperature=1.0, seed=[together.seeds[i]])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.stats[0] == together.stats[i]


@pytest.mark.parametrize("never", [False, True])
def test_decoding_compiles_nothing_after_calibrating(never, monkeypatch):
    monkeypatch.setattr(Pooled, "never_proposes", lambda self, calibration: never)  # of a toy, chance would decide
    decoder = Decoder(transformer(0), DraftModel(transformer(1), 3), controller=of_batch())
    decoder.calibrate([[1, 2, 3], [4, 5]], blocks=8, seconds=0, temperature=0.0)
    with count_compiles() as count:
        found = decoder.generate([[7] * 9, [1]], max_new_tokens=30, ignore_eos=True, temperature=0.0)
    assert count.programs == 0
    if never:
        assert [stats.blocks for stats in found.stats] == [30, 30]


def test_calibrating_compiles_nothing_that_decoding_does_not_and_decoding_nothing_after_it(monkeypatch):
    monkeypatch.setattr(Pooled, "never_proposes", lambda self, calibration: False)  # of a toy, chance would decide
    target = transformer(0)
    draft = dataclasses.replace(target, params=target.params)
    decoder = Decoder(target, DraftModel(draft, 4), controller=of_batch())
    prompts = [[1, 2, 3], [4, 5]]
    forced(decoder, True, 2, [1.0, 1.1, 1.2, 1.3, 1.4])
    decoder.compile(prompts, max_new_tokens=100, temperature=0.0)
    with count_compiles() as count:
        found = decoder.calibrate(prompts, blocks=8, seconds=0, temperature=0.0)
        decoder.generate(prompts, max_new_tokens=100, temperature=0.0)
        decoder.generate([[7] * 9, [1]], max_new_tokens=30, temperature=0.0)
    assert count.programs == 0
    assert found is not None
    assert found.seconds.shape == (5,)
    assert np.all(np.isfinite(found.seconds))
    assert np.all(np.asarray(found.seconds) > 0)
    assert np.all(np.asarray(found.acceptance) > 0.8), "it equals its target"


def test_before_anything_is_measured_the_default_keeps_to_the_drafters_length():
    default = Decoder(TARGET, DRAFTERS["draft"])
    fixed = Decoder(TARGET, DRAFTERS["draft"], controller="fixed")
    found, same = (decoder.generate(PROMPTS, **OPTIONS, temperature=1.0) for decoder in (default, fixed))
    assert found.tokens == same.tokens
    assert found.stats == same.stats
    default.calibrate(PROMPTS, blocks=4, seconds=0, temperature=1.0)
    assert kind_of(default, 4) == "adaptive"
    assert kind_of(default, 1) == "fixed", "a batch of another size"


def kind_of(decoder: Decoder, rows: int) -> str:
    controller = decoder.engine(False, rows)[0].controller
    assert controller is not None
    return controller.kind


def test_no_cache_is_copied_by_the_choice_of_a_length():
    target = transformer(0)
    decoder = Decoder(target, DraftModel(transformer(1), 3), controller=of_batch())
    forced(decoder, True, 4, [1.0, 1.2, 1.4, 1.6])
    assert copies(decoder) == 0


def copies(decoder: Decoder) -> int:
    import math
    import re

    state = decoder.prefilled([[1, 2, 3]] * 3, max_new_tokens=20, temperature=0.0)
    engine, params = decoder.engine(True, 4)
    text: Any = compiled_chunk(engine).lower(params, state, jnp.int32(100)).compile().as_text()
    sizes = {x.size for layer in state.cache.layers for x in (layer.keys, layer.values)}
    found = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)
    return sum(math.prod(map(int, shape.split(","))) in sizes for shape in found)


@pytest.mark.parametrize(
    ("controller", "verifier"),
    [
        *(("rows", "block"), in_proof("batch", "block"), in_proof("total", "speculative")),
        *(in_proof("confidence", "block"), in_proof("rows", "speculative")),
    ],
)
def test_the_distribution_of_three_tokens(controller, verifier):
    """Of the compiled loop; every choice is enumerated in test_exact.py."""
    decoder = Decoder(test_lossless.TARGET, test_lossless.DRAFTERS["k2"], verifier, CONTROLLERS[controller])
    distribution = exact_distribution(test_lossless.TARGET, test_lossless.PROMPT, 3)
    distributions.check_law(decoder, test_lossless.PROMPT, 3, distribution, distributions.SMOKE)


def test_every_registered_controller_is_decoded_with():
    assert {c["kind"] if isinstance(c, dict) else c.kind for c in CONTROLLERS.values()} == {*registry.CONTROLLERS} - {
        "fixed"
    }


def test_what_each_block_proposed_is_told():
    decoder = adaptive("draft", "speculative", CONTROLLERS["rows"])
    found = decoder.generate(PROMPTS, **OPTIONS, temperature=1.0)
    for proposals, stats in zip(found.proposals, found.stats, strict=True):
        assert len(proposals) == stats.blocks
        assert len(set(proposals)) > 1
        at = [sum(k >= place for k in proposals) for place in range(1, 6)]
        assert tuple(at) == stats.drafted_at


def weighing(controller, waited: int, **calibration: Any):
    """A controller of up to 3 proposals, the state of four rows after so many blocks without, and what it sees."""
    controller = controller.bind(NGram(3, 3, 1))
    found = Calibration(np.asarray([1.0, 1.9, 2.6, 3.1], np.float32), np.full(3, 0.1, np.float32), **calibration)  # type: ignore[arg-type]
    seen = dataclasses.replace(
        context([[1, 2]] * 4, [2] * 4, neutral_sampling(4, 5)), controller=controller, calibration=found
    )
    state = controller.init(4)
    pauses = dataclasses.replace(state.pauses, waited=state.pauses.waited + waited)
    return controller, dataclasses.replace(state, pauses=pauses, blocks=state.blocks + waited), seen


@pytest.mark.parametrize(("rows", "looks"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_a_batch_looks_at_what_would_pay_if_all_of_it_were_kept(rows, looks):
    controller, state, seen = weighing(of_batch(probe=4), waited=100)
    valid = jnp.broadcast_to(jnp.arange(4)[:, None] < rows, (4, 3))
    draft = Draft(jnp.zeros((4, 3), jnp.int32), valid, match_class=jnp.zeros((4,), jnp.int32))
    assert controller.review(state, seen, draft).tolist() == [looks] * 4
