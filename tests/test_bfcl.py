"""BFCL multi-turn: results and verdicts compared with the package's, turns, hostile calls, new tasks."""

import functools
import json
import os
import random
import subprocess
import sys
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
from conftest import ROOT, table

pytest.importorskip("bfcl_eval", reason="without bfcl-eval; run.sh bfcl says how to get it")
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils as package  # noqa: E402

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
    parse_calls,
    script,
)
from environments.bfcl.data import CATEGORIES, MORE_FUNCTIONS, tasks  # noqa: E402
from environments.bfcl.environment import Bfcl  # noqa: E402

ROWS = {key: row for category in CATEGORIES for key, row in data._entries(category).items()}
# The package's ground truths by its own ids
TRUTHS = {row["id"]: row["ground_truth"] for category in CATEGORIES
          for row in data._rows(f"possible_answer/BFCL_v4_multi_turn_{category}.json")}
TASKS = [(key, task) for category in CATEGORIES for key, task in tasks(category).items()]


def forget():
    """Deletes the package's simulators, which it keeps by the names of model and task."""
    for name in [name for name in vars(package) if name.endswith("_instance")]:
        del vars(package)[name]


def package_run(key, calls):
    """Returns the package's results of calls, which are Python, and its simulators."""
    row = ROWS[key]
    return package.execute_multi_turn_func_call(
        calls, row["initial_config"], row["involved_classes"], "m", row["id"], long_context="long" in key)


def as_python(call):
    given = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
    return f"{call['name']}({given})"


def verdict(key, turns):
    """Returns the package's verdict on replies, which are lists of calls, turn by turn."""
    forget()
    said = [[[as_python(call) for call in reply] for reply in turn] for turn in turns]
    category = ROWS[key]["id"].rpartition("_")[0]
    return checker.multi_turn_checker(said, TRUTHS[ROWS[key]["id"]], ROWS[key], category, "m")["valid"]


@functools.cache
def env_of(category, reward="all"):
    return Bfcl("short", category.replace("-", "_"), "published", reward)


def reward(key, turns):
    env = env_of(key.rpartition("-")[0])
    replies = [reply for turn in turns for reply in (*map(as_reply, turn), "so much for this")]
    step = environments.replay(env, env.find(f"bfcl-test-{key}"), replies)[-1]
    assert step.done
    return step.reward


def call_of(name, /, **arguments):
    return dict(name=name, arguments=arguments)


def block(name, /, **arguments):
    return as_reply([call_of(name, **arguments)])


def test_every_call_of_the_ground_truths_returns_and_leaves_what_the_packages_executor_does():
    made = 0
    for key, task in TASKS:
        forget()
        ours = Simulators(task["start"])
        for theirs, calls in zip(TRUTHS[ROWS[key]["id"]], task["calls"], strict=True):
            results, instances = package_run(key, theirs)
            assert [ours.run(call) for call in calls] == results, key
            assert checker.state_checker(ours.instances, instances)["valid"], key
            made += len(calls)
    assert made == 4625


VALUES = ["", " ", "x", "5", 0, 1, -1, 2.5, True, None, [], ["a"], {}, {"a": 1}, "..", "/", "AAPL"]


def damaged(rng, key, task):
    """Returns the replies of the ground truth after one to three random changes."""
    turns, names = deepcopy(task["calls"]), [*data.functions(key)]
    for _ in range(rng.randint(1, 3)):
        turn = rng.choice([turn for turn in turns if turn] or [[call_of("ls")]])
        call = rng.choice(turn)
        argument = rng.choice([*call["arguments"], "unknown"])
        rng.choice([
            lambda: turn.remove(call), lambda: turn.append(deepcopy(call)), lambda: rng.shuffle(turn),
            lambda: rng.choice(turns).append(turn.pop()), lambda: call.update(name=rng.choice(names)),
            lambda: call["arguments"].update({argument: rng.choice(VALUES)}),
            lambda: call["arguments"].pop(argument, None)])()
    return [[[call] for call in turn] if len(turn) <= MAX_REPLIES else [turn] for turn in turns]


def test_randomly_changed_replies_get_the_verdict_of_the_package():
    rng, found = random.Random(0), Counter()
    for _ in range(150):
        key, task = rng.choice(TASKS)
        turns = damaged(rng, key, task)
        mine = reward(key, turns)
        assert mine == verdict(key, turns), (key, turns)
        found[mine] += 1
    assert min(found[0], found[1]) > 15, found


def test_one_episode_leaves_nothing_to_the_next():
    """Long contexts are shared between the package's simulators."""
    key = "long-context-150"
    before, simulators = Simulators(key).states(), Simulators(key)
    for card in simulators.instances["TravelAPI"].credit_card_list.values():
        card["balance"] = -1
    assert simulators.states() != before == Simulators(key).states()


FILES = "bfcl-test-base-0"  # four turns about files, the first of three calls


def test_a_reply_with_calls_is_answered_with_results_and_one_without_with_the_next_turn():
    env = env_of("base")
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


def test_a_reply_without_a_known_call_is_idle():
    env = env_of("base")
    env.reset(FILES)
    replies = block("ls"), block("none") + block("ls"), block("none")
    assert [env.step(reply).idle for reply in replies] == [False, False, True]


@pytest.mark.parametrize("counts, share", [("all", 0.0), ("turns", 0.25)])
def test_twenty_replies_with_calls_are_a_turns_and_the_next_ends_the_episode(counts, share):
    env = env_of("base", counts)
    env.reset(FILES)
    first, second, *_ = map(as_reply, env.find(FILES)["calls"])
    assert env.max_turns == 4 * 21
    for reply in [block("ls")] * 19 + [first, "done", "done"] + [block("ls")] * 20:
        assert not env.step(reply).done
    step = env.step(second)
    assert step.done and step.reward == share and "More than 20 replies" in step.observation


def test_a_missing_function_is_documented_in_its_turn_and_can_be_called_before():
    env = env_of("miss-func")  # sort, in the fourth of five turns
    id = "bfcl-test-miss-func-0"
    assert "\nsort(" not in env.reset(id)
    env.step("done"), env.step("done")
    shown = env.step(MISSING).observation
    assert shown.startswith("<tools>\nsort(file_name: string): ")
    assert shown.endswith(f"</tools>\n\n{MORE_FUNCTIONS}") and shown.count("\n") == 4
    env.reset(id)
    assert "not defined" not in env.step(block("sort", file_name="x")).observation
    document = Bfcl("full", "miss_func").reset("bfcl-train-miss-func-127").splitlines()[1]
    assert {"name", "description", "parameters"} <= json.loads(document).keys()


def test_the_expert_calls_one_at_a_time_and_ends_turns_in_words():
    """The crowded task has 34 calls in a turn."""
    ls = call_of("ls")
    assert script([[ls, ls], []]) == [as_reply([ls]), as_reply([ls]), DONE, MISSING]
    crowded = tasks("long_context")["long-context-38"]["calls"]
    assert max(len(parse_calls(reply)) for reply in script(crowded)) == 2


LS, CD = call_of("ls"), call_of("cd", folder="a")
TEXT, BLOCK, OTHER = json.dumps(LS), "<tool_call>" + json.dumps(LS) + "</tool_call>", json.dumps(CD)


@pytest.mark.parametrize("reply, names", table(f"""
    I look.⏎<tool_call>⏎{TEXT}⏎</tool_call> So. -> ls
    {BLOCK}⏎<tool_call>{OTHER}</tool_call> -> ls cd
    <tool_call>[{TEXT}, {OTHER}]</tool_call> -> ls cd
    First⏎```json⏎{TEXT}⏎```⏎then⏎```json⏎[{TEXT}]``` -> ls ls
    {TEXT} -> ls
    [{TEXT}, {OTHER}] -> ls cd
    <think>maybe {BLOCK}</think>⏎<tool_call>{OTHER}</tool_call> -> cd
    ```json⏎{TEXT}⏎``` or <tool_call>{OTHER}</tool_call> -> cd
    {{"id": "call_1", "name": "ls", "arguments": {{}}, "type": "function", "index": 0}} -> ls
    [{{"name": "ls", "arguments": "{{}}"}}, {{"name": "ls", "arguments": " {{ }} "}}] -> ls ls
    ls() ->
    3 ->
    {{}} ->
    I call {TEXT} ->
    <tool_call>{TEXT} ->
    <think>{BLOCK} ->
    ```⏎{TEXT}⏎``` ->
    {TEXT} {TEXT} ->
    {{"name": "ls", "parameters": {{}}}} ->
    <tool_call>ls()</tool_call> ->
    <tool_call>{{'name': 'ls', 'arguments': {{}}}}</tool_call> ->
    [[{TEXT}]] ->
"""))
def test_the_form_of_a_call(reply, names):
    """Arguments may be JSON in a text, as in the handlers of bfcl-eval."""
    assert parse_calls(reply.replace("⏎", "\n")) == [dict(ls=LS, cd=CD)[name] for name in names.split()]


def test_calls_beside_an_invalid_one_are_made_and_fifty_a_reply():
    found = parse_calls(f"{BLOCK}<tool_call>cd a</tool_call>{BLOCK}")
    assert found[0] == found[2] == LS and found[1].startswith("not a call")
    found = parse_calls(json.dumps([LS] * 70))
    assert found[:-1] == [LS] * MAX_CALLS and "at most 50 calls" in found[-1]


DEEP = "[" * 100_000
HOSTILE = table("""
    {"name": "__init__", "arguments": {}} -> is not defined
    {"name": "_load_scenario", "arguments": {}} -> is not defined
    {"name": "eval", "arguments": {}} -> is not defined
    {"name": "__import__('os').getcwd", "arguments": {}} -> is not defined
    {"name": "GorillaFileSystem.ls", "arguments": {}} -> is not defined
    {"name": "root", "arguments": {}} -> is not defined
    {"name": "ｌｓ", "arguments": {}} -> is not defined
    {"name": "\\ud800", "arguments": {}} -> is not defined
    {"name": "place_order", "arguments": {}} -> is not defined
    {"name": 1, "arguments": {}} -> a call is <tool_call>
    {"name": {"cd": 1}, "arguments": {}} -> a call is <tool_call>
    {"name": "cd", "arguments": ["document"]} -> a call is <tool_call>
    {"name": "cd", "arguments": null} -> a call is <tool_call>
    {"name": "ls", "arguments": "{"} -> a call is <tool_call>
    {"name": "ls", "arguments": "[1]"} -> a call is <tool_call>
    {"name": "cd", "arguments": {"dir": "document"}} -> unexpected keyword
    {"name": "cd", "arguments": {"self": 1, "folder": "document"}} -> multiple values
    {"name": "cd", "arguments": {}} -> missing 1 required
    {"name": "cd", "arguments": {"folder": {"a": 1}}} -> Error during
    {"name": "cd", "arguments": {"folder": "\\ud800"}} -> surrogate
    {"name": "cd", "arguments": {"\\ud800": "a"}} -> surrogate
    {"name": "cd", "arguments": {"folder": [NaN]}} -> infinite
    {"name": "cd", "arguments": {"folder": 1e999}} -> infinite
    {"name": "cd", "arguments": {"folder": 100000000000000000000}} -> 20 digits
    {"name": "cd", "arguments": {"folder": "document/../../etc"}} -> Unsupported path
    {"name": "cd", "arguments": {"folder": "__import__('os')"}} -> No such
""") + [
    (block("x" * 10_000), "is not defined"),
    ('{"name": "ls", "arguments": "%s"}' % ("[" * 9000), "a call is <tool_call>"),
    ('{"name": "cd", "arguments": {"folder": %s}}' % ("9" * 5000), "20 digits"),
    ('{"name": "cd", "arguments": {"folder": %s}}' % ("[" * 30 + "]" * 30), "too deep"),
    ('{"name": "cd", "arguments": {"folder": %s}}' % ("[" * 950 + "]" * 950), "too deep"),
    (DEEP, "too deep"), (f"<tool_call>{DEEP}</tool_call>", "at most 100000"),
    (block("echo", content="x" * 9_000_000), "at most 100000"), (json.dumps([LS] * 100_000), "at most 100000"),
    ("<tool_call>" * 500_000, ""), ("```json\n```" * 200_000, ""), ("</tool_response>", "")]


def test_hostile_calls_are_observations_and_nothing_else(monkeypatch):
    env = env_of("base")
    env.reset(FILES)  # it imports the simulators, which executes their modules
    before = env.simulators.states()
    for name in "builtins.eval", "builtins.exec":
        monkeypatch.setattr(name, None)  # a text that is evaluated is another error
    monkeypatch.setattr(package, "execute_multi_turn_func_call", None)
    for reply, found in HOSTILE:
        env.reset(FILES)
        step = env.step(reply)
        step.observation.encode()
        assert (found or env.find(FILES)["turns"][1]) in step.observation, reply[:100]
        assert (step.reward, step.done) == (0.0, False) and len(step.observation) < 500
        assert env.simulators.states() == before, reply[:100]


MATHS = "base-15"  # a task with the simulator of mathematics


@pytest.mark.parametrize("name, arguments, found", table("""
    power -> {"base": 10, "exponent": 1000000000} -> at most 1000
    power -> {"base": 0, "exponent": -1} -> Error
    logarithm -> {"value": 2, "base": 3, "precision": 1000000000} -> at most 1000
    logarithm -> {"value": 2, "base": 3, "precision": " 1_000_000_000"} -> at most 1000
    logarithm -> {"value": 2, "base": 3, "precision": "１００００"} -> at most 1000
    logarithm -> {"value": 2, "base": 3, "precision": 1e300} -> at most 1000
    logarithm -> {"value": 8, "base": 2, "precision": " 5 "} -> {'result': mpf('3.0')}
    logarithm -> {"value": 8, "base": 2, "precision": 5.5} -> {'result': mpf('3.0')}
    square_root -> {"number": 2, "precision": 1000000000} -> at most 1000
    square_root -> {"number": 2, "precision": 5} -> Decimal('1.4142')
    round_number -> {"number": 5, "decimal_places": -1000000000} -> at most 1000
    mean -> {"numbers": [1e308, 1e308]} -> Infinity
"""))
def test_numbers_that_would_take_the_machine_are_refused(name, arguments, found):
    assert found in Simulators(MATHS).run(dict(name=name, arguments=json.loads(arguments)))


def test_concurrent_calls_keep_their_own_precision():
    calls = [call_of("logarithm", value=10, base=3, precision=n) for n in range(5, 40)] * 20

    def results(_):
        return [*map(Simulators(MATHS).run, calls)]

    alone = results(0)
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(results, range(8))] == [alone] * 8


def test_a_file_system_that_holds_itself_or_doubles_ends_in_errors():
    env, copied = env_of("base"), block("cp", source="a", destination="a")
    env.reset(FILES)
    env.step(block("mkdir", dir_name="a") + copied)  # the package's: a in itself
    assert "beyond 5000 paths" in env.step(block("find") + block("du")).observation
    assert env.simulators.states() and not env.step("next").done
    env.reset(FILES)
    for n in range(100):
        reply = block("cp", source="document", destination=f"d{n}") + block("mv", source=f"d{n}", destination="document")
        result = "".join(map(env.simulators.run, parse_calls(reply)))
    assert "beyond 5000 paths" in result and env.step("next").reward == 0


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


def test_splits_are_what_they_were_and_the_published_one_tests_all():
    """They are the same in all categories."""
    ours, published = make("bfcl"), make("bfcl", bfcl_split="published")
    assert ours.tasks("train")[:3] == ["bfcl-train-base-127", "bfcl-train-base-177", "bfcl-train-base-15"]
    assert published.tasks("train") == ours.tasks("train") and len(set(published.tasks("test"))) == 200
    for category in CATEGORIES:
        assert f"{category.replace('_', '-')}-127" in make("bfcl", bfcl_category=category).splits["train"]


# ------------------------------------------------------------------------------------ new tasks


@pytest.fixture(scope="module")
def files():
    """An environment, its generator, a training task about files, and a new one of its start."""
    env = make("bfcl", "short")
    return env, env.task_generator(), "bfcl-train-base-15", dict(
        start="base-15", turns=["What files are here?"], calls=[[LS]])


CALLS = {"mkdir": call_of("mkdir", dir_name="alpha"), "cd": call_of("cd", folder="alpha"), "cd.": call_of("cd", folder="."),
         "touch": call_of("touch", file_name="beta"), "cat": call_of("cat", file_name="none"), "pwd": call_of("pwd"),
         "ls": LS, "ls-": call_of("ls", a=False), "rm": call_of("_load_scenario"), "cd()": call_of("cd") | {"arguments": []}}
FOLDER = CALLS["mkdir"]


def turns_of(names):
    """Returns the calls with these names. Turns are separated by semicolons."""
    return [[*map(CALLS.get, turn.split())] for turn in names.split(";")]


def test_an_episode_becomes_a_task_of_one_turn_and_one_of_several(files):
    """Each has the last call, and the earlier calls that changed a state or returned an argument of a
    later call."""
    _, generator, task, _ = files
    replies = script(turns_of("mkdir; ls pwd cd cat; touch ls"))
    names = ["mkdir", "ls", "pwd", "cd", "touch", "ls"]
    assert generator.patterns(task, replies) == {*names, *map(", ".join, zip(names, names[1:]))}
    last = types.SimpleNamespace(choice=lambda rows: rows[-1], sample=lambda rows, n: rows[:n], randint=max)
    found = generator.finds(task, replies, last)
    assert [row["task"]["calls"] for row in found] == [
        turns_of("mkdir ls cd touch ls"), turns_of("mkdir; ls cd; touch ls")]
    assert all(row["template"] for row in found)


def test_planted_proposals_are_refused(files):
    """The calls of a task in a split are recognised with arguments that have their defaults."""
    _, generator, _, new = files
    assert generator.refusal(new) is None
    spelled = deepcopy(tasks("base")["base-47"]["calls"])
    find, = (call for call in sum(spelled, []) if call["name"] == "find")
    find["arguments"]["name"] = "None"
    for wrong, named in ((spelled, "a task of a split"), (turns_of("rm"), "no function '_load_scenario'"),
                         (turns_of("cd()"), "a call is")):
        assert named in generator.refusal(new | dict(calls=wrong))
    assert "no start state of a training task" in generator.refusal(new | dict(start="base-47"))


@pytest.mark.parametrize("calls, solution, reason", table("""
    mkdir ls -> mkdir ls -> None
    ls ls -> ls ls -> None
    mkdir cat -> mkdir cat -> a call of its solution fails
    mkdir ls -> -> its solution earns 0.00
    mkdir ls -> ls -> its solution earns 0.00
    pwd; cd. pwd -> pwd; cd. pwd -> it is solved without its last call
"""))
def test_a_solution_that_does_not_prove_its_task_is_refused(files, calls, solution, reason):
    """Results are counted, so that listing twice is not listing once."""
    _, generator, _, new = files
    task = new | dict(turns=["A folder, alpha."] * len(turns_of(calls)), calls=turns_of(calls))
    assert str(generator.verify(dict(solution=script(turns_of(solution)), task=task))) == reason


@pytest.mark.parametrize("calls, same", table("""
    mkdir ls- -> True
    mkdir; ls -> False
    mkdir -> False
    mkdir ls ls -> False
    mkdir cd ls -> False
"""))
def test_tasks_that_do_the_same_have_one_key(files, calls, same):
    _, generator, _, new = files
    one, other = (generator.key(new | dict(calls=turns_of(names))) for names in ("mkdir ls", calls))
    assert str(one == other) == same


def test_an_explorers_words_and_calls_become_a_task_or_nothing(files):
    _, generator, task, new = files

    def written(*actions):
        return generator.written(task, dict(query="A new folder.", action_sequence=[*actions]))

    assert written(json.dumps(FOLDER))["task"] == new | dict(turns=["A new folder."], calls=[[FOLDER]])
    for actions in [], ["mkdir(dir_name='new')"], ["5"], ["null"], [json.dumps([FOLDER, "x"])], [DEEP]:
        assert written(*actions) is None
