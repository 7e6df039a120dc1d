"""The drafts in models/demo-drafts are those that their cards and configs say, and are accepted as such."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from pydantic import TypeAdapter

import specjax
from specjax.config import RunConfig, load_config
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.glide import Glide
from specjax.runtime import fingerprint
from specjax.training.exports import WEIGHTS

ROOT = Path(__file__).parents[2]
DRAFTS = ("glide", "separate")
PROMPTS = ["def read_config(path):\n    ", "class Queue:\n    def "]


@pytest.fixture(scope="module")
def target():
    return specjax.load_model(ROOT / "models" / "demo-target")


def test_they_are_small():
    files = [file for file in (ROOT / "models" / "demo-drafts").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 14e6
    assert {file.parent.name for file in files} == set(DRAFTS)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_card_is_of_these_weights_and_of_the_config_in_the_tree(name, target):
    directory = ROOT / "models" / "demo-drafts" / name
    card = (directory / "README.md").read_text()
    loaded = specjax.load_drafter(directory, target)
    assert isinstance(loaded, Glide if name == "glide" else DraftModel)
    model: Any = loaded.model
    weights = jax.tree.map(lambda x: x.astype("float32"), model.params)
    assert f"| {WEIGHTS} | {fingerprint.digest(weights)} |" in card
    settings = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    config = load_config(ROOT / "configs" / "demo-drafts" / f"{name}.yaml", [])
    # The card says what there was to set when the draft was trained; what came later has its default.
    recorded = TypeAdapter(RunConfig).validate_python({**dataclasses.asdict(config), **settings})
    assert recorded == config


@pytest.mark.proof
@pytest.mark.parametrize(("name", "least"), [("glide", 4.0), ("separate", 3.0)])
def test_it_is_accepted_and_changes_nothing(name, least, target):
    options = {"max_new_tokens": 64, "ignore_eos": True}
    plain = specjax.Decoder(target).generate(PROMPTS, **options)
    drafter = specjax.load_drafter(ROOT / "models" / "demo-drafts" / name, target, k=5)
    found = specjax.Decoder(target, drafter).generate(PROMPTS, **options)
    assert found.tokens == plain.tokens
    assert sum(row.emitted for row in found.stats) / sum(row.blocks for row in found.stats) > least
