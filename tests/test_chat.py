"""An endpoint of our own on loopback: what it is sent, what it costs, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import Accelerator
from conftest import KEY

import coevolve
import envs
from baselines import chat
from dpo import Trajectory
from harness import endpoint as endpoints
from harness import report
from harness.settings import Settings, SettingsError, check
from look.conversations import conversations
from program.run import Run

ROOT = Path(__file__).parent.parent


class Guess(envs.World):
    """Three turns at most; "c" pays 1 and ends, anything else pays 0."""

    name, rules, max_steps, test_splits = "guess", "Guess.", 3, ("test",)

    def tasks(self, split):
        return [f"{split}-{i}" for i in range(4)]

    def find(self, task):
        return task

    def reset(self, task):
        return f"letter {task}"

    def step(self, reply):
        return envs.Step(f"not {reply}", float(reply == "c"), reply == "c")

    def expert(self):
        replies = iter("ac")
        return lambda observation: next(replies)


@pytest.fixture
def run(endpoint, tmp_path, monkeypatch):
    """run(**settings) -> the finished run."""
    monkeypatch.setattr(envs, "make", lambda *_, **__: envs.Repaired(Guess()))
    monkeypatch.setattr(endpoints.time, "sleep", lambda seconds: None)

    def start(**changed):
        values = dict(method="chat", model=endpoint.url, model_name="m", slots=2, examples=0,
                      out=str(tmp_path / "run"))
        found = Run(check(Settings(**{**values, **changed})), Accelerator(cpu=True))
        coevolve.coevolve(found)
        return found

    return start


def settings(endpoint, **more):
    return Settings(method="chat", model=endpoint.url, model_name="m", **more)


def test_an_evaluation_has_the_rows_and_events_of_any_other(endpoint, run):
    endpoint.answer = lambda messages: "c" if "test-1" in messages[0]["content"] else "x"
    r = run(price_in=2.0, price_out=10.0)
    rows = r.folder.read_jsonl("eval-0-target-test.jsonl")
    assert [(e["task"], e["reward"], e["steps"], e["ended"]) for e in rows] == [
        ("test-0", 0.0, 3, "budget"), ("test-1", 1.0, 1, "done"),
        ("test-2", 0.0, 3, "budget"), ("test-3", 0.0, 3, "budget")]
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"] * 3
    score = report.result(r.folder.path)["evaluations"][0]
    assert (score["reward"], score["success"], score["tasks"]) == (0.25, 0.25, 4)
    # Ten calls of 100 and 7 tokens: (1000 x 2 + 70 x 10) / a million dollars.
    assert (score["requests"], score["prompt_tokens"], score["completion_tokens"]) == (10, 1000, 70)
    assert score["retries"] == 0 and score["dollars"] == 0.0027
    assert [t["id"] for t in conversations(r.folder.path, first=["test-1"])["tasks"]][0] == "test-1"
    line = next(line for line in report.table(r.folder.path).splitlines() if "1,000" in line)
    assert line.split() == ["test", "10", "0", "0", "1,000", "70", "0.00"]


def test_the_request_is_that_of_the_protocol(endpoint, run):
    endpoint.answer = lambda messages: "Observation: I am the shop" if len(messages) == 1 else "c"
    run(slots=1, max_new_tokens=50)
    (path, authorization, body), (_, _, second) = endpoint.seen[:2]
    assert path == "/v1/chat/completions" and authorization == f"Bearer {KEY}"
    assert body == dict(model="m", temperature=0, max_tokens=50,
                        messages=[dict(role="user", content="Guess.\n\nletter test-0")])
    assert second["messages"][1:] == [dict(role="assistant", content=""),
                                      dict(role="user", content="not ")]


@pytest.mark.parametrize("count", [1, 2])
def test_examples_are_expert_conversations_and_the_rules_stand_once(endpoint, run, count):
    run(slots=1, examples=count)
    messages = endpoint.seen[0][2]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 * count + ["user"]
    assert [m["content"] for m in messages[1:4]] == ["a", "not a", "c"]
    assert "".join(m["content"] for m in messages).count("Guess.") == 1
    assert messages[0]["content"].startswith("Guess.\n\nletter train-")
    assert messages[-1]["content"] == "letter test-0"
    openings = {m["content"] for m in messages if "letter train-" in m["content"]}
    assert len(openings) == count


@pytest.mark.parametrize("fault", [None, (429, "slow down", {"Retry-After": "7"}), (500, "", {}),
                                   (200, "<html>", {}), (200, '{"choices": []}', {})])
def test_what_may_pass_is_tried_again_with_growing_waits(endpoint, fault, monkeypatch):
    waits, endpoint.faults = [], [fault] * 3
    monkeypatch.setattr(endpoints.time, "sleep", waits.append)
    reply, used = endpoints.Endpoint(settings(endpoint))([dict(role="user", content="?")])
    assert reply == "c" and used["retries"] == 3 and len(endpoint.seen) == 4
    if fault and fault[2]:
        assert waits == [7.0] * 3
    else:
        assert all(2 ** k / 2 <= wait <= 2 ** k for k, wait in enumerate(waits)) and len(waits) == 3


@pytest.mark.parametrize("faults, tries, message", [
    ([(401, f"Incorrect API key: {KEY}", {})], 1, "status 401: Incorrect API key: ***"),
    ([(302, "", {"Location": "http://elsewhere"})], 1, "status 302"),
    ([(400, "no\nsuch model", {})], 1, "status 400: no such model"),
    ([(200, '{"error": "we are sorry"}', {})] * 8, 8, "we are sorry"),
    ([(404, "no such model", {})], 1, "status 404: no such model (attempt 1)"),
    ([(400, "measure the temperature of water: bad request", {})], 1, "status 400: measure"),
    ([(200, "[" * 100_000, {})] * 8, 8, "(attempt 8)"),
    ([(529, "overloaded", {})] * 8, 8, "status 529: overloaded (attempt 8)"),
    ([(401, "x" * 190 + KEY, {})], 1, "status 401: xxx"),
    ([(503, "no", {})] * 8, 8, "status 503: no (attempt 8)"),
    ([None] * 8, 8, "(attempt 8)"),
])
def test_what_does_not_pass_is_one_line_without_the_key(endpoint, faults, tries, message,
                                                        monkeypatch):
    endpoint.faults = list(faults)
    monkeypatch.setattr(endpoints.time, "sleep", lambda seconds: None)
    with pytest.raises(endpoints.EndpointError) as error:
        endpoints.Endpoint(settings(endpoint))([dict(role="user", content="?")])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert KEY[:5] not in str(error.value) and len(endpoint.seen) == tries


def test_replies_that_the_endpoint_cut_are_counted(endpoint, run):
    answer = dict(choices=[dict(message=dict(content="a b"), finish_reason="length")])
    endpoint.faults = [(200, json.dumps(answer), {})]
    r = run(slots=1)
    assert [row["cut_replies"] for row in r.folder.read_jsonl("eval-0-target-test.jsonl")] == [1, 0, 0, 0]
    assert report.result(r.folder.path)["evaluations"][0]["with_cut_replies"] == 1


@pytest.mark.parametrize("message, usage, tokens", [
    (dict(content=[dict(type="text", text="c"), dict(type="text", text="d")]), {}, 0),
    (dict(content="cd"), None, 0),
    (dict(content="cd"), dict(prompt_tokens=5, completion_tokens=-3), 5),
    (dict(content="cd"), dict(prompt_tokens=5, completion_tokens=None), 5)])
def test_answers_in_parts_and_without_usage_are_read(endpoint, message, usage, tokens):
    endpoint.faults = [(200, json.dumps(dict(choices=[dict(message=message)], usage=usage)), {})]
    reply, used = endpoints.Endpoint(settings(endpoint))([dict(role="user", content="?")])
    assert reply == "cd" and used["prompt_tokens"] + used["completion_tokens"] == tokens
    assert used["unreported"] == (not usage)
    rows = [Trajectory(usage=dict.fromkeys(endpoints.USAGE, 1) | used)]
    assert ("dollars" in chat.cost(rows, settings(endpoint, price_in=1.0))) == bool(usage)


@pytest.mark.parametrize("message, reply", [
    (dict(role="assistant", reasoning="so"), ""), (dict(content=None), ""), (dict(content=7), "7"),
    (dict(content=f"your key is {KEY}"), "your key is ***")])
def test_odd_contents_are_replies_too(endpoint, message, reply):
    endpoint.faults = [(200, json.dumps(dict(choices=[dict(message=message)])), {})]
    found, used = endpoints.Endpoint(settings(endpoint))([dict(role="user", content="?")])
    assert found == reply and used["requests"] == 1 and len(endpoint.seen) == 1


def test_parameters_that_a_model_refuses_are_sent_otherwise(endpoint, capsys, monkeypatch):
    monkeypatch.setattr(endpoints.time, "sleep", lambda seconds: 1 / 0)
    endpoint.faults = [
        (400, "Unsupported parameter: 'max_tokens' ... Use 'max_completion_tokens' instead.", {}),
        (400, "Unsupported value: 'temperature' does not support 0 with this model.", {})]
    model = endpoints.Endpoint(settings(endpoint, max_new_tokens=50))
    for _ in range(2):
        model([dict(role="user", content="?")])
    assert "takes no temperature: its own is used" in capsys.readouterr().err
    bodies = [{k: v for k, v in body.items() if k != "messages"} for _, _, body in endpoint.seen]
    assert bodies == [dict(model="m", temperature=0, max_tokens=50),
                      dict(model="m", temperature=0, max_completion_tokens=50),
                      dict(model="m", max_completion_tokens=50)] + [
                      dict(model="m", max_completion_tokens=50)]


def test_an_address_may_name_the_whole_path(endpoint):
    for address in (endpoint.url, f"{endpoint.url}/", f"{endpoint.url}/chat/completions"):
        endpoints.Endpoint(Settings(method="chat", model=address, model_name="m"))([])
    assert {path for path, _, _ in endpoint.seen} == {"/v1/chat/completions"}
    endpoint.faults = [(404, "not here", {})]
    with pytest.raises(endpoints.EndpointError, match="most addresses end in /v1"):
        endpoints.Endpoint(Settings(method="chat", model=endpoint.url[:-3], model_name="m"))([])


def test_a_short_key_is_no_secret_to_be_cut_out_of_replies(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    endpoint.answer = lambda messages: "search[fox box]"
    assert endpoints.Endpoint(settings(endpoint))([])[0] == "search[fox box]"


def test_a_full_context_is_no_refusal_of_a_parameter(endpoint):
    endpoint.faults = [(400, "'max_tokens' or 'max_completion_tokens' is too large: 256. This model's "
                        "maximum context length is 2048 tokens", {})]
    with pytest.raises(endpoints.ContextFull):
        endpoints.Endpoint(settings(endpoint))([])


def test_a_refusal_without_a_key_names_the_variable(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    endpoint.faults = [(401, "who are you?", {})]
    with pytest.raises(endpoints.EndpointError, match="OPENAI_API_KEY is not set"):
        endpoints.Endpoint(settings(endpoint))([dict(role="user", content="?")])


def test_a_conversation_longer_than_the_endpoint_reads_ends_the_episode(endpoint, run):
    def answer(messages):
        if len(messages) == 3:
            full = "This model's maximum context length is 100 tokens"
            endpoint.faults = [(400, full, {})]
        return "x"

    endpoint.answer = answer
    r = run(slots=1)
    rows = r.folder.read_jsonl("eval-0-target-test.jsonl")
    assert {(e["ended"], e["steps"]) for e in rows} == {("context", 2)}
    assert "4 (4 out of context)" in report.table(r.folder.path)


def test_episodes_of_another_model_are_not_taken_for_this_ones(endpoint, run, tmp_path):
    endpoint.answer = lambda messages: "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "cost", lambda *_: 1 / 0)  # the phase does not come to its end
        with pytest.raises(ZeroDivisionError):
            run()
    with pytest.raises(SettingsError, match="model_name"):
        run(model_name="another")
    with open(tmp_path / "run/chat.jsonl", "a") as f:  # killed while it wrote
        f.write('{"task": "te')
    assert len(run().folder.read_jsonl("eval-0-target-test.jsonl")) == 4 and len(endpoint.seen) == 4


def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(SettingsError, match="OPENAI_API_KEY holds a character") as error:
        endpoints.Endpoint(settings(endpoint))
    assert "secret" not in str(error.value)


def test_a_server_without_a_key_gets_none(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    endpoints.Endpoint(settings(endpoint))([dict(role="user", content="?")])
    assert endpoint.seen[0][1] is None


def test_an_episode_ends_where_the_context_is_full(endpoint, run):
    endpoint.answer = lambda messages: "x"
    rows = run(max_tokens=107, max_new_tokens=20).folder.read_jsonl("eval-0-target-test.jsonl")
    assert {(e["ended"], e["steps"]) for e in rows} == {("context", 1)}


def test_a_stopped_run_goes_on_and_pays_for_no_episode_twice(endpoint, run):
    def break_down(messages):  # while test-2 is played; test-3 meets it
        if "test-2" in messages[0]["content"]:
            endpoint.faults = [(401, "out of money", {})] * 9
        return "c"

    endpoint.answer = break_down
    with pytest.raises(endpoints.EndpointError, match="out of money"):
        run(slots=1)
    endpoint.faults, paid = [], len(endpoint.seen)
    endpoint.answer = lambda messages: "c"
    r = run(slots=1)
    asked = [body["messages"][0]["content"][-6:] for _, _, body in endpoint.seen[paid:]]
    assert asked == ["test-3"] and len(r.folder.read_jsonl("eval-0-target-test.jsonl")) == 4


def test_the_key_is_nowhere_when_a_whole_command_has_run(endpoint, tmp_path):
    endpoint.answer = lambda messages: "Thought: t\nAction: search[mug]"
    command = [sys.executable, str(ROOT / "coevolve.py"), "--model", endpoint.url, "--model-name",
               "m", "--eval-tasks", "2", "--examples", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "prompt_tokens" in done.stdout and "unseen" in done.stdout
    endpoint.faults = [(401, f"bad key {KEY}", {})] * 9
    command[-1] = str(tmp_path / "refused")
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "bad key ***" in refused.stderr
    texts = [done.stdout, done.stderr, refused.stdout, refused.stderr]
    texts += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 8 and not any(KEY in text for text in texts)
