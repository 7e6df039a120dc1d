"""Classes of others, named by where they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specjax
from specjax import registry
from specjax.config import load_config
from specjax.decode.decoder import Decoder
from specjax.errors import ConfigError
from specjax.testing.toys import prefix_model

PAGE = Path(__file__).parents[1] / "docs/extending.md"
MODULE = """
from specjax.verifiers.speculative import Speculative


@dataclasses.dataclass(frozen=True)
class Careful(Speculative):
    kind: Literal["careful"] = "careful"


class NoDataclass:
    kind = "none"


@dataclasses.dataclass
class Mutable:
    kind: Literal["mutable"] = "mutable"


number = 3
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """The name of a module outside the package: the drafter that docs/extending.md shows, and more."""
    name = f"theirs_{abs(hash(tmp_path))}"
    (drafter,) = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class RepeatLast" in code
    )
    (tmp_path / f"{name}.py").write_text(drafter + MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_config_takes_a_class_from_outside(theirs, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"target: {{path: somewhere}}\ndata: {{path: python-stdlib}}\nverifier: '{theirs}:Careful'\n"
        f"certify: {{drafter: {{kind: '{theirs}:RepeatLast', k: 2}}}}\n"
        f"bench: {{drafters: [ngram, '{theirs}:RepeatLast']}}\n"
    )
    config = load_config(file)
    verifier = registry.build(registry.VERIFIERS, config.verifier, "verifier")
    drafter = registry.build(registry.DRAFTERS, config.certify.drafter, "certify.drafter")
    assert (verifier.kind, drafter.kind, drafter.k) == ("careful", "repeat_last", 2)


def test_a_decoder_takes_a_class_from_outside(theirs):
    target = prefix_model(0)
    plain = Decoder(target).generate([[1, 2]], max_new_tokens=6)
    decoder = specjax.Decoder(target, {"kind": f"{theirs}:RepeatLast", "k": 2}, f"{theirs}:Careful")
    assert decoder.generate([[1, 2]], max_new_tokens=6).tokens == plain.tokens


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "nowhere_to_be_found.sub:RepeatLast",
            r"no module 'nowhere_to_be_found'; install it, or put",
        ),
        ("{theirs}:Missing", "{theirs} has no Missing"),
        ("{theirs}:NoDataclass", "is no frozen dataclass with a field `kind"),
        ("{theirs}:number", "is no frozen dataclass with a field `kind"),
        ("{theirs}:Mutable", "is no frozen dataclass with a field `kind"),
        (
            "{theirs}.py:",
            "is unknown, known are dflash, dflash2, draft_model, dspark, eagle3, early_exit, glide, hybrid, medusa, "
            "mtp, ngram, p_eagle",
        ),
    ],
)
def test_what_cannot_be_used_is_named(theirs, kind, said):
    with pytest.raises(ConfigError, match=said.format(theirs=theirs)):
        registry.build(registry.DRAFTERS, kind.format(theirs=theirs), "drafter")


def test_fields_of_a_class_from_outside_are_checked_as_ours_are(theirs):
    for fields, said in (({"k": "3"}, r"drafter\.k: "), ({"n": 1}, "unknown key")):
        with pytest.raises(ConfigError, match=said):
            registry.build(registry.DRAFTERS, {"kind": f"{theirs}:RepeatLast", **fields}, "drafter")
