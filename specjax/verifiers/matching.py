"""The common part of rules that know the target's choice at every node: they follow the proposal while it agrees.

Dims: B rows, N proposed tokens, N1 = N + 1, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.interfaces import Draft, Verdict
from specjax.proposal import leading_run
from specjax.verifiers.chain import row


def walk(draft: Draft, chosen: Int[Array, "B N1"], usable: Bool[Array, "B N1"]) -> Verdict:
    """The verdict that accepts proposed tokens while they equal the target's choice at the node before, then takes its
    choice at the last node. Where ``usable`` is false, the target has no choice."""
    if draft.parents is None:
        count = leading_run((draft.tokens == chosen[:, :-1]) & usable[:, :-1] & draft.valid)
        return Verdict(count, row(chosen, count))
    wanted = draft.valid & jnp.take_along_axis(usable, draft.parents, axis=1)
    wanted &= draft.tokens == jnp.take_along_axis(chosen, draft.parents, axis=1)
    node, count, path = jnp.zeros((len(chosen),), jnp.int32), jnp.zeros((len(chosen),), jnp.int32), []
    for _ in range(draft.max_depth or 0):
        next_ones = wanted & (draft.parents == node[:, None])
        found = jnp.any(next_ones, axis=1)
        node = jnp.where(found, jnp.argmax(next_ones, axis=1).astype(jnp.int32) + 1, node)
        count += found.astype(jnp.int32)
        path.append(node)
    return Verdict(count, row(chosen, node), jnp.stack(path, axis=1))
