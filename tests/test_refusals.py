"""Refusals come before any weight is loaded. A row is what is called, and words of its sentence."""

import shutil
import sys
from functools import partial

import prepare_preferences
import pytest
import serve_reward
from refused import assert_refused, otherwise
from small import ROOT, config_of, train
from test_preferences import some_rows, write

from config import grpo
from flow_grpo import rewards
from flow_grpo.base.prompt import Prompt
from flow_grpo.checkpoints import checkpoints
from flow_grpo.command_line import command_line
from flow_grpo.data import prompts
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.rewards.clients.client import read_token
from flow_grpo.settings import config_files, table

WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"
NFT = "shapes_qwenimage_nft"
DPO = "shapes_qwenimage_dpo"
ONLINE = "shapes_qwenimage_dpo,online"
AWM = f"{NFT},awm"
TINY = "flow_grpo/assets/tiny_qwenimage"
NAN = float("nan")
INF = float("inf")
FLASH_4 = dict(attention="flash_4", precision="bf16", lora__rank=8)


def no(*words, **settings):
    """A row: settings that are refused, and the words; where there are none, the first setting's name and value."""
    key, value = next(iter(settings.items()))
    return words or (key.rpartition("__")[2], repr(value)), settings


def url(address, **more):
    return dict(reward__args={"shapes": {"url": address, **more}})


TRAINING = {  # a script's run -> its rows
    WINDOW: [
        no("num_images_per_prompt is 1", "compared", sample__num_images_per_prompt=1),
        no("3 prompts", "[1, 3, 9]", sample__num_prompts_per_epoch=3, sample__num_images_per_prompt=3),
        no("sde_window_range = (0, 4)", "(0, 3)", sample__sde_window_range=(0, 4)),
        no("sde_window_size = 4", "(0, 3)", sample__sde_window_size=4),
        no("sde_window_interval is 5", "sde_window_size set", sample__sde_window_size=0, sample__sde_window_interval=5),
        no("sde_window_range is (0, 2)", "sde_window_size 0", "(0, 3)", sample__sde_window_size=0,
           sample__sde_window_range=(0, 2)),
        no("baseline is 'prompt'", "branches", "'group'", sample__baseline="prompt"),
        no("filter_groups", "diversity_weight 0.0, but that is 0.1", train__filter_groups=True,
           train__diversity_weight=0.1),
        no("filter_groups", "'group' or 'prompt'", "'all'", train__filter_groups=True, sample__baseline="all"),
        no("reference_interval is 5", "train.beta set", train__reference_interval=5),
        no("reference_kl is 0.1", "train.beta set", train__reference_kl=0.1),
        no("beta_gate is 0.1", "train.beta set", train__beta_gate=0.1),
        no("beta_gate is 0.1", "set config.eval.rewards", train__beta_gate=0.1, train__beta=0.1,
           eval__rewards=("shapes",)),
        no("flash_solver", "flash_ratio set", sample__flash_solver="extrapolate"),
        no("activation_checkpointing is 0.5", "compile", fsdp__activation_checkpointing=0.5),
        no("base_precision is 'nf4'", "lora.rank set", base_precision="nf4", lora__rank=0),
        no("base_precision", "'nf4'", "'shard'", base_precision="nf4", fsdp__mode="shard"),
        no("rollout_weights is 'merged'", "''", base_precision="fp8_weights", sample__rollout_weights="merged"),
        no("rollout_weights is 'merged_fp8'", "'nf4'", base_precision="nf4", sample__rollout_weights="merged_fp8"),
        no("rollout_weights is 'fp8'", "'fp8_weights'", sample__rollout_weights="fp8"),
        no("grad_input_precision is 'fp8'", "base_precision 'fp8_weights'", train__grad_input_precision="fp8"),
        no("base_precision is '8bit', which is now called 'fp8_weights'", base_precision="8bit"),
        no("base_precision is 'fp8'", "'fp8_weights', 'nf4'", base_precision="fp8"),
        no("attention", "config.precision 'bf16', but that is 'fp32'", attention="flash_4", lora__rank=8),
        no("attention", "lora.rank set", **FLASH_4 | dict(lora__rank=0)),
        no("attention", "tiny_sd3", **FLASH_4, model="flow_grpo/assets/tiny_sd3"),
        no("attention", "H100", "without a GPU", **FLASH_4),
        no("precompute_modulation is True", "lora.rank set", precompute_modulation=True, lora__rank=0),
        no("modulation of sd3 depends on more", precompute_modulation=True, model="flow_grpo/assets/tiny_sd3"),
        no("modulation of zimage", "few weights", precompute_modulation=True, model="flow_grpo/assets/tiny_zimage"),
        no("'img_mod.1', which trains transformer_blocks.0.img_mod.1", precompute_modulation=True,
           lora__targets=("img_mod.1", "attn.to_q")),
        no("time_text_embed.timestep_embedder.linear_1", precompute_modulation=True, lora__targets=("linear_1",)),
        no("cache_dir", "/dev/null is no folder", cache_dir="/dev/null/x", base_precision="nf4"),
        no("sde_type 'cps'", "'cps_gaussian'", sample__sde_type="cps", train__objective="guard"),
        no("sde_type 'cps'", "'cps_gaussian'", sample__sde_type="cps", train__objective="dppo"),
        no("sde_type 'cps'", "'cps_gaussian'", sample__sde_type="cps", train__objective="rsm"),
        no("same_latent True", "'fdfo'", train__objective="fdfo"),
        no("'sde' or 'dance'", "'cps'", sample__sde_type="cps", train__objective="endpoint"),
        no("no multiple", "'endpoint'", sample__batch_size=6, train__objective="endpoint"),
        no("of whole groups of 4, as objective 'endpoint' takes them", "[1, 2]", train__objective="endpoint",
           train__updates_per_epoch=3),
        no("endpoint_space is 'x_0'", "objective 'clip'", train__endpoint_space="x_0"),
        no("clip_std_exponent is 2.0", "objective 'clip'", train__clip_std_exponent=2.0),
        no("clip_range is 0.001", "objective 'dppo'", train__clip_range=1e-3, train__objective="dppo"),
        no("kl_limit is 0.1", "objective 'clip'", train__kl_limit=0.1),
        no("train.guidance_scale is 2.0", "old_log_prob 'recompute'", train__guidance_scale=2.0),
        no("eval.rewards", "'shape'", "shapes", eval__rewards=("shape",)),
        no("noise_level is 0", sample__noise_level=0.0),
        no("noise_level is 1.2", "to 1.0", sample__noise_level=1.2, sample__sde_type="cps"),
        no("timestep_fraction is 0.99", "sde_window_size 0, but that is 2", train__timestep_fraction=0.99),
        no(height=72),
        no("offload", "'replicate'", fsdp__offload="weights"),
        no("offload", "torchrun", fsdp__offload="weights", fsdp__mode="shard", model=TINY),
        no("adam_betas", "nan", train__adam_betas=(NAN, 0.9)),
        no("lora.path is 'somewhere'", "lora.rank set", lora__rank=0, lora__path="somewhere"),
        no("nowhere/pytorch_lora_weights.safetensors", lora__path="nowhere"),
        no("/dev/null is a pipe or a device", lora__path="/dev/null"),
        no("is an address", "OWNER/NAME", model="https://huggingface.co/Qwen/Qwen-Image"),
        no("'/dev/null' is no folder", model="/dev/null"),
        no("no checkpoint at /dev/null", resume_from="/dev/null", dry_run=1),
        no("cache_dir", "/dev/null is no folder", cache_dir="/dev/null", dry_run=1),
        no("compile_cache", "/dev/null is no folder", compile=True, compile_cache="/dev/null/x"),
        no("everybody may write to /tmp", "chmod o-w", compile=True, compile_cache="/tmp"),
        no("compile_cache: /proc cannot be written", compile=True, compile_cache="/proc"),
        no("lora.targets has 'attn.to_qq'", "attn.to_q", lora__targets=("attn.to_k", "attn.to_qq")),
        no("lora.targets has 'attn'", lora__targets=("attn",)),  # no linear layer itself
        no("lora.targets", "lora.rank set", lora__targets=("attn.to_q",), lora__rank=0),
        no("'nowhere/at/all'", model="nowhere/at/all"),
        no("dataset", "'nowhere'", dataset="nowhere"),
        no("resume_from", "nowhere", resume_from="nowhere", model=TINY),
        no("cache_dir", "/proc/nowhere", cache_dir="/proc/nowhere"),
        no("alert", alert="ntfy 'x"),
        no("alert", "logger", alert="wandb", logger="none"),
        no("prompts of more tokens", "text_tokens = 8", "has 20", text_tokens=8),
        no("best_by", "'beauty'", "avg", eval__best_by="beauty"),
        no("min_variety is 0.9", "noises_per_prompt is 1", eval__min_variety=0.9),
        no("batched_guidance is True", "flux", "no second forward", batched_guidance=True,
           model="flow_grpo/assets/tiny_flux"),
        no("batched_guidance is True", "qwenimage", "no second forward", batched_guidance=True,
           sample__guidance_scale=1.0, eval__guidance_scale=1.0),
        no("text_multiple is 8", "padding", sample__text_multiple=8, model="flow_grpo/assets/tiny_sd3"),
        no("eval_freq 0", health__action="roll_back", eval_freq=0),
        no("ocr", "'a photo", reward_fn={"ocr": 1.0}),
        no("reward.device", "'cuda:99'", reward__device="cuda:99"),
        no("no/such/file", reward__token_file="no/such/file"),
        no("vlm_judge: url, model", reward_fn={"vlm_judge": 1.0}),
        no("vlm_judge.url is 'b:1'", reward_fn={"vlm_judge": 1.0},
           reward__args={"vlm_judge": {"url": "b:1", "model": "m"}}),
        no("reward.args.shape:", reward__args={"shape": {"url": "http://127.0.0.1:1"}}),
        no("reward.args.shapes", "urll", reward__args={"shapes": {"urll": "x"}}),
        no("shapes.max_masked_share is 2", reward__args={"shapes": {"max_masked_share": 2}}),
        no("shapes.backend", "a thread", reward__args={"shapes": {"backend": "inline"}}),
        no("shapes.token", "REWARD_TOKEN", reward__args={"shapes": {"token": "secret"}}),
        no("shapes.url is 'http://[::1:1'", **url("http://[::1:1")),
        no("shapes.url is 'b:1'", **url(["http://a", "b:1"])),
        no("shapes.url is 'ftp://a'", "http", **url("ftp://a")),
        no("shapes.url holds a password", "REWARD_TOKEN", **url("http://me:secret@a")),
        no("or a query", "REWARD_TOKEN", **url("http://a/b?key=secret")),
        no("reward.args.shapes", "http://127.0.0.1:1", **url("http://127.0.0.1:1")),
    ],
    BRANCHES: [
        no("text_multiple is 1", "40 widths", "32", sample__text_multiple=1,
           text_tokens=40, compile=True),
        no("num_branches is 1", "2", sample__num_branches=1),
        no("'endpoint'", "not branches", train__objective="endpoint"),
        no("step_weight is ''", "'sqrt3'", "'mean_one'", "'equal'", train__step_weight=""),
        no("timestep_fraction 0.1", "num_steps 4", train__timestep_fraction=0.1),
        no("7 trained steps = 28 rows", "updates_per_epoch 3", "[1, 2, 4, 7, 14, 28]", sample__batch_size=4,
           sample__num_steps=8, train__timestep_fraction=1.0, train__updates_per_epoch=3),
        no("rollout_weights", "'shard'", fsdp__mode="shard"),
        no("reward_fn", "'shape'", "shapes", reward_fn={"shape": 0.0, "jpeg_compressibility": 1.0}),
    ],
    NFT: [
        no("clip_range is 0.001", "forward_objective 'nft'", train__clip_range=1e-3),
        no("baseline is 'prompt'", "branches", "'group'", sample__baseline="prompt"),
        no("step_weight is set to 'equal'", "ignore", train__step_weight="equal"),
        no(train__old_decay_schedule=1.5),
        no("sampler_decay_schedule is 2.0", "forward_objective 'nft'", train__sampler_decay_schedule=2.0),
        no("adaptive_beta is True", "train.beta set", train__adaptive_beta=True, train__beta=0.0,
           train__reference_guidance_scale=0.0),
        no("reference_guidance_scale is 3.0", "train.beta set", train__beta=0.0),
        no(sample__num_images_per_prompt=1, sample__batch_size=2),
    ],
    f"{NFT},dgpo": [
        no("dgpo", "shared_noise True", train__shared_noise=False),
        no("dgpo", "baseline 'group', but it is 'all'", sample__baseline="all"),
        no("batch_size 2", "num_images_per_prompt 4", sample__batch_size=2),
        no("1 trained step = 4 rows", "whole groups of 4", "[1]", train__updates_per_epoch=2),
        no("old_decay_schedule 0", "updates_per_epoch 2", train__old_decay_schedule=0.0),
        no("16 rows of whole groups of 4", "those that do: [2, 4]", sample__num_prompts_per_epoch=4,
           sample__batch_size=16, train__old_decay_schedule=0.0, train__updates_per_epoch=3),
    ],
    f"{NFT},elbo": [no("old_decay_schedule 0", train__old_decay_schedule=0.0, train__updates_per_epoch=1)],
    f"{NFT},ram": [
        no("'ram' needs old_decay_schedule 0", "but it is 1.0", train__old_decay_schedule=1.0),
        no("'ram' needs config.train.beta above 0", train__beta=0.0, train__reference_guidance_scale=0.0),
        no("crd_beta is 0.5", "forward_objective 'ram'", train__crd_beta=0.5),
    ],
    f"{NFT},crd": [
        no("'crd'", "old_decay_schedule 0.0", "set 3", train__old_decay_schedule=0.0),
        no("'crd'", "old_decay_schedule 2.0", "75 updates", train__old_decay_schedule=2.0),
        no("'crd' needs config.train.shared_noise True", train__shared_noise=False),
        no("batch_size 2", "num_images_per_prompt 4", sample__batch_size=2),
        no("sampler_decay_schedule is 1.5", "1, 2, 3", train__sampler_decay_schedule=1.5),
        no("sampler_decay_schedule is -0.5", "1, 2, 3", train__sampler_decay_schedule=-0.5),
    ],
    AWM: [
        no("nft_beta is 0.3", "forward_objective 'awm'", train__nft_beta=0.3),
        no("old_decay_schedule 0", "but it is 0.5", train__old_decay_schedule=0.5),
        no("updates_per_epoch 2", train__updates_per_epoch=1),
    ],
    DPO: [
        no("preferences.path 'nowhere'", "train_*.parquet", preferences__path="nowhere"),
        no("7 pairs", "2 pairs a batch", "= 4", sample__num_prompts_per_epoch=7),
        no("9 pairs", "16", sample__num_prompts_per_epoch=16, train__updates_per_epoch=1),
        no(sample__batch_size=3),
        no("completion_batch_size is 8", "config.preferences.path ''", sample__completion_batch_size=8),
        no("'winner_latents'", "[16,64]", "[32,64]", height=128),
        no("'text'", "[20,64]", "[24,64]", text_tokens=24),
    ],
    ONLINE: [no("batch_size is 6", "num_images_per_prompt = 4", sample__batch_size=6)],
}  # fmt: skip
PREPARING = [
    no("preferences.path", preferences__path=""),
    no("--source 'nowhere'", source="nowhere"),
    no("'nowhere/at/all'", model="nowhere/at/all"),
    no("batch_size", "num_images_per_prompt", sample__batch_size=6),
    no(sample__num_images_per_prompt=1),
    no("text_tokens = 5", text_tokens=5),
    no("reward_fn", "'shape'", reward_fn={"shape": 1.0}),
    no("rollout_weights is 'merged_fp8'", "lora.path", sample__rollout_weights="merged_fp8"),
]


@pytest.fixture(scope="module")
def weightless(tmp_path_factory):
    """The tiny model with weights that no one can read."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("models") / "weightless")
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"not weights")
    return str(folder)


def train_weightless(name, weightless, folder, **how):
    how = {"model": weightless} | how
    if name == DPO:
        how.setdefault("preferences__path", str(folder / "pairs"))
    return lambda: train(name, folder / "runs", **how)


@pytest.mark.parametrize("name", TRAINING)
def test_a_run_is_refused_before_any_weight_is_loaded_and_leaves_nothing(name, weightless, tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("local", lambda images, prompts, metadata: images.mean((1, 2, 3)))
    monkeypatch.setattr(QwenImage, "load", None)  # which loads weights; some rows have a whole model
    (tmp_path / "pairs").mkdir()
    write(tmp_path / "pairs", some_rows(9, model=[weightless] * 9))
    rows = []
    for words, how in TRAINING[name]:
        rows.append((str(how), train_weightless(name, weightless, tmp_path, **how), words))
    assert_refused(rows)
    assert not (tmp_path / "runs").exists()


def test_preparing_pairs_is_refused_before_anything_is_made(weightless, tmp_path, monkeypatch):
    def prepare(how):
        how = dict(preferences__path=str(tmp_path / "pairs"), model=weightless) | how
        options = prepare_preferences.Options(source=how.pop("source", ""))
        return lambda: prepare_preferences.main(config_of(DPO, **how), options)

    assert_refused([(str(how), prepare(how), words) for words, how in PREPARING])
    assert not (tmp_path / "pairs").exists()
    (tmp_path / "file").touch()
    monkeypatch.setattr(QwenImage, "load", None)  # which loads weights
    paths = [str(tmp_path / name) for name in ("file", "file/pairs", "file/deep/pairs")]
    rows = [(path, prepare(dict(preferences__path=path, model=TINY)), [tmp_path / "file"]) for path in paths]
    assert_refused(rows)


def test_a_checkpoint_of_another_config_is_refused_before_any_weight_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(QwenImage, "load", None)
    config = config_of(WINDOW, tmp_path, reward_fn={"shapes": 1.0})
    folder = tmp_path / config.name
    progress = checkpoints.Progress(1, 2)
    checkpoint = checkpoints.save(folder / "checkpoints", {}, progress, config=config.to_dict())
    shutil.copy(checkpoint / "config.json", folder)
    how = dict(resume_from="latest", train__beta=0.5, lora__rank=8)
    with pytest.raises(ValueError, match=r"\(lora\.rank: 4 -> 8, train\.beta: 0\.0 -> 0\.5\)"):
        train(WINDOW, tmp_path, **how)


COMMAND_LINES = [
    ("shapes_qwenimage_pr", "'shapes_qwenimage_pr'"),
    ("--config.compile false", "'false'"),
    ("--config.compile=yes", "config.compile is 'yes'", "True or False"),
    ("--config.sample.num_stepz=3", "config.sample.num_stepz", "config.sample.num_steps"),
    ("--config.train.emas=1", "no setting config.train.emas; --help"),  # a word that is only loosely like another
    ("--config.seed.a=3", "config.seed.a"),
    ("--config.train.sde_type=cps", "config.train.sde_type", "config.sample.sde_type"),
    ("--config.train.num_steps=8", "config.eval.num_steps or config.sample.num_steps"),
    ("--eta 0.3", "--eta", "--config.KEY=VALUE"),
    ("--config.reward_fn.mine=high", "config.reward_fn.mine"),
    ("--config.reward.args.mine=3", "config.reward.args.mine"),
    ("--config.custom.a.b=3", "config.custom.a.b", "config file"),
    ("--eta 0.3", "--eta", "config.sample.noise_level", "coming_from.md"),
    ("actor_rollout_ref.rollout.n=8", "means nothing", "config.sample.num_images_per_prompt", "coming_from.md"),
    ("--config=config/dgx.py:pickscore_qwenimage_pr", "'config/dgx.py'", "are in config/grpo.py"),
    ("--config.num_epochs=many", "config.num_epochs is 'many'", "whole number"),
    (
        "--config=config/nothing.py:a",
        "'config/nothing.py'",
        "config/dpo.py, config/grpo.py, config/nft.py, config/refl.py",
    ),
    ("--config=/no/such:folder/file.py:a", "'/no/such:folder/file.py', which is not there"),
    ("--config=config/grpo.py:shapes_qwenimag", "'shapes_qwenimag'", "nearest: shapes_qwenimage"),
    ("--config=config/grpo.py:shapes_qwenimage,smok", "'smok'", "smoke"),
    ("--config=config/grpo.py:,smoke", "run ''", "shapes_qwenimage"),
    ("--config.lora.rank=0 --config.lora.alpha=64", "config.lora.alpha is 64", "config.lora.rank set"),
]


def test_what_a_command_line_cannot_mean_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "train_qwenimage.py")])
    default = "config/grpo.py:shapes_qwenimage"
    calls = [(words, lambda words=words: command_line.config_of(words.split(), default)) for words, *_ in COMMAND_LINES]
    assert_refused([(*call, says) for call, (_, *says) in zip(calls, COMMAND_LINES, strict=True)])


LINES = [  # of a user's run
    ("config.num_epoch = 32", "num_epochs"),
    ("config.sample.num_stepz = 8", "num_steps"),
    ('config.train.step_weights = "sqrt3"', "step_weight"),
    ("config.trian.beta = 0.1", "'trian'; nearest: config.train;"),
    ("config.train.lr = 0.1", "'lr'", "config.train.learning_rate", "coming_from.md"),
    ("config.train.emas = 0.1", "'emas'; --help config", "coming_from.md"),
    ("config.seed = seeed", "'seeed' is not defined"),
    ('config.pretrained.model = "a"', "pretrained"),
    ("config.resolution = 512", "config.height"),
    ('config.num_epochs = "32"', "num_epochs"),
    ("config = None", "returns None"),
]
BUGS = [
    ("None.sample", AttributeError),
    ("dict()['sample']", KeyError),
    ("config.num_epochs = 'a' + config.num_epochs", TypeError),
]


def made(line):
    """A call of `select` with a user's run of the given line."""
    code = f"def mine():\n    config = default_config()\n    {line}\n    return config\n"
    names = dict(default_config=table.default_config)
    exec(code, names)
    return lambda: config_files.select("mine", (names["mine"],), grpo.VARIANTS, "mine.py")


def test_an_unknown_key_in_a_run_is_answered_with_the_right_one_and_a_bug_keeps_its_own_error():
    rows = [(line, made(line), ["mine in mine.py", *words]) for line, *words in LINES]
    for line, error in BUGS:
        rows.append((line, made(line), [error.__name__], error))
        assert "mine.py" not in otherwise(made(line), ["no such word"], error), line
    assert_refused(rows)


@pytest.mark.parametrize("folder", ["plain", "with:colon", "with:two:colons"])
def test_a_name_follows_the_last_colon_since_folders_have_colons_too(folder, tmp_path):
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "mine.py"
    file.write_text(
        "from flow_grpo.settings.table import default_config\n\n\ndef get_config(name=''):\n"
        "    config = default_config()\n    config.name = name or 'of_the_file'\n    return config\n"
    )
    assert config_files.load(str(file)).name == "of_the_file"
    assert config_files.load(f"{file}:mine").name == "mine"


def test_variants_that_a_file_does_not_look_at_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from flow_grpo.settings.table import default_config\n\n\ndef get_config(name):\n    return default_config()\n"
    )
    assert config_files.load(f"{tmp_path}/mine.py:mine").name == "base"
    with pytest.raises(ValueError, match=r"mine\.py makes of 'mine,guard' what it makes of 'mine'"):
        config_files.load(f"{tmp_path}/mine.py:mine,guard")


SERVING = [
    ("jpeg_compresibility", "'jpeg_compresibility'", "jpeg_compressibility"),
    ("shapes --port 99999", "--port is 99999", "65535"),
    ("shapes --host 0.0.0.0", "--host 0.0.0.0", "token"),
    ("shapes --host ::", "token"),
    ("shapes --device warp:9", "--device is 'warp:9'"),
    ("shapes --token-file no/such/file", "'no/such/file'"),
    ("shapes --host 0.0.0.0 --without-token --device warp:9", "--device is 'warp:9'"),
]


def test_what_serve_reward_refuses():
    def start(words):
        args = serve_reward.parser().parse_args(words.split())
        serve_reward.check_flags(args)
        serve_reward.main(args)

    assert_refused([(words, lambda words=words: start(words), says) for words, *says in SERVING])


def test_a_file_without_a_token_is_refused_and_its_text_is_not_said(tmp_path):
    for text in ("", "\n", "open sesame", "sésame", None):
        file = tmp_path / f"token {len(text or '')}"
        if text is not None:
            file.write_text(text)
        said = otherwise(lambda file=file: read_token(str(file)), ["no such word"])
        assert said.startswith("UserError: ")
        assert "token" in said
        assert not text or text not in said
        file.unlink(missing_ok=True)


WEIGHTS = [
    ({"shape": 1.0}, (), "'shape'", "nearest: shapes"),
    ({"clip_model": 1.0}, (), "'clip_model'"),
    ({"shapes": "1"}, (), "reward_fn.shapes is '1'"),
    ({"shapes": True}, (), "reward_fn.shapes is True"),
    ({"shapes": INF}, (), "reward_fn.shapes is inf"),
    ({"avg": 1.0}, (), "'avg'"),
    ({}, (), "reward_fn", "shapes"),
    ({"shapes": 1.0}, ["pickscor"], "'pickscor'", "nearest: pickscore"),
]
METADATA = [
    ("geneval", {}, "geneval", '"include"'),
    ("geneval", {"include": [{"class": "dog"}], "tag": "a"}, '"class" and "count"'),
    ("geneval", {"include": [{"class": "dog", "count": 0}], "tag": "a"}, '"count"', "from 1"),
    ("geneval", {"include": [{"class": "dog", "count": "2"}], "tag": "a"}, '"count"', "from 1"),
    ("geneval", {"include": [{"class": "dog", "count": 1}]}, '"tag"', '"counting"'),
    ("geneval", {"include": [{"class": "dog", "count": 1}], "tag": None}, '"tag"'),
]


def test_rewards_are_refused_by_their_names_weights_options_and_prompts():
    rewards.check_options("vlm_judge", dict(url="http://a", model="b", lowest=0, token_file=""))
    good = {"tag": "counting", "include": [{"class": "dog", "count": 1}]}
    check = rewards.check_prompts
    rows = []
    for weights, of_evaluation, *words in WEIGHTS:
        call = partial(rewards.check_rewards, weights, of_evaluation)
        rows.append((f"{weights} {of_evaluation}", call, words))
    unknown = partial(rewards.check_options, "pickscore", {"models": "a"})
    wrong = partial(rewards.load, "aesthetic", "cpu", {"predictor": 5})
    rows += [
        ("unknown", unknown, ["pickscore", "models", "model, processor"]),
        ("wrong", wrong, ["'aesthetic'", "int"]),
    ]
    for name, metadata, *words in METADATA:
        check({name: 1.0}, [Prompt("a", good), Prompt("b", good)])
        prompts = Prompt("a", good), Prompt("b" * 5000, metadata)
        call = partial(check, {name: 1.0}, prompts)
        quoted = [f"reward '{name}'", *words, "'" + "b" * 40, "b...b", f"config.reward_fn.{name}=0"]
        rows.append((f"{name} {metadata}", call, quoted))
    rows.append(("watched", lambda: check({}, [Prompt("a")], ["shapes"]), ["reward 'shapes'", "'a'", "leave it out"]))
    assert_refused(rows)


FILES = [  # the file, its bytes and, after its own name, the words
    ("train_metadata.jsonl", b"", "empty"),
    ("train_metadata.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2", "JSON"),
    ("train_metadata.jsonl", b'{"prompt": "a"}\n\n', "line 2"),
    ("train_metadata.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', "line 2", '"prompt"'),
    ("train_metadata.jsonl", b'["a"]\n', "line 1", '"prompt"'),
    ("train_metadata.jsonl", b'{"prompt": 3}\n', "line 1", '"prompt"'),
    ("train_metadata.jsonl", b'{"prompt": " "}\n', "line 1"),
    ("train_metadata.jsonl", b'{"prompt": "a"}\n{"prompt": "a", "tag": ["\\ud800"]}', "line 2", "surrogate"),
    ("train_metadata.jsonl", b'{"prompt": "a", "tag": ["b"]}', "line 1", '"tag"', "['b']"),
    ("train_metadata.jsonl", b'{"prompt": "a", "tag": "b\\nc"}', "line 1", '"tag"'),
    ("train_metadata.jsonl", b"[" * 200_000, "line 1", "'[["),
    ("train_metadata.jsonl", b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "line 1", "JSON"),
    ("train.txt", b"", "empty"),
    ("train.txt", b"a circle\n \n", "line 2"),
    ("train.txt", "a\ncaf\u00e9\n".encode("latin-1"), "line 2", "0xe9"),
    ("train.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n", "git lfs pull"),
]


def test_prompt_files_are_refused_by_file_and_line_in_a_short_sentence_and_before_any_weight(weightless, tmp_path):
    rows = []
    for number, (file, stored, *words) in enumerate(FILES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / file).write_bytes(stored)
        (folder / "test.txt").write_text("a circle\n")
        says = [folder / file, *words]
        rows.append((f"{number}", lambda folder=folder: prompts.load_prompts(str(folder), "train"), says))
        rows.append((f"{number} run", train_weightless(WINDOW, weightless, tmp_path, dataset=str(folder)), says))
    rows.append(("long name", lambda: prompts.load_prompts("a" * 300, "train"), ["config.dataset", "'aaa"]))
    rows.append(("nothing", lambda: prompts.load_prompts(str(tmp_path), "train"), [tmp_path, "train_metadata.jsonl"]))
    assert_refused(rows)
    assert max(len(otherwise(call, ["no such word"])) for _, call, _ in rows) < 500
    assert not (tmp_path / "runs").exists()
