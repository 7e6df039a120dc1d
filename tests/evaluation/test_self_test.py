"""Planted errors of an export, each of which changes no output: the self-test finds and names them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import jax
import pytest

import specjax
from specjax.drafters.block_kv import BlockKV, TargetAndBlockKV
from specjax.drafters.draft_model import DraftModel, TrainedDraftModel
from specjax.drafters.glide import BoundGlide
from specjax.errors import ModelError
from specjax.evaluation.self_test import self_test
from specjax.formats import trained
from specjax.interfaces import Params
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.rotary import Rope
from specjax.models.weights import rounded
from specjax.testing.heads import TrainedHeads
from tests.drafters.test_glide import glide_of, target_of

PROMPTS = [[1, 2, 3], [5] * 9, list(range(20))]


@dataclasses.dataclass(frozen=True)
class Case:
    trained: Any
    params: Params
    target: LoadedModel

    def test(self, loaded: Any):
        return self_test(self.trained, self.params, self.target, loaded, PROMPTS)


@pytest.fixture(scope="module")
def glide() -> Case:
    target = target_of(num_layers=3)
    trained = glide_of(target, (0, 2), 2, hidden_size=16, intermediate_size=24)
    return Case(trained, jax.tree.map(lambda x: x * 3.0, trained.init_params(jax.random.key(1), target)), target)


@pytest.fixture(scope="module")
def separate(tiny_target, tiny_draft) -> Case:
    return Case(TrainedDraftModel(tiny_draft.spec), tiny_draft.params, tiny_target)


@pytest.fixture(params=["glide", "separate"])
def case(request) -> Case:
    return request.getfixturevalue(request.param)


@pytest.fixture
def planted(monkeypatch):
    """For errors in the code: nothing compiled before them counts, and nothing compiled with them stays."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


def changed(case: Case, params: Params | None = None, **settings: Any) -> Any:
    """The drafter with other weights, or its model with other settings."""
    drafter = case.trained.to_drafter(case.params if params is None else params, case.target, 3)
    config = dataclasses.replace(drafter.model.spec.config, **settings)
    spec = dataclasses.replace(drafter.model.spec, config=config)
    return dataclasses.replace(drafter, model=dataclasses.replace(drafter.model, spec=spec))


def test_what_was_exported_is_what_was_trained(case, tmp_path):
    trained.save(case.trained, case.params, case.target, tmp_path / "draft")
    found = case.test(specjax.load_drafter(tmp_path / "draft", case.target))
    assert found.weights == len(jax.tree.leaves(changed(case).bind(case.target).params))
    assert found.positions == 3 * len(PROMPTS)
    assert found.largest_difference < 1e-4


def test_a_target_in_bfloat16_has_its_draft_in_it_too(case, tmp_path):
    """Trained in float32, and decoded in what the target is in."""
    save_model(case.target, tmp_path / "target")
    target = load_model(tmp_path / "target", dtype="bfloat16")
    params = rounded(case.params, "bfloat16")
    trained.save(case.trained, params, target, tmp_path / "draft")
    found = Case(case.trained, params, target).test(specjax.load_drafter(tmp_path / "draft", target))
    assert 0 < found.largest_difference < 0.1
    late = dataclasses.replace(case, params=jax.tree.map(lambda x: 1.01 * x, params), target=target)
    with pytest.raises(ModelError, match="differs: by up to"):
        late.test(specjax.load_drafter(tmp_path / "draft", target))


def test_a_drafter_from_outside_is_tested_too(tiny_target):
    trained = TrainedHeads(2, 8, tiny_target.config.num_layers)
    params = trained.init_params(jax.random.key(0), tiny_target)
    case = Case(trained, params, tiny_target)
    assert case.test(trained.to_drafter(params, tiny_target, 1)).positions == 2 * len(PROMPTS)
    with pytest.raises(ModelError, match="self-test: head differs: by up to"):
        case.test(trained.to_drafter({**params, "head": params["head"] * 2}, tiny_target, 1))


def test_another_norm_is_named(case):
    params = jax.tree.map(lambda x: x, case.params)
    params["layers"][0]["mlp_norm"]["scale"] = 1.5 * params["layers"][0]["mlp_norm"]["scale"]
    with pytest.raises(ModelError, match=r"self-test: layers/0/mlp_norm/scale differs: by up to"):
        case.test(changed(case, params))


def test_a_missing_norm_is_named():
    target = target_of(num_layers=2, qk_norm="each_head")
    trained = glide_of(target, (0, 1), 2, hidden_size=16)
    case = Case(trained, trained.init_params(jax.random.key(1), target), target)
    lost = jax.tree.map(lambda x: x, case.params)
    for layer in lost["layers"].values():
        for name in ("q_norm", "k_norm"):
            del layer["attention"][name]
    with pytest.raises(ModelError, match=r"self-test: glide\.model\.config\.qk_norm is .none., and was 'each_head'"):
        case.test(changed(case, lost, qk_norm="none"))


def test_another_rotary_base_is_named(separate):
    layers = (dataclasses.replace(separate.trained.model.config.layer(0), rope=Rope(theta=500.0)),)
    layers *= separate.trained.model.config.num_layers
    with pytest.raises(ModelError, match=r"self-test: model\.config\.layers.* is .*500.* in training"):
        separate.test(changed(separate, layers=layers))


def test_another_template_is_named(separate):
    model = copy.copy(separate.trained.to_model(separate.params, separate.target))
    tokenizer = copy.deepcopy(separate.target.tokenizer)
    tokenizer.chat_template = "{{ messages }}!"
    with pytest.raises(ModelError, match="self-test: the chat template of its tokenizer is not the target's"):
        separate.test(DraftModel(dataclasses.replace(model, tokenizer=tokenizer), 3))


@pytest.mark.parametrize(("late", "said"), [(1, "one too few"), (-1, "one too many")])
def test_keys_and_values_of_another_slot_are_named(glide, planted, late, said):
    real = BoundGlide.draft

    def shifted(self, params, target, state, context):
        return real(self, params, dataclasses.replace(target, lengths=target.lengths - late), state, context)

    planted.setattr(BoundGlide, "draft", shifted)
    with pytest.raises(ModelError, match=f"decoding reads {said} of the target's keys and values"):
        glide.test(changed(glide))


def test_a_decoding_that_gives_nan_is_no_equal_one(glide, planted):
    real = BoundGlide.draft

    def broken(self, params, target, state, context):
        draft, state = real(self, params, target, state, context)
        assert draft.logits is not None
        return dataclasses.replace(draft, logits=draft.logits.at[:, 1, 0].set(float("nan"))), state

    planted.setattr(BoundGlide, "draft", broken)
    with pytest.raises(ModelError, match="a logit of decoding is NaN"):
        glide.test(changed(glide))


def test_a_mask_of_the_block_is_named(glide, planted):
    """Of decoding alone: the training forward, whose depths are numbers, keeps its own."""
    real = TargetAndBlockKV.attend

    def mutated(self, q, k, v, scale=None, soft_cap=None):
        attended, own = real(self, q, k, v, scale, soft_cap)
        if isinstance(self.depth, int):
            return attended, own
        return attended, BlockKV(own.keys.at[:, :, 0].set(0.0), own.values)

    planted.setattr(TargetAndBlockKV, "attend", mutated)
    with pytest.raises(ModelError, match="from depth 2 of a block on: its own keys and values, or their mask"):
        glide.test(changed(glide))


def test_other_counts_are_named(glide):
    from specjax.metrics import DecodeStats
    from specjax.training.selection import Decoded

    stats = DecodeStats(4, 8, (4, 4), (4, 2), (2, 2))
    found = glide.test(changed(glide))
    assert found.counting([Decoded(0.0, [stats], 1.0)], [Decoded(0.0, [stats], 2.0)]).blocks == 4
    with pytest.raises(ModelError, match="prompt 0 takes 5 target calls at temperature 0, and took 4 before"):
        found.counting([Decoded(0.0, [dataclasses.replace(stats, blocks=5)], 1.0)], [Decoded(0.0, [stats], 1.0)])
