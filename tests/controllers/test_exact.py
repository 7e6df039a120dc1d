"""The output of whole generations under each controller is exactly the target's, whatever it chooses by; and a choice
that looks at what it drops is found here."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import registry
from specjax.controllers.adaptive import Adaptive
from specjax.controllers.confidence import Confidence
from specjax.controllers.fixed import Fixed
from specjax.interfaces import Controller
from specjax.verifiers.block import Block
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.speculative import Speculative
from tests.controllers.choices import of_rows, of_total
from tests.controllers.generations import SECONDS, Generations, Toy, choices


@dataclasses.dataclass(frozen=True)
class Curious(Controller):
    """Looks at all that it may: committed tokens, whatever was drawn in the block before (rejected or not), and the
    distribution that a token is about to be drawn from."""

    kind: str = "toy_curious"

    def init(self, batch):
        return jnp.zeros((batch,), jnp.int32)

    def choose(self, state, context):
        committed = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None] < context.lengths[:, None]
        return (state + jnp.sum(jnp.where(committed, context.tokens, 0), axis=1)) % 3

    def stop(self, state, logits, offset):
        return (offset == 1) & (jnp.argmax(logits, axis=1).astype(jnp.int32) == state)

    def adapt(self, state, outcome):
        places = jnp.arange(1, outcome.draft.tokens.shape[1] + 1, dtype=jnp.int32)[None]
        drawn = jnp.sum(outcome.draft.tokens * places, axis=1)
        return (state + drawn + outcome.verdict.num_accepted + outcome.verdict.next_token) % 3


QUICK = {"decay": 0.5, "trust": 0.5, "margin": 0.0, "probe": 1}
"""Changes its mind after every block."""
CONTROLLERS: dict[str, Any] = {
    "fixed": Fixed(1),
    "adaptive": Adaptive(**QUICK),
    "of rows": of_rows(**QUICK),
    "total of two": of_total(2, **QUICK),
    "total of one": of_total(1, **QUICK),
    "confidence": Confidence(0.6),
    "confidence by entropy": Confidence(0.8, "entropy"),
    "curious": Curious(),
}
RULES: dict[str, Any] = {"speculative": Speculative(), "block": Block(), "coupled": Coupled()}
TOY, PAIR = Toy(size=3, k=2, length=4), Toy(size=2, k=2, length=3)
by_rule = pytest.mark.parametrize("rule", list(RULES))


def test_every_registered_controller_is_one_of_these():
    assert {c.kind for c in CONTROLLERS.values()} == {*registry.CONTROLLERS, "toy_curious"}


@by_rule
@pytest.mark.parametrize("name", list(CONTROLLERS))
def test_the_output_has_the_targets_distribution(name, rule):
    found = Generations(TOY, CONTROLLERS[name], RULES[rule])
    assert found.distance < 1e-12
    assert len(found.lengths) > 1 or name in ("fixed", "total of one", "total of two")


def chosen_beside(controller, kept: int) -> int:
    """The limit of a row that kept nothing of its first block, beside one that kept so much of it."""
    asked, first = choices(PAIR, controller, 2, False), np.zeros((1, 2), np.int32)
    kept_of = np.asarray([[0, kept]], np.int32)
    after = PAIR.following[0, 0, kept_of, 0].astype(np.int32)
    block = first, first + 2, first, first + 2, kept_of, first, after
    state = jax.tree.map(lambda x: np.asarray(x)[None], asked.controller.init(2))
    limit, _ = asked.look(asked.learn(2, state, *block), after)
    return int(limit[0, 0])


@by_rule
@pytest.mark.parametrize("name", ["adaptive", "total of one"])
def test_rows_that_choose_together_are_as_independent_as_two_of_the_targets(name, rule):
    """A row's length depends on what was kept in the row beside it, which tells nothing of what either will draw."""
    assert chosen_beside(CONTROLLERS[name], kept=0) != chosen_beside(CONTROLLERS[name], kept=1)
    found = Generations(PAIR, CONTROLLERS[name], RULES[rule], rows=2)
    assert found.distance < 1e-12
    assert len(found.lengths) > 1


def run(kept: np.ndarray) -> np.ndarray:
    """How many tokens of each draft there are before the first that is not kept."""
    return np.cumprod(kept, axis=2).sum(2).astype(int)


def unlikely_dropped(toy: Toy) -> np.ndarray:
    """A threshold on a drawn token's own probability, where the token that falls below it is not verified."""
    return run(toy.q_drafted > 0.4)


def best_prefix(toy: Toy) -> np.ndarray:
    """The length of the most expected tokens for its time, by the chances of all tokens that were drawn."""
    kept = np.cumprod(np.minimum(1.0, toy.p_drafted / toy.q_drafted), axis=2)
    return np.argmax((1 + np.pad(np.cumsum(kept, axis=2), ((0, 0), (0, 0), (1, 0)))) / np.asarray(SECONDS), axis=2)


def as_many_as_were_likely(toy: Toy) -> np.ndarray:
    """A limit chosen before anything is verified, but with a look at the whole draft of this block."""
    return toy.likely.sum(2)


def any_of_them(toy: Toy) -> np.ndarray:
    """For no reason, but another length for every draft."""
    return np.random.default_rng(2).integers(0, toy.k + 1, toy.q_drafted.shape[:2])


@pytest.mark.parametrize("rule", ["speculative", "block"])
@pytest.mark.parametrize("shortcut", [unlikely_dropped, best_prefix, as_many_as_were_likely, any_of_them])
def test_a_choice_that_looks_at_what_it_drops_is_found(shortcut, rule):
    """From 0.022 up, where what is exact is so to 1e-12. `coupled` is not among them: in the engine it keeps what plain
    decoding with the same noise would choose, whatever is proposed."""
    assert Generations(TOY, Fixed(2), RULES[rule], most=shortcut(TOY)).distance > 0.02


def last_is_unlikely(toy: Toy) -> np.ndarray:
    """The same threshold, where the token that falls below it is the last that is verified, as in transformers."""
    return 1 + run(toy.q_drafted[:, :, :-1] > 0.4)


@by_rule
def test_a_draft_may_stop_after_a_token_that_it_still_proposes(rule):
    found = Generations(TOY, Fixed(2), RULES[rule], most=last_is_unlikely(TOY))
    assert found.distance < 1e-12
    assert found.lengths == {1, 2}


@by_rule
@pytest.mark.parametrize("cut", [best_prefix, any_of_them])
def test_a_draft_without_a_distribution_may_be_cut_anywhere(cut, rule):
    """Nothing of it was drawn, so no look at it tells of a draw."""
    found = Generations(TOY, Fixed(2), RULES[rule], most=cut(TOY), certain=True)
    assert found.distance < 1e-12
    assert found.lengths == {0, 1, 2}


@by_rule
def test_what_is_not_proposed_counts_as_little_as_what_is_not_there(rule):
    """The blocks of the enumeration are as long as the longest; the engine's as long as their rung."""
    for certain in (False, True):
        cut = TOY.chances(RULES[rule], certain, masked=False)
        np.testing.assert_allclose(TOY.chances(RULES[rule], certain), cut, atol=1e-15)
