"""Blocks of mask tokens behind the root, filled in one pass: DFlash (2602.06036), and what others added to it.

Slot 0 is the root, the others hold a mask; they see each other, and in every layer the target's features of all tokens
before the root, which are injected as keys and values. The root's own features do not exist yet. DSpark (2607.05147)
conditions each token on the one before it: the block is still made in one pass, and then drawn in sequence, so that
the distribution of a draft token is what it was drawn from; and it says how likely a token is to be kept before it is
drawn. DFlash2 does the first by scoring a few candidates, and lets the slots of a block blend into their neighbours.

In decoding, the draft's cache holds the injected keys and values of verified tokens and nothing of a block. In
training, blocks begin at random roots of a row (anchors), others in every step.
"""
