"""Toy models whose laws can be enumerated, for tests and for certifying other people's parts."""
