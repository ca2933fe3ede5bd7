"""Task evolution: the signals, new tasks, the whole loop. The loss is in test_grpo.py."""

import os
import random
import re
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch
from conftest import ended, fork_ranks, kills_until_it_ends

import evolve
from common.files import read_json, read_jsonl
from common.settings import UsageError, parse
from dpo import Trajectory
from engine import run as engine_run
from engine.trajectories import read
from environments import converse, environment, make
from envs import Environment, Step
from grpo import advantages_of

# ----------------------------------------------------------------------- signals, picks and plans


def segment(task, y, step=1):
    """Makes the trajectories of a task in one step. Their messages are the step and the index."""
    return [Trajectory(task, "target", step, n, reward=float(won), messages=[step, n])
            for n, won in enumerate(y)]


@pytest.mark.parametrize("won, window, found", [
    ("40", 5, 1), ("21", 5, 1), ("42", 5, None),               # 2 of 4 count as solved
    ("00", 5, None), ("0", 5, None), ("4", 5, None),           # never solved; one group
    ("4000", 3, 3), ("4000", 2, None), ("4040", 5, 1)])        # outside the window; the last one
def test_forgetting(won, window, found):
    """`won` has the number of successes in each group of four episodes. The last group is in this
    segment, and those before it are in the previous one. Task b is not played in this segment. The
    success in the evidence is from the group that was solved, and the failure is from the last."""
    *before, now = [segment("a", [n < int(count) for n in range(4)], step)
                    for step, count in enumerate(won)]
    earlier = [*sum(before, []), *segment("b", [1], 90), *segment("b", [0], 91)]
    rows = list(evolve.forgetting(evolve.collect_history([earlier, now], window), None))
    assert [(row["task"], row["visits_ago"]) for row in rows] == ([("a", found)] if found else [])
    for row in rows:
        last = len(won) - 1
        assert (row["success_then"], row["failure"][0]) == ([last - found, 0], last)


@pytest.mark.parametrize("y, found", [("000", None), ("100", 1), ("110", 2), ("111", None)])
def test_boundary(y, found):
    rows = list(evolve.boundary(evolve.collect_history([segment("a", map(int, y))], 5), None))
    assert rows == ([] if found is None else [dict(
        task="a", successes=found, failure=[1, found], success=[1, 0])])


@pytest.mark.parametrize("below, least, expected", [
    (3.0, 1, {"p": 2}),  # 3 of 100 is at the threshold
    (3.1, 1, {"p": 2, "q": 3}), (3.1, 3, {"q": 3})])
def test_rare(below, least, expected, monkeypatch):
    """Of 100 episodes 2 hold p, 3 q and 95 r. The evidence is of those that hold it, and the task
    is that of the worst of them."""
    held = [{"p"}] * 2 + [{"q"}] * 3 + [{"r"}] * 95
    episodes = segment("won", [1]) + segment("lost", [0]) + segment("t", [1] * 98)
    monkeypatch.setattr(evolve, "RARE_BELOW", below)
    s = evolve.Settings(rare_min=least)
    rows = {row["pattern"]: row for row in evolve.rare(evolve.History({}, episodes, held), s)}
    assert {pattern: row["episodes"] for pattern, row in rows.items()} == expected
    if "p" in rows:
        assert (rows["p"]["task"], rows["p"]["failure"], rows["p"]["success"]) == (
            "lost", [1, 0], [1, 0])


def test_signals_pick_in_turn_and_a_task_once():
    """By hand: a1, b1; then a has b1 left, which is taken, so a3; b has none but a1; c picks too.
    """
    kinds = [[dict(task=task) for task in text.split()]
             for text in ("a1 b1 a3 a4", "b1 a1", "a1 c2 c3 c4")]
    assert [row["task"] for row in evolve.pick(kinds, 2)] == ["a1", "b1", "c2", "a3", "c3"]


def task_set(tasks):
    return [dict(task=task) for task in tasks]


def test_an_epoch_has_every_task_and_no_step_has_one_twice():
    """Four tasks a step; D has six at first, and eight from step 2 on."""
    run = SimpleNamespace(settings=evolve.Settings(step_tasks=4, evolve_every=1))
    planned, before = [], []
    for i in range(1, 42):
        before, _ = evolve.plan(run, task_set("abcdefgh"[:6 if i == 1 else 8]), before, i=i, steps=1)
        planned.append(before[0]["tasks"])
    assert all(len({*tasks}) == len(tasks) == 4 for tasks in planned)
    in_order = sum(planned, [])
    assert sorted(in_order[:6]) == [*"abcdef"]  # the epoch that had started ends
    for first in range(6, len(in_order) - 7, 8):
        assert sorted(in_order[first:first + 8]) == [*"abcdefgh"]


def test_a_small_set_is_played_whole():
    run = SimpleNamespace(settings=evolve.Settings(step_tasks=4, evolve_every=9))
    rows, _ = evolve.plan(run, task_set("abc"), [], i=3, steps=2)
    assert [(row["step"], sorted(row["tasks"])) for row in rows] == [(19, [*"abc"]), (20, [*"abc"])]


# ------------------------------------------------------------------ new tasks of the built-in environments


@pytest.fixture(scope="module")
def databases():
    env = make("intercodesql", "short")
    return env, env.task_generator()


@pytest.fixture(scope="module")
def shop():
    env = make("webshop", "short")
    return env, env.task_generator()


def replies_of(env, task):
    messages, _ = converse(env, env.reset(task), env.expert())
    return [m["content"] for m in messages if m["role"] == "assistant"]


def test_gold_queries_invert_to_questions_with_the_same_rows(databases):
    env, generator = databases
    rng = random.Random(0)
    same = 0
    for task in env.tasks("train")[::8]:
        question = env.find(task)
        gold = question["gold"]
        apart = re.sub(r"([(),*])", r" \1 ", gold)  # as the tiny tokenizer decodes it
        lower = re.sub("SELECT|FROM|MAX|OR", lambda m: m[0].lower(), gold)
        for written in (gold, apart, lower):
            text, again = generator.question(question["db"], written, rng)
            assert again == gold
            same += text == question["query"]
    assert same > 25  # of 150: a column may be called as stored or by a synonym


def test_a_query_that_no_question_describes_has_no_family(databases):
    _, generator = databases
    for sql in ("SELECT site FROM farms JOIN farmers USING (farm_id) WHERE grade = 'x'",
                "SELECT AVG(name) FROM farmers", "SELECT name FROM farmers WHERE grade > 20"):
        assert generator.question("farm_1", sql, random.Random(0)) is None
    assert generator.question("farm_1", "SELECT AVG(age) FROM farmers", random.Random(0))


def test_solutions_that_do_not_prove_a_question_are_refused(databases):
    env, generator = databases
    question = env.find(env.tasks("train")[0])
    whole = generator.proposal(question["query"], question["gold"], question["db"])
    solution = whole["solution"]
    assert generator.verify(whole) is None
    for says, wrong in (("does not end", solution[:-1]), ("earns", ["SHOW TABLES", "submit"]),
                        ("fails", ["SELECT nothing", *solution]),
                        ("longer", ["SHOW TABLES"] * 9 + solution)):
        assert says in generator.verify({**whole, "solution": wrong})


def test_questions_of_a_split_or_without_an_answer_are_refused(databases):
    env, generator = databases
    for split in ("validation", "test", "unseen"):
        for task in env.tasks(split)[:20]:
            assert generator.refusal(env.find(task)) == "a database of no training task"
    train = env.find(env.tasks("train")[0])
    gold, new = train["gold"], dict(train, query="x", gold="SELECT MAX(rooms) FROM farms")
    assert generator.refusal(new) is None
    evaluated = [env.find(env.tasks(split)[0])["query"] for split in ("validation", "test")]
    for says, field, texts in (
            ("a question of a split", "gold", (gold, gold.lower(), f"{gold}/* x */",
                                               gold.replace(" FROM ", " -- all\nFROM ") + " ;")),
            ("a question of a split", "query", (train["query"].upper() + " ",
                                                *[f"{text}?" for text in evaluated])),
            ("a held-out noun", "query", ["how many clocks"]),
            ("another time", "gold", ("SELECT datetime('now')", "SELECT random ( )")),
            ("cannot be run", "gold", (
                "DROP TABLE t", "SELECT * FROM nowhere", "SELECT 1 WHERE 1 = 0",
                "select 1 from farms where 1 = 1",
                # of a hostile explorer
                "SELECT COUNT(*) FROM " + ", ".join(f"farms {name}" for name in "abcdefghijkl"),
                "SELECT a FROM (SELECT 1 AS a LIMIT 0) WHERE 0 UNION SELECT 1 UNION SELECT 2",
                "SELECT '\ud800'", "SELECT '\0'"))):
        for text in texts:
            assert says in generator.refusal({**new, field: text}), text


def test_a_purchase_becomes_a_goal_that_its_actions_solve(shop):
    env, generator = shop
    rng = random.Random(0)
    reasons = Counter()
    for task in env.tasks("train")[:80]:
        for found in generator.finds(task, replies_of(env, task), rng):
            reason = generator.refusal(found["task"])
            reasons[reason] += 1
            assert reason or generator.verify(found) is None
            assert found["text"] == found["task"]["instruction"]
    assert reasons[None] > 25 and reasons["a goal of a split"] > 10


def test_goals_of_splits_and_of_held_out_products_are_refused(shop):
    env, generator = shop
    [new] = [found["task"] for found in generator.finds(
        env.tasks("train")[1], replies_of(env, env.tasks("train")[1]), random.Random(3))]
    assert generator.refusal(new) is None
    for split in ("train", "validation", "test", "unseen"):
        for task in env.tasks(split)[:20]:
            goal = env.find(task)
            other = {**goal, "instruction": "in other words", "price_upper": goal["price_upper"] + 7}
            planted = [goal, {**new, "instruction": f" {goal['instruction'].upper()}"}]
            if split != "train":  # nor with another price limit
                planted.append(other)
            assert {generator.refusal(same) for same in planted} == {"a goal of a split"}
            assert generator.refusal({**other, "goal_options": ["mauve"]}) == "no product meets it"
    for task in env.tasks("unseen"):
        goal = env.find(task)
        one = {**goal, "attributes": goal["attributes"][:1], "price_upper": goal["price_upper"] + 1}
        assert generator.refusal(one) in ("a goal of a split", "a held-out product meets it")


def test_an_explorers_goal_is_what_its_words_say(shop):
    env, generator = shop
    told = Counter()
    for task in env.tasks("train")[:40]:
        goal, actions = env.find(task), replies_of(env, task)
        [first, *_] = goal["attributes"]
        kind, options = goal["query"], ", ".join(goal["goal_options"])

        def written(text):
            return generator.written(task, dict(query=text, action_sequence=actions))

        words = f"I want {kind}, {first.upper()}, in {options}, lower than $"
        found = written(f"{words}997")
        asked = found["task"]
        assert (asked["query"], asked["attributes"], asked["price_upper"]) == (kind, [first], 997.0)
        assert set(asked["goal_options"]) == set(goal["goal_options"])
        told[generator.refusal(asked) or generator.verify(found)] += 1
        wrong = next(a for a in sorted(generator.attributes) if not any(
            a in p["Attributes"] for p in env.data.products if p["query"] == kind))
        colour = next(c for c in ("pink", "navy") if c not in goal["goal_options"])
        for text in (f"{words}1", words, "hello, lower than $997",  # it costs more; no limit; nothing
                     f"{kind} in {options}, lower than $997",  # no attribute
                     f"{wrong} {words}997", f"{colour} {words}997"):  # not of what was bought
            assert written(text) is None, text
        assert generator.refusal(written(f"{first} {kind} below 997 dollars")["task"])  # no colour
    assert told[None] > 3, told


def test_solutions_that_do_not_prove_a_goal_are_refused(shop):
    env, generator = shop
    task = env.tasks("train")[0]
    solution = replies_of(env, task)
    [found] = generator.finds(task, solution, random.Random(3))
    assert generator.verify(found) is None
    idle = ["click[buy now]", *solution]
    other = {**found["task"], "goal_options": ["mauve"]}
    for says, wrong in (("earns 0.00", dict(solution=solution[:-1])), ("earns", dict(task=other)),
                        ("not executed", dict(solution=idle)),
                        ("longer", dict(solution=["nonsense"] * 11 + solution))):
        assert says in generator.verify({**found, **wrong})
    # What did nothing is no part of a solution.
    assert generator.finds(task, idle, random.Random(3)) == [found]


def test_patterns_count_what_was_carried_out_alone(shop, databases):
    for (env, generator), idle in ((shop, ["click[buy now]", "nonsense", "search[desk"]),
                                   (databases, ["SELECT nonsense", "SHOW TABLES", "submit"])):
        task = env.tasks("train")[0]
        assert generator.patterns(task, idle) == set()
        assert generator.patterns(task, replies_of(env, task))


# ------------------------------------------------------------------------- an environment of one letter


class Letters(Environment):
    """Pays (sum of the reply's letters and the task's number, modulo 5) / 4; any number is a task.
    """
    name, test_splits, max_turns, stops = "letters", ("test",), 1, ("Observation:",)
    splits = {"train": {str(n): n for n in range(6)}, "test": {str(n): n for n in range(6, 9)}}

    def add(self, task):
        return super().add(task["number"])

    def start(self, number):
        self.number = number
        return f"say something, {number}"

    def step(self, reply):
        return Step("thanks", (sum(map(ord, reply)) + self.number) % 5 / 4, True)

    def task_generator(self):
        return Smith()


class Smith:
    """A reply is a find: a task of the number that it adds up to, beyond the training tasks."""

    def patterns(self, task, replies):
        return {f"{len(reply)} letters" for reply in replies}

    def finds(self, task, replies, rng):
        assert os.environ.get("RANK", "0") == "0"  # of several ranks one finds, and judges
        number = 10 + sum(map(ord, replies[0])) % 40
        return [dict(text=f"say {number}", task=dict(number=number), solution=replies)]

    def key(self, task):
        return str(task if isinstance(task, int) else task["number"])

    def refusal(self, task):
        return "a number of a split" if task["number"] % 7 == 0 else None

    def verify(self, proposal):
        assert os.environ.get("RANK", "0") == "0"
        return "odd" if proposal["task"]["number"] % 2 else None


@pytest.mark.parametrize("verify, third", [(True, "odd"), (False, None)])
def test_finds_are_judged_in_their_order(verify, third, monkeypatch):
    """By hand, of tasks of which 16 is in D, and three may join."""
    def find(number, text=None, solution="c"):
        task = None if number is None else dict(number=number)
        return dict(signal="rare", source="a", text=text or f"{number} {number} is it",
                    task=task, solution=[solution])

    finds = [find(12), find(12, "as before"), find(13, "an odd one"), find(14), find(16), find(None),
             find(18, "w" * 1001), find(18, "w" * 1000), find(20, "So: Search Red-Mugs!", "search[red mugs]"),
             find(22, "is IT 12 so"), find(24, "is it 12 or more"), find(26), find(28, "w" * 1001)]
    reasons = [None, "known already", third, "a number of a split", "known already",
               "not of the form that was asked for", "its text is empty or too long", None,
               "its text tells the solution", "a text that is there already",  # 3 of 4 words
               None if verify else "enough were added",  # 3 of 5
               "enough were added", "its text is empty or too long"]
    env = Letters()
    monkeypatch.setattr(evolve, "MOST_NEW_TASKS", 3)
    s = evolve.Settings(near_text=0.75, verify=verify)
    run = SimpleNamespace(settings=s, on_main=lambda function: function(), make_env=lambda: env)
    d = [dict(task="letters-added-0", definition=dict(number=16))]
    rows, numbers = evolve.judge(run, finds, d, i=1)
    assert [row["reason"] for row in rows] == reasons
    assert [row["replayed"] for row in rows] == [verify and r in (None, "odd") for r in reasons]
    assert numbers["refused"] == Counter(reason for reason in reasons if reason)


@pytest.fixture
def run(small_model, tmp_path, monkeypatch):
    """run(method, out, env_type, **settings) -> the finished run; method None: one to begin."""
    def start(method="evolve", out="run", env_type=Letters, **changed):
        monkeypatch.setattr(engine_run, "make", lambda *_, **__: env_type())
        constants = dict(MINIBATCH=2, EXPLORER_TEMPERATURE=1.5, EXPLORER_EPISODES=2)
        for name in [name for name in changed if name.isupper()]:
            constants[name] = changed.pop(name)
        for name, value in constants.items():
            monkeypatch.setattr(evolve, name, value)
        s = evolve.Settings(**dict(
            method=method or "grpo", model=str(small_model), out=str(tmp_path / out),
            max_tokens=400, max_new_tokens=4, warm_start="none", start_tasks=5, grpo_steps=6,
            evolve_every=2, evaluate_every=9, step_tasks=3, step_rollouts=4,
            grpo_lr=1e-4, grpo_temperature=1.5, near_text=1.0, picks=2) | changed)
        r = engine_run.Run(s, environment("webshop")())
        if method:
            evolve.METHODS[method].loop(r)
            r.close()
        return r

    return start


def rows(r, name):
    return read_jsonl(r.folder / name)


def files_of(folder):
    """All that a run has made, without its log, in which seconds are."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.suffix in (".jsonl", ".safetensors", ".pt") and p.name != "metrics.jsonl"}


def test_the_task_set_grows_from_signals(run):
    r = run(RARE_BELOW=60.0)
    d = [rows(r, f"iter{i}/tasks.jsonl") for i in range(3)]
    assert 0 < len(d[0]) <= 5 and len(d[2]) > len(d[0])
    assert d[2][:len(d[1])] == d[1] and d[1][:len(d[0])] == d[0]  # each is written whole
    numbers = [row["definition"]["number"] for row in d[2]]
    assert len(set(numbers)) == len(numbers)
    assert not any(n % 2 or n % 7 == 0 for n in numbers)  # what the generator refused
    for i in (1, 2):
        # Its steps are on D as it was; then every pick was explored twice.
        log = rows(r, f"iter{i}/target-agent/train.jsonl")
        assert [(row["step"], row["D"]) for row in log] == [
            (step, len(d[i - 1])) for step in (2 * i - 1, 2 * i)]
        episodes = read(r.folder / f"iter{i}/target-agent/episodes.jsonl")
        signals = rows(r, f"iter{i}/signals.jsonl")
        assert {row["task"] for row in signals} <= {t.task for t in episodes}
        picked = [(row["task"], row["signal"]) for row in signals if row["picked"]]
        explored = [(row["task"], row["signal"]) for row in rows(r, f"iter{i}/explored.jsonl")]
        assert Counter(explored) == Counter(2 * picked)
        assert len({signal for _, signal in picked}) > 1
    # Random exploration follows no signal, with as many episodes of the explorer.
    other = run(out="random", RARE_BELOW=60.0, guide="random", grpo_steps=3)
    assert {row["signal"] for row in rows(other, "iter1/explored.jsonl")} == {"random"}
    assert len(rows(other, "iter1/explored.jsonl")) == len(rows(r, "iter1/explored.jsonl"))
    # D is of tasks in an order, by which they have their ids.
    with pytest.raises(UsageError, match="letters-added-1 would get the id letters-added-0; restore"):
        evolve.env_with(r, d[2][1:])


def test_training_uses_the_distribution_that_episodes_are_sampled_from(run):
    """In the first step, the policy equals the sampler's and the reference."""
    r = run("grpo", start_from="train", grpo_steps=2, evolve_every=1, MINIBATCH=9, grpo_lr=1e-2)
    [first], [second] = (rows(r, f"iter{i}/target-agent/train.jsonl") for i in (1, 2))
    groups = defaultdict(list)
    for t in read(r.folder / "iter1/target-agent/episodes.jsonl"):
        groups[t.task].append(t)
    total = tokens = 0
    for group in groups.values():
        for t, advantage in zip(group, advantages_of([t.reward for t in group])):
            total += advantage * t.action_count
            tokens += t.action_count
    assert first["loss"] == pytest.approx(-total / tokens, abs=1e-5)
    assert first["kl"] == pytest.approx(0, abs=1e-4) and abs(second["kl"]) > 1e-3
    assert all(row["sampler"]["rms"] < 1e-4 for row in (first, second))


class Overlapping(Letters):
    splits = {"train": {str(n): n for n in range(6)}, "test": {str(n): n for n in range(5)}}


class Fixed(Letters):
    task_generator = Environment.task_generator


@pytest.mark.parametrize("said, env_type, more", [
    ("no training task is left, because all 5 are evaluated", Overlapping, dict(train_tasks=5)),
    ("letters: this environment makes no new tasks", Fixed, dict(start_from="train")),
    ("letters: this environment makes no new tasks", Fixed, dict(method="grpo"))])
def test_tasks_that_cannot_be_had_are_refused(said, env_type, more, run, tmp_path):
    with pytest.raises(UsageError, match=said):
        run(env_type=env_type, **more)
    if env_type is Fixed:  # before anything runs
        assert read_json(tmp_path / "run/phases.json") == {}


def test_what_is_evaluated_is_not_trained_on(run):
    r = run("grpo", env_type=Overlapping, start_from="train", grpo_steps=2)
    assert [row["task"] for row in rows(r, "iter0/tasks.jsonl")] == ["letters-train-5"]


def test_without_new_tasks_evolution_is_grpo_bit_for_bit(run):
    """GRPO needs no environment that makes tasks."""
    how = dict(start_from="train", grpo_steps=2, evolve_every=1)
    a, b = run("evolve", "a", MOST_NEW_TASKS=0, **how), run("grpo", "b", env_type=Fixed, **how)
    ours = files_of(b.folder)
    assert ours.items() <= files_of(a.folder).items() and "iter2/target-agent/moments.pt" in ours


class Vowels(Letters):
    """Pays the share of vowels among eight letters."""

    def step(self, reply):
        return Step("thanks", sum(letter in "aeiou" for letter in reply[:8]) / 8, True)


def test_steps_teach_a_policy_what_pays(run):
    r = run("grpo", env_type=Vowels, start_from="train", start_tasks=4, grpo_steps=20, evolve_every=20,
            step_tasks=4, step_rollouts=6, max_new_tokens=6, grpo_lr=4e-3, grpo_temperature=1.0)
    rewards = [row["reward"] for row in rows(r, "iter1/target-agent/train.jsonl")]
    assert sum(rewards[:4]) < 0.8 and sum(rewards[-4:]) > 1.6


# ------------------------------------------------------------------ interrupted, longer, on ranks


def test_a_run_that_is_killed_at_any_moment_ends_in_the_same_files(run, tmp_path):
    """Optimizer moments, epochs and tasks are resumed from files."""
    how = dict(grpo_steps=3, evolve_every=1, start_from="explore")
    whole = files_of(run(out="whole", **how).folder)
    killed = tmp_path / "killed"
    assert kills_until_it_ends(lambda: run(out="killed", **how), killed, tmp_path / "said")
    assert files_of(killed) == whole


def test_where_a_segment_ends_makes_no_difference_to_grpo(run):
    """AdamW's moments and the epoch over D continue in the next segment."""
    one = run("grpo", "one", start_from="train", grpo_steps=3, evolve_every=3)
    three = run("grpo", "three", start_from="train", grpo_steps=3, evolve_every=1)
    a, b = (folder / "model.safetensors" for folder in (
        one.folder / "iter1/target-agent", three.folder / "iter3/target-agent"))
    assert a.read_bytes() == b.read_bytes()


def test_more_steps_go_on_to_what_they_would_have_been(run):
    """The first run ended inside its second segment, which is recomputed at its full length."""
    whole = files_of(run("evolve", "whole", grpo_steps=5).folder)
    run("evolve", "longer", grpo_steps=3)
    longer = files_of(run("evolve", "longer", grpo_steps=5).folder)
    after_three = {name for name in longer if name.startswith("eval-2-")}
    assert after_three and longer.keys() - whole.keys() == after_three
    assert {name: longer[name] for name in whole} == whole


def test_two_sharded_processes_evolve_like_one(run, tmp_path):
    """Both play the tasks that join. Only the first one judges them, see `Letters`."""
    def work(ranks):
        run(out=str(ranks), start_from="train", start_tasks=3, step_tasks=6, grpo_steps=2,
            evolve_every=1, grpo_lr=1e-5, grpo_temperature=0.9, EXPLORER_EPISODES=4)

    for ranks in (1, 2):
        codes = map(ended, fork_ranks(ranks, lambda: work(ranks), tmp_path / "said"))
        assert [*codes] == [0] * ranks, (tmp_path / "said").read_text()[-3000:]
    for i in (1, 2):
        [one], [two] = (read_jsonl(tmp_path / out / f"iter{i}/target-agent/train.jsonl")
                        for out in "12")
        for name in "loss", "kl":
            assert two[name] == pytest.approx(one[name], abs=1e-5)
    assert abs(one["kl"]) > 1e-6  # it has learnt something
    for name in "iter1/tasks.jsonl", "iter1/signals.jsonl":
        one, two = ((tmp_path / out / name).read_text() for out in "12")
        assert one == two != ""
    assert any("-added-" in t.task for t in read(tmp_path / "2/iter2/target-agent/episodes.jsonl"))


def test_a_bf16_copy_of_a_live_model_equals_its_saved_agent(run):
    r = run(None)
    model = r.load(r.base)
    assert r.inference_copy(model) is model
    r.machine.bf16 = True
    copied, read_again = r.inference_copy(model), r.inference_copy(r.base)
    ids = torch.tensor([r.encoder.start([dict(role="user", content="say")])])
    assert copied is not model and copied.dtype == torch.bfloat16
    assert torch.equal(copied(input_ids=ids).logits, read_again(input_ids=ids).logits)


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("argv, said", [
    ("--grpo-steps 10", "the tasks would never evolve; give more than --evolve-every 10"),
    ("--step-rollouts 1", "must be at least 2"), ("--grpo-temperature 0", "at least 0.001"),
    ("--signals forgetting,luck", "must be a comma-separated list of forgetting,boundary,rare")])
def test_settings_that_make_no_sense_are_refused(argv, said):
    with pytest.raises(UsageError, match=said):
        parse(argv.split(), evolve.Settings, evolve.METHODS, environment)
