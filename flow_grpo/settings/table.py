"""Every setting: one entry with its default, unit, meaning, limits, and which scripts read it.

The defaults are a run of the shipped tiny Qwen-Image on the shapes task, on any machine. The experiment is stated here
(prompts, images, updates per epoch); how it divides over the GPUs is arithmetic (algorithms/batch_plan.py). From this
table follow the default config, what a value may be, what a script refuses because it would ignore it, what a resumed
run may change, and docs/reference/settings.md.
"""

from typing import Any

from ml_collections import ConfigDict

from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, OBJECTIVES
from flow_grpo.settings.setting import ALL, DISTILL, DPO, GRPO, NFT, PR, Setting

SCRIPTS = {GRPO: "train_*.py"} | {name: f"train_*_{name}.py" for name in (PR, NFT, DPO, DISTILL)}
ONLINE = (GRPO, PR, NFT)  # with advantages of images just sampled
RATIO = (GRPO, PR)  # with ratios of probabilities in the loss
NOISY = (GRPO, PR, DISTILL)  # with noise in the rollout
MAX_BATCH_SIZE = 4096  # rows of a forward
TINY = 1e-6  # the least of a number above 0
SECTIONS = {
    "": "The run",
    "reward": "How rewards are scored; what `reward.args` says of one reward goes before what is said here",
    "lora": "The adapter that is trained",
    "fsdp": "How weights lie over the GPUs",
    "sample": "The rollout",
    "train": "The update",
    "preferences": "Pairs of a better and a worse image",
    "eval": "The evaluation: deterministic, with averaged weights",
    "health": "Alarms, each of which compares the run with itself; 0 = no limit; see [health](../design/health.md)",
}


def _each(losses: dict) -> str:
    return "; ".join(f"{name} = {loss.card}" for name, loss in losses.items())


# fmt: off
SETTINGS = (
    Setting("algorithm", GRPO, "Script that the config is for; another one refuses it.", choices=ALL,
            resumable=True),  # a checkpoint without it may be resumed
    Setting("name", "base", "Name of this config, set by the file that made it.", resumable=True),
    Setting("method", "",
            'What a model card calls the algorithm; "" = by the script and its loss, or as functions of your own say.',
            resumable=True),
    Setting("run_name", "", 'Run folder under output_dir; "" = name.', resumable=True),
    Setting("output_dir", "runs", "Folder in which run folders are made.", resumable=True),
    Setting("logger", "wandb", 'Tracker that also shows the curves. "none" writes report.html at every evaluation.',
            choices=("wandb", "tensorboard", "none"), resumable=True),
    Setting("alert", "", 'Who is told of alarms, the end and a crash: "wandb" = its own alerts; else a command that '
            'gets a sentence as its last argument, such as "ntfy publish my_runs"; "" = nobody.', resumable=True),
    Setting("resume_from", "",
            '"" starts a new run; "latest" resumes the newest checkpoint of this run; else a checkpoint\'s folder: '
            "another run's begins a branch.",
            resumable=True),
    Setting("accept_changes", False,
            "Resume even if files of the data set, model, lora.path or pairs have changed.", resumable=True),
    Setting("dry_run", 0, "Say what the run would be on this number of GPUs, without loading its weights; 0 = train. "
            "--dry_run stands for the number that torchrun starts, --dry_run=8 for eight.", min=0, max=10**5,
            resumable=True),
    Setting("custom", {}, "Settings of your own, which a config file of your own adds and no check looks at."),
    Setting("seed", 42, "Seed of every random draw of the run.", min=-(2**63), max=2**63 - 1),
    Setting("num_epochs", 100, "Number of epochs, each a rollout and an update.", min=1, resumable=True),
    Setting("max_hours", 0.0, "Stop after the first epoch that ends more than this many hours after the run began; "
            "0 = no limit.", unit="h", min=0, resumable=True),
    Setting("save_freq", 10, "Save a checkpoint every N epochs, and after the last; 0 = only after the last.",
            unit="epochs", min=0, resumable=True),
    Setting("keep_checkpoints", 2, "Number of newest checkpoints that are kept.", min=1, resumable=True),
    Setting("eval_freq", 10, "Evaluate every N epochs, and before the first and after the last; 0 = never.",
            unit="epochs", min=0, resumable=True),
    Setting("model", "flow_grpo/assets/tiny_qwenimage", "Diffusers folder, or id on the hub."),
    Setting("model_class", "", 'Model class of your own, as MODULE:CLASS, importable; "" = by the pipeline of model. '
            "A run stores MODULE:CLASS@DIGEST of its source."),
    Setting("dataset", "dataset/shapes",
            "Folder with {train,validation,test}_metadata.jsonl or .txt; validation is optional."),
    Setting("reward_fn", {"shapes": 1.0}, "Weight of each reward, a file of flow_grpo/rewards; 0 = not used."),
    Setting("height", 64, "Height of an image; a multiple of 16.", unit="pixels", min=16, max=8192),
    Setting("width", 64, "Width of an image; a multiple of 16.", unit="pixels", min=16, max=8192),
    Setting("text_tokens", 20, "Width to which every prompt embedding is padded, in rollout and update alike.",
            unit="tokens", min=1, max=2048),
    Setting("cache_dir", "", "Folder in which runs share encoded prompts, so that no text encoder stays on the GPU; "
            '"" = none.', resumable=True),
    Setting("precision", "fp32", "Precision of the transformer; trained weights are stored in fp32.",
            choices=("fp32", "bf16")),
    Setting("base_precision", "",
            'Precision of the frozen layers beneath an adapter, in rollout and update alike; "" = precision.',
            choices=("", "fp8_weights", "nf4"), when=(("lora.rank",), ("fsdp.mode", "replicate"))),
    Setting("vae_precision", "fp32",
            "Precision of VAE decodes. With bf16, pixels differ by less than 0.3 of 255 on average.",
            choices=("fp32", "bf16"), resumable=True),
    Setting("attention", "",
            'Attention of Qwen-Image on a GPU; "" = torch\'s; "flash_4" = FlashAttention-4, faster under masks, with '
            "repeatable gradients.",
            choices=("", "flash_4"), resumable=True, when=(("precision", "bf16"), ("lora.rank",))),
    Setting("compile", False, "Compile transformer blocks and the decoder; the first start is slow.", resumable=True),
    Setting("vae_batch_size", 32, "Images per VAE decode.", unit="images", min=1, max=10**5, resumable=True),

    Setting("reward.args", {}, "Overrides by reward: NAME -> any setting of this section, options of its load(), "
            "and url, the server that scores it, such as http://127.0.0.1:18087, or a list of such."),
    Setting("reward.device", "", 'Device of a reward\'s model, such as "cuda:7"; "" = the rank\'s own.',
            resumable=True),
    Setting("reward.batch_size", 32, "Images per request.", unit="images", min=1, max=10**5),
    Setting("reward.max_masked_share", 0.0,
            "0 = a failed reward ends the run. Above 0, its image is left out of its group; the run ends if that is "
            "more than this fraction of the images or scouts of an epoch, an evaluation or a file.", min=0, max=1),
    Setting("reward.token_file", "",
            "File whose first line is the token that a server asks for; \"\" = the environment's REWARD_TOKEN.",
            resumable=True),
    Setting("reward.timeout_s", 120.0, "Time limit of one request. A call in a thread may take 300 s more.",
            unit="s", min=0.1, resumable=True),

    Setting("lora.rank", 32, "Rank of the adapter; 0 trains the full weights.", min=0, max=4096),
    Setting("lora.alpha", 64, "Scale of the adapter, times its rank.", min=1),
    Setting("lora.path", "", 'LoRA of diffusers or peft to start from, a folder or a file; "" = a fresh adapter.',
            when=(("lora.rank",),)),
    Setting("lora.targets", (), "Ends of the names of the linear layers that the adapter adapts, such as ('attn.to_q', "
            "'attn.to_v'); () = the model's own list.", when=(("lora.rank",),)),

    Setting("fsdp.mode", "replicate", "Layout of the weights. shard = over all GPUs; hybrid = over those of a machine.",
            choices=("replicate", "shard", "hybrid"), resumable=True),
    Setting("fsdp.activation_checkpointing", 0.0,
            "Fraction of activations that the backward recomputes: 0 = none, 1 = all but the blocks' inputs, a third "
            "more compute. Between the two the compiler chooses what costs least, which takes compile.",
            min=0, max=1, resumable=True),
    Setting("fsdp.offload", "",
            'What stays in host memory: "" = nothing; optimizer = its state while images are sampled; weights = also '
            "sharded weights, one GPU's too, which are fetched block by block.",
            choices=("", "optimizer", "weights"), resumable=True),

    Setting("sample.num_steps", 10, "Denoising steps of a rollout.", min=2, max=1000),
    Setting("sample.guidance_scale", 1.0, "Guidance scale; above 1 costs a second forward per step.", min=0, max=1000),
    Setting("sample.noise_level", 0.7, "Noise level eta of the SDE step; at most 1 for cps and cps_gaussian.",
            min=TINY, max=10, used_by=NOISY),
    Setting("sample.sde_type", "sde", "Formula of a noisy step; cps_gaussian is cps with its true log-density.",
            choices=("sde", "dance", "cps", "cps_gaussian"), used_by=NOISY),
    Setting("sample.num_prompts_per_epoch", 16, "Prompts per epoch, on all GPUs together.", min=1, max=10**6),
    Setting("sample.num_images_per_prompt", 8, "Group size; in train_*_pr.py, trunks per prompt.", min=1, max=10**4),
    Setting("sample.batch_size", 16, "Rows per forward and GPU wherever a log-prob is computed: rollout and update.",
            unit="rows", min=1, max=MAX_BATCH_SIZE),
    Setting("sample.global_std", False, "Divide advantages by the std of the whole epoch instead of the group's.",
            used_by=ONLINE, read_in="advantages"),
    Setting("sample.baseline", "group",
            "What rewards are compared within: group = images of a prompt, or branches of a trunk's step; prompt = "
            "branches of all its trunks at a step, in train_*_pr.py; all = the whole epoch.",
            choices=("group", "prompt", "all"),
            used_by=ONLINE),
    Setting("sample.scouts_per_image", 0,
            "Cheap images that are drawn for each trained one: the best and the worst of a prompt are drawn again from "
            "their noise, by the update's weights, and trained; 0 = none.", unit="images", min=0, max=1000,
            used_by=(GRPO, NFT), read_in="rollout"),
    Setting("sample.scout_ratio", 0.4, "Fraction of the forwards of a scout after its noise; 0 = all of them.", min=0,
            max=1, used_by=(GRPO, NFT), read_in="rollout", when=(("sample.scouts_per_image",),)),
    Setting("sample.sde_window_size", 2, "Steps that are sampled with noise and trained; 0 = all but the last.",
            unit="steps", min=0, used_by=(GRPO, NFT, DISTILL)),  # train_*_nft.py asks for 0
    Setting("sample.sde_window_range", (0, 5),
            "Steps [first, last) in which the window lies; without a window the default, or all steps but the last.",
            used_by=(GRPO, DISTILL)),
    Setting("sample.sde_window_interval", 0, "0 = the window is at a random place in every batch; N = it moves on by "
            "one step every N updates, and from the end of the range back to its start.", unit="updates", min=0,
            used_by=(GRPO, DISTILL), read_in="rollout", when=(("sample.sde_window_size",),)),
    Setting("sample.same_latent", False, "Start a group from one noise: it is one image until the window.",
            used_by=(GRPO, DISTILL)),
    Setting("sample.num_branches", 1, "Noisy branches per step of a trunk, at least 2.", min=1, max=4096,
            used_by=(PR,)),
    Setting("sample.completion_batch_size", 0,
            "Rows per forward without a log-prob, at most the images of an epoch; 0 = sample.batch_size.",
            unit="rows", min=0, max=4096, used_by=(*ONLINE, DISTILL), resumable=True),
    Setting("sample.flash_ratio", 0.0, "After the noise, compute only this fraction of the forwards; 0 = all of them.",
            min=0, max=1),
    Setting("sample.flash_solver", "dpm",
            "Solver of flash_ratio: dpm = DPM-Solver++ on a coarser grid; extrapolate = all steps, some without a "
            "forward.", choices=("dpm", "extrapolate"), when=(("sample.flash_ratio",),)),
    Setting("sample.text_multiple", 0,
            "Pad text to a multiple of this where no log-prob is computed; 0 = text_tokens.",
            unit="tokens", min=0, max=2048, resumable=True),
    Setting("sample.rollout_weights", "exact",
            "Weights of forwards without a log-prob: exact = the update's; merged = a copy with the adapter added, "
            "faster; merged_fp8 = a copy in fp8 whose products are fp8, other images; fp8 = no copy, but fp8 products "
            "of base_precision fp8_weights.", choices=("exact", "merged", "merged_fp8", "fp8"),
            when=(("lora.rank",), ("fsdp.mode", "replicate"))),

    Setting("train.learning_rate", 3e-4, "Highest learning rate of the run.", min=0, max=1000),
    Setting("train.learning_rate_schedule", "constant", "linear and cosine fall to 0 at the end of num_epochs.",
            choices=("constant", "linear", "cosine")),
    Setting("train.warmup_updates", 0, "Updates over which the learning rate rises from 0.", unit="updates", min=0),
    Setting("train.adam_betas", (0.9, 0.999), "Betas of AdamW.", min=0, max=0.9999999),
    Setting("train.weight_decay", 1e-4, "Weight decay of AdamW.", min=0, max=1000),
    Setting("train.max_grad_norm", 1.0, "Norm to which longer gradients are scaled down.", min=TINY),
    Setting("train.updates_per_epoch", 2, "Optimizer steps per epoch and inner epoch.", unit="updates", min=1,
            max=10**6),
    Setting("train.inner_epochs", 1, "Passes over one rollout, reshuffled.", min=1, max=1000),
    Setting("train.objective", "clip", f"Loss of a noisy step: {_each(OBJECTIVES)}.", choices=OBJECTIVES,
            used_by=RATIO, read_in="add_gradients"),
    Setting("train.forward_objective", "nft",
            f"Loss of finished images that are noised afresh: {_each(FORWARD_OBJECTIVES)}.",
            choices=FORWARD_OBJECTIVES, used_by=(NFT,), read_in="add_gradients"),
    Setting("train.old_log_prob", "rollout",
            "Old log-prob of the ratio: the rollout's, or recomputed by one extra forward per row.",
            choices=("rollout", "recompute"), used_by=RATIO),
    Setting("train.clip_range", 1e-4, "Clip range of the ratio. Log-probs are means over elements, so ratios stay "
            "near 1.", min=0, used_by=ONLINE, read_in="add_gradients"),
    Setting("train.kl_limit", 1e-5, "KL of a step from the rollout's beyond which a row stops pushing further.",
            unit="nat per latent element", min=0, used_by=RATIO, read_in="add_gradients"),
    Setting("train.parity_limit", 1.0,
            "End the run if log-ratios of an epoch's first update, which should be 0, are larger than this, on average "
            "larger than a tenth of it, or clipped in more than a hundredth of it of all rows; 0 = no limit, as with "
            "clip_range 0.", unit="clip ranges", min=0, used_by=RATIO, resumable=True),
    Setting("train.adv_clip_max", 5.0, "Largest size of an advantage.", min=TINY, used_by=ONLINE,
            read_in="add_gradients"),
    Setting("train.reward_aggregation", "sum", "How several rewards become one advantage: sum = of weighted rewards; "
            "gdpo = of their advantages.", choices=("sum", "gdpo"), used_by=ONLINE, read_in="advantages"),
    Setting("train.diversity_weight", 0.0,
            "Weight, beside the rewards, of an image's distance to the mean of its group's images (its part of "
            "health/diversity, 0.8 of the tiny base); 0 = none.", min=0, used_by=ONLINE, read_in="advantages"),
    Setting("train.filter_groups", False,
            "Leave groups whose rewards are all alike out of the mean that is the loss.", used_by=ONLINE,
            read_in="advantages", when=(("sample.baseline", "group", "prompt"), ("train.diversity_weight", 0.0))),
    Setting("train.beta", 0.0,
            "Weight of the KL to the reference policy; in train_*_nft.py, of the squared distance to it.",
            min=0, used_by=ONLINE, read_in="add_gradients"),
    Setting("train.reference_interval", 0,
            "Let the policy become its own reference every N updates; 0 = never.", unit="updates", min=0,
            used_by=(*ONLINE, DPO), when=(("train.beta",),)),
    Setting("train.reference_guidance_scale", 0.0,
            "Guidance scale of the first reference: above the policy's, the policy learns it; 0 = the policy's.",
            min=0, max=1000, used_by=ONLINE, when=(("train.beta",),)),
    Setting("train.guidance_scale", 0.0,
            "Guidance scale of the policy in the update, the old and the trained one; 0 = sample's.",
            min=0, max=1000, used_by=ONLINE, when=(("train.old_log_prob", "recompute"),)),
    Setting("train.shared_noise", False, "Noise the images of a group alike, to the same levels.", used_by=(NFT,)),
    Setting("train.flow_matching_weight", 0.0, "Weight of flow matching on the run's own images, good and bad alike.",
            min=0, used_by=(NFT,), read_in="add_gradients"),
    Setting("train.dgpo_beta", 100.0, "How sharply a group's difference of velocity errors decides; published 10 to "
            "100 over a fixed reference, 2000 and more over the old policy.", min=0, used_by=(NFT,),
            read_in="add_gradients"),
    Setting("train.proximal_weight", 30.0, "Weight of the log-ratio beside the advantage; 0 = none. Published as "
            "advantages of 0.1 (reward - mean): 10 / the std that advantages are divided by.", min=0, used_by=(NFT,),
            read_in="add_gradients"),
    Setting("train.nft_beta", 1.0, "Share of the trained policy in the mixture that is compared with x_0.", min=TINY,
            used_by=(NFT,), read_in="add_gradients"),
    Setting("train.old_decay_schedule", 1.0,
            "What the sampling policy keeps of itself: 1 = up to a half, 2 = up to 0.999, see losses.old_policy_decay; "
            "a number below 1 = always this share.", min=0, max=2, used_by=(NFT,)),
    Setting("train.dpo_beta", 1000.0, "How sharply a pair's difference of velocity errors decides.", min=0,
            used_by=(DPO,), read_in="add_gradients"),
    Setting("train.teachers", (), "Folders of the LoRA adapters that are learned from, such as best/ of other runs.",
            used_by=(DISTILL,), when=(("lora.rank",),)),
    Setting("train.step_weight", "",
            "Weight of a step's loss: sqrt3 = sqrt(3) * transition_std; mean_one = transition_std / its mean over the "
            'trained steps, which TempFlow-GRPO\'s constants are; equal = 1; "" = no choice, which is 1 too, and which '
            "train_*_pr.py refuses.",
            choices=("", "equal", "sqrt3", "mean_one"), used_by=NOISY, read_in="add_gradients"),
    Setting("train.timestep_fraction", 1.0,
            "Train int(this * num_steps) steps, the first ones, in train_*_nft.py one of each equal share; never the "
            "last. A window is trained whole.", min=TINY, max=1, used_by=(*ONLINE, DISTILL),
            when=(("sample.sde_window_size", 0),)),
    Setting("train.ema_decay", 0.9, "Decay of the averaged weights: min((1 + n) / (10 + n), this) after n updates.",
            min=0, max=1),
    Setting("train.ema_interval", 8,
            "Updates between averagings; before the first, the average is the weights.", unit="updates", min=1),

    Setting("preferences.path", "",
            'Folder of parquet files from prepare_preferences.py; "" = online, of images just sampled.',
            used_by=(DPO,)),
    Setting("preferences.min_margin", 0.0,
            "Of rollouts, keep pairs whose winner's reward is higher by more than this.", min=0, used_by=(DPO,)),

    Setting("eval.rewards", (), "Names of rewards that are measured but not trained on: they show what is hacked.",
            resumable=True),
    Setting("eval.num_prompts", 272, "Validation and test prompts, at most, evenly spread; 0 = none.",
            unit="prompts", min=0, resumable=True),
    Setting("eval.noises_per_prompt", 1, "Images of a prompt, always from the same noises.", min=1, max=10**4,
            resumable=True),
    Setting("eval.best_by", "avg", "Metric under eval/ whose highest value makes the policy in best/.", resumable=True),
    Setting("eval.test_freq", 0, "Test every N epochs, and before the first and after the last; 0 = only these.",
            unit="epochs", min=0, resumable=True),
    Setting("eval.num_steps", 10, "Deterministic denoising steps.", min=2, max=1000, resumable=True),
    Setting("eval.guidance_scale", 1.0, "Guidance scale; above 1 costs a second forward per step.", min=0, max=1000,
            resumable=True),
    Setting("eval.batch_size", 64, "Rows per forward and GPU.", unit="rows", min=1, max=10**5, resumable=True),

    Setting("health.action", "log",
            "What an alarm does: log = print it; lower_learning_rate = halve it; stop = save and end; roll_back = to "
            "the best weights and half of the learning rate; the fourth time, stop.",
            choices=("log", "lower_learning_rate", "stop", "roll_back"), resumable=True),
    Setting("health.reward_drop", 3.0, "Largest fall of the training reward below its best (means of 5 epochs), less "
            "what chance explains.", unit="standard errors", min=0, resumable=True),
    Setting("health.eval_drop", 3.0, "Largest fall of the evaluation below its best.", unit="standard errors", min=0,
            resumable=True),
    Setting("health.epochs_without_signal", 3, "Most epochs in a row in which nothing could be learned.",
            unit="epochs", min=0, resumable=True),
)
# fmt: on
BY_KEY = {setting.key: setting for setting in SETTINGS}
TOKEN_WAYS = "set REWARD_TOKEN in the environment, or name a file that holds the token by config.reward.token_file"


def default_config() -> ConfigDict:
    """Every setting's default; a name that is not in the table is an error."""
    config = ConfigDict()
    for setting in SETTINGS:
        section, _, key = setting.key.rpartition(".")
        if section and section not in config:
            config[section] = ConfigDict()
        target = config[section] if section else config
        target[key] = ConfigDict(setting.default) if isinstance(setting.default, dict) else setting.default
    config.lock()
    for open_section in (config.custom, config.reward_fn, config.reward.args):  # their keys are names, not settings
        open_section.unlock()
    return config


def value_of(config: ConfigDict, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = config[part]
    return config


def flat(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of all that is no section."""
    values = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {f"{prefix}{key}": value}
    return values


def ignored_by(algorithm: str) -> tuple[str, ...]:
    """The settings that an algorithm's script does not read."""
    return tuple(setting.key for setting in SETTINGS if algorithm not in setting.used_by)


def is_fixed(key: str) -> bool:
    """Whether a resumed run may not change the value of a dotted key. What `reward.args` says of one reward may change
    where it is its server, or the setting that it overrides may; the options of a reward's load() may not."""
    if key.startswith("reward.args."):
        option = [*key.split("."), ""][3]
        return option != "url" and is_fixed(f"reward.{option}")
    return not (key in BY_KEY and BY_KEY[key].resumable)


def check_values(config: ConfigDict) -> None:
    """Raises UserError for a value that its entry does not allow, with what it allows."""
    for setting in SETTINGS:
        setting.check(value_of(config, setting.key), setting.key)
