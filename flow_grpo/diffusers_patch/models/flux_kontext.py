"""FLUX.1-Kontext: diffusers' FluxKontextPipeline taken apart into what training needs.

A prompt has one source image or none. The transformer sees its latents behind the image's; the text encoders do not.
"""

import math
from typing import Any

import diffusers
import torch
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from torch import Tensor

from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.models.flux import Flux
from flow_grpo.diffusers_patch.size import Size

# Of a source, about, as the published weights were trained to see it.
SOURCE_PIXELS = 1024 * 1024


class FluxKontextPipeline(diffusers.FluxKontextPipeline):
    """Pipeline of diffusers, under its name.

    Args:
        source_pixels: about as many pixels has a source that the transformer sees; diffusers' own for the published
            weights.
    """

    def __init__(  # noqa: PLR0913 (from_pretrained reads the names of all parts here)
        self,
        scheduler,
        vae,
        text_encoder,
        tokenizer,
        text_encoder_2,
        tokenizer_2,
        transformer,
        image_encoder: Any = None,
        feature_extractor: Any = None,
        source_pixels: int = SOURCE_PIXELS,
    ):
        parts = (scheduler, vae, text_encoder, tokenizer, text_encoder_2, tokenizer_2, transformer)
        super().__init__(*parts, image_encoder, feature_extractor)
        self.register_to_config(source_pixels=source_pixels)


class FluxKontext(Flux):
    """Latents are packed [B, N, C], those of a source pictures [B, c, h, w]."""

    NAME = "flux_kontext"
    PIPELINE = FluxKontextPipeline
    GUIDANCE_SCALE = 2.5
    MOST_SOURCES = 1
    NEEDS_SOURCE = False
    ENCODERS = (*FlowModel.ENCODERS, "vae")

    @classmethod
    def call_arguments(cls, size: Size, num_steps: int, guidance_scale: float) -> dict[str, Any]:
        """Return the area, too: the pipeline would draw another size, of 1024 x 1024 pixels."""
        arguments = super().call_arguments(size, num_steps, guidance_scale)
        arguments["max_area"] = size.height * size.width
        return arguments

    def source_sizes(self, prompt: Prompt) -> tuple[tuple[int, int], ...]:
        """Width and height of the prompt's source: of the sizes that its pipeline prefers that of the nearest aspect
        ratio, scaled to the pipeline's number of pixels."""
        sizes = []
        scale = math.sqrt(self.pipeline.config["source_pixels"] / SOURCE_PIXELS)
        for width, height in prompt.source_sizes():
            aspect = self._in_tokens(width) / self._in_tokens(height)
            # Of sizes that are equally far the pipeline, too, takes the narrowest.
            distances = [(abs(aspect - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS]
            _, nearest_width, nearest_height = min(distances)
            sizes.append((self._in_tokens(nearest_width * scale), self._in_tokens(nearest_height * scale)))
        return tuple(sizes)

    def _in_tokens(self, side: float) -> int:
        """Return a side in pixels, rounded down to whole tokens, at least one."""
        token = self.pipeline.vae_scale_factor * 2
        return max(int(side) // token, 1) * token

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Encode FLUX.1's text, and the source to latents."""
        return self.with_sources(super().encode_one(prompt, width), prompt)

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        # Tokens of the image, then those of its source.
        tokens = [x]
        positions = [self.positions(*self.grid(size))]
        for source in condition.sources:
            tokens.append(self.pipeline._pack_latents(source, *source.shape))
            source_positions = self.positions(source.shape[2] // 2, source.shape[3] // 2)
            # The source is picture 1.
            source_positions[:, 0] = 1
            positions.append(source_positions)
        velocity = self.transformed(torch.cat(tokens, 1), t, condition, guidance_scale, torch.cat(positions))
        return velocity[:, : x.shape[1]]
