"""--protocol eto: the prompts of an agent, from a prompt folder, and the text that it is trained on.

The folder here is our own, in the form of those that ETO and IPR publish. Replies are parsed like
in their environments (ETO a2fc5da, IPR 93335a3), which were run for comparison.
"""

import json
import shutil

import pytest
from conftest import make_tokenizer, refusal, table

import coevolve
import environments
from common import settings
from dpo import Trajectory
from engine.chat import Encoder
from engine.rollouts import play_episodes as play
from engine.trajectories import write as write_jsonl
from environments import environment, expert_files

CHAT = [("user", "Observation:\nWebShop [SEP] Instruction: [SEP] a hat [SEP] Search"),
        ("assistant", "Thought: I search.\nAction: search[hat]"),
        ("user", "Observation:\nInstruction: [SEP] a hat [SEP] B0HAT"),
        ("assistant", "Thought: I buy.\nAction: click[B0HAT]")]
RULES = {"webshop": "You shop.\n\nAction: click[something]", "sciworld": "You experiment.\nwait",
         "intercode_sql": "You query."}


def said(turns):
    return [{"role": role, "content": content} for role, content in turns]


def cells(text):
    """Returns the rows of a table whose cells are JSON."""
    return [[*map(json.loads, row)] for row in table(text)]


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


TURNS = cells(r"""
    "I just say it: search[lamp]" -> null
    "Thought: t\nAction:click[x]" -> null
    "Action:" -> null
    "search[rug]" -> null
    "action: search[rug]" -> null
    "**Action:** search[rug]" -> null
    "Thought: t\nAction: search[desk lamp]\nAction: search[rug]" -> "search[desk lamp]"
    " Action: search[dog harness] " -> "search[dog harness]"
    "Action: search[wall clock] now" -> "search[wall clock]"
    "Thought: Action: search[rug]\nObservation: x" -> "search[rug]"
    "Action:  search[lamp]" -> ""
    "Action: \nsearch[lamp]" -> ""
    "Action: `search[lamp]`" -> ""
    "Action: click[Search]" -> ""
    "Action: search[a] and click[b]" -> ""
    "Action: click[nothing]" -> "" """)


def test_an_episode_in_the_shop_turn_by_turn(prompts):
    """Their shop gets the text after the first "Action: ". An invalid action keeps the page."""
    env, ours = make("webshop", prompts), environments.make("webshop")
    page = before = ours.reset("webshop-test-0")
    expected = [("user", RULES["webshop"]), ("assistant", "OK"), *CHAT, ("user", page)]
    replies = [reply for reply, _ in TURNS]
    for reply, action in TURNS:
        if action:
            ours.reset("webshop-test-0")  # one searches there on every page
            page = ours.step(action).observation
        observation = NO_ACTION if action is None else f"Observation:\n{page}"
        expected += [("assistant", reply), ("user", observation)]
    messages, reward = conversation(env, "webshop-test-0", replies)
    assert (messages, reward) == (said(expected), 0.0) and before != page
    env.reset("webshop-test-0")
    assert [env.step(reply).idle for reply in replies] == [not action for _, action in TURNS]


def test_experts_open_without_the_example_and_say_what_ours_say(prompts):
    env, ours = make("webshop", prompts), environments.make("webshop")
    found, expected = [], [RULES["webshop"], "OK"]
    for shop, texts in (env, found), (ours, expected):
        observation = shop.reset("webshop-train-0")
        messages, reward = environments.converse(shop, observation, shop.expert())
        texts += [m["content"].removeprefix(f"{ours.prompt}\n\n") for m in messages] + [reward]
    assert [str(text).removeprefix("Observation:\n") for text in found] == [*map(str, expected)]
    counts = [len(make("webshop", prompts, examples=n).opening("page", True)) for n in range(3)]
    assert counts == [3, 7, 9]  # as many examples as asked for


QUERY = "Action: \n```sql\n{}\n```"


def test_the_observations_of_intercodesql(prompts):
    env = make("intercodesql", prompts)
    task = "intercodesql-train-10"
    question = env.find(task)
    queries = map(QUERY.format, ("SHOW TABLES", "SELECT FROM x", question["gold"]))
    messages, reward = conversation(env, task, ["submit it", *queries, "Action: submit."])
    assert messages[6]["content"] == question["query"] and reward == 1.0
    observations = [m["content"] for m in messages[8::2]]
    no_action, rows, error = [text.removeprefix("Observation: ") for text in observations[:3]]
    assert no_action.startswith("I don't understand your input.\n Your input")
    assert rows.startswith("[(") and not rows.endswith("\n")
    assert error.startswith("Error executing query: You have an error") and error.endswith("\n")
    wrong = f"SELECT * FROM ({question['gold']}) AS t ORDER BY 1 DESC"
    assert conversation(env, task, [QUERY.format(wrong), "Action: submit"])[1] == -1.0


def test_science_opens_with_its_heading_and_a_wrong_first_focus_is_minus_1(prompts):
    science, task = make("scienceworld", prompts), "scienceworld-train-find-animal-0"
    messages, _ = conversation(science, task, ["wait"])
    assert messages[:2] == said([("user", RULES["sciworld"]), ("assistant", "OK")])
    assert messages[6]["content"].startswith("Task Description:\nYour task is to find a(n) animal.")
    assert science.opening(messages[6]["content"])[2]["content"].startswith("Your task is to find")
    moved = ["teleport to kitchen"] * 2
    # After another action the reward is the highest one, and a reply without an action resets it.
    for actions, lowest, highest in (
            (["focus on air"], -1, -1), (["look around", "focus on air"], 0, 1), (moved, 0.01, 1),
            ([*moved, None], 0, 0), (science.inner.gold(), 1, 1)):
        replies = [f"Action: {action}" if action else "wait" for action in actions]
        assert lowest <= conversation(science, task, replies)[1] <= highest
    science.close()


PUBLISHED = r"""[{"id": 17, "reward": 0.8, "source": "gpt", "conversations": [
  {"from": "human", "value": "their rules"}, {"from": "gpt", "value": "OK"},
  {"from": "human", "value": "WebShop [SEP] Instruction: [SEP] x"},
  {"from": "gpt", "value": "Thought: t\nAction: search[x]"},
  {"from": "human", "value": "Observation: [SEP] B0"},
  {"from": "gpt", "value": "Thought: t\nAction: click[buy now]"},
  {"from": "human", "value": "Observation: done"}]},
 {"id": "webshop_18", "conversations": [
  {"from": "human", "value": "WebShop [SEP] Instruction: [SEP] x"},
  {"from": "gpt", "value": "Thought: t\nAction: search[x]"}]}]"""


def test_published_experts_stay_as_their_file_has_them_or_open_like_our_rollouts(prompts, tmp_path):
    """ETO's list of WebShop has a reward and a source beside."""
    file = tmp_path / "published.json"
    file.write_text(PUBLISHED)
    page = "user", "WebShop [SEP] Instruction: [SEP] x"
    search = "assistant", "Thought: t\nAction: search[x]"
    buy = "assistant", "Thought: t\nAction: click[buy now]"
    without = [("user", RULES["webshop"]), ("assistant", "OK"), page, search]
    whole = [("user", "their rules"), *without[1:], ("user", "Observation: [SEP] B0"), buy]
    assert expert_files.read_experts(file, make("webshop", prompts)) == [
        ("webshop-train-17", said(whole), 0.8), ("webshop-train-18", said(without), 1.0)]
    env = environments.make("webshop")
    ours = [("user", f"{env.prompt}\n\n{page[1]}"), search]
    assert expert_files.read_experts(file, env) == [
        ("webshop-train-17", said([*ours, ("user", "[SEP] B0"), buy]), 0.8),
        ("webshop-train-18", said(ours), 1.0)]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(make_tokenizer("chatml"))


def play_scripted(encoder, env, replies):
    """Returns an episode of an agent with fixed replies, each with an end-of-turn token, and the
    ids in its context before each of them."""
    def answer(requests):
        (t, _), = requests
        read.append([*t.ids])
        ids = encoder.ids_after(encoder.template.opening, replies[t.turns])
        return [([*ids, encoder.end_of_turn], [])]

    t, read = Trajectory("webshop-train-0", "target"), []
    play(lambda: env, encoder, [t], answer, slots=1, max_tokens=8000)
    return t, read


SEARCHES = ["no action", "Action: search[desk lamp]", "Action: search[wall clock]"]
SEARCHES += ["Action: click[next >]"] * 7


def test_an_agent_reads_what_theirs_reads_and_is_trained_without_the_example(encoder, prompts):
    env = make("webshop", prompts)
    t, read = play_scripted(encoder, env, SEARCHES)
    expected, _ = conversation(env, t.task, SEARCHES)
    assert t.messages == expected[:-1] and (t.ended, t.turns) == ("turn_limit", 10)
    trained = env.opening(env.reset(t.task)) + expected[7:-1]
    assert "B0HAT" in str(expected) and "B0HAT" not in str(trained)
    assert (t.ids, t.action_mask) == encoder.encode(trained, 3)
    # Each context has the example.
    assert read == [encoder.encode(expected[:7 + 2 * turn], 7)[0] for turn in range(10)]


def test_played_episodes_are_experts_of_their_own_protocol_only(encoder, prompts, tmp_path):
    both, file = [make("webshop", prompts), environments.make("webshop")], tmp_path / "played.jsonl"
    for env, other in (both, both[::-1]):
        t, _ = play_scripted(encoder, env, SEARCHES)
        write_jsonl(file, [vars(t)])
        (task, messages, _), = expert_files.experts(env, str(file), 0)
        expected = encoder.encode(messages, len(env.opening("")))
        assert (task, t.ids, t.action_mask) == (t.task, *expected)
        line = refusal(lambda: next(expert_files.experts(other, str(file), 0)))
        assert "webshop-train-0 is another task here" in line


def test_a_reply_ends_where_theirs_ends(encoder, prompts):
    written, theirs, ours = zip(*cells(r"""
        "Action: a\nObservation: b" -> "Action: a" -> "Action: a"
        "Action: a\nTask: b" -> "Action: a" -> "Action: a\nTask: b"
        "Action: a\n--- b" -> "Action: a" -> "Action: a\n--- b"
        "Observation: b" -> "Observation: b" -> ""
        "x Observation: b" -> "x Observation: b" -> "x"
        "a: b-c --- d" -> "a: b-c --- d" -> "a: b-c --- d" """))
    for env, kept in (make("webshop", prompts), theirs), (environments.make("webshop"), ours):
        t, _ = play_scripted(encoder, env, [*written, *SEARCHES])
        replies = [m["content"] for m in t.messages if m["role"] == "assistant"]
        assert replies[-10:-4] == [*kept]


def test_the_protocol_sets_their_defaults(prompts):
    given = ["--env", "scienceworld", "--model", "m", "--protocol", "eto", "--prompts", prompts]
    s, own = settings.parse(given, coevolve.Settings, coevolve.METHODS, environment)
    assert (s.max_new_tokens, s.temperature, s.sft_lr) == (512, 0.0, 2e-5)
    assert own.task_types == "all"


@pytest.mark.parametrize("file, text", [
    ("instructions/webshop_inst.txt", None), ("icl_examples/webshop_icl.json", None),
    ("icl_examples/webshop_icl.json", '[[{"role": "user", "content": 5}]]')])
def test_a_folder_without_prompts_is_named(prompts, tmp_path, file, text):
    folder = shutil.copytree(prompts, tmp_path / "prompts")
    (folder / file).write_text(text) if text else (folder / file).unlink()
    said = refusal(make, "webshop", str(folder))
    assert said.startswith(f"--prompts {folder}") and file in said and "\n" not in said
