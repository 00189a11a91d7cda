"""Every setting: a field with its type, default and limits, and its meaning below it.

The defaults are a run of the shipped tiny Qwen-Image on the shapes task, on any machine. The experiment is stated here
(prompts, images, updates per epoch); how it divides over the GPUs is arithmetic (algorithms/batch_plan.py). From these
fields follow the config that files and flags edit, what a value may be, what a script refuses because it would ignore
it, what a resumed run may change, docs/reference/settings.md, and the types that an editor and the type checker know.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, GRADIENT_PATHS, OBJECTIVES
from flow_grpo.settings.setting import DISTILL, DPO, GRPO, NFT, PR, REFL, Section, setting

ONLINE = (GRPO, PR, NFT)  # with advantages of images just sampled
RATIO = (GRPO, PR)  # with ratios of probabilities in the loss
NOISY = (GRPO, PR, DISTILL)  # with noise in the rollout
COMPARED = (*ONLINE, DPO)  # with images of a prompt that teach by how differently they score
BATCHED = (GRPO, PR, NFT, DPO, DISTILL)  # with a rollout whose images take different numbers of forwards
FAST = (*BATCHED, REFL)  # with forwards in the rollout that no log-prob and no gradient needs
MAX_BATCH_SIZE = 4096  # rows of a forward
TINY = 1e-6  # the least of a number above 0
OWN_LOSS = "one of your own is registered at the top of the config file that names it: docs/howto/own_loss.md"


@dataclass(frozen=True)
class Reward(Section):
    """How rewards are scored; what `reward.args` says of one reward goes before what is said here."""

    args: Mapping[str, Any] = setting({})
    """Overrides by reward: NAME -> any setting of this section, options of its load(), and url, the server that scores
    it, such as http://127.0.0.1:18087, or a list of such."""

    device: str = setting("", resumable=True)
    """Device of a reward's model, such as "cuda:7"; "" = the rank's own."""

    batch_size: int = setting(32, unit="images", min=1, max=10**5)
    """Images per request."""

    frames: int = setting(4, unit="frames", min=1, max=16)
    """Frames of a video, at equal distances, that a reward of images scores: their mean is the video's score. A reward
    that takes videos gets all of them."""

    max_masked_share: float = setting(0.0, min=0, max=1)
    """0 = a failed reward ends the run. Above 0, its image is left out of its group; the run ends if that is more than
    this fraction of the images or scouts of an epoch, an evaluation or a file."""

    token_file: str = setting("", resumable=True)
    """File whose first line is the token that a server asks for; "" = the environment's REWARD_TOKEN."""

    timeout_s: float = setting(120.0, unit="seconds", min=0.1, resumable=True)
    """Time limit of one request. A call in a thread may take 300 s more."""


@dataclass(frozen=True)
class Lora(Section):
    """The adapter that is trained."""

    rank: int = setting(32, min=0, max=4096)
    """Rank of the adapter; 0 trains the full weights."""

    alpha: int = setting(64, min=1, typed_when=(("lora.rank",),))
    """Scale of the adapter, times its rank."""

    base: str = setting("")
    """LoRA that is added to the model's own weights when they are loaded, such as that of a few-step model, a folder or
    a file that diffusers reads; "" = none. It is not trained: the policy is, with it."""

    path: str = setting("", when=(("lora.rank",),))
    """LoRA of diffusers or peft to start from, a folder or a file; "" = a fresh adapter."""

    targets: tuple[str, ...] = setting((), when=(("lora.rank",),))
    """Ends of the names of the linear layers that the adapter adapts, such as ('attn.to_q', 'attn.to_v'); () = the
    model's own list."""

    export_dtype: Literal["float32", "bfloat16"] = setting("float32", resumable=True, when=(("lora.rank",),))
    """Of the LoRA files that the run writes; bfloat16 = half the size, each weight rounded by up to 0.4 %. Checkpoints
    resume in float32 whatever it is."""


@dataclass(frozen=True)
class Fsdp(Section):
    """How weights lie over the GPUs."""

    mode: Literal["replicate", "shard", "hybrid"] = setting("replicate", resumable=True)
    """Layout of the weights. shard = over all GPUs; hybrid = over those of a machine."""

    activation_checkpointing: float = setting(0.0, min=0, max=1, resumable=True)
    """Fraction of activations that the backward recomputes: 0 = none, 1 = all but the blocks' inputs, a third more
    compute. Between the two the compiler chooses what costs least, which takes compile."""

    offload: Literal["", "optimizer", "weights"] = setting("", resumable=True)
    """What stays in host memory: "" = nothing; optimizer = its state while images are sampled; weights = also sharded
    weights, one GPU's too, which are fetched block by block."""


@dataclass(frozen=True)
class Sample(Section):
    """The rollout."""

    num_steps: int = setting(10, min=2, max=1000)
    """Denoising steps of a rollout."""

    guidance_scale: float = setting(1.0, min=0, max=1000)
    """Guidance scale; above 1 costs a second forward per step."""

    noise_level: float = setting(0.7, min=1e-3, max=10, used_by=NOISY)
    """Noise level eta of the SDE step; at most 1 for cps and cps_gaussian."""

    sde_type: Literal["sde", "dance", "cps", "cps_gaussian"] = setting("sde", used_by=NOISY)
    """Formula of a noisy step; cps_gaussian is cps with its true log-density."""

    num_prompts_per_epoch: int = setting(16, min=1, max=10**6)
    """Prompts per epoch, on all GPUs together."""

    num_images_per_prompt: int = setting(8, min=1, max=10**4)
    """Group size; in train_*_pr.py, trunks per prompt."""

    prompt_weights: Literal["uniform", "signal"] = setting(
        "uniform",
        used_by=COMPARED,
        when=(
            ("preferences.path", ""),
            ("sample.baseline", "group", "prompt"),
            ("train.reward_aggregation", "sum"),
            ("train.diversity_weight", 0.0),
        ),
    )
    """How an epoch draws its prompts: uniform = in shuffled passes over all of them; signal = different ones, by how
    much their images' rewards differ, which is p (1 - p) for rewards of 0 and 1 of which a share p is 1. A prompt that
    was never drawn counts as one of p = 1/2."""

    prompt_weight_decay: float = setting(
        0.5, min=0, max=0.999, used_by=COMPARED, when=(("sample.prompt_weights", "signal"),)
    )
    """What a visit leaves of a prompt's mean signal: with 0.5, a prompt whose images score alike is drawn half as often
    after each visit."""

    prompt_weight_floor: float = setting(
        0.05, min=1e-4, max=1, used_by=COMPARED, when=(("sample.prompt_weights", "signal"),)
    )
    """Weight that a prompt keeps however alike its images score, relative to that of p = 1/2, so that each is drawn
    again."""

    batch_size: int = setting(16, unit="rows", min=1, max=MAX_BATCH_SIZE)
    """Rows per forward and GPU wherever a log-prob is computed: rollout and update."""

    global_std: bool = setting(False, used_by=ONLINE, read_in="advantages")
    """Divide advantages by the std of the whole epoch instead of the group's."""

    baseline: Literal["group", "prompt", "all"] = setting("group", used_by=ONLINE)
    """What rewards are compared within: group = images of a prompt, or branches of a trunk's step; prompt = branches of
    all its trunks at a step, in train_*_pr.py; all = the whole epoch."""

    scouts_per_image: int = setting(0, unit="images", min=0, max=1000, used_by=(GRPO, NFT), read_in="rollout")
    """Cheap images that are drawn for each trained one: the best and the worst of a prompt are drawn again from their
    noise, by the update's weights, and trained; 0 = none."""

    scout_ratio: float = setting(
        0.4, min=0, max=1, used_by=(GRPO, NFT), read_in="rollout", when=(("sample.scouts_per_image",),)
    )
    """Fraction of the forwards of a scout after its noise; 0 = all of them."""

    # train_*_nft.py asks for 0.
    sde_window_size: int = setting(2, unit="steps", min=0, used_by=(GRPO, NFT, DISTILL))
    """Steps that are sampled with noise and trained; 0 = all but the last."""

    sde_window_range: tuple[int, int] = setting((0, 5), used_by=(GRPO, DISTILL))
    """Steps [first, last) in which the window lies. With sde_window_size 0 all steps but the last are noisy, and no
    other range is taken."""

    sde_window_interval: int = setting(
        0, unit="updates", min=0, used_by=(GRPO, DISTILL), read_in="rollout", when=(("sample.sde_window_size",),)
    )
    """0 = the window is at a random place for each block of whole groups; N = it moves on by one step every N updates,
    and from the end of the range back to its start."""

    same_latent: bool = setting(False, used_by=(GRPO, DISTILL))
    """Start a group from one noise: it is one image until the window."""

    num_branches: int = setting(1, min=1, max=4096, used_by=(PR,))
    """Noisy branches per step of a trunk, at least 2."""

    completion_batch_size: int = setting(
        0, unit="rows", min=0, max=4096, used_by=BATCHED, when=(("preferences.path", ""),), resumable=True
    )
    """Rows per forward without a log-prob, at most the images of an epoch; 0 = sample.batch_size."""

    flash_ratio: float = setting(0.0, min=0, max=1, used_by=BATCHED)
    """After the noise, compute only this fraction of the forwards; 0 = all of them."""

    flash_solver: Literal["dpm", "extrapolate"] = setting("dpm", used_by=BATCHED, when=(("sample.flash_ratio",),))
    """Solver of flash_ratio: dpm = DPM-Solver++ on a coarser grid; extrapolate = all steps, some without a forward."""

    text_multiple: int = setting(0, unit="tokens", min=0, max=2048, used_by=FAST, resumable=True)
    """Pad text to a multiple of this where no log-prob is computed and no gradient is taken, in train_*_nft.py in the
    update, too; 0 = text_tokens."""

    rollout_weights: Literal["exact", "merged", "merged_fp8", "fp8"] = setting(
        "exact", used_by=FAST, when=(("lora.rank",), ("fsdp.mode", "replicate"))
    )
    """Weights of forwards without a log-prob or a gradient: exact = the update's; merged = a copy with the adapter
    added, faster; merged_fp8 = a copy in fp8 whose products are fp8, other images; fp8 = no copy, but fp8 products of
    base_precision fp8_weights."""


@dataclass(frozen=True)
class Train(Section):
    """The update."""

    learning_rate: float = setting(3e-4, min=0, max=1000)
    """Highest learning rate of the run."""

    learning_rate_schedule: Literal["constant", "linear", "cosine"] = setting("constant")
    """linear and cosine fall to 0 at the end of num_epochs."""

    warmup_updates: int = setting(0, unit="updates", min=0)
    """Updates over which the learning rate rises from 0."""

    adam_betas: tuple[float, float] = setting((0.9, 0.999), min=0, max=0.9999999)
    """Betas of AdamW."""

    weight_decay: float = setting(1e-4, min=0, max=1000)
    """Weight decay of AdamW."""

    max_grad_norm: float = setting(1.0, min=TINY)
    """Norm to which longer gradients are scaled down."""

    grad_input_precision: Literal["", "fp8"] = setting("", when=(("base_precision", "fp8_weights"),))
    """Precision of the products that give the gradients of layers' inputs; "" = precision; "fp8" = faster, by rounded
    rows of gradients and weights, behind the same forward."""

    updates_per_epoch: int = setting(2, unit="updates", min=1, max=10**6)
    """Optimizer steps per epoch and inner epoch."""

    inner_epochs: int = setting(1, min=1, max=1000, used_by=BATCHED, read_in="updates")
    """Passes over one rollout, reshuffled."""

    objective: str = setting("clip", choices=OBJECTIVES, used_by=RATIO, read_in="add_gradients", own_choice=OWN_LOSS)
    """Loss of a noisy step."""

    forward_objective: str = setting(
        "nft", choices=FORWARD_OBJECTIVES, used_by=(NFT,), read_in="add_gradients", own_choice=OWN_LOSS
    )
    """Loss of finished images that are noised afresh."""

    clip_std_exponent: float = setting(0.0, min=0, max=10, used_by=RATIO, read_in="add_gradients")
    """Power of the step's standard deviation by which the log-ratio is multiplied before it is clipped; 0 = none, 2 =
    published."""

    endpoint_magnitude: float = setting(0.1, min=TINY, max=1000, used_by=(GRPO,), read_in="add_gradients")
    """How far an update moves velocities or final latents, in root mean squares of the direction of reward."""

    endpoint_space: Literal["velocity", "x_0"] = setting("velocity", used_by=(GRPO,), read_in="add_gradients")
    """Where train.endpoint_magnitude is measured: of the velocity at each step, or of the final latents that it leads
    to, sigma times as far."""

    old_log_prob: Literal["rollout", "recompute"] = setting("rollout", used_by=RATIO)
    """Old log-prob of the ratio: the rollout's, or recomputed by one extra forward per row."""

    clip_range: float = setting(1e-4, min=0, used_by=ONLINE, read_in="add_gradients")
    """Clip range of the ratio. Log-probs are means over elements, so ratios stay near 1."""

    kl_limit: float = setting(1e-5, unit="nats per latent element", min=0, used_by=RATIO, read_in="add_gradients")
    """KL of a step from the rollout's beyond which a row stops pushing further."""

    parity_limit: float = setting(1.0, unit="clip ranges", min=0, used_by=(*RATIO, REFL), resumable=True)
    """End the run if log-ratios of an epoch's first update, which should be 0, are larger than this, on average larger
    than a tenth of it, or clipped in more than a hundredth of it of all rows; 0 = no limit, as with clip_range 0. In
    train_*_refl.py, if a velocity of an update differs from the rollout's by more than this many thousandths."""

    adv_clip_max: float = setting(5.0, min=TINY, used_by=ONLINE, read_in="add_gradients")
    """Largest size of an advantage."""

    adv_bound: Literal["clip", "tanh"] = setting("clip", used_by=ONLINE, read_in="add_gradients")
    """How advantages A stay within m = adv_clip_max: clip = larger ones become m; tanh = m tanh(A / m), which keeps
    their order."""

    reward_aggregation: Literal["sum", "gdpo"] = setting("sum", used_by=ONLINE, read_in="advantages")
    """How several rewards become one advantage: sum = of weighted rewards; gdpo = of their advantages."""

    diversity_weight: float = setting(0.0, min=0, used_by=ONLINE, read_in="advantages")
    """Weight, beside the rewards, of an image's distance to the mean of its group's images (its part of
    health/diversity, 0.8 of the tiny base); 0 = none."""

    filter_groups: bool = setting(
        False,
        used_by=ONLINE,
        read_in="advantages",
        when=(("sample.baseline", "group", "prompt"), ("train.diversity_weight", 0.0)),
    )
    """Leave groups whose rewards are all alike out of the mean that is the loss."""

    beta: float = setting(0.0, min=0, used_by=(*ONLINE, REFL), read_in="add_gradients")
    """Weight of the KL to the reference policy; in train_*_nft.py and train_*_refl.py, of the squared distance to
    it."""

    reference_interval: int = setting(0, unit="updates", min=0, used_by=(*ONLINE, DPO, REFL), when=(("train.beta",),))
    """Let the policy become its own reference every N updates; 0 = never."""

    reference_kl: float = setting(0.0, min=0, used_by=(*ONLINE, REFL), when=(("train.beta",),))
    """Let the policy become its own reference after an update whose mean KL to it, or in train_*_nft.py and
    train_*_refl.py mean squared distance, is above this; 0 = never."""

    beta_gate: float = setting(
        0.0, min=0, max=1, used_by=(*ONLINE, REFL), read_in="add_gradients", when=(("train.beta",),)
    )
    """Pull only images to the reference that the trained rewards rank higher than those of eval.rewards do, which are
    then computed of training images, too: this fraction of all, those that differ most; 0 = pull every image."""

    data: str = setting("", used_by=(*ONLINE, REFL), when=(("frames", 1),))
    """Folder of images with captions, in its metadata.jsonl, that flow matching trains on beside the rewards; "" =
    none."""

    data_weight: float = setting(0.01, min=TINY, used_by=(*ONLINE, REFL), when=(("train.data",),))
    """Weight of flow matching on the images of train.data."""

    adaptive_beta: bool = setting(False, used_by=(NFT,), read_in="add_gradients", when=(("train.beta",),))
    """Pull images to the reference by beta times 2 (1 - r), where r in [0, 1] is DiffusionNFT's of the advantage: the
    worst most, the best not at all."""

    reference_guidance_scale: float = setting(0.0, min=0, max=1000, used_by=(*ONLINE, REFL), when=(("train.beta",),))
    """Guidance scale of the first reference: above the policy's, the policy learns it; 0 = the policy's."""

    guidance_scale: float = setting(0.0, min=0, max=1000, used_by=ONLINE, when=(("train.old_log_prob", "recompute"),))
    """Guidance scale of the policy in the update, the old and the trained one; 0 = sample's."""

    shared_noise: bool = setting(False, used_by=(NFT,))
    """Noise the images of a group alike, to the same levels."""

    flow_matching_weight: float = setting(0.0, min=0, used_by=(NFT,), read_in="add_gradients")
    """Weight of flow matching on the run's own images, good and bad alike."""

    dgpo_beta: float = setting(100.0, min=0, used_by=(NFT,), read_in="add_gradients")
    """How sharply a group's difference of velocity errors decides; published 10 to 100 over a fixed reference, 2000 and
    more over the old policy."""

    proximal_weight: float = setting(30.0, min=0, used_by=(NFT,), read_in="add_gradients")
    """Weight of the log-ratio beside the advantage; 0 = none. Published as advantages of 0.1 (reward - mean): 10 / the
    std that advantages are divided by."""

    reward_multiplier: float = setting(1.0, min=0, used_by=(NFT,), read_in="add_gradients")
    """Weight of the advantage beside the pull to the reference, which is beta; published 50 beside 1. On the tiny model
    runs with 2 and more beside 1 fall."""

    crd_beta: float = setting(1.0, min=TINY, used_by=(NFT,), read_in="add_gradients")
    """Scale of the log-ratio beside the reward that it is fitted to: larger = the policy changes less."""

    nft_beta: float = setting(1.0, min=TINY, used_by=(NFT,), read_in="add_gradients")
    """Share of the trained policy in the mixture that is compared with x_0."""

    old_decay_schedule: float = setting(1.0, min=0, max=3, used_by=(NFT,))
    """What the old policy, which samples, keeps of itself: 1 = up to a half, 2 = none at first, then up to 0.999, 3 = a
    quarter at first, then up to 0.999, see losses.old_policy_decay; a number below 1 = always this share."""

    sampler_decay_schedule: float = setting(-1.0, min=-1, max=3, used_by=(NFT,))
    """As old_decay_schedule, of a third policy, which then samples in place of the old one; -1 = there is none."""

    dpo_beta: float = setting(1000.0, min=0, used_by=(DPO,), read_in="add_gradients")
    """How sharply a pair's difference of velocity errors decides."""

    gradient_path: str = setting("refl", choices=GRADIENT_PATHS, used_by=(REFL,))
    """Velocities that carry the reward's gradient, of one late step (refl), of the last steps (draft), of two leaps
    (leap) or of some steps at fixed states (sparse)."""

    gradient_steps: int = setting(
        3,
        unit="steps",
        min=1,
        max=1000,
        used_by=(REFL,),
        when=(("train.gradient_path", "refl", "draft", "sparse"),),
    )
    """refl = the last steps, of which each update draws one; draft = the last steps, all of them; sparse = how many are
    drawn of all steps, late ones more often."""

    gradient_noisings: int = setting(
        0,
        min=0,
        max=100,
        used_by=(REFL,),
        when=(("train.gradient_path", "draft"), ("train.gradient_steps", 1)),
    )
    """How often an image is noised anew to the level of the last step, for further gradients through that step
    (DRaFT-LV; published 2)."""

    leap_discount: float = setting(
        0.3, min=0, max=1, used_by=(REFL,), read_in="rollout", when=(("train.gradient_path", "leap"),)
    )
    """Share of the gradient through the second leap's velocity that goes on to the first leap."""

    leap_tolerance: float = setting(
        0.1, min=TINY, used_by=(REFL,), read_in="rollout", when=(("train.gradient_path", "leap"),)
    )
    """Distances of the leaps to the walk's own states, mean and absolute, count as at least this; an image's loss is
    divided by their sum."""

    sparse_rescale: float = setting(
        0.0, min=0, max=1, used_by=(REFL,), read_in="rollout", when=(("train.gradient_path", "sparse"),)
    )
    """How far the chosen steps' gradients are scaled up to stand for all steps: 0 = not at all, 1 = fully."""

    reward_target: float = setting(0.0, used_by=(REFL,))
    """Loss max(0, this - reward), so that rewards above it teach nothing more; it must lie above what most images
    reach. 0 = none: the loss is -reward."""

    detach_negative: bool = setting(False, used_by=(REFL,))
    """Compute the negative forward of guided velocities without gradients: a third less time, another gradient."""

    teachers: tuple[str, ...] = setting((), used_by=(DISTILL,), when=(("lora.rank",),))
    """Folders of the LoRA adapters that are learned from, such as best/ of other runs."""

    step_weight: Literal["", "equal", "sqrt3", "mean_one"] = setting("", used_by=NOISY, read_in="add_gradients")
    """Weight of a step's loss: sqrt3 = sqrt(3) * transition_std; mean_one = transition_std / its mean over the trained
    steps, which TempFlow-GRPO's constants are; equal = 1; "" = no choice, which is 1 too, and which train_*_pr.py
    refuses."""

    timestep_fraction: float = setting(
        1.0, min=TINY, max=1, used_by=(*ONLINE, DISTILL), when=(("sample.sde_window_size", 0),)
    )
    """Train int(this * num_steps) steps, the first ones, in train_*_nft.py one of each equal share; never the last. A
    window is trained whole."""

    ema_decay: float = setting(0.9, min=0, max=1)
    """Decay of the averaged weights: min((1 + n) / (10 + n), this) after n updates."""

    ema_interval: int = setting(8, unit="updates", min=1)
    """Updates between averagings; before the first, the average is the weights."""

    @property
    def moves_reference(self) -> bool:
        """Return whether the policy may become its own reference."""
        return bool(self.reference_interval or self.reference_kl)

    @property
    def gates_the_pull(self) -> bool:
        """Return whether only some images are pulled to the reference."""
        return self.beta > 0 and self.beta_gate > 0


@dataclass(frozen=True)
class Preferences(Section):
    """Pairs of a better and a worse image."""

    path: str = setting("", used_by=(DPO,))
    """Folder of parquet files from prepare_preferences.py; "" = online, of images just sampled."""

    min_margin: float = setting(0.0, min=0, used_by=(DPO,))
    """Pairs of sampled images are kept if their rewards differ by more than this."""


@dataclass(frozen=True)
class Eval(Section):
    """The evaluation: deterministic, with averaged weights."""

    rewards: tuple[str, ...] = setting((), resumable=True)
    """Names of rewards that are measured but not trained on: they show what is hacked."""

    num_prompts: int = setting(272, unit="prompts", min=0, resumable=True)
    """Validation and test prompts, at most, evenly spread; 0 = none."""

    noises_per_prompt: int = setting(1, min=1, max=10**4, resumable=True)
    """Images of a prompt, always from the same noises."""

    best_by: str = setting("avg", resumable=True)
    """Metric under eval/ whose highest value makes the policy in best/."""

    min_variety: float = setting(0.0, min=0, max=1, resumable=True)
    """Variety under eval/, as a share of that before training, below which no policy is the best; 0 = any."""

    test_freq: int = setting(0, unit="epochs", min=0, resumable=True)
    """Test every N epochs, and before the first and after the last; 0 = only these."""

    num_steps: int = setting(10, min=2, max=1000, resumable=True)
    """Deterministic denoising steps."""

    guidance_scale: float = setting(1.0, min=0, max=1000, resumable=True)
    """Guidance scale; above 1 costs a second forward per step."""

    batch_size: int = setting(64, unit="rows", min=1, max=10**5, resumable=True)
    """Rows per forward and GPU."""

    exact: bool = setting(False, used_by=FAST, resumable=True)
    """Draw the images that choose the best policy as the test's are drawn, by the update's weights; False = by
    sample.rollout_weights and sample.text_multiple, as a rollout's where no log-prob is computed."""

    flash_ratio: float = setting(
        0.0, min=0, max=1, used_by=BATCHED, resumable=True, when=(("eval.exact", False), ("sample.flash_ratio",))
    )
    """Of the images that choose the best policy, compute only this fraction of the forwards, by sample.flash_solver; 0
    = all of them."""

    save_images: int = setting(0, unit="prompts", min=0, resumable=True)
    """Number of validation prompts, evenly spread, whose images each evaluation writes at full size into
    images/eval_EPOCH/, with a table of prompts, noises and scores; 0 = none."""

    image_format: Literal["png", "jpg", "webp"] = setting("png", resumable=True, when=(("eval.save_images",),))
    """Format of the images of eval.save_images: png loses nothing; jpg and webp have quality 95."""


@dataclass(frozen=True)
class Health(Section):
    """Alarms, each of which compares the run with itself; 0 = no limit; see [health](../design/health.md)."""

    action: Literal["log", "lower_learning_rate", "stop", "roll_back"] = setting("log", resumable=True)
    """What an alarm does: log = print it; lower_learning_rate = halve it; stop = save and end; roll_back = to the best
    weights and half of the learning rate; the fourth time, stop."""

    reward_drop: float = setting(3.0, unit="standard errors", min=0, resumable=True)
    """Largest fall of the training reward below its best (means of 5 epochs), less what chance explains."""

    eval_drop: float = setting(3.0, unit="standard errors", min=0, resumable=True)
    """Largest fall of the evaluation below its best."""

    watched_drop: float = setting(3.0, unit="standard errors", min=0, resumable=True)
    """Largest fall of a reward of eval.rewards below its best evaluation, while the trained reward's evaluation has
    risen by as much."""

    epochs_without_signal: int = setting(3, unit="epochs", min=0, resumable=True)
    """Most epochs in a row in which nothing could be learned."""


@dataclass(frozen=True)
class Config(Section):
    """The run."""

    # A checkpoint without it may be resumed.
    algorithm: Literal["grpo", "pr", "nft", "dpo", "distill", "refl"] = setting("grpo", resumable=True)
    """Script that the config is for; another one refuses it."""

    name: str = setting("base", resumable=True)
    """Name of this config, set by the file that made it."""

    method: str = setting("", resumable=True)
    """What a model card calls the algorithm; "" = by the script and its loss, or as functions of your own say."""

    run_name: str = setting("", resumable=True)
    """Run folder under output_dir; "" = name."""

    output_dir: str = setting("runs", resumable=True)
    """Folder in which run folders are made."""

    logger: Literal["wandb", "tensorboard", "none"] = setting("wandb", resumable=True)
    """Tracker that also shows the curves. "none" writes report.html, at evaluations and at the end."""

    alert: str = setting("", resumable=True)
    """Who is told of alarms, the end and a crash: "wandb" = its own alerts; else a command that gets a sentence as its
    last argument, such as "ntfy publish my_runs"; "" = nobody."""

    resume_from: str = setting("", resumable=True)
    # The space keeps the quotation marks apart.
    """ "" starts a new run; "latest" resumes the newest checkpoint of this run; else a checkpoint's folder: another
    run's begins a branch."""

    accept_changes: bool = setting(False, resumable=True)
    """Resume even if files of the data set, model, lora.path or pairs have changed."""

    dry_run: int = setting(0, min=0, max=10**5, resumable=True)
    """Say what the run would be on this number of GPUs, without loading its weights; 0 = train. --dry_run stands for
    the number that torchrun starts, --dry_run=8 for eight."""

    dry_run_format: Literal["text", "json"] = setting("text", when=(("dry_run",),), resumable=True)
    """Form of what a dry run says: lines to be read, or one line of JSON with the figures."""

    custom: Any = setting({})
    """Settings of your own, which a config file of your own adds and no check looks at."""

    seed: int = setting(42, min=-(2**63), max=2**63 - 1)
    """Seed of every random draw of the run."""

    num_epochs: int = setting(100, min=1, resumable=True)
    """Number of epochs, each a rollout and an update."""

    max_hours: float = setting(0.0, unit="hours", min=0, resumable=True)
    """Stop after the first epoch that ends more than this many hours after the run began; 0 = no limit."""

    signal_grace_s: float = setting(25.0, unit="seconds", min=0, resumable=True)
    """Time from a signal that asks the run to end within which the epoch must end; an epoch that would take longer is
    dropped. Saving follows. Below torchrun's 30 s, or what the scheduler is told to leave."""

    save_freq: int = setting(10, unit="epochs", min=0, resumable=True)
    """Save a checkpoint every N epochs, and after the last; 0 = only after the last."""

    keep_checkpoints: int = setting(2, min=1, resumable=True)
    """Number of newest checkpoints that are kept."""

    eval_freq: int = setting(10, unit="epochs", min=0, resumable=True)
    """Evaluate every N epochs, and before the first and after the last; 0 = never."""

    model: str = setting("flow_grpo/assets/tiny_qwenimage")
    """Diffusers folder, or id on the hub."""

    model_class: str = setting("")
    """Model class of your own, as MODULE:CLASS, importable; "" = by the pipeline of model. A run stores
    MODULE:CLASS@DIGEST of its source."""

    dataset: str = setting("dataset/shapes")
    """Folder with {train,validation,test}_metadata.jsonl or .txt; validation is optional."""

    reward_fn: Mapping[str, float] = setting({"shapes": 1.0})
    """Weight of each reward, a file of flow_grpo/rewards; 0 = not used."""

    height: int = setting(64, unit="pixels", min=16, max=8192)
    """Height of an image; a multiple of 16."""

    width: int = setting(64, unit="pixels", min=16, max=8192)
    """Width of an image; a multiple of 16."""

    frames: int = setting(1, unit="frames", min=1, max=1000, used_by=BATCHED)
    """Frames of a video, as many as the model draws (Wan: one more than a multiple of 4); 1 = images."""

    text_tokens: int = setting(20, unit="tokens", min=1, max=2048)
    """Width to which every prompt embedding is padded, in rollout and update alike."""

    cache_dir: str = setting("", resumable=True)
    """Folder in which runs share encoded prompts, so that no text encoder stays on the GPU; "" = none."""

    precision: Literal["fp32", "bf16"] = setting("fp32")
    """Precision of the transformer; trained weights are stored in fp32."""

    base_precision: Literal["", "fp8_weights", "nf4"] = setting("", when=(("lora.rank",), ("fsdp.mode", "replicate")))
    """Precision of the frozen layers beneath an adapter, in rollout and update alike; "" = precision."""

    precompute_modulation: bool = setting(False, when=(("lora.rank",),), resumable=True)
    """Compute what the frozen weights of Qwen-Image make of the timestep alone once, when they are loaded, for the
    run's timesteps, and free them: a third of all."""

    vae_precision: Literal["fp32", "bf16"] = setting("fp32", resumable=True)
    """Precision of VAE decodes. With bf16, pixels differ by less than 0.3 of 255 on average."""

    attention: Literal["", "flash_4"] = setting("", when=(("precision", "bf16"), ("lora.rank",)), resumable=True)
    """Attention of Qwen-Image on a GPU; "" = torch's; "flash_4" = FlashAttention-4, faster under masks, with repeatable
    gradients."""

    batched_guidance: bool = setting(False, resumable=True)
    """Compute both velocities of guidance by one forward of twice the rows, in rollout and update alike. Usually
    faster, with half as many kernels to launch and each weight read once. Forwards without gradients need the memory of
    twice the rows."""

    compile: bool = setting(False, resumable=True)
    """Compile transformer blocks and the decoder; the first start is slow."""

    compile_cache: str = setting("", resumable=True, when=(("compile",),))
    """Folder that keeps compiled blocks for later starts, of each GPU and version of PyTorch by themselves; "" =
    PyTorch's own, a temporary one."""

    vae_batch_size: int = setting(32, unit="frames", min=1, max=10**5, resumable=True)
    """Images per VAE decode, or frames: at least one video."""

    reward: Reward = field(default_factory=Reward)
    lora: Lora = field(default_factory=Lora)
    fsdp: Fsdp = field(default_factory=Fsdp)
    sample: Sample = field(default_factory=Sample)
    train: Train = field(default_factory=Train)
    preferences: Preferences = field(default_factory=Preferences)
    eval: Eval = field(default_factory=Eval)
    health: Health = field(default_factory=Health)

    @property
    def evaluates(self) -> bool:
        """Return whether the run ever evaluates images."""
        return bool(self.eval_freq and self.eval.num_prompts)

    @property
    def drawn(self) -> str:
        """Return the word for what is drawn."""
        return "images" if self.frames == 1 else "videos"

    @property
    def watched_rewards(self) -> list[str]:
        """Return the rewards that evaluations measure beside those that are trained on."""
        return [name for name in self.eval.rewards if name not in self.reward_fn]
