"""What `pip install .` installs."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest
import yaml
from small import ENV, ROOT

from flow_grpo.diffusers_patch import registry

SOURCES = ("setup.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the package, without anything else of the checkout but the data set that it ships."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in ("flow_grpo", "dataset/shapes"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, folder]
    subprocess.run(command, check=True, env=ENV, capture_output=True, timeout=300)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_a_wheel_holds_every_module_the_tiny_model_and_the_shapes(wheel):
    names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "flow_grpo").rglob("*.py")}
    tiny = {str(path.relative_to(ROOT)) for path in (ROOT / "flow_grpo/assets/tiny_qwenimage").rglob("*.*")}
    assert modules | tiny <= names
    assert {f"{registry.tiny_folder(name)}/model_index.json" for name in registry.names()} <= names
    for split in ("train", "validation", "test"):
        data = wheel.read(f"flow_grpo/assets/dataset/shapes/{split}_metadata.jsonl")
        assert data == (ROOT / f"dataset/shapes/{split}_metadata.jsonl").read_bytes()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"flow_grpo"}


def test_a_wheel_names_its_requirements_and_pythons(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    needed = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(needed) == len(lines)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Author"] == "The flow_grpo authors"
    assert "License :: OSI Approved :: Apache Software License" in metadata.get_all("Classifier")


def test_a_wheel_holds_its_licence_whole_and_the_citation_names_the_same(wheel):
    for file in ("LICENSE", "NOTICE"):
        (name,) = [name for name in wheel.namelist() if name.endswith(f"/{file}")]
        assert wheel.read(name) == (ROOT / file).read_bytes()
    text, citation = (ROOT / "LICENSE").read_text(), yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert text.strip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in text
    assert citation["license"] == "Apache-2.0"
    assert f'version="{citation["version"]}"' in (ROOT / "setup.py").read_text()
