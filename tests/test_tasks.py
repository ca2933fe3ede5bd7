"""What tasks are: experts of elsewhere, and tasks that are made during a run."""

import random

import pytest
from conftest import Toy

import envs
from worlds.published import opens_otherwise
from worlds.webshop import catalogue

ADDRESS = "http://127.0.0.1:9"


def talk(text):
    return [dict(role="user", content=text), dict(role="assistant", content="Action: search[x]")]


def test_what_is_set_aside():
    env = envs.make("webshop", webshop_url=ADDRESS)
    page = "WebShop [SEP] Instruction: [SEP] a hat, and price lower than 30.00 dollars [SEP] Search"
    for same in (page, page.replace("30.00", "120.00"), f"Observation:\n{page}", f"{page} \n",
                 f"{env.prompt}\n\n{page}", f"rules of\n\nanother version\n\n{page}", page.upper(),
                 page.replace(", and price lower than 30.00 dollars", "")):
        assert opens_otherwise(env, talk(same), page) is None
    for other in ("a hat", page.replace("hat", "cap"), f"{page} and more", f"A {page}", ""):
        assert opens_otherwise(env, talk(other), page)
    embedded = envs.make("webshop")  # its limits stay, so another limit is another goal
    assert opens_otherwise(embedded, talk(page.replace("30", "40")), page)
    science = envs.World("short")
    assert opens_otherwise(science, talk("Task Description:\nBoil."), "Boil.") is None


class Told(Toy):
    """Says other words in the opening of one task."""
    changed = None

    def reset(self, task):
        page = super().reset(task)
        return page.replace("word", "sentence") if task == self.changed else page


def test_a_run_refuses_experts_of_elsewhere_before_it_trains(toy_run, tmp_path, monkeypatch):
    run = toy_run(Told, "--method", "eto")
    file, again = tmp_path / "experts.jsonl", tmp_path / "again"
    file.write_bytes((run / "experts.jsonl").read_bytes())
    toy_run(Told, "--method", "eto", "--experts", file, "--out", again)
    assert (again / "experts.jsonl").read_bytes() == file.read_bytes()
    monkeypatch.setattr(Told, "changed", "toy-train-6")
    with pytest.raises(SystemExit, match="toy-train-6 is another task here.*word.*sentence"):
        toy_run(Told, "--method", "eto", "--experts", file, "--out", tmp_path / "refused")
    assert not (tmp_path / "refused/sft-target").exists()
    toy_run(Told, "--method", "eto", "--experts", file, "--out", again)  # is not read again


def test_an_added_task_has_one_id_which_no_other_object_knows():
    env, other, rng = envs.make("webshop"), envs.make("webshop"), random.Random(0)
    tasks = [catalogue.draw_goal(rng, family, set(), env.world.products)
             for family in env.world.families[:4]]
    before, ids = {split: env.tasks(split) for split in env.splits}, [
        f"webshop-added-{n}" for n in range(4)]
    assert env.tasks("added") == []
    assert [env.add(task) for task in tasks] == ids == env.tasks("added")
    assert [env.add(dict(task)) for task in reversed(tasks)] == ids[::-1]  # the same again
    assert [env.find(id) for id in ids] == tasks
    assert {split: env.tasks(split) for split in env.splits} == before
    for unknown in (ids[0], "webshop-added-", "webshop-added-x"):
        with pytest.raises(ValueError, match=f"unknown task '{unknown}'"):
            other.find(unknown)
    env.close()
    assert env.tasks("added") == ids  # they are the object's, not an episode's
