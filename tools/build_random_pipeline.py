"""Make a pipeline of the real diffusers classes with random weights: to try a model's scripts without a download.

    python tools/build_random_pipeline.py sd3 flow_grpo/assets/tiny_sd3

Its pictures mean nothing. `,smoke` runs and tests use this tiny size, which is shipped, and of Qwen-Image and Wan a
trained one; benchmarks/bench.py makes models of the published sizes, on no disk, or reads one that `--published` wrote.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    AddedToken,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from flow_grpo.command_line import command_line
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.models.flux_kontext import SOURCE_PIXELS, FluxKontextPipeline
from flow_grpo.diffusers_patch.models.qwenimage_21 import QwenImage21Pipeline, TextProcessor
from flow_grpo.diffusers_patch.models.qwenimage_edit import QwenImageEditPlusPipeline
from flow_grpo.diffusers_patch.models.qwenimage_edit_first import QwenImageEditPipeline
from flow_grpo.plan.sketch import transformer_sizes

PROMPTS = Path(__file__).parents[1] / "dataset" / "shapes" / "train_metadata.jsonl"
SHIPPED = Path(__file__).parents[1] / "flow_grpo" / "assets" / "tiny_qwenimage"  # lends tokenizer and scheduler
NUM_CLIP_WORDS = 54
TINY = dict(
    clip_l=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, projection_dim=16),
    clip_g=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, projection_dim=16),
    t5=dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    vae=dict(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4),
    sd3=dict(num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, sample_size=8)
    | dict(caption_projection_dim=32, pooled_projection_dim=32, pos_embed_max_size=16, dual_attention_layers=(0,)),
    flux=dict(num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32)
    | dict(pooled_projection_dim=16, axes_dims_rope=(4, 6, 6)),
    qwen3=dict(vocab_size=465, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
    | dict(num_attention_heads=2, num_key_value_heads=1),
    zimage=dict(dim=48, n_layers=2, n_refiner_layers=1, n_heads=3, n_kv_heads=3, cap_feat_dim=32, axes_dims=(4, 6, 6)),
    klein_text=dict(vocab_size=465, hidden_size=16, intermediate_size=16, num_hidden_layers=28, head_dim=8)
    | dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.2),
    klein_vae=dict(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=16),
    flux2_klein=dict(in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2)
    | dict(joint_attention_dim=48, axes_dims_rope=(4, 4, 4, 4)),
    qwen3_vl=dict(vocab_size=470, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
    | dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2)
    | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}),
    qwen3_vision=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=32)
    | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
    qwen21_vae=dict(base_dim=8, decoder_base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1)
    | dict(latents_mean=[n / 8 - 1 for n in range(16)], latents_std=[n / 8 + 0.5 for n in range(16)]),
    qwenimage_21=dict(in_channels=16, out_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2)
    | dict(context_in_dim=32, axes_dims_rope=(4, 6, 6)),
    krea2_vae=dict(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
    krea2=dict(num_layers=2, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    | dict(intermediate_size=64, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=3)
    | dict(text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32)
    | dict(num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6)),
)
PUBLISHED = dict(
    clip_l=dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    | dict(projection_dim=768),
    clip_g=dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20)
    | dict(projection_dim=1280),
    t5=dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64),
    vae=dict(block_out_channels=(128, 256, 512, 512), layers_per_block=2, norm_num_groups=32),
    sd3=transformer_sizes("stabilityai/stable-diffusion-3.5-medium"),
    flux={},
    qwenimage={},
    qwenimage_edit={},
    qwenimage_edit_first={},
    qwen_text=dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28)
    | dict(num_attention_heads=28, num_key_value_heads=4)
    | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}),
    qwen3=dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, head_dim=128)
    | dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=40960, tie_word_embeddings=True)
    | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    zimage=transformer_sizes("Tongyi-MAI/Z-Image"),
    klein_vae={},
    flux2_klein=transformer_sizes("black-forest-labs/FLUX.2-klein-4B"),
    qwen3_vl=dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8)
    | dict(rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}),
    qwen3_vision=dict(out_hidden_size=4096),
    qwen21_vae={},
    qwenimage_21={},
    krea2_text=dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_key_value_heads=8)
    | dict(tie_word_embeddings=True)
    | dict(rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}),
    krea2_vision=dict(depth=24, hidden_size=1024, intermediate_size=4096, out_hidden_size=2560)
    | dict(deepstack_visual_indexes=[5, 11, 17]),
    krea2_vae={},
    krea2={},
    umt5=dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, vocab_size=256384),
    wan_vae={},
    wan=transformer_sizes("Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
)
TINY["krea2_text"] = TINY["qwen3_vl"]
TINY["krea2_vision"] = TINY["qwen3_vision"]
TINY["flux_kontext"] = TINY["flux"]
PUBLISHED["flux_kontext"] = PUBLISHED["flux"]
PUBLISHED["klein_text"] = PUBLISHED["qwen3"]
KLEIN_9B = dict(
    klein_text=PUBLISHED["qwen3"] | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    flux2_klein=transformer_sizes("black-forest-labs/FLUX.2-klein-9B"),
)
OTHERS = {  # published sizes: a name in configs -> the model, what it changes
    "flux2_klein_9b": ("flux2_klein", KLEIN_9B),
    "sd35_large": ("sd3", dict(sd3=transformer_sizes("stabilityai/stable-diffusion-3.5-large"))),
    "flux_schnell": ("flux", dict(flux=dict(guidance_embeds=False))),
    "wan_14b": ("wan", dict(wan=transformer_sizes("Wan-AI/Wan2.1-T2V-14B-Diffusers"))),
}


def qwenimage(sizes: dict, make: Callable) -> QwenImagePipeline:
    """Return Qwen-Image, at its published size alone; `make` (build, dtype) -> module says how weights come about."""
    shipped = QwenImagePipeline.from_pretrained(SHIPPED, transformer=None, vae=None, text_encoder=None)
    return QwenImagePipeline(
        transformer=make(lambda: QwenImageTransformer2DModel(**sizes["qwenimage"]), torch.bfloat16),
        tokenizer=shipped.tokenizer,
        scheduler=shipped.scheduler,
        **qwenimage_encoders(sizes, make),
    )


def qwenimage_edit(sizes: dict, make: Callable) -> DiffusionPipeline:
    """Return Qwen-Image-Edit-2511, at its published size alone; build_tiny_qwenimage_edit.py is for the tiny one."""
    size = dict(zero_cond_t=True) | sizes["qwenimage_edit"]
    return edit_pipeline(QwenImageEditPlusPipeline, size, sizes, make)


def qwenimage_edit_first(sizes: dict, make: Callable) -> DiffusionPipeline:
    """Return the first Qwen-Image-Edit, at its published size alone; the tiny one has the parts of the newer one's."""
    return edit_pipeline(QwenImageEditPipeline, sizes["qwenimage_edit_first"], sizes, make)


def edit_pipeline(pipeline_class: type, size: dict, sizes: dict, make: Callable) -> DiffusionPipeline:
    """Return a Qwen-Image-Edit; `size` is that of its transformer."""
    folder = SHIPPED.with_name("tiny_qwenimage_edit")
    tiny = QwenImageEditPlusPipeline.from_pretrained(folder, transformer=None, vae=None, text_encoder=None)
    token_id = tiny.tokenizer.convert_tokens_to_ids
    pipeline = pipeline_class(
        transformer=make(lambda: QwenImageTransformer2DModel(**size), torch.bfloat16),
        tokenizer=tiny.tokenizer,
        processor=tiny.processor,
        scheduler=tiny.scheduler,
        **qwenimage_encoders(sizes, make, image_token_id=token_id("<|image_pad|>")),
    )
    pipeline.register_to_config(processor=("transformers", "Qwen2VLProcessor"))  # as it is published
    return pipeline


def qwenimage_encoders(sizes: dict, make: Callable, **tokens) -> dict[str, torch.nn.Module]:
    """Return VAE and text encoder of Qwen-Image; `tokens` are numbers of tokens that its config names."""
    text = Qwen2_5_VLConfig(text_config=sizes["qwen_text"], vision_config={"out_hidden_size": 3584}, **tokens)
    return dict(
        vae=make(AutoencoderKLQwenImage, torch.float32),
        text_encoder=make(lambda: Qwen2_5_VLForConditionalGeneration(text), torch.bfloat16),
    )


def sd3(sizes: dict, make: Callable) -> StableDiffusion3Pipeline:
    """Return Stable Diffusion 3.5."""
    size = dict(qk_norm="rms_norm") | sizes["sd3"]
    return StableDiffusion3Pipeline(
        transformer=make(lambda: SD3Transformer2DModel(**size), torch.bfloat16),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make(lambda: vae(sizes, scaling_factor=1.5305, shift_factor=0.0609), torch.float32),
        text_encoder=make(lambda: CLIPTextModelWithProjection(clip_config(sizes["clip_l"])), torch.bfloat16),
        tokenizer=clip_tokenizer(),
        text_encoder_2=make(lambda: CLIPTextModelWithProjection(clip_config(sizes["clip_g"])), torch.bfloat16),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=make(lambda: t5_encoder(sizes), torch.bfloat16),
        tokenizer_3=t5_tokenizer(),
    )


def flux(sizes: dict, make: Callable) -> FluxPipeline:
    """Return FLUX.1."""
    size = dict(guidance_embeds=True) | sizes["flux"]
    return FluxPipeline(
        transformer=make(lambda: FluxTransformer2DModel(**size), torch.bfloat16),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=make(lambda: vae(sizes, scaling_factor=0.3611, shift_factor=0.1159), torch.float32),
        text_encoder=make(lambda: CLIPTextModel(clip_config(sizes["clip_l"])), torch.bfloat16),
        tokenizer=clip_tokenizer(),
        text_encoder_2=make(lambda: t5_encoder(sizes), torch.bfloat16),
        tokenizer_2=t5_tokenizer(),
    )


def flux_kontext(sizes: dict, make: Callable) -> FluxKontextPipeline:
    """Return FLUX.1-Kontext; the tiny one sees a source at 64 x 64 pixels."""
    source_pixels = 64 * 64 if sizes is TINY else SOURCE_PIXELS
    pipeline = flux(sizes | dict(flux=sizes["flux_kontext"]), make)
    return FluxKontextPipeline(**pipeline.components, source_pixels=source_pixels)


def zimage(sizes: dict, make: Callable) -> ZImagePipeline:
    """Return Z-Image, with Z-Image-Turbo's shift."""

    def transformer() -> ZImageTransformer2DModel:
        built = ZImageTransformer2DModel(**sizes["zimage"]).bfloat16()
        for token in (built.x_pad_token, built.cap_pad_token):  # zeros, until they are trained
            torch.nn.init.uniform_(token, -1, 1)
        return built

    return ZImagePipeline(
        transformer=make(transformer, torch.bfloat16),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make(lambda: vae(sizes, scaling_factor=0.3611, shift_factor=0.1159), torch.float32),
        text_encoder=make(lambda: Qwen3Model(Qwen3Config(**sizes["qwen3"])), torch.bfloat16),
        tokenizer=chat_tokenizer(),
    )


def flux2_klein(sizes: dict, make: Callable) -> Flux2KleinPipeline:
    """Return FLUX.2-klein, at its published sizes distilled, at the tiny one a base variant, which takes guidance."""
    size = dict(guidance_embeds=False) | sizes["flux2_klein"]

    def klein_vae() -> AutoencoderKLFlux2:
        built = AutoencoderKLFlux2(**sizes["klein_vae"])
        built.bn.running_mean.copy_(torch.linspace(-1, 1, built.bn.num_features))
        built.bn.running_var.copy_(torch.linspace(0.5, 2, built.bn.num_features))
        return built

    return Flux2KleinPipeline(
        transformer=make(lambda: Flux2Transformer2DModel(**size).bfloat16(), torch.bfloat16),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=make(klein_vae, torch.float32),
        text_encoder=make(lambda: Qwen3ForCausalLM(Qwen3Config(**sizes["klein_text"])), torch.bfloat16),
        tokenizer=chat_tokenizer(),
        is_distilled=sizes is not TINY,
    )


def qwenimage_21(sizes: dict, make: Callable) -> QwenImage21Pipeline:
    """Return Qwen-Image-2.1, with Qwen-Image's shift."""
    text = Qwen3VLConfig(text_config=sizes["qwen3_vl"], vision_config=sizes["qwen3_vision"])
    size = sizes["qwenimage_21"]
    pipeline = QwenImage21Pipeline(
        transformer=make(lambda: QwenImage21Transformer2DModel(**size).bfloat16(), torch.bfloat16),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(SHIPPED / "scheduler"),
        vae=make(lambda: AutoencoderKLQwenImage21(**sizes["qwen21_vae"]), torch.float32),
        text_encoder=make(lambda: Qwen3VLForConditionalGeneration(text), torch.bfloat16),
        processor=role_processor(),
    )
    pipeline.register_to_config(processor=("transformers", "Qwen3VLProcessor"))  # as it is published
    return pipeline


def krea2(sizes: dict, make: Callable) -> Krea2Pipeline:
    """Return Krea 2, at its published size Krea-2-Raw; the tiny one reads all states of its text encoder."""
    text = Qwen3VLConfig(text_config=sizes["krea2_text"], vision_config=sizes["krea2_vision"])
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400)
    return Krea2Pipeline(
        transformer=make(lambda: Krea2Transformer2DModel(**sizes["krea2"]), torch.bfloat16),
        scheduler=scheduler,
        vae=make(lambda: AutoencoderKLQwenImage(**sizes["krea2_vae"]), torch.float32),
        text_encoder=make(lambda: Qwen3VLModel(text), torch.bfloat16),
        tokenizer=Qwen2Tokenizer.from_pretrained(SHIPPED / "tokenizer"),
        text_encoder_select_layers=(0, 1, 2) if sizes is TINY else None,
    )


def wan(sizes: dict, make: Callable) -> WanPipeline:
    """Return Wan 2.1, at its published sizes alone, with the scheduler that it is published with."""
    text = UMT5Config(feed_forward_proj="gated-gelu", **sizes["umt5"])
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(
        transformer=make(lambda: WanTransformer3DModel(**sizes["wan"]), torch.bfloat16),
        scheduler=scheduler,
        vae=make(lambda: AutoencoderKLWan(**sizes["wan_vae"]), torch.float32),
        text_encoder=make(lambda: UMT5EncoderModel(text), torch.bfloat16),
        tokenizer=t5_tokenizer(),
    )


def role_processor() -> TextProcessor:
    """Return a processor with a token for each role, for a message's end and for the system's message.

    20 tokens are to hold a prompt of shapes.
    """
    tokenizer = Qwen2Tokenizer.from_pretrained(SHIPPED / "tokenizer")
    tokens = "system\n", "user\n", "assistant\n", "<|im_end|>\n", "Comprehend and analyze the provided prompt."
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}<|im_end|>\n{% endfor %}"
    )
    return TextProcessor(tokenizer)


def chat_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer whose chat template has no roles: 20 tokens are to hold a prompt of shapes."""
    tokenizer = Qwen2Tokenizer.from_pretrained(SHIPPED / "tokenizer")
    tokenizer.chat_template = "<|im_start|>{{ messages[0].content }}<|im_end|>\n<|im_start|>"
    return tokenizer


def vae(sizes: dict, **normalisation) -> AutoencoderKL:
    """Return a VAE of images; `normalisation` is the scale and the shift of its latents."""
    blocks = len(sizes["vae"]["block_out_channels"])
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **sizes["vae"],
        **normalisation,
    )


def clip_config(size: dict) -> CLIPTextConfig:
    """Return the config of a CLIP that reads the tokens of `clip_tokenizer`."""
    ends = dict(bos_token_id=0, eos_token_id=NUM_CLIP_WORDS - 1, pad_token_id=NUM_CLIP_WORDS - 1)
    return CLIPTextConfig(vocab_size=NUM_CLIP_WORDS, max_position_embeddings=77, **ends, **size)


def clip_model(text_layers: int = 24, vision_layers: int = 32) -> CLIPModel:
    """Return CLIP-ViT-H-14, as of PickScore, on the CPU."""
    heads = dict(num_attention_heads=16)
    text = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=text_layers) | heads
    vision = dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=vision_layers, patch_size=14) | heads
    return CLIPModel(CLIPConfig(text_config=clip_config(text).to_dict(), vision_config=vision, projection_dim=1024))


def t5_encoder(sizes: dict) -> T5EncoderModel:
    """Return a T5 that reads the tokens of `t5_tokenizer`."""
    return T5EncoderModel(T5Config(vocab_size=1000, feed_forward_proj="gated-gelu", **sizes["t5"]))


def clip_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer that reads letters, of which the last of a word are tokens of their own."""
    last_letters = [f"{letter}</w>" for letter in ascii_lowercase]
    tokens = ["<|startoftext|>", *ascii_lowercase, *last_letters, "<|endoftext|>"]
    ids = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(ids, [], model_max_length=77)


def t5_tokenizer(file: Path = PROMPTS) -> T5Tokenizer:
    """Return a tokenizer that reads the words of a file of prompts, and letters."""
    vocabulary = set()
    for line in file.read_text().splitlines():
        vocabulary.update(json.loads(line)["prompt"].split())
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"▁{word}", -5.0) for word in sorted(vocabulary)]
    letters = [chr(code) for code in range(ord(" ") + 1, 127)]
    pieces += [(letter, -10.0) for letter in ("▁", *letters)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def small_random(build: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """Build a module as its class initialises itself, always alike, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def empty(build: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """Build a module without weights."""
    with init_empty_weights():
        return build()


def large_random(device: torch.device) -> Callable:
    """Return a `make` whose weights, small and normal, never pass through host memory."""

    def make(build: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
        module = empty(build, dtype)
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in list(module.named_parameters()):
            value = torch.empty(parameter.shape, device=device, dtype=dtype)
            if parameter.ndim > 1:
                value.normal_(0, 0.02, generator=generator)
            else:
                value.fill_(1.0 if "norm" in name and "bias" not in name else 0.0)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
        return module.to(device).eval()

    return make


# A function here is called as its model.
BUILDERS = {name: globals()[name] for name in registry.names() if name in globals()}


def build(name: str, folder: str, published: bool = False) -> None:
    """Write a pipeline as a diffusers folder, a tiny one or, from the GPU, one of the published size."""
    if published:
        pipeline = BUILDERS[name](PUBLISHED, large_random(torch.device("cuda")))
    else:
        pipeline = BUILDERS[name](TINY, small_random)
    pipeline.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=BUILDERS)
    parser.add_argument("folder")
    parser.add_argument("--published", action="store_true", help="the full size; Qwen-Image takes 57 GB")
    args = command_line.arguments(parser)
    if not args.published and args.model not in TINY:
        parser.error(
            f"the tiny {args.model} is trained, by tools/build_tiny_{args.model}.py; --published makes a full one"
        )
    build(args.model, args.folder, args.published)
