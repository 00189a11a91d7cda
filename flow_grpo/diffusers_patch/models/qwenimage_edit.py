"""Qwen-Image-Edit: diffusers' QwenImageEditPlusPipeline, of the weights 2509 and 2511, taken apart into what training
needs. A prompt has one to three source images, each at its own aspect ratio: the text encoder sees them small, and the
transformer sees their latents behind the image's."""

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


class ImageProcessor(Qwen2VLProcessor):
    """The parts for images and texts of the pipeline's processor; the part for videos would need torchvision."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, tokenizer: PreTrainedTokenizerBase):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer)


class QwenImageEditPlusPipeline(diffusers.QwenImageEditPlusPipeline):
    """Diffusers' own, under its name, with a processor of images and texts.

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
    def from_pretrained(cls, folder: str, **options) -> "QwenImageEditPlusPipeline":
        if options.get("processor") is None:
            parts = Qwen2VLImageProcessorPil, AutoTokenizer
            parts = (part.from_pretrained(folder, subfolder="processor") for part in parts)
            options["processor"] = ImageProcessor(*parts)
        return super().from_pretrained(folder, **options)


class QwenImageEdit(QwenImage):
    """Latents are packed [B, N, C], those of sources pictures [B, c, h, w]; text is masked."""

    NAME = "qwenimage_edit"
    PIPELINE = QwenImageEditPlusPipeline
    MOST_SOURCES = len(SOURCES)
    ENCODERS = (*FlowModel.ENCODERS, "vae")

    def check_sources(self, prompts: list[Prompt]) -> None:
        """Raises UserError also for prompts whose sources differ in number or shape, which could share no forward."""
        super().check_sources(prompts)
        kinds = "source_pixels", "seen_pixels"
        by_sizes = {tuple(self._sizes(prompt, kind) for kind in kinds): prompt for prompt in prompts}
        if len(by_sizes) > 1:
            examples = " and ".join(f"{sizes[0]} of {quoted(by_sizes[sizes].text)}" for sizes in [*by_sizes][:2])
            raise UserError(f"sources of all prompts must have one number and shape (width, height), not {examples}")

    def _sizes(self, prompt: Prompt, pixels: str) -> tuple[tuple[int, int], ...]:
        """Width and height of the prompt's sources at so many pixels, a setting of the pipeline's."""
        area = self.pipeline.config[pixels]
        return tuple(calculate_dimensions(area, width / height) for width, height in prompt.source_sizes())

    def read_text(self, prompt: Prompt) -> str:
        """The sources, and the prompt."""
        processor, sizes = self.pipeline.processor, self._sizes(prompt, "seen_pixels")
        counts = processor._get_num_multimodal_tokens([size[::-1] for size in sizes])["num_image_tokens"]
        tokens = (f"<|vision_start|>{processor.image_token * count}<|vision_end|>" for count in counts)
        pictures = [f"Picture {number}: {picture}" for number, picture in enumerate(tokens, start=1)]
        return "".join([*pictures, prompt.text])

    def row_shapes(self, size: Size, width: int, prompt: Prompt | None = None) -> dict[str, tuple[int, ...]]:
        """Also of the sources of such prompts as this one."""
        channels, factor = self.transformer_config["in_channels"] // 4, self.pipeline.vae_scale_factor
        sizes = self._sizes(prompt, "source_pixels") if prompt else ()
        shapes = [(channels, height // factor, width_ // factor) for width_, height in sizes]
        return super().row_shapes(size, width, prompt) | dict(zip(SOURCES, shapes))

    def encode_one(self, prompt: Prompt, width: int | None) -> Condition:
        """The last states of the text encoder, which sees the sources, and the sources' latents."""
        pipeline, pictures = self.pipeline, prompt.pictures()
        resize, tensor = pipeline.image_processor.resize, pipeline.image_processor.preprocess
        sizes = zip(pictures, self._sizes(prompt, "seen_pixels"))
        seen = [resize(picture, height, width) for picture, (width, height) in sizes]
        text = pipeline.encode_prompt(prompt.text, seen, pipeline.text_encoder.device)[0]
        sizes = zip(pictures, self._sizes(prompt, "source_pixels"))
        shown = [tensor(picture, height, width).to(self.device) for picture, (width, height) in sizes]
        return Condition(text, **{name: encoded(pipeline, each) for name, each in zip(SOURCES, shown)})

    def forward(self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float, size: Size) -> Tensor:
        sources, pipeline = condition.sources, self.pipeline
        grids = [self.grid(size), *((source.shape[2] // 2, source.shape[3] // 2) for source in sources)]
        tokens = torch.cat([x, *(pipeline._pack_latents(source, *source.shape) for source in sources)], 1)
        return self.transformed(tokens, t, condition, [(1, *grid) for grid in grids])[:, : x.shape[1]]
