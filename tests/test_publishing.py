"""A run is published: its LoRA in diffusers, its card, an upload."""

import ast
import base64
import inspect
import json
import re
import shutil

import push_to_hub
import pytest
import torch
from hostile import http_server, send
from huggingface_hub import HfApi, ModelCard, constants
from PIL import Image
from refused import assert_refused
from safetensors.torch import load, load_file, save_file
from small import MODELS, as_prompts, change_json, config_of, exported, flip_a_bit, lines_of, loaded

from flow_grpo.base import folders
from flow_grpo.base.formatting import with_error
from flow_grpo.checkpoints import best
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.monitoring import model_card, provenance, run_history
from flow_grpo.weights import lora_files

TINY = "flow_grpo/assets/tiny_qwenimage"
LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture
def run(recorded):
    """The folder of a run with a function as its reward, without a tracker."""
    return recorded("window").folder


@pytest.fixture
def copy(run, tmp_path):
    """Copy of the run's folder, to be changed."""
    return shutil.copytree(run, tmp_path / "run")


def velocity(model):
    condition = model.encode(as_prompts(["a red circle"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        noise = model.noise(Size(64, 64), [generator])
        return model.velocity(noise, torch.tensor([500.0]), condition, 1.0, Size(64, 64))


def test_diffusers_loads_what_was_trained_by_the_code_of_the_card_in_any_folder(recorded, tmp_path, monkeypatch):
    base = velocity(loaded("qwenimage"))
    monkeypatch.chdir(tmp_path)
    for kind in ("window", "nft, full weights"):
        folder = shutil.copytree(recorded(kind).folder, tmp_path / kind)
        model_card.write_cards(folder, str(folder))
        (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        names = {}
        exec(code, names)
        assert (velocity(MODELS["qwenimage"](names["pipeline"], torch.device("cpu"))) - base).abs().max() > 1e-3
        assert names["image"].size == (64, 64)


def test_a_card_of_an_editing_model_gives_its_call_a_source_and_the_hub_its_task(copy):
    change_json(copy / "config.json", model="flow_grpo/assets/tiny_qwenimage_edit")
    assert model_card.write_cards(copy) == []
    text = (copy / "README.md").read_text()
    assert "pipeline_tag: image-to-image" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (call,) = ast.parse(code).body[-1:]
    names = {keyword.arg for keyword in call.value.value.value.keywords}
    taken = inspect.signature(MODELS["qwenimage_edit"].PIPELINE.__call__).parameters
    assert {"image", "height", "width", "num_inference_steps"} < names <= set(taken)


@pytest.mark.parametrize("sources", [{}, {"sources/a.png": "f9"}, None], ids=["none", "some", "not known"])
def test_a_card_of_a_model_that_also_draws_gives_its_call_a_source_where_prompts_had_one(sources, copy):
    change_json(copy / "config.json", model="flow_grpo/assets/tiny_flux_kontext")
    change_json(copy / "inputs.json", sources=sources)
    assert model_card.write_cards(copy) == []
    text = (copy / "README.md").read_text()
    assert ("image=source" in text) == ("YOUR PICTURE" in text) == (sources != {})
    assert f"pipeline_tag: {'image-to-image' if sources != {} else 'text-to-image'}" in text


def test_a_card_of_a_model_that_is_not_here_says_how_to_load_it(copy):
    change_json(copy / "config.json", model="somebody/elses")
    assert model_card.write_cards(copy) == []
    text = (copy / "README.md").read_text()
    assert 'from_pretrained("somebody/elses")' in text
    assert "pipeline(" not in text


def test_what_a_run_leaves_can_be_read_by_whom_the_umask_lets_and_its_page_has_its_numbers(run):
    like = (run / "config.json").stat().st_mode
    exported = [file for file in run.rglob("*.safetensors") if "state" not in file.parts]
    assert {file.parent.name for file in exported} >= {run.name, "best"}
    for file in exported:
        assert file.stat().st_mode == like, file
    assert "weight_norm" in (run / "report.html").read_text()
    assert len({line["weight_norm"] for line in lines_of(run, "epoch")}) == 3


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"commit": "abc"}, "| code | flow_grpo abc |"),  # of a version that noted no more
        ({"versions": {"torch": "9"}, "gpus": ["B300"], "ranks": 2}, "flow_grpo of an unknown commit; torch 9 |"),
        ({"gpus": 3}, "is damaged: gpus is 3"),
        ({"versions": {"torch": None}}, "is damaged: versions is {'torch': None}"),
        (3, ""),
    ],
)
def test_a_card_of_a_run_of_another_version_has_what_that_noted(start, said, copy):
    (copy / "run.json").write_text(json.dumps({"starts": [start]}))
    notices = model_card.write_cards(copy)
    assert said in (notices[0] if notices else (copy / "README.md").read_text())
    assert bool(notices) == ("damaged" in said)
    provenance.note_start(copy, run_history.read_run(copy, "").config, world_size=1, epoch=0)
    assert provenance.last_start(copy).ranks == 1


def test_the_card_says_what_was_trained_and_how_good_it_is(run):
    card = ModelCard.load(run / "README.md")
    assert card.data.library_name == "diffusers"
    assert {"lora", "flow-grpo-grpo"} <= set(card.data.tags)
    tests = lines_of(run, "test")
    # The last line is the test of the best weights.
    *_, last, of_best = tests
    before = with_error(tests[0]["test/redness"], tests[0]["test/std_error"])
    after = with_error(last["test/redness"], last["test/std_error"])
    after_best = with_error(of_best["test_best/redness"], of_best["test_best/std_error"])
    assert f"| redness | {before} | {after} |\n" in card.text
    assert f"| redness | {before} | {after_best} |\n" in (run / "best/README.md").read_text()
    for words in (
        "rewards and weights | redness 1.0",
        "| seed | 42 |",
        "| size | 64 x 64 pixels",
        "as trained: no averaging had begun",
        f"A LoRA of {TINY}, trained by",
        f'DiffusionPipeline.from_pretrained(resolve("{TINY}"))',
        "2505.05470",
        "| code | flow_grpo",
        "| `train.learning_rate` | 0.01 |",
    ):
        assert words in card.text
    assert not re.search(rf"{run.parent}|\bavg\b", card.text), "no path of this machine, no sum of one reward"
    for folder in (run, run / "best"):
        assert "![samples](samples.png)" in (folder / "README.md").read_text()
        assert Image.open(folder / "samples.png").width > 100


def test_the_card_says_at_which_strength_programs_that_read_tensors_alone_load_the_file(copy):
    file = copy / LORA
    for alpha, strength in ((4, "1"), (8, "2"), (6, "1.5"), (None, "1")):
        metadata = None
        if alpha:
            # 8 is what earlier versions wrote.
            settings = {"transformer.r": 4, "transformer.lora_alpha": alpha}
            metadata = {lora_files.METADATA: json.dumps(settings)}
        save_file(load_file(file), file, metadata)
        assert model_card.write_cards(copy) == []
        assert f"`{LORA}` goes into `models/loras`" in (copy / "README.md").read_text()
        assert f"loads it at strength {strength}.\n" in (copy / "README.md").read_text()
    file.write_bytes(b"no LoRA")
    (notice,) = model_card.write_cards(copy)
    assert f"{copy} has no model card" in notice


def test_a_folder_that_has_no_card_is_named_and_the_other_one_has_its_card(copy):
    (copy / "best" / best.FILE).write_bytes(b"no JSON")
    (copy / "README.md").unlink()
    (notice,) = model_card.write_cards(copy)
    assert f"{copy / 'best'} has no model card: {copy / 'best' / best.FILE} cannot be read" in notice
    assert (copy / "README.md").is_file()


def test_the_card_names_the_loss_that_was_chosen():
    assert model_card.algorithm(config_of("shapes_qwenimage,guard")) == "GRPO-Guard (arXiv:2510.22319)"
    for name, words in {"_pr": "TempFlow-GRPO", "_nft": "DiffusionNFT", "_dpo,online": "Diffusion-DPO"}.items():
        assert words in model_card.algorithm(config_of("shapes_qwenimage" + name))
    config = config_of("shapes_qwenimage", train__objective="of_a_fork")
    assert model_card.algorithm(config) == "of_a_fork"


def test_what_a_machine_knows_is_not_on_the_card(copy):
    config = json.loads((copy / "config.json").read_text())
    config |= dict(cache_dir="/home/me/cache", dataset="/home/me/prompts", num_epochs=5)
    config |= dict(custom={"api_key": "secret-word", "n": 7})
    config["lora"]["targets"] = ["a | b"]
    config["reward"]["args"] = {"judge": {"url": "http://10.0.0.7:8000", "token": "secret-word"}}
    config["alert"] = "curl -H 'Authorization: Bearer secret-word' 10.0.0.7 -d"
    (copy / "config.json").write_text(json.dumps(config))
    changed = {"dataset": ["/home/me/others", "/home/me/prompts"], "num_epochs": [9, 5]}
    (copy / folders.PARENT).write_text(json.dumps(dict(folder="/home/me/runs/old", epoch=2, changed=changed)))
    model_card.write_cards(copy)
    text = (copy / "README.md").read_text()
    for word in ("/home", "10.0.0.7", "secret-word", "`custom.n`"):
        assert word not in text
    for row in ("| prompts | prompts |", "| `num_epochs` | 5 |", "| `lora.targets` | ['a \\| b'] |"):
        assert row in text
    assert "| branch | begins with 2 epochs of old |" in text


HOSTILE = "<script>x</script>", "[y](javascript:z)", "![y][z]", "a\n\n# Head\n---", "`|` ``|", "*b* ~~b~~ $b$ _b_", "\\"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_card_shows_the_letters_of_a_foreign_run_and_none_of_them_as_markup(text, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / text.replace("/", "_"))
    config = json.loads((folder / "config.json").read_text())
    config["reward_fn"][text] = 1.0
    config["lora"]["targets"] = [text]
    config |= dict(model=text, dataset=f"/x/{text}", method=text, algorithm=text)
    (folder / "config.json").write_text(json.dumps(config))
    metrics = ""
    for line in lines_of(folder):
        line[f"test/{text.replace('/', '_')}"] = 0.5
        metrics += json.dumps(line) + "\n"
    (folder / "metrics.jsonl").write_text(metrics)
    start = dict(commit=text, versions={text: text}, gpus=[text], ranks=1)
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    assert model_card.write_cards(folder) == []
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model is None
    assert any(tag.startswith("flow-grpo-") and "\n" not in tag for tag in card.data.tags)
    prose = re.sub(r"```python\n.*?\n```", "", card.text, flags=re.DOTALL)
    assert set(re.findall(r"(?<!\\)\][(\[][^)]*\)?", prose)) <= {"](samples.png)", "](reward.png)"}
    assert not re.search(r"<|(?<![\\\w])[*~$]|(?<!\\)\b_|^# Head|^---$", prose, re.MULTILINE)
    for line in prose.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) in (3, 4), "lines between two or three columns"
    headings = ["Load it", "Training", "Licence"]
    assert re.findall(r"^## (.*)", card.text, re.MULTILINE) == headings


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("Qwen/Qwen-Image_2 [v1] #3", "Qwen/Qwen-Image_2 [v1] #3"),
        ("a\n# b\x1b[1m", "a # b?[1m"),
        ("<b> & &lt;", "&lt;b&gt; &amp; &amp;lt;"),
        ("_a_b_ __", r"\_a_b\_ \_\_"),
        ("[a](b) [a][b] [a]", r"[a\](b) [a\][b] [a]"),
        (r"a\`|", r"a\\\`\|"),
        ("https://a www.a.b c@d", r"https:\//a www\.a.b c\@d"),
        (0.5, "0.5"),
    ],
)
def test_a_value_on_a_card_is_escaped_where_markdown_would_read_it_as_more_than_letters(value, shown):
    assert model_card.markdown(value) == shown
    code = model_card.code_span("a`|b")
    assert model_card.markdown(code) == code == "`a'\\|b`"


def test_a_card_links_to_the_hub_only_what_may_be_there(copy):
    config = json.loads((copy / "config.json").read_text())
    links = {}
    for model in ("me/model_", "/absent/private/model", "../absent/model", f"{copy.parent}/absent", "flow_grpo/absent"):
        (copy / "config.json").write_text(json.dumps(config | {"model": model}))
        model_card.write_cards(copy)
        card = ModelCard.load(copy / "README.md")
        links[model] = card.data.base_model, re.findall(r"\]\(https:.*?\)", card.text), "private" in card.text
    linked = "me/model_", [r"](https://huggingface.co/me/model\_)"], False
    assert links.pop("me/model_") == linked
    assert {*map(str, links.values())} == {"(None, [], False)"}


def push(run, *words, hub=None):
    args = push_to_hub.parser().parse_args([str(run), "--repo", "me/red", *words])
    push_to_hub.main(args, hub or HfApi(endpoint="http://127.0.0.1:1"))


def test_a_dry_run_lists_the_files_and_connects_to_nothing(run, capsys):
    push(run, "--dry-run")
    out = capsys.readouterr().out
    listed = [line.split()[-1] for line in out.splitlines() if line.startswith(" ")]
    assert sorted(listed) == sorted(["README.md", "reward.png", "samples.png", LORA])
    assert "nothing was uploaded" in out
    card = (run / "best" / "README.md").read_text()
    assert 'load_lora_weights("me/red")' in card
    assert "Mean over the test prompts, at most 4 of them" in card
    assert "from before training" not in out


def test_a_best_policy_of_before_training_is_no_surprise(copy, capsys):
    change_json(copy / "best" / "evaluation.json", epoch=0)
    (copy / "best" / "checksums.json").unlink()
    push(copy, "--dry-run")
    assert "from before training: no later evaluation of its run was better" in capsys.readouterr().out
    assert best.caution(copy) == "", "the last weights"


@pytest.fixture
def upload(run, monkeypatch):
    """(flags) -> the paths that the hub is asked, and the content of each file that is committed, by its path."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the environment may say otherwise

    def push_with(*flags):
        committed = {}

        def answer(handler, body, number):
            said = dict(url=f"http://{handler.headers['host']}/me/red")
            if "/preupload/" in handler.path:
                said = {"files": []}
                for file in json.loads(body)["files"]:
                    said["files"].append(dict(path=file["path"], uploadMode="regular", shouldIgnore=False))
            elif "/commit/" in handler.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        committed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                said = dict(success=True, commitOid="a" * 40, commitUrl=f"{said['url']}/commit/a")
            send(handler, said)

        with http_server(answer) as (address, asked):
            push(run, *flags, hub=HfApi(endpoint=address, token="hf_test"))
        return asked, committed

    return push_with


def test_an_upload_makes_the_repository_and_commits_every_file_once(run, upload):
    asked, committed = upload("--weights=last")
    assert asked[0] == "/api/repos/create"
    assert committed.keys() == {"README.md", "reward.png", "samples.png", LORA}
    for name, content in committed.items():
        assert content == (run / name).read_bytes()


def test_a_lora_is_uploaded_in_bfloat16_and_stays_as_it_is_in_the_run(run, upload, capsys):
    file = run / "best" / LORA
    before = file.read_bytes()
    _, committed = upload("--export-dtype=bfloat16")
    assert file.read_bytes() == before
    assert f"{len(committed[LORA]):,}  {LORA}" in capsys.readouterr().out
    assert len(committed[LORA]) < 0.6 * len(before)
    weights = load(committed[LORA])
    for name, weight in load_file(file).items():
        assert torch.equal(weights[name], weight.bfloat16())
    copy = run.parents[1] / LORA
    copy.write_bytes(committed[LORA])
    assert lora_files.read_adapter(copy) == lora_files.read_adapter(file)
    assert committed["README.md"] == (run / "best" / "README.md").read_bytes()


def not_finite(path):
    tensors = load_file(path)
    save_file(tensors | dict.fromkeys(list(tensors)[:1], torch.full((4, 4), float("nan"))), path)


@pytest.mark.parametrize("weights", ["best", "last"])
@pytest.mark.parametrize("kind", ["window", "nft, full weights"])
def test_damaged_weights_are_not_uploaded(weights, kind, recorded, tmp_path):
    """Bits are compared where checksums are, which is in best/; numbers everywhere."""
    copy = shutil.copytree(recorded(kind).folder, tmp_path / "run")
    file = exported(copy / "best" if weights == "best" else copy)
    push(copy, "--weights", weights, "--dry-run")
    (flip_a_bit if weights == "best" else not_finite)(file)
    with pytest.raises(ValueError, match=file.name):
        push(copy, "--weights", weights)


def test_what_is_no_run_and_a_hub_that_does_not_answer_are_named(run, recorded, tmp_path):
    full = recorded("nft, full weights").folder
    rows = [("no run", lambda: push(tmp_path), [tmp_path]), ("no hub", lambda: push(run), ["me/red", "hub"])]
    rows.append(("no LoRA", lambda: push(full, "--export-dtype=bfloat16"), ["--export-dtype", full]))
    assert_refused(rows)
