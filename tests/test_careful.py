"""The careful run: nothing is lost, nothing is made twice, nobody else is in the folder."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import coevolve
import dpo
from lab import kept, store
from lab.checkpoint import Checkpoint
from worlds.files import read_jsonl

ROOT = Path(__file__).parent.parent
SMALL = ("--env webshop --train-tasks 6 --eval-tasks 4 --iterations 1 --rollouts 2 --sft-epochs 2 "
         "--dpo-epochs 2 --sft-batch 3 --dpo-batch 4 --threads 1").split()


def lab(*flags, **more):
    """`python -m lab` with these flags, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "lab", *map(str, flags)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, **more)


def outputs(folder: Path) -> dict[str, bytes]:
    """What the phases of a run wrote."""
    names = json.loads((folder / "phases.json").read_text())
    return {str(file.relative_to(folder)): file.read_bytes() for name in names
            for file in ([folder / name] if (folder / name).is_file() else
                         sorted((folder / name).rglob("*"))) if file.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("careful") / "run"
    process = lab(*SMALL, "--out", folder)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return folder


def test_killed_at_random_moments_a_run_ends_with_the_same_files(undisturbed, tmp_path):
    folder, rng, started = tmp_path / "run", random.Random(0), time.monotonic()
    for kill in range(6):
        process = lab(*SMALL, "--out", folder, "--checkpoint-minutes", 0)
        if not kill:  # how long the start takes
            while not (folder / "config.json").exists():
                time.sleep(0.1)
            start = time.monotonic() - started
        try:
            process.wait(rng.uniform(0.3, 6) + start * (kill > 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    process = lab(*SMALL, "--out", folder, "--checkpoint-minutes", 0)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert outputs(folder) == outputs(undisturbed)
    assert not (folder / "playing").exists() and not (folder / "checkpoint").exists()


def test_the_same_command_again_makes_nothing_anew(undisturbed):
    before = {name: (undisturbed / name).stat().st_mtime_ns for name in outputs(undisturbed)}
    process = lab(*SMALL, "--out", undisturbed)
    assert process.communicate() and process.returncode == 0
    assert {name: (undisturbed / name).stat().st_mtime_ns for name in before} == before


def test_a_second_process_in_a_folder_is_refused(tmp_path):
    first = lab(*SMALL, "--out", tmp_path)
    while not (tmp_path / "config.json").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.2)
    second = lab(*SMALL, "--out", tmp_path)
    said = second.communicate()[0]
    first.kill()
    first.communicate()
    assert second.returncode == 2 and "another process is running in this folder" in said
    assert said.strip().count("\n") == 0


def test_equal_phases_are_taken_over_and_others_made(undisturbed, tmp_path):
    """Another lambda_SFT is read by the target's preferences alone."""
    process = lab(*SMALL, "--out", tmp_path / "other", "--lambda-sft", 0.7, "--reuse",
                  undisturbed.parent)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    phases = json.loads((tmp_path / "other/phases.json").read_text())
    taken = {name for name, row in phases.items() if "reused" in row}
    made = set(phases) - taken
    assert {"experts.jsonl", "sft-target", "sft-failure", "iter1/target.jsonl",
            "eval-0-target-test.jsonl", "iter1/pairs-target.jsonl"} <= taken
    assert {"iter1/target-agent", "eval-1-target-test.jsonl"} <= made
    for name in taken:
        one, other = (folder / name for folder in (undisturbed, tmp_path / "other"))
        files = [one] if one.is_file() else [f for f in one.rglob("*") if f.is_file()]
        assert all(f.read_bytes() == (other / f.relative_to(one)).read_bytes() for f in files)


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


def test_settings_note_which_of_them_are_read():
    s, reads = store.recorded(coevolve.Settings(seed=3))
    assert s.seed == 3 and reads == {"seed"}
    assert isinstance(s, coevolve.Settings) and s.presets  # which is no setting
    assert reads == {"seed"}


class Stopped(Exception):
    pass


def test_a_phase_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    from accelerate import Accelerator

    accelerator, rng = Accelerator(cpu=True), random.Random(0)
    steps = [[dpo.Group([dpo.Trajectory(ids=[rng.randrange(4, 2000) for _ in range(12)],
                                        action_mask=[0] * 6 + [1] * 6)])] for _ in range(8)]
    how = dpo.Objective(dpo.sft_loss, lambda g: 6, lr=1e-3, warmup=0.3, weight_decay=0.1)

    def train(folder, stop=None):
        model, events = dpo.read_model(coevolve.MODELS["tiny"]), []
        checkpoint = Checkpoint(accelerator, folder, 0, events)

        def log(event):
            if event["step"] == stop:
                raise Stopped
            events.append(event)

        dpo.fit(model, steps, lambda model, ts: dpo.token_log_probs(model, ts), how, log,
                checkpoint)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), events

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
        theirs, prompt, page = None, "", "a page"

        def reset(self, task):
            return self.page

        def close(self):
            pass

    episodes = [dpo.Trajectory(str(n), "target", 1, 0, n, messages=[
        dict(role="user", content="a page")], ended="done") for n in range(3)]
    kept.Kept(tmp_path / "rows", World).add(episodes[:2])
    with open(tmp_path / "rows", "a") as file:
        file.write('{"task": "2", "ag')  # the process was killed
    again = kept.Kept(tmp_path / "rows", World)
    assert again.of(episodes[:2]) == episodes[:2] and again.of(episodes) is None
    World.page = "another page"
    assert kept.Kept(tmp_path / "rows", World).of(episodes[:1]) is None


def test_a_full_disk_is_one_line(tmp_path):
    def limit():  # bytes of a file, as a full disk ends it
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    process = lab(*SMALL, "--out", tmp_path / "run", preexec_fn=limit)
    said = process.communicate()[0].replace("\r", "\n")
    assert process.returncode == 2, said
    assert "Traceback" not in said and "goes on from here" in said.splitlines()[-1]


def test_a_damaged_folder_is_one_line(undisturbed, tmp_path):
    for name, text in (("phases.json", '{"experts.jsonl": {'), ("config.json", "[]")):
        folder = tmp_path / name
        shutil.copytree(undisturbed, folder)
        (folder / name).write_text(text)
        process = lab(*SMALL, "--out", folder)
        said = process.communicate()[0]
        assert process.returncode == 2 and "Traceback" not in said and name in said, said


def test_the_log_has_a_line_for_each_phase_and_step(undisturbed):
    events = read_jsonl(undisturbed / "metrics.jsonl")
    phases = [e["phase"] for e in events if e["event"] == "phase"]
    assert phases == [*json.loads((undisturbed / "phases.json").read_text())]
    steps = [e for e in events if e["event"] == "train" and e["phase"] == "sft-target"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    margins = read_jsonl(undisturbed / "iter1/target-agent/margins.jsonl")
    pairs = read_jsonl(undisturbed / "iter1/pairs-target.jsonl")
    assert sum(len(row["after"]) for row in margins) == len(pairs)
    assert all(m == 0 for row in margins for *_, m in row["before"])
