"""--protocol eto: the prompts of an agent, from a prompt folder, and the text that it is trained on.

The folder here is our own, in the form of those that ETO and IPR publish. Replies are parsed like
in their environments (ETO a2fc5da, IPR 93335a3), which were run for comparison.
"""

import json

import pytest
from conftest import make_tokenizer

import coevolve
import environments
from common import settings
from dpo import Trajectory
from engine.chat import Encoder
from engine.rollouts import play
from engine.trajectories import write as write_jsonl
from environments import environment, expert_files
from environments.scienceworld import environment as scienceworld

CHAT = [("user", "Observation:\nWebShop [SEP] Instruction: [SEP] a hat [SEP] Search"),
        ("assistant", "Thought: I search.\nAction: search[hat]"),
        ("user", "Observation:\nInstruction: [SEP] a hat [SEP] B0HAT"),
        ("assistant", "Thought: I buy.\nAction: click[B0HAT]")]
RULES = {"webshop": "You shop.\n\nAction: click[something]", "sciworld": "You experiment.\nwait",
         "intercode_sql": "You query."}


def said(turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompt")
    for kind in ("instructions", "icl_examples"):
        (folder / kind).mkdir()
    for name, text in RULES.items():
        (folder / f"instructions/{name}_inst.txt").write_text(text)
        (folder / f"icl_examples/{name}_icl.json").write_text(
            json.dumps([said(CHAT), said([("user", "2nd"), ("assistant", "Action: b")])]))
    return str(folder)


def make(name, prompts, **options):
    return environments.make(name, protocol="eto", prompts=prompts, **options)


def conversation(env, task, replies):
    """Returns the messages and the reward of an episode with these replies."""
    messages, reward = env.opening(env.reset(task), playing=True), 0.0
    for reply in replies:
        step = env.step(reply)
        messages += said([("assistant", reply), ("user", step.observation)])
        reward = step.reward
        if step.done:
            break
    return messages, reward


NO_ACTION = "Observation: Invalid format. The input must contains 'Action: '"


def test_an_episode_in_the_shop_turn_by_turn(prompts):
    """Their shop gets the text after the first "Action: ". An invalid action keeps the page."""
    env, ours = make("webshop", prompts), environments.make("webshop")
    task, turns = "webshop-test-0", [(reply, None) for reply in (
        "I just say it: search[lamp]", "Thought: t\nAction:click[x]", "Action:", "search[rug]", "action: search[rug]",
        "**Action:** search[rug]")] + [
        ("Thought: t\nAction: search[desk lamp]\nAction: search[rug]", "search[desk lamp]"),
        (" Action: search[dog harness] ", "search[dog harness]"), ("Action: search[wall clock] now", "search[wall clock]"),
        ("Thought: Action: search[rug]\nObservation: x", "search[rug]"), *((reply, "") for reply in (
            "Action:  search[lamp]", "Action: \nsearch[lamp]", "Action: `search[lamp]`", "Action: click[Search]",
            "Action: search[a] and click[b]", "Action: click[nothing]"))]
    page = before = ours.reset(task)
    expected = [("user", RULES["webshop"]), ("assistant", "OK"), *CHAT, ("user", page)]
    for reply, action in turns:
        if action:
            ours.reset(task)  # one searches there on every page
            page = ours.step(action).observation
        expected += [("assistant", reply), ("user", NO_ACTION if action is None else f"Observation:\n{page}")]
    messages, reward = conversation(env, task, [reply for reply, _ in turns])
    assert (messages, reward) == (said(expected), 0.0) and before != page
    env.reset(task)
    assert [env.step(reply).idle for reply, _ in turns] == [not action for _, action in turns]


def test_experts_open_without_the_example_and_say_what_ours_say(prompts):
    env, ours = make("webshop", prompts), environments.make("webshop")
    for task in env.tasks("train")[:3]:
        messages, reward = environments.converse(env, env.reset(task), env.expert())
        own, own_reward = environments.converse(ours, ours.reset(task), ours.expert())
        bare = [m["content"].removeprefix("Observation:\n") for m in messages[3:]]
        assert (bare, reward) == ([m["content"] for m in own[1:]], own_reward)
        assert messages[:3] == said([("user", RULES["webshop"]), ("assistant", "OK"),
                                     ("user", own[0]["content"].removeprefix(f"{ours.prompt}\n\n"))])
    counts = [len(make("webshop", prompts, examples=n).opening("page", True)) for n in range(3)]
    assert counts == [3, 7, 9]  # as many examples as asked for


def test_the_observations_of_intercodesql(prompts):
    env = make("intercodesql", prompts)
    task = env.tasks("train")[0]
    question = env.find(task)
    messages, reward = conversation(env, task, ["submit it", *map(
        "Action: \n```sql\n{}\n```".format, ("SHOW TABLES", "SELECT FROM x", question["gold"])),
        "Action: submit."])
    assert messages[6]["content"] == question["query"] and reward == 1.0
    read = [m["content"] for m in messages[8::2]]
    assert read[0].startswith("Observation: I don't understand your input.\n Your input")
    assert read[1].startswith("Observation: [(") and not read[1].endswith("\n")
    assert read[2].startswith("Observation: Error executing query: You have an error")
    assert read[2].endswith("\n")
    turned = "Action: \n```sql\nSELECT * FROM ({}) AS t ORDER BY 1 DESC\n```"
    assert {-1.0, 1.0} < {conversation(env, task, [  # a wrong answer may earn less than 0
        turned.format(env.find(task)["gold"]), "Action: submit"])[1] for task in env.tasks("test")[:60]}


def test_science_opens_with_its_heading_and_a_wrong_first_focus_is_minus_1(prompts, monkeypatch):
    monkeypatch.setattr(scienceworld._Simulator, "options", [*scienceworld._Simulator.options, "-XX:TieredStopAtLevel=1"])
    science, task = make("scienceworld", prompts), "scienceworld-train-find-animal-0"
    messages, reward = conversation(science, task, ["Action: focus on air"])
    assert messages[:2] == said([("user", RULES["sciworld"]), ("assistant", "OK")])
    assert messages[6]["content"].startswith("Task Description:\nYour task is to find a(n) animal.")
    assert messages[-1]["content"].startswith("Observation: ") and reward == -1.0
    assert science.opening(messages[6]["content"])[2]["content"].startswith("Your task is to find")
    science.reset(task)
    assert conversation(science, task, [f"Action: {a}" for a in science.inner.gold()])[1] == 1.0
    # Not the first: what had been reached before. One without an action forgets it.
    assert conversation(science, task, ["Action: look around", "Action: focus on air"])[1] >= 0
    reached = ["Action: teleport to kitchen"] * 2
    assert conversation(science, task, reached)[1] > 0
    assert conversation(science, task, reached + ["wait", "wait1"])[1] == 0.0
    science.close()


def entry(turns, id, **more):
    roles = {"user": "human", "assistant": "gpt"}
    return {"id": id, "conversations": [{"from": roles[r], "value": v} for r, v in turns], **more}


PUBLISHED = [("user", "their rules"), ("assistant", "OK"), ("user", "WebShop [SEP] Instruction: [SEP] x"),
             ("assistant", "Thought: t\nAction: search[x]"), ("user", "Observation: [SEP] B0"),
             ("assistant", "Thought: t\nAction: click[buy now]"), ("user", "Observation: done")]


def test_published_experts_stay_as_their_file_has_them_or_open_like_our_rollouts(prompts, tmp_path):
    """ETO's list of WebShop has a reward and a source beside."""
    (tmp_path / "f").write_text(json.dumps([entry(PUBLISHED, 17, reward=0.8, source="gpt"),
                                            entry(PUBLISHED[2:], "webshop_18")]))
    (_, whole, _), (_, without, _) = expert_files.read_experts(
        tmp_path / "f", make("webshop", prompts))
    assert whole == said(PUBLISHED[:-1])
    assert without == said([("user", RULES["webshop"]), ("assistant", "OK"), *PUBLISHED[2:-1]])
    env = environments.make("webshop")
    turns = said([("user", f"{env.prompt}\n\n{PUBLISHED[2][1]}"), PUBLISHED[3], ("user", "[SEP] B0"),
                  PUBLISHED[5]])
    assert expert_files.read_experts(tmp_path / "f", env) == [
        ("webshop-train-17", turns, 0.8), ("webshop-train-18", turns, 1.0)]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(make_tokenizer("chatml"))


def play_scripted(encoder, env, tasks, replies):
    """Returns episodes of an agent with fixed replies, each with an end-of-turn token, and the ids
    in its context before each of them."""
    def answer(asked):
        read.extend(list(t.ids) for t, _ in asked)
        return [([*encoder.ids_after(encoder.template.opening, replies[t.turns]), encoder.end_of_turn], [])
                for t, _ in asked]

    rows, read = [Trajectory(task, "target") for task in tasks], []
    play(lambda: env, encoder, rows, answer, slots=1, max_tokens=8000)
    return rows, read


def test_an_agent_reads_what_theirs_reads_and_is_trained_without_the_example(encoder, prompts):
    env = make("webshop", prompts)
    replies = ["no action", "Thought: t\nAction: search[desk lamp]", "Action: search[wall clock]"] + [
        "Action: click[next >]"] * 7
    rows, read = play_scripted(encoder, env, ["webshop-train-0", "webshop-train-1"], replies)
    for n, row in enumerate(rows):
        expected, _ = conversation(env, row.task, replies)
        assert row.messages == expected[:-1] and row.ended == "turn_limit" and row.turns == 10
        trained = env.opening(env.reset(row.task)) + expected[7:-1]
        assert "B0HAT" in str(expected) and "B0HAT" not in str(trained)
        assert [row.ids, row.action_mask] == list(encoder.encode(trained, 3))
        for turn in range(10):  # it goes on reading the example
            shown = encoder.encode(expected[:7 + 2 * turn], 7)[0]
            assert read[10 * n + turn] == shown


def test_played_episodes_are_experts_of_their_own_protocol_only(encoder, prompts, tmp_path):
    both = make("webshop", prompts), environments.make("webshop")
    for env, other in (both, both[::-1]):
        tasks, file = ["webshop-train-0", "webshop-train-1"], tmp_path / "played.jsonl"
        rows, _ = play_scripted(encoder, env, tasks, ["Action: search[desk lamp]"] + ["Action: click[next >]"] * 9)
        write_jsonl(file, [vars(row) for row in rows])
        found = [*expert_files.experts(env, str(file), 0)]
        assert [task for task, _, _ in found] == tasks
        for row, (_, messages, _) in zip(rows, found):
            assert [row.ids, row.action_mask] == list(encoder.encode(messages, len(env.opening(""))))
        with pytest.raises(environments.UsageError, match="webshop-train-0 is another task here"):
            next(expert_files.experts(other, str(file), 0))


def test_a_reply_ends_where_theirs_ends(encoder, prompts):
    replies = {  # what is written -> what stays by their protocol, and by ours
        "Action: a\nObservation: b": ("Action: a", "Action: a"), "Action: a\nTask: b": ("Action: a", "Action: a\nTask: b"),
        "Action: a\n--- b": ("Action: a", "Action: a\n--- b"), "Observation: b": ("Observation: b", ""),
        "x Observation: b": ("x Observation: b", "x"), "a: b-c --- d": ("a: b-c --- d", "a: b-c --- d")}
    for n, env in enumerate((make("webshop", prompts), environments.make("webshop"))):
        (row,), _ = play_scripted(encoder, env, ["webshop-train-0"], [*replies, *["x"] * 4])
        said = [m["content"] for m in row.messages if m["role"] == "assistant"][-10:]
        assert said[:6] == [kept[n] for kept in replies.values()]


def test_the_protocol_sets_their_defaults(prompts):
    given = ["--env", "scienceworld", "--model", "m", "--protocol", "eto", "--prompts", prompts]

    def parse(*more):
        return settings.parse([*given, *more], coevolve.Settings, coevolve.METHODS, environment)

    s, own = parse()
    assert (s.max_new_tokens, s.temperature, s.sft_lr) == (512, 0.0, 2e-5)
    assert (own.protocol, own.prompts, own.task_types) == ("eto", prompts, "all")
    assert parse("--temperature", "0.5")[0].temperature == 0.5


INSTRUCTION, EXAMPLES = "instructions/webshop_inst.txt", "icl_examples/webshop_icl.json"


@pytest.mark.parametrize("file, text", [
    (INSTRUCTION, None), (EXAMPLES, None), (EXAMPLES, '[[{"role": "user", "content": 5}]]')])
def test_a_folder_without_prompts_is_named(tmp_path, file, text):
    for name in (INSTRUCTION, EXAMPLES):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps([said(CHAT)]))
    path = tmp_path / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(environments.UsageError, match=rf"^--prompts {tmp_path}.*{path.name}.*$"):
        make("webshop", str(tmp_path))
