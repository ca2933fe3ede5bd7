"""An explorer at a chat endpoint: its prompts, its proposals and its usage."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

import environments
import envs
import evolve
from engine.run import Run
from engine.trajectories import read
from lab.chat import endpoint as endpoints
from lab.chat import explorer
from lab.settings import Settings

WELL = (  # its replies to the prompts for a context, an action and proposals
    '<think>```json\n{"where": "draft"}\n```</think>```json\n{"where": "here", "try": "more"}\n```',
    "SHOW TABLES<|im_end|>",
    '[{"query": "draft"}]</think>```json\n[{"intent": "i", "query": "how many farms do we have", '
    '"action_sequence": ["SHOW TABLES", "SELECT COUNT(*) FROM farms", "submit"]}]\n```')
BADLY = ('```json\n["where"]\n```', "DROP TABLE x; --\nObservation: []\nAction: submit",
         '```json\n[{"query": 7}, "x", {"query": "q", "action_sequence": "submit"}, '
         '{"query": "q", "action_sequence": ["DROP TABLE x", "submit"]}]\n```')
SHORT = (WELL[0], "submit", WELL[2])  # the signal once a pick, two requests an episode


@pytest.fixture
def explore(endpoint, tmp_path, monkeypatch):
    """explore(answers, n) returns two episodes of each of n tasks, their proposals and the sums of
    the phases' numbers. A second call resumes the run of the first one."""
    monkeypatch.setattr(endpoints.random, "uniform", lambda low, high: 0.0)  # no wait
    monkeypatch.setattr(evolve, "EXPLORER_EPISODES", 2)

    def start(answers, n, guide="signals"):
        def answer(messages):
            asked = messages[0]["content"]
            return answers[0 if "it is weak" in asked else 2 if "Write new tasks" in asked else 1]

        endpoint.answer = answer
        s = Settings(env="intercodesql", view="short", method="evolve", explorer=endpoint.url,
                     explorer_model="m", slots=1, guide=guide, out=str(tmp_path / "run"))
        run = Run(s, environments.environment("intercodesql")())
        tasks = run.env.tasks("train")[:n]  # the first is about farms
        signals = [dict(task=task, signal="forgetting", picked=True,
                        failure=[dict(role="user", content="a failure")],
                        success_then=[dict(role="user", content=task)]) for task in tasks]
        finds = explorer.find_tasks(run, 1, None, [dict(task=tasks[0], joined=0, text="a known text")], signals)
        taken = Counter()
        for numbers in run.done.values():
            taken.update({k: v for k, v in numbers.items() if isinstance(v, int)})
        return read(run.folder / "iter1/explored.jsonl"), finds, taken

    return start


def prompts_to(endpoint):
    return [body["messages"][0]["content"] for _, _, body in endpoint.seen]


def test_an_explorer_that_answers_well_proposes_a_task_that_verifies(explore, endpoint):
    _, (find, _), taken = explore(WELL, 1)  # one an episode
    generator = environments.make("intercodesql", "short").task_generator()
    assert find["text"].startswith("how many ") and find["solution"][0] == "SHOW TABLES"  # what it wrote
    assert generator.refusal(find["task"]) is generator.verify(find) is None
    assert taken["requests"] == len(endpoint.seen) == 1 + 2 * 11  # the signal, once
    assert taken["prompt_tokens"] == 23 * 100 and taken["unreadable"] == 0
    assert taken["cut_prompts"] == 2 * 9  # an endpoint that always reads 100 tokens
    reflection, act, *_, proposal = prompts_to(endpoint)
    for text in "no longer does", "user: a failure", "user: intercodesql-train-0":
        assert text in reflection
    assert 'above all:\n{"where": "here", "try": "more"}' in act and "a known text" in proposal


def test_proposals_of_another_form_are_counted_and_never_repaired(explore):
    """The text after an action is not played."""
    (episode, _), finds, taken = explore(BADLY, 1)
    assert [row["task"] for row in finds] == [None] * 6 and taken["unreadable"] == 1
    assert [m["content"] for m in episode.messages[1::2]] == ["DROP TABLE x; --"] * 10  # not a submission
    assert all("Error" in m["content"] for m in episode.messages[2::2])


ONE = r'{"query": "q", "action_sequence": ["Action:\n```sql\nSHOW TABLES\n```"]}'
# Two proposals of four in a list: one lacks a quote, the last is cut by the token limit.
FOUR = ('[{"query": "q0"}, {"query": "q1, "action_sequence": [{"name": "f", "query": "x"}]}, '
        '{"query": "q2"}, {"query": "q3", "action_sequence": [{"name": "f", "que')


@pytest.mark.parametrize("reply, expected", [
    (f"Two:\n```json\n{ONE}\n```\nand\n```\n{ONE}\n```", [ONE, ONE]),  # with fences in it
    ("none", [None]), ('```json\n{"query": "i want \\ud800"}\n```', [None]), ("```json\n[]\n```", []),
    ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", [None]), ('```\n{"a": 1e999}\n```', [None]),
    (" " * explorer.LONGEST_REPLY + ONE, [None]),  # parsed up to a limit
    (FOUR, ['{"query": "q0"}', None, '{"query": "q2"}', None])])
def test_an_object_that_cannot_be_parsed_is_none(reply, expected):
    assert explorer.objects(reply) == [json.loads(value or "null") for value in expected]


@pytest.mark.parametrize("query, actions, expected", [
    ("q" * 1000, ["a", {"b": 1}], ["a", '{"b": 1}']), ("q" * 1001, ["a"], None),  # too long
    ("q", "a", None), (" ", ["a"], None)])
def test_an_object_is_a_proposal_or_of_no_form(query, actions, expected):
    echo = SimpleNamespace(written=lambda task, proposal: dict(task=proposal["action_sequence"]))
    found = explorer.written(echo, "t", dict(query=query, action_sequence=actions))
    assert found["task"] == expected


def test_a_conversation_is_told_by_its_ends():
    turns = [dict(role="user", content=f"turn {n} " + "x" * 3000) for n in range(9)]
    told = explorer.told([dict(role="user", content="rules " * 2000 + "the task"), *turns], 6000)
    assert len(told) <= 6000 and "the task" in told and "turn 8" in told


NO = 400, "against our content policy", {}
ONLY_THOUGHTS = 200, '{"choices": [{"message": {"reasoning": "so"}}]}', {}


def test_what_is_refused_is_lost_or_described_by_us_and_the_rest_is_kept(explore, endpoint):
    """A signal is refused with any body, and again after another signal is answered. Later an
    episode is refused, and again after a request of before is answered."""
    endpoint.faults = [NO] * 4 + [False, NO, False, False, NO, False, NO]
    episodes, finds, taken = explore(SHORT, 2)
    assert any('above all:\n"it solved this task before' in text for text in prompts_to(endpoint))
    assert len(episodes) == len(finds) == 3
    assert taken["refused"] == taken["unreadable"] == 1
    assert taken["requests"] == len(endpoint.seen) - 7  # those that were refused


@pytest.mark.parametrize("before", [0, 4, 12])  # of the requests: 4, 8 and 8 in the three phases
@pytest.mark.parametrize("fault, line", [
    ((401, "no such key", {}), "401: no such key"), (NO, "400: against our .*; another request"),
    (ONLY_THOUGHTS, "no conversation; http.*REPLY")])
def test_a_stop_names_the_line_of_the_endpoint_and_no_request_is_repeated(explore, endpoint, before, fault, line):
    endpoint.faults = [False] * before + [fault] * 99
    with pytest.raises(envs.EnvError, match=line):
        explore(SHORT, 4)
    endpoint.faults, paid = [], len(endpoint.seen)
    episodes, finds, taken = explore(SHORT, 4)
    assert len(episodes) == len(finds) == 8
    assert taken["requests"] == 4 + 8 * 2 == before + len(endpoint.seen) - paid


def test_an_unguided_explorer_is_told_of_no_signal(explore):
    _, finds, taken = explore(SHORT, 2, guide="random")
    assert taken["requests"] == 4 * 2  # of which none is a reflection
    assert len(finds) == 4 and all(row["task"] for row in finds)
