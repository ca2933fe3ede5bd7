"""The commands in the docs: the parser of the program accepts each of them."""

import importlib.util
import itertools
import re
import shlex
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from conftest import ROOT, SMALL_RUN, program

import coevolve
import evolve
from common import settings
from common.files import read_jsonl
from environments import ENVIRONMENTS, environment
from environments.intercodesql import spider
from lab import learn
from lab import settings as lab
from lab.page import page
from lab.study import compare, study

DOCS = [path for path in ROOT.rglob("*.md") if not {".venv", "runs", "site-packages"} & {*path.parts}]
COMMAND = re.compile(r"(?:^|[ `])(?:bash run\.sh \w|python (?:-m (?:lab|environments)\b|\w+\.py))|(?:torchrun|accelerate launch) .*\.py ")


def commands() -> list[str]:
    """Returns the lines of code blocks, and the inline code, that run this project."""
    found = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        parts = re.split("^```.*", text, flags=re.M)  # prose, a block of code, prose, ...
        inline = re.findall(r"`([^`]+)`", "".join(parts[::2]))
        for line in [*"".join(parts[1::2]).splitlines(), *inline]:
            line = " ".join(line.partition("#")[0].split())
            line = re.sub("^for seed .* do (.*); done$", r"\1", line).replace("$seed", "0")
            if COMMAND.search(line):
                found.append(line)
    return found


def read(words: list[str], program=lab, options=environment):
    with suppress(SystemExit):  # --help
        settings.parse(words, program.Settings, program.METHODS, options)


def run_sh(command: str, words: list[str]):
    """Calls the parser of the program that run.sh starts for a command."""
    if command in ("ENV", *ENVIRONMENTS):
        read(["--env", command.replace("ENV", "webshop"), *words])
    elif command == "learn":
        read(["--file", *words], learn, lambda env: learn.Options)
    elif command == "play":
        assert words[0] in ("ENV", *ENVIRONMENTS, "echo") and words[1:] in ([], ["--agent", "RUN"])
    elif command == "test":
        assert all((ROOT / word).exists() for word in words)
    else:
        program = dict(compare=compare, page=page, study=study)[command]
        program.main([word.replace("ENV", "webshop") for word in words])


# What the programs do once they have parsed their words, and the check of paths, which are placeholders
EFFECTS = ("lab.study.compare.write_report lab.study.compare.grouped lab.study.study.ThreadPoolExecutor "
           "lab.study.study.finished lab.study.study.write_report lab.page.page.make_page "
           "environments.intercodesql.spider.load_intercode common.settings.Path").split()


@pytest.mark.parametrize("line", [*dict.fromkeys(commands())])
def test_a_command_of_the_docs_is_valid(line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which a study sets
    for name in EFFECTS:
        monkeypatch.setattr(name, MagicMock())
    words = shlex.split(re.sub(r"[][]|\.\.\.", "", line))
    if "run.sh" in words:
        command, *words = words[words.index("run.sh") + 1:]
        run_sh(command, words)
    elif "-m" in words:
        _, module, *words = words[words.index("-m"):]
        if module != "lab.NAME":
            assert importlib.util.find_spec(module), module
        if module == "environments.intercodesql.spider":
            spider.main(words)
    else:
        [n] = [n for n, word in enumerate(words) if word in ("coevolve.py", "evolve.py")]
        if "echo" not in words:  # the environment that docs/environments.md adds
            read(words[n + 1:], dict(coevolve=coevolve, evolve=evolve)[words[n].removesuffix(".py")])


def test_commands_are_found():
    found = commands()
    assert len(found) > 40 and any("--multi_gpu" in line for line in found)


def test_the_ablation_of_the_readme_changes_beta_alone(monkeypatch, tmp_path, capfd):
    """Its commands, with a base run on six tasks. beta changes in both iterations, and for both
    agents."""
    block, = re.findall(r"```\n(python coevolve.py --branch .*?)```", (ROOT / "README.md").read_text(), re.S)
    changed, compared = map(shlex.split, block.splitlines())
    monkeypatch.chdir(tmp_path)
    program(*SMALL_RUN, "--iterations", "2", "--out", "runs/webshop-coevolve-s0")
    program(*changed[2:])
    assert "; other settings: beta (0.1 -> 0.3); other code: none" in capfd.readouterr().out

    for beta, run in (0.1, "runs/webshop-coevolve-s0"), (0.3, "runs/beta"):
        files = [*Path(run).glob("iter[12]/*-agent/margins.jsonl")]
        assert len(files) == 4
        for row in itertools.chain(*map(read_jsonl, files)):
            chosen, rejected, margin = (last - first for first, last in zip(row["first"], row["last"]))
            assert margin == pytest.approx(beta * (chosen - rejected), abs=1e-5)
    compare.main(compared[3:])
    said = capfd.readouterr().out
    assert re.search(r"webshop: Settings in which they differ\n.*\nbeta +base +0.1\nbeta +beta +0.3\n\n", said)
