"""docs/tour.md says what the program computes, and what it gives a reader to paste works."""

import os
import platform
import re
import subprocess
import sys

import pytest
from conftest import ROOT

FILES = ("tour.md", "tour-mask.svg", "tour-tree.svg")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder like a clone's, in which a reader has run the tour's first command."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "tiny").symlink_to(ROOT / "tiny")
    subprocess.run(["bash", ROOT / "run.sh", "tour", "--out", "docs"], cwd=folder, check=True,
                   env={**os.environ, "PYTHON": sys.executable}, capture_output=True)
    return folder


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the digits are an x86 processor's")
@pytest.mark.parametrize("name", FILES)
def test_the_document_is_what_the_command_writes(clone, name):
    written = (clone / "docs" / name).read_text(encoding="utf-8")
    assert written == (ROOT / "docs" / name).read_text(encoding="utf-8"), "bash run.sh tour"


def test_what_a_reader_pastes_prints_what_the_document_says(clone):
    text = (clone / "docs/tour.md").read_text(encoding="utf-8")
    first, *commands = re.findall(r"```bash\n(.*?)```", text, re.S)
    assert first == "bash run.sh tour\n" and commands
    for each in commands:
        assert subprocess.run(each, shell=True, cwd=clone, check=True, capture_output=True).stdout
    pasted = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    printed = subprocess.run([sys.executable, "-c", pasted], cwd=clone, check=True, text=True,
                             capture_output=True).stdout.splitlines()
    assert printed == re.findall(r"It prints\s`(.*?)`", text) and len(printed) == 3


def test_the_document_and_its_pictures_are_small():
    sizes = [(ROOT / "docs" / name).stat().st_size for name in FILES]
    assert sum(sizes[1:]) < 50_000 and len((ROOT / "docs/tour.md").read_text().split()) < 1400
