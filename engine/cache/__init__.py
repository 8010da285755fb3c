"""The KV cache: who holds which block, which prefixes are cached, and the memory itself.

``kv_cache`` has the tensors, ``block_layout`` their arrangement. ``block_pool`` counts who holds a block, ``block_tables`` gives
requests theirs. ``prefix_cache`` finds blocks by tokens, ``prefix_reuse`` what a request can begin with. ``state_cache`` is for
recurrent layers.
"""
