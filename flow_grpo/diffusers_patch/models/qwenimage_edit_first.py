"""The first Qwen-Image-Edit, of August 2025: diffusers' QwenImageEditPipeline, in the parts of its successors.

A prompt has one source image, which the text encoder sees as large as the transformer does, in a template of its own.
"""

from os import PathLike
from typing import Any

import diffusers

from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.models.qwenimage_edit import QwenImageEdit, load_processor

# Of a source, about, as the published weights were trained to see it.
SOURCE_PIXELS = 1024 * 1024


class QwenImageEditPipeline(diffusers.QwenImageEditPipeline):
    """Pipeline of diffusers, under its name, with a processor of images and texts.

    Args:
        source_pixels: of a source that text encoder and transformer see; diffusers' own for the published weights.
    """

    def __init__(
        self,
        scheduler,
        vae,
        text_encoder,
        tokenizer,
        processor,
        transformer,
        source_pixels: int = SOURCE_PIXELS,
    ):
        super().__init__(scheduler, vae, text_encoder, tokenizer, processor, transformer)
        self.register_to_config(source_pixels=source_pixels)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, **options: Any) -> "QwenImageEditPipeline":
        if options.get("processor") is None:
            options["processor"] = load_processor(pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, **options)


class QwenImageEditFirst(QwenImageEdit):
    """Latents are packed [B, N, C], those of a source pictures [B, c, h, w]; text is masked."""

    NAME = "qwenimage_edit_first"
    PIPELINE = QwenImageEditPipeline
    MOST_SOURCES = 1
    TEXT_TOKENS = 2560  # 1,024 of a prompt, and those of its source, which are about 1,400

    def seen_sizes(self, prompt: Prompt) -> tuple[tuple[int, int], ...]:
        return self.source_sizes(prompt)

    def read_text(self, prompt: Prompt) -> str:
        """Return the prompt alone: the template has the source, as one token."""
        return prompt.text

    def num_text_tokens(self, prompt: Prompt) -> int:
        """Count also the tokens of the source, in the place of the template's one."""
        return super().num_text_tokens(prompt) - 1 + sum(self.num_seen_tokens(prompt))
