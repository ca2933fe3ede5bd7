"""`run.sh learn`: an agent of one's own trajectories, without an environment."""

import json
import math
import re
from collections import Counter

import pytest
import torch
from conftest import make_tokenizer, plain_log_probs
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
from common.files import read_jsonl
from common.settings import Refused
from lab import learn


def row(task, reward, *replies, **more):
    """A line of the file: a conversation in which these are the assistant's replies."""
    messages = []
    for n, reply in enumerate(replies):
        messages += [dict(role="user", content=f"{task}, page {n}"),
                     dict(role="assistant", content=reply)]
    return dict(task=task, messages=messages, reward=reward) | more


# Two tasks; the best of "a" is its second line, of "b" the first.
ROWS = [row("a", 0.5, "buy", "red"), row("a", 1.0, "search", "buy red"), row("a", 0.25, "leave"),
        row("b", 0.75, "search", "buy"), row("b", 0.75, "search", "wait", "buy")]


@pytest.fixture
def file(tmp_path):
    def write(rows):
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    return write


def encoder():
    return dpo.Encoder(make_tokenizer("chatml"))


def read(path, encoder, max_tokens, dropped):
    return learn.encoded(learn.read_trajectories(path, dropped), path, encoder, max_tokens,
                         dropped)


def sides(rows):
    """Of each pair its kind, and the lines of the file that are chosen and rejected."""
    return [(r["kind"], r["chosen"]["rollout"], r["rejected"]["rollout"]) for r in rows]


def pairs_of(path, dropped):
    played = read(path, encoder(), 4096, dropped)
    return learn.pair_rows(*learn.split(played, 0.0, dropped), learn.coevolve.Settings(), dropped)


def test_pairs_by_hand(file):
    """Of one agent failures are paired with each other, Eq. (6); equals make no pair."""
    dropped = Counter()
    rows = pairs_of(file(ROWS), dropped)
    assert sides(rows) == [("expert>target", 2, 1), ("expert>target", 2, 3),
                           ("failure>failure", 1, 3)]
    assert [r["weight"] for r in rows] == [0.5, 0.5, 1.0]
    assert [r["sft_weight"] for r in rows] == [0.5, 0.5, 0.0]
    assert dropped == {"as good as the expert": 1}


def test_failures_of_two_agents_are_paired_across_them(file):
    """Eq. (8): F_tgt x F_fail; the first agent of the file is the target."""
    rows = [row("a", 1.0, "x", agent="mine"), row("a", 0.5, "y", agent="mine"),
            row("a", 0.25, "z", agent="mine"), row("a", 0.75, "v", agent="theirs")]
    assert sides(pairs_of(file(rows), Counter())) == [
        ("expert>mine", 1, 2), ("expert>mine", 1, 3), ("expert>theirs", 1, 4),
        ("failure>failure", 4, 2), ("failure>failure", 4, 3)]


@pytest.mark.parametrize("agents", [
    ["mine", "theirs", "another's"], ["mine", "theirs", None], ["expert", "mine", "theirs", "x", "y"]])
def test_more_than_two_agents_are_refused(agents, file):
    """Failures of the second and the third would make no pair; who has no name is one, too."""
    rows = []
    for n, agent in enumerate(agents):
        named = {} if agent is None else dict(agent=agent)
        rows.append(row("a", 1.0 - n / 8, "x", **named))
    path = file(rows)
    with pytest.raises(Refused) as refusal:
        learn.read_trajectories(path, Counter())
    text = str(refusal.value)
    assert text.startswith(f"{path}: it has {4 if 'x' in agents else 3} agents, such as mine, theirs, ")
    assert "leave out the others" in text and "\n" not in text
    assert len(learn.read_trajectories(file(rows[:2]), Counter())) == 2


def test_a_demonstration_that_an_agent_beats_is_no_second_agent(file):
    """Failures of the one agent are paired with each other and with it; a task alone has no pair."""
    rows = [row("a", 0.75, "x", agent="expert"), row("a", 1.0, "y", agent="mine"),
            row("a", 0.5, "z", agent="mine"), row("a", 0.25, "v", agent="mine"),
            row("b", 1.0, "x", agent="expert")]
    assert sides(pairs_of(file(rows), Counter())) == [
        ("expert>mine", 2, 3), ("expert>mine", 2, 4), ("expert>expert", 2, 1),
        ("failure>failure", 1, 3), ("failure>failure", 1, 4), ("failure>failure", 3, 4)]


def test_the_best_of_a_task_that_earned_nothing_is_no_expert(file, tmp_path):
    dropped = Counter()
    nothing = [row("c", 0, "x"), row("c", 0.0, "y")]
    played = read(file([*ROWS, *nothing]), encoder(), 4096, dropped)
    experts, others = learn.split(played, 0.0, dropped)
    assert [(t.task, t.reward) for t in experts] == [("a", 1.0), ("b", 0.75)]
    assert {t.task for t in others} == {"a", "b"}
    assert dropped == {"of tasks without an expert": 2}
    # A limit of one's own; what solves its task is an expert all the same.
    experts, _ = learn.split(played, 1.0, dropped)
    assert [t.task for t in experts] == ["a"]
    with pytest.raises(Refused, match="no expert is left: .* lower --expert-min-reward 0.0"):
        learn.main([str(file(nothing)), "--out", str(tmp_path / "none")])


def test_a_file_that_is_no_utf_8_is_refused(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(json.dumps(row("a", 1.0, "grün"), ensure_ascii=False).encode("latin-1"))
    with pytest.raises(Refused, match="mine.jsonl, line 1: 'utf-8' codec can't decode byte"):
        read(path, encoder(), 4096, Counter())


def test_an_agent_that_any_tool_loads(file, small_model, tmp_path, capsys):
    path = file(ROWS)
    out = tmp_path / "agent"
    learn.main([str(path), "--model", str(small_model), "--out", str(out), "--sft-epochs", "3",
                "--sft-lr", "0.001", "--dpo-lr", "0.0001", "--dpo-epochs", "2"])
    said = capsys.readouterr().out
    assert said.startswith("2 experts, 3 pairs (2 expert>target, 1 failure>failure), not used: "
                           "1 as good as the expert\n")

    # SFT takes three steps. The first loss is Eq. (5) of the base on the best of each task.
    log = read_jsonl(out / "train.jsonl")
    assert len(log) == 3 + 2
    base = AutoModelForCausalLM.from_pretrained(small_model)
    nats = 0.0
    tokens = 0
    for best in [ROWS[1], ROWS[3]]:
        ids, mask = encoder().encode(best["messages"], 1)
        nats -= plain_log_probs(base, ids, mask).sum().item()
        tokens += sum(mask)
    assert log[0]["loss"] == pytest.approx(nats / tokens, abs=1e-4)
    assert log[2]["loss"] < log[0]["loss"]

    # Preferences begin at margin 0, where DPO's loss is ln 2 for each pair: 0.5 + 0.5 + 1.
    kinds = log[3]["kinds"]
    assert [kinds[kind]["count"] for kind in kinds] == [2, 1]
    assert [kinds[kind]["margin"] for kind in kinds] == pytest.approx([0, 0], abs=1e-5)
    imitation = 0.1 * kinds["expert>target"]["chosen"]
    assert log[3]["loss"] == pytest.approx((2 * math.log(2) - imitation) / 3, abs=1e-3)
    assert log[4]["loss"] < log[3]["loss"]

    agent = AutoModelForCausalLM.from_pretrained(out)
    before = base.get_output_embeddings().weight
    assert not torch.equal(agent.get_output_embeddings().weight, before)
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert agent.generation_config.eos_token_id == [encoder().end_of_turn]


BAD = dict(role="assistant", content=None)


@pytest.mark.parametrize("line, says", [
    (dict(task="a", reward=1.0), "messages None are no list"),
    (row("a", 1.5, "x"), "reward 1.5 is no number from 0 to 1"),
    (row("a", True, "x"), "reward True is no number"),
    (row("a", math.nan, "x"), "reward nan is no number"),
    (row("a", "1", "x"), "reward '1' is no number"),
    (row(7, 1.0, "x"), "task 7 and agent 'target' have to be names"),
    (row("a", 1.0, "x", agent=None), "agent None have to be names"),
    (row("a", 1.0), "the assistant says nothing"),
    (row("a", 1.0, "x") | dict(messages=ROWS[0]["messages"][1:]), "begins with the assistant"),
    (row("a", 1.0, "x") | dict(messages=["x"]), "no list of turns"),
    (row("a", 1.0, "x") | dict(messages=[*ROWS[0]["messages"], BAD]), "not user and assistant"),
    (row("a", 1.0, None), "None, which is no text"),
    (row("a", 1.0, "x") | dict(messages=[*ROWS[0]["messages"], dict(content="x")]), "turn 5 has the role None"),
])
def test_a_line_that_cannot_be_used_is_refused_in_a_line(file, line, says):
    path = file([ROWS[0], line])
    with pytest.raises(Refused) as refusal:
        read(path, encoder(), 4096, Counter())
    text = str(refusal.value)
    assert text.startswith(f"{path}, line 2: ")
    assert says in text
    assert "\n" not in text


def test_what_is_too_long_is_counted_and_what_follows_the_last_reply_is_not_read(file):
    dropped = Counter()
    asked = dict(role="user", content="the end")
    ends = ROWS[2] | dict(messages=[*ROWS[2]["messages"], asked])
    found = read(file([row("a", 1.0, "x " * 500), ends]), encoder(), 400, dropped)
    assert [t.rollout for t in found] == [2]
    assert found[0].messages == ROWS[2]["messages"]
    assert dropped == {"too long": 1}
    with pytest.raises(Refused, match="no trajectory is left: {'too long': 2}.*--max-tokens 1"):
        read(file(ROWS[:2]), encoder(), 1, Counter())


def test_blank_lines_and_the_mark_of_some_editors_say_nothing(file):
    path = file(ROWS[:2])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n") + b"\n \n")
    found = learn.read_trajectories(path, Counter())
    assert [t.messages for t in found] == [row["messages"] for row in ROWS[:2]]
    assert [t.rollout for t in found] == [1, 3]
    path.write_bytes(path.read_bytes() + b"{\n")
    with pytest.raises(Refused, match=r"mine.jsonl, line 7: Expecting property name.*; give \{task"):
        learn.read_trajectories(path, Counter())


@pytest.mark.parametrize("turns", [0, 1])
def test_a_rollout_whose_context_was_full_before_its_first_reply_is_left_out(file, turns):
    dropped = Counter()
    full = row("a", 0.0, "x", ended="context", steps=0)
    full["messages"] = full["messages"][:turns]
    found = learn.read_trajectories(file([full, *ROWS, full]), dropped)
    assert [t.rollout for t in found] == [2, 3, 4, 5, 6]
    assert dropped == {"too long": 2}


@pytest.mark.parametrize("flags, says", [
    (["--dpo-lr", "0"], "--dpo-lr 0.0: must be above 0"),
    (["--sft-epochs", "0"], "--sft-epochs 0: must be at least 1"),
    (["--out", "."], "--out .: it is not empty"),
    (["--out", __file__], "--out .*: it is not empty"),
])
def test_a_setting_that_is_wrong_is_refused(file, flags, says):
    with pytest.raises(Refused, match=says):
        learn.settings_from([str(file(ROWS)), *flags])


@pytest.mark.parametrize("rows, flags, says", [
    (ROWS, ["--out", "mine.jsonl/agent"], "--out .*agent: nothing can be written there .*another folder"),
    (ROWS, ["--out", "/proc/agent"], "--out /proc/agent: nothing can be written there .*another folder"),
    (None, [], "mine.jsonl: no such file; give one that has a trajectory in each line"),
    ([], [], "mine.jsonl: it has no trajectory with a reply; give {task,"),
    ([ROWS[0], dict(task="a")], [], "mine.jsonl, line 2: reward None is no number")])
def test_what_is_wrong_costs_no_load_of_a_model(rows, flags, says, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn, "Learner", lambda s: pytest.fail("a model is loaded"))
    if rows is not None:
        file(rows)
    with pytest.raises(Refused, match=says):
        learn.main(["mine.jsonl", *flags])


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error, says", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "lower --tokens-per-forward"),
    (MemoryError(), "lower --tokens-per-forward"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: "
                  "you tried to allocate 9 bytes."), "lower --tokens-per-forward"),
    (FULL, "delete that folder"),
    (SafetensorError(f"Error while serializing: I/O error: {FULL}"), "delete that folder"),
    (Refused("wrong;\nmend it"), "wrong; mend it")])
def test_an_error_of_the_machine_is_a_line_whose_remedies_there_are(error, says):
    text = learn.one_line(error)
    assert says in text and "\n" not in text
    assert "goes on" not in text  # it begins again
    flags = {"--out", *(f"--{name.replace('_', '-')}" for name in learn.READS)}
    assert set(re.findall(r"--[a-z-]+", text)) <= flags


def test_a_bug_is_no_line():
    assert learn.one_line(RuntimeError("shapes differ")) is None
