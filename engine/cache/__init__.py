"""Keys, values and states that are kept: who holds which block, what of a prompt is there already, and the bytes."""
