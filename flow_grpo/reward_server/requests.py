"""Requests to a reward server, read within limits of time, bytes and the memory of all requests."""

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from flow_grpo.rewards.clients.threads import Threads
from flow_grpo.rewards.clients.wire import unpack_image

MAX_JSON_BYTES = 2**25
ALL_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes, of the machine
JSON_COST = 40  # bytes of Python objects per byte of JSON, such as {"":{"":0}}
IMAGE_COST = 4  # copies of an image: decoded, in the batch, in the reward's copy of that, and in what it computes


@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    max_images: int = 4096  # of a request
    max_body_bytes: int = 2**30  # of a request
    max_memory_bytes: int = ALL_MEMORY // 4  # of all requests in flight
    read_s: float = 120.0  # time in which a request's body must arrive


class Memory:
    """Bytes that each request in flight takes."""

    def __init__(self, limit: int):
        self.limit = limit
        self.taken = Counter()  # request -> bytes

    def take(self, request: Request, num_bytes: int) -> None:
        """Take bytes for a request.

        Raise HTTPException 429 if other requests leave too little, and 413 if this request alone is too large.
        """
        total = self.taken.total()
        taken = self.taken[request]
        if total + num_bytes > self.limit:
            limit = f"of the {self.limit} bytes of memory for requests"
            if taken + num_bytes > self.limit:
                raise HTTPException(413, f"this request takes more than all {limit}")
            raise HTTPException(429, f"other requests hold {total - taken} {limit}")
        self.taken[request] += num_bytes

    def release(self, request: Request) -> None:
        """Give back all bytes of a request."""
        del self.taken[request]


class Job(NamedTuple):
    """Images or videos to be scored, of one size, with their prompts."""

    images: list[Tensor]  # [3, H, W] each, or [f, 3, H, W]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    sources: list[list[Tensor]]  # for each prompt the images that it edits

    def only(self, number: int) -> "Job":
        """Return the job of one of the images alone."""
        row = slice(number, number + 1)
        return Job(self.images[row], self.prompts[row], self.metadata[row], self.sources[row])


class Body(NamedTuple):
    """Parts of a multipart request."""

    text: str  # JSON
    images: list[bytes]  # files
    sources: list[bytes]  # files


async def read_job(request: Request, limits: Limits, memory: Memory, threads: Threads, videos: bool = False) -> Job:
    """Return the job of a request, which may hold `videos`; `threads` decode it, while the event loop answers others.

    Raise HTTPException 400, 408, 411, 413, 422 or 429.
    """
    try:
        async with asyncio.timeout(limits.read_s):
            body = await _read_body(request, limits, memory)
        num_image_bytes = sum(map(len, body.images + body.sources))
        memory.take(request, JSON_COST * len(body.text) + IMAGE_COST * num_image_bytes)
        return await asyncio.wrap_future(threads.submit(_parse, body, videos))
    except TimeoutError as error:
        raise HTTPException(408, f"the body took over {limits.read_s:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client has left") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise HTTPException(422, f"{type(error).__name__}: {error}"[:500]) from error


async def _read_body(request: Request, limits: Limits, memory: Memory) -> Body:
    """Return the parts of a multipart request. Its bytes are taken before one of them is read."""
    if "transfer-encoding" in request.headers or "content-length" not in request.headers:
        raise HTTPException(411, "a request has a Content-Length")
    num_bytes = int(request.headers["content-length"])
    if num_bytes > limits.max_body_bytes:
        raise HTTPException(413, f"at most {limits.max_body_bytes} bytes")
    memory.take(request, num_bytes)
    async with request.form(max_files=limits.max_images, max_fields=8, max_part_size=MAX_JSON_BYTES) as form:
        text = form["request"]
        if not isinstance(text, str):
            raise ValueError("'request' is a file, not a field")
        return Body(text, await _files(form, "images"), await _files(form, "sources"))


async def _files(form: FormData, name: str) -> list[bytes]:
    """Return the contents of a request's files of a name. Raise ValueError for a field of that name."""
    contents = []
    for part in form.getlist(name):
        if isinstance(part, str):
            raise ValueError(f"{name!r} is a field, not a file")
        contents.append(await part.read())
    return contents


def _parse(body: Body, videos: bool) -> Job:
    """Return the job of a request's parts. Raise ValueError and other errors of Python for parts that are none."""
    fields = json.loads(body.text)
    prompts = fields["prompts"]
    num_images = len(body.images)
    metadata = fields.get("metadata") or [{}] * num_images
    if not isinstance(prompts, list) or not num_images or not num_images == len(prompts) == len(metadata):
        raise ValueError(
            f"images: {num_images}, prompts: {len(prompts)}, metadata: {len(metadata)}; there is one of each"
        )
    for prompt, data in zip(prompts, metadata):
        if not isinstance(prompt, str) or not isinstance(data, dict):
            raise ValueError("prompts are strings, metadata objects")
    # UnicodeEncodeError for half a surrogate pair, which no tokenizer takes.
    "".join(prompts).encode()
    images = [unpack_image(data, videos) for data in body.images]
    if len({image.shape for image in images}) > 1:
        raise ValueError("the images of a request have one size")
    sources = list(map(unpack_image, body.sources))
    return Job(images, prompts, metadata, _by_prompt(sources, fields.get("sources"), len(prompts)))


def _by_prompt(sources: list[Tensor], numbers: list[list[int]] | None, num_prompts: int) -> list[list[Tensor]]:
    """Return the sources of each prompt, by their numbers; none without numbers. Raise ValueError for other numbers."""
    if numbers is None:
        return [[]] * num_prompts
    if len(numbers) != num_prompts:
        raise ValueError(f"lists of sources: {len(numbers)}, prompts: {num_prompts}; there is one for each")
    by_prompt = []
    for row in numbers:
        # A bool is no number here.
        if not all(type(number) is int and 0 <= number < len(sources) for number in row):
            raise ValueError(f"numbers {row} of sources, of which there are {len(sources)}")
        by_prompt.append([sources[number] for number in row])
    return by_prompt
