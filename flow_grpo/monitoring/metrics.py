"""What the numbers that a run logs are called and mean, and how they are averaged until they are logged."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Metric(NamedTuple):
    meaning: str
    expect: str  # what a healthy run shows
    unit: str = ""


METRICS = {  # a name that ends in <...> stands for every name that begins with what precedes it
    "reward/avg": Metric("weighted sum of the rewards, mean over the epoch's images", "rises"),
    "reward/<name>": Metric("one reward, mean over the epoch's images", "rises, or holds while another does"),
    "reward/scouts": Metric("reward/avg of the scouts (sample.scouts_per_image)", "rises"),
    "reward/group_std": Metric("standard deviation within a group, mean over groups", "falls slowly, never to 0"),
    "reward/zero_std_share": Metric("share of groups whose images all score alike: no signal", "below 0.5"),
    "reward/<name>_group_std": Metric("reward/group_std of one reward", "like reward/group_std"),
    "reward/<name>_zero_std_share": Metric("reward/zero_std_share of one reward", "like reward/zero_std_share"),
    "reward/<name>_masked_share": Metric(
        "share of images whose reward failed and was masked (`max_masked_share`)", "0"
    ),
    "eval/avg": Metric("weighted sum of the rewards over the validation prompts", "rises with reward/avg"),
    "eval/<name>": Metric(
        "one reward over the validation prompts, which choose the best policy", "rises with reward/; else it is hacked"
    ),
    "eval/std_error": Metric("standard error of the evaluation that says which policy is best", "steady"),
    "test/std_error": Metric("the same of the test", "steady"),
    "test_best/std_error": Metric("the same of the weights in best/", "steady"),
    "test/<name>": Metric("the same over the test prompts, which choose nothing", "follows eval/"),
    "test/<name>/<tag>": Metric("a score of right or wrong over the test prompts of one category", "follows test/"),
    "test/distance": Metric(
        "root mean square distance between two images of a test prompt, in the VAE's features per element",
        "falls slowly",
    ),
    "test/variety": Metric("test/distance over its first one, before training", "above 0.5; near 0 is mode collapse"),
    "test/<name>_bits": Metric(
        "collision entropy of what a reward's file tells a prompt's images apart by: -log2 of how often two are alike",
        "falls slowly; 0: all are alike",
    ),
    "eval/distance": Metric("test/distance of the validation prompts", "like test/distance"),
    "eval/variety": Metric("test/variety of the validation prompts", "like test/variety"),
    "eval/<name>_bits": Metric("the same entropy of the validation prompts", "like the test's"),
    "test_best/<name>": Metric("test/ of the weights in best/, after the last epoch", "at least test/'s last"),
    "best_epoch": Metric("epochs that these weights were trained", "near the last one, or the run went backwards"),
    "loss": Metric(
        "what is differentiated: (policy_loss plus the KL penalty) times the weights of the rows",
        "noise; its sign says nothing",
    ),
    "policy_loss": Metric("the algorithm's own objective", "GRPO: near 0 in an epoch's first update"),
    "ratio_mean": Metric(
        "policy / rollout probability as the objective clips it, mean over rows",
        "1 in the first update, then close to it",
    ),
    "ratio_std": Metric("its standard deviation over rows", "0 in the first update, then about clip_range"),
    "clip_fraction_high": Metric("share of rows clipped from above", "0 in the first update, then below 0.5"),
    "clip_fraction_low": Metric("share of rows clipped from below", "like clip_fraction_high"),
    "approx_kl": Metric(
        "mean (log-prob now - at rollout)^2 / 2", "0 in the first update, then small and steady", "nat"
    ),
    "kl_reference": Metric("KL from the reference policy, per latent element", "levels off if beta > 0", "nat"),
    "old_distance": Metric("NFT: squared distance to the old policy's velocity, per element", "small, steady"),
    "reference_distance": Metric("NFT: the same to the reference's, the penalty of train.beta", "grows, levels off"),
    "relative_velocity_norm": Metric(
        "NFT: norm of the policy's velocity over the reference's", "within 0.1 of 1 (arXiv:2606.27771)"
    ),
    "implicit_accuracy": Metric(
        "DPO: share of pairs whose winner gained on the reference against the loser", "0 at first, then above 0.5"
    ),
    "winner_error_gap": Metric("DPO: winners' velocity error minus the reference's", "below 0, or barely above"),
    "loser_error_gap": Metric("DPO: the same of losers", "above winner_error_gap"),
    "winner_rise_share": Metric("DPO: share of pairs whose winner is fitted worse than by the reference", "0.5 or so"),
    "validation/<name>": Metric("DPO: the same of held-out pairs, always under the same noises", "like <name>"),
    "grad_norm": Metric("gradient norm over all ranks, before clipping", "steady; peaks announce instability"),
    "weight_norm": Metric("norm of all trained weights after the epoch", "changes slowly; a jump is a wrong step"),
    "learning_rate": Metric("of the update just taken", "the configured value"),
    "advantage_abs_mean": Metric("mean absolute advantage of the rows", "0.7 to 0.9; less if groups score alike"),
    "advantage_positive_share": Metric(
        "share of rows whose advantage is above 0", "near 0.5; 0 if groups score alike, low if few of a group are good"
    ),
    "parity/log_prob_abs_diff_mean": Metric("mean gap of log-probs, update to rollout", "0 in float32", "nat"),
    "parity/log_prob_abs_diff_max": Metric("the largest such gap", "0; train.parity_limit ends the run", "nat"),
    "parity/ratio_minus_one_e4": Metric("mean absolute ratio - 1 before any update", "0 in float32", "1e-4"),
    "parity/recomputed_abs_diff_mean": Metric(
        "mean gap of recomputed log-probs to the rollout's (train.old_log_prob recompute)", "0 in float32", "nat"
    ),
    "parity/recomputed_abs_diff_max": Metric("the largest such gap", "0 in float32, else below clip_range / 10", "nat"),
    "health/latent_rms": Metric("root mean square of the final latents", "steady; drift: washed-out or burnt images"),
    "health/diversity": Metric("spread within a group over latent_rms", "falls slowly; near 0 is mode collapse"),
    "health/<limit>": Metric("what the limit of that name in config.health bounds", "well below its limit"),
    "health/limits_exceeded": Metric("limits of config.health that the epoch exceeded", "0"),
    "health/action_taken": Metric("whether health.action was taken after the epoch", "0"),
    "health/rolled_back_to": Metric("epochs of the policy that health.action roll_back went back to", "absent"),
    "health/learning_rate_factor": Metric("what health.action has left of train.learning_rate", "1"),
    "time/rollout_s": Metric("sampling the epoch's images", "steady", "s"),
    "time/reward_s": Metric("waiting for rewards that the rollout did not hide", "near 0", "s"),
    "time/update_s": Metric("forward, backward and optimizer steps", "steady", "s"),
    "time/eval_s": Metric("evaluation", "steady", "s"),
    "time/save_s": Metric("writing a checkpoint", "steady", "s"),
    "time/epoch_s": Metric("from the epoch's first timed phase to its log line", "about the sum of the phases", "s"),
    "batch_occupancy": Metric("fraction of the rows of the rollout's forwards that were an image's", "above 0.9"),
    "images_per_s": Metric("training images per second, all GPUs, eval and save not counted", "steady", "1/s"),
    "memory/peak_gib": Metric("peak allocated GPU memory of the main rank", "flat after the first epoch", "GiB"),
    "epoch": Metric("epochs finished before this one", "counts up from 0"),
    "step": Metric("optimizer steps taken", "counts up"),
    "images": Metric("training images sampled so far, all GPUs", "counts up"),
    "forwards": Metric(
        "transformer rows of the epoch, all GPUs; guidance counts two, a backward or an evaluation none", "steady"
    ),
}


def explain(name: str) -> tuple[str, Metric] | None:
    """The row of METRICS for a name, and the row's key; None for a name that it does not explain."""
    if name in METRICS:
        return name, METRICS[name]
    keys = [key for key in METRICS if "<" in key and name.startswith(key.split("<")[0])]
    fitting = [key for key in keys if name.endswith(key.rpartition(">")[2]) and name.count("/") == key.count("/")]
    key = max(fitting or keys, key=len, default=None)  # reward/<name>_group_std before reward/<name>
    return key and (key, METRICS[key])


class Meter:
    """Means and maxima of named per-row values between two `pop`s, without a device sync until then."""

    def __init__(self, device: str | torch.device = "cpu"):
        self.device = device
        self._clear()

    def _clear(self):
        self.sums, self.counts, self.maxima, self.spreads = {}, {}, {}, set()

    def add(self, **values) -> None:
        """Numbers or tensors of any shape: the mean weights every element alike, however minibatches were cut."""
        for name, value in values.items():
            value = self._float64(value)
            self.sums[name] = self.sums.get(name, 0) + value.sum()
            self.counts[name] = self.counts.get(name, 0) + value.numel()

    def add_weighted(self, weights: Tensor, **values: Tensor) -> None:
        """Like `add`, but popped as sum(weight * value) / sum(weight); NaN where all weights are 0."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + (self._float64(weights) * self._float64(value)).sum()
            self.counts[name] = self.counts.get(name, 0) + self._float64(weights).sum()

    def add_spread(self, **values) -> None:
        """Like `add`, but popped as <name>_mean and <name>_std, the population's standard deviation."""
        for name, value in values.items():
            self.add(**{f"{name}_mean": value, f"{name}_std": self._float64(value).square()})
            self.spreads.add(name)

    def add_max(self, **values) -> None:
        """Like `add`, but popped as the maximum."""
        for name, value in values.items():
            value = self._float64(value).max()
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def pop(self, reduce: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Everything since the last pop, in one copy to the host; every rank must have added the same names.

        Args:
            reduce: (sums [2, M], maxima [K]) -> the same over all ranks, float64: distributed.over_ranks.
        """
        names, tops = sorted(self.sums), sorted(self.maxima)
        if not names + tops:
            return {}
        columns = [self.sums[n] for n in names], [self.counts[n] for n in names], [self.maxima[n] for n in tops]
        sums, counts, maxima = (torch.stack([self._float64(x) for x in c]) if c else self._float64(c) for c in columns)
        (sums, counts), maxima = reduce(torch.stack([sums, counts]), maxima)
        values = dict(zip(names + tops, torch.cat([sums / counts, maxima]).tolist()))
        for name in self.spreads:
            variance = values[f"{name}_std"] - values[f"{name}_mean"] ** 2
            values[f"{name}_std"] = 0.0 if variance < 0 else math.sqrt(variance)  # a NaN stays a NaN
        self._clear()
        return values

    def _float64(self, value) -> Tensor:
        # The spread of a ratio is 1e-5 around 1, and float32 has no room for its square.
        return torch.as_tensor(value, device=self.device).detach().double()
