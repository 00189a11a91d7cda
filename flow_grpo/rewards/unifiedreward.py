"""UnifiedReward (arXiv:2503.05236), a vision-language model that rates images, on an OpenAI-compatible server.

It rates from 1 to 5, which is scaled to [0, 1]. The question is ours; give a model that was trained with another
question that one as the option `template`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.rewards import vlm_judge

RANGE = (0.0, 1.0)
TEMPLATE = """This image was generated from a caption: {prompt}

Judge how faithful the image is to the caption, and its quality. Give your reasons, then, on a line of its own, your
rating from 1 to 5 as "Final Score: N"."""
PATTERN = vlm_judge.pattern_after("final score")


def load(
    device: torch.device,
    url: str | list[str],
    model: str = "UnifiedReward",
    template: str = TEMPLATE,
    max_tokens: int = 512,
    **server,
) -> Callable[..., Tensor]:
    """Return the scorer of `vlm_judge` with UnifiedReward's question and scale; see there for the options."""
    return vlm_judge.load(
        device, url, model, template, pattern=PATTERN, lowest=1.0, highest=5.0, max_tokens=max_tokens, **server
    )
