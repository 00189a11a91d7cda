"""What the runs of a model share, whatever their algorithm, and what other weights of the same model change."""

from config import variants
from flow_grpo.diffusers_patch import registry
from flow_grpo.settings.table import default_config


def large(model):
    """Of a published model: 512 px, bf16, PickScore, 32 prompts of 16 images."""
    config = default_config()
    config.model, config.dataset, config.reward_fn = registry.hub_id(model), "dataset/pickscore", {"pickscore": 1.0}
    config.height, config.width, config.text_tokens, config.vae_batch_size = 512, 512, 128, 8
    config.precision = config.vae_precision = "bf16"
    config.fsdp.activation_checkpointing = 1.0
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt, config.sample.batch_size = 32, 16, 8
    config.eval.batch_size, config.cache_dir = 8, "runs/cache"
    return config


def compiled(config):
    """Compiled blocks; forwards without a log-prob see text padded to a multiple of 16 tokens."""
    config.compile, config.sample.text_multiple = True, 16
    return config


def qwenimage():
    """The 20 B Qwen-Image."""
    config = large("qwenimage")
    config.lora.rank, config.lora.alpha = 64, 128
    config.sample.guidance_scale = config.eval.guidance_scale = 4.0
    config.sample.noise_level = 1.2
    config.eval.num_steps = 50
    return config


def qwenimage_2512(config):
    """Newer weights of Qwen-Image."""
    config.model += "-2512"
    return config


def qwenimage_21():
    """The 7 B Qwen-Image-2.1: guidance is distilled in."""
    config = compiled(large("qwenimage_21"))
    config.eval.num_steps = 40
    return config


def qwenimage_edit(config):
    """Qwen-Image-Edit, with Qwen-Image's settings. A source takes about 200 tokens of text, and of the transformer as
    many as an image of 1024 x 1024 pixels."""
    config.model, config.dataset = registry.hub_id("qwenimage_edit"), "dataset/editing"
    config.reward_fn, config.text_tokens = {"editreward": 1.0}, 512
    return config


def tiny_edit(config):
    """The tiny editing model and its task, in the place of the tiny Qwen-Image."""
    config.model, config.dataset = registry.tiny_folder("qwenimage_edit"), "dataset/edits"
    config.reward_fn, config.text_tokens = {"edits": 1.0}, variants.TASKS[config.model].text_tokens
    return config


def sd3():
    """SD3.5-medium: 48 prompts of 24 images, as published."""
    config = large("sd3")
    config.fsdp.activation_checkpointing = 0.0
    config.sample.guidance_scale = config.eval.guidance_scale = 4.5
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt, config.sample.batch_size = 48, 24, 12
    config.eval.num_steps = 40
    return config


def sd35_large(config):
    """The 8 B SD3.5-large."""
    config.model = config.model.replace("-medium", "-large")
    config.fsdp.activation_checkpointing = 1.0
    if config.eval.guidance_scale > 1:
        config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.eval.num_steps = 28
    return config


def flux():
    """FLUX.1-dev: 48 prompts of 24 images and 6 steps, as published."""
    config = large("flux")
    config.lora.rank, config.lora.alpha = 64, 128
    config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt, config.sample.batch_size = 48, 24, 12
    config.sample.num_steps, config.sample.noise_level = 6, 0.9
    config.eval.num_steps = 28
    return config


def flux_schnell(config):
    """FLUX.1-schnell: it was distilled to 4 steps, and takes no guidance."""
    config.model = config.model.replace("-dev", "-schnell")
    config.sample.num_steps = config.eval.num_steps = 4
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config


def flux2_klein():
    """The 4 B FLUX.2-klein: it was distilled to 4 steps without guidance. It sees the padding of its text, of which its
    pipeline has 512 tokens; fewer are faster and other images."""
    config = large("flux2_klein")
    config.compile, config.text_tokens = True, 512
    config.sample.num_steps = config.eval.num_steps = 4
    return config


def flux2_klein_9b(config):
    """The 9 B FLUX.2-klein."""
    config.model = config.model.replace("-4B", "-9B")
    return config


def zimage():
    """The 6 B Z-Image. It reads text in multiples of 32 tokens, and a guidance scale of 4 as other models read 5."""
    config = large("zimage")
    config.compile, config.sample.text_multiple = True, 32
    config.sample.guidance_scale = config.eval.guidance_scale = 4.0
    config.eval.num_steps = 50
    return config


def zimage_turbo(config):
    """Z-Image-Turbo: it was distilled to 8 steps without guidance, which is a scale of 0."""
    config.model += "-Turbo"
    config.sample.num_steps = config.eval.num_steps = 8
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config
