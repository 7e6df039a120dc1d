from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import logging
import os
import shutil
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.rows import Batches, ConcatenatedRows, take
from specjax.errors import ConfigError, DataError, TrainingError
from specjax.interfaces import TopKLogits
from specjax.runtime.artifact import read_provenance
from specjax.runtime.log import read_log
from specjax.training import teacher_cache
from specjax.training.distributions import acceptance, top_k_logits
from specjax.training.teacher import target_output
from specjax.training.teacher_cache import (
    Logits,
    TeacherCache,
    from_records,
    numbers_of,
    record_dtype,
    summary,
    to_records,
)
from tests.training import toys
from tests.training.test_losses import log_softmax64
from tests.training.test_step import logits64
from tests.training.toys import Interrupt, bigram_params

K, ROWS, PER_SHARD, BATCH = 4, 40, 12, 5
SHARDS = [f"{number:06d}.npy" for number in range(4)]


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    """4 shards of 12, 12, 12 and 4 rows, in batches of 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_cache, "SHARD_BYTES", PER_SHARD * toys.LENGTH * record_dtype(K, toys.VOCAB).itemsize)
        yield


def cache(**changes) -> TeacherCache:
    settings: dict[str, Any] = {"target": toys.target(), "rows": toys.rows(ROWS), "k": K, "batch_size": BATCH} | changes
    settings.setdefault("numbers", np.arange(len(settings["rows"])))
    settings["format"] = Logits.of(settings.pop("k"), settings["target"], settings["rows"])
    return TeacherCache(**settings)


def make(directory, **changes):
    return cache(**changes).at(directory / "cache")


@pytest.fixture(scope="module")
def whole(small_shards, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, make(directory)


def shards(directory) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((directory / "cache").glob("*.npy"))}


def distribution(teacher: TopKLogits | None) -> np.ndarray:
    assert teacher is not None
    return np.exp(np.asarray(teacher.values - teacher.logsumexp[..., None], np.float64))


@pytest.mark.parametrize(("vocab_size", "bytes_per_token"), [(2048, 308), (65_536, 308), (65_537, 384), (151_936, 384)])
def test_a_token_takes_no_more_than_its_bytes(vocab_size, bytes_per_token):
    assert record_dtype(64, vocab_size).itemsize == bytes_per_token <= 400


@pytest.mark.parametrize("vocab_size", [500, 70_000])
def test_what_is_stored_comes_back(vocab_size):
    logits = 4 * np.random.default_rng(0).standard_normal((2, 3, vocab_size)).astype(np.float32)
    logits[0, 0, :-2] = -np.inf  # the distribution has fewer tokens than are kept
    logits[0, 1, 7] = 1e5  # all others are beyond float16
    uniform = jnp.full(logits.shape[:2], 0.5, jnp.float32)
    exact = jax.tree.map(np.asarray, top_k_logits(jnp.asarray(logits), 16, uniform, teacher_cache.TAIL_TOKENS))
    found = from_records(to_records(exact, vocab_size))
    np.testing.assert_array_equal(found.ids, exact.ids)
    assert found.ids.max() > 2**16 or vocab_size < 2**16
    np.testing.assert_allclose(distribution(found), distribution(exact), rtol=4e-3, atol=1e-7)
    # The tail is the true one, whatever rounding did to the rest.
    np.testing.assert_allclose(distribution(found).sum(-1), distribution(exact).sum(-1), atol=1e-6)
    np.testing.assert_array_equal(found.tail_ids, exact.tail_ids)
    stored = (
        np.asarray(distribution.tail_values) - distribution.logsumexp[..., None] for distribution in (found, exact)
    )
    np.testing.assert_allclose(*(np.exp(x[1]) for x in stored), rtol=1e-2)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"float32", "int32"}


def test_every_row_has_the_target_s_best_logits_of_that_row(whole):
    cached = whole[1]
    assert (len(cached), cached.length, cached.digest) == (ROWS, toys.LENGTH, toys.rows(ROWS).digest)
    order = np.random.default_rng(0).permutation(ROWS)
    batch = take(cached, order)
    log_p = log_softmax64(logits64(bigram_params(0), toys.windows(ROWS)[order, :-1]))
    assert batch.teacher is not None
    np.testing.assert_array_equal(batch.teacher.ids, np.argsort(-log_p, axis=-1)[..., :K])
    np.testing.assert_allclose(distribution(batch.teacher), -np.sort(-np.exp(log_p), axis=-1)[..., :K], rtol=2e-3)
    np.testing.assert_array_equal(batch.tokens, toys.windows(ROWS)[order, :-1])


def test_packed_rows_are_asked_about_with_their_documents_apart(tiny_target, tmp_path):
    stream = np.random.default_rng(0).integers(0, tiny_target.vocab_size, 4 * 16 + 1).astype(np.int32)
    rows = ConcatenatedRows(stream, np.array([0, 5, 21, 40]), 16)
    found = take(make(tmp_path, target=tiny_target, rows=rows, batch_size=4), range(4)).teacher
    batch = jax.tree.map(jnp.asarray, take(rows, range(4)))
    online = top_k_logits(target_output(tiny_target.spec, tiny_target.params, batch).logits, K)
    np.testing.assert_allclose(distribution(found), distribution(online), rtol=4e-3)
    joined = dataclasses.replace(batch, segments=None, positions=None)
    apart = top_k_logits(target_output(tiny_target.spec, tiny_target.params, joined).logits, K)
    assert not np.allclose(distribution(apart), distribution(online), rtol=4e-3)


def test_the_provenance_bounds_the_error_of_alpha(whole):
    directory, cached = whole
    found = read_provenance(directory / "cache")
    log_p = log_softmax64(logits64(bigram_params(0), toys.windows(ROWS)[:, :-1]))
    tail = np.sort(np.exp(log_p), axis=-1)[..., :-K].sum(-1)
    assert found["tail_mean"] == pytest.approx(tail.mean(), rel=1e-5)
    assert found["tail_max"] == pytest.approx(tail.max(), rel=1e-5)
    assert (found["positions"], found["bytes_per_token"]) == (ROWS * toys.LENGTH, 4 * K + 4 * 12 + 4)
    assert found["full_bytes_per_token"] == 4 * toys.VOCAB
    batch = take(cached, range(ROWS))
    draft = jnp.asarray(logits64(bigram_params(1), batch.tokens).astype(np.float32))
    ends = acceptance(draft, jax.tree.map(jnp.asarray, batch.teacher))
    alpha = np.minimum(np.exp(log_p), np.exp(log_softmax64(draft))).sum(-1).mean()
    assert abs(ends["alpha_upper"].mean() - alpha) <= found["alpha_error"]
    assert abs(ends["alpha_estimate"].mean() - alpha) <= found["alpha_error"] / 10
    assert 0 < found["rounding_mean"] < 1e-3 < found["alpha_error"]
    for text in ("cache: 4 of 12 logits", "68 bytes a token", f"alpha off by at most {found['alpha_error']:.2g}"):
        assert text in summary(directory / "cache")


def test_a_position_that_does_not_count_is_not_in_the_figures(tmp_path):
    class Half(toys.Windows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return dataclasses.replace(row, weight=row.weight * (np.arange(self.length) < 4))

    make(tmp_path, rows=Half(toys.windows(ROWS)))
    log_p = log_softmax64(logits64(bigram_params(0), toys.windows(ROWS)[:, :4]))
    tail = np.sort(np.exp(log_p), axis=-1)[..., :-K].sum(-1)
    found = read_provenance(tmp_path / "cache")
    assert found["positions"] == ROWS * 4
    assert found["tail_mean"] == pytest.approx(tail.mean(), rel=1e-5)


def test_only_the_rows_of_the_stage_s_batches_are_asked_about(whole, tmp_path):
    batches = Batches(toys.rows(ROWS), 4, 3)
    numbers = numbers_of(batches, 3)
    assert sorted(np.concatenate([batches.indices(step) for step in range(3)])) == numbers.tolist()
    np.testing.assert_array_equal(numbers_of(batches, 10), np.arange(ROWS))
    some = make(tmp_path, numbers=numbers)
    toys.assert_same(take(some, batches.indices(2)), take(whole[1], batches.indices(2)))
    with pytest.raises(KeyError, match=r"cache: holds nothing of row"):
        some[int(np.setdiff1d(np.arange(ROWS), numbers)[0])]


def counting(monkeypatch, fail_at: str | None = None) -> list[str]:
    """Names of the shards made from now on; the one to fail at is not begun."""
    made, real = [], TeacherCache._make

    def make(self, file, start):
        if file.name == fail_at:
            raise Interrupt
        made.append(file.name)
        return real(self, file, start)

    monkeypatch.setattr(TeacherCache, "_make", make)
    return made


def test_an_interrupted_cache_goes_on_with_the_shards_that_are_missing(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        counting(patch, SHARDS[2])
        with pytest.raises(Interrupt):
            make(tmp_path)
    assert not (tmp_path / "cache" / "provenance.json").exists()
    # Written, but killed before it was entered: not trusted.
    (tmp_path / "cache" / SHARDS[2]).write_bytes(b"half")
    made = counting(monkeypatch)
    make(tmp_path)
    assert made == SHARDS[2:]
    assert shards(tmp_path) == shards(whole[0])
    make(tmp_path)
    assert made == SHARDS[2:]


def test_a_damaged_shard_is_named_and_made_again(whole, tmp_path, monkeypatch, caplog):
    make(tmp_path)
    file = tmp_path / "cache" / SHARDS[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (tmp_path / "cache" / SHARDS[3]).unlink()
    made = counting(monkeypatch)
    with caplog.at_level(logging.WARNING):
        make(tmp_path)
    assert made == [SHARDS[1], SHARDS[3]]
    assert f"{SHARDS[1]}: changed since it was written" in caplog.text
    assert f"{SHARDS[3]}: missing, though it has a record" in caplog.text
    assert shards(tmp_path) == shards(whole[0])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("target_params", {"target": toys.target(5)}),
        ("target_config", {"target": toys.target(config=0.5)}),
        ("rows", {"rows": toys.rows(ROWS, 7)}),
        ("rows", {"numbers": np.arange(3)}),
        ("k", {"k": 3}),
    ],
)
def test_the_cache_of_another_target_of_other_rows_or_of_another_k_is_refused(field, change, whole):
    told = {"target_params": "the target's weights", "target_config": "the target's config"}
    with pytest.raises(TrainingError, match=told.get(field, rf"cache: was made with other settings: .*{field} \(")):
        make(whole[0], **change)


def test_more_logits_than_the_target_has_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"teacher_top_k=13 exceeds the target's 12 tokens"):
        make(tmp_path, k=13)
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_leaves_the_finished_shards_and_no_half_one(whole, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def fsync(file):
        calls.append(file)
        if len(calls) == 5:  # two records of the directory, first shard, its record, second shard
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(TrainingError, match=r"000001\.npy: cannot be written \(no space left.*takes 21,760 bytes"):
            make(tmp_path)
    records = [".fingerprint.json", "fingerprint.json"]
    assert sorted(f.name for f in (tmp_path / "cache").iterdir()) == sorted(["000000.json", SHARDS[0], *records])
    made = counting(monkeypatch)
    make(tmp_path)
    assert made == SHARDS[1:]
    assert shards(tmp_path) == shards(whole[0])


def test_a_disk_without_room_is_told_before_anything_is_computed(whole, tmp_path, monkeypatch):
    made = counting(monkeypatch)
    full = shutil.disk_usage(tmp_path)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(
        DataError, match=r"0\.0 MB are wanted for the target's output, and 0\.0 MB are free .*teacher_path"
    ):
        make(tmp_path)
    assert made == []
    shutil.copytree(whole[0] / "cache", tmp_path / "copied" / "cache")
    make(tmp_path / "copied")


def test_progress_counts_rows_batch_by_batch_and_what_is_there_at_once(tmp_path):
    seen: list[int] = []
    make(tmp_path, progress=lambda rows, record: seen.append(rows))
    assert seen == [5, 10, 12, 12, 17, 22, 24, 24, 29, 34, 36, 36, 40, 40]
    seen.clear()
    make(tmp_path, progress=lambda rows, record: seen.append(rows))
    assert seen == [12, 24, 36, 40]


def share(root, **changes):
    return cache(**changes).shared(root)


def test_runs_share_what_is_made_from_the_same_and_nothing_else(whole, tmp_path, monkeypatch):
    made = counting(monkeypatch)
    first = share(tmp_path / "cache")
    assert made == SHARDS
    assert share(tmp_path / "cache").directory == first.directory
    others = [{"k": 3}, {"target": toys.target(5)}, {"target": toys.target(config=0.5)}, {"numbers": np.arange(3)}]
    assert len({share(tmp_path / "cache", **other).directory for other in others} | {first.directory}) == 5
    assert made[:4] == SHARDS
    assert {file.name: file.read_bytes() for file in sorted(first.directory.glob("*.npy"))} == shards(whole[0])


def test_of_two_runs_at_once_one_makes_the_logits_and_the_other_waits(tmp_path, monkeypatch, capsys):
    made, real, begun, go = [], TeacherCache._make, threading.Event(), threading.Event()

    def make(self, file, start):
        made.append(file.name)
        begun.set()
        assert go.wait(60)
        return real(self, file, start)

    monkeypatch.setattr(TeacherCache, "_make", make)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(share, tmp_path)]
        assert begun.wait(60)
        runs.append(pool.submit(share, tmp_path))
        while "waiting for it" not in capsys.readouterr().err:
            time.sleep(0.01)
        go.set()
        first, second = (run.result(timeout=60) for run in runs)
    assert made == SHARDS
    assert first.digests == second.digests


# In training.


def test_training_on_all_logits_cached_is_training_online_but_for_their_rounding_and_resumes_exactly(
    tmp_path, monkeypatch
):
    # The loss that carries a number of its own from step to step.
    settings = {"loss": "lk_lambda", "teacher": "cached", "teacher_top_k": toys.VOCAB}
    online = toys.train(tmp_path / "online" / "stage", loss="lk_lambda")
    cached = toys.train(tmp_path / "cached" / "stage", **settings)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-2), online, cached)
    logs = [read_log(tmp_path / name / "stage") for name in ("online", "cached")]
    assert logs[0][-1]["alpha"] == pytest.approx(logs[1][-1]["alpha"], abs=1e-3)
    assert logs[0][0]["train_alpha"] == pytest.approx(logs[1][0]["train_alpha_upper"], abs=1e-3)
    found = read_provenance(tmp_path / "cached" / "stage" / "teacher")
    assert found["tail_mean"] < 1e-6
    assert found["shape"] == [ROWS, toys.LENGTH, toys.VOCAB]
    # Runs share them, and a run may be told so later.
    shared = {**settings, "teacher_path": str(tmp_path / "shared")}
    toys.assert_same(toys.train(tmp_path / "cached" / "stage", **shared), cached)
    assert not (tmp_path / "shared").exists()
    toys.assert_same(toys.train(tmp_path / "other" / "stage", **shared), cached)
    assert len(list((tmp_path / "shared").glob("*/provenance.json"))) == 1
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "again" / "stage", toys.interrupt_after(7), **settings)
    made = counting(monkeypatch)
    toys.assert_same(toys.train(tmp_path / "again" / "stage", **settings), cached)
    assert made == []
