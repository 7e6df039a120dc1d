"""The whole table; a mutant enters it where its part is imported."""

from tests.mutants import accelerators, chats, drafters, engine, features, gguf, glide, rules, sampling, seams, training
from tests.mutants.table import MUTANTS, Mutant

__all__ = [
    "MUTANTS", "Mutant", "accelerators", "chats", "drafters", "engine", "features", "gguf", "glide", "rules",
    "sampling", "seams", "training",
]  # fmt: skip
