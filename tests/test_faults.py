"""Faults of the world and of the machine: no trajectory is made of them, and no work is lost."""

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from conftest import Toy, make_model, make_tokenizer
from test_coevolve import command, contents

import coevolve
import dpo
import envs
import runner
from settings import SettingsError

ROOT = Path(__file__).parent.parent


# ------------------------------------------------------------------------------ one environment

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


@pytest.mark.parametrize("at", [(1,), (2,), (3,), (1, 2), (2, 3), (3, 4, 5)])
def test_a_disturbed_episode_is_the_one_that_would_have_been(at, monkeypatch):
    monkeypatch.setattr(envs.Resumed, "waits", (0.0, 0.0, 0.0))
    env = breaking(*at)
    assert episode(envs.Resumed(env())) == episode(Toy())
    assert env.calls > 3


def test_repetitions_wait_longer_each_time_and_are_bounded(monkeypatch):
    waited = []
    monkeypatch.setattr(envs.time, "sleep", waited.append)
    with pytest.raises(envs.EnvError, match="gone"):
        episode(envs.Resumed(breaking(*range(2, 99))()))
    assert waited == list(envs.Resumed.waits) == sorted(waited) and len(waited) == 3


def test_a_world_that_has_changed_is_not_played_on(monkeypatch):
    monkeypatch.setattr(envs.Resumed, "waits", (0.0,))

    class Replaced(breaking(2)):
        def reset(self, task):
            return f"{super().reset(task)}, after call {self.calls}"

    with pytest.raises(envs.EnvError, match="toy-train-1: it is not the world it was"):
        episode(envs.Resumed(Replaced()))


# ------------------------------------------------------------------------------ rollouts

@pytest.fixture(scope="module")
def agent():
    tokenizer = make_tokenizer("chatml")
    return make_model(len(tokenizer), seed=1), dpo.Encoder(tokenizer)


def play(agent, env, tasks=range(8), slots=3):
    episodes = [coevolve.Episode(f"toy-train-{n}", "target", 1, 0, seed=n) for n in tasks]
    coevolve.rollout(*agent, lambda: envs.Resumed(env()), episodes, temperature=1.0, slots=slots,
                     max_tokens=200, max_new_tokens=6, tokens_per_forward=1000)
    return [e.record() for e in episodes]


def test_faults_change_no_episode(agent, monkeypatch):
    monkeypatch.setattr(envs.Resumed, "waits", (0.0,) * 12)
    expected = play(agent, Toy)
    for seed in range(5):
        faults = random.Random(seed).sample(range(1, 40), 12)
        assert play(agent, breaking(*faults)) == expected


class Hole(Toy):
    """One task always breaks, at its second step."""
    hole = "toy-train-4"

    def step(self, reply):
        if self.task == self.hole and self.replies:
            raise envs.EnvError(f"{self.task}: broken")
        return super().step(reply)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_task_that_always_breaks_is_lost_and_no_failure(agent, slots, monkeypatch, capfd):
    monkeypatch.setattr(envs.Resumed, "waits", (0.0,))
    expected, found = play(agent, Toy), play(agent, Hole, slots=slots)
    assert [row["ended"] for row in found] == ["done"] * 4 + ["lost"] + ["done"] * 3
    assert found[:4] + found[5:] == expected[:4] + expected[5:]
    assert "lost, and left out: toy-train-4: broken" in capfd.readouterr().err


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_world_that_is_gone_stops_the_rollout(agent, slots, monkeypatch):
    monkeypatch.setattr(envs.Resumed, "waits", (0.0,))
    with pytest.raises(envs.EnvError, match="gone"):
        play(agent, breaking(*range(9, 999)), slots=slots)


def test_how_many_may_be_lost():
    error = envs.EnvError("broken")
    for lost, of in ((1, 2), (1, 100), (2, 200), (16, 1624)):
        coevolve.check_lost(lost, of, error)
    for lost, of in ((1, 1), (2, 3), (2, 199), (17, 1624)):
        with pytest.raises(envs.EnvError):
            coevolve.check_lost(lost, of, error)


def test_many_losses_in_a_row_are_a_world_that_is_gone(agent, monkeypatch):
    monkeypatch.setattr(envs.Resumed, "waits", ())
    monkeypatch.setattr(coevolve, "LOST_SHARE", 1.0)
    calls = 9
    gone = breaking(*range(calls, 999))
    with pytest.raises(envs.EnvError):
        play(agent, gone, slots=1)
    assert gone.calls == calls + coevolve.LOST_IN_A_ROW - 1


@pytest.mark.parametrize("error", [KeyError("a bug"), RuntimeError("a bug"), SettingsError("flag")])
def test_a_bug_or_a_wrong_setting_is_no_fault_of_the_world(agent, error, monkeypatch):
    monkeypatch.setattr(envs.time, "sleep", lambda seconds: pytest.fail("it was repeated"))

    class Bug(Toy):
        def step(self, reply):
            raise error

    with pytest.raises(type(error)) as raised:
        play(agent, Bug)
    assert raised.value is error


def test_the_end_does_not_wait_for_an_environment_that_hangs(agent, monkeypatch):
    monkeypatch.setattr(envs.Resumed, "waits", ())
    monkeypatch.setattr(coevolve, "LOST_IN_A_ROW", 1)
    release, closed = threading.Event(), []

    class Hangs(Toy):
        def reset(self, task):
            if task == "toy-train-0":
                raise envs.EnvError("gone")
            if task == "toy-train-1":
                release.wait(60)
            return super().reset(task)

        def close(self):
            closed.append(self.__dict__.get("task"))

    started = time.monotonic()
    with pytest.raises(envs.EnvError, match="gone"):
        play(agent, Hangs)
    assert time.monotonic() - started < 30 and not release.is_set()
    assert "toy-train-1" not in closed and "toy-train-2" in closed  # in use it is not closed
    release.set()


def test_logits_that_are_no_numbers_are_not_sampled(agent):
    model, encoder = make_model(len(agent[1].tokenizer), seed=1), agent[1]
    model.lm_head.weight.data[:] = float("nan")
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="logits"):
            coevolve.rollout(model, encoder, Toy, [coevolve.Episode("toy-train-0", "t", 1, 0, 0)],
                             temperature=temperature, slots=1, max_tokens=100, max_new_tokens=4,
                             tokens_per_forward=100)


# ------------------------------------------------------------------------------ whole runs

def events(run, name):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [row for row in rows if row["event"] == name]


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
    lost = [e for e in events(run, "dropped") if e["reason"] == coevolve.LOST]
    assert {(e["phase"], *e["tasks"]) for e in lost} >= {("experts", "toy-train-5"),
                                                         ("evaluate-target 0", "toy-test-2")}
    assert "7 of 8 episodes; the environment broke on toy-test-2" in said.out
    assert "7 (1 lost)" in said.out  # the closing table
    assert not any("toy-test-2" in path.read_text() for path in run.glob("eval-*.jsonl"))


def test_a_run_whose_world_was_gone_goes_on_to_the_undisturbed_result(toy_run, tmp_path):
    run = toy_run()
    undisturbed = contents(run)
    shutil.rmtree(run)
    gone = breaking(*range(60, 9999))
    with pytest.raises(envs.EnvError) as error:
        toy_run(gone)
    assert "The same command goes on" in coevolve.one_line(error.value)
    assert not (run / "result.json").exists() and gone.calls < 60 + 3 * 3
    assert contents(toy_run()) == undisturbed
