"""Qwen-Image-Edit: diffusers' QwenImageEditPlusPipeline, of the weights 2509 and 2511, taken apart into what training
needs. A prompt has one to three source images, each at its own aspect ratio: the text encoder sees them small, and the
transformer sees their latents behind the image's."""

from os import PathLike
from typing import Any

import diffusers
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    VAE_IMAGE_SIZE,
    calculate_dimensions,
)
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import SOURCES, Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel, check_one_shape
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.diffusers_patch.size import Size

# Longer side of a source over its shorter one that the text encoder's processor takes.
MOST_ASPECT = 200


class ImageProcessor(Qwen2VLProcessor):
    """Parts for images and texts of the pipeline's processor; the part for videos would need torchvision."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, tokenizer: PreTrainedTokenizerBase):
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer)


def load_processor(folder: str | PathLike) -> ImageProcessor:
    """Load the processor of a pipeline's folder or hub id."""
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder, subfolder="processor")
    tokenizer = AutoTokenizer.from_pretrained(folder, subfolder="processor")
    return ImageProcessor(image_processor, tokenizer)


class QwenImageEditPlusPipeline(diffusers.QwenImageEditPlusPipeline):
    """Pipeline of diffusers, under its name, with a processor of images and texts.

    Args:
        source_pixels: of a source whose latents the transformer sees; diffusers' own for the published weights.
        seen_pixels: of a source that the text encoder sees.
    """

    def __init__(
        self,
        scheduler,
        vae,
        text_encoder,
        tokenizer,
        processor,
        transformer,
        source_pixels: int = VAE_IMAGE_SIZE,
        seen_pixels: int = CONDITION_IMAGE_SIZE,
    ):
        super().__init__(scheduler, vae, text_encoder, tokenizer, processor, transformer)
        self.register_to_config(source_pixels=source_pixels, seen_pixels=seen_pixels)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike, **options: Any
    ) -> "QwenImageEditPlusPipeline":
        if options.get("processor") is None:
            options["processor"] = load_processor(pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, **options)


class QwenImageEdit(QwenImage):
    """Latents are packed [B, N, C], those of sources pictures [B, c, h, w]; text is masked."""

    NAME = "qwenimage_edit"
    PIPELINE = QwenImageEditPlusPipeline
    MOST_SOURCES = len(SOURCES)
    ENCODERS = (*FlowModel.ENCODERS, "vae")

    def check_sources(self, prompts: list[Prompt]) -> None:
        """Raise UserError also for a source of which the text encoder, or the transformer, sees next to nothing."""
        super().check_sources(prompts)
        check_one_shape(prompts, self.seen_sizes)
        for prompt in prompts:
            self._check_aspects(prompt, self.source_sizes(prompt))
            self._check_aspects(prompt, self.seen_sizes(prompt))

    def _check_aspects(self, prompt: Prompt, resized_sizes: tuple[tuple[int, int], ...]) -> None:
        """Raise UserError for a source of which a side would have no pixel, or too few beside the other."""
        for (width, height), resized in zip(prompt.source_sizes(), resized_sizes):
            if max(resized) > MOST_ASPECT * min(resized):
                raise UserError(
                    f"a source of {quoted(prompt.text)} has {width} x {height} pixels, and {self.NAME} would see "
                    f"{resized[0]} x {resized[1]} of them: crop it to sides more alike"
                )

    def source_sizes(self, prompt: Prompt) -> tuple[tuple[int, int], ...]:
        return _sizes(prompt, self.pipeline.config["source_pixels"])

    def seen_sizes(self, prompt: Prompt) -> tuple[tuple[int, int], ...]:
        """Width and height of the prompt's sources as the text encoder sees them."""
        return _sizes(prompt, self.pipeline.config["seen_pixels"])

    def read_text(self, prompt: Prompt) -> str:
        """Return the sources, each as the tokens that the text encoder sees it by, and the prompt."""
        token = self.pipeline.processor.image_token
        text = ""
        for number, count in enumerate(self.num_seen_tokens(prompt), start=1):
            text += f"Picture {number}: <|vision_start|>{token * count}<|vision_end|>"
        return text + prompt.text

    def num_seen_tokens(self, prompt: Prompt) -> list[int]:
        """Count the tokens that the text encoder sees each of the prompt's sources by."""
        heights_and_widths = [(height, width) for width, height in self.seen_sizes(prompt)]
        return self.pipeline.processor._get_num_multimodal_tokens(heights_and_widths)["num_image_tokens"]

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Take the last states of the text encoder, which sees the sources, and the sources' latents."""
        pipeline = self.pipeline
        seen_pictures = []
        for picture, (seen_width, seen_height) in zip(prompt.pictures(), self.seen_sizes(prompt)):
            seen_pictures.append(pipeline.image_processor.resize(picture, seen_height, seen_width))
        embeds, _ = pipeline.encode_prompt(prompt.text, seen_pictures, pipeline.text_encoder.device)
        return self.with_sources(Condition(embeds), prompt)

    def transformer_times(self, timesteps: Tensor) -> Tensor:
        """Return also 0, the time of sources with weights of zero_cond_t (2511)."""
        return torch.cat([super().transformer_times(timesteps), timesteps.new_zeros(1)])

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        # Tokens of the image, then those of its sources; grids are frames, rows and columns of tokens of 2 x 2 latents.
        tokens = [x]
        rows, columns = self.grid(size)
        grids = [(1, rows, columns)]
        for source in condition.sources:
            tokens.append(self.pipeline._pack_latents(source, *source.shape))
            grids.append((1, source.shape[2] // 2, source.shape[3] // 2))
        velocity = self.transformed(torch.cat(tokens, 1), t, condition, grids)
        return velocity[:, : x.shape[1]]


def _sizes(prompt: Prompt, pixels: int) -> tuple[tuple[int, int], ...]:
    """Width and height of the prompt's sources at about so many pixels, each at its own aspect ratio."""
    return tuple(calculate_dimensions(pixels, width / height) for width, height in prompt.source_sizes())
