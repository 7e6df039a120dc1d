from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sys
import time
import tomllib
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import specjax
from specjax import cli
from specjax.config import shipped
from specjax.costs import calibrations
from specjax.decode.request import derive_seeds
from specjax.drafters import draft_model
from specjax.errors import ConfigError, ModelError, Stopped
from specjax.formats import loading
from specjax.interfaces import TargetInfo
from specjax.jobs import demo, generate, sweep, train
from specjax.metrics import DecodeStats, RequestMetrics, cost
from specjax.models import hf
from specjax.models.files import write_atomically
from specjax.report import generation
from tests import processes

ROOT = Path(__file__).resolve().parents[1]
STATS = DecodeStats(blocks=2, emitted=5, drafted_at=(2, 2), reached_at=(2, 2), accepted_at=(2, 1))


def of_result(row=None, price_per_hour=None) -> RequestMetrics:
    """Two rows of 2 tokens: after 0.1 s, and 0.2 s or 0.3 s."""
    price = None if price_per_hour is None else cost(price_per_hour, 0.3)
    rows = [RequestMetrics(STATS, [[0.1, end]], end, 1, None if price is None else price / 2) for end in (0.2, 0.3)]
    return RequestMetrics.pooled(rows, 0.3) if row is None else rows[row]


class Decoder:
    """Stands for `specjax.Decoder`: says what it was given."""

    lossless, weighs = True, False

    def __init__(self, target, drafter=None, verifier="speculative", controller="adaptive"):
        self.drafter, self.controller = drafter, controller

    def generate(self, prompts, **options):
        return types.SimpleNamespace(
            text=[f"<{prompt}>" for prompt in prompts],
            tokens=[[1, 2]] * len(prompts),
            seeds=list(range(len(prompts))),
            stats=[STATS] * len(prompts),
            logprobs=[[-1.0, -2.0]] * len(prompts) if options["logprobs"] else None,
            finish_reasons=["length"] * len(prompts),
            metrics=of_result,
            pieces=lambda row: [types.SimpleNamespace(text=f"<{prompts[row]}>", origin="accepted")],
        )

    def compile(self, prompts, **options):
        pass

    def stream(self, prompt, **options):
        for i, origin in enumerate(("accepted", "bonus")):
            piece = types.SimpleNamespace(text=f"{origin}!{prompt if i else ''}", origin=origin)
            logprobs = [-1.0 - i] if options["logprobs"] else None
            yield types.SimpleNamespace(
                tokens=[i],
                text=piece.text,
                pieces=[piece],
                stats=STATS,
                done=i == 1,
                seconds=0.25 + 0.5 * i,
                logprobs=logprobs,
                finish_reason="length" if i else None,
            )


@pytest.fixture
def decoders(monkeypatch):
    """Replaces models and decoder; returns the drafters that were asked for."""
    made = []

    def decoder(target, drafter=None, verifier="speculative", controller="adaptive", prefill_chunk=None):
        made.append(drafter)
        return Decoder(target, drafter, verifier, controller)

    class Model(str, TargetInfo):
        tokenizer, dtype = "a tokenizer", "float32"

        def __init__(self, path: str):
            pass

        def free_originals(self) -> None:
            pass

    monkeypatch.setattr(specjax, "load_model", lambda path, **options: Model(path))
    monkeypatch.setattr(hf, "load_model", lambda path, *args, **options: Model(path))
    monkeypatch.setattr(draft_model, "with_its_vocabulary", lambda model, directory: model)
    monkeypatch.setattr(loading, "described", lambda path: ("draft_model", {}))
    monkeypatch.setattr(specjax, "Decoder", decoder)
    monkeypatch.setattr(generate, "tell_memory", lambda *arguments: None)
    return made


def as_json(metrics: RequestMetrics) -> dict:
    return json.loads(json.dumps(metrics.to_json()))


def call(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


def test_one_prompt_is_streamed_with_its_statistics_apart(decoders):
    result = call("generate", "--target", "t", "--draft", "d", "-k", "3", "--prompt", "x")
    assert result.exit_code == 0
    assert result.stdout == "accepted!bonus!x\n"
    assert "5 tokens, 2 target calls, block efficiency 2.50, acceptance rate 0.75" in result.stderr
    assert "TTFT 250.0 ms, TPOT 500.0 ms, 3 tokens/s, k used 2.0, 0 blocks without a draft\n" in result.stderr
    assert decoders[0].k == 3


def test_a_pipe_gets_the_text_unchanged(decoders):
    makefile = "all:\n\tmake\t[bold]\n"
    assert call("generate", "--target", "t", "--prompt", makefile).stdout == f"accepted!bonus!{makefile}\n"


def test_several_prompts_are_decoded_as_a_batch(decoders, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    result = call("generate", "--target", "t", "--ngram", "--prompt", "x", "--prompt-file", str(file))
    assert result.exit_code == 0
    assert "<x>" in result.stdout
    assert "<from a file>" in result.stdout
    assert isinstance(decoders[0], specjax.NGram)
    twice = call("generate", "--target", "t", *["--prompt-file", str(file)] * 2).stdout
    assert twice.count("<from a file>") == 2
    assert "TTFT 100.0 ms, TPOT 200.0 ms, 7 tokens/s, k used 2.0" in twice
    assert "all 2: 10 tokens, 4 target calls" in twice
    assert "TTFT P50 100.0 ms, TPOT P50 150.0 ms, 13 tokens/s, k used 2.0" in twice


def test_json_output_is_json_and_nothing_else(decoders):
    result = call("generate", "--target", "t", "--prompt", "x", "--prompt", "y", "--json")
    found = json.loads(result.stdout)
    _, row = found["rows"]
    assert (row["text"], row["tokens"], row["finish_reason"]) == ("<y>", [1, 2], "length")
    assert row["metrics"] == as_json(of_result(1))
    assert found["metrics"] == as_json(of_result())


@pytest.mark.parametrize("prompts", [["--prompt", "x"], ["--prompt", "x", "--prompt", "y"]])
def test_json_has_logprobs_where_asked_for(decoders, prompts):
    for extra, expected in (["--logprobs", "raw"], [-1.0, -2.0]), ([], None):
        result = call("generate", "--target", "t", *prompts, "--json", *extra)
        assert [row.get("logprobs") for row in json.loads(result.stdout)["rows"]] == [expected] * (len(prompts) // 2)


def test_token_options_reach_the_decoder(decoders, monkeypatch):
    given = {}
    stream = Decoder.stream
    monkeypatch.setattr(
        Decoder, "stream", lambda self, *args, **all_: given.update(all_) or stream(self, *args, **all_)
    )
    options = ["--logit-bias", "42=-1.5", "--logit-bias", "7=2", "--ban", "3", "--ban", "4"]
    assert call("generate", "--target", "t", "--prompt", "x", *options).exit_code == 0
    assert (given["logit_bias"], given["banned_tokens"]) == ({42: -1.5, 7: 2.0}, [3, 4])
    wrong = call("generate", "--target", "t", "--prompt", "x", "--logit-bias", "42:1")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "error: --logit-bias 42:1: give ID=VALUE, as in --logit-bias 42=-1.5\n",
    )


def test_json_of_one_prompt_tells_when_its_tokens_came(decoders):
    found = json.loads(call("generate", "--target", "t", "--prompt", "x", "--seed", "3", "--json").stdout)
    [row] = found["rows"]
    assert (row["text"], row["tokens"], row["finish_reason"]) == ("accepted!bonus!x", [0, 1], "length")
    assert row["seed"] == derive_seeds(3, 1)[0]
    assert row["metrics"] == found["metrics"] == as_json(RequestMetrics(STATS, [[0.25, 0.75]], 0.75))
    assert (row["metrics"]["ttft"], row["metrics"]["tpot"], row["metrics"]["interpolated"]) == (0.25, 0.5, 0)


@pytest.mark.parametrize("prompts", [["--prompt", "x"], ["--prompt", "x", "--prompt", "y"]])
def test_metrics_are_written_a_line_a_request_and_one_of_the_sum(decoders, tmp_path, prompts):
    file = tmp_path / "metrics.jsonl"
    options = ["--metrics", str(file), "--price-per-hour", "3.6"]
    result = call("generate", "--target", "t", *prompts, *options, "--json")
    found, count = json.loads(result.stdout), len(prompts) // 2
    *requests, total = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.pop("kind") for line in (*requests, total)] == ["request"] * count + ["sum"]
    assert total == found["metrics"]
    for i, (line, row) in enumerate(zip(requests, found["rows"], strict=True)):
        named = {"request": i, "seed": row["seed"], "finish_reason": "length"}
        assert line == named | row["metrics"]
    assert total["cost"] == pytest.approx(sum(line["cost"] for line in requests))
    assert total["cost_per_1k_tokens"] == pytest.approx(cost(3.6, 1000 / total["tokens_per_s"]))
    assert ", cost 0.00" in call("generate", "--target", "t", *prompts, *options).output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt", "x", "-k", "4"], "needs a drafter"),
        (["--prompt", "x", "--ngram", "-k", "0"], "greater than or equal to 1"),
        (["--prompt", "x", "--max-new-tokens", "0"], "greater than or equal to 1"),
        (["--prompt", "x", "--dtype", "int4"], "int4"),
        (["--prompt", "x", "--logprobs", "raw"], "with --json only"),
        (["--prompt", "x", "--price-per-hour", "-1"], "-1"),
        (["--prompt", "x", "--price-per-hour", "inf"], "give a number"),
        (["--prompt", "x", "--metrics", "no/such/directory/m.jsonl"], "--metrics no/such/directory/m.jsonl"),
        ([], "no prompt"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_arguments_that_do_not_fit_end_with_status_2(decoders, arguments, expected):
    result = call("generate", "--target", "t", *arguments)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not decoders


def test_a_missing_prompt_file_is_named(decoders, tmp_path):
    result = call("generate", "--target", "t", "--prompt-file", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path / 'none'}: no such file or directory\n"


def test_a_missing_model_is_one_line_and_status_2(tmp_path):
    result = call("generate", "--target", str(tmp_path / "none"), "--prompt", "x")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert str(tmp_path / "none") in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback_and_keeps_the_status(tmp_path):
    result = call("bench", str(tmp_path / "none.yaml"), "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "ConfigError" in result.stderr


def test_every_command_takes_debug():
    for command in ("generate", "bench", "numerics", "report", "export", "schema"):
        assert "--debug" in call(command, "--help").stdout


@pytest.fixture
def benched(monkeypatch):
    """Replaces the benchmark; returns the configs it was given."""
    seen = []

    def run_bench(config, bars):
        seen.append(config)
        row = {"drafter": "ngram", "k": 3, "batch_size": 1, "temperature": 0.0, "tokens_per_s": 12.5}
        return {"decoding": [row], "figures": {"speedup_greedy": 1.234}}

    monkeypatch.setitem(sys.modules, "specjax.jobs.bench", types.SimpleNamespace(run_bench=run_bench))
    return seen


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("target: {path: m}\ndata: {path: python-stdlib}\n")
    return path


def test_bench_prints_a_table_and_writes_its_results(benched, config_file, tmp_path):
    result = call("bench", str(config_file), "bench.ks=[3]", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 0
    assert benched[0].bench.ks == (3,)
    assert "12.5" in result.stdout
    assert "speedup_greedy 1.23" in result.stdout
    assert json.loads((tmp_path / "bench.json").read_text())["decoding"][0]["k"] == 3


def test_bench_checks_config_and_destination_before_it_measures(benched, config_file, tmp_path):
    assert call("bench", str(config_file), "bench.kk=[3]").exit_code == 2
    result = call("bench", str(config_file), "--out", str(tmp_path / "nowhere/bench.json"))
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
    assert not benched


def test_report_of_a_directory_without_results_is_refused(tmp_path):
    result = call("report", str(tmp_path))
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert not list(tmp_path.iterdir())


def test_schema_prints_json():
    assert "sweep" in json.loads(call("schema").stdout)["properties"]


def run_script(main, *arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.run_main(main, "A script.", argv=arguments)
    return int(caught.value.code or 0)


def test_a_script_gets_config_and_overrides_and_sets_the_exit_status():
    seen = []
    assert run_script(lambda config, overrides: seen.append((str(config), overrides)), "c.yaml", "a.b=1", "c=2") == 0
    assert seen == [("c.yaml", ["a.b=1", "c=2"])]
    assert run_script(lambda config, overrides: 1, "c.yaml") == 1
    assert run_script(lambda config, overrides: 0) == 2


def test_a_script_reports_each_problem_on_its_own_line(capsys):
    def main(config, overrides):
        raise ConfigError("first\nsecond")

    assert run_script(main, "c.yaml") == 2
    assert capsys.readouterr().err == "error: first\nerror: second\n"


def test_a_script_interrupted_says_so_and_exits_130(capsys):
    def main(config, overrides):
        raise KeyboardInterrupt

    assert run_script(main, "c.yaml") == 130
    assert "resumes" in capsys.readouterr().err


def test_training_stopped_by_sigterm_says_where_and_exits_143(capsys):
    def main(config, overrides):
        raise Stopped("runs/x: stopped by SIGTERM; step 7 is saved")

    assert run_script(main, "c.yaml") == 143
    assert "step 7 is saved" in capsys.readouterr().err


def test_sigterm_outside_of_training_says_that_the_same_command_goes_on(capsys):
    def main(config, overrides):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    assert run_script(main, "c.yaml") == 143
    assert capsys.readouterr().err == "\nstopped by SIGTERM; what is finished is kept, the same command goes on\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 2), (errno.EROFS, 2), (errno.EIO, None)])
def test_a_full_or_read_only_disk_is_an_error_of_the_user_and_a_broken_one_is_not(number, status, capsys):
    def main(config, overrides):
        raise OSError(number, os.strerror(number), "runs/x/log")

    if status is None:
        with pytest.raises(OSError, match="runs/x/log"):
            run_script(main, "c.yaml")
    else:
        assert run_script(main, "c.yaml") == status
        assert capsys.readouterr().err == f"error: runs/x/log: {os.strerror(number).lower()}\n"


def test_a_defect_is_not_dressed_up_as_an_error_of_the_user():
    def main(config, overrides):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run_main(main, None, argv=["c.yaml"])


def test_user_errors_are_not_swallowed_silently(capsys):
    with pytest.raises(SystemExit) as caught, cli.user_errors():
        raise ModelError("models/x: broken")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: models/x: broken\n"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_help_does_not_load_jax():
    code = "import sys; from specjax import cli, config; import specjax; print('jax' in sys.modules)"
    assert processes.run([sys.executable, "-c", code]) == processes.Finished(0, "False\n", "")


def test_every_public_name_can_be_imported():
    assert [name for name in specjax.__all__ if getattr(specjax, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="public names"):
        specjax.nothing  # noqa: B018


def test_generate_data_says_what_was_made(tmp_path, monkeypatch, capsys):
    from specjax.jobs import generate_data as make_data

    calls = []

    def made(config, out, draft, bars):
        calls.append((config.distill.data["kind"], out, draft))
        shards = [{}, {}]
        return {"directory": out, "sequences": 2000, "emitted": 64000, "shards": shards, "block_efficiency": 3.214}

    monkeypatch.setattr(make_data, "make_data", made)
    (tmp_path / "run.yaml").write_text("target: {path: t}\ndata: {path: d}\ndistill: {data: {kind: generated}}\n")
    with pytest.raises(SystemExit) as exit_:
        cli.app(["generate-data", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "data"), "--draft", "model"])
    assert exit_.value.code == 0
    assert calls == [("generated", tmp_path / "data", "model")]
    expected = f"{tmp_path / 'data'}: 2,000 sequences, 64,000 tokens in 2 shards, block efficiency 3.21\n"
    assert capsys.readouterr().out == expected


def test_the_version_is_told():
    assert call("--version").stdout == f"specjax {version('specjax')}\n"


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "specjax", "generate", "--target", "t"]
    done = processes.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, "no prompt" in done.stderr) == (2, True)


def test_train_is_what_train_draft_does(monkeypatch, config_file):
    import train_draft

    seen = []
    monkeypatch.setattr(train, "train", lambda config, overrides: seen.append((config, overrides)))
    assert call("train", str(config_file), "distill.steps=3").exit_code == 0
    assert seen == [(config_file, ["distill.steps=3"])]
    assert train_draft.main.__module__ == "specjax.jobs.train"


def test_a_config_that_comes_with_specjax_is_found_by_its_name(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert shipped.config_file(Path("tiny")).samefile(ROOT / "configs/tiny.yaml")
    assert shipped.config_file(Path("tiny.yaml")).samefile(ROOT / "configs/tiny.yaml")
    assert str(ROOT / "configs/tiny.yaml") in capsys.readouterr().err
    (tmp_path / "tiny.yaml").write_text("")
    assert shipped.config_file(Path("tiny.yaml")) == Path("tiny.yaml")  # what is there comes first
    (tmp_path / "sweep").mkdir()
    assert shipped.config_file(Path("sweep")).samefile(ROOT / "configs/sweep.yaml")  # but for a folder


@pytest.mark.parametrize("command", ["train", "bench", "certify"])
def test_a_config_of_the_demos_target_needs_a_clone(monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    result = call(command, "demo")
    assert result.exit_code == 2
    for said in ("target.path models/demo-target", "49 MB", str(tmp_path), "git clone", "target.path=DIR"):
        assert said in result.stderr


def test_the_demo_is_found_from_inside_a_clone(monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    assert demo.clone() == ROOT


def test_the_demo_runs_in_its_clone(monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    ran = []
    monkeypatch.setattr(
        demo, "run_one", lambda settings: ran.append((Path.cwd(), settings.bench.prompts, settings.out))
    )
    assert call("demo", "bench.prompts=2").exit_code == 0
    assert ran == [(ROOT, 2, "runs/demo")]


def test_run_and_sweep_do_the_main_job(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(
        sweep, "whole_run", lambda config: ran.append((config.seed, config.out)) or {"alpha_after": 0.8}
    )
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text("target: {path: models/target}\ndata: {path: python-stdlib}\nout: here\n")
    found = call("run", str(config), "seed=3")
    assert found.exit_code == 0
    assert "alpha_after" in found.stdout
    assert ran == [(3, "here")]
    swept = call("sweep", str(config), "sweep.seed=[1,2]")
    assert swept.exit_code == 0
    assert "2 of 2 runs finished" in swept.stdout
    assert [seed for seed, _ in ran[1:]] == [1, 2]
    refused = call("run", str(config), "sweep.seed=[1,2]")
    assert refused.exit_code == 2
    assert "specjax sweep" in refused.stderr


def test_the_demo_without_a_clone_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "site-packages/specjax/jobs/demo.py"))
    result = call("demo")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    for said in (str(tmp_path), "49 MB", "git clone", "specjax demo", "specjax train demo_from_scratch"):
        assert said in result.stderr


def test_the_configs_are_data_of_the_package():
    """As setup.py declares them: a wheel is built by nobody in a test."""
    names = {file.name for file in (ROOT / "configs").iterdir() if file.is_file()}
    assert names == {file.name for file in (ROOT / "configs").glob("*.yaml")} | {"schema.json"}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert settings["specjax.configs"] == ["*.yaml", "schema.json"]
    assert 'package_dir={"specjax.configs": "configs"}' in (ROOT / "setup.py").read_text()


def test_a_terminal_gets_the_prompt_before_the_text_and_a_pipe_does_not(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Terminal(), "xaccepted!bonus!x\n"), (io.StringIO(), "accepted!bonus!x\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("TERM", "dumb" if not stream.isatty() else "xterm")
        generation.stream(Decoder(None), "x", "x", {"logprobs": None, "seed": 0}, None, no_color=True)
        assert re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()) == expected


def test_generate_takes_a_run_for_its_draft(decoders, tmp_path):
    (tmp_path / "run/draft").mkdir(parents=True)
    (tmp_path / "run/draft/config.json").write_text("{}")
    assert call("generate", "--target", "t", "--draft", str(tmp_path / "run"), "--prompt", "x").exit_code == 0
    assert decoders[0].model == str(tmp_path / "run/draft")


def test_generate_says_where_the_costs_are_from_that_its_controller_weighs_with(decoders, monkeypatch):
    asked = []

    def calibrate(decoder, prompts, **sampling):
        asked.append((decoder.controller, prompts, sampling))
        return (
            types.SimpleNamespace(summary="costs of blocks read from FILE") if decoder.controller != "fixed" else None
        )

    monkeypatch.setattr(calibrations, "calibrate", calibrate)
    options = ("generate", "--target", "t", "--ngram", "--prompt", "x", "--temperature", "0.5")
    found = [call(*options, *more) for more in ((), ("--controller", "confidence"), ("--controller", "fixed"))]
    assert asked == [(name, ["x"], {"temperature": 0.5}) for name in ("adaptive", "confidence", "fixed")]
    told = "note: costs of blocks read from FILE\n"
    assert [result.stderr.startswith(told) for result in found] == [True, True, False]


def test_what_the_terminal_cannot_show_is_escaped(tmp_path):
    """Nothing that took long is lost for a character, and metrics are written."""
    code = (
        "import sys; from specjax import cli\n"
        "with cli.user_errors():\n"
        "    print('caf\\xe9 \\u4e2d'); print('\\xe9', file=sys.stderr)\n"
        "open(sys.argv[1], 'w').write('metrics')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    found = processes.run([sys.executable, "-c", code, str(tmp_path / "m.txt")], env=environment)
    assert (found.returncode, found.stdout.strip()) == (0, "caf\\xe9 \\u4e2d")
    assert "\\xe9" in found.stderr
    assert (tmp_path / "m.txt").read_text() == "metrics"
