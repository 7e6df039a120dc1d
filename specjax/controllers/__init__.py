"""Controllers, the rules for the draft length of each block: one file each, one line in specjax.registry."""
