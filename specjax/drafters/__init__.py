"""Who proposes the block: one file each, one line in specjax.registry."""
