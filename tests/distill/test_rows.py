"""Documents in, rows out: every token predicted once, from its own document alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.distill.rows import Batches, Packed, take
from specjax.errors import DataError
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model


def packed(length: int = 8) -> Packed:
    """Documents of 5, 1, 20 and 15 tokens."""
    return Packed(np.arange(41, dtype=np.int32), np.array([0, 5, 6, 26]), length)


def test_every_token_but_the_first_is_predicted_once():
    rows = packed()
    assert len(rows) == 5
    assert np.concatenate([rows[i].following for i in range(5)]).tolist() == list(range(1, 41))
    for row in (rows[i] for i in range(5)):
        np.testing.assert_array_equal(row.following[:-1], row.tokens[1:])


def test_no_document_predicts_the_start_of_the_next():
    rows = packed()
    uncounted = [int(token) for i in range(5) for token in rows[i].following[np.asarray(rows[i].weight) == 0]]
    assert uncounted == [5, 6, 26]


def test_positions_and_segments_start_over_in_each_document():
    row = packed()[0]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1]
    assert row.segments.tolist() == [0, 0, 0, 0, 0, 1, 2, 2]
    # A row that begins inside a document begins at position 0: what came before is not there to be attended to.
    assert packed()[1].positions.tolist() == list(range(8))


def test_too_little_text_for_one_row_is_refused():
    with pytest.raises(DataError, match="8 tokens, too few for one window of 9"):
        Packed(np.arange(8, dtype=np.int32), np.zeros(1, int), 8)


def test_a_model_sees_a_packed_document_as_it_sees_it_alone():
    model = Model(ModelConfig(48, 16, 24, 2, 2, 1, 8))
    params = model.init(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, take(packed(40), [0]))
    logits = model(params, batch.tokens, batch.token_positions, mask=batch.attention_mask).logits
    for start, end in ((0, 5), (5, 6), (6, 26), (26, 40)):
        alone = batch.tokens[:, start:end]
        expected = model(params, alone, jnp.arange(end - start)[None]).logits
        np.testing.assert_allclose(logits[:, start:end], expected, atol=2e-6)


def test_a_batch_is_a_function_of_seed_and_step():
    one, other = Batches(packed(4), 3, 0), Batches(packed(4), 3, 0)
    assert [one.indices(i).tolist() for i in range(7)] == [other.indices(i).tolist() for i in reversed(range(7))][::-1]
    epoch = np.concatenate([one.indices(i) for i in range(4)])[: len(packed(4))]
    assert sorted(epoch.tolist()) == list(range(10))
    assert one.indices(0).tolist() != Batches(packed(4), 3, 1).indices(0).tolist()
    np.testing.assert_array_equal(one[2].tokens[1], packed(4)[int(one.indices(2)[1])].tokens)
