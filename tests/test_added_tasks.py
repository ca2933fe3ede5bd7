"""Tasks that are made during a run: they join one object's, and are played like any other."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import envs
from worlds import World
from worlds.webshop import catalogue
from worlds.webshop.server import WebShopServer

ROOT = Path(__file__).resolve().parents[1]


def new_goals(n):
    """Goals of no split, over families of the catalogue."""
    world, rng = catalogue.shop_world(), random.Random(0)
    taken = {catalogue.goal_key(goal) for goals in world.goals.values() for goal in goals}
    return [catalogue.draw_goal(rng, family, taken, world.products) for family in world.families[:n]]


GOALS = new_goals(4)
QUESTIONS = [
    {"query": "how many schools are there", "gold": "SELECT COUNT(*) FROM {t}"},
    {"query": "list all there is of the places", "gold": "SELECT *\n  FROM {t}  "}]


def new_questions():
    """Questions about databases of the embedded world, the place's table of each."""
    databases = envs.make("intercodesql").world.databases
    return [dict(question, db=db, gold=question["gold"].format(t=script.split()[2]))
            for question, (db, script) in zip(QUESTIONS, databases.items())]


TASKS = {"webshop": GOALS, "intercodesql": new_questions(),
         "scienceworld": [{"type": "find-animal", "variation": 299},
                          {"type": "mendelian-genetics-known-plant", "variation": 0}]}


@pytest.mark.parametrize("name", TASKS)
def test_ids_count_in_the_order_of_adding_and_a_task_has_one(name):
    env, tasks = envs.make(name), TASKS[name]
    assert env.tasks("added") == []
    ids = [f"{name}-added-{n}" for n in range(len(tasks))]
    assert [env.add(task) for task in tasks] == ids == env.tasks("added")
    assert [env.add(task) for task in reversed(tasks)] == ids[::-1]  # the same again
    assert [env.add(json.loads(json.dumps(task))) for task in tasks] == ids
    assert env.tasks("added") == ids
    env.close()
    assert env.tasks("added") == ids  # they are the object's, not an episode's


@pytest.mark.parametrize("name", TASKS)
def test_an_added_task_is_found_by_the_object_that_added_it_and_by_no_other(name):
    env, other = envs.make(name), envs.make(name)
    before = {split: env.tasks(split) for split in env.splits}
    ids = [env.add(task) for task in TASKS[name]]
    assert len({str(env.find(id)) for id in ids}) == len(ids)
    assert {split: env.tasks(split) for split in env.splits} == before
    assert other.tasks("added") == [] == envs.make(name).tasks("added")
    for unknown in (ids[0], f"{name}-added-99", f"{name}-added-", f"{name}-added-x"):
        with pytest.raises(ValueError, match=f"unknown task '{unknown}'"):
            other.find(unknown)
    other.add(TASKS[name][1])
    assert other.find(ids[0]) == env.find(ids[1])
    with pytest.raises(ValueError, match="unknown task"):
        other.reset(ids[1])


@pytest.mark.parametrize("view", ["full", "short"])
@pytest.mark.parametrize("name", ["webshop", "intercodesql"])
def test_the_expert_solves_an_added_task(name, view):
    env = envs.make(name, view)
    for task in TASKS[name]:
        id = env.add(task)
        messages, reward = envs.converse(env, env.reset(id), env.expert())
        assert reward == 1.0, messages
        assert task.get("instruction", task["query"]) in messages[0]["content"]
    env.close()


def test_the_expert_solves_an_added_task_of_the_simulator():
    env = envs.make("scienceworld", "short")
    id = env.add({"type": "lifespan-longest-lived", "variation": 124})
    assert env.find(id) == ("lifespan-longest-lived", 124)
    messages, reward = envs.converse(env, env.reset(id), env.expert())
    assert reward == 1.0 and env.max_steps == 10
    env.close()


def test_what_becomes_of_the_given_object_does_not_matter():
    env, goal = envs.make("webshop"), json.loads(json.dumps(GOALS[0]))
    id = env.add(goal)
    goal["attributes"].append("made of gold")
    goal["instruction"] = "buy nothing"
    assert env.find(id) == GOALS[0]


def lacking(task, field):
    return {key: value for key, value in task.items() if key != field}


QUESTION = TASKS["intercodesql"][0]
WRONG = [  # environment, task, what the error says
    *(("webshop", lacking(GOALS[0], field), f"no '{field}'") for field in (
        "instruction", "name", "query", "product_category", "attributes", "goal_options",
        "price_upper")),
    ("webshop", GOALS[0] | {"attributes": "soft"}, "'attributes' is 'soft', a str"),
    ("webshop", GOALS[0] | {"attributes": ["soft", 3]}, "asks for 3"),
    ("webshop", GOALS[0] | {"goal_options": [None]}, "asks for None"),
    ("webshop", GOALS[0] | {"price_upper": "40"}, "'price_upper' is '40', a str"),
    ("webshop", GOALS[0] | {"price_upper": True}, "'price_upper' is 'True', a bool"),
    ("webshop", GOALS[0] | {"price_upper": float("nan")}, "'price_upper' is nan"),
    ("webshop", GOALS[0] | {"price_upper": 0}, "'price_upper' is 0"),
    ("webshop", GOALS[0] | {"instruction": ""}, "'instruction' is empty"),
    ("webshop", GOALS[0] | {"query": "kettle"}, "no 'kettle'; choose from: bed sheets, coffee mug"),
    *(("intercodesql", lacking(QUESTION, field), f"no '{field}'") for field in (
        "query", "gold", "db")),
    ("intercodesql", QUESTION | {"db": "nowhere"}, "no database 'nowhere'"),
    ("intercodesql", QUESTION | {"gold": 7}, "'gold' is '7', a int"),
    ("intercodesql", QUESTION | {"gold": "DROP TABLE town"}, "cannot be asked: .* Only SELECT"),
    ("intercodesql", QUESTION | {"query": ""}, "'query' is empty"),
    ("scienceworld", {"type": "boil"}, "no 'variation'"),
    ("scienceworld", {"variation": 3}, "no 'type'"),
    ("scienceworld", {"type": "bake", "variation": 0}, "no type 'bake'; choose from: boil"),
    ("scienceworld", {"type": "boil", "variation": 30}, "variations 0-29, not 30"),
    ("scienceworld", {"type": "boil", "variation": -1}, "variations 0-29, not -1"),
    ("scienceworld", {"type": "boil", "variation": "0"}, "'variation' is '0', a str"),
    ("scienceworld", {"type": "boil", "variation": True}, "'variation' is 'True', a bool"),
    *((name, task, "no '") for name in TASKS for task in ([], "boil", None, {})),
]


@pytest.mark.parametrize("name, task, says", WRONG)
def test_a_task_that_cannot_be_played_is_refused_with_what_is_wrong(name, task, says):
    env = envs.make(name)
    with pytest.raises(ValueError, match=f"^{name}: not a task to add: .*{says}") as error:
        env.add(task)
    assert "\n" not in str(error.value) and env.tasks("added") == []


def test_a_question_may_be_about_what_a_server_has(tmp_path):
    """Without a dump the databases are the server's, and the splits' questions name them."""
    (tmp_path / "ic_spider_dev.json").write_text(json.dumps([QUESTION | {"db": "pets"}]))
    env = envs.make("intercodesql", intercode_data=str(tmp_path), mysql_url="mysql://a@127.0.0.1:9")
    assert env.add(QUESTION | {"db": "pets"}) == "intercodesql-added-0"
    with pytest.raises(ValueError, match="no database 'town_1'"):
        env.add(QUESTION | {"db": "town_1"})


def test_a_real_server_takes_no_new_goal():
    for env in (WebShopServer("http://127.0.0.1:9"),
                envs.make("webshop", webshop_url="http://127.0.0.1:9")):
        with pytest.raises(envs.Refused, match="takes no new goals"):
            env.add(GOALS[0])
        assert env.tasks("added") == []


def test_a_world_says_itself_whether_it_takes_tasks():
    class Words(World):
        name, splits = "words", {"train": {"0": "red"}}

    env = Words("short")
    assert env.tasks("train") == ["words-train-0"] and env.find("words-train-0") == "red"
    with pytest.raises(envs.Refused, match="words: takes no new tasks"):
        env.add({"word": "blue"})


def test_an_instruction_in_other_words_is_played_but_not_by_the_scripted_expert():
    env = envs.make("webshop", "short")
    page = env.reset(env.add(GOALS[0] | {"instruction": "get me something nice"}))
    assert "get me something nice" in page
    with pytest.raises(ValueError, match="reads the catalogue's own wordings only"):
        env.expert()(page)


ADD_AND_PLAY = """
import envs, json, sys
for name, tasks in json.load(sys.stdin).items():
    env = envs.make(name, "full")
    ids = [env.add(task) for task in tasks]
    print(json.dumps([[id, *envs.converse(env, env.reset(id), env.expert())] for id in ids]))
"""


def test_another_process_that_adds_the_same_tasks_has_the_same_ids_and_episodes():
    tasks = json.dumps({name: TASKS[name] for name in ("webshop", "intercodesql")})
    first, second = (subprocess.run(
        [sys.executable, "-c", ADD_AND_PLAY], cwd=ROOT, input=tasks, text=True, check=True,
        capture_output=True, env={"PYTHONHASHSEED": seed}).stdout for seed in ("0", "1"))
    assert first == second
    for line, name in zip(first.splitlines(), ("webshop", "intercodesql")):
        env = envs.make(name, "full")
        ids = [env.add(task) for task in TASKS[name]]
        here = [[id, *envs.converse(env, env.reset(id), env.expert())] for id in ids]
        assert json.loads(line) == here and here[0][0] == f"{name}-added-0"
