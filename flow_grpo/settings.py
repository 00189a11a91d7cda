"""Every setting: one entry with its default, unit, meaning, limits, and which scripts read it.

The defaults are a run of the shipped tiny Qwen-Image on the shapes task, on any machine. The experiment is stated here
(prompts, images, updates per epoch); how it divides over the GPUs is arithmetic (flow_grpo/batching.py). From this
table follow the default config, what a value may be, what a script refuses because it would ignore it, what a resumed
run may change, and docs/settings.md, which `python -m flow_grpo.settings > docs/settings.md` writes.
"""

import json
import sys
from pathlib import PurePath
from typing import Any

from ml_collections import ConfigDict

from flow_grpo.quoting import quoted
from flow_grpo.setting import ALL, DPO, GRPO, NFT, PR, Setting

SCRIPTS = {GRPO: "train_*.py", PR: "train_*_pr.py", NFT: "train_*_nft.py", DPO: "train_*_dpo.py"}
ONLINE = (GRPO, PR, NFT)  # with advantages of images just sampled
RATIO = (GRPO, PR)  # with noise in the rollout, and ratios of probabilities in the loss
TINY = 1e-6  # the least of a number above 0
SECTIONS = {
    "": "The run",
    "reward": "How rewards are scored; what `reward.args` says of one reward goes before what is said here",
    "lora": "The adapter that is trained",
    "fsdp": "How weights lie over the GPUs",
    "sample": "The rollout",
    "train": "The update",
    "preferences": "Pairs of a better and a worse image, and how prepare_preferences.py makes them",
    "eval": "The evaluation: deterministic, with averaged weights",
    "health": "Alarms, each against the run itself, and what follows them; 0 = no limit; see [health](health.md)",
}

# fmt: off
SETTINGS = (
    Setting("algorithm", GRPO, "the script that the config is for; another one refuses it", choices=ALL,
            may_differ=True),  # a checkpoint without it may be resumed
    Setting("name", "base", "of this config; set by the file that made it", may_differ=True),
    Setting("run_name", "", 'folder under output_dir; "" = name', may_differ=True),
    Setting("output_dir", "runs", "where run folders are made", may_differ=True),
    Setting("logger", "wandb", "where else curves go; without one, report.html is written at every evaluation",
            choices=("wandb", "tensorboard", "both", "none"), may_differ=True),
    Setting("project", "flow_grpo", "in wandb, which is offline unless WANDB_MODE=online", may_differ=True),
    Setting("resume_from", "",
            '"" = a new run, "latest" = the newest checkpoint of this run, or a checkpoint\'s folder', may_differ=True),
    Setting("custom", {}, "settings of your own, which a config file of your own adds and no check looks at"),
    Setting("seed", 42, "names every random draw of the run", least=-(2**63), most=2**63 - 1),
    Setting("num_epochs", 100, "rollout + update rounds", least=1, may_differ=True),
    Setting("max_hours", 0.0, unit="h", least=0, may_differ=True,
            meaning="end after the epoch in which the run, or what is resumed of it, is this old; 0 = no limit"),
    Setting("save_freq", 10, "between checkpoints; the last epoch is always saved; 0 = only the last", unit="epochs",
            least=0, may_differ=True),
    Setting("keep_checkpoints", 2, "newest ones that stay", least=1, may_differ=True),
    Setting("eval_freq", 10, "between evaluations; before the first and after the last always; 0 = never",
            unit="epochs", least=0, may_differ=True),
    Setting("rollout_images_freq", 0, "between epochs of which images/ keeps an image of each prompt; 0 = never",
            unit="epochs", least=0, may_differ=True),
    Setting("model", "flow_grpo/assets/tiny_qwenimage", "diffusers folder or hub id"),
    Setting("dataset", "dataset/shapes",
            "folder with {train,validation,test}_metadata.jsonl or .txt; it need not have validation"),
    Setting("reward_fn", {"shapes": 1.0}, "file in flow_grpo/rewards -> weight; 0 = not used"),
    Setting("height", 64, "of an image; a multiple of 16", unit="pixels", least=16, most=8192),
    Setting("width", 64, "of an image; a multiple of 16", unit="pixels", least=16, most=8192),
    Setting("text_tokens", 20, "every prompt embedding is padded to this width, in rollout and update alike",
            unit="tokens", least=1, most=2048),
    Setting("embeddings_cache", "",
            'folder: prompts are encoded once, and no text encoder stays on the GPU; "" = none', may_differ=True),
    Setting("weights_cache", "",
            'folder for the base as base_precision stores it, which later starts read; "" = none', may_differ=True),
    Setting("precision", "fp32", "of the transformer; trained weights are stored in fp32",
            choices=("fp32", "bf16", "fp16")),
    Setting("base_precision", "",
            'of the frozen layers beneath an adapter, in rollout and update alike; "" = as precision',
            choices=("", "fp8", "8bit", "4bit")),
    Setting("vae_precision", "fp32", "of VAE decodes: bf16 is faster; pixels differ by less than 0.3 of 255 on average",
            choices=("fp32", "bf16"), may_differ=True),
    Setting("attention", "",
            'of Qwen-Image on a GPU; "" = torch\'s; "flash_4" = FlashAttention-4, faster under masks, with '
            "repeatable gradients; with compile, on H100 and H200, GELU is computed inside 8-bit products",
            choices=("", "flash_4"), may_differ=True),
    Setting("compile", False, "transformer blocks and the decoder: slow to start the first time", may_differ=True),
    Setting("vae_batch_size", 32, "images per decode", unit="images", least=1, most=10**5, may_differ=True),

    Setting("reward.args", {}, "NAME -> any setting of this section but max_pending, and the options of its load()"),
    Setting("reward.url", "", "of one reward only, in args: the server that scores it, such as http://127.0.0.1:18087"),
    Setting("reward.backend", "thread", "process: a server that the run starts, one for all ranks of a machine",
            choices=("inline", "thread", "process"), may_differ=True),
    Setting("reward.device", "", 'of a thread\'s or a process\'s model, such as "cuda:7"; "" = the rank\'s own',
            may_differ=True),
    Setting("reward.batch_size", 32, "per request", unit="images", least=1, most=10**5),
    Setting("reward.max_pending", 1024, "of a rank that wait for a score; the rollout waits for room", unit="images",
            least=1, may_differ=True),
    Setting("reward.on_failure", "fail", "mask: leave the image out of its group", choices=("fail", "mask")),
    Setting("reward.max_masked_share", 0.05, "of an epoch's images; more is an error", least=0, most=1),
    Setting("reward.token_file", "",
            "whose first line is the token of a server that asks for one; \"\" = the environment's REWARD_TOKEN",
            may_differ=True),
    Setting("reward.image_format", "npy", "to a server: npy has every bit, png has 8 bits and a tenth of the size",
            choices=("npy", "png")),
    Setting("reward.in_flight", 64, "requests of a rank to a server", least=1, most=4096, may_differ=True),
    Setting("reward.timeout_s", 120.0, "of one request; in a thread it may take timeout_s and retry_s together",
            unit="s", least=0.1, may_differ=True),
    Setting("reward.retry_s", 300.0, "how long a server may be away", unit="s", least=0, may_differ=True),

    Setting("lora.rank", 32, "0 = train the full weights", least=0, most=4096),
    Setting("lora.alpha", 64, "scale of the adapter, times its rank", least=1),
    Setting("lora.path", "", 'a diffusers LoRA folder to start from; "" = a fresh adapter'),

    Setting("fsdp.mode", "replicate", "hybrid: shard inside groups of shard_size, replicate across them",
            choices=("replicate", "shard", "hybrid"), may_differ=True),
    Setting("fsdp.shard_size", 0, "of a hybrid group", unit="ranks", least=0, may_differ=True),
    Setting("fsdp.activation_checkpointing", False,
            "store each block's input alone for the backward: a third more compute", may_differ=True),
    Setting("fsdp.activation_memory", 1.0,
            "compiled blocks: share of the other activations that is stored; what costs least is recomputed",
            least=0, most=1, may_differ=True),
    Setting("fsdp.offload_weights", False,
            "sharded weights stay in host memory, one GPU's too; a block's come when it computes", may_differ=True),
    Setting("fsdp.offload_optimizer", False, "optimizer state in host memory while images are sampled",
            may_differ=True),

    Setting("sample.num_steps", 10, "denoising steps of a rollout", least=2, most=1000),
    Setting("sample.guidance_scale", 1.0, "above 1 costs a second forward per step", least=0, most=1000),
    Setting("sample.noise_level", 0.7, "eta of the SDE step", least=0, most=1000, scripts=RATIO),
    Setting("sample.sde_type", "sde", "formula of a noisy step; cps_gaussian is cps with its true log-density",
            choices=("sde", "dance", "cps", "cps_gaussian"), scripts=RATIO),
    Setting("sample.num_prompts_per_epoch", 16, "on all GPUs together", least=1, most=10**6),
    Setting("sample.num_images_per_prompt", 8, "group size; in train_*_pr.py: trunks per prompt", least=1, most=10**4),
    Setting("sample.batch_size", 16, "per forward and GPU wherever a log-prob is computed: rollout and update alike",
            unit="rows", least=1, most=4096),
    Setting("sample.global_std", False, "advantages over the std of the whole epoch instead of the group's own"),
    Setting("sample.sde_window_size", 2, "steps sampled with noise and trained; 0 = all but the last", unit="steps",
            least=0, scripts=(GRPO, NFT)),  # train_*_nft.py asks for 0
    Setting("sample.sde_window_range", (0, 5), "the window lies in steps [first, last)", scripts=(GRPO,)),
    Setting("sample.sde_window_schedule", "random", "how the window moves: random = per batch",
            choices=("random", "progressive", "decay", "exp_decay"), scripts=(GRPO,)),
    Setting("sample.sde_window_interval", 25, "between a schedule's moves; decay's and exp_decay's longest",
            unit="updates", least=1, scripts=(GRPO,)),
    Setting("sample.sde_window_stride", 1, "of a move; from the end of the range back to its start", unit="steps",
            least=1, scripts=(GRPO,)),
    Setting("sample.same_latent", False, "a group starts from one noise and is one image until the window",
            scripts=(GRPO,)),
    Setting("sample.num_branches", 1, "noisy branches per step of a trunk, at least 2; 1 in the other scripts", least=1,
            scripts=ONLINE, most=4096),
    Setting("sample.completion_batch_size", 0,
            "per forward without a log-prob, of branches or with engine stepwise; 0 = sample.batch_size",
            unit="rows", least=0, most=4096, scripts=ONLINE, may_differ=True),
    Setting("sample.flash_ratio", 0.0, "above 0: after the noise, only this share of the forwards that are left",
            least=0, most=1),
    Setting("sample.flash_solver", "dpm",
            "dpm = DPM-Solver++ on a coarser grid, extrapolate = all steps, some without a forward",
            choices=("dpm", "extrapolate")),
    Setting("sample.engine", "full", "full: a batch's rows walk together, stepwise: each row or branch in a slot",
            choices=("full", "stepwise"), may_differ=True),
    Setting("sample.text_multiple", 0,
            "stepwise: width of text where no log-prob is computed, a multiple of this; 0 = text_tokens",
            unit="tokens", least=0, most=2048, may_differ=True),
    Setting("sample.merge_adapter", False,
            "faster forwards where no log-prob is computed, for a copy of the adapted weights"),
    Setting("sample.fast_precision", "",
            'of the products where no log-prob is computed: "" = as the others\', fp8 = faster, other images',
            choices=("", "fp8")),

    Setting("train.learning_rate", 3e-4, "the highest of the run", least=0, most=1000),
    Setting("train.learning_rate_schedule", "constant", "linear and cosine fall to 0 at the end of num_epochs",
            choices=("constant", "linear", "cosine")),
    Setting("train.warmup_updates", 0, "before them the rate rises from 0 in equal parts", unit="updates", least=0),
    Setting("train.target_update_size", 0.0,
            "ratio_std of an epoch's last update in clip ranges; above it the rate falls; 0 = off",
            least=0, scripts=RATIO),
    Setting("train.adam_beta1", 0.9, "AdamW's", least=0, most=0.9999999),
    Setting("train.adam_beta2", 0.999, "AdamW's", least=0, most=0.9999999),
    Setting("train.adam_eps", 1e-8, "AdamW's", least=1e-20),
    Setting("train.weight_decay", 1e-4, "AdamW's", least=0, most=1000),
    Setting("train.max_grad_norm", 1.0, "longer gradients are scaled down to it", least=TINY),
    Setting("train.updates_per_epoch", 2, "optimizer steps per epoch and inner epoch", unit="updates", least=1,
            most=10**6),
    Setting("train.inner_epochs", 1, "passes over one rollout, reshuffled", least=1, most=1000),
    Setting("train.objective", "clip", "guard: ratios normalised per step, GRPO-Guard", choices=("clip", "guard"),
            scripts=RATIO),
    Setting("train.old_log_prob", "rollout",
            "old log-prob of the ratio: the rollout's, or recomputed by one extra forward per row",
            choices=("rollout", "recompute"), scripts=RATIO),
    Setting("train.importance_cap", 0.0,
            "above 0, with recompute: also weigh by min(recomputed / noted probability, this)", least=0, scripts=RATIO),
    Setting("train.clip_range", 1e-4, "of the ratio; log-probs are means over elements, so ratios stay near 1", least=0,
            scripts=RATIO),
    Setting("train.adv_clip_max", 5.0, "advantages lie within plus and minus this", least=TINY, scripts=ONLINE),
    Setting("train.reward_aggregation", "sum", "sum of weighted rewards, or gdpo: of their advantages",
            choices=("sum", "gdpo"), scripts=ONLINE),
    Setting("train.filter_groups", False,
            "leave groups whose rewards are all alike out of the mean that is the loss", scripts=ONLINE),
    Setting("train.beta", 0.0,
            "weight of the KL to the reference policy; train_*_nft.py: of the squared distance to it",
            least=0, scripts=ONLINE),
    Setting("train.reference_interval", 0,
            "until the policy becomes its own reference, again and again; 0 = never", unit="updates", least=0),
    Setting("train.reference_guidance_scale", 0.0,
            "of the first reference: above sample's, the policy learns it; 0 = sample's", least=0, most=1000,
            scripts=ONLINE),
    Setting("train.shared_noise", False, "the images of a group are noised alike, to the same levels", scripts=(NFT,)),
    Setting("train.flow_matching_weight", 0.0, "of flow matching on the run's own images, good and bad alike", least=0,
            scripts=(NFT,)),
    Setting("train.flow_matching_warmup", 0, "over which that weight rises from 0", unit="updates", least=0,
            scripts=(NFT,)),
    Setting("train.nft_beta", 1.0, "share of the trained policy in the mixture that is compared with x_0", least=TINY,
            scripts=(NFT,)),
    Setting("train.old_decay_schedule", 1, "how the sampling policy follows; see losses.old_policy_decay",
            choices=(0, 1, 2), scripts=(NFT,)),
    Setting("train.dpo_beta", 1000.0, "how sharply a pair's difference of velocity errors decides", least=0,
            scripts=(DPO,)),
    Setting("train.step_weight", "none", "sqrt3: sqrt(3) * transition_std, mean_one: transition_std / its mean",
            choices=("none", "sqrt3", "mean_one"), scripts=RATIO),
    Setting("train.timestep_fraction", 1.0, "keep the first part of the trained steps", least=TINY, most=1,
            scripts=ONLINE),
    Setting("train.ema_decay", 0.9, "min((1 + n) / (10 + n), this) after n averagings", least=0, most=1),
    Setting("train.ema_interval", 8, "optimizer steps between averagings; before the first the average is the weights",
            unit="updates", least=1),

    Setting("preferences.path", "",
            'folder of parquet files from prepare_preferences.py; "" = online, of images just sampled', scripts=(DPO,)),
    Setting("preferences.source", "",
            'to prepare from: "" = own rollouts; a folder with pairs.jsonl, or with parquet files', scripts=(DPO,)),
    Setting("preferences.max_rows", 0, "of the source, its first ones; 0 = all", unit="prompts or pairs", least=0,
            scripts=(DPO,)),
    Setting("preferences.min_margin", 0.0, "own rollouts, online: the winner's reward is higher by more than this",
            least=0, scripts=(DPO,)),
    Setting("preferences.validation_share", 0.1, "of the prompts, whose pairs are held out", least=0, most=0.99,
            scripts=(DPO,)),
    Setting("preferences.max_dropped_share", 0.2,
            "more of the source than this left out is an error, once all is written", least=0, most=1, scripts=(DPO,)),
    Setting("preferences.part_size", 256, "of the source per file", unit="pairs", least=1, scripts=(DPO,)),
    Setting("preferences.dtype", "float32", "of what is stored", choices=("float32", "bfloat16"), scripts=(DPO,)),

    Setting("eval.rewards", (), "names of rewards that are measured too but not trained on: they show what is hacked",
            may_differ=True),
    Setting("eval.num_prompts", 272, "of the validation and of the test prompts, at most, evenly spread; 0 = none",
            unit="prompts", least=0, may_differ=True),
    Setting("eval.noises_per_prompt", 1, "images of a prompt, always from the same noises", least=1, most=10**4,
            may_differ=True),
    Setting("eval.best_by", "avg", "name of the eval/ figure whose highest value makes the policy in best/",
            may_differ=True),
    Setting("eval.keep_state", False, "best/checkpoint holds what training needs to go on from the best policy",
            may_differ=True),
    Setting("eval.test_freq", 0, "between tests; before the first and after the last always; 0 = only these",
            unit="epochs", least=0, may_differ=True),
    Setting("eval.height", 0, "of an image; 0 = as in training", unit="pixels", least=0, most=8192, may_differ=True),
    Setting("eval.width", 0, "of an image; 0 = as in training", unit="pixels", least=0, most=8192, may_differ=True),
    Setting("eval.num_steps", 10, "deterministic denoising steps", least=2, most=1000, may_differ=True),
    Setting("eval.guidance_scale", 1.0, "above 1 costs a second forward per step", least=0, most=1000, may_differ=True),
    Setting("eval.batch_size", 64, "per forward and GPU", unit="rows", least=1, most=10**5, may_differ=True),
    Setting("eval.num_pairs", 256, "held-out ones, evenly spread", unit="pairs", least=1, scripts=(DPO,),
            may_differ=True),
    Setting("eval.noises_per_pair", 4, "noises and levels at which each pair is judged, always the same", least=1,
            scripts=(DPO,), may_differ=True, most=10**4),
    Setting("eval.num_panel_images", 12, "shown by trackers and in samples.png; of a rollout", unit="images", least=1,
            may_differ=True),

    Setting("health.action", "log",
            "log: print, lower_learning_rate: halve it, stop: save and end, roll_back: to the best weights",
            choices=("log", "lower_learning_rate", "stop", "roll_back"), may_differ=True),
    Setting("health.max_roll_backs", 3, "roll_back: each halves the learning rate; once more is stop", least=0,
            may_differ=True),
    Setting("health.reward_drop", 3.0, "of the training reward below its best (5 epochs' means), less luck",
            unit="standard errors", least=0, may_differ=True),
    Setting("health.eval_drop", 3.0, "of the evaluation below its best", unit="standard errors", least=0,
            may_differ=True),
    Setting("health.reference_distance", 2.0,
            "of reference_distance or kl_reference; a velocity's own mean square is about 2", least=0, may_differ=True),
    Setting("health.loss_rise", 1.5, "of policy_loss, 5 epochs' mean, over the first 5; not where ratios are clipped",
            unit="factor", least=0, may_differ=True),
    Setting("health.update_size", 10.0, "ratio_std of an epoch's last update, 5 epochs' mean; not with guard",
            unit="clip ranges", least=0, may_differ=True),
    Setting("health.epochs_without_signal", 3, "in a row", unit="epochs", least=0, may_differ=True),
    Setting("health.latent_rms_change", 1.5, "either way, of health/latent_rms since the first epoch", unit="factor",
            least=0, may_differ=True),
    Setting("health.high_frequency_change", 2.0, "upwards, of health/high_frequency", unit="factor", least=0,
            may_differ=True),
    Setting("health.diversity_change", 5.0, "downwards, of health/diversity", unit="factor", least=0, may_differ=True),
    Setting("health.grad_norm_spike", 10.0,
            "largest gradient norm of an epoch over the median of the 20 updates before it", unit="factor", least=0,
            may_differ=True),
)
# fmt: on
BY_KEY = {setting.key: setting for setting in SETTINGS}
TOKEN_WAYS = "set REWARD_TOKEN in the environment, or name a file that holds the token by config.reward.token_file"
RENAMED = {  # key of older configs -> what became of it
    "trouble": "is now config.health",
    "resolution": "is now config.height and config.width",
    "sample.merged_precision": "is now config.sample.fast_precision",
    "reward.token": f"would be stored with the config; {TOKEN_WAYS}",
}

MOVED = {  # key of older configs -> the settings that have its value now
    "sample.merged_precision": ("sample.fast_precision",),
    "resolution": ("height", "width"),
}


def default_config() -> ConfigDict:
    """Every setting's default; a name that is not in the table is an error."""
    config = ConfigDict()
    for setting in SETTINGS:
        section, _, key = setting.key.rpartition(".")
        if section and section not in config:
            config[section] = ConfigDict()
        target = config[section] if section else config
        target[key] = ConfigDict(setting.default) if isinstance(setting.default, dict) else setting.default
    config.lock().custom.unlock()
    return config


def with_defaults(stored: dict[str, Any], file: PurePath) -> dict[str, Any]:
    """Fill up a config as a JSON file holds it, in place: settings that are younger than the file have their defaults,
    or the values that they had by another name.

    Raises:
        ValueError: something else stands in the place of a section.
    """
    for section in {setting.key.rpartition(".")[0] for setting in SETTINGS} - {""}:
        if not isinstance(stored.get(section, {}), dict):
            raise ValueError(f"{file} is damaged: its {section!r} is {quoted(stored[section])}, no section of settings")
    values = {setting.key: setting.default for setting in SETTINGS}
    for old, new in MOVED.items():
        section, _, key = old.rpartition(".")
        source = stored.get(section, {}) if section else stored
        if key in source:
            values |= dict.fromkeys(new, source.pop(key))
    for setting_key, value in values.items():
        section, _, key = setting_key.rpartition(".")
        target = stored.setdefault(section, {}) if section else stored
        target.setdefault(key, json.loads(json.dumps(value)))
    return stored


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
    return tuple(setting.key for setting in SETTINGS if algorithm not in setting.scripts)


def may_differ() -> tuple[str, ...]:
    """Keys that a resumed run may change. A section stands for all of its keys, those of older configs too."""
    fixed = {setting.key.partition(".")[0] for setting in SETTINGS if not setting.may_differ}
    keys = [setting.key for setting in SETTINGS if setting.may_differ]
    keys += ["reward.token"]  # of older configs
    return tuple(dict.fromkeys(key if (top := key.partition(".")[0]) in fixed else top for key in keys))


def check_values(config: ConfigDict) -> None:
    """Raises ValueError for a value that its entry does not allow, with what it allows."""
    for setting in SETTINGS:
        setting.check(value_of(config, setting.key), setting.key)


def page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings\n",
        "Every setting, with its default. `python -m flow_grpo.settings > docs/settings.md` writes this page from",
        "flow_grpo/settings.py. A script refuses a setting that it would ignore. A resumed run may change what is",
        "marked under *resume*; [Configs of your own](own_config.md) says how to set one.",
    ]
    for section, title in SECTIONS.items():
        lines += [f"\n## {section or 'config'}: {title}\n", "| setting | default | meaning | scripts | resume |"]
        lines += ["|---|---|---|---|---|", *(_row(s) for s in SETTINGS if s.key.rpartition(".")[0] == section)]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    facts = [f"{setting.unit}: {setting.meaning}" if setting.unit else setting.meaning]
    facts += [", ".join(f"`{choice!r}`" for choice in setting.choices)] if setting.choices else []
    facts += [setting.limits()] if setting.limits() else []
    scripts = "all" if setting.scripts == ALL else ", ".join(f"`{SCRIPTS[name]}`" for name in setting.scripts)
    changes = "yes" if setting.may_differ else ""
    return f"| `{setting.key}` | `{setting.default!r}` | {'; '.join(facts)} | {scripts} | {changes} |"


if __name__ == "__main__":
    sys.stdout.write(page())
