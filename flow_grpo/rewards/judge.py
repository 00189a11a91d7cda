"""Asking a vision-language model on an OpenAI-compatible server (vLLM, sglang, ...) for a number."""

import base64
import json
import re
from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted
from flow_grpo.rewards.clients import wire
from flow_grpo.rewards.clients.client import Server


def load_judge(
    url: str | list, model: str, template: str, pattern: str, lowest: float, highest: float, max_tokens: int, **server
) -> Callable[..., Tensor]:
    """A scorer that sends each image with its question and reads a number out of the answer.

    Args:
        url: of the server, without /v1.
        template: the question; {prompt} stands for the image's prompt.
        pattern: regular expression whose first group is the number; its last match counts.
        lowest, highest: the scale that the model is asked for; scores are scaled to [0, 1].
        server: token_file, timeout_s of flow_grpo.rewards.clients.client.Server.

    Raises:
        UserError: a template without {prompt}, a pattern without a group, an empty scale.
    """
    find = _compiled(pattern)
    if "{prompt}" not in template or find.groups < 1 or not lowest < highest:
        raise UserError(
            f"a judge needs {{prompt}} in its template ({template[:60]!r}), a group in its pattern ({pattern!r}) and "
            f"lowest < highest ({lowest}, {highest})"
        )
    judge = Server(url, **server)

    def parse(body: bytes) -> float:
        text = answer_of(body)
        matches = find.findall(text)
        number = (matches[-1] if isinstance(matches[-1], str) else matches[-1][0]) if matches else None
        try:
            values = [(float(number) - lowest) / (highest - lowest)]
        except (TypeError, ValueError) as error:
            raise wire.BadAnswer(f"no number as {pattern!r} finds it in {text[-120:]!r}") from error
        return wire.check_numbers("score", values, 1, (0.0, 1.0)).item()

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        questions = [question(image, template.replace("{prompt}", text)) for image, text in zip(images, prompts)]
        settings = dict(model=model, temperature=0.0, max_tokens=max_tokens)
        sent = [judge.post("/v1/chat/completions", parse, json=settings | message) for message in questions]
        return torch.tensor([future.result() for future in sent])

    return score


def _compiled(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"a judge's pattern is a regular expression; {quoted(pattern)} is none: {error}") from error


def question(image: Tensor, text: str) -> dict:
    """The messages of a chat request."""
    picture = "data:image/png;base64," + base64.b64encode(wire.pack_image(image, "png")).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}]}


def answer_of(body: bytes) -> str:
    """The text that a chat server answered. Raises BadAnswer."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise wire.BadAnswer(f"no chat completion but {body[:80]!r}") from error
    if not isinstance(text, str):
        raise wire.BadAnswer(f"no text but {str(text)[:80]!r}")
    return text
