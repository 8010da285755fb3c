"""One file for each outside interface, and what several of these share.

- TRL: ``trl``, with ``trl_callbacks``, ``trl_checks``, ``trl_engine_config``, ``trl_images``, ``trl_metrics`` and
  ``trl_sampling``; ``trl_async`` with ``trl_async_loop`` and ``daemon_executor``.
- Other loops: ``accelerate``, ``ppo``, ``transformers``, ``async_steps``; ``trainer_memory`` serves TRL and accelerate.
- HTTP: ``server``, ``openai_api`` and ``openai_answers``, with ``http_requests``, ``image_urls``, ``json_schemas`` and
  ``text_stream``.
- The command line: ``cli``, ``cli_engine``, ``cli_files``, ``jsonl``.
"""
