"""Separate and glide drafts of fewer ids: a narrow head computes what the whole one does, proposes no other id, and is
trained, stored and read as such."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import config
from specjax.drafters.glide import Glide, LoadedGlide
from specjax.errors import ConfigError, ModelError
from specjax.models import kernels
from specjax.models.decode_layout import DecodeLayout
from specjax.models.hf import LoadedModel, load_model, quantize_model, save_model
from specjax.models.vocabulary import NEVER, DraftVocabulary
from specjax.training.init.first_weights import initial_draft
from tests.cases import transformer
from tests.drafters.test_glide import glide_of, target_of
from tests.models.directories import same_params
from tests.training import toys

SIZE = 61
FEWER = DraftVocabulary([0, 1, 4, 7, 9, 20, 33, 60], SIZE)
PROMPTS = [[1, 2, 3], [7], list(range(20))]

TEXT = np.tile(np.asarray([3, 8, 8, 5, 50, 8, 3, 3, 9], np.int32), (8, 3))


def run_of(kind: str, **settings: Any) -> config.RunConfig:
    sizes = config.Architecture(num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2)
    sizes = config.Architecture(num_layers=2) if kind == "glide" else sizes
    draft = config.Draft(architecture=sizes, init="scratch", kind=kind, settings=settings)
    return config.RunConfig(config.Target(path="x"), config.Data(path="x", seq_len=26), draft)


def draft_of(kind: str, target: LoadedModel, k: int = 3) -> Any:
    """An untrained draft of fewer ids."""
    if kind == "glide":
        trained: Any = glide_of(target, (0, 1), hidden_size=16, intermediate_size=24).with_vocabulary(FEWER)
        return Glide(LoadedGlide(trained.glide.model, trained.init_params(jax.random.key(1), None), (0, 1)), k)
    model = transformer(1, tie_embeddings=kind == "tied")
    return specjax.DraftModel(with_few(LoadedModel(model.spec, model.params)), k)


def with_few(model: LoadedModel) -> LoadedModel:
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, vocabulary=FEWER))


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_head_gives_the_logits_of_the_whole_one(tied, quantize):
    toy = transformer(1, tie_embeddings=tied)
    whole = LoadedModel(toy.spec, toy.params)
    if quantize is not None:
        whole = quantize_model(whole, quantize)
    final = jax.random.normal(jax.random.key(2), (2, 3, whole.config.hidden_size))
    layout = whole.layout()
    expected = np.asarray(layout.spec.head(layout.params, final))
    few = with_few(whole)
    for spec, params in ((few.spec, few.params), (few.layout().spec, few.layout().params)):
        found = np.asarray(spec.head(params, final))
        tolerance = 2e-2 if quantize and tied else 1e-5  # beside a tied table, a head in 8 bits is a copy
        np.testing.assert_allclose(found[..., FEWER.ids], expected[..., FEWER.ids], rtol=0, atol=tolerance)
        assert (np.delete(found, FEWER.ids, axis=-1) == np.float32(NEVER)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_weights_come_back_from_the_layout(tied):
    toy = transformer(1, tie_embeddings=tied)
    few = with_few(LoadedModel(toy.spec, toy.params))
    layout = DecodeLayout.of(few.spec, few.params)
    assert "narrow_head" in layout.params
    assert kernels.counted(layout.params["narrow_head"])[0] == len(FEWER.ids) * few.config.hidden_size
    assert ("head" in layout.params) == (not tied)  # no copy of a tied table
    assert same_params(layout.originals(), toy.params)


@pytest.mark.parametrize("kind", ["glide", "tied", "untied"])
def test_no_other_id_is_proposed_and_the_output_is_the_targets(kind):
    target = target_of()
    plain = specjax.Decoder(target).generate(PROMPTS, max_new_tokens=16)
    decoder = specjax.Decoder(target, draft_of(kind, target), controller="fixed")
    assert decoder.generate(PROMPTS, max_new_tokens=16).tokens == plain.tokens
    sampled = decoder.generate(PROMPTS, max_new_tokens=24, temperature=1.0, seed=3)
    pairs = zip(sampled.tokens, sampled.origins, strict=True)
    accepted = {token for row, origins in pairs for token, o in zip(row, origins, strict=True) if o == "accepted"}
    assert accepted
    assert accepted <= {*FEWER.ids.tolist()}


@pytest.mark.parametrize("kind", ["glide", "draft_model"])
def test_it_is_trained_stored_and_read(kind, tmp_path):
    target = target_of()
    drafter, params = initial_draft(run_of(kind, draft_vocab_size=5), target, toys.Windows(TEXT))
    assert {*drafter.vocabulary.ids.tolist()} >= {3, 8}
    assert len(drafter.vocabulary.ids) == 5
    drafter.save(params, target, tmp_path / "draft")
    read: Any = specjax.load_drafter(tmp_path / "draft", target, k=2)
    assert read.model.spec.vocabulary == drafter.vocabulary
    again = specjax.load_drafter(tmp_path / "draft", target, k=2, kind=kind)
    assert specjax.Decoder(target, again).generate(PROMPTS, max_new_tokens=8).tokens
    if kind == "draft_model":  # a model like any other to whoever wants one
        assert load_model(tmp_path / "draft").spec.vocabulary is None


def test_training_compares_over_the_few_ids_and_takes_their_gradient():
    toy = transformer(1, tie_embeddings=True)
    few = with_few(LoadedModel(toy.spec, toy.params)).spec
    final = jax.random.normal(jax.random.key(2), (1, 4, few.config.hidden_size))

    def loss(params, head):
        return jnp.sum(jax.nn.softmax(head(params, final)) ** 2)

    narrow = jax.grad(lambda params: loss(params, few.logits_of_few))(toy.params)
    whole = jax.grad(lambda params: loss(params, lambda p, x: toy.spec.head(p, x)[..., FEWER.ids]))(toy.params)
    np.testing.assert_allclose(narrow["embedding"], whole["embedding"], rtol=0, atol=1e-6)
    assert np.abs(np.delete(np.asarray(narrow["embedding"]), FEWER.ids, axis=0)).max() == 0


def test_what_is_no_draft_vocabulary_is_refused(tmp_path):
    target = target_of()
    model = transformer(1, tie_embeddings=True)
    save_model(with_few(LoadedModel(model.spec, model.params)), tmp_path / "draft")
    file = tmp_path / "draft/draft_vocabulary.json"
    (tmp_path / "draft/SHA256SUMS").unlink()
    for ids in ([4, 1], [SIZE], [], "all", None):
        file.write_text(json.dumps({"ids": ids} if ids is not None else [1]))
        with pytest.raises(ModelError, match=r"draft_vocabulary\.json: holds no ascending ids of 0 \.\. 60"):
            specjax.load_drafter(tmp_path / "draft", target, k=2)
    with pytest.raises(ConfigError, match=r"draft\.draft_vocab_size: 62, and the target has 61 ids"):
        initial_draft(run_of("draft_model", draft_vocab_size=62), target, toys.Windows(TEXT))
