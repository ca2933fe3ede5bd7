"""Requests to a chat endpoint on loopback, its usage and its errors, and the evaluation of an
agent's folder."""

import json
from functools import cache
from threading import Event

import pytest
from conftest import KEY

import engine.run as run_module
import environments
import envs
from common.files import read_jsonl
from common.settings import UsageError, parse
from engine import command, models
from engine.run import Run
from envs import Step
from lab.chat import endpoint as endpoints
from lab.chat.endpoint import EndpointError, NotAnswered, Refused
from lab.page import page
from lab.settings import METHODS, Settings

EVAL = "eval-0-target-test.jsonl"
read_encoder = cache(models.read_encoder)


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
    """start(*flags) runs the program in tmp_path/run. SystemExit has the line of an error."""
    def end(line, status):
        assert status == 2 and "\n" not in line and KEY[:5] not in line
        raise SystemExit(line)

    monkeypatch.setattr(command, "end", end)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run_module, "make", lambda name, view, **_: Guess(view))
    monkeypatch.setattr(endpoints.random, "uniform", lambda low, high: 0.0)  # no waits
    return lambda *flags: command.main([*map(str, ("--out", tmp_path / "run", *flags))], Settings,
                                       Run, METHODS, "bash run.sh ENV")


@pytest.fixture
def run(start, endpoint, monkeypatch):
    """run(*flags) -> the rows and the numbers of a run at the endpoint."""
    monkeypatch.setitem(models.MODELS, endpoint.url, models.MODELS["tiny"])
    monkeypatch.setattr(models, "read_encoder", read_encoder)
    monkeypatch.setattr(models, "parameter_count", lambda config: 1)  # the model is not played

    def begin(*flags):
        r = start("--model", endpoint.url, "--model-name", "m", "--slots", 1, "--examples", 0, *flags)
        return read_jsonl(r.folder / EVAL), r.done[EVAL]

    return begin


def column(name, rows):
    return [row[name] for row in rows]


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


@pytest.mark.parametrize("slots", [1, 9])
def test_an_evaluation_has_the_rows_and_numbers_of_any_other(endpoint, run, tmp_path, slots):
    endpoint.answer = lambda messages: "c" if "test-1" in messages[0]["content"] else "x"
    rows, numbers = run("--slots", slots)
    assert column("task", rows) == [f"guess-test-{n}" for n in range(4)]
    assert column("reward", rows) == [0, 1, 0, 0] and column("turns", rows) == [3, 1, 3, 3]
    assert column("ended", rows) == ["turn_limit", "done", "turn_limit", "turn_limit"]
    assert column("role", rows[0]["messages"]) == ["user", "assistant"] * 3
    assert rows[0]["ids"] == rows[0]["action_mask"] == rows[0]["log_probs"] == []
    expected = dict(reward=0.25, success=0.25, episodes=4, requests=10, prompt_tokens=1000,
                    completion_tokens=70, retries=0, cut_replies=0)
    assert numbers.items() >= expected.items() and "refused" not in numbers
    assert page.make_page(tmp_path / "run")


def test_the_request_is_that_of_the_protocol(endpoint, run):
    endpoint.answer = lambda messages: "Observation: I am the shop" if len(messages) == 1 else "c"
    rows, _ = run("--max-new-tokens", 50)
    opening = dict(role="user", content="Guess.\n\nletter test-0")
    body = dict(model="m", temperature=0, max_tokens=50, messages=[opening])
    assert endpoint.seen[0] == ("/v1/chat/completions", f"Bearer {KEY}", body)
    assert endpoint.seen[1][2]["messages"] == [
        opening, dict(role="assistant", content="(no reply)"), dict(role="user", content="not ")]
    assert column("content", rows[0]["messages"])[1:3] == ["", "not "]  # as it was


def test_examples_are_expert_conversations_and_the_rules_stand_once(endpoint, run, monkeypatch, tmp_path):
    splits = Guess.splits | dict(train=Guess.splits["train"] | {"0": "letter test-3"})  # evaluated
    monkeypatch.setattr(Guess, "splits", splits)
    run("--examples", 2)
    messages = endpoint.seen[0][2]["messages"]
    assert column("role", messages) == ["user", "assistant"] * 4 + ["user"]
    assert column("content", messages) == [
        "Guess.\n\nletter train-1", "a", "not a", "c", "letter train-2", "a", "not a", "c", "letter test-0"]
    monkeypatch.setattr(Guess, "splits", splits | dict(train={"1": "letter train-1"}))
    with pytest.raises(SystemExit, match="expert trajectories that succeed on tasks that are not evaluated: 1; lower --examples"):
        run("--examples", 2, "--out", tmp_path / "again")


def test_rollouts_are_played_apart_and_their_best_is_reported(endpoint, run):
    replies = iter("cxxxxxxxxx" + "c" * 9)  # of task 0 the first rollout, of 2 and 3 both succeed
    endpoint.answer = lambda messages: next(replies)
    rows, numbers = run("--rollouts", 2, "--temperature", 0.5)
    assert {body["temperature"] for _, _, body in endpoint.seen} == {0.5}
    assert column("rollout", rows) == [0, 1] * 4
    assert column("reward", rows) == [1, 0, 0, 0, 1, 1, 1, 1]
    assert numbers.items() >= dict(reward=5 / 8, best=3 / 4, best_success=3 / 4).items()


@pytest.mark.parametrize("read, cut", [
    ([300, 310, 320], 0), ([300, 300, 300], 2), ([300, 290, 310], 1), ([300, 0, 0], 0)])
def test_a_truncated_prompt_is_reported_once_and_counted(endpoint, run, capsys, read, cut):
    """ollama truncates prompts that are longer than num_ctx without an error. A task has three
    turns. The run is stopped in the third, and resumes."""
    said = [answer(content="x", usage=dict(prompt_tokens=n)) for n in read * 4]
    endpoint.faults = [*said[:2], (401, "no", {})]
    with pytest.raises(SystemExit, match="401"):
        run()
    endpoint.faults = said[2:]
    rows, numbers = run()
    assert numbers["cut_prompts"] == 4 * cut and column("turns", rows) == [3] * 4
    assert bool(cut) <= capsys.readouterr().err.count("server truncates it") <= 2 * cut


# ------------------------------------------------------------------------ errors, by status alone

LINE = "Too many tokens, your credit is used up: content_filter"  # it decides nothing
RETRIED = [  # errors that pass; the last ones are responses without a usable choice
    *((status, LINE, {}) for status in (408, 409, 425, 429, 500, 503, 529)), None, "cut",
    answer(content=LINE, finish_reason="error"), answer(content="", finish_reason="error"),
    answer(content="", finish_reason=LINE), answer(content=dict(text=LINE)), answer(content="x", error=LINE),
    *((200, text, {}) for text in (
        LINE, "[" * 100_000, '{"error": "no credit", "code": 400}', '{"choices": []}', '{"choices": [{"text": "c"}]}',
        '{"choices": [{"message": null, "error": "too long"}]}',
        '{"choices": [{"message": {"content": "x"}, "error": {"message": "no credit", "code": 402}}]}'))]
STOPPING = [(status, LINE, {}) for status in (401, 402, 404, 407)]  # of all requests
REFUSED = [  # of the conversation, or of all requests
    *((status, LINE, {}) for status in (302, 400, 403, 405, 413, 422, 451)),
    answer(content=None, finish_reason="content_filter"),
    answer(content="c", finish_reason="content_filter")]


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("fault", [*RETRIED, *STOPPING, *REFUSED])
def test_an_error_costs_no_reward(endpoint, run, tmp_path, fault, before):
    """The server answers some requests as the expert does, and then has a fault, which ends after
    one request, or after the run has stopped."""
    endpoint.answer = play_the_expert
    endpoint.faults = [False] * before + [fault]
    if fault in STOPPING:
        with pytest.raises(SystemExit, match=f"status {fault[0]}: {LINE}"):
            run("--slots", 4)
    rows, _ = run("--slots", 4)
    assert column("reward", rows) == [1] * 4
    assert fault not in RETRIED or len(endpoint.seen) == 8 + 1

    again = "--slots", 4, "--refused", "zero", "--out", tmp_path / "again"
    endpoint.faults = [False] * before + [fault] * 999
    with pytest.raises(SystemExit, match="^http.*resume$"):
        run(*again)
    assert not (tmp_path / "again" / EVAL).exists()
    endpoint.faults = []
    rows, _ = run(*again)
    assert column("reward", rows) == [1] * 4


@pytest.mark.parametrize("task", [0, 2])
@pytest.mark.parametrize("turn, refused", [(0, "zero"), (1, "stop"), (1, "zero")])
@pytest.mark.parametrize("fault", [REFUSED[1], REFUSED[-1], RETRIED[4]])
def test_a_conversation_that_alone_is_refused(endpoint, run, fault, turn, refused, task):
    def respond(body):
        opening, *rest = body["messages"]
        refuses = f"test-{task}" in opening["content"] and len(rest) == 2 * turn
        return fault if refuses else others(body)

    endpoint.answer, endpoint.respond, others = play_the_expert, respond, endpoint.respond
    if turn == 0:
        with pytest.raises(SystemExit, match=f"^guess-test-{task}: http.*; .*--refused zero"):
            run("--slots", 4)
    rows, numbers = run("--slots", 4, "--refused", refused)
    own = rows.pop(task)
    assert (own["reward"], own["turns"]) == (0, turn)
    assert own["ended"] == ("context_limit" if turn else "refused")
    assert column("reward", rows) == [1] * 3
    assert numbers["refused_later" if turn else "refused"] == 1
    assert numbers["requests"] == 8  # in each process, one was repeated


def test_a_resumed_run_pays_for_no_answer_twice_and_writes_no_key(endpoint, run, tmp_path):
    endpoint.answer = play_the_expert
    endpoint.faults = [False] * 5 + [(401, KEY, {})]
    with pytest.raises(SystemExit, match="401"):
        run()
    with pytest.raises(SystemExit, match="model_name"):  # what is paid for is another model's
        run("--model-name", "another")
    assert run()[1]["requests"] == 8 and len(endpoint.seen) == 8 + 1
    texts = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(texts) > 3 and KEY not in "".join(texts)


def test_kept_answers_are_only_taken_where_the_environment_shows_what_it_showed(endpoint, run, monkeypatch, tmp_path):
    endpoint.answer = lambda messages: "x"
    run()
    (tmp_path / "run" / EVAL).unlink()
    monkeypatch.setattr(Guess, "start", lambda self, letter: letter.replace("t-1", "t-1 below 30"))
    endpoint.answer, paid = (lambda messages: "c"), len(endpoint.seen)
    rows, _ = run()
    assert column("reward", rows) == [0, 1, 0, 0]
    (_, _, body), = endpoint.seen[paid:]
    assert body["messages"][0]["content"] == "Guess.\n\nletter test-1 below 30"


def test_a_stop_waits_for_no_request_in_flight(endpoint, run):
    stopped = Event()
    endpoint.respond = lambda body: stopped.wait() and STOPPING[0]
    endpoint.faults = [answer(content="a"), STOPPING[0]]
    with pytest.raises(SystemExit, match=LINE):
        run("--slots", 4, "--refused", "zero")
    stopped.set()
    assert len(endpoint.seen) <= 5


# --------------------------------------------------------------------------------- the requests


@pytest.mark.parametrize("asked, least", [
    (None, 0), ("0", 0), ("soon", 0), ("9" * 5000, 0), ("Wed, 99 Oct 99999", 0), (" 7 ", 7), ("999", 120),
    ("Wed, 21 Oct 2099 07:28:00 GMT", 120)])
def test_waits_grow_whatever_an_endpoint_asks_for(call, asked, least):
    reply, used = call(*[(429, "slow down", {"Retry-After": asked} if asked else {})] * 5)
    assert reply == "c" and used["retries"] == len(call.waits) == 5
    for k, wait in enumerate(call.waits):
        assert max(least, 2**k / 2) <= wait <= max(least, 2**k)


@pytest.mark.parametrize("fault, kind, message", [
    ((401, f"Incorrect API key: {KEY}", {}), EndpointError, "status 401: Incorrect API key: ***"),
    ((403, "x" * 190 + KEY, {}), Refused, "status 403: xxx"),
    ((503, "a\nb", {}), Refused, "status 503: a b (attempt 8)"),
    (30.0, Refused, "raise --timeout 0.05, or lower --slots"),
    (answer(tool_calls=[dict(name="ls")], content="I look:"), NotAnswered, "tool call parser")])
def test_an_error_is_one_line_and_so_is_each_retry(call, capsys, fault, kind, message):
    error, _ = call(*[fault] * 8, timeout=0.05 if fault == 30.0 else 60)
    assert type(error) is kind and message in str(error)
    assert KEY[:5] not in str(error) and "\n" not in str(error)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(call.waits) == 7 * ("attempt 8" in str(error))
    assert all(f"; retry {n} of 7 in " in line for n, line in enumerate(lines, 1))


@pytest.mark.parametrize("accepted, tries, status", [
    ("max_tokens temperature", 1, 400), ("max_completion_tokens temperature", 2, 422), ("max_tokens", 3, 400),
    ("max_completion_tokens", 4, 422)])
def test_the_first_answer_decides_the_body_of_all_requests(endpoint, run, capsys, accepted, tries, status):
    def respond(body):
        fits = {*body} == {"model", "messages", *accepted.split()}
        return answered(body) if fits else (status, LINE, {})

    endpoint.answer, endpoint.respond, answered = play_the_expert, respond, endpoint.respond
    rows, _ = run("--slots", 4)
    assert column("reward", rows) == [1] * 4 and len(endpoint.seen) == tries - 1 + 8
    told = capsys.readouterr().err
    assert told.count("accepts only") == (tries > 1)
    assert ("without temperature" in told) == ("temperature" not in accepted)


def test_an_address_may_name_the_whole_path(endpoint, call):
    for address in (endpoint.url, f"{endpoint.url}/", f"{endpoint.url}/chat/completions"):
        call(url=address)
    assert {path for path, _, _ in endpoint.seen} == {"/v1/chat/completions"}
    assert "most addresses end in /v1" in str(call((404, "no", {}), url=endpoint.url[:-3])[0])


def test_keys(endpoint, call, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "OPENAI_API_KEY is not set" in str(call((401, "no", {}))[0])
    assert endpoint.seen[0][1] is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(UsageError, match="^OPENAI_API_KEY has a character that no key has"):
        call()


# ----------------------------------------------------------------------------------- the replies

TEXT, THOUGHT = dict(type="text", text="c"), dict(type="thinking", thinking="so")

@pytest.mark.parametrize("said", [
    answer(content="", my_own_thoughts="so click c"), answer(content=[THOUGHT]),
    answer(content="", finish_reason="length"), answer(content="<think>so click")])
def test_reasoning_alone_and_empty_replies_are_counted_and_told(endpoint, run, capsys, said):
    for faults, refused in ([said], "stop"), ([said] * 4, "zero"):
        endpoint.faults = faults
        with pytest.raises(SystemExit, match="guess-test-0: .*reasoning.*--max-new-tokens"):
            run("--refused", refused)
    endpoint.faults = [said, answer(content=None), False, answer(content=" \n"), said]
    rows, numbers = run("--refused", "zero")
    assert column("ended", rows) == ["refused", "done", "refused", "done"]
    assert numbers.items() >= dict(refused=2, only_thoughts=2, empty_replies=2, requests=4).items()
    assert capsys.readouterr().err.count("such requests are counted") == 3  # once a process


@pytest.mark.parametrize("said, reply, tokens", [
    (answer(content=[TEXT, THOUGHT, TEXT], usage={}), "cc", 0), (answer(content="c\ud83d"), "c\ufffd", 0),
    (answer(content="c", usage=dict(prompt_tokens=5, completion_tokens=None)), "c", 5),
    (answer(content="", error=None, finish_reason=None), "", 0),
    (answer(content="c", my_thoughts="so", tool_calls=[], finish_reason="eos"), "c", 0)])
def test_replies_with_other_fields_are_replies(call, said, reply, tokens):
    found, used = call(said)
    assert found == reply and used["prompt_tokens"] == tokens
    assert used["unreported"] == (tokens == 0) and not call.waits


OPENINGS = [  # what chat templates put before a reply, and what ended the turn before it
    "", "<s> ", "</s>", " [/INST] ", "</s><s>ASSISTANT: ",                    # Llama 2, Mistral, Vicuna
    "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|python_tag|>",  # Llama 3
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eom_id|>",
    "<|eot|><|header_start|>assistant<|header_end|>\n\n",                     # Llama 4
    "<start_of_turn>model\n", "<end_of_turn>\n<start_of_turn>model\n",  # Gemma
    "<|turn>model\n", "<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>assistant\n",  # Qwen
    "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<pad><pad>",
    "<|assistant|>\n", "<|end|><|assistant|>", "<|im_start|>assistant<|im_sep|>",  # Phi
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|START_THINKING|>submit<|END_THINKING|><|START_RESPONSE|>",             # Cohere
    "<|start_of_role|>assistant<|end_of_role|>", "<think>submit</think><response>",  # Granite
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "<|start|>assistant<|channel|>final<|message|>",                          # GPT-OSS
    "<|channel|>final <|constrain|>json<|message|>", "analysissubmit.assistantfinal",
    "<|channel|>analysis<|message|>submit<|end|><|start|>assistant<|channel|>final<|message|>",
    "<｜Assistant｜>", "<｜end▁of▁sentence｜><｜Assistant｜></think>",  # DeepSeek
    "[gMASK]<sop><|assistant|>\n", "<|assistant|>\n<think></think>\n", "<|begin_of_box|>",  # GLM
    "<|im_assistant|>assistant<|im_middle|>", "◁think▷submit◁/think▷",        # Kimi
    "<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "[THINK]submit[/THINK]", "<seed:eos><seed:bos>assistant\n", "<seed:think>submit</seed:think>",  # Magistral, Seed
    "<extra_id_1>Assistant\n", "[|endofturn|]\n[|assistant|]", "]~b]ai\n",    # Nemotron, EXAONE, MiniMax
    "<|bom|><|assistant|> ", "<role>ASSISTANT</role>", "<|assistant_start|>",  # Jamba, Ling, Apertus
    "<|begin_of_thought|>submit<|end_of_thought|>\n\n<|begin_of_solution|>\n",
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
    ("<|start_header_id|>user<|end_header_id|>\n\nd", False),
    *((text, True) for text in (
        "<think>submit", "<think>submit</think>\n", "submit</think>", "[THINK]submit",
        "c\n<think>submit", "<|channel|>analysis<|message|>submit", "<|channel>thought\nsubmit",
        "<|channel|>analysis<|message|>submit<|end|><|channel|>final<|message|>"))])
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
def test_no_request_is_sent_if_prompt_and_reply_exceed_max_tokens(endpoint, run, size, prompt, turns):
    usage = dict(prompt_tokens=prompt, completion_tokens=4000 * bool(prompt))  # with reasoning
    endpoint.faults = [answer(content="x" * size, usage=usage)] * 99
    rows, _ = run("--max-tokens", 100, "--max-new-tokens", 50)
    assert column("turns", rows) == [turns] * 4 and len(endpoint.seen) == 4 * turns
    assert column("ended", rows) == ["turn_limit" if turns == 3 else "context_limit"] * 4


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


@pytest.mark.parametrize("flags, says", [
    ("--method evaluate --model tiny --sft-lr 1", "--sft-lr is not read by --method evaluate"),
    ("--method evaluate --model tiny --rollouts 4", "--temperature 0: all rollouts"),
    ("--method ppo --rollouts 1", "--rollouts 1: PPO compares"),
    ("--method eto --model http://a/v1", "--method eto: an endpoint, .* needs --method chat"),
    ("--model ftp://a/v1 --method chat --model-name m", "needs --method chat, and --method chat"),
    ("--model http://a/v1", "--model-name: give the model's name"),
    ("--model http://a/v1 --model-name m --timeout 0", "--timeout 0.0: must be above 0"),
    ("--model http://a/v1 --model-name m --examples 3", "--examples 3: must be 0, 1 or 2")])
def test_settings_that_contradict_each_other_are_refused(start, flags, says):
    with pytest.raises(SystemExit, match=says):
        start(*flags.split())


@pytest.mark.parametrize("flags", ["--method evaluate", "--model http://a/v1 --model-name m"])
@pytest.mark.parametrize("more, expected", [("", (0, 1)), ("--temperature 1 --rollouts 4", (1, 4))])
def test_decoding_is_greedy_unless_asked_otherwise(flags, more, expected):
    s, _ = parse(f"{flags} {more}".split(), Settings, METHODS, environments.environment)
    assert (s.temperature, s.rollouts) == expected
