"""What clients send to a reward server, read within limits: time, bytes, and the memory of all requests."""

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from flow_grpo.rewards.clients.threads import Threads
from flow_grpo.rewards.clients.wire import unpack_image

MAX_JSON_BYTES = 2**25
ALL_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes, of the machine
JSON_COST = 40  # bytes of Python objects per byte of JSON, such as {"":{"":0}}
IMAGE_COST = 4  # copies of an image: as decoded, in the batch, in the reward's copy of it, and in what it makes of that


@dataclass(frozen=True)
class Limits:
    max_images: int = 4096  # of a request
    max_body_bytes: int = 2**30  # of a request
    max_memory_bytes: int = ALL_MEMORY // 4  # of all requests in flight
    read_s: float = 120.0  # how long a request's body may take


class Memory:
    """Bytes that each request in flight takes."""

    def __init__(self, limit: int):
        self.limit, self.taken = limit, Counter()  # by request

    def take(self, request: Request, num_bytes: int) -> None:
        """Raises HTTPException 429 where the others leave too little, 413 where this request alone is too large."""
        total, own = self.taken.total(), self.taken[request]
        if total + num_bytes > self.limit:
            limit = f"of the {self.limit} bytes of memory for requests"
            if own + num_bytes > self.limit:
                raise HTTPException(413, f"this request takes more than all {limit}")
            raise HTTPException(429, f"other requests hold {total - own} {limit}")
        self.taken[request] += num_bytes

    def release(self, request: Request) -> None:
        del self.taken[request]


# Images, decoded; prompts; metadata; and the sources that each prompt edits.
Job = tuple[list[Tensor], list[str], list[dict], list[list[Tensor]]]


async def read_job(request: Request, limits: Limits, memory: Memory, threads: Threads) -> Job:
    """What a request asks to score; `threads` decode it, while the event loop answers others. Raises HTTPException 400,
    408, 411, 413, 422 or 429."""
    try:
        async with asyncio.timeout(limits.read_s):
            text, files, sources = await _read_body(request, limits, memory)
        memory.take(request, JSON_COST * len(text) + IMAGE_COST * sum(map(len, files + sources)))
        return await asyncio.wrap_future(threads.submit(_parse, text, files, sources))
    except TimeoutError as error:
        raise HTTPException(408, f"the body took over {limits.read_s:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client has left") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise HTTPException(422, f"{type(error).__name__}: {error}"[:500]) from error


async def _read_body(request: Request, limits: Limits, memory: Memory) -> tuple[str, list[bytes], list[bytes]]:
    """The JSON of a multipart request, its images, and what they were made of; bytes are taken before one is read."""
    if "transfer-encoding" in request.headers or "content-length" not in request.headers:
        raise HTTPException(411, "a request has a Content-Length")
    num_bytes = int(request.headers["content-length"])
    if num_bytes > limits.max_body_bytes:
        raise HTTPException(413, f"at most {limits.max_body_bytes} bytes")
    memory.take(request, num_bytes)
    async with request.form(max_files=limits.max_images, max_fields=8, max_part_size=MAX_JSON_BYTES) as form:
        files = [[await part.read() for part in form.getlist(name)] for name in ("images", "sources")]
        return form["request"], *files


def _parse(text: str, files: list[bytes], sources: list[bytes]) -> Job:
    body = json.loads(text)
    prompts, metadata = body["prompts"], body.get("metadata") or [{}] * len(files)
    if not isinstance(prompts, list) or not files or not len(files) == len(prompts) == len(metadata):
        raise ValueError(f"{len(files)} images, {len(prompts)} prompts, {len(metadata)} metadata")
    if not all(isinstance(p, str) for p in prompts) or not all(isinstance(m, dict) for m in metadata):
        raise ValueError("prompts are strings, metadata objects")
    "".join(prompts).encode()  # UnicodeEncodeError for half a surrogate pair, which no tokenizer takes
    images = [unpack_image(file) for file in files]
    if len({image.shape for image in images}) > 1:
        raise ValueError("the images of a request have one size")
    decoded = [unpack_image(file) for file in sources]
    return images, prompts, metadata, _shared(decoded, body.get("sources"), len(prompts))


def _shared(sources: list[Tensor], numbers: list[list[int]] | None, count: int) -> list[list[Tensor]]:
    """The sources of each of so many prompts, by their numbers; none without numbers."""
    numbers = [[] for _ in range(count)] if numbers is None else numbers
    if len(numbers) != count or not all(type(n) is int and 0 <= n < len(sources) for row in numbers for n in row):
        raise ValueError(f"sources of {len(numbers)} prompts, not of {count}, or numbers beyond {len(sources)} sources")
    return [[sources[number] for number in row] for row in numbers]
