"""Parameters over a mesh of four devices: where they lie, that they are the same, that they compute the same."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.errors import ModelError
from specjax.models import weights
from specjax.models.families import FAMILIES
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.sharding import PARAMETERS, place
from specjax.models.transformer import Model
from tests.models.directories import TOKENS, same_params
from tests.models.test_families import random_params, read
from tests.models.variants import VARIANTS

DIVIDED = {"vocab_size": 40, "num_key_value_heads": 4}
"""Changes that make every size of the small Llama a multiple of four."""


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


def specs(params) -> dict[str, PartitionSpec]:
    """Of layer 0 and what is outside of layers."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {".".join(str(key.key) for key in path): leaf.sharding.spec for path, leaf in leaves}
    return {name.removeprefix("layers.0."): spec for name, spec in named.items() if not name.startswith("layers.1.")}


def test_every_matrix_of_every_family_has_one_row_in_the_table():
    for family in FAMILIES.values():
        for path in family.tensors:
            rows = [pattern for pattern, _ in PARAMETERS if re.search(pattern, path)]
            split = path.endswith(("kernel", "embedding")) or re.search(r"(q|k|v|gate|up)_proj", path)
            assert len(rows) == bool(split), path


def test_every_parameter_lies_where_the_table_says(llama):
    params = load_model(llama.write(**DIVIDED), mesh=mesh_of(fsdp=2, tensor=2)).params
    columns, rows, whole = PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", "fsdp"), PartitionSpec(None)
    expected = {f"attention.{name}_proj.kernel": columns for name in "qkv"} | {"attention.o_proj.kernel": rows}
    expected |= {f"mlp.{name}_proj.kernel": columns for name in ("gate", "up")} | {"mlp.down_proj.kernel": rows}
    expected |= {"embedding": rows, "head.kernel": columns}
    expected |= dict.fromkeys(("attention_norm.scale", "mlp_norm.scale", "norm.scale"), whole)
    assert specs(params) == expected
    assert params["embedding"].addressable_shards[0].data.shape == (20, 8)


def test_what_does_not_divide_is_whole_on_every_device(llama):
    """37 tokens, 2 key-value heads of 4 features, over 4 devices: a head is not cut, though its features would be."""
    found = specs(load_model(llama.write(), mesh=mesh_of(tensor=4)).params)
    assert found["embedding"] == found["head.kernel"] == PartitionSpec(None, None)
    assert found["attention.k_proj.kernel"] == found["attention.v_proj.kernel"] == PartitionSpec(None, None)
    assert found["attention.q_proj.kernel"] == PartitionSpec(None, "tensor")


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 1, "tensor": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_those_of_one_device(llama, axes, dtype):
    one = load_model(llama.write(**DIVIDED), dtype)
    many = load_model(llama.path, dtype, mesh=mesh_of(**axes))
    assert same_params(one.params, many.params)
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(many.params)} == {4}


@pytest.mark.parametrize("name", ["llama-tied-biased", "mixtral-window", "phi3", "gpt2", "gpt_neox"])
def test_every_layout_on_disk_loads_over_a_mesh_computes_the_same_and_saves_bit_for_bit(name, tmp_path):
    settings = {**VARIANTS[name], "vocab_size": 62}
    settings |= {"num_local_experts": 4} if settings["model_type"] == "mixtral" else {}
    config = read(settings)
    config = dataclasses.replace(config, num_layers=1, layers=config.layers[:1])
    save_model(LoadedModel(Model(config), random_params(config), family=settings["model_type"]), tmp_path / "one")
    one, many = load_model(tmp_path / "one"), load_model(tmp_path / "one", mesh=mesh_of(fsdp=2, tensor=2))
    assert same_params(one.params, many.params)
    expected = one.logits(TOKENS)
    np.testing.assert_allclose(many.logits(TOKENS), expected, atol=2e-5 * float(np.std(expected)))
    save_model(many, tmp_path / "many")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "many" / file).read_bytes()


def test_a_device_s_piece_is_read_alone_and_once(llama, monkeypatch):
    seen: list[tuple[str, tuple]] = []
    value = weights.StoredTensor.value

    def spied(self, index=None):
        assert index is not None
        seen.append((self.name, tuple((part.start, part.stop) for part in index)))
        return value(self, index)

    monkeypatch.setattr(weights.StoredTensor, "value", spied)
    load_model(llama.write(**DIVIDED), mesh=mesh_of(data=2, tensor=2))
    read = [index for name, index in seen if name == "model.layers.1.self_attn.q_proj.weight"]
    assert read == [((0, 8), (0, 16)), ((8, 16), (0, 16))]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("mesh", [None, {"tensor": 4}, {"data": 4}], ids=str)
def test_parameters_are_jax_s_own_and_can_be_donated(mesh):
    """JAX borrows what is aligned to 64 bytes, and keeps a borrowed buffer when its array is donated."""
    raw = np.zeros(2**20 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    value = raw[start : start + 2**20].view(np.float32).reshape(4, -1)
    spec = PartitionSpec("tensor" if mesh and "tensor" in mesh else None)
    sharding = None if mesh is None else NamedSharding(mesh_of(**mesh), spec)
    placed = (
        weights.whole(value.__getitem__, value.shape)
        if sharding is None
        else place(value.__getitem__, value.shape, sharding)
    )
    value[...] = 1
    assert not np.any(placed)
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(placed)
    assert placed.is_deleted()
    assert np.all(donated == 1)


def test_an_axis_that_means_nothing_is_refused(llama):
    with pytest.raises(ModelError, match="mesh: axis 'model' is unknown; name its axes from data, fsdp, tensor"):
        load_model(llama.write(), mesh=mesh_of(model=2))
