"""A run's folder and command line: skipped and repeated phases, resuming, errors and flags."""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, TOY, Toy, ended, fork, in_toy, kills_until_it_ends, program, wait_until
from safetensors.torch import load_file, save_file

import coevolve
from common import files
from common.files import read_json, read_jsonl, write_json
from common.settings import UsageError, parse
from engine import branch, code, command, models, phases, run
from engine.trajectories import write as write_jsonl
from environments import environment
from envs import EnvError
from lab import __main__ as whole_program
from lab.page import page

KILLED_RUNS = int(os.environ.get("KILLED_RUNS", 1))
FF = "failure>failure"
RESUME = ". Fix this and rerun the same command to resume"
SFT = ("--method", "sft", "--eval-tasks", 1)  # the shortest run


def made(folder) -> list[str]:
    """Returns the outputs that all processes have made in a folder, in order."""
    return [row["phase"] for row in read_jsonl(folder / "metrics.jsonl") if row["event"] == "phase"]


def contents(folder) -> tuple[dict, dict]:
    """Returns the files made by the phases of a run, and their records without the time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in ("config.json", "phases.json", "metrics.jsonl", "lock"):
            found[name] = path.read_bytes()
    records = read_json(folder / "phases.json")
    return found, {name: row | dict(seconds=0, stat=0) for name, row in records.items()}


def refusal(start, *arguments) -> str:
    """Returns the error line of the run that start(*arguments) starts."""
    with pytest.raises(SystemExit) as refused:
        start(*arguments)
    line = refused.value.code
    del refused  # its frames hold the lock of the run's folder
    return line


@pytest.fixture
def again(toy, small_model, tmp_path, monkeypatch):
    """again(change, *flags) -> the outputs that are made again after change(folder) of a copy of
    the toy run in tmp_path/run."""
    out = tmp_path / "run"
    shutil.copytree(toy[0], out)
    monkeypatch.setattr(run, "make", lambda *_, **__: Toy())

    def start(change=lambda out: None, *flags):
        change(out)
        before = len(made(out))
        program(*TOY, "--model", small_model, "--out", out, *flags)
        return {*made(out)[before:]}

    return start


# ------------------------------------------------------------------------ skipped and repeated phases


def test_a_phase_runs_again_exactly_if_its_inputs_differ(small_model, tmp_path):
    """Inputs are the phase, values, content of files and lists, agents and tokenizer, not times or
    names."""
    given = tmp_path / "given"
    given.write_text("a")
    s = coevolve.Settings(model=str(small_model), out=str(tmp_path / "run"), max_tokens=99)
    done = []

    def rows(r, *inputs, n=1):
        done.append(r.name)
        return [dict(text=str(inputs[0]))]

    def other(r, *inputs, n=1):
        return rows(r, *inputs)

    def agent(r, *inputs):
        done.append(r.name)
        return small_model

    def process(phase=rows, inputs=(given,), fingerprint="", n=1, more=()):
        """Runs three phases: rows, an agent made of them and of `more`, and rows made of both."""
        r = run.Run(s, environment("webshop")())
        r.fingerprint += fingerprint
        done.clear()
        first = r.once("first.jsonl", phase, *inputs, n=n)
        trained = r.once("agent", agent, [*first, *more])
        r.once("last.jsonl", rows, first, [trained], dict(more=given))
        r.close()
        return done.copy()

    everything = ["first.jsonl", "agent", "last.jsonl"]
    assert process() == everything
    assert process() == []
    os.utime(given, (1, 1))
    os.utime(tmp_path / "run/first.jsonl", (1, 1))
    assert process() == []
    assert process(n=3) == ["first.jsonl"]  # with the same content
    assert process(other, n=3) == ["first.jsonl"]
    now = dict(phase=other, inputs=(given, given), n=3)
    assert process(**now) == ["first.jsonl"]
    now["more"] = [dict(text="of plain Python between two phases")]
    assert process(**now) == ["agent", "last.jsonl"]
    given.write_text("b")
    assert process(**now) == ["first.jsonl", "last.jsonl"]  # the first with the same content
    now["fingerprint"] = "x"
    assert process(**now) == everything
    shutil.rmtree(tmp_path / "run/agent")
    assert process(**now) == ["agent"]
    write_jsonl(tmp_path / "run/first.jsonl", [dict(text="by hand")])
    assert process(**now) == ["agent", "last.jsonl"]
    assert process(**now) == []


def without_failures(out):
    pairs = out / "iter1/pairs-target.jsonl"
    write_jsonl(pairs, [row for row in read_jsonl(pairs) if row["kind"] != FF])


def shorter(out):
    """Deletes outputs but not their records, and adds a record that no phase uses."""
    shutil.rmtree(out / "iter1")
    records = read_json(out / "phases.json")
    write_json(out / "phases.json", records | dict(lock=records["experts.jsonl"]))


@pytest.mark.parametrize("change, expected", [
    (lambda out: (out / "iter1/target.jsonl").unlink(), {"iter1/target.jsonl"}),
    # The agent is made again as it was, so later outputs stay valid.
    (lambda out: shutil.rmtree(out / "sft-target"), {"sft-target"}),
    (shorter, {f"iter1/{name}" for name in (
        "target.jsonl", "failure.jsonl", "pairs-target.jsonl", "pairs-failure.jsonl",
        "target-agent", "failure-agent")})])
def test_what_was_deleted_is_made_again_as_it_was(change, expected, again, toy, tmp_path):
    assert again(change) == expected
    assert contents(tmp_path / "run") == contents(toy[0])


def test_phases_after_an_edited_file_run_again(again, toy, tmp_path):
    follows = {"iter1/target-agent", "eval-1-target-test.jsonl"}
    assert again(without_failures) == follows
    [line] = read_jsonl(tmp_path / "run/iter1/target-agent/train.jsonl")
    assert {*line["kinds"]} == {"expert>target", "expert>failure"}
    edited = [name for name, row in read_json(tmp_path / "run/phases.json").items() if "edited" in row]
    assert edited == ["iter1/pairs-target.jsonl"]
    # Undo the edit.
    name = "iter1/pairs-target.jsonl"
    assert again(lambda out: shutil.copy(toy[0] / name, out / name)) == follows
    assert contents(tmp_path / "run") == contents(toy[0])


def test_agents_of_another_base_are_trained_again(toy_run, small_model, tmp_path):
    """Also if its files have the same size. The tokenizer is the same, so the experts stay."""
    base = shutil.copytree(small_model, tmp_path / "base")
    (base / ".cache").mkdir()  # made by the client of the Hugging Face Hub
    out = toy_run("--model", base, *SFT)
    first = made(out)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    toy_run("--model", base, *SFT)
    assert made(out)[len(first):] == first[1:]


def test_a_base_on_the_hub_is_identified_by_its_commit(toy_run, small_model, tmp_path, monkeypatch):
    """After a new commit, agents are trained again. A process uses one commit. Without a network,
    the cache suffices."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "models--x--y"
    (cache / "refs").mkdir(parents=True)

    def move(commit, shift):
        base = shutil.copytree(small_model, cache / "snapshots" / (commit * 40))
        weights = load_file(base / "model.safetensors")
        weights["model.norm.weight"] += shift
        save_file(weights, base / "model.safetensors", {"format": "pt"})
        (cache / "refs/main").write_text(commit * 40)

    move("a", 0)
    out = toy_run("--model", "x/y", *SFT)
    first = made(out)
    loss = read_jsonl(out / "sft-target/train.jsonl")[0]["loss"]
    toy_run("--model", "x/y", *SFT)
    assert made(out) == first
    move("b", 1)
    toy_run("--model", "x/y", *SFT)  # the same process keeps the first commit
    assert made(out) == first
    models.commit_of.cache_clear()
    toy_run("--model", "x/y", *SFT)
    assert made(out)[len(first):] == first[1:]
    assert read_jsonl(out / "sft-target/train.jsonl")[0]["loss"] != loss
    models.commit_of.cache_clear()


def test_more_iterations_continue_a_run_its_log_and_its_trackers(toy_run, monkeypatch):
    seen = {}  # logged by the tracker: step -> numbers
    monkeypatch.setattr(Accelerator, "log", lambda self, numbers, step: seen.update({step: numbers}))
    flags = ("--method", "eto", "--eval-tasks", 2)
    out = toy_run(*flags)
    first = made(out)
    toy_run(*flags, "--iterations", 2)
    assert made(out)[len(first):] == ["iter2/target.jsonl", "iter2/pairs-target.jsonl",
                                      "iter2/target-agent", "eval-2-target-test.jsonl"]
    assert "iterations (2 -> 1)" in refusal(toy_run, *flags)

    # metrics.jsonl has a line for each step of training and for each phase.
    lines = read_jsonl(out / "metrics.jsonl")
    assert [*seen] == [*range(1, len(lines) + 1)]
    steps = [line["loss"] for line in lines if line["event"] == "train"]
    written = [row["loss"] for agent in ("sft-target", "iter1/target-agent", "iter2/target-agent")
               for row in read_jsonl(out / agent / "train.jsonl")]
    assert steps == written
    assert seen[len(lines)]["evaluate/target/test/reward"] == lines[-1]["reward"]


def test_trackers_get_the_usual_names(toy_run, monkeypatch):
    seen = []
    monkeypatch.setattr(Accelerator, "log", lambda self, numbers, step: seen.append(numbers))
    out = toy_run()
    [line] = read_jsonl(out / "iter1/target-agent/train.jsonl")
    [numbers] = [row for row in seen if "iter1/target-agent/lr" in row]
    prefix, row = "iter1/target-agent/", line["kinds"]["expert>failure"]
    assert numbers[f"{prefix}loss"] == line["loss"]
    assert numbers[f"{prefix}grad_norm"] == line["norm"]
    for name, own in {"rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected",
                      "rewards/margins": "margin", "rewards/accuracies": "accuracy",
                      "logps/chosen": "chosen", "logps/rejected": "rejected"}.items():
        assert numbers[f"{prefix}{name}/expert_over_failure"] == row[own]
    assert row["reward_chosen"] - row["reward_rejected"] == pytest.approx(row["margin"])
    assert not any(">" in name for row in seen for name in row)


@pytest.fixture
def bare(small_model, tmp_path):
    """A run without outputs, for phases of the test."""
    s = coevolve.Settings(model=str(small_model), out=str(tmp_path / "run"), max_tokens=99)
    return run.Run(s, environment("webshop")())


def numbers(r, *inputs, found=None, **values):
    """A phase that returns a row and `found`."""
    return [dict(text="text")], dict(found or {})


def test_a_phase_may_return_numbers_of_numpy_and_torch(bare):
    found = dict(a=np.float32(0.5), b=np.int64(3), c=torch.tensor(2.0), d=[np.bool_(True)])
    bare.once("a.jsonl", lambda r: numbers(r, found=found))
    row = read_json(bare.folder / "phases.json")["a.jsonl"]
    assert {name: row[name] for name in found} == dict(a=0.5, b=3, c=2.0, d=[True])


def changes_its_input(r, rows):
    rows[0]["text"] = "changed"
    return []


@pytest.mark.parametrize("phase, inputs, values, says", [
    (lambda r: None, (), {}, "it returned None; return a list of trajectories"),
    (lambda r: ([], 3), (), {}, "its second value is 3; return a dict"),
    (lambda r: numbers(r, found=dict(bad=float("nan"))), (), {}, "bad: "),
    (lambda r: numbers(r, found=dict(bad=np.arange(3))), (), {}, "bad: array([0, 1, 2]) is"),
    (lambda r: numbers(r, found=dict(bad=dict(a=dict(b=1)))), (), {}, "bad is {'a': {'b': 1}}; return"),
    (lambda r: numbers(r, found=dict(seconds=1)), (), {}, "the record of an output already has the entry 'seconds'"),
    (lambda r, i: numbers(r, found=dict(i=1)), (), dict(i=3), "the record of an output already has the entry 'i'"),
    (numbers, ("a name",), {}, "the input 'a name' is no list of trajectories or pairs, and no path;"),
    (numbers, (), dict(agent=Path("a")), "agent: PosixPath('a') is no number"),
    (changes_its_input, ([dict(text="given")],), {}, "it changed one of its inputs")])
def test_an_invalid_phase_is_refused_by_name(phase, inputs, values, says, bare):
    with pytest.raises(UsageError) as error:
        bare.once("a.jsonl", phase, *inputs, **values)
    assert str(error.value).startswith(f"{phase.__name__}, for the output a.jsonl: {says}")
    assert not (bare.folder / "a.jsonl").exists()


def test_an_output_is_made_once_in_a_process(bare):
    bare.once("a.jsonl", numbers)
    with pytest.raises(UsageError, match="output a.jsonl: this run has already made it with the phase numbers"):
        bare.once("a.jsonl", numbers)


def test_changed_code_is_recorded_after_a_phase_has_used_it(again, toy, tmp_path, monkeypatch, capsys):
    now = code.code_now()
    other = now | dict(files=now["files"] | {"dpo.py": "0" * 40})
    config = tmp_path / "run/config.json"
    assert read_json(config)["code"] == now and read_json(config)["finished"]
    monkeypatch.setattr(phases, "code_now", lambda: other)
    assert again() == set()
    said = capsys.readouterr().out
    assert said.count("the code has changed") == 1 and "has changed since: dpo.py\n" in said
    assert read_json(config)["code"] == now  # it has made all outputs
    assert again(lambda out: (out / "eval-1-target-test.jsonl").unlink())
    assert read_json(config)["code"] == other


def test_the_files_that_differ_between_two_records_of_code(tmp_path, monkeypatch):
    """Without git every file is recorded. In a repository, the files that differ from the commit
    are recorded, also deleted and new ones. Both kinds of records can be compared."""
    monkeypatch.setattr(code, "ROOT", tmp_path)
    for name in "coevolve.py", "dpo.py", "envs.py":
        (tmp_path / name).write_text(name)
    plain = code.code_now()
    assert plain["commit"] is None and [*plain["files"]] == ["coevolve.py", "dpo.py", "envs.py"]

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path,
                       check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    first = code.code_now()
    assert first["commit"] and first["files"] == {} and code.code_differences(plain, first) == []
    (tmp_path / "dpo.py").write_text("changed")
    (tmp_path / "own.py").write_text("new")
    (tmp_path / "envs.py").unlink()
    changed = code.code_now()
    assert code.code_differences(first, changed) == ["dpo.py", "envs.py", "own.py"]
    assert code.code_differences(plain, changed) == ["dpo.py", "envs.py", "own.py"]
    unknown = dict(commit="f" * 40, files={})
    assert "has no commit fff" in code.code_differences(first, unknown)[0]


# ----------------------------------------------------------------------------------- edited files


def line_of(name, **changed):
    """Returns a function that edits the second line of a file in a run's folder."""
    def edit(out):
        rows = read_jsonl(out / name)
        row = rows[1] | changed
        rows[1] = {key: value for key, value in row.items() if value != "deleted"}
        write_jsonl(out / name, rows)
    return edit


PLAYED, PAIRS = "iter1/target.jsonl", "iter1/pairs-target.jsonl"
SIDE = dict(agent="target", iteration=1, rollout=0)


@pytest.mark.parametrize("name, changed, says", [
    (PLAYED, dict(ids="deleted"), "'ids' is missing"),
    (PLAYED, dict(mine=1), "a trajectory has no field 'mine'"),
    (PLAYED, dict(ids=[1, 2.5]), "ids must be of type list[int]"),
    (PLAYED, dict(ids=[1] * 9), "it has 9 ids, and an action_mask of"),
    (PLAYED, dict(ids=[1, 2, 3], action_mask=[0, 2, 1], log_probs=[]), "other numbers than 0 and 1"),
    (PLAYED, dict(log_probs=[-1.0]), "it has 1 log_probs, and"),
    *[(PLAYED, dict(ids=ids, action_mask=[0, 1], log_probs=[]), "are in the vocabulary")
      for ids in ([1, -2], [1, 99999])],
    (PLAYED, dict(reward="1"), "reward must be of type float, but is '1'"),
    (PLAYED, dict(reward=math.nan), "reward must be of type float, but is nan"),
    (PLAYED, dict(turns=True), "turns must be of type int"),
    (PLAYED, dict(messages=[dict(role="user", content=None)]), "content must be of type str"),
    (PAIRS, dict(weight=-1.0), "weight is -1.0, below 0"),
    (PAIRS, dict(sft_weight=math.inf), "sft_weight must be of type float, but is inf"),
    (PAIRS, dict(chosen=SIDE, rejected=SIDE), "its two sides have the same tokens"),
    (PAIRS, dict(chosen=SIDE | dict(rollout=7)), "rollout 7, but the inputs of its phase have no such"),
    (PAIRS, dict(chosen=dict(agent="target")), "'iteration' is missing")])
def test_an_invalid_edit_is_refused_with_file_and_line(
        name, changed, says, again, tmp_path):
    line = refusal(again, line_of(name, **changed))
    assert line.startswith(f"{tmp_path / 'run' / name}, line 2: ") and says in line


# --------------------------------------------------------------------------------------- a branch


def test_a_branch_reuses_earlier_outputs_and_continues_with_other_settings(
        toy_run, toy, tmp_path, capsys):
    own = ("--d-tgt-failures", "none", "--seed", 5)
    flags = ("--branch", f"{toy[0]}@iter1/pairs-target.jsonl", *own)
    out = toy_run(*flags)
    said = capsys.readouterr().out
    before, after = read_json(toy[0] / "phases.json"), read_json(out / "phases.json")
    taken = [*before][:[*before].index("iter1/pairs-target.jsonl")]
    assert made(out) == [*before][len(taken):]
    for name in taken:
        assert after[name] | dict(stat=0) == before[name] | dict(stat=0)
        assert (out / name).is_dir() or (out / name).read_bytes() == (toy[0] / name).read_bytes()
    # Weights are hard links.
    for name, alike in [("sft-target/model.safetensors", True), ("experts.jsonl", False)]:
        assert (out / name).samefile(toy[0] / name) == alike
    assert FF not in after["iter1/pairs-target.jsonl"]["pairs"]
    # The differences are printed and recorded.
    differs = "d_tgt_failures (cross -> none)"
    assert f"other settings: {differs}; other code: none\n" in said
    assert "outputs were made with another seed (0 -> 5); `compare` will not pair" in said
    assert read_json(out / "config.json")["branch"] == dict(
        run=str(toy[0]), output="iter1/pairs-target.jsonl", seed=0, settings=[differs], code=[])

    # The same command resumes, and so does a branch of the branch.
    count = len(made(out))
    toy_run(*flags)
    assert len(made(out)) == count
    other = ("--out", tmp_path / "other", "--branch", f"{out}@iter1/target-agent")
    toy_run(*other, *own)
    assert contents(tmp_path / "other")[0] == contents(out)[0]


def test_a_branch_names_settings_that_only_one_of_the_runs_has(toy_run, toy, tmp_path, capsys):
    config = tmp_path / "other/config.json"
    shutil.copytree(toy[0], config.parent)
    settings = read_json(config)["settings"]
    del settings["cut_turns"]
    write_json(config, read_json(config) | dict(settings=settings | dict(mine=3)))
    toy_run("--branch", f"{config.parent}@iter1/target-agent")
    said = capsys.readouterr().out
    assert "other settings: cut_turns (- -> 5), mine (3 -> -); " in said


@pytest.mark.parametrize("branch, says", [
    ("runs/nowhere@sft-target", "runs/nowhere@sft-target: give RUN@OUTPUT, where"),
    ("RUN@iter9/target.jsonl", "the run has no output 'iter9/target.jsonl'; choose from: experts.jsonl, "),
    ("RUN@eval-1-target-test.jsonl", "run/iter1/target.jsonl does not exist any more")])
def test_a_branch_of_a_missing_run_or_output_is_refused(branch, says, again, toy_run, tmp_path):
    (tmp_path / "run/iter1/target.jsonl").unlink()
    branch = branch.replace("RUN", str(tmp_path / "run"))
    assert says in refusal(toy_run, "--out", tmp_path / "new", "--branch", branch)


# -------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("name", ["experts.jsonl", "sft-target", ""])
def test_a_folder_without_a_config_is_refused_and_stays_as_it_is(name, toy_run, tmp_path):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    says = f"it contains {name}, but no config.json of a run; give another" if name else "it is a file;"
    assert f"--out {tmp_path / 'run'}: {says}" in refusal(toy_run)
    assert mine.read_text() == "mine"
    assert not name or [*mine.parent.iterdir()] == [mine]


def test_a_folder_of_other_settings_or_of_a_model_is_refused(toy_run, toy, small_model):
    before = {path: path.read_bytes() for path in toy[0].rglob("*") if path.is_file()}
    line = refusal(toy_run, "--out", toy[0], "--seed", 7, "--beta", 0.2)
    assert "beta (0.1 -> 0.2), beta_later (0.5 -> 0.2), seed (0 -> 7); give another folder, or the same settings" in line
    assert before == {path: path.read_bytes() for path in before}
    assert "is not that of a run; give another folder" in refusal(toy_run, "--out", small_model)


@pytest.mark.parametrize("flags, says", [
    (("--view", "short"), "the run has other values of view (full -> short); give the same"),
    (("--model", ROOT / "tiny"), "the run has other values of model ("),
    (("--protocol", "eto", "--prompts", ROOT), "protocol (ours -> eto)")])
def test_a_branch_of_a_run_in_another_setting_is_refused(flags, says, toy_run, toy, tmp_path):
    assert says in refusal(toy_run, "--out", tmp_path / "new", *flags,
                           "--branch", f"{toy[0]}@iter1/target.jsonl")


@pytest.mark.parametrize("name", ["../mine", "/mine", ".", "iter1/../../mine"])
def test_a_branch_writes_only_below_out(name, again, toy_run, tmp_path):
    """Also if phases.json is damaged. Other files stay."""
    name = name.replace("/mine", str(tmp_path / "mine")) if name == "/mine" else name
    (tmp_path / "mine").mkdir()
    phases = tmp_path / "run/phases.json"
    write_json(phases, {name: {}} | read_json(phases))
    line = refusal(toy_run, "--out", tmp_path / "new/run",
                   "--branch", f"{tmp_path / 'run'}@iter1/target.jsonl")
    assert "is not in the run's folder" in line and (tmp_path / "mine").exists()
    assert (tmp_path / "new/run/lock").exists()


def test_a_branch_that_was_stopped_while_copying_starts_again(toy_run, toy, monkeypatch):
    copy = branch.copy

    def stopped(source, target):
        if source.name == "sft-failure":
            raise KeyboardInterrupt
        copy(source, target)

    flags = ("--branch", f"{toy[0]}@iter1/pairs-target.jsonl")
    monkeypatch.setattr(branch, "copy", stopped)
    with pytest.raises(KeyboardInterrupt):
        toy_run(*flags)
    monkeypatch.setattr(branch, "copy", copy)
    assert contents(toy_run(*flags))[0] == contents(toy[0])[0]


def test_two_processes_in_a_folder_are_one_too_many(again, tmp_path):
    def hold():
        held = files.lock(tmp_path / "run")  # until the process ends
        (tmp_path / "held").touch()
        time.sleep(600)
        held.release()

    holder = fork(hold, tmp_path / "said")
    wait_until((tmp_path / "held").exists, "the other process to hold the lock")
    line = refusal(again)
    os.kill(holder, signal.SIGKILL)
    assert ended(holder) == -signal.SIGKILL
    assert f"--out {tmp_path / 'run'}: another process is running in this folder" in line
    assert again(lambda out: None, "--slots", 2, "--tokens-per-forward", 99) == set()  # free settings


def test_an_agent_of_the_run_that_is_damaged_has_its_own_remedy(again, tmp_path):
    """The next phase reads it. After it is deleted, it is made again."""
    agent = tmp_path / "run/sft-target"

    def cut(out):
        os.truncate(agent / "model.safetensors", 9999)
        (out / "iter1/target.jsonl").unlink()

    line = refusal(again, cut)
    assert f"{agent}: this agent of the run is damaged; delete the folder" in line
    assert re.search("again; the cause: .*(incomplete|header|deserializ)", line), line
    assert again(lambda out: shutil.rmtree(agent)) == {"sft-target", "iter1/target.jsonl"}


# ----------------------------------------------------------------------------- the end of a run


@pytest.mark.parametrize("seed", range(KILLED_RUNS))
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_files(
        seed, toy, small_model, tmp_path):
    """KILLED_RUNS=n tests n runs, which are killed at different moments."""
    out = tmp_path / "run"
    assert kills_until_it_ends(lambda: in_toy("--model", small_model, "--out", out), out,
                               tmp_path / "said", seed)
    assert contents(out) == contents(toy[0])


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_prints_one_line(number, status, small_model, tmp_path):
    out, said = tmp_path / "run", tmp_path / "said"
    process = fork(lambda: in_toy("--model", small_model, "--out", out, "--iterations", 99), said)
    wait_until((out / "experts.jsonl").exists, "the run's first output")
    os.kill(process, number)
    assert ended(process) == status
    assert said.read_text().splitlines()[-1] == "stopped; rerun the same command to resume"
    assert "Traceback" not in said.read_text()


def fails_with(error):
    def fail(*_):
        raise error

    return fail


def test_a_usage_error_is_a_line_and_a_bug_a_traceback(small_model, tmp_path, monkeypatch):
    said = tmp_path / "said"
    assert ended(fork(lambda: in_toy("--beta", -1), said)) == 2
    assert said.read_text().strip() == "--beta -1.0: must be above 0"
    monkeypatch.setattr(models, "save", fails_with(KeyError("a bug")))
    run_of_a_bug = fork(lambda: in_toy("--model", small_model, "--out", tmp_path / "run"), said)
    assert ended(run_of_a_bug) == 1
    assert "Traceback" in said.read_text() and "KeyError: 'a bug'" in said.read_text()


@pytest.mark.parametrize("error, says", [
    (OSError(28, "No space left on device"), f"No space left on device; make room on the disk{RESUME}"),
    # Raised by tokenizers
    (Exception("No space left on device (os error 28)"), f"(os error 28); make room on the disk{RESUME}"),
    (FloatingPointError("loss nan"), "loss nan; lower the learning rate and give another --out"),
    (torch.OutOfMemoryError("CUDA"), "out of memory; add --gradient-checkpointing on, or lower"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory; add"),
    (EnvError("mysql://host is gone"), "mysql://host is gone. Fix this and rerun")])
def test_an_error_of_the_machine_is_a_line_with_a_remedy(error, says, toy_run, monkeypatch):
    monkeypatch.setattr(models, "save", fails_with(error))
    line = refusal(toy_run, *SFT)
    assert says in line and ("Fix this" in line) == ("Fix this" in says)


def test_a_page_that_cannot_be_written_ends_the_run_in_a_line(toy_run, monkeypatch, tmp_path):
    monkeypatch.setattr(page, "make_page", fails_with(OSError(28, "No space left on device")))
    monkeypatch.setattr(command, "main", partial(command.main, finish=whole_program.finish))
    assert refusal(toy_run, *SFT).endswith(f"make room on the disk{RESUME}")
    assert (tmp_path / "run/result.json").exists()


def test_a_run_ends_with_its_result_in_ten_lines_of_a_terminal():
    """The run has two agents and two splits. Its commands can be pasted, also with spaces in paths."""
    rows = {f"eval-{i}-{name}-{split}.jsonl": dict(
        split=split, name=name, episodes=9, reward=0.25 + i / 2, success=i / 4, seconds=50.0)
        for i in (0, 1) for name in ("target", "failure") for split in ("test", "unseen")}
    done = SimpleNamespace(folder=Path("my runs/a"), settings=coevolve.Settings(),
                           done={"iter1/target-agent": dict(seconds=600.4)} | rows)
    lines = command.closing_lines(done, "my runs/a/run.html, 0.4 MB: open it in a browser")
    assert "\n".join(lines).splitlines() == [
        "", "my runs/a: coevolve on webshop, model tiny, seed 0",
        "target, test: reward 0.250 -> 0.750, success 0% -> 25%; "
        "unseen: reward 0.250 -> 0.750, success 0% -> 25%",
        "failure, test: reward 0.250 -> 0.750, success 0% -> 25%; "
        "unseen: reward 0.250 -> 0.750, success 0% -> 25%",
        "1,000 s in all",  # 8 x 50 + 600.4
        "my runs/a/run.html, 0.4 MB: open it in a browser",
        "bash run.sh compare 'my runs/a' OTHER_RUN",
        "bash run.sh play webshop --agent 'my runs/a'"]
    assert sum(-(-max(1, len(line)) // 80) for line in "\n".join(lines).splitlines()) == 10
    assert "bash run.sh page 'my runs/a'" in command.closing_lines(done, "")  # without a page


def test_a_closed_pipe_ends_the_help_silently(tmp_path):
    """As with `| head`, the next output ends the program."""
    read, write = os.pipe()
    os.close(read)

    def without_a_reader():
        sys.stdout = open(write, "w")
        os.dup2(write, 1)
        in_toy("--help", "all")

    assert ended(fork(without_a_reader, tmp_path / "said")) == -signal.SIGPIPE
    assert (tmp_path / "said").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_rank_prints_its_address_and_can_be_stopped(number, small_model, tmp_path):
    """The environment has variables of a cluster job."""
    said = tmp_path / "said"
    process = fork(lambda: in_toy("--model", small_model, "--out", tmp_path / "run"), said, RANK="2",
                   WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    line = "rank 2 of 4 waits for 127.0.0.1:9; WORLD_SIZE and RANK come from the environment\n"
    wait_until(lambda: said.exists() and line in said.read_text(), "the line about what the rank waits for")
    os.kill(process, number)
    assert ended(process) == -number and "Traceback" not in said.read_text()


@pytest.mark.parametrize("left", [dict(LOCAL_RANK="3"), dict(WORLD_SIZE="4"), dict(
    WORLD_SIZE="four", RANK="1")])
def test_incomplete_variables_of_ranks_are_refused(left, small_model, tmp_path):
    said = tmp_path / "said"
    assert ended(fork(lambda: in_toy("--out", tmp_path / "run"), said, **left)) == 2
    assert "unset LOCAL_RANK, RANK and WORLD_SIZE" in said.read_text().splitlines()[-1]
    assert "Traceback" not in said.read_text()


# ------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("flags, says", [
    ("--betta 1", "unrecognized arguments: --betta 1; --help lists the settings"),
    ("--beta -1 --rollouts 0", "--rollouts 0: must be at least 1; --beta -1.0: must be above 0"),
    ("--temperature 1e-39", "--temperature 1e-39: must be 0 (greedy decoding) or at least 0.001"),
    ("--method eto --d-fail cross", "--d-fail is not read by --method eto"),
    ("--rollouts 2 --temperature 0", "--temperature 0: all rollouts of a task"),
    ("--max-new-tokens 768 --max-tokens 768", "--max-new-tokens 768: must be below --max-tokens"),
    ("--intercode-data /", "unrecognized arguments: --intercode-data"),  # of another environment
    ("--experts=~/nowhere", f"--experts {os.path.expanduser('~/nowhere')}: does not exist; give an existing file"),
    *[(f"{flag}{between}", f"{flag}: the value is empty; give one, or leave the flag out")
      for flag in ("--experts", "--branch", "--model", "--failure-from", "--out", "--track", "--env", "--seed")
      for between in ("=", " ''")],
    ("--model /nowhere", "--model /nowhere: "),
    ("--max-tokens 40 --max-new-tokens 8 --train-tasks 5", "no expert trajectory is left; dropped: {'too long': 5};"),
    ("--failure-from TINY --model SMALL", "tiny: its tokenizer or chat template is not that of --model"),
    ("--track abacus", "--track abacus: "),
    ("--track wandb", f"--track wandb: it is not installed; {sys.executable} -m pip install wandb"),
])
def test_an_invalid_flag_is_refused_with_a_remedy(
        flags, says, small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = flags.replace("TINY", str(models.MODELS["tiny"])).replace("SMALL", str(small_model))
    assert says in refusal(program, "--out", tmp_path / "run", *shlex.split(flags))


@pytest.mark.parametrize("flags, values", [
    ("", dict(train_tasks=100, iterations=3, view="short", lambda_sft=1.0,
              pair_weights="instruction")),  # of WebShop, with tiny
    ("--method eto", dict(view="short", lambda_sft=0.0, pair_weights="none")),
    ("--quick", dict(train_tasks=60, eval_tasks=60, iterations=2)),
    ("--quick --model x --iterations 2", dict(train_tasks=120, eval_tasks=40, iterations=2,
                                              dpo_epochs=1))])
def test_presets_replace_defaults_and_flags_replace_presets(flags, values):
    """Presets of a model, an environment, a protocol, a method, and --quick."""
    s, _ = parse(flags.split(), coevolve.Settings, coevolve.METHODS, environment)
    assert {name: getattr(s, name) for name in values} == values


def test_help_has_the_settings_of_the_method_with_values_and_sources(capsys):
    def help_of(*argv):  # flag -> its help
        assert not refusal(program, *argv)
        texts = re.split(r"\n  (?=--)", capsys.readouterr().out)
        return {text.split()[0]: " ".join(text.split()) for text in texts[1:]}

    every = help_of("--env", "intercodesql", "--rollouts", 3, "--help", "all")
    for text in every.values():
        assert re.search(r" [A-Z][^:]{10,}.*: .*default", text), text
    assert "5 (preset intercodesql; default 3 [App. B; 5 on" in every["--iterations"]
    assert "3 (given; default 1 [Section 5.2.1])" in every["--rollouts"]
    some, read = (help_of("--method", "eto", *flags) for flags in (["-h"], ["--help", "all"]))
    assert some.keys() < read.keys() and "--d-fail" not in read
    assert " 0.0 (preset --method eto; default 0.1 [" in some["--lambda-sft"]


# ---------------------------------------------------------------------------- models and experts


def configured(folder, **values):
    write_json(folder / "config.json", read_json(folder / "config.json") | values)


def with_weights(folder, **more):
    """Ties the head of a model and adds weights. Their names have __ in place of dots."""
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    more = {name.replace("__", "."): value.clone() for name, value in more.items()}
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    configured(folder, tie_word_embeddings=True)


ONES = torch.ones(1, 32)


@pytest.mark.parametrize("change, says", [
    (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing; copy it from the base"),
    (lambda f: with_weights(f, score__weight=ONES, mtp__norm__weight=ONES[0]),
     "1 weights are not used by the model that its config.json describes, such as score.weight; "),
    (lambda f: configured(f, model_type="new", auto_map=dict(AutoConfig="code.Config")), "code"),
    (lambda f: configured(f, num_hidden_layers=3, layer_types=["full_attention"] * 3),
     "11 weights are missing, such as model.layers.2."),
    (lambda f: configured(f, intermediate_size=64), "; give a"),
    (lambda f: configured(f, model_type="t5"), "t5 is not a causal language model of transformers; "),
])
def test_an_unusable_model_is_refused_by_name(change, says, small_model, tmp_path):
    folder = shutil.copytree(small_model, tmp_path / "model")
    change(folder)
    (folder / "code.py").write_text("raise SystemExit('code of a model is run')")
    line = refusal(program, "--model", folder, "--out", tmp_path / "run", "--method", "sft")
    assert line.startswith(f"--model {folder}: ") and says in line, line
    assert not (tmp_path / "run").exists()


def test_unused_heads_and_output_switches_of_a_base_are_neither_used_nor_saved(
        toy_run, small_model, tmp_path, capfd):
    base = shutil.copytree(small_model, tmp_path / "base")
    with_weights(base, mtp__layers__0__weight=ONES, v_head__summary__weight=ONES,
                 model__layers__0__self_attn__rotary_emb__inv_freq=ONES[0])
    configured(base, output_attentions=True, output_hidden_states=True, return_dict=False,
               temperature=0.5, num_beams=4, max_position_embeddings=255)
    out = toy_run(*SFT, "--model", base)
    said = capfd.readouterr()
    assert (said.out + said.err).count("2 weights are not used, such as mtp.layers.0.weight; no") == 1
    assert f"{base} has 255 positions, " in said.out
    assert len(load_file(out / "sft-target/model.safetensors")) == len(
        load_file(base / "model.safetensors")) - 3
    saved = read_json(out / "sft-target/config.json")
    assert not saved.get("output_attentions") and not saved.get("output_hidden_states")
    assert saved.get("return_dict", True) and not saved.keys() & {"temperature", "num_beams"}


def test_what_could_not_be_saved_is_found_before_training(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "write", fails_with(ValueError("transformers refuses it")))
    assert "an agent trained from it could not be saved: transformers refuses it" in refusal(toy_run)
    assert not (tmp_path / "run").exists()


def test_the_best_of_an_agents_own_trajectories_are_experts(toy_run, toy, tmp_path):
    """Of several of a task, the first with the highest reward stays as it is. Those at or below the
    minimum reward are dropped, and all dropped ones are counted."""
    [e, *_] = read_jsonl(toy[0] / "experts.jsonl")
    rows = [e | dict(reward=0.7), e | dict(messages=[], ended="context_limit", turns=0)]
    for name, rewards in dict(target=[0.8, 1.0, 0.9], failure=[1.0, 0.8, 0.9]).items():
        for row, reward in zip(read_jsonl(toy[0] / f"iter1/{name}.jsonl")[1:], rewards):
            rows.append(row | dict(reward=reward))
    write_jsonl(tmp_path / "e", rows)
    out = toy_run(*SFT, "--experts", tmp_path / "e", "--train-tasks", 4)
    found = read_jsonl(out / "experts.jsonl")
    # --train-tasks counts tasks, not entries. The first task has no expert left.
    assert [row["task"] for row in found] == [row["task"] for row in rows[2:5]]
    for row in found:
        own = [t for t in rows if t["task"] == row["task"]]
        best = max(own, key=lambda t: t["reward"])
        assert len(own) == 2 and (row["agent"], row["reward"]) == ("expert", best["reward"])
        assert row["messages"] == best["messages"] and row["turns"] == best["turns"]
    dropped = read_json(out / "phases.json")["experts.jsonl"]["dropped"]
    assert dropped == {"too long": 1, "reward": 1, "not the best of its task": 3}


class Overlap(Toy):
    """Three of the eight training tasks are also evaluation tasks."""
    splits = dict(Toy.splits, test={key: f"toy-train-{key}" for key in ("1", "2", "3")})


def test_evaluated_tasks_are_not_trained_on(toy_run):
    out = toy_run(*SFT, env=Overlap)
    tasks = {row["task"] for row in read_jsonl(out / "experts.jsonl")}
    assert tasks == {f"toy-train-{n}" for n in (0, 4, 5, 6, 7)}
    dropped = read_json(out / "phases.json")["experts.jsonl"]["dropped"]
    assert dropped == {"evaluated too": 3}


def test_an_agent_that_was_trained_on_evaluated_tasks_is_refused(toy, toy_run, tmp_path):
    """The tasks of a trained agent are in the files of its run: experts, and generated tasks."""
    mine = tmp_path / "mine"
    shutil.copytree(toy[0], mine)
    (mine / "iter2").mkdir()
    agent = mine / "iter1/target-agent"
    toy_run(*SFT, "--model", agent)
    line = refusal(lambda: toy_run(*SFT, "--model", agent, env=Overlap))
    assert "3 of 3 evaluated tasks are also trained on; give other --eval-splits" in line
    rows = [row | dict(task=f"toy-test-{n}") for n, row in enumerate(read_jsonl(mine / "experts.jsonl"))]
    for file, of_test in {"experts.jsonl": rows[:3], "iter2/tasks.jsonl": rows[3:5]}.items():
        write_jsonl(mine / file, of_test)
        for flag in ("--model", "--failure-from"):
            line = refusal(toy_run, "--out", tmp_path / "other", flag, agent)
            assert f"{agent}: {len(of_test)} of 8 evaluated tasks are also trained on" in line
        write_jsonl(mine / file, [])
