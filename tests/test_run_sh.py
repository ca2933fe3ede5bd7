"""run.sh on machines that lack something, made of a copy of the repository and a bare PATH."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from lab.harness.files import ROOT

TOOLS = "bash sh cat dirname grep mkdir rm sed touch uname".split()
OLD = "exit 1"  # an interpreter whose version check fails
# An interpreter without packages: the check of requirements.txt finds nothing.
BARE = (f'case $1 in */requirements.py) echo "torch (found none)"; exit 1 ;; esac\n'
        f'exec "{sys.executable}" "$@"')
NO_VENV = f'case "$*" in "-m venv"*) echo "No module named ensurepip"; exit 1 ;; esac\n{BARE}'
# One that has all, and only says what else it would run.
FULL = (f'case $* in */requirements.py*) ;; *version_info* | */settings.py*) '
        f'exec "{sys.executable}" "$@" ;; *) echo "ran $*" ;; esac')


@pytest.fixture
def machine(tmp_path):
    """machine(python3=SCRIPT, ...)(*arguments) runs run.sh with these interpreters alone."""
    repo, bin_ = tmp_path / "a repo", tmp_path / "bin"
    for folder in (repo, bin_, tmp_path / "home"):
        folder.mkdir()
    (repo / "lab/harness").mkdir(parents=True)
    shutil.copytree(ROOT / "worlds", repo / "worlds")
    for name in ("run.sh", "requirements.txt", "lab/harness/requirements.py", "lab/harness/settings.py"):
        shutil.copy(ROOT / name, repo / name)
    for tool in TOOLS:
        (bin_ / tool).symlink_to(shutil.which(tool))

    def build(**interpreters):
        for name, script in interpreters.items():
            (bin_ / name.replace("_", ".")).write_text(f"#!/bin/bash\n{script}\n")
            (bin_ / name.replace("_", ".")).chmod(0o755)

        def run(*arguments, **env):
            home = str(tmp_path / "home")
            done = subprocess.run(
                [shutil.which("bash"), str(repo / "run.sh"), *arguments], cwd=tmp_path, text=True,
                capture_output=True, timeout=180,
                env={"PATH": str(bin_), "HOME": home, "PIP_CONFIG_FILE": os.devnull, **env})
            run.venv = repo / ".venv"
            return done

        return run

    return build


def one_line(done):
    """The last line on stderr of a run that was refused with exit status 2."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_without_a_command_usage_is_printed(machine):
    run = machine(python3=BARE)
    for arguments in ((), ("shop",)):
        assert "bash run.sh webshop" in run(*arguments).stderr
        assert run(*arguments).returncode == 2


def test_unsupported_python_is_refused_in_one_line(machine):
    """Others by the known names are tried, unless the user names one."""
    done = machine()("test")
    assert len(done.stderr.splitlines()) == 1 and "python3 is missing" in one_line(done)
    done = machine(python3=OLD, python3_12=OLD)("webshop")
    assert len(done.stderr.splitlines()) == 1
    assert "not Python 3.10-3.13" in one_line(done) and "PYTHON=" in one_line(done)
    run = machine(python3=OLD, python3_11=BARE)
    done = run("webshop", "--help")
    assert done.returncode == 0 and "--lambda-sft" in done.stdout and not run.venv.exists()
    assert one_line(run("webshop", PYTHON="python3")).startswith("run.sh: python3 is missing or not")


def test_an_environment_that_is_foreign_stays_and_a_half_made_one_is_made_anew(machine):
    run = machine(python3=NO_VENV)
    done = run("webshop")
    assert "apt install python3-venv" in one_line(done) and "torch (found none)" in done.stderr
    assert not run.venv.exists()
    run.venv.mkdir()
    assert "delete it" in one_line(run("test")) and run.venv.exists()
    (run.venv / "installing").touch()
    assert "apt install python3-venv" in one_line(run("test")) and not run.venv.exists()


@pytest.mark.parametrize("flags", [["--betta", "1"], ["--beta", "-1"], ["--method", "dpo"]])
def test_bad_flag_is_refused_before_anything_is_installed(machine, flags):
    run = machine(python3=BARE)
    done = run("webshop", *flags)
    assert len(done.stderr.splitlines()) == 1 and flags[0] in one_line(done)
    assert not run.venv.exists()


@pytest.mark.skipif(not importlib.util.find_spec("ensurepip"), reason="no ensurepip here")
def test_no_network_names_the_remedy_and_pips_log(machine):
    run = machine(python3=BARE)
    done = run("webshop", PIP_INDEX_URL="http://127.0.0.1:9", PIP_RETRIES="0")
    assert "PIP_INDEX_URL" in one_line(done) and ".venv-install.log" in one_line(done)
    assert "ERROR" in (run.venv.parent / ".venv-install.log").read_text()


# A .venv that has all but the package of bfcl, where pip notes what it is asked for.
VENV = ('case $* in */requirements.py*requirements.txt) ;; */requirements.py*) exit 1 ;; '
        '*version_info*) ;; "-m pip install"*) echo "$*" >>"{log}"; exit {status} ;; '
        '*) echo "ran $*" ;; esac')


@pytest.mark.parametrize("status", [0, 1])
def test_bfcl_gets_its_one_package_without_its_dependencies(machine, tmp_path, status):
    run, log = machine(python3=BARE), tmp_path / "pip"
    run()
    (run.venv / "bin").mkdir(parents=True)
    (run.venv / "bin/python").write_text(f"#!/bin/bash\n{VENV.format(log=log, status=status)}\n")
    (run.venv / "bin/python").chmod(0o755)
    done = run("bfcl", "--model", "m")
    assert log.read_text() == "-m pip install --no-deps --retries 1 bfcl-eval==2026.3.23\n"
    if status:
        assert "bfcl needs one more package: " in one_line(done) and "--no-deps" in one_line(done)
    else:
        assert "lab/loop.py --env bfcl --model m" in done.stdout
        assert "installing bfcl-eval==2026.3.23" in done.stderr
    assert run("test").stdout.startswith("ran -m pytest")  # with or without it
    assert run("webshop").stdout.startswith("ran ") and len(log.read_text().splitlines()) == 2


def test_bfcl_adds_nothing_to_an_active_environment(machine):
    run = machine(python3='case $* in */requirements.txt) ;; */requirements.py*) exit 1 ;; '
                          f'*version_info* | */settings.py*) exec "{sys.executable}" "$@" ;; '
                          '*) echo "ran $*" ;; esac')
    said = one_line(run("bfcl", "--model", "m"))
    assert said.endswith("-m pip install --no-deps bfcl-eval==2026.3.23")
    assert run("test").stdout.startswith("ran -m pytest") and not run.venv.exists()
    assert one_line(run("bfcl")).startswith("run.sh: --model tiny: it cannot read")


def test_active_environment_that_satisfies_the_requirements_is_used(machine):
    run = machine(python3=FULL)
    done = run("test", "-k", "a name")
    assert done.stdout == ("ran -m pytest -q -rs --durations=10 -o testpaths=tests -n logical --maxprocesses 4 "
                           "--dist loadfile --no-loadscope-reorder -k a name\n") and done.returncode == 0
    assert "lab/loop.py --env webshop --seed 3" in run("webshop", "--seed", "3").stdout
    assert run("load-intercode", "a").stdout == (
        "ran -m worlds.intercodesql.spider a\n")
    assert run("study", "webshop").stdout == "ran -m lab.study.runs webshop\n"
    assert run("compare", "runs/a").stdout == "ran -m lab.study.report runs/a\n"
    assert run("page", "runs/a").stdout == "ran -m lab.look.page runs/a\n"
    assert run("play", "webshop").stdout == "ran -m lab.look.play webshop\n"
    assert "lab/bench/bench.py --quick" in run("bench", "--quick").stdout
    assert not run.venv.exists()
