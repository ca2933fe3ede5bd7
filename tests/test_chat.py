"""Requests to a chat endpoint on loopback, its usage and its errors, and the evaluation of an
agent's folder."""

import json
import re

import pytest
from conftest import KEY

import engine.run as run_module
import environments
import envs
from common.files import read_jsonl
from common.settings import UsageError, parse
from engine import models
from engine.run import Run
from envs import Step
from lab.chat import endpoint as endpoints
from lab.chat.endpoint import ContextFull, EndpointError, NotAnswered, OnlyThoughts
from lab.settings import METHODS, Settings

ASKED = [dict(role="user", content="?")]


class Guess(envs.Environment):
    """Three turns at most; "c" pays 1 and ends, anything else pays 0."""
    name, max_turns, test_splits = "guess", 3, ("test",)
    rules = "Guess."
    splits = {split: {str(i): f"letter {split}-{i}" for i in range(4)}
              for split in ("train", "test")}

    def start(self, letter):
        return letter

    def step(self, reply):
        return Step(f"not {reply}", float(reply == "c"), reply == "c")

    def expert(self):
        replies = iter("ac")
        return lambda observation: next(replies)


def parsed(*argv):
    return parse([*map(str, argv)], Settings, METHODS, environments.environment)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(*flags) -> the finished run, in tmp_path/run."""
    monkeypatch.setattr(run_module, "make", lambda name, view, **_: Guess(view))
    monkeypatch.setattr(endpoints.random, "uniform", lambda low, high: 0.0)

    def begin(*argv):
        s, options = parsed("--out", tmp_path / "run", *argv)
        if s.method == "chat":
            monkeypatch.setitem(models.MODELS, s.model, models.MODELS["tiny"])
        r = Run(s, options)
        METHODS[s.method][0](r)
        return r

    return begin


@pytest.fixture
def run(start, endpoint):
    """run(*flags) -> the finished run at the endpoint."""
    return lambda *argv: start("--model", endpoint.url, "--model-name", "m", "--slots", 1,
                               "--examples", 0, *argv)


def rows_of(run):
    return read_jsonl(run.folder / "eval-0-target-test.jsonl")


def numbers_of(run):
    return json.loads((run.folder / "phases.json").read_text())["eval-0-target-test.jsonl"]


@pytest.fixture
def call(endpoint, monkeypatch):
    """call(*faults) calls the endpoint once, after these faults. It returns the reply and its
    usage, or the error. `tries` and `waits` are those of the call."""
    def ask(*faults, url=endpoint.url):
        endpoint.faults, before = list(faults), len(endpoint.seen)
        ask.waits, asked = [], endpoints.Endpoint(url, "m", 0, 256)
        monkeypatch.setattr(asked.stopped, "wait", ask.waits.append)
        try:
            return asked(ASKED)
        except (EndpointError, ContextFull) as error:
            return error, {}
        finally:
            ask.tries = len(endpoint.seen) - before

    return ask


def answer(usage=None, finish_reason="stop", **message):
    return 200, json.dumps(dict(choices=[dict(message=message, finish_reason=finish_reason)],
                                usage=usage)), {}


def choice(**fields):
    return 200, json.dumps(dict(choices=[fields])), {}


# --------------------------------------------------------------------------------- evaluations


@pytest.mark.parametrize("slots", [1, 9])
def test_an_evaluation_has_the_rows_and_numbers_of_any_other(endpoint, run, slots):
    endpoint.answer = lambda messages: "c" if "test-1" in messages[0]["content"] else "x"
    r = run("--slots", slots)
    rows = rows_of(r)
    assert [(e["task"], e["reward"], e["turns"], e["ended"]) for e in rows] == [
        ("guess-test-0", 0.0, 3, "turn_limit"), ("guess-test-1", 1.0, 1, "done"),
        ("guess-test-2", 0.0, 3, "turn_limit"), ("guess-test-3", 0.0, 3, "turn_limit")]
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"] * 3
    assert rows[0]["ids"] == rows[0]["action_mask"] == rows[0]["log_probs"] == []
    found = numbers_of(r)
    assert (found["reward"], found["success"], found["episodes"]) == (0.25, 0.25, 4)
    assert (found["requests"], found["prompt_tokens"], found["completion_tokens"]) == (10, 1000, 70)
    assert found["retries"] == found["cut_replies"] == 0 and "refused" not in found


def test_the_request_is_that_of_the_protocol(endpoint, run):
    endpoint.answer = lambda messages: "Observation: I am the shop" if len(messages) == 1 else "c"
    r = run("--max-new-tokens", 50)
    (path, authorization, body), (_, _, second) = endpoint.seen[:2]
    assert path == "/v1/chat/completions" and authorization == f"Bearer {KEY}"
    assert body == dict(model="m", temperature=0, max_tokens=50,
                        messages=[dict(role="user", content="Guess.\n\nletter test-0")])
    assert second["messages"][1:] == [dict(role="assistant", content="(no reply)"),
                                      dict(role="user", content="not ")]
    assert [m["content"] for m in rows_of(r)[0]["messages"]][1:3] == ["", "not "]  # as it was


def test_examples_are_expert_conversations_and_the_rules_stand_once(endpoint, run, monkeypatch, tmp_path):
    splits = Guess.splits | dict(train=Guess.splits["train"] | {"0": "letter test-3"})  # evaluated
    monkeypatch.setattr(Guess, "splits", splits)
    run("--examples", 2)
    assert [(m["role"], m["content"]) for m in endpoint.seen[0][2]["messages"]] == [*zip(
        ["user", "assistant"] * 4 + ["user"],
        ["Guess.\n\nletter train-1", "a", "not a", "c", "letter train-2", "a", "not a", "c",
         "letter test-0"])]
    monkeypatch.setattr(Guess, "splits", splits | dict(train={"1": "letter train-1"}))
    with pytest.raises(UsageError, match="expert trajectories that succeed on tasks that are not evaluated: 1; lower --examples"):
        run("--examples", 2, "--out", tmp_path / "again")


def test_rollouts_are_played_apart_and_their_best_is_reported(endpoint, run):
    replies = iter("cxxxxxxxxx" + "c" * 9)  # of task 0 the first rollout, of 2 and 3 both succeed
    endpoint.answer = lambda messages: next(replies)
    found = numbers_of(r := run("--rollouts", 2, "--temperature", 0.5))
    assert {body["temperature"] for _, _, body in endpoint.seen} == {0.5}
    assert [(e["task"][-1], e["rollout"], e["reward"]) for e in rows_of(r)] == [
        ("0", 0, 1), ("0", 1, 0), ("1", 0, 0), ("1", 1, 0), ("2", 0, 1), ("2", 1, 1), ("3", 0, 1),
        ("3", 1, 1)]
    assert (found["reward"], found["best"], found["best_success"]) == (5 / 8, 3 / 4, 3 / 4)


def test_a_conversation_longer_than_the_endpoint_reads_ends_after_a_whole_turn(endpoint, run):
    endpoint.answer = lambda messages: "x"
    full = 400, "'max_tokens' is too large: 256. This model's maximum context length is 2048 tokens", {}
    endpoint.faults = [False, full] * 4
    r = run()
    assert {(e["ended"], e["turns"], len(e["messages"])) for e in rows_of(r)} == {("context_limit", 1, 3)}


def test_a_first_request_that_can_never_fit_is_refused(endpoint, run):
    endpoint.faults = [(400, "max_tokens: 256 > 128, which is the maximum allowed number", {})]
    with pytest.raises(UsageError, match="^guess-test-0: .*first request.*--max-new-tokens 256"):
        run()
    endpoint.faults = [(400, "the prompt is too long: 900 tokens", {})] * 4
    with pytest.raises(UsageError, match="first request"):  # of all tasks: nothing is scored
        run("--refused", "zero")
    endpoint.faults = [(400, "the prompt is too long: 900 tokens", {}), *[False] * 3]
    assert [(e["reward"], e["ended"]) for e in rows_of(run("--refused", "zero"))] == [
        (0.0, "refused"), *[(1.0, "done")] * 3]


@pytest.mark.parametrize("read, cut", [
    ([300, 310, 320], 0), ([300, 300, 300], 2), ([300, 290, 310], 1), ([300, 0, 0], 0)])
def test_a_truncated_prompt_is_reported_once_and_counted(endpoint, run, capsys, read, cut):
    """ollama truncates prompts that are longer than num_ctx without an error. A task has three
    turns. The run is stopped in the third, and resumes."""
    said = [answer(content="x", usage=dict(prompt_tokens=n)) for n in read * 4]
    endpoint.faults = [*said[:2], (401, "no", {})]
    with pytest.raises(envs.EnvError, match="401"):
        run()
    endpoint.faults = said[2:]
    r = run()
    assert numbers_of(r)["cut_prompts"] == 4 * cut and [e["turns"] for e in rows_of(r)] == [3] * 4
    assert bool(cut) <= capsys.readouterr().err.count("server truncates it") <= 2 * cut


# -------------------------------------------------------------------- stopped, refused, changed


def test_a_stopped_run_goes_on_and_pays_for_no_answer_twice(endpoint, run):
    def break_down(messages):
        if "test-2" not in messages[0]["content"]:
            return "c"
        endpoint.faults = [(401, f"out of money {KEY}", {})] if len(messages) == 3 else []
        return "x"

    endpoint.answer = break_down
    with pytest.raises(envs.EnvError, match="out of money"):
        run()
    paid = len(endpoint.seen)
    assert paid == 5  # two tasks, two turns of test-2, the refusal
    with pytest.raises(UsageError, match="model_name"):  # what is paid for is another model's
        run("--model-name", "another")
    endpoint.answer = lambda messages: "c"
    r = run()
    asked = [body["messages"][0]["content"][-6:] for _, _, body in endpoint.seen[paid:]]
    assert asked == ["test-2", "test-3"] and len(rows_of(r)) == 4
    assert [m["content"] for m in rows_of(r)[2]["messages"][1::2]] == ["x", "x", "c"]
    assert numbers_of(r)["requests"] == 6
    texts = [file.read_text() for file in r.folder.rglob("*") if file.is_file()]
    assert len(texts) > 3 and not any(KEY in text for text in texts)


def test_kept_answers_are_only_taken_where_the_environment_shows_what_it_showed(endpoint, run, monkeypatch):
    endpoint.answer = lambda messages: "x"
    r = run()
    (r.folder / "eval-0-target-test.jsonl").unlink()
    other = Guess.start
    monkeypatch.setattr(Guess, "start", lambda self, letter: other(self, letter) + (
        " below 30 dollars" if letter == "letter test-1" else ""))
    endpoint.answer, paid = (lambda messages: "c"), len(endpoint.seen)
    rows = rows_of(run())
    assert [body["messages"][0]["content"] for _, _, body in endpoint.seen[paid:]] == [
        "Guess.\n\nletter test-1 below 30 dollars"]
    assert [e["reward"] for e in rows] == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_task_that_is_refused_in_any_turn_ends_the_run_or_counts_as_nothing(
        endpoint, run, monkeypatch, turn):
    """What the task earned before is taken back."""
    monkeypatch.setattr(Guess, "step", lambda self, reply: Step("half of it", 0.5, False))
    endpoint.faults = [False] * (3 + turn) + [(400, "against our policy", {})]
    with pytest.raises(envs.EnvError, match="^guess-test-1: .*against our policy.*--refused zero"):
        run()
    endpoint.faults, paid = [(422, "flagged", {})], len(endpoint.seen)
    r = run("--refused", "zero")
    assert len(endpoint.seen) == paid + 1 + 3 + 3  # the first task is paid for
    half = (0.5, "turn_limit", 3)
    assert [(e["reward"], e["ended"], e["turns"]) for e in rows_of(r)] == [
        half, (0.0, "refused", turn), half, half]
    found = numbers_of(r)
    assert (found["reward"], found["episodes"], found["refused"]) == (0.375, 4, 1)


def test_a_wrong_key_refuses_no_task_and_ends_all_episodes(endpoint, run):
    endpoint.faults = [(401, "who are you?", {})] + [30.0] * 99  # the others get no answer meanwhile
    with pytest.raises(envs.EnvError, match="status 401: who are you"):
        run("--slots", 4, "--refused", "zero")
    assert len(endpoint.seen) <= 4


# --------------------------------------------------------------------------------- the requests


LATER, PAST = "Wed, 21 Oct 2099 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT"


def test_waits_grow_whatever_an_endpoint_asks_for(call):
    for asked, least in [
            (None, 0), ("0", 0), ("-5", 0), (PAST, 0), ("soon", 0), ("", 0), ("nan", 0), ("1e9", 0),
            ("9" * 5000, 0), ("Wed, 99 Oct 99999", 0), ("7", 7), (" 7 ", 7), ("999", 120), (LATER, 120)]:
        for status in 408, 429, 500, 503:
            headers = {} if asked is None else {"Retry-After": asked}
            reply, used = call(*[(status, "slow down", headers)] * 5)
            assert reply == "c" and used["retries"] == len(call.waits) == 5
            for k, wait in enumerate(call.waits):
                assert max(least, 2**k / 2) <= wait <= max(least, 2**k), (asked, status)


HALF = "half an ans"
PASSING = [  # transient errors, as a fault or in a response of the endpoint
    None, "cut", (503, "no", {}), (200, "half a", {}), (200, "[" * 100_000, {}), (200, '{"choices": []}', {}),
    (200, '{"error": "we are sorry"}', {}), answer(content=HALF, finish_reason="abort"),
    answer(content=HALF, error=dict(message="late", code=502)), answer(content=dict(text=HALF)),
    answer(content="", finish_reason="network_error"),
    choice(finish_reason="stop", error="overloaded", message=dict(content=HALF)),
    choice(finish_reason="stop", message=None), choice(finish_reason="stop", text=HALF)]


def test_transient_errors_are_retried_and_the_last_one_is_raised(call):
    for fault in PASSING:
        reply, used = call(*[fault] * 3)
        assert (reply, used["retries"], call.tries) == ("c", 3, 4), fault
        error, _ = call(*[fault] * 8)
        assert type(error) is EndpointError and "(attempt 8)" in str(error) and call.tries == 8, fault


def test_a_permanent_error_is_one_line_without_the_key(call):
    for fault, message in [
            ((401, f"Incorrect API key: {KEY}", {}), "status 401: Incorrect API key: ***"),
            ((302, "", {"Location": "http://elsewhere"}), "status 302"),
            ((200, "x" * 1_000_001, {}), "the response is longer than 1,000,000 bytes"),
            ((401, "x" * 190 + KEY, {}), "status 401: xxx"), ((400, "a\nb", {}), "status 400: a b")]:
        error, _ = call(fault)
        assert isinstance(error, EndpointError) and message in str(error) and call.tries == 1
        assert KEY[:5] not in str(error) and "\n" not in str(error)


REFUSED = [
    answer(content=None, finish_reason="content_filter"), answer(content=HALF, finish_reason="content_filter"),
    answer(content=None, refusal="I cannot help with that"),
    answer(content=[dict(type="refusal", refusal="no")]), answer(content=None, finish_reason="OTHER"),
    (200, '{"error": {"code": 403, "message": "flagged"}}', {}), (403, "flagged", {}), (451, "no", {}),
    answer(content="I look:", tool_calls=[dict(function=dict(name="ls"))], finish_reason="tool_calls"),
    answer(content=None, function_call=dict(name="ls"))]
PART = dict(type="reasoning", text="so")
ONLY_THOUGHTS = [
    answer(content="", my_own_thoughts="so click c"), answer(content=[PART]),
    answer(content="", finish_reason="length", usage=dict(
        completion_tokens=9, completion_tokens_details=dict(reasoning_tokens=9))),
    answer(content="<think>so click", finish_reason="length"), answer(finish_reason="MAX_TOKENS"),
    answer(content=[dict(type="text", text="so", thought=True)])]


def test_a_response_without_a_reply_is_refused_or_only_reasoning(call):
    for said in REFUSED:
        assert type(call(said)[0]) is NotAnswered and call.tries == 1, said
    for said in ONLY_THOUGHTS:
        assert type(call(said)[0]) is OnlyThoughts and call.tries == 1, said


def test_thoughts_alone_and_empty_replies_are_counted_and_told(endpoint, run, capsys):
    endpoint.faults = [ONLY_THOUGHTS[0]]
    with pytest.raises(envs.EnvError, match="^guess-test-0: .*reasoning.*--max-new-tokens"):
        run()
    endpoint.faults = [ONLY_THOUGHTS[0], answer(content=None), answer(content=" \n"), False, ONLY_THOUGHTS[0]]
    r = run("--refused", "zero")
    assert [(e["reward"], e["ended"]) for e in rows_of(r)] == [
        (0.0, "refused"), (1.0, "done"), (0.0, "refused"), (1.0, "done")]
    found = numbers_of(r)
    assert found["refused"] == found["only_thoughts"] == found["empty_replies"] == 2
    assert capsys.readouterr().err.count("such requests are counted") == 2  # once a process
    assert len((r.folder / "answers.jsonl").read_text().splitlines()) == 4


TEXT = dict(type="text", text="c")
READ = [  # (answer, reply, tokens)
    (answer(content=[TEXT, dict(type="text", text="d")], usage={}), "cd", 0), (answer(content=["c", TEXT]), "cc", 0),
    (answer(content="c", usage=dict(prompt_tokens=5, completion_tokens=-3)), "c", 5),
    (answer(content=f"your key is {KEY}"), "your key is ***", 0), (answer(content="c\ud83d"), "c\ufffd", 0),
    (answer(content="", error=None, finish_reason=None), "", 0),
    (answer(content="c", refusal=None, tool_calls=[], function_call=None, finish_reason="eos"),
     "c", 0)]


def test_replies_with_other_fields_are_replies(call):
    for said, reply, tokens in READ:
        found, used = call(said)
        assert (found, call.tries, used["cut_replies"]) == (reply, 1, 0), said
        assert used["prompt_tokens"] + used["completion_tokens"] == tokens
        assert used["unreported"] == (tokens == 0)
    for ends in "length", "max_tokens", "model_context_window_exceeded":
        assert call(answer(content="a b", finish_reason=ends))[1]["cut_replies"] == 1


# ------------------------------------------------------------------------ thoughts and end tokens

# The content of a response, and the reply in it; None: there is only reasoning.
DRAFT = "```python\napis.pay()\n```"
CODE = "```python\nprint(1 < 2)\n```"
ANALYSIS = "<|channel|>analysis<|message|>Action: submit"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
THOUGHTS = [
    ("The Observation: says so. Action: submit</think>\n\nc", "c"),
    (f"<think>First {DRAFT}</think>\n{CODE}", CODE), (f"First {DRAFT} </think>{CODE}", CODE),
    *((f"<{name}>a\nb</{name}>c", "c") for name in ("think", "THOUGHT", "seed:new_reasoning_step")),
    *((f"{opens}a Action: submit{closes}c", "c") for opens, closes in (
        ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"), ("<｜think｜>", "<｜/think｜>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>\n<|begin_of_solution|>"),
        ("<|channel>thought\n", "<channel|>"), (' \n<think lang="en" n=1>', "</think >"),
        ("", "<|END_THINKING|>"), ("<thinking>", "</think>"), ('A 5" mug', "</think>"))),
    ('\\"<think>a</think>c"', '\\"c"'),  # an escaped quote opens no string
    ("<think></think>c", "c"), ("<think/>c", "c"), ("<think>a</think><think>b</think>c", "c"),
    ("<think>a <think>b</think> Action: submit</think>c", "c"),
    ("<think>a <reasoning>b</reasoning> Action: submit</think>c", "c"),
    ("Sure. <think>Action: submit</think>c", "Sure. c"), ("c\n<think>Action: submit", "c"),
    (f"{ANALYSIS}<|end|>{ANALYSIS}<|end|>{FINAL}c<|return|>", "c"), (f"{ANALYSIS}{FINAL}c", "c"),
    (f"Action: submit<|end|>{FINAL}c", "c"), ("<|channel|>final <|constrain|>json<|message|>c", "c"),
    ("analysisAction: submit.assistantfinalc", "c"),
    *((f"c{end}", "c") for end in (
        "</s>", "<eos>", "<end_of_turn>", "<turn|>", "[EOT]", "[/INST]", "<|never_seen|>\n",
        "<｜end▁of▁sentence｜>", "<|im_end|>\n<|im_start|>user\nd", "<|im_start|>assistant\nd")),
    *((f"{start}c<|im_end|>", "c") for start in (
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|assistant|>")),
    ("<think>a<|im_end|></think>c", "c"), ("<|im_start|>user\nd", ""),
    *((text, None) for text in (
        "<think>Action: submit</think>\n", "Action: submit</think>", "[THINK]Action: submit",
        f"{ANALYSIS}<|end|>{FINAL}"))]
# Marks inside the actions, strings and code of an agent stay unchanged.
PLAIN = ["SELECT a FROM t WHERE b <reason AND c> 2", "search[<think> mug]", "click[thoughts]",
         "click[big [THINK] poster]", "SELECT * FROM t WHERE a = '</think>'", " c \n",
         "x = [reason]\nprint(x)", "<s>10</s> 8", '{"text": "say \\"<think>\\" to <|im_end|>"}',
         "`</think>` ends it", '<tool_call>\n{"name": "think"}\n</tool_call>', "click[END]",
         "I don't think it's <i>it</i>", "if a<|b: pass"]


def test_reasoning_and_end_tokens_are_removed_from_a_reply(call):
    for text, reply in THOUGHTS + [(text, text) for text in PLAIN]:
        parts = [dict(type="text", text=text[:9]), PART, dict(type="text", text=text[9:])]
        for said in dict(content=text), dict(content=text, reasoning="Action: submit"), dict(content=parts):
            found, _ = call(answer(**said))
            if reply or said == dict(content=text) and reply is not None:
                assert found == reply, said
            else:
                assert type(found) is OnlyThoughts, said


# ------------------------------------------------------------------------- lengths and parameters

TOO_LONG = [  # messages of providers, one for each part of the pattern; several are from public reports
    "This model's maximum context length is 4096 tokens. However, you requested 5048 tokens",
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens",
    "Please reduce the length of the messages or completion. Current length is 9 while limit is 8",
    "the request exceeds the available context size, try increasing it", "Prompt exceeds max length",
    "too many tokens: total number of tokens in the prompt cannot exceed 4081",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
    "Range of input length should be [1, 30720]", "Input is too long for requested model.",
    "the input token count is 105 but model only supports up to 100. Reduce the input token count",
    "max_tokens must be at least 1, got -204.", "Invalid 'messages[1].content': string too long",
    '{"code": "context_length_exceeded"}', "{'type': 'exceed_context_size_error', 'code': None}"]
NOT_LONG = [  # (status, text, tries)
    (413, "Request too large for m on tokens per minute (TPM): Limit 6000, Requested 6627", 1),
    (400, "Token quota exceeded", 1), (400, "Request contains an image too large to process", 1),
    (400, "Unknown parameter: 'context_window'.", 1), (400, "request header too long", 1),
    (400, "prompt must be at least 1 token long", 1), (400, "'aa' is too long - 'messages.1.name'", 1),
    (429, "Throttling error: Too many tokens, please wait before trying again.", 8),
    (503, "The request queue is too long", 8), (400, "Invalid 'user': string too long", 1), (401, "your key is too long", 1)]


QUOTE = "message is longer than the maximum, and temperature should only be 1"
JUDGED = [  # (the body of an error, ContextFull or NotAnswered): code, then type, param, message
    (dict(message=QUOTE, code="content_filter", param="prompt"), NotAnswered),
    (dict(message=QUOTE, code=400, innererror=dict(code="ResponsibleAIPolicyViolation")), NotAnswered),
    (dict(message=QUOTE, type="content_policy_violation", code=None), NotAnswered),
    (dict(message=QUOTE, code="insufficient_quota"), NotAnswered),
    (dict(message="no", code="context_length_exceeded"), ContextFull),
    (dict(message="no", code="400", type="exceed_context_size_error"), ContextFull),
    (dict(message=QUOTE, param="user"), NotAnswered), (dict(message=f"Our policy: {QUOTE}"), NotAnswered),
    *((dict(message=f"We reject {opens}{QUOTE}{closes}!", type="BadRequestError", code=400), NotAnswered)
      for opens, closes in ('""', "''", "``", "“”", "‘’", "«»", ("```\n", "\n```"), ("'I don't say ", "'"),
                            ('"', ""))),
    (dict(message="Bad: " + json.dumps([dict(role="user", content=QUOTE)])), NotAnswered),
    (dict(message=f"Bad: {[dict(role='user', content=QUOTE)]}"), NotAnswered),
    (dict(detail=[dict(loc=["body", "messages", 0], msg="no text", input=QUOTE)]), NotAnswered),
    *((dict(message=f"XException - {nested}. Fallbacks=None", code="400"), kind)  # as proxies forward it
      for body, kind in ((dict(message="the prompt is too long", code=400), ContextFull),
                         (dict(message=QUOTE, code="content_filter"), NotAnswered))
      for nested in (json.dumps(dict(error=body)), dict(error=body), f"b'{json.dumps(dict(error=body))}'")),
    (dict(metadata=dict(raw='{"error": {"message": "the prompt is too long"}}')), ContextFull)]


def test_an_error_that_quotes_the_prompt_is_classified_by_its_code_first(call):
    for body, kind in JUDGED:
        for text in (json.dumps(body), json.dumps(dict(error=body)), json.dumps([dict(error=body)])):
            assert type(call((400, text, {}))[0]) is kind and call.tries == 1, body
    for status in 200, 500:  # a filter never passes
        for text in dict(error=JUDGED[0][0]), dict(choices=[dict(error=JUDGED[0][0])]):
            assert type(call((status, json.dumps(text), {}))[0]) is NotAnswered and call.tries == 1


DETAILS = "completion_tokens_details"


@pytest.mark.parametrize("content, usage, tokens", [  # context tokens, by hand
    ("c", dict(prompt_tokens=100, completion_tokens=4000, **{DETAILS: dict(reasoning_tokens="3990")}), 110),
    ("c", dict(prompt_tokens=100, completion_tokens=4000, reasoning_tokens=3990), 110),
    *(("<think>so</think>Action: c", dict(prompt_tokens=100, completion_tokens=4000, **{DETAILS: details}), 103)
      for details in (None, "?", dict(reasoning_tokens=0))),  # 9 bytes
    ("Action: c", dict(prompt_tokens=100, completion_tokens=4000), 103),  # hidden: 4000 tokens of 9 bytes
    ("Action: c", dict(prompt_tokens=100, completion_tokens=7), 107),
    ("Action: c", dict(prompt_tokens=100, completion_tokens=9, **{DETAILS: dict(reasoning_tokens=99)}), 103),
    *(("Action: c", usage, 1 + 3) for usage in (  # of "?" and "Action: c"
        None, "?", dict(prompt_tokens=0, completion_tokens=0)))])
def test_context_tokens_exclude_reasoning_and_zero_usage_is_estimated(call, content, usage, tokens):
    _, used = call(answer(content=content, usage=usage))
    assert used["context_tokens"] == tokens and call.tries == 1
    assert used["unreported"] == (tokens == 4)


@pytest.mark.parametrize("usage", [
    None, dict(prompt_tokens=0, completion_tokens=0), dict(prompt_tokens=95, completion_tokens=4000)])
def test_max_tokens_end_an_episode_by_what_the_messages_take(endpoint, run, tmp_path, usage):
    """A reply of 400 bytes is estimated as 100 tokens, and one of 1 byte as 1."""
    for size, end in (400, ("context_limit", 1)), (1, ("turn_limit", 3)):
        endpoint.faults = [answer(content="x" * size, usage=usage, reasoning="so")] * 99
        r = run("--max-tokens", 100, "--max-new-tokens", 50, "--out", tmp_path / str(size))
        assert {(e["ended"], e["turns"]) for e in rows_of(r)} == {end}


class Steps:
    """A pattern that counts the characters that its searches pass."""

    def __init__(self, pattern):
        self.pattern, self.count = pattern, 0

    def search(self, text, at=0):
        match = self.pattern.search(text, at)
        self.count += (match.end() if match else len(text)) - at
        return match


def test_a_reply_is_read_in_linear_time(monkeypatch):
    """Each search begins where the last one ended, and the patterns of tags have no unbounded repeat."""
    for mark in ("[", "<think>", "[think]", " [THINK]", "</think>", "<|im_start|>", "<|channel|>", '"\\', "'a ",
                 "[[a]", "<think a='b' ", "<|channel|>final<|message|>", "[reason]</think>", "`", "<s>"):
        steps = Steps(endpoints.MARKS)
        text = mark * (20_000 // len(mark))
        with monkeypatch.context() as patch:
            patch.setattr(endpoints, "MARKS", steps)
            endpoints.reply_in(text)
        assert steps.count <= len(text), mark
    for pattern in endpoints.TAG, endpoints.FINAL:
        assert not re.findall(r"(?<!\\)[*+]", pattern.replace("(?:\\|[^", ""))


def test_errors_of_length_are_recognised_in_any_wording(call):
    for text in TOO_LONG:
        for status in 400, 413, 422, 500:
            fault = dict(message=text, code=status)
            for said in (status, text), (200, json.dumps(dict(error=fault))), (
                    200, json.dumps(dict(object="error", **fault))), (
                    200, json.dumps(dict(choices=[dict(error=fault, message=dict(content=""))]))), (
                    200, json.dumps(dict(choices=[dict(message=dict(content="", error=fault))]))):
                assert type(call((*said, {}))[0]) is ContextFull and call.tries == 1, said
    for status, text, tries in NOT_LONG:
        assert isinstance(call(*[(status, text, {})] * 8)[0], EndpointError), text
        assert call.tries == tries, text


RENAMED = "Unsupported parameter: 'max_tokens' ... Use 'max_completion_tokens' instead."
FIELDS = [  # (refusals, the fields that are sent after them)
    *(([text], "max_tokens") for text in (
        "Unsupported value: 'temperature' does not support 0 with this model.",
        "`temperature` is deprecated for this model.",
        '{"detail": [{"type": "extra_forbidden", "loc": ["body", "temperature"], "msg": "Extra inputs '
        'are not permitted", "input": 0}]}',
        '{"error": {"message": "Unsupported parameter", "param": "temperature"}}',
        "temperature: Input should be less than or equal to 1")),
    (["Unrecognized request argument supplied: max_tokens"], "temperature"),
    (["unexpected: temperature", "model m does not accept max_tokens"], ""),
    ([RENAMED], "temperature max_completion_tokens"),
    ([RENAMED, "max_completion_tokens is not supported"], "temperature"),
    ([RENAMED, "temperature: unknown"], "max_completion_tokens")]


def test_a_rejected_field_is_left_out_of_later_requests(endpoint, call, capsys):
    for texts, sent in FIELDS:
        for status in 400, 422:
            endpoint.seen.clear()
            endpoint.faults = [(status, text, {}) for text in texts]
            model = endpoints.Endpoint(endpoint.url, "m", 0, 50)
            assert [model(ASKED)[0], model(ASKED)[0]] == ["c", "c"]
            bodies = [set(body) - {"model", "messages"} for _, _, body in endpoint.seen]
            assert bodies[-2:] == [set(sent.split())] * 2 and len(bodies) == len(texts) + 2, texts
            said = capsys.readouterr().err
            assert said.count("its own default is used") == 2 - len(bodies[-1]), texts
            assert ("refuses temperature" in said) == ("temperature" not in sent), texts
    for text in ("unknown field: 'foo'", "this text about temperature is against our policy",
                 "max_tokens_a_day is not supported"):
        assert text in str(call((400, text, {}))[0]) and call.tries == 1


def test_an_address_may_name_the_whole_path(endpoint, call):
    for address in (endpoint.url, f"{endpoint.url}/", f"{endpoint.url}/chat/completions"):
        call(url=address)
    assert {path for path, _, _ in endpoint.seen} == {"/v1/chat/completions"}
    assert "most addresses end in /v1" in str(call((404, "not here", {}), url=endpoint.url[:-3])[0])


def test_keys(endpoint, call, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "OPENAI_API_KEY is not set" in str(call((401, "who are you?", {}))[0])
    assert endpoint.seen[-1][1] is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as error:
        call()
    assert "secret" not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", "x")  # too short to be a secret that a reply gives away
    endpoint.answer = lambda messages: "search[fox box]"
    assert call()[0] == "search[fox box]"


# ------------------------------------------------------------- an agent that a run has trained


@pytest.fixture
def small(small_model):
    return ("--model", small_model, "--max-tokens", 400, "--max-new-tokens", 5)


def test_a_checkpoint_is_evaluated_as_in_the_run_that_made_it(start, small, tmp_path):
    first = start(*small, "--method", "eto", "--sft-lr", 1e-2, "--iterations", 1)
    again = start("--method", "evaluate", *small, "--model", first.folder / "iter1/target-agent",
                  "--out", tmp_path / "again")
    kept = ("task", "ids", "messages", "reward", "turns", "ended")
    rows, expected = ([[row[key] for key in kept] for row in read_jsonl(r.folder / name)] for r, name in (
        (again, "eval-0-target-test.jsonl"), (first, "eval-1-target-test.jsonl")))
    assert rows == expected and len(rows) == 4
    assert not [p.name for p in again.folder.iterdir() if p.is_dir()]


def test_settings_that_contradict_each_other_are_refused():
    for argv, says in [
            ("--method evaluate --model tiny --sft-lr 1", "--sft-lr is not read by --method evaluate"),
            ("--method evaluate --model tiny --rollouts 4", "--temperature 0: all rollouts"),
            ("--method ppo --rollouts 1", "--rollouts 1: PPO compares"),
            ("--method eto --model http://a/v1", "--method eto: an endpoint, .* needs --method chat"),
            ("--model ftp://a/v1 --method chat --model-name m", "needs --method chat, and --method chat"),
            ("--model http://a/v1", "--model-name: give the model's name"),
            ("--model http://a/v1 --model-name m --examples 3", "--examples 3: must be 0, 1 or 2")]:
        with pytest.raises(UsageError, match=says):
            parsed(*argv.split())
    for argv in ("--method", "evaluate"), ("--model", "http://a/v1", "--model-name", "m"):
        for more, expected in ((), (0, 1)), (("--temperature", 1, "--rollouts", 4), (1, 4)):
            s, _ = parsed(*argv, *more)
            assert (s.temperature, s.rollouts) == expected  # greedy unless asked otherwise
