"""Runs requests on a model's weights. Knows neither text nor where weights come from.

Begin with ``core``: a step is ``scheduler.plan()``, ``inputs.fill(plan)``, ``runner(batch)``, ``scheduler.commit(...)``.

- What runs next: ``scheduler`` and its ``counters``, ``request``, ``request_scores``, ``plan``, and ``cache``, the blocks.
- What a step reads: ``step_inputs`` fills a ``batch``, by ``plan_arrays`` and ``packed_inputs``.
- Running it: ``runner``, ``graphs``, the shell in ``model``, its ``layers``, and what these call, ``step_context`` and
  ``attention``; ``supported_models`` says which models can be run, ``module_settings`` notices settings that change.
- What comes of it: ``sampler``, ``constraints``, ``scorer``.
- What rows may have besides: ``adapters`` (LoRA), ``images``.
- The device: ``device``, ``virtual_memory``; the interpreter: ``frames``.
"""
