"""Where the engine's weights come from. Knows nothing of the engine.

Begin with ``source``: a live model gets an ``aliased_source``, or a ``mirrored_source``, which keeps a ``mirror``.

- Keeping a mirror up to date, and checking it: ``change_detection``, ``mirror_comparison``.
- Sharded trainers: ``held``, ``shards``, ``dtensor_layout``, ``gather``, ``rank_agreement``.
- Weights from elsewhere: ``transport``, ``manifest``, ``receiving``, ``form``, ``staging``, ``consistent_reads``.
- Adapters: ``peft_adapters`` of the live model, ``other_model_adapters``, ``adapter_files``.
- Models as trainers have them: ``naming``, ``module_tree``, ``bitsandbytes_state``.
- Used by all: ``checksum``.
"""
