"""Drafts made of the target's own layers: what is kept computes what it did there, and what is shared stays the
target's. The draft cut by principal directions is tested in test_prune.py."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import config, registry
from specjax.distill import init
from specjax.distill.evaluate import evaluate
from specjax.distill.init import SharedEnds, initial_draft
from specjax.distill.optimizer import make_optimizer
from specjax.distill.rows import take
from specjax.distill.step import TrainState, make_update
from specjax.distill.teacher import completed
from specjax.distill.trainer import train_stage
from specjax.errors import ConfigError, TrainingError
from specjax.models.families import family_of
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.transformer import Model
from specjax.types import Batch
from tests.cases import in_proof
from tests.distill import toys
from tests.models.test_families import random_params, random_tokens, read
from tests.models.variants import VARIANTS

DEAD = 1
ONE_OF_EACH = (
    *(
        "llama",
        "qwen3_moe-some-layers",
        "mistral-window",
        "mixtral-window",
        "qwen2-window",
        "qwen3-window-biased",
        "gemma",
        "gemma2",
    ),
    *("phi3-longrope-short", "olmo2", "smollm3-window", "starcoder2", "granite", "cohere", "gpt2", "gpt_neox"),
)


def settings(**draft) -> config.RunConfig:
    data = config.Data(path="x", seq_len=8)
    return config.RunConfig(target=config.Target(path="x"), data=data, draft=config.Draft(**draft))


def model(name: str = "llama", dead: tuple[int, ...] = (), **changes) -> LoadedModel:
    """A variant of random weights; what a dead layer reads, it adds nothing to."""
    spec = Model(dataclasses.replace(read(VARIANTS[name]), **changes))
    params = random_params(spec.config)
    for layer in dead:

        def silenced(path, leaf):
            writes = {"o_proj", "down_proj"} & {getattr(key, "key", None) for key in path}
            return jnp.zeros_like(leaf) if writes or path[-1].key == "bias" else leaf

        params["layers"][layer] = jax.tree_util.tree_map_with_path(silenced, params["layers"][layer])
    return LoadedModel(spec, params, family=VARIANTS[name]["model_type"])


def drafted(target: LoadedModel, **kept) -> init.Initial:
    return initial_draft(settings(init={"kind": "layers", **kept}), target, toys.rows(1))


@pytest.mark.parametrize("name", ["gemma3", *map(in_proof, ONE_OF_EACH)])
def test_without_a_layer_that_adds_nothing_the_draft_is_the_target(name, tmp_path):
    target = model(name, dead=(DEAD,))
    initial = drafted(target, keep=[i for i in range(target.config.num_layers) if i != DEAD])
    assert initial.spec.config.num_layers == target.config.num_layers - 1
    save_model(LoadedModel(initial.spec, initial.params, family=initial.family), tmp_path / "draft")
    draft = load_model(tmp_path / "draft")
    assert (draft.config, draft.family) == (initial.spec.config, target.family)
    tokens = random_tokens(0, 2, 20)
    np.testing.assert_allclose(draft.logits(tokens), target.logits(tokens), rtol=1e-4, atol=1e-4)


def test_every_kept_layer_is_the_targets_of_that_number():
    target = model("gemma3")
    initial = drafted(target, keep=[1, 2])
    for new, old in enumerate((1, 2)):
        toys.assert_same(initial.params["layers"][new], target.params["layers"][old])
        assert initial.spec.config.layer(new) == target.config.layer(old)
    assert target.config.layer(1) != target.config.layer(2)
    for name in target.params.keys() - {"layers"}:
        toys.assert_same(initial.params[name], target.params[name])


def test_a_shared_embedding_and_head_are_no_parameters_and_stay_the_targets():
    target = model(num_layers=2, tie_embeddings=False)
    initial = drafted(target, keep=[1], share=True)
    assert isinstance(initial.drafter, SharedEnds)
    assert set(initial.params) == {"layers", "norm"}
    stage = toys.stage(steps=3)
    optimizer, loss = make_optimizer(stage), registry.build(registry.LOSSES, "forward_kl", "loss")
    state = TrainState(jax.tree.map(jnp.array, initial.params), optimizer.init(initial.params))
    update = make_update(initial.drafter, loss, optimizer, target.spec, 4)
    losses = []
    for _ in range(3):
        state, metrics = update(state, target.params, batch())
        losses.append(float(metrics["loss"]))
    whole = completed(initial.drafter, state.params, target.params)
    assert losses[-1] < losses[0]
    for name in ("embedding", "head"):
        toys.assert_same(whole[name], target.params[name])
    assert not np.array_equal(whole["norm"]["scale"], target.params["norm"]["scale"])


def batch() -> Batch:
    return take(toys.rows(4), range(4))


def test_a_shared_draft_is_measured_as_its_copy_is():
    target = model(num_layers=1)
    copied, shared = (drafted(target, keep=[0], share=share) for share in (False, True))
    assert set(copied.params) - set(shared.params) == {"embedding", "head"}
    found = [evaluate(i.drafter, i.params, target, toys.rows(4), 32, 4) for i in (copied, shared)]
    assert found[0] == found[1]
    assert found[0].alpha == pytest.approx(1, abs=1e-5)


def test_a_shared_draft_trains_alike_on_cached_logits_and_in_bfloat16(tmp_path):
    target = model(num_layers=2, tie_embeddings=False)
    initial = drafted(target, keep=[1], share=True)
    optimizer, held_out = config.Optimizer(learning_rate=0.01, warmup_steps=1), toys.rows(8)

    def nll(params) -> float:
        return evaluate(initial.drafter, params, target, held_out, 32, 4).nll

    found = []
    for i, changes in enumerate(({}, {"teacher": "cached"}, {"compute_dtype": "bfloat16"})):
        stage = toys.stage(steps=2, optimizer=optimizer, teacher_top_k=target.vocab_size, **changes)
        rows = (toys.rows(40), held_out)
        params = train_stage(tmp_path / str(i), stage, initial.drafter, initial.params, target, *rows, 0)
        assert set(params) == {"layers", "norm"}
        found.append(nll(params))
    moved = abs(found[0] - nll(initial.params))
    np.testing.assert_allclose(found, found[0], atol=0.1 * moved)


def test_a_shared_draft_without_its_target_is_refused(tmp_path):
    target = model(num_layers=2)
    initial = drafted(target, keep=[0], share=True)
    stage, rows = toys.stage(loss="cross_entropy"), (toys.rows(40), toys.rows(8))
    with pytest.raises(TrainingError, match="shares weights with its target"):
        train_stage(tmp_path / "stage", stage, initial.drafter, initial.params, None, *rows, 0)


def test_layers_that_the_target_does_not_have_are_refused():
    message = r"draft\.init\.keep: the target has no layer 4, its 4 layers are 0 \.\. 3"
    with pytest.raises(ConfigError, match=message):
        drafted(model(), keep=[0, 4])


def test_windows_longer_than_the_positions_of_the_layers_are_refused():
    run = dataclasses.replace(settings(init={"kind": "layers", "keep": [0]}), data=config.Data(path="x", seq_len=129))
    with pytest.raises(ConfigError, match=r"data\.seq_len: 129 exceeds the draft's 128 positions"):
        initial_draft(run, model(), toys.rows(1))


def test_layers_that_their_family_cannot_write_are_refused_before_training():
    """A Llama knows no second norm after each half of a layer, a Gemma 3 has them."""
    target = dataclasses.replace(model("gemma3"), family="llama")
    with pytest.raises(ConfigError, match=r"keep other layers than \[0\]; .* cannot be saved as 'llama'"):
        drafted(target, keep=[0])


def test_layers_without_rotary_embeddings_alone_are_a_draft(tmp_path):
    target = model("smollm3")
    assert [target.config.layer(i).rope is None for i in range(4)] == [False, True, False, True]
    initial = drafted(target, keep=[1, 3])
    save_model(LoadedModel(initial.spec, initial.params, family=initial.family), tmp_path / "draft")
    assert load_model(tmp_path / "draft").config == initial.spec.config


def test_a_gemma_without_windows_is_written_with_one_that_no_layer_has():
    """transformers asks for its size all the same."""
    target = model("gemma3")
    draft = drafted(target, keep=[2]).spec.config
    assert draft.layers[0].window is None
    written = family_of("gemma3_text", "test").write_config(draft)
    assert written["sliding_window"] == 4096
    assert written["layer_types"] == ["full_attention"]


@pytest.mark.parametrize("spec", ["target", {"kind": "pruned"}])
def test_both_spellings_of_a_cut_draft_are_cut(spec, tiny_target, monkeypatch):
    cut = {"embedding": "cut"}
    monkeypatch.setattr(init, "prune", lambda target, shape, tokens: cut)
    shape = config.Architecture(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1)
    initial = initial_draft(settings(init=spec, architecture=shape), tiny_target, toys.rows(4))
    assert initial.params is cut
    assert (initial.spec.config.hidden_size, initial.spec.config.vocab_size) == (16, tiny_target.vocab_size)


def test_a_checkpoint_may_be_spelled_as_a_path_or_a_kind(tiny_target, tiny_draft, tmp_path):
    save_model(tiny_draft, tmp_path / "start")
    path = str(tmp_path / "start")
    for spec in (path, {"kind": "checkpoint", "path": path}):
        initial = initial_draft(settings(init=spec), tiny_target, toys.rows(1))
        toys.assert_same(initial.params, tiny_draft.params)
