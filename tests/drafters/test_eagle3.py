"""The draft that reads its target's features: what it decodes is its training forward, its cache is what a prompt of
the same tokens leaves, and whatever it proposes, the output is the target's."""

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
from specjax.decode.decoder import Decoder
from specjax.decode.engine import looked_at, propose
from specjax.decode.request import prepare
from specjax.decode.scheduler import Scheduler
from specjax.drafters.eagle3 import Eagle3, Eagle3Draft, Eagle3Model, Options, TrainedEagle3
from specjax.drafters.features import LoadedDraft
from specjax.errors import ModelError
from specjax.evaluation.teacher import target_output
from specjax.models.config import LayerKind
from specjax.models.hf import LoadedModel
from specjax.types import Batch
from tests.cases import transformer
from tests.distill import toys

PROMPTS = [[1, 2, 3], [7], list(range(20)), [5] * 11]
PUBLISHED = Options()
OPTIONS = {
    "published": PUBLISHED,
    "plain": Options(norm_before_residual=False),
    "3.1": Options(norm_output=True, fc_norm=True),
    "normed": Options(norm_before_fc=True),
}


def target_of(**changes) -> LoadedModel:
    model = transformer(0, **{"max_positions": 256, "num_layers": 3, **changes})
    return LoadedModel(model.spec, model.params)


def model_of(target: LoadedModel, options: Options = PUBLISHED, **changes) -> Eagle3Model:
    config = dataclasses.replace(target.config, num_layers=1, layers=(LayerKind(),), **changes)
    return Eagle3Model(config, (0, 1, 3), target.config.hidden_size, options=options)


def random_params(model: Eagle3Model) -> Any:
    return jax.tree.map(lambda x: x * 2.0, jax.jit(model.init)(jax.random.key(1)))


def alike(found: Any, expected: Any) -> None:
    """As far as the target's own features are when it reads a prompt in pieces, or in blocks; a mistake is a hundred
    times as large."""
    assert float(jnp.max(jnp.abs(found - expected))) < 2e-3 * float(jnp.std(expected))


def drafted(decoder: Decoder, prompts: list[list[int]]) -> Any:
    """The block behind each prompt."""
    engine, params = decoder.engine(greedy=False)
    state = decoder.prefilled(prompts, max_new_tokens=8, temperature=1.0)
    return jax.jit(lambda params, state: propose(engine, params, state, looked_at(engine, params, state))[0])(
        params, state
    )


@pytest.mark.parametrize("piece", [None, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_is_the_training_forward(name, piece):
    """At every depth of blocks behind prompts of many lengths, which are fed at once or in pieces."""
    target, k = target_of(), 4
    model = model_of(target, OPTIONS[name])
    params, size, fed = random_params(model), target.config.vocab_size, 32
    lengths = np.asarray([2, 9, 20, fed - k])
    text = np.random.default_rng(0).integers(0, size, (len(lengths), fed)).astype(np.int32)
    decoder = Decoder(target, Eagle3(LoadedDraft(model, params), k), "speculative", "fixed", prefill_chunk=piece)
    draft = drafted(decoder, [row[:length].tolist() for row, length in zip(text, lengths, strict=True)])
    for row, length in enumerate(lengths):
        text[row, length : length + k] = draft.tokens[row]
    batch = Batch(jnp.asarray(text), jnp.asarray(np.roll(text, -1, axis=1)), jnp.ones(text.shape))
    trained = TrainedEagle3(model, depths=k)
    out = target_output(target.spec, target.params, batch, trained.reads)
    for depth, prediction in enumerate(trained.predictions(params, batch, out)):
        found = np.asarray(prediction.logits)[np.arange(len(lengths)), lengths - 1 + depth]
        alike(found, draft.logits[: len(lengths), depth])
        assert (np.asarray(prediction.weight)[np.arange(len(lengths)), lengths - 1 + depth] == 1).all()


def test_documents_of_a_row_know_nothing_of_each_other():
    """What a document's tokens predict is what they do alone, and its first tokens, without features, do not count."""
    target = target_of()
    model, depths = model_of(target), 3
    params, trained = random_params(model), TrainedEagle3(model, depths=3)
    text = np.random.default_rng(0).integers(0, 61, (2, 24)).astype(np.int32)
    segments = jnp.asarray(np.repeat([[0, 1]], 2, 0).repeat(12, 1))
    positions = jnp.asarray(np.tile(np.arange(12), 2)[None].repeat(2, 0), jnp.int32)
    together = Batch(jnp.asarray(text), jnp.asarray(text), jnp.ones(text.shape), positions, segments)
    alone = [Batch(*(jnp.asarray(text[:, at]),) * 2, jnp.ones((2, 12))) for at in (slice(0, 12), slice(12, 24))]

    def predicted(batch: Batch) -> list[Any]:
        return [*trained.predictions(params, batch, target_output(target.spec, target.params, batch, trained.reads))]

    both = predicted(together)
    for i, batch in enumerate(alone):
        for depth, (whole, part) in enumerate(zip(both, predicted(batch), strict=True)):
            at = slice(12 * i, 12 * i + 12)
            np.testing.assert_array_equal(whole.weight[:, at], part.weight)
            np.testing.assert_array_equal(part.weight[0], np.arange(12) > depth)
            counts = np.asarray(part.weight[0]) > 0
            alike(whole.logits[:, at][:, counts], part.logits[:, counts])
    assert len(both) == depths


@pytest.mark.parametrize("controller", ["fixed", "adaptive"])
def test_a_cache_is_what_a_prompt_of_the_same_tokens_leaves(controller):
    """After rejections, growth, blocks without a draft, and rows of different lengths."""
    target = target_of(max_positions=512)
    model = model_of(target)
    drafter = Eagle3(LoadedDraft(model, random_params(model)), 3)
    decoder = Decoder(target, drafter, "block", controller)
    engine, params = decoder.engine(greedy=False, rows=4)
    options = {"temperature": 1.0}
    scheduler = Scheduler(engine, params, 4)
    scheduler.insert(prepare(target, 3, PROMPTS, 300, 0, True, options))
    for _ in range(3):
        scheduler.chunk(max_steps=40)
    state, lengths = scheduler.state, scheduler.lengths
    texts = [np.asarray(state.tokens)[row, :length].tolist() for row, length in enumerate(lengths)]
    fresh = decoder.prefilled(texts, max_new_tokens=8, temperature=1.0)
    for row, length in enumerate(lengths):
        assert length > len(PROMPTS[row]) + 40
        alike(state.drafter.features[row], fresh.drafter.features[row])
        for name, axis in (("keys", 1), ("values", 2)):
            ours, theirs = (np.asarray(getattr(s.drafter.cache.layers[0], name)[row]) for s in (state, fresh))
            ours, theirs = (np.take(x, np.arange(length - 2), axis=axis) for x in (ours, theirs))
            alike(ours, theirs)


@pytest.mark.parametrize("name", ["published", "3.1"])
def test_greedy_output_is_the_targets(name):
    target = target_of()
    model = model_of(target, OPTIONS[name])
    decoder = Decoder(target, Eagle3(LoadedDraft(model, random_params(model)), 3), "block")
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=100, temperature=0.0).tokens
    assert decoder.generate(PROMPTS, max_new_tokens=100, temperature=0.0).tokens == plain


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}])
def test_one_begins_as_its_targets_last_layer_and_comes_back_from_disk(options, tmp_path):
    target = target_of(num_layers=6)
    kind = Eagle3Draft(**options)
    run = config.RunConfig(
        config.Target(path="x"), config.Data(path="x", seq_len=8), config.Draft(kind="eagle3", settings=options)
    )
    initial = kind.draft(run, target, toys.Windows(np.zeros((4, 9), np.int32)))
    drafter: Any = initial.drafter
    assert drafter.model.reads == (2, 4, 6)
    assert not {"embedding", "head"} & initial.params.keys()
    whole = drafter.complete(initial.params, target.params)
    np.testing.assert_array_equal(whole["head"]["kernel"], target.params["embedding"].T)
    np.testing.assert_array_equal(
        whole["layers"][0]["mlp"]["up_proj"]["kernel"], target.params["layers"][5]["mlp"]["up_proj"]["kernel"]
    )
    drafter.save(whole, target, tmp_path / "draft")
    found: Any = specjax.load_drafter(tmp_path / "draft", target, k=3)
    assert found.model.spec == drafter.model
    assert not {"embedding", "head"} & found.model.params.keys()
    jax.tree.map(np.testing.assert_array_equal, found.model.params, initial.params)
    assert json.loads((tmp_path / "draft/config.json").read_text())["speculators_model_type"] == "eagle3"
    other = LoadedModel(dataclasses.replace(target.spec, config=dataclasses.replace(target.config, num_layers=2)), {})
    with pytest.raises(ModelError, match=r"eagle3: reads stream 6, and the target has 0 \.\. 2"):
        found.bind(other)
