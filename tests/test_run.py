"""A run's folder and command line: skipped and repeated phases, resuming, errors and flags."""

import json
import os
import re
import shutil
import signal
import sys
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import (
    ROOT,
    Toy,
    ended,
    files_of,
    fork,
    in_toy,
    kills_until_it_ends,
    program,
    refusal,
    refused,
    table,
    wait_until,
)
from filelock import FileLock
from safetensors.torch import load_file, save_file

import coevolve
from common.files import read_json, read_jsonl, remove, write_json
from dpo import Pair, Trajectory
from engine import code, command, models, phases
from engine.trajectories import write as write_jsonl
from lab import __main__ as whole_program

KILLED_RUNS = int(os.environ.get("KILLED_RUNS", 1))
RESUME = ". Fix this and rerun the same command to resume"
SFT = ("--method", "sft", "--eval-tasks", 1)  # the shortest run


def made(folder) -> list[str]:
    """Returns the outputs that all processes have made in a folder, in order."""
    return [row["phase"] for row in read_jsonl(folder / "metrics.jsonl") if row["event"] == "phase"]


def contents(folder) -> tuple[dict, dict]:
    """Returns the files made by the phases of a run, and their records without the time."""
    records = read_json(folder / "phases.json")
    return files_of(folder), {name: row | dict(seconds=0, stat=0) for name, row in records.items()}


@pytest.fixture
def copied(toy, tmp_path):
    """copied(name) -> a copy of the toy run in tmp_path/name."""
    return lambda name: shutil.copytree(toy[0], tmp_path / name, copy_function=shutil.copyfile)


@pytest.fixture
def again(copied, toy_run):
    """again(change, *names) -> the outputs that are made again after change(folder, *names) of a
    copy of the toy run in tmp_path/run."""
    out = copied("run")

    def start(change=None, *names, flags=()):
        if change:
            change(out, *names)
        before = len(made(out))
        toy_run(*flags)
        return {*made(out)[before:]}

    return start


# ------------------------------------------------------------------------ skipped and repeated phases


def test_a_phase_runs_again_exactly_if_its_inputs_differ(new_run, small_model, tmp_path):
    """Inputs are the phase, values, content of files and lists, names in a dict, agents and
    tokenizer, not times or names of files."""
    given, base = tmp_path / "given", tmp_path / "base"
    base.mkdir()
    now = dict(inputs=[given], fingerprint="", n=1, name="trained")
    done = []

    def rows(r, *inputs, n):
        done.append(r.name)
        return [dict(text=str(inputs[0]))]

    def agent(r, *inputs):
        done.append(r.name)
        return small_model

    for change, expected in [
            (lambda: given.write_text("a"), "first.jsonl agent last"),
            (lambda: os.utime(given, (1, 1)), ""),
            # The first phase makes the same content, so the others are skipped.
            (lambda: now.update(n=3), "first.jsonl"),
            (lambda: now.update(name="agent"), "last"),
            (lambda: now.update(inputs=[given, given]), "first.jsonl"),
            (lambda: setattr(rows, "__name__", "other"), "first.jsonl"),
            (lambda: given.write_text("b"), "first.jsonl last"),
            (lambda: (base / "a.bin").write_text("a"), "agent last"),
            (lambda: (base / "a.bin").write_text("b"), "agent last"),  # of the same size
            (lambda: (base / ".cache").mkdir(), ""),  # by the client of the Hugging Face Hub
            (lambda: now.update(fingerprint="x"), "first.jsonl agent last")]:
        change()
        r = new_run()
        r.fingerprint += now["fingerprint"]
        done.clear()
        first = r.once("first.jsonl", rows, *now["inputs"], n=now["n"])
        trained = r.once("agent", agent, [first, base])
        r.once("last", agent, {now["name"]: trained, "more": given})
        r.close()
        assert " ".join(done) == expected


def test_a_file_may_change_between_two_phases(new_run, tmp_path):
    file = tmp_path / "file"

    def read(run, file):
        return [dict(text=file.read_text())]

    for text in "bb", "ccc":
        run = new_run()
        file.write_text("a")
        run.once("first.jsonl", read, file)
        file.write_text(text)
        assert run.once("second.jsonl", read, file) == [dict(text=text)]
        run.close()


def delete(out, name):
    remove(out / name)


def halve(out, name):
    """Deletes every second line."""
    write_jsonl(out / name, read_jsonl(out / name)[::2])


def edit(out, name, line='{"reward": 1.0}'):
    """Changes fields of the second line of a file; null deletes a field."""
    rows = read_jsonl(out / name)
    row = rows[1] | json.loads(line)
    rows[1] = {key: value for key, value in row.items() if value is not None}
    write_jsonl(out / name, rows)


def orphan(out, name):
    """Deletes an output but not its record, and adds a record that no phase uses."""
    delete(out, name)
    records = read_json(out / "phases.json")
    write_json(out / "phases.json", records | dict(lock=records["experts.jsonl"]))


PLAYED, PAIRS, FAILURES = (f"iter1/{name}.jsonl" for name in ("target", "pairs-target", "pairs-failure"))
EVALUATED = "eval-1-target-test.jsonl"
OF_TARGET, OF_FAILURE = (
    {f"iter1/{name}-agent", f"eval-1-{name}-test.jsonl"} for name in ("target", "failure"))
OF_ROLLOUTS = {PAIRS, FAILURES, *OF_TARGET, *OF_FAILURE}


@pytest.mark.parametrize("change, name, expected", [
    (orphan, PLAYED, {PLAYED}),
    # An agent is made again as it was, so later outputs stay valid.
    (delete, "sft-target", {"sft-target"}),
    (halve, PAIRS, OF_TARGET), (halve, FAILURES, OF_FAILURE), (edit, PLAYED, OF_ROLLOUTS),
    (halve, EVALUATED, set())])
def test_what_depends_on_a_change_is_made_again(change, name, expected, again, toy, tmp_path):
    """If the edited file is restored, the run ends as before."""
    out = tmp_path / "run"
    assert again(change, name) == expected
    if change in (halve, edit):
        found, records = contents(out)
        assert [output for output, row in records.items() if "edited" in row] == [name]
        for agent in expected - {*found}:
            assert found[f"{agent}/train.jsonl"] != (toy[0] / agent / "train.jsonl").read_bytes()
        shutil.copy(toy[0] / name, out / name)
        assert again() == expected
        assert not [*out.rglob("*.edited")]
    assert contents(out) == contents(toy[0])


def test_an_edited_file_is_kept_if_its_phase_runs_again(again, tmp_path):
    out = tmp_path / "run"
    again(halve, PAIRS)
    edited = (out / PAIRS).read_bytes()
    again(edit, PLAYED)
    assert (out / f"{PAIRS}.edited").read_bytes() == edited != (out / PAIRS).read_bytes()


def test_a_base_on_the_hub_is_identified_by_its_commit(new_run, small_model, tmp_path, monkeypatch):
    """A process uses one commit. Without a network, the cache suffices."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "models--x--y"
    (cache / "refs").mkdir(parents=True)
    for commit, expected in ("a", "a"), ("b", "a"), ("c", "c"):
        shutil.copytree(small_model, cache / "snapshots" / (commit * 40))
        (cache / "refs/main").write_text(commit * 40)
        if commit == "c":  # as in another process
            models.commit_of.cache_clear()
        r = new_run(model="x/y")
        assert r.key_of(r.base) == expected * 40
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

    lines = read_jsonl(out / "metrics.jsonl")
    assert [*seen] == [*range(1, len(lines) + 1)]
    assert seen[len(lines)]["evaluate/target/test/reward"] == lines[-1]["reward"]
    trained = [(line["phase"], line["loss"]) for line in lines if line["event"] == "train"]
    assert trained == [(agent, row["loss"]) for agent in (
        "sft-target", "iter1/target-agent", "iter2/target-agent")
        for row in read_jsonl(out / agent / "train.jsonl")]
    # Trackers get TRL's names. MLflow refuses ">".
    assert ">" not in str(seen)
    line, numbers = lines[-3], seen[len(lines) - 2]
    assert numbers["iter2/target-agent/grad_norm"] == line["norm"]
    for name, own in {"rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected",
                      "rewards/margins": "margin", "rewards/accuracies": "accuracy",
                      "logps/chosen": "chosen", "logps/rejected": "rejected"}.items():
        name = f"iter2/target-agent/{name}/expert_over_target"
        assert numbers[name] == line["kinds"]["expert>target"][own]


# ----------------------------------------------------------------------- values between two phases


def play(run):
    return [Trajectory("a", "target", rollout=n, reward=reward, ids=[7, n], action_mask=[1, 1])
            for n, reward in enumerate([0.25, 0.5, 1.0])]


def pair(run, played):
    *failures, best = played
    return [Pair("expert>target", best, failure, 0.5, 0.5) for failure in failures]


def heavier(pairs):
    pairs[0].weight = 3.0
    return pairs


@pytest.mark.parametrize("change", [
    heavier,
    # Other tokens, which a pairs file does not contain
    lambda pairs: [replace(pair, rejected=replace(pair.rejected, ids=[7, 8])) for pair in pairs]])
def test_what_the_loop_changes_between_two_phases_is_cached(change, new_run):
    """Only the phase after the change runs again, and only once. Saved pairs stay as they are."""
    learned = []

    def learn(run, pairs):
        learned.append([*pairs])
        return []

    changed = change(pair(None, play(None)))
    for now, runs in (copy, 1), (change, 2), (change, 2), (list, 3):
        run = new_run()
        pairs = run.once("pairs.jsonl", pair, run.once("played.jsonl", play))
        run.once("learned.jsonl", learn, now(pairs))
        run.close()
        assert len(learned) == runs
        assert learned[-1] == (changed if now == change else pair(None, play(None)))


def test_a_phase_may_return_numbers_of_numpy_and_torch(new_run):
    run = new_run()
    found = dict(a=np.float32(0.5), b=torch.tensor(2.0), c=[np.bool_(True)])
    output = "a/b/c.jsonl"
    assert run.once(output, lambda run: ([dict(a=found["a"])], found)) == [dict(a=0.5)]
    assert [run.done[output][name] for name in found] == [0.5, 2.0, [True]]


def changing(played):
    played[1].reward = 0.9
    return played


def worse(t):
    return replace(t, reward=0.4)


@pytest.mark.parametrize("result, says", [
    (None, "it returned None; return a list of trajectories"),
    (([], 3), "its second value is 3; return a dict"),
    (([], dict(bad=float("nan"))), "bad: "),
    (([], dict(bad=np.arange(3))), "bad: array([0, 1, 2]) is"),
    (([], dict(a=dict(b=dict(c=1)))), "a is {'b': {'c': 1}}; return a number"),
    (([], dict(seconds=1)), "already has the entry 'seconds'; give this"),
    (([], dict(i=2)), "already has the entry 'i'"),
    (changing, "it changed one of its inputs; let it change a copy"),
    (lambda played: [Pair("k", played[2], worse(played[0]))],
     "task 'a', agent 'target', iteration 0, rollout 0, but the inputs of the phase have none or"),
    (lambda played: [*played, replace(played[0])],
     "two trajectories have task 'a', agent 'target', iteration 0, rollout 0; give one of them"),
    (lambda played: [Pair("k", *played[:2], weight=-1.0)], "line 1: weight is -1.0, below 0"),
    (lambda played: [replace(played[0], reward=True)], "line 1: reward must be of type float")])
def test_a_phase_that_would_go_wrong_is_refused_by_name(result, says, new_run):
    def mine(run, played, i):
        return result(played) if callable(result) else result

    run = new_run()
    line = refusal(partial(run.once, i=1), "out.jsonl", mine, run.once("played.jsonl", play))
    assert line.startswith("mine, for the output out.jsonl: ") and says in line
    assert {*read_json(run.folder / "phases.json")} == {"played.jsonl"}


def test_invalid_inputs_of_a_phase_are_refused(new_run):
    run = new_run()
    played = run.once("played.jsonl", play)
    assert "played.jsonl: this run has already made" in refusal(run.once, "played.jsonl", play)
    assert "the input 'a name' is no list of trajectories or pairs, and no path; give" in refusal(
        run.once, "a.jsonl", print, "a name")
    assert "two trajectories have task 'a'" in refusal(run.once, "a.jsonl", print, [*played, *played])
    assert "already has the entry 'seconds'" in refusal(
        partial(run.once, seconds=1), "a.jsonl", print)
    assert "agent: PosixPath('a') is no number" in refusal(
        partial(run.once, agent=Path("a")), "a.jsonl", print)
    pairs = run.once("pairs.jsonl", pair, played)
    played[1].reward = 0.4
    assert "pairs.jsonl: trajectories were changed after these pairs" in refusal(list, pairs)


# --------------------------------------------------------------------------------- edited files


@pytest.mark.parametrize("name, line, says", table("""
    target -> {"ids": null} -> 'ids' is missing
    target -> {"mine": 1} -> a trajectory has no field 'mine'
    target -> {"ids": [1, 2.5]} -> ids must be of type list[int]
    target -> {"turns": true} -> turns must be of type int
    target -> {"reward": NaN} -> reward must be of type float, but is nan
    target -> {"messages": [{"role": "user", "content": null}]} -> content must be of type str
    target -> {"ids": [1]} -> it has 1 ids, and an action_mask of
    target -> {"ids": [1, 2], "action_mask": [0, 2], "log_probs": []} -> other numbers than 0 and 1
    target -> {"log_probs": [-1.0]} -> it has 1 log_probs, and
    target -> {"ids": [1, -2], "action_mask": [0, 1], "log_probs": []} -> are in the vocabulary
    target -> {"ids": [1, 9999], "action_mask": [0, 1], "log_probs": []} -> are in the vocabulary
    pairs-target -> {"weight": -1} -> weight is -1, below 0
    pairs-target -> {"chosen": {"agent": "target", "iteration": 1, "rollout": 7}} -> rollout 7, but the inputs of its phase have no such
    pairs-target -> {"chosen": {"agent": "target"}} -> 'iteration' is missing
"""))
def test_an_invalid_edit_is_refused_with_file_and_line(name, line, says, again, tmp_path):
    name = f"iter1/{name}.jsonl"
    said = refusal(again, edit, name, line)
    assert said.startswith(f"{tmp_path / 'run' / name}, line 2: ") and says in said


# ------------------------------------------------------------------------- the code of a run


def test_changed_code_is_recorded_after_a_phase_has_used_it(again, tmp_path, monkeypatch, capsys):
    now = code.code_now()
    other = now | dict(files=now["files"] | {"dpo.py": "0" * 40})
    config = tmp_path / "run/config.json"
    monkeypatch.setattr(phases, "code_now", lambda: other)
    assert again() == set()
    assert capsys.readouterr().out.count("has changed since: dpo.py\n") == 1
    assert read_json(config)["code"] == now  # it has made all outputs
    again(delete, EVALUATED)
    assert read_json(config)["code"] == other


def test_the_files_that_differ_between_two_records_of_code(tmp_path, monkeypatch):
    """Without git every file is recorded. In a repository, the files that differ from the commit
    are recorded, also deleted and new ones. Both kinds of records can be compared."""
    monkeypatch.setattr(code, "ROOT", tmp_path)
    for name in "coevolve.py", "dpo.py", "envs.py":
        (tmp_path / name).write_text(name)
    records = [code.code_now()]
    for words in "init", "add .", "-c user.name=a -c user.email=a commit -m a":
        code.git(*words.split())
    records.append(code.code_now())
    assert code.code_differences(*records) == []
    (tmp_path / "dpo.py").write_text("changed")
    (tmp_path / "own.py").write_text("new")
    (tmp_path / "envs.py").unlink()
    for record in records:
        assert code.code_differences(record, code.code_now()) == ["dpo.py", "envs.py", "own.py"]
    unknown = dict(commit="f" * 40, files={})
    assert "has no commit fff" in code.code_differences(records[1], unknown)[0]


# --------------------------------------------------------------------------- branches and folders


def test_a_branch_reuses_earlier_outputs_and_continues_with_other_settings(
        toy_run, copied, tmp_path, capsys):
    source = copied("source")
    config = read_json(source / "config.json")
    del config["settings"]["cut_turns"]  # as a run of other code, with a setting that is not known
    config["settings"]["mine"] = 3
    write_json(source / "config.json", config)
    flags = ("--branch", f"{source}@{PAIRS}", "--d-tgt-failures", "none", "--seed", 5)
    out = toy_run(*flags)
    before, after = read_json(source / "phases.json"), read_json(out / "phases.json")
    place = [*before].index(PAIRS)
    assert made(out) == [*before][place:] and "failure>failure" not in after[PAIRS]["pairs"]
    for name in [*before][:place]:
        assert after[name] | dict(stat=0) == before[name] | dict(stat=0)
    # Weights are hard links.
    for name, alike in [("sft-target/model.safetensors", True), ("experts.jsonl", False)]:
        assert (out / name).samefile(source / name) == alike
    # The differences are printed and recorded.
    differs = ["cut_turns (- -> 5)", "d_tgt_failures (cross -> none)", "mine (3 -> -)"]
    said = capsys.readouterr().out
    assert f"other settings: {', '.join(differs)}; other code: none\n" in said
    line = next(line for line in said.splitlines() if line.startswith("settings of"))
    assert "dpo_lr (0.001, not 1e-06)" in line and "d_tgt" not in line and "seed" not in line
    assert read_json(out / "config.json")["branch"] == dict(
        run=str(source), output=PAIRS, seed=0, settings=differs, code=[])

    # The same command resumes, and so does a branch of the branch.
    count = len(made(out))
    toy_run(*flags)
    assert len(made(out)) == count
    toy_run(*flags, "--out", tmp_path / "other", "--branch", f"{out}@iter1/target-agent")
    assert files_of(tmp_path / "other") == files_of(out)


def test_folders_and_branches_that_do_not_fit_are_refused(toy, copied, toy_run, small_model, tmp_path):
    """All files stay as they are."""
    older, oldest, incomplete, notes = map(copied, ("older", "oldest", "incomplete", "notes"))
    (notes / "config.json").unlink()
    records = read_json(older / "phases.json")
    write_json(older / "phases.json", {"experts.jsonl": dict(hash="")})
    settings = read_json(oldest / "config.json")["settings"] | dict(method="dart")
    write_json(oldest / "config.json", dict(settings=settings))
    (incomplete / PLAYED).unlink()
    config = read_json(incomplete / "config.json")
    del config["settings"]["cut_turns"]  # as of a program that did not have it
    write_json(incomplete / "config.json", config)

    def now():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = now()
    new = f"--out {tmp_path / 'new'} --branch"
    refused(toy_run, [*table(f"""
        --out {notes} -> --out {notes}: it contains eval-0-failure-test.jsonl, but no config.json
        --out {notes}/experts.jsonl -> it is a file; give a folder
        --out {small_model} -> is not that of a run; give another folder
        --out {incomplete} --branch {toy[0]}@{PLAYED} -> was started without --branch; give another
        --out {older} -> --out {older}: an older version of this program made this run; give
        --out {oldest} -> --out {oldest}: an older version of this program made this run; give
        {new} {older}@{PLAYED} -> --branch {older}@{PLAYED}: an older version of this program made
        {new} runs/nowhere@sft-target -> runs/nowhere@sft-target: give RUN@OUTPUT, where
        {new} {toy[0]}@iter9/target.jsonl -> has no output 'iter9/target.jsonl'; choose from: experts
        {new} {incomplete}@{PAIRS} -> {incomplete / PLAYED} does not exist any more
        {new} {oldest}@{PLAYED} -> --method dart: this program does not have it; choose from: coevolve,
        {new} {toy[0]}@{PLAYED} --model {ROOT}/tiny -> the run has other values of model (
        {new} {toy[0]}@{PLAYED} --protocol eto --prompts {ROOT} -> the run has other values of protocol (ours
    """),
        (f"--out {incomplete} --beta 0.2 --cut-turns 1",
         "beta (0.1 -> 0.2), beta_later (0.5 -> 0.2), cut_turns (5 -> 1); give"),
        (f"{new} {toy[0]}@{PLAYED} --view short", "view (full -> short); give the same")])
    for name in "iter1/../../older", str(older), ".":  # of a damaged phases.json
        write_json(incomplete / "phases.json", {name: {}} | records)
        refused(toy_run, [(f"{new} {incomplete}@{PLAYED}", f"{name!r} is not in the run's folder")])
    write_json(incomplete / "phases.json", records)
    assert before.items() <= now().items()


def test_two_processes_in_a_folder_are_one_too_many(again, tmp_path):
    with FileLock(tmp_path / "run/lock"):
        assert "run: another process is running in this folder" in refusal(again)
    assert again(flags=("--slots", 2, "--tokens-per-forward", 99)) == set()  # free settings


def test_an_agent_of_the_run_that_is_damaged_has_its_own_remedy(again, tmp_path):
    """The next phase reads it. After it is deleted, it is made again."""
    agent = tmp_path / "run/sft-target"
    os.truncate(agent / "model.safetensors", 9999)
    line = refusal(again, delete, PLAYED)
    assert f"{agent}: this agent of the run is damaged; delete the folder" in line
    assert re.search("again; the cause: .*(incomplete|header|deserializ)", line), line
    assert again(delete, "sft-target") == {"sft-target", PLAYED}


def test_a_finished_run_starts_again_without_opening_a_list(toy, small_model, tmp_path):
    def again():
        opened = set()
        sys.addaudithook(lambda event, given: event == "open" and opened.add(str(given[0])))
        in_toy("--model", small_model, "--out", toy[0])
        lists = [name for name in opened if name.endswith(".jsonl")]
        assert lists == [str(toy[0] / "metrics.jsonl")]

    assert ended(fork(again, tmp_path / "said")) == 0, (tmp_path / "said").read_text()


# ----------------------------------------------------------------------------- the end of a run


@pytest.fixture
def process(small_model, tmp_path):
    """process(*flags, **environment) -> the id of a process that runs the core in tmp_path/run. Its
    output goes to tmp_path/said."""
    flags = ("--model", small_model, "--out", tmp_path / "run")
    return lambda *own, **environment: fork(
        lambda: in_toy(*flags, *own), tmp_path / "said", **environment)


@pytest.mark.parametrize("seed", range(KILLED_RUNS))
@pytest.mark.parametrize("branch", [False, True])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_files(
        branch, seed, toy, small_model, tmp_path):
    """KILLED_RUNS=n tests n runs, which are killed at different moments, also while a branch copies
    the outputs of the other run."""
    out = tmp_path / "run"
    flags = ("--branch", f"{toy[0]}@{PAIRS}") if branch else ()
    assert kills_until_it_ends(lambda: in_toy("--model", small_model, "--out", out, *flags), out,
                               tmp_path / "said", seed)
    assert contents(out) == contents(toy[0])


CLUSTER = dict(RANK="2", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
WAITS = "rank 2 of 4 waits for 127.0.0.1:9; WORLD_SIZE and RANK come from the environment"
STOPPED = "stopped; rerun the same command to resume"


@pytest.mark.parametrize("variables, first, number, status, last", [
    ({}, "experts.jsonl", signal.SIGTERM, 143, STOPPED),
    ({}, "experts.jsonl", signal.SIGINT, 130, STOPPED),
    (CLUSTER, WAITS, signal.SIGINT, -signal.SIGINT, WAITS)])
def test_a_signal_ends_a_process(variables, first, number, status, last, process, tmp_path):
    """A run ends in a line. A rank of a cluster job that waits for others has printed their address."""
    said = tmp_path / "said"
    running = process("--iterations", 99, **variables)
    wait_until(lambda: said.exists() and first in said.read_text(), first)
    os.kill(running, number)
    assert ended(running) == status
    assert said.read_text().splitlines()[-1] == last and "Traceback" not in said.read_text()


@pytest.mark.parametrize("flags, variables, status, says", [
    (("--beta", -1), {}, 2, "--beta -1.0: must be above 0"),
    ((), dict(WORLD_SIZE="four"), 2, "unset LOCAL_RANK, RANK and WORLD_SIZE"),
    ((), {}, 1, "KeyError: 'a bug'")])
def test_a_usage_error_is_a_line_and_a_bug_a_traceback(
        flags, variables, status, says, process, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "save", Mock(side_effect=KeyError("a bug")))
    assert ended(process(*flags, **variables)) == status
    said = (tmp_path / "said").read_text()
    assert said.endswith(f"{says}\n") and ("Traceback" in said) == (status == 1)


SAVE, WRITE, PAGE = "engine.models.save", "engine.models.write_model", "lab.page.page.make_page"


@pytest.mark.parametrize("where, error, says", [
    # As tokenizers raises it
    (SAVE, Exception("No space left on device"), f"device; make room on the disk{RESUME}"),
    (SAVE, FloatingPointError("loss nan"), "loss nan; lower the learning rate and give another --out"),
    (SAVE, torch.OutOfMemoryError("CUDA"), "out of memory; add --gradient-checkpointing on, or lower"),
    (SAVE, RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory; add"),
    (PAGE, OSError("no network"), f"no network{RESUME}"),
    (WRITE, ValueError("it refuses"), "an agent trained from it could not be saved: it refuses")])
def test_an_error_of_the_machine_is_a_line_with_a_remedy(
        where, error, says, toy_run, monkeypatch, tmp_path):
    """Results are there without a page. What could not be saved is found before training."""
    monkeypatch.setattr(command, "run_program", partial(command.run_program, finish=whole_program.finish))
    monkeypatch.setattr(where, Mock(side_effect=error))
    line = refusal(toy_run, *SFT)
    assert says in line and ("Fix this" in line) == ("Fix this" in says)
    assert (tmp_path / "run/result.json").exists() == (where == PAGE)
    assert (tmp_path / "run").exists() == (where != WRITE)


def test_a_run_ends_with_its_result_in_ten_lines_of_a_terminal():
    """The run has two agents and two splits. Its commands can be pasted, also with spaces in paths."""
    rows = {f"eval-{i}-{name}-{split}.jsonl": dict(
        split=split, name=name, episodes=9, reward=0.25 + i / 2, success=i / 4, seconds=50.0)
        for i in (0, 1) for name in ("target", "failure") for split in ("test", "unseen")}
    done = SimpleNamespace(folder=Path("my runs/a"), settings=coevolve.Settings(),
                           done={"iter1/target-agent": dict(seconds=600.4)} | rows)
    said = "\n".join(command.closing_lines(done, "my runs/a/run.html, 0.4 MB: open it in a browser"))
    of_agent = ("test: reward 0.250 -> 0.750, success 0% -> 25%; "
                "unseen: reward 0.250 -> 0.750, success 0% -> 25%")
    assert said == f"""
my runs/a: coevolve on webshop, model tiny, seed 0
target, {of_agent}
failure, {of_agent}
1,000 s in all
my runs/a/run.html, 0.4 MB: open it in a browser
bash run.sh compare 'my runs/a' OTHER_RUN
bash run.sh play webshop --agent 'my runs/a'"""  # 1,000 s are 8 x 50 + 600.4
    assert "bash run.sh page 'my runs/a'" in command.closing_lines(done, "")  # without a page


def test_a_closed_pipe_ends_the_help_silently(tmp_path):
    """As with `| head`, the next output ends the program."""
    read, write = os.pipe()
    os.close(read)

    def without_a_reader():
        sys.stdout = open(write, "w")
        in_toy("--help", "all")

    assert ended(fork(without_a_reader, tmp_path / "said")) == -signal.SIGPIPE
    assert (tmp_path / "said").read_text() == ""


# ------------------------------------------------------------------------------- the command line


def test_an_invalid_flag_is_refused_with_a_remedy(small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(coevolve.Settings.presets, "quick", dict(d_fail="al"))
    refused(partial(program, "--out", tmp_path / "run"), table(f"""
        --quick -> --d-fail al: choose from: all, cross, buffer
        --betta 1 -> unrecognized arguments: --betta 1; --help lists the settings
        --beta -1 --rollouts 0 -> --rollouts 0: must be at least 1; --beta -1.0: must be above 0
        --temperature 1e-39 -> --temperature 1e-39: must be 0 (greedy decoding) or at least 0.001
        --method eto --d-fail cross -> --d-fail is not read by --method eto
        --rollouts 2 --temperature 0 -> --temperature 0: all rollouts of a task
        --max-new-tokens 768 --max-tokens 768 -> --max-new-tokens 768: must be below --max-tokens
        --intercode-data / -> unrecognized arguments: --intercode-data
        --experts=~/nowhere -> --experts {Path.home()}/nowhere: does not exist, or is a pipe; give an existing file
        --experts= -> --experts: the value is empty; give one, or leave the flag out
        --seed ' ' -> --seed: the value is empty; give one, or leave the flag out
        --model /nowhere -> --model /nowhere:
        --failure-from {ROOT}/tiny --model {small_model} -> tiny: its tokenizer or chat template is not that of --model
        --track abacus -> --track abacus:
        --track wandb -> wandb: it is not installed; {sys.executable} -m pip install wandb
        --max-tokens 40 --max-new-tokens 8 --train-tasks 5 --out {tmp_path}/few -> no expert trajectory is left; dropped: {{'too long': 5}};
    """))


def test_each_kind_of_run_has_a_folder_of_its_own():
    s = coevolve.Settings(method="eto", quick=True, seed=3)
    assert str(phases.folder_of(s)) == "runs/webshop-eto-quick-s3"


def test_help_has_the_settings_of_the_method_with_values_and_sources(capsys):
    def help_of(argv):  # flag -> its help
        assert refusal(program, *argv.split()) == ""
        texts = re.split(r"\n  (?=--)", capsys.readouterr().out)
        return {text.split()[0]: " ".join(text.split()) for text in texts[1:]}

    every = help_of("--env intercodesql --rollouts 3 --help all")
    for text in every.values():
        assert re.search(r" [A-Z][^:]{10,}.*: .*default", text), text
    assert "5 (preset intercodesql; default 3 [App. B; 5 on" in every["--iterations"]
    assert "3 (given; default 1 [Section 5.2.1])" in every["--rollouts"]
    some, read = help_of("--method eto -h"), help_of("--method eto --help all")
    assert some.keys() < read.keys() and "--d-fail" not in read
    assert " 0.0 (preset --method eto; default 0.1 [" in some["--lambda-sft"]


# ---------------------------------------------------------------------------- models and experts


def change_config(folder, values):
    write_json(folder / "config.json", read_json(folder / "config.json") | values)


def add_weights(folder, names):
    """Adds weights of 32 numbers to a model."""
    file = folder / "model.safetensors"
    more = {name: torch.ones(32) for name in names}
    save_file(load_file(file) | more, file, {"format": "pt"})


@pytest.mark.parametrize("change, given, says", table("""
    delete -> "model.safetensors" -> no file named model.safetensors
    delete -> "tokenizer.json" -> tokenizer.json is missing; copy it from the base
    weights -> ["score.weight", "mtp.norm.weight"] -> 1 weights are not used by the model that its config.json describes, such as score.weight;
    config -> {"model_type": "new", "auto_map": {"AutoConfig": "code.Config"}} -> code
    config -> {"num_hidden_layers": 3, "layer_types": null} -> 11 weights are missing, such as model.layers.2.
    config -> {"intermediate_size": 64} -> ; give a
    config -> {"model_type": "t5"} -> t5 is not a causal language model of transformers;
"""))
def test_an_unusable_model_is_refused_by_name(change, given, says, small_model, tmp_path):
    folder = shutil.copytree(small_model, tmp_path / "model")
    dict(delete=delete, weights=add_weights, config=change_config)[change](folder, json.loads(given))
    (folder / "code.py").write_text("raise SystemExit('code of a model is run')")
    line = refusal(program, "--model", folder, "--out", tmp_path / "run", "--method", "sft")
    assert line.startswith(f"--model {folder}: ") and says in line, line
    assert not (tmp_path / "run").exists()


def test_unused_heads_and_output_switches_of_a_base_are_neither_used_nor_saved(
        toy_run, small_model, tmp_path, capfd):
    base = shutil.copytree(small_model, tmp_path / "base")
    add_weights(base, ["mtp.layers.0.weight", "v_head.summary.weight",
                       "model.layers.0.self_attn.rotary_emb.inv_freq"])
    change_config(base, dict(output_attentions=True, return_dict=False, max_position_embeddings=255))
    out = toy_run(*SFT, "--model", base)
    said = "".join(capfd.readouterr())
    assert said.count("2 weights are not used, such as mtp.layers.0.weight; no") == 1
    assert f"{base} has 255 positions, " in said
    saved, given = (load_file(folder / "model.safetensors") for folder in (out / "sft-target", base))
    assert len(saved) == len(given) - 3
    own = read_json(out / "sft-target/config.json")
    assert not own.get("output_attentions") and own.get("return_dict", True)


def test_the_best_of_an_agents_own_trajectories_are_experts(toy_run, toy, tmp_path):
    """Of several of a task, the first with the highest reward stays as it is. Those at or below the
    minimum reward are dropped, and all dropped ones are counted. --train-tasks counts tasks."""
    [e, *_] = read_jsonl(toy[0] / "experts.jsonl")
    rows = [e | dict(reward=0.7), e | dict(messages=[], ended="context_limit", turns=0)]
    for name, rewards in dict(target=[0.8, 1.0, 0.9], failure=[1.0, 0.8, 0.9]).items():
        for row, reward in zip(read_jsonl(toy[0] / f"iter1/{name}.jsonl")[1:], rewards):
            rows.append(row | dict(reward=reward))
    write_jsonl(tmp_path / "e", rows)
    out = toy_run(*SFT, "--experts", tmp_path / "e", "--train-tasks", 4)
    found = read_jsonl(out / "experts.jsonl")
    for row, n in zip(found, (5, 3, 4), strict=True):
        for name in "task", "messages", "turns", "reward":
            assert row[name] == rows[n][name]
        assert row["agent"] == "expert"
    dropped = read_json(out / "phases.json")["experts.jsonl"]["dropped"]
    assert dropped == {"too long": 1, "reward": 1, "not the best of its task": 3}


class Overlap(Toy):
    """Three of the eight training tasks are also evaluation tasks."""
    splits = dict(Toy.splits, test={key: f"toy-train-{key}" for key in ("1", "2", "3")})


def test_evaluated_tasks_are_not_trained_on(toy_run, tmp_path):
    """The tasks of a trained agent are in the files of its run: experts, and generated tasks."""
    out = toy_run(*SFT, env=Overlap)
    tasks = {row["task"] for row in read_jsonl(out / "experts.jsonl")}
    assert tasks == {f"toy-train-{n}" for n in (0, 4, 5, 6, 7)}
    dropped = read_json(out / "phases.json")["experts.jsonl"]["dropped"]
    assert dropped == {"evaluated too": 3}

    agent = out / "sft-target"
    toy_run(*SFT, "--model", agent, "--out", tmp_path / "other")
    rows = [dict(task=f"toy-test-{n}") for n in range(5)]
    (out / "iter2").mkdir()
    for file, of_test in {"experts.jsonl": rows[:3], "iter2/tasks.jsonl": rows[3:]}.items():
        write_jsonl(out / file, of_test)
        says = f"{agent}: {len(of_test)} of 8 evaluated tasks are also trained on; give other --eval-splits"
        for flag in "--model", "--failure-from":
            assert says in refusal(toy_run, "--out", tmp_path / "new", flag, agent)
        write_jsonl(out / file, [])
