"""--dry_run: what is measured of a run, how large its files become, and which prompts are evaluated how often."""

import itertools
import json
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from PIL import Image
from small import ROOT, as_prompts, config_of, exported, lines_of, loaded, plan, stored, train

from flow_grpo import rewards
from flow_grpo.algorithms import batch_plan
from flow_grpo.base.prompt import Prompt
from flow_grpo.checkpoints import exports
from flow_grpo.command_line import checks
from flow_grpo.data import embedding_cache
from flow_grpo.data.prompts import Split
from flow_grpo.diffusers_patch import model_classes, registry
from flow_grpo.diffusers_patch.sampling_params import of_validation
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.evaluation import saved_images
from flow_grpo.plan import estimate, forwards, measured, row_cost, sketch
from flow_grpo.run import dry_run
from flow_grpo.run.run import Experiment, Prompts
from flow_grpo.settings import config_files, table
from flow_grpo.weights import fsdp_utils, policies


def test_a_dry_run_says_what_a_run_would_be_and_makes_no_folder(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        train("shapes_qwenimage_pr", tmp_path / "runs", dry_run=2, lora__rank=32)
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "an epoch on 2 GPUs" in said
    assert "0.5898 million are trained" in said
    assert not (tmp_path / "runs").exists()


def row_of(run, /, **changes):
    """The measured run whose figures hold for one of config/ on four GPUs."""
    config = config_files.load(f"{ROOT}/config/{run}")
    config.dry_run = 4
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return measured.of_config(table.typed(config))


def test_each_measured_row_holds_for_its_own_config():
    for row in measured.rows():
        config = replace(row.config(), dry_run=row.gpus)
        assert measured.of_config(config) == row


def test_measured_figures_hold_whatever_is_changed_that_costs_nothing():
    changes = dict(seed=1, name="mine", num_epochs=7, dataset="data/mine", train__learning_rate=1e-3, lora__alpha=7)
    changes |= dict(eval__num_steps=9, health__action="stop", cache_dir="elsewhere", reward_fn__pickscore=0.5)
    row = row_of("grpo.py:pickscore_qwenimage", **changes)
    assert (row.run, row.settings) == ("pickscore_qwenimage", {})


COSTLY = {"height": 1024, "lora.rank": 512, "sample.num_steps": 40, "sample.scouts_per_image": 4}
COSTLY |= {"train.inner_epochs": 4, "fsdp.activation_checkpointing": 0.0, "sample.batch_size": 4, "cache_dir": ""}
COSTLY |= {"train.beta": 0.1, "model": "mine"}


@pytest.mark.parametrize("key", COSTLY)
def test_measured_figures_do_not_hold_where_a_setting_that_costs_is_changed(key):
    assert row_of("grpo.py:pickscore_qwenimage", **{key: COSTLY[key]}) is None


def test_sharded_weights_were_measured_on_one_number_of_gpus():
    changes = dict(lora__rank=0, fsdp__mode="shard", compile=False, sample__batch_size=8)
    assert row_of("grpo.py:pickscore_qwenimage", **changes).gpus == 4
    assert row_of("grpo.py:pickscore_qwenimage", **changes, dry_run=8) is None


def test_lines_say_where_figures_are_from():
    config = replace(config_of_type("pickscore_qwenimage"), dry_run=8)
    known = dry_run.GpuFigures("measured", 58.6, "80 GB", 0.88, 2.02, 0.5, 7.04)
    said = "\n".join(dry_run.gpu(config, known))
    assert "GPU, measured: 58.6 GiB" in said
    assert "80 GB" in said
    assert "7.04 images/s to be scored" in said
    unknown = dry_run.GpuFigures("", None, None, None, None, None, None)
    assert "no figures" in "\n".join(dry_run.gpu(config, unknown))
    assert "more than an H200 has" in "\n".join(dry_run.gpu(config, known._replace(gib=150.0, card="")))


def test_where_a_card_of_80_gb_is_its_variant_is_named():
    config = config_of_type("pickscore_qwenimage")
    qwenimage, sd3 = (model_classes.resolve(registry.tiny_folder(name), "") for name in ("qwenimage", "sd3"))
    assert "gpu_80gb" in dry_run.variant_notice(config, qwenimage, 79.1)
    chosen = config_of_type("pickscore_qwenimage,gpu_80gb")
    tiny = config_of_type("shapes_qwenimage")
    no_notice = (config, qwenimage, None), (config, qwenimage, 139.8), (chosen, qwenimage, 79.1)
    for case in (*no_notice, (tiny, qwenimage, 79.1), (config, sd3, 79.1)):
        assert dry_run.variant_notice(*case) == ""


def test_estimates_lie_between_those_of_measured_shares_of_checkpointing():
    config = replace(config_of_type("pickscore_qwenimage"), dry_run=1)
    cost = row_cost.RowCost(flops=10**13, product_numbers=10**9, block_numbers=10**8)
    size = row_cost.ModelSize(weights=2 * 10**10, adapted=10**10, trained=10**8, blocks=60, width=3072)
    work = estimate.Work(cost, size, forwards.Forwards(fast=100, exact=10, frozen=0, trained=10), 16, guided=True)
    rates = estimate.rates()
    memory = []
    seconds = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        of_share = replace(config, fsdp=replace(config.fsdp, activation_checkpointing=share))
        memory.append(estimate.gib(of_share, work, rates))
        seconds.append(estimate.epoch_s(of_share, work, rates))
    assert memory == sorted(memory, reverse=True)
    assert seconds == sorted(seconds)
    for figures in (memory, seconds):
        assert len(set(figures)) == 5
        assert figures[1] == pytest.approx((figures[0] + figures[2]) / 2)
        assert figures[3] == pytest.approx((figures[2] + figures[4]) / 2)


def test_a_measured_run_is_for_the_card_that_it_was_measured_on():
    for row in measured.rows():
        config = replace(row.config(), dry_run=row.gpus)
        source, gib, card, images_per_s = dry_run.memory_and_speed(config, work=None)
        assert source == ("out of memory" if row.out_of_memory else "measured")
        assert (gib, images_per_s) == (row.gib, row.images_per_s)
        assert row.card.endswith(card)


def test_what_was_measured_holds_for_other_weights_of_the_same_sizes():
    known = measured.of_config(replace(config_of_type("pickscore_qwenimage,large_gpu"), dry_run=1))
    newer = replace(config_of_type("pickscore_qwenimage_2512,large_gpu"), dry_run=1)
    assert known is not None
    assert measured.of_config(newer) == known
    # Editing weights have the transformer of an image model, and see sources as well; 2.1 has another class.
    for other in ("Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-2.1", "a folder"):
        assert measured.of_config(replace(newer, model=other)) is None


def config_of_type(name):
    """Typed settings of a published run."""
    return table.typed(config_files.load(f"{ROOT}/config/grpo.py:{name}"))


def test_numbers_have_no_exponents():
    assert [dry_run.rounded(number) for number in (1142.0, 326.9, 0.0118, 3.77)] == ["1,100", "330", "0.012", "3.8"]


def test_a_loss_that_is_not_stable_says_so_in_a_dry_run_and_at_the_start_of_a_run(shallow, tmp_path, capsys):
    said = []
    for changes in (dict(dry_run=1), dict(num_epochs=1, eval_freq=0)):
        with suppress(SystemExit):
            train("shapes_qwenimage_nft,awm", tmp_path, **shallow, **changes)
        said.append("forward_objective 'awm' is stable with a strong pull" in capsys.readouterr().out)
    assert said == [True, True]
    assert checks.caution(config_of("shapes_qwenimage_nft")) == ""
    assert config_of("shapes_qwenimage_nft,awm").train.beta == 2.0, "what it says of awm is of this pull"


def test_a_setting_that_costs_nothing_is_a_setting():
    assert {*measured.FREE, *measured.COST_WHERE_SET} <= {*table.BY_KEY}


def test_where_compiled_blocks_are_kept_and_how_long_a_signal_waits_leave_a_run_measured():
    run = config_of_type("pickscore_qwenimage")
    row = measured.of_config(run)
    assert row is not None
    assert measured.of_config(replace(run, compile_cache="/kept", signal_grace_s=300.0)) == row


def test_prompts_that_are_trained_on_and_evaluated_are_named():
    train_prompts = as_prompts(["a", "b", "c"])
    others = as_prompts(["d"])
    splits = [Split("validation", others), Split("test", as_prompts(["c", "b", "e"]))]
    assert "2 test prompts, such as 'c'" in dry_run.overlap_notice(train_prompts, splits)
    assert dry_run.overlap_notice(train_prompts, splits[:1]) == ""


def test_images_of_other_proportions_than_what_they_edit_are_said():
    source = Image.new("RGB", (100, 80))
    prompt = Prompt("make it red", sources=(source,))
    said = dry_run.stretch_notice(prompt, Size(height=64, width=64))
    assert "'make it red' have 100 x 80 pixels, images 64 x 64" in said
    assert dry_run.stretch_notice(prompt, Size(height=64, width=80)) == ""
    assert dry_run.stretch_notice(prompt, Size(height=64, width=96)) != ""
    assert dry_run.stretch_notice(Prompt("a red circle"), Size(height=64, width=64)) == ""
    assert dry_run.stretch_notice(None, Size(height=64, width=64)) == ""


def padding_notice_of(name, most_tokens, **changes):
    config = config_of(name, **changes)
    typed = replace(table.typed(config), dry_run=1)
    family = model_classes.resolve(registry.tiny_like(config.model), "")
    prompts = Prompts([], Split("test", []), Split("test", []), [], True, [], [], most_tokens)
    return dry_run.padding_notice(Experiment(typed, family, plan(config), prompts))


def test_the_width_of_text_is_named_that_spares_forwards_with_a_log_prob_their_padding():
    assert "41 tokens" in padding_notice_of("shapes_qwenimage", 41, text_tokens=128)
    assert "config.text_tokens=48 " in padding_notice_of("shapes_qwenimage", 41, text_tokens=128)
    # At 64 px an image has 16 tokens: a third of the row is padding with 32, nothing with 16.
    assert "config.text_tokens=16 " in padding_notice_of("shapes_qwenimage", 16, text_tokens=32)
    assert padding_notice_of("shapes_qwenimage", 17, text_tokens=32) == ""
    # Few of the 4,096 + 128 tokens at 1024 px are padding.
    assert padding_notice_of("shapes_qwenimage", 41, text_tokens=128, height=1024, width=1024) == ""
    # No forward has a log-prob, the model sees its padding, prompts were not counted.
    assert padding_notice_of("shapes_qwenimage_nft", 41, text_tokens=128) == ""
    assert padding_notice_of("motions_wan", 41, text_tokens=128) == ""
    assert padding_notice_of("shapes_qwenimage", 0, text_tokens=128) == ""


@pytest.mark.parametrize(("name", "drawn"), [("shapes_qwenimage", "images"), ("motions_wan", "videos")])
def test_an_epoch_a_run_and_a_plan_count_what_they_draw(name, drawn):
    config = config_of(name)
    divided = plan(config)
    typed = table.typed(config)
    assert f" {drawn}, at " in dry_run.epoch(typed, divided, "each GPU")
    assert f" {drawn}, " in dry_run.run_length(typed, divided)
    figures = dry_run.GpuFigures("estimated", 12.0, "24 GB", 0.5, 10.0, 1.0, 0.5)
    lines = dry_run.gpu(typed, figures)
    assert f"0.5 {drawn}/s of one" in lines[0]
    assert f"0.5 {drawn}/s to be scored" in lines[-1]


def test_a_plan_of_pairs_counts_pairs_and_draws_none_that_are_stored(recorded):
    online = config_of("shapes_qwenimage_dpo,online")
    said = dry_run.epoch(table.typed(online), plan(online), "each GPU")
    # The best and the worst image of each of 8 prompts are a pair.
    assert said.startswith("8 prompts x 4 = 32 images, ")
    assert said.endswith("2 updates of 4 pairs each")

    folder = recorded("dpo").folder
    config = table.of_stored(json.loads((folder / "config.json").read_text()))
    divided = batch_plan.plan_pairs(config, 1)
    pairs = divided.num_groups
    said = dry_run.epoch(config, divided, "each GPU")
    assert said.startswith(f"{pairs} stored pairs = {2 * pairs} images, ")
    assert said.endswith(f"updates of {pairs // divided.updates_per_epoch} pairs each")
    assert lines_of(folder, "epoch")[0]["images"] == divided.num_images

    # Nothing is decoded, and nothing is to be scored.
    work = estimate.work_of(config, divided, model_classes.by_name("qwenimage"))
    assert not work.are_drawn
    rates = estimate.rates()
    assert estimate.epoch_s(config, work, rates) == estimate.epoch_s(config, work, rates._replace(s_decode=9.0))


def test_test_prompts_are_counted_when_they_are_drawn():
    config = config_of("shapes_qwenimage", eval_freq=5)
    splits = [Split("validation", as_prompts(["a"])), Split("test", as_prompts(["b", "c"]))]
    choosing, tests = dry_run.evaluations(table.typed(config), splits)
    assert "every 5 epochs: 1 validation" in choosing
    assert "at the end: 2 test" in tests
    config.eval.test_freq = 20
    assert "every 20 epochs: 2 test" in dry_run.evaluations(table.typed(config), splits)[1]
    assert len(dry_run.evaluations(table.typed(config), splits[1:])) == 1
    # Test prompts that choose, too, by shortcuts are drawn again for the test.
    config.sample.rollout_weights = "merged"
    choosing, tests = dry_run.evaluations(table.typed(config), splits[1:])
    assert choosing.endswith("by merged weights")
    assert "every 20 epochs: 2 test" in tests
    assert "merged" not in tests


def test_evaluations_are_planned_as_often_as_a_run_makes_them(recorded):
    folder = recorded("nft").folder
    config = table.of_stored(json.loads((folder / "config.json").read_text()))
    splits = [Split("validation", as_prompts(["a"])), Split("test", as_prompts(["b"]))]
    planned = [drawing.times for drawing in dry_run.drawings(config, splits)]
    # The last line of a test is that of the best weights.
    assert planned == [len(lines_of(folder, "eval")), len(lines_of(folder, "test"))]


def test_test_prompts_that_choose_are_drawn_where_either_evaluation_is_due():
    config = config_of("shapes_qwenimage", num_epochs=10, eval_freq=5, eval__test_freq=4)
    (drawing,) = dry_run.drawings(table.typed(config), [Split("test", as_prompts(["a"]))])
    # Before the first epoch, after 4, 5, 8, and at the end.
    assert drawing.times == 5


def test_hours_of_evaluations_are_those_of_their_shortcuts():
    config = config_files.load(f"{ROOT}/config/grpo.py:pickscore_qwenimage,large_gpu")
    config.model = "Qwen/Qwen-Image"
    family = sketch.family_of(registry.published(config.model))
    work = estimate.work_of(table.typed(config), plan(config), family)

    def seconds(**changes):
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(changes)
        typed = table.typed(changed)
        how = of_validation(typed)
        return estimate.evaluation_s(typed, work, 16, family, how)

    exact = seconds(**{"eval.exact": True})
    merged = seconds()
    assert merged < exact
    assert seconds(**{"sample.rollout_weights": "merged_fp8"}) < merged
    halved = seconds(**{"sample.flash_ratio": 0.5, "eval.flash_ratio": 0.5})
    assert halved == pytest.approx(merged / 2, rel=0.1)


def test_a_dry_run_counts_the_files_that_evaluations_save(shallow, tmp_path, capsys):
    """Each of three evaluations, before epochs 0 and 2 and after the last one, draws 3 prompts with 2 noises."""
    how = shallow | dict(eval__save_images=3, eval__noises_per_prompt=2, num_epochs=3, eval_freq=2)
    with pytest.raises(SystemExit):
        train("shapes_qwenimage", tmp_path / "runs", dry_run=1, **how)
    said = capsys.readouterr().out
    assert "images/: 18 png files of eval.save_images, at most 0.013 MB each and 0.00024 GB together" in said
    with pytest.raises(SystemExit):
        train("shapes_qwenimage", tmp_path / "runs", dry_run=1, dry_run_format="json", **how)
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    saved = list((train("shapes_qwenimage", tmp_path / "runs", **how) / "images").glob("eval_*/*.png"))
    assert len(saved) == 18
    sizes = [file.stat().st_size for file in saved]
    assert 18 * max(sizes) <= 1e9 * planned["saved_images_gb"]
    # The number of prompts may be smaller than what is to be saved, or nothing be evaluated at all.
    changes = dict(eval__save_images=50, eval__noises_per_prompt=2, num_epochs=1)
    config = table.typed(config_of("shapes_qwenimage", tmp_path, **changes))
    split = Split("validation", as_prompts(["a", "b"]))
    assert dry_run.num_saved_images(config, [split]) == 2 * 2 * 2
    assert dry_run.num_saved_images(replace(config, eval_freq=0), [split]) == 0
    fewer = replace(config, eval=replace(config.eval, num_prompts=1))
    assert dry_run.num_saved_images(fewer, [split]) == 2 * 1 * 2
    # Images of a test are not saved: before epoch 1 nothing else is due.
    tested = replace(config, num_epochs=3, eval_freq=2, eval=replace(config.eval, test_freq=1))
    assert dry_run.num_saved_images(tested, [split]) == 3 * 2 * 2


FORMATS = list(itertools.product(saved_images.OPTIONS, [Size(64, 64), Size(512, 512)]))
FORMATS += [("png", Size(64, 64, 9)), ("webp", Size(64, 64, 9))]


@pytest.mark.parametrize(("file_type", "size"), FORMATS, ids=str)
def test_no_picture_is_larger_than_a_dry_run_says(file_type, size, tmp_path):
    """Noise cannot be compressed: of all colours it is the largest as PNG, of the brightest as JPEG."""
    shape = (size.frames, 3, size.height, size.width)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    images = torch.stack([noise, noise.round()])
    prompts = as_prompts(["a", "b"])
    saved = saved_images.SavedImages(tmp_path, prompts, [0, 1], file_type)
    saved.write([(0, 0), (0, 1)], images if size.frames > 1 else images[:, 0])
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= dry_run.picture_bytes(size)


@pytest.mark.parametrize(("kind", "num_extra"), [("window", 0), ("nft", 1), ("online dpo", 0)])
def test_a_checkpoint_is_as_large_as_a_dry_run_says(recorded, kind, num_extra):
    folder = recorded(kind).folder
    config = table.of_stored(json.loads((folder / "config.json").read_text()))
    total = 0
    trained = 0
    for name, tensor in stored(folder, 1).items():
        if name.endswith("/step"):
            continue
        total += tensor.nbytes
        if name.startswith("model/"):
            trained += tensor.nbytes
    checkpoint = dry_run.checkpoint_bytes(config, trained, num_extra)
    assert checkpoint == total + trained  # the LoRA beside them


def bytes_of_weights(folder):
    """Bytes that a folder's weights and training states take on the disk, those of several links once."""
    sizes = {}
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix in (".safetensors", ".bin", ".pt", ".distcp"):
            status = file.stat()
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@pytest.mark.parametrize("action", ["log", "roll_back"])
def test_a_run_whose_evaluations_rise_takes_the_disk_that_its_dry_run_says(action, tmp_path, monkeypatch, capsys):
    """At its end, when it has removed the oldest checkpoint."""
    calls = itertools.count()

    def rising(images, prompts, metadata):
        return images.mean((1, 2, 3)) + next(calls)

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("rising", rising)
    how = dict(lora__rank=32, reward_fn={"rising": 1.0}, num_epochs=4, save_freq=1, eval_freq=1, keep_checkpoints=2)
    how |= dict(eval__num_prompts=2, health__action=action)
    with pytest.raises(SystemExit):
        train("shapes_qwenimage", tmp_path / "runs", dry_run=1, dry_run_format="json", **how)
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    run = train("shapes_qwenimage", tmp_path / "runs", **how)
    written = bytes_of_weights(run)
    checkpoint = bytes_of_weights(sorted((run / "checkpoints").iterdir())[-1]) - bytes_of_weights(run / "best")
    assert checkpoint == pytest.approx(1e9 * planned["checkpoint_gb"], rel=0.05)
    # The last evaluation came after the last checkpoint: best/ is in none of them.
    assert written + checkpoint == pytest.approx(1e9 * planned["disk_gb"], rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planned_lora_has_the_bytes_of_the_file_that_is_written(dtype, tmp_path):
    config = table.typed(config_of("shapes_qwenimage", lora__export_dtype=dtype))
    pipeline = loaded("qwenimage").pipeline
    policies.attach(
        pipeline.transformer, config.lora, policies.targets(config.lora, model_classes.by_name("qwenimage"))
    )
    exports.save_lora(pipeline, tmp_path, config.lora.export_dtype)
    file = exported(tmp_path)
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little") + 8
    trained = sum(weight.numel() for weight in fsdp_utils.trainable_parameters(pipeline.transformer).values())
    state = dry_run._state_bytes(config, 4 * trained, 0)
    assert dry_run.checkpoint_bytes(config, 4 * trained, 0) == state + file.stat().st_size - header_bytes


def test_a_dry_run_counts_the_prompts_that_the_run_keeps_in_its_cache(shallow, tmp_path, capsys):
    how = shallow | dict(cache_dir=str(tmp_path / "cache"), num_epochs=1, eval__num_prompts=3)
    with pytest.raises(SystemExit):
        train("shapes_qwenimage", tmp_path / "runs", dry_run=1, **how)
    said = capsys.readouterr().out
    train("shapes_qwenimage", tmp_path / "runs", **how)
    num_files = len(list((tmp_path / "cache").glob("*/*.safetensors")))
    # 2 of 24 training prompts are drawn, and 3 of each other split evaluated.
    assert num_files == 2 + 3 + 3
    assert f" GB of {num_files} prompts in float32" in said


def test_stored_pairs_take_nothing_of_a_cache(pairs, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train("shapes_qwenimage_dpo", tmp_path, dry_run=1, eval_freq=0, cache_dir=str(tmp_path / "cache"), **pairs)
    assert " prompts in float32" not in capsys.readouterr().out


def test_the_cache_is_at_most_as_large_as_a_dry_run_says(tmp_path):
    config = config_of("edits_qwenimage_edit", sample__guidance_scale=2.0)
    model = loaded("qwenimage_edit")
    prompts = as_prompts(["a", "b", "c"], "qwenimage_edit")
    cache = embedding_cache.Cache(str(tmp_path), {}, config.text_tokens, torch.device("cpu"))
    cache.fill(prompts, lambda prompt: model.encode([prompt], width=config.text_tokens, guided=True))
    written = [path.stat().st_size for path in tmp_path.rglob("*.safetensors")]
    bound = dry_run.cached_bytes(config, type(model), prompts, guided=True)
    assert len(written) == 6
    assert 0.5 * bound < sum(written) <= bound
