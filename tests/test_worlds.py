"""What every environment states, experts that cannot go on, files of experts."""

import ast
import json
import math
import re
from collections import Counter
from contextlib import suppress

import pytest
from conftest import ROOT, make_tokenizer

import envs
import worlds
from common.files import write_jsonl
from dpo import Encoder, Trajectory
from evolve import Explored
from worlds import expert_files, make
from worlds.webshop.shop import WebShop


class Echo(worlds.World):
    """The least that an environment has to be."""
    name = "echo"
    test_splits = ("test",)
    max_steps = 2

    def __init__(self, view="full"):
        super().__init__(view)
        self.splits = {split: {"0": "red", "1": "blue"} for split in ("train", "test")}

    def start(self, what):
        self.word = what
        return f"say {what}"

    def step(self, reply):
        return worlds.Step("again", float(reply == self.word), reply == self.word)


def names_used_of(name):
    """X of each name.X in the core, evolve.py, lab/ and worlds/, but for files about one
    environment, which import it."""
    found = set()
    for file in [*ROOT.glob("*.py"), *ROOT.glob("lab/**/*.py"), *ROOT.glob("worlds/*.py")]:
        text = file.read_text(encoding="utf-8")
        if re.search(r"^(from|import) worlds\.(\w+)\.", text, re.M):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and name in (
                    getattr(node.value, "id", None), getattr(node.value, "attr", None)):
                found.add(node.attr)
    return found - {"get_template"}  # of pages, whose environment is jinja's


def test_a_world_states_all_that_is_asked_of_an_environment():
    used = names_used_of("env")
    assert {"stops", "success", "opening", "max_steps", "step", "reset"} <= used
    assert not [name for name in used if not hasattr(Echo(), name)]


def test_an_environment_of_ones_own_has_the_rest_from_world():
    env = Echo()
    assert (env.success, env.stops, env.prompt) == (1.0, ("Observation:",), "")
    assert env.tasks("train") == ["echo-train-0", "echo-train-1"]
    page = env.reset("echo-train-1")
    assert env.opening(page) == [dict(role="user", content="say blue")] == env.opening(page, True)
    assert env.step("red") == worlds.Step("again", 0.0, False)
    assert env.step("blue").done
    assert env.find(env.add("green")) == "green" and env.tasks("added") == ["echo-added-0"]
    assert env.possible() == ([], "") and env.reply("blue") == "Action: blue"
    assert worlds.replay(env, "red", ["blue", "red", "red"])[-1].reward == 1.0
    for missing in (env.expert, env.task_generator, lambda: env.tasks("dev")):
        with pytest.raises(worlds.Refused, match="^echo: [^\n]*$"):
            missing()
    with pytest.raises(ValueError, match="tasks.split. lists them"):
        env.find("echo-train-9")


@pytest.mark.parametrize("options", [dict(), dict(view="short")])
@pytest.mark.parametrize("name", ["webshop", "scienceworld", "intercodesql"])
def test_environments_repair_nothing_of_world_away(name, options):
    env = make(name, **options)
    assert env.name == name and env.stops and 0 < env.success <= 1 and env.max_steps > 0
    assert {*env.test_splits} < env.splits.keys()


@pytest.mark.parametrize("reply, action", [
    ("look around", "look around"), (" look around", " look around"), ("", ""), ("Action:", ""),
    ("Thought: I look.\nAction: look around", "look around"),
    ("Thought: so\nAction:\n  look around\n", "look around"),
    ("I plan. Action: look around", "look around"), ("Thought: Action: none\nAction: look around", "look around"),
    # As chat models write them.
    *((text, "look around") for text in (
        "**Action:** look around", "**Action**: look around", "**Action: look around**",
        "### Action\nlook around", "Action 2: look around", "action: look around", "- Action: look around",
        "Action: `look around`", "Action: **look around**", 'Action: "look around"',
        "Action: `look around` to see", "Action:\n```\nlook around\n```", "```text\nAction: look around\n```",
        "`look around`", "**look around**", "```\nlook around\n```", "Action：look around")),
    # Two rounds: the second was written without the page that the first one leads to.
    ("Action: look around\nAction: wait", "look around"),
    ("Thought: a\nAction: look around\nThought: b\nAction: wait", "look around"),
    ("Thought: a Action: look around Thought: b Action: wait", "look around"),
    ("Action: look around\nObservation: a room\nAction: wait", "look around"),
    ("Action: look around\nThat should help.", "look around"),
    ("Action: 0\nso", "0"), ("Action: a *b* `c` d", "a *b* `c` d"),
    ("```python\na\nb\n```", "a\nb"), ("a\nb", "a\nb"),
])
def test_an_action_is_found_in_every_form_of_reply(reply, action):
    assert Echo().action(reply) == action


# ------------------------------------------------------------------------- experts that are stuck


def test_an_expert_that_ends_before_the_episode_has_failed():
    replies = iter(["red"])
    env = Echo()
    messages, reward = worlds.converse(env, env.reset("echo-train-1"), lambda page: next(replies))
    assert reward == 0.0 and [turn["content"] for turn in messages] == ["say blue", "red"]
    messages, reward = worlds.converse(env, env.reset("echo-train-1"), lambda page: next(replies))
    assert reward == 0.0 and messages == [dict(role="user", content="say blue")]


class Changed(WebShop):
    """The shop, whose pages somebody has changed."""

    def __init__(self, change, **more):
        super().__init__(**more)
        self.change = change

    def show(self, page):
        return self.change(super().show(page))


@pytest.mark.parametrize("change", [
    str.upper, lambda page: "", lambda page: page.replace("$", "USD "),
    lambda page: page.replace("price lower than", "for"), lambda page: page[::2],
    lambda page: page.replace("[SEP]", "/"), lambda page: page.replace("0", "."),
    lambda page: page.replace("Buy Now", "Buy")])
def test_the_shops_expert_on_changed_pages_fails_and_nothing_breaks(change):
    env = Changed(change, view="short")
    found = [*expert_files.experts(env, None, 5)]
    assert [task for task, *_ in found] == env.tasks("train")[:5]
    assert all(0 <= reward <= 1 and messages[-1]["role"] in ("assistant", "user")
               for _, messages, reward in found)


def test_experts_with_fewer_turns_fail_and_nothing_breaks(monkeypatch):
    monkeypatch.setattr(WebShop, "max_steps", 2)
    monkeypatch.setattr("worlds.intercodesql.world.InterCodeSQL.max_steps", 1)
    for name in ("webshop", "intercodesql"):
        assert [reward for *_, reward in expert_files.experts(make(name), None, 3)] == [0.0] * 3


# ----------------------------------------------------------------------------- files of experts


def row(**changed):
    """A line of a run's experts.jsonl for the first training task of the shop."""
    env = make("webshop")
    messages, reward = worlds.converse(env, env.reset("webshop-train-0"), env.expert())
    return {"task": "webshop-train-0", "messages": messages, "reward": reward, **changed}


def turn(n, **changed):
    messages = row()["messages"]
    messages[n] = {**messages[n], **changed}
    return row(messages=messages)


def listed(**changed):
    turns = [("human", "rules"), ("gpt", "OK"), ("human", "WebShop [SEP] x"),
             ("gpt", "Action: search[x]")]
    return {"id": "webshop_0", "conversations": [
        {"from": who, "value": text} for who, text in turns], **changed}


def heard(n, **changed):
    entry = listed()
    entry["conversations"][n] |= changed
    return entry


@pytest.mark.parametrize("entry, told", [
    (turn(1, tool_calls=[{"name": "ls"}]), "turn 2: it has 'tool_calls', which nothing here reads"),
    (turn(1, weight=0), "turn 2: it has 'weight'"),
    (turn(3, train=False), "turn 4: it has 'train'"),
    (turn(1, content=None), "turn 2: null is no text"),
    (turn(1, content=["a"]), r'turn 2: \["a"\] is no text'),
    (turn(3, content="a \ud83d"), "turn 4: character 3 is half of a surrogate pair"),
    (turn(0, content="\udc00"), "turn 1: character 1 is half"),
    (row(messages=[{"role": "user"}]), "turn 1: it has no 'content'"),
    (row(messages=[]), "there is no reply in it"),
    (row(messages=row()["messages"][:1]), "there is no reply in it"),
    (row(messages=[], ended="context", steps=2), "there is no reply in it"),
    (row(messages=[], ended="done", steps=0), "there is no reply in it"),
    (row(messages="x"), "must be"), (row(task=7), "must be"),
    *((row(reward=reward), f"reward {reward!r} is not in .0, 1")
      for reward in (2, -0.1, None, True, False, "1", math.nan, {})),
    *((row(**{name: value}), f"it has '{name}', which nothing here reads; take it out") for name, value in (
        ("system", "You shop."), ("system", None), ("tools", []), ("weight", 0.5), ("rejected", []))),
    (turn(0, role="system"), "turn 1: its 'role' is 'system', and only user, assistant, human, gpt are read"),
    (turn(2, role="tool"), "turn 3: its 'role' is 'tool'"),
    ([1], "it is no JSON object"),
])
def test_what_is_wrong_with_an_expert_is_said_with_line_and_turn(tmp_path, entry, told):
    file = tmp_path / "experts.jsonl"
    file.write_text(json.dumps(row(task="webshop-train-1")) + "\n" + json.dumps(entry) + "\n")
    with pytest.raises(worlds.Refused, match=rf"^--experts {file}, line 2: .*{told}[^\n]*$"):
        expert_files.read_experts(str(file), make("webshop"))


@pytest.mark.parametrize("entry, told", [
    ({"item_id": "webshop_0", "conversations": listed()["conversations"]}, "it has no 'id'"),
    (listed(id="webshop_-5"), "id 'webshop_-5' is below 0"), (listed(id=-5), "id '-5' is below 0"),
    (listed(id="webshop"), "id 'webshop' has no number of a task"),
    (listed(id=None), "id 'None' has no number"),
    (heard(3, value=None), "turn 4: null is no text"),
    (heard(2, value="\ud800"), "turn 3: character 1 is half of a surrogate pair"),
    (heard(3, tool_calls=[]), "turn 4: it has 'tool_calls'"),
    *((heard(n, loss=loss), f"turn {n + 1}: its 'loss' is {said}, but all replies are trained on")
      for n, loss, said in ((3, False, "false"), (3, 0, "0"), (3, 0.5, "0.5"), (2, True, "true"))),
    *((heard(n, **{"from": who}), f"turn {n + 1}: its 'from' is '{who}', and only ")
      for n, who in ((3, "tool"), (0, "system"), (2, "observation"))),
    *((listed(**{name: "x"}), f"it has '{name}', which nothing here reads") for name in (
        "system", "tools", "weight", "messages")),
    (listed(reward=True), "reward True is not in"), (listed(reward=None), "reward None is not in"),
    *((listed(conversations=listed()["conversations"][:n]), "there is no reply in it")
      for n in range(4)),
])
def test_what_is_wrong_with_a_published_expert_is_said_with_entry_and_turn(tmp_path, entry, told):
    file = tmp_path / "list.json"
    file.write_text(json.dumps([listed(id="webshop_1"), entry]))
    with pytest.raises(worlds.Refused, match=rf"^--experts {file}, entry 1: .*{told}[^\n]*$"):
        expert_files.read_experts(str(file), make("webshop"))


def test_a_rollout_whose_context_was_full_before_its_first_reply_is_left_out(tmp_path):
    """As episodes write it: the task does not fit, or there is no room for what is said."""
    env = make("webshop")
    encoder = Encoder(make_tokenizer("chatml"))
    rows = [row(task="webshop-train-0")]
    for most in 9, 99_999:
        t = Trajectory("webshop-train-0")
        running = envs.episode(env, encoder, t, most)
        with suppress(StopIteration):
            running.send(None)
            running.send(None)
        rows.append(vars(t))
    assert [len(each["messages"]) for each in rows[1:]] == [0, 1]
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, rows)
    dropped = Counter()
    found = [*expert_files.experts(env, str(file), 0, dropped)]
    assert [(task, messages) for task, messages, _ in found] == [
        ("webshop-train-0", row()["messages"])]
    assert dropped == {"too long": 2} and [*expert_files.experts(env, str(file), 0)] == found


def test_all_that_a_run_writes_of_an_episode_is_known():
    assert vars(Explored()).keys() <= {"task", "messages", "reward", *expert_files.PLAYED}


def test_a_published_turn_may_say_that_it_is_trained_on(tmp_path):
    """As in AgentLM's form of the lists: loss is null, true, or false of the OK."""
    entry = listed()
    for said, loss in zip(entry["conversations"], (None, False, None, True)):
        said["loss"] = loss
    (tmp_path / "f").write_text(json.dumps([entry]))
    ((_, messages, _),) = expert_files.read_experts(str(tmp_path / "f"), make("webshop"))
    assert messages[-1] == dict(role="assistant", content="Action: search[x]")


def test_experts_of_another_prompt_or_view_are_refused(tmp_path, monkeypatch):
    rows = {}
    for view in ("full", "short"):
        env = make("webshop", view)
        messages, reward = worlds.converse(env, env.reset("webshop-train-0"), env.expert())
        rows[view] = dict(task="webshop-train-0", messages=messages, reward=reward)
    for made, played in (("full", "short"), ("short", "full")):
        (tmp_path / made).write_text(json.dumps(rows[made]))
        with pytest.raises(worlds.Refused, match="is another task here.*--view"):
            next(expert_files.experts(make("webshop", played), str(tmp_path / made), 0))
        assert [*expert_files.experts(make("webshop", made), str(tmp_path / made), 0)]
    monkeypatch.setattr(WebShop, "rules", "You shop.")
    with pytest.raises(worlds.Refused, match="is another task here"):
        next(expert_files.experts(make("webshop"), str(tmp_path / "full"), 0))
