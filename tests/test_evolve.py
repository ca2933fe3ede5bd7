"""Agent and tasks that evolve together: advantages, objective, signals, new tasks, the whole loop."""

import copy
import json
import math
import os
import random
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ended, fork_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import coevolve
import dpo
import envs
import evolve
from coevolve import read
from common.files import read_jsonl, seed_of
from dpo import Trajectory
from lab.careful.kept import Checkpoint
from worlds import Step, World, converse
from worlds.intercodesql.questions import sql_world
from worlds.intercodesql.world import InterCodeSQL


@pytest.mark.parametrize("rewards, expected", [
    # mean 0.5, squares 4 x 0.25, over K - 1 = 3: std 0.57735
    ([0.0, 1.0, 0.0, 1.0], [-0.866024, 0.866024, -0.866024, 0.866024]),
    ([1.0, 0.0], [0.707106, -0.707106]),
    ([0.5, 0.5, 0.5], []), ([0.7], []),  # equals teach nothing
])
def test_advantages_by_hand(rewards, expected):
    assert evolve.advantages(rewards) == pytest.approx(expected, abs=2e-6)


def trajectories_of_random_words(encoder, n):
    """n trajectories that a sampler may have drawn, of nine random words after one prompt."""
    rng = random.Random(0)
    never = encoder.sampler().never
    words = [i for i in range(len(encoder.tokenizer)) if i not in never]
    start = encoder.start([dict(role="user", content="find a mug")])
    found = []
    for _ in range(n):
        reply = rng.choices(words, k=9)
        found.append(Trajectory("task", ids=start + reply, action_mask=[0] * len(start) + [1] * 9))
    return found


def moved(model, seed):
    """A copy of the model whose weights are a little elsewhere."""
    other = copy.deepcopy(model)
    for p in other.parameters():
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
        p.data += 0.02 * noise
    return other


def visit_by_others(model, encoder, sampler):
    """A visit for which pi_old, pi_ref and the sampler are three other models."""
    visit = evolve.Visit(trajectories_of_random_words(encoder, 4), advantages=[1.0, -2.0, 0.5, 0.0])
    with torch.no_grad():
        visit.old = dpo.token_log_probs(moved(model, 2), visit.trajectories, sampler)
        visit.ref = dpo.token_log_probs(moved(model, 3), visit.trajectories, sampler)
        visit.drawn = dpo.token_log_probs(moved(model, 4), visit.trajectories, sampler)
    return visit


def by_hand(model, visit, sampler, s):
    """The loss as one loop over tokens in float64, from plain passes over whole trajectories; and
    how many ratios are out of bounds."""
    total = torch.zeros((), dtype=torch.float64)
    outside = 0
    k = 0  # of the action token
    for t, advantage in zip(visit.trajectories, visit.advantages):
        logits = model(input_ids=torch.tensor([t.ids])).logits[0].double() / sampler.temperature
        allowed = [i for i in range(logits.shape[1]) if i not in sampler.never]
        for j in range(1, len(t.ids)):
            if not t.action_mask[j]:
                continue
            old, ref, drawn = visit.old[k], visit.ref[k], visit.drawn[k]
            new = logits[j - 1][t.ids[j]] - torch.logsumexp(logits[j - 1][allowed], 0)
            ratio = math.e ** (new - old)
            clipped = min(max(ratio.item(), 1 - s.clip_low), 1 + s.clip_high)
            outside += clipped != ratio.item()
            surrogate = ratio * advantage
            if clipped != ratio.item() and clipped * advantage < surrogate.item():
                surrogate = torch.tensor(clipped * advantage, dtype=torch.float64)
            if s.importance_cap:
                surrogate = surrogate * min(math.e ** (old - drawn).item(), s.importance_cap)
            d = ref - new
            total = total - surrogate + s.grpo_kl * (math.e ** d - d - 1)
            k += 1
    return total, outside


@pytest.mark.parametrize("low, high, beta, cap", [
    (0.2, 0.28, 1e-3, 0.0), (0.01, 0.02, 0.5, 0.0), (0.5, 3.0, 0, 0.0), (0.2, 0.28, 1e-3, 1.05)])
def test_the_objective_is_the_loop_over_tokens(agent, low, high, beta, cap):
    model, encoder = agent
    sampler = encoder.sampler(0.9)
    visit = visit_by_others(model, encoder, sampler)
    s = evolve.Settings(clip_low=low, clip_high=high, grpo_kl=beta, importance_cap=cap)
    policy = dpo.token_log_probs(model, visit.trajectories, sampler)
    loss, statistics = evolve.grpo_loss(policy, [visit], s)
    expected, outside = by_hand(model, visit, sampler, s)
    assert statistics == {"action": dict(count=36, clipped=outside)} and outside > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    weight = model.lm_head.weight
    gradient, = torch.autograd.grad(loss, weight, retain_graph=True)
    by_loop, = torch.autograd.grad(expected, weight)
    assert torch.allclose(gradient, by_loop, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rewards", [
    [0.1 + 0.2, 0.3], [1.0, 1.0 - 2e-16, 1.0], [0.0, -0.0], [sum([0.1] * 10), 1.0, 1.0]])
def test_rewards_that_differ_by_rounding_are_equal(rewards):
    assert evolve.advantages(rewards) == []


def test_rewards_that_differ_by_little_are_not_equal():
    assert evolve.advantages([0.5, 0.501]) == pytest.approx([-0.70611, 0.70611], abs=1e-4)


def at_one_token(policy, old, ref, advantage=1.0, beta=1.0):
    """GRPO's loss, its derivative by log pi and its statistics for one token, in nats."""
    token = torch.tensor([policy], requires_grad=True)
    visit = evolve.Visit([Trajectory(ids=[0, 0], action_mask=[0, 1])], advantages=[advantage],
                         old=torch.tensor([old]), ref=torch.tensor([ref]),
                         drawn=torch.tensor([old]))
    loss, statistics = evolve.grpo_loss(token, [visit], evolve.Settings(grpo_kl=beta))
    derivative, = torch.autograd.grad(loss, token)
    return loss.item(), derivative.item(), statistics


@pytest.mark.parametrize("d", [-99.0, -30.0, -1.0, 0.0, 1.0, 10.0, 19.9])
def test_k3_is_exact_where_it_is_not_far(d):
    """No advantage is left: L = beta (exp(d) - d - 1), and its derivative by log pi 1 - exp(d)."""
    loss, derivative, statistics = at_one_token(-d, -d, 0.0, advantage=0.0)
    assert loss == pytest.approx(math.exp(d) - d - 1, rel=1e-5, abs=1e-6)
    assert derivative == pytest.approx(1 - math.exp(d), rel=1e-5, abs=1e-6)
    assert "far" not in statistics


@pytest.mark.parametrize("d", [21.0, 88.0, 89.0, 99.0, 700.0, 1e4])
def test_k3_of_a_far_token_is_finite_and_pulls_the_policy_back(d):
    """Beyond 20 nats exp(d) goes on as its tangent, e^20 (1 + d - 20)."""
    loss, derivative, statistics = at_one_token(-d, -d, 0.0, advantage=0.0)
    assert loss == pytest.approx(math.exp(20) * (d - 19) - d - 1, rel=1e-5)
    assert derivative == pytest.approx(-math.exp(20), rel=1e-5)
    assert statistics["far"] == dict(count=1)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_of_a_far_token_is_finite(advantage):
    loss, derivative, _ = at_one_token(-1.0, -100.0, -1.0, advantage)
    assert math.isfinite(loss) and math.isfinite(derivative)


def test_how_far_sampler_and_training_are_apart_is_measured():
    """Of four tokens one is 0.5 nats off (its ratio 1.65 is beyond 1.28), one -0.1."""
    visit = evolve.Visit([], old=torch.tensor([-1.0, -2.0, -3.0, -1.1]),
                            drawn=torch.tensor([-1.0, -2.0, -3.5, -1.0]))
    assert evolve.apart([visit], evolve.Settings()) == pytest.approx(dict(
        mean=0.1, rms=math.sqrt((0.25 + 0.01) / 4), beyond=0.25), rel=1e-5)
    assert evolve.apart([], evolve.Settings()) == {}


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
    ([1.0, 0, 0, 0], 2, None), ([1.0, 0.0, 1.0, 0.0], 5, 1),
])
def test_forgetting(scores, window, found):
    """The last visit is in this segment, those before in the one before; b is not visited now. The
    success that is shown is of the visit that was won, the failure of the last."""
    *before, now = [segment("a", [n < 4 * score for n in range(4)], step)
                    for step, score in enumerate(scores)]
    before = [t for visit in before for t in visit] + segment("b", [1], 90) + segment("b", [0], 91)
    s = evolve.Settings(window=window)
    rows = [*evolve.forgetting(evolve.look_back([before, now], 1.0, window), s)]
    assert [(row["task"], row["visits_ago"]) for row in rows] == ([("a", found)] if found else [])
    for row in rows:
        assert row["success_then"] == [len(scores) - 1 - found, 0]
        assert row["failure"][0] == len(scores) - 1


@pytest.mark.parametrize("y, found", [([0, 0, 0], None), ([1, 0, 0], 1), ([1, 1, 0], 2),
                                      ([1, 1, 1], None)])
def test_boundary(y, found):
    rows = [*evolve.boundary(evolve.look_back([segment("a", y)], 1.0, 5), None)]
    assert rows == ([] if found is None else [dict(
        task="a", successes=found, failure=[1, found], success=[1, 0])])


def test_rare():
    def found(below, least, held=[{"p"}] * 2 + [{"q"}] * 3 + [{"r"}] * 95):
        history = evolve.History(1.0, {}, segment("t", [1] * len(held)), held)
        s = evolve.Settings(rare_below=below, rare_min=least)
        return {row["pattern"]: row["episodes"] for row in evolve.rare(history, s)}

    assert found(3.0, 1) == {"p": 2}           # 3 of 100 is at the threshold
    assert found(3.1, 1) == {"p": 2, "q": 3}
    assert found(3.1, 3) == {"q": 3} and found(3.1, 1, []) == {}


def test_signals_pick_in_turn_and_a_task_once():
    """By hand: a1, b1; then a has b1 left, which is taken, so a3; b has none but a1; c picks too."""
    def rows(text):
        return [dict(task=task) for task in text.split()]

    picked = evolve.pick([rows("a1 b1 a3 a4"), rows("b1 a1"), rows("a1 c2 c3 c4")], 2)
    assert [row["task"] for row in picked] == ["a1", "b1", "c2", "a3", "c3"]


@pytest.fixture(scope="module")
def databases():
    env = envs.make("intercodesql", "short")
    return env, env.task_generator()


@pytest.fixture(scope="module")
def shop():
    env = envs.make("webshop", "short")
    return env, env.task_generator()


def replies_of(env, task):
    messages, _ = converse(env, env.reset(task), env.expert())
    return [m["content"] for m in messages if m["role"] == "assistant"]


def test_every_gold_query_inverts_to_a_question_with_the_same_rows(databases):
    env, generator = databases
    rng, same = random.Random(0), 0
    for split in ("train", "validation", "test", "unseen"):
        for task in env.tasks(split):
            question = env.find(task)
            gold = question["gold"]
            apart = re.sub(r"([(),*])", r" \1 ", gold)  # as the tiny tokenizer decodes it
            for written in (gold, apart, re.sub("SELECT|FROM|MAX|OR", lambda m: m[0].lower(), gold)):
                text, again = generator.question(question["db"], written, rng)
                assert again == gold
                same += text == question["query"]
    assert same > 900  # of 5,400: a column may be called as stored or by a synonym


def test_a_query_that_its_words_would_not_say_is_of_no_family(databases):
    """Places are where things are, not in them; names have no average and none is above 20."""
    env, generator = databases
    for db, script in list(env.world.databases.items())[:40]:
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
        for task in env.tasks(split)[:40]:
            assert generator.refusal(env.find(task)) == "a database of no training task"
    train = env.find(env.tasks("train")[0])
    gold, new = train["gold"], dict(train, query="x", gold="SELECT 1")
    assert generator.refusal(new) is None
    for says, field, texts in (
            ("a question of a split", "gold", (gold, gold + "  ", gold.lower(), f"{gold}/* x */",
                                               re.sub(r"FROM (\w+)", r"FROM (`\1`) AS t", gold),
                                               gold.replace(" FROM ", " -- all\nFROM ") + " ;")),
            ("a question of a split", "query", (train["query"].upper() + " ", *(
                f"{env.find(env.tasks(split)[0])['query']}?" for split in ("validation", "test")))),
            ("a held-out noun", "query", ["how many clocks"]),
            ("cannot be asked", "gold", ("SELECT @@version", "DROP TABLE t")),
            ("another time", "gold", ("SELECT datetime('now')", "SELECT random ( )"))):
        for text in texts:
            assert says in generator.refusal({**new, field: text})


SAME = [  # (what is rewritten, how) where it does not change what a query finds
    (r"(FROM|JOIN) (\w+)", r"\1 `\2`"), (r"COUNT\(\*\)", "count ( 1 ) AS n"),
    (r"WHERE (.*?)( ORDER|$)", r"WHERE (\1)\2"), (r"(\w+) = ('\w+')", r"\2 = \1"),
    (r"(\w+) > (\d+)", r"\2 < \1"), (r"WHERE ([^O]*) OR ([^O]*)$", r"WHERE \2 OR \1"),
    (r"^SELECT (\w+) FROM (\w+)\b(?! JOIN)", r"SELECT t.\1 FROM \2 AS t"), (r"$", " ; -- all"),
    (r"FROM (\w+) JOIN (\w+) USING \((\w+)\)", r"FROM \2 q JOIN \1 w ON w.\3 = q.\3"),
    (r"WHERE (\w+) < (\d+)$", r"WHERE NOT \1 >= \2"), (r"AVG\((\w+)\)", r"SUM(\1) / COUNT(*)"),
]
OTHER = [(r" WHERE [^)]*$", ""), (r"> [2-6]\d", "> 85"), (r"<", ">"), (r" ORDER BY .*", ""), (r"LIMIT \d", "LIMIT 9"),
         (r" DESC", ""), (r"MAX", "MIN"), (r" OR ", " AND "), (r"^SELECT (\w+) FROM", r"SELECT \1, 1 FROM")]


def test_queries_that_find_the_same_are_one_question(databases):
    env, generator = databases
    same, other = Counter(), Counter()
    for task in env.tasks("train")[:150]:
        question = env.find(task)
        key = generator.key(question)
        for rewrites, found, alike in ((SAME, same, True), (OTHER, other, False)):
            for pattern, by in rewrites:
                sql = re.sub(pattern, by, question["gold"], count=1)
                if sql != question["gold"]:
                    found[pattern] += 1
                    assert (generator.key(dict(question, gold=sql)) == key) == alike, (sql, question)
    assert len(same) == len(SAME) and len(other) == len(OTHER)
    elsewhere = next(q for q in env.splits["train"].values() if q["db"] != question["db"])
    count = "SELECT 1"
    assert generator.key(dict(question, gold=count)) != generator.key(dict(elsewhere, gold=count))
    fails = [generator.key(dict(question, gold=f"SELECT {n} FROM nowhere")) for n in "112"]
    assert fails[0] == fails[1] != fails[2]


GOLD = "SELECT name FROM doctor WHERE age > 30 OR color = 'red'"


@pytest.mark.parametrize("text, tells", [
    *((text, True) for text in (
        GOLD, GOLD.lower(), f"(Hint: {GOLD.lower()})", f"Run it:\n```sql\n{GOLD}\n```",
        "they are: select `name`\n from doctor where `age`>30   or color=\"red\";",
        "desc doctor, then say the names", "Select Name From Doctor", "`select name from people`",
        "SELECT name FROM people", "select avg(age) from people", "select * from people",
        "select p.name from people p where p.age > 30", "select/**/a/**/from/**/b where c = 3",
        "with a as (select b from c order by d) select 1", "select left(a, 1) from b limit 3",
        "select a from b where c in ('red', 'blue')", "select a from b join c using (d)")),
    *((text, False) for text in (
        "list the name of doctors with age above 30 or color 'red'", "", "submit the names",
        "select the names of doctors from towns where the age is above 30",
        "Select all doctors from France, where age is high or color 'red'",
        "which actors from Japan did they select, and where do they live?",
        "please select actors, writers and singers from France", "select 3 doctors from Spain",
        "From the list of doctors, select those where age is above 30",
        "select people from towns (all of them)", "show the tables of doctors"))])
@pytest.mark.parametrize("view", ["short", "full"])
def test_a_text_with_sql_tells_its_solution_and_english_does_not(databases, text, tells, view):
    env, generator = databases
    if view == "full":
        env = envs.make("intercodesql")
        generator = env.task_generator()
    proposal = generator.proposal(text, GOLD, "d")
    assert generator.tells(text, proposal["solution"]) == tells
    question = env.find(env.tasks("train")[0])
    whole = generator.proposal(question["query"], question["gold"], question["db"])
    assert generator.verify(whole) is None
    joined = f"{question['query']}: {question['gold'].lower()}"
    assert generator.verify(dict(whole, text=joined)) == "its text tells its solution"


def test_nobody_makes_questions_about_other_data(monkeypatch):
    theirs = replace(sql_world(), tables=None)  # as InterCode's own
    monkeypatch.setattr("worlds.intercodesql.world.sql_world", lambda: theirs)
    env = InterCodeSQL("short")
    with pytest.raises(envs.Refused, match="--method grpo --start-from train"):
        env.task_generator()


def test_a_purchase_becomes_a_goal_that_its_actions_solve(shop):
    env, generator = shop
    rng, kept, refused = random.Random(0), 0, Counter()
    for task in env.tasks("train")[:150]:
        for found in generator.finds(task, replies_of(env, task), rng):
            reason = generator.refusal(found["task"])
            refused[reason] += 1
            if reason is None:
                assert generator.verify(found) is None
                assert env.add(found["task"]) and found["text"] == found["task"]["instruction"]
                kept += 1
    assert kept > 50 and refused["a goal of a split"] > 20


def test_goals_of_splits_and_of_held_out_products_are_refused(shop):
    env, generator = shop
    new = next(found["task"] for task in env.tasks("train") for found in generator.finds(
        task, replies_of(env, task), random.Random(3)) if not generator.refusal(found["task"]))
    for split in ("train", "validation", "test", "unseen"):
        for task in env.tasks(split)[:40]:
            goal = env.find(task)
            other = {**goal, "instruction": "in other words", "price_upper": goal["price_upper"] + 7}
            for same in (goal, {**new, "instruction": f" {goal['instruction'].upper()}"},
                         *([other] if split != "train" else [])):  # nor with another price limit
                assert generator.refusal(same) == "a goal of a split"
            assert generator.refusal({**other, "goal_options": ["mauve"]}) == "no product meets it"
    for goal in (env.find(task) for task in env.tasks("unseen")):
        one = {**goal, "attributes": goal["attributes"][:1], "price_upper": goal["price_upper"] + 1}
        assert generator.refusal(one) in ("a goal of a split", "a held-out product meets it")


def test_an_explorers_goal_is_what_its_words_say(shop):
    env, generator = shop
    told = Counter()
    for task in env.tasks("train")[:80]:
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
        assert written(f"{words}1") is None                       # it costs more
        assert written(words) is None                             # no limit
        assert written("hello, lower than $997") is None          # nothing
        assert written(f"{goal['query']} in {options}, lower than $997") is None  # no attribute
        wrong = next(a for a in sorted(generator.attributes) if not any(
            a in p["Attributes"] for p in env.world.products if p["query"] == goal["query"]))
        assert written(f"{wrong} {words}997") is None
        colour = next(c for c in ("pink", "navy") if c not in goal["goal_options"])
        assert written(f"{colour} {words}997") is None
        alone = written(f"{first[0]} {goal['query']} below 997 dollars")
        assert alone["task"]["goal_options"] == []
        assert generator.refusal(alone["task"])  # no colour
    assert told[None] > 10, told


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
    assert {"buy as asked", "choose what was asked"} <= generator.patterns(task, replies_of(env, task))
    env, generator = databases
    task = env.tasks("train")[0]
    assert generator.patterns(task, ["SELECT nonsense", "SHOW TABLES", "submit"]) == set()
    gold = env.find(task)["gold"]
    pattern, = generator.patterns(task, [gold])  # as the tiny tokenizer decodes it, too
    assert generator.patterns(task, [re.sub(r"([(),*])", r" \1 ", gold)]) == {pattern}


def test_a_variation_is_of_the_same_kind_and_its_solution_proves_it(shop):
    env, generator = shop
    rng, texts = random.Random(0), set()
    for task in env.tasks("train")[:25]:
        for _ in range(2):
            proposal, = generator.vary(task, None, rng)
            old, new = env.find(task), proposal["task"]
            assert generator.refusal(new) is None and generator.verify(proposal) is None
            assert new["query"] == old["query"]
            id = env.add(new)  # somebody who reads the text alone solves it
            messages, reward = converse(env, page := env.reset(id), env.expert())
            assert reward == 1 and proposal["text"] in page
            texts.add(proposal["text"])
    assert len(texts) > 45


def test_a_rare_pattern_is_asked_for_where_it_can_be(shop):
    env, generator = shop
    can = "< prev, open number 3", "next >", "search for 1 attributes"
    cannot = ("buy without an option", "choose something else", "open number 1, description",
              "search for 0 attributes")
    task, found = env.tasks("train")[0], Counter()
    for pattern in can:
        assert generator.parses(pattern)
        for seed in range(5):
            for proposal in generator.vary(task, pattern, random.Random(seed)):
                found[pattern] += 1
                id = env.add(proposal["task"])
                assert pattern in generator.patterns(id, proposal["solution"])
                assert generator.verify(proposal) is None
    assert set(found) == set(can)
    assert not any(generator.parses(pattern) for pattern in cannot)


class Letters(World):
    """Pays (sum of the reply's letters and the task's number, modulo 5) / 4; any number is a task."""
    name, test_splits, max_steps, stops = "letters", ("test",), 1, ("Observation:",)
    splits = {"train": {str(n): n for n in range(6)}, "test": {str(n): n for n in range(6, 9)}}

    def add(self, task):
        return super().add(task["number"])

    def start(self, number):
        self.number = number
        return f"say something, {number}"

    def step(self, reply):
        return Step("thanks", (sum(map(ord, reply)) + self.number) % 5 / 4, True)

    def expert(self):
        return lambda observation: "c"

    def task_generator(self):
        return Smith()


class Smith:
    """A reply is a find: a task of the number that it adds up to, beyond the training tasks."""
    form, actions = "A number.", "letters"

    def patterns(self, task, replies):
        return {f"{len(reply)} letters" for reply in replies}

    def finds(self, task, replies, rng):
        number = 10 + sum(map(ord, replies[0])) % 40 if replies else 10
        return [dict(text=f"say {number}", task=dict(number=number), solution=replies)]

    def key(self, task):
        return str(task if isinstance(task, int) else task["number"])

    def refusal(self, task):
        number = task if isinstance(task, int) else task["number"]
        return "a number of a split" if number % 7 == 0 else None

    def verify(self, proposal):
        return "odd" if proposal["task"]["number"] % 2 else None

    def parses(self, pattern):
        return pattern != "4 letters"

    def vary(self, task, pattern, rng):
        number = rng.randrange(10, 200)
        return [dict(text=f"say {number}, {task}, {pattern}", task=dict(number=number), solution=[])]


@pytest.fixture
def run(small_model, tmp_path, monkeypatch):
    """run(method, out, world, kind, **settings) -> the finished run; method None: one to begin."""
    def start(method="evolve", out="run", world=Letters, kind=evolve.Run, **changed):
        monkeypatch.setattr(envs, "make", lambda *_, **__: world())
        s = evolve.Settings(**dict(
            method=method, model=str(small_model), out=str(tmp_path / out), max_tokens=400,
            max_new_tokens=4, slots=8, warm_start="none", start_tasks=5, grpo_steps=6,
            evolve_every=2, evaluate_every=9, step_tasks=3, step_rollouts=4, grpo_batch=2,
            grpo_lr=1e-4, grpo_temperature=1.5, explorer_temperature=1.5, near_text=1.0, picks=2,
            explorer_episodes=2) | changed)
        r = kind(s, envs.environment("webshop")())
        if method:
            evolve.METHODS[method].loop(r)
        return r

    return start


def rows(r, name):
    return read_jsonl(r.folder / name)


def sizes(r):
    return [len(evolve.active(rows(r, f"iter{i}/tasks.jsonl"))) for i in range(3)]


def steps(r):
    return [row for file in sorted(r.folder.glob("iter*/target-agent/train.jsonl"))
            for row in read_jsonl(file)]


def weights(r, i):
    return (r.folder / f"iter{i}/target-agent/model.safetensors").read_bytes()


def test_the_task_set_grows_from_signals(run):
    r = run(rare_below=60.0)
    found, d = sizes(r), [rows(r, f"iter{i}/tasks.jsonl") for i in range(3)]
    assert 0 < found[0] <= 5 and found[2] > found[0]
    assert d[2][:len(d[1])] == d[1] and d[1][:len(d[0])] == d[0]  # each is written whole
    numbers = [row["definition"]["number"] for row in d[2]]
    assert len(set(numbers)) == len(numbers)
    assert not any(n % 2 or n % 7 == 0 for n in numbers)  # what the generator refused
    proposals = [row for i in range(3) for row in rows(r, f"iter{i}/proposals.jsonl")]
    assert {"odd", "a number of a split", "known already"} <= {row["reason"] for row in proposals}
    assert [(row["step"], row["D"]) for row in steps(r)] == [
        (n + 1, found[n // 2]) for n in range(6)]
    assert all(row["sampler"]["rms"] < 1e-4 and row["sampler"]["beyond"] == 0
               for row in steps(r))  # plain and fp32: the same
    for i in (1, 2):
        picked = [row for row in rows(r, f"iter{i}/signals.jsonl") if row["picked"]]
        visited = {t.task for t in read(r.folder / f"iter{i}/target-agent/episodes.jsonl")}
        assert {row["task"] for row in picked} <= visited
        logged = r.done[f"iter{i}/signals.jsonl"]["picks"]
        assert logged == Counter(f"picked {row['signal']}" for row in picked) and len(logged) > 1
    # Random exploration follows no signal, with as many episodes of the explorer.
    other = run(out="random", rare_below=60.0, guide="random", grpo_steps=3)
    assert {row["signal"] for row in rows(other, "iter1/explored.jsonl")} == {"random"}
    assert len({r.done["iter1/explored.jsonl"]["episodes"] for r in (r, other)}) == 1


class Overlapping(Letters):
    splits = {"train": {str(n): n for n in range(6)}, "test": {str(n): n for n in range(5)}}


def test_a_task_with_a_long_text_is_refused_before_it_is_played():
    def reason(text):
        proposal = dict(text=text, task=dict(number=10), solution=[])
        return evolve.refusal(Smith(), proposal, set(), [], 1.0)

    assert reason("w" * 1000) is None
    assert reason("w" * 1001) == "its text is too long"


@pytest.mark.parametrize("start_from", ["train", "explore"])
def test_training_tasks_that_are_all_evaluated_are_refused(start_from, run):
    how = dict(world=Overlapping, start_from=start_from, grpo_steps=2)
    with pytest.raises(envs.Refused, match="of 5 training tasks none is left"):
        run(train_tasks=5, **how)
    assert "iter1/target-agent" in run(train_tasks=6, out="one", **how).done


def help_of(capsys, monkeypatch, *argv):
    """heading -> flag -> what --help says of the setting, and the whole text."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        coevolve.main([*argv, "--help"], evolve.Settings, evolve.Run, evolve.METHODS, "evolve.py")
    said = capsys.readouterr().out
    groups = {}
    for group in said.split("\n\n"):
        heading, *flags = re.split(r"\n  (?=--)", group)
        groups[heading.strip(":")] = {text.split()[0]: " ".join(text.split()) for text in flags}
    return groups, said


def test_help_says_of_each_setting_what_it_does_and_where_its_default_is_from(capsys, monkeypatch):
    groups, said = help_of(capsys, monkeypatch)
    assert said.startswith("usage: python evolve.py [--env ENV] [--method METHOD]")
    for method in evolve.METHODS:
        assert re.search(rf"\n  {method} +GRPO on ", said)
    assert "--method" in groups["What is trained, on which tasks, and how long an episode may be"]
    own = [groups[kind.__doc__] for kind in (evolve.Grpo, evolve.NewTasks, evolve.Evolution)]
    assert [len(group) for group in own] == [13, 7, 10]
    for group in own:
        for text in group.values():
            assert re.search(r" [A-Z][^:]{10,}.*: .*default .* \[.*\]", text), text
    assert own[0]["--grpo-kl"].endswith("0.2 (preset tiny; default 0.001 [notes; AgentEvolver])")


def test_help_leaves_out_what_grpo_does_not_read(capsys, monkeypatch):
    groups, _ = help_of(capsys, monkeypatch, "--method", "grpo")
    assert evolve.NewTasks.__doc__ in groups and evolve.Evolution.__doc__ not in groups


class Scripted(evolve.Run):
    """The agent says "c"; pays(t) is the reward."""
    pays = staticmethod(lambda t: float(t.rollout % 2))

    def play(self, agent, episodes, temperature, make_env=None):
        for t in episodes:
            t.messages = [dict(role="user", content="say"), dict(role="assistant", content="c")]
            t.ids, t.action_mask = self.encoder.encode(t.messages, 1)
            t.log_probs, t.reward, t.ended = [-1.0] * t.action_count, self.pays(t), "done"
        return episodes


def test_a_policy_far_from_the_reference_goes_on_and_it_is_said_once(run, monkeypatch, capsys):
    """In every step the reference is 99 nats above the policy at the first token of a visit."""
    add_log_probs = evolve.add_log_probs

    def add_far_ones(visits, *more):
        add_log_probs(visits, *more)
        for visit in visits:
            visit.ref[0] += 99

    monkeypatch.setattr(evolve, "add_log_probs", add_far_ones)
    r = run("grpo", kind=Scripted, start_from="train", grpo_steps=2)
    assert [row["far"] for row in steps(r)] == [3, 3]  # a token of each of three tasks
    assert all(math.isfinite(row["loss"] + row["norm"]) for row in steps(r))
    assert capsys.readouterr().out.count("6 times the policy was 20 nats and more from pi_ref") == 1


def test_a_minibatch_counts_the_tasks_that_it_leaves_out(run, monkeypatch):
    """Six tasks in twos, of eight that were asked for: whoever is left out, the others stay
    together as they were."""
    cuts = []
    training = dpo.training

    def watch(model, optimizer, steps, *more):
        cuts.append([{visit.trajectories[0].task for visit in batch} for batch in steps])
        return training(model, optimizer, steps, *more)

    monkeypatch.setattr(dpo, "training", watch)
    for n, equal in enumerate(("", "124")):
        class Equal(Scripted):
            pays = staticmethod(lambda t: t.rollout % 2 if t.task[-1] not in equal else 0.0)
        r = run("grpo", f"run{n}", kind=Equal, start_from="train", start_tasks=8, step_tasks=6,
                grpo_steps=1, step_rollouts=2)
        assert [r.done["iter0/tasks.jsonl"][name] for name in ("tasks", "missing")] == [6, 2]
        kept = [{task for task in minibatch if task[-1] not in equal} for minibatch in cuts[0]]
        assert cuts[n] == [minibatch for minibatch in kept if minibatch]
    assert [len(minibatch) for minibatch in cuts[0]] == [2, 2, 2]


def test_a_world_without_new_tasks_is_refused_before_anything_runs(run, monkeypatch, tmp_path):
    monkeypatch.setattr(Letters, "task_generator", World.task_generator)
    for method in "evolve", "grpo":
        with pytest.raises(envs.Refused, match="letters: nobody makes new tasks in this world"):
            run(method, method)
        assert json.loads((tmp_path / method / "phases.json").read_text()) == {}


def test_without_new_tasks_evolution_is_grpo_bit_for_bit(run):
    a, b = (run(method, method, add_most=0, start_from="train", grpo_steps=2, evolve_every=1)
            for method in ("evolve", "grpo"))
    assert weights(a, 2) == weights(b, 2)
    kl = [row["kl"] for row in steps(b)]
    assert kl[0] == pytest.approx(0, abs=1e-5) and abs(kl[-1]) > 1e-6  # it starts at the reference


def test_aimed_tasks_vary_what_was_picked_and_nobody_explores(run):
    """Nor is what joins verified here."""
    r = run(explorer="aimed", rare_below=60.0, rare_min=2, verify=False, grpo_steps=4)
    assert (r.folder / "iter0/explored.jsonl").exists()  # the start tasks
    assert not (r.folder / "iter1/explored.jsonl").exists()
    signals = rows(r, "iter1/signals.jsonl")
    picked = {(row["task"], row["signal"], str(row.get("pattern"))) for row in signals
              if row["picked"]}
    assert Counter((row["source"], row["signal"], row["text"].rsplit(", ", 1)[1])
                   for row in rows(r, "iter1/proposals.jsonl")) == dict.fromkeys(picked, 2)
    patterns = {(row["pattern"], row["episodes"]) for row in signals if row["signal"] == "rare"}
    assert patterns and all(p != "4 letters" and n > 1 for p, n in patterns)
    assert any(row["definition"]["number"] % 2 for row in rows(r, "iter1/tasks.jsonl"))


@pytest.mark.parametrize("tasks, share, of_start", [  # a step has 4 tasks, D_0 has 3
    (8, 0.75, 3), (8, 0.5, 2), (1, 0.5, 3), (0, 0.5, 3), (8, 1.0, 3), (8, 0.0, None)])
def test_each_pass_visits_every_task_and_no_step_one_twice(tmp_path, tasks, share, of_start):
    """With --start-share the start tasks have so much of each step, and passes of their own."""
    start, added = ["s0", "s1", "s2"], [f"a{n}" for n in range(tasks)]
    r = SimpleNamespace(main=True, settings=evolve.Settings(
        start_share=share, step_tasks=4, evolve_every=1, grpo_steps=45))
    d = [dict(task=task, joined=int(task[0] == "a")) for task in start + added]
    planned, before = [], []
    for i in range(1, 46):
        (tmp_path / "tasks").write_text("\n".join(map(json.dumps, d if i > 1 else d[:3])))
        evolve.plan(r, tmp_path / f"{i}", [tmp_path / "tasks"], before, i=i)
        before = [tmp_path / f"{i}"]
        planned.append(read_jsonl(before[0])[0]["tasks"])
    first, *later = planned
    assert len(first) == 3
    for batch in later:
        assert len({*batch}) == len(batch) == min(4, 3 + tasks)
        assert of_start is None or sum(task in start for task in batch) == of_start
    visits = Counter(task for batch in later for task in batch)
    for pool in (start, added) if share else (start + added,):
        counts = [visits[task] for task in pool]
        assert not counts or max(counts) - min(counts) <= 1


def test_added_tasks_that_are_mastered_leave_for_good(run):
    """The agent here solves what has an even id, all of it; start tasks stay all the same."""
    class Even(Scripted):
        pays = staticmethod(lambda t: 1.0 if int(t.task[-1]) % 2 == 0 else float(t.rollout % 2))

    r = run(kind=Even, explorer="aimed", mastered="leave", step_tasks=20, grpo_steps=4, picks=4,
            start_from="train", evolve_every=1, step_rollouts=2)
    start, gone = {row["task"] for row in rows(r, "iter0/tasks.jsonl")}, set()
    for i in (1, 2, 3):
        before, d = (rows(r, f"iter{n}/tasks.jsonl") for n in (i - 1, i))
        left = {row["task"] for row in d if row.get("left") == i}
        assert left == {row["task"] for row in evolve.active(before)
                        if row["task"] not in start and int(row["task"][-1]) % 2 == 0}
        gone |= left
        now = {row["task"] for row in evolve.active(d)}
        assert not gone & now and start <= now
        assert not gone & {t.task for t in read(r.folder / f"iter{i + 1}/target-agent/episodes.jsonl")}
    assert len(gone) > 2


def test_what_is_always_or_never_solved_does_not_join(run):
    """The agent solves number n in n % 5 of its four plays."""
    asked = []

    class Some(Scripted):
        def play(self, agent, episodes, temperature, make_env=None):
            env = (make_env or self.make_env)()
            if episodes[0].seed == seed_of(0, "solve", episodes[0].iteration, episodes[0].task, 0):
                asked.append((str(agent)[-19:], len(episodes), temperature))
            self.pays = lambda t: float(t.rollout < env.find(t.task) % 5)
            return super().play(agent, episodes, temperature)

    r = run(kind=Some, explorer="aimed", solve_check=4, start_from="train", add_most=5, picks=4,
            explorer_episodes=5, step_tasks=5, grpo_steps=2, evolve_every=1)
    judged = rows(r, "iter1/solved.jsonl")
    tried = [row for row in judged if "solved" in row]
    assert len(tried) == 5 and {row["solved"] for row in tried} >= {0, 4}
    for row in tried:
        assert row["solved"] == row["task"]["number"] % 5
        assert row["reason"] == {0: "the agent never solves it", 4: "the agent always solves it"}.get(
            row["solved"])
    added = [row["task"] for row in judged if not row["reason"]]
    assert added and added == [
        row["definition"] for row in rows(r, "iter1/tasks.jsonl") if row["joined"]]
    assert asked == [("/iter1/target-agent", 20, 1.5)]  # hot as in training


class Vowels(Letters):
    """Pays the share of vowels among eight letters."""

    def step(self, reply):
        return Step("thanks", sum(letter in "aeiou" for letter in reply[:8]) / 8, True)


def test_twenty_four_steps_teach_a_policy_what_pays(run):
    r = run("grpo", world=Vowels, start_from="train", start_tasks=4, grpo_steps=24, evolve_every=24,
            step_tasks=4, step_rollouts=6, max_new_tokens=6, slots=24, grpo_lr=3e-3,
            grpo_temperature=1.0)
    log = rows(r, "iter1/target-agent/train.jsonl")
    rewards, kl = [row["reward"] for row in log], [row["kl"] for row in log]
    assert np.mean(rewards[:5]) < 0.2 and np.mean(rewards[-5:]) > 0.4
    assert np.mean(kl[-10:]) > 0  # of its own samples, over the tokens that may be drawn


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.is_file() and p.suffix in (".jsonl", ".safetensors")}


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(run):
    """Stopped in segment 2 and in the evolution after it: moments and passes go on from files."""
    more = dict(solve_check=3, mastered="leave", start_share=0.5, grpo_steps=3, evolve_every=1,
                max_tokens=40, start_from="train")
    whole = files_of(run(out="whole", **more).folder)

    class Stops(evolve.Run):
        def make(self, out, work, *inputs, **how):
            if how.get("i") == 2 and work.__name__ == self.stop:
                raise KeyboardInterrupt
            return super().make(out, work, *inputs, **how)

    for Stops.stop in "train", "join":
        with pytest.raises(KeyboardInterrupt):
            run(out="stopped", kind=Stops, **more)
    assert files_of(run(out="stopped", **more).folder) == whole


def test_a_state_inside_a_segment_is_gone_on_from(run):
    """Stopped after its first step, and moments are kept too."""
    class Stops(evolve.Run):
        def checkpoint(self, steps):
            def keep(model, optimizer, n):
                kept.keep(model, optimizer, n)
                raise RuntimeError("stopped")

            kept = Checkpoint(self.accelerator, self.folder / "inside", 0, steps)
            return SimpleNamespace(keep=keep, restore=kept.restore)

    how = dict(start_from="train", grpo_steps=2)
    whole = files_of(run("grpo", "whole", **how).folder)
    for _ in range(2):  # in the second step, too, which begins where the first ended
        with pytest.raises(RuntimeError, match="stopped"):
            run("grpo", "stopped", kind=Stops, **how)
    assert files_of(run("grpo", "stopped", kind=Stops, **how).folder) == whole


def test_a_copy_of_a_live_model_answers_as_it_does(run):
    r = run(None)
    model = r.load(r.base)
    assert r.replica(model) is model and not model.training
    r.bf16 = True
    copied = r.replica(model)
    read_again = coevolve.Run.replica(r, r.base)
    ids = torch.tensor([r.encoder.start([dict(role="user", content="say")])])
    assert copied.dtype == torch.bfloat16
    assert torch.equal(copied(input_ids=ids).logits, read_again(input_ids=ids).logits)
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_two_sharded_processes_evolve_like_one(tied, small_model, tmp_path):
    base = tmp_path / "base"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(small_model, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    AutoTokenizer.from_pretrained(small_model).save_pretrained(base)
    said = tmp_path / "said"
    for ranks in (1, 2):
        flags = dict(
            model=base, out=tmp_path / str(ranks), start_from="train", grpo_steps=2,
            evolve_every=1, evaluate_every=9, grpo_lr=1e-5, max_tokens=400, max_new_tokens=4,
            slots=8, start_tasks=5, warm_start="none", step_tasks=3, step_rollouts=4, grpo_batch=2,
            near_text=1.0, picks=1, explorer_episodes=4)

        def work():
            envs.make = lambda *_, **__: Letters()
            argv = []
            for name, value in flags.items():
                argv += [f"--{name.replace('_', '-')}", str(value)]
            coevolve.main(argv, evolve.Settings, evolve.Run, evolve.METHODS)

        assert [ended(p) for p in fork_ranks(ranks, work, said)] == [0] * ranks, said.read_text()[-3000:]
    log = [[(row["loss"], row["kl"]) for i in (1, 2) for row in read_jsonl(
        tmp_path / f"{out}/iter{i}/target-agent/train.jsonl")] for out in "12"]
    assert torch.tensor(log[0]).sub(torch.tensor(log[1])).abs().max() < 5e-6
    assert len(log[0]) == 2 and abs(log[0][1][1]) > 1e-6  # it has learnt something
    one, two = ((tmp_path / out / "iter1/tasks.jsonl").read_text() for out in "12")
    assert one == two != ""


def test_a_rank_without_episodes_knows_an_agent_as_the_others_do(small_model, tmp_path):
    """Two episodes a step on three ranks. By how an agent was made all of them find its state."""
    def work():
        class Noting(evolve.Run):
            def record(self, output):
                super().record(output)
                made = {name: row["made_by"] for name, row in self.done.items()}
                (tmp_path / "0").write_text(json.dumps(made))

            def once(self, output, *what, **how):
                path = super().once(output, *what, **how)
                made = {name: row["made_by"] for name, row in self.done.items()}
                (tmp_path / os.environ["RANK"]).write_text(json.dumps(made))
                return path

        envs.make = lambda *_, **__: Letters()
        flags = ("--method grpo --start-from train --grpo-steps 2 --evolve-every 1 --evaluate-every 9 "
                 "--max-tokens 400 --max-new-tokens 4 --slots 8 --start-tasks 1 --warm-start none "
                 "--step-tasks 1 --step-rollouts 2 --grpo-batch 1 --eval-tasks 1")
        argv = [*flags.split(), "--model", str(small_model), "--out", str(tmp_path / "run")]
        coevolve.main(argv, evolve.Settings, Noting, evolve.METHODS)

    said = tmp_path / "said"
    assert [ended(p) for p in fork_ranks(3, work, said)] == [0] * 3, said.read_text()[-3000:]
    known = [json.loads((tmp_path / rank).read_text()) for rank in "012"]
    assert "iter2/target-agent" in known[0]
    agents = [{name: made[name] for name in made if name.endswith("agent")} for made in known]
    assert agents[0] == agents[1] == agents[2]


def test_moments_are_read_again_also_where_no_text_uses_a_parameter(small_model, tmp_path):
    """As a part for pictures, which gets no gradient."""
    def model():
        found = dpo.load(Accelerator(cpu=True), small_model, recompute=False, shard=False)
        found.eyes = torch.nn.Linear(2, 2)
        return found

    text = Trajectory("a", ids=[5, 6, 7, 8], action_mask=[0, 0, 1, 1])
    objective = dpo.Objective(dpo.sft_loss, lambda group: 2, 1e-3)
    first, second = model(), model()
    eyes = copy.deepcopy(first.eyes)
    optimizer = dpo.adamw(first, objective)
    list(dpo.training(first, optimizer, [[dpo.Group([text])]] * 2, objective, dpo.token_log_probs))
    assert torch.equal(first.eyes.weight, eyes.weight)
    evolve.save_moments(SimpleNamespace(main=True), first, optimizer, tmp_path / "moments.pt")
    again = dpo.adamw(second, objective)
    evolve.load_moments(second, again, tmp_path / "moments.pt")
    for p, q in zip(first.parameters(), second.parameters()):
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], again.state[q]["exp_avg_sq"])


def test_more_steps_go_on_to_what_they_would_have_been(run):
    """The run ended inside its second segment, which is made again, as long as it has to be."""
    whole = files_of(run("evolve", "whole", grpo_steps=5).folder)
    run("evolve", "longer", grpo_steps=3)
    longer = files_of(run("evolve", "longer", grpo_steps=5).folder)
    after_three = {name for name in longer if name.startswith("eval-2-")}
    assert after_three and longer.keys() - whole.keys() == after_three
    assert {name: longer[name] for name in whole} == whole
