"""`run.sh learn`: training on a file of trajectories, without an environment."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import coevolve
from common.files import read_jsonl
from common.settings import UsageError
from engine.chat import Encoder
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


def read(path, **settings):
    """Returns a run before training, with the trajectories of a file."""
    s = learn.Settings(**settings)
    encoder = Encoder(make_tokenizer("chatml"))
    trajectories, dropped = learn.trajectories_in(path, encoder, s.max_tokens)
    return SimpleNamespace(settings=s, encoder=encoder, trajectories=trajectories, dropped=dropped,
                           main=True, name="", done={}, ids_by_name={}, print=print)


def made_of(path, **settings):
    """Returns the experts and the pairs of a file, and the counts of dropped trajectories of
    both."""
    run = read(path, **settings)
    experts, best = learn.best(run, path)
    played = {}
    for name in dict.fromkeys(t.agent for t in run.trajectories):
        played[name], _ = learn.others(run, path, experts, name)
    pairs, numbers = learn.make_pairs(run, experts, played)
    return experts, pairs, best["dropped"], numbers["dropped"]


def sides(pairs):
    """Returns (kind, line of the chosen trajectory, line of the rejected one) of each pair."""
    return [(pair.kind, pair.chosen.rollout, pair.rejected.rollout) for pair in pairs]


# Eq. (8) pairs each with its expert, and F_tgt x F_fail, the first agent of the file being the
# target; of one agent failures are paired with each other, Eq. (6).
MINE, THEIRS = dict(agent="mine"), dict(agent="theirs")
@pytest.mark.parametrize("rows, expected, weights", [
    (ROWS, [("expert>target", 2, 1), ("expert>target", 2, 3), ("failure>failure", 1, 3)],
     [(0.5, 0.5), (0.5, 0.5), (1.0, 0.0)]),
    ([row("a", 1.0, "x", **MINE), row("a", 0.5, "y", **MINE), row("a", 0.25, "z", **MINE),
      row("a", 0.75, "v", **THEIRS)],
     [("expert>mine", 1, 2), ("expert>mine", 1, 3), ("expert>theirs", 1, 4),
      ("failure>failure", 4, 2), ("failure>failure", 4, 3)], None),
    # A demonstration that an agent beats is no second agent; a task alone has no pair.
    ([row("a", 0.75, "x", agent="expert"), row("a", 1.0, "y", **MINE), row("a", 0.5, "z", **MINE),
      row("a", 0.25, "v", **MINE), row("b", 1.0, "x", agent="expert")],
     [("expert>mine", 2, 3), ("expert>mine", 2, 4), ("expert>expert", 2, 1),
      ("failure>failure", 1, 3), ("failure>failure", 1, 4), ("failure>failure", 3, 4)], None),
    # One text is no pair with itself, whatever it earned, and the others weigh 1 together.
    ([row("a", 1.0, "x", "y"), row("a", 0.25, "x", "y"), row("a", 0.5, "z"), row("a", 0.75, "z")],
     [("expert>target", 1, 3), ("expert>target", 1, 4), ("failure>failure", 3, 2),
      ("failure>failure", 4, 2)], [(0.5, 0.5), (0.5, 0.5), (1 / 3, 0.0), (1 / 3, 0.0)])])
def test_pairs_by_hand(file, rows, expected, weights):
    _, pairs, _, dropped = made_of(file(rows))
    assert sorted(sides(pairs)) == sorted(expected)
    if weights:
        assert [(pair.weight, pair.sft_weight) for pair in pairs] == weights
    assert dropped == ({coevolve.SAME_TOKENS: 2} if weights and len(weights) == 4 else
                       {"as good as the expert": 1} if weights else {})


def test_the_best_of_a_task_that_earned_nothing_is_no_expert(file):
    nothing = [row("c", 0, "x"), row("c", 0.0, "y")]
    experts, pairs, dropped, _ = made_of(file([*ROWS, *nothing]))
    assert [(t.task, t.reward, t.agent) for t in experts] == [
        ("a", 1.0, "expert"), ("b", 0.75, "expert")]
    assert {pair.chosen.task for pair in pairs} == {"a"}
    assert dropped == {"of tasks without an expert": 2}
    # With a higher limit, a trajectory that solves its task is still an expert.
    experts, *_ = made_of(file(ROWS), expert_min_reward=1.0)
    assert [t.task for t in experts] == ["a"]
    with pytest.raises(UsageError, match="no expert trajectory is left: .* lower --expert-min-reward 0.0"):
        made_of(file(nothing))


def test_an_agent_that_transformers_loads_and_a_run_that_resumes(file, small_model, tmp_path, capsys):
    def train():
        learn.main([str(file(ROWS)), "--model", str(small_model), "--out", str(out), "--sft-lr",
                    "0.001", "--dpo-lr", "0.0001", "--dpo-epochs", "2", "--max-tokens", "512"])
        return capsys.readouterr().out

    out = tmp_path / "агент"
    said = train()
    assert "3 pairs (2 expert>target, 1 failure>failure), 1 dropped (1 as good as the expert)" in said

    log = read_jsonl(out / "train.jsonl")  # SFT takes three steps, preferences two
    assert len(log) == 3 + 2
    base = AutoModelForCausalLM.from_pretrained(small_model)
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    assert log[2]["loss"] < log[0]["loss"]

    # Preferences begin at margin 0, where DPO's loss is ln 2 for each pair: 0.5 + 0.5 + 1.
    kinds = log[3]["kinds"]
    assert [kinds[kind]["count"] for kind in kinds] == [2, 1]
    assert [kinds[kind]["margin"] for kind in kinds] == pytest.approx([0, 0], abs=1e-5)
    imitation = 0.1 * kinds["expert>target"]["chosen"]
    assert log[3]["loss"] == pytest.approx(math.log(2) - imitation / 2, abs=1e-3)
    assert log[4]["loss"] < log[3]["loss"]
    for phase, k in (("sft-target", 0), ("iter1/target-agent", 3)):
        assert f"{phase:28}  {3 - k // 3} steps, loss {log[k]['loss']:.3f} -> " in said

    agent = AutoModelForCausalLM.from_pretrained(out)
    before = base.get_output_embeddings().weight
    assert not torch.equal(agent.get_output_embeddings().weight, before)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template

    # The same command makes what is missing, and the same agent; the page of its run shows pairs.
    weights = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out / "run/iter1/target-agent")
    again = train()
    assert "iter1/target-agent" in again and "sft-target" not in again
    assert (out / "model.safetensors").read_bytes() == weights
    assert read_jsonl(out / "train.jsonl") == log
    assert (out / "run/run.html").stat().st_size > 10_000
    with pytest.raises(UsageError, match="other settings: .*seed .0 -> 1."):
        learn.main([str(file(ROWS)), "--model", str(small_model), "--out", str(out), "--seed", "1"])


@pytest.mark.parametrize("line, says", [
    (json.dumps(row("a", 1.0, "grün"), ensure_ascii=False).encode("latin-1"), "can't decode byte"),
    (row("a", 1.5, "x"), "reward 1.5 is not a number from 0 to 1"),
    (row("a", True, "x"), "reward True is not a number"),
    (row("a", math.nan, "x"), "reward nan is not a number"),
    (row(7, 1.0, "x"), "task 7 must be a name"),
    (row("a", 1.0), "its messages have the roles []"),
    (row("a", 1.0, "x") | dict(messages=ROWS[0]["messages"][1:]), "its messages have the roles ['assistant'"),
    (row("a", 1.0, None), "is not a string"),
    # A field that is not read would change the training data without an error.
    (row("a", 1.0, "x", system="Be brief."), "it has 'system', which is not supported; remove it"),
    (row("a", 1.0) | dict(messages=[dict(role="user", content="", weight=0)]), "it has 'weight'")])
def test_a_line_that_cannot_be_used_is_refused_with_its_number(file, line, says):
    path = file([ROWS[0], {}])
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(path.read_bytes().replace(b"{}\n", data.strip() + b"\n"))
    with pytest.raises(UsageError) as refusal:
        read(path)
    text = str(refusal.value)
    assert text.startswith(f"{path}, line 2: ") and says in text and "\n" not in text


def test_parts_of_a_file_that_are_left_out(file):
    """Blank lines, a byte order mark, the last message of the user, and fields of a run's file."""
    asked = dict(role="user", content="the end")
    ends = ROWS[2] | dict(messages=[*ROWS[2]["messages"], asked], iteration=3, rollout=9, ids=[1], seed=4)
    full = row("a", 0.0, "x", ended="context_limit", turns=0) | dict(messages=[asked])
    path = file([row("a", 1.0, "x " * 500), ends, full])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n") + b"\n \n")
    run = read(path, max_tokens=400)
    assert [(t.rollout, t.messages) for t in run.trajectories] == [(3, ROWS[2]["messages"])]
    assert run.dropped == {"too long": 2}
    with pytest.raises(UsageError, match="no trajectory is left: {'too long': 2}.*--max-tokens 1"):
        read(file(ROWS[:2]), max_tokens=1)


def test_replies_of_an_opening_are_no_actions(file):
    """In a run's file, `turns` and `action_mask` mark the replies that are actions."""
    told = row("a", 1.0, "OK", "search", "buy")
    [t] = read(file([told | dict(turns=2, action_mask=[0, 0, 1, 1, 0, 1])])).trajectories
    encoder = Encoder(make_tokenizer("chatml"))
    assert (t.ids, t.action_mask) == encoder.encode(told["messages"], 3)
    assert t.turns == 2
    for wrong, says in [(dict(turns=4), "'turns' is 4, but the number of replies is 3"),
                        (dict(action_mask=[0, 1, 0, 1]), "'action_mask' marks 2 replies, but the last 3")]:
        with pytest.raises(UsageError, match=says):
            read(file([told | wrong]))


@pytest.mark.parametrize("agents", [["mine", "theirs", "x"], ["mine", "theirs", None, "expert"]])
def test_more_than_two_agents_are_refused(agents, file):
    """Failures of the second and the third would make no pair. A missing name counts as one."""
    rows = [row("a", 1.0 - n / 8, "x", **({} if agent is None else dict(agent=agent)))
            for n, agent in enumerate(agents)]
    with pytest.raises(UsageError, match="it has 3 agents: mine, theirs, .* leave out all but two"):
        read(file(rows))
    assert len(read(file(rows[:2])).trajectories) == 2


@pytest.mark.parametrize("rows, flags, says", [
    (ROWS, ["--rollouts", "2"], "--rollouts is not read"),
    (ROWS, ["--out", "."], "--out .: it is not empty"),
    ([ROWS[0], dict(task="a")], [], "mine.jsonl, line 2: it has no 'messages'")])
def test_errors_are_found_before_a_model_is_loaded(rows, flags, says, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.models.read_model", lambda *_, **__: pytest.fail("a model is loaded"))
    file(rows)
    with pytest.raises(UsageError, match=says):
        learn.main(["mine.jsonl", *flags])
