"""Any vision-language model as a judge: how well an image shows its prompt, asked for on a scale of your own.

A score is the number in the model's answer, scaled to [0, 1]. The server is OpenAI-compatible, such as vLLM's or
sglang's; question, scale and how to find the number are options.
"""

import torch

from flow_grpo.rewards.judge import load_judge

RANGE = (0.0, 1.0)
TEMPLATE = """Here is an image that was made for the following description.

{prompt}

How well does the image show what the description says? Look at every object, its number, its colour, its place, and at
text if any is asked for. Answer with one line, "Rating: N", where N is a whole number from 0 (shows nothing of it) to
10 (shows all of it)."""
PATTERN = r"Rating:\s*(\d+(?:\.\d+)?)"


def load(
    device: torch.device,
    url: str | list,
    model: str,
    template: str = TEMPLATE,
    pattern: str = PATTERN,
    lowest: float = 0.0,
    highest: float = 10.0,
    max_tokens: int = 256,
    **server,
):
    """The scorer; nothing is loaded here.

    Args:
        url: of the server, without /v1.
        model: the name it serves the model under.
        template, pattern, lowest, highest: as in judge.load_judge.
        server: token_file, timeout_s.
    """
    return load_judge(url, model, template, pattern, lowest, highest, max_tokens, **server)
