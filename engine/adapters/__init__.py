"""LoRA adapters in a shell: over which modules, in which slots, and from which memory."""
