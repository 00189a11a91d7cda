"""Rewards in threads and servers: same scores, hidden latency, and servers that misbehave."""

import asyncio
import base64
import gc
import gzip
import io
import json
import os
import pickle
import random
import re
import signal
import socket
import threading
import time
import traceback
import weakref
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from http.client import IncompleteRead

import hostile
import httpx
import numpy as np
import pytest
import serve_reward
import torch
import warm
from hostile import http_server, says
from PIL import Image
from small import ENV, as_prompts, random_images
from starlette.exceptions import HTTPException

from flow_grpo import rewards
from flow_grpo.base.prompt import Prompt
from flow_grpo.reward_server import requests
from flow_grpo.reward_server.requests import Limits, Memory
from flow_grpo.reward_server.server import listen, make_app
from flow_grpo.rewards import unifiedreward, vlm_judge
from flow_grpo.rewards.clients import client, wire
from flow_grpo.rewards.clients.client import Server
from flow_grpo.rewards.scores import CLIPPED, join_scores, scores_of
from flow_grpo.scoring import pool as scoring_pool
from flow_grpo.scoring import settings as scoring_settings
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import RewardFailed
from flow_grpo.settings.sections import Reward

CPU = torch.device("cpu")
JPEG = {"jpeg_compressibility": 1.0}


def settings(**changed):
    return Reward(**changed)


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    for owner, name in ((client, "RETRY_S"), (client, "IN_FLIGHT"), (scoring_pool, "MAX_PENDING")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def pool_of(url="", name="served", retry_s=2.0, in_flight=64, max_pending=1024, **how):
    """A pool with one reward: JPEG, or what `url` serves, which needs no file here."""
    # The fixture `constants` puts these back.
    client.RETRY_S = retry_s
    client.IN_FLIGHT = in_flight
    scoring_pool.MAX_PENDING = max_pending
    args = {name: {"url": url}} if url else {}
    return Pool(CPU, {name: 1.0} if url else JPEG, (), settings(args=args, **dict(timeout_s=2.0) | how))


def score(pool, count=6):
    return pool.submit(random_images(count), as_prompts(f"prompt {i}" for i in range(count)))()


@contextmanager
def served(*args):
    """serve_reward.py as a command; (address, process)."""
    process = warm.Started(["scripts/serve_reward.py", *JPEG, "--port", 0, *args], ENV)
    try:
        while not process.stdout().endswith("\n"):
            assert process.poll() is None, process.stderr()
            time.sleep(0.01)
        yield process.stdout().split()[0], process
    finally:
        process.kill()
        process.done()


def test_a_token_is_asked_for_before_weights_are_loaded_and_ctrl_c_is_quiet(tmp_path, monkeypatch):
    right = tmp_path / "token"
    other = tmp_path / "other"
    right.write_text("sesame\n")
    other.write_text("open\n")
    with served("--token-file", right) as (url, process):
        for header in (b"", b"Bearer open", b"Bearer s\xe9same"):
            assert httpx.post(url + "/score", headers={"Authorization": header}).status_code == 401
        asking = settings(args={"jpeg_compressibility": dict(url=url)}, timeout_s=5.0)
        for token_file in ("", str(other)):
            asking = replace(asking, token_file=token_file)
            with pytest.raises(ValueError, match=f"{url} asks for another token"):
                scoring_settings.check_rewards(JPEG, (), asking)
            with pytest.raises(RewardFailed, match="HTTP 401"):
                score(Pool(CPU, JPEG, (), asking))
        for token_file in (str(right), ""):
            asking = replace(asking, token_file=token_file)
            scoring_settings.check_rewards(JPEG, (), asking)
            assert score(Pool(CPU, JPEG, (), asking))["avg"].shape == (6,)
            monkeypatch.setenv("REWARD_TOKEN", "sesame")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr() == ""


BROKEN = {  # kind -> what a server does, and words of the error
    "500s": (says({}, 500), "HTTP 500"),
    "429s": (says({}, 429), "HTTP 429"),
    "terminal codes": (says(b"\x1b[2Jgone", 400), "HTTP 400 ?[2Jgone"),
    "307": (says({}, 307), "refused: HTTP 307"),
    "closes": (hostile.gone, "away for over"),
    "half a body": (hostile.half, "away for over"),
    "hangs": (hostile.hangs, "no answer within"),
    "drips": (hostile.drips, "no answer within"),
    "a gigabyte": (hostile.floods, "answered with over"),
    "no JSON": (says(b"<html>"), "no JSON"),
    "a list": (says([0.5] * 6), "no JSON with"),
    "too few": (says({"scores": {"score": [0.5]}}), "(1,) for 6 images"),
    "too large": (says({"scores": {"score": [0.5, 0.5, 3.5e38, 0.5, 0.5, 0.5]}}), "is inf for 'prompt 2'"),
    "strings": (says({"scores": {"score": ["85%"] * 6}}), "is '85%', which is no number, for 'prompt 0' (6 such"),
    "null": (says({"scores": {"score": [0.5, None] * 3}}), "is None, which is no number, for 'prompt 1' (3 such"),
    "N/A": (says({"scores": {"score": [0.5] * 5 + ["N/A"]}}), "is 'N/A', which is no number, for 'prompt 5'"),
    "lists": (says({"scores": {"score": [[0.5]] * 6}}), "is [0.5], which is no number, for 'prompt 0'"),
    "by id": (says({"scores": {"score": {"5": 0.5, "0": 0.25}}}), "{'0': 0.25, '5': 0.5} for 6 images"),
    "one number": (says({"scores": {"score": 0.5}}), "returned 0.5 for 6 images"),
    "too many": (says({"scores": {"score": [0.5] * 7}}), "(7,) for 6 images"),
    "no scores": (says({"scores": None}), "returned None for 6 images"),
    "an error with status 200": (says({"error": "out of memory"}), "out of memory"),
    "gzip": (says(gzip.compress(b'{"scores": {}}')), "of gzip, which was not asked for"),
    "deep": (says(b"[" * 200_000), "no JSON with"),
    "a traceback": (says(b"Traceback" + b" line" * 900 + b" KeyError: 'tag'", 500), "KeyError: 'tag'"),
    "a name in TeX": (says({"scores": {"score": [0.5] * 6, "$\\frac{1$": [0.5] * 6}}), "frac{1$'; a metric has"),
    "40 names": (says({"scores": {f"f{i}": [0.5] * 6 for i in range(39)} | {"score": [0.5] * 6}}), "40 scores"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_hostile_server_is_an_error_with_its_address_and_a_prompt(kind):
    answer, why = BROKEN[kind]
    with http_server(answer) as (url, counted), pytest.raises(RewardFailed) as caught:
        score(pool_of(url, "shapes", timeout_s=1.0, retry_s=0.3))
    assert [word for word in (why, url, "'prompt 0'") if word not in str(caught.value)] == []
    assert "refused" not in why or len(counted) == 1  # asked once


@pytest.mark.parametrize("answer", [hostile.hangs, hostile.drips])
def test_a_start_waits_for_no_health_without_end(answer, monkeypatch):
    monkeypatch.setattr(scoring_settings, "HEALTH_S", 0.2)
    with http_server(answer) as (url, _), pytest.raises(ValueError, match=f"served: .*{url}.* within 0.2 s"):
        scoring_settings.check_rewards({"served": 1.0}, (), settings(args={"served": {"url": url}}))


def test_a_server_that_comes_back_is_asked_again(caplog):
    def twice_broken(handler, body, number):
        away = {1: says(b"\x1b[2J", 503), 2: hostile.gone}  # the first is announced
        away.get(number, hostile.honest)(handler, body, number)

    with http_server(twice_broken) as (url, counted):
        assert score(pool_of(url))["avg"].tolist() == [0.5] * 6
        assert len(counted) == 3
    assert not any("\x1b" in record.message for record in caplog.records), "no codes of a terminal"


def test_requests_go_to_several_servers_in_turn_and_past_one_that_is_away_which_is_said_once(caplog, monkeypatch):
    with http_server(hostile.honest) as (first, of_first), http_server(hostile.honest) as (second, of_second):
        assert score(pool_of([first, second], batch_size=1))["avg"].tolist() == [0.5] * 6
        assert (len(of_first), len(of_second)) == (3, 3)
        for rank in "3210":  # a request of each
            monkeypatch.setenv("RANK", rank)
            score(pool_of([first, second]))
        assert (len(of_first), len(of_second)) == (5, 5)
    with http_server(hostile.gone) as (away, of_away), http_server(hostile.honest) as (there, of_there):
        pool = pool_of([away, there], batch_size=1, in_flight=1, retry_s=1.0)
        assert [score(pool)["avg"].tolist() for _ in range(2)] == [[0.5] * 6] * 2
        assert len(of_there) == 12
        assert 1 <= len(of_away) <= 2  # set aside for a while
    with pytest.raises(RewardFailed, match=rf"{there}/score was away for over 0\.3 s"):
        score(pool_of(there, retry_s=0.3, batch_size=1))  # nobody listens there any more
    (line,) = [record.message for record in caplog.records if there in record.message]
    assert f"reward server {there}: ConnectError" in line
    with pytest.raises(client.ServerAway, match="was away for over"):
        client.Server(there).post("/score", bytes, content=b"").result()


def test_a_pickle_bomb_does_not_go_off(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was_here"),)

    nested = [0]
    for _ in range(30):
        nested = [nested] * 10
    bombs = [Bomb(), {"outputs": [Bomb()]}, nested, np.array([Bomb()], dtype=object)]

    def answer(handler, body, number):
        hostile.send(handler, pickle.dumps(bombs[(number - 1) // client.ANSWERS]))

    with http_server(answer) as (url, _):
        scorer = rewards.load("deqa", CPU, dict(url=url, allow_pickle=True, timeout_s=2.0))
        for _ in bombs:
            with pytest.raises(client.ServerError, match="no plain pickle"):
                scorer(random_images(2), ["a"] * 2, [{}] * 2)
    assert not (tmp_path / "was_here").exists()


def traceback_of(error):
    try:
        raise error
    except Exception:
        return traceback.format_exc().encode()


def test_an_older_server_whose_reward_raises_is_not_away_and_the_other_images_have_a_score():
    """The answer is 500 with the traceback, where our own server refuses by 422."""

    def fails_for_one(handler, body, number):
        requests_of.append(number)
        images = pickle.loads(body)["meta_datas"]
        if any(data["prompt"] == "prompt 2" for data in images):
            return hostile.send(handler, traceback_of(KeyError("color")), 500)
        hostile.send(handler, pickle.dumps(dict(scores=[0.5] * len(images), strict_rewards=[0.0] * len(images))))

    requests_of = []
    how = dict(metadata={"tag": "counting", "include": [{"class": "bench", "count": 1}]}, allow_pickle=True)
    with pytest.raises(RewardFailed, match=r"'geneval'.*its reward raises KeyError: 'color'"):
        scored_by(fails_for_one, "geneval", **how)
    assert len(requests_of) == client.ANSWERS
    for scores in scored_by(fails_for_one, "geneval", max_masked_share=0.5, **how):
        assert scores["geneval"].isnan().tolist() == [False, False, True, False, False, False]
    # All images together and the third one alone, each as often as an answer that cannot be read; five others, once.
    assert len(requests_of) == client.ANSWERS + 2 * (2 * client.ANSWERS + 5)


def full_memory():
    try:
        np.empty(2**62, np.uint8)
    except MemoryError as error:
        return error


def raised_after(first, error):
    """Return an error that is raised while another one, which the traceback begins with, is handled."""
    try:
        raise first
    except type(first):
        error.__context__ = first
    return error


PASSING = {
    "memory": MemoryError("of the machine"),
    "memory for an array": full_memory(),
    "memory after another error": raised_after(KeyError("color"), MemoryError("of the machine")),
    "GPU of a worker": RuntimeError("a worker has failed:\nCUDA error: unspecified launch failure"),
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "GPU of an older PyTorch": RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be"),
    "GPU of AMD": RuntimeError("HIP error: unspecified launch failure"),
    "network": ConnectionResetError(104, "Connection reset by peer"),
    "service that a reward asks": httpx.ReadTimeout("timed out"),
}


@pytest.mark.parametrize("kind", [*PASSING, "no traceback"])
def test_an_older_server_whose_machine_fails_is_asked_again(kind):
    body = traceback_of(PASSING[kind]) if kind in PASSING else b"<h1>Internal Server Error</h1>"

    def fails_often(handler, _, number):
        if number <= client.ANSWERS + 1:
            return hostile.send(handler, body, 500)
        hostile.send(handler, pickle.dumps(dict(outputs=[0.5] * 6)))

    scores, _ = scored_by(fails_often, "deqa", allow_pickle=True)
    assert scores["deqa"].tolist() == [0.5] * 6


def test_older_servers_are_asked_in_pickle_only_when_that_was_allowed():
    with pytest.raises(ValueError, match="speaks pickle"):
        rewards.load("deqa", CPU, {})

    def answer(handler, body, number):
        asked = pickle.loads(body)
        count = len(asked["images"])
        assert all(image.startswith(b"\xff\xd8") for image in asked["images"])
        strict = [float(metadata["x"]) for metadata in asked.get("meta_datas", [])]
        found = dict(outputs=[np.float32(0.25)] * count, scores=np.linspace(0, 1, count), strict_rewards=strict)
        hostile.send(handler, pickle.dumps(found))

    with http_server(answer) as (url, _):
        how = dict(url=url, allow_pickle=True)
        assert rewards.load("deqa", CPU, how)(random_images(3), ["a"] * 3, [{}] * 3) == {"score": [0.25] * 3}
        asked = random_images(3), ["a"] * 3, [{"x": 0}, {"x": 1}, {"x": 0}]
        assert rewards.load("geneval", CPU, how)(*asked) == {"score": [0, 0.5, 1], "strict": [0, 1, 0]}


def judged(url, name="vlm_judge", prompts=("a",), **options):
    judge = rewards.load(name, CPU, dict(url=url, model="qwen") | options)
    return scores_of(name, judge, random_images(len(prompts)), list(prompts), [{}] * len(prompts))["score"].tolist()


def chat(text):
    return {"choices": [{"message": {"content": text}}]}


def test_a_judge_is_asked_about_each_image_and_its_prompt_after_what_was_edited():
    def answer(handler, body, number):
        request = json.loads(body)
        *pictures, question = request["messages"][0]["content"]
        assert (handler.path, request["model"]) == ("/v1/chat/completions", "qwen")
        sizes = []
        for picture in pictures:
            content = base64.b64decode(picture["image_url"]["url"].split(",")[1])
            sizes.append(Image.open(io.BytesIO(content)).size)
        asked.append((sizes, "stayed" in question["text"]))
        hostile.send(handler, chat(f"Hm, 3 things.\nRating: {10 if 'make it red' in question['text'] else 4}"))

    asked = []
    sources = (Image.new("RGB", (30, 20)), Image.new("RGB", (8, 9)))
    with http_server(answer) as (url, _):
        args = {"vlm_judge": dict(url=url, model="qwen")}
        scoring_settings.check_rewards({"vlm_judge": 1.0}, (), settings(args=args))  # it has no /health to ask for
        pool = Pool(CPU, {"vlm_judge": 1.0}, (), settings(args=args))
        scores = pool.submit(random_images(2), [Prompt("make it red", {}, sources), Prompt("b", {})])()["avg"]
    assert scores.tolist() == pytest.approx([1.0, 0.4])
    assert sorted(asked) == [([(30, 20), (8, 9), (64, 64)], True), ([(64, 64)], False)]


def test_a_server_scores_with_the_sources_that_a_thread_has():
    def score(images, prompts, metadata, sources):
        seen.append(list(map(len, sources)))
        scores = []
        for image, of_image in zip(images, sources, strict=True):
            scores.append(image.mean() - sum(source.mean() for source in of_image))
        return torch.stack(scores)

    seen = []
    red = Image.new("RGB", (8, 8), "red")
    white = Image.new("RGB", (9, 8), "white")
    prompts = [Prompt("a", {}, (red, white)), Prompt("b", {}, (white,)), Prompt("a", {}, (red, white))]
    expected = random_images(3).mean((1, 2, 3)) - torch.tensor([4 / 3, 1, 4 / 3])
    with listening(score) as url:
        torch.testing.assert_close(pool_of(url).submit(random_images(3), prompts)()["avg"], expected)
    rewards.register("sourced", score)
    try:
        found = Pool(CPU, {"sourced": 1.0}, (), settings()).submit(random_images(3), prompts)()["avg"]
    finally:
        del rewards.REGISTERED["sourced"]
    torch.testing.assert_close(found, expected)
    assert seen == [[2, 1, 2]] * 2


def test_a_server_scores_frames_of_videos_as_a_thread_does():
    def score(images, prompts, metadata):
        seen.append(images.shape[1:])
        return {"score": images.mean((1, 2, 3)), "red": images[:, 0].mean((1, 2))}

    seen = []
    videos = torch.stack([random_images(2, 16, seed) for seed in range(5)], 1)
    prompts = as_prompts(["a", "b"])
    with listening(score) as url:
        found = pool_of(url, frames=2).submit(videos, prompts)()
    torch.testing.assert_close(found["avg"], videos[:, [0, 4]].mean((1, 2, 3, 4)))
    rewards.register("framed", score)
    try:
        local = Pool(CPU, {"framed": 1.0}, (), settings(frames=2)).submit(videos, prompts)()
    finally:
        del rewards.REGISTERED["framed"]
    assert seen == [(3, 16, 16)] * 2
    for name in ("avg", "framed_red", "framed_frame_1", "framed_frame_2"):
        torch.testing.assert_close(found[name.replace("framed", "served")], local[name])


def test_a_server_that_takes_videos_says_so_and_gets_them_whole():
    def score(videos, prompts, metadata):
        seen.append(tuple(videos.shape[:2]))
        return videos[:, -1].mean((1, 2, 3)) - videos[:, 0].mean((1, 2, 3))

    seen = []
    videos = torch.stack([random_images(2, 16, seed) for seed in range(5)], 1)
    rises = videos[:, -1].mean((1, 2, 3)) - videos[:, 0].mean((1, 2, 3))
    prompts = as_prompts(["a", "b"])
    with listening(score) as url:
        assert httpx.get(url + "/health").json()["takes"] == "videos"
        pool = pool_of(url, batch_size=5)
        torch.testing.assert_close(pool.submit(videos, prompts)()["avg"], rises)
        assert pool.submit(videos[:, 0], prompts)()["avg"].tolist() == [0, 0]
    # Each request has five frames at most.
    assert seen == [(1, 5), (1, 5), (2, 1)]
    with listening() as url:
        assert httpx.get(url + "/health").json()["takes"] == "images"
        file = ("images", ("0.npy", wire.pack_image(videos[0], "npy")))
        answer = httpx.post(url + "/score", data={"request": json.dumps({"prompts": ["a"]})}, files=[file])
        assert answer.status_code == 422
        assert "must be (3, H, W)" in answer.text


def test_a_judge_has_its_own_question_and_scale_and_says_a_number():
    with http_server(says(chat("Good.\nFinal Score: **4**"))) as (url, _):
        assert judged(url, "unifiedreward", prompts=("a", "b")) == [0.75, 0.75]
    with http_server(says(chat("7 of 20"))) as (url, _):
        own = dict(template="{prompt}?", pattern=r"(\d+) of", lowest=0, highest=20)
        assert judged(url, **own) == [pytest.approx(0.35)]
    with pytest.raises(ValueError, match="a judge needs"):
        judged("http://127.0.0.1:1", template="good?")
    for text in ("I cannot tell.", None):
        with http_server(says(chat(text))) as (url, counted):
            with pytest.raises(client.ServerError, match="no number"):
                judged(url)
            assert len(counted) == client.ANSWERS


def test_a_judge_that_says_no_number_once_is_asked_again():
    def answer(handler, body, number):
        hostile.send(handler, chat("I would rather not." if number == 1 else "Rating: 4"))

    with http_server(answer) as (url, counted):
        assert judged(url) == [pytest.approx(0.4)]
        assert len(counted) == 2


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_a_judge_is_found_by_its_url_with_or_without_the_path(end):
    with http_server(says(chat("Rating: 4"))) as (url, counted):
        assert judged(url + end) == [pytest.approx(0.4)]
        assert counted == ["/v1/chat/completions"]


NUMBERS = {  # what a judge says -> its score on a scale from 0 to 10
    "rating: 8": 0.8,
    "**Rating:** 8": 0.8,
    "Rating: **8/10**": 0.8,
    "__Rating__: `8`": 0.8,
    "### Rating\n8": 0.8,
    "| Rating | 8 |": 0.8,
    "Rating (0 to 10): 8": 0.8,
    "Rating: 8,5": 0.85,
    "Rating: 8.5 out of 10": 0.85,
    "Rating\uff1a\uff18": 0.8,  # full-width letters
    "Rating: 85%": 0.85,
    r"Rating: \boxed{8}": 0.8,
    '{"rating": 8}': 0.8,
    "<rating>8</rating>": 0.8,
    "I give it a score of 8.": 0.8,  # in other words, but the only number
    "Rating: 3, no.\nRating: 8": 0.8,
    "Rating: -2": -0.2,  # clipped later
    "Rating: 87": 8.7,
    "8": 0.8,
    "**8/10**\n": 0.8,
    "85 %.": 0.85,
}


def body_of(text):
    return json.dumps(chat(text)).encode()


@pytest.mark.parametrize("text", NUMBERS)
def test_a_judges_number_is_read_however_it_is_written(text):
    find = re.compile(vlm_judge.PATTERN)
    assert vlm_judge.rating(body_of(text), find, 0.0, 10.0) == pytest.approx(NUMBERS[text])


def test_an_answer_in_parts_is_read():
    assert vlm_judge.rating(body_of([{"text": "Rating"}, {"text": ": 8"}]), re.compile(vlm_judge.PATTERN), 0, 10) == 0.8


@pytest.mark.parametrize(
    "text", ["Rating: N/A", "Rating: nan", "Rating: 4/5", "Rating: 7-8", "Score: 3. Score: 4", "4/5", "8 circles", ""]
)
def test_what_is_not_one_number_on_the_judges_scale_is_no_score(text):
    with pytest.raises(client.ServerError, match="number"):
        vlm_judge.rating(body_of(text), re.compile(vlm_judge.PATTERN), 0.0, 10.0)


def test_a_final_score_counts_before_the_scores_of_its_parts():
    find = re.compile(unifiedreward.PATTERN)
    for text in ("Final score: 4/5. Style score: 2", "**Final Score:** 4", "score: 4 out of 5"):
        assert vlm_judge.rating(body_of(text), find, 1.0, 5.0) == 0.75


def scored_by(answer, name, count=6, metadata=None, **options):
    """Scores by a server of another kind, asked once about all images."""
    with http_server(answer) as (url, _):
        args = {name: dict(url=url, batch_size=count) | options}
        pool = Pool(CPU, {name: 1.0}, (), settings(args=args, timeout_s=2.0))
        prompts = [Prompt(f"prompt {i}", metadata or {}) for i in range(count)]
        return [pool.submit(random_images(count), prompts)() for _ in range(2)]


def pickles(**answer):
    return lambda handler, body, number: hostile.send(handler, pickle.dumps(answer))


BEYOND = {  # a reward of RANGE (0, 1), its server's answer, options, and the scores that are made of it
    "vlm_judge": (says(chat("Rating: 87")), dict(model="a"), [1.0] * 6),
    "unifiedreward": (says(chat("Final Score: 0")), {}, [0.0] * 6),
    "deqa": (pickles(outputs=[0.5, 1.5, -1.0, 0.5, 0.5, 0.5]), dict(allow_pickle=True), [0.5, 1, 0, 0.5, 0.5, 0.5]),
    "shapes": (says({"scores": {"score": [0.5, 1.5] * 3}}), {}, [0.5, 1.0] * 3),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_a_server_scores_beyond_its_scale_is_clipped_counted_and_said_once(name, caplog):
    answer, options, expected = BEYOND[name]
    scores, _ = scored_by(answer, name, **options)
    assert scores[name].tolist() == scores["avg"].tolist() == expected
    assert scores[f"{name}_clipped_share"].tolist() == [float(value in (0, 1)) for value in expected]
    (line,) = [record.message for record in caplog.records if "clipped" in record.message]
    assert f"reward '{name}'" in line
    assert "beyond its scale 0 to 1" in line


def test_where_nothing_was_clipped_in_a_part_its_share_is_0():
    parts = [{"score": torch.tensor([1.0]), CLIPPED: torch.tensor([1.0])}, {"score": torch.tensor([0.5])}]
    assert join_scores(parts)[CLIPPED].tolist() == [1.0, 0.0]


def published_geneval(handler, body, number):
    """The answer of the server that came with Flow-GRPO, where a picture shows as many objects as its number."""
    asked = pickle.loads(body)
    scores = []
    strict = []
    for number_of_image, metadata in enumerate(asked["meta_datas"]):
        assert metadata["tag"] == "counting"
        assert metadata["prompt"] == f"prompt {number_of_image}"
        demands = [1 - abs(number_of_image - clause["count"]) / clause["count"] for clause in metadata["include"]]
        scores.append(sum(demands) / len(demands))
        strict.append(float(min(demands) == 1))
    lists = dict.fromkeys(["rewards", "strict_rewards"], strict)
    hostile.send(handler, pickle.dumps(dict(scores=scores, group_rewards={}, group_strict_rewards={}) | lists))


def test_genevals_published_scores_have_no_lower_end_and_are_left_as_they_are():
    metadata = {"tag": "counting", "include": [{"class": "bench", "count": 1}]}
    scores, _ = scored_by(published_geneval, "geneval", metadata=metadata, allow_pickle=True)
    assert scores["geneval"].tolist() == [0.0, 1.0, 0.0, -1.0, -2.0, -3.0]
    assert scores["geneval_strict"].tolist() == [0, 1, 0, 0, 0, 0]
    assert "geneval_clipped_share" not in scores


def test_an_image_without_a_score_is_left_out_alone():
    with http_server(says({"scores": {"score": [0.5, None, 0.25, "N/A", 0.5, 0.5]}})) as (url, _):
        scores = score(pool_of(url, max_masked_share=0.5))["avg"]
    assert scores.isnan().tolist() == [False, True, False, True, False, False]
    assert scores[2] == 0.25
    answer = pickles(outputs=[0.5, None, 0.5, 0.5, 0.5, 0.5])
    with pytest.raises(RewardFailed, match="'deqa' is nan for 'prompt 1'"):
        scored_by(answer, "deqa", allow_pickle=True)


def in_a_thread(name, reward):
    """Scores of a reward of one's own, of which half may fail."""
    rewards.register(name, reward)
    try:
        return score(Pool(CPU, {name: 1.0}, (), settings(max_masked_share=0.5, batch_size=6)))
    finally:
        del rewards.REGISTERED[name]


def test_an_image_that_our_server_cannot_score_is_left_out_alone_as_in_a_thread():
    def score_some(images, prompts, metadata):
        scores = images.mean((1, 2, 3))
        doubled = 2 * scores
        for number, prompt in enumerate(prompts):
            if prompt == "prompt 2":
                doubled[number] = torch.inf
        return {"score": scores, "doubled": doubled}

    with listening(score_some) as url:
        found = score(pool_of(url, max_masked_share=0.5))
        with pytest.raises(RewardFailed, match=r"no number, for 'prompt 2' \(1 such image\)"):
            score(pool_of(url))
    local = in_a_thread("some", score_some)
    assert local["avg"].isnan().tolist() == [False, False, True, False, False, False]
    for name, figure in (("avg", "avg"), ("served_doubled", "some_doubled")):
        torch.testing.assert_close(found[name], local[figure], equal_nan=True)


def fails_for_prompt_2(images, prompts, metadata):
    if "prompt 2" in prompts:
        raise KeyError("face")
    return images.mean((1, 2, 3))


def test_an_image_for_which_a_served_reward_raises_is_left_out_alone_as_in_a_thread_and_its_server_is_not_away():
    with listening(fails_for_prompt_2) as url:
        found = score(pool_of(url, max_masked_share=0.5, retry_s=60.0))
        with pytest.raises(RewardFailed, match=r"for 'prompt 2'.*; the server says: KeyError: 'face'"):
            score(pool_of(url, retry_s=60.0))
    local = in_a_thread("faces", fails_for_prompt_2)
    assert local["avg"].isnan().tolist() == [False, False, True, False, False, False]
    torch.testing.assert_close(found["avg"], local["avg"], equal_nan=True)


def test_a_served_reward_that_raises_for_every_image_refuses_the_request_with_its_error():
    def raises(images, prompts, metadata):
        seen.append(len(images))
        raise KeyError("face")

    seen = []
    pool_settings = dict(retry_s=60.0, batch_size=3)
    with listening(raises) as url:
        with pytest.raises(RewardFailed, match=f"{url}/score refused: HTTP 422 KeyError: 'face'"):
            score(pool_of(url, **pool_settings), count=3)
        pool = pool_of(url, max_masked_share=1.0, **pool_settings)
        assert score(pool, count=3)["avg"].isnan().all()
        assert "KeyError: 'face'" in pool.scorers["served"].last_error
    # Three images at once, and each alone; twice.
    assert seen == [3, 1, 1, 1] * 2


def answer_with(status):
    request = httpx.Request("GET", "http://127.0.0.1/")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))


def raised_from_itself():
    error = KeyError("color")
    error.__cause__ = error
    return error


def raised_from(cause, kind=KeyError):
    error = kind("a library's own")
    error.__cause__ = cause
    return error


OF_THE_MACHINE = [MemoryError(), torch.OutOfMemoryError(), torch.AcceleratorError(), ConnectionResetError()]
OF_THE_MACHINE += [httpx.ConnectError(""), httpx.ReadTimeout(""), httpx.RemoteProtocolError(""), answer_with(503)]
OF_THE_MACHINE += [client.ServerAway(), IncompleteRead(b""), answer_with(429), raised_from(httpx.PoolTimeout(""))]


@pytest.mark.parametrize("error", OF_THE_MACHINE, ids=repr)
def test_a_server_whose_machine_fails_is_away_and_another_one_scores(error):
    """The network is of the machine: a reward may itself ask a service, by httpx or by a client of ours."""

    def fails(images, prompts, metadata):
        raise error

    with listening(fails) as broken, listening() as url:
        assert httpx.post(broken + "/score", **parts(GOOD)).status_code == 500
        torch.testing.assert_close(score(pool_of([broken, url]))["avg"], random_images(6).mean((1, 2, 3)))


REFUSALS = [answer_with(404), client.ServerError("refused"), raised_from(KeyError()), raised_from_itself()]
REFUSALS += [raised_from(FileNotFoundError(), ValueError), raised_from(raised_from(ConnectionError(), ValueError))]


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_served_reward_that_refuses_or_whose_own_service_does_is_not_away(error):
    """A ValueError refuses the input, whatever it was raised from."""

    def fails(images, prompts, metadata):
        raise error

    with listening(fails) as url:
        assert httpx.post(url + "/score", **parts(GOOD)).status_code == 422


def test_a_request_at_which_the_machine_has_failed_is_scored_when_it_is_sent_again():
    def fails_once(images, prompts, metadata):
        calls.append(len(images))
        if len(calls) == 1:
            raise MemoryError("of the machine")
        return images.mean((1, 2, 3))

    calls = []
    with listening(fails_once) as url:
        torch.testing.assert_close(score(pool_of(url), count=1)["avg"], random_images(1).mean((1, 2, 3)))
    assert calls == [1, 1]


def test_an_image_that_is_scored_alone_has_the_sources_of_its_own_prompt():
    def fails_together(images, prompts, metadata, sources):
        if len(images) > 1:
            raise KeyError("face")
        (own_sources,) = sources
        return [float(source.shape[-1]) for source in own_sources]

    edits = [Prompt(f"edit {side}", {}, (Image.new("RGB", (side, 8)),)) for side in (8, 16, 24)]
    with listening(fails_together) as url:
        assert pool_of(url, batch_size=3).submit(random_images(3), edits)()["avg"].tolist() == [8, 16, 24]


@pytest.mark.parametrize("kind", [KeyError, ValueError, MemoryError])
def test_a_server_keeps_no_images_of_requests_for_which_its_reward_has_failed(kind):
    def raises(images, prompts, metadata):
        seen.append(weakref.ref(images))
        raise kind("face")

    seen = []
    with listening(raises) as url:
        request = parts(GOOD, GOOD, request='{"prompts": ["a", "b"]}', **{"Idempotency-Key": "1"})
        assert "face" in httpx.post(url + "/score", **request).text
        gc.collect()
        assert [images() for images in seen] == [None] * 3


def test_what_a_call_for_all_images_held_is_free_when_each_is_scored_alone():
    def fails_together(images, prompts, metadata):
        # The test is of memory: a frame that is alive keeps what it has computed.
        alive.append(sum(computed() is not None for computed in all_computed))
        computed = images * 2
        all_computed.append(weakref.ref(computed))
        if len(images) > 1:
            raise torch.OutOfMemoryError("too many")
        return computed.mean((1, 2, 3))

    alive = []
    all_computed = []
    with listening(fails_together) as url:
        assert score(pool_of(url, batch_size=3), count=3)["avg"].isfinite().all()
    assert alive == [0] * 4


def test_no_more_images_are_under_way_than_there_is_room_for():
    under_way = []
    most = []

    def slow(handler, body, number):
        under_way.append(number)
        most.append(len(under_way))
        time.sleep(0.05)
        under_way.pop()
        hostile.honest(handler, body, number)

    with http_server(slow) as (url, counted):
        pool = pool_of(url, batch_size=2, max_pending=8)
        pending = [pool.submit(random_images(10), as_prompts(["a"] * 10)) for _ in range(4)]
        for wait in pending:
            assert len(wait()["avg"]) == 10
        assert max(most) <= 4
        assert len(counted) == 20


PATIENCE_S = 20  # until a test fails


def mean(images, prompts, metadata):
    return images.mean((1, 2, 3))


@contextmanager
def listening(score=mean, host="127.0.0.1", token="", **limits):
    """The address of a server; it is announced when it can be connected to."""
    address = Future()
    over = threading.Event()
    app = make_app("mean", score, Limits(**limits), token)

    def announce(url):
        socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)).close()
        address.set_result(url)

    async def main():
        listener = asyncio.create_task(listen(app, host, 0, announce))
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


ODD = wire.pack_image(torch.zeros(3, 16, 8), "npy")
GOOD = wire.pack_image(torch.zeros(3, 16, 16), "npy")


def parts(*images, request='{"prompts": ["a"]}', **headers):
    return dict(data={"request": request}, files=[("images", ("0", image)) for image in images], headers=headers)


def header(text):
    """An .npy file with this for a header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


REFUSED = {  # a request, the status and words of the answer
    "no multipart": (dict(json={"prompts": ["a"]}), 422, "'request'"),
    "a file for the text": (dict(files={"request": ("0", b"{}")}), 422, "'request' is a file"),
    "a text for a file": (parts(GOOD) | dict(data={"request": "{}", "images": "a"}), 422, "'images' is a field"),
    "no image": (parts(b"GIF89a" + b"\0" * 50), 422, "magic"),
    "two images": (parts(GOOD, GOOD), 422, "images: 2, prompts: 1"),
    "two sizes": (parts(GOOD, ODD, request=json.dumps({"prompts": ["a", "b"]})), 422, "one size"),
    "types": (parts(GOOD, request='{"prompts": [3]}'), 422, "prompts are strings"),
    "metadata": (parts(GOOD, request='{"prompts": ["a"], "metadata": ["b"]}'), 422, "metadata objects"),
    "surrogate": (parts(GOOD, request='{"prompts": ["\\ud800"]}'), 422, "UnicodeEncodeError"),
    "a string": (parts(GOOD, request='{"prompts": "a"}'), 422, "Error"),
    "no object": (parts(GOOD, request='["a"]'), 422, "Error"),
    "deep": (parts(GOOD, request="[" * 200_000), 422, "RecursionError"),
    "brackets": (parts(header("(" * 9000)), 422, "without a header"),
    "70,000 pixels": (parts(wire.pack_image(torch.zeros(3, 1, 70_000), "npy")), 422, "at most 32768"),
    "too few values": (parts(GOOD[:-4]), 422, f"in {4 * 3 * 16 * 16 - 4} bytes"),
    "objects": (parts(GOOD.replace(b"'<f4'", b"'|O' ")), 422, "of object"),
    "NaN": (parts(wire.pack_image(torch.full((3, 4, 4), torch.nan), "npy")), 422, "outside [0, 1]"),
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
    def answer(key, *images):
        return httpx.post(small_server + "/score", **parts(*images, **{"Idempotency-Key": key}))

    assert answer("k", GOOD).json() == {"scores": {"score": [0.0]}}
    assert answer("k").json() == {"scores": {"score": [0.0]}}
    assert answer("other").status_code == 422


def test_an_empty_idempotency_key_is_none(small_server):
    for image, expected in ((torch.zeros(3, 4, 4), 0.0), (torch.ones(3, 4, 4), 1.0)):
        request = parts(wire.pack_image(image, "npy"), **{"Idempotency-Key": ""})
        assert httpx.post(small_server + "/score", **request).json() == {"scores": {"score": [expected]}}


def test_random_bytes_are_refused_with_a_status_below_500(small_server):
    """Both whole bodies and good requests with a few bytes changed."""
    draw = random.Random(0)
    request = httpx.Request("POST", "http://a", **parts(GOOD))
    good = request.read()
    kind = request.headers["content-type"]
    with httpx.Client() as connection:
        for _ in range(60):
            body = bytearray(good) if draw.random() < 0.8 else bytearray(draw.randbytes(200))
            for _ in range(draw.randint(1, 8)):
                body[draw.randrange(min(len(body), 600))] = draw.randrange(256)
            answer = connection.post(small_server + "/score", content=bytes(body), headers={"Content-Type": kind})
            assert answer.status_code in (200, 400, 413, 422), (answer.status_code, answer.text, bytes(body[:600]))


def test_health_is_answered_while_images_are_decoded(monkeypatch):
    decoding = threading.Event()
    health_was_answered = threading.Event()
    decode = requests.unpack_image

    def waits(*args):
        decoding.set()
        assert health_was_answered.wait(PATIENCE_S)
        return decode(*args)

    monkeypatch.setattr(requests, "unpack_image", waits)
    with listening() as url:
        scored = Server(url).post("/score", json.loads, **parts(GOOD))
        assert decoding.wait(PATIENCE_S)
        assert httpx.get(url + "/health").json() == {"status": "ok", "waiting": 1, "allowed": True, "takes": "images"}
        health_was_answered.set()
        assert scored.result() == {"scores": {"score": [0.0]}}


def test_an_ipv6_address_is_announced_as_one_that_can_be_connected_to():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with listening(host="::1") as url:
        assert httpx.get(url + "/health").status_code == 200


def test_no_token_is_needed_where_nobody_else_can_connect(monkeypatch):
    for host, token in (("127.0.0.1", ""), ("::1", ""), ("::", "sesame")):  # without: a row of test_refusals.py
        monkeypatch.setenv("REWARD_TOKEN", token)
        serve_reward.check_flags(serve_reward.parser().parse_args(["shapes", "--host", host]))
