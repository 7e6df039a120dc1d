from __future__ import annotations

import pytest

from specjax.models.hf import save_model

from .table import World


@pytest.fixture(scope="session")
def saved(tiny_target, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save_model(tiny_target, path)
    return path


@pytest.fixture
def world(tiny_target, tiny_draft, saved, tmp_path):
    return World(tiny_target, tiny_draft, tmp_path, saved)
