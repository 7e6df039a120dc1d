from __future__ import annotations

import pytest

from specjax.runtime import store


def test_a_file_counts_while_it_is_what_its_record_says(tmp_path):
    file = tmp_path / "made" / "000000.npy"
    assert store.record_of(file) is None
    record = store.write(file, b"content", {"rows": 3})
    assert store.record_of(file) == record
    assert record["rows"] == 3
    file.write_bytes(b"Content")
    assert store.record_of(file) is None
    store.write(file, b"content", {"rows": 3})
    assert store.record_of(file) == record
    store.remove(file)
    assert list(file.parent.iterdir()) == []


def test_a_file_that_was_killed_before_its_record_does_not_count(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.fingerprint, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        store.write(tmp_path / "a.npy", b"content", {})
    assert (tmp_path / "a.npy").read_bytes() == b"content"
    assert store.record_of(tmp_path / "a.npy") is None
