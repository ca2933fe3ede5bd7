"""Tasks that are made during a run: they join one object's, and are played like any other."""

import json
import random

import pytest

import envs
from worlds import World
from worlds.webshop import catalogue


def new_goals(n):
    """Goals of no split, over families of the catalogue."""
    world, rng = catalogue.shop_world(), random.Random(0)
    taken = {catalogue.goal_key(goal) for goals in world.goals.values() for goal in goals}
    return [catalogue.draw_goal(rng, family, taken, world.products)
            for family in world.families[:n]]


def new_questions():
    """Questions about databases of the embedded world, the place's table of each."""
    asked = [("how many schools are there", "SELECT COUNT(*) FROM {t}"),
             ("list all there is of the places", "SELECT *\n  FROM {t}  ")]
    databases = envs.make("intercodesql").world.databases
    return [dict(query=query, gold=gold.format(t=script.split()[2]), db=db)
            for (query, gold), (db, script) in zip(asked, databases.items())]


TASKS = {"webshop": new_goals(4), "intercodesql": new_questions()}
GOAL, QUESTION = TASKS["webshop"][0], TASKS["intercodesql"][0]


@pytest.mark.parametrize("name", TASKS)
def test_an_added_task_has_one_id_which_no_other_object_knows(name):
    env, other, tasks = envs.make(name), envs.make(name), json.loads(json.dumps(TASKS[name]))
    before = {split: env.tasks(split) for split in env.splits}
    ids = [f"{name}-added-{n}" for n in range(len(tasks))]
    assert env.tasks("added") == []
    assert [env.add(task) for task in tasks] == ids == env.tasks("added")
    assert [env.add(task) for task in reversed(tasks)] == ids[::-1]  # the same again
    for task in tasks:
        task.clear()  # what becomes of the given objects does not matter
    assert [env.find(id)["query"] for id in ids] == [task["query"] for task in TASKS[name]]
    assert {split: env.tasks(split) for split in env.splits} == before
    for unknown in (ids[0], f"{name}-added-", f"{name}-added-x"):
        with pytest.raises(ValueError, match=f"unknown task '{unknown}'"):
            other.find(unknown)
    env.close()
    assert env.tasks("added") == ids  # they are the object's, not an episode's


@pytest.mark.parametrize("view", ["full", "short"])
@pytest.mark.parametrize("name", TASKS)
def test_the_expert_solves_an_added_task(name, view):
    env = envs.make(name, view)
    for task in TASKS[name]:
        id = env.add(task)
        messages, reward = envs.converse(env, env.reset(id), env.expert())
        assert reward == 1.0, messages
        assert task.get("instruction", task["query"]) in messages[0]["content"]
    env.close()


@pytest.mark.parametrize("name, task, says", [
    ("webshop", {}, "'instruction'"), ("webshop", None, "'instruction'"),
    ("webshop", GOAL | {"attributes": "soft"}, "'attributes' is 'soft'"),
    ("webshop", GOAL | {"price_upper": True}, "'price_upper' is 'True'"),
    ("webshop", GOAL | {"instruction": ""}, "'instruction' is ''"),
    ("webshop", GOAL | {"query": "kettle"}, "no 'kettle'"),
    ("intercodesql", QUESTION | {"db": "nowhere"}, "no database 'nowhere'"),
    ("intercodesql", QUESTION | {"gold": "DROP TABLE town"}, "Only SELECT"),
])
def test_a_task_that_cannot_be_played_is_refused_with_what_is_wrong(name, task, says):
    env = envs.make(name)
    with pytest.raises(ValueError, match=says) as error:
        env.add(task)
    assert "\n" not in str(error.value) and env.tasks("added") == []


def test_a_question_may_be_about_what_a_server_has(tmp_path):
    """Without a dump the databases are the server's, and the splits' questions name them."""
    (tmp_path / "ic_spider_dev.json").write_text(json.dumps([QUESTION | {"db": "pets"}]))
    env = envs.make("intercodesql", intercode_data=str(tmp_path), mysql_url="mysql://a@127.0.0.1:9")
    assert env.add(QUESTION | {"db": "pets"}) == "intercodesql-added-0"
    with pytest.raises(ValueError, match="no database 'town_1'"):
        env.add(QUESTION | {"db": "town_1"})


def test_a_world_says_itself_whether_it_takes_tasks():
    class Words(World):
        name, splits = "words", {"train": {"0": "red"}}

    env = Words("short")
    assert env.tasks("train") == ["words-train-0"] and env.find("words-train-0") == "red"
    with pytest.raises(envs.Refused, match="words: takes no new tasks"):
        env.add({"word": "blue"})


def test_an_instruction_in_other_words_is_played_but_not_by_the_scripted_expert():
    env = envs.make("webshop", "short")
    page = env.reset(env.add(GOAL | {"instruction": "get me something nice"}))
    assert "get me something nice" in page
    with pytest.raises(ValueError, match="reads the catalogue's own wordings only"):
        env.expert()(page)
