"""An HTTP server on a live engine, in OpenAI's protocol: how agents and environments speak to the model being trained.

    with serve(engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")

Requests run in one batch with the trainer's, under the present weights. During a pause they wait; while the engine sleeps they
are refused. Needs starlette and uvicorn: pip install 'stoker[server]'.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stoker.integrations.async_steps import AsyncSteps
from stoker.integrations.http_requests import TooLongError, gone, most_bytes, parsed, read_body, unless
from stoker.integrations.openai_answers import Stream, answer, failure
from stoker.integrations.openai_api import Call, UnknownModelError, read_call, tokenised
from stoker.kernels.errors import (
    EngineStateError,
    InvalidConfigError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
    StokerError,
    UnsupportedModelError,
    WeightsMismatchError,
    WeightTransferError,
)
from stoker.rollout import LIVE, RolloutEngine, RolloutHandle, RolloutOutput
from stoker.rollout.adapters import AdapterChoice
from stoker.rollout.config import check_alone
from stoker.rollout.user_values import shown

_STATUS: tuple[tuple[type[StokerError], int], ...] = (  # the first one that fits counts
    (UnknownModelError, 404),
    (TooLongError, 413),
    (InvalidRequestError, 400),
    (UnsupportedModelError, 400),
    (WeightsMismatchError, 400),
    (WeightTransferError, 400),  # the file or folder is named by the request
    (EngineStateError, 503),
    (StokerError, 500),
)
_GRACE_S = 5  # when closing: for answers that are being sent, and for a change that is being made
_CLOSED = "the server is being closed, and what was asked for may not be done"
_T = TypeVar("_T")


def serve(
    engine: RolloutEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "policy",
    api_key: str | None = None,
    control: bool = False,
    adapter: AdapterChoice = LIVE,
) -> Server:
    """Serve ``engine`` from threads of this process, until the server is closed; returns when it listens.

    port: 0 is any free one. name: of the model, in requests; adapters have their own names. adapter: what the model runs
    with under that name, as in ``RolloutEngine.generate_batch``. api_key: what requests, but for ``/health``, have to bring
    as a bearer token, where there is one. control: also serve what changes the engine (pause, resume, sleep,
    wake_up, update_weights, load and unload of adapters), which read files whose paths a request names.

    Raises ``InvalidConfigError`` where it cannot listen there, no request could bring the key or ``engine`` is none,
    ``InvalidRequestError`` where there is no such adapter.
    """
    return Server(engine, host, port, name, api_key, control, adapter)


class Server:
    """A running server, as ``serve`` starts it; also a context manager. The engine stays its owner's.

    port: a number, or what ``listen`` returned for it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        host: str,
        port: int | socket.socket,
        name: str,
        api_key: str | None,
        control: bool,
        adapter: AdapterChoice,
    ) -> None:
        if not isinstance(engine, RolloutEngine):
            raise InvalidConfigError(
                f"serve takes a RolloutEngine, and this is a {type(engine).__name__}: RolloutEngine(model, tokenizer=tokenizer), "
                "attach(trainer), or the engine of an AcceleratedEngine"
            )
        check_alone(engine.config, "servers")
        if isinstance(adapter, str) and adapter not in engine.adapters:
            raise InvalidRequestError(
                f"adapter={shown(adapter)}: there are {', '.join(sorted(engine.adapters)) or 'none'}"
            )
        check_key(api_key)
        self._engine, self._adapter = engine, adapter
        self._name = name
        self._api_key = api_key
        self._steps = AsyncSteps(engine)
        self._closing, self._ends = False, asyncio.Event()
        # These threads mostly wait: for a change of the engine to end, or for an image to be fetched.
        self._starts = ThreadPoolExecutor(64, "stoker-requests")
        # One thread, so that a pause, an update and a resume run in the order they came in.
        self._control = ThreadPoolExecutor(1, "stoker-control")
        self._last_change: Future[None] | None = None
        self._socket = port if isinstance(port, socket.socket) else listen(host, port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        app = Starlette(
            routes=self._routes(control),
            lifespan=self._running,
            exception_handlers={StokerError: self._refuse, HTTPException: self._unknown, ClientDisconnect: _to_nobody},
        )
        # The server must not set up the process's logging.
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_S)
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-server", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()
        if self._loop is None:
            raise InvalidConfigError("the server did not start: the log says why")

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self._started.set()

    @asynccontextmanager
    async def _running(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        async with self._steps:
            self._started.set()
            yield
        self._last_change = self._control.submit(self._end_pause)
        self._control.shutdown(wait=False)
        self._starts.shutdown(wait=False)

    def close(self) -> None:
        """Stop. Requests under way are answered with the tokens they have, and ``finish_reason`` "abort", all else with the status
        503. A pause that was asked for over HTTP ends: nobody could ask for its end.
        """
        if self._closing:
            return
        self._closing = True
        end = time.monotonic() + _GRACE_S
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._ends.set)
        self._loop.call_soon_threadsafe(self._steps.abort)
        self._server.should_exit = True
        self._thread.join()
        if self._last_change is not None:  # it comes after a change that is being made, which may take longer
            wait([self._last_change], max(0.0, end - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url}, {self._engine!r})"

    # -- routes ----------------------------------------------------------------------------------------------------

    def _routes(self, control: bool) -> list[Route]:
        engine = self._engine
        asked: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._model),
            "/v1/completions": ("POST", partial(self._generate, chat=False)),
            "/v1/chat/completions": ("POST", partial(self._generate, chat=True)),
            "/tokenize": ("POST", self._tokenize),
        }
        changes: dict[str, tuple[Callable[..., Any], dict[str, type]]] = {
            "/pause": (partial(engine.pause, owner=self), {"mode": str}),
            "/resume": (partial(engine.resume, owner=self), {"recompute": bool}),
            "/sleep": (engine.sleep, {"level": int}),
            "/wake_up": (engine.wake_up, {"tags": list}),
            "/update_weights": (self._update_weights, {"path": str, "version": int}),
            "/v1/load_lora_adapter": (self._load_adapter, {"lora_name": str, "lora_path": str}),
            "/v1/unload_lora_adapter": (self._unload_adapter, {"lora_name": str}),
        }
        if control:
            for path, (change, fields) in changes.items():
                asked[path] = ("POST", partial(self._change, change=change, fields=fields))
        return [Route(path, self._guarded(endpoint), methods=[method]) for path, (method, endpoint) in asked.items()]

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        key = None if self._api_key is None or endpoint == self._health else f"Bearer {self._api_key}".encode()

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if key is not None and not hmac.compare_digest(given, key):
                return _error(401, "the API key is missing or another: send it as 'Authorization: Bearer KEY'")
            if self._closing:
                return _error(503, _CLOSED)
            return await endpoint(request)

        return guarded

    @staticmethod
    async def _refuse(_: Request, error: Exception) -> Response:
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None  # as OpenAI's
        return _error(next(status for kind, status in _STATUS if isinstance(error, kind)), str(error), code)

    @staticmethod
    async def _unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    async def _health(self, _: Request) -> Response:
        engine = self._engine
        state = {"is_sleeping": engine.is_sleeping, "is_paused": engine.is_paused}
        return JSONResponse({"weight_version": engine.weight_version, **state})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._known()})

    async def _model(self, request: Request) -> Response:
        asked = request.path_params["name"]
        model = next((model for model in self._known() if model["id"] == asked), None)
        if model is None:
            raise UnknownModelError(f"model={shown(asked)}: there are {', '.join(m['id'] for m in self._known())}")
        return JSONResponse(model)

    def _known(self) -> list[dict[str, Any]]:
        same = {"object": "model", "created": 0, "owned_by": "stoker", "max_model_len": self._engine.max_model_len}
        return [{"id": name, **same} for name in (self._name, *sorted(self._engine.adapters))]

    async def _change(self, request: Request, *, change: Callable[..., Any], fields: dict[str, type]) -> Response:
        if request.query_params:  # other servers take them; to ignore them would make another change than was asked for
            raise InvalidRequestError(f"{shown(str(request.url.query))} is in the URL: give it in the body, as JSON")
        body = parsed(await self._body(request) or bytearray(b"{}"))
        given = {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else None
        if given is None or any(type(value) is not fields.get(name) for name, value in given.items()):
            takes = ", ".join(f"{name} ({kind.__name__})" for name, kind in fields.items())
            raise InvalidRequestError(f"the body is {shown(body)}: give an object with {takes}")
        try:
            change = partial(change, **given)
            await self._unless_closed(asyncio.get_running_loop().run_in_executor(self._control, change))
        except EngineStateError as error:  # due to something under way, not to the server
            return _error(409, str(error))
        return await self._health(request)

    def _end_pause(self) -> None:
        if not self._engine.is_paused:
            return
        with suppress(EngineStateError):  # it is closed
            try:
                self._engine.resume(owner=self)
            except EngineStateError:  # asleep with its owner's requests under way, who is to end a pause after waking
                self._engine.pause()
                self._engine.resume(owner=self)

    def _update_weights(self, path: str = "", version: int | None = None) -> None:
        # Both are False for what is no path, and for a pipe, to which nobody may ever write.
        if not os.path.isfile(path) and not os.path.isdir(path):
            raise InvalidRequestError(f"path={shown(path)}: give a safetensors file or a folder that is there")
        self._engine.update_weights(path, version=version)

    def _load_adapter(self, lora_name: str = "", lora_path: str = "") -> None:
        if lora_name == self._name or not lora_name.isprintable():  # half a character, which no answer can hold
            raise InvalidRequestError(f"{shown(lora_name)} is the served model's, or not printable: give another")
        self._engine.load_adapter(lora_name, lora_path)

    def _unload_adapter(self, lora_name: str = "") -> None:
        self._engine.unload_adapter(lora_name)

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        body = parsed(await self._body(request))
        start = asyncio.get_running_loop().run_in_executor(self._starts, self._start, body, chat)
        call, handles = await self._unless_closed(start)
        created = int(time.time())
        if call.stream:
            events = self._events(call, handles, created)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        outputs = await unless(gone(request), self._results(handles))
        # In a thread, as decoding tokens one by one would keep all other clients waiting.
        made = asyncio.to_thread(answer, call, outputs, self._engine.tokenizer, created)
        return Response(await made, media_type="application/json")

    async def _tokenize(self, request: Request) -> Response:
        body = parsed(await self._body(request))
        ids = asyncio.get_running_loop().run_in_executor(self._starts, tokenised, body, self._engine, self._name)
        return JSONResponse(await self._unless_closed(ids))

    async def _body(self, request: Request) -> bytearray:
        most = most_bytes(self._engine.max_model_len, images=self._engine.processor is not self._engine.tokenizer)
        return await self._unless_closed(read_body(request, most))

    async def _unless_closed(self, work: Awaitable[_T]) -> _T:
        async def closed() -> NoReturn:
            await self._ends.wait()
            raise HTTPException(503, _CLOSED)

        return await unless(closed(), work)

    def _start(self, body: Any, chat: bool) -> tuple[Call, list[RolloutHandle]]:
        """Make and submit a call. In a thread, since templates and tokenizers take time, and the engine may be being changed."""
        call = read_call(body, self._engine, self._name, self._adapter, chat=chat)
        handles = []
        for row, prompt in enumerate(call.prompts):
            try:
                handles.append(self._engine.submit(prompt, call.params, adapter=call.adapter))
            except InvalidRequestError as error:  # requests before it end when their handles are dropped
                raise type(error)(str(error).replace("prompt 0", f"prompt {row}", 1)) from error
        return call, handles

    async def _results(self, handles: list[RolloutHandle]) -> list[RolloutOutput]:
        outputs = await asyncio.gather(*map(self._steps.result, handles))
        for output in outputs:
            if output.error is not None:
                raise RequestFailedError(str(output.error))
        return outputs

    async def _events(self, call: Call, handles: list[RolloutHandle], created: int) -> AsyncIterator[str]:
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        streams = [Stream(call, row, self._engine.tokenizer, created) for row in range(len(handles))]

        async def follow(stream: Stream, handle: RolloutHandle) -> RolloutOutput:
            async for chunks in self._steps.chunks(handle):
                for chunk in chunks:
                    events.put_nowait(stream.event(chunk))
            output = handle.result()
            for event in stream.ends(output) if output.error is None else ():
                events.put_nowait(event)
            return output

        async def follow_all() -> list[RolloutOutput]:
            try:
                return await asyncio.gather(*map(follow, streams, handles))
            finally:
                events.put_nowait(None)

        following = asyncio.create_task(follow_all())
        try:
            while (event := await events.get()) is not None:
                yield f"data: {json.dumps(event)}\n\n"
            outputs = await following
            if (error := next((o.error for o in outputs if o.error is not None), None)) is not None:
                yield f"data: {json.dumps(failure(500, str(error)))}\n\n"
            elif call.usage:
                yield f"data: {json.dumps(streams[0].usage(outputs))}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            following.cancel()  # where the client has gone


def check_key(api_key: str | None) -> None:
    """Raise ``InvalidConfigError`` for a key that no request could bring."""
    # Other characters are changed or lost in a header, and an empty key would let in everybody or nobody.
    if api_key is not None and not (isinstance(api_key, str) and re.fullmatch("[!-~]([ -~]*[!-~])?", api_key)):
        raise InvalidConfigError(
            "api_key is empty, or has what a header does not carry: give printable ASCII without spaces around it, "
            "or None for no key"
        )


def listen(host: str, port: int) -> socket.socket:
    """Take a port: clients that connect from now on wait for a server. Raises ``InvalidConfigError`` where it cannot be had."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, TypeError) as error:
        raise InvalidConfigError(
            f"nothing can listen at {host}:{port} ({error}): give another host or port, of which 0 is any free one"
        ) from error


async def _to_nobody(_: Request, error: Exception | None = None) -> Response:
    """The response where the client has gone, perhaps in the middle of its request."""
    return Response(status_code=499)


def _error(status: int, message: str, code: str | None = None) -> Response:
    return JSONResponse(failure(status, message, code), status, {"retry-after": "1"} if status == 503 else None)
