"""Playing at a terminal, by a person and by a trained agent."""

import runpy
import shutil
import sys

import pytest
from conftest import ended, fork, refused

import environments
from common.files import read_jsonl
from engine.models import read_encoder
from environments.webshop.server import WebShopServer
from lab.chat import play
from lab.chat.play import agent_of, chosen, main
from lab.runfiles import visible


@pytest.fixture
def typed(monkeypatch, capsys):
    """typed(lines, *argv) returns the output for these lines of input."""
    def run(lines, *argv):
        waiting = iter(lines)
        monkeypatch.setattr("builtins.input", lambda prompt: print(prompt, end="") or next(waiting))
        main([str(word) for word in argv])
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("env", ["webshop", "intercodesql"])
@pytest.mark.parametrize("view", ["short", "full"])
def test_a_person_plays_what_the_agent_reads_to_the_reward(typed, env, view):
    """A person who types the expert's replies earns the expert's reward."""
    played = environments.make(env, view)
    messages, reward = environments.converse(played, played.reset(f"{env}-test-3"), played.expert())
    played.close()
    replies = [m["content"] for m in messages if m["role"] == "assistant"]
    said = " ".join(typed(["?", *replies], env, f"{env}-test-3", "--view", view).split())
    assert f"done after {len(replies)} turns: reward {reward:.3f}, a success" in said
    for message in messages:
        assert " ".join(message["content"].split()) in said
    assert " ".join(played.rules.split()) in said  # in any view, by ?


def test_wrong_arguments_are_refused(small_run, tmp_path):
    shop = WebShopServer("http://localhost:1")
    assert chosen(shop, "webshop-test-0") == "webshop-test-0"  # the goal 0 of a real server
    assert chosen(shop, "test") in shop.tasks("test")
    torn = shutil.copytree(small_run, tmp_path / "run")
    (torn / "iter1/target-agent/model.safetensors").write_bytes(b"torn")
    refused(lambda *argv: main([*argv]), [
        ("", "name an environment"),
        ("webshop webshop-test-9999", "(such as webshop-test-0)"),
        ("webshop --mysql-url mysql://a@b", "unrecognized arguments: --mysql-url"),
        (f"intercodesql --agent {small_run}", "was trained on webshop, not on"),
        *[(f"webshop --agent {torn / name}", f"--agent {torn / name}: neither a run with")
          for name in ("iter9/target-agent", "iter1")],
        (f"webshop --agent {torn}", f"{torn}/iter1/target-agent")])


def test_it_works_with_a_pipe(tmp_path):
    """Types invalid UTF-8, an empty line, an unknown number and the number of an action."""
    (tmp_path / "typed").write_bytes(b"search[m\xfcg mug]\n\n99\n3\nclick[Buy Now]\n")

    def work():
        sys.stdin, sys.argv = open(tmp_path / "typed"), ["play", "webshop", "webshop-test-3"]
        runpy.run_module("lab.chat.play", run_name="__main__")

    assert ended(fork(work, tmp_path / "said")) == 0
    said = (tmp_path / "said").read_text()
    assert "done after 3 turns: reward" in said and "your action: search[m" in said


def test_the_agent_plays_as_in_its_evaluation(small_run, typed):
    for row in read_jsonl(small_run / "eval-1-target-test.jsonl"):
        said = typed([""] * row["turns"], "webshop", row["task"], "--agent", small_run)
        replies = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert [line[4:] for line in said.splitlines() if line.startswith("    ")] == (
            visible("\n".join(replies)).split("\n"))
        assert f"reward {row['reward']:.3f}" in said.splitlines()[-1]


def test_the_agent_reads_what_the_person_did(small_run, typed, monkeypatch):
    """After a person's turn, the context is that of `Encoder.encode` for the messages, and the
    environment has executed the person's action."""
    contexts, make_generator = [], play.generation.make_generator

    def recording(*arguments):
        generate = make_generator(*arguments)
        return lambda requests: contexts.append([*requests[0][0].ids]) or generate(requests)

    monkeypatch.setattr(play.generation, "make_generator", recording)
    search = "search[\xfcmug mug]"
    said = typed([search, "", "q"], "webshop", "webshop-test-0", "--agent", small_run)
    assert "left after 2 turns" in said
    played = environments.make("webshop", "short")
    messages = played.opening(played.reset("webshop-test-0"))
    encoder = read_encoder(small_run / "sft-target")
    for context in contexts[:2]:
        assert context == encoder.encode(messages, 1)[0]
        messages += [dict(role="assistant", content=search),
                     dict(role="user", content=played.step(search).observation)]


def test_any_agent_of_a_run_can_be_named(small_run, tmp_path):
    """The default is the last target agent that still exists."""
    run = tmp_path / "run"
    shutil.copytree(small_run, run, ignore=shutil.ignore_patterns("target-agent"))
    assert agent_of(run) == (run, run / "sft-target")
    failure = run / "iter1/failure-agent"
    assert agent_of(failure) == (run, failure)
