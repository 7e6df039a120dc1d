"""The engine's invariants, through the public `Decoder`."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.decode import decoder as decoder_lib
from specjax.decode import programs
from specjax.decode import scheduler as scheduler_lib
from specjax.decode.decoder import Decoder
from specjax.decode.request import derive_seeds, prepare
from specjax.decode.result import HostSync
from specjax.drafters.draft_model import BoundDraftModel, DraftModel, TrainedDraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import DataError, SpecjaxError
from specjax.interfaces import Batch, Calibration, TargetView
from specjax.models.cache import num_slots
from specjax.models.config import Norm
from specjax.models.decode_layout import DecodeLayout
from specjax.runtime.compile_cache import count_compiles
from specjax.testing.toys import context, neutral_sampling, prefix_model
from specjax.verifiers.lenient import Lenient
from tests.cases import in_proof, transformer

TARGET, DRAFT = prefix_model(0), prefix_model(1)
RAGGED = [[1, 2, 3], [0], [1, 3] * 20, [2, 1], [3] * 11]


@pytest.fixture(scope="module")
def pair():
    return transformer(0), transformer(1, hidden_size=16, num_layers=1)


DRAFTERS = {f"draft k={k}": DraftModel(DRAFT, k) for k in (1, 3, 8)} | {
    "self": DraftModel(TARGET, 4),
    "ngram": NGram(4, max_n=3, min_n=1),
}


@pytest.mark.parametrize("name", ["draft k=3", "self", "ngram", in_proof("draft k=1"), in_proof("draft k=8")])
def test_greedy_output_is_the_autoregressive_one_on_ragged_batches(name):
    want = Decoder(TARGET).generate(RAGGED, max_new_tokens=50).tokens
    assert Decoder(TARGET, DRAFTERS[name]).generate(RAGGED, max_new_tokens=50).tokens == want
    alone = [Decoder(TARGET, DRAFTERS[name]).generate([p], max_new_tokens=50).tokens[0] for p in RAGGED[:2]]
    assert alone == want[:2]


@pytest.mark.parametrize("k", [in_proof(1), 4])
def test_greedy_output_of_a_transformer_is_the_autoregressive_one(pair, k):
    target, draft = pair
    prompts = [[5, 9, 11], [7], list(range(30))]
    want = Decoder(target).generate(prompts, max_new_tokens=40)
    got = Decoder(target, DraftModel(draft, k)).generate(prompts, max_new_tokens=40)
    assert got.tokens == want.tokens
    assert len({tuple(row) for row in want.tokens}) == 3, "a target that repeats itself would prove nothing"


def test_autoregressive_output_is_the_argmax_of_the_uncached_model(pair):
    target, _ = pair
    [tokens] = Decoder(target).generate([[5, 9, 11]], max_new_tokens=20).tokens
    whole = np.asarray(target.logits([[5, 9, 11, *tokens]]))[0]
    assert tokens == whole[2:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("k", "temperature"), [(3, 1.0), (6, 0.0), *(in_proof(k, t) for k, t in ((1, 0.0), (1, 1.0), (3, 0.0), (6, 1.0)))]
)
def test_a_transformer_drafting_for_itself_is_always_accepted(pair, k, temperature):
    target, _ = pair
    result = Decoder(target, DraftModel(target, k)).generate(
        [[5, 9], [3] * 9, [1]], max_new_tokens=35, temperature=temperature
    )
    # Block and single-token passes differ in the last bits, so a sampled draft may lose one in millions, not in dozens.
    assert all(s.accepted == s.drafted for s in result.stats)


def test_generation_crosses_cache_buckets_without_a_difference():
    """256 slots, then 512, then the whole buffer."""
    want = np.asarray(Decoder(TARGET, DraftModel(DRAFT, 3)).generate([[1, 2]], max_new_tokens=900).tokens[0])
    whole = np.asarray(TARGET.logits([[1, 2, *want.tolist()]]))[0]
    assert (want == whole[1:-1].argmax(-1)).all()


def _halve(logits, context):
    return logits / 2


@pytest.mark.parametrize(
    ("temperature", "options"), [(0.0, {}), (1.0, {}), (1.0, {"logprobs": "raw", "logits_processor": _halve})]
)
def test_compile_leaves_nothing_for_generate_to_compile(temperature, options):
    decoder = Decoder(TARGET, DraftModel(DRAFT, 5))
    decoder.compile([[1] * 9], max_new_tokens=800, temperature=temperature, **options)
    with count_compiles() as count:
        result = decoder.generate([[2] * 13], max_new_tokens=780, temperature=temperature, **options)
    assert count.programs == 0
    assert (result.verifier, result.lossless) == ("speculative" if temperature else "greedy", True)


def test_a_stop_token_ends_the_row_where_plain_decoding_would_end_it():
    stopping = prefix_model(0, eos_ids=(3,))
    plain = Decoder(stopping).generate(RAGGED, max_new_tokens=50)
    fast = Decoder(stopping, DraftModel(TARGET, 6)).generate(RAGGED, max_new_tokens=50)
    assert fast.tokens == plain.tokens
    assert any(len(row) % 7 and row[-1] == 3 for row in fast.tokens), "no stop fell inside a block"
    assert all(3 not in row[:-1] for row in fast.tokens)
    ignoring = Decoder(stopping, DraftModel(TARGET, 6)).generate(RAGGED, max_new_tokens=50, ignore_eos=True)
    assert [len(row) for row in ignoring.tokens] == [50] * 5


@pytest.mark.parametrize("budget", [1, 2, 7, [1, 9, 2, 30, 5]])
def test_a_budget_smaller_than_a_block_cuts_it(budget):
    want = Decoder(TARGET).generate(RAGGED, max_new_tokens=30).tokens
    got = Decoder(TARGET, DraftModel(TARGET, 8)).generate(RAGGED, max_new_tokens=budget)
    budgets = budget if isinstance(budget, list) else [budget] * 5
    assert got.tokens == [row[:b] for row, b in zip(want, budgets, strict=True)]
    assert [s.emitted for s in got.stats] == budgets


@pytest.mark.parametrize(
    "drafter", [in_proof(None, id="plain"), DraftModel(DRAFT, 3), NGram(3, 3, 1)], ids=[None, "draft", "ngram"]
)
def test_a_row_replays_alone_in_another_slot_from_its_own_seed(drafter):
    decoder = Decoder(TARGET, drafter)
    temperatures = [1.0, 0.7, 0.0, 1.3, 1.0]
    together = decoder.generate(RAGGED, max_new_tokens=[32, 9, 30, 25, 28], temperature=temperatures, seed=7)
    alone = decoder.generate([RAGGED[3]], max_new_tokens=25, temperature=1.3, seed=[together.seeds[3]])
    assert alone.tokens[0] == together.tokens[3]
    moved = decoder.generate(
        [RAGGED[0], RAGGED[3]], max_new_tokens=[11, 25], temperature=[0.5, 1.3], seed=[5, together.seeds[3]]
    )
    assert moved.tokens[1] == together.tokens[3]
    assert (
        decoder.generate(RAGGED, max_new_tokens=30, temperature=1.0, seed=8).tokens
        != decoder.generate(RAGGED, max_new_tokens=30, temperature=1.0, seed=9).tokens
    )


def test_seeds_are_distinct_across_rows_and_integers():
    seeds = [s for base in range(50) for s in derive_seeds(base, 50)]
    assert len(set(seeds)) == 2500
    assert derive_seeds(3, 2) == derive_seeds(3, 50)[:2]


def test_a_greedy_row_inside_a_sampling_batch_is_greedy():
    decoder = Decoder(TARGET, DraftModel(DRAFT, 4))
    want = decoder.generate(RAGGED, max_new_tokens=30).tokens
    mixed = decoder.generate(RAGGED, max_new_tokens=30, temperature=[0.0, 1.0, 0.0, 1.0, 0.0], seed=3).tokens
    assert [mixed[i] for i in (0, 2, 4)] == [want[i] for i in (0, 2, 4)]
    assert mixed[1] != want[1]


def test_the_stream_hands_out_the_tokens_of_generate_as_they_are_committed():
    decoder = Decoder(TARGET, DraftModel(DRAFT, 3))
    want = decoder.generate([[1, 2]], max_new_tokens=150, temperature=0.9, seed=4)
    events = list(decoder.stream([1, 2], max_new_tokens=150, temperature=0.9, seed=4))
    assert [t for event in events for t in event.tokens] == want.tokens[0]
    assert len(events) == want.stats[0].blocks
    assert all(1 <= len(e.tokens) <= 4 for e in events)
    assert events[-1].done
    assert not events[0].done
    assert events[-1].stats == want.stats[0]


def test_a_stream_for_the_eye_takes_blocks_together_and_hands_out_the_same_tokens(monkeypatch):
    decoder, options = Decoder(TARGET, DraftModel(DRAFT, 3)), {"max_new_tokens": 150, "temperature": 0.9, "seed": 4}
    want = decoder.generate([[1, 2]], **options)
    monkeypatch.setattr(decoder_lib, "_EVENT_SECONDS", 3600.0)
    events = list(decoder.stream([1, 2], steps_per_event=None, **options))
    assert [t for event in events for t in event.tokens] == want.tokens[0]
    # 1, then twice as many each time, since no chunk takes an hour.
    taken = np.diff([0, *(event.stats.blocks for event in events)]).tolist()
    assert taken[:-1] == [1, 1, *(2 ** (i + 1) for i in range(len(taken) - 3))]
    assert events[-1].done


@pytest.mark.parametrize(
    ("last", "took", "want"), [(1, 0.02, 2), (4, 0.1, 2), (3, 0.15, 1), (2, 9.0, 1), (8, 0.01, 16)]
)
def test_blocks_of_an_event_follow_their_seconds(last, took, want):
    looks = [HostSync(seconds, np.zeros(1, np.int32)) for seconds in (1.0, 1.0 + took)]
    assert decoder_lib._smooth(looks, last) == want
    assert decoder_lib._smooth(looks[:1], last) == 1


def test_origins_and_counters_tell_the_same_story():
    result = Decoder(TARGET, DraftModel(DRAFT, 3)).generate(RAGGED, max_new_tokens=48, temperature=1.0, seed=1)
    for origins, stats in zip(result.origins, result.stats, strict=True):
        own = sum(origin in ("corrected", "bonus") for origin in origins)
        assert stats.blocks - own in (0, 1), "only the last block may lose its own token, to the budget"
        assert 0 <= stats.accepted - origins.count("accepted") <= 3
        assert stats.emitted == len(origins) == 48
        assert stats.drafted == 3 * stats.blocks
        assert stats.accepted_at == tuple(sorted(stats.accepted_at, reverse=True))
        assert stats.reached_at[0] == stats.blocks
        assert stats.reached_at[1:] == stats.accepted_at[:-1]


def test_nothing_is_recompiled_for_other_prompts_lengths_seeds_or_temperatures():
    decoder = Decoder(TARGET, DraftModel(DRAFT, 3))

    def request(i: int) -> None:
        rng = np.random.default_rng(i)
        lengths = rng.integers(1, 17, 3)
        decoder.generate(
            [rng.integers(0, 4, n).tolist() for n in lengths],
            max_new_tokens=rng.integers(1, 17, 3).tolist(),
            temperature=[0.0, float(rng.uniform(0.2, 2)), 1.0] if i % 2 else 0.0,
            seed=i,
        )

    for i in range(2):
        request(i)
    with count_compiles() as count:
        for i in range(2, 20):
            request(i)
    assert count.programs == 0
    with count_compiles() as count:
        decoder.generate([[1] * 40], max_new_tokens=4)
    assert count.programs > 0, "the counter counts"


def test_the_loop_makes_no_host_transfer_inside_a_chunk():
    decoder = Decoder(TARGET, DraftModel(DRAFT, 3))
    state = decoder.prefilled([[1, 2], [3]], max_new_tokens=20, temperature=1.0)
    steps = jnp.int32(1000)
    engine, params = decoder.engine(False)
    run = programs.compiled_chunk(engine)
    program = run.trace(params, state, steps).lower().as_text()
    assert "while" in program
    for way_out in ("callback", "outfeed", "infeed", "send", "recv"):
        assert way_out not in program
    run(params, jax.tree.map(jnp.copy, state), steps)
    with jax.transfer_guard("disallow"):
        after = run(params, state, steps)
    assert np.asarray(after.done).all()


@pytest.mark.parametrize(
    ("drafter", "greedy"), [("draft", False), ("ngram", True), in_proof("draft", True), in_proof("ngram", False)]
)
def test_prefill_and_loop_lower_for_accelerators(monkeypatch, greedy, drafter):
    # Fresh models: weights are laid out, and programs made, for the backend that is asked for first; all but "cpu" are
    # treated alike.
    platforms = ("tpu", "cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: platforms[0])
    target, draft = transformer(2, norm=Norm(eps=1e-6)), transformer(3, hidden_size=16, norm=Norm(eps=1e-6))
    decoder = Decoder(target, DraftModel(draft, 3) if drafter == "draft" else NGram(3))
    engine, params = decoder.engine(greedy)
    batch = prepare(target, 3, [[1, 2, 3]], 8, 0, False, {"temperature": 0.0 if greedy else 1.0})
    prefill = programs.compiled_prefill(engine.target, engine.drafter, batch.slots[0])
    jax.export.export(prefill, platforms=platforms)(params, batch.request)
    state = jax.eval_shape(prefill, params, batch.request)
    exported = jax.export.export(programs.compiled_chunk(engine), platforms=platforms)(
        params, state, jax.ShapeDtypeStruct((), jnp.int32)
    )
    assert exported.platforms == platforms


def test_weights_are_laid_out_once_for_all_decoders_of_a_target(pair):
    target, draft = pair
    of_one, of_other = (Decoder(target, DraftModel(draft, k)).engine(True)[1].target for k in (2, 3))
    assert all(a is b for a, b in zip(jax.tree.leaves(of_one), jax.tree.leaves(of_other), strict=True))
    changed = dataclasses.replace(target)
    before = Decoder(changed).engine(True)[1].target
    changed.params = jax.tree.map(lambda x: x + 1, changed.params)
    after = Decoder(changed).engine(True)[1].target
    assert not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(after)[0])


def test_a_draft_is_laid_out_once_for_all_decoders(pair):
    target, draft = pair
    drafters = [Decoder(target, DraftModel(draft, k)).engine(True)[1].drafter for k in (2, 3)]
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, drafters), strict=True))


def test_freed_originals_leave_the_weights_in_memory_once():
    """Live arrays of a target and a draft that three decoders share, and what `params` then means."""

    def live_bytes() -> int:
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    before = live_bytes()
    changes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "tie_embeddings": False}
    models = [transformer(seed, **changes) for seed in (8, 9)]
    saved = [jax.tree.map(np.array, model.params) for model in models]
    loaded = live_bytes() - before
    for model in models:
        model.free_originals()
    decoders = [Decoder(models[0], DraftModel(models[1], k)) for k in (1, 2, 3)]
    assert all(decoder.engine(True) for decoder in decoders)
    assert live_bytes() - before <= 1.01 * loaded
    for model, params in zip(models, saved, strict=True):
        jax.tree.map(np.testing.assert_array_equal, model.params, params)
    assert live_bytes() - before <= 1.01 * loaded, "what was made from the layout is not kept"


def test_an_outgrown_cache_is_freed_before_the_next_chunk(monkeypatch):
    """Also while a stream's consumer holds on to what it was given."""
    chunk, seen = programs.compiled_chunk, []

    def watched(engine):
        def run(params, state, *limits):
            slots = num_slots(state.cache)
            held = {x.shape[2] for x in jax.live_arrays() if x.ndim == 4 and x.shape[:2] == (1, 1)}
            seen.append((slots, {size for size in held if size >= 256}))
            return chunk(engine)(params, state, *limits)

        return run

    monkeypatch.setattr(scheduler_lib, "compiled_chunk", watched)
    gc.collect()
    decoder = Decoder(prefix_model(0, vocab_size=7))
    decoder.generate([[1, 2]], max_new_tokens=600)
    kept = list(decoder.stream([1, 2], max_new_tokens=600, steps_per_event=200))
    assert len(kept) >= 3
    assert {slots for slots, _ in seen} == {256, 512, 1024}
    assert all(held == {slots} for slots, held in seen)


def test_a_cache_keeps_numbers_of_the_models_type(pair):
    target, draft = pair
    half = dataclasses.replace(target, spec=dataclasses.replace(target.spec, dtype="bfloat16"))
    state = Decoder(half, DraftModel(draft, 2)).prefilled([[1, 2]], max_new_tokens=4, temperature=1.0)
    assert {x.dtype for x in jax.tree.leaves(state.cache)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.drafter.cache)} == {jnp.dtype(jnp.float32)}


def test_every_leaf_of_the_state_has_the_row_first(pair):
    target, draft = pair
    state = Decoder(target, DraftModel(draft, 3)).prefilled([[1], [2], [3]], max_new_tokens=4, temperature=1.0)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {4}


def test_the_drafts_decode_path_gives_its_training_logits(pair):
    """Teacher-forced: every proposal position of every block against the training forward at the same place."""
    _, draft = pair
    spec = BoundDraftModel(draft.spec, 3)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 24)), jnp.int32)

    @jax.jit
    def train_logits(tokens):
        (prediction,) = TrainedDraftModel(draft.spec).predictions(
            draft.params, Batch(tokens, tokens, jnp.ones(tokens.shape)), None
        )
        return prediction.logits

    feed, propose = jax.jit(spec.model.__call__), jax.jit(spec.draft)
    state = spec.extend(draft.params, spec.init(2, 32), tokens[:, :1], jnp.ones(2, jnp.int32), None)
    for length in (1, 2, 5, 6, 9):
        lengths = jnp.full(2, length, jnp.int32)
        noise = sampling.fresh_noise(jnp.zeros((2, 2), jnp.uint32), lengths, 3)
        for start in range(1, length + 1):  # feed everything committed so far, as prefill and earlier blocks would
            at = jnp.full((2, 1), start - 1, jnp.int32)
            state = state._replace(cache=feed(draft.params, tokens[:, start - 1 : start], at, at, state.cache).cache)
        seen = context(tokens, lengths, neutral_sampling(2, 61), noise)
        block, state = propose(draft.params, TargetView({}), state, seen)
        want = train_logits(jnp.concatenate([tokens[:, :length], block.tokens], axis=1))
        assert block.logits is not None
        np.testing.assert_allclose(block.logits, want[:, length - 1 : length + 2], atol=2e-5)
        np.testing.assert_allclose(block.logits[:, 0], train_logits(tokens)[:, length - 1], atol=2e-5)


def test_the_largest_cache_holds_the_longest_row_and_a_block():
    """S >= longest + K + 1 always, or dynamic_update_slice would clamp and overwrite valid slots."""
    for length, new in [(1, 1), (16, 16), (17, 64), (100, 28), (120, 7), (1, 500), (64, 192)]:
        batch = prepare(TARGET, 8, [[1] * length], new, 0, True, {})
        assert batch.slots[-1] >= length + new + 8 + 1
        assert batch.request.prompt.shape[1] <= batch.slots[0]


def ngram_draft(tokens: list[int], **settings):
    drafter = NGram(**settings)
    padded = jnp.asarray([[*tokens, *[3] * 5]], jnp.int32)
    draft, _ = jax.jit(drafter.draft)({}, TargetView({}), {}, context(padded, [len(tokens)], neutral_sampling(1, 16)))
    return [t for t, ok in zip(draft.tokens[0].tolist(), draft.valid[0].tolist(), strict=True) if ok]


def test_ngram_proposes_what_followed_the_longest_then_latest_match():
    assert ngram_draft([1, 2, 7, 8, 9, 1, 2], k=3, min_n=2, max_n=3) == [7, 8, 9]
    assert ngram_draft([1, 2, 7, 5, 1, 2, 8, 5, 1, 2], k=2, min_n=2, max_n=3) == [8, 5]
    assert ngram_draft([4, 1, 2, 7, 5, 1, 2, 8, 4, 1, 2], k=1, min_n=1, max_n=3) == [7]
    assert ngram_draft([1, 2, 3, 4], k=3, min_n=2, max_n=3) == []
    assert ngram_draft([6, 6], k=3, min_n=1, max_n=3) == [6, 6, 6], "the suffix does not match itself"
    assert ngram_draft([6, 1, 2, 3, 1, 2], k=5, min_n=2, max_n=3) == [3, 1, 2, 3, 1], "a period goes on"
    assert ngram_draft([5], k=3, min_n=1, max_n=3) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompts": []}, "prompts: the list is empty"),
        ({"prompts": "text"}, "give a list"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"prompts": [[1], [4]]}, "prompt 1: token id 4 is outside the target's vocabulary of 4"),
        ({"prompts": [[-1]]}, "token id -1"),
        ({"prompts": ["text"]}, "no tokenizer"),
        ({"prompts": [[1]], "max_new_tokens": 0}, "max_new_tokens of row 0: 0"),
        ({"prompts": [[1]], "temperature": -1.0}, "temperature of row 0: -1.0"),
        ({"prompts": [[1]], "temperature": float("nan")}, "temperature of row 0"),
        ({"prompts": [[1], [2]], "seed": [1]}, "seed: 1 values for 2 prompts"),
        ({"prompts": [[1] * 4000], "max_new_tokens": 100}, "4096 positions"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(DataError, match=message) as error:
        Decoder(TARGET, DraftModel(DRAFT, 2)).generate(call.pop("prompts"), **call)
    assert "\n" not in str(error.value)


def test_a_verifier_made_in_python_is_checked_as_a_configs_is():
    with pytest.raises(SpecjaxError, match=r"verifier.lenience: found 5.0, expected less than or equal to 1"):
        Decoder(TARGET, verifier=Lenient(lenience=5.0))
    assert not Decoder(TARGET, verifier=Lenient(lenience=0.5)).lossless


@pytest.mark.parametrize("learned", [in_proof(False, id="rotary"), pytest.param(True, id="learned")])
def test_a_context_can_be_decoded_to_its_last_position(learned):
    """What is drafted past the end is masked, as past the budget; k may even exceed the whole context."""
    target = transformer(5, max_positions=20, learned_positions=learned)
    prompts, budgets, k = [[1, 2, 3], [4]], [17, 19], 24
    want = Decoder(target).generate(prompts, max_new_tokens=budgets)
    drafted = Decoder(target, DraftModel(target, k)).generate(prompts, max_new_tokens=budgets)
    assert drafted.tokens == want.tokens
    assert drafted.finish_reasons == ["length", "length"]
    assert [s.blocks for s in drafted.stats] == [1, 1]
    with pytest.raises(DataError, match=r"max_new_tokens=18 it exceeds the target's 20 positions"):
        Decoder(target, DraftModel(target, 4)).generate([[1, 2, 3]], max_new_tokens=18)


def test_a_draft_with_fewer_positions_than_the_generation_is_told(pair):
    target, _ = pair
    short = transformer(1, hidden_size=16, num_layers=1, max_positions=32)
    decoder = Decoder(target, DraftModel(short, 2))
    with pytest.warns(UserWarning, match="the draft has 32 positions, and this generation may reach 40"):
        found = decoder.generate([[1] * 8], max_new_tokens=32)
    assert found.tokens == Decoder(target).generate([[1] * 8], max_new_tokens=32).tokens
    decoder.generate([[1] * 8], max_new_tokens=24)  # warnings are errors here


def test_the_greedy_verifier_refuses_temperatures():
    with pytest.raises(DataError, match="temperature 0 only"):
        Decoder(TARGET, verifier="greedy").generate([[1]], temperature=1.0)


def test_an_unknown_verifier_names_the_nearest():
    with pytest.raises(SpecjaxError, match="speculative"):
        Decoder(TARGET, verifier="speculativ")


@pytest.mark.parametrize("replaced", ["draft", "target"])
def test_weights_that_are_replaced_are_decoded_with(replaced):
    """Of the draft, all of whose proposals are kept once it equals the target; and of the target."""
    one, other = (prefix_model(seed, vocab_size=7) for seed in (0, 1))
    model = {"draft": other, "target": one}
    decoder = Decoder(one, DraftModel(other, 3))
    before = decoder.generate([[1, 2]], max_new_tokens=40, temperature=0.0)
    assert before.stats[0].accepted < before.stats[0].drafted
    model[replaced].params = {"draft": one, "target": other}[replaced].params
    after = decoder.generate([[1, 2]], max_new_tokens=40, temperature=0.0)
    assert after.tokens == Decoder(one).generate([[1, 2]], max_new_tokens=40, temperature=0.0).tokens
    assert after.stats[0].accepted >= 3 * (after.stats[0].blocks - 1)


def test_nothing_asks_a_model_that_only_decodes_for_its_originals(monkeypatch):
    """They would be all of its weights once more, and are made whenever somebody does."""
    target, draft = transformer(0), transformer(1)
    for model in (target, draft):
        model.free_originals()
    monkeypatch.setattr(DecodeLayout, "originals", lambda self: pytest.fail("all weights were made again"))
    for drafter in (None, "ngram", DraftModel(draft, 2), DraftModel(target, 2)):
        decoder = Decoder(target, drafter)
        decoder.generate([[1, 2]], max_new_tokens=8, temperature=0.0, logprobs="raw")
        decoder.calibrate([[1, 2]], blocks=2, seconds=0, temperature=0.0)
        assert "weights in memory" in repr(target)


def test_a_model_and_a_drafter_are_printed_in_a_line(pair):
    target, draft = pair
    for thing in (target, draft, DraftModel(draft, 3), Decoder(target, DraftModel(draft, 3))):
        assert len(repr(thing)) < 300
        assert "\n" not in repr(thing)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, r"decoder.calibrations\[True, 1\]: a int"),
        (([1.0, 2.0], [0.5]), r"seconds of \[2\] and acceptance of \[1\], and the drafter proposes up to 3"),
        (([1.0, 2.0, 0.0, 3.0], [0.5] * 3), "above 0"),
        (([np.nan] * 4, [0.5] * 3), "above 0"),
        (([1.0] * 4, [0.5, 0.5, 1.5]), "chances from 0 to 1"),
        (([1.0] * 4, [0.5] * 3, 0.0, [1.0] * 4), r"found=.*; this drafter takes None"),
        (([1.0] * 4, [0.5] * 3, 0.0, None, [[0.5] * 3] * 2), r"by_class of \[2, 3\]; this drafter takes \[1, 3\], or"),
        (([1.0] * 4, [0.5] * 3, 0.0, None, [[0.5, 0.5, 1.5]]), "by_class=.*give chances from 0 to 1"),
    ],
)
def test_a_calibration_that_cannot_be_weighed_with_is_refused(given, message):
    decoder = Decoder(prefix_model(0), DraftModel(prefix_model(1), 3))
    arrays: Any = None
    if isinstance(given, tuple):
        arrays = [None if x is None else np.asarray(x, np.float32) for x in given]
    decoder.calibrations[True, 1] = given if arrays is None else Calibration(*arrays)
    with pytest.raises(SpecjaxError, match=message):
        decoder.generate([[1]], max_new_tokens=4, temperature=0.0)


@pytest.mark.parametrize("chunk", ["8", 2.0, True, 0])
def test_a_prefill_chunk_is_a_whole_number_of_tokens(chunk):
    with pytest.raises(SpecjaxError, match=r"prefill_chunk: .*give at least 1 token, a whole number"):
        Decoder(prefix_model(0), prefill_chunk=chunk)


def test_any_number_of_blocks_can_be_in_an_event():
    events = list(Decoder(prefix_model(0)).stream([1], max_new_tokens=8, temperature=0.0, steps_per_event=2**40))
    assert [len(event.tokens) for event in events] == [8]
