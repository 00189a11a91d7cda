"""What a hostile reward server answers: each function draws an answer, and says what in it is valid, None = nothing."""

import gzip
import json
import math
import pickle
import socket
import time
from pathlib import Path

import numpy as np
from faults_files import FLAG, Bomb
from faults_tries import Dice

COUNT = 3  # images in a request
VALUES = (
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e400",
        "true",
        "null",
        '"0.5"',
        "[]",
        "{}",
        "9" * 400,
        "0.5j",
        "00.5",
    ),
    *("-0.0", "1e-320", "0x1", "[0.5]", '"NaN"', "9" * 5000, ".5", "1.", "+1", "0.5", "3", "1e308", "3.5e38"),
)
BODIES = (
    *(b"", b"{", b"null", b"[]", b"5", b"<html>", b"\xff\xfe", b"\0" * 1000, b'{"scores": null}', b'{"scores": {}}'),
    *(b'{"scores": []}', b'{"scores": {"score": 0.5}}', b'{"scores": {"score": {}}}', b'{"scores": {"score": null}}'),
    *(
        b"[" * 200000,
        b'{"a":' * 100000,
        b'{"scores": {"score": ' + b"[" * 50000,
        b"9" * 2**20,
        b'"' + b"x" * 2**20 + b'"',
    ),
    *(b'{"scores": {"score": [0.5, 0.5, 0.5]}, "scores": {"score": [9]}}', b"\xef\xbb\xbf{}", b"{'scores': 1}"),
)
HEADS = (
    *(
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 200 OK\r\n",
        b"HTTP/9.9 200 OK\r\n",
        b"HTTP/1.1 abc OK\r\n",
        b"ICY 200 OK\r\n",
    ),
    *(b"\r\n\r\n", b"HTTP/1.1 200\r\n", b"HTTP/1.1 99999 X\r\n", b"\x16\x03\x01\x02\x00", b"HTTP/1.1 -1 X\r\n"),
)
STATUSES = (
    100,
    101,
    103,
    204,
    206,
    301,
    302,
    304,
    307,
    400,
    401,
    403,
    404,
    408,
    413,
    418,
    422,
    429,
    451,
    500,
    502,
    503,
    599,
)
ENCODINGS = ("gzip", "deflate", "br", "zstd", "identity", "nowhere", "gzip, gzip")


def response(body: bytes, *, head: bytes = HEADS[0], length: object = None, headers: bytes = b"") -> bytes:
    length = len(body) if length is None else length
    return head + f"Content-Length: {length}\r\n".encode() + headers + b"\r\n" + body


def sends(data: bytes):
    return lambda connection: connection.sendall(data)


def values(dice: Dice, folder: Path):
    """Scores that are no numbers, too many, or too few."""
    texts = [dice.pick(VALUES) for _ in range(dice.pick((COUNT, COUNT, COUNT, 0, 1, 4, 1000)))]
    texts = ["0.5" if dice.share() < 0.5 else text for text in texts]
    body = b'{"scores": {"score": [' + ", ".join(texts).encode() + b"]}}"
    return sends(response(body)), texts


def bodies(dice: Dice, folder: Path):
    body = dice.pick(BODIES) if dice.share() < 0.8 else dice.bytes(1 + dice.below(10000))
    return sends(response(body)), None


def keys(dice: Dice, folder: Path):
    """Other figures beside the score."""
    names = ("", "score", "avg", "a/b", "x" * 10**5, "\N{PILE OF POO}", "served", "\ud800")
    scores = {
        "score": [0.5] * COUNT,
        dice.pick(names): dice.pick(([0.5] * COUNT, [1], None, ["x"] * COUNT, [math.nan] * COUNT)),
    }
    return sends(response(json.dumps({"scores": scores}).encode())), scores


def statuses(dice: Dice, folder: Path):
    status = dice.pick(STATUSES)
    headers = dice.pick((b"", b"Location: http://127.0.0.1:1/\r\n", b"Location: /score\r\n", b"Retry-After: 99999\r\n"))
    words = dice.pick((b"", b"x" * 2**20, b"\xff" * 1000, b"{}"))
    return sends(response(words, head=f"HTTP/1.1 {status} X\r\n".encode(), headers=headers)), None


def heads(dice: Dice, folder: Path):
    lengths = (None, -1, "x", 10**20, "1, 2", 5, "", "0x10")
    headers = (
        b"",
        b"A" * 10**6 + b": b\r\n",
        b"A: b\r\n" * 10**5,
        b": \r\n",
        b"\0: x\r\n",
        b"A: \xff\r\n",
        b" folded\r\n",
    )
    body = b'{"scores": {"score": [0.5, 0.5, 0.5]}}'
    head = HEADS[0] if dice.share() < 0.5 else dice.pick(HEADS)
    return sends(response(body, head=head, length=dice.pick(lengths), headers=dice.pick(headers))), body


def encodings(dice: Dice, folder: Path):
    """A body that is said to be compressed, and is, or is not, or grows when it is unpacked."""
    plain = dice.pick((b'{"scores": {"score": [0.5, 0.5, 0.5]}}', b" " * 2**28, dice.bytes(1000)))
    body = gzip.compress(plain, 1) if dice.share() < 0.6 else plain[: 2**20]
    return sends(response(body, headers=f"Content-Encoding: {dice.pick(ENCODINGS)}\r\n".encode())), plain


def chunks(dice: Dice, folder: Path):
    sizes = (
        b"5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\n",
        b"FFFFFFFFFFFFFFFFFFFF\r\n",
        b"zz\r\n",
        b"5;" + b"x" * 10**6,
        b"0\r\n" + b"A: b\r\n" * 10**5,
    )
    return sends(HEADS[0] + b"Transfer-Encoding: chunked\r\n\r\n" + dice.pick(sizes)), None


def slow(dice: Dice, folder: Path):
    """Bytes now and then, or none; for longer than a request may take."""
    start = dice.pick((b"", b"HTTP", HEADS[0], response(b"", length=10**6), HEADS[0] + b"A: "))
    pause = dice.pick((0.01, 0.2, 0.9))

    def answer(connection) -> None:
        connection.sendall(start)
        for _ in range(int(20 / pause)):
            time.sleep(pause)
            connection.sendall(b" ")

    return answer, None


def floods(dice: Dice, folder: Path):
    """A gigabyte of headers or body."""
    start, part = dice.pick(
        (
            (response(b"", length=2**30), b" " * 2**20),
            (HEADS[0], b"A: " + b"b" * 10**4 + b"\r\n"),
            (HEADS[0] + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 2**16 + b"\r\n"),
            (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        )
    )

    def answer(connection) -> None:
        connection.sendall(start)
        for _ in range(2**30 // len(part)):
            connection.sendall(part)

    return answer, None


def leaves(dice: Dice, folder: Path):
    """Closes or resets the connection, at once or amid an answer."""
    whole = response(b'{"scores": {"score": [0.5, 0.5, 0.5]}}')
    part, resets = whole[: dice.below(len(whole))], dice.share() < 0.5

    def answer(connection) -> None:
        connection.sendall(part)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    return answer, None


def pickles(dice: Dice, folder: Path):
    """To the client of older servers, which speak pickle."""
    nested = [0]
    for _ in range(30):
        nested = [nested] * 10
    bomb = Bomb(folder / FLAG)
    things = (
        bomb,
        {"outputs": [bomb]},
        nested,
        np.array([bomb], dtype=object),
        {"outputs": "x"},
        {"outputs": [1] * 9},
        5,
    )
    body = pickle.dumps(dice.pick(things), protocol=dice.below(6))
    if dice.share() < 0.4:
        place = dice.below(len(body))
        body = body[:place] + dice.bytes(1) + body[place + 1 :]
    if dice.share() < 0.1:
        body = b"\x80\x04\x95" + dice.bytes(8) + b"\x8e" + b"\xff" * 6 + b"\0\0" + b"."
    return sends(response(body)), None


ANSWERS = (
    values,
    values,
    bodies,
    keys,
    statuses,
    heads,
    encodings,
    chunks,
    slow,
    floods,
    leaves,
    pickles,
    values,
    bodies,
)
