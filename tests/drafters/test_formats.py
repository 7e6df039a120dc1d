"""Stored forms of drafts that read hidden states: what is written is read again, bit for bit; layers are numbered as
each form numbers them; what contradicts itself, or another target, is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import os
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax import cli, config, formats
from specjax.drafters.eagle3 import Eagle3Model, Options
from specjax.drafters.features import LoadedDraft
from specjax.errors import ConfigError, ModelError
from specjax.formats import torch_file
from specjax.models import hf
from specjax.models import weights as weights_lib
from specjax.models.config import LayerKind
from specjax.models.families import FAMILIES, Settings
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.rotary import Rope
from specjax.models.transformer import Model
from specjax.training.init.first_weights import initial_draft
from tests.drafters import test_features
from tests.drafters.test_features import target_of
from tests.models.variants import VARIANTS
from tests.training import toys

KINDS = {
    ("speculators", "eagle3"): "two_layers",
    ("speculators", "p_eagle"): "p_eagle",
    ("speculators", "mtp"): "mtp",
    ("speculators", "dflash"): "dflash_windows",
    ("speculators", "dflash2"): "dflash2",
    ("speculators", "dspark"): "dspark_fewer_ids",
    ("sglang", "eagle3"): "sglang",
    ("z-lab", "dflash"): "dflash",
    ("z-lab", "dflash2"): "dflash2_scaled",
    ("deepspec", "dspark"): "dspark_confident",
    ("medusa", "medusa"): "medusa_own_heads",
    ("specjax", "early_exit"): "early_exit",
    ("specjax", "mtp"): "mtp_other_norms",
    ("specjax", "dflash"): "dflash_other_windows",
    ("specjax", "dflash2"): "dflash2_scaled",
    ("specjax", "eagle3"): "fewer_ids",
}
STREAMS = {"sglang": (1, 2, 3), "z-lab": (1, 3), "deepspec": (1, 3)}
NORMED = ("mtp", "dflash", "dflash2", "dspark")
"""Kinds that other projects know with norms of queries and keys alone."""


def draft(name: str, target: LoadedModel, normed: bool = False) -> LoadedDraft:
    """``normed``: with norms of queries and keys."""
    if name == "sglang":
        sizes = dataclasses.replace(target.config, num_layers=1, layers=(LayerKind(Rope()),), tie_embeddings=False)
        spec: Any = Eagle3Model(
            sizes, STREAMS["sglang"], sizes.hidden_size, options=Options(norm_before_residual=False)
        )
        return LoadedDraft(spec, test_features.random_params(spec))
    trained, _ = test_features.made(name, target)
    config = dataclasses.replace(trained.model.config, tie_embeddings=False, qk_norm="head" if normed else "none")
    # One kind of layer is written once.
    config = dataclasses.replace(config, layers=config.layers[:1] if len(set(config.layers)) == 1 else config.layers)
    spec = dataclasses.replace(trained.model, config=config)
    return LoadedDraft(spec, test_features.random_params(spec))


def files(directory: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in directory.iterdir() if file.name not in ("README.md", "SHA256SUMS")
    }


@pytest.mark.parametrize(("form", "kind"), KINDS)
def test_what_is_written_is_read_again_and_written_the_same(form, kind, tmp_path):
    target = target_of()
    made = draft(KINDS[form, kind], target, kind in NORMED and form != "specjax")
    formats.save(made, kind, tmp_path / "one", target="t", form_name=form)
    settings = json.loads((tmp_path / "one/config.json").read_text())
    del settings["specjax_drafter"]  # as others write it
    (tmp_path / "one/config.json").write_text(json.dumps(settings))
    (tmp_path / "one/SHA256SUMS").unlink()
    drafter: Any = specjax.load_drafter(tmp_path / "one", target, k=2)
    assert drafter.kind == kind
    assert drafter.model.spec == made.spec
    for name, value in drafter.model.params.items():
        np.testing.assert_equal(np.asarray(leaves(value)), np.asarray(leaves(made.params[name])))
    again = LoadedDraft(drafter.model.spec, {**made.params, **drafter.model.params})
    formats.save(again, kind, tmp_path / "two", target="t", form_name=form)
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert {n: x for n, x in one.items() if n != "config.json"} == {n: x for n, x in two.items() if n != "config.json"}


def leaves(tree: Any) -> Any:
    import jax

    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize(("form", "kind"), [key for key in KINDS if key[0] in STREAMS])
def test_layers_are_numbered_from_the_first_ones_output_elsewhere(form, kind, tmp_path):
    target = target_of()
    made = draft(KINDS[form, kind], target, kind in NORMED)
    formats.save(made, kind, tmp_path / "draft", target="t", form_name=form)
    settings = json.loads((tmp_path / "draft/config.json").read_text())
    own = settings.get("eagle_config", settings.get("dflash_config", settings))
    ids = own.get("target_layer_ids", own.get("eagle_aux_hidden_state_layer_ids"))
    assert ids == [i - 1 for i in STREAMS[form]]
    tensors = safetensors.numpy.load_file(tmp_path / "draft/model.safetensors")
    assert ("embed_tokens.weight" in tensors) == (form == "deepspec")
    if form == "sglang":
        assert "midlayer.hidden_norm.weight" in tensors
        assert tensors["t2d"].all()
        assert not tensors["d2t"].any()


def test_offsets_of_a_draft_vocabulary_are_stored(tmp_path):
    target = target_of()
    formats.save(draft("fewer_ids", target), "eagle3", tmp_path / "draft", target="t")
    tensors = safetensors.numpy.load_file(tmp_path / "draft/model.safetensors")
    ids = test_features.FEWER.ids
    np.testing.assert_array_equal(tensors["d2t"], ids - np.arange(len(ids)))
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)
    assert tensors["lm_head.weight"].shape[0] == len(ids)


_LAYERS = "transformer_layer_config"


def changed(directory: Path, settings: Any = None, **tensors: Any) -> None:
    file = directory / "config.json"
    told, settings = json.loads(file.read_text()), dict(settings or {})
    layers = {**told.get(_LAYERS, {}), **(settings.pop(_LAYERS, None) or {})}
    file.write_text(json.dumps({**told, **settings, **({_LAYERS: layers} if layers else {})}))
    if tensors:
        weights = directory / "model.safetensors"
        safetensors.numpy.save_file({**safetensors.numpy.load_file(weights), **tensors}, weights)
    (directory / "SHA256SUMS").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("settings", "tensors", "said"),
    [
        ({"draft_vocab_size": 7}, {}, "d2t has 8 ids, and draft_vocab_size is 7"),
        (
            {},
            {"d2t": np.asarray([0, 0, 2, 4, 5, 15, 27, 500])},
            r"d2t: ids of 0 \.\. 60 are to be named; they are offs",
        ),
        ({}, {"t2d": np.zeros(61, bool)}, "d2t and t2d name different ids"),
        ({"norm_output": 1}, {}, "norm_output=1, expected bool"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, {}, "eagle_aux_hidden_state_layer_ids='all', expected a list"),
        (
            {"speculators_model_type": "xpress", "specjax_drafter": None},
            {},
            "speculators_model_type='xpress' is not read",
        ),
        ({}, {"extra.weight": np.zeros(3, np.float32)}, r"unexpected: extra\.weight"),
        ({"norm_before_residuals": False}, {}, "norm_before_residuals=False is not read; remove it if it changes noth"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, "norm_before_fc=True, fc_norm=True: norms of the same layers"),
        ({"specjax_shared": None, "specjax_drafter": "os:Code"}, {}, "specjax_drafter='os:Code' is no kind of ours"),
        ({"specjax_shared": [1]}, {}, r"specjax_shared=\[1\], expected a list of names"),
        ({"speculators_model_type": ["eagle3"], "specjax_drafter": None}, {}, r"=\['eagle3'\] is not read"),
        ({"draft_vocab_size": -8}, {}, "draft_vocab_size=-8, expected at least 1"),
        (
            {"transformer_layer_config": {"vocab_size": 10**12}},
            {},
            "vocab_size=1000000000000, expected at most 16777216",
        ),
        ({"target_hidden_size": 0}, {}, "target_hidden_size=0, expected at least 1"),
        ({}, {"d2t": np.asarray([0.4] * 8)}, r"d2t is float64\[8\]; expected a row of ids"),
        ({}, {"d2t": np.asarray(3)}, r"d2t is int64\[\]; expected a row of ids"),
        ({}, {"d2t": np.asarray([2**32, 2**32, 2**32, *[2**32 + 9] * 5])}, "d2t: ids of 0"),
        ({}, {"t2d": 2 * test_features.FEWER.mask.astype(np.int8)}, "d2t and t2d name different ids"),
        ({"speculators_config": {"algorithm": "dflash"}}, {}, "algorithm='dflash', and the draft is 'eagle3'"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, tensors, said, tmp_path):
    target = target_of()
    formats.save(draft("fewer_ids", target), "eagle3", tmp_path / "draft", target="t")
    changed(tmp_path / "draft", settings, **tensors)
    with pytest.raises(ModelError, match=said):
        specjax.load_drafter(tmp_path / "draft", target)


@pytest.mark.parametrize(
    ("name", "kind", "form", "said"),
    [
        (
            "published",
            "eagle3",
            "sglang",
            r"sglang: cannot say norm_before_residual \(draft\.norm_before_residual: false tr",
        ),
        (
            "dspark",
            "dspark",
            "z-lab",
            "format 'z-lab': has no dspark drafts; of those that have: speculators, deepspec",
        ),
        ("dspark_rnn", "dspark", "deepspec", "deepspec: cannot say slots that predict their own token"),
        ("dspark_confident", "dspark", "deepspec", "deepspec: cannot say layers without norms of queries and keys"),
        ("dflash", "dflash", "z-lab", "z-lab: cannot say layers without norms of queries and keys"),
        ("dflash", "dflash", "speculators", r"no words for layers without norms of .* \(draft\.qk_norm: true\); spec"),
        ("dflash_other_windows", "dflash", "speculators", "no words for layers without norms of queries"),
        ("mtp", "mtp", "speculators", "no words for a head whose layer is not Qwen 3's"),
        ("mtp_other_norms", "mtp", "speculators", r"no words for the norms of its state \(post\) and of what it rec"),
    ],
)
def test_a_form_without_the_words_says_so(name, kind, form, said, tmp_path):
    with pytest.raises(ModelError, match=said):
        formats.save(draft(name, target_of()), kind, tmp_path / "draft", target="t", form_name=form)
    assert not (tmp_path / "draft").exists()


def test_another_target_is_refused(tmp_path):
    target = target_of()
    formats.save(draft("dflash", target), "dflash", tmp_path / "draft", target="t")
    drafter = specjax.load_drafter(tmp_path / "draft", target)
    for change, said in (({"hidden_size": 64, "head_dim": 8}, "hidden_size"), ({"vocab_size": 62}, "vocab_size=61")):
        with pytest.raises(ModelError, match=f"dflash: reads a target of {said}"):
            drafter.bind(target_of(**change))


OTHERS = {"target_layer_ids": [0, 2], "mask_token_id": 60}


@pytest.mark.parametrize(
    ("form", "settings", "said"),
    [
        ("z-lab", {"dflash_config": {**OTHERS, "output_bias": 3}}, "output_bias=3 is not read"),
        (
            "z-lab",
            {"dflash_config": {**OTHERS, "mask_token_id": 61}},
            "mask_token_id=61, and the vocabulary has 61",
        ),
        ("z-lab", {"num_target_layers": 5}, "num_target_layers=5, and the target has 3 layers"),
        ("z-lab", {"block_size": 1}, "block_size=1, expected at least 2"),
        ("z-lab", {"block_size": 10**12}, "block_size=1000000000000, expected at most 1024"),
        (
            "z-lab",
            {"block_size": 5, "dflash_config": {**OTHERS, "block_size": 3}},
            "block_size=5, and 3 in dflash_config",
        ),
        *(
            ("z-lab", {"dflash_config": {**OTHERS, name: value}}, f"{name}={value}, expected a finite number above 0")
            for name, value in (
                ("output_multiplier", 0.0),
                ("input_embedding_scale", float("nan")),
                ("final_logit_softcapping", -1.0),
            )
        ),
        ("deepspec", {"markov_rank": -1}, "markov_rank=-1, expected at least 0"),
        ("deepspec", {"layer_norms": True}, "layer_norms=True is not read"),
        (
            "sglang",
            {"norm_before_residual": True},
            "norm_before_residual=True, which drafts of this form",
        ),
        ("sglang", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"layer_ids=\[1, 2, 3\] is not read"),
        ("sglang", {"eagle_config": {"aux_ids": [1]}}, r"aux_ids=\[1\] is not read"),
        ("sglang", {"norm_output": False}, "norm_output=False is not read"),
        ("medusa", {"medusa_num_layers": 0}, "medusa_num_layers=0, expected at least 1"),
        ("medusa", {"medusa_num_layers": 10**12}, "medusa_num_layers=1000000000000, expected at most 64"),
        ("medusa", {"vocab_size": 62}, "medusa: reads a target of vocab_size=62, and this one has 61"),
        ("specjax", {"adapter": "wide"}, "adapter='wide', expected int"),
    ],
)
def test_what_a_form_does_not_say_so_is_refused(form, settings, said, tmp_path):
    target, kind = target_of(), next(kind for name, kind in KINDS if name == form)
    made = draft(KINDS[form, kind], target, kind in NORMED)
    formats.save(made, kind, tmp_path / "draft", target="t", form_name=form)
    changed(tmp_path / "draft", {**settings, "specjax_drafter": None})
    with pytest.raises(ModelError, match=said):
        specjax.load_drafter(tmp_path / "draft", target)


def test_ids_that_are_left_out_must_be_said(tmp_path):
    """A whole vocabulary has no d2t; a selector looks its candidates up among all ids."""
    target = target_of()
    formats.save(draft("published", target), "eagle3", tmp_path / "whole", target="t")
    changed(tmp_path / "whole", t2d=np.zeros(61, bool))
    with pytest.raises(ModelError, match="t2d leaves ids out, and no d2t says which"):
        specjax.load_drafter(tmp_path / "whole", target)
    formats.save(draft("dflash2_scaled", target, True), "dflash2", tmp_path / "fewer", target="t", form_name="z-lab")
    ids = test_features.FEWER.ids
    tables = {"d2t": ids - np.arange(len(ids)), "t2d": test_features.FEWER.mask}
    changed(tmp_path / "fewer", {"draft_vocab_size": len(ids)}, **tables)
    with pytest.raises(ModelError, match="draft_vocab_size=8; a dflash2 draft chooses among all ids"):
        specjax.load_drafter(tmp_path / "fewer", target)


def test_streams_that_a_shallow_target_has_not_are_refused(tmp_path):
    """The published default is counted from the last layer."""
    target = target_of(num_layers=2)
    formats.save(draft("published", target), "eagle3", tmp_path / "draft", target="t")
    changed(tmp_path / "draft", {"eagle_aux_hidden_state_layer_ids": None})
    with pytest.raises(ModelError, match="eagle3: names no streams, and a target of 2 layers has not those that"):
        specjax.load_drafter(tmp_path / "draft", target, k=2).bind(target)


def test_norms_that_are_named_are_those_that_a_head_is_read_with(tmp_path):
    """What is not named is as the draft says, whatever the default."""
    target = target_of()
    formats.save(draft("mtp_other_norms", target), "mtp", tmp_path / "draft", target="t", form_name="specjax")

    def read(**named: str) -> tuple[str, ...]:
        drafter: Any = specjax.load_drafter(tmp_path / "draft", target, kind={"kind": "mtp", **named})
        return dataclasses.astuple(drafter.model.spec.options)

    stored = read()
    assert stored != ("pre", "post")
    for place, (name, default) in enumerate((("state", "pre"), ("recycled", "post"))):
        for norms in ("pre", "post", default):
            assert read(**{name: norms}) == (*stored[:place], norms, *stored[place + 1 :])


def test_what_a_draft_says_of_itself_is_not_asked_for(tmp_path):
    target = target_of()
    formats.save(draft("published", target), "eagle3", tmp_path / "draft", target="t")
    specjax.load_drafter(tmp_path / "draft", target, kind={"kind": "eagle3", "depths": 2})
    with pytest.raises(ConfigError, match=r"load_drafter: kind\.layers: the draft in .* has its own; leave it out"):
        specjax.load_drafter(tmp_path / "draft", target, kind={"kind": "eagle3", "layers": 2})


def test_without_a_length_a_draft_proposes_what_it_can(tmp_path):
    target = target_of()
    for kind, name, most in (("medusa", "medusa", 3), ("eagle3", "published", 5)):
        formats.save(draft(name, target), kind, tmp_path / kind, target="t")
        drafter: Any = specjax.load_drafter(tmp_path / kind, target)
        assert drafter.k == min(5, drafter.longest or most)
        drafter.bind(target)


def test_drafts_of_others_are_no_models_and_links_lead_nowhere(tmp_path):
    target = target_of()
    for form, kind in (("speculators", "eagle3"), ("sglang", "eagle3"), ("z-lab", "dflash"), ("medusa", "medusa")):
        made = draft(KINDS[form, kind], target, kind in NORMED)
        formats.save(made, kind, tmp_path / form, target="t", form_name=form)
        changed(tmp_path / form, {"specjax_drafter": None})
        with pytest.raises(ModelError, match=r"is a draft, no model; specjax\.load_drafter\(DIRECTORY, target\)"):
            load_model(tmp_path / form)
    weights = tmp_path / "sglang/model.safetensors"
    weights.rename(tmp_path / "outside.safetensors")
    weights.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(ModelError, match=r"is a link to .*, outside the model directory"):
        specjax.load_drafter(tmp_path / "sglang", target)


def test_a_draft_of_the_last_stream_is_of_a_target_of_as_many_layers(tmp_path):
    """One of more layers has a stream of that number, and it is not what was trained on."""
    for kind, name in (("mtp", "mtp"), ("medusa", "medusa")):
        formats.save(draft(name, target_of()), kind, tmp_path / kind, target="t")
        drafter = specjax.load_drafter(tmp_path / kind, target_of(), k=2)
        if kind == "mtp":
            with pytest.raises(ModelError, match="mtp: reads the last stream of a target of 3 layers, and this one"):
                drafter.bind(target_of(num_layers=4))


def test_published_defaults_are_those_of_the_library(tmp_path):
    """Windows of Llama's layers, no list of streams, nothing of what is null: as its trainer writes them."""
    target = target_of(num_layers=7)
    made = draft("published", target)
    windowed = dataclasses.replace(made.spec.config, layers=(LayerKind(Rope(), window=5),))
    spec = dataclasses.replace(made.spec, config=windowed, reads=(2, 3, 4))
    formats.save(LoadedDraft(spec, made.params), "eagle3", tmp_path / "draft", target="t")
    told = json.loads((tmp_path / "draft/config.json").read_text())
    assert told["transformer_layer_config"]["layer_types"] == ["sliding_attention"]
    library = {"speculators_version": "0.9.0", "embed_requires_grad": False, "auto_map": {"": "config.Config"}}
    library |= {"eagle_aux_hidden_state_layer_ids": None, "target_hidden_size": None, "specjax_drafter": None}
    inner = {"use_sliding_window": True, "pretraining_tp": 1, "attention_dropout": 0.0, "use_cache": True}
    library["transformer_layer_config"] = {**told["transformer_layer_config"], **inner}
    changed(tmp_path / "draft", library)
    drafter: Any = specjax.load_drafter(tmp_path / "draft", target, k=2)
    assert drafter.model.spec == spec


def test_a_confidence_that_a_stored_draft_has_no_head_for_is_refused(tmp_path):
    target = target_of()
    formats.save(draft("dspark", target), "dspark", tmp_path / "draft", target="t", form_name="specjax")
    section = config.Draft(kind="dspark", init=str(tmp_path / "draft"), settings={"confidence": 0.5})
    run = config.RunConfig(config.Target(path="x"), config.Data(path="x", seq_len=8), section)
    with pytest.raises(
        ConfigError, match=r"draft\.confidence: the draft that draft\.init names has no such head; leave"
    ):
        initial_draft(run, target, toys.Windows(np.zeros((4, 9), np.int32)))


def test_a_draft_in_several_files_is_read_and_a_broken_one_named(tmp_path, monkeypatch):
    target = target_of()
    with monkeypatch.context() as patch:
        patch.setattr(hf, "MAX_SHARD_BYTES", 4000)
        formats.save(draft("fewer_ids", target), "eagle3", tmp_path / "draft", target="t")
    assert len([*(tmp_path / "draft").glob("*.safetensors")]) > 1
    index = (tmp_path / "draft" / weights_lib.INDEX).read_bytes()
    changed(tmp_path / "draft")
    (tmp_path / "draft" / weights_lib.INDEX).unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        specjax.load_drafter(tmp_path / "draft", target)
    (tmp_path / "draft" / weights_lib.INDEX).write_bytes(index)
    drafter: Any = specjax.load_drafter(tmp_path / "draft", target, k=2)
    assert drafter.model.spec.vocabulary == test_features.FEWER
    formats.save(draft("fewer_ids", target), "eagle3", tmp_path / "draft", target="t")
    changed(tmp_path / "draft")
    weights = tmp_path / "draft/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or not a safetensors file"):
        specjax.load_drafter(tmp_path / "draft", target)


@pytest.mark.parametrize("other", ["sglang", "specjax"])
def test_a_draft_is_exported_in_another_form_and_back(other, tiny_target, tmp_path, capsys, monkeypatch):
    """Ends that the other form leaves out are the target's again."""
    save_model(dataclasses.replace(tiny_target, eos_ids=(0,)), tmp_path / "target")
    config = tiny_target.config
    sizes = dataclasses.replace(config, num_layers=1, layers=config.layers[:1], tie_embeddings=False)
    spec = Eagle3Model(sizes, (1, 2), config.hidden_size, options=Options(norm_before_residual=False))
    params = {**test_features.random_params(spec), "embedding": tiny_target.params["embedding"]}
    made = LoadedDraft(spec, params)
    card = f"---\nlibrary_name: speculators\n---\n\n# draft\n\n{formats.readers_of('speculators')}\n"
    formats.save(made, "eagle3", tmp_path / "draft", target="t", shared=("embedding",), card=card)
    for form, source, out in ((other, "draft", "other"), ("speculators", "other", "back")):
        cli_args = ["export", str(tmp_path / source), str(tmp_path / out), "--format", form]
        monkeypatch.setattr("sys.argv", ["specjax", *cli_args, "--target", str(tmp_path / "target")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None)
        assert f"eagle3 draft, as {form}" in capsys.readouterr().out
    one, small, two = (
        safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("draft", "other", "back")
    )
    assert one.keys() == two.keys() != small.keys()
    assert "embed_tokens.weight" not in small
    told = (tmp_path / "other/README.md").read_text()
    assert "library_name: specjax\n" in told
    assert formats.readers_of(other) in told
    assert (tmp_path / "back/README.md").read_text() == card
    if other == "specjax":
        lost = tmp_path / "other"
        settings = json.loads((lost / "config.json").read_text())
        (lost / "config.json").write_text(json.dumps({**settings, "specjax_shared": []}))
        (lost / "SHA256SUMS").unlink()
        with pytest.raises(ModelError, match="lacks embedding, and specjax_shared does not name it"):
            specjax.load_drafter(lost, tiny_target, k=2)
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name])


def test_the_head_that_comes_with_a_checkpoint_is_read_beside_it(tmp_path):
    """Its projection reads state and token, ours token and state; elsewhere its tensors are those of a Qwen 2 layer."""
    settings = {**VARIANTS["mimo"], "tie_word_embeddings": False}
    spec = Model(FAMILIES["mimo"].read_config(Settings(settings, "config.json")))
    target = LoadedModel(spec, jax.jit(spec.init)(jax.random.key(0)))
    save_model(dataclasses.replace(target, family="mimo"), tmp_path / "target")
    file = tmp_path / "target/config.json"
    config = json.loads(file.read_text())
    layer = safetensors.numpy.load_file(tmp_path / "target/model.safetensors")
    head = {n.replace("model.layers.3.", "model.mtp_layers.0."): x * 1.25 for n, x in layer.items() if "layers.3." in n}
    size, draws = config["hidden_size"], np.random.default_rng(0)
    projection = draws.normal(size=(size, 2 * size)).astype(np.float32) * size**-0.5
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    head |= {f"model.mtp_layers.0.{n}.weight": np.ones(size, np.float32) for n in norms}
    head["model.mtp_layers.0.input_proj.weight"] = projection
    changed(tmp_path / "target", {"num_nextn_predict_layers": 1}, **head)
    found = load_model(tmp_path / "target")
    drafter: Any = specjax.load_drafter(tmp_path / "target", found, k=2)
    assert drafter.kind == "mtp"
    assert drafter.model.spec.reads == (4,)
    kernel = np.asarray(drafter.model.params["fc"]["kernel"]).T
    np.testing.assert_array_equal(kernel, np.concatenate([projection[:, size:], projection[:, :size]], axis=1))
    mlp = drafter.model.params["layers"][0]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(mlp, head["model.mtp_layers.0.mlp.up_proj.weight"].T)
    plain = specjax.Decoder(found).generate([[1, 2, 3]], max_new_tokens=8).tokens
    assert specjax.Decoder(found, drafter).generate([[1, 2, 3]], max_new_tokens=8).tokens == plain
    with pytest.raises(ModelError, match="speculators: has no words for a head whose layer is not Qwen 3's"):
        formats.convert(tmp_path / "target", tmp_path / "head", found, "speculators")
    formats.convert(tmp_path / "target", tmp_path / "head", found, "specjax")
    fed_after: Any = specjax.load_drafter(tmp_path / "target", found, k=2, kind={"kind": "mtp", "state": "post"})
    assert fed_after.model.spec.options.state == "post"
    again: Any = specjax.load_drafter(tmp_path / "head", found, k=2)
    np.testing.assert_array_equal(again.model.params["fc"]["kernel"], drafter.model.params["fc"]["kernel"])
    with pytest.raises(ModelError, match="format 'native': has no mtp drafts"):
        formats.convert(tmp_path / "head", tmp_path / "again", found, "native")
    changed(tmp_path / "target", {"num_nextn_predict_layers": 2})
    with pytest.raises(ModelError, match="num_nextn_predict_layers=2; only a single head is read"):
        specjax.load_drafter(tmp_path / "target", found)


class Torch:
    """Names that a file of torch's asks for, importable while it is written."""

    def __init__(self, patch: pytest.MonkeyPatch):
        torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

        def rebuild(*args: Any) -> None: ...

        rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
        utils._rebuild_tensor_v2 = self._rebuild = rebuild  # pyright: ignore[reportAttributeAccessIssue]
        self._storage = type("FloatStorage", (), {"__module__": "torch"})
        torch.FloatStorage = self._storage  # pyright: ignore[reportAttributeAccessIssue]
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)

    def save(self, tensors: dict[str, Any], file: Path) -> None:
        """Arrays as torch.save writes them; anything else as it pickles."""
        storages: list[np.ndarray] = []

        class Pickler(pickle.Pickler):
            def persistent_id(writer, obj: Any) -> Any:
                return (
                    ("storage", self._storage, *obj[1:]) if isinstance(obj, tuple) and obj[:1] == ("storage",) else None
                )

            def reducer_override(writer, obj: Any) -> Any:
                if not isinstance(obj, np.ndarray):
                    return NotImplemented
                storages.append(obj)
                storage = ("storage", str(len(storages) - 1), "cpu", obj.size)
                return self._rebuild, (storage, 0, obj.shape, tuple(s // 4 for s in obj.strides), False, None)

        stream = io.BytesIO()
        Pickler(stream, protocol=2).dump(collections.OrderedDict(tensors))
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("draft/data.pkl", stream.getvalue())
            for i, storage in enumerate(storages):
                archive.writestr(f"draft/data/{i}", np.ascontiguousarray(storage).tobytes())


def test_a_file_of_torch_is_read_without_torch_and_without_running_it(tmp_path, monkeypatch):
    target = target_of()
    made = draft("medusa_own_heads", target)
    formats.save(made, "medusa", tmp_path / "draft", target="t")
    weights = tmp_path / "draft/medusa_lm_head.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    weights.unlink()
    published = weights.with_suffix(".pt")
    published.unlink()
    changed(tmp_path / "draft")
    with pytest.raises(ModelError, match=r"holds neither medusa_lm_head\.safetensors nor medusa_lm_head\.pt"):
        specjax.load_drafter(tmp_path / "draft", target)
    with monkeypatch.context() as patch:
        Torch(patch).save(tensors, published)
        Torch(patch).save({"0.0.linear.weight": os.getcwd}, tmp_path / "code.pt")
    drafter: Any = specjax.load_drafter(tmp_path / "draft", target, k=2)
    np.testing.assert_array_equal(
        leaves(drafter.model.params), leaves({n: made.params[n] for n in drafter.model.params})
    )
    with pytest.raises(ModelError, match=r"it asks for posix\.getcwd\), and nothing else is unpickled"):
        torch_file.read_tensors(tmp_path / "code.pt")
    (tmp_path / "none.pt").write_bytes(b"none")
    with pytest.raises(ModelError, match="is no plain dict of tensors"):
        torch_file.read_tensors(tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("offset", "size", "stride"), [(3, (2,), (1,)), (0, (2, 2), (2, 3)), (0, (2,), (-1,)), (0, (9, 9), (0, 0))]
)
def test_a_tensor_outside_of_its_storage_is_refused(offset, size, stride):
    with pytest.raises(ValueError, match="outside of its storage"):
        torch_file._made(np.zeros(4, np.float32), offset, size, stride)
    np.testing.assert_array_equal(torch_file._made(np.arange(4.0), 0, (2, 2), (1, 2)), [[0, 2], [1, 3]])


def test_what_a_file_is_handed_it_cannot_change(tmp_path, monkeypatch):
    """The state that it would set of a dtype, every later bfloat16 of the process would have."""
    with monkeypatch.context() as patch:
        Torch(patch)

        class Changed:
            def __reduce__(self) -> Any:
                return collections.OrderedDict, (), {"values": None}

        class BFloat16:
            def __reduce__(self) -> Any:
                return sys.modules["torch"].FloatStorage, ()

        for name, obj in (("shadowed", Changed()), ("called", BFloat16())):
            with zipfile.ZipFile(tmp_path / f"{name}.pt", "w") as archive:
                archive.writestr("draft/data.pkl", pickle.dumps(obj, protocol=2))
    assert torch_file.read_tensors(tmp_path / "shadowed.pt") == {}
    with pytest.raises(ModelError, match="is no plain dict of tensors"):
        torch_file.read_tensors(tmp_path / "called.pt")


SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "architectures"),
)
READ_BY_THEIR_CLASS = {
    ("sglang", "eagle3"): (*SIZES, "draft_vocab_size", "target_hidden_size", "eagle_config"),
    ("z-lab", "dflash"): (*SIZES, "num_target_layers", "block_size", "dflash_config", "attention_bias", "layer_types"),
    ("z-lab", "dflash2"): (*SIZES, "num_target_layers", "block_size", "dflash_config", "attention_bias", "layer_types"),
    ("deepspec", "dspark"): (
        *(*SIZES, "target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank"),
        *("markov_head_type", "confidence_head_with_markov", "block_size", "num_target_layers", "attention_bias"),
    ),
    ("deepspec", "dflash"): (
        *(*SIZES, "target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank"),
        *("block_size", "num_target_layers", "attention_bias"),
    ),
    ("deepspec", "eagle3"): (
        *(*SIZES, "target_layer_ids", "ttt_length", "step_loss_decay", "num_target_layers", "attention_bias"),
    ),
    ("medusa", "medusa"): ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"),
}
"""Attributes that each project's own class takes from its config without asking whether they are there."""


def normed_eagle3(target: LoadedModel) -> LoadedDraft:
    """As DeepSpec's class computes it, which reads the embeddings as any other stream."""
    made = draft("sglang", target)
    config = dataclasses.replace(made.spec.config, qk_norm="head")
    spec = dataclasses.replace(made.spec, config=config, reads=(0, 1, 3))
    return LoadedDraft(spec, test_features.random_params(spec))


@pytest.mark.parametrize(("form", "kind"), READ_BY_THEIR_CLASS)
def test_what_is_written_has_all_that_their_own_class_reads(form, kind, tmp_path):
    target = target_of()
    if (form, kind) == ("deepspec", "eagle3"):
        made = normed_eagle3(target)
    elif (form, kind) == ("deepspec", "dflash"):
        made = draft("dflash", target, True)
        made = LoadedDraft(dataclasses.replace(made.spec, from_root=True), made.params)
    else:
        made = draft(KINDS[form, kind], target, kind in NORMED)
    formats.save(made, kind, tmp_path / "draft", target="t", target_layers=3, form_name=form)
    settings = json.loads((tmp_path / "draft/config.json").read_text())
    wanted = READ_BY_THEIR_CLASS[form, kind]
    assert [name for name in wanted if settings.get(name) is None] == []
    if "num_target_layers" in wanted:
        assert settings["num_target_layers"] == 3
    del settings["specjax_drafter"]  # as others write it
    (tmp_path / "draft/config.json").write_text(json.dumps(settings))
    (tmp_path / "draft/SHA256SUMS").unlink()
    drafter: Any = specjax.load_drafter(tmp_path / "draft", target, k=2)
    assert (drafter.kind, drafter.model.spec) == (kind, made.spec)


def test_an_export_says_how_many_layers_its_target_has(tiny_target, tmp_path):
    """No draft knows by itself: here it reads none of the last."""
    config = tiny_target.config
    sizes = dataclasses.replace(config, num_layers=1, layers=config.layers[:1], tie_embeddings=False, qk_norm="head")
    made = draft("dflash", tiny_target, True)
    spec = dataclasses.replace(made.spec, config=sizes, reads=(1,))
    formats.save(LoadedDraft(spec, test_features.random_params(spec)), "dflash", tmp_path / "draft", target="t")
    formats.convert(tmp_path / "draft", tmp_path / "z-lab", tiny_target, "z-lab")
    settings = json.loads((tmp_path / "z-lab/config.json").read_text())
    assert settings["num_target_layers"] == config.num_layers > 1


@pytest.mark.parametrize("own_heads", [True, False])
def test_an_export_is_found_by_medusas_own_loader(own_heads, tmp_path):
    """It reads one file of torch's, and of a projection that is not there it has random numbers."""
    target = target_of()
    made = draft("medusa_own_heads" if own_heads else "medusa", target)
    formats.save(made, "medusa", tmp_path / "draft", target="t")
    found = torch_file.read_tensors(tmp_path / "draft/medusa_lm_head.pt")
    spec: Any = made.spec
    heads = made.params["heads"]
    for i in range(spec.heads):
        for j in range(spec.blocks):
            kernel = heads[i]["blocks"][j]["kernel"]
            np.testing.assert_array_equal(found[f"{i}.{j}.linear.weight"], np.asarray(kernel).T)
        projection = heads[i]["head"] if own_heads else made.params["head"]
        np.testing.assert_array_equal(found[f"{i}.{spec.blocks}.weight"], np.asarray(projection["kernel"]).T)
    assert len(found) == spec.heads * (2 * spec.blocks + 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_])
def test_a_file_for_torch_is_read_again(dtype, tmp_path):
    array = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    torch_file.write_tensors(tmp_path / "a.pt", {"a.b": array, "again": array, "c": np.zeros((), dtype)})
    found = torch_file.read_tensors(tmp_path / "a.pt")
    assert found.keys() == {"a.b", "again", "c"} == torch_file.tensor_names(tmp_path / "a.pt")
    for name in ("a.b", "again"):
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], array)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert [n for n in archive.namelist() if "/data/" in n] == ["archive/data/0", "archive/data/1"]  # stored once


@pytest.mark.parametrize(("form", "kind"), [("speculators", "eagle3"), ("sglang", "eagle3"), ("z-lab", "dflash")])
def test_a_draft_in_a_file_of_torch_is_read(form, kind, tmp_path):
    """What is wrong with it is told of that file."""
    target = target_of()
    name = "fewer_ids" if form == "speculators" else KINDS[form, kind]
    made = draft(name, target, kind in NORMED)
    formats.save(made, kind, tmp_path / "draft", target="t", form_name=form)
    weights = tmp_path / "draft/model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    weights.unlink()
    changed(tmp_path / "draft")
    torch_file.write_tensors(tmp_path / "draft/pytorch_model.bin", tensors)
    drafter: Any = specjax.load_drafter(tmp_path / "draft", target, k=2)
    assert drafter.model.spec == made.spec
    formats.convert(tmp_path / "draft", tmp_path / "again", target, form)
    np.testing.assert_equal(safetensors.numpy.load_file(tmp_path / "again/model.safetensors"), tensors)
    torch_file.write_tensors(tmp_path / "draft/pytorch_model.bin", {**tensors, "extra": tensors["fc.weight"]})
    with pytest.raises(ModelError, match=r"draft: the tensors do not fit config\.json; missing: none; unexp"):
        specjax.load_drafter(tmp_path / "draft", target)
    torch_file.write_tensors(tmp_path / "draft/pytorch_model.bin", {**tensors, "fc.weight": tensors["fc.weight"][:1]})
    with pytest.raises(ModelError, match=r"fc\.weight"):
        specjax.load_drafter(tmp_path / "draft", target)
