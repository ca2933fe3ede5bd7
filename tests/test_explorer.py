"""An explorer at a chat endpoint: its prompts, its proposals and its usage."""

import json
import random
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import pytest

import environments
import envs
import evolve
from common.files import read_jsonl
from engine.run import Run
from environments.intercodesql import questions
from lab.chat import endpoint as endpoints
from lab.chat import explorer
from lab.settings import Settings

WELL = (  # its replies to the prompts for a context, an action and proposals
    '<think>```json\n{"where": "draft"}\n```</think>```json\n{"where": "here", "try": "more"}\n```',
    "SHOW TABLES<|im_end|>",
    '[{"query": "draft"}]</think>```json\n[{"intent": "i", "query": "how many NOUN do we have", '
    '"action_sequence": ["SHOW TABLES", "SELECT COUNT(*) FROM NOUN", "submit"]}]\n```')
BADLY = ('```json\n["where"]\n```', "DROP TABLE x; --\nObservation: []\nAction: submit",
         '```json\n[{"query": 7}, "x", {"query": "q", "action_sequence": "submit"}, '
         '{"query": "q", "action_sequence": ["DROP TABLE x", "submit"]}]\n```')
SHORT = (WELL[0], "submit", WELL[2])  # the signal once a pick, two requests an episode


@pytest.fixture
def env():
    return environments.make("intercodesql", "short")


@pytest.fixture
def explore(env, endpoint, tmp_path, monkeypatch):
    """explore(answers, n) returns two episodes of each of n tasks, their proposals and the usage.
    A second call resumes the run of the first one."""
    monkeypatch.setattr(endpoints.random, "uniform", lambda low, high: 0.0)  # no wait
    monkeypatch.setattr(evolve, "EXPLORER_EPISODES", 2)

    def start(answers, n, guided=True):
        s = Settings(
            env="intercodesql", view="short", method="evolve", explorer=endpoint.url,
            explorer_model="m", slots=1, guide="signals" if guided else "random",
            out=str(tmp_path / "run"))
        run = Run(s, environments.environment("intercodesql")())
        tasks = env.tasks("train")[:n]
        table = env.data.databases[env.find(tasks[0])["db"]].split("CREATE TABLE ")[1].split()[0]

        def answer(messages):
            asked = messages[0]["content"]
            kind = 0 if "it is weak" in asked else 2 if "Write new tasks" in asked else 1
            return answers[kind].replace("NOUN", table)

        endpoint.answer = answer
        d, signals = tmp_path / "tasks.jsonl", tmp_path / "signals.jsonl"
        d.write_text(json.dumps(dict(task=tasks[0], joined=0, text="a known text")))
        signals.write_text("\n".join(json.dumps(dict(
            task=task, signal="forgetting", picked=True, success=None, **{
                name: [dict(role="user", content="a page"), dict(role="assistant", content=name)]
                for name in ("failure", "success_then")})) for task in tasks))
        finds = explorer.find_tasks(run, 1, None, [d], [signals])
        taken = Counter()
        for name in ("contexts", "explored", "finds"):
            taken.update({k: v for k, v in run.done.get(f"iter1/{name}.jsonl", {}).items()
                          if k in (*endpoints.USAGE, "unreadable", "refused")})
        explored = read_jsonl(run.folder / "iter1/explored.jsonl")
        return [evolve.Explored(**row) for row in explored], read_jsonl(finds), taken

    return start


def test_an_explorer_that_answers_well_proposes_a_task_that_verifies(env, explore, endpoint):
    episodes, finds, taken = explore(WELL, 1)
    generator = env.task_generator()
    assert [row["text"].split()[:2] for row in finds] == [["how", "many"]] * 2  # one an episode
    gold = finds[0]["task"]["gold"]
    assert finds[0]["solution"] == ["SHOW TABLES", gold, "submit"]  # what it wrote
    assert generator.refusal(finds[0]["task"]) is None and generator.verify(finds[0]) is None
    assert [t.turns for t in episodes] == [10, 10]
    assert taken["requests"] == len(endpoint.seen) == 1 + 2 * 11  # the signal, once
    assert taken["prompt_tokens"] == 23 * 100 and taken["unreadable"] == 0
    assert taken["cut_prompts"] == 2 * 9  # an endpoint that always reads 100 tokens
    assert [m["role"] for m in episodes[0].messages] == ["user", "assistant"] * 10
    reflection, act, *_, proposal = [body["messages"][0]["content"] for _, _, body in endpoint.seen]
    assert all(text in reflection for text in ("no longer does", "success_then", "failure"))
    assert 'above all:\n{"where": "here", "try": "more"}' in act and "a known text" in proposal


def test_proposals_of_another_form_are_counted_and_never_repaired(explore):
    """The text after an action is not played."""
    episodes, finds, taken = explore(BADLY, 1)
    assert [row["task"] for row in finds] == [None] * 6 and taken["unreadable"] == 1
    assert {evolve.refusal(None, row, set(), [], 1.0) for row in finds} == {
        "not of the form that was asked for"}
    assert all(m["role"] != "user" or "Error" in m["content"] for m in episodes[0].messages[1:])
    assert episodes[0].turns == 10  # not a submission
    assert {m["content"] for m in episodes[0].messages if m["role"] == "assistant"} == {
        "DROP TABLE x; --"}


def test_an_object_that_cannot_be_parsed_is_none():
    one = json.dumps(dict(query="q", action_sequence=["Action:\n```sql\nSHOW TABLES\n```"]))
    assert explorer.objects(f"Two:\n```json\n{one}\n```\nand\n```\n{one}\n```") == [
        json.loads(one)] * 2  # with fences in it
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    for reply in ("none", f"```json\n{deep}\n```", '```json\n{"query": "i want \\ud800"}\n```',
                  '```\n{"a": 1e999}\n```', "```" + " " * 50_000):
        assert explorer.objects(reply) == [None]
    assert explorer.objects("```json\n[]\n```") == []
    assert explorer.objects(" " * explorer.LONGEST_REPLY + one) == [None]  # parsed up to a limit
    # Two proposals of four in a list: one lacks a quote, the last is cut by the token limit.
    whole = [dict(intent="i", query=f"q{n}", action_sequence=[dict(name="f", query="x")])
             for n in range(4)]
    a, b, c, d = map(json.dumps, whole)
    reply = "```json\n[" + ",\n".join([a, b.replace('"q1"', '"q1'), c, d[:-20]])
    assert explorer.objects(reply) == [whole[0], None, whole[2], None]


def test_an_object_is_a_proposal_or_of_no_form():
    echo = SimpleNamespace(written=lambda task, proposal: dict(task=task, **proposal))
    assert explorer.written(echo, "t", dict(query="q", action_sequence=["a", {"b": 1}])) == dict(
        task="t", query="q", action_sequence=["a", '{"b": 1}'])
    nested = json.loads("[" * 900 + "]" * 900)
    for query, actions, kept in (("q" * 1000, ["a"], True), ("q" * 1001, ["a"], False),  # too long
                                 (nested, None, False), (" ", [], False)):
        found = explorer.written(echo, "t", dict(query=query, action_sequence=actions))
        assert (found["task"] == "t") == kept


def test_a_conversation_is_told_by_its_ends():
    long = [dict(role="user", content="rules " * 2000 + "the task"),
            *(dict(role=role, content=f"{role} {n} " + "x" * 3000) for n in range(9)
              for role in ("assistant", "user"))]
    told = explorer.told(long, 6000)
    assert len(told) <= 6000 and "the task" in told and "user 8" in told


def test_a_conversation_that_the_endpoint_refuses_is_lost_and_the_others_are_kept(explore, endpoint):
    endpoint.faults = [False] * 5 + [(400, "against our content policy", {})]
    episodes, finds, taken = explore(SHORT, 4)
    assert len(episodes) == 7 and taken["refused"] == 1 and len(finds) == 7
    assert taken["requests"] == 4 + 7 * 2 == len(endpoint.seen) - 1


def test_a_resumed_run_repeats_no_answered_request(explore, endpoint):
    """The key is refused in the second phase, and the run resumes there."""
    endpoint.faults = [False] * 7 + [(401, "no such key", {})]
    with pytest.raises(envs.EnvError, match="401"):
        explore(SHORT, 4)
    assert len(endpoint.seen) == 8
    episodes, finds, taken = explore(SHORT, 4)
    assert len(episodes) == len(finds) == 8
    assert taken["requests"] - 4 == 8 * 2  # the first phase's are in its own row
    assert len(endpoint.seen) == 8 + (4 + 8 * 2 - 7)


def test_a_signal_too_long_for_the_explorer_is_named_instead(explore, endpoint):
    endpoint.faults = [(400, "maximum context length is 8192 tokens", {})]
    _, finds, taken = explore(SHORT, 1)
    assert "no longer does" in endpoint.seen[1][2]["messages"][0]["content"]
    assert len(finds) == 2 and taken["unreadable"] == 1


def test_an_unguided_explorer_is_told_of_no_signal(explore, endpoint):
    _, finds, taken = explore(SHORT, 2, guided=False)
    asked = [body["messages"][0]["content"] for _, _, body in endpoint.seen]
    assert not any("above all" in text or "it is weak" in text for text in asked)
    assert taken["requests"] == 4 * 2  # of which none is a reflection
    assert len(finds) == 4 and all(row["task"] for row in finds)


def test_a_question_with_the_solution_of_another_does_not_join(env):
    generator, rng = env.task_generator(), random.Random(0)
    task = env.tasks("train")[0]
    db = env.find(task)["db"]
    joined, of = Counter(), Counter()
    with closing(env.database(db)) as database:
        for _ in range(160):
            q, other = (questions.draw_question(rng, env.data.tables[db]) for _ in range(2))
            if q["gold"] == other["gold"] or not all(
                    questions.worth_asking(database.run, each["gold"])
                    and not generator.refusal(dict(each, db=db)) for each in (q, other)):
                continue
            for kind, text, sql in (
                    ("right", q["query"], q["gold"]), ("its solution", q["query"], other["gold"]),
                    ("no text", "?", q["gold"]), ("no solution", q["query"], "SELECT 1")):
                found = generator.written(task, dict(query=text, action_sequence=[
                    "SHOW TABLES", *(f"DESC {table}" for table in questions.tables_of(sql)), sql,
                    "submit"]))
                joined[kind] += not (evolve.refusal(generator, found, set(), [], 1.0)
                                     or generator.verify(found))
                of[kind] += 1
    assert joined["right"] == of["right"] > 15
    assert joined.total() == joined["right"]
