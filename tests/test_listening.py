"""A reward server's connections, in this process: slow clients, addresses, and what its command line refuses."""

import asyncio
import socket
import threading
from contextlib import asynccontextmanager

import httpx
import pytest
import torch
from starlette.exceptions import HTTPException

from flow_grpo.reward_server import requests, serve
from flow_grpo.reward_server.requests import Hold, Limits, Memory
from flow_grpo.reward_server.server import make_app
from flow_grpo.rewards.clients.wire import pack_image

IMAGE = ("images", ("0", pack_image(torch.zeros(3, 16, 16), "png")))
ONE = dict(data={"request": '{"prompts": ["a"]}'}, files=[IMAGE])
PATIENCE_S = 20  # until a test fails


@asynccontextmanager
async def listening(host="127.0.0.1", **limits):
    """The address of a server of this event loop, which scores an image by its mean."""
    address = asyncio.Future()
    limits = Limits(**limits)
    app = make_app("mean", lambda images, *_: images.mean((1, 2, 3)), limits)
    task = asyncio.create_task(serve.listen(app, host, 0, address.set_result))
    try:
        yield httpx.URL(await address)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def answer_to(url, data):
    """All that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    received = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    return received


def test_a_body_that_does_not_come_is_not_waited_for():
    async def main():
        async with listening(read_s=0.05) as url:
            head = b"POST /score HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 10\r\n"
            assert (await answer_to(url, head + b"\r\n12345")).startswith(b"HTTP/1.1 408")

    asyncio.run(main())


def test_health_is_answered_while_images_are_decoded(monkeypatch):
    decoding, health_was_answered, decode = threading.Event(), threading.Event(), requests.unpack_image

    def waits(*args):
        decoding.set()
        assert health_was_answered.wait(PATIENCE_S)
        return decode(*args)

    async def main():
        async with listening() as url, httpx.AsyncClient(timeout=2 * PATIENCE_S) as client:
            scored = asyncio.create_task(client.post(url.join("/score"), **ONE))
            await asyncio.to_thread(decoding.wait, PATIENCE_S)
            assert (await client.get(url.join("/health"))).status_code == 200
            health_was_answered.set()
            assert (await scored).json() == {"scores": {"score": [0.0]}}

    monkeypatch.setattr(requests, "unpack_image", waits)
    asyncio.run(main())


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_is_announced_as_one_that_can_be_connected_to():
    async def main():
        async with listening("::1") as url, httpx.AsyncClient() as client:
            assert url.host == "::1"
            assert (await client.get(url.join("/health"))).status_code == 200

    asyncio.run(main())


def test_requests_share_the_memory():
    memory = Memory(100)
    first, second = Hold(memory), Hold(memory)
    first.take(80)
    for num_bytes, status in ((30, 429), (101, 413)):
        with pytest.raises(HTTPException) as caught:
            second.take(num_bytes)
        assert caught.value.status_code == status
    first.release()
    second.take(30)
    assert memory.taken == 30


def test_the_address_is_announced_when_it_can_be_connected_to():
    def connect(address):
        with socket.create_connection((httpx.URL(address).host, httpx.URL(address).port)):
            raise InterruptedError

    app = make_app("mean", torch.mean, Limits())
    with pytest.raises(InterruptedError):
        asyncio.run(serve.listen(app, "127.0.0.1", 0, connect))


@pytest.mark.parametrize(("host", "is_loopback"), [("127.0.0.1", True), ("::1", True), ("::", False)])
def test_a_token_is_needed_where_others_can_connect(host, is_loopback):
    parsed = serve.parse(["shapes", "--host", host])
    assert serve.is_loopback(host) == is_loopback
    serve.check(parsed, "sesame")
    if is_loopback:
        serve.check(parsed, "")
