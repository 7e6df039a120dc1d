"""Context-dependent distributions small enough to enumerate, and what a verifier's `distribution` makes of them, in
float64."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Draft, VerdictDistribution


class Tables:
    """T pairs of distributions: ``p[i]`` and ``q[i]`` of shape ``[T, V^i, V]``, after each prefix of i tokens."""

    def __init__(self, p, q):
        self.p, self.q = [np.asarray(x, np.float64) for x in p], [np.asarray(x, np.float64) for x in q]
        self.count, _, self.size = self.p[0].shape
        self.k = len(q)
        self.drafts = np.asarray(list(itertools.product(range(self.size), repeat=self.k)), np.int32)
        self._prefix = [self.drafts[:, :i] @ (self.size ** np.arange(i)[::-1]).astype(int) for i in range(self.k + 1)]
        self.p_rows = np.stack([p[:, rows] for p, rows in zip(self.p, self._prefix, strict=True)], axis=2)
        self.q_rows = np.stack([q[:, rows] for q, rows in zip(self.q, self._prefix, strict=False)], axis=2)
        """``[T, V^K, K (+ 1), V]``: along each draft."""
        drafted = np.broadcast_to(self.drafts[None, :, :, None], (*self.q_rows.shape[:3], 1))
        self.chance = np.prod(np.take_along_axis(self.q_rows, drafted, 3)[..., 0], axis=2)

    @property
    def joint(self) -> np.ndarray:
        """The target's distribution of K + 1 tokens, ``[T, V^(K + 1)]``."""
        distribution = np.ones((self.count, 1))
        for p in self.p:
            distribution = (distribution[..., None] * p).reshape(self.count, -1)
        return distribution

    def distribution(self, verifier, valid=None, certain: bool = False) -> VerdictDistribution:
        """``[T, V^K, ...]``: of every draft of every table."""
        flat = (self.count * len(self.drafts), -1)
        tokens = np.broadcast_to(self.drafts[None], (self.count, *self.drafts.shape)).reshape(flat)
        valid = np.ones(self.drafts.shape, bool) if valid is None else valid
        draft = Draft(jnp.asarray(tokens), jnp.asarray(np.tile(valid, (self.count, 1))))
        rows = [x.reshape(flat[0], *x.shape[2:]) for x in (self.p_rows, self.q_rows)]
        p, q = jnp.asarray(rows[0]), None if certain else jnp.asarray(rows[1])
        distribution = jax.jit(verifier.distribution)(draft, p, q)
        assert distribution.num_accepted.dtype == distribution.next_token.dtype == jnp.float64
        return jax.tree.map(lambda x: np.asarray(x).reshape(self.count, len(self.drafts), *x.shape[1:]), distribution)

    def output(self, distribution: VerdictDistribution, chance: np.ndarray | None = None) -> np.ndarray:
        """The distribution of the first K + 1 tokens, ``[T, V^(K + 1)]``: what a block emits, then the target's own.
        ``chance`` of the drafts, ``[T, V^K]``; the default is that of being drawn."""
        drawn = self.chance if chance is None else chance
        stopped = np.zeros((self.count, 1))
        for n in range(self.k + 1):
            mass = (drawn * distribution.num_accepted[..., n])[..., None] * distribution.next_token[:, :, n]
            ends = np.zeros((self.count, self.size**n, self.size))
            for draft, prefix in enumerate(self._prefix[n]):
                ends[:, prefix] += mass[:, draft]
            stopped = (stopped[..., None] * self.p[n] + ends).reshape(self.count, -1)
        return stopped

    def expected_accepted(self, distribution: VerdictDistribution) -> np.ndarray:
        """E[n] of each table."""
        return (self.chance * (distribution.num_accepted @ np.arange(self.k + 1.0))).sum(1)


def random_tables(seed: int, count: int, size: int, k: int) -> Tables:
    """A sixth each: dense; with zeros; p = q at half of the prefixes; ties; one-hot distributions; disjoint
    supports."""
    rng = np.random.default_rng(seed)
    kind = np.arange(count)[:, None, None] % 6

    def distributions(i):
        weights = rng.exponential(size=(count, size**i, size)) ** 2
        weights = np.where((kind == 1) & (rng.random(weights.shape) < 0.4), 0.0, weights)
        weights = np.where(kind == 3, rng.integers(0, 3, weights.shape), weights)
        weights = np.where(kind == 4, np.eye(size)[rng.integers(0, size, weights.shape[:2])], weights)
        weights[..., 0] += weights.sum(-1) == 0
        return weights

    def normal(weights):
        return weights / weights.sum(-1, keepdims=True)

    p, q = [distributions(i) for i in range(k + 1)], [distributions(i) for i in range(k)]
    for i in range(k):
        side = np.arange(size) < size // 2
        apart = (kind == 5) & (rng.random((count, size**i, 1)) < 0.7)
        p[i], q[i] = np.where(apart & side, 0.0, p[i]), np.where(apart & ~side, 0.0, q[i])
        same = (kind == 2) & (rng.random((count, size**i, 1)) < 0.5)
        q[i] = np.where(same, p[i], q[i])
    return Tables([normal(x) for x in p], [normal(x) for x in q])


def context_free(p, q, k: int) -> Tables:
    """The same p and q after every prefix."""
    size = len(p)
    distributions = [
        [np.tile(np.asarray(x, float), (1, size**i, 1)) for i in range(n)] for x, n in ((p, k + 1), (q, k))
    ]
    return Tables(*distributions)


def total_variation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(a - b).sum(-1) / 2
