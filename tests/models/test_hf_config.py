"""The config of a Hugging Face directory: every spelling read, every unknown setting refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import CONFIG_MAPPING

from specjax.errors import ModelError
from specjax.models.config import LayerKind
from specjax.models.families import FAMILIES, Settings
from specjax.models.hf import _read_eos_ids, load_model, save_model
from specjax.models.rotary import Rope
from tests.models.directories import change

ROPES = {
    "old": {"rope_theta": 500.0},
    "old, null scaling": {"rope_theta": 500.0, "rope_scaling": None},
    "new": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    "new, type left out": {"rope_parameters": {"rope_theta": 500.0}},
    "new beside old": {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    "new wins over top level": {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 500.0}},
    "old default scaling": {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
    "scaling replaces parameters": {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"rope_type": "default"}},
    "absent": {},
}


@pytest.mark.parametrize("spelling", ROPES)
def test_every_spelling_of_rotary_settings_is_read_as_transformers_reads_it(llama, spelling):
    from transformers import LlamaConfig

    path = llama.write(rope_theta=None)
    change(path / "config.json", **ROPES[spelling])
    theirs = LlamaConfig.from_pretrained(path).to_dict()["rope_parameters"]["rope_theta"]
    assert load_model(path).config.layers == (LayerKind(Rope(theirs)),)
    assert theirs == (500.0 if "500" in str(ROPES[spelling]) and "replaces" not in spelling else 10_000.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_scaling.type='mrope'"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 8.0}}, "rope_scaling.rope_type='proportional'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta=1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters.full_attention="),
        ({"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor=2.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"use_qk_norm": True}, "use_qk_norm=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"num_local_experts": 4}, "num_local_experts=4"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_is_not_implemented_is_refused_by_name_and_value(llama, settings, named):
    path = llama.write()
    change(path / "config.json", **settings)
    with pytest.raises(ModelError) as refused:
        load_model(path)
    assert named in str(refused.value)
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None, "pretraining_tp": 1, "quantization_config": None, "attention_dropout": 0.0},
        {"layer_types": ["full_attention", "full_attention"]},
        {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
    ids=str,
)
def test_an_inactive_setting_changes_nothing(llama, settings):
    path = llama.write()
    before = load_model(path)
    change(path / "config.json", **settings)
    assert load_model(path).config == before.config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "lama"}, "model_type='lama' is not implemented (nearest: llama); known are cohere, "),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 should be a positive int"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 should be at most 10,000"),
        ({"vocab_size": "37"}, "vocab_size='37' should be a positive int"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 should be a positive float"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' should be true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"eos_token_id": 37}, "eos_token_id=37 should be token ids in 0 .. 36"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_is_one_line_that_names_it(llama, settings, named):
    path = llama.write()
    change(path / "config.json", **settings)
    with pytest.raises(ModelError) as refused:
        load_model(path)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_absent_settings_take_the_defaults_of_transformers(llama):
    from transformers import LlamaConfig

    path = llama.write(num_key_value_heads=4)
    absent = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta", "tie_word_embeddings")
    config = {k: v for k, v in llama.config.items() if k not in absent}
    (path / "config.json").write_text(json.dumps(config))
    ours, theirs = load_model(path).config, LlamaConfig(**config)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim) == (4, 4)
    assert (ours.norm.eps, ours.max_positions) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (ours.ropes[0].theta, ours.tie_embeddings) == (
        theirs.to_dict()["rope_parameters"]["rope_theta"],
        theirs.tie_word_embeddings,
    )


def test_what_ends_a_text_where_no_file_says_so_is_what_transformers_takes():
    for name, family in FAMILIES.items():
        if name in CONFIG_MAPPING:
            theirs = CONFIG_MAPPING[name]()
            assert family.eos_id == getattr(theirs.get_text_config(), "eos_token_id", None), name


def test_a_default_that_the_vocabulary_does_not_have_ends_nothing(tmp_path):
    settings = Settings({}, "config.json")
    for eos_id, expected in ((36, (36,)), (37, ())):
        family = dataclasses.replace(FAMILIES["llama"], eos_id=eos_id)
        assert _read_eos_ids(tmp_path, {}, settings, family, 37) == expected


ABSENT = object()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [4, 9, 4]}, 3, (4, 9)),
        ({"eos_token_id": 0}, 3, (0,)),
        ({"temperature": 1.0}, 3, (3,)),
        (None, [3, 8], (3, 8)),
        (None, None, ()),
        ({"eos_token_id": None}, 3, ()),
        ({"eos_token_id": None}, ABSENT, ()),
        # Where neither file has the key, the family's: a Llama's is 2.
        (None, ABSENT, (2,)),
        ({"temperature": 1.0}, ABSENT, (2,)),
        ({"eos_token_id": 4}, ABSENT, (4,)),
    ],
)
def test_generation_stops_on_generation_config_and_falls_back_to_config(llama, tmp_path, generation, config, expected):
    path = llama.write(eos_token_id=None)  # leaves the key out
    if config is not ABSENT:
        change(path / "config.json", eos_token_id=config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    loaded = load_model(path)
    assert loaded.eos_ids == expected
    save_model(loaded, tmp_path / "copy")
    assert load_model(tmp_path / "copy").eos_ids == expected
