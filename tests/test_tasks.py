"""What is trained on and what is evaluated: counts, tasks that are in both, experts of elsewhere."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Toy, events

from lab import play_env as envs
from lab.harness.report import table
from lab.harness.settings import SettingsError, from_flat, options_of
from lab.program import tasks
from worlds.webshop import catalogue
from worlds.webshop.server import WebShopServer
from worlds.webshop.shop import WebShop

ADDRESS = "http://127.0.0.1:9"


def settings(**values):
    return from_flat(**{"model": "m", **values})


def survey(s):
    return tasks.survey(s, envs.make(s.env, s.view, **options_of(s)))


def published(ids, path, text="Instruction: x"):
    """An experts file of these ids, in the published form."""
    turns = [("human", "rules"), ("gpt", "OK"), ("human", text), ("gpt", "Action: search[x]")]
    path.write_text(json.dumps([
        {"id": id, "conversations": [{"from": f, "value": v} for f, v in turns]} for id in ids]))
    return str(path)


def talk(text):
    return [dict(role="user", content=text), dict(role="assistant", content="Action: search[x]")]


def ours(openings, path):
    """An experts file of ours: task -> how its conversation opens."""
    path.write_text("".join(json.dumps(dict(task=task, reward=1.0, messages=talk(text))) + "\n"
                            for task, text in openings.items()))
    return str(path)


def asked(folder, train, test):
    """Settings of the databases with a folder of these questions: (words, database) each."""
    folder.mkdir(exist_ok=True)
    for split, questions in (("train", train), ("test", test)):
        (folder / f"ic_spider_{split}.json").write_text(json.dumps(
            [dict(query=q, gold=f"SELECT '{q}'", db=db) for q, db in questions]))
    return dict(env="intercodesql", intercode_data=str(folder), mysql_url="mysql://a@h")


def test_goals_of_a_server_are_known_by_their_numbers(tmp_path):
    file = published([f"webshop_{n}" for n in (0, 4, 9, 12, 199, 200, 3000)], tmp_path / "e")
    s = settings(webshop_url=ADDRESS, experts=file, eval_tasks=200)
    with pytest.raises(SettingsError) as error:
        survey(s)
    line = str(error.value)
    assert line.startswith("5 of 200 evaluated tasks are also trained on (--experts ")
    assert "webshop-test-0 (as webshop-train-0), webshop-test-4" in line
    assert "webshop-test-12" not in line
    assert "--split-file" in line and "--overlap drop" in line and "\n" not in line
    found = survey(settings(webshop_url=ADDRESS, experts=file, eval_tasks=200, overlap="drop"))
    assert found.left_out == {f"webshop-train-{n}" for n in (0, 4, 9, 12, 199)}
    found = survey(settings(webshop_url=ADDRESS, experts=file, eval_tasks=200, overlap="keep"))
    assert (found.left_out, found.about["overlap"], found.about["experts"]) == (set(), 5, 7)
    # Those that are not trained on do not count.
    assert survey(settings(webshop_url=ADDRESS, experts=published(["a_3000", "a_7"], tmp_path / "f"),
                           eval_tasks=200, train_tasks=1)).about["experts"] == 1


def test_questions_are_known_by_text_and_database(tmp_path):
    here = asked(tmp_path, [("How many?", "d"), ("Who?", "d"), ("What?", "e")],
                 [("how  many?", "d"), ("What?", "d"), ("Why?", "d")])
    with pytest.raises(SettingsError, match="^1 of 3 .*the training split.*intercodesql-test-0 \\(as int"):
        survey(settings(**here))
    file = published(["ic_2"], tmp_path / "e", "What?")  # the same words on another database
    assert survey(settings(**here, experts=file)).about["split_by"] == str(tmp_path)


@pytest.mark.parametrize("env", ["webshop", "intercodesql", "scienceworld"])
def test_no_built_in_split_overlaps_another(env):
    for splits in ("test", "validation"):
        assert survey(settings(env=env, eval_splits=splits)).about["overlap"] == 0


def test_an_experts_file_of_ours_may_hold_evaluated_tasks(tmp_path):
    names = "webshop-train-1", "webshop-unseen-3", "webshop-test-2"
    file = ours(dict.fromkeys(names, "x"), tmp_path / "e")
    with pytest.raises(SettingsError, match="^2 of 394 .*such as webshop-unseen-3, webshop-test-2;"):
        survey(settings(experts=file))
    # In the built-in shop equal numbers of two splits are two goals.
    found = survey(settings(experts=ours({"webshop-train-2": "x"}, tmp_path / "f")))
    assert found.about["experts"] == 1


def test_an_evaluated_instruction_is_found_wherever_an_opening_says_it(tmp_path):
    """In somebody's words before the first page, in another case and other signs."""
    shop = envs.make("webshop")
    page, [other], [short] = (shop.reset("webshop-train-3"), shop.wording("webshop-test-5"),
                              shop.wording("webshop-train-3"))
    for text, found in (
            (f"You shop.\n\nTask: {other.upper()}!\n\n{page}", 1), (f"{page}\n\n{other}", 1),
            (f"First line.\n{other.replace(' ', '  ')}\nThen act.\n\n{page}", 1),
            (f"You shop for people.\n\nFor example: {short}\n\n{page}", 0),  # what it is itself
            (f"{other[5:]} {page}", 0), (f"{other[:-9]}\n\n{page}", 0), (page, 0)):
        s = settings(experts=ours({"webshop-train-3": text, "webshop-train-4": shop.reset(
            "webshop-train-4")}, tmp_path / "e"))
        if found:
            with pytest.raises(SettingsError, match="test-5 \\(as webshop-train-3\\)"):
                survey(s)
            assert survey(replace(s, overlap="drop")).left_out == {"webshop-train-3"}
        else:
            assert survey(s).about["overlap"] == 0, text


def test_a_short_instruction_inside_a_longer_one_is_none(tmp_path):
    """Questions: of those that overlap the longest is meant, and few words are no instruction."""
    long = "what is the name of each town in the north"
    here = asked(tmp_path, [(long, "d"), ("How many?", "d")],
                 [("What is the name of each town", "d"), ("in the north", "d")])
    for before, found in (("", 0), (f"Here somebody asks: {long}? ", 0), ("look in the north ", 0),
                          ("What is the NAME, of each town? ", 1)):
        for task, query in enumerate((long, "How many?")):
            file = published([f"ic_{task}"], tmp_path / "e", f"{before}\n\n{query}")
            s = settings(**here, experts=file, overlap="keep")
            assert survey(s).about["overlap"] == found, (before, query)


def trained(folder, names, env=None, before="tiny", added=()):
    """An agent's folder as a run writes it that trained on these tasks of `env` and added others."""
    def make_env():
        world = envs.make("webshop") if env is None else env
        for row in added:
            world.add(row["task"])
        return world

    folder.mkdir(parents=True)
    tasks.RunTasks.record(SimpleNamespace(training=names, added=lambda: added, make_env=make_env),
                          before, folder)
    return folder


def test_what_an_agent_was_trained_on_counts_too(tmp_path):
    agent = str(trained(tmp_path / "a", ["webshop-test-5", "webshop-train-1"]))
    for method, overlap in (("evaluate", "refuse"), ("coevolve", "refuse"), ("coevolve", "drop")):
        with pytest.raises(SettingsError) as error:
            survey(settings(method=method, model=agent, overlap=overlap))
        line = str(error.value)
        assert line.startswith("1 of 394 evaluated tasks") and "webshop-test-5;" in line
        assert f"--model {agent}" in line and "--overlap keep" in line
    assert survey(settings(method="evaluate", model=agent, overlap="keep")).about["overlap"] == 1
    for moved in (shutil.copytree(agent, tmp_path / "copied"), Path(agent).rename(tmp_path / "b")):
        (tmp_path / f"to-{moved.name}").symlink_to(moved)
        for model in (moved, tmp_path / f"to-{moved.name}"):
            with pytest.raises(SettingsError, match="^1 of 394 "):
                survey(settings(method="evaluate", model=str(model)))
    # On a server the numbers mean other goals; and another environment's tasks are none of these.
    s = settings(method="evaluate", model=str(moved), webshop_url=ADDRESS)
    assert survey(s).about["overlap"] == 0
    assert survey(settings(env="intercodesql", model=str(moved))).about["overlap"] == 0
    assert survey(settings(method="evaluate", model="hub/name")).about["overlap"] == 0


def test_a_failure_agent_and_tasks_that_were_made_count_too(tmp_path):
    trained(tmp_path / "run/iter3/failure-agent", ["webshop-test-5"])
    with pytest.raises(SettingsError, match="--failure-from"):
        survey(settings(failure_from=str(tmp_path / "run")))
    goal = WebShop().find("webshop-test-9")
    agent = trained(tmp_path / "b", ["webshop-test-4"],
                    added=[dict(id="webshop-added-0", task=goal)])
    with pytest.raises(SettingsError, match="^2 of 394 .*such as webshop-test-4, webshop-test-9;"):
        survey(settings(method="evaluate", model=str(agent)))


def test_what_was_trained_on_is_known_whatever_number_it_has_elsewhere(tmp_path):
    """The same number means another question there, and the same question has another number."""
    there, here = (asked(tmp_path / train, [(q, "d") for q in train], [(q, "d") for q in test])
                   for train, test in (("abcd", "e"), ("xyz", "wcb")))
    agent = trained(tmp_path / "agent", [f"intercodesql-train-{n}" for n in range(4)],
                    envs.make(there.pop("env"), **there))
    shutil.rmtree(tmp_path / "abcd")
    with pytest.raises(SettingsError, match="^2 of 3 .*intercodesql-test-[12]"):
        survey(settings(**here, method="evaluate", model=str(agent)))


def seen(folder):
    """Which of the toy's tasks an agent's folder says that it, or one before it, was trained on."""
    known = tasks.trained_on(folder)
    return {name for split in ("train", "test") for name in Toy().tasks(split)
            if tasks.marks(Toy(), name) <= known}


def test_three_generations_of_moved_agents_know_what_the_first_was_trained_on(toy_run, tmp_path):
    first = toy_run(Toy, "--method", "sft")
    own = {f"toy-train-{n}" for n in range(8)}
    assert seen(first / "sft-target") == own
    rows = [json.loads(line) for line in (first / "experts.jsonl").open()]
    rows[2]["task"] = "toy-test-2"
    rows[2]["messages"][0]["content"] = "task toy-test-2: say the word"
    file = tmp_path / "experts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--method", "sft", "--experts", file, "--out", tmp_path / "dropped"]
    with pytest.raises(SettingsError, match="^1 of 8 evaluated tasks are also trained on"):
        toy_run(Toy, *flags)
    toy_run(Toy, *flags, "--overlap", "drop")
    assert events(tmp_path / "dropped", "dropped") == [dict(
        event="dropped", phase="experts.jsonl", reason="evaluated too", count=1,
        tasks=["toy-test-2"])]
    toy_run(Toy, "--experts", file, "--overlap", "keep", "--out", tmp_path / "a")
    assert "--overlap keep" in table(tmp_path / "a").splitlines()[1]
    for name in ("sft-target", "sft-failure", "iter1/failure-agent", "iter1/target-agent"):
        assert seen(tmp_path / "a" / name) == own - {"toy-train-2"} | {"toy-test-2"}
    model = (tmp_path / "a/iter1/target-agent").rename(tmp_path / "elsewhere")
    second = ["--method", "sft", "--model", model, "--train-tasks", 2]
    with pytest.raises(SettingsError, match="^1 of 8 .*--model .*toy-test-2"):
        toy_run(Toy, *second, "--out", tmp_path / "b")
    toy_run(Toy, *second, "--overlap", "keep", "--out", tmp_path / "b")
    assert seen(tmp_path / "b/sft-target") == own - {"toy-train-2"} | {"toy-test-2"}
    # A failure agent of elsewhere keeps what it was trained on, and so does what becomes of it.
    toy_run(Toy, "--failure-from", tmp_path / "a", "--train-tasks", 2, "--overlap", "keep",
            "--out", tmp_path / "d")
    for name in ("sft-failure", "iter1/failure-agent"):
        assert "toy-test-2" in seen(tmp_path / "d" / name)
    assert seen(tmp_path / "d/iter1/target-agent") == {"toy-train-0", "toy-train-1"}


def test_a_run_that_evaluates_tries_the_last_task_of_each_split(tmp_path):
    found = survey(settings(method="evaluate", train_tasks=9999))  # and counts no training tasks
    assert found.tried == ["webshop-test-249", "webshop-unseen-143"]
    with pytest.raises(SettingsError, match="--eval-tasks 145: webshop has 144 unseen tasks"):
        survey(settings(method="evaluate", eval_tasks=145))
    (tmp_path / "train_indices.json").write_text("[7, 3, 7]")
    (tmp_path / "test_indices.json").write_text("[11896, 2]")  # of a server the highest goal
    found = survey(settings(webshop_url=ADDRESS, split_file=str(tmp_path), method="evaluate"))
    assert found.tried == ["webshop-test-11896"]


@pytest.mark.parametrize("text", ["{", "[]", "[-1]", "[true]", None])
def test_lists_of_goals_that_cannot_be_are_named(tmp_path, text):
    (tmp_path / "train_indices.json").write_text("[1]")
    if text is not None:
        (tmp_path / "test_indices.json").write_text(text)
    with pytest.raises(envs.Refused, match=f"^--split-file {tmp_path}/test_indices.json: .*$"):
        WebShopServer(ADDRESS, "full", str(tmp_path))


def test_validation_goals_are_the_rules_that_no_list_has(tmp_path):
    (tmp_path / "train_indices.json").write_text("[501, 3]")
    (tmp_path / "test_indices.json").write_text("[500, 2]")
    shop = envs.make("webshop", webshop_url=ADDRESS, split_file=str(tmp_path))
    assert shop.tasks("train") == ["webshop-train-501", "webshop-train-3"]
    assert shop.tasks("validation")[0] == "webshop-validation-502"
    assert len(shop.tasks("validation")) == 998
    assert WebShopServer(ADDRESS).tasks("test")[-1] == "webshop-test-499"  # the rule's are as before


def test_what_is_set_aside():
    env = envs.make("webshop", webshop_url=ADDRESS)
    page = "WebShop [SEP] Instruction: [SEP] a hat, and price lower than 30.00 dollars [SEP] Search"
    for same in (page, page.replace("30.00", "120.00"), f"Observation:\n{page}", f"{page} \n",
                 f"{env.prompt}\n\n{page}", f"rules of\n\nanother version\n\n{page}", page.upper(),
                 page.replace(", and price lower than 30.00 dollars", "")):
        assert envs.opens_otherwise(env, talk(same), page) is None
    for other in ("a hat", page.replace("hat", "cap"), f"{page} and more", f"A {page}", ""):
        assert envs.opens_otherwise(env, talk(other), page)
    embedded = envs.make("webshop")  # its limits stay, so another limit is another goal
    assert envs.opens_otherwise(embedded, talk(page.replace("30", "40")), page)
    science = envs.World("short")
    assert envs.opens_otherwise(science, talk("Task Description:\nBoil."), "Boil.") is None


class Told(Toy):
    """Says other words in the opening of one task."""
    changed = None

    def reset(self, task):
        page = super().reset(task)
        return page.replace("word", "sentence") if task == self.changed else page


def test_a_run_refuses_experts_of_elsewhere_before_it_trains(toy_run, tmp_path, monkeypatch):
    run = toy_run(Told, "--method", "sft")
    names = [f"toy-train-{n}" for n in range(8)]
    file = tmp_path / "experts.jsonl"
    file.write_bytes((run / "experts.jsonl").read_bytes())
    assert [json.loads(line)["task"] for line in file.open()] == names
    again = tmp_path / "again"
    toy_run(Told, "--method", "sft", "--experts", file, "--out", again)
    assert (again / "experts.jsonl").read_bytes() == file.read_bytes()
    assert json.loads((again / "config.json").read_text())["tasks"]["experts"] == 8
    monkeypatch.setattr(Told, "changed", "toy-train-6")
    with pytest.raises(SettingsError, match="toy-train-6 is another task here.*word.*sentence"):
        toy_run(Told, "--method", "sft", "--experts", file, "--out", tmp_path / "refused")
    assert not (tmp_path / "refused/config.json").exists()
    # What was read before is not read again.
    toy_run(Told, "--method", "sft", "--experts", file, "--out", tmp_path / "again")


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
