"""An explorer at an endpoint of our own: what it is told, what it proposes, what it costs."""

import json
import random
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import dpo
import envs
import mutual
from harness.settings import Settings
from playing import explorer

WELL = (  # its answers, by what it is asked for: context, action, proposals
    '```json\n{"where": "here", "try": "more"}\n```', "SHOW TABLES",
    '```json\n[{"intent": "i", "query": "how many are there", "confidence": 0.9, '
    '"action_sequence": ["SHOW TABLES", "SELECT COUNT(*) FROM TABLE", "submit"]}]\n```')
PROSE = "It should try harder.", "Let me think about it.", "I would ask about tables."
BADLY = ('```json\n["where"]\n```', "DROP TABLE x; --",
         '```json\n[{"query": 7}, "x", {"query": "q", "action_sequence": "submit"}, '
         '{"query": "q", "action_sequence": ["DROP TABLE x", "submit"]}]\n```')


@pytest.fixture
def env():
    return envs.make("intercodesql", "short")


@pytest.fixture
def explore(env, endpoint, tmp_path, monkeypatch):
    """explore(answers, n) -> two episodes of each of n tasks, what they took, the lost."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    s = Settings(env="intercodesql", view="short", method="evolve", explorer=endpoint.url,
                 explorer_model="m", max_new_tokens=64, slots=1)
    lost = []
    folder = SimpleNamespace(running="explored", path=tmp_path, inputs=lambda: "all before",
                             on_main=lambda said: said())
    log = SimpleNamespace(dropped=lambda phase, reason, tasks: lost.extend(tasks), say=print,
                          bar=lambda *_: nullcontext(SimpleNamespace(update=lambda n=1: None)))
    run = SimpleNamespace(settings=s, folder=folder, log=log, tasks=SimpleNamespace(
        make_env=lambda: envs.make("intercodesql", "short"), task_generator=env.task_generator))

    def start(answers, n):
        tasks = env.tasks("train")[:n]
        table = env.world.databases[env.find(tasks[0])["db"]].split("CREATE TABLE ")[1].split()[0]

        def answer(messages):
            asked = messages[0]["content"]
            kind = 0 if "it is weak" in asked else 2 if "Write new tasks" in asked else 1
            return answers[kind].replace("FROM TABLE", f"FROM {table}")

        endpoint.answer = answer
        lost.clear()
        starts = [dpo.Trajectory(task, "boundary", 1, k) for task in tasks for k in range(2)]
        picks = [dict(task=task, signal="boundary", success=[], failure=[]) for task in tasks]
        return *explorer.explore(run, starts, picks, ["a known text"], Path("agent")), lost

    return start


@pytest.fixture
def explore_once(env, explore):
    """explore_once(answers) -> proposals of the second episode of a pick, it, what both took."""
    def start(answers):
        (_, t), taken, _ = explore(answers, 1)
        return explorer.abstract(env.task_generator(), t, random.Random(0)), t, taken

    return start


def test_an_explorer_that_answers_well_proposes_a_task_that_verifies(env, explore_once, endpoint):
    rows, t, taken = explore_once(WELL)
    generator = env.task_generator()
    assert [row["text"] for row in rows] == ["how many are there"]
    assert generator.refusal(rows[0]["task"]) is None and generator.verify(rows[0]) is None
    assert t.steps == 10 and t.usage["requests"] == 11  # ten actions, and what they become
    assert taken["requests"] == len(endpoint.seen) == 1 + 2 * 11  # the signal, once
    assert taken["prompt_tokens"] == 23 * 100 and taken["unreadable"] == 0
    assert "a known text" in json.dumps(endpoint.seen[-1])
    assert [m["role"] for m in t.messages] == ["user", "assistant"] * 10


def test_what_an_explorer_imagines_after_its_action_is_not_played(explore_once):
    _, t, _ = explore_once(("{}", "SHOW TABLES\nObservation: []\nAction: submit", "```json\n[]\n```"))
    assert t.steps == 10  # not a submission
    assert {m["content"] for m in t.messages if m["role"] == "assistant"} == {"SHOW TABLES"}


def test_an_explorer_that_writes_prose_proposes_nothing(explore_once):
    rows, t, taken = explore_once(PROSE)
    assert rows == [] and taken["unreadable"] == 3  # the signal and two episodes


def test_proposals_of_another_form_are_counted_and_never_mended(explore_once):
    rows, t, taken = explore_once(BADLY)
    assert [row["task"] for row in rows] == [None] * 4 and taken["unreadable"] == 1
    assert {mutual.refusal(None, row, set(), [], 1.0) for row in rows} == {
        "not of the form that was asked for"}
    assert all(m["role"] != "user" or "Error" in m["content"] for m in t.messages[1:])


def test_what_cannot_be_read_is_none():
    action = "Action:\n```sql\nSHOW TABLES\n```"
    one = json.dumps(dict(query="q", action_sequence=[action]))
    assert explorer.blocks(f"```json\n[{one}]\n```") == [[json.loads(one)]]  # with fences in it
    assert explorer.blocks(f"Two:\n```json\n{one}\n```\nand\n```\n{one}\n```") == [
        json.loads(one)] * 2
    deep = "[" * 5000 + "]" * 5000
    for reply in ("none", "```json\n{\n```", f"```json\n{deep}\n```", "```json\n7\n```",
                  '```json\n{"query": "i want \\ud800"}\n```', '```\n{"where": NaN}\n```',
                  '```\n{"a": 1e999}\n```', "```" + " " * 50_000):
        assert explorer.blocks(reply) == [None]
    nested = json.loads("[" * 900 + "]" * 900)
    assert explorer.proposal_of(dict(query="q", action_sequence=["a", {"b": 1}])) == dict(
        query="q", action_sequence=["a", '{"b": 1}'])
    for value in (nested, dict(query=nested), dict(query=" ", action_sequence=[])):
        assert explorer.proposal_of(value) is None


def test_an_explorer_is_told_the_task_the_failure_and_the_last_success():
    long = [dict(role="user", content="rules " * 2000 + "the task"),
            *(dict(role=role, content=f"{role} {n} " + "x" * 3000) for n in range(9)
              for role in ("assistant", "user"))]
    told = explorer.told(long, 6000)
    assert len(told) <= 6000 and "the task" in told and "user 8" in told
    seen, t = [], dpo.Trajectory(usage=dict(unreadable=0))
    pick = dict(signal="forgetting", task="t", success=None, failure=long,
                success_then=[dict(role="user", content="a page"),
                              dict(role="assistant", content="what worked")])
    context = explorer.reflect(lambda m: (seen.append(m[0]["content"]), ('{"no": 1}', {}))[1], t,
                               pick)
    assert "what worked" in seen[0] and "user 8" in seen[0]
    assert "no longer" in context and t.usage["unreadable"] == 1


def test_an_explorer_that_fails_first_or_answers_late_is_asked_again_and_counted(
        explore_once, endpoint, monkeypatch):
    monkeypatch.setattr("playing.endpoint.TIMEOUT", (1, 0.5))
    waits, post = [1.5, 0, 1.5], endpoint.RequestHandlerClass.do_POST

    def late(handler):
        threading.Event().wait(waits.pop() if waits else 0)
        post(handler)

    monkeypatch.setattr(endpoint.RequestHandlerClass, "do_POST", late)
    endpoint.faults = [False] * 3 + [(500, "", {}), (429, "", {"Retry-After": "0"}), (200, "{", {})]
    rows, _, taken = explore_once(WELL)
    assert len(rows) == 1 and taken["retries"] == 5


def test_a_conversation_that_the_endpoint_refuses_is_lost_and_the_others_are_kept(explore,
                                                                                  endpoint):
    """It is tried again when the phase goes on; the others are not paid for twice."""
    well = (WELL[0], "submit", WELL[2])  # the signal once a pick, two requests an episode
    endpoint.faults = [False] * 4 + [(400, "against our content policy", {})]
    played, taken, lost = explore(well, 12)
    assert len(played) == 23 and len(lost) == 1
    asked = len(endpoint.seen)
    assert taken["requests"] == 12 + 23 * 2 + 1 == asked - 1
    again, more, lost = explore(well, 12)
    assert len(again) == 24 and not lost and all(t in again for t in played)
    assert len(endpoint.seen) == asked + 2 and more["requests"] == taken["requests"] + 2


def test_a_signal_too_long_for_the_explorer_is_named_instead(explore_once, endpoint):
    endpoint.faults = [(400, "maximum context length is 8192 tokens", {})]
    rows, t, taken = explore_once(WELL)
    assert "some succeed" in t.usage["context"] and len(rows) == 1 and taken["unreadable"] == 1


def test_an_explorer_that_is_gone_ends_the_phase_with_one_line(explore_once, endpoint):
    endpoint.faults = [(500, "", {})] * 99
    with pytest.raises(envs.EnvError, match="status 500"):
        explore_once(WELL)
