"""`run.sh learn`: an agent of one's own trajectories, without an environment."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import make_tokenizer, plain_log_probs
from family_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    """A run as its phases before training see it, and what it has read."""
    s = learn.Settings(**settings)
    encoder = Encoder(make_tokenizer("chatml"))
    trajectories, dropped = learn.trajectories_in(path, encoder, s.max_tokens)
    return SimpleNamespace(settings=s, encoder=encoder, trajectories=trajectories, dropped=dropped,
                           main=True, name="", done={}, ids_by_name={}, print=print)


def made_of(path, tmp_path, **settings):
    """What the phases before training make of a file: rows of experts and of pairs, and what each
    counted as dropped."""
    run = read(path, **settings)
    experts = tmp_path / "experts.jsonl"
    best = learn.best(run, experts, path)
    played = {}
    for name in dict.fromkeys(t.agent for t in run.trajectories):
        played[name] = tmp_path / f"{name}.jsonl"
        learn.others(run, played[name], path, experts, name)
    pairs = learn.make_pairs(run, tmp_path / "pairs.jsonl", experts, played, "target")
    return (read_jsonl(experts), read_jsonl(tmp_path / "pairs.jsonl"), best["dropped"],
            pairs["dropped"])


def sides(pairs):
    """Of each pair its kind, and the lines of the file that are chosen and rejected."""
    return [(r["kind"], r["chosen"]["rollout"], r["rejected"]["rollout"]) for r in pairs]


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
def test_pairs_by_hand(file, tmp_path, rows, expected, weights):
    _, pairs, _, dropped = made_of(file(rows), tmp_path)
    assert sorted(sides(pairs)) == sorted(expected)
    if weights:
        assert [(r["weight"], r["sft_weight"]) for r in pairs] == weights
    assert dropped == ({"the same text": 2} if weights and len(weights) == 4 else
                       {"as good as the expert": 1} if weights else {})


def test_the_best_of_a_task_that_earned_nothing_is_no_expert(file, tmp_path):
    nothing = [row("c", 0, "x"), row("c", 0.0, "y")]
    experts, pairs, dropped, _ = made_of(file([*ROWS, *nothing]), tmp_path)
    assert [(t["task"], t["reward"], t["agent"]) for t in experts] == [
        ("a", 1.0, "expert"), ("b", 0.75, "expert")]
    assert {r["task"] for r in pairs} == {"a"}
    assert dropped == {"of tasks without an expert": 2}
    # A limit of one's own; what solves its task is an expert all the same.
    experts, *_ = made_of(file(ROWS), tmp_path, expert_min_reward=1.0)
    assert [t["task"] for t in experts] == ["a"]
    with pytest.raises(UsageError, match="no expert trajectory is left: .* lower --expert-min-reward 0.0"):
        made_of(file(nothing), tmp_path)


def test_an_agent_that_any_tool_loads_and_a_run_that_goes_on(file, small_model, tmp_path, capsys):
    def train():
        learn.main([str(file(ROWS)), "--model", str(small_model), "--out", str(out), "--sft-lr",
                    "0.001", "--dpo-lr", "0.0001", "--dpo-epochs", "2", "--max-tokens", "512"])
        return capsys.readouterr().out

    out = tmp_path / "агент"
    said = train()
    assert ("2 experts, 3 pairs (2 expert>target, 1 failure>failure), "
            "1 not used (1 as good as the expert)\n") in said

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
    assert agent.generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>")]

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


def test_a_model_that_errs_by_length_runs_at_batch_size_1(file, tmp_path):
    """Phi-3's longrope reads a text beside one beyond its first 64 positions by other factors."""
    tokenizer = make_tokenizer("chatml")
    model = tiny_model("phi3", len(tokenizer), original_max_position_embeddings=64,
                       max_position_embeddings=512)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [row("a", 1.0, "x"), row("b", 1.0, "search " * 60)]
    learn.main([str(file(rows)), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"),
                "--max-tokens", "400", "--sft-epochs", "1"])
    nats = 0.0
    tokens = 0
    for each in rows:
        ids, mask = Encoder(tokenizer).encode(each["messages"], 1)
        nats -= plain_log_probs(model, ids, mask).sum().item()
        tokens += sum(mask)
    assert read_jsonl(tmp_path / "out/train.jsonl")[0]["loss"] == pytest.approx(nats / tokens, abs=1e-3)


def turn(content, **more):
    return [*ROWS[0]["messages"], dict(role="user", content="on"),
            dict(role="assistant", content=content) | more]


@pytest.mark.parametrize("line, says", [
    ("{\n", "Expecting property name"), (json.dumps(["a"]), "no attribute"),
    (json.dumps(row("a", 1.0, "grün"), ensure_ascii=False).encode("latin-1"), "can't decode byte"),
    (dict(task="a", reward=1.0), "it has no 'messages'"),
    (row("a", 1.5, "x"), "reward 1.5 is not a number from 0 to 1"),
    (row("a", True, "x"), "reward True is not a number"),
    (row("a", math.nan, "x"), "reward nan is not a number"),
    (row("a", "1", "x"), "reward '1' is not a number"),
    (row(7, 1.0, "x"), "task 7 and agent 'target' must be names"),
    (row("a", 1.0, "x", agent=None), "agent None must be names"),
    (row("a", 1.0), "its messages have the roles []"),
    (row("a", 1.0, "x") | dict(messages=ROWS[0]["messages"][1:]), "its messages have the roles ['assistant'"),
    (row("a", 1.0, "x") | dict(messages=5), "not iterable"),
    (row("a", 1.0, "x") | dict(messages=[*ROWS[0]["messages"], dict(role="assistant", content="x")]), "message by message"),
    (row("a", 1.0, "x") | dict(messages=[*ROWS[0]["messages"], dict(content="x")]), "turn 5: it has no 'role'"),
    (row("a", 1.0, None), "is not a string"),
    # What is not read would train another agent than the file's.
    (row("a", 1.0, "x", system="Be brief."), "it has 'system', which is not supported; remove it"),
    (row("a", 1.0, "x", tools=[], weights=[1]), "it has 'tools', which"),
    (row("a", 1.0, "x") | dict(messages=turn("x", weight=0)), "turn 6: it has 'weight'"),
    (row("a", 1.0, "x") | dict(messages=turn("x", tool_calls=[])), "turn 6: it has 'tool_calls'")])
def test_a_line_that_cannot_be_used_as_it_is_is_refused_by_its_number(file, line, says):
    path = file([ROWS[0], {}])
    data = line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()
    path.write_bytes(path.read_bytes().replace(b"{}\n", data.strip() + b"\n"))
    with pytest.raises(UsageError) as refusal:
        read(path)
    text = str(refusal.value)
    assert text.startswith(f"{path}, line 2: ") and says in text and "\n" not in text


def test_lines_that_are_left_out_and_what_is_not_read(file):
    """Blank lines, the mark of some editors, the user's last word, and all that a run's file has."""
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
                        (dict(turns=-1), "'turns' is -1"), (dict(turns="2"), "TypeError"),
                        (dict(action_mask=[0, 1, 0, 1]), "'action_mask' marks 2 replies, but the last 3"),
                        (dict(turns=2, action_mask=[0, 1, 0, 0]), "marks 1 replies, but the last 2"),
                        (dict(turns=2, action_mask=[0, 1, 0, 1, 0, 1]), "marks 3 replies")]:
        with pytest.raises(UsageError, match=says):
            read(file([told | wrong]))


@pytest.mark.parametrize("agents", [["mine", "theirs", "x"], ["mine", "theirs", None, "expert"]])
def test_more_than_two_agents_are_refused(agents, file):
    """Failures of the second and the third would make no pair; who has no name is one, too."""
    rows = [row("a", 1.0 - n / 8, "x", **({} if agent is None else dict(agent=agent)))
            for n, agent in enumerate(agents)]
    with pytest.raises(UsageError, match="it has 3 agents: mine, theirs, .* leave out all but two"):
        read(file(rows))
    assert len(read(file(rows[:2])).trajectories) == 2


@pytest.mark.parametrize("rows, flags, says", [
    (ROWS, ["--dpo-lr", "0"], "--dpo-lr 0.0: must be above 0"),
    (ROWS, ["--rollouts", "2"], "--rollouts is not read"),
    (ROWS, ["--out", "."], "--out .: it is not empty"),
    (ROWS, ["--out", "mine.jsonl/agent"], "Not a directory"),
    (None, [], "mine.jsonl: does not exist"),
    ([], [], "mine.jsonl: no trajectory is left"),
    ([ROWS[0], dict(task="a")], [], "mine.jsonl, line 2: it has no 'messages'")])
def test_what_is_wrong_costs_no_load_of_a_model(rows, flags, says, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.models.read_model", lambda *_, **__: pytest.fail("a model is loaded"))
    if rows is not None:
        file(rows)
    with pytest.raises((UsageError, OSError), match=says):
        learn.main(["mine.jsonl", *flags])
    with pytest.raises(UsageError, match="FILE: give the file"):
        learn.main(flags[:0])
