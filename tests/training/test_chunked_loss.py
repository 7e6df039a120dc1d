"""Logits a few positions at a time give what logits of all positions at once do."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import backend, registry
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.drafters.glide import GlideModel, TrainedGlide
from specjax.interfaces import Batch
from specjax.models.transformer import Model
from specjax.training import chunked_loss as matching
from specjax.training.distributions import top_k_logits
from specjax.training.evaluate import evaluate_all
from specjax.training.init.first_weights import SharedEnds
from specjax.training.step import TrainState, Update
from tests.cases import in_proof, transformer
from tests.training import toys

LENGTH, CHUNK = 23, 5
TARGET, DRAFT, OTHER = transformer(0), transformer(1), transformer(2)
GLIDE = TrainedGlide(GlideModel(Model(dataclasses.replace(TARGET.spec.config, num_layers=1)), (1,)), depths=3)
SEPARATE = TrainedDraftModel(DRAFT.spec)
SHARING = SharedEnds(DRAFT.spec, shared=("embedding",))
DRAFTS = {
    "separate": (SEPARATE, DRAFT.params),
    "glide": (GLIDE, GLIDE.init_params(jax.random.key(3), TARGET)),
    "frozen head": (SHARING, {n: x for n, x in DRAFT.params.items() if n != "embedding"}),
}
ADASPEC = {"kind": "adaspec", "reference": "other", "of": {"kind": "sum", "of": ["lk_lambda", "cross_entropy"]}}
LOSSES = {
    "kl": "forward_kl",
    "labels": "cross_entropy",
    "of whole rows": {"kind": "sum", "of": [{**ADASPEC, "weight": 0.5}, "lk_alpha", {**ADASPEC, "keep": 0.7}]},
}


def batch() -> Batch:
    random = np.random.default_rng(1)
    tokens = jnp.asarray(random.integers(0, 61, (2, LENGTH + 1)), jnp.int32)
    weight = jnp.asarray(random.choice([0.0, 0.25, 1.0], (2, LENGTH)), jnp.float32)
    return Batch(tokens[:, :-1], tokens[:, 1:], weight)


def stepped(drafter, params, loss, batch: Batch, spec=TARGET.spec):
    """Parameters moved by their gradient, and the metrics."""
    built = registry.build(registry.LOSSES, loss, "loss")
    update = Update(drafter, built, optax.sgd(1.0), spec, 2, {"other": SEPARATE}).jitted()
    params = jax.tree.map(jnp.array, params)
    state = TrainState(params, optax.sgd(1.0).init(params), jnp.float32(0.3))
    state, metrics = update(state, TARGET.params, batch, {"other": OTHER.params})
    return jax.device_get((state.params, metrics))


def in_chunks(monkeypatch, run):
    """``run()`` with the logits of all positions at once, and with those of `CHUNK` positions of 2 rows at a time."""
    whole = run()
    monkeypatch.setattr(backend, "logit_tokens", lambda vocab_size: 2 * CHUNK + 1)
    jax.clear_caches()  # what is compiled does not know that it is another
    chunked = run()
    jax.clear_caches()
    return whole, chunked


def assert_close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), a, b)


QUICK = [("separate", "of whole rows"), ("glide", "kl"), ("frozen head", "labels")]


@pytest.mark.parametrize(
    ("draft", "loss"),
    [*QUICK, *(in_proof(draft, loss) for draft in DRAFTS for loss in LOSSES if (draft, loss) not in QUICK)],
)
def test_a_step_of_chunks_is_the_step_of_the_whole(draft, loss, monkeypatch):
    """Loss, gradient and alpha, of several depths and of losses that choose among the positions of a row."""
    drafter, params = DRAFTS[draft]
    whole, chunked = in_chunks(monkeypatch, lambda: stepped(drafter, params, LOSSES[loss], batch()))
    assert_close(chunked, whole)
    assert whole[1]["grad_norm"] > 0.01


@pytest.mark.parametrize("k", [8, 61])
def test_so_is_that_of_cached_logits(k, monkeypatch):
    best = top_k_logits(TARGET.spec(TARGET.params, batch().tokens, batch().token_positions).logits, k)
    given = dataclasses.replace(batch(), teacher=best)
    whole, chunked = in_chunks(monkeypatch, lambda: stepped(SEPARATE, DRAFT.params, "lk_lambda", given, None))
    assert_close(chunked, whole)


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_evaluation_of_chunks_is_that_of_the_whole(draft, monkeypatch):
    drafter, params = DRAFTS[draft]
    windows = np.random.default_rng(2).integers(0, 61, (3, LENGTH + 1)).astype(np.int32)

    def run():
        several = [params, jax.tree.map(lambda x: 0.5 * x, params)]
        found = evaluate_all(drafter, several, TARGET, toys.Windows(windows), 3 * LENGTH, 2)
        return [dataclasses.astuple(evaluation) for evaluation in found]

    whole, chunked = in_chunks(monkeypatch, run)
    assert_close(chunked, whole)


def test_of_frozen_weights_no_gradient_is_made():
    """Gradients reach what is trained through a chunk, also where the chunk multiplies with what is not."""
    hidden, head, scale = jnp.ones((1, 6, 4)), jnp.ones((4, 9)), jnp.float32(2.0)
    some = matching.Positions(hidden, jnp.zeros((1, 6), jnp.int32), jnp.ones((1, 6)), None)

    def loss(scale, head):
        def add(m):
            return jnp.sum(m.weight[..., None] * jnp.tanh(scale * m.hidden @ head) ** 2), jnp.sum(m.weight)

        return matching.summed(add, some, 4)[0]

    def made(wanted):
        return str(jax.make_jaxpr(jax.grad(loss, wanted))(scale, head))

    of_head = "f32[4,9] = broadcast_in_dim"
    assert of_head in made(1)
    assert of_head not in made(0)
