"""TRL's trainers with a teacher on a server, without vLLM.

with without_vllm():
    trainer = ServerDistillationTrainer(model, args)  # teacher_model_server_url: of ``stoker serve TEACHER``
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stoker.integrations.trl_checks import check_version


@contextmanager
def without_vllm() -> Iterator[None]:
    """Context manager in which trainers are built that ask a server for their teacher's log-probabilities.

    Their client only sends HTTP requests, but wants vLLM to be installed beside it; in here it does not. Nothing else of TRL
    takes notice. Raises ``InvalidConfigError`` where TRL is missing or too old.
    """
    check_version("a teacher on a server")
    from trl.generation import vllm_client

    wanted = vllm_client.is_vllm_available

    def installed(*_: Any, **__: Any) -> bool:
        return True

    vllm_client.is_vllm_available = installed
    try:
        yield
    finally:
        vllm_client.is_vllm_available = wanted
