"""Rewards in threads, processes and servers: same scores, hidden latency, and servers that misbehave."""

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
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
from small import ENV, ROOT, config_of

from flow_grpo import rewards
from flow_grpo.scoring import pickled, wire
from flow_grpo.scoring.client import Server, ServerError
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import RewardFailed

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


def pool_of(url="", **how):
    """A pool with one reward: a file, or what `url` serves, which needs no file here."""
    fast = dict(timeout_s=2.0, retry_s=2.0) | how
    if not url:
        return Pool(CPU, JPEG, (), settings(**fast))
    return Pool(CPU, {"served": 1.0}, (), settings(args={"served": {"url": url}}, **fast))


def score(pool, count=6):
    return pool.submit(images(count), [f"prompt {i}" for i in range(count)], [{}] * count).result()


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
    """The address of one that takes requests of up to 1 MiB, for all tests that only ask."""
    with served("--max-body-mib", "1") as (url, _):
        yield url


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_every_backend_gives_the_same_scores_in_order(backend):
    expected = rewards.load("jpeg_compressibility", CPU)(images(40), [""] * 40, [{}] * 40)
    pool = pool_of(backend=backend, batch_size=7)
    found = score(pool, 40)
    pool.close()
    assert torch.equal(found["jpeg_compressibility"], expected)
    assert torch.equal(found["avg"], expected)


@pytest.mark.parametrize("form", ["npy", "png"])
def test_a_server_gives_the_local_scores_of_a_thousand_images_with_64_requests_in_flight(form):
    pictures = (images(1000, 32) * 255).round() / 255  # what a PNG can hold
    expected = rewards.load("jpeg_compressibility", CPU)(pictures, [""] * 1000, [{}] * 1000)
    with served() as (url, _):
        pool = pool_of(url, batch_size=4, in_flight=64, timeout_s=60.0, image_format=form)
        found = pool.submit(pictures, [""] * 1000, [{}] * 1000).result()
        pool.close()
        answered = httpx.get(url + "/health").json(), httpx.get(url + "/version").json()
    assert torch.equal(found["served"], expected)
    assert answered[0] == {"status": "ok", "waiting": 0}
    assert answered[1]["reward"] == "jpeg_compressibility"


def test_json_is_an_alternative_to_multipart(small_server):
    import base64

    expected = rewards.load("jpeg_compressibility", CPU)(images(2), [""] * 2, [{}] * 2)
    files = [base64.b64encode(wire.pack_image(image, "npy")).decode() for image in images(2)]
    answer = httpx.post(small_server + "/score", json={"prompts": ["a", "b"], "images": files})
    assert torch.tensor(answer.json()["scores"]["score"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (dict(json={"prompts": ["a"], "images": ["!!"]}), 422, "Error"),
        (dict(json={"prompts": ["a"], "images": ["AAAA"]}), 422, "no image"),
        (dict(json={"prompts": ["a"]}), 422, "images"),
        (dict(json={"prompts": [], "images": []}), 422, "0 images"),
        (dict(json={"prompts": [3], "images": ["AAAA"]}), 422, "prompts are strings"),
        (dict(content=b"\x80\x05."), 422, "Error"),
        (dict(content=b" " * (2 << 20)), 413, "at most 1048576 bytes"),
    ],
    ids=["base64", "image", "no images", "empty", "types", "pickle", "too long"],
)
def test_a_server_refuses_what_it_cannot_read(request_, status, says, small_server):
    answer = httpx.post(small_server + "/score", **request_)
    assert httpx.get(small_server + "/health").status_code == 200
    assert answer.status_code == status
    assert says in answer.text


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


def test_a_token_is_asked_for():
    with served(env={"REWARD_TOKEN": "sesame"}) as (url, _):
        assert httpx.post(url + "/score", json={}).status_code == 401
        how = dict(timeout_s=5.0, retry_s=0.0)
        wrong = Pool(CPU, JPEG, (), settings(args={"jpeg_compressibility": dict(url=url, token="open")}, **how))
        with pytest.raises(RewardFailed, match="HTTP 401"):
            score(wrong)
        right = Pool(CPU, JPEG, (), settings(args={"jpeg_compressibility": dict(url=url, token="sesame")}, **how))
        assert score(right)["avg"].shape == (6,)


def answers(url):
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_dies_with_the_process_that_started_it(tmp_path):
    code = "import sys; from flow_grpo.scoring.processes import start_server as s\n"
    code += "print(s('jpeg_compressibility', 'cpu', {}, 4)[0], flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    url = process.stdout.readline().strip()
    assert httpx.get(url + "/health").status_code == 200
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.time() + 20
    while time.time() < deadline and answers(url):
        time.sleep(0.1)
    assert not answers(url)


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
            score(pool_of(url, timeout_s=1.0, retry_s=1.0))
        assert why in str(caught.value)
        assert url in str(caught.value)
        assert "'prompt 0'" in str(caught.value)
        masked = score(pool_of(url, timeout_s=1.0, retry_s=0.0, on_failure="mask"))
        assert masked["served"].isnan().all()


def test_scores_beyond_a_rewards_range_are_refused():
    with http_server(says({"scores": {"score": [0.5, 1.5]}})) as (url, _):
        shapes = Pool(CPU, {"shapes": 1.0}, (), settings(args={"shapes": {"url": url}}, timeout_s=2.0, retry_s=0.0))
        with pytest.raises(RewardFailed, match=r"'1.5', not a finite number in \[0.0, 1.0\]"):
            shapes.submit(images(2), ["a"] * 2, [{}] * 2).result()


def test_a_server_that_comes_back_is_asked_again():
    def twice_broken(handler, body, number):
        (hostile.gone if number == 1 else says({}, 503) if number == 2 else hostile.honest)(handler, body, number)

    with http_server(twice_broken) as (url, counted):
        assert score(pool_of(url))["avg"].tolist() == [0.5] * 6
        assert len(counted) == 3


def test_what_is_refused_is_not_asked_again():
    with http_server(says({}, 400)) as (url, counted):
        with pytest.raises(RewardFailed, match="refused: HTTP 400"):
            score(pool_of(url))
        assert len(counted) == 1


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # taken, so that nobody else can listen there
        with pytest.raises(RewardFailed, match=rf"{url}/score was away for over 0.3 s"):
            score(pool_of(url, retry_s=0.3))


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
        args = {"deqa": dict(allow_pickle=True, timeout_s=2.0, retry_s=0.0)}
        pool = Pool(CPU, {"deqa": 1.0}, (), settings(args={"deqa": args["deqa"]}))
        scorer = rewards.load("deqa", CPU, dict(url=url, allow_pickle=True, timeout_s=2.0, retry_s=0.0))
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
            found = dict(scores=np.linspace(0, 1, count), strict_rewards=[float(m["x"]) for m in asked["meta_datas"]])
        else:
            found = dict(outputs=[np.float32(0.25)] * count)
        hostile.send(handler, pickle.dumps(found))

    with http_server(answer) as (url, _):
        how = dict(url=url, allow_pickle=True)
        assert rewards.load("deqa", CPU, how)(images(3), ["a"] * 3, [{}] * 3).tolist() == [0.25] * 3
        found = rewards.load("geneval", CPU, how)(images(3), ["a"] * 3, [{"x": 0}, {"x": 1}, {"x": 0}])
    assert found["score"].tolist() == [0, 0.5, 1]
    assert found["strict"].tolist() == [0, 1, 0]


def test_plain_data_come_through_a_pickle():
    data = {"a": [1, 2.5, "x", None, True], "b": np.arange(6.0).reshape(2, 3), "c": np.float64(2)}
    assert pickled.loads(pickle.dumps(data)) == {"a": [1, 2.5, "x", None, True], "b": [[0, 1, 2], [3, 4, 5]], "c": 2.0}


def chat(text):
    return says({"choices": [{"message": {"content": text}}]})


def test_a_judge_is_asked_about_each_image_and_its_prompt():
    import json

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
        judge = rewards.load("vlm_judge", CPU, dict(url=url, model="qwen", retry_s=0.0))
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
        pool = pool_of(url, batch_size=2, max_pending=8, in_flight=64)
        pending = [pool.submit(images(10), ["a"] * 10, [{}] * 10) for _ in range(4)]
        assert all(len(part.result()["avg"]) == 10 for part in pending)
        assert most[0] <= 4
        assert len(counted) == 20


def test_the_same_request_is_answered_from_memory(small_server):
    server, body = Server(small_server), {"prompts": ["a"], "images": []}
    files = [("images", ("0.npy", wire.pack_image(images(1)[0], "npy"), wire.TYPES["npy"]))]
    how = dict(data={"request": '{"prompts": ["a"]}'}, files=files, headers={"Idempotency-Key": "k"})
    first = server.post("/score", bytes, **how).result()
    again = server.post("/score", bytes, json=body, headers={"Idempotency-Key": "k"}).result()
    assert first == again
    with pytest.raises(ServerError, match="422"):
        server.post("/score", bytes, json=body, headers={"Idempotency-Key": "other"}).result()
