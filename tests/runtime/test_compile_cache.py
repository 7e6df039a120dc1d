from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from specjax.models.hf import save_model
from specjax.runtime import compile_cache
from specjax.runtime.compile_cache import SWITCH, count_compiles, keep_programs, programs_kept
from specjax.runtime.progress import console_bars
from tests import processes


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's empty cache directory; what a test sets in JAX is undone."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    jax.clear_caches()


def test_a_program_from_the_cache_is_counted_and_gives_the_same_bits(home):
    directory = keep_programs()
    assert directory is not None
    x = jax.random.normal(jax.random.key(0), (16, 16))
    results, counts = [], []
    for _ in range(2):
        jax.clear_caches()
        with count_compiles() as count:
            results.append(np.asarray(jax.jit(lambda x: jnp.tanh(x @ x.T) / 3)(x)))
        counts.append(count.programs)
    assert any("lambda" in file.name for file in directory.iterdir())
    assert counts[0] == counts[1] >= 1
    np.testing.assert_array_equal(*results)


def cache_dir() -> str | None:
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def test_the_directory_is_the_users_own_and_private(home):
    directory = keep_programs()
    assert directory is not None
    assert directory.parent == home / "specjax"
    assert directory.stat().st_mode & 0o077 == 0
    assert cache_dir() == str(directory)


@pytest.mark.parametrize("off", ["config", "environment", "given", "file in the way"])
def test_the_cache_can_be_turned_off_and_never_fails_a_run(off, home, monkeypatch):
    if off == "environment":
        monkeypatch.setenv(SWITCH, "0")
    elif off == "given":
        jax.config.update("jax_compilation_cache_dir", str(home / "own"))
    elif off == "file in the way":
        (home / "specjax").write_text("")
    assert keep_programs(off != "config") is None
    assert cache_dir() == (str(home / "own") if off == "given" else None)


def test_an_import_turns_nothing_on():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    code = "import jax, specjax, specjax.cli; assert jax.config.jax_compilation_cache_dir is None"
    assert processes.run([sys.executable, "-c", code], cwd=processes.ROOT, env=environment).returncode == 0


def test_a_damaged_program_costs_a_compile_and_no_failure(home):
    directory = keep_programs()
    assert directory is not None
    results = []
    for damage in (False, True):
        for entry in directory.iterdir() if damage else ():
            entry.write_bytes(entry.read_bytes()[:40])
        jax.clear_caches()
        results.append(np.asarray(jax.jit(lambda x: jnp.cos(x @ x.T) / 7)(np.ones((8, 8), np.float32))))
    np.testing.assert_array_equal(*results)


GENERATE = """
import sys

import jax
import specjax
from specjax.runtime.compile_cache import count_compiles
from specjax.models.hf import save_model
from specjax.runtime.compile_cache import keep_programs

keep_programs()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
with count_compiles() as count:
    target = specjax.load_model(sys.argv[1])
    drafter = specjax.load_drafter(sys.argv[2], target, k=2)
    decoder = specjax.Decoder(target, drafter, "block")
    decoder.generate([[5, 6, 7]], max_new_tokens=8, temperature=0.0)
print(count.programs, count.programs - len(hits))
"""


def test_a_first_generation_compiles_few_programs_and_none_again(tmp_path, tiny_target, tiny_draft):
    """In new processes, as the shipped pair does (docs/performance.md); sizes differ, and so do the layouts' shapes."""
    for name, model in (("target", tiny_target), ("draft", tiny_draft)):
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), model.params)
        save_model(dataclasses.replace(model, params=rounded), tmp_path / name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), SWITCH: "1"}
    command = [sys.executable, "-c", GENERATE, str(tmp_path / "target"), str(tmp_path / "draft")]
    counts = []
    for _ in range(2):
        found = processes.run(command, cwd=processes.ROOT, env=environment)
        assert found.returncode == 0, found.output
        counts.append([int(x) for x in found.stdout.split()])
    (cold, _), (warm, compiled_again) = counts
    assert cold == warm <= 35
    assert compiled_again <= 3


def test_the_programs_unused_for_longest_are_removed(home, monkeypatch):
    directory = keep_programs()
    assert directory is not None
    for age, name in enumerate(("new", "middle", "old")):
        (directory / name).write_bytes(bytes(10))
        os.utime(directory / name, (1e9 - age, 1e9 - age))
    tuned = directory / "xla_gpu_per_fusion_autotune_cache_dir"
    tuned.mkdir()
    os.utime(tuned, (1e8, 1e8))
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", 25)
    jax.config.update("jax_compilation_cache_dir", None)
    keep_programs()
    assert sorted(file.name for file in directory.iterdir()) == ["middle", "new", tuned.name]


def test_what_compiles_is_told_at_the_end_with_what_came_from_the_cache(home, monkeypatch, capsys):
    monkeypatch.setattr(compile_cache, "_SECONDS_WORTH_SAYING", 0.0)
    told = []
    for _ in range(2):
        jax.clear_caches()
        with programs_kept():
            jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x.T) / 5)(np.ones((16, 16), np.float32)))
        told.append(capsys.readouterr().err.splitlines()[-1])
    assert re.fullmatch(rf"compiled \d+ programs? in \d+\.\d s; kept for the next start in {home}/specjax/.*", told[0])
    assert re.fullmatch(r"compiled (\d+) programs? in \d+\.\d s, [1-9]\d* of them from the cache.*", told[1])


def test_a_wait_for_the_compiler_is_said_once_or_beside_the_open_bar(home, monkeypatch, capsys):
    monkeypatch.setattr(compile_cache, "_SECONDS_WORTH_SAYING", 0.01)
    begun, ended = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"
    with programs_kept():
        for _ in range(2):
            compile_cache._on_duration(begun, 0.0)
            time.sleep(0.1)
            compile_cache._on_duration(ended, 1.5)
        assert capsys.readouterr().err == "compiling ...\n"
        screen = io.StringIO()
        bar: Any = console_bars(Console(file=screen, force_terminal=True, width=80))
        with bar("decoding", 3) as show:
            compile_cache._on_duration(begun, 0.0)
            time.sleep(0.7)
            compile_cache._on_duration(ended, 1.5)
            show(1, {})
        assert "compiling 0:00" in screen.getvalue()
    assert capsys.readouterr().err.startswith("compiled 3 programs in 4.5 s")
