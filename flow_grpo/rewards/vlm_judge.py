"""Judgement of an image by any vision-language model, which is asked how well it shows its prompt.

A score is the number in the model's answer, scaled to [0, 1]. The server is OpenAI-compatible, such as vLLM's or
sglang's. Options choose the question, the scale and the pattern that finds the number.
"""

import base64
import json
import re
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.rewards.clients import wire
from flow_grpo.rewards.clients.client import Server, ServerError, excerpt, urls_of

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
NUMBER = r"[-+]?\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?"
SCALE = r"(?:\s*\([^)]*\))?\s*(?:[:=>|]|\bis\b|\bof\b)?\s*"  # between a word and its number, as in "(0 to 10): "
# Text behind a number that makes it a share, says what it is out of, or makes it the start of a range.
BEHIND = re.compile(
    rf"\s*(?:(?P<share>%)|(?:/|out of|of)\s*(?P<top>{NUMBER})|(?P<range>(?:-|–|to)\s*\d))", re.IGNORECASE
)
PATHS = ("/chat/completions", "/v1")  # ends of a url, which are added here


def pattern_after(text: str) -> str:
    """Return a regular expression whose group is the number after a text, in capitals or small letters."""
    return rf"(?i)\b{text}{SCALE}({NUMBER})"


PATTERN = pattern_after("rating")
ANY_PATTERN = re.compile(pattern_after("(?:rating|score)"))  # for an answer in other words than those asked for
# An answer without any words.
BARE_PATTERN = re.compile(rf"\s*({NUMBER})\s*(?:%|(?:/|out of|of)\s*{NUMBER})?\s*\.?\s*", re.IGNORECASE)


def load(
    device: torch.device,
    url: str | list[str],
    model: str,
    template: str = "",
    pattern: str = PATTERN,
    lowest: float = 0.0,
    highest: float = 10.0,
    max_tokens: int = 256,
    **server,
) -> Callable[..., Tensor]:
    """Return a scorer that sends each image with its question and reads a number out of the answer.

    Nothing is loaded here. Raise UserError for a template without {prompt}, a pattern that is no regular expression or
    has no group, and an empty scale.

    Args:
        url: server's address, with or without /v1.
        model: name that the server gives its model.
        template: question, in which {prompt} stands for the image's prompt. "" = TEMPLATE, for edits EDIT_TEMPLATE.
        pattern: regular expression whose first group is the number; its last match counts. It is tried on the answer
            without Markdown first, then on the answer as it is.
        lowest, highest: ends of the scale that the model is asked for; scores are scaled to [0, 1].
        server: token_file, timeout_s of flow_grpo.rewards.clients.client.Server.
    """
    number_pattern = _checked_pattern(pattern, template, lowest, highest)
    judge = Server([_base_url(address) for address in urls_of(url)], **server)
    parse = partial(rating, number_pattern=number_pattern, lowest=lowest, highest=highest)

    def score(
        images: Tensor, prompts: list[str], metadata: list[dict], sources: list[list[Tensor]] | None = None
    ) -> Tensor:
        # All requests are sent before the first answer is waited for.
        answers = []
        for image, prompt, prompt_sources in zip(images, prompts, sources or [[]] * len(prompts)):
            request = question([*prompt_sources, image], prompt, template, model, max_tokens)
            answers.append(judge.post("/v1/chat/completions", parse, json=request))
        return torch.tensor([answer.result() for answer in answers])

    return score


def _checked_pattern(pattern: str, template: str, lowest: float, highest: float) -> re.Pattern[str]:
    """Return the compiled pattern of a judge. Raise UserError for options of `load` that cannot be."""
    try:
        number_pattern = re.compile(pattern)
    except re.error as error:
        raise UserError(f"a judge's pattern is a regular expression; {quoted(pattern)} is none: {error}") from error
    has_prompt = not template or "{prompt}" in template
    if not has_prompt or number_pattern.groups < 1 or not lowest < highest:
        raise UserError(
            f"a judge needs {{prompt}} in its template, a group in its pattern ({pattern!r}) and {lowest} < {highest}"
        )
    return number_pattern


def question(images: list[Tensor], prompt: str, template: str, model: str, max_tokens: int) -> dict[str, Any]:
    """Return a chat request about the last image, which may have been made of the others."""
    content = []
    for image in images:
        encoded = base64.b64encode(wire.pack_image(image, "png")).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}})
    if not template:
        template = EDIT_TEMPLATE if len(images) > 1 else TEMPLATE
    content.append({"type": "text", "text": template.replace("{prompt}", prompt)})
    messages = [{"role": "user", "content": content}]
    return {"model": model, "temperature": 0.0, "max_tokens": max_tokens, "messages": messages}


def _base_url(url: str) -> str:
    """Return a server's address without the path of its requests."""
    url = url.rstrip("/")
    for end in PATHS:
        url = url.removesuffix(end).rstrip("/")
    return url


def rating(body: bytes, number_pattern: re.Pattern, lowest: float, highest: float) -> float:
    """Return the number in a chat server's answer, on a scale whose ends become 0 and 1; it may lie beyond them.

    Raise ServerError if there is none, or it is on another scale.
    """
    match = _last_match(_content(body), number_pattern)
    text = match.string
    number = float(match[1].replace(",", "."))
    behind = BEHIND.match(text, match.end(1))
    if behind and behind["share"]:
        return number / 100
    if behind and behind["range"]:
        raise ServerError(f"a range in place of one number in {quoted(excerpt(text.encode()))}")
    if behind and float(behind["top"].replace(",", ".")) != highest:
        raise ServerError(f"a number out of {behind['top']}, not {highest:g}, in {quoted(excerpt(text.encode()))}")
    return (number - lowest) / (highest - lowest)


def _content(body: bytes) -> str:
    """Return the text of a chat server's answer, which may come in parts. Raise ServerError if there is none."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        if not isinstance(content, str):
            raise TypeError("no text")
        return content
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ServerError(f"no number in an answer without a text: {quoted(excerpt(body))}") from error


def _last_match(text: str, number_pattern: re.Pattern) -> re.Match:
    """Return the match of the number, in the text without Markdown or as it is. Raise ServerError if there is none."""
    plain = _plain(text)
    for form in (plain, text):
        matches = list(number_pattern.finditer(form))
        if matches and matches[-1][1]:
            return matches[-1]
    # A pattern of the user's own is taken at its word.
    if not number_pattern.pattern.endswith(f"{SCALE}({NUMBER})"):
        pattern = number_pattern.pattern
        raise ServerError(f"no number as {pattern!r} finds it in {quoted(excerpt(text.encode()))}")
    bare = BARE_PATTERN.fullmatch(plain)
    if bare:
        return bare
    matches = list(ANY_PATTERN.finditer(plain))
    if len({match[1] for match in matches}) != 1:
        raise ServerError(f"no number in {quoted(excerpt(text.encode()))}")
    return matches[0]


def _plain(text: str) -> str:
    """Return a text without Markdown, LaTeX's boxes and quotes around words, in plain forms of letters and digits."""
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"\\boxed\{([^}]*)\}", r"\1", text)
    return re.sub(r"[*`\"$#]|__", "", text)
