from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from specjax.errors import TrainingError
from specjax.runtime.log import Log, read_log


def test_records_past_the_checkpoint_are_dropped_and_nothing_is_there_twice(tmp_path):
    log = Log(tmp_path / "log.jsonl", 0)
    for step in (5, 10, 15):
        log.append({"step": step, "loss": 1.0 / step})
    log = Log(tmp_path / "log.jsonl", 10)
    log.append({"step": 15, "loss": 0.5})
    assert [(r["step"], r["loss"]) for r in read_log(tmp_path)] == [(5, 0.2), (10, 0.1), (15, 0.5)]


DAMAGED = [b'{"st', b'{"step": 2, "lo\xf3s": 1}', b'{"stdp": 2}', b'{"step": "2"}', b"5", b'["step"]', b""]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_named_and_the_file_left_as_it_is(line, tmp_path):
    file, content = tmp_path / "log.jsonl", b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    file.write_bytes(content)
    told = r"log\.jsonl, line 2: damaged.*keep one of it and mend or delete"
    for read in (lambda: read_log(tmp_path), lambda: Log(file, 3)):
        with pytest.raises(TrainingError, match=told) as error:
            read()
        assert "\n" not in str(error.value)
    assert file.read_bytes() == content


def test_a_last_line_that_is_cut_short_inside_a_character_is_dropped(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "\xc3')
    assert read_log(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("call", ["open", "append"])
def test_a_full_disk_is_one_clear_error(call, tmp_path, monkeypatch):
    log = Log(tmp_path / "log.jsonl", 0)
    log.append({"step": 1})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    write = (lambda: Log(tmp_path / "log.jsonl", 1)) if call == "open" else (lambda: log.append({"step": 2}))
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if call == "open" else (Path, "open")), full)
        with pytest.raises(TrainingError, match=r"log\.jsonl: .*no space.*stays valid"):
            write()
    assert read_log(tmp_path) == [{"step": 1}]
