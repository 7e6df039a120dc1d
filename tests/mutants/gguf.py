"""Errors in the reading of GGUF files, found by the models and tokenizers that were written."""

from __future__ import annotations

import dataclasses

from specjax.models import gguf
from specjax.models.gguf import architectures, tensors, tokenizer
from tests.models import test_gguf as tests
from tests.mutants.table import mutant, wrap

CONVERTED = tests.test_a_file_holds_the_model_that_was_converted
IDS = tests.test_token_ids_are_those_of_the_same_tokenizer_json
SENTENCEPIECE = tests.test_token_ids_of_sentencepiece_are_those_of_the_same_tokenizer_json


@mutant("gguf", CONVERTED, name="llama")
def rotated_rows_stay_in_turn(patch):
    patch.setattr(gguf, "places_of", lambda header: {
        name: dataclasses.replace(place, heads=None) for name, place in architectures.places_of(header).items()
    })  # fmt: skip


@mutant("gguf", CONVERTED, name="llama")
def keys_are_put_back_by_the_number_of_query_heads(patch):
    def make(real):
        def mutated(header):
            most = max(place.heads or 0 for place in real(header).values())
            return {
                name: dataclasses.replace(place, heads=place.heads and most) for name, place in real(header).items()
            }

        return mutated

    wrap(patch, gguf, "places_of", make)


@mutant("gguf", CONVERTED, name="gemma3")
def norms_keep_the_one_that_was_added(patch):
    patch.setattr(gguf, "places_of", lambda header: {
        name: dataclasses.replace(place, offset=0.0) for name, place in architectures.places_of(header).items()
    })  # fmt: skip


@mutant("gguf", tests.test_values_of_types_that_the_package_only_reads, kind="Q4_K")
def a_piece_begins_at_the_first_row(patch):
    wrap(patch, tensors.GGUFTensor, "_rows", lambda real: lambda self, rows: real(self, rows - rows.min()))


@mutant("gguf", IDS, pre="smollm")
def digits_stay_together(patch):
    patch.setitem(tokenizer.SPLITS, "smollm", tokenizer.SPLITS["gpt-2"])


@mutant("gguf", tests.test_a_piece_that_is_a_token_is_taken_whole_where_the_model_does, pre="llama-bpe", ids=[2])
def a_piece_that_is_a_token_is_merged(patch):
    patch.setitem(tokenizer.SPLITS, "llama-bpe", dataclasses.replace(tokenizer.SPLITS["llama-bpe"], whole=False))


@mutant("gguf", SENTENCEPIECE, architecture="gemma3")
def a_gemmas_merges_follow_its_scores(patch):
    def make(real):
        def mutated(vocabulary, vocab):
            header = dataclasses.replace(
                vocabulary.header, values={**vocabulary.header.values, "general.architecture": "llama"}
            )
            return real(dataclasses.replace(vocabulary, header=header), vocab)

        return mutated

    wrap(patch, tokenizer, "_merges", make)
