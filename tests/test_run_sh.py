"""run.sh, in a copy of the repository with a PATH that has only the needed tools."""

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, table

TOOLS = "bash sh cat chmod dirname grep mkdir readlink rm sed touch uname".split()
OLD = "exit 1"  # an interpreter whose version check fails
# An interpreter without packages: the check of requirements.txt finds nothing.
BARE = (f'case $1 in */requirements.py) echo "torch (found none)"; exit 1 ;; esac\n'
        f'exec "{sys.executable}" "$@"')
NO_VENV = f'case "$*" in "-m venv"*) echo "No module named ensurepip"; exit 1 ;; esac\n{BARE}'
# An interpreter with all packages, which prints all other commands instead of running them.
FULL = (f'case $* in */requirements.py*) ;; *version_info*) '
        f'exec "{sys.executable}" "$@" ;; *) echo "ran $*" ;; esac')


def write_program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """machine(python3=SCRIPT, ...)(*arguments) runs run.sh with these interpreters alone."""
    repo, bin_ = tmp_path / "a repo", tmp_path / "bin"
    shutil.copytree(ROOT / "environments", repo / "environments")
    shutil.copy(ROOT / "requirements.txt", repo)
    script = (ROOT / "run.sh").read_text()  # for machines with other devices than this one
    for path in "/dev/nvidia", "/dev/kfd", "/opt/rocm/.info/version":
        script = script.replace(path, f"{tmp_path}/{Path(path).name}")
    (repo / "run.sh").write_text(script)
    bin_.mkdir()
    for tool in TOOLS:
        (bin_ / tool).symlink_to(shutil.which(tool))

    def build(**interpreters):
        for name, script in interpreters.items():
            write_program(bin_ / name.replace("_", "."), script)

        def run(*arguments, script="a repo/run.sh", **env):
            return subprocess.run(
                [shutil.which("bash"), script, *arguments], cwd=tmp_path, text=True,
                capture_output=True, env={"PATH": str(bin_), "HOME": str(tmp_path), **env})

        run.venv, run.install = repo / ".venv", partial(write_program, repo / ".venv/bin/python")
        return run

    return build


def one_line(done):
    """Returns the last line on stderr of a command with exit status 2."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_without_a_command_usage_is_printed(machine):
    run = machine(python3=BARE)
    assert "bash run.sh webshop" in run().stderr and run().returncode == 2
    assert one_line(run("webshp")).endswith("'webshp' (did you mean webshop?); bash run.sh lists all")
    assert one_line(run("xyz")).endswith("unknown command 'xyz'; bash run.sh lists all")
    for asked in "--help", "-h":
        done = run(asked)
        assert (done.returncode, done.stderr) == (0, "") and "bash run.sh webshop" in done.stdout


def test_each_folder_of_an_environment_is_a_command(machine, tmp_path):
    run = machine(python3=FULL)
    folder = tmp_path / "a repo/environments/new_one"
    (folder / "__pycache__").mkdir(parents=True)  # left by a deleted environment
    assert "unknown command 'new_one'" in run("new_one").stderr
    (folder / "__init__.py").touch()
    assert run("new_one", "--quick").stdout == "ran -m lab --env new_one --quick\n"
    assert "new_one" in run("--help").stdout.splitlines()[-1].split()


def test_an_interpreter_and_a_checkout_may_be_in_a_path_with_spaces(machine, tmp_path):
    run = machine(python3=FULL)
    (tmp_path / "my bin").mkdir()
    named = shutil.move(tmp_path / "bin/python3", tmp_path / "my bin/python3")
    # By a symbolic link, and with CDPATH, with which cd prints the folder.
    link = tmp_path / "link.sh"
    link.symlink_to(tmp_path / "a repo/run.sh")
    for script, cdpath in (link, ""), ("a repo/run.sh", str(tmp_path)):
        done = run("page", "r", script=script, PYTHON=str(named), CDPATH=cdpath)
        assert done.stdout.startswith("ran -m lab.page.page r"), done.stderr


def test_a_complete_environment_is_used_without_a_lock(machine):
    """Also in a read-only checkout."""
    run = machine(python3=BARE)
    run.install(FULL)
    assert run("page", "r").stdout.startswith("ran -m lab.page.page r")
    assert not (run.venv.parent / ".venv.lock").exists()


def test_unsupported_python_is_refused_in_one_line(machine):
    """Other names of interpreters are tried unless the user gives one."""
    done = machine()("test")
    assert len(done.stderr.splitlines()) == 1 and "python3 is missing" in one_line(done)
    done = machine(python3=OLD, python3_12=OLD)("webshop")
    assert len(done.stderr.splitlines()) == 1
    assert "not Python 3.10-3.13" in one_line(done) and "PYTHON=" in one_line(done)
    run = machine(python3=OLD, python3_11=NO_VENV)
    assert "installing packages" in run("webshop", "--help").stderr  # by 3.11
    assert one_line(run("webshop", PYTHON="python3")).startswith("run.sh: python3 is missing or not")


def test_a_foreign_venv_stays_and_an_incomplete_one_is_made_again(machine):
    run = machine(python3=NO_VENV)
    done = run("webshop")
    assert "apt install python3-venv" in one_line(done) and "torch (found none)" in done.stderr
    assert not run.venv.exists()
    run.venv.mkdir()
    assert "delete it" in one_line(run("test")) and run.venv.exists()
    (run.venv / "installing").touch()
    assert "apt install python3-venv" in one_line(run("test")) and not run.venv.exists()


# A .venv without the package of bfcl. Its pip logs its arguments.
VENV = ('case $* in */requirements.py*requirements.txt) ;; */requirements.py*) exit 1 ;; '
        '*version_info*) ;; "-m pip install"*) echo "$*" >>"{log}"; exit {status} ;; '
        '*) echo "ran $*" ;; esac')


@pytest.mark.parametrize("status", [0, 1])
def test_bfcl_gets_its_one_package_without_its_dependencies(machine, tmp_path, status):
    run, log = machine(python3=BARE), tmp_path / "pip"
    run()
    run.install(VENV.format(log=log, status=status))
    done = run("bfcl", "--model", "m")
    assert log.read_text() == "-m pip install --no-deps --retries 1 bfcl-eval==2026.3.23\n"
    if status:
        assert "bfcl needs one more package: " in one_line(done) and "--no-deps" in one_line(done)
    else:
        assert "-m lab --env bfcl --model m" in done.stdout
        assert "installing bfcl-eval==2026.3.23" in done.stderr
    assert run("test").stdout.startswith("ran -m pytest")  # with or without it
    assert run("webshop").stdout.startswith("ran ") and len(log.read_text().splitlines()) == 2


def test_bfcl_adds_nothing_to_an_active_environment(machine):
    run = machine(python3='case $* in */requirements.txt) ;; */requirements.py*) exit 1 ;; '
                          f'*version_info*) exec "{sys.executable}" "$@" ;; '
                          '*) echo "ran $*" ;; esac')
    said = one_line(run("bfcl", "--model", "m"))
    assert said.endswith("-m pip install --no-deps bfcl-eval==2026.3.23")
    assert run("test").stdout.startswith("ran -m pytest") and not run.venv.exists()


# An interpreter with all packages. It makes environments whose programs log their arguments.
MAKER = """case $* in */requirements.py*) ;; *"(3, 11)"*) exit {old} ;;
    *version_info*) exec "{python}" "$@" ;;
    "-m venv"*) mkdir -p "$3/bin"
        for name in python appworld; do
            printf '#!/bin/bash\\necho "$0 $*" >>"{log}"; exit {status}\\n' >"$3/bin/$name"
            chmod +x "$3/bin/$name"
        done ;;
    *) echo "ran $*" ;; esac"""


@pytest.mark.parametrize("status, old, said", table("""
    0 -> 0 ->
    1 -> 0 -> was not installed
    0 -> 1 -> needs Python 3.11, 3.12 or 3.13"""))
def test_appworld_gets_an_environment_of_its_own_once(machine, tmp_path, status, old, said):
    log, maker = tmp_path / "log", MAKER.format(
        python=sys.executable, log=tmp_path / "log", status=status, old=old)
    run = machine(python3=maker, python3_12=maker)
    done = run("appworld", "--model", "m")
    if said:
        assert said in one_line(done) and done.stdout == ""
    else:
        assert done.stdout == "ran -m lab --env appworld --model m\n"
    assert run("test").stdout.startswith("ran -m pytest")  # with or without it
    apps = f"{run.venv}-appworld"
    assert said or log.read_text() == (
        f"{apps}/bin/python -m pip install appworld==0.1.3.post1\n{apps}/bin/appworld install\n")
    assert not run.venv.exists()
    log.write_text("")
    assert run("webshop").stdout.startswith("ran ") and log.read_text() == ""


@pytest.mark.parametrize("words, line", table("""
    webshop --seed 3 -> -m lab --env webshop --seed 3
    study a -> -m lab.study.study a
    compare a -> -m lab.study.compare a
    page a -> -m lab.page.page a
    play a -> -m lab.chat.play a
    learn a -> -m lab.learn a
    test -k x -> -m pytest -q -rs --durations=10 -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder -k x"""))
def test_active_environment_that_satisfies_the_requirements_is_used(machine, words, line):
    run = machine(python3=FULL)
    done = run(*words.split())
    assert (done.stdout, done.returncode) == (f"ran {line}\n", 0) and not run.venv.exists()
    assert importlib.util.find_spec(line.split()[1])


@pytest.mark.parametrize("device, visible, processes", table("""
    other -> 2 -> 1
    nvidia0 -> 0 -> 1
    nvidia0 -> 1 -> 1
    nvidia3 -> 2 -> 2
    kfd -> 3 -> 3"""))
def test_each_gpu_that_torch_can_use_gets_a_process(machine, tmp_path, device, visible, processes):
    """CUDA_VISIBLE_DEVICES has no effect on the number."""
    run = machine(python3=f'case "$*" in *device_count*) echo {visible}; exit ;; esac\n{FULL}')
    (tmp_path / device).touch()
    done = run("webshop", CUDA_VISIBLE_DEVICES="0,1")
    assert (done.stdout, done.stderr) == ("ran -m lab --env webshop\n" * int(processes), "")


@pytest.mark.parametrize("there, nvidia_smi, visible, wheel, index, pips, said", table("""
    nvidia0 -> -> 0 -> torch for CUDA -> -> 1 -> PIP_INDEX_URL
    nvidia3 -> -> 0 -> torch for CUDA -> -> 1 -> PIP_INDEX_URL
    -> echo 'GPU 0: NVIDIA H100' -> 0 -> torch for CUDA -> -> 1 -> PIP_INDEX_URL
    -> echo No devices were found -> 0 -> torch for CPUs -> cpu -> 2 -> PIP_INDEX_URL
    nvidia-uvm -> -> 0 -> torch for CPUs -> cpu -> 2 -> PIP_INDEX_URL
    nvidia0 kfd -> -> 0 -> torch for CUDA -> -> 1 -> PIP_INDEX_URL
    kfd version -> -> 0 -> torch for ROCm 6.4 -> rocm6.4 -> 1 -> no torch for ROCm 6.4
    kfd -> -> 0 -> -> -> 0 -> install ROCm, or train on the CPU: CUDA_VISIBLE_DEVICES=
    -> -> 0 -> torch for CPUs -> cpu -> 2 -> PIP_INDEX_URL
    nvidia0 -> -> -> torch for CPUs -> cpu -> 2 -> PIP_INDEX_URL
    nvidia0 -> -> -1 -> torch for CPUs -> cpu -> 2 -> PIP_INDEX_URL"""))
def test_the_wheel_of_torch_depends_on_the_machine(
        machine, tmp_path, there, nvidia_smi, visible, wheel, index, pips, said):
    """WSL has no device of a GPU. The venv's pip logs its arguments, and finds nothing. An index
    other than PyPI is tried once. PyPI has wheels for CPUs, but not for ROCm."""
    log = tmp_path / "pip"
    log.touch()
    pip = f'#!/bin/bash\ncase "$*" in *install*) echo "$*" >>"{log}"; exit 1 ;; esac\n'
    run = machine(python3=f"""case "$*" in *requirements.py*) echo torch; exit 1 ;; *version_info*) ;;
        "-m venv"*) mkdir "$3/bin"; echo '{pip}' >"$3/bin/python"; chmod +x "$3/bin/python" ;; esac""")
    write_program(tmp_path / "bin/nvidia-smi", nvidia_smi)
    for name in there.split():
        (tmp_path / name).write_text("6.4.1-83\n")
    done = run("webshop", CUDA_VISIBLE_DEVICES=visible)
    assert wheel in done.stderr and said in one_line(done)
    asked = log.read_text()
    assert asked.count("install") == int(pips)
    url = r"--retries 0 --index-url https://download.pytorch.org/whl/(\S+) torch>="
    assert re.findall(url, asked) == index.split()
    assert ("needs 5 GB" in done.stderr) == (index == "cpu")
