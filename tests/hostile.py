"""Reward servers that misbehave, on loopback; each closes with its context."""

import json
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def http_server(answer):
    """answer: (handler, body, number of the request) -> None writes the response. Yields the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            with lock:
                counted.append(self.path)
                number = len(counted)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with suppress(BrokenPipeError, ConnectionResetError):
                answer(self, body, number)

        do_GET = do_POST

        def log_message(self, *args):
            pass

    counted = []
    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()  # s until it sees its shutdown
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", counted
    finally:
        server.shutdown()
        server.server_close()


def send(handler, body, status=200, length=None):
    """A response; length: what it claims to be long."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("content-length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def honest(handler, body, number):
    """A score of one half for each image of a multipart request."""
    send(handler, {"scores": {"score": [0.5] * body.count(b'name="images"')}})


def gone(handler, body, number):
    """Closes the connection without a word."""
    handler.close_connection = True
    handler.connection.close()


def half(handler, body, number):
    """Half of what it promises."""
    send(handler, b'{"scores": {"sc', length=1000)
    handler.close_connection = True


def hangs(handler, body, number):
    """Say nothing for a long time."""
    time.sleep(20)


def drips(handler, body, number):
    """A byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("content-length", "1000000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


def floods(handler, body, number):
    """The beginning of a gigabyte; who waits for the rest waits for ever."""
    send(handler, b" " * (2**24 + 1), length=2**30)


def says(answer, status=200):
    """Always the same."""
    return lambda handler, body, number: send(handler, answer, status)
