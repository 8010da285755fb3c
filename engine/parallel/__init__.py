"""A model that several ranks run together: what each of them has of it, and what they tell each other in a step.

- Who they are, and their sums: ``tensor_parallel``.
- ``layers`` cuts fused layers, their linears as ``cuts`` say. What is between the linears: ``mixers`` cuts those that attend,
  ``recurrent`` those with states; both by ``shares``. ``norms``: over what ranks share.

What they agree on before a step, their prompts for example, is in ``rollout/lockstep.py``.
"""
