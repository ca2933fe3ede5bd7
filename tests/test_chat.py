"""An endpoint of our own on loopback: what it is sent, what it costs, and how it fails."""

import gc
import json

import pytest
from conftest import KEY, ended, fork

from lab import loop as coevolve
from lab import mutual
from lab import play_env as envs
from lab.harness import report
from lab.harness.settings import Settings, SettingsError
from lab.look.page import make_page
from lab.playing import endpoint as endpoints
from lab.program import start

ASKED = [dict(role="user", content="?")]


class Guess(envs.World):
    """Three turns at most; "c" pays 1 and ends, anything else pays 0."""

    name, rules, max_steps, test_splits = "guess", "Guess.", 3, ("test",)
    splits = {split: {str(i): f"letter {split}-{i}" for i in range(4)}
              for split in ("train", "test")}

    def start(self, letter):
        return letter

    def step(self, reply):
        return envs.Step(f"not {reply}", float(reply == "c"), reply == "c")

    def expert(self):
        replies = iter("ac")
        return lambda observation: next(replies)


@pytest.fixture
def run(begin, endpoint, monkeypatch):
    """run(**settings) -> the finished run."""
    monkeypatch.setattr(endpoints.time, "sleep", lambda seconds: None)

    def start(**changed):
        found = begin(Guess, **dict(
            method="chat", model=endpoint.url, model_name="m", slots=1, examples=0) | changed)
        coevolve.coevolve(found)
        return found

    return start


def rows_of(run):
    return run.folder.read_jsonl("eval-0-target-test.jsonl")


@pytest.fixture
def call(endpoint, monkeypatch):
    """call(*faults, **settings): asks once, after these faults; the reply and what it took."""
    waits = []
    monkeypatch.setattr(endpoints.time, "sleep", waits.append)

    def ask(*faults, model=endpoint.url, **more):
        endpoint.faults = list(faults)
        return endpoints.Endpoint(
            Settings(method="chat", model=model, model_name="m", **more))(ASKED)

    ask.waits = waits
    return ask


def answer(usage=None, finish_reason="stop", **message):
    return 200, json.dumps(dict(choices=[dict(message=message, finish_reason=finish_reason)],
                                usage=usage)), {}


def test_an_evaluation_has_the_rows_and_events_of_any_other(endpoint, run):
    endpoint.answer = lambda messages: "c" if "test-1" in messages[0]["content"] else "x"
    r = run(slots=2, price_in=2.0, price_out=10.0)
    rows = rows_of(r)
    assert [(e["task"], e["reward"], e["steps"], e["ended"]) for e in rows] == [
        ("guess-test-0", 0.0, 3, "budget"), ("guess-test-1", 1.0, 1, "done"),
        ("guess-test-2", 0.0, 3, "budget"), ("guess-test-3", 0.0, 3, "budget")]
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"] * 3
    score = report.result(r.folder.path)["evaluations"][0]
    assert (score["reward"], score["success"], score["tasks"]) == (0.25, 0.25, 4)
    # Ten calls of 100 and 7 tokens: (1000 x 2 + 70 x 10) / a million dollars.
    assert (score["requests"], score["prompt_tokens"], score["completion_tokens"]) == (10, 1000, 70)
    assert score["retries"] == 0 and score["dollars"] == 0.0027


def test_the_request_is_that_of_the_protocol(endpoint, run):
    endpoint.answer = lambda messages: "Observation: I am the shop" if len(messages) == 1 else "c"
    run(max_new_tokens=50)
    (path, authorization, body), (_, _, second) = endpoint.seen[:2]
    assert path == "/v1/chat/completions" and authorization == f"Bearer {KEY}"
    assert body == dict(model="m", temperature=0, max_tokens=50,
                        messages=[dict(role="user", content="Guess.\n\nletter test-0")])
    assert second["messages"][1:] == [dict(role="assistant", content=""),
                                      dict(role="user", content="not ")]


@pytest.mark.parametrize("count", [1, 2])
def test_examples_are_expert_conversations_and_the_rules_stand_once(endpoint, run, count):
    run(examples=count)
    messages = endpoint.seen[0][2]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 * count + ["user"]
    assert [m["content"] for m in messages[1:4]] == ["a", "not a", "c"]
    assert "".join(m["content"] for m in messages).count("Guess.") == 1
    assert messages[0]["content"].startswith("Guess.\n\nletter train-")
    assert messages[-1]["content"] == "letter test-0"
    assert len({m["content"] for m in messages if "letter train-" in m["content"]}) == count


@pytest.mark.parametrize("fault", [None, (429, "slow down", {"Retry-After": "7"}), (500, "", {}),
                                   (200, "<html>", {}), (200, '{"choices": []}', {})])
def test_what_may_pass_is_tried_again_with_growing_waits(endpoint, call, fault):
    reply, used = call(*[fault] * 3)
    assert reply == "c" and used["retries"] == 3 and len(endpoint.seen) == 4
    if fault and fault[2]:
        assert call.waits == [7.0] * 3
    else:
        assert len(call.waits) == 3
        assert all(2 ** k / 2 <= wait <= 2 ** k for k, wait in enumerate(call.waits))


@pytest.mark.parametrize("fault, tries, message", [
    ((401, f"Incorrect API key: {KEY}", {}), 1, "status 401: Incorrect API key: ***"),
    ((302, "", {"Location": "http://elsewhere"}), 1, "status 302"),
    ((200, '{"error": "we are sorry"}', {}), 8, "we are sorry"),
    ((200, "[" * 100_000, {}), 8, "(attempt 8)"),
    ((401, "x" * 190 + KEY, {}), 1, "status 401: xxx"),
    ((503, "no", {}), 8, "status 503: no (attempt 8)"),
    (None, 8, "(attempt 8)"),
])
def test_what_does_not_pass_is_one_line_without_the_key(endpoint, call, fault, tries, message):
    with pytest.raises(endpoints.EndpointError) as error:
        call(*[fault] * 8)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert KEY[:5] not in str(error.value) and len(endpoint.seen) == tries


@pytest.mark.parametrize("said, reply, tokens", [
    (answer(content=[dict(type="text", text="c"), dict(type="text", text="d")], usage={}), "cd", 0),
    (answer(content="c", usage=dict(prompt_tokens=5, completion_tokens=-3)), "c", 5),
    (answer(content="c", usage=dict(prompt_tokens=5, completion_tokens=None)), "c", 5),
    (answer(reasoning="so"), "", 0), (answer(content=7), "7", 0),
    (answer(content=f"your key is {KEY}"), "your key is ***", 0)])
def test_odd_answers_are_read(endpoint, call, said, reply, tokens):
    found, used = call(said)
    assert found == reply and used["prompt_tokens"] + used["completion_tokens"] == tokens
    assert used["unreported"] == (tokens == 0) and len(endpoint.seen) == 1


def test_cut_replies_and_unknown_tokens_are_counted(endpoint, run):
    endpoint.faults = [answer(content="a b", finish_reason="length")]
    r = run(price_in=1.0)
    assert [row["cut_replies"] for row in rows_of(r)] == [1, 0, 0, 0]
    score = report.result(r.folder.path)["evaluations"][0]
    assert score["with_cut_replies"] == score["unreported"] == 1 and "dollars" not in score


def test_parameters_that_a_model_refuses_are_sent_otherwise(endpoint, call, capsys):
    endpoint.faults = [
        (400, "Unsupported parameter: 'max_tokens' ... Use 'max_completion_tokens' instead.", {}),
        (400, "Unsupported value: 'temperature' does not support 0 with this model.", {})]
    model = endpoints.Endpoint(Settings(method="chat", model=endpoint.url, model_name="m",
                                        max_new_tokens=50))
    for _ in range(2):
        model(ASKED)
    assert "takes no temperature: its own is used" in capsys.readouterr().err and not call.waits
    bodies = [{k: v for k, v in body.items() if k != "messages"} for _, _, body in endpoint.seen]
    assert bodies == [dict(model="m", temperature=0, max_tokens=50),
                      dict(model="m", temperature=0, max_completion_tokens=50),
                      *[dict(model="m", max_completion_tokens=50)] * 2]


def test_an_address_may_name_the_whole_path(endpoint, call):
    for address in (endpoint.url, f"{endpoint.url}/", f"{endpoint.url}/chat/completions"):
        call(model=address)
    assert {path for path, _, _ in endpoint.seen} == {"/v1/chat/completions"}
    with pytest.raises(endpoints.EndpointError, match="most addresses end in /v1"):
        call((404, "not here", {}), model=endpoint.url[:-3])


def test_keys(endpoint, call, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")  # too short to be a secret that a reply gives away
    endpoint.answer = lambda messages: "search[fox box]"
    assert call()[0] == "search[fox box]"
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(endpoints.EndpointError, match="OPENAI_API_KEY is not set"):
        call((401, "who are you?", {}))
    assert endpoint.seen[-1][1] is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(SettingsError, match="OPENAI_API_KEY") as error:
        call()
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("full, turns", [
    ("This model's maximum context length is 100 tokens", 2),
    ("'max_tokens' or 'max_completion_tokens' is too large: 256. This model's maximum context "
     "length is 2048 tokens", 2), (None, 1)])
def test_a_conversation_longer_than_the_endpoint_reads_ends_at_its_last_whole_turn(endpoint, run,
                                                                                  full, turns):
    """Or, without such an answer, where --max-tokens are full."""
    def answer(messages):
        if full and len(messages) == 3:
            endpoint.faults = [(400, full, {})]
        return "x"

    endpoint.answer = answer
    r = run() if full else run(max_tokens=107, max_new_tokens=20)
    assert {(e["ended"], e["steps"], len(e["messages"])) for e in rows_of(r)} == {
        ("context", turns, 2 * turns)}


def test_a_stopped_run_goes_on_and_pays_for_no_episode_twice(endpoint, run, tmp_path):
    """The request of an episode that broke, of test-2, counts as well."""
    def break_down(messages):
        if "test-2" in messages[0]["content"]:
            endpoint.faults = [(401, "out of money", {})] * 9
        return "c" if "test-2" not in messages[0]["content"] else "x"

    endpoint.answer = break_down
    with pytest.raises(envs.EnvError, match="out of money"):
        run()
    gc.collect()  # releases its folder
    endpoint.faults, paid = [], len(endpoint.seen)
    endpoint.answer = lambda messages: "c"
    with pytest.raises(SettingsError, match="model_name"):  # what is paid for is another model's
        run(model_name="another")
    gc.collect()
    with open(tmp_path / "run/playing/endpoint.jsonl", "a") as file:  # killed while it wrote
        file.write('{"task": "te')
    r = run()
    asked = [body["messages"][0]["content"][-6:] for _, _, body in endpoint.seen[paid:]]
    assert asked == ["test-2", "test-3"] and len(rows_of(r)) == 4
    assert report.result(r.folder.path)["evaluations"][0]["requests"] == 5


def test_an_episode_that_is_refused_for_good_is_left_out_and_counted(endpoint, run):
    endpoint.faults = [False, (400, "against our policy", {})]
    r = run()
    assert [e["task"] for e in rows_of(r)] == ["guess-test-0", "guess-test-2", "guess-test-3"]
    score = report.result(r.folder.path)["evaluations"][0]
    assert (score["tasks"], score["lost"]) == (3, 1)


def test_the_key_is_nowhere_when_a_whole_command_has_run(endpoint, tmp_path):
    endpoint.answer = lambda messages: "Thought: t\nAction: search[mug]"
    for out, faults, status, says in (("run", 0, 0, "prompt_tokens"), ("refused", 9, 2, "bad key ***")):
        endpoint.faults = [(401, f"bad key {KEY}", {})] * faults
        command = ["--model", endpoint.url, "--model-name", "m", "--eval-tasks", "2", "--examples",
                   "1", "--out", str(tmp_path / out)]
        said = tmp_path / f"{out}.said"
        assert ended(fork(lambda: start.start(command, mutual.loop_of, make_page), said)) == status
        assert says in said.read_text()
    texts = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 8 and not any(KEY in text for text in texts)
