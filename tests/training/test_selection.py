"""Which step a stage keeps and when it stops, from scripted scores; and that the scores are those of decoding."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from specjax import config
from specjax.data.corpus import Document, Part
from specjax.data.prompts import HeldOutPrompt, cut_prompts
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel, TrainedDraftModel
from specjax.errors import ConfigError, DataError, TrainingError
from specjax.evaluation import figures
from specjax.evaluation import held_out as held_out_lib
from specjax.evaluation.held_out import held_out_decoding
from specjax.jobs import bench as measure
from specjax.metrics import DecodeStats
from specjax.runtime import artifact, checkpoint, fingerprint
from specjax.runtime.compile_cache import count_compiles
from specjax.runtime.log import read_log
from specjax.testing.toys import prefix_model, related
from specjax.training import selection
from specjax.training.layout import make_layout
from specjax.training.selection import Decoded, Selector
from tests.cases import in_proof
from tests.training import toys
from tests.training.toys import Interrupt, interrupt_after

EVERY = 2
"""Steps between two evaluations of the toy stage of 12, which is saved every 5."""


def decoded(efficiency: float, temperature: float = 0.0) -> Decoded:
    counts = DecodeStats(1000, round(1000 * efficiency), (1000,), (1000,), (round(1000 * efficiency) - 1000,))
    return Decoded(temperature, [counts], 1.0)


@dataclasses.dataclass
class Scripted:
    """``scores``: digest of the weights -> block efficiency; weights that are not there are noted and score 1."""

    rule: config.Selection
    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    seen: list[str] = dataclasses.field(default_factory=list)
    identity: str = "scripted"

    def __call__(self, params) -> list[Decoded]:
        self.seen.append(fingerprint.digest(params))
        return [decoded(self.scores.get(self.seen[-1], 1.0))]


def weights(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.full((3,), step, jnp.float32)}


def chosen(scores: Sequence[float], **rule) -> tuple[int, int]:
    """(step of the result, last step) of a stage whose evaluations at steps 1, 2, ... have ``scores``."""
    scripted = {fingerprint.digest(weights(step)): score for step, score in enumerate(scores, 1)}
    with tempfile.TemporaryDirectory() as directory:
        selector, step = Selector(Path(directory), Scripted(config.Selection(**rule), scripted), 0), 0
        while step < len(scores) and not selector.stops:
            step += 1
            selector.measure(step, weights(step))
        return int(selector.result(weights(step))["w"][0]), step


@pytest.mark.parametrize(
    ("scores", "best"), [((2.0, 3.0, 2.5, 2.9), 2), ((3.0, 2.0), 1), ((1.5, 2.0), 2), ((2.0, 3.0, 3.0, 1.0), 3)]
)
def test_the_result_is_the_step_of_the_most_tokens_a_call_the_latest_of_equals(scores, best):
    assert chosen(scores, select="best") == (best, len(scores))
    assert chosen(scores) == (len(scores), len(scores))


@pytest.mark.parametrize(
    ("scores", "patience", "last"),
    [
        ((2.0, 1.9, 1.8, 3.0), 1, 2),
        ((2.0, 1.9, 1.8, 3.0), 2, 3),
        ((2.0, 1.9, 2.1, 2.0, 2.0, 9.0), 2, 5),
        ((2.0, 2.0, 2.0, 9.0), 2, 3),
        ((1.0, 2.0, 3.0, 4.0), 1, 4),
    ],
)
def test_a_stage_stops_after_so_many_evaluations_without_a_better_one(scores, patience, last):
    assert chosen(scores, patience=patience) == (last, last)
    assert chosen(scores, patience=patience, select="best")[1] == last


def test_the_score_is_the_mean_over_temperatures_and_the_log_has_each_position():
    stats = DecodeStats(10, 28, (10, 10), (10, 8), (8, 4))
    both = [Decoded(0.0, [stats], 1.0), decoded(2.2, temperature=0.7)]
    record = selection.record_of(both)
    assert record["block_efficiency"] == selection.score(both) == pytest.approx(2.5)
    assert (record["block_efficiency_t0"], record["block_efficiency_t0.7"]) == pytest.approx((2.8, 2.2))
    assert (record["acceptance_t0_at_1"], record["acceptance_t0_at_2"]) == (0.8, 0.4)
    assert record["block_efficiency_t0_low"] == record["block_efficiency_t0_high"] == 2.8
    assert all(type(value) is float for value in record.values())


@pytest.fixture(scope="module")
def trajectory(tmp_path_factory) -> list[str]:
    """Digests of the toy stage's weights at its evaluations."""
    scripted = Scripted(config.Selection())
    toys.train(tmp_path_factory.mktemp("whole") / "stage", decoding=scripted, eval_every=EVERY)
    assert len(scripted.seen) == 6
    return scripted.seen


def best_of(trajectory, *scores, **rule) -> Scripted:
    return Scripted(config.Selection(select="best", **rule), dict(zip(trajectory, scores, strict=False)))


def test_a_stage_returns_its_best_weights_again_without_decoding_again(trajectory, tmp_path):
    scripted = best_of(trajectory, 2.0, 2.5, 3.5, 3.0, 2.0, 2.0)
    found = toys.train(tmp_path / "stage", decoding=scripted, eval_every=EVERY)
    assert fingerprint.digest(found) == trajectory[2]
    log = read_log(tmp_path / "stage")
    measured = {r["step"]: r["block_efficiency"] for r in log if "block_efficiency" in r}
    assert measured == {2: 2.0, 4: 2.5, 6: 3.5, 8: 3.0, 10: 2.0, 12: 2.0}
    again = best_of(trajectory)
    assert fingerprint.digest(toys.train(tmp_path / "stage", decoding=again, eval_every=EVERY)) == trajectory[2]
    assert again.seen == []


@pytest.mark.parametrize("killed_after", [3, 7, 11])
def test_an_interrupted_stage_chooses_and_stops_as_an_uninterrupted_one(killed_after, trajectory, tmp_path):
    """The best step is before the interruption or after it; a better one than it is never forgotten."""
    scores = (2.0, 3.0, 2.0, 4.0, 3.9, 3.8)
    settings = {"decoding": best_of(trajectory, *scores, patience=2), "eval_every": EVERY}
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(killed_after), **settings)
    assert fingerprint.digest(toys.train(tmp_path / "stage", **settings)) == trajectory[3]
    log = read_log(tmp_path / "stage")
    assert [r["block_efficiency"] for r in log if "block_efficiency" in r] == list(scores)


def test_a_stage_that_stopped_early_is_finished(trajectory, tmp_path):
    scripted = best_of(trajectory, 2.0, 3.0, 2.9, 2.8, 9.0, patience=2)
    steps: list[int] = []
    for _ in range(2):
        found = toys.train(tmp_path / "stage", lambda step, _: steps.append(step), decoding=scripted, eval_every=EVERY)
        assert fingerprint.digest(found) == trajectory[1]
    assert steps == list(range(1, 9))


def test_a_kill_between_the_best_weights_and_their_score_changes_nothing(trajectory, tmp_path, monkeypatch):
    scripted = best_of(trajectory, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0)
    write = artifact.write_json

    def killed(file, value):
        if file.name == selection.SCORES and "6" in value:
            # On disk before the score that names them.
            assert (tmp_path / "stage" / selection.BEST / "6" / checkpoint.MANIFEST).exists()
            raise Interrupt
        write(file, value)

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "write_json", killed)
        with pytest.raises(Interrupt):
            toys.train(tmp_path / "stage", decoding=scripted, eval_every=EVERY)
    found = toys.train(tmp_path / "stage", decoding=scripted, eval_every=EVERY)
    assert fingerprint.digest(found) == trajectory[2]


def test_a_damaged_best_step_is_named_and_the_best_before_it_is_the_result(trajectory, tmp_path, caplog):
    settings = {"decoding": best_of(trajectory, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0), "eval_every": EVERY}
    toys.train(tmp_path / "stage", **settings)
    best = tmp_path / "stage" / selection.BEST
    (best / "6" / "sha256.json").write_text("{}")
    assert fingerprint.digest(toys.train(tmp_path / "stage", **settings)) == trajectory[1]
    assert "of step 6, is gone or damaged; the result is the best before it, of step 4" in caplog.text
    (best / "4" / "sha256.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"of step 6, is gone or damaged; .*copy, or move .*stage elsewhere"):
        toys.train(tmp_path / "stage", **settings)


def test_a_damaged_best_step_costs_nothing_where_it_is_the_last(trajectory, tmp_path):
    settings = {"decoding": best_of(trajectory, 1.0, 2.0, 1.0, 1.0, 1.0, 3.0), "eval_every": EVERY}
    toys.train(tmp_path / "stage", **settings)
    (tmp_path / "stage" / selection.BEST / "12" / "sha256.json").write_text("{}")
    assert fingerprint.digest(toys.train(tmp_path / "stage", **settings)) == trajectory[5]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: content[:20], "damaged"),
        (lambda content: "[]", "damaged"),
        (lambda content: content.replace('"2": 2.0', '"2": 9.0'), "damaged"),
        (lambda content: '{"2": 2.0, "4": 3.0, "6": 4.0, "8": 1.0, "10": 1.0}', "of an earlier version, or damaged"),
        (None, "gone"),
    ],
)
def test_damaged_scores_are_those_of_the_log(damage, told, trajectory, tmp_path, caplog):
    scripted = best_of(trajectory, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0)
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(11), decoding=scripted, eval_every=EVERY)
    scores = tmp_path / "stage" / selection.SCORES
    scores.unlink() if damage is None else scores.write_text(damage(scores.read_text()))
    found = toys.train(tmp_path / "stage", decoding=scripted, eval_every=EVERY)
    assert fingerprint.digest(found) == trajectory[2]
    assert f"scores.json: {told}; the scores are those of the log" in caplog.text


def test_what_decides_is_part_of_the_stages_settings_and_what_only_informs_is_not(trajectory, tmp_path):
    settings = {"eval_every": EVERY, "steps": 2}
    toys.train(tmp_path / "informed", decoding=Scripted(config.Selection()), **settings)
    toys.train(tmp_path / "informed", decoding=Scripted(config.Selection(prompts=3)), **settings)
    toys.train(tmp_path / "informed", **settings)
    toys.train(tmp_path / "decided", decoding=best_of(trajectory), **settings)
    for changes in ({"decoding": best_of(trajectory, patience=3)}, {"decoding": best_of(trajectory), "eval_every": 1}):
        with pytest.raises(TrainingError, match=r"other settings: .*selection\.(patience|eval_every)"):
            toys.train(tmp_path / "decided", **settings | changes)


# The real decoding.

DOCUMENTS = [Document(str(i), f"def function_{i}(value, other): return value + {i}\n" * 6) for i in range(8)]


def run_config(**selected) -> config.RunConfig:
    rule = {"prompts": 3, "prompt_tokens": 8, "new_tokens": 12, "k": 2, "temperatures": (0.0, 1.0)}
    return config.RunConfig(
        target=config.Target(path="x"),
        data=config.Data(path="x"),
        bench=config.Bench(prompts=2, prompt_tokens=8),
        selection=config.Selection(**rule | selected),
    )


TARGET: Any = prefix_model(0, scale=1.2)
DRAFT = related(TARGET, 1)


@pytest.fixture(scope="module")
def decoding() -> held_out_lib.HeldOutDecoding:
    """Of toy models, which compile in no time."""
    prompts = [HeldOutPrompt(tokens, "text") for tokens in ([1, 2], [3], [0, 1])]
    rule = config.Selection(prompts=3, new_tokens=12, k=2)
    settings = ((0.0, 1.0), "speculative", {}, 0)
    return held_out_lib.HeldOutDecoding(rule, TARGET, TrainedDraftModel(DRAFT.spec), prompts, *settings)


def test_the_counts_are_those_of_decoding_with_these_weights(decoding):
    prompts = [prompt.tokens for prompt in decoding.prompts]
    greedy, sampled = decoding(DRAFT.params)
    decoder = Decoder(TARGET, DraftModel(DRAFT, 2))
    for found, temperature in ((greedy, 0.0), (sampled, 1.0)):
        want = decoder.generate(prompts, max_new_tokens=12, temperature=temperature, seed=0, ignore_eos=True)
        assert (found.temperature, found.by_prompt) == (temperature, want.stats)
        assert found.stats.emitted == 3 * 12
        assert found.tokens_per_s == pytest.approx(36 / found.seconds)
        assert Decoded.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_the_speed_is_the_median_of_the_turns():
    turns = [[dataclasses.replace(decoded(2.0), seconds=s), decoded(3.0, 1.0)] for s in (9.0, 2.0, 4.0)]
    greedy, sampled = held_out_lib.with_median_seconds(turns)
    assert (greedy.seconds, greedy.tokens_per_s) == (4.0, 500.0)
    assert sampled == decoded(3.0, 1.0)


def test_a_draft_that_is_the_target_has_every_token_accepted(decoding):
    for found in decoding(TARGET.params):
        assert found.stats.acceptance_at == (1.0, 1.0)


def programs_for_other_weights(decoding: held_out_lib.HeldOutDecoding, params) -> int:
    other = jax.tree.map(lambda x: -x, params)
    decoding(params)
    with count_compiles() as count:
        decoding(other)
    return count.programs


def test_other_weights_of_the_draft_compile_nothing(decoding):
    assert programs_for_other_weights(decoding, DRAFT.params) == 0


@pytest.mark.more
def test_other_weights_of_a_transformer_compile_nothing(tiny_target, tiny_draft):
    found = held_out_decoding(run_config(), tiny_target, TrainedDraftModel(tiny_draft.spec), DOCUMENTS)
    assert found is not None
    assert programs_for_other_weights(found, tiny_draft.params) == 0


def test_the_prompts_are_not_those_of_the_benchmark(tiny_target, tiny_draft):
    decoding = held_out_decoding(run_config(), tiny_target, TrainedDraftModel(tiny_draft.spec), DOCUMENTS)
    assert decoding is not None
    timed = measure.held_out_prompts(DOCUMENTS, tiny_target, 8, 8)
    assert len(decoding.prompts) == 3
    assert not [p for p in decoding.prompts if p.tokens in timed]


def test_temperatures_are_those_of_the_benchmark_unless_they_are_given(tiny_target, tiny_draft):
    run = dataclasses.replace(run_config(temperatures=None), bench=config.Bench(temperatures=(0.5,)))
    found = held_out_decoding(run, tiny_target, TrainedDraftModel(tiny_draft.spec), DOCUMENTS)
    assert found is not None
    assert found.temperatures == (0.5,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_tokens": 250}, "need 261 positions, the target has 256"),
        ({"prompt_tokens": 240}, r"no prompt of selection\.prompt_tokens=240"),
    ],
)
def test_what_cannot_be_decoded_is_refused(changes, message, tiny_target, tiny_draft):
    with pytest.raises(DataError, match=message):
        held_out_decoding(run_config(**changes), tiny_target, TrainedDraftModel(tiny_draft.spec), DOCUMENTS)


def test_without_prompts_nothing_is_decoded_and_nothing_can_be_chosen(tiny_target, tiny_draft):
    drafter = TrainedDraftModel(tiny_draft.spec)
    assert held_out_decoding(run_config(prompts=0), tiny_target, drafter, DOCUMENTS) is None
    refused: list[dict[str, Any]] = [{"select": "best"}, {"patience": 2}]
    for changes in refused:
        with pytest.raises(ValueError, match="need prompts to decode"):
            config.Selection(prompts=0, **changes)


@pytest.mark.parametrize(
    ("processes", "mesh", "can"),
    [
        (2, config.Mesh(data=-1, draft="replicated"), False),
        (1, config.Mesh(fsdp=2), True),
        (1, config.Mesh(fsdp=2, draft="replicated"), True),
    ],
)
def test_several_processes_do_not_decode_and_cannot_choose(processes, mesh, can, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    assert held_out_lib.decoding_enabled(dataclasses.replace(run_config(), mesh=mesh)) == can
    chooses = dataclasses.replace(run_config(select="best"), mesh=mesh)
    message = r"select=best and patience=None, but several processes do not decode; set select=last"
    with contextlib.nullcontext() if can else pytest.raises(ConfigError, match=message):
        held_out_lib.decoding_enabled(chooses)


def test_that_several_processes_do_not_decode_is_said(tiny_target, tiny_draft, monkeypatch, capsys):
    settings = (tiny_target, TrainedDraftModel(tiny_draft.spec), DOCUMENTS)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    silent, told = (dataclasses.replace(run_config(**rule), mesh=config.Mesh(data=-1)) for rule in ({"prompts": 0}, {}))
    assert held_out_decoding(silent, *settings) is None
    assert capsys.readouterr().err == ""
    assert held_out_decoding(told, *settings) is None
    assert capsys.readouterr().err.startswith("note: selection: several processes do not decode")


@pytest.mark.parametrize("target", [in_proof("replicated"), "sharded"])
def test_a_draft_and_a_target_in_parts_decode_as_whole_ones(target, tiny_draft):
    """A draft that is its target: were one of them put together wrongly, it would not have every token accepted."""
    layout, drafter = make_layout(config.Mesh(fsdp=2, tensor=2, target=target)), TrainedDraftModel(tiny_draft.spec)
    parts = layout.put(tiny_draft.params, layout.of_draft(tiny_draft.params, drafter))
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(parts))
    whole = dataclasses.replace(tiny_draft, params=parts) if layout.target_sharded else tiny_draft
    prompts = [HeldOutPrompt(list(range(start, start + 8)), "text") for start in (5, 9)]
    rule = config.Selection(prompts=2, new_tokens=8, k=2)
    settings = (drafter, prompts, (1.0,), "speculative", {}, 0)
    (found,) = held_out_lib.HeldOutDecoding(rule, whole, *settings)(parts)
    assert found.stats.acceptance_at == (1.0, 1.0)
    assert found.stats.emitted == 2 * 8


def test_a_comparison_tells_sources_apart_and_adds_them_up(decoding):
    """Two prompts of one source, one of another: 3 and 1 tokens a block."""
    counts = [DecodeStats(10, emitted, (10, 10), (10, 10), (10, 10)) for emitted in (30, 30, 10)]
    sources = ("code", "code", "prose")
    prompts = [dataclasses.replace(p, source=s) for p, s in zip(decoding.prompts, sources, strict=True)]
    of = dataclasses.replace(decoding, prompts=prompts, temperatures=(0.0,))
    alphas = {"draft_before": {"code": 0.5, "prose": 0.2, "all": 0.4}}
    rows = figures.comparison(of, {"draft_before": [Decoded(0.0, counts, 2.0)]}, alphas)
    assert [(r.source, r.prompts, r.alpha) for r in rows] == [("code", 2, 0.5), ("prose", 1, 0.2), ("all", 3, 0.4)]
    assert [r.block_efficiency for r in rows] == pytest.approx([3.0, 1.0, 70 / 30])
    assert [r.tokens_per_s for r in rows] == [None, None, 35.0]
    assert rows[2].low is not None
    assert rows[2].low < 70 / 30 < (rows[2].high or math.nan)


def test_prompts_carry_the_source_of_their_document(tiny_target):
    prompts = cut_prompts([Document("a", DOCUMENTS[0].text, "wiki"), DOCUMENTS[1]], tiny_target.tokenizer, 8, 2)
    assert sorted(p.source for p in prompts) == ["text", "wiki"]


def test_prompts_of_chats_end_where_an_answer_begins(tiny_tokenizer, caplog):
    def chat(name: str, *sizes: int) -> Document:
        """Alternating parts of so many tokens: questions, then answers."""
        parts = tuple(Part("(" * size, i % 2 == 0) for i, size in enumerate(sizes))
        return Document(name, name + "".join(part.text for part in parts), name, parts, ({"role": "user"},))

    size = len(tiny_tokenizer("(")["input_ids"])
    assert size == 1
    several, long = chat("a", 3, 2, 2, 9, 30, 1), chat("b", 20, 4)
    prompts = cut_prompts([several, long], tiny_tokenizer, 10, 9)
    # Whole ones first: after 3, and after 3 + 2 + 2 tokens; then the ends of longer ones.
    assert sorted((p.source, len(p.tokens)) for p in prompts[:2]) == [("a", 3), ("a", 7)]
    assert sorted((p.source, len(p.tokens)) for p in prompts[2:]) == [("a", 10), ("b", 10)]
    assert "2 of 4 held-out prompts are the end of a longer chat; more prompt_tokens than 10" in caplog.text
    caplog.clear()
    assert len(cut_prompts([several, long], tiny_tokenizer, 46, 9)) == 4
    assert not caplog.records


def test_a_prompt_of_the_documents_own_is_the_held_out_prompt(tiny_tokenizer):
    document = Document("a", "def add(first", parts=(Part("def add", True), Part("(first", False)))
    (prompt,) = cut_prompts([document], tiny_tokenizer, 64, 5)
    assert prompt.tokens == tiny_tokenizer("def add")["input_ids"]


def test_held_out_prompts_from_inside_a_text_open_as_a_text_does(tiny_tokenizer):
    class Opening:
        eos_token_id = 0

        def __call__(self, texts, add_special_tokens=True):
            ids = tiny_tokenizer(texts)["input_ids"]
            return {"input_ids": [7, *ids] if add_special_tokens else ids}

    asked = (Part("(" * 9, True), Part("first", False))
    text, own = Document("a", "(" * 16, "text"), Document("b", "(" * 9 + "first", "own", asked)
    chat = dataclasses.replace(own, text="(" * 9 + " first", source="chat", messages=({"role": "user"},))
    found = {p.source: p.tokens for p in cut_prompts([text, own, chat], Opening(), 4, 20)}
    (bracket,) = tiny_tokenizer("(")["input_ids"]
    opened = [7, bracket, bracket, bracket]
    assert found == {"text": opened, "own": opened, "chat": [bracket] * 4}
    # One token would be no prompt beside what opens it.
    assert [p.tokens for p in cut_prompts([text], Opening(), 1, 1)] == [[bracket]]
