"""One file for each outside interface, and helpers that several of them share.

- TRL: ``trl``, with ``trl_callbacks``, ``trl_checks``, ``trl_engine_config``, ``trl_images``, ``trl_metrics`` and
  ``trl_sampling``; teachers on servers: ``trl_teachers``; asynchronous GRPO and distillation: ``trl_async`` with
  ``trl_async_loop``, ``trl_async_teachers`` and ``daemon_executor``.
- Other loops: ``accelerate``, ``ppo``, ``transformers``; coroutines: ``async_steps``. TRL and accelerate share
  ``mixed_precision`` and ``trainer_memory``.
- HTTP: ``server``, ``openai_api`` and ``openai_answers``, with ``http_requests``, ``image_urls``, ``json_schemas`` and
  ``text_stream``.
- The command line: ``cli``, ``cli_engine``, ``cli_files``, ``jsonl``.
"""
