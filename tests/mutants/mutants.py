"""The whole table; a mutant enters it where its part is imported."""

from tests.mutants import drafters, engine, glide, rules, sampling, seams, token_rows, training
from tests.mutants.table import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "drafters", "engine", "glide", "rules", "sampling", "seams", "token_rows", "training"]
