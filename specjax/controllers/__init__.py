"""How much is proposed: one file each, one line in specjax.registry."""
