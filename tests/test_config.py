from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specjax.config import Draft, RunConfig, load_config, load_sweep
from specjax.config.training import STARTS
from specjax.errors import ConfigError
from specjax.registry import INITS, VERIFIERS, build
from specjax.verifiers.lenient import Lenient

ROOT = Path(__file__).parent.parent
SMALLEST = "target: {path: models/target}\ndata: {path: python-stdlib}\n"


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problem(path: Path, *overrides: str, load=load_config) -> str:
    """The one line that the config is refused with."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_overrides_change_single_fields_and_leave_their_neighbours(written):
    path = written(SMALLEST + "distill: {steps: 7, batch_size: 3}\n")
    config = load_config(path, ["distill.steps=9", "distill.optimizer.learning_rate=1e-4", "bench.ks=[2,4]"])
    assert (config.distill.steps, config.distill.batch_size) == (9, 3)
    assert config.distill.optimizer.learning_rate == 1e-4
    assert config.bench.ks == (2, 4)


def test_an_empty_mapping_empties_one_and_leaves_a_section(written):
    path = written(SMALLEST + "bench: {prompts: 5, drafts: {mine: models/mine}}\n")
    emptied = load_config(path, ["bench.drafts={}"]).bench
    assert (emptied.prompts, emptied.drafts) == (5, {})
    assert load_config(path, ["bench={}"]).bench == load_config(path).bench


JENSEN = "distill: {loss: {kind: jensen_shannon, beta: 0.3}}\n"
EVERY_UNION = """
draft: {init: {kind: layers, keep: [0, 1], share: true}}
distill:
  loss: {kind: adaspec, reference: there, of: {kind: jensen_shannon, beta: 0.3}}
  data: {kind: generated, sequences: 7}
verifier: {kind: lenient, lenience: 0.5}
certify: {drafter: {kind: draft_model, model: there, k: 3}}
"""


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        (["distill.loss={kind: lk_lambda, eta: 2}"], {"kind": "lk_lambda", "eta": 2}),
        (["distill.loss.kind=lk_lambda"], {"kind": "lk_lambda"}),
        (["distill.loss.kind=lk_lambda", "distill.loss.eta=2"], {"kind": "lk_lambda", "eta": 2}),
        (["distill.loss.eta=2", "distill.loss.kind=lk_lambda"], {"kind": "lk_lambda", "eta": 2}),
        (["distill.loss={kind: sum, of: [forward_kl]}", "distill.loss=lk_alpha"], "lk_alpha"),
        (["distill.loss.draft_temperature=2"], {"kind": "jensen_shannon", "beta": 0.3, "draft_temperature": 2}),
        (["distill.loss={kind: jensen_shannon, beta: 0.1}"], {"kind": "jensen_shannon", "beta": 0.1}),
    ],
)
def test_an_override_of_another_kind_replaces_the_fields_of_the_one_before(written, overrides, loss):
    assert load_config(written(SMALLEST + JENSEN), overrides).distill.loss == loss


@pytest.mark.parametrize(
    ("loss", "overrides", "expected"),
    [
        (
            "{kind: adaspec, reference: r, of: {kind: jensen_shannon}}",
            ["distill.loss.of=[lk_alpha]", "distill.loss.kind=sum"],
            {"kind": "sum", "of": ["lk_alpha"]},
        ),
        (
            "{kind: sum, of: [lk_alpha]}",
            ["distill.loss.of.kind=lk_alpha", "distill.loss.reference=r", "distill.loss.kind=adaspec"],
            {"kind": "adaspec", "reference": "r", "of": {"kind": "lk_alpha"}},
        ),
    ],
)
def test_a_field_that_two_kinds_have_is_given_anew(written, loss, overrides, expected):
    path = written(SMALLEST + f"bench: {{ks: [3]}}\ndistill: {{loss: {loss}}}\n")
    assert load_config(path, overrides).distill.loss == expected
    with pytest.raises(ConfigError, match=r"override 'bench.ks.0=3': a list is overridden as a whole"):
        load_config(path, [*overrides, "bench.ks.0=3"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft.init", {"kind": "checkpoint", "path": "elsewhere"}),
        ("distill.loss.of", {"kind": "lk_lambda", "eta": 1}),
        ("distill.data", {"kind": "on_policy", "share": 0.25}),
        ("verifier", {"kind": "typical", "epsilon": 0.1}),
        ("certify.drafter", {"kind": "ngram", "k": 2}),
    ],
)
def test_so_does_one_of_every_field_that_has_kinds(written, field, value):
    found = load_config(written(SMALLEST + EVERY_UNION), [f"{field}={json.dumps(value)}"])
    for name in field.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value


def test_a_section_keeps_its_fields_whatever_kind_it_is_set_to(written):
    path = written(SMALLEST + "distill: {optimizer: {kind: adamw, learning_rate: 1e-4, schedule: linear}}\n")
    optimizer = load_config(path, ["distill.optimizer.kind=muon"]).distill.optimizer
    assert (optimizer.kind, optimizer.learning_rate, optimizer.schedule) == ("muon", 1e-4, "linear")


def test_losses_can_be_swept(written):
    swept = "[forward_kl, {kind: lk_lambda, eta: 2}, {kind: jensen_shannon, beta: 0.1}]"
    runs = load_sweep(written(SMALLEST + JENSEN + f"sweep: {{distill.loss: {swept}}}\n"))
    assert [run.error for run in runs] == [None] * 3
    losses = [run.config.distill.loss for run in runs if run.config]
    assert losses == ["forward_kl", {"kind": "lk_lambda", "eta": 2}, {"kind": "jensen_shannon", "beta": 0.1}]


@pytest.mark.parametrize(
    ("init", "rate", "steps"),
    [
        ("null", 3e-3, 300),
        ("scratch", 3e-3, 300),
        ("{kind: scratch}", 3e-3, 300),
        ("target", 1e-3, 300),
        ("{kind: pruned}", 1e-3, 300),
        ("{kind: layers, keep: [0]}", 3e-4, 300),
        ("models/llama-1b", 1e-4, 0),
        ("{kind: checkpoint, path: models/llama-1b}", 1e-4, 0),
    ],
)
def test_defaults_do_not_undo_what_the_draft_starts_with(written, init, rate, steps):
    config = load_config(written(SMALLEST), [f"draft.init={init}"])
    assert (config.draft.pretrain.loss, config.draft.pretrain.steps) == ("cross_entropy", steps)
    assert config.draft.pretrain.optimizer.learning_rate == config.distill.optimizer.learning_rate == rate
    assert config.distill.steps == 500
    same = RunConfig(target=config.target, data=config.data, draft=Draft(init=config.draft.init))
    assert (same.draft, same.distill) == (config.draft, config.distill)
    # Given in part, it is still a pretraining; what is given holds.
    config = load_config(written(SMALLEST), [f"draft.init={init}", "draft.pretrain.batch_size=3"])
    assert (config.draft.pretrain.loss, config.draft.pretrain.steps) == ("cross_entropy", steps)
    given = ["draft.pretrain.steps=7", "draft.pretrain.loss=forward_kl", "distill.optimizer.learning_rate=5e-2"]
    config = load_config(written(SMALLEST), [f"draft.init={init}", *given])
    assert (config.draft.pretrain.loss, config.draft.pretrain.steps) == ("forward_kl", 7)
    assert (config.draft.pretrain.optimizer.learning_rate, config.distill.optimizer.learning_rate) == (rate, 5e-2)


def test_a_target_from_scratch_learns_as_random_weights_do(written):
    text = "target: {architecture: {}, steps: 3}\ndata: {path: python-stdlib}\ndraft: {init: models/llama-1b}\n"
    assert load_config(written(text)).target.optimizer.learning_rate == 3e-3


def test_every_kind_of_start_has_defaults_of_its_own():
    assert STARTS.keys() == {*INITS}


def test_a_field_can_be_interpolated_from_another(written):
    path = written(SMALLEST + "distill: {batch_size: 6}\neval: {batch_size: '${distill.batch_size}'}\n")
    assert load_config(path, ["distill.batch_size=5"]).eval.batch_size == 5


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "a/${oc.decode:1}", "${oc.${data.path}:x}"])
def test_resolvers_are_refused(written, text):
    message = problem(written(SMALLEST + f"out: '{text}'\n"))
    assert "out:" in message
    assert "resolver" in message


def test_interpolating_what_is_not_there_is_refused(written):
    assert "seed: Interpolation key 'nowhere' not found" in problem(written(SMALLEST), "seed=${nowhere}")


def test_steps_are_given_or_counted_from_epochs_of_the_data(written):
    stage = load_config(written(SMALLEST), []).distill
    assert (stage.steps, stage.over(100), stage.num_steps) == (500, stage, 500)
    stage = load_config(
        written(SMALLEST + "distill: {steps: 7, batch_size: 8}"), ["distill.steps=", "distill.epochs=2.5"]
    )
    assert stage.distill.over(100).num_steps == 32
    with pytest.raises(ValueError, match="depend on the data"):
        _ = stage.distill.num_steps


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("distil.steps", "'distill'"),
        ("distill.step", "'distill.steps'"),
        ("distill.learning_rate", "'distill.optimizer.learning_rate'"),
        ("draft.hidden_size", "'draft.architecture.hidden_size'"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(written, key, nearest):
    message = problem(written(SMALLEST), f"{key}=1")
    assert f"did you mean {nearest}?" in message
    assert f"from the override '{key}=1'" in message


def test_an_unknown_key_in_the_file_names_the_file_and_lists_what_is_known(written):
    path = written(SMALLEST + "qqq: 1\n")
    message = problem(path)
    assert message.startswith(f"{path}: qqq: unknown key")
    assert "bench" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("distill.steps=abc", 'found "abc", expected a valid integer'),
        ("distill.steps=2.5", "found 2.5, expected a valid integer"),
        ("distill.steps='12'", 'found "12", expected a valid integer'),
        ("seed=true", "found true, expected a valid integer"),
        ("data.path=12", "found 12, expected a valid string (quote it)"),
        ("target.dtype=float8", "found \"float8\", expected 'float32', 'bfloat16' or 'float16'"),
        ("bench=3", "found 3, expected a mapping of fields"),
        ("bench.ks=3", "found 3, expected a valid list"),
        ("draft=", "found null, expected a mapping of fields"),
    ],
)
def test_a_wrong_type_names_value_and_expectation(written, override, expected):
    message = problem(written(SMALLEST), override)
    assert f"{override.partition('=')[0]}: {expected}" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("distill.optimizer.learning_rate=3", "less than or equal to 1"),
        ("distill.optimizer.clip_norm=.nan", "greater than 0"),
        ("distill.steps=-1", "greater than or equal to 0"),
        ("data.held_out=1.0", "less than 1"),
        ("bench.prompt_tokens=0", "greater than or equal to 1"),
        ("bench.ks=[]", "at least one value"),
        ("bench.ks=[3,3]", "repeats a value"),
        ("bench.ks=[65]", "less than or equal to 64"),
        ("out=''", "at least 1 character"),
    ],
)
def test_a_value_out_of_range_says_the_range(written, override, expected):
    message = problem(written(SMALLEST), override)
    assert override.partition("=")[0] in message
    assert expected in message


def test_every_problem_gets_its_own_line(written):
    with pytest.raises(ConfigError) as caught:
        load_config(written(SMALLEST), ["seed=-1", "distill.steps=x", "nope=1"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["draft.architecture.hidden_size=130"], "hidden_size=130 is not a multiple of num_heads=4"),
        (["draft.architecture.hidden_size=12"], "rotary embeddings need an even number"),
        (["draft.architecture.head_dim=7"], "head_dim=7 is odd"),
        (["draft.architecture.num_kv_heads=3"], "num_heads=4 is not a multiple of num_kv_heads=3"),
        (["target.path=null"], "neither of path and architecture"),
        (["target.architecture.hidden_size=64"], "both of path and architecture"),
        (["target.steps=5"], "only a target from scratch is trained"),
        (["target.path=null", "target.architecture.hidden_size=64"], "has to be trained; set steps"),
        (
            ["target.path=null", "target.architecture.hidden_size=64", "target.steps=3", "target.kv_cache=int8"],
            "without a path",
        ),
        (["verifier=greedy"], "temperature 0 only"),
        (
            ["distill.teacher=cached", "distill.loss=reverse_kl"],
            "loss 'reverse_kl' needs the target's whole distribution",
        ),
        (
            ["distill.teacher=cached", "distill.loss={kind: forward_kl, target_temperature: 2}"],
            "loss 'forward_kl' needs the target's whole distribution, teacher=cached keeps its 64 largest logits",
        ),
        (["mesh.data=-1", "mesh.fsdp=-1"], "-1 on more than one axis"),
        (["mesh.tensor=0"], "0 devices"),
        (["distributed.enabled=true", "distributed.process_id=1"], "go together"),
        (["distributed.coordinator=h:1", "distributed.num_processes=2", "distributed.process_id=1"], "enabled=true"),
        (["distill.steps=5", "distill.epochs=2"], "steps=5 and epochs=2; give one of them, and null for the other"),
        (["distill.micro_batch_size=3"], "batch_size=16 is not a multiple of micro_batch_size=3"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(written, overrides, expected):
    assert expected in problem(written(SMALLEST), *overrides)


def test_kept_hidden_states_take_losses_of_the_whole_distribution(written):
    """Of a draft that reads them; what is kept of others is the largest logits."""
    kept = ["distill.teacher=cached", "distill.loss=reverse_kl"]
    assert load_config(written(SMALLEST), [*kept, "draft.kind=eagle3"]).distill.loss == "reverse_kl"


@pytest.mark.parametrize(
    ("override", "nearest"), [("verifier=speculativ", "'speculative'"), ("distill.loss=forward-kl", "'forward_kl'")]
)
def test_an_unregistered_kind_names_the_nearest(written, override, nearest):
    message = problem(written(SMALLEST), override)
    assert f"did you mean {nearest}?" in message
    assert "known are" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- a\n- b\n", "a list at the top"),
        ("3", "not a mapping"),
        ("target: [", "not valid YAML"),
        ("seed: 1\nseed: 2\n", "duplicate key seed"),
        ("data: {path: x}\n", "target: missing"),
    ],
)
def test_a_file_that_is_no_config_is_refused(written, text, expected):
    path = written(text)
    message = problem(path)
    assert message.startswith(f"{path}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("draft.init={kind: layer, keep: [0]}", "draft.init: 'layer' is unknown"),
        ("draft.init={kind: layers}", "draft.init: keep: missing"),
        ("draft.init={kind: layers, keep: []}", "draft.init: keep: found [], expected"),
        ("draft.init={kind: layers, keep: [2, 1]}", "draft.init: keep: [2, 1] is not ascending"),
        (
            "draft.init={kind: layers, keep: [0], shared: true}",
            "shared: unknown key of 'layers'; did you mean",
        ),
        ("draft.init=''", "draft.init: found an empty text"),
        ("draft.init=[1]", "draft.init: found [1], expected a kind"),
        ("selection={prompts: 0, select: best}", "need prompts to decode"),
        ("selection.temperatures=[0.5]", "decodes at temperature 0 only, selection.temperatures has 0.5"),
    ],
)
def test_an_impossible_start_or_choice_is_refused(written, override, expected):
    config = SMALLEST + "verifier: greedy\nbench: {temperatures: [0]}\n"
    assert expected in problem(written(config), override)


def test_a_draft_may_start_from_layers_of_the_target(written):
    config = load_config(written(SMALLEST), ["draft.init={kind: layers, keep: [0, 2], share: true}"])
    assert config.draft.init == {"kind": "layers", "keep": [0, 2], "share": True}


def test_a_missing_file_or_directory_is_named(tmp_path):
    assert problem(tmp_path / "nope.yaml") == f"{tmp_path / 'nope.yaml'}: no such config file"
    assert str(tmp_path) in problem(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"out: caf\xe9\n")
    assert "not UTF-8" in problem(path)


@pytest.mark.parametrize("override", ["distill.steps", "=3", "distill..steps=3", "bench.ks=[1", "seed=${x"])
def test_a_malformed_override_is_named(written, override):
    assert f"override {override!r}" in problem(written(SMALLEST), override)


def test_a_sweep_is_the_product_in_file_order_with_stable_names(written):
    sweep = SMALLEST + "out: runs/s\nsweep: {distill.steps: [10, 20], seed: [0, 1]}\n"
    runs = load_sweep(written(sweep))
    assert [tuple(run.overrides.values()) for run in runs] == [(10, 0), (10, 1), (20, 0), (20, 1)]
    assert [(run.config.distill.steps, run.config.seed) for run in runs if run.config] == [
        (10, 0),
        (10, 1),
        (20, 0),
        (20, 1),
    ]
    assert all(run.config and run.config.out == str(run.out) == f"runs/s/{run.id}" for run in runs)
    larger = load_sweep(written(sweep.replace("[10, 20]", "[10, 20, 30]")))
    assert {run.id for run in runs} < {run.id for run in larger}


def test_a_sweep_point_changes_what_is_interpolated_from_it(written):
    path = written(SMALLEST + "control: {learning_rates: ['${distill.optimizer.learning_rate}']}\n"
                   "sweep: {distill.optimizer.learning_rate: [1e-3, 2e-3]}\n")  # fmt: skip
    assert [run.config.control.learning_rates for run in load_sweep(path) if run.config] == [(1e-3,), (2e-3,)]


def test_another_base_configuration_is_another_run(written):
    path = written(SMALLEST + "sweep: {seed: [0, 1]}\n")
    before, after = load_sweep(path), load_sweep(path, ["distill.steps=3"])
    assert not {run.id for run in before} & {run.id for run in after}
    assert [run.id for run in before] == [run.id for run in load_sweep(path, ["out=elsewhere"])]


def test_an_invalid_point_of_a_sweep_leaves_the_others_valid(written):
    good, bad = load_sweep(written(SMALLEST + "sweep: {seed: [0, -1]}\n"))
    assert good.config is not None
    assert bad.config is None
    assert "seed: found -1" in str(bad.error)
    assert "from the sweep" in str(bad.error)


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("{seeed: [1]}", "did you mean 'seed'?"),
        ("{seed: []}", "expected a list of values"),
        ("{seed: 3}", "expected a list of values"),
        ("{seed: [1, 1]}", "occurs twice"),
        ("{seed: [-1]}", "seed: found -1"),
        ("{out: [a]}", "not a field to sweep"),
        ("[1]", "expected a mapping"),
    ],
)
def test_a_sweep_that_is_wrong_as_a_whole_is_refused(written, sweep, expected):
    assert expected in problem(written(SMALLEST + f"sweep: {sweep}\n"), load=load_sweep)


def test_a_swept_field_cannot_be_overridden_too(written):
    message = problem(written(SMALLEST + "sweep: {seed: [0, 1]}\n"), "seed=4", load=load_sweep)
    assert "set by the override 'seed=4' and by the sweep" in message


def test_a_file_without_sweep_is_one_run_in_out_itself(written):
    [run] = load_sweep(written(SMALLEST + "out: runs/one\n"))
    assert (run.overrides, str(run.out), run.config and run.config.out) == ({}, "runs/one", "runs/one")


def test_a_sweep_is_no_single_run_unless_it_is_switched_off(written):
    path = written(SMALLEST + "sweep: {seed: [0, 1]}\n")
    assert "specjax sweep" in problem(path)
    assert load_config(path, ["sweep=null"]).seed == 0


def test_the_committed_schema_is_current():
    from specjax.config import json_schema

    committed = json.loads((ROOT / "configs/schema.json").read_text(encoding="utf-8"))
    assert committed == json_schema(), "run: specjax schema > configs/schema.json"


CONFIGS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "configs").rglob("*.yaml"))]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_is_valid_and_says_how_to_run_it(name):
    path = ROOT / name
    lines = path.read_text(encoding="utf-8").splitlines()
    header = "\n".join(line for line in lines[: lines.index("")] if line.startswith("#"))
    assert lines[0] == f"# yaml-language-server: $schema={'../' * (name.count('/') - 1)}schema.json"
    assert name in header
    assert all(run.config is not None for run in load_sweep(path))


def test_the_demo_draft_has_the_size_that_its_header_says():
    path = ROOT / "configs/demo.yaml"
    config = load_config(path)
    target = json.loads((ROOT / str(config.target.path) / "config.json").read_text())
    a, width = config.draft.architecture, target["head_dim"]
    attention = 2 * a.hidden_size * width * (target["num_attention_heads"] + target["num_key_value_heads"])
    size = 2048 * a.hidden_size + a.num_layers * (attention + 3 * a.hidden_size * a.intermediate_size)
    assert f"{size / 1e6:.1f}M parameters" in path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("verifier: blok", "verifier: 'blok' is unknown, known are block, coupled, .*; did you mean 'block'?"),
        ("verifier: {kind: lenient, lenience: 2}", "verifier: lenience: found 2, expected less than or equal to 1"),
        ("verifier: {kind: lenient, leniense: 0.5}", "leniense: unknown key of 'lenient'; did you mean 'lenience'?"),
        ("verifier: {lenience: 0.5}", "expected a kind or a mapping with one"),
        (
            "verifier: lenient\nrequire_lossless: true",
            "'lenient' changes the target's distribution and require_lossless is true",
        ),
        ("certify: {drafter: draft_model}", "certify.drafter: model: missing; .*model: PATH"),
        ("certify: {drafter: {kind: ngram, k: 0}}", "certify.drafter: k: found 0"),
        ("sampling: {top_p: 0}", "sampling.top_p: found 0"),
        ("sampling: {banned_tokens: [-1]}", "sampling.banned_tokens.0: found -1"),
    ],
)
def test_a_verifier_drafter_or_sampling_parameter_that_cannot_be_is_refused(written, text, message):
    assert re.search(message, problem(written(SMALLEST + text + "\n")))


def test_a_verifier_with_its_fields_and_sampling_parameters_are_read(written):
    text = "verifier: {kind: lenient, lenience: 0.25}\nsampling: {logit_bias: {5: -1.5}, banned_tokens: [1, 2]}\n"
    config = load_config(written(SMALLEST + text))
    assert build(VERIFIERS, config.verifier, "verifier") == Lenient(lenience=0.25)
    assert config.sampling.options()["logit_bias"] == {5: -1.5}
    assert (config.sampling.top_k, config.sampling.banned_tokens) == (0, (1, 2))
    assert load_config(written(SMALLEST), ["verifier=block", "require_lossless=true"]).verifier == "block"


def test_a_tilde_in_out_is_the_users_own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    text = "target: {path: somewhere}\ndata: {path: texts}\nout: ~/runs/x\n"
    file.write_text(text)
    assert load_config(file).out == str(tmp_path / "runs" / "x")
    file.write_text(f"{text}sweep: {{seed: [0, 1], distill.steps: [1, -1]}}\n")
    assert {run.out.parent for run in load_sweep(file)} == {tmp_path / "runs" / "x"}
