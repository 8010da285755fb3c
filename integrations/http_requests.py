"""Reads bodies of HTTP requests up to a length, and ends work for clients that have gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from stoker.kernels.errors import InvalidRequestError

_A_TOKEN = 64  # bytes, of text in JSON or of an id
_LEAST = 32 * 2**20  # bytes, whatever the model: of many prompts
_IMAGES = 64 * 2**20  # bytes besides
_T = TypeVar("_T")


class TooLongError(InvalidRequestError):
    """A body of more bytes than a request needs."""


def most_bytes(max_model_len: int, images: bool) -> int:
    """The most bytes of a body. Larger ones would take memory, and seconds to parse, while nobody else is answered."""
    return max(_LEAST, _A_TOKEN * max_model_len) + images * _IMAGES


async def read_body(request: Request, most: int) -> bytearray:
    """The body of a request. Raises ``TooLongError`` where it has more than ``most`` bytes, which are not kept."""
    body, announced = bytearray(), request.headers.get("content-length", "")
    fits = not announced.isdecimal() or int(announced) <= most
    if fits or "expect" not in request.headers:  # a client that asks before it sends is answered right away
        async for part in request.stream():  # to the end: most clients read no answer before they have sent all
            fits = fits and len(body) + len(part) <= most
            if fits:
                body += part
            else:
                body.clear()
    if not fits:
        raise TooLongError(
            f"the body has more than {most} bytes, the most the server takes: send several requests with fewer prompts, "
            "or smaller images"
        )
    return body


def parsed(body: bytearray) -> Any:
    """The JSON of a body."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from error


async def unless(end: Coroutine[Any, Any, NoReturn], work: Awaitable[_T]) -> _T:
    """What ``work`` returns; or what ``end`` raises, where that comes first, and cancels the work."""
    wanted, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((wanted, ending), return_when=asyncio.FIRST_COMPLETED)
        return wanted.result() if wanted.done() else ending.result()
    finally:
        for one in (wanted, ending):
            if not one.cancel() and not one.cancelled():
                one.exception()  # retrieve it, or asyncio would log it


async def gone(request: Request) -> NoReturn:
    """Raise ``ClientDisconnect`` once the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
