"""Command lines. What click itself refuses ends in its line `Error: ...`, everything else is one line `error: ...`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from specjax import cli

from .table import World

BASE = "target: {path: m}\ndata: {path: python-stdlib}\n"


@dataclasses.dataclass(frozen=True)
class Command:
    """``arguments`` with ``{tmp}`` and ``{saved}`` filled in, after ``files`` (name -> content) were written."""

    arguments: str
    says: tuple[str, ...]
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    before: Callable[[World], object] | None = None


def command(arguments: str, *says: str, before: Callable[[World], object] | None = None, **files: str) -> Command:
    return Command(
        arguments, says, {name.replace("__", "/").replace("_", "."): text for name, text in files.items()}, before
    )


GENERATE = "generate --target {saved}"

ROWS = {
    "no command of that name": command("generat", "No such command", "generat"),
    "an option of no name": command(f"{GENERATE} --prompt x --temprature 1", "--temprature", "--temperature"),
    "an option without its value": command("generate --target", "--target", "requires an argument"),
    "no target": command("generate --prompt x", "--target"),
    "no prompt": command(GENERATE, "no prompt", "--prompt TEXT"),
    "an empty prompt": command(f"{GENERATE} --prompt= --prompt x", "--prompt 1", "empty", "token"),
    "an empty prompt file": command(
        f"{GENERATE} --prompt-file {{tmp}}/p.txt", "--prompt-file {tmp}/p.txt", "empty", p_txt=""
    ),
    "a prompt file that is not there": command(f"{GENERATE} --prompt-file {{tmp}}/none", "{tmp}/none", "no such file"),
    "a prompt file that is a directory": command(f"{GENERATE} --prompt-file {{tmp}}", "{tmp}", "is a directory"),
    "a prompt file that is not UTF-8": command(
        f"{GENERATE} --prompt-file {{tmp}}/p.bin",
        "--prompt-file {tmp}/p.bin",
        "UTF-8",
        "byte 0",
        "iconv",
        before=lambda w: w.file("p.bin", b"\xff\xfe"),
    ),
    "k without a drafter": command(f"{GENERATE} --prompt x -k 3", "-k 3", "--draft DIR", "--ngram"),
    "k of 0": command(f"{GENERATE} --prompt x --ngram -k 0", "-k", "'0'", "greater than or equal to 1"),
    "k of a fraction": command(f"{GENERATE} --prompt x --ngram -k 2.5", "-k", "'2.5'", "integer"),
    "a draft that is not there": command(
        f"{GENERATE} --prompt x --draft {{tmp}}/none", "{tmp}/none", "no such directory"
    ),
    "a run whose draft is not there": command(
        f"{GENERATE} --prompt x --draft {{tmp}}/run", "{tmp}/run", "no draft/config.json", "specjax train", run__log="x"
    ),
    "a target that is not there": command("generate --prompt x --target {tmp}/none", "{tmp}/none", "no such directory"),
    "a run as target": command(
        "generate --prompt x --target {tmp}/run",
        "{tmp}/run",
        "is a run",
        "{tmp}/run/draft",
        run__draft__config_json="{}",
    ),
    "an unknown dtype": command(f"{GENERATE} --prompt x --dtype int4", "--dtype", "'int4'", "bfloat16"),
    "an unknown verifier": command(f"{GENERATE} --prompt x --verifier blok", "verifier", "'blok'", "'block'?"),
    "a temperature of text": command(f"{GENERATE} --prompt x --temperature hot", "--temperature", "'hot'"),
    "a temperature below 0": command(f"{GENERATE} --prompt x --temperature=-1", "--temperature", "-1", "equal to 0"),
    "top_p above 1": command(f"{GENERATE} --prompt x --temperature 1 --top-p 1.5", "top_p", "1.5", "(0, 1]"),
    "a budget of 0": command(f"{GENERATE} --prompt x --max-new-tokens 0", "--max-new-tokens", "0"),
    "a budget that does not fit": command(f"{GENERATE} --prompt x --max-new-tokens 9999", "max_new_tokens=9999", "256"),
    "a seed below 0": command(f"{GENERATE} --prompt x --seed=-1", "--seed", "-1"),
    "a bias without its value": command(f"{GENERATE} --prompt x --logit-bias 42", "--logit-bias 42", "ID=VALUE"),
    "a bias of a token that is none": command(f"{GENERATE} --prompt x --logit-bias 999=1", "logit_bias", "999", "300"),
    "a banned token of text": command(f"{GENERATE} --prompt x --ban x", "--ban", "'x'", "integer"),
    "an empty stop string": command(f"{GENERATE} --prompt x --stop=", "stop_strings", "''", "non-empty"),
    "logprobs without JSON": command(f"{GENERATE} --prompt x --logprobs raw", "--logprobs", "--json"),
    "a system message without a chat": command(f"{GENERATE} --prompt x --system s", "--system", "--chat"),
    "a chat without a template": command(
        f"{GENERATE} --prompt x --chat", "--chat", "no chat template", "leave --chat out"
    ),
    "no config": command("train", "CONFIG"),
    "a config that is not there": command("train {tmp}/none.yaml", "{tmp}/none.yaml", "no such config file"),
    "a config of no name that is known": command("train dmeo", "dmeo", "no such config file", "demo", "tiny"),
    "training with an unknown field": command(
        "train {tmp}/c.yaml distill.stepz=3", "distill.stepz", "'distill.steps'?", c_yaml=BASE
    ),
    "training of a sweep": command(
        "train {tmp}/c.yaml", "{tmp}/c.yaml", "sweep", "sweep=null", c_yaml=BASE + "sweep: {seed: [1]}\n"
    ),
    "training for a target that is not there": command(
        "train {tmp}/c.yaml target.path={tmp}/none out={tmp}/out", "{tmp}/none", "no such directory", c_yaml=BASE
    ),
    "a benchmark without a draft": command(
        "bench {tmp}/c.yaml out={tmp}/out", "out", "{tmp}/out", "holds no draft", "specjax train", c_yaml=BASE
    ),
    "a benchmark to a directory that is not there": command(
        "bench {tmp}/c.yaml --out {tmp}/none/b.json", "--out {tmp}/none/b.json", "existing directory", c_yaml=BASE
    ),
    "a certificate without a draft": command(
        "certify {tmp}/c.yaml out={tmp}/out", "{tmp}/out", "holds no draft", "certify.drafter", c_yaml=BASE
    ),
    "a certificate into a file": command(
        "certify {tmp}/c.yaml --out {tmp}/c.yaml", "--out {tmp}/c.yaml", "not a directory", c_yaml=BASE
    ),
    "a calibration without a drafter": command(
        "calibrate {tmp}/c.yaml target.path={saved} out={tmp}/out bench.drafters=[]",
        "bench",
        "no drafter",
        "bench.drafts",
        c_yaml=BASE,
    ),
    "a plan for a device of no name": command(
        "plan {tmp}/c.yaml --device h100", "--device h100", "'h100-sxm'?", "rtx-4090", "FILE.yaml", c_yaml=BASE
    ),
    "a plan for a device that is not there": command(
        "plan {tmp}/c.yaml --device {tmp}/d.yaml", "{tmp}/d.yaml", "no such", c_yaml=BASE
    ),
    "a plan that measures elsewhere": command(
        "plan {tmp}/c.yaml --device l4 --measure", "--measure", "--device l4", "leave one", c_yaml=BASE
    ),
    "a plan with an alpha above 1": command("plan {tmp}/c.yaml --alpha 1.5", "--alpha", "1.5", c_yaml=BASE),
    "a plan into a file": command(
        "plan {tmp}/c.yaml --out {tmp}/c.yaml", "--out {tmp}/c.yaml", "not a directory", c_yaml=BASE
    ),
    "data without a kind that makes it": command(
        "generate-data {tmp}/c.yaml", "distill.data", "'text'", "kind: generated", c_yaml=BASE
    ),
    "a report of nothing": command("report {tmp}", "{tmp}/results.json", "not found", "finish the run"),
    "a report of what is no JSON": command("report {tmp}", "{tmp}/results.json", "line 1", "delete", results_json="{"),
    "a report of a list": command("report {tmp}", "{tmp}/results.json", "top level", "[1]", results_json="[1]"),
    "a report without a summary": command(
        "report {tmp}", "{tmp}/results.json", "summary", "required", results_json=json.dumps({"name": "a", "date": "b"})
    ),
    "an export over something else": command(
        "export {saved} {tmp}/dir --overwrite", "{tmp}/dir", "not a plain model directory", "remove it", dir__x="x"
    ),
    "an export to what is there": command("export {saved} {tmp}", "{tmp}", "exists already", "--overwrite"),
    "an export in shards of nothing": command("export {saved} {tmp}/a --max-shard-gb 0", "--max-shard-gb", "0"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_command_ends_with_status_2_and_one_line(name, world, monkeypatch):
    case = ROWS[name]
    monkeypatch.chdir(world.tmp)
    for file, content in case.files.items():
        world.file(file, content)
    if case.before is not None:
        case.before(world)

    def filled(text: str) -> str:
        return text.replace("{tmp}", str(world.tmp)).replace("{saved}", str(world.saved))

    result = CliRunner().invoke(cli.app, [filled(part) for part in case.arguments.split()])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    lines = result.stderr.splitlines()
    [told] = [line for line in lines if line.lower().startswith("error: ")]
    assert lines[-1] == told
    assert "Traceback" not in result.stderr
    missing = [said for said in map(filled, case.says) if said not in told]
    assert not missing, f"{missing} not in: {told}"
