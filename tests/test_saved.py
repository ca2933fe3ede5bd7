"""What a run saves can be used by others, and a run that cannot start says so in one line."""

import io
import os
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import transformers
from accelerate import Accelerator
from conftest import ROOT, files_of, refusal, table

from engine import machine, models


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664)])
def test_all_files_of_a_run_and_its_branch_have_the_mode_of_the_umask(
        toy_run, toy, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        own = toy_run("--method", "eto", "--eval-tasks", 1)
        branch = f"{own}@iter1/target.jsonl"
        toy_run("--out", tmp_path / "branch", "--branch", branch, "--beta", 0.3)
        # The files of this run may have the mode of another umask.
        toy_run("--out", tmp_path / "other", "--branch", f"{toy[0]}@iter1/failure-agent")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or path.stat().st_mode & 0o777 == mode
    assert files_of(tmp_path / "other") == files_of(toy[0])


def test_a_model_that_this_user_may_not_read_is_not_called_damaged(small_model, monkeypatch):
    """A UsageError would be."""
    monkeypatch.setattr(os, "access", lambda file, how: file.name != "model.safetensors")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", Mock(
        side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(PermissionError, match="model.safetensors: this user may not read it"):
        models.read_model(small_model)


def start(*arguments, **environment):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | environment)


@pytest.mark.parametrize("program", [
    ["coevolve.py"], ["evolve.py"], ["-m", "lab"], ["-m", "lab.page.page"], ["-m", "lab.learn"]])
def test_a_program_without_its_packages_says_how_to_get_them(program):
    """-S leaves out the packages that are installed."""
    done = start("-S", *program, "--env", "webshop")
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "bash run.sh webshop" in line and f"source {ROOT}/.venv/bin/activate" in line


@pytest.mark.parametrize("program", [["coevolve.py"], ["-m", "lab"], ["-m", "lab.study.compare"]])
def test_ctrl_c_during_the_imports_ends_a_program_in_one_line(program, tmp_path):
    # A package with the name of one that all programs import, and which is interrupted. A shell
    # ignores the signal in background jobs.
    (tmp_path / "torch.py").write_text("from signal import *\nsignal(SIGINT, default_int_handler)\n"
                                       "raise_signal(SIGINT)\n")
    done = start(*program, "a", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped\n")


def test_a_missing_module_of_the_user_has_its_traceback(tmp_path):
    (tmp_path / "mine.py").write_text("import coevolve, a_module_of_mine\n")
    done = start(tmp_path / "mine.py", PYTHONPATH=str(ROOT))
    assert "Traceback" in done.stderr and "a_module_of_mine" in done.stderr


@pytest.mark.parametrize("devices, lists, found", table("""
    -> -> False
    nvidia3 -> -> True
    nvidiactl nvidia-uvm -> -> False
    kfd -> -> True
    dxg -> GPU 0: NVIDIA H100 -> True
    -> No devices found -> False"""))
def test_a_gpu_is_noticed(devices, lists, found, tmp_path, monkeypatch):
    """WSL has no device of a GPU, and a container may have another than the first. A machine
    without NVIDIA's driver has no nvidia-smi."""
    nvidia_smi = Mock(return_value=Mock(stdout=lists))
    if not lists:
        nvidia_smi.side_effect = FileNotFoundError
    for name in devices.split():
        (tmp_path / name).touch()
    monkeypatch.setattr(machine.subprocess, "run", nvidia_smi)
    assert str(machine.has_gpu(tmp_path)) == found


def test_gpus_that_torch_cannot_use_are_refused_unless_they_are_hidden(monkeypatch):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    for visible in "", "-1":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine.check_torch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "cannot use this machine's GPUs" in refusal(machine.check_torch)


def test_a_tracker_that_cannot_start_is_named(toy_run, monkeypatch):
    monkeypatch.setattr(Accelerator, "init_trackers", Mock(
        side_effect=ConnectionError("no key\nand no network")))
    monkeypatch.setattr("engine.tracking.filter_trackers", lambda *_: ["wandb"])
    said = refusal(toy_run, "--track", "wandb")
    assert said.startswith("--track wandb: it cannot start: no key") and "tensorboard" in said


def test_the_users_matplotlib_settings_do_not_apply(toy, tmp_path):
    """Nor does the backend that a notebook sets."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    run = shutil.copytree(toy[0], tmp_path / "run")
    done = start("-m", "lab.page.page", run, MATPLOTLIBRC=str(tmp_path),
                 MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert (done.returncode, done.stderr) == (0, "") and (run / "run.html").exists()


def test_main_runs_in_a_notebook(toy_run, monkeypatch):
    """Its stdout has no `reconfigure`, and it is no file."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    toy_run("--method", "sft", "--eval-tasks", 1)
    assert "sft on webshop" in said.getvalue()
