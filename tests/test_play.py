"""Playing at a terminal: a person by a pipe, a trained agent, and who has the turn."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from lab import mutual
from lab import play_env as envs
from lab.harness.files import ROOT, RunError, read_jsonl
from lab.harness.report import visible
from lab.harness.settings import SettingsError
from lab.look import play
from lab.look.play import main
from lab.program import start
from lab.training import smollm2


@pytest.fixture
def typed(monkeypatch, capsys):
    """typed(lines)(*argv): what is printed when these lines are typed; the end of input follows."""
    def prepare(*lines):
        waiting = list(lines)

        def read(prompt):
            print(prompt, end="")
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("builtins.input", read)

        def run(*argv):
            main([str(word) for word in argv])
            assert "Traceback" not in (said := capsys.readouterr().out)
            return said

        return run

    return prepare


def expert(task, view="full", env="webshop"):
    world = envs.make(env, view)
    messages, reward = envs.converse(world, world.reset(task), world.expert())
    world.close()
    return [m["content"] for m in messages if m["role"] == "assistant"], reward, messages


def test_a_person_plays_what_the_agent_reads_to_the_reward(typed):
    replies, reward, messages = expert("webshop-test-3", view="short")
    said = " ".join(typed(*replies)("webshop", "webshop-test-3").split())
    assert f"done after {len(replies)} turns: reward {reward:.3f}, a success" in said
    for message in messages:
        assert " ".join(message["content"].split()) in said
    assert "You are shopping on a web shop." in said  # which this view does not tell the agent


@pytest.mark.parametrize("view", ["full", "short"])
def test_queries_are_typed_as_they_are(typed, view):
    replies, reward, _ = expert("intercodesql-test-3", "short", "intercodesql")
    said = typed(*replies)("intercodesql", "intercodesql-test-3", "--view", view)
    assert f"done after {len(replies)} turns: reward 1.000, a success" in said
    assert said.count("SHOW TABLES; DESC table; SELECT ...; submit") == 1  # and not every turn


@pytest.mark.parametrize("argv, said", [
    ([], "name an environment"), (["shop"], "unknown environment 'shop'"),
    (["webshop", "webshop-test-9999"], "unknown task .*such as webshop-test-0"),
    (["webshop", "moon"], "unknown split 'moon'"),
    (["webshop", "--betta", "1"], "unknown: --betta 1"),
    (["webshop", "--mysql-url", "mysql://a@b"], "is for intercodesql, not for webshop"),
    (["intercodesql", "--intercode-data", "/nowhere"], "/nowhere")])
def test_mistakes_are_told(argv, said):
    with pytest.raises((SettingsError, envs.Refused), match=said):
        main(argv)


def test_it_works_with_a_pipe_and_mistakes_are_one_line():
    def run(*argv, typed=""):
        return subprocess.run([sys.executable, "-m", "lab.look.play", *argv], input=typed.encode(),
                              capture_output=True, cwd=ROOT, env={**os.environ, "LC_ALL": "C"})

    done = run("webshop", "webshop-test-3", typed="search[m\xfcg mug]\n\n99\n3\nclick[Buy Now]\n")
    assert done.returncode == 0 and b"done after 3 turns: reward" in done.stdout
    assert b"your action: search[" in done.stdout
    done = run("webshop", "--agent", "/nowhere")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(b"play: --agent /nowhere: neither a run nor an agent")


@pytest.fixture(scope="module")
def trained(small_model, tmp_path_factory):
    """A run in the shop: nobody learns anything in it, but all its files are there."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    start.main([
        "--env", "webshop", "--model", str(small_model), "--train-tasks", "2", "--eval-tasks", "3",
        "--iterations", "1", "--sft-epochs", "1", "--dpo-epochs", "1", "--view", "short",
        "--max-tokens", "1024", "--max-new-tokens", "8", "--threads", "1", "--out", str(folder)],
        mutual.loop_of)
    gc.collect()
    return folder


def test_an_agent_of_grpo_on_training_tasks_plays(trained, tmp_path, typed):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "tasks.jsonl").write_text('{"id": "webshop-train-0"}\n')
    phases = json.loads((run / "phases.json").read_text())
    (run / "phases.json").write_text(json.dumps({**phases, "tasks.jsonl": {}}))
    assert "reward" in typed()("webshop", "webshop-test-3", "--agent", run)


def proposals(said):
    return [line[4:] for line in said.splitlines() if line.startswith("    ")]


def test_the_agent_plays_as_in_its_evaluation_and_says_what_it_had_in_mind(trained, typed):
    for row in read_jsonl(trained / "eval-1-target-test.jsonl")[:2]:
        said = typed()("webshop", row["task"], "--agent", trained)
        replies = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert " ".join(" ".join(proposals(said)).split()) == " ".join(
            visible(" ".join(replies)).split())
        assert f"reward {row['reward']:.3f}" in said.splitlines()[-1]
    told = [line for line in said.splitlines() if line.startswith("The action begins with ")]
    assert len(told) == row["steps"]
    best = [float(part) for part in re.findall(r"(\d+\.\d)%", told[0])]
    assert len(best) == 3 and best == sorted(best, reverse=True) and sum(best) <= 100.1


def test_the_agent_reads_what_the_person_did(trained, typed, monkeypatch):
    """After two of a person's turns its context is what `Encoder.encode` makes of the messages."""
    from lab.look.agent import Agent

    seen, propose = [], Agent.propose

    def spy(self, messages):
        self.read(messages)
        seen.append((list(self.slot.playing.ids), self.encoder))
        return propose(self, messages)

    monkeypatch.setattr(Agent, "propose", spy)
    said = typed("t", "search[mug]", "3", "", "q")("webshop", "webshop-test-0", "--agent", trained)
    turns = said.split("--- turn ")[1:]
    assert "your action" in turns[0] and "Page 1 (Total results" in turns[0]
    assert "The action begins" not in turns[1]  # it is the person's now
    assert "The action begins" in turns[2] and "Enter plays it" in turns[2]
    assert len(seen) == 2
    world = envs.make("webshop", "short")
    messages = envs.opening(world, world.reset("webshop-test-0"))
    for action in ("search[mug]", 2):
        action = action if isinstance(action, str) else world.possible()[0][action]
        messages += [{"role": "assistant", "content": action},
                     {"role": "user", "content": world.step(action).observation}]
    ids, encoder = seen[1]
    messages.append({"role": "assistant", "content": "x"})
    expected = encoder.encode(messages)[0]
    assert ids == expected[:len(ids)] and len(expected) - len(ids) == len(encoder.reply("x"))


def test_any_agent_of_a_run_can_be_named(trained):
    assert play.agent_of(trained)[1:] == (trained / "iter1/target-agent", "iter1/target-agent")
    run, folder, name = play.agent_of(trained / "iter1/failure-agent")
    assert (run, folder, name) == (trained, trained / "iter1/failure-agent", "iter1/failure-agent")
    assert play.agent_of(trained / "sft-target")[0] == trained
    with pytest.raises(RunError, match="was trained on webshop, not on intercodesql"):
        main(["intercodesql", "--agent", str(trained)])


def test_a_model_that_was_evaluated_alone_plays_or_is_said_not_to(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "base", lambda: tmp_path / "made")
    (tmp_path / "phases.json").write_text("{}")
    for model, agent in (("smollm2", tmp_path / "made"), ("org/m", "org/m")):
        (tmp_path / "config.json").write_text(json.dumps(
            dict(settings=dict(method="evaluate", model=model))))
        assert play.agent_of(tmp_path) == (tmp_path, agent, model)
    (tmp_path / "config.json").write_text('{"settings": {"method": "evaluate", "model": "tiny"}}')
    with pytest.raises(RunError, match="name another run"):
        play.agent_of(tmp_path)
