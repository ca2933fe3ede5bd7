"""Agent and tasks that evolve together: the loss, the signals, new tasks, the whole loop."""

import copy
import math
import os
import random
import re
import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import ended, fork, fork_ranks, plain_log_probs
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dpo
import evolve
from common.files import read_json, read_jsonl, write_jsonl
from common.settings import Refused, parse, settings_of
from dpo import Group, Trajectory
from engine import models
from engine import run as engine_run
from engine.records import read
from worlds import Step, World, converse, environment, make

# ---------------------------------------------------------------------------------------- GRPO


@pytest.mark.parametrize("rewards, expected", [
    # mean 0.5, squares 4 x 0.25, over K - 1 = 3: std 0.57735
    ([0.0, 1.0, 0.0, 1.0], [-0.866024, 0.866024, -0.866024, 0.866024]),
    ([1.0, 0.0], [0.707106, -0.707106]),
    ([0.5, 0.501], [-0.70611, 0.70611]),
    ([0.5, 0.5, 0.5], []), ([0.7], []),  # equals teach nothing, also but for rounding
    ([0.1 + 0.2, 0.3], []), ([1.0, 1.0 - 2e-16, 1.0], []), ([sum([0.1] * 10), 1.0, 1.0], [])])
def test_advantages_by_hand(rewards, expected):
    assert evolve.advantages_of(rewards) == pytest.approx(expected, abs=2e-6)


def visit(counts, advantages, old, ref):
    """Episodes of so many action tokens each; old and ref are log pi of all of them."""
    episodes = [Trajectory(ids=[0] * (n + 1), action_mask=[0] + [1] * n) for n in counts]
    return evolve.Visit(episodes, advantages=advantages, old=torch.tensor(old),
                        ref=torch.tensor(ref))


def loss_of(policy, visits, kl, low=0.2, high=0.25):
    """GRPO's loss, its derivative by each log pi, and its statistics."""
    policy = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    loss, statistics = evolve.grpo_loss(policy, visits, low, high, kl)
    loss.backward()
    return loss.item(), policy.grad.tolist(), statistics


def test_the_loss_by_hand():
    """Two visits, of three episodes; ratios may be 0.8 to 1.25, and beta is 0.1.

    pi   old  ref    A  ratio  surrogate            its derivative, d log pi
    .5   .5   .5     1    1    1                    1
    .5   .25  .5     1    2    min(2, 1.25)         0
    .25  .5   .25    1   .5    min(.5, .8)          .5
    .5   .25  .5    -2    2    min(-4, -2.5)        -4
    .25  .5   .25   -2   .5    min(-1, -1.6)        0
    .25  .25  .5     0    1    0, and k3 = 2 - log 2 - 1, of which it is 1 - 2
    """
    def logs(*chances):
        return [math.log(chance) for chance in chances]

    visits = [visit([3], [1.0], logs(.5, .25, .5), logs(.5, .5, .25)),
              visit([2, 1], [-2.0, 0.0], logs(.25, .5, .25), logs(.5, .25, .5))]
    loss, gradient, statistics = loss_of(logs(.5, .5, .25, .5, .25, .25), visits, kl=0.1)
    assert loss == pytest.approx(-(1 + 1.25 + .5 - 4 - 1.6) + 0.1 * (1 - math.log(2)))
    assert gradient == pytest.approx([-1, 0, -.5, 4, 0, -.1], abs=1e-6)
    assert statistics == {"action": dict(count=6, clipped=4)}


@pytest.mark.parametrize("d", [-99.0, -1.0, 0.0, 1.0, 19.9, 21.0, 89.0, 700.0, 1e4])
def test_k3_far_from_the_reference_stays_finite_and_pulls_back(d):
    """Without an advantage the loss is beta k3. Beyond 20 nats exp(d) goes on as its tangent."""
    loss, gradient, statistics = loss_of([-d], [visit([1], [0.0], [-d], [0.0])], kl=2.0)
    near = min(d, 20.0)
    exp_d = math.exp(near) * (1 + d - near)
    assert loss == pytest.approx(2 * (exp_d - d - 1), rel=1e-5, abs=1e-6)
    assert gradient == pytest.approx([2 * (1 - math.exp(near))], rel=1e-5, abs=1e-6)
    assert statistics.get("far") == (dict(count=1) if d > 20 else None)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_far_away_stays_finite(advantage):
    loss, gradient, _ = loss_of([-1.0], [visit([1], [advantage], [-100.0], [-1.0])], kl=1.0)
    assert math.isfinite(loss) and math.isfinite(*gradient)


def test_how_far_sampler_and_training_are_apart_is_measured():
    """Of four tokens one is 0.5 nats off (its ratio 1.65 is beyond 1.28), one -0.1."""
    one = evolve.Visit([], old=torch.tensor([-1.0, -2.0, -3.0, -1.1]),
                       drawn=torch.tensor([-1.0, -2.0, -3.5, -1.0]))
    assert evolve.sampler_gap([one], evolve.Settings()) == pytest.approx(dict(
        mean=0.1, rms=math.sqrt((0.25 + 0.01) / 4), beyond=0.25), rel=1e-5)
    assert evolve.sampler_gap([], evolve.Settings()) == {}


def test_moments_are_read_again_also_where_no_text_uses_a_parameter(small_model, tmp_path):
    """As a part for pictures, which gets no gradient."""
    def model():
        found = models.load(Accelerator(cpu=True), small_model, recompute=False, shard=False)
        found.eyes = torch.nn.Linear(2, 2)
        return found

    first, second = model(), model()
    eyes = copy.deepcopy(first.eyes)
    optimizer = dpo.adamw(first)
    batch = [Group([Trajectory("a", ids=[5, 6, 7, 8], action_mask=[0, 0, 1, 1])])]
    list(dpo.train(first, optimizer, [batch] * 2, [1e-3] * 2, dpo.sft_loss, dpo.action_count))
    assert torch.equal(first.eyes.weight, eyes.weight)
    evolve.save_moments(SimpleNamespace(main=True), first, optimizer, tmp_path / "moments.pt")
    again = dpo.adamw(second)
    evolve.load_moments(second, again, tmp_path / "moments.pt")
    for p, q in zip(first.parameters(), second.parameters()):
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], again.state[q]["exp_avg_sq"])


# ----------------------------------------------------------------------- signals, picks and plans


def segment(task, y, step=1):
    """A visit, whose conversations name the step and the episode."""
    return [Trajectory(task, "target", step, n, reward=float(won), messages=[step, n])
            for n, won in enumerate(y)]


@pytest.mark.parametrize("scores, window, found", [
    ([1.0, 0.0], 5, 1), ([0.5, 0.0], 5, 1),      # 0.5 counts as solved
    ([1.0, 0.5], 5, None),                       # and so it is not forgotten at 0.5
    ([1.0, 0.25], 5, 1), ([0.0, 0.0], 5, None),  # never solved
    ([0.0], 5, None), ([1.0], 5, None),          # one visit
    ([1.0, 0, 0, 0, 0, 0], 5, 5), ([1.0, 0, 0, 0, 0, 0, 0], 5, None),  # outside the window
    ([1.0, 0, 0, 0], 2, None), ([1.0, 0.0, 1.0, 0.0], 5, 1)])
def test_forgetting(scores, window, found):
    """The last visit is in this segment, those before in the one before; b is not visited now. The
    success that is shown is of the visit that was won, the failure of the last."""
    *before, now = [segment("a", [n < 4 * score for n in range(4)], step)
                    for step, score in enumerate(scores)]
    earlier = [*sum(before, []), *segment("b", [1], 90), *segment("b", [0], 91)]
    rows = list(evolve.forgetting(evolve.look_back([earlier, now], window), None))
    assert [(row["task"], row["visits_ago"]) for row in rows] == ([("a", found)] if found else [])
    for row in rows:
        assert row["success_then"] == [len(scores) - 1 - found, 0]
        assert row["failure"][0] == len(scores) - 1


@pytest.mark.parametrize("y, found", [
    ([0, 0, 0], None), ([1, 0, 0], 1), ([1, 1, 0], 2), ([1, 1, 1], None)])
def test_boundary(y, found):
    rows = list(evolve.boundary(evolve.look_back([segment("a", y)], 5), None))
    assert rows == ([] if found is None else [dict(
        task="a", successes=found, failure=[1, found], success=[1, 0])])


@pytest.mark.parametrize("below, least, expected", [
    (3.0, 1, {"p": 2}),  # 3 of 100 is at the threshold
    (3.1, 1, {"p": 2, "q": 3}), (3.1, 3, {"q": 3})])
def test_rare(below, least, expected):
    """Of 100 episodes 2 hold p, 3 q and 95 r. The evidence is of those that hold it, and the task
    is that of the worst of them."""
    held = [{"p"}] * 2 + [{"q"}] * 3 + [{"r"}] * 95
    episodes = segment("won", [1]) + segment("lost", [0]) + segment("t", [1] * 98)
    s = evolve.Settings(rare_below=below, rare_min=least)
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


def test_passes_visit_every_task_and_no_step_one_twice(tmp_path):
    """Four tasks a step; D has six at first, and eight from step 2 on."""
    s = evolve.Settings(step_tasks=4, evolve_every=1)
    run = SimpleNamespace(main=True, settings=s)
    write_jsonl(tmp_path / "d", [dict(task=f"s{n}") for n in range(6)])
    planned, before = [], []
    for i in range(1, 42):
        evolve.plan(run, tmp_path / str(i), [tmp_path / "d"], before, i=i, steps=1)
        before = [tmp_path / str(i)]
        planned += [row["tasks"] for row in read_jsonl(before[0])]
        if i == 1:
            write_jsonl(tmp_path / "d", [dict(task=f"{kind}{n}") for kind, count in
                                         (("s", 6), ("a", 2)) for n in range(count)])
    assert all(len({*tasks}) == len(tasks) == 4 for tasks in planned)
    in_order = sum(planned, [])
    assert sorted(in_order[:6]) == [f"s{n}" for n in range(6)]  # the pass that had begun ends
    for first in range(6, len(in_order) - 7, 8):
        assert len({*in_order[first:first + 8]}) == 8


@pytest.mark.parametrize("tasks, step", [(3, 4), (1, 4), (5, 4)])
def test_a_small_set_is_played_whole(tasks, step, tmp_path):
    run = SimpleNamespace(main=True, settings=evolve.Settings(step_tasks=step, evolve_every=9))
    write_jsonl(tmp_path / "d", [dict(task=str(n)) for n in range(tasks)])
    evolve.plan(run, tmp_path / "3", [tmp_path / "d"], [], i=3, steps=2)
    rows = read_jsonl(tmp_path / "3")
    assert [row["step"] for row in rows] == [19, 20]
    assert all(len({*row["tasks"]}) == min(tasks, step) for row in rows)


# ------------------------------------------------------------------ new tasks of the built-in worlds


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
    rng, same = random.Random(0), 0
    for split in ("train", "validation", "test", "unseen"):
        for task in env.tasks(split)[::4]:
            question = env.find(task)
            gold = question["gold"]
            apart = re.sub(r"([(),*])", r" \1 ", gold)  # as the tiny tokenizer decodes it
            lower = re.sub("SELECT|FROM|MAX|OR", lambda m: m[0].lower(), gold)
            for written in (gold, apart, lower):
                text, again = generator.question(question["db"], written, rng)
                assert again == gold
                same += text == question["query"]
    assert same > 225  # of 1,350: a column may be called as stored or by a synonym


def test_a_query_that_its_words_would_not_say_is_of_no_family(databases):
    """Places are where things are, not in them; names have no average and none is above 20."""
    env, generator = databases
    for db, script in list(env.world.databases.items())[:20]:
        (place, key, _), (other, _, body) = re.findall(
            r"CREATE TABLE (\w+) \((\w+) int PRIMARY KEY, (.*)\);", script)[:2]
        label, text = (line.split()[0] for line in body.split(", ")[:2])
        for sql in (f"SELECT site FROM {place} JOIN {other} USING ({key}) WHERE {text} = 'x'",
                    f"SELECT AVG({label}) FROM {other}", f"SELECT {label} FROM {other} "
                    f"WHERE {text} > 20", f"SELECT {label} FROM {other} ORDER BY {text} DESC"):
            assert generator.question(db, sql, random.Random(0)) is None, sql


def test_solutions_that_do_not_prove_a_question_are_refused(databases):
    env, generator = databases
    question = env.find(env.tasks("train")[0])
    whole = generator.proposal(question["query"], question["gold"], question["db"])
    assert generator.verify(whole) is None
    for says, solution in (("does not end", whole["solution"][:-1]),
                           ("earns", ["SHOW TABLES", "submit"]),
                           ("fails", ["SELECT nothing", *whole["solution"]]),
                           ("longer", ["SHOW TABLES"] * 9 + whole["solution"])):
        assert says in generator.verify({**whole, "solution": solution})
    table = question["gold"].split(" FROM ")[1].split()[0]
    for gold in ("SELECT * FROM nowhere", "SELECT 1 WHERE 1 = 0", "SELECT",  # no rows; no query
                 f"select 1 from {table} where 1 = 1", f"SELECT 1 FROM {table}\nWhere 1 = 1",
                 # of a hostile explorer
                 "SELECT COUNT(*) FROM " + ", ".join(f"{table} a{n}" for n in range(12)),
                 "SELECT a FROM (SELECT 1 AS a LIMIT 0) WHERE 0 UNION SELECT 1 UNION SELECT 2",
                 "SELECT hex(zeroblob(400000000))", "SELECT '\ud800'", "SELECT '\0'"):
        proposal = generator.proposal("x", gold, question["db"])
        assert generator.refusal(proposal["task"]) or generator.verify(proposal), gold


def test_planted_questions_are_refused(databases):
    env, generator = databases
    for split in ("validation", "test", "unseen"):
        for task in env.tasks(split)[:20]:
            assert generator.refusal(env.find(task)) == "a database of no training task"
    train = env.find(env.tasks("train")[0])
    gold, new = train["gold"], dict(train, query="x", gold="SELECT 1")
    assert generator.refusal(new) is None
    evaluated = [env.find(env.tasks(split)[0])["query"] for split in ("validation", "test")]
    for says, field, texts in (
            ("a question of a split", "gold", (gold, gold + "  ", gold.lower(), f"{gold}/* x */",
                                               gold.replace(" FROM ", " -- all\nFROM ") + " ;")),
            ("a question of a split", "query", (train["query"].upper() + " ",
                                                *[f"{text}?" for text in evaluated])),
            ("a held-out noun", "query", ["how many clocks"]),
            ("cannot be asked", "gold", ["DROP TABLE t"]),
            ("another time", "gold", ("SELECT datetime('now')", "SELECT random ( )"))):
        for text in texts:
            assert says in generator.refusal({**new, field: text}), text


def test_a_purchase_becomes_a_goal_that_its_actions_solve(shop):
    env, generator = shop
    rng, kept, refused = random.Random(0), 0, Counter()
    for task in env.tasks("train")[:80]:
        for found in generator.finds(task, replies_of(env, task), rng):
            reason = generator.refusal(found["task"])
            refused[reason] += 1
            if reason is None:
                assert generator.verify(found) is None
                assert env.add(found["task"]) and found["text"] == found["task"]["instruction"]
                kept += 1
    assert kept > 25 and refused["a goal of a split"] > 10


def test_goals_of_splits_and_of_held_out_products_are_refused(shop):
    env, generator = shop
    new = next(found["task"] for task in env.tasks("train") for found in generator.finds(
        task, replies_of(env, task), random.Random(3)) if not generator.refusal(found["task"]))
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
        first = goal["attributes"][:1]
        options = ", ".join(goal["goal_options"])

        def written(text):
            return generator.written(task, dict(query=text, action_sequence=actions))

        words = f"I want {goal['query']}, {first[0].upper()}, in {options}, lower than $"
        found = written(f"{words}997")
        asked = {name: found["task"][name] for name in ("query", "attributes", "price_upper")}
        assert asked == dict(query=goal["query"], attributes=first, price_upper=997.0)
        assert set(found["task"]["goal_options"]) == set(goal["goal_options"])
        told[generator.refusal(found["task"]) or generator.verify(found)] += 1
        wrong = next(a for a in sorted(generator.attributes) if not any(
            a in p["Attributes"] for p in env.world.products if p["query"] == goal["query"]))
        colour = next(c for c in ("pink", "navy") if c not in goal["goal_options"])
        for text in (f"{words}1", words,  # it costs more; no limit
                     "hello, lower than $997",  # nothing
                     f"{goal['query']} in {options}, lower than $997",  # no attribute
                     f"{wrong} {words}997", f"{colour} {words}997"):  # not of what was bought
            assert written(text) is None, text
        alone = written(f"{first[0]} {goal['query']} below 997 dollars")
        assert alone["task"]["goal_options"] == []
        assert generator.refusal(alone["task"])  # no colour
    assert told[None] > 3, told


def test_solutions_that_do_not_prove_a_goal_are_refused(shop):
    env, generator = shop
    task = env.tasks("train")[0]
    solution = replies_of(env, task)
    found, = generator.finds(task, solution, random.Random(3))
    assert generator.verify(found) is None
    idle = ["click[buy now]", *solution]
    other = {**found["task"], "goal_options": ["mauve"]}
    for says, wrong in (("earns 0.00", dict(solution=solution[:-1])), ("earns", dict(task=other)),
                        ("not carried out", dict(solution=solution + ["click[buy now]"])),
                        ("not carried out", dict(solution=idle)),
                        ("longer", dict(solution=["nonsense"] * 11 + solution))):
        assert says in generator.verify({**found, **wrong})
    again, = generator.finds(task, idle, random.Random(3))
    assert again == found  # what did nothing is no part of a solution


def test_patterns_count_what_was_carried_out_alone(shop, databases):
    env, generator = shop
    task = env.tasks("train")[0]
    assert generator.patterns(task, ["click[buy now]", "nonsense", "search[desk"]) == set()
    done = generator.patterns(task, replies_of(env, task))
    assert {"buy as asked", "choose what was asked"} <= done
    env, generator = databases
    task = env.tasks("train")[0]
    assert generator.patterns(task, ["SELECT nonsense", "SHOW TABLES", "submit"]) == set()
    gold = env.find(task)["gold"]
    pattern, = generator.patterns(task, [gold])  # as the tiny tokenizer decodes it, too
    assert generator.patterns(task, [re.sub(r"([(),*])", r" \1 ", gold)]) == {pattern}


# ------------------------------------------------------------------------- a world of one letter


class Letters(World):
    """Pays (sum of the reply's letters and the task's number, modulo 5) / 4; any number is a task.
    """
    name, test_splits, max_steps, stops = "letters", ("test",), 1, ("Observation:",)
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


class Discreet(Smith):
    def tells(self, text, solution):
        return solution[0] in text


@pytest.mark.parametrize("verify, third", [(True, "odd"), (False, None)])
def test_finds_are_judged_in_their_order(verify, third, tmp_path):
    """By hand, of tasks of which 16 is in D, and three may join."""
    def find(number, text=None, solution="c"):
        task = None if number is None else dict(number=number)
        return dict(signal="rare", source="a", text=text or f"{number} {number} is it",
                    task=task, solution=[solution])

    finds = [find(12), find(12, "as before"), find(13, "an odd one"), find(14), find(16), find(None),
             find(18, "w" * 1001), find(18, "w" * 1000), find(20, "say zz", "zz"),
             find(22, "is IT 12 so"), find(24, "is it 12 or more"), find(26), find(28, "w" * 1001)]
    reasons = [None, "known already", third, "a number of a split", "known already",
               "not of the form that was asked for", "its text is too long", None,
               "its text tells the solution", "a text that is there already",  # 3 of 4 words
               None if verify else "enough were added",  # 3 of 5
               "enough were added", "its text is too long"]
    env = Letters()
    env.task_generator = Discreet
    s = evolve.Settings(add_most=3, near_text=0.75, verify=verify)
    run = SimpleNamespace(settings=s, main=True, machine=SimpleNamespace(gather=list),
                          make_env=lambda: env)
    write_jsonl(tmp_path / "finds", finds)
    write_jsonl(tmp_path / "d", [dict(task="letters-added-0", definition=dict(number=16))])
    numbers = evolve.judge(run, tmp_path / "out", tmp_path / "finds", [tmp_path / "d"], i=1)
    rows = read_jsonl(tmp_path / "out")
    assert [row["reason"] for row in rows] == reasons
    assert [row["replayed"] for row in rows] == [verify and r in (None, "odd") for r in reasons]
    refused = Counter(reason for reason in reasons if reason)
    assert numbers == dict(proposals=13, replayed=4 * verify, added=3, refused=refused,
                           kinds={"added rare": 3})


@pytest.fixture
def run(small_model, tmp_path, monkeypatch):
    """run(method, out, world, kind, **settings) -> the finished run; method None: one to begin."""
    def start(method="evolve", out="run", world=Letters, kind=engine_run.Run, **changed):
        monkeypatch.setattr(engine_run, "make", lambda *_, **__: world())
        s = evolve.Settings(**dict(
            method=method or "grpo", model=str(small_model), out=str(tmp_path / out),
            max_tokens=400, max_new_tokens=4, warm_start="none", start_tasks=5, grpo_steps=6,
            evolve_every=2, evaluate_every=9, step_tasks=3, step_rollouts=4, grpo_batch=2,
            grpo_lr=1e-4, grpo_temperature=1.5, explorer_temperature=1.5, near_text=1.0, picks=2,
            explorer_episodes=2) | changed)
        r = kind(s, environment("webshop")())
        if method:
            evolve.METHODS[method].loop(r)
            r.close()
        return r

    return start


def rows(r, name):
    return read_jsonl(r.folder / name)


def steps(r):
    return [row for file in sorted(r.folder.glob("iter*/target-agent/train.jsonl"))
            for row in read_jsonl(file)]


def files_of(folder):
    """All that a run has made, without its log, in which seconds are."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.suffix in (".jsonl", ".safetensors", ".pt") and p.name != "metrics.jsonl"}


def test_the_task_set_grows_from_signals(run):
    r = run(rare_below=60.0)
    d = [rows(r, f"iter{i}/tasks.jsonl") for i in range(3)]
    assert 0 < len(d[0]) <= 5 and len(d[2]) > len(d[0])
    assert d[2][:len(d[1])] == d[1] and d[1][:len(d[0])] == d[0]  # each is written whole
    numbers = [row["definition"]["number"] for row in d[2]]
    assert len(set(numbers)) == len(numbers)
    assert not any(n % 2 or n % 7 == 0 for n in numbers)  # what the generator refused
    assert [(row["step"], row["D"]) for row in steps(r)] == [
        (n + 1, len(d[n // 2])) for n in range(6)]
    for i in (1, 2):
        episodes = read(r.folder / f"iter{i}/target-agent/episodes.jsonl")
        signals = rows(r, f"iter{i}/signals.jsonl")
        picked = [row for row in signals if row["picked"]]
        assert {row["task"] for row in signals} <= {t.task for t in episodes}
        logged = r.done[f"iter{i}/signals.jsonl"]
        assert logged["picks"] == Counter(f"picked {row['signal']}" for row in picked)
        assert len(logged["picks"]) > 1
        # Each pick was explored twice.
        explored = Counter((row["task"], row["signal"])
                           for row in rows(r, f"iter{i}/explored.jsonl"))
        assert explored == Counter(2 * [(row["task"], row["signal"]) for row in picked])
    # Random exploration follows no signal, with as many episodes of the explorer.
    other = run(out="random", rare_below=60.0, guide="random", grpo_steps=3)
    assert {row["signal"] for row in rows(other, "iter1/explored.jsonl")} == {"random"}
    assert len({r.done["iter1/explored.jsonl"]["episodes"] for r in (r, other)}) == 1
    # D is of tasks in an order, by which they have their ids.
    with pytest.raises(Refused, match="letters-added-1 is letters-added-0 here; keep its rows"):
        evolve.env_with(r, d[2][1:])


def test_training_sees_the_distribution_that_episodes_are_drawn_from(run, small_model):
    """By plain passes over the episodes, at the sampler's temperature and without the tokens that
    are never drawn. In the first step the policy is the one that played, and the reference."""
    r = run("grpo", start_from="train", grpo_steps=2, evolve_every=1, grpo_batch=9, grpo_lr=1e-2)
    first, second = steps(r)
    episodes = read(r.folder / "iter1/target-agent/episodes.jsonl")
    total = tokens = 0
    for task in {t.task for t in episodes}:
        visit = [t for t in episodes if t.task == task]
        for t, advantage in zip(visit, evolve.advantages_of([t.reward for t in visit])):
            total += advantage * t.action_count
            tokens += t.action_count
    assert first["loss"] == pytest.approx(-total / tokens, abs=1e-5)
    assert first["kl"] == pytest.approx(0, abs=1e-4) and abs(second["kl"]) > 1e-3
    assert all(row["sampler"]["rms"] < 1e-4 and row["sampler"]["beyond"] == 0
               for row in (first, second))

    never = r.encoder.sampler().never
    played = read(r.folder / "iter2/target-agent/episodes.jsonl")
    kl = 0.0
    for task in {t.task for t in played}:
        visit = [t for t in played if t.task == task]
        if evolve.advantages_of([t.reward for t in visit]):
            kl += sum(apart(r.folder / "iter1/target-agent", small_model, t, never) for t in visit)
    taught = 4 * (second["tasks"] - second["skipped"])
    assert second["kl"] == pytest.approx(kl / taught, abs=1e-3)


def apart(old, ref, t, never):
    """log pi_old - log pi_ref of an episode, by plain passes."""
    with torch.no_grad():
        found = [plain_log_probs(models.read_model(folder), t.ids, t.action_mask, never, 1.5).sum()
                 for folder in (old, ref)]
    return (found[0] - found[1]).item()


class Scripted(engine_run.Run):
    """The agent says "c"; pays(t) is the reward."""
    pays = staticmethod(lambda t: float(t.rollout % 2))

    def play(self, agent, begun, temperature, make_env=None):
        for t in begun:
            t.messages = [dict(role="user", content="say"), dict(role="assistant", content="c")]
            t.ids, t.action_mask = self.encoder.encode(t.messages, 1)
            t.log_probs, t.reward, t.ended = [-1.0] * t.action_count, self.pays(t), "done"
        return begun


def test_a_policy_far_from_the_reference_goes_on_and_it_is_said_once(run, monkeypatch, capsys):
    """In every step the reference is 99 nats above the policy at the first token of a visit."""
    note_log_probs = evolve.note_log_probs

    def note_far_ones(visits, name, *more):
        note_log_probs(visits, name, *more)
        for visit in visits if name == "ref" else []:
            visit.ref[0] += 99

    monkeypatch.setattr(evolve, "note_log_probs", note_far_ones)
    r = run("grpo", kind=Scripted, start_from="train", grpo_steps=2)
    assert [row["far"] for row in steps(r)] == [3, 3]  # a token of each of three tasks
    assert all(math.isfinite(row["loss"] + row["norm"]) for row in steps(r))
    assert capsys.readouterr().out.count("6 times the policy was 20 nats and more from pi_ref") == 1


def test_a_minibatch_counts_the_tasks_that_it_leaves_out(run, monkeypatch):
    """Six tasks in twos, of eight that were asked for: whoever is left out, the others stay
    together as they were."""
    cuts = []
    training = dpo.train

    def watch(model, optimizer, steps, *more):
        cuts.append([{visit.trajectories[0].task for visit in batch} for batch in steps])
        return training(model, optimizer, steps, *more)

    monkeypatch.setattr(dpo, "train", watch)
    for n, equal in enumerate(("", "124")):
        class Equal(Scripted):
            pays = staticmethod(lambda t: t.rollout % 2 if t.task[-1] not in equal else 0.0)
        r = run("grpo", f"run{n}", kind=Equal, start_from="train", start_tasks=8, step_tasks=6,
                grpo_steps=1, step_rollouts=2)
        assert [r.done["iter0/tasks.jsonl"][name] for name in ("tasks", "missing")] == [6, 2]
        kept = [{task for task in minibatch if task[-1] not in equal} for minibatch in cuts[0]]
        assert cuts[n] == [minibatch for minibatch in kept if minibatch]
    assert [len(minibatch) for minibatch in cuts[0]] == [2, 2, 2]


class Overlapping(Letters):
    splits = {"train": {str(n): n for n in range(6)}, "test": {str(n): n for n in range(5)}}


class Silent(Letters):
    def task_generator(self):
        smith = Smith()
        smith.finds = lambda *_: []
        return smith


class Fixed(Letters):
    task_generator = World.task_generator


@pytest.mark.parametrize("said, world, more", [
    ("of 5 training tasks none is left", Overlapping, dict(start_from="train", train_tasks=5)),
    ("of 5 training tasks none is left", Overlapping, dict(train_tasks=5)),
    ("no start task came of the unguided exploration", Silent, {}),
    ("letters: nobody makes new tasks in this world", Fixed, dict(start_from="train")),
    ("letters: nobody makes new tasks in this world", Fixed, dict(method="grpo"))])
def test_tasks_that_cannot_be_had_are_refused(said, world, more, run, tmp_path):
    with pytest.raises(Refused, match=said):
        run(world=world, **more)
    made = read_json(tmp_path / "run/phases.json")
    assert not any("target-agent" in name for name in made)
    if world is Fixed:  # before anything runs
        assert made == {}


def test_what_is_evaluated_is_not_trained_on(run):
    r = run("grpo", world=Overlapping, start_from="train", grpo_steps=2)
    assert [row["task"] for row in rows(r, "iter0/tasks.jsonl")] == ["letters-train-5"]


def test_without_new_tasks_evolution_is_grpo_bit_for_bit(run):
    """GRPO needs no world that makes tasks."""
    how = dict(start_from="train", grpo_steps=2, evolve_every=1)
    a, b = run("evolve", "a", add_most=0, **how), run("grpo", "b", world=Fixed, **how)
    ours = files_of(b.folder)
    assert ours.items() <= files_of(a.folder).items() and "iter2/target-agent/moments.pt" in ours


class Vowels(Letters):
    """Pays the share of vowels among eight letters."""

    def step(self, reply):
        return Step("thanks", sum(letter in "aeiou" for letter in reply[:8]) / 8, True)


def test_steps_teach_a_policy_what_pays(run):
    r = run("grpo", world=Vowels, start_from="train", start_tasks=4, grpo_steps=20, evolve_every=20,
            step_tasks=4, step_rollouts=6, max_new_tokens=6, grpo_lr=4e-3, grpo_temperature=1.0)
    log = rows(r, "iter1/target-agent/train.jsonl")
    assert evolve.mean([row["reward"] for row in log[:4]]) < 0.2
    assert evolve.mean([row["reward"] for row in log[-4:]]) > 0.4
    assert evolve.mean([row["kl"] for row in log[-8:]]) > 0  # of its own samples


# ------------------------------------------------------------------ interrupted, longer, on ranks


def test_a_run_that_is_killed_at_any_moment_ends_in_the_same_files(run, tmp_path):
    """By SIGKILL, again and again: moments, passes and tasks go on from files."""
    how = dict(grpo_steps=3, evolve_every=1, start_from="explore")
    started = time.monotonic()
    whole = files_of(run(out="whole", **how).folder)
    lasts = time.monotonic() - started
    rng, kills, code = random.Random(os.getpid()), 0, None
    while code != 0:
        process = fork(lambda: run(out="killed", **how), tmp_path / "said")
        until = time.monotonic() + rng.uniform(0.1, 0.9) * lasts * (1 + kills / 8)
        while (done := os.waitpid(process, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
            time.sleep(0.005)
        if done == (0, 0):
            os.kill(process, signal.SIGKILL)
            kills += 1
            assert ended(process) == -signal.SIGKILL
        else:
            code = os.waitstatus_to_exitcode(done[1])
            assert code == 0, (tmp_path / "said").read_text()[-3000:]
    assert kills and files_of(tmp_path / "killed") == whole


def test_more_steps_go_on_to_what_they_would_have_been(run):
    """The run ended inside its second segment, which is made again, as long as it has to be."""
    whole = files_of(run("evolve", "whole", grpo_steps=5).folder)
    run("evolve", "longer", grpo_steps=3)
    longer = files_of(run("evolve", "longer", grpo_steps=5).folder)
    after_three = {name for name in longer if name.startswith("eval-2-")}
    assert after_three and longer.keys() - whole.keys() == after_three
    assert {name: longer[name] for name in whole} == whole


def test_two_sharded_processes_evolve_like_one(run, small_model, tmp_path):
    """Both know the tasks that join, and play them; one of them judges, see `Letters`."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(small_model, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    AutoTokenizer.from_pretrained(small_model).save_pretrained(base)

    def work(ranks):
        run(out=str(ranks), model=str(base), start_from="train", start_tasks=3, step_tasks=6,
            grpo_steps=2, evolve_every=1, grpo_lr=1e-5, grpo_temperature=0.9, explorer_episodes=4)

    for ranks in (1, 2):
        codes = map(ended, fork_ranks(ranks, lambda: work(ranks), tmp_path / "said"))
        assert [*codes] == [0] * ranks, (tmp_path / "said").read_text()[-3000:]
    log = [[(row["loss"], row["kl"]) for i in (1, 2) for row in read_jsonl(
        tmp_path / f"{out}/iter{i}/target-agent/train.jsonl")] for out in "12"]
    assert torch.tensor(log[0]).sub(torch.tensor(log[1])).abs().max() < 5e-6
    assert len(log[0]) == 2 and abs(log[0][1][1]) > 1e-6  # it has learnt something
    for name in "iter1/tasks.jsonl", "iter1/signals.jsonl":
        one, two = ((tmp_path / out / name).read_text() for out in "12")
        assert one == two != ""
    assert any("-added-" in t.task for t in read(tmp_path / "2/iter2/target-agent/episodes.jsonl"))


def test_a_copy_of_a_live_model_answers_as_it_does(run):
    r = run(None)
    model = r.load(r.base)
    assert r.replica(model) is model and not model.training
    r.machine.bf16 = True
    copied, read_again = r.replica(model), r.replica(r.base)
    ids = torch.tensor([r.encoder.start([dict(role="user", content="say")])])
    assert copied.dtype == torch.bfloat16
    assert torch.equal(copied(input_ids=ids).logits, read_again(input_ids=ids).logits)
    assert not {p.data_ptr() for p in copied.parameters()} & {
        p.data_ptr() for p in model.parameters()}


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("argv, said", [
    ("--grpo-steps 10", "the tasks would never evolve; give more than --evolve-every 10"),
    ("--method grpo --picks 3", "--picks is not read by --method grpo"),
    ("--step-rollouts 1", "must be at least 2"), ("--grpo-temperature 0", "at least 0.001"),
    ("--signals forgetting,luck", "must be some of forgetting,boundary,rare")])
def test_settings_that_make_no_sense_are_refused(argv, said):
    with pytest.raises(Refused, match=said):
        parse(argv.split(), evolve.Settings, evolve.METHODS, environment)


def test_every_setting_says_where_its_default_is_from():
    for name, setting in settings_of(evolve.Evolution).items():
        assert re.fullmatch(r"[A-Z].{10,} \[.*(summary|notes|ours|AgentEvolver).*\]",
                            setting.comment), name
