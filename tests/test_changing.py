"""What docs/changing.md and the README tell a fork to change applies, and does what they say."""

import json
import re
import shutil
import subprocess
import sys

from lab.harness.files import ROOT


def blocks(page):
    return re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.S)


def changes(block):
    """(file, lines to take out, lines to put in) of each change in a block."""
    for change in block.split("--- ")[1:]:
        head, *lines = change.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[:1] == sign) for sign in "-+")
        yield head.split(":")[0], old, new


def test_the_readmes_changes_are_those_of_the_guide():
    block, = blocks("README.md")
    assert set(changes(block)) < set(changes(blocks("docs/changing.md")[0]))


def test_a_new_method_and_a_new_environment_are_a_few_lines(small_model, tmp_path):
    copy = tmp_path / "fork"
    for package in ROOT.glob("*/__init__.py"):
        shutil.copytree(package.parent, copy / package.parent.name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    ablations, *guides = blocks("docs/changing.md")
    for name, old, new in (change for block in guides for change in changes(block)):
        text = (copy / name).read_text() if old else ""
        assert text.count(old) == 1 or not old, name
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text.replace(old, new) if old else new + "\n")
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(copy / "lab/loop.py"), "--env", "echo", "--loud", "--method", "more-sft",
         "--model", str(small_model), "--sft-epochs", "1", "--max-tokens", "256",
         "--max-new-tokens", "8", "--threads", "1", "--out", str(out)],
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (out / "eval-1-target-test.jsonl").open()]
    assert [row["task"] for row in rows] == ["echo-test-0", "echo-test-1"]
    assert rows[0]["messages"][0]["content"] == "say GREY"
    assert (out / "iter1/target-agent/model.safetensors").exists()
