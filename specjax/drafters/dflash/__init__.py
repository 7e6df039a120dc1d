"""Blocks of mask tokens after the root, filled in one pass: DFlash (2602.06036), and what others added to it.

A block has N slots. Slot 0 holds the root (the newest token), the others a mask token. They see each other and, in
every layer, the target's features of all tokens before the root, injected as keys and values. The root's own features
do not exist yet. DSpark (2607.05147) conditions each token on the one before it: the block is still made in one pass
and then drawn in sequence, so that verification knows the exact distribution of each proposed token. DSpark also
predicts how likely a token is to be accepted, before it is drawn. DFlash2 conditions each token by scoring a few
candidates, and lets the slots of a block blend into their neighbours.

In decoding, the draft's cache holds the injected keys and values of verified tokens and nothing of a block. In
training, blocks begin at random roots of a row (anchors), drawn anew in every step.
"""
