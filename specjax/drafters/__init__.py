"""Drafters, which propose the tokens of a block: one file each, one line in specjax.registry."""
