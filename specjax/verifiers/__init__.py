"""Verifiers, the rules for which proposed tokens are accepted and which token of the target's own follows."""
