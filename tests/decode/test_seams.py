"""The seams, through those who live in them: a drafter that equals its target has every token accepted, and whoever
proposes, the output is that of plain decoding."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.decoder import Decoder
from specjax.decode.programs import compiled_chunk
from specjax.drafters.base import StatelessDrafter
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError
from specjax.interfaces import Draft, Reads, TargetView, Verdict
from specjax.models.config import LayerKind
from specjax.proposal import Proposal
from specjax.testing.inhabitants import CacheReader, Changing, HiddenReader, Tree
from specjax.testing.toys import context, exact_distribution, neutral_sampling, prefix_model, related
from tests.cases import in_proof, transformer
from tests.decode import distributions, test_lossless

TARGET = prefix_model(0, vocab_size=5, eos_ids=(4,))
DRAFT = related(TARGET, 1, 0.5)
PROMPTS = [[1], [1, 2, 3], [3, 1, 2, 0, 2], [2] * 9]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("greedy", {"temperature": 0.0}),
    "coupled": ("coupled", {"temperature": 1.0}),
    "parameters": ("coupled", {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5}),
}
READERS = {"hidden": HiddenReader(3), "cache": CacheReader(3)}
SELF = {"tree": Tree(TARGET, 2, 3), "wide tree": Tree(TARGET, 3, 2)} | READERS
OTHERS = {"tree": Tree(DRAFT, 2, 3)}
SHORT_TREE = Tree(related(test_lossless.TARGET, 1), 2, 2)


@pytest.mark.parametrize("mode", ["greedy", "coupled", in_proof("parameters")])
@pytest.mark.parametrize("name", ["tree", "hidden", "cache", in_proof("wide tree")])
def test_a_drafter_that_equals_its_target_has_every_token_accepted(name, mode):
    verifier, options = MODES[mode]
    drafter = SELF[name]
    result = Decoder(TARGET, drafter, verifier).generate(PROMPTS, **OPTIONS, **options)
    plain = Decoder(TARGET, None, verifier).generate(PROMPTS, **OPTIONS, **options)
    assert result.tokens == plain.tokens
    depth = drafter.k
    for stats in result.stats:
        assert stats.accepted == stats.drafted == stats.blocks * depth
        assert stats.blocks == -(-40 // (depth + 1))
    assert {origin for row in result.origins for origin in row} == {"accepted", "bonus"}


@pytest.mark.parametrize("name", list(READERS))
def test_a_reader_has_every_sampled_token_accepted(name):
    result = Decoder(TARGET, READERS[name], "speculative").generate(PROMPTS, **OPTIONS, temperature=1.0)
    assert all(stats.accepted == stats.drafted for stats in result.stats)


@pytest.mark.parametrize("mode", [in_proof("greedy"), in_proof("coupled"), "parameters"])
def test_a_tree_of_another_model_gives_what_plain_decoding_gives(mode):
    verifier, options = MODES[mode]
    decoder = Decoder(TARGET, OTHERS["tree"], verifier)
    result, plain = (d.generate(PROMPTS, **OPTIONS, **options) for d in (decoder, Decoder(TARGET, None, verifier)))
    assert result.tokens == plain.tokens
    accepted = sum(stats.accepted for stats in result.stats)
    assert 0 < accepted < sum(stats.drafted for stats in result.stats)
    chain = Decoder(TARGET, DraftModel(DRAFT, 3), verifier).generate(PROMPTS, **OPTIONS, **options)
    assert accepted > sum(stats.accepted for stats in chain.stats), "two of the best at every place beat the best one"
    ended = decoder.generate(PROMPTS, max_new_tokens=40, **options)
    assert ended.tokens == Decoder(TARGET, None, verifier).generate(PROMPTS, max_new_tokens=40, **options).tokens
    logprobs, wanted = (
        d.generate(PROMPTS, **OPTIONS, **options, logprobs="processed").logprobs
        for d in (decoder, Decoder(TARGET, None, verifier))
    )
    assert logprobs is not None
    assert wanted is not None
    for row, want in zip(logprobs, wanted, strict=True):
        np.testing.assert_allclose(row, want, atol=1e-4)


@pytest.mark.parametrize(
    "layers", [{}, {"num_layers": 2, "layers": (LayerKind(window=6), LayerKind())}], ids=["", "windows"]
)
def test_a_tree_goes_through_a_transformer(layers):
    """Laid out as decoding reads it, with a cache folded in the loop, rotary positions and windows."""
    target = transformer(0, **layers)
    draft = dataclasses.replace(target, params=jax.tree.map(lambda x: x * 1.05, target.params))
    prompts = [[1, 2, 3], list(range(20)), [7] * 11]
    plain = Decoder(target).generate(prompts, max_new_tokens=30, temperature=0.0)
    found = Decoder(target, Tree(draft, 2, 2)).generate(prompts, max_new_tokens=30, temperature=0.0)
    assert found.tokens == plain.tokens
    same = Decoder(target, Tree(target, 2, 2)).generate(prompts, max_new_tokens=30, temperature=0.0)
    assert same.tokens == plain.tokens
    assert all(stats.accepted == stats.drafted for stats in same.stats)


@pytest.mark.more
def test_a_processor_sees_each_branch_of_a_tree():
    options = {**OPTIONS, "temperature": 1.0, "logits_processor": test_lossless.shy}
    found, plain = (
        Decoder(TARGET, drafter, "coupled").generate(PROMPTS, **options) for drafter in (OTHERS["tree"], None)
    )
    assert found.tokens == plain.tokens


@pytest.mark.proof
def test_the_distribution_of_three_tokens_of_a_tree():
    """With fewer rows than chains have: that its tokens are those of plain sampling is tested above."""
    decoder = Decoder(test_lossless.TARGET, SHORT_TREE, "coupled")
    distribution = exact_distribution(test_lossless.TARGET, test_lossless.PROMPT, 3)
    distributions.check_law(decoder, test_lossless.PROMPT, 3, distribution, distributions.SMOKE)


def test_a_tree_is_never_verified_as_a_chain():
    for verifier in ("speculative", "block", "typical"):
        with pytest.raises(ConfigError, match=f"verifier '{verifier}' takes chains, and the drafter proposes trees"):
            Decoder(TARGET, Tree(DRAFT), verifier).generate([[1]], max_new_tokens=4, temperature=1.0)


@pytest.mark.parametrize(
    ("drafter", "mode"),
    [("draft", "coupled"), ("tree", "greedy"), in_proof("draft", "greedy"), in_proof("tree", "coupled")],
)
def test_a_length_that_changes_with_every_block_changes_no_token(drafter, mode):
    verifier, options = MODES[mode]
    proposer = DraftModel(DRAFT, 3) if drafter == "draft" else OTHERS["tree"]
    decoder = Decoder(TARGET, proposer, verifier, Changing(3, 0.9))
    result, plain = (d.generate(PROMPTS, **OPTIONS, **options) for d in (decoder, Decoder(TARGET, None, verifier)))
    assert result.tokens == plain.tokens
    for stats in result.stats:
        most = [sum(1 for block in range(stats.blocks) if block % 4 > j) for j in range(3)]
        assert all(drafted <= at_most for drafted, at_most in zip(stats.drafted_at, most, strict=True))
        assert stats.drafted_at[0] > stats.drafted_at[2] > 0 or drafter == "draft"


def test_a_length_moves_no_other_rows_noise():
    """And a row that chooses the whole block has what it has without a controller."""
    whole = Decoder(TARGET, DraftModel(DRAFT, 3)).generate(PROMPTS, **OPTIONS, temperature=1.0)
    same = Decoder(TARGET, DraftModel(DRAFT, 3), controller={"kind": "fixed", "k": 3})
    assert same.generate(PROMPTS, **OPTIONS, temperature=1.0).tokens == whole.tokens
    decoder = Decoder(TARGET, DraftModel(DRAFT, 3), controller=Changing(3))
    together = decoder.generate(PROMPTS, **OPTIONS, temperature=1.0)
    for i, prompt in enumerate(PROMPTS):
        alone = decoder.generate([prompt], **OPTIONS, temperature=1.0, seed=[together.seeds[i]])
        assert alone.tokens[0] == together.tokens[i]


def test_a_fixed_length_is_that_of_a_shorter_drafter():
    short = Decoder(TARGET, DraftModel(DRAFT, 2)).generate(PROMPTS, **OPTIONS, temperature=0.0)
    cut = Decoder(TARGET, DraftModel(DRAFT, 5), controller={"kind": "fixed", "k": 2})
    found = cut.generate(PROMPTS, **OPTIONS, temperature=0.0)
    assert found.tokens == short.tokens
    assert [stats.accepted_at[:2] for stats in found.stats] == [stats.accepted_at for stats in short.stats]
    assert all(stats.drafted_at[2:] == (0, 0, 0) for stats in found.stats)


PARENTS = [[0, 0, 1, 1, 2], [0, 1, 2, 0, 4]]


def tree() -> Proposal:
    tokens = jnp.asarray([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    seen = context(jnp.zeros((2, 12), jnp.int32), [3, 7], neutral_sampling(2, 10))
    return Proposal.of(seen, Draft(tokens, tokens > 0, None, jnp.asarray(PARENTS), max_depth=3))


def test_a_tree_knows_positions_slots_paths_and_what_each_node_sees():
    proposal = tree()
    assert proposal.slots.tolist() == [[2, 3, 4, 5, 6, 7], [6, 7, 8, 9, 10, 11]]
    assert proposal.positions.tolist() == [[2, 3, 3, 4, 4, 4], [6, 7, 8, 9, 7, 8]]
    for row, parents in enumerate(PARENTS):
        paths = [[]]
        for node, parent in enumerate(parents, 1):
            paths.append([*paths[parent], node])
        for node, path in enumerate(paths):
            assert np.flatnonzero(np.asarray(proposal.mask)[row, node]).tolist() == [0, *path]
            tokens, count = proposal.prefix(node)
            wanted = [int(proposal.drafted[row, i - 1]) for i in path]
            assert tokens[row, : int(count[row])].tolist() == wanted


def test_a_tree_is_closed_from_the_root_and_followed_to_where_the_verifier_went():
    proposal = tree()
    good = jnp.asarray([[True, False, True, True, True], [False, True, True, True, True]])
    closed = proposal.closed(good)
    assert closed.tolist() == [[True, False, True, True, False], [False, False, False, True, True]]
    assert proposal.offered(closed).tolist() == [2, 2]
    verdict = Verdict(jnp.asarray([1, 2]), jnp.asarray([0, 0]), jnp.asarray([[1, 1, 1], [4, 5, 5]]))
    followed = proposal.follow(verdict, closed)
    assert followed.tokens[0, :2].tolist() == [5, 0]
    assert followed.tokens[1, :3].tolist() == [4, 5, 0]
    assert followed.rejected.tolist() == [True, False]
    values = jnp.arange(12).reshape(2, 6)
    assert followed.at_end(values).tolist() == [1, 11]


def test_a_chain_is_the_tree_of_one_branch():
    chain = Proposal.chain(
        context(jnp.zeros((1, 9), jnp.int32), [3], neutral_sampling(1, 10)), jnp.asarray([[4, 5, 6, 7, 8, 9]])
    )
    branch = dataclasses.replace(chain, parents=jnp.asarray([[0, 1, 2, 3, 4, 5]]))
    assert chain.mask is None
    for name in ("positions", "slots", "depth", "path"):
        np.testing.assert_array_equal(getattr(chain, name), getattr(branch, name))
    good = jnp.asarray([[True, True, False, True, True, True]])
    valid = chain.closed(good)
    np.testing.assert_array_equal(valid, branch.closed(good))
    np.testing.assert_array_equal(chain.offered(valid), branch.offered(valid))
    way = jnp.asarray([[1, 2, 3, 4, 5, 6]])
    for count in range(3):
        of_chain = chain.follow(Verdict(jnp.asarray([count]), jnp.asarray([9])), valid)
        of_branch = branch.follow(Verdict(jnp.asarray([count]), jnp.asarray([9]), way), valid)
        for name in ("tokens", "num_accepted", "rejected"):
            got, want = (np.asarray(getattr(x, name))[..., : count + 1] for x in (of_branch, of_chain))
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["draft", "hidden"])
def test_a_prompt_that_comes_in_pieces_is_read_as_a_whole_one(name):
    """Rows of different lengths, one of which has all of its tokens in the first piece; then what was proposed."""
    drafter = {"draft": DraftModel(DRAFT, 3), "hidden": HiddenReader(3)}[name]
    bound, params = drafter.bind(TARGET)
    reads, batch, slots = bound.reads, 3, 16
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 4, (batch, 9)), jnp.int32)
    lengths = jnp.asarray([9, 4, 6], jnp.int32)  # with the root
    more = {"reads": reads} if reads else {}

    def extended(ends):
        state, cache, start = bound.init(batch, slots), TARGET.spec.init_cache(batch, slots), 0
        for end in ends:
            at = jnp.broadcast_to(jnp.arange(start, end, dtype=jnp.int32)[None], (batch, end - start))
            out = TARGET.spec(TARGET.params, tokens[:, start:end], at, at, cache, **more)
            counts = jnp.clip(lengths - 1 - start, 0, end - start)
            where = jnp.full((batch,), start, jnp.int32)
            state, cache = bound.extend(params, state, tokens[:, start:end], counts, out, where), out.cache
            start = end
        seen = context(tokens, lengths, neutral_sampling(batch, 5))
        draft, _ = bound.draft(params, TargetView({}), state, seen)
        return draft.tokens

    whole = extended([9])
    np.testing.assert_array_equal(extended([4, 9]), whole)
    np.testing.assert_array_equal(extended([1, 2, 8, 9]), whole)
    assert len({tuple(row) for row in np.asarray(whole).tolist()}) > 1


@dataclasses.dataclass(frozen=True)
class Glance(StatelessDrafter):
    """Three guesses from the target's keys and values of layer 0, or from nothing; each in a loop of its own."""

    reads: Reads
    k: int = 3
    kind: Literal["glance"] = "glance"

    def draft(self, params, target, state, context):
        batch = len(context.lengths)

        def guess(before, _):
            lengths: Any = target.lengths
            seen = before[:, None, None].astype(jnp.float32)
            for keys, values in target.keys_values:
                counts = jnp.repeat(lengths, len(keys) // batch)[:, None] > jnp.arange(keys.shape[-2])[None]
                weight = jnp.where(counts, jnp.max(keys, axis=-1) + jnp.repeat(seen[:, 0], len(keys) // batch, 0), 0.0)
                seen = jnp.einsum("hs,hcs->hc", weight, values).reshape(batch, 1, -1)
            found = jnp.sum(jnp.abs(seen), axis=(1, 2)).astype(jnp.int32) % 5
            return found, found

        _, tokens = jax.lax.scan(guess, jnp.zeros((batch,), jnp.int32), length=self.k)
        return Draft(tokens.T, jnp.ones((batch, self.k), bool)), state


class Hoards(Glance):
    """Keeps what it may only look at."""

    def init(self, batch, num_slots):
        config = transformer(0).config
        return jnp.zeros((batch * config.num_kv_heads, num_slots, config.head_dim))

    def draft(self, params, target, state, context):
        draft, _ = super().draft(params, target, state, context)
        return draft, target.keys_values[0][0]


def copies_of_a_cache(drafter: Glance, rows: int) -> int:
    """Copies of an array of the size of the cache's in the compiled loop."""
    decoder = Decoder(transformer(0), drafter, "greedy")
    state = decoder.prefilled([[1, 2, 3]] * rows, max_new_tokens=20, temperature=0.0)
    engine, params = decoder.engine(True)
    text: Any = compiled_chunk(engine).lower(params, state, jnp.int32(100)).compile().as_text()
    sizes = {x.size for layer in state.cache.layers for x in (layer.keys, layer.values)}
    found = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)
    return sum(math.prod(map(int, shape.split(","))) in sizes for shape in found)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_reader_of_keys_and_values_makes_no_copy_of_the_cache(rows):
    reads = Reads(kv_layers=(0,))
    assert copies_of_a_cache(Glance(reads), rows) == 0
    assert copies_of_a_cache(Hoards(reads), rows) > 0, "the counter counts"
