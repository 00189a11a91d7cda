"""Rewards in threads, processes and servers: same scores, hidden latency, and servers that misbehave."""

import io
import json
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import hostile
import httpx
import numpy as np
import pytest
import torch
import warm
from hostile import http_server, says
from ml_collections import ConfigDict
from PIL import Image
from small import ENV, as_prompts, config_of

from flow_grpo import rewards
from flow_grpo.rewards.clients import client, wire
from flow_grpo.rewards.clients.client import Server, ServerError
from flow_grpo.scoring import pool as scoring_pool
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import RewardFailed
from flow_grpo.scoring.settings import check_rewards

CPU, WINDOW = torch.device("cpu"), "shapes_qwenimage"
JPEG = {"jpeg_compressibility": 1.0}


def settings(**changed):
    config = config_of(WINDOW).reward
    with config.unlocked():
        args = changed.pop("args", {})
        config.update(changed)
        config.args = ConfigDict(args)
    return config


def images(count, size=16):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    for owner, name in ((client, "RETRY_S"), (client, "IN_FLIGHT"), (scoring_pool, "MAX_PENDING")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def pool_of(url="", **how):
    """A pool with one reward: a file, or what `url` serves, which needs no file here."""
    client.RETRY_S = how.pop("retry_s", 2.0)  # `constants` sets them back
    client.IN_FLIGHT, scoring_pool.MAX_PENDING = how.pop("in_flight", 64), how.pop("max_pending", 1024)
    fast = dict(timeout_s=2.0) | how
    if not url:
        return Pool(CPU, JPEG, (), settings(**fast))
    return Pool(CPU, {"served": 1.0}, (), settings(args={"served": {"url": url}}, **fast))


def score(pool, count=6):
    return pool.submit(images(count), as_prompts(f"prompt {i}" for i in range(count))).result()


@contextmanager
def served(*args, name="jpeg_compressibility", port=0, env=()):
    """serve_reward.py as a command; (address, process)."""
    command = ["scripts/serve_reward.py", name, "--port", port, *args]
    process = warm.Started(command, ENV | dict(env))
    try:
        while not process.stdout().endswith("\n"):
            assert process.poll() is None, process.stderr()
            time.sleep(0.01)
        yield process.stdout().split()[0], process
    finally:
        process.kill()
        process.done()


@pytest.fixture(scope="module")
def small_server():
    """The address of one that takes requests of up to 1 MiB, 8 MiB of memory in all, for all tests that only ask."""
    with served("--max-body-mib", "1", "--max-memory-gib", str(2**-7)) as (url, _):
        yield url


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_every_backend_gives_the_same_scores_in_order(backend):
    expected = rewards.load("jpeg_compressibility", CPU)(images(40), [""] * 40, [{}] * 40)
    pool = pool_of(backend=backend, batch_size=7)
    found = score(pool, 40)
    assert torch.equal(found["jpeg_compressibility"], expected)
    assert torch.equal(found["avg"], expected)
    if backend == "process":
        server = pool.scorers["jpeg_compressibility"].process.process
        server.kill()
        server.wait()
        with pytest.raises(RewardFailed, match=r"reward 'jpeg_compressibility' .* has ended with status -9"):
            score(pool)
    pool.close()


def test_a_server_gives_the_local_scores_of_400_images_with_64_requests_in_flight():
    pictures = images(400, 32)
    expected = rewards.load("jpeg_compressibility", CPU)(pictures, [""] * 400, [{}] * 400)
    with served() as (url, _):
        pool = pool_of(url, batch_size=4, timeout_s=60.0)
        found = pool.submit(pictures, as_prompts([""] * 400)).result()
        pool.close()
        answered = httpx.get(url + "/health").json()
    assert torch.equal(found["served"], expected)
    assert answered == {"status": "ok", "waiting": 0, "allowed": True}


def test_json_is_an_alternative_to_multipart(small_server):
    import base64

    expected = rewards.load("jpeg_compressibility", CPU)(images(2), [""] * 2, [{}] * 2)
    files = [base64.b64encode(wire.pack_image(image, "npy")).decode() for image in images(2)]
    answer = httpx.post(small_server + "/score", json={"prompts": ["a", "b"], "images": files})
    assert torch.tensor(answer.json()["scores"]["score"]) == pytest.approx(expected)


def png_header(size):
    """A PNG that says how large it is, and ends."""
    buffer = io.BytesIO()
    Image.new("L", (size, size)).save(buffer, "png")
    return buffer.getvalue()[:33]


PNG_HEADER = png_header(512) + b"\0\0\0\0IDAT" + bytes(12)


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (dict(json={"prompts": ["a"], "images": ["!!"]}), 422, "Error"),
        (dict(json={"prompts": ["a"], "images": ["AAAA"]}), 422, "no image"),
        (dict(json={"prompts": ["a"]}), 422, "images"),
        (dict(json={"prompts": [], "images": []}), 422, "0 images"),
        (dict(json={"prompts": [3], "images": ["AAAA"]}), 422, "prompts are strings"),
        (dict(content=b'{"prompts": ["\\ud800"], "images": ["AAAA"]}'), 422, "UnicodeEncodeError"),
        (dict(json={"prompts": "a", "images": ["AAAA"]}), 422, "no object with a list 'prompts'"),
        (dict(json=["a"]), 422, "no object with a list 'images'"),
        (dict(content=b"\x80\x05."), 422, "Error"),
        (dict(content=b"[" * 200_000), 422, "RecursionError"),
        (dict(content=b"", headers={"Authorization": b"Bearer \xe9"}), 422, "Error"),
        (dict(content=b" " * (2 << 20)), 413, "at most 1048576 bytes"),
        (dict(content=iter([b" " * (1 << 18)] * 5)), 413, "at most 1048576 bytes"),
        (dict(data={"request": '{"prompts": ["a"]}'}, files=[("images", ("0", PNG_HEADER))]), 413, "262144 pixels"),
        (dict(data={"request": json.dumps(["a" * 250_000])}, files=[("images", b"")]), 413, "more than all"),
    ],
    ids=[
        *("base64", "image", "no images", "empty", "types", "surrogate", "a string", "no object", "pickle", "deep"),
        *("header", "too long", "unannounced", "pixels", "memory"),
    ],
)
def test_a_server_refuses_what_it_cannot_read(request_, status, says, small_server):
    answer = httpx.post(small_server + "/score", **request_)
    assert httpx.get(small_server + "/health").status_code == 200
    assert answer.status_code == status
    assert says in answer.text


def test_a_content_length_that_lies_changes_no_limit(small_server):
    host, port = httpx.URL(small_server).host, httpx.URL(small_server).port
    head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, port), timeout=20) as connection:
        connection.sendall(head + b"100000\r\n" + b" " * (1 << 20) + b"\r\n1\r\n \r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_requests_give_their_memory_back(small_server):
    server = Server(small_server)
    files = [("images", (str(i), wire.pack_image(image, "npy"))) for i, image in enumerate(images(10, 64))]
    data = {"request": json.dumps({"prompts": ["a" * 8000] * 10})}
    for _ in range(3):  # each takes more than half of what there is
        assert server.post("/score", bytes, data=data, files=files).result()


def array_claiming(shape, dtype="<f4"):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, dict(descr=dtype, fortran_order=False, shape=shape))
    return buffer.getvalue() + b"\0" * 64


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (array_claiming((3, 4000, 4000)), "with 64 bytes"),
        (array_claiming((3, 10**9, 10**9)), "at most 4096 a side"),
        (array_claiming((3, 4, 4), "|O"), "must be"),
        (wire.pack_image(images(1)[0] + 9, "npy"), r"outside \[0, 1\]"),
        (wire.pack_image(images(1)[0] / 0, "npy"), r"outside \[0, 1\]"),
        (b"GIF89a" + b"\0" * 50, "no image"),
    ],
)
def test_images_that_are_none(data, says):
    with pytest.raises(ValueError, match=says):
        wire.unpack_image(data, 4096)


def test_a_token_is_asked_for_before_weights_are_loaded_and_ctrl_c_is_quiet(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("sesame\n")
    (tmp_path / "other").write_text("open\n")
    with served("--token-file", tmp_path / "token") as (url, process):
        for header in (b"", b"Bearer open", b"Bearer s\xe9same"):
            assert httpx.post(url + "/score", headers={"Authorization": header}).status_code == 401
        asking = settings(args={"jpeg_compressibility": dict(url=url)}, timeout_s=5.0)
        for file in ("", str(tmp_path / "other")):
            asking.token_file = file
            with pytest.raises(ValueError, match=f"{url} asks for another token"):
                check_rewards(JPEG, (), asking)
            with pytest.raises(RewardFailed, match="HTTP 401"):
                score(Pool(CPU, JPEG, (), asking))
        asking.token_file = str(tmp_path / "token")
        check_rewards(JPEG, (), asking)
        assert score(Pool(CPU, JPEG, (), asking))["avg"].shape == (6,)
        monkeypatch.setenv("REWARD_TOKEN", "sesame")
        asking.token_file = ""
        assert score(Pool(CPU, JPEG, (), asking))["avg"].shape == (6,)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr() == ""


def answers(url):
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


STARTS = """
import time
from flow_grpo.base import distributed
from flow_grpo.scoring.processes import start_server
distributed.init_distributed()
print(start_server("jpeg_compressibility", "cpu", {}, 4).url, flush=True)
time.sleep(100)
"""


def test_every_machine_has_a_server_of_its_own_which_dies_with_the_rank_that_started_it(tmp_path):
    """Three ranks: two of a machine, and one of another, which cannot connect to the first one's loopback."""
    (tmp_path / "starts.py").write_text(STARTS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    places = [(0, 0), (0, 1), (1, 0)]  # machine, rank there
    ranks = [
        warm.Started(
            [tmp_path / "starts.py"],
            ENV | world | {"RANK": str(rank), "GROUP_RANK": str(machine), "LOCAL_RANK": str(local)},
        )
        for rank, (machine, local) in enumerate(places)
    ]
    try:
        while not all(rank.stdout().endswith("\n") for rank in ranks):
            assert all(rank.poll() is None for rank in ranks), [rank.stderr() for rank in ranks]
            time.sleep(0.05)
        first, second, other = (rank.stdout().strip() for rank in ranks)
        assert first == second != other
        assert answers(first)
        assert answers(other)
    finally:
        for rank in ranks:
            rank.kill()
            rank.done()
    deadline = time.time() + 20
    while time.time() < deadline and (answers(first) or answers(other)):
        time.sleep(0.1)
    assert not answers(first)
    assert not answers(other)


BROKEN = {
    "500s": (says({}, 500), "HTTP 500"),
    "429s": (says({}, 429), "HTTP 429"),
    "404": (says({}, 404), "refused: HTTP 404"),
    "closes": (hostile.gone, "away for over"),
    "half a body": (hostile.half, "away for over"),
    "hangs": (hostile.hangs, "no answer within"),
    "drips": (hostile.drips, "no answer within"),
    "a gigabyte": (hostile.floods, "answered with over"),
    "no JSON": (says(b"<html>"), "no JSON"),
    "a list": (says([0.5] * 6), "no {"),
    "too few": (says({"scores": {"score": [0.5]}}), "1 values for 6 images"),
    "NaN": (says(b'{"scores": {"score": [0.5, 0.5, NaN, 0.5, 0.5, 0.5]}}'), "'nan', not a finite number"),
    "infinite": (says(b'{"scores": {"score": [1e999, 0, 0, 0, 0, 0]}}'), "'inf', not a finite number"),
    "too large": (says({"scores": {"score": [0.5, 0.5, 3.5e38, 0.5, 0.5, 0.5]}}), "'3.5e+38', not a finite"),
    "strings": (says({"scores": {"score": ["0.5"] * 6}}), "'0.5', not a finite number"),
    "truths": (says({"scores": {"score": [True] * 6}}), "'True', not a finite number"),
    "no score": (says({"scores": {"other": [0.5] * 6}}), "no {"),
    "a pickle": (says(pickle.dumps({"scores": {"score": [0.5] * 6}})), "no JSON"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_hostile_server_is_an_error_with_its_address_and_a_prompt_or_a_mask(kind):
    answer, why = BROKEN[kind]
    with http_server(answer) as (url, _):
        with pytest.raises(RewardFailed) as caught:
            score(pool_of(url, timeout_s=1.0, retry_s=0.3))
        assert why in str(caught.value)
        assert url in str(caught.value)
        assert "'prompt 0'" in str(caught.value)
        masked = score(pool_of(url, timeout_s=1.0, retry_s=0.0, max_masked_share=0.05))
        assert masked["served"].isnan().all()


def test_scores_beyond_a_rewards_range_are_refused():
    with http_server(says({"scores": {"score": [0.5, 1.5]}})) as (url, _):
        shapes = Pool(CPU, {"shapes": 1.0}, (), settings(args={"shapes": {"url": url}}, timeout_s=2.0))
        with pytest.raises(RewardFailed, match=r"'1.5', not a finite number in \[0.0, 1.0\]"):
            shapes.submit(images(2), as_prompts(["a"] * 2)).result()


def test_a_server_that_comes_back_is_asked_again():
    def twice_broken(handler, body, number):
        (hostile.gone if number == 1 else says({}, 503) if number == 2 else hostile.honest)(handler, body, number)

    with http_server(twice_broken) as (url, counted):
        assert score(pool_of(url))["avg"].tolist() == [0.5] * 6
        assert len(counted) == 3


def test_requests_go_to_several_servers_in_turn_and_past_one_that_is_away():
    with http_server(hostile.honest) as (first, of_first), http_server(hostile.honest) as (second, of_second):
        assert score(pool_of([first, second], batch_size=1))["avg"].tolist() == [0.5] * 6
        assert (len(of_first), len(of_second)) == (3, 3)
    with http_server(hostile.gone) as (away, of_away), http_server(hostile.honest) as (there, of_there):
        pool = pool_of([away, there], batch_size=1, in_flight=1, retry_s=1.0)
        assert [score(pool)["avg"].tolist() for _ in range(2)] == [[0.5] * 6] * 2
        assert len(of_there) == 12
        assert 1 <= len(of_away) <= 2  # set aside for a while
    with pytest.raises(RewardFailed, match=r"was away for over 0\.5 s"):
        score(pool_of([away, there], retry_s=0.5))


def test_what_is_refused_is_not_asked_again():
    for status in (400, 307):
        with http_server(says({}, status)) as (url, counted):
            with pytest.raises(RewardFailed, match=f"refused: HTTP {status}"):
                score(pool_of(url))
            assert len(counted) == 1


def test_that_nobody_listens_is_said_at_once_but_not_per_request(caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # taken, so that nobody else can listen there
        with pytest.raises(RewardFailed, match=rf"{url}/score was away for over 0.3 s"):
            score(pool_of(url, retry_s=0.3, batch_size=1))
    (line,) = [record.message for record in caplog.records if url in record.message]
    assert f"reward server {url}: ConnectError" in line


WAS_HERE = Path(tempfile.gettempdir(), f"flow_grpo_was_here_{os.getpid()}")  # this process's own


class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {WAS_HERE}",)


def nested(depth=30):
    value = [0]
    for _ in range(depth):
        value = [value] * 10
    return value


@pytest.mark.parametrize("bomb", [Bomb(), {"outputs": [Bomb()]}, nested(), np.array([Bomb()], dtype=object)])
def test_a_pickle_bomb_does_not_go_off(bomb):
    with http_server(says(pickle.dumps(bomb))) as (url, _):
        args = {"deqa": dict(allow_pickle=True, timeout_s=2.0)}
        pool = Pool(CPU, {"deqa": 1.0}, (), settings(args={"deqa": args["deqa"]}))
        scorer = rewards.load("deqa", CPU, dict(url=url, allow_pickle=True, timeout_s=2.0))
        with pytest.raises(wire.BadAnswer, match="no plain pickle"):
            scorer(images(2), ["a"] * 2, [{}] * 2)
        pool.close()
    assert not WAS_HERE.exists()


def test_older_servers_are_asked_in_pickle_only_when_that_was_allowed():
    with pytest.raises(ValueError, match="speaks pickle"):
        rewards.load("deqa", CPU, {})

    def answer(handler, body, number):
        asked = pickle.loads(body)
        count = len(asked["images"])
        assert all(image.startswith(b"\xff\xd8") for image in asked["images"])
        if "meta_datas" in asked:
            strict.append(asked["only_strict"])
            found = dict(scores=np.linspace(0, 1, count), strict_rewards=[float(m["x"]) for m in asked["meta_datas"]])
        else:
            found = dict(outputs=[np.float32(0.25)] * count)
        hostile.send(handler, pickle.dumps(found))

    strict = []
    with http_server(answer) as (url, _):
        how = dict(url=url, allow_pickle=True)
        assert rewards.load("deqa", CPU, how)(images(3), ["a"] * 3, [{}] * 3).tolist() == [0.25] * 3
        asked = images(3), ["a"] * 3, [{"x": 0}, {"x": 1}, {"x": 0}]
        rewards.load("geneval", CPU, how | dict(only_strict=False))(*asked)
        found = rewards.load("geneval", CPU, how)(*asked)
    assert strict == [False, True]
    assert found["score"].tolist() == [0, 0.5, 1]
    assert found["strict"].tolist() == [0, 1, 0]


def chat(text):
    return says({"choices": [{"message": {"content": text}}]})


def test_a_judge_is_asked_about_each_image_and_its_prompt():
    asked = []

    def answer(handler, body, number):
        message = json.loads(body)["messages"][0]["content"]
        asked.append((handler.path, json.loads(body)["model"], message[1]["text"], message[0]["image_url"]["url"][:30]))
        rating = 10 if "a red circle" in message[1]["text"] else 4
        hostile.send(handler, {"choices": [{"message": {"content": f"Hm, 3 things.\nRating: {rating}"}}]})

    with http_server(answer) as (url, _):
        judge = rewards.load("vlm_judge", CPU, dict(url=url, model="qwen"))
        found = judge(images(3), ["a red circle", "b", "c"], [{}] * 3)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.4, 0.4]))
    assert {path for path, *_ in asked} == {"/v1/chat/completions"}
    assert {(model, picture) for _, model, _, picture in asked} == {("qwen", "data:image/png;base64,iVBORw0K")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("I cannot tell.", "no number"),
        ("Rating: 11", r"not a finite number in \[0.0, 1.0\]"),
        (None, "no text but 'None'"),
    ],
)
def test_a_judge_that_does_not_say_a_number_is_an_error(text, says):
    with http_server(chat(text)) as (url, _):
        judge = rewards.load("vlm_judge", CPU, dict(url=url, model="qwen"))
        with pytest.raises(wire.BadAnswer, match=says):
            judge(images(1), ["a"], [{}])


def test_unifiedreward_and_an_own_question_and_scale():
    with http_server(chat("Good.\nFinal Score: **4**")) as (url, _):
        found = rewards.load("unifiedreward", CPU, dict(url=url))(images(2), ["a", "b"], [{}] * 2)
    assert found.tolist() == [0.75, 0.75]
    with http_server(chat("7 of 20")) as (url, _):
        own = dict(url=url, model="m", template="{prompt}?", pattern=r"(\d+) of", lowest=0, highest=20)
        assert rewards.load("vlm_judge", CPU, own)(images(1), ["a"], [{}]).item() == pytest.approx(0.35)
    with pytest.raises(ValueError, match="a judge needs"):
        rewards.load("vlm_judge", CPU, dict(url="http://127.0.0.1:1", model="m", template="good?"))


def test_no_more_images_are_under_way_than_there_is_room_for():
    at_once, most, lock = [0], [0], threading.Lock()

    def slow(handler, body, number):
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.05)
        with lock:
            at_once[0] -= 1
        hostile.honest(handler, body, number)

    with http_server(slow) as (url, counted):
        pool = pool_of(url, batch_size=2, max_pending=8)
        pending = [pool.submit(images(10), as_prompts(["a"] * 10)) for _ in range(4)]
        assert all(len(part.result()["avg"]) == 10 for part in pending)
        assert most[0] <= 4
        assert len(counted) == 20


def test_the_same_request_is_answered_from_memory(small_server):
    server, body = Server(small_server), {"prompts": ["a"], "images": []}
    files = [("images", ("0.npy", wire.pack_image(images(1)[0], "npy")))]
    how = dict(data={"request": '{"prompts": ["a"]}'}, files=files, headers={"Idempotency-Key": "k"})
    first = server.post("/score", bytes, **how).result()
    again = server.post("/score", bytes, json=body, headers={"Idempotency-Key": "k"}).result()
    assert first == again
    with pytest.raises(ServerError, match="422"):
        server.post("/score", bytes, json=body, headers={"Idempotency-Key": "other"}).result()
