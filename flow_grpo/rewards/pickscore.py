"""PickScore (arXiv:2305.01569): how well people would like an image for its prompt, by a CLIP trained on their choices.

A score is logit_scale * cosine(image, prompt) / 26, the scale of the Flow-GRPO code base.
"""

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import CLIPModel, CLIPProcessor

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
SCALE = 26.0
BATCH_SIZE = 32  # images per forward


def load(device: torch.device | str, model: str = MODEL, processor: str = PROCESSOR):
    """The scorer, in float32 on `device`.

    Args:
        model: hub id or folder of a CLIPModel.
        processor: hub id or folder of its CLIPProcessor.

    Raises:
        ValueError: weights or processor cannot be had.
    """
    clip = _pretrained(CLIPModel, model, dtype=torch.float32).to(device).requires_grad_(False).eval()
    prepare = _pretrained(CLIPProcessor, processor, backend="pil")  # torchvision would resize a little differently

    @torch.no_grad()
    def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """Images [B, 3, H, W] in [0, 1] -> [B] float32."""
        starts = range(0, len(prompts), BATCH_SIZE)
        rows = [slice(start, start + BATCH_SIZE) for start in starts]
        return torch.cat([_score(clip, prepare, images[part], prompts[part]) for part in rows])

    return score


def _score(clip: CLIPModel, prepare: CLIPProcessor, images: Tensor, prompts: list[str]) -> Tensor:
    pixels = images.detach().float().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    inputs = prepare(
        text=prompts,
        images=[Image.fromarray(image) for image in pixels],
        padding="max_length",  # one width, whatever the neighbours
        truncation=True,
        max_length=clip.config.text_config.max_position_embeddings,
        return_tensors="pt",
    ).to(clip.device)
    out = clip(**inputs)
    return clip.logit_scale.exp() * cosine_similarity(out.image_embeds, out.text_embeds) / SCALE


def _pretrained(kind: type, name: str, **how):
    try:
        return kind.from_pretrained(name, **how)
    except OSError as error:  # no such id, or no network and nothing in the cache
        raise ValueError(
            f"reward pickscore needs the {kind.__name__} {name!r}, neither in the Hugging Face cache nor to be "
            f"downloaded: run `hf download {name}` where there is a network, and set HF_HOME to the folder it filled"
        ) from error
