"""What the settings of published code bases are called here, which the command line, config files and a page say.

`python -m flow_grpo.settings.published` prints the tables of docs/reference/coming_from.md.
"""

import sys
from typing import NamedTuple

from flow_grpo.settings import older
from flow_grpo.settings.table import BY_KEY, SECTIONS


class Row(NamedTuple):
    """One setting of another code base."""

    theirs: str  # dotted as there, without dashes
    ours: tuple[str, ...]  # settings that have its part here; () = there is none
    note: str = ""  # what differs; why there is none


class Source(NamedTuple):
    """A code base, and what its settings are here."""

    name: str
    flag: str  # what a setting begins with where it is typed
    rows: tuple[Row, ...]


SIDES = ("lt", "gt", "low", "high")
FLOW_GRPO = Source(
    "Flow-GRPO and TempFlow-GRPO",
    "",
    (
        Row("pretrained.model", ("model",)),
        Row("pretrained.revision", (), "model may be a folder that holds that revision"),
        Row("resolution", ("height", "width"), "512 in the published configs of both"),
        Row("frames", (), "images only"),
        Row("mixed_precision", ("precision",), '"bf16" in our published configs; the first ratio is exactly 1 in any'),
        Row("allow_tf32", (), "matrix products in float32 stay exact; precision bf16 is the fast one"),
        Row("use_lora", ("lora.rank",), "0 trains the full weights"),
        Row("train.lora_path", ("lora.path",)),
        Row("activation_checkpointing", ("fsdp.activation_checkpointing",), "1 is all"),
        Row("fsdp_optimizer_offload", ("fsdp.offload",), '"optimizer"'),
        Row("logdir", ("output_dir",)),
        Row("save_dir", ("output_dir", "run_name")),
        Row("num_checkpoint_limit", ("keep_checkpoints",)),
        Row("debug", (), "the variant NAME,smoke is a run of seconds"),
        Row("num_epochs", ("num_epochs", "max_hours"), "100000 there, stopped by hand; 100 here"),
        Row("resume_from", ("resume_from",), 'a folder, or "latest"; with optimizer and averages, bit for bit'),
        Row("prompt_fn", ("dataset",), "files of the folder are read as they are, by their names"),
        Row("prompt_fn_kwargs", ("dataset",)),
        Row("reward_fn", ("reward_fn",), "--config.reward_fn.NAME=1.0; ocr reads by rapidocr instead of PaddleOCR"),
        Row("per_prompt_stat_tracking", ("sample.baseline",), 'False is "all"; True is "group"'),
        Row("sample.eval_num_steps", ("eval.num_steps",)),
        Row("sample.eval_guidance_scale", ("eval.guidance_scale",), "sample.guidance_scale does not set it"),
        Row("sample.test_batch_size", ("eval.batch_size",)),
        Row("sample.train_batch_size", ("sample.batch_size",), "rollout and update have the same forwards"),
        Row("train.batch_size", ("sample.batch_size",), "rollout and update have the same forwards"),
        Row("sample.mini_num_image_per_prompt", ("sample.batch_size",)),
        Row(
            "sample.num_batches_per_epoch",
            ("sample.num_prompts_per_epoch",),
            "of all GPUs together; the rest is arithmetic, so the experiment does not change with the GPUs",
        ),
        Row("sample.num_image_per_prompt", ("sample.num_images_per_prompt",), "in train_*_pr.py: trunks"),
        Row("sample.sample_time_per_prompt", ("sample.num_images_per_prompt",)),
        Row("exploration_k", ("sample.num_branches",), "6, in TempFlow-GRPO's code"),
        Row("sample.train_num_steps", ("sample.sde_window_size",)),
        Row("sample.global_std", ("sample.global_std",), "True there, False here; TempFlow-GRPO has False"),
        Row("sample.same_latent", ("sample.same_latent",), "ours also shares the steps before the window"),
        Row(
            "sample.sde_window_range",
            ("sample.sde_window_range",),
            "Flow-GRPO's Qwen-Image script draws one window for the whole run, ours one for every block of groups",
        ),
        Row(
            "sample.sde_type",
            ("sample.sde_type",),
            "our cps has their log-prob; cps_gaussian is the step's true density",
        ),
        Row("sample.kl_reward", ("train.beta",), "the KL is part of the loss, not of the reward"),
        Row("train.gradient_accumulation_steps", ("train.updates_per_epoch",), "2 in both; theirs follows from it"),
        Row("train.num_inner_epochs", ("train.inner_epochs",), "1 in both"),
        Row("train.adam_weight_decay", ("train.weight_decay",)),
        Row("train.adam_beta1", ("train.adam_betas",)),
        Row("train.adam_beta2", ("train.adam_betas",)),
        Row("train.adam_epsilon", (), "it is 1e-8, as there"),
        Row("train.use_8bit_adam", (), "an adapter's state is small; fsdp.offload puts it into host memory"),
        Row("train.cfg", ("sample.guidance_scale",), "1 is no guidance; rollout and update always have the same"),
        Row("train.clip_range", ("train.clip_range",), "1e-4 in both, of a mean over elements"),
        *(Row(f"train.clip_range_{side}", ("train.clip_range",), "one for both sides") for side in SIDES),
        Row(
            "train.timestep_fraction",
            ("train.timestep_fraction",),
            "int(num_steps * this) steps in both, but never the last here; with a window it is unused there, 1 here",
        ),
        Row("train.beta", ("train.beta",), "of a KL that is 1 / abs(dt) times Flow-GRPO's: divide its beta by 4.39"),
        Row("sample.noise_level", ("sample.noise_level",), "TempFlow-GRPO has it in the code of its step"),
        Row("train.timestep_shift", (), "the schedule is that of the model's scheduler"),
        Row("train.ema", ("train.ema_decay", "train.ema_interval"), "always on; 0 and 1 make the average the weights"),
        Row("train.sft", (), "no loss on given images; train_*_dpo.py learns from pairs of them"),
        Row("train.sft_batch_size", (), "no loss on given images; train_*_dpo.py learns from pairs of them"),
        Row("diffusion_loss", (), "no loss on given images; train_*_dpo.py learns from pairs of them"),
        Row("train.algorithm", (), "its GARDO masks the KL of rewards that disagree; other names are config.algorithm"),
        Row("reset_freq", ("train.reference_interval",), "GARDO's; in updates"),
        Row("kl_thres", (), "GARDO's; train.reference_interval moves the reference at fixed updates"),
        Row("main_reward", ("eval.best_by",), "GARDO's; it chooses the best policy, no mask"),
    ),
)
DIFFUSION_NFT = Source(
    "DiffusionNFT",
    "",
    (
        Row("base_model", ("model",)),
        Row("beta", ("train.nft_beta",), "1.0 in both; 0.1 there for OCR and several rewards"),
        Row("decay_type", ("train.old_decay_schedule",), "1 in both; 2 there for OCR"),
        Row("algorithm.old_policy_decay_schedule", ("train.old_decay_schedule",), "verl's; copy is 0"),
        Row("algorithm.old_policy_decay", ("train.old_decay_schedule",), "verl's; a number below 1 is a fixed decay"),
        Row("algorithm.old_policy_update_interval", (), "verl's; the sampling policy moves after every epoch"),
        Row(
            "train.beta",
            ("train.beta",),
            "1e-4 in the published sizes; 0.5 against the guided base in shapes_qwenimage_nft, since with 1e-4 every "
            "long run of it fell",
        ),
        Row("train.adv_mode", (), 'all advantages are used, which is "all" there'),
        Row("sample.guidance_scale", ("sample.guidance_scale",), "1.0 in both"),
        Row("sample.solver", ("sample.flash_solver", "sample.flash_ratio"), '"dpm2" there; Euler steps by default'),
        Row("sample.deterministic", (), "the rollout of train_*_nft.py never has noise"),
    ),
)
DANCE_GRPO = Source(
    "DanceGRPO and MixGRPO",
    "--",
    (
        Row("pretrained_model_name_or_path", ("model",)),
        Row("data_json_path", ("dataset",), "embeddings are made by the run itself, and kept in cache_dir"),
        Row("h", ("height",), "720 there, 512 here"),
        Row("w", ("width",), "720 there, 512 here"),
        Row("eta", ("sample.noise_level", "sample.sde_type"), '0.3 there with "dance", 0.7 here with "sde"'),
        Row("flow_grpo_sampling", ("sample.sde_type",), 'without it "dance"; "sde" is the default here'),
        Row("shift", (), "the schedule is that of the model's scheduler"),
        Row("cfg", ("sample.guidance_scale",)),
        Row("sampling_steps", ("sample.num_steps",), "16 there, 10 here, 6 in pickscore_flux"),
        Row("num_generations", ("sample.num_images_per_prompt",), "12 there, 16 to 24 in the published configs"),
        Row("train_batch_size", ("sample.batch_size", "sample.num_prompts_per_epoch")),
        Row("init_same_noise", ("sample.same_latent",), "ours also shares the steps before the window"),
        Row(
            "timestep_fraction",
            ("train.timestep_fraction", "sample.sde_window_size"),
            "a random part of the steps there, the first part here; a random one is a window",
        ),
        Row("ignore_last", (), "the last step is never trained"),
        Row("sampler_seed", ("seed",), "one seed names every draw"),
        Row("learning_rate", ("train.learning_rate",), "1e-5 there, of full weights; 3e-4 here, of an adapter"),
        Row("lr_warmup_steps", ("train.warmup_updates",)),
        Row("gradient_accumulation_steps", ("train.updates_per_epoch",)),
        Row("max_train_steps", ("num_epochs",)),
        Row("checkpointing_steps", ("save_freq",), "in epochs"),
        Row("gradient_checkpointing", ("fsdp.activation_checkpointing",), "1 is all"),
        Row("clip_range", ("train.clip_range",), "1e-4 in both"),
        Row("adv_clip_max", ("train.adv_clip_max",), "5 in both"),
        Row("kl_coeff", ("train.beta",)),
        Row("reward_model", ("reward_fn",), "--config.reward_fn.NAME=1.0 for each"),
        Row("use_hpsv2", ("reward_fn",), "--config.reward_fn.hpsv2=1.0"),
        Row("multi_reward_mix", ("train.reward_aggregation",), 'advantage_aggr is "gdpo", reward_aggr is "sum"'),
        Row("training_strategy", ("sample.sde_window_size",), '"part" is a window, "all" is 0'),
        Row("group_size", ("sample.sde_window_size",), "4 there and in the variant mixgrpo"),
        Row("sample_strategy", ("sample.sde_window_interval",), '"random" is 0'),
        Row("iters_per_group", ("sample.sde_window_interval",), "25 there and in the variant mixgrpo"),
        Row("max_iters_per_group", (), "windows move at random or at a fixed interval"),
        Row("prog_overlap_step", (), "a window moves by one step, as there"),
        Row("dpm_algorithm_type", ("sample.flash_solver",)),
        Row("dpm_post_compress_ratio", ("sample.flash_ratio",), "0.4 there and in the variant flash"),
    ),
)
TRL = Source(
    "TRL",
    "",
    (
        Row("reward_funcs", ("reward_fn",), "a file for each reward"),
        Row("train_dataset", ("dataset",), "a folder of text files"),
        Row("num_generations", ("sample.num_images_per_prompt",)),
        Row("num_iterations", ("train.inner_epochs",), "1 in both"),
        Row("steps_per_generation", ("train.updates_per_epoch",)),
        Row("epsilon", ("train.clip_range",), "0.2 there, 1e-4 here: ratios of means over elements are nearer to 1"),
        Row("beta", ("train.beta",), "0 in both; here a KL of Gaussians' means, not of tokens"),
        Row("scale_rewards", ("sample.global_std",), '"group" is False, "batch" is True'),
        Row("per_device_train_batch_size", ("sample.batch_size",)),
        Row("gradient_checkpointing", ("fsdp.activation_checkpointing",), "1 is all"),
        Row("bf16", ("precision",), '"bf16"'),
        Row("lr_scheduler_type", ("train.learning_rate_schedule",)),
        Row("warmup_steps", ("train.warmup_updates",)),
        Row("save_steps", ("save_freq",), "in epochs"),
        Row("save_total_limit", ("keep_checkpoints",)),
        Row("resume_from_checkpoint", ("resume_from",), '"latest"'),
        Row("report_to", ("logger",), '"wandb" (offline by default), "tensorboard", "none"'),
        Row("use_vllm", (), "the sampler is the trainer's own transformer"),
    ),
)
SOURCES = (FLOW_GRPO, DIFFUSION_NFT, DANCE_GRPO, TRL)
RECIPES = {  # run of a published config file -> the same run here
    "geneval_sd3": "scripts/reproduce/flow_grpo_geneval_sd3.sh",
    "general_ocr_sd3": "scripts/reproduce/flow_grpo_ocr_sd3.sh",
    "pickscore_qwenimage_8gpu": "scripts/reproduce/flow_grpo_pickscore_qwenimage.sh",
    "geneval_sd3_pr": "scripts/reproduce/tempflow_grpo_geneval_sd3.sh",
    "sd3_geneval": "scripts/reproduce/diffusion_nft_geneval_sd3.sh",
    "sd3_pickscore": "config/nft.py:pickscore_sd3_nft",
    "pickscore_sd3_fast_nocfg": "config/grpo.py:pickscore_sd3_fast",
    "flux_pr": "config/grpo.py:pickscore_flux_pr, of 512 px and 6 steps",
}


def answer(key: str) -> str | None:
    """What a setting of older configs or of published code is called here; None for a setting and for other names."""
    parts: dict[str, list[str]] = {}
    for source in SOURCES:
        for row in source.rows:
            if row.theirs == key:
                parts.setdefault(_part_of(row), []).append(source.name)
    if key in BY_KEY or not parts:
        return older.answer(key)
    return f"config has no {key}; " + "; ".join(f"that of {' and '.join(of)} {part}" for part, of in parts.items())


def _part_of(row: Row) -> str:
    if not row.ours:
        return f"has no counterpart here: {row.note}"
    return "is " + " and ".join(f"config.{key}" for key in row.ours) + " here" + (f" ({row.note})" if row.note else "")


def recipe(name: str) -> str | None:
    """Where a run of a published config file is found, as a sentence; None for another name."""
    return f"the published {name} is {RECIPES[name]}" if name in RECIPES else None


def names_ending_in(name: str) -> list[str]:
    """Dotted names that `answer` knows and whose last part, or whose section, is `name`."""
    known = [*older.GONE, *(row.theirs for source in SOURCES for row in source.rows if row.theirs not in BY_KEY)]
    sections = {key.partition(".")[0] for key in known if "." in key} - set(SECTIONS)
    return [key for key in known if name == key.rpartition(".")[2] or (key.startswith(f"{name}.") and name in sections)]


def tables() -> str:
    """All rows as markdown, a table for each source."""
    return "\n\n".join(f"## Settings of {source.name}\n\n{_table(source)}" for source in SOURCES)


def _table(source: Source) -> str:
    rows = ["| theirs | ours | |", "|---|---|---|"]
    for row in source.rows:
        ours = ", ".join(f"`{key}`" for key in row.ours) or "-"
        rows.append(f"| `{source.flag}{row.theirs}` | {ours} | {row.note} |".replace("  |", " |"))
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")
