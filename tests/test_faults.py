"""Faults of the world and of the machine: no trajectory is made of them, and no work is lost."""

import fcntl
import gc
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from conftest import TOY, Toy, ended, events, fork, fork_ranks, make_model, wait_until
from test_coevolve import contents

from lab import mutual
from lab import play_env as envs
from lab import tokens as dpo
from lab.engine.checkpoint import Damaged
from lab.harness import files
from lab.harness.settings import SettingsError
from lab.playing import episodes as phases
from lab.playing.rollout import Sampling, rollout
from lab.program import start


class Breaks(Toy):
    """Raises EnvError at the calls whose numbers are in `at`, counted over all objects."""
    at, calls = (), 0

    def call(self):
        type(self).calls += 1
        if type(self).calls in self.at:
            raise envs.EnvError("gone")

    def reset(self, task):
        self.call()
        return super().reset(task)

    def step(self, reply):
        self.call()
        return super().step(reply)


def breaking(*at):
    return type("Breaking", (Breaks,), {"at": at, "calls": 0})


def episode(env, task="toy-train-1", replies=("a", "bc")):
    return [env.reset(task), *(env.step(reply) for reply in replies)]


def test_repetitions_wait_longer_each_time_and_are_bounded(monkeypatch):
    waited = []
    monkeypatch.setattr(envs.time, "sleep", waited.append)
    with pytest.raises(envs.EnvError, match="gone"):
        episode(envs.Repaired(breaking(*range(2, 99))()))
    assert waited == list(envs.Repaired.waits) == sorted(waited) and len(waited) == 4


def test_a_world_that_has_changed_is_not_played_on(monkeypatch):
    monkeypatch.setattr(envs.Repaired, "waits", (0.0,))

    class Replaced(breaking(2)):
        def reset(self, task):
            return f"{super().reset(task)}, after call {self.calls}"

    with pytest.raises(envs.EnvError, match="toy-train-1: it is not the world it was"):
        episode(envs.Repaired(Replaced()))


def play(agent, env, tasks=range(8), slots=3):
    episodes = [dpo.Trajectory(f"toy-train-{n}", "target", 1, 0, seed=n) for n in tasks]
    rollout(*agent, lambda: envs.Repaired(env()), episodes, Sampling(
        1.0, max_tokens=200, max_new_tokens=6, tokens_per_forward=1000, slots=slots))
    return [e.record() for e in episodes]


def test_faults_change_no_episode(agent, monkeypatch):
    monkeypatch.setattr(envs.Repaired, "waits", (0.0,) * 12)
    expected = play(agent, Toy)
    for seed in range(2):
        faults = random.Random(seed).sample(range(1, 40), 12)
        assert play(agent, breaking(*faults)) == expected


class Hole(Toy):
    """One task always breaks, at its second step."""
    hole = "toy-train-4"

    def step(self, reply):
        if self.task == self.hole and self.replies:
            raise envs.EnvError(f"{self.task}: broken")
        return super().step(reply)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_task_that_always_breaks_is_lost_and_no_failure(agent, slots, monkeypatch, capfd):
    monkeypatch.setattr(envs.Repaired, "waits", (0.0,))
    expected, found = play(agent, Toy), play(agent, Hole, slots=slots)
    assert [row["ended"] for row in found] == ["done"] * 4 + ["lost"] + ["done"] * 3
    assert found[:4] + found[5:] == expected[:4] + expected[5:]
    assert "lost, and left out: toy-train-4: broken" in capfd.readouterr().err


def test_losses_are_counted_over_all_ranks(monkeypatch):
    """200 episodes on four ranks: each may lose two, 1% of 200, but together they lost three."""
    rows = [dpo.Trajectory(str(n), ended="lost" if n < 3 else "done") for n in range(200)]
    monkeypatch.setattr(phases, "play_share", lambda *_: rows[:50])
    monkeypatch.setattr(phases, "gather_object", lambda _: rows)
    logged = []
    run = SimpleNamespace(
        accelerator=SimpleNamespace(process_index=0, num_processes=4),
        folder=SimpleNamespace(running="explore"), log=SimpleNamespace(
            bar=lambda *_: nullcontext(), say=lambda line: None,
            dropped=lambda phase, reason, tasks: logged.append(len(tasks))))
    episodes = [dpo.Trajectory(str(n), "target", 1, 0, 0) for n in range(200)]
    with pytest.raises(envs.EnvError, match="explore: 3 of 200 episodes were lost"):
        phases.play_with(run, None, None, episodes, 0.7)
    rows[2].ended = "done"
    assert len(phases.play_with(run, None, None, episodes, 0.7)) == 198
    assert logged == [3, 2]


def test_many_losses_in_a_row_are_a_world_that_is_gone(agent, monkeypatch):
    monkeypatch.setattr(envs.Repaired, "waits", ())
    monkeypatch.setattr(envs, "LOST_SHARE", 1.0)
    calls = 9
    gone = breaking(*range(calls, 999))
    with pytest.raises(envs.EnvError):
        play(agent, gone, slots=1)
    assert gone.calls == calls + envs.LOST_IN_A_ROW - 1


@pytest.mark.parametrize("error", [KeyError("a bug"), SettingsError("flag")])
def test_a_bug_or_a_wrong_setting_is_no_fault_of_the_world(agent, error, monkeypatch):
    monkeypatch.setattr(envs.time, "sleep", lambda seconds: pytest.fail("it was repeated"))

    class Bug(Toy):
        def step(self, reply):
            raise error

    with pytest.raises(type(error)) as raised:
        play(agent, Bug)
    assert raised.value is error


def test_the_end_does_not_wait_for_an_environment_that_hangs(agent, monkeypatch):
    monkeypatch.setattr(envs.Repaired, "waits", ())
    monkeypatch.setattr(envs, "LOST_IN_A_ROW", 1)
    release, closed, waited = threading.Event(), [], []

    class Hangs(Toy):
        def reset(self, task):
            if task == "toy-train-0":
                raise envs.EnvError("gone")
            if task == "toy-train-1":
                waited.append(release.wait(60))
            return super().reset(task)

        def close(self):
            closed.append(self.__dict__.get("task"))

    with pytest.raises(envs.EnvError, match="gone"):
        play(agent, Hangs)
    assert waited == []
    # The first was closed as it broke, it and the third at the end; one that is in use is not.
    assert "toy-train-1" not in closed and len(closed) == 3
    release.set()


def test_logits_that_are_no_numbers_are_not_sampled(agent):
    model, encoder = make_model(len(agent[1].tokenizer)), agent[1]
    model.lm_head.weight.data[:] = float("nan")
    with pytest.raises(FloatingPointError, match="logits"):
        play((model, encoder), Toy, [0])


FEW = Toy, "--train-tasks", 4, "--eval-tasks", 2, "--sft-batch", 2, "--checkpoint-minutes", 0
KEPT = {}


@pytest.fixture
def undisturbed(toy_run, tmp_path_factory):
    """The folder of a finished run of the toy, made once."""
    if not KEPT:
        KEPT["run"] = shutil.move(toy_run(*FEW), tmp_path_factory.mktemp("kept") / "run")
    return KEPT["run"]


@pytest.fixture
def finished(undisturbed, tmp_path):
    """A copy of it in tmp_path/run."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def test_lost_tasks_are_named_and_the_mean_says_over_how_many(toy_run, capfd):
    class Holes(Toy):
        def reset(self, task):
            if task in ("toy-test-2", "toy-train-5"):
                raise envs.EnvError(f"{task}: broken")
            return super().reset(task)

    run = toy_run(Holes)
    said = capfd.readouterr()
    assert [e["task"] for e in map(json.loads, (run / "experts.jsonl").open())] == [
        f"toy-train-{n}" for n in (0, 1, 2, 3, 4, 6, 7)]
    for event in events(run, "evaluation"):
        assert (event["tasks"], event["lost"]) == (7, 1)
    lost = [e for e in events(run, "dropped") if e["reason"] == envs.LOST]
    assert {(e["phase"], *e["tasks"]) for e in lost} >= {
        ("experts.jsonl", "toy-train-5"), ("eval-0-target-test.jsonl", "toy-test-2")}
    assert "7 of 8 episodes; the environment broke on toy-test-2" in said.out
    assert "7 (1 lost" in said.out  # the closing table
    assert not any("toy-test-2" in path.read_text() for path in run.glob("eval-*.jsonl"))


def test_a_run_whose_world_was_gone_goes_on_to_the_undisturbed_result(undisturbed, toy_run,
                                                                     tmp_path):
    gone = breaking(*range(30, 9999))
    with pytest.raises(envs.EnvError) as error:
        toy_run(gone, *FEW[1:])
    assert "The same command goes on" in start.one_line(error.value)
    assert not (tmp_path / "run/result.json").exists() and gone.calls < 30 + 3 * 3
    assert contents(toy_run(*FEW)) == contents(undisturbed)


@contextmanager
def disk_of(size):
    """A disk on which no file can be larger than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    out, err, sys.stdout, sys.stderr = sys.stdout, sys.stderr, io.StringIO(), io.StringIO()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.stdout, sys.stderr = out, err


def test_a_full_disk_stops_the_run_at_any_write_and_loses_nothing(undisturbed, toy_run, tmp_path):
    """At its first file, at the weights of an agent, and at a checkpoint, which is larger."""
    weights = (undisturbed / "sft-target/model.safetensors").stat().st_size
    for size, name in ((100, "run/config.json"), (90_000, "run/sft-target.tmp"),
                       (2 * weights, "checkpoint/writing/whole.pt")):
        with pytest.raises(Exception) as error, disk_of(size):
            toy_run(*FEW)
        line = start.one_line(error.value)
        assert line and "\n" not in line and name in line, repr(error)
        assert not (tmp_path / "run/sft-target").exists()
        del error
        gc.collect()
    assert contents(toy_run(*FEW)) == contents(undisturbed)


RUN_FILES = ["config.json", "phases.json", "metrics.jsonl", "iter1/pairs-target.jsonl",
             "sft-target/model.safetensors"]


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_damaged_run_file_is_named_and_nothing_overwritten(toy_run, finished, name):
    run = finished
    whole = (run / name).read_bytes()
    edited = whole.replace(b"1", b"2", 1) if b"1" in whole else whole[:-9] + b"x" + whole[-8:]
    for damaged in (whole[:len(whole) // 2], edited, b"", b"[]"):
        if damaged == edited and name in ("config.json", "phases.json"):
            continue  # it may still be one
        (run / name).write_bytes(damaged)
        before = contents(run) if name != "metrics.jsonl" else None
        with pytest.raises((SettingsError, files.RunError)) as error:
            toy_run(*FEW)
        line = start.one_line(error.value)
        assert str(run) in line and "\n" not in line and len(line) < 400
        assert (name.split("/")[0] in line or "made with other settings" in line), line
        assert name == "metrics.jsonl" or contents(run) == before


def test_a_damaged_checkpoint_inside_a_phase_is_named(toy_run, tmp_path):
    flags = ["--checkpoint-minutes", 0, "--sft-batch", 1, "--sft-epochs", 9]
    flags += ["--sft-lr", 1e14, "--max-grad-norm", 1e14]
    with pytest.raises(FloatingPointError):  # after some steps
        toy_run(Toy, *flags)
    file, = (tmp_path / "run/checkpoint").glob("*/*.pt")
    whole = file.read_bytes()
    for damaged in (b"", whole[:len(whole) // 2], b"x" + whole[1:]):
        file.write_bytes(damaged)
        with pytest.raises(Damaged, match="damaged; delete .*checkpoint to begin the phase"):
            toy_run(Toy, *flags)


def test_a_forgotten_phase_or_a_deleted_file_is_made_again_with_all_that_follows(
        toy_run, finished, undisturbed, capfd):
    phases = json.loads((finished / "phases.json").read_text())
    del phases["iter1/pairs-target.jsonl"]
    (finished / "phases.json").write_text(json.dumps(phases))
    (finished / "result.json").write_text("{")
    assert contents(toy_run(*FEW)) == contents(undisturbed)
    (finished / "iter1/target.jsonl").unlink()
    toy_run(*FEW)
    assert "iter1/target.jsonl is gone: computing it and all that follows" in capfd.readouterr().out
    assert contents(finished) == contents(undisturbed)


def test_the_second_of_two_runs_in_a_folder_is_refused(toy_run, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/lock", "w") as lock:  # as another process would
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SettingsError, match="another process is running in this folder"):
            toy_run()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def begin(small_model, folder, env, *flags):
    """What runs co-evolution in that environment, in a process of its own."""
    def work():
        sys.argv = ["coevolve.py"]
        envs.make, envs.Repaired.waits = lambda *_, **__: envs.Repaired(env()), (0.0,)
        small = *TOY, "--model", small_model, "--out", folder / "run"
        start.start([*map(str, small), *map(str, flags)], mutual.loop_of, None)

    return work


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_go_on(tmp_path, small_model, number, status):
    """Also while an environment hangs."""
    class Hangs(Toy):
        def step(self, reply):
            (tmp_path / "hangs").touch()
            time.sleep(600)

    process = fork(begin(small_model, tmp_path, Hangs, *FEW[1:]), tmp_path / "said")
    wait_until((tmp_path / "hangs").exists)
    os.kill(process, number)
    assert ended(process) == status
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    assert "coevolve.py: stopped; the same command goes on from here\n" in said


@pytest.mark.parametrize("fault, says", [
    (lambda: envs.EnvError("the world is gone"), "the world is gone. The same command goes on"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "process 0 ends because another of this run")])
def test_when_a_rank_dies_all_stop_with_its_message(tmp_path, small_model, fault, says):
    class Fails(Toy):
        def step(self, reply):
            if os.environ["RANK"] == "1" and (tmp_path / "run/sft-target").exists():
                raise fault()
            return super().step(reply)

    ranks = fork_ranks(2, begin(small_model, tmp_path, Fails), tmp_path / "said")
    assert all([ended(process) for process in ranks])
    said = (tmp_path / "said").read_text()
    assert says in said and "Traceback" not in said
    assert (tmp_path / "run/sft-target").exists() and not list((tmp_path / "run").glob("eval*"))


def test_the_last_good_checkpoint_is_kept(toy_run, tmp_path):
    flags = ["--dpo-lr", "1e14", "--dpo-epochs", 3, "--dpo-batch", 4, "--max-grad-norm", "1e14"]
    with pytest.raises(FloatingPointError) as error:
        toy_run(Toy, *flags)
    line = start.one_line(error.value)
    assert re.search(r"(loss|gradient norm) (nan|inf) at step \d on tasks toy-train-\d", line), line
    assert "\n" not in line and "finished phases are kept" in line
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*.safetensors")}
    assert {path.parent.name for path in before} == {"sft-target", "sft-failure"}
    assert not list(run.glob("iter1/*-agent")) and not (run / "result.json").exists()
    with pytest.raises(FloatingPointError):  # the same again, from the same checkpoints
        toy_run(Toy, *flags)
    assert {path: path.read_bytes() for path in run.rglob("*.safetensors")} == before


def scored(score):
    """The toy whose agents earn score(task, replies); its experts earn 1."""
    class Scored(Toy):
        def reward(self):
            return 1.0 if self.replies == ["the word"] * 2 else score(self.task, self.replies)
    return Scored


@pytest.mark.parametrize("reward, target, failure", [
    (1.0, ({}, {"as good as the expert": 16, "not both failures": 8}), {"not both failures": 8}),
    (0.5, ({"expert>target": 8, "expert>failure": 8}, {"equal failures": 8}), {"equal failures": 8})])
def test_an_agent_without_pairs_stays_as_it_is(toy_run, reward, target, failure):
    """Where nobody fails there are none, and of equal failures none for the failure agent."""
    run = toy_run(scored(lambda task, replies: reward))
    found = {e["trains"]: (e["kept"], e["dropped"]) for e in events(run, "pairs")}
    assert found == {"target": target, "failure": ({}, failure)}
    for agent, kept in (("target", target[0]), ("failure", {})):
        stays = ((run / f"iter1/{agent}-agent/model.safetensors").read_bytes()
                 == (run / f"sft-{agent}/model.safetensors").read_bytes())
        assert stays == (not kept)


@pytest.mark.parametrize("fault", [None, KeyError("a bug")])
def test_secrets_are_in_no_file_and_no_line(small_model, tmp_path, fault):
    """Whatever the environment holds."""
    class Fails(Toy):
        def step(self, reply):
            if fault and self.task.startswith("toy-test"):
                raise fault
            return super().step(reply)

    status = ended(fork(
        begin(small_model, tmp_path, Fails, *FEW[1:]), tmp_path / "said", HF_TOKEN="hf_canary1",
        MYSQL_PWD="canary3", OPENAI_API_KEY="sk-canary2", WANDB_API_KEY="canary4"))
    found = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) > 9 and (status == 0) == (fault is None)
    assert not any(b"canary" in text for text in found)
