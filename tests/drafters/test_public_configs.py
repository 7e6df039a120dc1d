"""Published drafts: each config.json of `public_configs.jsonl`, key by key, beside random weights by the names that its
makers' class has. It is read as they mean it, or refused with the reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax.drafters.features import check_readable
from specjax.errors import ModelError
from specjax.formats import TargetInfo, torch_file
from specjax.models.config import ModelConfig

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("public_configs.jsonl").read_text("utf-8").splitlines()
]
READ = [row for row in ROWS if row["kind"]]
H, WIDE, V, FEWER, HEADS, KV, HEAD_DIM, RANK = 32, 48, 61, 8, 4, 2, 8, 4
SIZES = {
    "hidden_size": H,
    "target_hidden_size": H,
    "intermediate_size": WIDE,
    "vocab_size": V,
    "head_dim": HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "markov_rank": RANK,
    "mask_token_id": V - 1,
}
IDS = np.asarray([0, 1, 4, 7, 9, 20, 33, 60])


def small(config: dict[str, Any]) -> dict[str, Any]:
    """With sizes that a test can have; what is left out stays left out."""
    found = dict(config)
    for name, value in config.items():
        if isinstance(value, dict):
            found[name] = small(value)
        elif name in SIZES and value:
            found[name] = SIZES[name]
        elif name == "draft_vocab_size":
            found[name] = V if value == config.get("vocab_size", 248320) else FEWER
        elif name == "eos_token_id":
            found[name] = 0
    return found


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def layer(name: str, reads: int = H, normed: bool = False, biased: bool = False) -> dict[str, tuple[int, ...]]:
    widths = {"q": HEADS * HEAD_DIM, "k": KV * HEAD_DIM, "v": KV * HEAD_DIM}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.self_attn.{x}_proj.weight": (n, reads) for x, n in widths.items()}
    shapes |= {f"{name}.self_attn.{x}_proj.bias": (n,) for x, n in widths.items() if biased}
    shapes |= {f"{name}.self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk" if normed}
    shapes |= {f"{name}.mlp.{x}_proj.weight": (WIDE, H) for x in ("gate", "up")}
    norms = {f"{name}.{x}.weight": (H,) for x in ("input_layernorm", "post_attention_layernorm")}
    out = {f"{name}.self_attn.o_proj.weight": (H, HEADS * HEAD_DIM), f"{name}.mlp.down_proj.weight": (H, WIDE)}
    return {**shapes, **norms, **out}


def tensors_of(row: dict[str, Any], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """As the makers' class names and shapes them."""
    told, file, ends = config.get("transformer_layer_config", config), row["file"], row.get("ends", False)
    rows, count = config.get("draft_vocab_size", V), told.get("num_hidden_layers", 1)
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (H,), "fc.weight": (H, H * len(row["reads"] or [0, 0, 0]))}
    if ends:
        shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (rows, H)}
    if file in ("midlayer", "layers.0"):
        shapes |= {**layer(file, 2 * H, row.get("normed", False)), f"{file}.hidden_norm.weight": (H,)}
        shapes["lm_head.weight"] = (rows, H)
        shapes |= {"input_norm.weight": shapes["fc.weight"][1:]} if config.get("norm_before_fc") else {}
    elif file == "blocks":
        layers = (layer(f"layers.{i}", normed=True) for i in range(count))
        shapes |= {"hidden_norm.weight": (H,), **{name: shape for each in layers for name, shape in each.items()}}
        if row["kind"] == "dspark":
            shapes |= {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK)}
            shapes |= {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
    elif file == "medusa":
        shapes = {f"{i}.0.linear.{x}": (H, H) if x == "weight" else (H,) for i in range(5) for x in ("weight", "bias")}
        shapes |= {f"{i}.1.weight": (V, H) for i in range(5)}
    elif file == "eagle1":
        shapes = {"embed_tokens.weight": (V, H), "fc.weight": (H, 2 * H), "fc.bias": (H,), **layer("layers.0")}
    else:
        normed, biased = told["model_type"] == "qwen3", told["model_type"] == "qwen2"
        layers = (layer(f"model.layers.{i}", H, normed, biased) for i in range(count))
        shapes = {name: shape for each in layers for name, shape in each.items()}
        shapes |= {"model.norm.weight": (H,), "model.embed_tokens.weight": (V, H)}
    found = random(shapes)
    if rows < V:
        found |= {"d2t": IDS - np.arange(FEWER), "t2d": np.isin(np.arange(V), IDS)}
    return found


def written(row: dict[str, Any], directory: Path) -> tuple[dict[str, np.ndarray], TargetInfo]:
    """A directory of this row; its tensors, and what is told of a target of its own."""
    config = small(row["config"])
    tensors = tensors_of(row, config)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if row.get("torch"):
        name = "medusa_lm_head.pt" if row["file"] == "medusa" else "pytorch_model.bin"
        torch_file.write_tensors(directory / name, tensors)
    else:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    sizes = ModelConfig(V, H, WIDE, row["layers"], HEADS, KV, HEAD_DIM)
    return tensors, TargetInfo(sizes, "float32")


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [re.sub(r"[^\w.-]+", "-", row["source"]) for row in rows]


@pytest.mark.parametrize("row", READ, ids=names(READ))
def test_a_published_draft_is_read_as_its_makers_mean_it(row, tmp_path):
    tensors, target = written(row, tmp_path / "draft")
    drafter: Any = specjax.load_drafter(tmp_path / "draft", target)
    assert drafter.kind == row["kind"]
    if row["kind"] == "draft_model":
        assert drafter.model.config.num_layers == row["config"]["num_hidden_layers"]
        return
    spec, params, config = drafter.model.spec, drafter.model.params, row["config"]
    check_readable(row["kind"], spec, target.config)
    assert list(spec.reads) == row["reads"]
    if row["kind"] == "medusa":
        assert (spec.heads, spec.own_heads) == (5, True)
        np.testing.assert_array_equal(params["heads"][4]["head"]["kernel"], tensors["4.1.weight"].T)
        return
    layers = config.get("transformer_layer_config", config)
    rope = {**(layers.get("rope_scaling") or {}), **(layers.get("rope_parameters") or {})}
    assert spec.config.layer(0).rope.theta == rope.get("rope_theta", layers.get("rope_theta", 10_000))
    scaled = "mrope" not in rope.values() and rope.get("rope_type", "default") != "default"
    assert (spec.config.layer(0).rope.scaling is not None) == scaled
    assert spec.config.norm.eps == layers["rms_norm_eps"]
    assert spec.config.num_layers == (1 if row["kind"] == "eagle3" else layers["num_hidden_layers"])
    assert spec.config.qk_norm == ("head" if row["file"] == "blocks" or row.get("normed") else "none")
    assert (spec.config.qkv_bias, spec.config.o_bias, spec.config.mlp_bias) == (False, False, False)
    assert (spec.vocabulary is None) == ("d2t" not in tensors)
    np.testing.assert_array_equal(params["fc"]["kernel"], tensors["fc.weight"].T)
    first = f"{row['file'] if row['file'] == 'midlayer' else 'layers.0'}.self_attn.q_proj.weight"
    np.testing.assert_array_equal(params["layers"][0]["attention"]["q_proj"]["kernel"], tensors[first].T)
    assert ("embedding" in params, "head" in params) == ("embed_tokens.weight" in tensors, "lm_head.weight" in tensors)
    if row["kind"] == "eagle3":
        assert not spec.options.norm_before_residual
        assert spec.options.norm_before_fc == ("input_norm.weight" in tensors)
    else:
        sliding = [kind == "sliding_attention" for kind in layers["layer_types"]]
        assert [spec.config.layer(i).window is not None for i in range(len(sliding))] == sliding
        # DeepSpec's class begins with the root's slot, and so does all DSpark.
        assert spec.from_root == (row["kind"] == "dspark" or "Qwen3DSparkModel" in config["architectures"])
        assert (spec.slots, spec.mask_token) == (config["block_size"], V - 1)
        assert spec.most == spec.slots - (not spec.from_root)


@pytest.mark.parametrize("row", [row for row in ROWS if not row["kind"]], ids=lambda row: names([row])[0])
def test_what_is_not_read_is_refused_with_its_reason(row, tmp_path):
    _, target = written(row, tmp_path / "draft")
    with pytest.raises(ModelError, match=row["said"]) as raised:
        specjax.load_drafter(tmp_path / "draft", target)
    assert "load_drafter" not in str(raised.value)  # the call that was just made
    assert "\n" not in str(raised.value)


def test_fifty_of_sixty_published_drafts_are_read():
    assert len(ROWS) == 60
    assert len(READ) >= 50
    assert len({json.dumps(row["config"], sort_keys=True) for row in ROWS}) == 60


def changed(row: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """``row`` with other keys; a name with two underscores is in the object before them."""
    config = json.loads(json.dumps(row["config"]))
    for name, value in keys.items():
        *inside, last = name.split("__")
        where = config
        for part in inside:
            where = where[part]
        where[last] = value
    return {**row, "config": config}


def row_of(source: str) -> dict[str, Any]:
    return next(row for row in ROWS if row["source"].endswith(source))


_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
_WITH_EXPERTS = {"transformer_layer_config__model_type": "qwen3_moe"}


@pytest.mark.parametrize(
    ("source", "keys", "said"),
    [
        ("keys for gpt-oss", {"eagle_config__use_mtp_layernorm": True}, "use_mtp_layernorm=True is not implemented"),
        (
            "keys for gpt-oss",
            {"eagle_config__parallel_draft_step": 2},
            "parallel_draft_step=2 is not implemented; only 1",
        ),
        (
            "keys for gpt-oss",
            {"eagle_config__use_last_layernorm": False},
            "use_last_layernorm=False is not implemented",
        ),
        ("keys for gpt-oss", {"eagle_config__next_layer_regular": 1}, "next_layer_regular=1 is not implemented"),
        ("keys for gpt-oss", {"quantization_config": {"bits": 4}}, r"quantization_config=.* is not implemented"),
        ("keys for gpt-oss", {"pruned_heads": {"0": [1]}}, r"pruned_heads=.* is not implemented; only \{\} is"),
        ("keys for gpt-oss", {"num_aux_hidden_states": 5}, "num_aux_hidden_states=5, and the draft reads 3 layers"),
        ("hunyuan-4b-eagle3", {"use_cla": True}, "use_cla=True is not implemented; only False is"),
        ("hunyuan-4b-eagle3", {"norm_type": "layer"}, "norm_type='layer' is not implemented; only 'rms' is"),
        ("qwen3-4b-dspark", {"dflash_config__shift_label": False}, "shift_label=False is not implemented"),
        ("qwen3-8b-dflash", {"dflash_config__use_swa": True}, "use_swa=True is not implemented; only False is"),
        (
            "qwen3-8b-dflash",
            {"dflash_config__projector_type": "xpress"},
            r"projector_type='xpress' of arch.* is not read",
        ),
        ("qwen3-8b-dflash", {"dflash_config__block_size": 8}, "block_size=16, and 8 in dflash_config"),
        ("eagle3_qwen3_4b_ttt7", _TWO_LAYERS, "num_hidden_layers=2; of this class a single layer is read"),
        ("dspark_qwen3_4b_block7", {"num_anchor": 512}, "num_anchor=512 is not read; remove it if it changes nothing"),
        ("qwen3-8b-eagle3", {"architectures": ["MyForCausalLMEagle3"]}, r"is a draft \(draft_vocab_size\) of architec"),
        ("converted (0.7)", _WITH_EXPERTS, "model_type='qwen3_moe': its layers are none of Llama, Qwen 2 and Qwen 3"),
    ],
)
def test_a_key_that_would_change_the_draft_is_refused_at_another_value(source, keys, said, tmp_path):
    _, target = written(changed(row_of(source), **keys), tmp_path / "draft")
    with pytest.raises(ModelError, match=said) as raised:
        specjax.load_drafter(tmp_path / "draft", target)
    assert "load_drafter" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("qwen3-8b-dflash", {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}),
        ("qwen3-8b-dflash", {"model_type": "qwen3_moe"}),
        ("qwen3-8b-dflash", {"model_type": "llama"}),
        ("qwen3-8b-dflash", {"num_anchors": 512, "loss_decay_gamma": 7.0, "attention_backend": "flex_attention"}),
        ("qwen3-8b-eagle3", {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "norm_topk_prob": True}),
        ("qwen3-8b-eagle3", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}),
        ("qwen3-8b-eagle3", {"temperature": 0.6, "top_p": 0.95, "num_beams": 1, "prefix": None, "pruned_heads": {}}),
        ("eagle3_qwen3_4b_ttt7", {"model_type": "qwen3_moe"}),
    ],
)
def test_keys_that_change_nothing_are_read_over(source, keys, tmp_path):
    row = row_of(source)
    _, target = written(row, tmp_path / "one")
    written(changed(row, **keys), tmp_path / "two")
    one, two = (specjax.load_drafter(tmp_path / name, target) for name in ("one", "two"))
    assert one.model.spec == two.model.spec  # pyright: ignore[reportAttributeAccessIssue]


def test_layers_that_are_numbered_in_either_of_two_ways_are_asked_for(tmp_path):
    """The first is 1 or the last is the target's own in one of them; of others it is not known."""
    row = changed(row_of("keys for gpt-oss"), eagle_config__eagle_aux_hidden_state_layer_ids=[5, 17, 29])
    _, target = written(row, tmp_path / "draft")
    with pytest.raises(ModelError, match=r"layer_ids=\[5, 17, 29\] are layers whose outputs are read, or whose inputs"):
        specjax.load_drafter(tmp_path / "draft", target)
    for reads in ([6, 18, 30], [5, 17, 29]):
        drafter: Any = specjax.load_drafter(tmp_path / "draft", target, kind={"kind": "eagle3", "reads": reads})
        assert list(drafter.model.spec.reads) == reads
    with pytest.raises(ModelError, match="ask for one"):
        specjax.load_drafter(tmp_path / "draft", target, kind={"kind": "eagle3", "reads": [1, 2, 3]})
    _, target = written(row_of("keys for gpt-oss"), tmp_path / "plain")
    with pytest.raises(ModelError, match="reads: the draft says it itself; leave it out"):
        specjax.load_drafter(tmp_path / "plain", target, kind={"kind": "eagle3", "reads": [2, 18, 33]})


def test_what_a_dspark_draft_begins_with_is_asked_for_where_it_does_not_say(tmp_path):
    """Its key is younger than the kind, and without it older drafts and later readers mean different slots."""
    old = row_of("from before its key")
    layers = {**old["config"]["transformer_layer_config"], "rope_parameters": {"rope_theta": 1e7}}
    row = {**changed(old, transformer_layer_config=layers), "reads": [9, 19, 29], "kind": "dspark"}
    _, target = written(row, tmp_path / "draft")
    tensors = safetensors.numpy.load_file(tmp_path / "draft/model.safetensors")
    tensors |= random({"lm_head.weight": (FEWER, H), "markov_head.markov_w2.weight": (FEWER, RANK)})
    safetensors.numpy.save_file(tensors, tmp_path / "draft/model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json: sample_from_anchor is missing: .* name what it was trained"):
        specjax.load_drafter(tmp_path / "draft", target)
    for asked in (True, False):
        kind = {"kind": "dspark", "sample_from_anchor": asked}
        drafter: Any = specjax.load_drafter(tmp_path / "draft", target, kind=kind)
        assert drafter.model.spec.from_root is asked
    file = tmp_path / "draft/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sample_from_anchor": False}))
    assert not specjax.load_drafter(tmp_path / "draft", target).model.spec.from_root  # pyright: ignore
    with pytest.raises(ModelError, match="sample_from_anchor=False, and True is asked for; leave it out"):
        specjax.load_drafter(tmp_path / "draft", target, kind={"kind": "dspark", "sample_from_anchor": True})


def test_a_draft_of_another_kind_is_no_separate_model(tmp_path):
    _, target = written(row_of("qwen3-8b-eagle3"), tmp_path / "draft")
    with pytest.raises(ModelError, match="is a eagle3 draft, no separate model; leave kind out, or name 'eagle3'"):
        specjax.load_drafter(tmp_path / "draft", target, kind="draft_model")


def test_the_streams_of_blocks_that_name_none_are_those_of_their_class(tmp_path):
    row = row_of("qwen3-8b-dflash")
    _, target = written(changed(row, dflash_config={"mask_token_id": 60}), tmp_path / "draft")
    drafter: Any = specjax.load_drafter(tmp_path / "draft", target)
    assert list(drafter.model.spec.reads) == row["reads"]  # evenly spread, they are
