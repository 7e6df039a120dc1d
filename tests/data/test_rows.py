"""Documents in, rows out: every token predicted once, from its own document alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data.corpus import BadRecordPolicy, Document, Part
from specjax.data.rows import Batches, ConcatenatedRows, Sequences, WholeSequenceRows, pack, spread_predictions, take
from specjax.errors import DataError
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model


def packed(length: int = 8) -> ConcatenatedRows:
    """Documents of 5, 1, 20 and 15 tokens."""
    return ConcatenatedRows(np.arange(41, dtype=np.int32), np.array([0, 5, 6, 26]), length)


def test_every_token_but_the_first_is_predicted_once():
    rows = packed()
    assert len(rows) == 5
    assert np.concatenate([rows[i].labels for i in range(5)]).tolist() == list(range(1, 41))
    for row in (rows[i] for i in range(5)):
        np.testing.assert_array_equal(row.labels[:-1], row.tokens[1:])


def test_no_document_predicts_the_start_of_the_next():
    rows = packed()
    uncounted = [int(token) for i in range(5) for token in rows[i].labels[np.asarray(rows[i].weight) == 0]]
    assert uncounted == [5, 6, 26]


def test_positions_and_segments_start_over_in_each_document():
    row = packed()[0]
    assert np.asarray(row.positions).tolist() == [0, 1, 2, 3, 4, 0, 0, 1]
    assert np.asarray(row.segments).tolist() == [0, 0, 0, 0, 0, 1, 2, 2]
    # A row that begins inside a document begins at position 0: what came before is not there to be attended to.
    assert np.asarray(packed()[1].positions).tolist() == list(range(8))


def test_too_little_text_for_one_row_is_refused():
    with pytest.raises(DataError, match="8 tokens, too few for one window of 9"):
        ConcatenatedRows(np.arange(8, dtype=np.int32), np.zeros(1, int), 8)


def test_a_model_sees_a_packed_document_as_it_sees_it_alone():
    model = Model(ModelConfig(48, 16, 24, 2, 2, 1, 8))
    params = jax.jit(model.init)(jax.random.key(0))
    run = jax.jit(lambda tokens, positions, mask=None: model(params, tokens, positions, mask=mask).logits)
    rows = ConcatenatedRows(np.arange(41, dtype=np.int32), np.array([0, 10, 20]), 40)
    batch = jax.tree.map(jnp.asarray, take(rows, [0]))
    logits = run(batch.tokens, batch.token_positions, batch.documents)
    for start in (0, 10):
        alone = run(batch.tokens[:, start : start + 10], jnp.arange(10)[None])
        np.testing.assert_allclose(logits[:, start : start + 10], alone, atol=2e-6)


def test_a_batch_is_a_function_of_seed_and_step():
    one, other = Batches(packed(4), 3, 0), Batches(packed(4), 3, 0)
    assert [one.indices(i).tolist() for i in range(7)] == [other.indices(i).tolist() for i in reversed(range(7))][::-1]
    epoch = np.concatenate([one.indices(i) for i in range(4)])[: len(packed(4))]
    assert sorted(epoch.tolist()) == list(range(10))
    assert one.indices(0).tolist() != Batches(packed(4), 3, 1).indices(0).tolist()
    np.testing.assert_array_equal(one[2].tokens[1], packed(4)[int(one.indices(2)[1])].tokens)


@pytest.mark.parametrize("prompt_weight", [0.0, 0.25, 1.0])
def test_a_prediction_counts_as_the_token_that_it_predicts(prompt_weight):
    prompt = np.zeros(41, bool)
    prompt[6:10] = prompt[20:23] = True
    rows = ConcatenatedRows(np.arange(41, dtype=np.int32), np.array([0, 5, 6, 26]), 8, prompt, prompt_weight)
    following = np.concatenate([rows[i].labels for i in range(5)])
    weight = np.concatenate([rows[i].weight for i in range(5)])
    starts = np.isin(following, (5, 6, 26))
    np.testing.assert_array_equal(weight, np.where(starts, 0, np.where(prompt[following], prompt_weight, 1)))


@pytest.mark.parametrize("opening", [(98,), (98, 99)])
def test_a_row_that_begins_inside_a_document_opens_as_a_text_does(opening):
    plain, size = packed(), len(opening)
    opened = ConcatenatedRows(plain.stream, plain.starts, plain.length, opening=opening)
    assert opened.digest != plain.digest
    for i in range(5):
        row, before = opened[i], plain[i]
        # The first row begins a document; the fourth has two tokens of one, which two would replace whole.
        replaced = 0 if i == 0 or (i, size) == (3, 2) else size
        np.testing.assert_array_equal(row.tokens, [*opening[:replaced], *np.asarray(before.tokens)[replaced:]])
        np.testing.assert_array_equal(row.labels[:-1], row.tokens[1:])
        # Of one token that opens a text all predictions are kept; of two, there is none of the second.
        np.testing.assert_array_equal(row.weight[: size - 1], 0 if replaced else before.weight[: size - 1])
        np.testing.assert_array_equal(row.weight[size - 1 :], before.weight[size - 1 :])
        np.testing.assert_array_equal([row.positions, row.segments], [before.positions, before.segments])


def test_a_document_that_ends_where_a_row_begins_is_not_opened_again():
    rows = ConcatenatedRows(np.arange(41, dtype=np.int32), np.array([0, 9, 18]), 8, opening=(99,))
    assert rows[1].tokens.tolist() == list(range(8, 16))
    assert rows[2].tokens.tolist() == [99, *range(17, 24)]


@pytest.mark.parametrize("answers", [4, 40, 400])
def test_positions_that_are_measured_are_those_that_count(answers):
    """Of 4,000 tokens in rows of 8, a few are an answer's."""
    prompt = np.ones(4001, bool)
    prompt[np.linspace(10, 3990, answers).astype(int)] = False
    rows = ConcatenatedRows(np.arange(4001, dtype=np.int32), np.array([0]), 8, prompt)
    for wanted in (1, 16, 200):
        found = np.count_nonzero(spread_predictions(rows, wanted).weight)
        assert found >= min(0.95 * wanted, answers)
        assert found == answers or found < 5 * wanted + 8
    whole = ConcatenatedRows(np.arange(4001, dtype=np.int32), np.array([0]), 8)
    assert spread_predictions(whole, 64).tokens.shape == (8, 8)


def test_rows_of_which_nothing_is_predicted_are_refused():
    """A loss over nothing would be 0. The first token of a document is predicted by nobody."""
    prompt = np.ones(41, bool)
    prompt[5] = False
    given = (np.arange(41, dtype=np.int32), np.array([0, 5]), 8, prompt)
    with pytest.raises(DataError, match="nothing of the corpus's 41 tokens is to be predicted, they are all prompts"):
        ConcatenatedRows(*given)
    assert ConcatenatedRows(*given, 0.5)[0].weight.max() == 0.5


def documents(*texts) -> list[Document]:
    return [Document(str(i), text) for i, text in enumerate(texts)]


def test_a_prompt_is_tokenized_by_itself_and_masked(tiny_tokenizer):
    document = Document("0", "def add(first", parts=(Part("def ad", True), Part("d(first", False)))
    rows = pack(tiny_tokenizer, [document], 0, 4)
    apart = [tiny_tokenizer(part.text)["input_ids"] for part in document.parts]
    assert rows.stream.tolist() == [*apart[0], *apart[1], 0]
    assert rows.prompt is not None
    assert rows.prompt.tolist() == [True] * len(apart[0]) + [False] * (len(apart[1]) + 1)
    assert rows.digest != pack(tiny_tokenizer, documents(document.text), 0, 4).digest


def test_a_chat_is_closed_by_its_template_alone(tiny_tokenizer):
    said = ({"role": "assistant", "content": "first"},)
    chat = Document("0", "print(first", parts=(Part("print", True), Part("(first", False)), messages=said)
    rows = pack(tiny_tokenizer, [chat], 0, 2)
    assert rows.stream.tolist() == [t for part in chat.parts for t in tiny_tokenizer(part.text)["input_ids"]]


def test_a_document_opens_as_the_tokenizer_opens_a_text(tiny_tokenizer):
    class Opening:
        def __call__(self, texts, add_special_tokens=True):
            if isinstance(texts, str):
                return {"input_ids": [7, *tiny_tokenizer(texts)["input_ids"]]}
            assert not add_special_tokens
            return tiny_tokenizer(texts)

    rows, plain = (pack(t, documents("def add", "return first"), 0, 4) for t in (Opening(), tiny_tokenizer))
    assert len(rows.stream) == len(plain.stream) + 2
    assert rows.stream[rows.starts].tolist() == [7, 7]
    np.testing.assert_array_equal(np.delete(rows.stream, rows.starts), plain.stream)
    assert (rows.opening, plain.opening) == ((7,), ())


def test_how_many_documents_are_tokenized_at_once_changes_nothing(tiny_tokenizer, monkeypatch):
    texts = documents(*(f"def function_{i}(value)" for i in range(7)))
    whole = pack(tiny_tokenizer, texts, 0, 8)
    monkeypatch.setattr("specjax.data.rows._TOKENIZED_AT_ONCE", 2)
    assert pack(tiny_tokenizer, texts, 0, 8).digest == whole.digest
    assert whole.stream.dtype == np.int32


def test_a_side_of_which_every_record_was_skipped_is_refused(tiny_tokenizer):
    with pytest.raises(DataError, match="the corpus has 0 tokens, too few for one window of 5; use more text"):
        pack(tiny_tokenizer, [], 0, 4)


def test_a_document_shorter_than_two_tokens_is_refused_or_counted(tiny_tokenizer):
    texts = documents("a", "return first + second")
    with pytest.raises(DataError, match=r"^0: 'a' has 1 of the tokenizer's tokens.*data\.on_bad=skip"):
        pack(tiny_tokenizer, texts, 0, 4)
    bad = BadRecordPolicy("skip")
    rows = pack(tiny_tokenizer, texts, 0, 4, bad=bad)
    assert bad.counts == {"documents shorter than two tokens": 1}
    assert rows.digest == pack(tiny_tokenizer, texts[1:], 0, 4).digest


def fitted(length: int = 8, **options) -> WholeSequenceRows:
    """Sequences of 5, 4, 2 and 9 tokens, with prompts of 2, 1, 1 and 3."""
    bounds = ((0, 2, 5), (5, 6, 9), (9, 10, 11), (11, 14, 20))
    prompts, continuations = zip(*((range(a, b), range(b, c)) for a, b, c in bounds), strict=True)
    return WholeSequenceRows(Sequences.of(prompts, continuations), length, **options)


def test_sequences_are_never_cut_and_rows_are_filled():
    rows = fitted()
    assert len(rows) == 3
    first, second, third = (rows[i] for i in range(3))
    assert first.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert np.asarray(first.segments).tolist() == [0] * 5 + [1] * 3
    assert np.asarray(first.positions).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    # Of each prediction: prompts and the first token of a sequence do not count.
    assert first.labels[first.weight > 0].tolist() == [2, 3, 4, 6, 7, 8]
    assert second.labels[second.weight > 0].tolist() == [10]
    assert third.labels[third.weight > 0].tolist() == list(range(14, 20))
    assert [len(fitted(alone=True)), len(fitted(19))] == [4, 1]
    unmasked = fitted(prompt_weight=1.0)[0]
    assert unmasked.labels[unmasked.weight == 0].tolist() == [5]
    counted = fitted(prompt_weight=0.5)[2]
    assert counted.weight.tolist() == [0.5, 0.5, 1, 1, 1, 1, 1, 1]


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(DataError, match="a sequence of 9 tokens does not fit a row of 8"):
        fitted(7)
