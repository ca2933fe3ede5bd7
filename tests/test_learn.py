"""`run.sh learn`: training on a file of trajectories, without an environment."""

import json
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import make_tokenizer, refusal, refused, table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import coevolve
from common.files import read_jsonl
from engine.chat import Encoder
from lab import learn


def rows(text):
    """Parses lines such as "a 0.5 buy/red mine": the task, the reward, the replies of the assistant
    in its conversation, and the agent if there is one."""
    found = []
    for line in text.strip().splitlines():
        task, reward, replies, *agent = line.split()
        messages = []
        for n, reply in enumerate(replies.split("/")):
            messages += [dict(role="user", content=f"{task}, page {n}"),
                         dict(role="assistant", content=reply)]
        row = dict(task=task, messages=messages, reward=float(reward))
        found.append(row | (dict(agent=agent[0]) if agent else {}))
    return found


MINE = """
a 0.5 buy/red
a 1.0 search/buy-red
a 0.25 leave
b 0.75 search/buy
b 0.75 search/wait/buy
"""


@pytest.fixture
def file(tmp_path):
    """file(rows) -> a file with these rows."""
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
    return SimpleNamespace(settings=s, trajectories=trajectories, dropped=dropped, name="",
                           print=print)


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


# Eq. (8) pairs each trajectory with the expert of its task, and F_tgt x F_fail. The first agent in
# the file is the target. The failures of a single agent are paired with each other, Eq. (6).
@pytest.mark.parametrize("played, expected, dropped", [
    (MINE, """
expert>target 2 1 0.5 0.5
expert>target 2 3 0.5 0.5
failure>failure 1 3 1 0""", {"as good as the expert": 1}),
    ("""
a 1.0 x mine
a 0.5 y mine
a 0.25 z mine
a 0.75 v theirs""", """
expert>mine 1 2 0.333333 0.333333
expert>mine 1 3 0.333333 0.333333
expert>theirs 1 4 0.333333 0.333333
failure>failure 4 2 0.5 0
failure>failure 4 3 0.5 0""", {}),
    # A demonstration that an agent beats is no second agent. A task with one trajectory has no pair.
    ("""
a 0.75 x expert
a 1.0 y mine
a 0.5 z mine
a 0.25 v mine
b 1.0 x expert""", """
expert>mine 2 3 0.333333 0.333333
expert>mine 2 4 0.333333 0.333333
expert>expert 2 1 0.333333 0.333333
failure>failure 3 4 0.333333 0
failure>failure 1 3 0.333333 0
failure>failure 1 4 0.333333 0""", {}),
    # A text makes no pair with itself, even with another reward. The others weigh 1 together.
    ("""
a 1.0 x/y
a 0.25 x/y
a 0.5 z
a 0.75 z""", """
expert>target 1 3 0.5 0.5
expert>target 1 4 0.5 0.5
failure>failure 3 2 0.333333 0
failure>failure 4 2 0.333333 0""", {coevolve.SAME_TOKENS: 2})])
def test_pairs_by_hand(file, played, expected, dropped):
    """A pair is its kind, the lines of its trajectories in the file, and its weights."""
    _, pairs, _, counts = made_of(file(rows(played)))
    found = "\n".join(f"{pair.kind} {pair.chosen.rollout} {pair.rejected.rollout} {pair.weight:g} "
                      f"{pair.sft_weight:g}" for pair in pairs)
    assert found == expected.strip()
    assert counts == dropped


def test_the_best_of_a_task_that_earned_nothing_is_no_expert(file):
    nothing = rows("c 0 x\nc 0.0 y")
    experts, _, dropped, _ = made_of(file([*rows(MINE), *nothing]))
    assert [(t.task, t.reward, t.agent) for t in experts] == [
        ("a", 1.0, "expert"), ("b", 0.75, "expert")]
    assert dropped == {"of tasks without an expert": 2}
    # With a higher limit, a trajectory that solves its task is still an expert.
    experts, *_ = made_of(file(rows(MINE)), expert_min_reward=1.0)
    assert [t.task for t in experts] == ["a"]
    line = refusal(made_of, file(nothing))
    assert "no expert trajectory is left: " in line and "; lower --expert-min-reward 0.0" in line


def test_an_agent_that_transformers_loads_and_a_run_that_resumes(
        file, small_model, tmp_path, capsys):
    out = tmp_path / "агент"
    words = (f"{file(rows(MINE))} --model {small_model} --out {out} --sft-lr 0.001 --dpo-lr 0.0001 "
             "--dpo-epochs 2 --max-tokens 512").split()
    learn.main(words)
    said = capsys.readouterr().out
    assert "3 pairs (2 expert>target, 1 failure>failure), 1 dropped (1 as good as the expert)" in said
    log = read_jsonl(out / "train.jsonl")  # SFT takes three steps, preferences two
    first, _, last, before, after = [step["loss"] for step in log]
    assert last < first and after < before
    # The agent is that of the last phase.
    agent = AutoModelForCausalLM.from_pretrained(out)
    weights = load_file(out / "run/iter1/target-agent/model.safetensors")
    assert agent.lm_head.weight.equal(weights["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(out).chat_template

    # The same command makes what is missing, and the same agent; the page of its run shows pairs.
    made = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out / "run/iter1/target-agent")
    learn.main(words)
    said = capsys.readouterr().out
    assert "iter1/target-agent" in said and "sft-target" not in said
    assert (out / "model.safetensors").read_bytes() == made
    assert (out / "run/run.html").exists()
    assert "other settings: seed (0 -> 1)" in refusal(learn.main, [*words, "--seed", "1"])


# A field that is not read would change the training data without an error. In a run's file, `turns`
# and `action_mask` mark the replies that are actions.
@pytest.mark.parametrize("change, says", table("""
    {"messages": [{"role": "user", "content": "grün"}]} -> can't decode byte
    {"reward": 1.5} -> reward 1.5 is not a number from 0 to 1
    {"reward": true} -> reward True is not a number
    {"reward": NaN} -> reward nan is not a number
    {"task": 7} -> task 7 must be a name
    {"agent": "a/b"} -> agent 'a/b' must be a name of letters and digits
    {"messages": []} -> its messages have the roles []
    {"messages": [{"role": "assistant", "content": "x"}]} -> its messages have the roles ['assistant'
    {"messages": [{"role": "user", "content": null}]} -> is not a string
    {"system": "Be brief."} -> it has 'system', which is not supported; remove it
    {"messages": [{"role": "user", "content": "", "weight": 0}]} -> it has 'weight'
    {"turns": 4} -> 'turns' is 4, but the number of replies is 2
    {"action_mask": [0, 1]} -> 'action_mask' marks 1 replies, but the last 2"""))
def test_a_line_that_cannot_be_used_is_refused_with_its_number(file, change, says):
    first = rows(MINE)[0]
    path = file([first])
    line = json.dumps(first | json.loads(change), ensure_ascii=False)
    path.write_bytes(path.read_bytes() + line.encode("latin-1"))
    said = refusal(read, path)
    assert said.startswith(f"{path}, line 2: ") and says in said and "\n" not in said


def test_parts_of_a_file_that_are_left_out(file):
    """Blank lines, a byte order mark, the last message of the user, and fields of a run's file. A
    reply of the opening is no action."""
    long, short, full = rows(f"a 1.0 {'x' * 999}\na 0.25 OK/search/buy\na 0.0 x")
    end = dict(role="user", content="the end")
    short |= dict(iteration=3, rollout=9, ids=[1], seed=4, turns=2, action_mask=[0, 0, 1, 1, 0, 1])
    full |= dict(ended="context_limit", turns=0, messages=[end])
    path = file([long, short | dict(messages=[*short["messages"], end]), full])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n") + b"\n \n")
    run = read(path, max_tokens=400)
    [t] = run.trajectories
    assert (t.rollout, t.messages, t.turns) == (3, short["messages"], 2)
    assert (t.ids, t.action_mask) == Encoder(make_tokenizer("chatml")).encode(t.messages, 3)
    assert run.dropped == {"too long": 2}
    says = "no trajectory is left: {'too long': 3}; give one in each line, or raise --max-tokens 1"
    assert says in refusal(partial(read, max_tokens=1), path)


def test_more_than_two_agents_are_refused(file):
    """Failures of the second and the third would make no pair. A line without an agent counts as
    one of target, and lines of expert do not count."""
    played = rows("a 1.0 x mine\na 0.5 x theirs\na 0.4 x expert\na 0.3 x")
    line = refusal(read, file(played))
    assert "it has 3 agents: mine, theirs, target; leave out all but two" in line
    read(file(played[:3]))


def test_errors_are_found_before_a_model_is_loaded(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.models.read_model", lambda *_, **__: pytest.fail("it is loaded"))
    name = file([*rows(MINE), dict(task="a")]).name
    pipe, _ = os.pipe()  # the next pipe would have the same path, and its content would not be read
    refused(lambda *flags: learn.main([*flags]), [
        (f"{name} --rollouts 2", "--rollouts is not read"),
        (f"{name} --out .", "--out .: it is not empty"),
        (f"/dev/fd/{pipe}", "is a pipe; give an existing file"),
        (name, "mine.jsonl, line 6: it has no 'messages'")])
