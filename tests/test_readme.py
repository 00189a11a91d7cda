"""README says what is there."""

import re
import shutil

from small import ROOT

INDEXES = ("reference/experiments.md", "design/checks.md", "reference/code_map.md")
README = (ROOT / "README.md").read_text()
PAGES = README + "".join((ROOT / "docs" / page).read_text() for page in INDEXES)
FOLDERS = ("config", "dataset", "scripts", "flow_grpo", "tests", "benchmarks", "tools", "docs")


def test_every_path_that_is_named_exists():
    named = set(re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w./-]*\w|\b[A-Z]+\.md\b", PAGES))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_script_config_and_make_target_that_is_named_exists():
    for script in re.findall(r"`(train_\w+?)(?:\.py)?`", PAGES):
        assert (ROOT / "scripts" / f"{script}.py").exists(), script
    configs = "".join((ROOT / "config" / name).read_text() for name in ("grpo.py", "nft.py", "dpo.py"))
    runs = re.findall(r"^def (\w+)\(\)", configs, re.MULTILINE)
    assert set(re.findall(r"\b(?:shapes|pickscore)_\w+", PAGES)) == set(runs)
    makefile = (ROOT / "Makefile").read_text()
    lists = re.findall(r"^(?:QUICK|ON_GPU) := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    files = [f"tests/test_{name}.py" for names in lists for name in names.replace("\\", " ").split()]
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    named = re.findall(r"^make ([\w-]+)|`make (?:PYTHON=\S+ )?([\w-]+)", PAGES, re.MULTILINE)
    assert {first or second for first, second in named} <= set(targets)


def test_the_tests_that_it_names_are_there():
    named = re.findall(r'ARGS="?((?:tests/\S+?\.py ?)+)(?:-k (\w+))?["`]', PAGES)
    assert len(named) == PAGES.count("ARGS=") - PAGES.count("ARGS=FILE")
    for files, word in named:
        text = "".join((ROOT / file).read_text() for file in files.split())
        assert re.search(rf"def test_\w*{word}", text), (files, word)


def test_every_link_leads_to_a_file():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())]
    links = [(page, link) for page, link in links if not link.startswith("http")]
    assert len(links) > 20
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_the_examples_run(recorded, tmp_path, monkeypatch, capsys):
    (tmp_path / "flow_grpo").symlink_to(ROOT / "flow_grpo")
    shutil.copytree(recorded("branches").folder, tmp_path / "runs" / "shapes_qwenimage_pr")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, {})
    shown = capsys.readouterr().out
    assert "torch.Size([2, 3, 64, 64]) [tensor([" in shown
    assert "torch.Size([2, 7, 6, 3, 64, 64])" in shown
