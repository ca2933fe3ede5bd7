"""Experts, SFT agents and evaluations that runs have in common: made once, equal to the bit."""

import json
import shutil
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import ended, fork
from test_coevolve import contents
from test_methods import SMALL, OneReply

from lab import loop as coevolve
from lab import mutual
from lab.harness import files, report, reuse
from lab.harness.files import read_jsonl
from lab.harness.folder import Folder
from lab.harness.log import Log
from lab.harness.settings import AFTER_SFT, Settings, SettingsError
from worlds import environment

SHARED = ["experts.jsonl", "sft-target", "eval-0-target-test.jsonl", "sft-failure",
          "eval-0-failure-test.jsonl"]


@pytest.fixture
def study(begin, tmp_path):
    """study(name, method, **settings) -> a run that has not begun, in tmp_path/study/name."""
    folder = tmp_path / "study"
    folder.mkdir()
    return lambda name, method="coevolve", **changed: begin(OneReply, f"study/{name}", **dict(
        SMALL, reuse=str(folder), method=method, dpo_epochs=1, rollouts=1) | changed)


@pytest.fixture
def play(study):
    """The same, finished."""
    def finish(*args, **more):
        run = study(*args, **more)
        coevolve.coevolve(run)
        (run.folder.path / "result.json").write_text(json.dumps(report.result(run.folder.path)))
        run.folder.close()
        return run

    return finish


def phases(run) -> dict[str, str | None]:
    """What each phase wrote -> the run that it was taken from."""
    return {e["phase"]: e.get("reused") for e in read_jsonl(run.folder.path / "metrics.jsonl")
            if e["event"] == "phase"}


def taken(run) -> list[str]:
    return [name for name, source in phases(run).items() if source]


def without_marks(run):
    found, events = contents(run.folder.path)
    return found, [{k: v for k, v in e.items() if k != "reused"} for e in events]


def test_what_is_taken_is_what_the_method_would_have_made(play, capsys):
    first = play("coevolve-s0")
    assert taken(first) == []
    printed = capsys.readouterr().out
    second = play("eto-s0", "eto")
    alone = play("../alone", "eto", reuse=None)
    assert without_marks(second) == without_marks(alone)
    assert phases(second) == {name: str(first.folder.path) if name in SHARED[:3] else None
                              for name in phases(alone)}
    assert "sft-target/trained_on.json" in contents(second.folder.path)[0]
    third = play("lambda-0.1-s0", lambda_sft=0.9)
    assert taken(third) == SHARED and {*phases(third).values()} == {str(first.folder.path), None}
    assert without_marks(third) == without_marks(play("../alone-2", lambda_sft=0.9, reuse=None))
    seconds = {e["phase"]: e["seconds"] for run in (first, second)
               for e in read_jsonl(run.folder.path / "metrics.jsonl") if e["event"] == "phase"}
    said = capsys.readouterr().out
    assert "made by" not in printed
    assert f"sft-target                  {seconds['sft-target']:7.1f} s  made by {first.folder.path}" in (
        said)
    table = report.table(second.folder.path)
    assert "sft-target *" in table and "of these reused (*)" in table
    assert "reused" not in report.table(alone.folder.path)


def test_a_run_is_taken_from_though_it_took_it_itself(play):
    first, second = play("a"), play("b", "eto")
    shutil.rmtree(first.folder.path)
    third = play("c", "sft")
    assert {*phases(third).values()} == {str(first.folder.path)}  # which made it
    assert (third.folder.path / "sft-target/model.safetensors").samefile(
        second.folder.path / "sft-target/model.safetensors")


def test_a_setting_that_matters_prevents_it(play):
    play("a", "sft")
    for name, value in dict(
            seed=1, sft_lr=2e-4, sft_epochs=2, max_tokens=300, max_new_tokens=4, slots=4,
            expert_min_reward=0.5, tokens_per_forward=64, weight_decay=0.1, train_tasks=5,
            eval_splits="validation", overlap="keep").items():
        assert taken(play(name, "sft", **{name: value})) == [], name


def test_lists_of_tasks_are_compared_by_what_they_say(play, tmp_path):
    """The same lists in another folder are the same; with one other task of any split none is."""
    def lists(name, **changed):
        folder = tmp_path / name
        folder.mkdir()
        found = dict(train=[["boil", 0]], dev=[["boil", 1]], test=[["boil", 2]]) | changed
        for split, tasks in found.items():
            (folder / f"{split}_indices.json").write_text(json.dumps(tasks))
        return dict(env="scienceworld", options=environment("scienceworld")(split_file=str(folder)))

    play("a", "sft", **lists("first"))
    assert taken(play("b", "sft", **lists("copied"))) == SHARED[:3]
    for split in ("train", "dev", "test"):
        assert taken(play(split, "sft", **lists(f"other-{split}", **{split: [["boil", 3]]}))) == []


def test_code_model_and_files_that_have_changed_prevent_it(play, study, monkeypatch, tmp_path,
                                                           small_model):
    rows = [dict(task=f"one-train-{n}", reward=1.0, messages=[
        dict(role="user", content=f"say something, train-{n}"),
        dict(role="assistant", content="c")]) for n in range(6)]
    experts, copied = tmp_path / "mine/experts.jsonl", tmp_path / "yours/experts.jsonl"

    def write(rows):
        for file in (experts, copied):
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(rows)
    play("a", "sft", experts=str(experts))
    assert taken(play("b", "sft", experts=str(copied))) == SHARED[:3]  # equal bytes
    write(rows[::-1])
    assert taken(play("c", "sft", experts=str(experts))) == []
    other = shutil.copytree(small_model, tmp_path / "model")
    play("d", "sft")
    assert taken(play("e", "sft", model=str(other))) == SHARED[:3]
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert taken(play("f", "sft", model=str(other))) == []
    monkeypatch.setattr(files, "code_hash", lambda: "edited")
    assert taken(play("g", "sft")) == []


@pytest.mark.parametrize("damage", ["edited", "deleted", "log"])
def test_what_somebody_has_changed_is_made_again(play, damage):
    first = play("a", "sft")
    weights = first.folder.path / "sft-target/model.safetensors"
    if damage == "edited":
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    elif damage == "deleted":
        weights.unlink()
    else:
        log = (first.folder.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (first.folder.path / "metrics.jsonl").write_text("".join(log[:2]))
    second = play("b", "sft")
    assert "sft-target" not in taken(second) and "experts.jsonl" in taken(second)
    assert without_marks(second) == without_marks(play("c", "sft", reuse=None))


def test_a_run_killed_after_it_took_a_phase_goes_on_to_the_same_result(play, study, monkeypatch):
    """Stopped before the log, after it, and before the phase is recorded."""
    play("a", "sft")
    expected = without_marks(play("whole", "eto"))
    for owner, at in ((reuse, "take"), (Log, "__call__"), (Folder, "_entry")):
        with monkeypatch.context() as patch:
            target = owner
            real = getattr(target, at)

            def dies(*args, **more):
                done = real(*args, **more)
                if (args[1:] and args[1] == "sft-target" or more.get("phase") == "sft-target"
                        or at == "_entry" and args[1].name == "sft-target"):
                    raise KeyboardInterrupt
                return done

            patch.setattr(target, at, dies)
            run = study(at, "eto")
            with pytest.raises(KeyboardInterrupt):
                coevolve.coevolve(run)
            run.folder.lock.release()
        again = play(at, "eto")
        assert "sft-target" in taken(again) and without_marks(again) == expected


def test_of_runs_that_start_together_one_makes_a_phase(play, tmp_path):
    """Two processes, each with a run of its own: whoever is first makes it, the other waits."""
    processes, said = [fork(partial(play, name), tmp_path / "said") for name in "ab"], "said"
    assert [ended(process) for process in processes] == [0, 0], (tmp_path / said).read_text()
    runs = [SimpleNamespace(folder=SimpleNamespace(path=tmp_path / "study" / name))
            for name in "ab"]
    alone = without_marks(play("alone", reuse=None))
    for name in SHARED:  # made by one, taken by the other
        assert {phases(run)[name] for run in runs} in [{None, str(run.folder.path)} for run in runs]
    assert [without_marks(run) for run in runs] == [alone] * 2


def test_the_shared_phases_read_no_setting_that_is_said_not_to_matter(study):
    """A run whose settings note what is read of them."""
    read, run = set(), study("a")

    class Noting:
        def __init__(self, settings):
            self._settings = settings

        def __getattr__(self, name):
            read.add(name)
            return getattr(self._settings, name)

    for part in (run, run.folder, run.tasks, run.trainer):
        part.settings = Noting(run.settings)
    for output, work, *args in (
            ("experts.jsonl", coevolve.collect_experts), ("sft-target", coevolve.train_sft, "target"),
            ("eval-0-target-test.jsonl", coevolve.evaluate, "target", 0, "test")):
        run.phase(output, work, *args)
    assert {"sft_lr", "max_tokens", "expert_min_reward", "view"} <= read
    # The method says whose folder is the base's, the number of iterations what disk is needed.
    assert read & {*AFTER_SFT} == {"method", "iterations", "reuse", "checkpoint_minutes",
                                   "failure_from"}  # with which nothing is shared
    assert {*AFTER_SFT} <= {f.name for f in fields(Settings)}


def test_a_folder_that_is_not_there_is_refused(study):
    with pytest.raises(SettingsError, match="--reuse .*nowhere: there is no such folder"):
        study("a", reuse="nowhere")


def test_runs_of_mutual_take_what_the_other_methods_made(play, study):
    play("a", "sft")
    run = study("b", "grpo", start_from="train", start_tasks=6, grpo_steps=1, step_tasks=2,
                step_rollouts=2)
    mutual.mutual(run)
    assert taken(run) == SHARED[:3] and [*phases(run)][3:] == [
        "iter0/tasks.jsonl", "iter1/target-agent", "eval-1-target-test.jsonl"]
    run = study("c", "grpo", warm_start="none", start_from="train", start_tasks=6, grpo_steps=1,
                step_tasks=2, step_rollouts=2)
    mutual.mutual(run)
    assert taken(run) == []
