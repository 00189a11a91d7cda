"""What clients send to a reward server, read within limits: time, bytes, pixels, and the memory of all requests."""

import asyncio
import base64
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from flow_grpo.base.threads import Threads
from flow_grpo.rewards.clients.wire import image_size, unpack_image

MAX_JSON_BYTES = 2**25
JSON_COST = 40  # bytes of Python objects per byte of JSON, such as {"":{"":0}}
PIXEL_BYTES = 12  # float32
PIXEL_COST = 4 * PIXEL_BYTES  # as decoded, in the batch, in the reward's copy of it, and in what it makes of that


def _quarter_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


@dataclass(frozen=True)
class Limits:
    """What a server takes."""

    batch_size: int = 32  # images scored together
    max_delay_s: float = 0.01  # how long an image waits for others
    max_waiting: int = 4096  # images in line
    max_body_bytes: int = 2**30  # of a request as it is sent, and of its images as float32
    max_side: int = 4096  # pixels of an image
    max_memory_bytes: int = field(default_factory=_quarter_of_memory)  # of all requests in flight
    read_s: float = 120.0  # how long a request's body may take


class Memory:
    """Bytes that the requests in flight take together."""

    def __init__(self, limit: int):
        self.limit, self.taken = limit, 0


class Hold:
    """One request's part of the memory."""

    def __init__(self, memory: Memory):
        self.memory, self.taken = memory, 0

    def take(self, num_bytes: int) -> None:
        """Raises HTTPException 429 where the others leave too little, 413 where this request alone is too large."""
        if self.memory.taken + num_bytes > self.memory.limit:
            limit = f"of the {self.memory.limit} bytes of memory for requests"
            if self.taken + num_bytes > self.memory.limit:
                raise HTTPException(413, f"this request takes more than all {limit}")
            raise HTTPException(429, f"other requests hold {self.memory.taken - self.taken} {limit}")
        self.memory.taken += num_bytes
        self.taken += num_bytes

    def release(self) -> None:
        """Give all of it back."""
        self.memory.taken -= self.taken
        self.taken = 0


@dataclass
class Job:
    """A request whose images are decoded."""

    images: list[Tensor]
    prompts: list[str]
    metadata: list[dict]
    done: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())  # its scores


class Content(NamedTuple):
    """A request whose images are still files."""

    files: list[bytes]
    prompts: list[str]
    metadata: list[dict]
    num_pixels: int


async def read_job(request: Request, limits: Limits, hold: Hold, threads: Threads) -> Job:
    """From JSON or multipart.

    Args:
        threads: which decode, while the event loop answers others.

    Raises:
        HTTPException: 400, 408, 413, 422 or 429.
    """
    try:
        async with asyncio.timeout(limits.read_s):
            text, files = await _read_body(request, limits, hold)
        hold.take(JSON_COST * len(text))
        content = await asyncio.wrap_future(threads.submit(_parse, text, files, limits))
        if content.num_pixels * PIXEL_BYTES > limits.max_body_bytes:
            most = limits.max_body_bytes // PIXEL_BYTES
            raise HTTPException(413, f"the images have {content.num_pixels} pixels together; at most {most}")
        hold.take(PIXEL_COST * content.num_pixels)
        decoded = threads.submit(lambda: [unpack_image(file, limits.max_side) for file in content.files])
        images = await asyncio.wrap_future(decoded)
    except TimeoutError as error:
        raise HTTPException(408, f"the body took over {limits.read_s:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client has left") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HTTPException(422, f"{type(error).__name__}: {error}"[:500]) from error
    return Job(images, content.prompts, content.metadata)


async def _read_body(request: Request, limits: Limits, hold: Hold) -> tuple[str | bytes, list[bytes] | None]:
    """The JSON of a request, and its images where they are not in there."""
    multipart = request.headers.get("content-type", "").startswith("multipart/")
    most = limits.max_body_bytes if multipart else min(limits.max_body_bytes, MAX_JSON_BYTES)
    too_long = HTTPException(413, f"at most {most} bytes" + ("" if multipart else " of JSON; multipart may have more"))
    if int(request.headers.get("content-length", 0)) > most:
        raise too_long
    counted = Request(request.scope, _counted(request.receive, hold, most, too_long))
    if not multipart:
        return await counted.body(), None
    part_size = min(most, MAX_JSON_BYTES)
    async with counted.form(max_files=limits.max_waiting, max_fields=8, max_part_size=part_size) as form:
        return form["request"], [await part.read() for part in form.getlist("images")]


def _counted(receive: Callable, hold: Hold, most: int, too_long: HTTPException) -> Callable:
    """Starlette's `receive`, which counts what has come: a Content-Length may lie, or be missing."""
    count = 0

    async def receive_counted() -> dict[str, Any]:
        nonlocal count
        message = await receive()
        size = len(message.get("body", b""))
        count += size
        if count > most:
            raise too_long
        hold.take(size)
        return message

    return receive_counted


def _parse(text: str | bytes, files: list[bytes] | None, limits: Limits) -> Content:
    body = json.loads(text)
    if files is None:
        files = [base64.b64decode(image, validate=True) for image in _list_in(body, "images")]
    prompts, metadata = _list_in(body, "prompts"), body.get("metadata") or [{}] * len(files)
    if not files or not len(files) == len(prompts) == len(metadata):
        raise ValueError(f"{len(files)} images, {len(prompts)} prompts, {len(metadata)} metadata")
    if not all(isinstance(p, str) for p in prompts) or not all(isinstance(m, dict) for m in metadata):
        raise ValueError("prompts are strings, metadata objects")
    "".join(prompts).encode()  # UnicodeEncodeError for half a surrogate pair, which no tokenizer takes
    sizes = {image_size(file, limits.max_side) for file in files}
    if len(sizes) > 1:
        raise ValueError("the images of a request have one size")
    return Content(files, prompts, metadata, len(files) * math.prod(sizes.pop()))


def _list_in(body: dict, key: str) -> list:
    if not isinstance(body, dict) or not isinstance(body.get(key), list):
        raise ValueError(f"no object with a list {key!r}")
    return body[key]
