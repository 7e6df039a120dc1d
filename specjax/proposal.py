"""A proposal as the target sees it: a chain, or a tree whose branches are alternatives for the same positions.

Node 0 is the root, the newest committed token, whose keys and values the target does not have yet; nodes 1 .. N are the
proposed tokens. In a tree a parent comes before its children, siblings share a position, and every node has a slot of
its own; a node sees the committed tokens and its own root-to-node path (2305.09781). For a chain, slots equal
positions, and nothing here gathers or masks.

Dims: B rows, N proposed nodes, N1 = N + 1, D largest depth (N for a chain), D1 = D + 1, L token buffer.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from specjax.interfaces import Context, Draft, Verdict


@flax.struct.dataclass
class Proposal:
    """A proposal as it is fed to the target: the root, the newest committed token, then the proposed tokens."""

    root: Int[Array, " B"]
    drafted: Int[Array, "B N"]
    start: Int[Array, " B"]
    """Slot of the root, which is its position too."""
    parents: Int[Array, "B N"] | None = None
    """The node that proposed token i (node i + 1) follows; None: a chain."""
    max_depth: int = flax.struct.field(pytree_node=False, default=0)
    """D, the most proposed tokens that can be accepted."""

    @classmethod
    def of(cls, context: Context, draft: Draft) -> Proposal:
        """The proposal of a drafter after the committed tokens of ``context``."""
        start = context.lengths - 1
        root = jnp.take_along_axis(context.tokens, start[:, None], axis=1)[:, 0]
        return cls(root, draft.tokens, start, draft.parents, draft.max_depth or draft.tokens.shape[1])

    @classmethod
    def chain(cls, context: Context, drafted: Int[Array, "B N"]) -> Proposal:
        """The proposal of a chain that is still being drafted."""
        return cls.of(context, Draft(drafted, jnp.ones(drafted.shape, bool)))

    @property
    def tokens(self) -> Int[Array, "B N1"]:
        """The tokens to feed, the root first."""
        return jnp.concatenate([self.root[:, None], self.drafted], axis=1)

    @property
    def slots(self) -> Int[Array, "B N1"]:
        """A cache slot of its own for each node."""
        return self.start[:, None] + jnp.arange(self.drafted.shape[1] + 1, dtype=jnp.int32)[None]

    @property
    def positions(self) -> Int[Array, "B N1"]:
        """Position of each node; siblings share one."""
        return self.slots if self.parents is None else self.start[:, None] + self.depth

    @property
    def depth(self) -> Int[Array, "#B N1"]:
        """Depth of each node: the number of proposed tokens on its root-to-node path, itself included."""
        if self.parents is None:
            return _index(self.drafted.shape[1] + 1)
        return depths(self.path)

    @property
    def mask(self) -> Bool[Array, "B N1 N1"] | None:
        """The attention mask: the nodes that each node sees; None for a chain: those before it and itself."""
        if self.parents is None:
            return None
        return jnp.pad(self.path, ((0, 0), (0, 0), (1, 0)), constant_values=True)

    @property
    def path(self) -> Bool[Array, "#B N1 N"]:
        """Membership in root-to-node paths. ``path[b, j, i]``: proposed token i is on the path to node j, possibly as
        its end."""
        count = self.drafted.shape[1]
        if self.parents is None:
            return jnp.tril(jnp.ones((count + 1, count), bool), -1)[None]
        return paths(self.parents)

    def prefix(self, node: int | Int[Array, ""]) -> tuple[Int[Array, "B D"], Int[Array, "#B"]]:
        """The proposed tokens on the path to ``node``, in order, and their number; later entries mean nothing."""
        depth = jax.lax.dynamic_index_in_dim(self.depth, node, axis=1, keepdims=False)
        if self.parents is None:
            return self.drafted, depth
        on = jax.lax.dynamic_index_in_dim(self.path, node, axis=1, keepdims=False)
        at = on[:, None] & (
            self.depth[:, None, 1:] == jnp.arange(1, self.max_depth + 1, dtype=jnp.int32)[None, :, None]
        )
        return jnp.sum(jnp.where(at, self.drafted[:, None], 0), axis=2), depth

    def closed(self, good: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
        """True for proposed tokens that are good together with all that come before them."""
        if self.parents is None:
            return jnp.cumprod(good.astype(jnp.int32), axis=1) > 0
        return jnp.all(~self.path[:, 1:] | good[:, None], axis=2)  # a node is on its own path

    def of_parents(self, values: Shaped[Array, "B N1"]) -> Shaped[Array, "B N"]:
        """The value of the node that each proposed token follows."""
        return values[:, :-1] if self.parents is None else jnp.take_along_axis(values, self.parents, axis=1)

    def offered(self, valid: Bool[Array, "B N"]) -> Int[Array, " B"]:
        """k_r, the largest depth with a proposed token. ``valid`` is closed (`closed`)."""
        if self.parents is None:
            return leading_run(valid)
        return jnp.max(jnp.where(valid, self.depth[:, 1:], 0), axis=1, initial=0)

    def follow(self, verdict: Verdict, valid: Bool[Array, "B N"]) -> Followed:
        """The path through the block that the verifier took."""
        count = verdict.num_accepted
        accepted, nodes, rejected = self.drafted, None, count < self.offered(valid)
        if self.parents is not None:
            assert verdict.path is not None  # a verifier that takes trees gives one
            nodes = jnp.pad(verdict.path, ((0, 0), (1, 0)))
            accepted = jnp.take_along_axis(self.drafted, jnp.maximum(verdict.path - 1, 0), axis=1)
            last = jnp.take_along_axis(nodes, count[:, None], axis=1)
            rejected = jnp.any(valid & (self.parents == last), axis=1)
        own = _index(self.max_depth + 1) == count[:, None]
        tokens = jnp.where(own, verdict.next_token[:, None], jnp.pad(accepted, ((0, 0), (0, 1))))
        return Followed(tokens, count, rejected, nodes)


@flax.struct.dataclass
class Followed:
    """A block after verification, as a chain whatever was proposed."""

    tokens: Int[Array, "B D1"]
    """The accepted tokens, then the target's own; later entries mean nothing."""
    num_accepted: Int[Array, " B"]
    """Number of proposed tokens that were accepted."""
    rejected: Bool[Array, " B"]
    """True if the target's own token stands in place of proposed tokens, which were rejected."""
    nodes: Int[Array, "B D1"] | None = None
    """The node that token j follows; None: node j."""

    def along(self, values: Shaped[Array, "B N1 ..."]) -> Shaped[Array, "B D1 ..."]:
        """The values of the nodes that the tokens follow, token by token."""
        if self.nodes is None:
            return values
        return jnp.take_along_axis(values, self.nodes.reshape(*self.nodes.shape, *[1] * (values.ndim - 2)), axis=1)

    def at_end(self, values: Shaped[Array, "B N1"]) -> Shaped[Array, " B"]:
        """The value of the node that the target's own token follows."""
        return jnp.take_along_axis(self.along(values), self.num_accepted[:, None], axis=1)[:, 0]


def paths(parents: Int[Array, "B N"]) -> Bool[Array, "B N1 N"]:
    """Membership in the root-to-node paths of a tree, see `Proposal.path`."""
    size = parents.shape[1] + 1
    above = jax.nn.one_hot(jnp.pad(parents, ((0, 0), (1, 0))), size, dtype=bool) | jnp.eye(size, dtype=bool)[None]
    # A node reaches itself and its parent; each round doubles its reach upwards.
    for _ in range((parents.shape[1] - 1).bit_length()):
        above = jnp.any(above[..., None] & above[:, None], axis=2)
    return above[..., 1:]


def depths(path: Bool[Array, "B N1 N"]) -> Int[Array, "B N1"]:
    """Depth of each node."""
    return jnp.sum(path, axis=2, dtype=jnp.int32)


def leading_run(accepted: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Number of accepted tokens before the first that is not."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _index(size: int) -> Int[Array, "1 size"]:
    return jnp.arange(size, dtype=jnp.int32)[None]
