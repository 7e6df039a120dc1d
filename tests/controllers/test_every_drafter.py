"""Every kind of drafter under every controller, calibrated or not, at any lengths and temperatures: greedy output is
the target's, and under `coupled` so is any other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from specjax import registry
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.testing.inhabitants import HiddenReader, Tree
from specjax.testing.toys import prefix_model, related
from tests.cases import in_proof
from tests.drafters import test_features, test_glide

TOY = prefix_model(0)
TOYS: dict[str, Any] = {
    "toy": DraftModel(related(TOY, 1), 5),
    "ngram": NGram(5),
    "hybrid": Hybrid(DraftModel(related(TOY, 1), 3), 5),
    "tree": Tree(related(TOY, 1), width=2, depth=2),
    "tree_of_three": Tree(TOY, width=2, depth=3),
    "hidden": HiddenReader(3),
}
FEATURES = ("eagle3", "p_eagle", "mtp", "medusa", "early_exit", "dflash", "dflash2", "dspark")
CONTROLLERS: dict[str, Any] = {name: {"kind": name} for name in registry.CONTROLLERS}
CONTROLLERS |= {"rows": {"kind": "adaptive", "per": "row"}, "total": {"kind": "adaptive", "total": 3}}
KS = (None, (0, 1), (0, 1, 2))
CASES = [*itertools.product(TOYS, CONTROLLERS, (True, False), KS, (0.0, 1.0))]
QUICK = [
    ("ngram", "adaptive", True, (0, 1, 2), 0.0),
    ("tree", "adaptive", True, None, 1.0),
    ("tree_of_three", "rows", True, (0, 1, 2), 0.0),
    ("hybrid", "adaptive", True, None, 0.0),
    ("hybrid", "rows", True, (0, 1, 2), 1.0),
    *CASES[::61],
]


def decoded(target: Any, drafter: Any, controller: str, calibrated: bool, ks: Any, temperature: float) -> Any:
    lengths = {"ks": list(ks)} if ks and controller != "fixed" else {}
    decoder = Decoder(target, drafter, "coupled", {**CONTROLLERS[controller], **lengths})
    prompts = [[1, 2, 1, 2, 1], [2]]
    if calibrated:
        decoder.calibrate(prompts, blocks=2, seconds=0, temperature=temperature)
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True}
    found = decoder.generate(prompts, **options)
    assert found.tokens == Decoder(target, None, "coupled").generate(prompts, **options).tokens
    return found


@pytest.mark.parametrize(
    ("drafter", "controller", "calibrated", "ks", "temperature"),
    [*QUICK, *(in_proof(*case) for case in CASES[5::29] if case not in QUICK)],
)
def test_a_toy_is_decoded_with(drafter, controller, calibrated, ks, temperature):
    decoded(TOY, TOYS[drafter], controller, calibrated, ks, temperature)


@pytest.mark.parametrize(
    ("kind", "controller", "calibrated", "ks", "temperature"),
    [
        in_proof("dflash", "adaptive", True, (0, 1, 2), 0.0),
        in_proof("eagle3", "rows", True, None, 1.0),
        in_proof("p_eagle", "adaptive", True, (0, 1, 2), 0.0),
        in_proof("mtp", "total", True, None, 0.0),
        in_proof("medusa", "adaptive", False, None, 1.0),
        in_proof("early_exit", "adaptive", False, (0, 1), 0.0),
        in_proof("dflash2", "rows", False, (0, 1, 2), 0.0),
        in_proof("dspark", "confidence", True, (0, 1, 2), 1.0),
        in_proof("glide", "adaptive", True, (0, 1, 2), 1.0),
    ],
)
def test_a_kind_that_is_trained_is_decoded_with(kind, controller, calibrated, ks, temperature):
    if kind == "glide":
        target = test_glide.target_of()
        drafter = test_glide.random_glide(target, reads=(0, 1))
    else:
        target = test_features.target_of()
        trained, params = test_features.made("published" if kind == "eagle3" else kind, target)
        drafter = trained.to_drafter(params, target, 3)
    decoded(target, drafter, controller, calibrated, ks, temperature)


def test_every_registered_drafter_is_one_of_these():
    assert {*registry.DRAFTERS} == {*FEATURES, "ngram", "draft_model", "glide", "hybrid"}
