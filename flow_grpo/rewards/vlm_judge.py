"""Any vision-language model as a judge: how well an image shows its prompt, asked for on a scale of your own.

A score is the number in the model's answer, scaled to [0, 1]. The server is OpenAI-compatible, such as vLLM's or
sglang's; question, scale and how to find the number are options.
"""

import base64
import json
import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import quoted
from flow_grpo.rewards.clients import wire
from flow_grpo.rewards.clients.client import Server, ServerError

RANGE = (0.0, 1.0)
TEMPLATE = """Here is an image that was made for the following description.

{prompt}

How well does the image show what the description says? Look at every object, its number, its colour, its place, and at
text if any is asked for. Answer with one line, "Rating: N", where N is a whole number from 0 (shows nothing of it) to
10 (shows all of it)."""
EDIT_TEMPLATE = """The last image was made of what comes before it, by the following instruction.

{prompt}

How well was the instruction followed, and has everything else stayed as it was? Answer with one line, "Rating: N",
where N is a whole number from 0 (nothing was done, or it is another image) to 10 (all that was asked for, and only
that)."""
PATTERN = r"Rating:\s*(\d+(?:\.\d+)?)"


def load(
    device: torch.device,
    url: str | list,
    model: str,
    template: str = "",
    pattern: str = PATTERN,
    lowest: float = 0.0,
    highest: float = 10.0,
    max_tokens: int = 256,
    **server,
) -> Callable[..., Tensor]:
    """A scorer that sends each image with its question and reads a number out of the answer. Nothing is loaded here.
    Raises UserError: a template without {prompt}, a pattern that is none or has no group, an empty scale.

    Args:
        url, model: of the server, without /v1, and what it calls its model.
        template: the question; {prompt} stands for the image's prompt. "" = TEMPLATE, for edits EDIT_TEMPLATE.
        pattern: regular expression whose first group is the number; its last match counts.
        lowest, highest: the scale that the model is asked for; scores are scaled to [0, 1].
        server: token_file, timeout_s of flow_grpo.rewards.clients.client.Server.
    """
    try:
        find = re.compile(pattern)
    except re.error as error:
        raise UserError(f"a judge's pattern is a regular expression; {quoted(pattern)} is none: {error}") from error
    if (template and "{prompt}" not in template) or find.groups < 1 or not lowest < highest:
        raise UserError(
            f"a judge needs {{prompt}} in its template, a group in its pattern ({pattern!r}) and {lowest} < {highest}"
        )
    judge, parse = Server(url, **server), partial(rating, find=find, lowest=lowest, highest=highest)

    def score(images: Tensor, prompts: list[str], metadata: list, sources: list | None = None) -> Tensor:
        rows = zip(images, prompts, sources or [[]] * len(prompts))
        asked = [question([*own, image], text, template, model, max_tokens) for image, text, own in rows]
        sent = [judge.post("/v1/chat/completions", parse, json=request) for request in asked]
        return torch.tensor([future.result() for future in sent])

    return score


def question(images: list[Tensor], prompt: str, template: str, model: str, max_tokens: int) -> dict:
    """A chat request about the last image, which may have been made of the others."""
    encoded = [base64.b64encode(wire.pack_image(image, "png")).decode() for image in images]
    pictures = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in encoded]
    text = (template or (EDIT_TEMPLATE if images[1:] else TEMPLATE)).replace("{prompt}", prompt)
    messages = [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]
    return dict(model=model, temperature=0.0, max_tokens=max_tokens, messages=messages)


def rating(body: bytes, find: re.Pattern, lowest: float, highest: float) -> float:
    """The number in what a chat server answered, scaled to [0, 1] but unchecked. Raises ServerError."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
        return (float([*find.finditer(text)][-1][1]) - lowest) / (highest - lowest)
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"no number as {find.pattern!r} finds it in {body[:1000]!r}") from error
