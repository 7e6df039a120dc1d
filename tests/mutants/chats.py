"""Errors in chats that the target writes by itself."""

from __future__ import annotations

import dataclasses

from specjax.data import self_chat
from tests.mutants.table import mutant, wrap
from tests.training import test_self_chat as tests


@mutant("chats", tests.test_the_choices_of_a_chat_follow_from_seed_and_number)
def all_messages_of_a_chat_have_one_seed(patch):
    def make(real):
        def mutated(*args):
            plan = real(*args)
            return dataclasses.replace(plan, seeds=plan.seeds[:1] * len(plan.seeds))

        return mutated

    wrap(patch, tests, "plan_of", make)


@mutant("chats", tests.test_a_chat_close_to_an_earlier_one_is_a_near_duplicate)
def near_duplicates_are_sought_in_the_newest_chat_alone(patch):
    def make(real):
        def mutated(self, tokens):
            found = real(self, tokens)
            if not found:
                self._seen = {run for run in map(hash, self_chat._runs(tokens, 8)) if run % 4 == 0}
            return found

        return mutated

    wrap(patch, self_chat.NearDuplicates, "has", make)


@mutant("chats", tests.test_a_message_is_dropped_for_what_it_is)
def special_tokens_pass_the_filters(patch):
    wrap(
        patch, tests, "fault_of", lambda real: lambda text, tokens, special, settings: real(text, tokens, (), settings)
    )
