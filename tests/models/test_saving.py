"""Sharded files, full disks, and `specjax export`."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from specjax import cli
from specjax.errors import ModelError
from specjax.models import files, hf, weights
from specjax.models.hf import load_model, save_model
from tests.models.directories import make_tokenizer, rewrite, same_params

SHARD = 4000
"""Bytes; the largest tensor of the small Llama has 2,368."""


def test_shards_hold_what_the_index_says_and_load_bit_for_bit(llama, tmp_path):
    model = load_model(llama.write())
    save_model(model, tmp_path / "out", max_shard_bytes=SHARD)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in llama.tensors.values())}
    shards = sorted(set(index["weight_map"].values()))
    count = len(shards)
    assert count > 3
    assert shards == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert not (tmp_path / "out" / "model.safetensors").exists()
    for shard in shards:
        stored = load_file(tmp_path / "out" / shard)
        assert stored.keys() == {name for name, file in index["weight_map"].items() if file == shard}
        assert sum(value.nbytes for value in stored.values()) <= SHARD
        assert b'"__metadata__":{"format":"pt"}' in (tmp_path / "out" / shard).read_bytes()[8:200]
    assert same_params(load_model(tmp_path / "out").params, model.params)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(llama, tmp_path):
    model = load_model(llama.write())
    save_model(model, tmp_path / "out", max_shard_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(llama.tensors)
    assert same_params(load_model(tmp_path / "out").params, model.params)
    with pytest.raises(ModelError, match="max_shard_bytes=0 should be positive"):
        save_model(model, tmp_path / "none", max_shard_bytes=0)


def test_one_shard_is_in_memory_at_a_time(llama, tmp_path, monkeypatch):
    """Also none of what was brought to the host stays with the arrays, as it would on an accelerator."""
    made, written = [], []
    tensor, save_file = weights._tensor, weights.save_file

    def spied_tensor(sources, dtype):
        made.append(len(written))
        return tensor(sources, dtype)

    def spied_save_file(tensors, *args, **kwargs):
        written.append(sum(value.nbytes for value in tensors.values()))
        return save_file(tensors, *args, **kwargs)

    monkeypatch.setattr(weights, "_tensor", spied_tensor)
    monkeypatch.setattr(weights, "save_file", spied_save_file)
    model = load_model(llama.write(), mesh=jax.make_mesh((4,), ("fsdp",)))
    save_model(model, tmp_path / "out", max_shard_bytes=SHARD)
    assert max(written) <= SHARD
    assert set(made) == set(range(len(written)))  # each shard is made after the one before it was written
    assert all(leaf._npy_value is None for leaf in jax.tree.leaves(model.params))


# --- what fails ---------------------------------------------------------------------------------------------------


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", [(weights, "save_file"), (hf, "write_json"), (files, "sha256")], ids=lambda x: x[1])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(llama, tmp_path, monkeypatch, where, overwrite):
    model = load_model(llama.write())
    before = {file.name: file.read_bytes() for file in llama.path.iterdir()}
    monkeypatch.setattr(*where, full_disk)
    place = llama.path if overwrite else tmp_path / "out"
    message = r"cannot be written \(.*No space left on device\); make room there"
    with pytest.raises(ModelError, match=message) as refused:
        save_model(model, place, overwrite=overwrite, max_shard_bytes=SHARD)
    assert str(refused.value).startswith(f"{place}: ")
    assert "\n" not in str(refused.value)
    assert [file.name for file in tmp_path.iterdir()] == ["llama"]
    assert {file.name: file.read_bytes() for file in llama.path.iterdir()} == before


@pytest.mark.parametrize("room", [1000, 11_000], ids=["weights", "tokenizer"])
def test_a_limit_of_the_system_is_met_as_a_full_disk_is(llama, tmp_path, room):
    """Writes that really fail, in the libraries that write weights and tokenizer."""
    letters = [chr(i) for i in range(0x4E00, 0x4E00 + 36)]
    tokenizer = make_tokenizer("".join(letters))
    tokenizer.add_tokens([letter * 300 for letter in letters])
    model = dataclasses.replace(load_model(llama.write()), tokenizer=tokenizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ModelError, match=r"out: cannot be written \(.*[Ff]ile too large") as refused:
            save_model(model, tmp_path / "out", max_shard_bytes=SHARD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ("tokenizer" in str(refused.value)) == (room > 1000)
    assert [file.name for file in tmp_path.iterdir()] == ["llama"]


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(llama, tmp_path, monkeypatch):
    """Files and their directory first, then the move, then the directory that the name stands in."""
    model, seen = load_model(llama.write()), []
    monkeypatch.setattr(hf, "flush", lambda *paths: seen.append([path.name for path in paths]))
    rename = type(tmp_path).rename
    monkeypatch.setattr(type(tmp_path), "rename", lambda self, new: (seen.append(new.name), rename(self, new))[1])
    save_model(model, tmp_path / "new" / "out")
    (*written, partial), moved, parent = seen
    assert sorted(written) == sorted(file.name for file in (tmp_path / "new" / "out").iterdir())
    assert partial.startswith(".out.partial-")
    assert (moved, parent) == ("out", ["new"])
    files.flush(tmp_path, tmp_path / "new" / "out" / "config.json")  # both kinds can be


def test_weights_that_other_processes_hold_a_part_of_are_refused(llama, tmp_path):
    class Part(np.ndarray):
        is_fully_addressable = False

    model = load_model(llama.write())
    params = {**model.params, "norm": {"scale": np.ones(16, np.float32).view(Part)}}
    with pytest.raises(ModelError, match=r"out: other processes hold a part of the weights; gather them"):
        save_model(dataclasses.replace(model, params=params), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_generation_config_survives_but_for_the_end_of_sequence_which_is_the_model_s(llama, tmp_path):
    told = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 7, "num_assistant_tokens": 4}
    (llama.write() / "generation_config.json").write_text(json.dumps({**told, "eos_token_id": [4, 9]}))
    assert export(llama.path, tmp_path / "out").exit_code == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {**told, "eos_token_id": [4, 9]}
    model = dataclasses.replace(load_model(llama.path), eos_ids=(5,))
    save_model(model, tmp_path / "other")
    assert json.loads((tmp_path / "other" / "generation_config.json").read_text()) == {**told, "eos_token_id": 5}
    save_model(dataclasses.replace(model, eos_ids=()), tmp_path / "none")
    assert json.loads((tmp_path / "none" / "generation_config.json").read_text()) == told


# --- export -------------------------------------------------------------------------------------------------------


def export(*arguments: object):
    return CliRunner().invoke(cli.app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_export_writes_a_directory_as_it_is_stored_and_keeps_its_card(llama, tmp_path, stored):
    make_tokenizer().save_pretrained(llama.write())
    (llama.path / "README.md").write_text("# mine\n")
    save_model(load_model(llama.path), llama.path, dtype=stored, overwrite=True, card="# mine\n")
    result = export(llama.path, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'out'}: 5,104 parameters in {stored}, weights in 1 file\n"
    source, out = load_file(llama.path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert source.keys() == out.keys()
    for name, value in source.items():
        assert value.dtype == out[name].dtype == stored
        np.testing.assert_array_equal(value, out[name])
    assert (tmp_path / "out" / "README.md").read_text() == "# mine\n"
    assert load_model(tmp_path / "out").tokenizer("abc")["input_ids"] == [1, 2, 3]


def test_export_converts_and_shards_and_writes_a_card_where_there_is_none(llama, tmp_path):
    result = export(llama.write(), tmp_path / "out", "--dtype", "bfloat16", "--max-shard-gb", "0.001")
    assert result.exit_code == 0, result.stderr
    assert "in bfloat16" in result.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nlibrary_name: transformers\n")
    assert "# llama\n" in (tmp_path / "out" / "README.md").read_text()


def test_export_of_a_run_is_its_draft(llama, tmp_path):
    run = tmp_path / "run"
    save_model(load_model(llama.write()), run / "draft", card="# draft\n\nalpha 0.9\n")
    (run / "draft-distill").mkdir()
    assert export(run, tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "README.md").read_text() == "# draft\n\nalpha 0.9\n"
    assert same_params(load_model(tmp_path / "out").params, load_model(llama.path).params)


def test_export_refuses_what_it_cannot_read_or_would_replace(llama, tmp_path):
    llama.write()
    (tmp_path / "empty").mkdir()
    result = export(tmp_path / "empty", tmp_path / "out")
    assert result.exit_code == 2
    assert "neither a model directory (no config.json) nor a run with a draft" in result.stderr
    rewrite(llama, {**llama.tensors, "model.norm.weight": np.full(16, np.nan, np.float32)})
    result = export(llama.path, tmp_path / "out", "--check-finite")
    assert (result.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "tensor model.norm.weight has 16 of 16 values that are NaN" in result.stderr
    # Before anything is read: the source does not exist.
    result = export(tmp_path / "nowhere", llama.write())
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert "--overwrite" in result.stderr
    assert export(llama.path, llama.path, "--overwrite").exit_code == 0


def test_written_weights_have_the_mode_of_their_siblings(tiny_target, tmp_path):
    """safetensors keeps what it writes to the owner, whatever the umask: a served model is for others to read."""
    before = os.umask(0o022)
    try:
        save_model(tiny_target, tmp_path / "model", max_shard_bytes=20_000)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert len([name for name in modes if name.endswith(".safetensors")]) > 1
    assert set(modes.values()) == {0o644}, modes
