"""Config files and overrides."""

from __future__ import annotations

import pytest

from specjax.config import load_config, load_sweep
from specjax.errors import ConfigError

from .table import Row, World, check, row

BASE = "target: {path: m}\ndata: {path: python-stdlib}\n"


def text(content: str | bytes, *says: str) -> Row:
    """A file of ``content``."""
    return row(ConfigError, lambda world: load_config(world.file("run.yaml", content)), "{tmp}/run.yaml", *says)


def key(lines: str, *says: str) -> Row:
    """A good file with ``lines`` more."""
    return text(BASE + lines, *says)


def override(given: str, *says: str) -> Row:
    return row(ConfigError, lambda world: load_config(world.file("run.yaml", BASE), [given]), *says)


def sweep(lines: str, *says: str) -> Row:
    return row(ConfigError, lambda world: load_sweep(world.file("run.yaml", BASE + lines)), "{tmp}/run.yaml", *says)


ROWS = {
    "no file": row(ConfigError, lambda w: load_config(w.tmp / "none.yaml"), "{tmp}/none.yaml", "no such config"),
    "a directory": row(ConfigError, lambda w: load_config(w.tmp), "{tmp}", "cannot be read"),
    "an empty file": text("", "empty", "mapping"),
    "a list": text("- a\n", "list", "mapping"),
    "no YAML": text("a: [1\n", "YAML"),
    "not UTF-8": text(b"a: \xff\n", "UTF-8", "byte 3"),
    "a key twice": text("seed: 1\nseed: 2\n", "seed"),
    "no target": text("data: {path: python-stdlib}\n", "target", "missing"),
    "no data": text("target: {path: m}\n", "data", "missing"),
    "an unknown section": key("distil: {steps: 3}\n", "distil", "unknown key", "'distill'?"),
    "an unknown field": key("distill: {step: 3}\n", "distill.step", "unknown key", "'distill.steps'?"),
    "a field of another section": key("steps: 3\n", "steps", "unknown key", "steps'?"),
    "text for a number": key("seed: five\n", "seed", '"five"', "integer"),
    "a number in quotes": key("seed: '5'\n", "seed", '"5"', "integer"),
    "a fraction for a count": key("distill: {steps: 1.5}\n", "distill.steps", "1.5", "integer"),
    "a number below its bound": key("distill: {batch_size: 0}\n", "distill.batch_size", "0", "greater than"),
    "endless epochs": key("distill: {epochs: .inf}\n", "distill.epochs", "Infinity", "finite"),
    "a negative seed": key("seed: -1\n", "seed", "-1", "greater than or equal to 0"),
    "a number for text": key("out: 5\n", "out", "5", "quote it"),
    "an empty name": key("out: ''\n", "out", '""', "at least 1 character"),
    "a list for a section": key("bench: [1]\n", "bench", "[1]", "mapping of fields"),
    "a number for a section": key("bench: 3\n", "bench", "3", "mapping of fields"),
    "a number for a list": key("bench: {ks: 3}\n", "bench.ks", "3", "list"),
    "an empty list": key("bench: {ks: []}\n", "bench.ks", "[]", "at least one"),
    "a list that repeats": key("bench: {ks: [3, 3]}\n", "bench.ks", "[3, 3]", "once"),
    "an item below its bound": key("bench: {ks: [0]}\n", "bench.ks.0", "0", "greater than or equal to 1"),
    "a temperature below 0": key("bench: {temperatures: [-1]}\n", "bench.temperatures.0", "-1"),
    "NaN": key("sampling: {top_p: .nan}\n", "sampling.top_p", "NaN"),
    "an unknown loss": key("distill: {loss: forward_kul}\n", "distill.loss", "'forward_kul'", "'forward_kl'?"),
    "an unknown field of a loss": key(
        "distill: {loss: {kind: adaspec, keeep: 0.5}}\n", "distill.loss: keeep", "'adaspec'", "'keep'?"
    ),
    "a loss without its kind": key("distill: {loss: {temperature: 2}}\n", "distill.loss", "kind"),
    "an unknown verifier": key("verifier: blok\n", "verifier", "'blok'", "'block'?"),
    "a field of a verifier out of range": key(
        "verifier: {kind: lenient, lenience: 2}\n", "verifier: lenience", "2", "less than or equal to 1"
    ),
    "text for a number of a verifier": key("verifier: {kind: top_k, k: '3'}\n", "verifier: k", "'3'", "integer"),
    "a truth value for a number of a drafter": key(
        "certify: {drafter: {kind: ngram, k: true}}\n", "certify.drafter: k", "True", "integer"
    ),
    "a drafter that needs a model": key(
        "certify: {drafter: draft_model}\n", "certify.drafter: model", "missing", "model: PATH"
    ),
    "an unknown drafter": key("bench: {drafters: [ngrm]}\n", "bench.drafters", "'ngrm'", "'ngram'?"),
    "a drafter that needs weights in the grid": key(
        "bench: {drafters: [draft_model]}\n", "bench.drafters", "draft_model"
    ),
    "a draft from disk under the name of another": key(
        "bench: {drafts: {draft_after: here}}\n", "bench.drafts.draft_after", "names another drafter", "of its own"
    ),
    "a greedy rule with samples": key("verifier: greedy\n", "'greedy'", "temperature 0", "bench.temperatures=[0]"),
    "a lossy rule where none may be": key(
        "verifier: top_k\nrequire_lossless: true\n", "'top_k'", "require_lossless", "use one of"
    ),
    "an unknown kind of data": key("distill: {data: generatd}\n", "distill.data", "'generatd'", "'generated'?"),
    "an unknown start": key("draft: {init: {kind: layer}}\n", "draft.init", "'layer'", "'layers'?"),
    "an empty path of a start": key("draft: {init: ''}\n", "draft.init", "empty", "null"),
    "a target of both kinds": text(
        "target: {path: m, architecture: {hidden_size: 8}}\ndata: {path: python-stdlib}\n", "target"
    ),
    "a target of neither": text("target: {}\ndata: {path: python-stdlib}\n", "target", "path", "architecture"),
    "held-out text of everything": text(
        "target: {path: m}\ndata: {path: python-stdlib, held_out: 1.5}\n", "data.held_out", "1.5"
    ),
    "heads that do not divide": key("draft: {architecture: {num_heads: 4, num_kv_heads: 3}}\n", "num_heads", "4", "3"),
    "an unknown dtype": text(
        "target: {path: m, dtype: float8}\ndata: {path: python-stdlib}\n", "target.dtype", '"float8"'
    ),
    "a mesh of 0 devices": key("mesh: {data: 0}\n", "mesh.data", "0 devices", "-1"),
    "a resolver": key("out: ${oc.env:HOME}\n", "out", "resolver", "oc.env"),
    "an interpolation of nothing": key("out: ${nowhere}\n", "out", "nowhere"),
    "a value that is still to come": key("out: ???\n", "out", "Missing mandatory value"),
    "a sweep in a single run": key("sweep: {seed: [1]}\n", "sweep", "specjax sweep", "sweep=null"),
    "an override without a value": override("distill.steps", "override 'distill.steps'", "field=value"),
    "an override without a field": override("=3", "override '=3'", "field=value"),
    "an override of an unknown field": override(
        "distill.stepz=3", "distill.stepz", "'distill.steps'?", "distill.stepz=3"
    ),
    "an override of the wrong type": override("seed=x", "seed", '"x"', "integer", "override 'seed=x'"),
    "an override inside a list": override("bench.ks.0=3", "bench.ks"),
    "an override that is no YAML": override("bench.ks=[3", "override 'bench.ks=[3'", "YAML"),
    "a sweep of nothing": sweep("sweep: {seed: []}\n", "sweep.seed", "[]", "list"),
    "a sweep of a number": sweep("sweep: {seed: 3}\n", "sweep.seed", "3", "list"),
    "a sweep of an unknown field": sweep("sweep: {sed: [3]}\n", "sweep.sed", "'seed'?"),
    "a sweep of the directory": sweep("sweep: {out: [a, b]}\n", "sweep.out", "own directory"),
    "a sweep that repeats": sweep("sweep: {seed: [3, 3]}\n", "sweep", "twice", "once"),
    "a sweep that is a list": sweep("sweep: [3]\n", "sweep", "mapping"),
    "a sweep of bad values": sweep("sweep: {seed: [x]}\n", "seed", '"x"', "integer"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_config_is_told_in_one_line(name, world: World):
    check(ROWS[name], world)
