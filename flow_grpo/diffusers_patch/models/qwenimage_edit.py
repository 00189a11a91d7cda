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
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage, encoded
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
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(
                pretrained_model_name_or_path, subfolder="processor"
            )
            tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, subfolder="processor")
            options["processor"] = ImageProcessor(image_processor, tokenizer)
        return super().from_pretrained(pretrained_model_name_or_path, **options)


class QwenImageEdit(QwenImage):
    """Latents are packed [B, N, C], those of sources pictures [B, c, h, w]; text is masked."""

    NAME = "qwenimage_edit"
    PIPELINE = QwenImageEditPlusPipeline
    MOST_SOURCES = len(SOURCES)
    ENCODERS = (*FlowModel.ENCODERS, "vae")

    def check_sources(self, prompts: list[Prompt]) -> None:
        """Raise UserError also for prompts whose sources differ in number or shape, which could share no forward."""
        super().check_sources(prompts)
        prompt_of_sizes = {}
        for prompt in prompts:
            sizes = (self._sizes(prompt, "source_pixels"), self._sizes(prompt, "seen_pixels"))
            self._check_aspects(prompt, sizes)
            prompt_of_sizes[sizes] = prompt
        if len(prompt_of_sizes) > 1:
            examples = []
            for (source_sizes, _), prompt in list(prompt_of_sizes.items())[:2]:
                examples.append(f"{source_sizes} of {quoted(prompt.text)}")
            raise UserError(
                f"sources of all prompts must have one number and shape (width, height), not {' and '.join(examples)}"
            )

    def _check_aspects(self, prompt: Prompt, sizes: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        """Raise UserError for a source of which a side would have no pixel, or too few beside the other."""
        for source_sizes in sizes:
            for (width, height), resized in zip(prompt.source_sizes(), source_sizes):
                if max(resized) > MOST_ASPECT * min(resized):
                    raise UserError(
                        f"a source of {quoted(prompt.text)} has {width} x {height} pixels, and {self.NAME} would see "
                        f"{resized[0]} x {resized[1]} of them: crop it to sides more alike"
                    )

    def _sizes(self, prompt: Prompt, pixels: str) -> tuple[tuple[int, int], ...]:
        """Width and height of the prompt's sources at so many pixels, a setting of the pipeline's."""
        area = self.pipeline.config[pixels]
        return tuple(calculate_dimensions(area, width / height) for width, height in prompt.source_sizes())

    def read_text(self, prompt: Prompt) -> str:
        """Return the sources, each as the tokens that the text encoder sees it by, and the prompt."""
        processor = self.pipeline.processor
        heights_and_widths = [(height, width) for width, height in self._sizes(prompt, "seen_pixels")]
        counts = processor._get_num_multimodal_tokens(heights_and_widths)["num_image_tokens"]
        text = ""
        for number, count in enumerate(counts, start=1):
            text += f"Picture {number}: <|vision_start|>{processor.image_token * count}<|vision_end|>"
        return text + prompt.text

    def row_shapes(self, size: Size, width: int, prompt: Prompt | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes also of the sources of such prompts as this one."""
        shapes = super().row_shapes(size, width, prompt)
        if prompt is None:
            return shapes
        # A token's channels are those of 2 x 2 latents.
        channels = self.transformer_config["in_channels"] // 4
        factor = self.pipeline.vae_scale_factor
        for name, (source_width, source_height) in zip(SOURCES, self._sizes(prompt, "source_pixels")):
            shapes[name] = (channels, source_height // factor, source_width // factor)
        return shapes

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """Take the last states of the text encoder, which sees the sources, and the sources' latents."""
        pipeline = self.pipeline
        processor = pipeline.image_processor
        pictures = prompt.pictures()
        seen_pictures = []
        for picture, (seen_width, seen_height) in zip(pictures, self._sizes(prompt, "seen_pixels")):
            seen_pictures.append(processor.resize(picture, seen_height, seen_width))
        embeds, _ = pipeline.encode_prompt(prompt.text, seen_pictures, pipeline.text_encoder.device)

        latents = {}
        sizes = self._sizes(prompt, "source_pixels")
        for name, picture, (source_width, source_height) in zip(SOURCES, pictures, sizes):
            # Pixels are [1, 3, H, W] in [-1, 1].
            pixels = processor.preprocess(picture, source_height, source_width)
            latents[name] = encoded(pipeline, pixels.to(self.device))
        return Condition(embeds, **latents)

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
