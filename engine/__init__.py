"""Runs requests on a model's weights. Knows neither text nor where weights come from.

Begin with ``core``: a step is ``scheduler.plan()``, ``inputs.fill(plan)``, ``runner(batch)``, ``scheduler.commit(...)``.

- Deciding what runs next: ``scheduler`` and its ``counters``, ``request``, ``request_scores``, ``plan``; ``cache`` has the blocks.
- Inputs of a step: ``step_inputs`` fills a ``batch``, with the help of ``plan_arrays`` and ``packed_inputs``.
- Running it: ``runner``, ``graphs``, the shell in ``model``, its ``layers``, and what these call, ``step_context`` and
  ``attention``. ``supported_models`` says which models can be run, ``written_classes`` makes them without Liger's kernels,
  ``module_settings`` notices settings that change.
- From logits to results: ``sampler``, ``constraints``, ``scorer``.
- LoRA: ``adapters``. Prompts with images: ``images``.
- Ranks that run one model together: ``parallel``.
- The device: ``device``, ``virtual_memory``. The Python interpreter: ``frames``.
"""
