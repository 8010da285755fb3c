"""Fetches the images of chats from their URLs, within a time-out and up to a size."""

from __future__ import annotations

import time
from base64 import b64encode
from http.client import HTTPException
from urllib.request import Request, urlopen

from stoker.kernels.errors import InvalidRequestError, first_line
from stoker.rollout.user_values import shown

_WITHIN_S = 30.0
_MOST = 64 * 2**20  # bytes


def as_data(name: str, url: str) -> str:
    """A ``data:`` URL of what lies at an ``http`` or ``https`` one. name: of who has it, in messages.

    transformers fetches images, too, but waits for them without an end, and takes as much as is sent.
    """
    data, end = bytearray(), time.monotonic() + _WITHIN_S
    try:
        with urlopen(Request(url, headers={"user-agent": "stoker"}), timeout=_WITHIN_S) as answer:
            while part := answer.read1(2**16):
                data += part
                if len(data) > _MOST:
                    raise OSError(f"it has more than {_MOST} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"it took longer than {_WITHIN_S:g} s")
    except (OSError, HTTPException, ValueError) as error:  # the last of what is no URL
        raise InvalidRequestError(
            f"{name} has an image at {shown(url)} that cannot be fetched ({first_line(error)}): give another URL, or the image "
            "itself as a data: URL"
        ) from error
    return f"data:image/any;base64,{b64encode(data).decode()}"
