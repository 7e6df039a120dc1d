"""Whole generations with lengths chosen by a controller, enumerated in float64: every draft, every verdict, every
choice of a length by what the blocks before became.

Breadth first, a block at a time: a node is where a generation can be between two blocks (what is committed, and the
controller's state), and all of them are rows of a few calls of one size. What a rule does with a block depends on the
prefix, the draft and how much of it is proposed, and is asked once. Every block has noise of its own, with `coupled`
too, whose engine gives a place the same noise again: there no choice could show at all.

Dims: N nodes, R rows of a batch, K draft length, D drafts of K tokens, V vocabulary, M transitions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Calibration, Context, Draft, Outcome, Output, Verdict
from specjax.testing.toys import context, neutral_sampling
from tests.controllers.choices import bound

NODES = 2048
"""Of one call, the last of them repeated, so that each function is compiled once."""
SECONDS, ACCEPTANCE = [1.0, 1.25, 1.6], [0.6, 0.5]
"""Of the calibration; no length is the best whatever was kept."""


class Toy:
    """A target and a draft with a distribution of their own after every prefix. Prefixes are numbered as the nodes of a
    tree, the empty one 0, and those of ``length`` tokens are ends."""

    def __init__(self, size: int, k: int, length: int):
        self.size, self.k, self.length = size, k, length
        self.drafts = np.asarray(list(itertools.product(range(size), repeat=k)), np.int32)
        self.depth = np.repeat(np.arange(length + k + 1), size ** np.arange(length + k + 1))
        self.p, self.q = (self._distributions(seed) for seed in (0, 1))
        self.open, self.ends = (int((self.depth < d).sum()) for d in (length, length + 1))
        self.tokens = np.zeros((len(self.depth), length + k), np.int32)
        for i in range(1, len(self.depth)):
            parent, at = (i - 1) // size, self.depth[i] - 1
            self.tokens[i, :at], self.tokens[i, at] = self.tokens[parent, :at], (i - 1) % size
        ways = [np.broadcast_to(np.arange(self.open)[:, None], (self.open, len(self.drafts)))]
        for drawn in self.drafts.T:
            ways.append(self.child(ways[-1], drawn))
        self.along = np.stack(ways, axis=2)
        """``[open, D, K + 1]``: where the first 0 .. K tokens of each draft lead."""
        drawn = np.broadcast_to(self.drafts[None, :, :, None], (self.open, *self.drafts.shape, 1))
        at = self.along[:, :, :-1]
        self.p_drafted, self.q_drafted = (np.take_along_axis(x[at], drawn, 3)[..., 0] for x in (self.p, self.q))
        self.likely = self.q[at].argmax(-1) == drawn[..., 0]
        """Whether a token is the draft's most likely one; like ``p_drafted`` and ``q_drafted`` ``[open, D, K]``."""

    def _distributions(self, seed: int) -> np.ndarray:
        weights = np.random.default_rng(seed).exponential(size=(len(self.depth), self.size)) ** 2
        return weights / weights.sum(1, keepdims=True)

    def child(self, prefix: np.ndarray, token: np.ndarray) -> np.ndarray:
        return prefix * self.size + 1 + token

    @functools.cached_property
    def target(self) -> np.ndarray:
        """The chance of every prefix in plain sampling; its ends are the output."""
        chance = np.ones(1)
        for d in range(self.length):
            chance = (chance[:, None] * self.p[self.depth == d]).reshape(-1)
        return chance

    @functools.cached_property
    def following(self) -> np.ndarray:
        """``[ends, D, K + 1, V]``: where n tokens of a draft and one of the target's own lead; an end stays."""
        found = self.child(self.along[..., None], np.arange(self.size))
        for _ in range(self.k):  # what a block has too much is cut
            found = np.where(self.depth[found] > self.length, (found - 1) // self.size, found)
        stays = np.broadcast_to(
            np.arange(self.open, self.ends)[:, None, None, None], (self.ends - self.open, *found.shape[1:])
        )
        return np.concatenate([found, stays])

    def chances(self, rule: Any, certain: bool = False, masked: bool = True) -> np.ndarray:
        """``[ends, K + 1, D, K + 1, V]``: after each prefix, if the first 0 .. K tokens of a draft are proposed, the
        chance of each draft, of how many of its tokens are kept, and of the token that follows."""
        return _chances(self, rule, certain, masked)


@functools.cache
def _distribution(rule: Any):
    return jax.jit(rule.distribution)


@functools.cache
def _chances(toy: Toy, rule: Any, certain: bool, masked: bool) -> np.ndarray:
    """``masked``: what is not proposed is there, but not valid, as where another row proposes more."""
    drawn = toy.likely.all(2).astype(float) if certain else toy.q_drafted.prod(2)
    tokens = np.tile(toy.drafts, (toy.open, 1))
    found = np.zeros((toy.ends, toy.k + 1, len(toy.drafts), toy.k + 1, toy.size))
    found[toy.open :, :, 0, 0, 0] = 1.0
    for k in range(toy.k + 1):
        depth = toy.k if masked else k
        valid = np.broadcast_to(np.arange(depth) < k, (len(tokens), depth))
        p, q = (x[toy.along.reshape(len(tokens), -1)] for x in (toy.p, toy.q))
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            draft = Draft(jnp.asarray(tokens[:, :depth]), jnp.asarray(valid))
            deterministic = certain or not depth
            told = _distribution(rule)(
                draft, jnp.asarray(p[:, : depth + 1]), None if deterministic else jnp.asarray(q[:, :depth])
            )
            assert told.num_accepted.dtype == told.next_token.dtype == jnp.float64
        kept = np.asarray(told.num_accepted)[..., None] * np.asarray(told.next_token)
        kept = np.where(np.asarray(told.num_accepted)[..., None] > 0, kept, 0.0)
        found[: toy.open, k, :, : depth + 1] = drawn[..., None, None] * kept.reshape(*drawn.shape, depth + 1, toy.size)
    return found


class Choices:
    """What a controller decides and learns at many nodes at once; each is a batch of ``rows`` of its own."""

    def __init__(self, toy: Toy, controller: Any, rows: int, certain: bool):
        self.toy, self.controller, self.rows, self.certain = toy, controller, rows, certain
        self.rungs = controller.compiled_lengths or (toy.k,)
        self.tables = {
            "log p": np.log(toy.p).astype(np.float32),
            "log q": np.log(toy.q).astype(np.float32),
            "depth": toy.depth.astype(np.int32),
            "tokens": np.pad(toy.tokens, ((0, 0), (1, 0)), constant_values=1),
            "along": np.pad(toy.along, ((0, toy.ends - toy.open), (0, 0), (0, 0))).astype(np.int32),
        }
        self._look = jax.jit(jax.vmap(self._looked, (None, 0, 0)))
        self._learn = jax.jit(jax.vmap(self._learnt, (None, None, 0, 0, 0, 0, 0, 0, 0, 0)), static_argnums=0)

    def look(self, state: Any, prefix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each row, ``limit [N, R]`` and how many tokens of each draft are proposed ``[N, R, D]``."""
        return in_calls(functools.partial(self._look, self.tables), state, prefix)

    def learn(self, depth: int, state: Any, *blocks: np.ndarray) -> Any:
        """The states ``[M, R, ...]`` after blocks that the target saw ``depth`` drafted tokens of."""
        return in_calls(functools.partial(self._learn, depth, self.tables), state, *blocks)

    def fed(self, proposed: np.ndarray) -> np.ndarray:
        """How long the block of a batch is, ``[M]``: the lowest rung that holds the row of most proposals."""
        rungs = np.asarray(self.rungs)
        return rungs[np.searchsorted(rungs, proposed.max(1))]

    def _seen(self, tables: Any, state: Any, prefix: Any, limit: Any) -> Context:
        depth = tables["depth"][prefix]
        found = context(tables["tokens"][prefix], depth + 1, neutral_sampling(self.rows, self.toy.size))
        return dataclasses.replace(
            found,
            prompt_lengths=jnp.ones_like(depth),
            controller=self.controller,
            controller_state=state,
            limit=limit,
            calibration=Calibration(jnp.asarray(SECONDS, jnp.float32), jnp.asarray(ACCEPTANCE, jnp.float32)),
            active=depth < self.toy.length,
        )

    def _looked(self, tables: Any, state: Any, prefix: Any) -> tuple[Any, Any]:
        seen = self._seen(tables, state, prefix, None)
        chosen = self.controller.choose(state, seen)
        limit = jnp.where(
            jnp.asarray(seen.active), self.toy.k if chosen is None else jnp.minimum(chosen, self.toy.k), 0
        )

        def proposed(way):
            going, count = limit > 0, jnp.zeros_like(limit)
            for i in range(self.toy.k):
                stops = self.controller.stop(state, tables["log q"][way[:, i]], i)
                going = going & (i < limit) if stops is None else going & (i < limit) & ~stops
                count = count + going.astype(jnp.int32)
            return count

        return limit, jax.vmap(proposed, in_axes=1, out_axes=1)(tables["along"][prefix])

    def _learnt(self, depth, tables, state, prefix, limit, which, proposed, n, token, following) -> Any:
        seen = self._seen(tables, state, prefix, limit)
        drafted = jnp.asarray(self.toy.drafts)[which]
        at = jnp.take_along_axis(tables["along"][prefix], which[:, None, None], axis=1)[:, 0]
        valid = jnp.arange(depth, dtype=jnp.int32)[None] < proposed[:, None]
        logits = None if self.certain or not depth else tables["log q"][at[:, :depth]]
        out = Output(tables["log p"][at[:, : depth + 1]])
        own = jnp.arange(depth + 1, dtype=jnp.int32)[None] == n[:, None]
        tokens = jnp.where(own, token[:, None], jnp.pad(drafted[:, :depth], ((0, 0), (0, 1))))
        emitted = tables["depth"][following] - tables["depth"][prefix]
        draft = Draft(drafted[:, :depth], valid, logits)
        return self.controller.adapt(state, Outcome(seen, draft, out, Verdict(n, token), emitted, tokens))


@functools.cache
def choices(toy: Toy, controller: Any, rows: int, certain: bool) -> Choices:
    return Choices(toy, bound(controller, toy.k), rows, certain)


def in_calls(function: Any, *columns: Any) -> Any:
    """``function`` of all rows, `NODES` at a time."""
    count, found = len(columns[-1]), []
    for start in range(0, count, NODES):
        rows = np.minimum(np.arange(start, start + NODES), count - 1)
        found.append(jax.tree.map(np.asarray, function(*at(columns, rows))))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *found)


class Generations:
    """All generations of a controller with a rule, each row of the batch from the same prompt. ``most``: how many
    tokens of each draft are proposed at most ``[open, D]``, whatever the controller says; ``certain``: the draft
    proposes its most likely tokens, as a drafter without a distribution does."""

    def __init__(
        self,
        toy: Toy,
        controller: Any,
        rule: Any,
        *,
        rows: int = 1,
        most: np.ndarray | None = None,
        certain: bool = False,
    ):
        self.toy, self.rows = toy, rows
        self.most = np.full((toy.open, len(toy.drafts)), toy.k) if most is None else most
        self.most = np.concatenate([self.most, np.zeros((toy.ends - toy.open, len(toy.drafts)), int)])
        self.choices, self.chances = choices(toy, controller, rows, certain), toy.chances(rule, certain)
        self.lengths: set[int] = set()
        """How much was proposed."""
        self.output = np.zeros((toy.ends - toy.open,) * rows)
        self._run()

    @property
    def distance(self) -> float:
        """Total variation from the target's distribution; of several rows, from as many independent ones."""
        joint = functools.reduce(np.multiply.outer, [self.toy.target] * self.rows)
        assert abs(self.output.sum() - 1.0) < 1e-12
        return float(np.abs(self.output - joint).sum() / 2)

    def _run(self) -> None:
        prefix, weight = np.zeros((1, self.rows), np.int32), np.ones(1)
        state = jax.tree.map(lambda x: np.asarray(x)[None], self.choices.controller.init(self.rows))
        while len(prefix):
            prefix, state, weight = self._block(prefix, state, weight)

    def _block(self, prefix: np.ndarray, state: Any, weight: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
        """The nodes a block later; what has ended is added to the output."""
        toy, drafts = self.toy, np.arange(len(self.toy.drafts))
        limit, proposed = self.choices.look(state, prefix)
        proposed = np.minimum(proposed, self.most[prefix]).astype(np.int32)
        chance = self.chances[prefix[..., None], proposed, drafts]
        self.lengths |= set(proposed[(chance.sum((3, 4)) > 0) & (prefix < toy.open)[..., None]].tolist())
        node, what, mass = joint(weight, chance.reshape(*prefix.shape, -1))
        which, n, token = (x.astype(np.int32) for x in np.unravel_index(what, chance.shape[2:]))
        after = toy.following[prefix[node], which, n, token].astype(np.int32)
        ended = np.all(after >= toy.open, axis=1)
        np.add.at(self.output, tuple((after[ended] - toy.open).T), mass[ended])
        proposed = np.take_along_axis(proposed[node], which[..., None], 2)[..., 0]
        blocks = prefix[node], limit[node], which, proposed, n, token, after
        return self._merged(*at((at(state, node), blocks, mass), ~ended))

    def _merged(self, state: Any, blocks: tuple, mass: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
        """Where the blocks lead. Nodes that nothing tells apart from here on are one."""
        after, fed = blocks[-1], self.choices.fed(blocks[3])
        order = np.argsort(fed, kind="stable")
        lengths = np.unique(fed).tolist()
        learnt = [self.choices.learn(depth, *at((state, *blocks), fed == depth)) for depth in lengths]
        if not learnt:
            return after, state, mass
        state, after, mass = jax.tree.map(lambda *parts: np.concatenate(parts), *learnt), after[order], mass[order]
        columns = [np.ascontiguousarray(x).reshape(len(mass), -1) for x in (after, *jax.tree.leaves(state))]
        bits = np.concatenate([x.view(np.uint8) for x in columns], axis=1)
        _, first, of = np.unique(bits.view(f"V{bits.shape[1]}")[:, 0], return_index=True, return_inverse=True)
        return after[first], at(state, first), np.bincount(of, mass, len(first))


def joint(weight: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All that can happen, if T things can in each row of each node, ``chance [N, R, T]``: the node ``[M]``, what in
    its rows ``[M, R]``, and how likely it is ``[M]``."""
    count, rows, kinds = chance.shape
    together = weight[:, None]
    for row in range(rows):
        together = (together[:, :, None] * chance[:, row, None]).reshape(count, -1)
    node, what = np.nonzero(together)
    return node, np.stack(np.unravel_index(what, (kinds,) * rows), axis=1), together[node, what]


def at(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x: x[rows], tree)
