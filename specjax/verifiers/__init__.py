"""Which part of a drafted block is kept, and the target's own token after it."""
