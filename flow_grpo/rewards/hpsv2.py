"""HPS v2.1 (arXiv:2306.09341): people's preference for an image of a prompt, by a CLIP trained on their choices.

A score is cosine(image, prompt), about 0.2 to 0.35. An oblong image is padded with black, as by the authors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo.base.pixels import to_pictures
from flow_grpo.rewards.clip_model import in_batches, optional_package, read_weights

WEIGHTS = "xswu/HPSv2/HPS_v2.1_compressed.pt"
ARCHITECTURE = "ViT-H-14"
RANGE = (-1.0, 1.0)


def load(device: torch.device | str, weights: str = WEIGHTS, architecture: str = ARCHITECTURE) -> Callable[..., Tensor]:
    """Return the scorer, in float32 on `device`. Raise UserError if open_clip or weights are missing.

    Args:
        weights: checkpoint with a "state_dict", a local file or owner/repository/file of the hub.
        architecture: name that open_clip knows.
    """
    open_clip = optional_package("hpsv2", "open_clip", "pip install flow_grpo[hpsv2]")
    state = read_weights("hpsv2", weights)["state_dict"]
    clip, _, prepare = open_clip.create_model_and_transforms(
        architecture, load_weights=False, image_resize_mode="longest"
    )
    clip.load_state_dict(state)
    clip.to(device).requires_grad_(False).eval()
    # It pads all prompts to one width, so that none depends on its neighbours.
    tokenize = open_clip.get_tokenizer(architecture)

    def cosines(images: Tensor, prompts: list[str]) -> Tensor:
        pixels = torch.stack([prepare(picture) for picture in to_pictures(images)]).to(device)
        image_embeddings = clip.encode_image(pixels, normalize=True)
        text_embeddings = clip.encode_text(tokenize(prompts).to(device), normalize=True)
        return (image_embeddings * text_embeddings).sum(1)

    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return in_batches(cosines, images, prompts)

    return score
