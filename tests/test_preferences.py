"""Preference pairs: what is stored is what is read, what is wrong is named, and preparing them can be killed."""

import base64
import copy
import fcntl
import io
import itertools
import json
import multiprocessing
import re
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import prepare_preferences
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import warm
from PIL import Image
from refused import assert_refused
from safetensors.torch import save_file
from small import MODELS, ROOT, SOURCES, as_prompts, change_json, config_of, few_prompts, flip_a_bit, loaded, prepare

from flow_grpo import rewards
from flow_grpo.base import folders, rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.folders import LOCK, release
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.data import image_pairs, preferences
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.monitoring import progress
from flow_grpo.rewards.clients.wire import pack_image
from flow_grpo.run import input_files
from flow_grpo.scoring.scorers import RewardFailed
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config, Lora, Reward

TINY = "flow_grpo/assets/tiny_qwenimage"
NAME = "shapes_qwenimage_dpo"
SHAPES = dict(latents=(16, 64), text_embeds=(20, 64), mask=(20,))
SIZE = Size(64, 64)
CPU = torch.device("cpu")


def some_rows(count, **changed):
    draw = torch.Generator().manual_seed(0)
    columns = {}
    for name in preferences.LATENTS:
        columns[name] = torch.randn(count, *SHAPES["latents"], generator=draw)
    columns["text"] = torch.randn(count, *SHAPES["text_embeds"], generator=draw)
    columns["mask"] = torch.ones(count, 20).bool()
    alike = dict(negative_prompt="", winner_score=0.9, loser_score=0.1, model=TINY, dtype="float32")
    alike |= dict(height=64, width=64)
    for name, value in alike.items():
        columns[name] = [value] * count
    columns["prompt"] = [f"a photo of {i} circles" for i in range(count)]
    return columns | changed


def write(folder, rows, name="train_00000.parquet", dtype="float32"):
    preferences.write_pairs(folder / name, rows, SHAPES, dtype)
    return folder


def open_folder(folder):
    return preferences.open_pairs(str(folder), SHAPES, TINY, SIZE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_is_what_was_written(dtype, tmp_path):
    rows = some_rows(50, dtype=[dtype] * 50)
    write(tmp_path, {name: values[:20] for name, values in rows.items()}, dtype=dtype)
    write(tmp_path, {name: values[20:] for name, values in rows.items()}, "train_00001.parquet", dtype)
    pairs = open_folder(tmp_path)["train"]
    assert len(pairs) == 50
    wanted = [49, 3, 20, 19, 3]
    read = pairs.read(wanted, [7, 8, 9, 10, 11], CPU)
    assert preferences.dtype_of("fp32" if dtype == "float32" else "bf16") == dtype
    columns = dict(winner_latents=read.winners, loser_latents=read.losers, text=read.condition.text_embeds)
    for name, values in columns.items():
        expected = rows[name][wanted].to(getattr(torch, dtype)).float()
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
    assert torch.equal(read.condition.mask, rows["mask"][wanted])
    assert read.condition.pooled is None
    assert read.numbers.tolist() == [7, 8, 9, 10, 11]
    for row in wanted:
        assert pairs.prompts[row].text == rows["prompt"][row]


def with_rows(**changed):
    """A change of the file of nine good rows: other values of some columns."""
    return lambda path: write(path.parent, some_rows(9, **changed))


def with_table(change):
    return lambda path: pq.write_table(change(pq.read_table(path)), path)


def without(column):
    """A change of the file: its last row has nothing in a column."""
    return with_table(
        lambda table: pa.concat_tables([table[:8], table[8:].drop_columns(column)], promote_options="default")
    )


NAN = some_rows(9)["winner_latents"]
NAN[7, 3, 5] = float("nan")
WRONG = {  # what changes a good file, and words of the sentence
    "NaN": (with_rows(winner_latents=NAN), "row 7", "'winner_latents'"),
    "model": (with_rows(model=[TINY] * 4 + ["other"] * 5), "'model'", "'other'", TINY),
    "height": (with_rows(height=[64] * 8 + [512]), "'height'", "512", "64"),
    "width": (with_rows(width=[64] * 8 + [96]), "'width'", "96", "64"),
    "missing": (with_table(lambda table: table.drop_columns("loser_latents")), "'loser_latents'", "nothing"),
    "unknown": (with_table(lambda table: table.append_column("seed", pa.array(range(9)))), "'seed'", "nothing"),
    "hole": (without("text"), "'text'", "no value"),
    "no prompt": (without("prompt"), "'prompt'", "no value"),
    "empty": (with_table(lambda table: table.slice(0, 0)), "row"),
    "type": (with_table(lambda table: table.set_column(0, "prompt", pa.array(range(9)))), "'prompt'", "int64"),
    "no parquet": (lambda path: path.write_bytes(b"not parquet"), "parquet"),
}


def test_a_wrong_file_is_refused_by_its_row_and_column(tmp_path):
    path = write(tmp_path, some_rows(9)) / "train_00000.parquet"
    good = path.read_bytes()

    def read(change):
        path.write_bytes(good)
        change(path)
        open_folder(tmp_path)["train"].read([2, 7], [0, 0], CPU)

    (tmp_path / "cut" / "unfinished").mkdir(parents=True)
    other_size = SHAPES | dict(latents=(64, 64))
    rows = [
        ("cut", lambda: open_folder(tmp_path / "cut"), ["complete"]),
        ("nothing", lambda: open_folder(tmp_path / "nothing"), ["train_*.parquet"]),
        ("size", lambda: preferences.open_pairs(str(tmp_path), other_size, TINY, SIZE), ["[16,64]", "[64,64]"]),
    ]
    for name, (change, *words) in WRONG.items():
        rows.append((name, partial(read, change), [path, *words]))
    assert_refused(rows)


NOT_READ = {"negative_prompt", "dtype", "winner_score", "loser_score"}  # for who reads the file, not for training


def test_a_flipped_bit_in_any_column_that_is_read_is_damage(tmp_path):
    path = write(tmp_path, some_rows(9)) / "train_00000.parquet"
    whole = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    noticed = set()
    for column in map(group.column, range(group.num_columns)):
        data = bytearray(whole)
        data[column.data_page_offset + column.total_compressed_size - 1] ^= 1  # past the header of its last page
        path.write_bytes(data)
        try:
            open_folder(tmp_path)["train"].read([4], [0], CPU)
        except ValueError as error:
            if re.search("train_00000.parquet is damaged: .*checksum", str(error)):
                noticed.add(column.path_in_schema.split(".")[0])
    assert {*pq.read_schema(path).names} - noticed == NOT_READ


def test_best_and_worst_of_each_group():
    latents = torch.arange(8.0).view(8, 1, 1)
    embeds = Condition(torch.arange(8.0).view(8, 1, 1))
    scores = torch.tensor([0.1, 0.9, 0.5, 0.2, 0.25, 0.25, 0.375, 0.25])
    rewards = {"avg": scores, "a": scores}
    pairs = preferences.best_and_worst(latents, embeds, range(40, 48), rewards, {"a": 1.0}, group=4, margin=0.125)
    assert pairs.winners.flatten().tolist() == [1, 6]
    assert pairs.losers.flatten().tolist() == [0, 4]
    assert pairs.loss_weight.tolist() == [1, 0]
    assert pairs.numbers.tolist() == [40, 44]
    assert pairs.condition.text_embeds.flatten().tolist() == [0, 4]


def test_group_that_differs_by_rounding_alone_makes_no_pair():
    score = torch.tensor(85.3)
    above = torch.nextafter(score, torch.tensor(1e9))
    missing = torch.tensor(torch.nan)
    scores = torch.stack([score, above, score, missing, score, above + 1, score, missing])
    latents = torch.zeros(8, 1, 1)
    rewards = {"avg": scores, "a": scores}
    pairs = preferences.best_and_worst(latents, Condition(latents), range(8), rewards, {"a": 1.0}, group=4, margin=0.0)
    assert pairs.loss_weight.tolist() == [0, 1]


def test_group_whose_weighted_rewards_cancel_makes_no_pair():
    """Sums of the first group differ by rounding: little beside each reward, but not beside a sum."""
    weights = {"a": 1.0, "b": -0.3}
    level = torch.full((8,), 85.3)
    rewards = {"a": level.clone(), "b": level / 0.3}
    rewards["a"][::2] *= 1 + 2e-7
    rewards["a"][5] += 0.01
    rewards["avg"] = sum(weight * rewards[name] for name, weight in weights.items())
    latents = torch.zeros(8, 1, 1)
    pairs = preferences.best_and_worst(latents, Condition(latents), range(8), rewards, weights, group=4, margin=0.0)
    assert rewards["avg"][:4].unique().numel() > 1
    assert pairs.loss_weight.tolist() == [0, 1]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_minibatches_never_split_a_pair_and_miss_none(size):
    pairs = preferences.Pairs(
        *torch.arange(30.0).view(2, 15, 1), torch.ones(15), Condition(torch.ones(15, 1, 1)), torch.arange(15)
    )
    updates = list(preferences.minibatches(pairs, 3, size, 1))
    assert list(map(len, updates)) == [-(-5 // size)] * 3
    numbers = []
    for minibatch in itertools.chain(*updates):
        numbers += minibatch.numbers.tolist()
        assert torch.equal(minibatch.losers - minibatch.winners, torch.full_like(minibatch.winners, 15))
        assert minibatch.num_update_rows == 5
    assert numbers == list(range(15))


@pytest.mark.parametrize("size", [Size(64, 64), Size(64, 96)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_shapes_of_encoded_images_and_prompts(name, size):
    model = loaded(name)
    light = MODELS[name].without_weights(registry.tiny_folder(name))
    (prompt,) = as_prompts(["a photo of a red circle"], name)
    text = model.encode([prompt], width=32, guided=False)
    latents = model.encode_images(torch.rand(3, 3, size.height, size.width), batch_size=2)
    shapes = {"latents": tuple(latents.shape[1:])}
    for name_of_column, values in text.tensors().items():
        shapes[name_of_column] = tuple(values.shape[1:])
    assert shapes == light.row_shapes(size, 32, prompt)
    like = model.noise(size, [rng.generator(0, "x")])
    assert latents.shape[1:] == like.shape[1:]


@pytest.mark.parametrize("name", MODELS)
def test_latents_are_scaled_as_the_decoder_unscales_them(name, monkeypatch):
    """Whatever channels and frames its VAE takes."""
    model = loaded(name)
    vae = model.pipeline.vae
    encode = vae.encode
    decode = vae.decode
    seen = []
    made = []
    monkeypatch.setattr(vae, "encode", lambda pixels: made.append(encode(pixels)) or made[-1])
    monkeypatch.setattr(vae, "decode", lambda z, **how: seen.append(z) or decode(z, **how))
    model.decode(model.encode_images(torch.rand(2, 3, 64, 64)), SIZE, batch_size=2)
    torch.testing.assert_close(seen[0], made[0].latent_dist.mode())


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_pairs_are_not_gone_on_with_by_rewards_that_see_other_frames_or_have_other_options(tmp_path):
    def origin(**settings):
        config = Config(reward=Reward(**settings))
        return prepare_preferences.origin_of(config, prepare_preferences.DEFAULTS, [])

    begun_with = tmp_path / "settings.json"
    begun_with.write_text(json.dumps(origin()))
    prepare_preferences.check_unchanged(tmp_path, origin(batch_size=3), begun_with)
    rows = []
    for settings in (dict(frames=2), dict(args={"ocr": {"frames": 2}}), dict(args={"vlm_judge": {"question": "?"}})):
        changed = origin(**settings)
        words = [str(tmp_path), "begun with other settings", "reward."]
        rows.append(
            ("", lambda changed=changed: prepare_preferences.check_unchanged(tmp_path, changed, begun_with), words)
        )
    assert_refused(rows)


def test_pairs_of_own_rollouts_are_not_gone_on_with_by_images_that_are_decoded_otherwise(tmp_path):
    def origin(vae_precision, source=""):
        options = prepare_preferences.Options(source=source)
        return prepare_preferences.origin_of(Config(vae_precision=vae_precision), options, [])

    begun_with = tmp_path / "settings.json"
    begun_with.write_text(json.dumps(origin("fp32")))
    go_on = partial(prepare_preferences.check_unchanged, tmp_path, origin("bf16"), begun_with)
    assert_refused([("", go_on, [str(tmp_path), "begun with other settings (vae_precision)"])])
    # Images that are there are encoded, not decoded.
    begun_with.write_text(json.dumps(origin("fp32", "images")))
    prepare_preferences.check_unchanged(tmp_path, origin("bf16", "images"), begun_with)


def test_a_folder_goes_on_only_with_the_lora_that_it_was_begun_with(tmp_path):
    def claim(weight, part):
        torch.manual_seed(weight)
        lora = tmp_path / part / "pytorch_lora_weights.safetensors"
        lora.parent.mkdir(exist_ok=True)
        save_file({"lora_A.weight": torch.randn(2, 2)}, lora)
        config = Config(lora=Lora(**{part: str(lora.parent)}))
        origin = prepare_preferences.origin_of(config, prepare_preferences.DEFAULTS, [])
        folder = tmp_path / f"pairs_{part}"
        is_claimed = prepare_preferences.claim(folder, origin)
        release(folder)
        return is_claimed

    for part in ("path", "base"):
        assert claim(1, part)
        assert claim(1, part)
        assert_refused([("", partial(claim, 2, part), [f"pairs_{part}", "begun with other files of a LoRA"])])


def test_a_folder_goes_on_only_with_the_model_and_reward_files_that_it_was_begun_with(tmp_path, monkeypatch):
    """An older folder has no digests of either."""
    model = Path(shutil.copytree(ROOT / TINY, tmp_path / "model"))
    rewards_folder = tmp_path / "rewards"
    rewards_folder.mkdir()
    reward = rewards_folder / "of_ones_own.py"
    reward.write_text("def load(device):\n    return lambda images, prompts, metadata: images.mean((1, 2, 3))\n")
    monkeypatch.setenv("FLOW_GRPO_REWARDS", str(rewards_folder))
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__])
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = table.typed(config_of(NAME, model=str(model), reward_fn={"of_ones_own": 1.0}))
    folder = tmp_path / "pairs"
    folder.mkdir()
    # Left by a start that was killed while it wrote.
    (folder / f"digests{folders.SCRATCH}0").write_text("{")

    def claim():
        memory = input_files.digests_file_of(config, folder)
        origin = prepare_preferences.origin_of(config, prepare_preferences.DEFAULTS, [], memory)
        is_claimed = prepare_preferences.claim(folder, origin)
        release(folder)
        return is_claimed

    assert claim()
    assert claim()
    begun = (folder / "unfinished" / "settings.json").read_text()
    text = reward.read_text()
    reward.write_text(text.replace("mean", "sum"))
    assert_refused([("reward", claim, [str(folder), "begun with other files of rewards (of_ones_own): restore them"])])
    reward.write_text(text)
    assert claim()
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    flip_a_bit(weights)
    words = [str(folder), "begun with other files of the model (vae/diffusion_pytorch_model.safetensors)"]
    assert_refused([("model", claim, words)])
    older = json.loads(begun)
    del older["model"], older["rewards"]
    (folder / "unfinished" / "settings.json").write_text(json.dumps(older))
    assert claim()
    # A reward of evaluations scores no pair: it is not even imported.
    (rewards_folder / "watched.py").write_text("import a_package_that_is_nowhere\n")
    watching = replace(config, eval=replace(config.eval, rewards=("watched",)))
    assert set(prepare_preferences.origin_of(watching, prepare_preferences.DEFAULTS, [])["rewards"]) == {"of_ones_own"}
    # Images of a source are encoded by the model, and scored by nobody.
    options = prepare_preferences.Options(source="images")
    assert prepare_preferences.origin_of(config, options, []).keys() == {"made_by", "rows", "sources", "model"}


def test_pairs_of_own_rollouts_have_the_scores_of_the_stored_images(tmp_path):
    """Decoded and scored again, latents get the scores beside them, up to a few bytes of a JPEG of 1e-3 each."""
    how = dict(dataset=few_prompts(tmp_path / "data"), reward_fn={"jpeg_compressibility": 1.0})
    how |= dict(preferences__min_margin=0.2, validation_share=0.3)
    folder = prepare(NAME, tmp_path / "pairs", **how)
    report = json.loads((folder / "report.json").read_text())
    pairs = open_folder(folder)
    model = loaded("qwenimage")
    scorer = rewards.load("jpeg_compressibility", CPU)
    for split, files in pairs.items():
        assert len(files) == report["pairs"][split] > 0
        table = pq.read_table(sorted(folder.glob(f"{split}_*")))
        winner_scores = torch.tensor(table["winner_score"].to_pylist())
        loser_scores = torch.tensor(table["loser_score"].to_pylist())
        assert (winner_scores - loser_scores > 0.2).all()
        rows = list(range(len(table)))
        read = files.read(rows, rows, CPU)
        for latents, stored_scores in ((read.winners, winner_scores), (read.losers, loser_scores)):
            images = model.decode(latents, SIZE)
            scores = scorer(images, [""] * len(images), [{}] * len(images))
            torch.testing.assert_close(scores, stored_scores, rtol=0, atol=1e-2)
    assert sum(report["pairs"].values()) + report["reasons"]["no preference"] == 24
    trained, held_out = (set(texts_of(files.prompts)) for files in pairs.values())
    assert not trained & held_out


def test_a_folder_goes_on_with_the_settings_that_it_was_begun_with(pairs, tmp_path):
    folder = shutil.copytree(pairs["preferences__path"], tmp_path / "pairs")
    files = files_of(folder)
    report = json.loads((folder / "report.json").read_text())
    report["made_by"]["preferences"]["path"] = str(folder)

    def args_of(report):
        return report["made_by"]["reward"]["args"].setdefault("jpeg_compressibility", {})

    def again(change=lambda report: None, **how):
        changed = copy.deepcopy(report)
        change(changed)
        (folder / "report.json").write_text(json.dumps(changed))
        prepare(NAME, folder, **pairs | dict(preferences__path=str(folder)) | how)

    again()  # complete: nothing to do
    again(lambda report: report["made_by"]["sample"].pop("rollout_weights"))  # a setting younger than the folder
    again(sample__text_multiple=10)  # one that changes no file
    again(lambda report: args_of(report).update(max_masked_share=0.5))
    assert files_of(folder) == files
    rows = [
        ("seed", lambda: again(seed=7), ["(seed)"]),
        ("rows", lambda: again(max_rows=20), ["(options.max_rows)"]),
        (
            "reward",
            lambda: again(lambda report: args_of(report).update(quality=90)),
            ["(reward.args.jpeg_compressibility.quality)"],
        ),
        ("prompts", lambda: again(lambda report: report.update(rows="of other prompts")), ["other prompts"]),
    ]
    assert_refused(rows)


def complete(folder):
    """In a process of its own: hold the folder for a moment, and leave it complete."""
    folders.lock(folder)
    (folder / "held").touch()
    time.sleep(0.5)
    (folder / "unfinished" / "settings.json").rename(folder / "report.json")
    (folder / "unfinished").rmdir()


def test_a_folder_that_another_process_completes_meanwhile_is_left_as_it_is(tmp_path):
    config = config_of(NAME)
    origin = prepare_preferences.origin_of(config, prepare_preferences.Options(max_rows=2), [])
    assert prepare_preferences.claim(tmp_path, origin)
    release(tmp_path)
    other = multiprocessing.get_context("fork").Process(target=complete, args=[tmp_path])
    other.start()
    while not (tmp_path / "held").exists():
        assert other.is_alive()
        time.sleep(0.01)
    assert not prepare_preferences.claim(tmp_path, origin)
    other.join()
    assert not (tmp_path / "unfinished").exists()
    assert folders.lock(tmp_path) == "", "nobody holds it"
    release(tmp_path)


def test_a_folder_goes_on_only_with_the_pictures_to_be_edited_that_it_was_begun_with(tmp_path):
    paths = [Path(shutil.copy(source, tmp_path)) for source in SOURCES[:3]]
    rows = [Prompt("make it red", {}, (path,)) for path in paths]
    options = prepare_preferences.Options(max_rows=2)
    config = config_of(NAME)
    folder = tmp_path / "pairs"
    before = prepare_preferences.origin_of(config, options, rows)
    assert prepare_preferences.claim(folder, before)
    shutil.copy(SOURCES[0], paths[2])  # of a row that is not used
    assert prepare_preferences.origin_of(config, options, rows) == before
    shutil.copy(SOURCES[3], paths[1])
    now = prepare_preferences.origin_of(config, options, rows)
    assert now["rows"] == before["rows"], "the same texts and names"
    lines = [dict(sources=row.sources) for row in rows]
    assert prepare_preferences.digests_of(lines, 2)["sources"] == now["sources"]
    go_on = partial(prepare_preferences.claim, folder, now)
    assert_refused([("", go_on, [str(folder), "begun with other pictures to be edited"])])
    settings = folder / "unfinished" / "settings.json"
    stored = json.loads(settings.read_text())
    del stored["sources"]  # as older versions wrote it
    settings.write_text(json.dumps(stored))
    assert go_on()
    release(folder)


def test_a_reward_that_fails_is_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    def broken(images, prompts, metadata):
        raise RuntimeError("the key has expired")

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("broken", broken)
    monkeypatch.setattr(prepare_preferences.policies_to_compare, "load_candidate", None)  # to call it is a TypeError
    how = dict(dataset=few_prompts(tmp_path / "data"), reward_fn={"broken": 1.0})
    with pytest.raises(UserError, match=r"the key has expired.*; tried on a grey image before anything is loaded"):
        prepare(NAME, tmp_path / "pairs", **how)


def test_images_without_a_score_are_in_no_pair_and_a_dead_reward_leaves_nothing_done(tmp_path, monkeypatch):
    def brightness(images, prompts, metadata):
        if dead or len(images) > 1 or next(calls) % 5 == 0:  # alone, every fifth image has no score
            raise RuntimeError("away")
        return images.mean((1, 2, 3))

    dead = [True]
    calls = itertools.count()
    data = few_prompts(tmp_path / "data")
    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("brightness", brightness)
    how = dict(dataset=data, reward_fn={"brightness": 1.0})
    how |= dict(max_dropped_share=0.7, preferences__min_margin=0.0, sample__num_images_per_prompt=2)
    with pytest.raises(RewardFailed, match=r"failed for 100.0% of 16 images"):
        prepare(NAME, tmp_path / "pairs", **how, reward__max_masked_share=0.05)
    dead.clear()
    folder = prepare(NAME, tmp_path / "pairs", **how, reward__max_masked_share=0.5)  # goes on
    reasons = json.loads((folder / "report.json").read_text())["reasons"]
    assert reasons["the reward failed"] > 0
    assert sum(map(len, open_folder(folder).values())) == 24 - sum(reasons.values()) > 0


def test_parts_that_lost_rows_to_a_reward_are_made_anew_once_it_answers(tmp_path, monkeypatch):
    def brightness(images, prompts, metadata):
        scores = images.mean((1, 2, 3))
        if away:
            first = torch.tensor([texts.index(prompt) < 8 for prompt in prompts])
            return torch.where(first, scores, torch.nan)
        return scores

    away = [True]
    data = few_prompts(tmp_path / "data")
    texts = texts_of(load_prompts(data, "train"))
    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("brightness", brightness)
    how = dict(dataset=data, reward_fn={"brightness": 1.0}, reward__max_masked_share=1.0, max_rows=16)
    how |= dict(preferences__min_margin=0.0, sample__num_images_per_prompt=2)
    with pytest.raises(UserError, match=r"8 of 16 rows cannot be used.* makes the parts anew whose reward failed"):
        prepare(NAME, tmp_path / "pairs", **how)
    first = tmp_path / "pairs" / "train_00000.parquet"
    written_at = first.stat().st_mtime_ns
    stale = tmp_path / "pairs" / "validation_00001.parquet"
    shutil.copy(first, stale)  # as of a part that had a pair there
    away.clear()
    folder = prepare(NAME, tmp_path / "pairs", **how)
    assert files_of(folder) == files_of(prepare(NAME, tmp_path / "whole", **how))
    assert first.stat().st_mtime_ns == written_at, "a part without losses stays"


def interrupted(monkeypatch, owner, name):
    """A list of as many entries as there are calls of a function before one is interrupted."""
    plain = getattr(owner, name)
    left = []

    def call(*args):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return plain(*args)

    monkeypatch.setattr(owner, name, call)
    return left


def test_interrupted_after_any_part_it_goes_on_and_makes_the_same_files(tmp_path, monkeypatch):
    """Left to test_checkpoints.py and test_folders.py: what a kill leaves of a part or of a report."""
    how = dict(dataset=few_prompts(tmp_path / "data"), max_rows=20, part_size=8, sample__num_images_per_prompt=2)
    whole = prepare(NAME, tmp_path / "whole", **how)
    left = interrupted(monkeypatch, prepare_preferences, "write_part")
    for count in (0, 1, 1, 9, 10):
        left[:] = [None] * count
        if count == 10:  # as after a kill between the report and the end
            (tmp_path / "parts" / "unfinished").mkdir()
        with pytest.raises(KeyboardInterrupt) if count < 9 else nullcontext():
            prepare(NAME, tmp_path / "parts", **how)
    assert files_of(tmp_path / "parts") == files_of(whole)
    assert len(open_folder(tmp_path / "parts")) == 2, "it is complete"
    report = json.loads((tmp_path / "parts" / "report.json").read_text())
    expected = json.loads((whole / "report.json").read_text())
    assert report["pairs"] == expected["pairs"]
    assert report["dropped"] == expected["dropped"]
    assert sum(report["pairs"].values()) + len(report["dropped"]) == 20, "of the first prompts alone"


def test_without_a_terminal_it_says_how_far_it_is_and_how_to_take_less(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    how = dict(dataset=few_prompts(tmp_path / "data"), sample__num_images_per_prompt=2, part_size=16)
    prepare(NAME, tmp_path / "pairs", **how, max_rows=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("24 rows of the source are used; --max_rows=16 ")
    counts = re.findall(r": (\d+/\d+),.* left$", "\n".join(lines), re.MULTILINE)
    assert counts == ["4/24", "8/24", "12/24", "16/24", "20/24"]


@pytest.mark.slow
def test_two_ranks_make_the_files_of_one(tmp_path):
    data = few_prompts(tmp_path / "data")
    whole = prepare(NAME, tmp_path / "whole", dataset=data, sample__num_images_per_prompt=2)
    two = tmp_path / "two"
    command = ["scripts/prepare_preferences.py", f"--config=config/dpo.py:{NAME},smoke"]
    command += [f"--config.preferences.path={two}", f"--config.dataset={data}", "--config.sample.batch_size=8"]
    command += ["--config.sample.num_images_per_prompt=2", "--part_size=8", "--validation_share=0.15"]
    ranks = warm.torchrun(command)
    assert (two / "report.json").exists(), [rank.stderr[-2000:] for rank in ranks]
    assert sizes_of(two) == sizes_of(whole)


def sizes_of(folder):
    """Bytes of a folder's files of pairs."""
    return {name: len(data) for name, data in files_of(folder).items()}


def picture(number, height=64, width=80):
    """The bytes of a file of noise."""
    return pack_image(torch.rand(3, height, width, generator=torch.Generator().manual_seed(number)), "png")


def test_a_picture_is_turned_upright_and_made_smaller_by_averaging():
    large = image_pairs.load_image(picture(0, 512, 512), Size(64, 64))
    small = image_pairs.load_image(picture(0, 64, 64), Size(64, 64))
    assert large.std() < 0.1 < 0.25 < small.std()
    upright = picture(0, 96, 64)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # its first row is on the right
    Image.open(io.BytesIO(upright)).transpose(Image.Transpose.ROTATE_90).save(turned, "png", exif=exif)
    expected = image_pairs.load_image(upright, Size(96, 64))
    assert torch.equal(image_pairs.load_image(turned.getvalue(), Size(96, 64)), expected)


@pytest.fixture
def images(tmp_path):
    """Eight good pairs in a folder, and one of each that cannot be used."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(16):
        (folder / f"{number}.png").write_bytes(picture(number))
    (folder / "broken.png").write_bytes(picture(0)[:500])
    rows = []
    for i in range(8):
        rows.append({"prompt": f"a photo of {i} circles", "winner": f"{2 * i}.png", "loser": f"{2 * i + 1}.png"})
    good = rows[0]
    rows += [
        good | {"winner": "broken.png"},
        good | {"winner": "nowhere.png"},
        good | {"winner": "1.png"},
        good | {"prompt": " "},
        good | {"prompt": "word " * 99},
        good | {"winner_score": 0.5, "loser_score": 0.5},
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", ["qwenimage", "sd3"])
def test_pairs_of_image_files_of_which_a_larger_share_than_usual_is_bad(name, images, tmp_path):
    config = f"pickscore_{name}_dpo"
    how = dict(source=str(images), model=registry.tiny_folder(name))
    with pytest.raises(ValueError, match=r"5 of 14 rows .*'unreadable image': 2.*max_dropped_share=0.2"):
        prepare(config, tmp_path / "pairs", **how)
    folder = prepare(config, tmp_path / "pairs", **how, max_dropped_share=0.4)
    report = json.loads((folder / "report.json").read_text())
    reasons = ["unreadable image"] * 2 + ["winner and loser are one image", "empty prompt", "prompt too long"]
    assert [row["why"] for row in report["dropped"]] == [*reasons, "no preference"]
    assert [row["row"] for row in report["dropped"]] == [8, 9, 10, 11, 12, 13]
    assert sum(report["pairs"].values()) == 8
    model = loaded(name)
    pairs = preferences.open_pairs(str(folder), model.row_shapes(SIZE, 20), registry.tiny_folder(name), SIZE)
    first = pairs["train"].read([0], [0], CPU)
    number = int(pairs["train"].prompts[0].text.split()[3])
    winner = image_pairs.load_image(images / f"{2 * number}.png", SIZE)
    loser = image_pairs.load_image(images / f"{2 * number + 1}.png", SIZE)
    encoded = model.encode_images(torch.stack([winner, loser]))
    torch.testing.assert_close(torch.cat([first.winners, first.losers]), encoded, rtol=0, atol=1e-5)


def test_of_few_prompts_one_is_held_out_with_all_its_pairs(images, tmp_path):
    lines = (images / "pairs.jsonl").read_text().splitlines()[:8]
    (images / "pairs.jsonl").write_text("\n".join(lines + lines[:4]))
    how = dict(source=str(images), part_size=4)
    some = open_folder(prepare(NAME, tmp_path / "some", validation_share=1e-6, **how))
    none = open_folder(prepare(NAME, tmp_path / "none", validation_share=0.0, **how))
    assert len(none["train"]) == 12
    assert len(none["validation"]) == 0
    trained = texts_of(some["train"].prompts)
    held_out = texts_of(some["validation"].prompts)
    assert sorted(trained + held_out) == sorted(texts_of(none["train"].prompts))
    assert len(set(held_out)) == 1
    assert not set(trained) & set(held_out)


def test_pick_a_pics_columns(images, tmp_path):
    rows = []
    for i, label in enumerate((1.0, 0.0, 0.5, 0.0, 1.0)):
        rows.append(
            {
                "caption": f"a photo of {i} circles",
                "jpg_0": picture(2 * i),
                "jpg_1": picture(2 * i + 1),
                "label_0": label,
                "label_1": 1 - label,
                "user_id": 7,
            }
        )
    source = tmp_path / "pickapic"
    source.mkdir()
    for part, some in enumerate((rows[:2], rows[2:])):
        pq.write_table(pa.Table.from_pylist(some), source / f"{part}.parquet", row_group_size=2)
    opened = image_pairs.open_rows(str(source))
    assert [row["winner"] for row in opened[0:2]] == [rows[0]["jpg_0"], rows[1]["jpg_1"]]
    folder = prepare(NAME, tmp_path / "pairs", source=str(source), validation_share=0.0)
    table = pq.read_table(folder / "train_00000.parquet").to_pylist()
    assert [row["prompt"] for row in table] == [rows[i]["caption"] for i in (0, 1, 3, 4)]
    assert json.loads((folder / "report.json").read_text())["dropped"] == [dict(row=2, why="no preference")]


def test_a_malformed_line_and_a_folder_that_is_foreign_or_written_to_are_named(images, tmp_path, monkeypatch):
    with (images / "pairs.jsonl").open("a") as file:
        file.write('{"prompt": "a", "winner": "1.png"}\n')
    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.setattr("flow_grpo.base.folders.WAIT_S", 0.0)
    with (locked / LOCK).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        rows = [
            (
                "malformed",
                lambda: prepare(NAME, tmp_path / "pairs", source=str(images)),
                ["pairs.jsonl", "line 15", '"loser"'],
            ),
            ("foreign", lambda: prepare(NAME, images), [images, "not made by this script"]),
            ("locked", lambda: prepare(NAME, locked), ["writing", locked]),
        ]
        assert_refused(rows)
    # Not even digests are written into a folder of something else.
    assert not (images / folders.DIGESTS).exists()


RED, BLUE = (picture(number, 8, 8) for number in (0, 1))
PAIR = dict(caption="a cat", jpg_0=RED, jpg_1=BLUE, label_0=1.0, label_1=0.0)
LINE = dict(prompt="a cat", winner="red.png", loser="blue.png")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def rows_with(count=2, **columns):
    """Writes a file of Pick-a-Pic's columns, of which some hold something else."""
    return lambda folder: pq.write_table(pa.Table.from_pylist([PAIR | columns] * count), folder / "a.parquet")


def rows_of(**columns):
    """Writes a file of one row."""
    return lambda folder: pq.write_table(pa.Table.from_pylist([columns]), folder / "a.parquet")


def stored(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def lines_with(**changed):
    return stored("pairs.jsonl", (json.dumps(LINE | changed) + "\n").encode() * 2)


def without_rows(folder):
    pq.write_table(pa.Table.from_pylist([PAIR]).slice(0, 0), folder / "a.parquet")


def cut_at_its_end(folder):
    rows_with()(folder)
    flaw = folder / "a.parquet"
    flaw.write_bytes(flaw.read_bytes()[:-20])


def with_damaged_page(folder):
    rows_with()(folder)
    flaw = folder / "a.parquet"
    data = bytearray(flaw.read_bytes())
    data[4:60] = bytes(56)
    flaw.write_bytes(data)


def in_a_folder_below(folder):
    (folder / "data").mkdir()
    rows_with()(folder / "data")


ODD_FLAGS = [  # options of the script, and words of the sentence
    (dict(max_rows=-1), "--max_rows is -1"),
    (dict(part_size=0), "--part_size is 0"),
    (dict(part_size=-8), "--part_size is -8"),
    (dict(validation_share=1.0), "--validation_share is 1.0"),
    (dict(validation_share=float("nan")), "--validation_share is nan"),
    (dict(max_dropped_share=-0.1), "--max_dropped_share is -0.1"),
    (dict(max_dropped_share=float("inf")), "--max_dropped_share is inf"),
]


def test_flag_that_nothing_can_be_made_with_is_refused(tmp_path):
    def preparing(**options):
        return lambda: prepare(NAME, tmp_path / "pairs", **options)

    own_sigmas = shutil.copytree(registry.tiny_folder("qwenimage_21"), tmp_path / "own_sigmas")
    change_json(own_sigmas / "model_index.json", sample_sigmas=[1.0, 0.9, 0.7])
    steps = preparing(model=str(own_sigmas), reward_fn={"jpeg_compressibility": 1.0})
    rows = [(words, preparing(**options), [words]) for options, words in ODD_FLAGS]
    assert_refused([*rows, ("steps", steps, ["config.sample.num_steps is 4", "3 steps"])])
    with pytest.raises(SystemExit):
        prepare_preferences.flags(["--source="])


FOREIGN = {  # what writes a source that is none, and words of the sentence
    "nothing": (lambda folder: None, "neither pairs.jsonl nor *.parquet"),
    "webdataset": (stored("00000.tar", b"x"), "'00000.tar'", "neither"),
    "save_to_disk": (stored("data.arrow", b"x"), "'data.arrow'", "neither"),
    "clone of a hub": (in_a_folder_below, "folder data has *.parquet"),
    "pointer": (stored("a.parquet", POINTER), "a.parquet", "git lfs pull"),
    "empty": (stored("a.parquet", b""), "a.parquet is empty"),
    "cut": (cut_at_its_end, "a.parquet", "no parquet file"),
    "damaged page": (with_damaged_page, "a.parquet is damaged"),
    "no rows": (without_rows, "no row"),
    "columns of TRL": (rows_of(prompt="a", chosen=RED, rejected=BLUE), "no column caption", "'chosen'", "rename"),
    "columns of HPD": (rows_of(prompt="a", image_path=["a", "b"], human_preference=[1, 0]), "'human_preference'"),
    "base64": (rows_with(jpg_0=base64.b64encode(RED).decode()), "row 0, 'jpg_0'", "does not exist"),
    "base64 as bytes": (rows_with(jpg_0=base64.b64encode(RED)), "row 0, 'jpg_0'", "no picture of a format"),
    "arrays": (rows_with(jpg_1=[1, 2]), "'jpg_1' holds list", "not images as bytes"),
    "cut images": (rows_with(jpg_1=RED[:150]), "row 0, 'jpg_1'", "cannot be read"),
    "no images": (rows_with(jpg_1=None), "row 0, 'jpg_1'", "there is no image"),
    "no captions": (rows_with(caption=" "), "row 0, 'caption'", "empty"),
    "lists of captions": (rows_with(caption=["a"]), "'caption' holds list", "not text"),
    "labels of text": (rows_with(label_0="left", label_1="right"), "a.parquet", "'left' and 'right'"),
    "labels alike": (rows_with(label_0=0.5, label_1=0.5), "'label_0' and 'label_1'", "0.5 and 0.5"),
    "labels that are none": (rows_with(label_0=float("nan")), "nan and 0.0"),
    "one image": (rows_with(jpg_1=RED), "row 0, 'jpg_0' and 'jpg_1' are one image"),
    "lists of images": (rows_with(jpg_0=[RED]), "'jpg_0' holds list", "not images as bytes"),
    "labels that are missing": (rows_with(label_0=None, label_1=None), "None and None"),
    "files of macOS": (stored("._a.parquet", b"\0\5\x16\7"), "neither pairs.jsonl nor *.parquet"),
    "a device": (lambda folder: (folder / "a.parquet").symlink_to("/dev/zero"), "a.parquet", "device"),
    "lines of a device": (lambda folder: (folder / "pairs.jsonl").symlink_to("/dev/zero"), "pairs.jsonl", "device"),
    "lines of a folder": (lambda folder: (folder / "pairs.jsonl").mkdir(), "pairs.jsonl", "directory"),
    "lines of one image": (lines_with(loser="red.png"), "line 1, 'winner' and 'loser' are one image"),
    "lines of NaN": (lines_with(winner_score=float("nan"), loser_score=0.1), "nan and 0.1"),
    "lines of a pointer": (stored("pairs.jsonl", POINTER), "pairs.jsonl", "git lfs pull"),
    "lines of TRL": (stored("pairs.jsonl", b'{"prompt": "a", "chosen": "a.png"}'), "line 1", '"winner"'),
    "lines without images": (lines_with(winner="gone.png"), "line 1, 'winner'", "gone.png' does not exist"),
    "lines without prompts": (lines_with(prompt=None), "line 1", '"prompt"'),
    "lines of worse winners": (lines_with(winner_score=1, loser_score=2), "pairs.jsonl", "1 and 2"),
}


def test_foreign_source_is_refused_by_its_file_and_column_or_line(tmp_path):
    rows = []
    for name, (write_source, *words) in FOREIGN.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "blue.png").write_bytes(BLUE)
        (folder / "red.png").write_bytes(RED)
        write_source(folder)
        rows.append((name, lambda source=str(folder): image_pairs.open_rows(source), [folder, *words]))
    (tmp_path / "pairs.csv").write_text("caption,jpg_0\n")
    rows.append(("file", lambda: image_pairs.open_rows(str(tmp_path / "pairs.csv")), ["pairs.csv", "is no folder"]))
    assert_refused(rows)


def dictionary_encoded(folder):
    table = pa.Table.from_pylist([PAIR])
    pq.write_table(table.set_column(0, "caption", table["caption"].dictionary_encode()), folder / "a.parquet")


def beside_a_hidden_file(folder):
    rows_with()(folder)
    (folder / "._a.parquet").write_bytes(b"\0\5\x16\7")


READ = {  # what writes a source whose first image wins
    "bytes of datasets": rows_with(jpg_0={"bytes": RED, "path": None}, jpg_1={"bytes": BLUE, "path": "gone.png"}),
    "paths of datasets": rows_with(jpg_0={"bytes": None, "path": "red.png"}, jpg_1={"bytes": b"", "path": "blue.png"}),
    "paths": rows_with(jpg_0="red.png", jpg_1="blue.png"),
    "labels of text": rows_with(label_0="1", label_1="0"),
    "labels of logic": rows_with(label_0=True, label_1=False),
    "dictionary": dictionary_encoded,
    "lines": lines_with(winner_score=2, loser_score=1),
    "beside a hidden file of macOS": beside_a_hidden_file,
}


@pytest.mark.parametrize("name", READ)
def test_source_of_every_form_has_the_same_images(name, tmp_path):
    (tmp_path / "blue.png").write_bytes(BLUE)
    (tmp_path / "red.png").write_bytes(RED)
    READ[name](tmp_path)
    pair = image_pairs.load_pair(image_pairs.open_rows(str(tmp_path))[0:1][0], SIZE)
    for image, stored_image in zip(pair, (RED, BLUE), strict=True):
        assert torch.equal(image, image_pairs.load_image(stored_image, SIZE))


def test_few_unreadable_images_and_text_labels_are_dropped_one_by_one(tmp_path):
    table = pa.Table.from_pylist([PAIR | dict(label_0=label) for label in ("1", "tie", "1")])
    images = pa.array([None, RED, RED], pa.binary())
    pq.write_table(table.set_column(1, "jpg_0", images), tmp_path / "a.parquet")
    rows = image_pairs.open_rows(str(tmp_path))
    reasons = []
    for row in rows[0:3]:
        try:
            image_pairs.load_pair(row, SIZE)
            reasons.append("")
        except image_pairs.Dropped as why:
            reasons.append(str(why))
    assert reasons == ["unreadable image", "no preference", ""]
