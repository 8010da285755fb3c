"""TRL's loop of asynchronous distillation for one run of a trainer, with the engine as the student, and servers as teachers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from trl.experimental.async_distillation.async_rollout_worker import _AsyncRolloutLoop

from stoker.integrations.trl_async_loop import EngineLoop
from stoker.integrations.trl_sampling import live_model
from stoker.kernels.errors import RequestFailedError, first_line
from stoker.rollout import RolloutEngine

_log = logging.getLogger("stoker")
_LONGEST_S = 16.0  # between attempts
_LATER = {408, 425, 429}  # statuses that say to ask again, and so do all from 500
_TO_SHOW = 2000  # characters of an answer
_direct = build_opener(ProxyHandler({}))  # as TRL asks


class _AwayError(Exception):
    """A server that gives no answer now, and may give one later."""


class DistillationLoop(EngineLoop, _AsyncRolloutLoop):  # type: ignore[misc]
    """Samples, and has the teachers score it. What they are asked, and what is made of their answers, is TRL's.

    TRL would ask through aiohttp, repeat each request up to 90 times, refused or not, and keep the reason to itself.
    """

    def __init__(self, engine: RolloutEngine, trainer: Any, seed: str, **options: Any) -> None:
        super().__init__(engine, trainer, seed, **options)
        self._vocab_size = live_model(trainer).config.get_text_config().vocab_size
        self._patience_s = trainer.args.vllm_server_timeout

    def _loops(self, stop_event: asyncio.Event) -> Sequence[Awaitable[None]]:
        return (self._meet_and_generate(stop_event),)

    async def _meet_and_generate(self, stop_event: asyncio.Event) -> None:
        await self._resolve_teacher_model_names()
        await self._generate_loop(stop_event=stop_event)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> list[int]:
        return (await self._sample(prompt_ids)).token_ids

    async def _get(self, base_url: str, path: str, timeout: float) -> Any:
        return await self._ask(base_url + path, timeout, None)

    async def _post(self, base_url: str, path: str, payload: dict[str, Any], timeout: float) -> Any:
        url = base_url + path
        answer = await self._ask(url, timeout, json.dumps(payload).encode())
        try:
            scored = answer["choices"][0]["prompt_logprobs"] or ()
        except (LookupError, TypeError):  # of another kind of server
            scored = ()
        if len(scored) != len(payload["prompt"]):
            raise RequestFailedError(
                f"{url} answered without prompt_logprobs of every token: a teacher is a server that gives them, as vllm serve does"
            )
        if beyond := [t for given in scored if given for t in map(int, given) if t >= self._vocab_size]:
            raise RequestFailedError(
                f"{url} gave a log-probability of token {beyond[0]}, and the student has {self._vocab_size} tokens: a teacher must "
                "share the student's tokenizer"
            )
        return answer

    async def _ask(self, url: str, timeout: float, body: bytes | None) -> Any:
        ask = partial(_answer, url, body, timeout)
        return await asyncio.get_running_loop().run_in_executor(None, ask)

    async def _retry(self, coro_factory: Callable[[], Awaitable[Any]], *, label: str, max_attempts: int = 1) -> Any:
        """Ask until there is an answer; a server that is away is waited for, as it may still be loading its model."""
        end, pause = time.monotonic() + self._patience_s, 0.25
        while True:
            self._heartbeat_value.value = time.time()
            try:
                return await coro_factory()
            except _AwayError as error:
                if time.monotonic() + pause > end:
                    raise RequestFailedError(
                        f"{error}: it was waited for {self._patience_s:g} s (vllm_server_timeout)"
                    ) from error
                _log.warning("%s failed, and is repeated in %g s: %s", label, pause, error)
            self._counters["rollout/vllm_retry_total"] += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)


def _answer(url: str, body: bytes | None, timeout: float) -> Any:
    """What a server answers, from JSON. Raises ``_AwayError`` where it may be asked again, and ``RequestFailedError``."""
    try:
        with _direct.open(Request(url, body, {"content-type": "application/json"}), timeout=timeout) as answer:
            return json.load(answer)
    except HTTPError as error:
        said = f"{url} answered with status {error.code}: {_text(error)}"
        if error.code >= 500 or error.code in _LATER:
            raise _AwayError(said) from error
        raise RequestFailedError(said) from error
    except (OSError, HTTPException) as error:
        raise _AwayError(f"{url} cannot be reached ({first_line(error)})") from error
    except ValueError as error:
        raise RequestFailedError(f"{url} answered without JSON, or is no URL ({first_line(error)})") from error


def _text(error: HTTPError) -> str:
    try:
        return error.read(_TO_SHOW).decode(errors="replace").strip() or error.reason
    except (OSError, HTTPException):  # it broke off
        return error.reason
