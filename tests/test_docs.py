"""The commands in the docs: the parser of the program accepts each of them."""

import importlib.util
import re
import shlex
from types import SimpleNamespace

import pytest
from conftest import ROOT

import coevolve
import evolve
from common import settings
from environments import ENVIRONMENTS, environment
from environments.intercodesql import spider
from lab import learn
from lab import settings as lab
from lab.page import page
from lab.study import compare, study
from lab.study.methods import method_of

DOCS = [path for path in ROOT.rglob("*.md") if not {".venv", "runs", "site-packages"} & {*path.parts}]
COMMAND = re.compile(r"(?:^|[ `])(?:bash run\.sh \w|python (?:-m (?:lab|environments)\b|\w+\.py))|(?:torchrun|accelerate launch) .*\.py ")


def commands() -> list[str]:
    """Returns the lines of code blocks, and the inline code, that run this project."""
    found = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
        inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for line in [*"".join(blocks).splitlines(), *inline]:
            line = " ".join(line.split())
            line = re.sub("^for seed .* do (.*); done$", r"\1", line).replace("$seed", "0")
            if COMMAND.search(line) and not line.startswith("#"):
                found.append(line)
    return found


def read(words: list[str], kind=lab.Settings, methods=lab.METHODS):
    if words == ["--help", "all"]:
        return
    settings.parse(words, kind, methods, environment)


def read_run_sh(command: str, words: list[str], monkeypatch):
    """Calls the parser of the program that run.sh starts for a command."""
    env = "webshop" if command == "ENV" else command
    if env in ENVIRONMENTS:
        read(["--env", env, *words])
    elif command == "learn":
        settings.parse(["--file", *words], learn.Settings, learn.METHODS, lambda env: learn.Options)
    elif command == "study":
        def read_arms(env, arms, seeds, folder, more, jobs):
            for arm in arms:
                read(["--env", env, "--method", method_of(arm), *study.read_by(arm, arms, more)])

        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which a study sets
        monkeypatch.setattr(study, "make_runs", read_arms)
        monkeypatch.setattr(study, "finished", lambda folder: [folder])
        study.main([word.replace("ENV", "webshop") for word in words])
    elif command == "play":
        assert words[0] in ("ENV", *ENVIRONMENTS, "echo") and words[1:] in ([], ["--agent", "RUN"])
    elif command == "test":
        assert all((ROOT / word).exists() for word in words)
    else:
        dict(compare=compare, page=page)[command].main(words)


@pytest.mark.parametrize("line", [*dict.fromkeys(commands())])
def test_a_command_of_the_docs_is_valid(line, monkeypatch):
    for module in compare, study:
        monkeypatch.setattr(module, "write_report", lambda *_: "")
    monkeypatch.setattr(compare, "named", list)
    monkeypatch.setattr(page, "make_page", lambda *_: "")
    monkeypatch.setattr(spider, "load_intercode", lambda *_: [])
    monkeypatch.setattr(settings, "Path", lambda name: SimpleNamespace(exists=lambda: True))  # of placeholders
    words = shlex.split(re.sub(r"[][]|\.\.\.", "", line), comments=True)
    if "run.sh" in words:
        command, *words = words[words.index("run.sh") + 1:]
        named = re.search(r'^commands="(.*)\$environments"', (ROOT / "run.sh").read_text(), re.M)
        assert command in [*named[1].split(), *ENVIRONMENTS, "ENV"]
        read_run_sh(command, words, monkeypatch)
    elif words[0] == "source":
        assert words[1] == ".venv/bin/activate"
    elif "-m" in words:
        _, module, *words = words[words.index("-m"):]
        if module != "lab.NAME":
            assert importlib.util.find_spec(module), module
        if module == "environments.intercodesql.spider":
            spider.main(words)
    else:
        [n] = [n for n, word in enumerate(words) if word in ("coevolve.py", "evolve.py")]
        program = dict(coevolve=coevolve, evolve=evolve)[words[n].removesuffix(".py")]
        if "echo" not in words:  # the environment that docs/environments.md adds
            read(words[n + 1:], program.Settings, program.METHODS)


def test_commands_are_found():
    found = commands()
    assert len(found) > 40 and any("--multi_gpu" in line for line in found)
