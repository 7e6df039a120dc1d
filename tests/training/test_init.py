"""Drafts made of the target's own layers: what is kept computes what it did there, and what is shared stays the
target's. The draft cut by principal directions is tested in test_prune.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import config, registry
from specjax.data.rows import take
from specjax.errors import ConfigError, TrainingError
from specjax.interfaces import Batch
from specjax.models.families import family_of
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.transformer import Model
from specjax.training.evaluate import evaluate
from specjax.training.init import first_weights as init
from specjax.training.init.first_weights import SharedEnds, initial_draft
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState, Update
from specjax.training.teacher import with_shared_params
from tests.cases import in_proof
from tests.models.test_families import random_params, random_tokens, read
from tests.models.variants import VARIANTS
from tests.training import toys
from tests.training.toys import train_stage

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
    assert initial.drafter.model.config.num_layers == target.config.num_layers - 1
    save_model(LoadedModel(initial.drafter.model, initial.params, family=initial.drafter.family), tmp_path / "draft")
    draft = load_model(tmp_path / "draft")
    assert (draft.config, draft.family) == (initial.drafter.model.config, target.family)
    tokens = random_tokens(0, 2, 20)
    np.testing.assert_allclose(draft.logits(tokens), target.logits(tokens), rtol=1e-4, atol=1e-4)


def test_every_kept_layer_is_the_targets_of_that_number():
    target = model("gemma3")
    initial = drafted(target, keep=[1, 2])
    for new, old in enumerate((1, 2)):
        toys.assert_same(initial.params["layers"][new], target.params["layers"][old])
        assert initial.drafter.model.config.layer(new) == target.config.layer(old)
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
    update = Update(initial.drafter, loss, optimizer, target.spec, 4).jitted()
    losses = []
    for _ in range(3):
        state, metrics = update(state, target.params, batch())
        losses.append(float(metrics["loss"]))
    whole = with_shared_params(initial.drafter, state.params, target.params)
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


def test_a_shared_draft_trains_alike_on_cached_logits_in_bfloat16_and_with_rounded_products(tmp_path):
    target = model(num_layers=2, tie_embeddings=False)
    initial = drafted(target, keep=[1], share=True)
    optimizer, held_out = config.Optimizer(learning_rate=0.01, warmup_steps=1), toys.rows(8)

    def nll(params) -> float:
        return evaluate(initial.drafter, params, target, held_out, 32, 4).nll

    found = []
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"teacher": "cached"},
        {"compute_dtype": "bfloat16"},
        {"matmul_dtype": "bfloat16"},
    )
    for i, changes in enumerate(ways):
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
    save_model(LoadedModel(initial.drafter.model, initial.params, family=initial.drafter.family), tmp_path / "draft")
    assert load_model(tmp_path / "draft").config == initial.drafter.model.config


def test_a_gemma_without_windows_is_written_with_one_that_no_layer_has():
    """transformers asks for its size all the same."""
    target = model("gemma3")
    draft = drafted(target, keep=[2]).drafter.model.config
    assert draft.layers[0].window is None
    written = family_of("gemma3_text", "test").write_config(draft)
    assert written["sliding_window"] == 4096
    assert written["layer_types"] == ["full_attention"]


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
SIZES = {*SMALL, "head_dim"}


def small(name: str, **changes) -> init.Initial:
    """A draft of random weights for a target of that variant."""
    config_of = read(VARIANTS[name])
    target = LoadedModel(Model(config_of), {}, family=VARIANTS[name]["model_type"])
    shape = config.Architecture(**{**SMALL, **changes})
    starts = (settings(architecture=shape, init=start) for start in (None, "scratch"))
    drafts = [initial_draft(start, target, toys.rows(1)) for start in starts]
    toys.assert_same(drafts[0].params, drafts[1].params)
    return drafts[1]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_draft_from_scratch_is_of_its_target_s_family(name, tmp_path):
    full, initial = read(VARIANTS[name]), small(name)
    found = initial.drafter.model.config
    assert {size: getattr(found, size) for size in SMALL} == SMALL
    derived = {"layers", "experts", "attention_scale", "embedding_multiplier"}
    for field in {f.name for f in dataclasses.fields(full)} - SIZES - derived:
        assert getattr(found, field) == getattr(full, field), field
    assert {dataclasses.replace(kind, dense=False) for kind in full.layers} >= set(found.layers)
    assert set(found.ropes) <= set(full.ropes)
    assert initial.drafter.family == {"mixtral": "mistral", "qwen3_moe": "qwen3"}.get(
        full_family(name), full_family(name)
    )
    save_model(LoadedModel(initial.drafter.model, initial.params, family=initial.drafter.family), tmp_path / "draft")
    again = load_model(tmp_path / "draft")
    assert again.config == found
    toys.assert_same(again.params, initial.params)


def full_family(name: str) -> str:
    return VARIANTS[name]["model_type"]


def test_what_a_family_derives_from_its_sizes_is_that_of_the_draft():
    gemma = small("gemma2", head_dim=8).drafter.model.config
    assert gemma.embedding_multiplier == 16**0.5
    # The target divides scores by the root of 9, over heads of 12 features.
    assert gemma.attention_scale == pytest.approx((9 * 8 / 12) ** -0.5)


def test_a_draft_of_few_layers_keeps_one_that_sees_everything():
    """The first and last layer of the target have windows."""
    full, found = read(VARIANTS["gemma3"]), small("gemma3").drafter.model.config
    assert full.layer(0).window is not None
    assert full.layer(3).window is not None
    assert [found.layer(i).window is None for i in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"num_kv_heads": 1}, r"num_kv_heads=1, and .* a gpt2, as the target is one, has num_kv_heads=2"),
        ("gpt2", {"head_dim": 12}, r"head_dim=12, and .* has head_dim=8"),
        ("phi3-longrope-short", {"head_dim": 12}, r"no phi3 like the target: .*6 rotated pairs of features"),
    ],
)
def test_sizes_that_the_family_cannot_have_are_refused(name, changes, message):
    with pytest.raises(ConfigError, match=rf"draft\.architecture: .*{message}"):
        small(name, **changes)


@pytest.mark.parametrize("spec", ["target", {"kind": "pruned"}])
def test_both_spellings_of_a_cut_draft_are_cut(spec, tiny_target, monkeypatch):
    cut = {"embedding": "cut"}
    monkeypatch.setattr(init, "prune", lambda target, shape, tokens: cut)
    shape = config.Architecture(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1)
    initial = initial_draft(settings(init=spec, architecture=shape), tiny_target, toys.rows(4))
    assert initial.params is cut
    assert (initial.drafter.model.config.hidden_size, initial.drafter.model.config.vocab_size) == (
        16,
        tiny_target.vocab_size,
    )


def test_a_checkpoint_may_be_spelled_as_a_path_or_a_kind(tiny_target, tiny_draft, tmp_path):
    save_model(tiny_draft, tmp_path / "start")
    path = str(tmp_path / "start")
    for spec in (path, {"kind": "checkpoint", "path": path}):
        initial = initial_draft(settings(init=spec), tiny_target, toys.rows(1))
        toys.assert_same(initial.params, tiny_draft.params)
