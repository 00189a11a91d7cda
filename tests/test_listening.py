"""A reward server in this process: what it answers, what it refuses to read, and where it listens."""

import asyncio
import io
import json
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import torch
from starlette.exceptions import HTTPException

from flow_grpo.reward_server import requests, serve
from flow_grpo.reward_server.requests import Limits, Memory
from flow_grpo.reward_server.server import make_app
from flow_grpo.rewards.clients import wire
from flow_grpo.rewards.clients.client import Server

PATIENCE_S = 20  # until a test fails


def mean(images, prompts, metadata):
    return images.mean((1, 2, 3))


@contextmanager
def listening(score=mean, host="127.0.0.1", token="", **limits):
    """The address of a server; it is announced when it can be connected to."""
    address, over, app = Future(), threading.Event(), make_app("mean", score, Limits(**limits), token)

    def announce(url):
        socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)).close()
        address.set_result(url)

    async def main():
        listener = asyncio.create_task(serve.listen(app, host, 0, announce))
        await asyncio.to_thread(over.wait)
        listener.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        yield address.result(PATIENCE_S)
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def small_server():
    """The address of one that takes requests of up to 1 MiB, 8 MiB of memory in all."""
    with listening(max_body_bytes=2**20, max_memory_bytes=2**23) as url:
        yield url


def array_claiming(shape, dtype="<f4"):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, dict(descr=dtype, fortran_order=False, shape=shape))
    return buffer.getvalue() + b"\0" * 64


ODD, GOOD = wire.pack_image(torch.zeros(3, 16, 8), "npy"), wire.pack_image(torch.zeros(3, 16, 16), "npy")


def parts(*images, request='{"prompts": ["a"]}', **headers):
    return dict(data={"request": request}, files=[("images", ("0", image)) for image in images], headers=headers)


REFUSED = {  # a request, the status and words of the answer
    "no multipart": (dict(json={"prompts": ["a"]}), 422, "'request'"),
    "no JSON": (parts(GOOD, request="!!"), 422, "JSONDecodeError"),
    "no image": (parts(b"GIF89a" + b"\0" * 50), 422, "magic"),
    "no images": (parts(), 422, "0 images"),
    "two images": (parts(GOOD, GOOD), 422, "2 images, 1 prompts"),
    "two sizes": (parts(GOOD, ODD, request=json.dumps({"prompts": ["a", "b"]})), 422, "one size"),
    "types": (parts(GOOD, request='{"prompts": [3]}'), 422, "prompts are strings"),
    "metadata": (parts(GOOD, request='{"prompts": ["a"], "metadata": ["b"]}'), 422, "metadata objects"),
    "surrogate": (parts(GOOD, request='{"prompts": ["\\ud800"]}'), 422, "UnicodeEncodeError"),
    "a string": (parts(GOOD, request='{"prompts": "a"}'), 422, "Error"),
    "no object": (parts(GOOD, request='["a"]'), 422, "Error"),
    "deep": (parts(GOOD, request="[" * 200_000), 422, "RecursionError"),
    "header": (dict(content=b"", headers={"Authorization": b"Bearer \xe9"}), 422, "Error"),
    "too few values": (parts(array_claiming((3, 128, 128))), 422, "in 64 bytes"),
    "objects": (parts(array_claiming((3, 4, 4), "|O")), 422, "must be"),
    "values": (parts(wire.pack_image(torch.full((3, 4, 4), 9.0), "npy")), 422, "outside [0, 1]"),
    "infinite": (parts(wire.pack_image(torch.ones(3, 4, 4) / 0, "npy")), 422, "outside [0, 1]"),
    "too long": (dict(content=b" " * (2 << 20)), 413, "at most 1048576 bytes"),
    "unannounced": (dict(content=iter([b" " * (1 << 18)] * 5)), 411, "Content-Length"),
    "memory": (parts(b"", request=json.dumps(["a" * 250_000])), 413, "more than all"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_server_refuses_what_it_cannot_read_and_goes_on(kind, small_server):
    request, status, says = REFUSED[kind]
    answer = httpx.post(small_server + "/score", **request)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text
    answer = httpx.post(small_server + "/score", **parts(GOOD))
    assert answer.json() == {"scores": {"score": [0.0]}}


BODIES = {  # headers, the body, and the status of the answer
    "does not come": (b"Content-Length: 10", b"--a\r\n", b"408"),
    "is larger than the memory": (b"Content-Length: 70000", b"--a\r\n", b"413"),
    "has a length that lies": (b"Content-Length: 10\r\nTransfer-Encoding: chunked", b"1\r\n \r\n", b"411"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_is_neither_waited_for_nor_read_without_limit(kind):
    headers, body, status = BODIES[kind]
    with listening(read_s=0.05, max_memory_bytes=2**16) as url:
        address = httpx.URL(url).host, httpx.URL(url).port
        with socket.create_connection(address, timeout=PATIENCE_S) as connection:
            head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=a\r\n"
            connection.sendall(head + headers + b"\r\n\r\n" + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 " + status)


def test_requests_give_their_memory_back(small_server):
    large = wire.pack_image(torch.zeros(3, 64, 64), "npy")
    for _ in range(3):  # each takes more than half of what there is
        request = parts(*[large] * 10, request=json.dumps({"prompts": ["a" * 8000] * 10}))
        assert httpx.post(small_server + "/score", **request).status_code == 200


def test_requests_share_the_memory():
    memory = Memory(100)
    memory.take("first", 80)
    for num_bytes, status in ((30, 429), (101, 413)):
        with pytest.raises(HTTPException) as caught:
            memory.take("second", num_bytes)
        assert caught.value.status_code == status


def test_the_same_request_is_answered_from_memory(small_server):
    first, again, other = (
        httpx.post(small_server + "/score", **parts(*images, **{"Idempotency-Key": key}))
        for images, key in (([GOOD], "k"), ([], "k"), ([], "other"))
    )
    assert first.json() == again.json() == {"scores": {"score": [0.0]}}
    assert other.status_code == 422


def test_health_is_answered_while_images_are_decoded(monkeypatch):
    decoding, health_was_answered, decode = threading.Event(), threading.Event(), requests.unpack_image

    def waits(*args):
        decoding.set()
        assert health_was_answered.wait(PATIENCE_S)
        return decode(*args)

    monkeypatch.setattr(requests, "unpack_image", waits)
    with listening() as url:
        scored = Server(url).post("/score", json.loads, **parts(GOOD))
        assert decoding.wait(PATIENCE_S)
        assert httpx.get(url + "/health").json() == {"status": "ok", "waiting": 0, "allowed": True}
        health_was_answered.set()
        assert scored.result() == {"scores": {"score": [0.0]}}


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_is_announced_as_one_that_can_be_connected_to():
    with listening(host="::1") as url:
        assert url.startswith("http://[::1]:")
        assert httpx.get(url + "/health").status_code == 200


def test_no_token_is_needed_where_nobody_else_can_connect():
    for host, token in (("::1", ""), ("::", "sesame")):  # without: a row of test_refusals.py
        serve.check(serve.parse(["shapes", "--host", host]), token)
