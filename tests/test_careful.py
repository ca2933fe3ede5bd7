"""The careful run: nothing is lost, nothing is made twice, nobody else is in the folder."""

import json
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import SMALL_RUN, ended, fork, wait_until

import coevolve
import dpo
from common.files import read_jsonl
from lab.careful import kept, store
from lab.careful.kept import Checkpoint
from lab.careful.run import Run

KILLS = int(os.environ.get("KILLS", 3))


def lab(said, *flags, first=lambda: None):
    """The number of a fork that is `python -m lab` with these flags; `said` has what it prints."""
    def work():
        first()
        sys.argv = ["lab", *map(str, (*SMALL_RUN, "--threads", 1, *flags))]
        runpy.run_module("lab", run_name="__main__")

    return fork(work, said)


def finish(out, *flags, status=0, **how):
    """What such a run prints, once it has ended."""
    said = out.with_suffix(".said")
    assert ended(lab(said, "--out", out, *flags, **how)) == status, said.read_text()[-2000:]
    return said.read_text()


def outputs(folder: Path) -> dict[str, bytes]:
    """What the phases of a run wrote."""
    names = json.loads((folder / "phases.json").read_text())
    return {str(file.relative_to(folder)): file.read_bytes() for name in names
            for file in (folder / name, *sorted((folder / name).rglob("*"))) if file.is_file()}


def test_killed_at_random_moments_a_run_ends_with_the_same_files(careful_run, tmp_path):
    """`KILLS=40 bash run.sh test tests/test_careful.py` kills it more often."""
    out, rng, killed = tmp_path / "run", random.Random(0), 0
    phases = json.loads((careful_run / "phases.json").read_text())
    seconds = sum(row["seconds"] for row in phases.values())
    for _ in range(KILLS):
        process = lab(tmp_path / "said", "--out", out, "--checkpoint-minutes", 0)
        time.sleep(rng.uniform(0.2, seconds / 2))  # so that it is not done before
        os.kill(process, signal.SIGKILL)
        killed += ended(process) == -signal.SIGKILL
    finish(out, "--checkpoint-minutes", 0)
    assert killed and outputs(out) == outputs(careful_run)
    assert not (out / "playing").exists() and not (out / "checkpoint").exists()
    expected = {name: row["made"] for name, row in phases_of(careful_run).items()}
    assert {name: row["made"] for name, row in phases_of(out).items()} == expected


def test_the_same_command_again_makes_nothing_anew(careful_run):
    times = {p: p.stat().st_mtime_ns for p in map(careful_run.joinpath, outputs(careful_run))}
    finish(careful_run)
    assert times == {p: p.stat().st_mtime_ns for p in times}


def test_a_second_process_in_a_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    first = lab(tmp_path / "said", "--out", out)
    wait_until((out / "config.json").exists)
    said = finish(out, status=2)
    os.kill(first, signal.SIGKILL)
    ended(first)
    assert "another process is running in this folder" in said and said.strip().count("\n") == 0


def phases_of(run: Path) -> dict[str, dict]:
    return json.loads((run / "phases.json").read_text())


def test_an_equal_run_makes_nothing(careful_run, tmp_path):
    """Also in another folder, and what follows the first trained agents."""
    out = tmp_path / "equal"
    finish(out, "--reuse", careful_run.parent, "--checkpoint-minutes", 3)
    assert [name for name, row in phases_of(out).items() if "reused" not in row] == []
    assert outputs(out) == outputs(careful_run)


# The settings of the preference phases alone, and phases that do not depend on any of them.
@pytest.mark.parametrize("name, value", [("--dpo-lr", 3e-5), ("--beta", 0.3)])
def test_what_does_not_depend_on_a_setting_is_taken_over(careful_run, tmp_path, name, value):
    out = tmp_path / "other"
    finish(out, name, value, "--reuse", careful_run.parent)
    made = {name for name, row in phases_of(out).items() if "reused" not in row}
    assert made == {name for name in phases_of(careful_run)
                    if name.startswith("eval-1-") or name.endswith("-agent")}


def test_equal_phases_are_taken_over_and_others_made(careful_run, tmp_path):
    """Another weight of the DPO term is read by the target's preferences alone."""
    out = tmp_path / "other"
    finish(out, "--lambda-dpo", 0.7, "--reuse", careful_run.parent)
    phases = phases_of(out)
    made = {name for name, row in phases.items() if "reused" not in row}
    assert made == {"iter1/target-agent", "eval-1-target-test.jsonl", "eval-1-target-unseen.jsonl"}
    ours, theirs = outputs(out), outputs(careful_run)
    assert all(ours[name] == theirs[name] for name in ours
               if name in phases and name not in made or name.startswith("sft-"))
    model = "iter1/target-agent/model.safetensors"
    assert ours[model] != theirs[model]


def test_a_phase_that_goes_on_has_read_what_it_read_before(tmp_path):
    """Also what nothing reads again, since a kept state is past it."""
    first = SimpleNamespace(main=True, folder=tmp_path, recipe="of-a-phase", reads={"beta", "env"})
    Run.keep_reads(first)
    again = SimpleNamespace(folder=tmp_path, recipe="of-a-phase")
    assert set(Run.read_before(again)) == {"beta", "env"}
    assert Run.read_before(SimpleNamespace(folder=tmp_path, recipe="of-another")) == []


def test_the_code_of_a_phase_is_what_it_runs(monkeypatch):
    def codes():
        return [store.code_of(work, "webshop") for work in (coevolve.train_sft,
                                                            coevolve.train_preferences)]

    (sft, preferences), definitions = codes(), store.definitions
    changed = {"preference_loss": [("def preference_loss(): return 0", frozenset())]}
    monkeypatch.setattr(store, "definitions", lambda *files: definitions(*files) | changed)
    assert codes()[0] == sft and codes()[1] != preferences
    changed["sft_loss"] = [("def sft_loss(): return 0", frozenset())]
    assert codes()[0] != sft


class Stopped(Exception):
    pass


def test_a_phase_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    accelerator, rng = Accelerator(cpu=True), random.Random(0)
    steps = [[dpo.Group([dpo.Trajectory(ids=[rng.randrange(4, 2000) for _ in range(12)],
                                        action_mask=[0] * 6 + [1] * 6)])] for _ in range(8)]
    objective = dpo.Objective(dpo.sft_loss, lambda group: 6, lr=1e-3, warmup=0.3, weight_decay=0.1)

    def train(folder, stop=None):
        model, lines = dpo.read_model(coevolve.MODELS["tiny"]), []
        optimizer = dpo.adamw(model, objective)
        checkpoint = Checkpoint(accelerator, folder, 0, lines)
        done = checkpoint.restore(model, optimizer)
        for line in dpo.training(model, optimizer, steps, objective, dpo.token_log_probs, done):
            if line["step"] == stop:
                raise Stopped
            lines.append(line)
            checkpoint.keep(model, optimizer, line["step"])
        return torch.cat([p.detach().flatten() for p in model.parameters()]), lines

    expected, events = train(tmp_path / "whole")
    for stop in (1, 4, 8):
        with pytest.raises(Stopped):
            train(tmp_path / "stopped", stop)
    found, again = train(tmp_path / "stopped")
    assert torch.equal(found, expected) and again == events
    state = next((tmp_path / "stopped").glob("step-*"))
    next(state.glob("*.distcp")).write_bytes(b"torn")
    with pytest.raises(OSError, match="damaged .*; delete"):
        train(tmp_path / "stopped")


def test_kept_episodes_are_whole_and_of_the_same_world(tmp_path):
    class World:
        page = "a page"

        def reset(self, task):
            return self.page

        def opening(self, page, playing):
            return [dict(role="user", content=page)]

        def close(self):
            pass

    episodes = [dpo.Trajectory(str(n), "target", 1, 0, n, messages=[
        dict(role="user", content="a page")], ended="done") for n in range(3)]
    kept.Kept(tmp_path / "rows", World).add(episodes[:2])
    with open(tmp_path / "rows", "a") as file:
        file.write('{"task": "2", "ag\n{"ta')  # the process was killed
    again = kept.Kept(tmp_path / "rows", World)
    assert again.of(episodes[:2]) == episodes[:2] and again.of(episodes) is None
    again.add(episodes[2:])
    assert kept.Kept(tmp_path / "rows", World).of(episodes) == episodes
    World.page = "another page"
    assert kept.Kept(tmp_path / "rows", World).of(episodes[:1]) is None


def test_a_full_disk_is_one_line(tmp_path):
    def limit():  # bytes of a file, as a full disk ends it
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    said = finish(tmp_path / "run", status=2, first=limit).replace("\r", "\n")
    assert "Traceback" not in said and "goes on from here" in said.splitlines()[-1]


@pytest.mark.parametrize("name, text", [
    ("phases.json", '{"experts.jsonl": {'), ("config.json", "[]")])
def test_a_damaged_folder_is_one_line(name, text, careful_run, tmp_path):
    out = shutil.copytree(careful_run, tmp_path / "run")
    (out / name).write_text(text)
    said = finish(out, status=2)
    assert "Traceback" not in said and name in said


def test_the_log_has_a_line_for_each_phase_and_step(careful_run):
    events = read_jsonl(careful_run / "metrics.jsonl")
    phases = [e["phase"] for e in events if e["event"] == "phase"]
    assert phases == [*json.loads((careful_run / "phases.json").read_text())]
    steps = [e for e in events if e["event"] == "train" and e["phase"] == "sft-target"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    margins = read_jsonl(careful_run / "iter1/target-agent/margins.jsonl")
    pairs = read_jsonl(careful_run / "iter1/pairs-target.jsonl")
    assert sum(len(row["after"]) for row in margins) == len(pairs)
    assert all(m == 0 for row in margins for *_, m in row["before"])
