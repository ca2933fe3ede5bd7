"""Requests to a chat endpoint on loopback, its usage and its errors, and the evaluation of an
agent's folder."""

import json
import re
import threading
from functools import partial
from operator import itemgetter

import pytest
from conftest import KEY, refusal, refused, table, wait_until

import engine.run as run_module
import envs
from common.files import read_json, read_jsonl
from engine import command
from envs import Step
from lab.__main__ import main
from lab.chat import endpoint as endpoints
from lab.chat.endpoint import EndpointError

EVAL = "eval-0-target-test.jsonl"


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


def play_the_expert(messages):
    return "a" if len(messages) == 1 else "c"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(*flags) runs the program. Returns the rows and the numbers of its first evaluation.
    SystemExit has the line of an error."""
    def end(line, status):
        assert status == 2 and "\n" not in line and KEY[:5] not in line
        raise SystemExit(line)

    def begin(*flags, out=tmp_path / "run"):
        main([*map(str, ("--out", out, *flags))])
        return read_jsonl(out / EVAL), read_json(out / "phases.json")[EVAL]

    monkeypatch.setattr(command, "end", end)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run_module, "make", lambda name, view, **_: Guess(view))
    monkeypatch.setattr(endpoints.random, "uniform", lambda low, high: 0.0)  # no waits
    return begin


@pytest.fixture
def run(start, endpoint):
    """run(*flags) evaluates the endpoint."""
    return partial(start, "--model", endpoint.url, "--model-name", "m", "--slots", 1,
                   "--examples", 0)


def column(names, rows):
    return [*map(itemgetter(*names.split()), rows)]


@pytest.fixture
def call(endpoint, monkeypatch):
    """call(*faults) calls the endpoint once, after these faults. It returns the reply and its
    usage, or the error. `waits` are those of the call."""
    def ask(*faults, url=endpoint.url, timeout=60):
        endpoint.faults = [*faults]
        ask.waits, asked = [], endpoints.Endpoint(url, "m", 0, 256, timeout)
        monkeypatch.setattr(asked.stopped, "wait", ask.waits.append)
        try:
            return asked([dict(role="user", content="?")])
        except EndpointError as error:
            return error, {}

    return ask


def answer(usage=None, finish_reason="stop", **message):
    return 200, json.dumps(dict(choices=[dict(message=message, finish_reason=finish_reason)],
                                usage=usage)), {}


# --------------------------------------------------------------------------------- evaluations


def test_an_evaluation_has_the_rows_and_numbers_of_any_other(endpoint, run, tmp_path):
    """Three replies are empty, since an observation follows. The protocol has no empty messages."""
    endpoint.answer = lambda messages: "c" if "test-1" in str(messages) else "Observation: my shop"
    rows, numbers = run("--max-new-tokens", 50)
    lost = 0, 3, "turn_limit"
    assert column("reward turns ended", rows) == [lost, (1, 1, "done"), lost, lost]
    expected = dict(reward=0.25, success=0.25, episodes=4, requests=10, prompt_tokens=1000,
                    completion_tokens=70, retries=0, cut_replies=0)
    assert numbers.items() >= expected.items() and "refused" not in numbers
    assert (tmp_path / "run/run.html").exists()

    opening = dict(role="user", content="Guess.\n\nletter test-0")
    body = dict(model="m", temperature=0, max_tokens=50, messages=[opening])
    assert endpoint.seen[0] == ("/v1/chat/completions", f"Bearer {KEY}", body)
    assert endpoint.seen[1][2]["messages"] == [
        opening, dict(role="assistant", content="(no reply)"), dict(role="user", content="not ")]
    assert column("content", rows[0]["messages"])[1:3] == ["", "not "]  # as it was


def test_examples_are_expert_conversations_and_the_rules_stand_once(
        endpoint, run, monkeypatch, tmp_path):
    monkeypatch.setitem(Guess.splits["train"], "0", "letter test-3")  # evaluated
    run("--examples", 2)
    messages = endpoint.seen[0][2]["messages"]
    assert column("role", messages) == ["user", "assistant"] * 4 + ["user"]
    assert column("content", messages) == [
        "Guess.\n\nletter train-1", "a", "not a", "c", "letter train-2", "a", "not a", "c",
        "letter test-0"]
    for task in "23":
        monkeypatch.delitem(Guess.splits["train"], task)
    said = refusal(partial(run, out=tmp_path / "again"), "--examples", 2)
    assert "succeed on tasks that are not evaluated: 1; lower --examples" in said


def test_rollouts_are_played_apart_and_their_best_is_reported(endpoint, run):
    replies = iter("cxxxxxxxxx" + "c" * 9)  # of task 0 the first rollout, of 2 and 3 both succeed
    endpoint.answer = lambda messages: next(replies)
    rows, numbers = run("--rollouts", 2, "--temperature", 0.5)
    assert {body["temperature"] for _, _, body in endpoint.seen} == {0.5}
    assert column("rollout", rows) == [0, 1] * 4
    assert column("reward", rows) == [1, 0, 0, 0, 1, 1, 1, 1]
    assert numbers.items() >= dict(reward=5 / 8, best=3 / 4, best_success=3 / 4).items()


@pytest.mark.parametrize("row", table("""
    [300, 310, 320] -> 0
    [300, 300, 300] -> 2
    [300, 290, 310] -> 1
    [300, 0, 0] -> 0"""))
def test_a_truncated_prompt_is_reported_once_and_counted(endpoint, run, capsys, row):
    """ollama truncates prompts that are longer than num_ctx without an error. A task has three
    turns. The run is stopped in the third, and resumes."""
    read, cut = map(json.loads, row)
    said = [answer(content="x", usage=dict(prompt_tokens=n)) for n in read * 4]
    endpoint.faults = [*said[:2], (401, "no", {})]
    assert "401" in refusal(run)
    endpoint.faults = said[2:]
    rows, numbers = run()
    assert numbers["cut_prompts"] == 4 * cut and column("turns", rows) == [3] * 4
    assert bool(cut) <= capsys.readouterr().err.count("server truncates it") <= 2 * cut


# ------------------------------------------------------------------------ errors, by status alone

# The text of an error, which decides nothing. An error message has its first 200 characters.
LINE = "Too many tokens,\nyour credit is used up: content_filter" + "x" * 135 + KEY
FILTERED = '{"choices": [{"message": {"content": "c"}, "finish_reason": "content_filter"}]}'


def fault_of(text):
    """Returns a fault for `serve`: a status, a fault of the connection, or a response."""
    if text.isdecimal():
        return int(text), LINE, {}
    named = dict(closed=None, cut="cut", slow=30.0, nested=(200, "[" * 100_000, {}))
    return named.get(text, (200, text, {}))


# Errors of all requests, errors of a conversation or of all requests, and errors that pass. The
# responses of the last ones lack a usable choice.
@pytest.mark.parametrize("text, kind, message", table("""
    401 -> EndpointError -> status 401: Too many tokens, your credit
    402 -> EndpointError -> status 402
    404 -> EndpointError -> status 404
    407 -> EndpointError -> status 407
    302 -> Refused -> status 302
    400 -> Refused -> status 400
    403 -> Refused -> status 403: Too many tokens, your credit
    405 -> Refused -> status 405
    413 -> Refused -> status 413
    422 -> Refused -> status 422
    451 -> Refused -> status 451
    {"choices": [{"message": {"content": null}, "finish_reason": "content_filter"}]} -> Refused -> content_filter
    {"choices": [{"message": {"content": "c"}, "finish_reason": "content_filter"}]} -> Refused -> content_filter
    {"choices": [{"message": {"content": "I look:", "tool_calls": [{}]}}]} -> NotAnswered -> tool call parser
    408 -> Refused -> (attempt 8)
    409 -> Refused -> (attempt 8)
    425 -> Refused -> (attempt 8)
    429 -> Refused -> (attempt 8)
    500 -> Refused -> (attempt 8)
    503 -> Refused -> status 503: Too many tokens, your credit is used up: content_filterx
    529 -> Refused -> (attempt 8)
    closed -> Refused -> (attempt 8)
    cut -> Refused -> (attempt 8)
    nested -> Refused -> (attempt 8)
    slow -> Refused -> raise --timeout 0.05, or lower --slots (attempt 8)
    no JSON -> Refused -> (attempt 8)
    {"error": "no credit", "code": 400} -> Refused -> (attempt 8)
    {"choices": []} -> Refused -> (attempt 8)
    {"choices": [{"text": "c"}]} -> Refused -> (attempt 8)
    {"choices": [{"message": null, "error": "too long"}]} -> Refused -> (attempt 8)
    {"choices": [{"message": {"content": {"text": "c"}}}]} -> Refused -> (attempt 8)
    {"choices": [{"message": {"content": "x"}}], "error": "no credit"} -> Refused -> (attempt 8)
    {"choices": [{"message": {"content": "x"}, "error": {"code": 402}}]} -> Refused -> (attempt 8)
    {"choices": [{"message": {"content": "x", "error": "no credit"}}]} -> Refused -> (attempt 8)
    {"choices": [{"message": {"content": "x"}, "finish_reason": "error"}]} -> Refused -> (attempt 8)
    {"choices": [{"message": {"content": ""}, "finish_reason": "too many tokens"}]} -> Refused -> (attempt 8)"""))
def test_the_status_alone_decides_what_an_error_is(call, capsys, text, kind, message):
    """An error is one line, and so is each retry."""
    error, _ = call(*[fault_of(text)] * 8, timeout=0.05 if text == "slow" else 60)
    assert type(error).__name__ == kind and message in str(error)
    assert KEY[:5] not in str(error) and "\n" not in str(error)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(call.waits) == 7 * ("attempt 8" in str(error))
    assert all(f"; retry {n} of 7 in " in line for n, line in enumerate(lines, 1))


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("text", ["401", "400", "403", FILTERED, "429", "closed", "no JSON"])
def test_an_error_costs_no_reward(endpoint, run, tmp_path, text, before):
    """The server answers some requests as the expert does, and then has a fault, which ends after
    one request, or after the run has stopped."""
    endpoint.answer = play_the_expert
    for times in 1, 999:
        endpoint.faults = [False] * before + [fault_of(text)] * times
        again = partial(run, "--slots", 4, "--refused", "zero", out=tmp_path / str(times))
        if times > 1 or text == "401":
            assert re.fullmatch("http.*resume", refusal(again))
            endpoint.faults = []
        rows, _ = again()
        assert column("reward", rows) == [1] * 4


@pytest.mark.parametrize("task", [0, 2])
@pytest.mark.parametrize("turn, ended", [(0, "refused"), (1, "context_limit")])
@pytest.mark.parametrize("text", ["500", "403", FILTERED])
def test_a_conversation_that_alone_is_refused(endpoint, run, text, turn, ended, task):
    def respond(body):
        opening, *rest = body["messages"]
        refuses = f"test-{task}" in opening["content"] and len(rest) == 2 * turn
        return fault_of(text) if refuses else others(body)

    endpoint.answer, endpoint.respond, others = play_the_expert, respond, endpoint.respond
    if turn == 0:
        said = refusal(run, "--slots", 4)
        assert re.fullmatch(f"guess-test-{task}: http.*; .*--refused zero.*", said)
    rows, numbers = run("--slots", 4, "--refused", "stop" if turn else "zero")
    expected = [(1, 2, "done")] * 4
    expected[task] = 0, turn, ended
    assert column("reward turns ended", rows) == expected
    assert numbers["refused_later" if turn else "refused"] == 1
    assert numbers["requests"] == 8  # in each process, one was repeated


def test_a_resumed_run_pays_for_no_answer_twice_and_writes_no_key(
        endpoint, run, monkeypatch, tmp_path):
    """An answer is reused only if the environment shows what it showed."""
    endpoint.answer = play_the_expert
    endpoint.faults = [False] * 5 + [(401, KEY, {})]
    assert "401" in refusal(run)
    assert "model_name" in refusal(run, "--model-name", "another")  # it has not been paid for
    assert run()[1]["requests"] == 8 and len(endpoint.seen) == 8 + 1
    texts = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(texts) > 3 and KEY not in "".join(texts)

    (tmp_path / "run" / EVAL).unlink()
    monkeypatch.setattr(Guess, "start", lambda self, letter: letter.replace("t-1", "t-1 below 30"))
    endpoint.answer = lambda messages: "c"
    rows, _ = run()
    assert column("turns", rows) == [2, 1, 2, 2]
    (_, _, body), = endpoint.seen[9:]
    assert body["messages"][0]["content"] == "Guess.\n\nletter test-1 below 30"


def test_a_stop_waits_for_no_request_in_flight_and_sends_no_other(endpoint, run):
    stopped = threading.Event()
    endpoint.respond = lambda body: stopped.wait() and fault_of("503")
    endpoint.faults = [answer(content="a"), fault_of("401")]
    assert "status 401" in refusal(run, "--slots", 4, "--refused", "zero")
    stopped.set()
    wait_until(lambda: not any("ThreadPool" in thread.name for thread in threading.enumerate()),
               "the threads of the run")
    assert len(endpoint.seen) <= 5


# --------------------------------------------------------------------------------- the requests


@pytest.mark.parametrize("asked, least", [
    (None, 0), ("soon", 0), ("9" * 5000, 0), ("Wed, 99 Oct 99999", 0), (" 7 ", 7), ("999", 120),
    ("Wed, 21 Oct 2099 07:28:00 GMT", 120)])
def test_waits_grow_whatever_an_endpoint_asks_for(call, asked, least):
    reply, used = call(*[(429, "slow down", {"Retry-After": asked} if asked else {})] * 5)
    assert reply == "c" and used["retries"] == len(call.waits) == 5
    for k, wait in enumerate(call.waits):
        assert max(least, 2**k / 2) <= wait <= max(least, 2**k)


@pytest.mark.parametrize("accepted, status, tries, message", table("""
    max_tokens temperature -> 400 -> 1 ->
    max_completion_tokens temperature -> 422 -> 2 -> accepts only requests with max_completion_tokens
    max_tokens -> 400 -> 3 -> accepts only requests with max_tokens and without temperature
    max_completion_tokens -> 422 -> 4 -> accepts only requests with max_completion_tokens and without temperature"""))
def test_the_first_answer_decides_the_body_of_all_requests(
        endpoint, run, capsys, accepted, status, tries, message):
    def respond(body):
        fits = {*body} == {"model", "messages", *accepted.split()}
        return answered(body) if fits else fault_of(status)

    endpoint.answer, endpoint.respond, answered = play_the_expert, respond, endpoint.respond
    rows, _ = run("--slots", 4)
    assert column("reward", rows) == [1] * 4 and len(endpoint.seen) == int(tries) - 1 + 8
    told = capsys.readouterr().err
    assert message in told and told.count("accepts only") == bool(message)


def test_an_address_may_name_the_whole_path(endpoint, call):
    for end in "/", "/chat/completions":
        call(url=endpoint.url + end)
    assert {path for path, _, _ in endpoint.seen} == {"/v1/chat/completions"}
    assert "most addresses end in /v1" in str(call((404, "no", {}), url=endpoint.url[:-3])[0])


def test_keys(endpoint, call, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "OPENAI_API_KEY is not set" in str(call((401, "no", {}))[0])
    assert endpoint.seen[0][1] is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    assert refusal(call).startswith("OPENAI_API_KEY has a character that no key has")


# ----------------------------------------------------------------------------------- the replies

@pytest.mark.parametrize("text", [
    '{"choices": [{"message": {"content": "", "my_own_thoughts": "so click c"}}]}',
    '{"choices": [{"message": {"content": [{"type": "thinking", "thinking": "so click c"}]}}]}',
    '{"choices": [{"message": {"content": ""}, "finish_reason": "length"}]}',
    '{"choices": [{"message": {"content": "<think>so click"}}]}'])
def test_reasoning_alone_and_empty_replies_are_counted_and_told(endpoint, run, capsys, text):
    thought = fault_of(text)
    for policy in "stop", "zero":
        endpoint.faults = [thought] * 4
        said = refusal(run, "--refused", policy)
        assert re.search("guess-test-0: .*reasoning.*--max-new-tokens", said)
    endpoint.faults = [thought, answer(content=None), False, answer(content=" \n"), thought]
    rows, numbers = run("--refused", "zero")
    assert column("ended", rows) == ["refused", "done", "refused", "done"]
    assert numbers.items() >= dict(refused=2, only_thoughts=2, empty_replies=2, requests=4).items()
    assert capsys.readouterr().err.count("such requests are counted") == 3  # once a process


@pytest.mark.parametrize("text, reply, tokens", table(r"""
    {"choices": [{"message": {"content": [{"type": "text", "text": "c"}, {"type": "thinking"}]}}]} -> c -> 0
    {"choices": [{"message": {"content": [{"type": "text", "text": "c"}, {"type": "text", "text": "c"}]}}]} -> cc -> 0
    {"choices": [{"message": {"content": "c\ud83d"}}]} -> c� -> 0
    {"choices": [{"message": {"content": "c"}}], "usage": {"prompt_tokens": 5, "completion_tokens": null}} -> c -> 5
    {"choices": [{"message": {"content": ""}, "error": null, "finish_reason": null}]} -> -> 0
    {"choices": [{"message": {"content": "c", "my_thoughts": "so", "tool_calls": []}, "finish_reason": "eos"}]} -> c -> 0"""))
def test_replies_with_other_fields_are_replies(call, text, reply, tokens):
    found, used = call(fault_of(text))
    assert found == reply and used["prompt_tokens"] == int(tokens)
    assert used["unreported"] == (tokens == "0") and not call.waits


OPENINGS = [  # what chat templates put before a reply, and what ended the turn before it
    "", "<s> ", " [/INST] ", "</s><s>ASSISTANT: ",                     # Llama 2, Mistral, Vicuna
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",     # Llama 3
    "<end_of_turn>\n<start_of_turn>model\n", "<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",  # Gemma
    "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<pad><pad>",     # Qwen
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",   # Cohere
    "<|START_THINKING|>submit<|END_THINKING|><|START_RESPONSE|>",
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",      # Granite
    "<think>submit</think><response>",
    "<|channel|>analysis<|message|>submit<|end|><|start|>assistant<|channel|>final<|message|>",  # GPT-OSS
    "<|channel|>final <|constrain|>json<|message|>", "analysissubmit.assistantfinal",
    "<｜end▁of▁sentence｜><｜Assistant｜></think>", "[gMASK]<sop><|assistant|>\n",  # DeepSeek, GLM
    "<|im_end|><|im_assistant|>assistant<|im_middle|>", "◁think▷submit◁/think▷",  # Kimi
    "[THINK]submit[/THINK]", "<seed:eos><seed:bos>assistant\n", "<seed:think>submit</seed:think>",  # Magistral, Seed
    "<extra_id_1>Assistant\n", "[|endofturn|]\n[|assistant|]", "]~b]ai\n",  # Nemotron, EXAONE, MiniMax
    "<role>ASSISTANT</role>", "<|begin_of_thought|>submit<|end_of_thought|>\n<|begin_of_solution|>\n",  # Ling
    "submit</think>\n\n", "<think>\nsubmit<|im_end|></think>", "<think/>", "<think lang='en'>submit</think >",
    "<think>a</think>submit<think>b</think>"]
ENDS = ["", "</s>", "<end_of_turn>", "<turn|>", "[/INST]", "<|never_seen|>\n",
        "<｜end▁of▁sentence｜>", "<|im_end|>\n<|im_start|>user\nd", "<|im_start|>assistant\nd"]
PLAIN = ["SELECT a FROM t WHERE b <reason AND c> 2", "click[thoughts]", "x = [reason]\nprint(x)",
         '<tool_call>\n{"name": "think"}\n</tool_call>', "if a<|b: pass",
         "model = ai", "assistant_id = 1"]


@pytest.mark.parametrize("opening", OPENINGS)
def test_what_opens_a_reply_is_not_its_end(opening):
    for end in ENDS:
        assert endpoints.reply_in(f"{opening}Action: c{end}")[0] == "Action: c", end
    for text in PLAIN:
        assert endpoints.reply_in(opening + text)[0] == text


@pytest.mark.parametrize("text, reasons", [
    ("<|im_end|>", False), ("<|im_start|>user\nd", False), ("<|user|>\nd", False),
    ("<think>submit</think>\n", True), ("[THINK]submit", True), ("c\n<think>submit", True),
    ("<|channel>thought\nsubmit", True), ("<|channel|>analysis<|message|>submit", True),
    ("<|channel|>analysis<|message|>submit<|end|><|channel|>final<|message|>", True)])
def test_reasoning_and_the_turns_of_others_are_no_reply(text, reasons):
    assert endpoints.reply_in(text) == ("", reasons)


@pytest.mark.parametrize("mark", [
    "<think>", "<|channel|>", "<think a='b' ", "<|channel|>final", "<s> ", " ", "<|im_start|>model\n", "<|", "think"])
def test_a_reply_is_read_in_linear_time(mark):
    """In quadratic time, it would take hours."""
    endpoints.reply_in(mark * (500_000 // len(mark)))


@pytest.mark.parametrize("size, prompt, turns", [
    # The opening has 21 bytes, and an observation 4 more than the reply: 6 + 21 + 22 + 50 <= 100.
    (84, 0, 2), (88, 0, 1), (1, 47, 3), (1, 48, 1)])
def test_no_request_is_sent_if_prompt_and_reply_exceed_max_tokens(
        endpoint, run, size, prompt, turns):
    usage = dict(prompt_tokens=prompt, completion_tokens=4000 * bool(prompt))  # with reasoning
    endpoint.faults = [answer(content="x" * size, usage=usage)] * 99
    rows, _ = run("--max-tokens", 100, "--max-new-tokens", 50)
    ended = "turn_limit" if turns == 3 else "context_limit"
    assert column("turns ended", rows) == [(turns, ended)] * 4 and len(endpoint.seen) == 4 * turns


# ------------------------------------------------------------- an agent that a run has trained


def test_a_checkpoint_is_evaluated_as_in_the_run_that_made_it(start, small_model, tmp_path):
    first, again = tmp_path / "run", tmp_path / "again"
    start("--model", small_model, "--max-tokens", 400, "--max-new-tokens", 5, "--method", "eto",
          "--sft-lr", 1e-2, "--iterations", 1)
    rows, _ = start("--method", "evaluate", "--model", first / "iter1/target-agent", out=again)
    kept = "task ids messages reward turns ended"
    expected = read_jsonl(first / "eval-1-target-test.jsonl")
    assert column(kept, rows) == column(kept, expected) and len(rows) == 4


def test_settings_that_contradict_each_other_are_refused(start):
    chat = "--model http://a/v1 --model-name m"
    refused(start, [
        ("--method evaluate --model tiny --sft-lr 1", "--sft-lr is not read by --method evaluate"),
        ("--method evaluate --model tiny --rollouts 4", "--temperature 0: all rollouts"),
        ("--method ppo --rollouts 1", "--rollouts 1: PPO compares"),
        ("--method eto --model http://a/v1", "an endpoint, http://host:port/v1"),
        ("--model ftp://a/v1 --method chat --model-name m", "--method chat needs an endpoint"),
        ("--model http://a/v1", "--model-name: give the model's name"),
        (f"{chat} --timeout 0", "--timeout 0.0: must be above 0"),
        (f"{chat} --examples 3", "--examples 3: must be 0, 1 or 2")])
