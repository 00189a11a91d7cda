"""Models: what the runs of one share, whatever their algorithm, and what other weights of the same model change."""

from ml_collections import ConfigDict

from config import variants
from flow_grpo.diffusers_patch import registry
from flow_grpo.settings.table import default_config


def large(model: str) -> ConfigDict:
    """Return the config of a published model: 512 px, bf16, PickScore, 32 prompts of 16 images."""
    config = default_config()
    config.model = registry.hub_id(model)
    config.dataset = "dataset/pickscore"
    config.reward_fn = {"pickscore": 1.0}
    config.height = 512
    config.width = 512
    config.text_tokens = 128
    config.vae_batch_size = 8
    config.precision = config.vae_precision = "bf16"
    config.fsdp.activation_checkpointing = 1.0
    config.sample.num_prompts_per_epoch = 32
    config.sample.num_images_per_prompt = 16
    config.sample.batch_size = 8
    config.eval.batch_size = 8
    # Text encoders run once: embeddings of all prompts are kept there for later runs.
    config.cache_dir = "runs/cache"
    return config


def compiled(config: ConfigDict) -> ConfigDict:
    """Compiled blocks; forwards without a log-prob see text padded to a multiple of 16 tokens."""
    config.compile = True
    config.sample.text_multiple = 16
    return config


def qwenimage() -> ConfigDict:
    """The 20 B Qwen-Image."""
    config = large("qwenimage")
    config.lora.rank = 64
    config.lora.alpha = 128
    config.sample.guidance_scale = config.eval.guidance_scale = 4.0
    config.sample.noise_level = 1.2
    config.eval.num_steps = 50
    return config


def qwenimage_2512(config: ConfigDict) -> ConfigDict:
    """Newer weights of Qwen-Image."""
    config.model += "-2512"
    return config


def qwenimage_21() -> ConfigDict:
    """The 7 B Qwen-Image-2.1: guidance is distilled in."""
    config = compiled(large("qwenimage_21"))
    config.eval.num_steps = 40
    return config


def qwenimage_edit(config: ConfigDict) -> ConfigDict:
    """Qwen-Image-Edit, with Qwen-Image's settings.

    A source takes about 200 tokens of text, and as many tokens of the transformer as an image of 1024 x 1024 pixels.
    """
    config.model = registry.hub_id("qwenimage_edit")
    config.dataset = "dataset/editing"
    config.reward_fn = {"editreward": 1.0}
    config.text_tokens = 512
    return config


def qwenimage_edit_first(config: ConfigDict) -> ConfigDict:
    """The first Qwen-Image-Edit, with the settings of the newer ones. A source takes about 1,400 tokens of text."""
    config.model = registry.hub_id("qwenimage_edit_first")
    config.text_tokens = 1536
    # Compiled blocks have a graph for each width.
    config.sample.text_multiple = 64
    return config


def tiny_edit(config: ConfigDict) -> ConfigDict:
    """The tiny editing model and its task, in the place of the tiny Qwen-Image."""
    config.model = registry.tiny_folder("qwenimage_edit")
    config.dataset = "dataset/edits"
    config.reward_fn = {"edits": 1.0}
    config.text_tokens = variants.TASKS[config.model].text_tokens
    return config


def tiny_wan(config: ConfigDict) -> ConfigDict:
    """The tiny Wan and its task, videos of 9 frames, in the place of the tiny Qwen-Image."""
    config.model = registry.tiny_folder("wan")
    config.frames = 9
    config.dataset = "dataset/motions"
    config.reward_fn = {"motions": 1.0}
    config.text_tokens = variants.TASKS[config.model].text_tokens
    return config


def on_proxy(config: ConfigDict) -> ConfigDict:
    """A learned guess of the rule `shapes` in its place, and the rule measured beside it.

    The guess also chooses the policy in best/ (`eval.best_by` stays "avg"), as a learned reward does where nobody knows
    the truth: the rule only shows what that costs.
    """
    config.reward_fn = {"shapes_proxy": 1.0}
    config.eval.rewards = ("shapes",)
    return config


def sd3() -> ConfigDict:
    """SD3.5-medium: 48 prompts of 24 images, as published."""
    config = large("sd3")
    config.fsdp.activation_checkpointing = 0.0
    config.sample.guidance_scale = config.eval.guidance_scale = 4.5
    config.sample.num_prompts_per_epoch = 48
    config.sample.num_images_per_prompt = 24
    config.sample.batch_size = 12
    config.eval.num_steps = 40
    return config


def sd35_large(config: ConfigDict) -> ConfigDict:
    """The 8 B SD3.5-large."""
    config.model = config.model.replace("-medium", "-large")
    config.fsdp.activation_checkpointing = 1.0
    # A run without guidance stays without.
    if config.eval.guidance_scale > 1:
        config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.eval.num_steps = 28
    return config


def flux() -> ConfigDict:
    """FLUX.1-dev: 48 prompts of 24 images and 6 steps, as published."""
    config = large("flux")
    config.lora.rank = 64
    config.lora.alpha = 128
    config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.sample.num_prompts_per_epoch = 48
    config.sample.num_images_per_prompt = 24
    config.sample.batch_size = 12
    config.sample.num_steps = 6
    config.sample.noise_level = 0.9
    config.eval.num_steps = 28
    return config


def flux_schnell(config: ConfigDict) -> ConfigDict:
    """FLUX.1-schnell: it was distilled to 4 steps, and takes no guidance."""
    config.model = config.model.replace("-dev", "-schnell")
    config.sample.num_steps = config.eval.num_steps = 4
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config


def flux_kontext() -> ConfigDict:
    """FLUX.1-Kontext-dev, which edits, with FLUX.1-dev's settings but for the guidance; 8 prompts of 8 images.

    A source takes as many tokens of the transformer as an image of 1024 x 1024 pixels, four times those of an image.
    """
    config = flux()
    config.model = registry.hub_id("flux_kontext")
    config.dataset = "dataset/editing"
    config.reward_fn = {"editreward": 1.0}
    config.compile = True
    config.sample.guidance_scale = config.eval.guidance_scale = 2.5
    config.sample.num_prompts_per_epoch = 8
    config.sample.num_images_per_prompt = 8
    config.sample.batch_size = 4
    return config


def flux2_klein() -> ConfigDict:
    """The 4 B FLUX.2-klein: it was distilled to 4 steps without guidance.

    It sees the padding of its text, of which its pipeline has 512 tokens; with fewer it is faster, and images are other
    ones.
    """
    config = large("flux2_klein")
    config.compile = True
    config.text_tokens = 512
    config.sample.num_steps = config.eval.num_steps = 4
    return config


def flux2_klein_9b(config: ConfigDict) -> ConfigDict:
    """The 9 B FLUX.2-klein."""
    config.model = config.model.replace("-4B", "-9B")
    return config


def krea2() -> ConfigDict:
    """The 13 B Krea-2-Raw, with the guidance and the steps of evaluations that its authors recommend.

    A guidance scale of 3.5 is 4.5 of most other models.
    """
    config = compiled(large("krea2"))
    config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.eval.num_steps = 52
    return config


def wan() -> ConfigDict:
    """The 1.3 B Wan 2.1, text to video: 33 frames of 240 x 416 pixels, which is published, and 16 prompts of 8 videos.

    It sees the padding of its text, of which its pipeline has 512 tokens.
    """
    config = large("wan")
    config.height = 240
    config.width = 416
    config.frames = 33
    config.text_tokens = 512
    config.vae_batch_size = 66
    config.compile = True
    config.sample.num_steps = 20
    config.sample.guidance_scale = config.eval.guidance_scale = 4.5
    config.sample.num_prompts_per_epoch = 16
    config.sample.num_images_per_prompt = 8
    config.eval.num_steps = 50
    config.eval.num_prompts = 64
    # Rewards of images do not see that videos have come to stand still.
    config.eval.rewards = ("frame_difference",)
    return config


def zimage() -> ConfigDict:
    """The 6 B Z-Image. It reads text in multiples of 32 tokens, and a guidance scale of 4 as other models read 5."""
    config = large("zimage")
    config.compile = True
    config.sample.text_multiple = 32
    config.sample.guidance_scale = config.eval.guidance_scale = 4.0
    config.eval.num_steps = 50
    return config


def zimage_turbo(config: ConfigDict) -> ConfigDict:
    """Z-Image-Turbo: it was distilled to 8 steps without guidance, which is a scale of 0."""
    config.model += "-Turbo"
    config.sample.num_steps = config.eval.num_steps = 8
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config
