"""Toy models whose distributions can be enumerated, for tests and for certifying other people's parts."""
