"""Any vision-language model as a judge: how well an image shows its prompt, asked for on a scale of your own.

A score is the number in the model's answer, scaled to [0, 1]. The server is OpenAI-compatible, such as vLLM's or
sglang's; question, scale and how to find the number are options.
"""

import base64
import json
import re
import unicodedata
from collections.abc import Callable
from functools import partial

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
# Behind a number: what makes it a share, what it is out of, or the end of a range.
BEHIND = re.compile(
    rf"\s*(?:(?P<share>%)|(?:/|out of|of)\s*(?P<top>{NUMBER})|(?P<range>(?:-|–|to)\s*\d))", re.IGNORECASE
)
PATHS = "/chat/completions", "/v1"  # ends of a url that are ours to add


def pattern_after(words: str) -> str:
    """A regular expression whose group is the number after some words, in capitals or small letters."""
    return rf"(?i)\b{words}{SCALE}({NUMBER})"


PATTERN = pattern_after("rating")
ANY_PATTERN = re.compile(pattern_after("(?:rating|score)"))  # for an answer in other words than those asked for


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
        url, model: of the server, with or without /v1, and what it calls its model.
        template: the question; {prompt} stands for the image's prompt. "" = TEMPLATE, for edits EDIT_TEMPLATE.
        pattern: regular expression whose first group is the number; its last match counts. It is tried on the answer
            without Markdown first, then on the answer as it is.
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
    judge = Server([_base(part) for part in urls_of(url)], **server)
    parse = partial(rating, find=find, lowest=lowest, highest=highest)

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


def _base(url: str) -> str:
    """A server's address without the path of its requests."""
    url = url.rstrip("/")
    for end in PATHS:
        url = url.removesuffix(end).rstrip("/")
    return url


def rating(body: bytes, find: re.Pattern, lowest: float, highest: float) -> float:
    """The number in what a chat server answered, on a scale whose ends become 0 and 1; it may lie beyond them. Raises
    ServerError: there is none, or it is on another scale."""
    text = _content(body)
    match, text = _last_match(text, find)
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
    """The text of a chat server's answer, which may come in parts. Raises ServerError: there is none."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        if not isinstance(content, str):
            raise TypeError("no text")
        return content
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ServerError(f"no number in an answer without a text: {quoted(excerpt(body))}") from error


def _last_match(text: str, find: re.Pattern) -> tuple[re.Match, str]:
    """The match of the number, and the text in which it is: without Markdown, or as it is. Raises ServerError: none."""
    plain = _plain(text)
    for form in (plain, text):
        matches = list(find.finditer(form))
        if matches and matches[-1][1]:
            return matches[-1], form
    is_own = not find.pattern.endswith(f"{SCALE}({NUMBER})")
    matches = [] if is_own else list(ANY_PATTERN.finditer(plain))
    if len({match[1] for match in matches}) == 1:
        return matches[0], plain
    looked_for = f" as {find.pattern!r} finds it" if is_own else ""
    raise ServerError(f"no number{looked_for} in {quoted(excerpt(text.encode()))}")


def _plain(text: str) -> str:
    """A text without Markdown, LaTeX's boxes and quotes around words, in plain forms of letters and digits."""
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"\\boxed\{([^}]*)\}", r"\1", text)
    return re.sub(r"[*`\"$#]|__", "", text)
