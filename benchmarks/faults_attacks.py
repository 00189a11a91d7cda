"""What hostile clients send to a reward server: each attack returns the statuses of the answers that it got."""

import base64
import io
import json
import pickle
import re
import socket
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from faults_files import FLAG, Bomb
from faults_tries import Dice

from flow_grpo.scoring import wire

IMAGE = torch.linspace(0, 1, 3 * 16 * 16).view(3, 16, 16)
DTYPES = ("<f4", "|O", "<f8", ">f4", "|V8", "|u1", "<M8[s]", "[('a', '<f4')]", "|S1000000000", "<c8")
SHAPES = (
    "(3, 16, 16)",
    "(3, 10**9, 10**9)",
    "(3, -1, 16)",
    "(3, 0, 0)",
    "(-3, 16, 16)",
    "()",
    "(3,)",
    "(3, 1, 10**18)",
)
SHAPES += ("(True, 16, 16)", "(3, 16.0, 16)", "'x'", "__import__('os')", "(" * 500 + ")" * 500, "(3, 4096, 4096)")
PROMPTS = ("a", {"a": 1}, [5], [None], [], ["a"] * 3, None, [["a"]], ["x" * 10**6], ["\ud800"], 5, True)
METADATA = (None, [], [5], [{}], [{"a": "b" * 10**6}], {"a": 1}, "x", [[]], [{}] * 1000)
HEADERS = (
    *({"Authorization": value} for value in ("Bearer é", "Bearer", "", "x" * 10**5, "Basic YTpi", "\xff" * 100)),
    *({"Content-Length": value} for value in ("-1", "x", "1e3", "99999999999999999999", "5, 5", "", "0")),
    *(
        {"Content-Type": value}
        for value in ("multipart/form-data", "multipart/form-data; boundary=", "x" * 10**5, "\xff")
    ),
    *({"Idempotency-Key": value} for value in ("", "x" * 10**5, "\xff", "../../x")),
    *({"Host": "\xff"}, {"Expect": "100-continue"}, {"Upgrade": "websocket", "Connection": "Upgrade"}),
    *({f"X-{number}": "y" for number in range(5000)}, {"Transfer-Encoding": "gzip, chunked"}),
)


class Attacked:
    """A server, and how to send it things."""

    def __init__(self, port: int, token: str, dice: Dice, folder: Path, late: bool):
        self.port, self.token, self.dice, self.folder = port, token, dice, folder
        self.late = late  # whether nobody listened yet at the address that it printed

    def raw(self, data: bytes, limit_s: float = 10.0) -> int:
        """The status of the answer to some bytes; 0 = none."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=limit_s) as connection:
            with suppress(OSError):
                connection.sendall(data)
            match = re.match(rb"HTTP/\S+ (\d+)", connection.recv(4096))
            return int(match[1]) if match else 0
        return 0

    def post(self, body: bytes, headers: dict[str, str] | None = None, limit_s: float = 60.0) -> int:
        """The status of a POST to /score, with the right token unless the headers have another."""
        usual = {"Content-Length": str(len(body)), "Content-Type": "application/json", "Host": "x"}
        usual |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in (usual | (headers or {})).items())
        return self.raw(f"POST /score HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace") + body, limit_s)

    def score(self, files: list[bytes], **more: object) -> int:
        """The status of a JSON request with some files."""
        body = {"prompts": ["a"] * len(files), "images": [base64.b64encode(file).decode() for file in files]} | more
        return self.post(json.dumps(body).encode())


def arrays(to: Attacked) -> list[int]:
    """npy files with other headers than they may have."""
    descr, shape = to.dice.pick(DTYPES), to.dice.pick(SHAPES)
    header = f"{{'descr': '{descr}', 'fortran_order': {to.dice.pick(('False', 'True', '5'))}, 'shape': {shape}, }}"
    header = header if to.dice.share() < 0.8 else "{" * 30000
    version = to.dice.pick((1, 1, 1, 2, 3, 255))
    data = (
        b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header.encode()
    )
    return [to.score([data + b"\0" * 3072])]


def values(to: Attacked) -> list[int]:
    """Pixels that are no numbers from 0 to 1; images of two sizes; of none."""
    odd = IMAGE * to.dice.pick((float("nan"), float("inf"), -1.0, 2.0, 1e30, 1e-320))
    others = [odd, torch.zeros(3, 1, 1), torch.zeros(3, 4096, 1), torch.zeros(3, 1, 5000), torch.zeros(3, 8, 16)]
    chosen = [wire.pack_image(to.dice.pick([IMAGE, *others]), "npy") for _ in range(1 + to.dice.below(4))]
    return [to.score(chosen)]


def png(width: int, height: int, rows: int) -> bytes:
    """A PNG of one colour that claims a size; so small that many fit into a request."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes(1 + 3 * width) * rows if rows * width <= 2**24 else bytes(100), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def pictures(to: Attacked) -> list[int]:
    """Small files of large pictures, one or many."""
    side = to.dice.pick((4096, 4096, 4097, 20000, 60000, 2**31 - 1, 0))
    file = png(side, side, min(side, 4096))
    return [to.score([file] * to.dice.pick((1, 4, 16, 60)))]


def pictures_at_once(to: Attacked) -> list[int]:
    """Requests that are allowed one by one, from several clients; who is told to come later is not let down."""
    file = png(4096, 4096, 4096)
    with ThreadPoolExecutor(6) as threads:
        return list(threads.map(lambda _: to.score([file]), range(6)))


def formats(to: Attacked) -> list[int]:
    """Other formats, and files that end early."""
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    picture = wire.pack_image(IMAGE, "png")
    files = (b"GIF89a" + b"\0" * 99, b"%!PS-Adobe\n", b"BM" + b"\0" * 99, b"II*\0" + b"\0" * 99, buffer.getvalue(), b"")
    files += (
        picture[: to.dice.below(len(picture))],
        pickle.dumps(Bomb(to.folder / FLAG)),
        b"<svg/>",
        to.dice.bytes(500),
    )
    return [to.score([to.dice.pick(files)])]


def bodies(to: Attacked) -> list[int]:
    """JSON that is none, deep, or of other types."""
    texts = (
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b"\xff",
        b"[" * 200000,
        b'{"a":' * 100000,
        b"9" * 10**6,
        b'{"prompts": []}',
    )
    if to.dice.share() < 0.5:
        return [to.post(to.dice.pick(texts))]
    image = base64.b64encode(wire.pack_image(IMAGE, "npy")).decode()
    images = to.dice.pick(([image], [image], [image] * 3, [5], "x", [None], {"a": 1}, [image + "!"], ["A" * 10**6]))
    body = {"prompts": to.dice.pick(PROMPTS), "images": images, "metadata": to.dice.pick(METADATA)}
    return [to.post(json.dumps(body).encode())]


def headers(to: Attacked) -> list[int]:
    return [to.post(b"{}", to.dice.pick(HEADERS), limit_s=5.0)]


def paths(to: Attacked) -> list[int]:
    """Other paths and methods."""
    path = to.dice.pick(
        ("/", "/../../etc/passwd", "/score/../..", "//", "/%00", "/score?x=" + "y" * 10**5, "*", "/\xff")
    )
    method = to.dice.pick(("GET", "PUT", "TRACE", "CONNECT", "X" * 10**4, "", "PRI", "OPTIONS"))
    return [to.raw(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"), limit_s=5.0)]


def lengths(to: Attacked) -> list[int]:
    """Chunked, with another length beside it; longer than it may be."""
    length = to.dice.pick(("Content-Length: 10\r\n", "", "Content-Length: 10\r\nContent-Length: 20\r\n"))
    head = f"POST /score HTTP/1.1\r\nHost: x\r\n{length}Transfer-Encoding: chunked\r\n"
    head += f"Authorization: Bearer {to.token}\r\n" if to.token else ""
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    with suppress(OSError), socket.create_connection(("127.0.0.1", to.port), timeout=20) as connection:
        connection.sendall(head.encode() + b"\r\n")
        with suppress(OSError):
            for _ in range(400):
                connection.sendall(chunk)
        with suppress(OSError):
            connection.sendall(b"0\r\n\r\n")
        answer = connection.recv(4096)
        match = re.match(rb"HTTP/\S+ (\d+)", answer)
        return [int(match[1]) if match else 0]
    return [0]


def parts(to: Attacked) -> list[int]:
    """Multipart bodies that are malformed, or have many parts."""
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    image = b'--b\r\nContent-Disposition: form-data; name="images"; filename="%s"\r\n\r\n%s\r\n'
    request = part % (b"request", b'{"prompts": ["a"]}')
    file = wire.pack_image(IMAGE, "npy")
    bodies = (
        *(
            request,
            request + b"--b--",
            part % (b"x", b"y") * 20000 + b"--b--",
            image % (b"0.npy", file) * 6000 + b"--b--",
        ),
        *(request + image % (b"../../x", file) + b"--b--", b"--b\r\n\r\n--b--", b"--b\r\n" + b"A: b\r\n" * 10**4, b""),
        *(request * 2 + image % (b"x" * 10**5, file) + b"--b--", part % (b"request", b"[" * 10**5) + b"--b--"),
    )
    return [to.post(to.dice.pick(bodies), {"Content-Type": "multipart/form-data; boundary=b"})]


def crowd(to: Attacked) -> list[int]:
    """Many connections that say nothing, half a request, or a good one at once."""
    start = to.dice.pick(
        (b"", b"POST /score HTTP/1.1\r\nHost: x\r\n", b"POST /score HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
    )
    connections = []
    with suppress(OSError):
        for _ in range(to.dice.pick((50, 300))):
            connections.append(socket.create_connection(("127.0.0.1", to.port), timeout=5))
            connections[-1].sendall(start)
    time.sleep(0.5)
    statuses = [to.score([wire.pack_image(IMAGE, "npy")])]
    for connection in connections:
        connection.close()
    return statuses


def tokens(to: Attacked) -> list[int]:
    """Wrong ones: without the right one no score is given, and nothing that is sent is read."""
    wrong = to.dice.pick(("", "Bearer", "Bearer x", f"Bearer {to.token[:-1]}", f"Basic {to.token}", "Bearer sesame\0"))
    body = json.dumps({"prompts": ["a"], "images": [base64.b64encode(wire.pack_image(IMAGE, "npy")).decode()]})
    status = to.post(body.encode(), {"Authorization": wrong})
    if to.token and status not in (400, 401, 403):
        return [500 + status % 100]  # an attack that was let in counts as a broken server
    return [status]


def keys(to: Attacked) -> list[int]:
    """The same key with other requests, and one request many times."""
    good = json.dumps({"prompts": ["a"], "images": [base64.b64encode(wire.pack_image(IMAGE, "npy")).decode()]}).encode()
    other = json.dumps({"prompts": ["a"], "images": ["AAAA"]}).encode()
    bodies = [to.dice.pick((good, other)) for _ in range(10)]
    return [to.post(body, {"Idempotency-Key": "k"}) for body in bodies]


def at_once(to: Attacked) -> list[int]:
    """As soon as it has printed its address, before all other attacks: it listens there."""
    return [503 if to.late else 200]


ATTACKS = (
    *(arrays, values, pictures, formats, bodies, headers, paths, lengths, parts, crowd, tokens, keys, bodies, headers),
    *(at_once, pictures_at_once),
)
