"""Properties of every environment, parsing of replies, experts that fail, files of experts."""

import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from importlib import import_module

import psutil
import pytest
from conftest import ROOT, refusal, table, wait_for_end

import environments
import envs
from environments import expert_files
from environments.appworld import data as appworld
from environments.intercodesql import questions
from environments.webshop import pages, shop
from evolve import Explored, tells


class Echo(envs.Environment):
    """The smallest possible environment."""
    name = "echo"
    test_splits = ("test",)
    max_turns = 2
    splits = {split: {"0": "red", "1": "blue"} for split in ("train", "test")}

    def start(self, what):
        self.word = what
        return f"say {what}"

    def step(self, reply):
        return envs.Step("again", float(reply == self.word), reply == self.word)


@pytest.mark.parametrize("value", ["x[x", "x]]", "[x", "`", "` ", "*`x", "Action: `\n"])
def test_a_reply_is_parsed_in_linear_time(value):
    """In quadratic time, millions of characters would take hours."""
    for parse in pages.name_and_argument, envs.unmarked, envs.Environment().action:
        for head, tail in (value, ""), (value, "x"), (value[0], value[1:]):
            parse(head * 2_000_000 + tail * 2_000_000)


def test_a_new_environment_inherits_the_defaults_of_Environment():
    env = Echo()
    assert (env.stops, env.prompt) == (("Observation:",), "")
    assert env.tasks("train") == ["echo-train-0", "echo-train-1"]
    page = env.reset("echo-train-1")
    assert env.opening(page) == [dict(role="user", content="say blue")] == env.opening(page, True)
    assert env.step("red") == envs.Step("again", 0.0, False)
    assert env.step("blue").done
    assert env.possible() == ([], "") and env.reply("blue") == "Action: blue"
    for missing in env.expert, env.task_generator, lambda: env.tasks("dev"):
        assert re.fullmatch("echo: .*", refusal(missing))


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


@pytest.mark.parametrize("reply, action", table("""
    look around -> look around
    Thought: I look.⏎Action: look around -> look around
    Thought: Action: none⏎Action: look around -> look around
    Action: look around⏎That should help. -> look around
    Thought: so.␍⏎Action:␍⏎\tlook around␍⏎ -> look around
    **Action:** look around -> look around
    **Action: look around** -> look around
    I look.⏎### Action⏎look around -> look around
    Action 2: look around -> look around
    Action：look around -> look around
    Action: `look around` to see -> look around
    Action: "look around" -> look around
    `look around` -> look around
    **look around** -> look around
    Action:⏎```⏎look around⏎``` -> look around
    ```text⏎Action: look around⏎``` -> look around
    Action: look around⏎Action: wait -> look around
    Thought: a Action: look around Thought: b Action: wait -> look around
    Action: look around⏎Observation: a room⏎Action: wait -> look around
    ->
    Action: ->
    Action: 0⏎so -> 0
    Action: a *b* `c` d -> a *b* `c` d
    a⏎b -> a⏎b
    ```python⏎a⏎b⏎``` -> a⏎b
"""))
def test_an_action_is_found_in_every_form_of_reply(reply, action):
    """Of several actions the first counts. The others were written before the next page was shown."""
    reply = reply.replace("␍", "\r").replace("⏎", "\n")
    assert Echo().action(reply) == action.replace("⏎", "\n")


# ------------------------------------------------------------------- the contract of environments

# Name -> its other options, the sizes of its splits, and what no two splits may share of a task
ROWS = {
    "webshop": ({}, "unseen 144, train 600, validation 158, test 250",
                lambda env, goal: (goal["query"], sorted(goal["attributes"] + goal["goal_options"]))),
    "intercodesql": ({}, "train 1000, validation 300, test 300, unseen 200",
                     lambda env, task: sorted(map(sorted, questions.schema_key(env.data.databases[task["db"]])))),
    "scienceworld": (dict(task_types="short"), "train 676, validation 70, seen 75, unseen 75",
                     lambda env, task: task),
    "bfcl": (dict(bfcl_category="all"), "train 400, validation 80, test 320", lambda env, task:
             json.dumps(import_module("environments.bfcl.data").start_state(task["start"])["config"], sort_keys=True)),
    "appworld": ({}, "train 72, validation 36, test 36, unseen 42",
                 lambda env, task: appworld.specs(env.judge.root, task["start"])),
}
ALL = [f"{name} full" for name in ROWS]


@pytest.fixture(scope="module")
def world(request):
    """An environment. Skips the test if its package is missing or this machine cannot run it."""
    name, view = request.param.split()
    try:
        env = environments.make(name, view, **ROWS[name][0])
        env.reset(env.tasks("train")[0])
    except environments.UsageError as error:
        pytest.skip(str(error))
    yield env
    env.close()


def worlds(*names):
    return pytest.mark.parametrize("world", names, indirect=True)


@worlds(*ALL)
def test_splits_have_their_sizes_and_share_nothing(world):
    _, sizes, part = ROWS[world.name]
    assert ", ".join(f"{split} {len(tasks)}" for split, tasks in world.splits.items()) == sizes
    parts = [{repr(part(world, task)) for task in tasks.values()} for tasks in world.splits.values()]
    assert len(set.union(*parts)) == sum(map(len, parts))


def expert_replies(env, task):
    """Returns the messages, the expert's replies and the reward."""
    messages, reward = environments.converse(env, env.reset(task), env.expert())
    return messages, [turn["content"] for turn in messages if turn["role"] == "assistant"], reward


@worlds(*ALL, "webshop short", "intercodesql short")
def test_the_expert_solves_tasks_and_a_part_of_its_replies_does_not(world, tmp_path, monkeypatch):
    """An episode leaves nothing to the next one, and no file."""
    monkeypatch.chdir(tmp_path)
    rewards = []
    for split in world.splits:
        for task in some_of(world, split):
            messages, replies, reward = expert_replies(world, task)
            rewards.append(reward)
            assert not tells(messages[0]["content"].removeprefix(world.prompt), replies)
            for part in replies[:-1], replies[-1:]:
                assert environments.replay(world, world.find(task), part)[-1].reward < 1, task
        assert expert_replies(world, task)[0] == messages
        assert ("Thought: " in replies[0]) == (world.prompt != "" and world.name not in ("bfcl", "appworld"))
    assert rewards.count(1) > 0.95 * len(rewards) and [*tmp_path.iterdir()] == []


def some_of(env, split):
    count = dict(webshop=80, intercodesql=80, bfcl=10, appworld=4, scienceworld=2)[env.name]
    return env.tasks(split)[::len(env.tasks(split)) // count]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@worlds("scienceworld full", "appworld full")
def test_no_process_outlives_its_run(world, end):
    code = ("import signal, time; from environments import make\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job has none
            f"env = make({world.name!r}); env.reset(env.tasks('train')[0])\n"
            "print('ready', flush=True); time.sleep(600)")
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    run.stdout.readline()
    inside = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(end)
    run.wait()
    assert inside
    wait_for_end(inside)


# ----------------------------------------------------------------- the contract of task generators

# The text of a task, as the change of another task
TEXT = {"webshop": lambda env, task: dict(instruction=task["instruction"].upper()),
        "intercodesql": lambda env, task: dict(query=task["query"].upper()),
        "bfcl": lambda env, task: dict(turns=[task["turns"][0].upper()]),
        "appworld": lambda env, task: dict(text=appworld.specs(env.judge.root, task["start"])["instruction"].upper())}


def tried(env, task):
    """Returns the replies of an episode, from which new tasks are made."""
    if env.name != "intercodesql":
        return expert_replies(env, task)[1]
    table = env.data.tables[env.find(task)["db"]][-1]  # a gold query would be a question of a split
    return ["SHOW TABLES", f"SELECT AVG({table.numbers[0].name}) FROM {table.name}"]


@pytest.fixture(scope="module")
def found(world):
    """(environment, task generator, (task, new task that is made from it and not refused))."""
    generator, rng = world.task_generator(), random.Random(0)
    tasks = world.tasks("train")[::len(world.tasks("train")) // 12]
    rows = [(task, row) for task in tasks for row in generator.finds(task, tried(world, task), rng)]
    return world, generator, [(task, row) for task, row in rows if not generator.refusal(row["task"])]


makes_tasks = worlds("webshop short", "intercodesql short", "bfcl short", "appworld full")


@makes_tasks
def test_a_found_task_verifies_and_a_part_of_its_solution_does_not(found):
    """If an explorer model writes the same, it becomes an equal task, which has one key."""
    env, generator, rows = found
    keys = [generator.key(row["task"]) for _, row in rows]
    assert len({*keys}) == len(rows) > 3
    for (source, row), key in zip(rows, keys):
        text, task, solution = row["text"], row["task"], row["solution"]
        assert json.loads(json.dumps(row)) == row and not tells(text, solution)
        assert generator.verify(row) is None
        assert environments.replay(env, env.find(env.add(task)), solution)[-1].reward == 1
        less = task | dict(code=task["code"][:-1]) if "code" in task else task
        assert generator.verify(row | dict(task=less, solution=solution[:-1]))
        if len(task.get("turns", [text])) == 1:
            written = generator.written(source, dict(query=text, action_sequence=solution))
            assert generator.key(written["task"]) == key and generator.verify(written) is None


@makes_tasks
def test_a_task_of_a_split_is_refused(found):
    env, generator, [(_, row), *_] = found
    for split in env.splits:
        for task in map(env.find, env.tasks(split)[:3]):
            text = TEXT[env.name](env, task)
            assert generator.refusal(row["task"] | task | text)
            assert split == "train" or "of a split" in generator.refusal(row["task"] | text)


# ------------------------------------------------------------------------- experts that are stuck


@pytest.mark.parametrize("replies, said, earned", table("""
    red red blue -> say blue, red, again, red -> 0.0
    pink blue -> say blue, pink, again, blue -> 1.0
    blue red -> say blue, blue -> 1.0
    half -> say blue, half, again -> 0.0
    -> say blue -> 0.0
"""))
def test_an_expert_that_ends_before_the_episode_has_failed(replies, said, earned):
    """So has one without success at the end of the episode. Later replies are not played."""
    env = Echo()
    env.step = lambda reply: envs.Step("again", 1.0 if reply == env.word else 0.5 * (reply == "half"), reply == env.word)
    messages, reward = environments.converse(env, env.reset("echo-train-1"), environments.saying(replies.split()))
    assert ", ".join(turn["content"] for turn in messages) == said and str(reward) == earned


@pytest.mark.parametrize("old, new", table(r"""
    [a-z] -> X
    . ->
    \$ -> USD
    lower than -> for
    SEP -> /
"""))
def test_the_shops_expert_on_changed_pages_fails_and_nothing_breaks(old, new, monkeypatch):
    show = pages.Shop.show
    monkeypatch.setattr(pages.Shop, "show", lambda *page, **first: re.sub(old, new, show(*page, **first)))
    found = [*expert_files.experts(shop.WebShop(), None, 5)]
    assert len(found) == 5 and all(0 <= reward < 1 for *_, reward in found)


# ----------------------------------------------------------------------------- files of experts


def turns(role, text, *pairs):
    return [{role: who, text: said} for who, said in pairs]


def row(**changed):
    """A line of a run's experts.jsonl."""
    messages = turns("role", "content", ("user", "say red"), ("assistant", "blue"),
                     ("user", "again"), ("assistant", "red"))
    return {"task": "echo-train-0", "messages": messages, "reward": 1.0, **changed}


def listed(**changed):
    """An entry of a list of ETO's."""
    conversation = turns("from", "value", ("human", "rules"), ("gpt", "OK"), ("human", "say red"),
                         ("gpt", "Action: red"))
    return {"id": "echo_0", "conversations": conversation, **changed}


# Changes of an entry of one of the two forms, where "-" deletes a value -> what is wrong with it
WRONG = table("""
    run system=null -> it has 'system', which is not supported; remove it
    list weight=null -> it has 'weight', which is not supported; remove it
    run messages.3.tool_calls=0 -> turn 4: it has 'tool_calls', which is not supported
    list conversations.3.weight=0 -> turn 4: it has 'weight', which is not supported
    list conversations.3.loss=false -> turn 4: its 'loss' is false, but all replies are trained on
    list conversations.3.loss=0 -> turn 4: its 'loss' is 0, but all replies are trained on
    list conversations.2.loss=true -> turn 3: its 'loss' is true
    run messages.2.role="tool" -> turn 3: its 'role' is 'tool', which is not supported; choose from: user, assistant, human, gpt
    list conversations.0.from="system" -> turn 1: its 'from' is 'system', which is not supported; choose from: user
    run messages.1.content=null -> turn 2: null is not a string
    list conversations.3.value=null -> turn 4: null is not a string
    run reward=- -> it has no 'reward'
    list id=- -> it has no 'id'
    run messages=[] -> the conversation has no reply
    run messages=[] ended="context_limit" turns=2 -> the conversation has no reply
    run messages=[] ended="done" turns=0 -> the conversation has no reply
    list conversations=[] -> the conversation has no reply
    list conversations.3=- -> the conversation has no reply
    run messages.2.role="assistant" -> the messages do not alternate between user and assistant
    run reward=2 -> reward 2 is not in [0, 1]
    list reward=null -> reward None is not in [0, 1]
    run reward=true -> reward True is not in [0, 1]
    list reward=NaN -> reward nan is not in [0, 1]
    list id="echo_-1" -> id 'echo_-1' has a negative number
    list id="echo" -> id 'echo' has no number of a task
    run task="echo-train-7" -> unknown task 'echo-train-7'
    list id="echo_7" -> unknown task 'echo-train-7'
    run messages="x" -> it must be ETO's JSON list
    list conversations=3 -> it must be ETO's JSON list
""")


def changed(entry, changes):
    for path, value in (change.split("=") for change in changes):
        part = entry
        *parents, last = [int(name) if name.isdigit() else name for name in path.split(".")]
        for name in parents:
            part = part[name]
        if value == "-":
            del part[last]
        else:
            part[last] = json.loads(value)
    return entry


@pytest.mark.parametrize("changes, says", WRONG)
def test_an_invalid_expert_is_refused_with_its_position(tmp_path, changes, says):
    """It is the second entry of a list, or the second line."""
    file, (form, *changes) = tmp_path / "experts", changes.split()
    whole, place = (row, "line 2") if form == "run" else (listed, "entry 1")
    rows = [whole(), changed(whole(), changes)]
    file.write_text(json.dumps(rows) if form == "list" else "\n".join(map(json.dumps, rows)))
    said = refusal(expert_files.read_experts, file, Echo())
    assert said.startswith(f"--experts {file}, {place}: ") and says in said and "\n" not in said


def test_all_fields_of_a_runs_trajectories_are_known():
    assert vars(Explored()).keys() <= {"task", "messages", "reward", *expert_files.PLAYED}


def experts_in(folder, rows, env=None, dropped=None):
    """Returns the experts of a file with these rows, and the lines that are printed."""
    lines = []
    file = folder / "experts"
    file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return [*expert_files.experts(env or Echo(), str(file), 0, dropped, lines.append)], lines


def test_a_rollout_whose_context_was_full_before_its_first_reply_is_left_out(tmp_path):
    """The task does not fit, or the first reply does not."""
    full = [row(ended="context_limit", turns=0, messages=row()["messages"][:n], reward=0.0) for n in (0, 1)]
    lines = "\n".join(map(json.dumps, [row(), *full]))
    dropped = Counter()
    assert experts_in(tmp_path, lines, dropped=dropped) == ([("echo-train-0", row()["messages"], 1.0)], [])
    assert dropped == {"too long": 2}


def test_published_entries_are_read_and_those_without_a_reward_counted_in_one_line(tmp_path):
    """In AgentLM's form of the lists, turns have a loss, null or true, and false for the "OK"."""
    masked = listed()
    for said, loss in zip(masked["conversations"], (None, False, None, True)):
        said["loss"] = loss
    found, lines = experts_in(tmp_path, [listed(), listed(reward=0.5), masked])
    messages = [dict(role="user", content="say red"), dict(role="assistant", content="Action: red")]
    assert found == [("echo-train-0", messages, reward) for reward in (1, 0.5, 1)]
    assert lines == [f"{tmp_path}/experts: 2 of 3 expert trajectories have no reward; they count as 1"]


def test_experts_of_another_prompt_view_or_page_are_refused(tmp_path):
    class Told(Echo):
        rules = "Say it."

    class Louder(Echo):
        def start(self, what):
            return super().start(what) + "!"

    assert experts_in(tmp_path, row(), Told("short"))[0] == [("echo-train-0", row()["messages"], 1.0)]
    for env in Told(), Louder():
        assert re.search("echo-train-0 is another task here.*--view", refusal(experts_in, tmp_path, row(), env))
