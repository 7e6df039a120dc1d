"""Every test runs under JAX's strict rules and with shapes checked: four CPU devices, no implicit dtype or rank
promotion, shape annotations enforced by beartype. Set before JAX and specjax are first imported."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib.metadata
import os
from pathlib import Path

gc.disable()  # until `pytest_collection_finish`
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile much and compute little, and two workers share the cores: unoptimised code, by the older emitters of
# fusions and in one piece, is made in half of the time. `make proof` asks for the code that users run.
_LEVEL = "--xla_backend_optimization_level"
_FLAGS = ["--xla_force_host_platform_device_count=4"]
if _LEVEL not in os.environ.get("XLA_FLAGS", ""):
    _FLAGS.append(f"{_LEVEL}=0")
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # a flag that XLA does not know ends the process
        _FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["SPECJAX_COMPILE_CACHE"] = "0"
os.environ.setdefault("MPLBACKEND", "agg")
# Every program, whatever it took, is kept for the next run, and read by the processes that tests start as well.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Of a damaged one, which is compiled anew. (A process that is killed may leave it half written.)
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry"

import beartype
import jax
import jaxtyping
import pytest
from _pytest.runner import runtestprotocol
from jax._src.interpreters import mlir

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Where the mathematics is. Not the pytrees: JAX rebuilds those with placeholders and host code with numpy arrays. Of
# metrics its functions of arrays alone: the distribution tests make counts by the ten thousand.
CHECKED = ["sampling", "verifiers", "drafters", "models.transformer", "models.layers", "models.products"]
CHECKED += ["models.rotary", "training.losses", "training.distributions"]
jaxtyping.install_import_hook([f"specjax.{module}" for module in CHECKED], "beartype.beartype")

from specjax import metrics
from specjax.runtime import compile_cache

# Outside the checkout, so that every clone has them. JAX's names of the programs say versions, flags and all that is
# computed: what an edit or a planted error changes is compiled.
PROGRAMS = None  # those of a directory that was given are left alone
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    PROGRAMS = compile_cache.user_cache() / "specjax" / f"tests-{compile_cache.machine()}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
_MOST_PROGRAM_BYTES = 2 * 10**9

for _name in ("alpha_per_position", "negative_log_likelihood"):
    setattr(metrics, _name, jaxtyping.jaxtyped(typechecker=beartype.beartype)(getattr(metrics, _name)))

from specjax.data.corpus import Document
from specjax.data.tokenizer import train_tokenizer
from specjax.decode import programs
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model

VOCAB = 300
_LINES = (
    "def add(first, second):\n    return first + second\n",
    "for number in range(10):\n    print(number, add(number, 1))\n",
    "class Tree:\n    def __init__(self, value, left=None, right=None):\n        self.value = value\n",
)


# JAX lowers each program in a context of its own, and to make one it loads every dialect of MLIR, which takes longer
# than a small program does. They can share one.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# Linux maps at most 65,530 pieces of memory for a process, and a program takes dozens. Programs are freed above the
# first number between files, and above the second within one.
_MAPS, _KEPT_MAPS, _MOST_MAPS = Path("/proc/self/maps"), 6_000, 25_000
_tests_since = 0


def pytest_configure(config):
    """Make room for the programs of this run, once: not in each of its workers."""
    if PROGRAMS is not None and not hasattr(config, "workerinput"):
        compile_cache.make_room(PROGRAMS, _MOST_PROGRAM_BYTES)


def pytest_collection_finish():
    """What has been imported stays, and tracing makes many objects that die young: walking over all of them as often as
    Python does takes a sixth of a test's time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def _run_test(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


# Python keeps the frames of calls in pieces of 16 kB. It asks the system for a piece, and gives it back, whenever calls
# cross the end of one, and tracing, which calls deeply, does so all the time: a tenth of a test. Everything that is
# called from a frame of this size shares its piece, which has a megabyte.
_run_test.__code__ = _run_test.__code__.replace(co_stacksize=70_000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    _run_test(item, nextitem)
    return True


def pytest_runtest_teardown(item, nextitem):
    """Let go of programs between files of tests, which share few: together they would be gigabytes. And before the
    system refuses to map more: a worker that is refused dies."""
    global _tests_since
    _tests_since += 1
    last = nextitem is not None and nextitem.path != item.path
    if not last and _tests_since < 8:
        return
    maps = _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else _MOST_MAPS
    if maps > (_KEPT_MAPS if last else _MOST_MAPS):
        programs.free_programs()
        jax.clear_caches()
        gc.collect()
    _tests_since = 0


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level BPE of at most 300 ids, trained on a few lines."""
    return train_tokenizer([Document(str(i), text) for i, text in enumerate(_LINES)], VOCAB)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=256,
    )


@pytest.fixture(scope="session")
def tiny_target(tiny_config, tiny_tokenizer) -> LoadedModel:
    """Random weights; no end-of-sequence id, so that generations have the length asked for."""
    model = Model(tiny_config)
    return LoadedModel(model, jax.jit(model.init)(jax.random.key(0)), tiny_tokenizer, name="tiny-target")


@pytest.fixture(scope="session")
def tiny_chat(tiny_target) -> LoadedModel:
    """The random model with a chat template."""
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    return dataclasses.replace(tiny_target, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def tiny_draft(tiny_tokenizer) -> LoadedModel:
    """A smaller model over the same vocabulary."""
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=256,
    )
    model = Model(config)
    return LoadedModel(model, jax.jit(model.init)(jax.random.key(1)), tiny_tokenizer, name="tiny-draft")
