from __future__ import annotations

import errno
from pathlib import Path

import pytest

from specjax.distill.log import Log, read_log
from specjax.errors import TrainingError


def test_records_past_the_checkpoint_are_dropped_and_nothing_is_there_twice(tmp_path):
    log = Log(tmp_path / "log.jsonl", 0)
    for step in (5, 10, 15):
        log.append({"step": step, "loss": 1.0 / step})
    log = Log(tmp_path / "log.jsonl", 10)
    log.append({"step": 15, "loss": 0.5})
    assert [(r["step"], r["loss"]) for r in read_log(tmp_path)] == [(5, 0.2), (10, 0.1), (15, 0.5)]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(TrainingError, match=r"log\.jsonl, line 2: damaged.*delete the line"):
        read_log(tmp_path)


@pytest.mark.parametrize("call", ["open", "append"])
def test_a_full_disk_is_one_clear_error(call, tmp_path, monkeypatch):
    log = Log(tmp_path / "log.jsonl", 0)
    log.append({"step": 1})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    write = (lambda: Log(tmp_path / "log.jsonl", 1)) if call == "open" else (lambda: log.append({"step": 2}))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text" if call == "open" else "open", full)
        with pytest.raises(TrainingError, match=r"log\.jsonl: .*no space.*stays valid"):
            write()
    assert read_log(tmp_path) == [{"step": 1}]
