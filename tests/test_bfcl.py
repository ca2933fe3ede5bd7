"""BFCL multi-turn: results and verdicts compared with the package's, turns, hostile calls, splits."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("bfcl_eval", reason="without bfcl-eval; run.sh bfcl says how to get it")
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils as package  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (  # noqa: E402
    multi_turn_checker,
)

import environments  # noqa: E402
import envs  # noqa: E402
from environments import make  # noqa: E402
from environments.bfcl import data  # noqa: E402
from environments.bfcl.calls import (  # noqa: E402
    DONE,
    MAX_CALLS,
    MAX_REPLIES,
    MISSING,
    Simulators,
    as_reply,
    failed,
    parse_calls,
    script,
)
from environments.bfcl.data import CATEGORIES, MORE_FUNCTIONS, SIZES, start_state, tasks  # noqa: E402
from environments.bfcl.environment import Bfcl  # noqa: E402
from evolve import tells

ROOT = Path(__file__).parents[1]
PACKAGE = Path(package.__file__).parents[2]
ROWS = {}      # the package's id -> its test entry
TRUTHS = {}    # the package's id -> its ground truth
for category in CATEGORIES:
    name = f"BFCL_v4_multi_turn_{category}.json"
    for folder, found in (("data", ROWS), ("data/possible_answer", TRUTHS)):
        for line in (PACKAGE / folder / name).read_text().splitlines():
            row = json.loads(line)
            found[row["id"]] = row if found is ROWS else row["ground_truth"]


def package_id(key):
    category, _, number = key.rpartition("-")
    return f"multi_turn_{category.replace('-', '_')}_{number}"


def forget():
    """Deletes the package's simulators, which it keeps by the names of model and task."""
    for name in [name for name in vars(package) if name.endswith("_instance")]:
        del vars(package)[name]


def package_run(key, calls):
    """Returns the package's results of calls, which are Python, and its simulators."""
    id = package_id(key)
    return package.execute_multi_turn_func_call(
        calls, ROWS[id]["initial_config"], ROWS[id]["involved_classes"], "m", id,
        long_context="long_context" in id)


def as_python(call):
    given = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
    return f"{call['name']}({given})"


def verdict(key, turns):
    """Returns the package's verdict on replies, which are lists of calls, turn by turn."""
    forget()
    id = package_id(key)
    said = [[[as_python(call) for call in reply] for reply in turn] for turn in turns]
    return multi_turn_checker(said, TRUTHS[id], ROWS[id], id.rpartition("_")[0], "m")["valid"]


ENVS = {(category, reward): Bfcl("short", category, "published", reward)
        for category in CATEGORIES for reward in ("all", "turns")}


def env_of(key, reward="all"):
    return ENVS[key.rpartition("-")[0].replace("-", "_"), reward]


def play(env, task, replies):
    """Returns the last step of an episode with these replies."""
    env.reset(task)
    for reply in replies:
        step = env.step(reply)
        if step.done:
            return step
    return step


def reward(key, turns, counts="all"):
    replies = [reply for turn in turns for reply in (*map(as_reply, turn), "so much for this")]
    step = play(env_of(key, counts), f"bfcl-test-{key}", replies)
    assert step.done
    return step.reward


def all_tasks():
    return [(key, task) for category in CATEGORIES for key, task in tasks(category).items()]


def one_by_one(task):
    """Returns the replies of the ground truth, with one call each unless there are too many."""
    return [[[call] for call in turn] if len(turn) <= MAX_REPLIES else [turn]
            for turn in task["calls"]]


def block(name, /, **arguments):
    return as_reply([dict(name=name, arguments=arguments)])


def state(value):
    """Returns the public attributes of simulators, in a form that can be compared."""
    if hasattr(value, "__dict__"):
        return type(value).__name__, {name: state(inner) for name, inner in vars(value).items()
                                      if name[0] != "_" and name != "parent"}
    if isinstance(value, dict):
        return [(name, state(inner)) for name, inner in value.items()]
    return [state(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def test_every_call_of_the_ground_truths_returns_and_leaves_what_the_packages_executor_does():
    made = 0
    for key, task in all_tasks():
        forget()
        ours = Simulators(task["start"])
        for theirs, calls in zip(TRUTHS[package_id(key)], task["calls"], strict=True):
            results, instances = package_run(key, theirs)
            assert [ours.run(call) for call in calls] == results, key
            assert {name: state(instance) for name, instance in ours.instances.items()} == {
                name: state(instance) for name, instance in instances.items()}, key
            made += len(calls)
    assert made == 4625


def test_ground_truths_are_right_and_without_their_last_call_wrong():
    for key, task in all_tasks()[::4]:
        turns = [[turn] if turn else [] for turn in task["calls"]]
        assert reward(key, turns) == 1 and verdict(key, turns), key
        last = next(turn for turn in reversed(turns) if turn)
        last[0] = last[0][:-1]
        assert reward(key, turns) == 0 and not verdict(key, turns), key


VALUES = ["", " ", "x", 0, 1, -1, 2.5, True, None, [], ["a"], {}, {"a": 1}, "..", "/", "AAPL"]


def damaged(rng, key, task):
    """Returns the replies of the ground truth after one to three random changes."""
    turns = json.loads(json.dumps(task["calls"]))
    functions = [row for name in start_state(key)["classes"]
                 for row in data.documents(name).values()]
    for _ in range(rng.randint(1, 3)):
        places = [(turn, n) for turn in turns for n in range(len(turn))]
        if not places:
            break
        turn, n = rng.choice(places)
        call, new = turn[n], rng.choice(functions)
        new = dict(name=new["name"], arguments={argument: rng.choice(VALUES) for argument in
                                                new["parameters"]["properties"]})
        argument = rng.choice([*call["arguments"], "unknown"])
        rng.choice([
            lambda: turn.pop(n), lambda: rng.choice(turns).append(turn.pop(n)),
            lambda: rng.shuffle(turn), lambda: turn.insert(n, dict(call)),
            lambda: turn.insert(n, new), lambda: call.update(name=new["name"]),
            lambda: call["arguments"].update({argument: rng.choice(VALUES)}),
            lambda: call["arguments"].pop(argument, None)])()
    return one_by_one(dict(calls=turns))


def test_randomly_changed_replies_get_the_verdict_of_the_package():
    rng, found = random.Random(0), Counter()
    for _ in range(150):
        key, task = rng.choice(all_tasks())
        turns = damaged(rng, key, task)
        mine, share = reward(key, turns), reward(key, turns, "turns")
        assert mine == verdict(key, turns), (key, turns)
        assert (share == 1) == (mine == 1) and 0 <= share <= 1
        found["right" if mine else "partly" if share else "wrong"] += 1
    assert min(found["right"], found["partly"], found["wrong"]) > 15, found


def test_one_episode_leaves_nothing_to_the_next():
    """Long contexts are shared between the package's simulators."""
    keys = [key for key in tasks("long_context") if "TravelAPI" in start_state(key)["classes"]]
    before = [Simulators(key).states() for key in keys]
    for key in keys:
        simulators = Simulators(key)
        for card in simulators.instances["TravelAPI"].credit_card_list.values():
            card["balance"] = -1
        assert simulators.states() not in before
    assert [Simulators(key).states() for key in keys] == before


FILES = "bfcl-test-base-0"  # four turns about files, the first of three calls


def test_a_reply_with_calls_is_answered_with_results_and_one_without_with_the_next_turn():
    env = env_of("base-0")
    texts, truth = env.find(FILES)["turns"], env.find(FILES)["calls"]
    opening = env.reset(FILES)
    assert opening.endswith(f"</tools>\n\n{texts[0]}") and "mkdir(dir_name: string): " in opening
    step = env.step(as_reply(truth[0]))
    assert step.observation == "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in (
        '{"current_working_directory": "document"}', "None",
        "{\"result\": \"'final_report.pdf' moved to 'temp/final_report.pdf'\"}"))
    for n, calls in enumerate(truth[1:], 1):
        assert env.step("I have done it.") == envs.Step(texts[n], 0.0, False)
        for call in calls:
            assert not env.step(as_reply([call])).done
    assert env.step("") == envs.Step("The conversation is over.", 1.0, True)


@pytest.mark.parametrize("counts, share", [("all", 0.0), ("turns", 0.25)])
def test_twenty_replies_with_calls_are_a_turns_and_the_next_ends_the_episode(counts, share):
    env, calls = env_of("base-0", counts), env_of("base-0").find(FILES)["calls"]
    env.reset(FILES)
    assert env.max_turns == 4 * (MAX_REPLIES + 1)
    for _ in range(MAX_REPLIES - 1):
        assert not env.step(block("ls")).done
    assert not env.step(as_reply(calls[0])).done and not env.step("done").done
    for _ in range(MAX_REPLIES):
        assert not env.step(block("no_such")).done
    step = env.step(as_reply(calls[1]))
    assert step.done and step.reward == share and "More than 20 replies" in step.observation


def test_a_missing_function_is_documented_in_its_turn_and_can_be_called_before():
    env = env_of("miss-func-0")  # sort, in the fourth of five turns
    task = env.find("bfcl-test-miss-func-0")
    assert task["hidden"] == {"3": ["sort"]} and task["calls"][2] == []
    assert "\nsort(" not in env.reset("bfcl-test-miss-func-0")
    for n in (1, 2):
        assert env.step("done").observation == task["turns"][n]
    shown = env.step(MISSING).observation
    assert shown.startswith("<tools>\nsort(file_name: string): ")
    assert shown.endswith(f"</tools>\n\n{MORE_FUNCTIONS}") and shown.count("\n") == 4
    assert "not defined" not in env.step(block("sort", file_name="x")).observation
    full = Bfcl("full", "miss_func").reset("bfcl-train-miss-func-127")
    documents = full.partition("</tools>")[0].splitlines()[1:]
    assert {"name", "description", "parameters"} <= json.loads(documents[0]).keys()


def test_the_expert_calls_one_at_a_time_ends_turns_in_words_and_is_right():
    env = make("bfcl", bfcl_category="all")
    for task in env.tasks("validation"):
        messages, earned = environments.converse(env, env.reset(task), env.expert())
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        assert earned == 1 and replies == script(env.find(task)["calls"])
        assert messages[0]["content"].startswith(env.prompt) and len(replies) <= env.max_turns
        assert sum(reply in (DONE, MISSING) for reply in replies) == len(env.find(task)["turns"])
    crowded = tasks("long_context")["long-context-38"]["calls"]  # 34 calls in a turn
    assert max(map(len, crowded)) == 34 and max(len(parse_calls(r)) for r in script(crowded)) == 2


LS = dict(name="ls", arguments={})
TEXT = json.dumps(LS)
CD = dict(name="cd", arguments={"folder": "a"})


OTHER = [{"id": "call_1", **LS}, {"arguments": {}, "type": "function", "name": "ls", "index": 0},
         {"name": "ls", "arguments": "{}"}, {"name": "ls", "arguments": " { }\n"}]  # as bfcl-eval's handlers
FORMS = [  # reply -> its calls
    (f"I look.\n<tool_call>\n{TEXT}\n</tool_call> So.", [LS]), (as_reply([LS, CD]), [LS, CD]),
    (f"<tool_call>{json.dumps([LS, CD])}</tool_call>", [LS, CD]),
    (f"First\n```json\n{TEXT}\n```\nthen\n```json\n[{TEXT}]```", [LS, LS]), (TEXT, [LS]),
    (f"  [{TEXT}, {TEXT}]\n", [LS, LS]), (f"<think>maybe {as_reply([CD])}</think>\n{as_reply([LS])}", [LS]),
    (f"```json\n{TEXT}\n``` or <tool_call>{json.dumps(CD)}</tool_call>", [CD]), (json.dumps(OTHER), [LS] * 4),
    # no call: words, half a form, another form
    *[(reply, []) for reply in (
        "", "ls()", "3", "{}", f"I call {TEXT}", f"<tool_call>{TEXT}", f"<think>{as_reply([LS])}", f"```\n{TEXT}\n```",
        f"{TEXT} {TEXT}", '{"name": "ls", "parameters": {}}', "<tool_call>ls()</tool_call>",
        "<tool_call>{'name': 'ls', 'arguments': {}}</tool_call>", f"[[{TEXT}]]")],
]


def test_the_form_of_a_call():
    for reply, calls in FORMS:
        assert parse_calls(reply) == calls, reply
    found = parse_calls(f"{as_reply([LS])}<tool_call>cd a</tool_call>{as_reply([CD])}")
    assert found[0] == LS and found[1].startswith("not a call") and found[2] == CD
    found = parse_calls(json.dumps([LS] * 70))
    assert found[:-1] == [LS] * MAX_CALLS and "at most 50 calls" in found[-1]


DEEP = "[" * 100_000
HOSTILE = {  # one a class: reply -> what its observation says
    **{block(name): "is not defined" for name in (
        "__init__", "_load_scenario", "eval", "__import__('os').getcwd", "GorillaFileSystem.ls", "self", "root",
        "ｌｓ", "ls\u200b", "\ud800", "", "place_order", "x" * 10_000)},
    **{json.dumps(dict(name=name, arguments=arguments)): "a call is <tool_call>" for name, arguments in [
        ("cd", ["document"]), ("cd", None), (1, {}), ({"cd": 1}, {}), *[
            ("ls", text) for text in ("", "a", "[1]", "{", '"{}"', "7", "[" * 9000)]]},
    **{block("cd", **arguments): found for arguments, found in [
        ({"dir": "document"}, "unexpected keyword"), ({"self": 1, "folder": "document"}, "multiple values"),
        ({}, "missing 1 required"), ({"folder": {"a": 1}}, "Error during"), ({"folder": None}, "Error during"),
        ({"folder": "\ud800"}, "surrogate"), ({"\ud800": "a"}, "surrogate"), ({"folder": 10 ** 20}, "20 digits"),
        ({"folder": [float("nan")]}, "infinite"), ({"folder": "document/../../etc"}, "Unsupported path"),
        ({"folder": "__import__('os')"}, "No such")]},
    '{"name": "cd", "arguments": {"folder": 1e999}}': "infinite",
    '{"name": "cd", "arguments": {"folder": %s}}' % ("9" * 5000): "20 digits",
    '{"name": "cd", "arguments": {"folder": %s}}' % ("[" * 30 + "]" * 30): "too deep",
    '{"name": "cd", "arguments": {"folder": %s}}' % ("[" * 950 + "]" * 950): "too deep",
    DEEP: "too deep", f"<tool_call>{DEEP}</tool_call>": "at most 100000",
    block("echo", content="x" * 9_000_000): "at most 100000", json.dumps([LS] * 100_000): "at most 100000",
    "<tool_call>" * 500_000: None, "```json\n```" * 200_000: None, "\0": None, "</tool_response>": None,
}


def test_hostile_calls_are_observations_and_nothing_else(monkeypatch):
    def reached(*_):
        raise AssertionError("a text was evaluated")

    env = env_of("base-0")
    env.reset(FILES)  # it imports the simulators, which executes their modules
    before = env.simulators.states()
    monkeypatch.setattr("builtins.eval", reached)
    monkeypatch.setattr("builtins.exec", reached)
    monkeypatch.setattr(package, "execute_multi_turn_func_call", reached)
    for reply, found in HOSTILE.items():
        env.reset(FILES)
        step = env.step(reply)
        step.observation.encode()
        assert (found or env.find(FILES)["turns"][1]) in step.observation, reply[:100]
        assert (step.reward, step.done) == (0.0, False) and len(step.observation) < 500
        assert env.simulators.states() == before, reply[:100]


MATHS = next(key for key in tasks("base") if "MathAPI" in start_state(key)["classes"])


def test_numbers_that_would_take_the_machine_are_refused():
    for name, arguments, found in [
            ("power", dict(base=10, exponent=10 ** 9), "at most 1000"), ("power", dict(base=0, exponent=-1), "Error"),
            *[("logarithm", dict(value=2, base=3, precision=n), "at most 1000")
              for n in (10 ** 9, "1000000000", " 1_000_000_000", "\uff11\uff10\uff10\uff10\uff10", 1e300)],
            *[("logarithm", dict(value=8, base=2, precision=n), "{'result': mpf('3.0')}") for n in (5, "5", " 5 ", 5.5)],
            ("square_root", dict(number=2, precision=10 ** 9), "at most 1000"),
            ("square_root", dict(number=2, precision=5), "Decimal('1.4142')"),
            ("round_number", dict(number=5, decimal_places=-10 ** 9), "at most 1000"),
            ("mean", dict(numbers=[1e308] * 2), "Infinity")]:
        assert found in Simulators(MATHS).run(dict(name=name, arguments=arguments)), (name, arguments)


def test_a_file_system_that_holds_itself_or_doubles_ends_in_errors():
    env, copied = env_of("base-0"), block("cp", source="a", destination="a")
    env.reset(FILES)
    env.step(block("mkdir", dir_name="a") + copied)  # the package's: a in itself
    assert "beyond 5000 paths" in env.step(block("find") + block("du")).observation
    assert env.simulators.states() and not env.step("next").done
    env.reset(FILES)
    for n in range(MAX_REPLIES):
        reply = "".join(block("cp", source="document", destination=f"d{n}{m}")
                        + block("mv", source=f"d{n}{m}", destination="document") for m in range(5))
        step = env.step(reply + block("find"))
    assert "beyond 5000 paths" in step.observation and env.step("next").reward == 0


def test_numbers_as_text_have_the_result_of_the_package():
    tried = 0
    for key, task in all_tasks():
        calls = [dict(name=call["name"], arguments={
            name: str(value) if type(value) in (int, float) else value for name, value in call["arguments"].items()})
            for turn in task["calls"] for call in turn]
        if calls == sum(task["calls"], []):
            continue
        forget()
        results, _ = package_run(key, map(as_python, calls))
        assert list(map(Simulators(task["start"]).run, calls)) == results, key
        tried += 1
    assert tried == 560


def test_a_reply_without_a_known_call_is_idle():
    env = make("bfcl", "short")
    env.reset(FILES)
    for reply, idle in ((block("ls"), False), (block("none") + block("ls"), False), (block("none"), True)):
        assert env.step(reply).idle == idle, reply


def test_concurrent_calls_keep_their_own_precision():
    calls = [dict(name="logarithm", arguments=dict(value=10, base=3, precision=n)) for n in range(5, 40)] * 20
    want = list(map(Simulators(MATHS).run, calls))
    assert len(set(want)) == 35
    with ThreadPoolExecutor(8) as pool:
        assert all(told == want for told in pool.map(
            lambda _: list(map(Simulators(MATHS).run, calls)), range(8)))


def test_a_task_does_not_depend_on_the_process_the_time_zone_or_the_time():
    code = """if True:
        import hashlib, json
        from environments.bfcl.environment import Bfcl, script
        env, told = Bfcl("short", "all"), []
        for task in env.tasks("train")[::16]:
            told.append(env.reset(task))
            for reply in script(env.find(task)["calls"]):
                told.append(env.step(reply).observation)
        from environments.bfcl.calls import Simulators
        from environments.bfcl.data import tasks
        for s in map(Simulators, tasks("base")):  # texts of sets, and of the time
            calls = [("trading_login", dict(username="a", password="b")),
                     ("fund_account", dict(amount=5)), ("get_transaction_history", {}),
                     ("edit_ticket", dict(ticket_id=1, updates={c: c for c in "qwertyuiop"}))]
            if travel := s.instances.get("TravelAPI"):
                calls += [("verify_traveler_information", dict(
                    first_name=travel.user_first_name, last_name=travel.user_last_name,
                    date_of_birth="2007-01-01", passport_number="US1"))]
                calls += [("book_flight", dict(
                    access_token=travel.access_token, card_id=card, travel_date="2024-01-01",
                    travel_from="SFO", travel_to="LAX", travel_class="royal"))
                    for card in travel.credit_card_list]
            told += [s.run(dict(name=name, arguments=arguments)) for name, arguments in calls]
        kinds = ["Invalid fields", "Must be one of {", "at least 18", "2024-09-0"]
        print([any(kind in text for text in told) for kind in kinds],
              hashlib.sha256(json.dumps(told).encode()).hexdigest())"""
    said = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, check=True,
                           capture_output=True, env={**os.environ, "TZ": zone, "PYTHONHASHSEED": seed}).stdout
            for zone, seed in [("UTC", "0"), ("Asia/Kathmandu", "1")]}
    assert len(said) == 1 and said.pop().startswith("[True, True, True, True]")


def test_splits_have_their_sizes_and_no_start_state_on_two_sides():
    sides, numbers = {}, {split: set() for split in SIZES}
    for category in (*CATEGORIES, "all"):
        env, times = make("bfcl", bfcl_category=category), 4 if category == "all" else 1
        assert {split: len({*env.tasks(split)}) for split in env.splits} == {
            split: times * size for split, size in SIZES.items()}
        for split in env.splits:
            numbers[split] |= {task.rpartition("-")[2] for task in env.tasks(split)}
            for task in env.tasks(split):
                config = json.dumps(start_state(env.find(task)["start"])["config"], sort_keys=True)
                assert sides.setdefault(config, split) == split, task
    assert {split: len(found) for split, found in numbers.items()} == SIZES  # alike in all categories
    assert set.union(*numbers.values()) == {str(n) for n in range(200)}


def test_splits_are_what_they_were_and_the_published_one_tests_all():
    ours, published = make("bfcl"), make("bfcl", bfcl_split="published")
    assert ours.tasks("train")[:3] == ["bfcl-train-base-127", "bfcl-train-base-177", "bfcl-train-base-15"]
    assert published.tasks("train") == ours.tasks("train") and len(set(published.tasks("test"))) == 200


# ------------------------------------------------------------------------------------ new tasks


@pytest.fixture(scope="module")
def files():
    """An environment, its generator, a training task about files, and a new one of its start."""
    env = make("bfcl", "short")
    task = next(task for task in env.tasks("train")
                if "GorillaFileSystem" in start_state(env.find(task)["start"])["classes"])
    return env, env.task_generator(), task, dict(
        start=env.find(task)["start"], turns=["What files are here?"], calls=[[LS]])


def call_of(name, /, **arguments):
    return dict(name=name, arguments=arguments)


def explored(rng, env, task):
    """Returns replies with a random part of the ground truth's calls, and with others."""
    names = data.functions(env.find(task)["start"])
    pool = [call for key in tasks("base") for turn in tasks("base")[key]["calls"] for call in turn
            if call["name"] in names]
    calls = [call for turn in env.find(task)["calls"] for call in turn if rng.random() < 0.7]
    for _ in range(rng.randint(1, 5)):
        calls.insert(rng.randint(0, len(calls)), rng.choice(pool))
    return [as_reply([call]) for call in calls]


def test_what_was_done_becomes_tasks_that_verify_and_are_new():
    env = make("bfcl", "short")
    generator, rng, verdicts, kept = env.task_generator(), random.Random(0), Counter(), []
    for task in env.tasks("train")[:20]:
        replies = explored(rng, env, task)
        made = [call for reply in replies for call in parse_calls(reply)]
        simulators = Simulators(env.find(task)["start"])
        names = [call["name"] for call in made if not failed(simulators.run(call))]
        assert generator.patterns(task, replies) == {
            *names, *(f"{a}, {b}" for a, b in zip(names, names[1:]))}
        for proposal in generator.finds(task, replies, rng):
            assert proposal["template"] and proposal["text"] and json.dumps(proposal)
            assert not tells(proposal["text"], proposal["solution"])
            reason = generator.refusal(proposal["task"]) or generator.verify(proposal)
            verdicts[reason] += 1
            kept += [] if reason else [proposal]
    assert verdicts[None] > 15 and verdicts[None] > 0.8 * verdicts.total(), verdicts
    assert any(len(p["task"]["turns"]) > 1 for p in kept)
    both = [p["task"]["calls"] for p in kept]  # one row of calls, in one turn and in several
    assert any(len(a) == 1 < len(b) and a[0] == sum(b, []) for a, b in zip(both, both[1:]))
    for proposal in kept[:10]:
        id = env.add(proposal["task"])
        assert environments.converse(env, env.reset(id), env.expert())[1] == 1


def test_planted_proposals_are_refused(files):
    env, generator, task, new = files
    test, start = env.find(env.tasks("test")[3]), new["start"]
    assert generator.refusal(new) is None and generator.refusal(env.find(task)) == "a task of a split"
    others = [key for key in tasks("base") if start_state(key)["classes"] == start_state(start)["classes"]
              and f"bfcl-train-{key}" not in env.tasks("train")]
    for key in others:
        other = tasks("base")[key]
        spelled = json.loads(json.dumps(other["calls"]))
        for call in sum(spelled, []):  # with arguments that say what is so if nothing is said
            known = generator.functions[call["name"]]["parameters"]["properties"]
            call["arguments"] |= {name: what["default"] for name, what in known.items()
                                  if name not in call["arguments"] and "default" in what}
        if spelled != other["calls"]:
            break
    assert spelled != other["calls"]
    for wrong, named in [
            ({"start": test["start"]}, "no start state of a training task"),
            ({"turns": [test["turns"][0]]}, "a task of a split"),
            *[({"turns": ["x"] * len(calls), "calls": calls}, "a task of a split") for calls in (other["calls"], spelled)],
            ({"calls": [[call_of("_load_scenario")]]}, "no function '_load_scenario'"),
            ({"calls": [[dict(name="ls", arguments=[])]]}, "a call is")]:
        assert named in generator.refusal({**new, **wrong})


def test_a_solution_that_does_not_prove_its_task_is_refused(files):
    env, generator, _, new = files

    def verdict(calls, solution=None, start=new["start"], text="A folder, alpha. At none."):
        return generator.verify(dict(solution=solution or script(calls), task=dict(
            start=start, turns=[text] * len(calls), calls=calls)))

    folder, none, here, pwd = (call_of("mkdir", dir_name="alpha"), call_of("cat", file_name="none"),
                               call_of("cd", folder="."), call_of("pwd"))
    assert verdict([[folder, LS]]) is None and verdict([[folder]]) is None
    assert verdict([[LS, LS]]) is None  # results are counted
    assert verdict([[folder, none]]) == "a call of its solution fails"
    for solution in (["I am done"], script([[LS]])):
        assert verdict([[folder, LS]], solution) == "its solution earns 0.00"
    assert verdict([[pwd], [here, pwd]]) == "it is solved without its last call"
    cars = next(key for key in env.splits["train"] if "VehicleControlAPI" in start_state(key)["classes"])
    outside = call_of("get_outside_temperature_from_google")
    assert verdict([[outside]], start=cars) is None  # what is drawn is drawn again


def test_tasks_that_do_the_same_have_one_key(files):
    _, generator, _, new = files
    a, b = call_of("mkdir", dir_name="a"), call_of("ls", a=False)
    key = generator.key({**new, "calls": [[a, LS]]})
    for calls, same in (([[a, b]], True), ([[a], [LS]], False), ([[a]], False), ([[a, LS, LS]], False),
                        ([[a, call_of("cd", folder="a"), LS]], False)):
        assert (generator.key({**new, "calls": calls}) == key) == same, calls


def test_an_explorers_words_and_calls_become_a_task_or_nothing(files):
    _, generator, task, new = files
    call = call_of("mkdir", dir_name="new")

    def written(*actions):
        return generator.written(task, dict(query="A new folder, please.", action_sequence=[*actions]))

    for action in (json.dumps(call), as_reply([call])):
        assert (found := written(action))["task"] == {
            **new, "turns": ["A new folder, please."], "calls": [[call]]} and "template" not in found
        assert generator.refusal(found["task"]) is None and generator.verify(found) is None
    for actions in ([], ["mkdir(dir_name='new')"], ["5"], ["null"], [json.dumps([call, "x"])], [DEEP]):
        assert written(*actions) is None
