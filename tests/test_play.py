"""Playing at a terminal: a person by a pipe, a trained agent, and who has the turn."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coevolve
import dpo
import envs
import worlds
from lab import play
from lab.play import main
from lab.runfiles import visible
from worlds.files import read_jsonl
from worlds.flags import Refused

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """A small run of the core in the shop, with all its files."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    small = ("--train-tasks 6 --eval-tasks 4 --iterations 1 --rollouts 1 --sft-epochs 1 "
             "--dpo-epochs 1 --seed 1")
    subprocess.run([sys.executable, ROOT / "coevolve.py", "--env", "webshop", *small.split(),
                    "--out", folder], check=True, capture_output=True)
    return folder


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
    messages, reward = worlds.converse(world, world.reset(task), world.expert())
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
    (["webshop", "--betta", "1"], "unrecognized arguments: --betta 1"),
    (["webshop", "--mysql-url", "mysql://a@b"], "unrecognized arguments: --mysql-url"),
    (["intercodesql", "--intercode-data", "/nowhere"], "/nowhere")])
def test_mistakes_are_told(argv, said):
    with pytest.raises(Refused, match=said):
        main(argv)


def test_it_works_with_a_pipe_and_mistakes_are_one_line():
    def run(*argv, typed=""):
        return subprocess.run([sys.executable, "-m", "lab.play", *argv], input=typed.encode(),
                              capture_output=True, cwd=ROOT, env={**os.environ, "LC_ALL": "C"})

    done = run("webshop", "webshop-test-3", typed="search[m\xfcg mug]\n\n99\n3\nclick[Buy Now]\n")
    assert done.returncode == 0 and b"done after 3 turns: reward" in done.stdout
    assert b"your action: search[" in done.stdout
    done = run("webshop", "--agent", "/nowhere")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(b"play: --agent /nowhere: neither a run nor an agent")


def proposals(said):
    return [line[4:] for line in said.splitlines() if line.startswith("    ")]


def test_the_agent_plays_as_in_its_evaluation_and_says_how_sure_it_is(plain_run, typed):
    agent = plain_run / "iter1/target-agent"
    model = dpo.read_model(agent).eval()
    encoder = dpo.Encoder(dpo.read(coevolve.transformers.AutoTokenizer, agent))
    for row in read_jsonl(plain_run / "eval-1-target-test.jsonl")[:2]:
        said = typed(*[""] * row["steps"])("webshop", row["task"], "--agent", plain_run)
        replies = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert " ".join(" ".join(proposals(said)).split()) == " ".join(
            visible(" ".join(replies)).split())
        assert f"reward {row['reward']:.3f}" in said.splitlines()[-1]
        # Of the last reply, by the model's own softmax over what may be drawn.
        written = [k for k, acts in enumerate(row["action_mask"]) if acts]
        first = max(k for k in written if k - 1 not in written)
        with torch.no_grad():
            logits = model(torch.tensor([row["ids"]])).logits[0]
        logits[:, [*encoder.never(logits.shape[1])]] = -torch.inf
        p = [logits[k - 1].softmax(-1)[row["ids"][k]].item() for k in written if k >= first]
        told = re.findall(r"a probability of (\d+\.\d)%;.*?, (\d+\.\d)%:", " ".join(said.split()))
        assert len(told) == row["steps"]
        assert [float(x) for x in told[-1]] == pytest.approx(
            [100 * torch.tensor(p).prod().item(), 100 * min(p)], abs=0.06)


def test_the_agent_reads_what_the_person_did(plain_run, typed, monkeypatch):
    """After a person's turns its context is what `Encoder.encode` makes of the messages, and its
    world has done what the person said, in words that the agent does not know."""
    seen, replies = [], dpo.replies
    monkeypatch.setattr(dpo, "replies", lambda model, encoder, *more: seen.append(
        (encoder, list(more[3][0][0]))) or replies(model, encoder, *more))
    said = typed("t", "search[\xfcmug mug]", "3", "q")("webshop", "webshop-test-0", "--agent",
                                                     plain_run)
    turns = said.split("--- turn ")[1:]
    assert "your action" in turns[0] and "Page 1 (Total results" in turns[0]
    assert "probability" in turns[0] and "probability" not in turns[1] + turns[2]
    encoder, ids = seen[0]
    world = envs.make("webshop", "short")
    messages = envs.opening(world, world.reset("webshop-test-0"))
    assert ids == encoder.encode(messages, 1)[0]
    # The whole episode that a person plays beside an agent has the ids of its messages.
    t, searched = dpo.Trajectory("webshop-test-0"), "search[\xfcmug mug]"
    running = envs.episode(world, encoder, t, 768)
    running.send(None)
    encoder.said = searched
    running.send((written := encoder.reply(searched), [0.0] * len(written)))
    assert t.messages[1]["content"] == searched and "Page 1" in t.messages[2]["content"]
    assert (t.ids, t.action_mask) == encoder.encode(t.messages, 1)


def test_an_agent_plays_the_tasks_that_its_run_made(plain_run, tmp_path, typed):
    run = shutil.copytree(plain_run, tmp_path / "run")
    goal = envs.make("webshop").find("webshop-train-0")
    phases = json.loads((run / "phases.json").read_text())
    (run / "phases.json").write_text(json.dumps({**phases, "iter1/tasks.jsonl": {}}))
    (run / "iter1/tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
        dict(task="webshop-train-0"), dict(task="webshop-added-0", definition={
            **goal, "instruction": "i want a mauve mug"}))))
    said = typed("q")("webshop", "webshop-added-0", "--agent", run)
    assert "mauve" in said.split("--- turn")[0]


def test_any_agent_of_a_run_can_be_named(plain_run, tmp_path):
    assert play.agent_of(plain_run) == (plain_run, plain_run / "iter1/target-agent")
    folder = plain_run / "iter1/failure-agent"
    assert play.agent_of(folder) == (plain_run, folder)
    assert play.agent_of(plain_run / "sft-target")[0] == plain_run
    with pytest.raises(Refused, match="was trained on webshop, not on intercodesql"):
        main(["intercodesql", "--agent", str(plain_run)])
    (tmp_path / "phases.json").write_text("{}")
    with pytest.raises(Refused, match="no target agent is trained in it"):
        play.agent_of(tmp_path)
