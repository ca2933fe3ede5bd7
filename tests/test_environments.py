"""Properties of every environment, parsing of replies, experts that fail, files of experts."""

import json
import math
from collections import Counter
from contextlib import suppress

import pytest
from conftest import make_tokenizer

import environments
import envs
from dpo import Trajectory
from engine.chat import Encoder
from engine.trajectories import write as write_jsonl
from environments import expert_files
from environments.webshop import shop
from evolve import Explored


class Echo(envs.Environment):
    """The smallest possible environment."""
    name = "echo"
    test_splits = ("test",)
    max_turns = 2

    def __init__(self, view="full"):
        super().__init__(view)
        self.splits = {split: {"0": "red", "1": "blue"} for split in ("train", "test")}

    def start(self, what):
        self.word = what
        return f"say {what}"

    def step(self, reply):
        return envs.Step("again", float(reply == self.word), reply == self.word)


class Counted(str):
    """A text that counts the characters which its methods read."""
    read = 0

    def counted(name):
        def method(self, *given):
            Counted.read += len(self)
            found = getattr(str, name)(self, *given)
            if isinstance(found, (list, tuple)):
                return type(found)(map(Counted, found))
            return Counted(found) if isinstance(found, str) else found
        return method

    __getitem__, partition, split, strip, lower, find, rfind = map(
        counted, "__getitem__ partition split strip lower find rfind".split())


@pytest.mark.parametrize("parse, value", [
    (shop.name_and_argument, "x[x"), (shop.name_and_argument, "x]]"), (shop.name_and_argument, "[x"),
    (envs.unmarked, "`"), (envs.unmarked, "` "), (envs.unmarked, "*`x"), (envs.Environment().action, "Action: `\n")],
    ids=lambda given: getattr(given, "__name__", repr(given)))  # no address: xdist compares names
def test_a_reply_is_parsed_in_linear_time(parse, value):
    """The number of characters that are read is at most proportional to the length."""
    for text in (value * 1000, value * 1000 + "x", value[0] * 1000 + value[1:] * 1000):
        Counted.read = 0
        parse(Counted(text))
        assert 0 < Counted.read <= 12 * len(text)


def test_a_new_environment_inherits_the_defaults_of_Environment():
    env = Echo()
    assert (env.stops, env.prompt) == (("Observation:",), "")
    assert env.tasks("train") == ["echo-train-0", "echo-train-1"]
    page = env.reset("echo-train-1")
    assert env.opening(page) == [dict(role="user", content="say blue")] == env.opening(page, True)
    assert env.step("red") == envs.Step("again", 0.0, False)
    assert env.step("blue").done
    assert env.possible() == ([], "") and env.reply("blue") == "Action: blue"
    for missing in (env.expert, env.task_generator, lambda: env.tasks("dev")):
        with pytest.raises(environments.UsageError, match="^echo: [^\n]*$"):
            missing()


def test_an_added_task_has_one_id_which_no_other_object_knows():
    env, other = Echo(), Echo()
    assert env.tasks("added") == []
    assert [env.add(word) for word in ("green", "pink", "green")] == [
        "echo-added-0", "echo-added-1", "echo-added-0"]
    env.close()  # they are the object's, not an episode's
    assert [env.find(task) for task in env.tasks("added")] == ["green", "pink"]
    assert env.tasks("train") == other.tasks("train")
    for unknown in ("echo-added-0", "echo-added-", "echo-train-9", "train-0", "shop-train-0"):
        with pytest.raises(ValueError, match=f"unknown task '{unknown}'; tasks.split. lists them"):
            other.find(unknown)


@pytest.mark.parametrize("action, replies", [
    ("look around", [
        "look around", "Thought: I look.\nAction: look around", "Thought: Action: none\nAction: look around",
        "Action: look around\nThat should help.", "Thought: so.\r\nAction:\r\n\tlook around\r\n"]),
    ("look around", [  # in the forms of chat models
        "**Action:** look around", "**Action: look around**", "### Action\nlook around", "Action 2: look around",
        "Action：look around", "Action: `look around` to see", 'Action: "look around"', "`look around`",
        "Action:\n```\nlook around\n```", "```text\nAction: look around\n```", "**look around**"]),
    ("look around", [  # two rounds: the second was written without the page that the first one leads to
        "Action: look around\nAction: wait", "Thought: a Action: look around Thought: b Action: wait",
        "Action: look around\nObservation: a room\nAction: wait"]),
    (" look around", [" look around"]), ("", ["", "Action:"]), ("0", ["Action: 0\nso"]),
    ("a *b* `c` d", ["Action: a *b* `c` d"]), ("a\nb", ["a\nb", "```python\na\nb\n```"])])
def test_an_action_is_found_in_every_form_of_reply(action, replies):
    for reply in replies:
        assert Echo().action(reply) == action, reply


# ------------------------------------------------------------------------- experts that are stuck


def test_an_expert_that_ends_before_the_episode_has_failed():
    """So has one without success at the end of the episode. Later replies are not played."""
    env = Echo()
    env.step = lambda reply: envs.Step("again", 1.0 if reply == env.word else 0.5 * (reply == "half"), reply == env.word)
    for replies, said, earned in (
            (["red", "red", "blue"], ["red", "again", "red"], 0.0), (["pink", "blue"], ["pink", "again", "blue"], 1.0),
            (["blue", "red"], ["blue"], 1.0), (["half"], ["half", "again"], 0.0), ([], [], 0.0)):
        messages, reward = environments.converse(env, env.reset("echo-train-1"), environments.saying(replies))
        assert (reward, [turn["content"] for turn in messages]) == (earned, ["say blue", *said])


def test_the_shops_expert_on_changed_pages_fails_and_nothing_breaks(monkeypatch):
    show = shop.show
    for change in (str.upper, lambda page: "", lambda page: page.replace("$", "USD "), lambda page: page[::2],
                   lambda page: page.replace("price lower than", "for"), lambda page: page.replace("[SEP]", "/")):
        monkeypatch.setattr(shop, "show", lambda *page, **first: change(show(*page, **first)))
        found = [*expert_files.experts(shop.WebShop(), None, 5)]
        assert [task for task, *_ in found] == shop.WebShop().tasks("train")[:5]
        assert all(0 <= reward < 1 for *_, reward in found)


# ----------------------------------------------------------------------------- files of experts


def row(**changed):
    """A line of a run's experts.jsonl."""
    messages = [dict(role=role, content=text) for role, text in (
        ("user", "say red"), ("assistant", "blue"), ("user", "again"), ("assistant", "red"))]
    return {"task": "echo-train-0", "messages": messages, "reward": 1.0, **changed}


def turn(n, **changed):
    found = row()
    found["messages"][n] |= changed
    return found


def listed(**changed):
    """An entry of a list of ETO's."""
    turns = [dict([("from", who), ("value", text)]) for who, text in (
        ("human", "rules"), ("gpt", "OK"), ("human", "say red"), ("gpt", "Action: red"))]
    return {"id": "echo_0", "conversations": turns, **changed}


def heard(n, **changed):
    found = listed()
    found["conversations"][n] |= changed
    return found


WRONG = {
    "it has 'NAME', which is not supported; remove it": [
        (maker(**{name: None}), name) for maker in (row, listed) for name in ("system", "tools", "weight")],
    "turn [14]: it has 'NAME', which is not supported": [
        (maker(3, **{name: 0}), name) for maker in (turn, heard) for name in ("tool_calls", "weight")],
    "turn 4: its 'loss' is NAME, but all replies are trained on": [
        (heard(3, loss=False), "false"), (heard(3, loss=0), "0"), (heard(3, loss=0.5), "0.5")],
    "turn 3: its 'loss' is true": [(heard(2, loss=True), "")],
    "turn [1-4]: its '(role|from)' is 'NAME', which is not supported; choose from: user, assistant, human, gpt": [
        (turn(2, role="tool"), "tool"), (heard(0, **{"from": "system"}), "system")],
    "turn [1-4]: null is not a string": [(turn(1, content=None), ""), (heard(3, value=None), "")],
    "it has no 'NAME'": [
        ({"item_id": "echo_0", "conversations": []}, "id"), ({"task": "echo-train-0", "messages": []}, "reward")],
    "the conversation has no reply": [
        *((row(messages=row()["messages"][:n], **more), "") for n in (0, 1) for more in (
            {}, dict(ended="context_limit", turns=2), dict(ended="done", turns=0))),
        *((listed(conversations=listed()["conversations"][:n]), "") for n in range(4))],
    "the messages do not alternate between user and assistant": [(turn(2, role="assistant"), "")],
    "reward NAME is not in .0, 1.": [
        (maker(reward=reward), repr(reward)) for maker in (row, listed) for reward in (2, None, True, math.nan)],
    "id 'NAME' has a negative number": [(listed(id="echo_-1"), "echo_-1")],
    "unknown task": [(row(task="echo-train-7"), ""), (listed(id="echo_7"), "")],
    ".*; it must be ETO's JSON list": [(row(messages="x"), ""), (listed(conversations=3), "")],
}


@pytest.mark.parametrize("says", WRONG)
def test_an_invalid_expert_is_refused_with_its_position(tmp_path, says):
    """It is the second entry of a list, or the second line."""
    file = tmp_path / "experts"
    for entry, name in WRONG[says]:
        if "conversations" in entry:
            place = "entry 1"
            file.write_text(json.dumps([listed(), entry]))
        else:
            place = "line 2"
            file.write_text(json.dumps(row()) + "\n" + json.dumps(entry) + "\n")
        with pytest.raises(environments.UsageError, match=rf"^--experts {file}, {place}: {says.replace('NAME', name)}[^\n]*$"):
            expert_files.read_experts(str(file), Echo())


def test_all_fields_of_a_runs_trajectories_are_known():
    assert vars(Explored()).keys() <= {"task", "messages", "reward", *expert_files.PLAYED}


def test_a_rollout_whose_context_was_full_before_its_first_reply_is_left_out(tmp_path):
    """The task does not fit, or the first reply does not."""
    env, encoder, rows = Echo(), Encoder(make_tokenizer("chatml")), [row()]
    for most in 9, 99_999:
        t = Trajectory("echo-train-0")
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
    assert found == [("echo-train-0", row()["messages"], 1.0)]
    assert dropped == {"too long": 2} and [*expert_files.experts(env, str(file), 0)] == found


def test_published_entries_without_a_reward_are_counted_in_one_line(tmp_path):
    file, lines = tmp_path / "list.json", []
    for entries in ([listed(), listed(reward=1), listed()], [listed(reward=0.5)]):
        file.write_text(json.dumps(entries))
        rewards = [reward for *_, reward in expert_files.experts(Echo(), str(file), 0, report=lines.append)]
        assert rewards == [entry.get("reward", 1.0) for entry in entries]
    file.write_text(json.dumps(row()))  # a run's trajectory always has one
    assert len([*expert_files.experts(Echo(), str(file), 0, report=lines.append)]) == 1
    assert lines == [f"{file}: 2 of 3 expert trajectories have no reward; they count as 1"]


def test_the_loss_field_of_published_turns_is_read(tmp_path):
    """In AgentLM's form of the lists, loss is null or true, and false for the "OK"."""
    entry = listed()
    for said, loss in zip(entry["conversations"], (None, False, None, True)):
        said["loss"] = loss
    (tmp_path / "f").write_text(json.dumps([entry]))
    assert expert_files.read_experts(str(tmp_path / "f"), Echo()) == [(
        "echo-train-0", [dict(role="user", content="say red"), dict(role="assistant", content="Action: red")], 1.0)]


def test_experts_of_another_prompt_view_or_page_are_refused(tmp_path):
    class Told(Echo):
        rules = "Say it."

    class Louder(Echo):
        def start(self, what):
            return super().start(what) + "!"

    file = tmp_path / "experts"
    file.write_text(json.dumps(row()))
    assert [*expert_files.experts(Told("short"), str(file), 0)] == [
        ("echo-train-0", row()["messages"], 1.0)]
    for played in Told(), Louder():
        with pytest.raises(environments.UsageError, match="echo-train-0 is another task here.*--view"):
            next(expert_files.experts(played, str(file), 0))
