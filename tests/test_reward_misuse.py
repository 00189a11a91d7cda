"""Rewards that hang, end the process, answer wrongly or write into what they get: an error with their name, no harm."""

import logging
import subprocess
import sys
import threading

import pytest
import torch
from small import ENV, ROOT, as_prompts, config_of

from flow_grpo import rewards
from flow_grpo.rewards.clients import client
from flow_grpo.scoring import pool
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import RewardFailed

CPU, IMAGES = torch.device("cpu"), torch.full((2, 3, 8, 8), 0.5)
HANGS = "import threading\n\n\ndef load(device):\n    return lambda *_: threading.Event().wait(20)\n"


def submit(the_pool):
    return the_pool.submit(IMAGES, as_prompts(["prompt 0", "prompt 1"]))


@pytest.fixture
def make_pool(tmp_path, monkeypatch):
    """Of one reward, whose file has a text."""

    def make(text, **changed):
        (tmp_path / "misused.py").write_text(text)
        monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
        monkeypatch.delitem(sys.modules, "flow_grpo.rewards.misused", raising=False)
        settings = config_of("shapes_qwenimage").reward
        monkeypatch.setattr(client, "RETRY_S", 0.1)
        settings.update(dict(timeout_s=0.1) | changed)
        return Pool(CPU, {"misused": 1.0}, (), settings)

    return make


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_reward_that_hangs_in_a_thread_ends_the_run_with_its_name(share, make_pool, monkeypatch):
    monkeypatch.setattr(pool, "MAX_PENDING", 2)
    the_pool = make_pool(HANGS, max_masked_share=share)
    pending = submit(the_pool)
    says = r"reward 'misused' \(thread\) has not returned within 0.2 s .* first prompt: 'prompt 0'"
    with pytest.raises(RewardFailed, match=says):
        submit(the_pool)  # for which there is no room
    with pytest.raises(RewardFailed, match=says):
        pending.result()


def test_a_thread_that_hangs_does_not_hold_the_process():
    code = "import threading; from flow_grpo.base.threads import Threads; "
    code += "Threads(1).submit(threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV, timeout=100).returncode == 0


def test_what_is_waited_for_is_said(make_pool, monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(threading, "told", told, raising=False)
    slow = "import threading\n\n\ndef load(device):\n"
    slow += "    return lambda images, *_: images.mean((1, 2, 3)) if threading.told.wait(20) else None\n"
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: (lines.append(record.getMessage()), told.set()))
    logger, lines = logging.getLogger("flow_grpo.rewards.clients.client"), []
    logger.addHandler(handler)
    monkeypatch.setattr(pool, "SIGN_OF_LIFE_S", 0.0)
    try:
        assert submit(make_pool(slow, timeout_s=60.0)).result()["misused"].tolist() == [0.5, 0.5]
    finally:
        logger.removeHandler(handler)
    assert "reward 'misused' (thread) has been scoring for 0 s; first prompt: 'prompt 0'" in lines[0]


WRONG = {
    "no score": ("return {'other': images.mean((1, 2, 3))}", "a dict without 'score', but with 'other'"),
    "nothing": ("return None", "NoneType"),
    "the run's": ('return {k: images.mean((1, 2, 3)) for k in ("score", "masked_share")}', "masked_share"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_reward_that_is_wrong_is_named(kind, backend, make_pool):
    body, says = WRONG[kind]
    text = "def load(device):\n    return score\n\n\ndef score(images, prompts, metadata):\n"
    text += "".join(f"    {line}\n" for line in body.splitlines())
    with pytest.raises(RewardFailed, match=f"reward 'misused'.*{says}.*'prompt 0'"):
        submit(make_pool(text, backend=backend)).result()
    masked = submit(make_pool(text, backend=backend, max_masked_share=0.05)).result()
    assert masked["misused"].isnan().all()


def test_what_a_reward_writes_into_what_it_gets_is_seen_by_nobody():
    images, prompts, metadata = IMAGES.clone(), ["a", "b"], [{"x": [1]}, {}]

    def score(images, prompts, metadata):
        images.zero_()
        metadata[0]["x"].append(2)
        prompts.clear()
        return images.mean((1, 2, 3))

    assert rewards.scores_of("writes", score, images, prompts, metadata)["score"].tolist() == [0, 0]
    assert torch.equal(images, IMAGES)
    assert (prompts, metadata) == (["a", "b"], [{"x": [1]}, {}])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def load(device:\n", RuntimeError),
        ("import nowhere_at_all\n", RuntimeError),
        ("x = 1\n", ValueError),
        ("load = 5\n", ValueError),
        ("def load(device):\n    return None\n", ValueError),
        ("def load(device):\n    raise KeyError('word')\n", RuntimeError),
        ("def load(device):\n    raise OSError('no weights')\n", ValueError),
        ("def load(device):\n    raise ValueError('a path')\n", RuntimeError),
        ("def load():\n    return len\n", RuntimeError),
    ],
    ids=["syntax", "import", "none", "number", "nothing", "error", "file", "value", "arguments"],
)
def test_a_file_that_is_no_reward_is_an_error_with_its_name(text, kind, make_pool):
    with pytest.raises(kind, match="reward 'misused'"):
        make_pool(text)
