"""Every setting there is, with its default, unit and meaning. The files beside this one only override.

The defaults are a run of the shipped tiny Qwen-Image on the shapes task, on any machine. The experiment is stated here
(prompts, images, updates per epoch); how it divides over the GPUs is arithmetic (flow_grpo/batching.py).
"""

import difflib
import re
import sys

import ml_collections

from flow_grpo.rewards import known

RENAMED = {"trouble": "health", "resolution": "height and config.width"}  # keys of older configs


def select(name, runs, variants, file):
    """The config that NAME or NAME,VARIANT,... of a file's functions makes; ValueError names the nearest."""
    runs, variants = ({function.__name__: function for function in functions} for functions in (runs, variants))
    _refuse_renamed(sys.argv)
    run, *chosen = name.split(",")
    if run not in runs or set(chosen) - set(variants):
        near = difflib.get_close_matches(run, runs, cutoff=0) or runs
        raise ValueError(
            f"no run {name!r} in {file}; nearest: {', '.join(near)}; each also with variants of it, as "
            f"NAME,smoke: {', '.join(variants)}"
        )
    try:
        config = runs[run]()
        for variant in chosen:
            config = variants[variant](config)
    except (AttributeError, KeyError, TypeError) as error:  # ml_collections' own words name the nearest key
        _refuse_renamed((), str(error))
        raise ValueError(f"{run} in {file} sets what config/base.py does not know: {error}") from error
    config.name = name.replace(",", "_")
    config.reward_fn = dict.fromkeys(known(), 0.0) | dict(
        config.reward_fn
    )  # so that any can be set on the command line
    return config


def _refuse_renamed(flags, error=""):
    """Raises ValueError if the command line, or ml_collections' words about an unknown key, use a key's old name."""
    for old, new in RENAMED.items():
        set_by_flag = any(re.match(rf"--?config\.{old}\b", flag) for flag in flags)
        if set_by_flag or re.match(rf"\W*(Key )?\W+{old}\W", error):
            raise ValueError(f"config.{old} is now config.{new}")


def get_config():
    config = ml_collections.ConfigDict()
    config.name = "base"  # of this config; set by the file that made it
    config.run_name = ""  # folder under output_dir; "" = name
    config.output_dir = "runs"
    config.project = "flow_grpo"  # in wandb, which is offline unless WANDB_MODE=online
    config.resume_from = ""  # "" = a new run, "latest" = the newest checkpoint of this run, or a checkpoint's folder
    config.seed = 42
    config.num_epochs = 100  # rollout + update rounds
    config.max_hours = 0.0  # end after the epoch in which the run, or what is resumed of it, is this old; 0 = no limit
    config.save_freq = 10  # epochs between checkpoints; the last epoch is always saved; 0 = only the last
    config.keep_checkpoints = 2  # newest ones kept
    config.eval_freq = 10  # epochs between evaluations; before the first and after the last always; 0 = never

    config.model = "flow_grpo/assets/tiny_qwenimage"  # diffusers folder or hub id
    config.dataset = "dataset/shapes"  # folder with {train,validation,test}_metadata.jsonl or .txt; validation may lack
    config.reward_fn = ml_collections.ConfigDict({"shapes": 1.0})  # file in flow_grpo/rewards -> weight; 0 = not used
    config.height = 64  # pixels, a multiple of 16
    config.width = 64  # pixels, a multiple of 16
    config.text_tokens = 20  # every prompt embedding is padded to this width, in rollout and update alike
    config.embeddings_cache = ""  # folder: prompts are encoded once, and no text encoder stays on the GPU; "" = none
    config.precision = "fp32"  # "fp32" | "bf16" | "fp16" of the transformer; trained weights are kept in fp32
    config.vae_precision = "fp32"  # "fp32" | "bf16" of the VAE that draws: faster, on average less than .3 of 255 away
    config.compile = False  # transformer blocks and the decoder: slow to start the first time
    config.vae_batch_size = 32  # images per decode

    config.reward = reward()
    config.lora = lora()
    config.fsdp = fsdp()
    config.sample = sample()
    config.train = train()
    config.preferences = preferences()
    config.eval = evaluation()
    config.health = health()
    return config.lock()  # a name that is not in this file is an error from here on


def reward():
    """How rewards are scored. What reward.args says of one reward goes before what is said here."""
    reward = ml_collections.ConfigDict()
    reward.args = ml_collections.ConfigDict()  # NAME -> any of these but max_pending, and the options of its load()
    reward.url = ""  # of one reward only, in args: the server that scores it, such as http://127.0.0.1:18087
    reward.backend = "thread"  # "inline" | "thread" | "process": a server that the run starts, one for all ranks
    reward.device = ""  # where a thread's or a process's model lies, such as "cuda:7"; "" = the rank's own
    reward.batch_size = 32  # images per request
    reward.max_pending = 1024  # images of a rank that wait for a score; the rollout waits for room
    reward.on_failure = "fail"  # "fail" | "mask": leave the image out of its group
    reward.max_masked_share = 0.05  # of an epoch's images; more is an error
    reward.token = ""  # for a server that asks for one
    reward.image_format = "npy"  # to a server: "npy" keeps every bit | "png" has 8 bits and is a tenth of the size
    reward.in_flight = 64  # requests of a rank to a server
    reward.timeout_s = 120.0  # of one request
    reward.retry_s = 300.0  # how long a server may be away
    return reward


def lora():
    """The adapter that is trained."""
    lora = ml_collections.ConfigDict()
    lora.rank = 32  # 0 = train the full weights
    lora.alpha = 64
    lora.path = ""  # a diffusers LoRA folder to start from; "" = a fresh adapter
    return lora


def fsdp():
    """How weights lie over the GPUs."""
    fsdp = ml_collections.ConfigDict()
    fsdp.mode = "replicate"  # "replicate" | "shard" | "hybrid" (shard inside groups of shard_size, replicate across)
    fsdp.shard_size = 0  # ranks of a hybrid group
    fsdp.activation_checkpointing = False  # keep each block's input alone for the backward: a third more compute
    fsdp.activation_memory = 1.0  # compiled blocks: share of the other activations kept; what costs least is recomputed
    fsdp.offload_weights = False  # sharded weights stay in host memory, one GPU's too; a block's come when it computes
    fsdp.offload_optimizer = False  # optimizer state in host memory while images are sampled
    return fsdp


def sample():
    """The rollout."""
    sample = ml_collections.ConfigDict()
    sample.num_steps = 10  # denoising steps of a rollout
    sample.guidance_scale = 1.0  # > 1 costs a second forward per step
    sample.noise_level = 0.7  # eta of the SDE step
    sample.sde_type = "sde"  # "sde" | "dance" | "cps" | "cps_gaussian" (cps with its true log-density)
    sample.num_prompts_per_epoch = 16
    sample.num_images_per_prompt = 8  # group size; in train_*_pr.py: trunks per prompt
    sample.batch_size = 16  # rows per forward and GPU wherever a log-prob is born: rollout and update alike
    sample.global_std = False  # advantages over the std of the whole epoch instead of the group's own
    sample.sde_window_size = 2  # train_*.py: steps sampled with noise and trained; 0 = all but the last
    sample.sde_window_range = (0, 5)  # train_*.py: the window lies in steps [first, last)
    sample.sde_window_schedule = "random"  # train_*.py: "random" per batch | "progressive" | "decay" | "exp_decay"
    sample.sde_window_interval = 25  # train_*.py: updates between a schedule's moves; decay's and exp_decay's longest
    sample.sde_window_stride = 1  # train_*.py: steps of a move; from the end of the range back to its start
    sample.same_latent = False  # train_*.py: a group starts from one noise and is one image until the window
    sample.num_branches = 1  # train_*_pr.py: noisy branches per step of a trunk, at least 2
    sample.completion_batch_size = 128  # train_*_pr.py: rows per forward and GPU of the branches' way to the image
    sample.flash_ratio = 0.0  # above 0: after the noise, only this share of the forwards that are left
    sample.flash_solver = "dpm"  # "dpm": DPM-Solver++ on a coarser grid | "extrapolate": all steps, some without one
    sample.engine = "full"  # "full": a batch's rows walk together | "stepwise": each row or branch in a slot
    sample.text_multiple = 0  # "stepwise": width of text where no log-prob is born, a multiple of this; 0: text_tokens
    sample.merge_adapter = False  # faster forwards where no log-prob is born, for a copy of the adapted weights
    sample.merged_precision = ""  # of that copy and its products: "" as the weights' own | "fp8": faster, other images
    return sample


def train():
    """The update."""
    train = ml_collections.ConfigDict()
    train.learning_rate = 3e-4  # the highest of the run
    train.learning_rate_schedule = "constant"  # "constant" | "linear" | "cosine": falls to 0 at the end of num_epochs
    train.warmup_updates = 0  # before them the rate rises from 0 in equal parts
    train.target_update_size = 0.0  # ratio_std of an epoch's last update in clip ranges; above, the rate falls; 0 = off
    train.adam_beta1 = 0.9
    train.adam_beta2 = 0.999
    train.adam_eps = 1e-8
    train.weight_decay = 1e-4
    train.max_grad_norm = 1.0
    train.updates_per_epoch = 2  # optimizer steps per epoch and inner epoch
    train.inner_epochs = 1  # passes over one rollout, reshuffled
    train.objective = "clip"  # "clip" | "guard" (ratios normalised per step, GRPO-Guard)
    train.old_log_prob = "rollout"  # of the ratio: noted by the "rollout" | "recompute": by one more forward per row
    train.importance_cap = 0.0  # above 0, with "recompute": also weigh by min(recomputed / noted probability, this)
    train.clip_range = 1e-4  # of the ratio; log-probs are means over elements, so ratios stay near 1
    train.adv_clip_max = 5.0
    train.reward_aggregation = "sum"  # "sum" of weighted rewards | "gdpo": of their advantages
    train.filter_groups = False  # leave groups whose rewards are all alike out of the mean that is the loss
    train.beta = 0.0  # weight of the KL to the reference policy; train_*_nft.py: of the squared distance to it
    train.reference_interval = 0  # updates until the policy becomes its own reference, again and again; 0 = never
    train.reference_guidance_scale = 0.0  # of the first reference: above sample's, the policy learns it; 0 = sample's
    train.shared_noise = False  # train_*_nft.py: the images of a group are noised alike, to the same levels
    train.flow_matching_weight = 0.0  # train_*_nft.py: of flow matching on the run's own images, good and bad alike
    train.flow_matching_warmup = 0  # train_*_nft.py: updates over which that weight rises from 0
    train.nft_beta = 1.0  # train_*_nft.py: share of the trained policy in the mixture that is compared with x_0
    train.old_decay_schedule = 1  # train_*_nft.py: how the sampling policy follows; losses.old_policy_decay's 0 | 1 | 2
    train.dpo_beta = 1000.0  # train_*_dpo.py: how sharply a pair's difference of velocity errors decides
    train.step_weight = "none"  # "none" | "sqrt3" (sqrt(3) * transition_std) | "mean_one" (transition_std / its mean)
    train.timestep_fraction = 1.0  # keep the first part of the trained steps
    train.ema_decay = 0.9  # min((1 + n) / (10 + n), this) after n averagings
    train.ema_interval = 8  # optimizer steps between averagings; before the first the average is the weights
    return train


def preferences():
    """Pairs of a better and a worse image: train_*_dpo.py, prepare_preferences.py."""
    preferences = ml_collections.ConfigDict()
    preferences.path = ""  # folder of parquet files from prepare_preferences.py; "" = online, of images just sampled
    preferences.source = ""  # to prepare from: "" = own rollouts; a folder with pairs.jsonl, or with parquet files
    preferences.min_margin = 0.0  # own rollouts, online: the winner's reward is higher by more than this
    preferences.validation_share = 0.1  # of the prompts, whose pairs are held out
    preferences.max_dropped_share = 0.2  # more of the source than this left out is an error, once all is written
    preferences.part_size = 256  # pairs of the source per file
    preferences.dtype = "float32"  # "float32" | "bfloat16" of what is stored
    return preferences


def evaluation():
    """The evaluation: deterministic, with averaged weights."""
    evaluation = ml_collections.ConfigDict()
    evaluation.rewards = ()  # names of rewards that are measured too but not trained on: they show what is hacked
    evaluation.num_prompts = 272  # of the validation and of the test prompts, at most, evenly spread; 0 = none
    evaluation.noises_per_prompt = 1  # images of a prompt, always from the same noises
    evaluation.best_by = "avg"  # name of the eval/ figure whose highest value makes the policy in best/
    evaluation.keep_state = False  # best/checkpoint holds what training needs to go on from the best policy
    evaluation.test_freq = 0  # epochs between tests; before the first and after the last always; 0 = only these
    evaluation.height = 0  # pixels; 0 = as in training
    evaluation.width = 0  # pixels; 0 = as in training
    evaluation.num_steps = 10  # deterministic
    evaluation.guidance_scale = 1.0
    evaluation.batch_size = 64  # rows per forward and GPU
    evaluation.num_pairs = 256  # train_*_dpo.py: held-out pairs, evenly spread
    evaluation.noises_per_pair = 4  # train_*_dpo.py: noises and levels at which each is judged, always the same
    evaluation.num_panel_images = 12  # shown in wandb and samples.png
    return evaluation


def health():
    """Alarms, each against the run itself, and what follows them; 0 = no limit. See docs/health.md."""
    health = ml_collections.ConfigDict()
    health.action = "log"  # "log" (print) | "lower_learning_rate" (halve it) | "stop" (save and end) | "roll_back"
    health.max_roll_backs = 3  # "roll_back": the best evaluation's weights, half the rate; once more is "stop"
    health.reward_drop = 3.0  # standard errors of the training reward below its best (5 epochs' means), less luck
    health.eval_drop = 3.0  # standard errors of the evaluation below its best
    health.reference_distance = 2.0  # of reference_distance or kl_reference; a velocity's own mean square is about 2
    health.loss_rise = 1.5  # factor of policy_loss, 5 epochs' mean, over the first 5; not where ratios are clipped
    health.update_size = 10.0  # ratio_std of an epoch's last update, 5 epochs' mean, in clip ranges; not with "guard"
    health.epochs_without_signal = 3  # in a row
    health.latent_rms_change = 1.5  # factor, either way, of health/latent_rms since the first epoch
    health.high_frequency_change = 2.0  # factor, upwards, of health/high_frequency
    health.diversity_change = 5.0  # factor, downwards, of health/diversity
    health.grad_norm_spike = 10.0  # largest gradient norm of an epoch over the median of the 20 updates before it
    return health
