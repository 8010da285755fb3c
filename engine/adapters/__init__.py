"""LoRA adapters in the engine's model.

``checks`` whether one fits; ``slots`` which have a slot; ``slab``, copies of those that lie elsewhere than on the device;
``lora``, what a slot does to modules' outputs, and ``replacements``, what it puts in place of them.
"""
