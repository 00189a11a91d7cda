"""Settings of rollouts and updates by what they do to whole runs. Their rows: test_rollout.py."""

import pytest
import torch
import train_qwenimage
import train_qwenimage_pr
from small import config_of, few_prompts, lines_of, prepare, stored, train

from flow_grpo import rewards
from flow_grpo.algorithms.rollout import concat
from flow_grpo.command_line import checks
from flow_grpo.diffusers_patch.flow_model import Network
from flow_grpo.run import sampling, update
from flow_grpo.run.startup import start


@pytest.mark.parametrize(
    "name", ["shapes_qwenimage_pr", pytest.param("shapes_qwenimage,guard", marks=pytest.mark.slow)]
)
def test_recomputed_log_probs_are_the_updates_own_whatever_the_rollout_noted(name, shallow, tmp_path, monkeypatch):
    """Wrong ones end a run (test_parity.py); recomputing them cures it, and says how wrong they were."""
    plain = sampling.from_trace

    def wrong(*args, **options):
        found = plain(*args, **options)
        found.log_probs += 1e-3
        found.means += 1e-3
        return found

    settings = shallow | dict(num_epochs=1, eval_freq=0, sample__num_prompts_per_epoch=1)
    right = lines_of(train(name, tmp_path / "right", train__old_log_prob="recompute", **settings))
    apart = dict(sample__guidance_scale=2.0, train__guidance_scale=1.0)  # of the guidance in the update alone
    guided = lines_of(train(name, tmp_path / "guided", train__old_log_prob="recompute", **settings, **apart))
    monkeypatch.setattr(sampling, "from_trace", wrong)
    cured = lines_of(train(name, tmp_path / "cured", train__old_log_prob="recompute", **settings))
    assert guided[-1]["parity/recomputed_abs_diff_max"] > 1e-3
    for lines, gap in ((right, 0.0), (cured, 1e-3), (guided, guided[-1]["parity/recomputed_abs_diff_max"])):
        first, *_, epoch = [line for line in lines if line["kind"] in ("update", "epoch")]
        assert first["parity/log_prob_abs_diff_max"] == first["ratio_std"] == 0
        assert epoch["parity/recomputed_abs_diff_max"] == pytest.approx(gap, rel=1e-2)
    assert losses_of(right) == losses_of(cured)


def test_batched_guidance_gives_each_forward_of_rollout_update_and_evaluation_twice_the_rows(
    shallow, tmp_path, monkeypatch
):
    plain = Network.forward
    rows = set()

    def seen(network, x, *inputs):
        rows.add(len(x))
        return plain(network, x, *inputs)

    monkeypatch.setattr(Network, "forward", seen)
    guided = dict(sample__guidance_scale=4.0, eval__guidance_scale=4.0, sample__batch_size=4, eval__batch_size=4)
    settings = shallow | guided | dict(num_epochs=1, sample__num_prompts_per_epoch=1)
    in_two = losses_of(lines_of(train("shapes_qwenimage", tmp_path / "two", **settings)))
    assert rows == {4}
    rows.clear()
    in_one = losses_of(lines_of(train("shapes_qwenimage", tmp_path / "one", batched_guidance=True, **settings)))
    assert rows == {8}
    assert in_one == pytest.approx(in_two, rel=1e-3)

    # prepare_preferences.py draws by the same settings.
    rows.clear()
    how = dict(max_rows=2, part_size=2, sample__num_images_per_prompt=2, sample__guidance_scale=4.0)
    prepare("shapes_qwenimage_dpo", tmp_path / "pairs", batched_guidance=True, **how)
    assert rows == {8}


@pytest.mark.parametrize("loss", ["fdfo", "endpoint"])
def test_rows_of_whole_groups_carry_the_images_that_their_paths_led_to(loss, shallow, tmp_path, monkeypatch):
    submit = train_qwenimage.rewards.submit
    backward = train_qwenimage.backward
    finished = {}
    minibatches = []

    def noted(run, samples, batch):
        finished.update(zip(batch.image_numbers, samples.latents, strict=True))
        return submit(run, samples, batch)

    def kept(run, losses, rows):
        minibatches.append(rows)
        backward(run, losses, rows)

    monkeypatch.setattr(train_qwenimage.rewards, "submit", noted)
    monkeypatch.setattr(train_qwenimage, "backward", kept)
    train(f"shapes_qwenimage,{loss}", tmp_path, num_epochs=1, eval_freq=0, **shallow)
    assert len(minibatches) > 1
    for rows in minibatches:
        images, steps = rows.row_ids.T
        assert rows.group_size == 4
        # Neighbours are the images of one group, at one step.
        assert (images.view(-1, 4) // 4 == images.view(-1, 4)[:, :1] // 4).all()
        assert (steps.view(-1, 4) == steps.view(-1, 4)[:, :1]).all()
        for image, x_0 in zip(images.tolist(), rows.x_0, strict=True):
            assert torch.equal(x_0, finished[image])


@pytest.mark.parametrize("script", [train_qwenimage, train_qwenimage_pr], ids=["plan of a window", "plan of branches"])
def test_an_update_may_train_images_in_a_window_and_branches_whatever_the_plan(script, shallow, tmp_path):
    """The first ratios are 1, or optimizer_step would end the run."""
    kind = "shapes_qwenimage_pr" if script is train_qwenimage_pr else "shapes_qwenimage"
    config = config_of(kind, tmp_path, num_epochs=1, eval_freq=0, train__updates_per_epoch=1, **shallow)
    run = start(config, checks.PR if script is train_qwenimage_pr else checks.GRPO)
    for num_branches in (1, 3):
        stored = []
        submitted = []
        for batch, samples in sampling.sample_epoch(run, 0, lambda batch: range(1, 3), num_branches):
            groups = None
            if num_branches > 1:
                groups = torch.tensor(batch.image_numbers)[:, None, None].expand(-1, 2, num_branches)
            stored.append(sampling.to_rollout(run, samples, batch, num_trained_steps=2))
            submitted.append(train_qwenimage.rewards.submit(run, samples, batch, groups))
        rollout = concat(stored)
        scores = train_qwenimage.rewards.gather(run, submitted)
        rollout.advantages, rollout.loss_weight = train_qwenimage.rewards.advantages(run, scores)
        (minibatches,) = update.updates(run, rollout)
        for rows in minibatches:
            assert rows.num_outcomes == num_branches
            train_qwenimage.add_gradients(run, rows)
    update.optimizer_step(run)
    (line,) = lines_of(run.folder, "update")
    assert line["parity/log_prob_abs_diff_max"] == 0 < line["grad_norm"]


def losses_of(lines):
    return [line["loss"] for line in lines if "loss" in line]


def test_advantages_and_the_gradients_norm_count_up_to_their_bounds(shallow, tmp_path):
    """Both bounds are below all advantages, so that the gradient is in proportion to them."""
    how = shallow | dict(num_epochs=1, eval_freq=0, sample__num_prompts_per_epoch=2, train__updates_per_epoch=1)
    how |= dict(train__max_grad_norm=1e-5)
    one = train("shapes_qwenimage", tmp_path / "1", train__adv_clip_max=1e-3, **how)
    two = train("shapes_qwenimage", tmp_path / "2", train__adv_clip_max=2e-3, **how)
    norm = lines_of(one, "update")[0]["grad_norm"]
    assert lines_of(two, "update")[0]["grad_norm"] == pytest.approx(2 * norm, rel=1e-3)
    tensors = stored(two, 1)
    moments = [tensors[name].flatten() for name in tensors if name.endswith("/exp_avg")]
    assert torch.cat(moments).norm() == pytest.approx(0.1 * 1e-5, rel=1e-2)
    assert norm > 1e-5


@pytest.mark.slow
def test_with_one_baseline_for_all_groups_that_score_alike_are_compared_with_each_other(shallow, tmp_path, monkeypatch):
    def length(images, prompts, metadata):
        return torch.tensor([float(len(prompt)) for prompt in prompts])

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("length", length)
    how = dict(model=shallow["model"], reward_fn={"length": 1.0}, num_epochs=1, eval_freq=0)
    for baseline, flat, size in (("group", 1, 0.0), ("all", 0, 1.0)):
        folder = train("shapes_qwenimage", tmp_path / baseline, sample__baseline=baseline, **how)
        assert [line["reward/zero_std_share"] for line in lines_of(folder, "epoch")] == [flat]
        found = [line["advantage_abs_mean"] for line in lines_of(folder, "update")]
        assert found == pytest.approx([size] * 2, abs=1e-3)  # two prompts: +1 and -1


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(dict(sde_window_size=0), id="own"),
        pytest.param(dict(same_latent=True, noise_level=0.01), id="shared", marks=pytest.mark.slow),
    ],
)
def test_an_epoch_draws_noise_of_its_own(how, tmp_path):
    """The same prompt under the same weights: with noise in every step, or from one start with little after it."""
    how = {f"sample__{key}": value for key, value in how.items()}
    how |= dict(sample__num_prompts_per_epoch=1, train__learning_rate=0.0)
    how |= dict(num_epochs=2, eval_freq=0, reward_fn={"jpeg_compressibility": 1.0})
    how |= dict(dataset=few_prompts(tmp_path / "data", 1))
    first, second = lines_of(train("shapes_qwenimage", tmp_path / "runs", **how), "epoch")
    assert abs(first["reward/avg"] - second["reward/avg"]) > 0.05
