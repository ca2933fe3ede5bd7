"""Agent and tasks that evolve together: advantages, objective, signals, new tasks, the whole loop."""

import copy
import gc
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ended, events, fork, fork_ranks, wait_until

from lab import mutual
from lab import play_env as envs
from lab import tokens as dpo
from lab.engine.checkpoint import Checkpoint
from lab.harness import report
from lab.harness.settings import Settings, SettingsError
from lab.look.conversations import conversations
from lab.program import start
from lab.program.tasks import marks, trained_on
from worlds import Step, World, fields_of
from worlds.intercodesql.world import InterCodeSQL


@pytest.mark.parametrize("rewards, expected", [
    # mean 0.5, squares 4 x 0.25, over K - 1 = 3: std 0.57735
    ([0.0, 1.0, 0.0, 1.0], [-0.866024, 0.866024, -0.866024, 0.866024]),
    ([1.0, 0.0], [0.707106, -0.707106]),
    ([0.5, 0.5, 0.5], []),  # equals teach nothing
    ([0.7], []), ([], []),
])
def test_advantages_by_hand(rewards, expected):
    assert mutual.advantages(rewards) == pytest.approx(expected, abs=2e-6)


def sampled(encoder, n, seed=0, length=9):
    """n trajectories of random words after one prompt, as the sampler may draw them."""
    rng, never = random.Random(seed), set(encoder.pieces.suppress_tokens)
    free = [i for i in range(len(encoder.tokenizer)) if i not in never]
    start = encoder.start([dict(role="user", content="find a mug")])
    return [dpo.Trajectory("task", ids=start + (reply := rng.choices(free, k=length)),
                           action_mask=[0] * len(start) + [1] * len(reply)) for _ in range(n)]


def policies(agent, seeds=(2, 3), n=4):
    """A group with log-probabilities of two other models as old and ref, and the sampler."""
    model, encoder = agent
    sampler = dpo.Sampler(0.9, encoder.suppress_tokens(model.config.vocab_size))
    group = dpo.Rollouts("task", sampled(encoder, n), advantages=[1.0, -2.0, 0.5, 0.0][:n])
    for seed, name in zip(seeds, ("old", "ref")):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed),
                                        dtype=p.dtype)
        setattr(group, name, dpo.log_probs_of(Accelerator(cpu=True), other, [group], 4096,
                                              sampler=sampler)[0])
    return model, group, sampler


def by_hand(model, group, sampler, low, high, beta):
    """The loss as one loop over tokens in float64, from plain passes over whole sequences; and how
    many ratios are out of bounds."""
    total, outside = torch.zeros((), dtype=torch.float64), 0
    for t, advantage, old, ref in zip(group.sequences, group.advantages, group.old, group.ref):
        logits = model(input_ids=torch.tensor([t.ids]), lengths=[len(t.ids)]).logits[0].double()
        logits = logits / sampler.temperature
        allowed = [i for i in range(logits.shape[1]) if i not in sampler.suppress_tokens]
        k = 0
        for j in range(1, len(t.ids)):
            if not t.action_mask[j]:
                continue
            new = logits[j - 1][t.ids[j]] - torch.logsumexp(logits[j - 1][allowed], 0)
            ratio = math.e ** (new - old[k])
            clipped = min(max(ratio.item(), 1 - low), 1 + high)
            outside += clipped != ratio.item()
            surrogate = ratio * advantage
            if clipped != ratio.item() and clipped * advantage < surrogate.item():
                surrogate = torch.tensor(clipped * advantage, dtype=torch.float64)
            d = ref[k] - new
            total = total - surrogate + beta * (math.e ** d - d - 1)
            k += 1
    return total, outside


@pytest.mark.parametrize("low, high, beta", [(0.2, 0.28, 1e-3), (0.01, 0.02, 0.5), (0.5, 3.0, 0)])
def test_the_objective_is_the_loop_over_tokens(agent, low, high, beta):
    model, group, sampler = policies(agent)
    loss, statistics = mutual.grpo_loss(model, [group], sampler, low, high, beta)
    expected, outside = by_hand(model, group, sampler, low, high, beta)
    assert statistics == {"action": [36, outside]} and outside > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = [torch.autograd.grad(x, model.lm_head.weight, retain_graph=True)[0]
                 for x in (loss, expected)]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


def test_the_mask_is_in_the_kl_by_hand(monkeypatch):
    """Token 2 is never drawn: of the other two pi is (2/3, 1/3) and pi_ref (1/2, 1/2).

    Drawn 0: d = ln 1/2 - ln 2/3 = ln 3/4, k3 = 3/4 - ln 3/4 - 1. Drawn 1: d = ln 3/2. Weighted by
    pi that is KL(pi || pi_ref) = 2/3 ln 4/3 + 1/3 ln 2/3, however likely token 2 is.
    """
    def policy(*weights):
        def model(**_):
            return SimpleNamespace(logits=torch.tensor([[weights]]).log())
        model.parameters = lambda: iter([torch.zeros(1)])
        return model

    sampler, k3 = dpo.Sampler(1.0, (2,)), []
    for token in (0, 1):
        t = dpo.Trajectory(ids=[0, token], action_mask=[0, 1])
        ref = dpo.token_log_probs(policy(1.0, 1.0, 9.0), [t], sampler)
        group = dpo.Rollouts("task", [t], advantages=[0.0], old=[ref], ref=[ref])
        k3.append(mutual.grpo_loss(policy(2.0, 1.0, 0.1), [group], sampler, 0.2, 0.28, 1.0)[0])
    assert k3 == pytest.approx([0.75 - math.log(0.75) - 1, 1.5 - math.log(1.5) - 1])
    kl = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert (2 * k3[0] + k3[1]) / 3 == pytest.approx(kl)


@pytest.mark.parametrize("scores, window, found", [
    ([1.0, 0.0], 5, 1), ([0.5, 0.0], 5, 1),      # 0.5 counts as solved
    ([1.0, 0.5], 5, None),                       # and so it is not forgotten at 0.5
    ([1.0, 0.49], 5, 1), ([0.0, 0.0], 5, None),  # never solved
    ([0.0], 5, None), ([1.0], 5, None),          # one visit
    ([1.0, 0, 0, 0, 0, 0], 5, 5), ([1.0, 0, 0, 0, 0, 0, 0], 5, None),  # outside the window
    ([1.0, 0, 0, 0], 2, None), ([1.0, 0.0, 1.0, 0.0], 5, 1),
])
def test_forgetting(scores, window, found):
    assert mutual.forgetting({"a": scores, "b": [1.0, 0.0]}, {"a"}, window) == (
        {} if found is None else {"a": found})


@pytest.mark.parametrize("y, found", [([0, 0, 0], None), ([1, 0, 0], 1), ([1, 1, 0], 2),
                                      ([1, 1, 1], None)])
def test_boundary(y, found):
    assert mutual.boundary({"a": y}) == ({} if found is None else {"a": found})


def test_rare():
    held = [{"p"}] * 2 + [{"q"}] * 3 + [{"r"}] * 95
    assert mutual.rare(held, 3.0, 1) == {"p": 2}           # 3 of 100 is at the threshold
    assert mutual.rare(held, 3.1, 1) == {"p": 2, "q": 3}
    assert mutual.rare(held, 3.1, 3) == {"q": 3} and mutual.rare([], 3.1, 1) == {}


@pytest.fixture(scope="module")
def databases():
    env = envs.make("intercodesql", "short")
    return env, env.task_generator()


@pytest.fixture(scope="module")
def shop():
    env = envs.make("webshop", "short")
    return env, env.task_generator()


def replies_of(env, task):
    messages, _ = envs.converse(env, env.reset(task), env.expert())
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
    for question in env.world.questions["train"].values():
        for damaged in (question["gold"] + " LIMIT 3 OFFSET 1", "SELECT", question["gold"] + " x",
                        question["gold"].replace("SELECT", "SELECT nothing,", 1)):
            assert generator.question(question["db"], damaged, random.Random(0)) is None


def test_solutions_that_do_not_prove_a_question_are_refused(databases):
    env, generator = databases
    question = env.find(env.tasks("train")[0])
    whole = generator.proposal(question["query"], question["gold"], question["db"])
    assert generator.verify(whole) is None
    assert "does not end" in generator.verify({**whole, "solution": whole["solution"][:-1]})
    assert "earns" in generator.verify({**whole, "solution": ["SHOW TABLES", "submit"]})
    table = generator.proposal("x", "SELECT * FROM nowhere", question["db"])
    assert generator.verify(table)
    table = question["gold"].split(" FROM ")[1].split()[0]
    for gold in ("SELECT 1 WHERE 1 = 0", "SELECT",  # no rows; no query
                 f"select 1 from {table} where 1 = 1", f"SELECT 1 FROM {table}\nWhere 1 = 1"):
        assert generator.verify(generator.proposal("x", gold, question["db"])), gold
    long = ["SHOW TABLES"] * 9 + whole["solution"]
    assert "longer" in generator.verify({**whole, "solution": long})


def test_planted_questions_are_refused(databases):
    env, generator = databases
    for split in ("validation", "test", "unseen"):
        for task in env.tasks(split)[:40]:
            assert generator.refusal(env.find(task)) == "a database of no training task"
    train = env.find(env.tasks("train")[0])
    assert generator.refusal(train) == "a question of a split"
    assert generator.refusal({**train, "query": "other words"}) == "a question of a split"
    assert generator.refusal({**train, "gold": train["gold"] + "  ", "query": "x"})
    assert generator.refusal({**train, "query": "x", "gold": "SELECT 1"}) is None
    for gold in ("SELECT @@version", "DROP TABLE t"):  # nobody may ask that
        assert "cannot be asked" in generator.refusal({**train, "query": "x", "gold": gold})
    gold, asked = train["gold"], "a question of a split"
    for other in (gold.lower(), gold.replace(" FROM ", " -- all\nFROM ") + " ;", f"{gold}/* x */"):
        assert generator.refusal({**train, "query": "x", "gold": other}) == asked
    assert generator.refusal({**train, "query": train["query"].upper() + " ", "gold": "SELECT 1"}) == asked
    for split in ("train", "validation", "test"):
        words = env.find(env.tasks(split)[0])["query"]
        assert generator.refusal({**train, "query": f"{words}?", "gold": "SELECT 1"}) == asked
    assert generator.refusal({**train, "query": "how many clocks", "gold": "SELECT 1"}) == (
        "a held-out noun")
    for gold in ("SELECT datetime('now')", "SELECT CURRENT_TIME", "SELECT random ( )"):
        assert "another time" in generator.refusal({**train, "query": "x", "gold": gold})
    assert generator.key(dict(db="d", gold="SELECT 'A'")) != generator.key(dict(db="d", gold="SELECT 'a'"))


HOSTILE = (  # SQL of an explorer model; {t} is a table
    "SELECT COUNT(*) FROM " + ", ".join(f"{{t}} a{n}" for n in range(12)),
    "SELECT a FROM (SELECT 1 AS a LIMIT 0) WHERE 0 UNION SELECT 1 UNION SELECT 2",
    "SELECT hex(zeroblob(400000000))", "SELECT '\ud800'", "SELECT '\0'")


@pytest.mark.parametrize("gold", HOSTILE)
def test_no_query_of_an_explorer_breaks_or_holds_up_the_run(databases, gold):
    env, generator = databases
    db = env.find(env.tasks("train")[0])["db"]
    table = env.world.databases[db].split("CREATE TABLE ")[1].split()[0]
    proposal = generator.proposal("what is this", gold.replace("{t}", table), db)
    assert generator.refusal(proposal["task"]) or generator.verify(proposal)


def test_nobody_makes_questions_about_other_data():
    env = InterCodeSQL("short")
    env.world = replace(env.world, tables=None)  # as InterCode's own
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
    for split in ("train", "validation", "test", "unseen"):
        for task in env.tasks(split)[:40]:
            goal = env.find(task)
            assert generator.refusal(goal) == "a goal of a split"
            goal = {**goal, "instruction": "in other words"}
            other = generator.refusal({**goal, "price_upper": goal["price_upper"] + 7})
            if split != "train":  # nor with another price limit
                assert other == "a goal of a split"
            # What a held-out product meets is refused, whatever family it was thought of in.
            one = {**goal, "attributes": goal["attributes"][:1], "goal_options": ["mauve"]}
            assert generator.refusal(one) == "no product meets it"
    new = next(found["task"] for task in env.tasks("train") for found in generator.finds(
        task, replies_of(env, task), random.Random(3)) if not generator.refusal(found["task"]))
    for words in (env.find(env.tasks(split)[0])["instruction"] for split in ("test", "unseen")):
        said = {**new, "instruction": f" {words.upper()}"}
        assert generator.refusal(said) == "a goal of a split"
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
    assert generator.verify({**found, "solution": solution[:-1]}) == "its solution earns 0.00"
    other = {**found["task"], "goal_options": ["mauve"]}
    assert "earns" in generator.verify({**found, "task": other})
    assert "not carried out" in generator.verify({**found, "solution": solution + ["click[buy now]"]})
    idle = {**found, "solution": ["click[buy now]", *solution]}
    assert generator.verify(idle) == "an action of its solution is not carried out"
    assert "longer" in generator.verify({**found, "solution": ["nonsense"] * 11 + solution})
    again, = generator.finds(task, idle["solution"], random.Random(3))
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


@pytest.mark.parametrize("name", ["shop", "databases"])
def test_a_variation_is_of_the_same_kind_and_its_solution_proves_it(name, request):
    env, generator = request.getfixturevalue(name)
    rng, texts = random.Random(0), set()
    same = ("query",) if name == "shop" else ("db",)
    for task in env.tasks("train")[:25]:
        for _ in range(2):
            proposal, = generator.vary(task, None, rng)
            old, new = env.find(task), proposal["task"]
            assert generator.refusal(new) is None and generator.verify(proposal) is None
            assert all(new[field] == old[field] for field in same)
            if name == "databases":
                assert generator.family(new["gold"]) == generator.family(old["gold"])
            id = env.add(new)  # somebody who reads the text alone solves it
            messages, reward = envs.converse(env, page := env.reset(id), env.expert())
            assert reward == 1 and proposal["text"] in page
            texts.add(proposal["text"])
    assert len(texts) > 45


def test_a_rare_pattern_is_asked_for_where_it_can_be(shop, databases):
    for (env, generator), can, cannot in (
            (shop, ("< prev, open number 3", "next >", "search for 1 attributes"),
             ("buy without an option", "choose something else", "open number 1, description",
              "search for 0 attributes")),
            (databases, ("how many {t} are there for each {c}",
                         "list the {n} of {t} in {p} with {e} {u}"),
             ("SELECT x FROM x", "list the {n}"))):
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
    question = env.find(env.tasks("train")[0])
    odd = env.add({**question, "query": "x", "gold": "SELECT 1"})  # of no family
    assert generator.vary(odd, None, random.Random(0)) == []


class Letters(World):
    """Pays (sum of the reply's letters and the task's number, modulo 5) / 4; any number is a task."""
    name, test_splits, max_steps, latency = "letters", ("test",), 1, 0
    splits = {"train": {str(n): n for n in range(6)}, "test": {str(n): n for n in range(6, 9)}}

    def check(self, task):
        return fields_of(task, number=int)["number"]

    def reset(self, task):
        self.number = self.find(task)
        return f"say something, {self.number}"

    def step(self, reply):
        return Step("thanks", (sum(map(ord, reply)) + self.number) % 5 / 4, True)

    def expert(self):
        return lambda observation: "c"

    def task_generator(self):
        return Smith()


class Smith:
    """A reply is a find: a task of the number that it adds up to, beyond the training tasks."""

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


FEW = dict(max_tokens=400, max_new_tokens=4, slots=8, warm_start="none", start_tasks=5,
           evolve_every=2, step_tasks=3, step_rollouts=4, grpo_batch=2, near_text=1.0, threads=1)


@pytest.fixture
def run(begin):
    """run(method, **settings) -> the finished run."""
    def start(method, out="run", world=Letters, **changed):
        r = begin(world, out, **dict(
            FEW, method=method, grpo_steps=6, evaluate_every=1, grpo_lr=1e-4, grpo_temperature=1.5,
            explorer_temperature=1.5, expert_min_reward=0.0, picks=2, explorer_episodes=2,
            checkpoint_minutes=0) | changed)
        mutual.mutual(r)
        r.folder.lock.release()
        return r

    return start


def weights(r, i):
    return (r.folder.path / f"iter{i}/target-agent/model.safetensors").read_bytes()


def test_the_task_set_grows_from_signals(run):
    r = run("evolve", rare_below=60.0)
    files = [f"iter{i}/{name}.jsonl" for i in (1, 2) for name in
             ("signals", "explored", "proposals", "tasks")]
    assert all((r.folder.path / name).exists() for name in files)
    sizes = [len(mutual.task_set(r, i)) for i in range(3)]
    assert 0 < sizes[0] <= 5 and sizes[2] > sizes[0]
    numbers = [row["task"]["number"] for row in r.tasks.added()]
    assert len(set(numbers)) == len(numbers) == sizes[2]
    assert not any(n % 2 or n % 7 == 0 for n in numbers)  # what the generator refused
    rows = [row for i in range(3) for row in r.folder.read_jsonl(f"iter{i}/proposals.jsonl")]
    assert {"odd", "a number of a split", "known already"} <= {row["reason"] for row in rows}
    assert [e["step"] for e in events(r, "grpo")] == [1, 2, 3, 4, 5, 6]
    assert {e["D"] for e in events(r, "grpo")} == set(sizes)
    assert all(0 <= e["clipped"] < 1 for e in events(r, "grpo"))

    kinds = set()
    for i in (1, 2):
        found = r.folder.read_jsonl(f"iter{i}/signals.jsonl")
        kinds |= {row["signal"] for row in found}
        assert all(row["failure"] and row["success"] for row in found
                   if row["signal"] == "boundary")
        picked = [row["task"] for row in found if row["picked"]]
        visited = {t.task for t in r.folder.trajectories(f"iter{i}/target-agent/episodes.jsonl")}
        assert len(picked) == len(set(picked)) > 0 and set(picked) <= visited
    assert {"boundary", "rare"} <= kinds

    text = report.table(r.folder.path)
    signals = text.split("iteration  forgetting")[1].split("\n\n")[0].splitlines()[1:]
    assert [int(line.split()[-1]) for line in signals] == sizes  # |D| then
    assert [int(line.split()[-2]) for line in signals] == [sizes[0], *np.diff(sizes)]
    refused = text.split("Proposals refused\n")[1].split("\n\n")[0].splitlines()[1:]
    assert {line.rsplit(None, 1)[0]: int(line.split()[-1]) for line in refused} == Counter(
        row["reason"] for row in rows if row["reason"])
    task = r.folder.trajectories("iter3/target-agent/episodes.jsonl")[-1].task
    assert [t["id"] for t in conversations(r.folder.path, first=[task])["tasks"]][0] == task

    env = r.tasks.make_env()  # what an agent says that it was trained on grows with the set
    known = [[marks(env, task) <= trained_on(r.agent_folder("target", i))
              for task in env.tasks("added")] for i in (1, 2, 3)]
    assert list(map(sum, known)) == sizes


def test_what_is_forgotten_is_what_was_won_in_the_visits_before(run):
    """And the success that is shown with it is of that visit, not of the one that failed."""
    r = run("evolve", window=2, grpo_steps=8, evolve_every=6, step_rollouts=3)
    visits = {}
    for t in r.folder.trajectories("iter1/target-agent/episodes.jsonl"):
        visits.setdefault(t.task, {}).setdefault(t.iteration, []).append(t)
    expected = {}
    for task, by_step in visits.items():
        *before, now = [[t.reward == 1 for t in group] for group in by_step.values()]
        won = [n for n, y in enumerate(before) if sum(y) / 3 >= 0.5]
        if sum(now) / 3 < 0.5 and won and len(before) - won[-1] <= 2:
            expected[task] = next(
                t.messages for t in [*by_step.values()][won[-1]] if t.reward == 1)
    rows = r.folder.read_jsonl("iter1/signals.jsonl")
    assert expected and expected == {
        row["task"]: row["success_then"] for row in rows if row["signal"] == "forgetting"}


def test_of_earlier_segments_no_episode_is_held(run, monkeypatch):
    asked, alive = itertools.count(), []

    def patterns(smith, task, replies):
        if next(asked) % 12 == 11:  # the last of a segment's twelve episodes
            alive.append(sum(isinstance(o, dpo.Trajectory) for o in gc.get_objects()))
        return set()

    monkeypatch.setattr(Smith, "patterns", patterns)
    run("evolve", grpo_steps=6, evolve_every=1)
    assert len(alive) == 5 and alive[-1] <= alive[0]


def says_c(encoder, starts):
    """The episodes of an agent that says "c"."""
    for t in starts:
        t.messages = [dict(role="user", content="say"), dict(role="assistant", content="c")]
        t.ids, t.action_mask = encoder.encode(t.messages)
        yield t


def test_a_minibatch_counts_the_tasks_that_it_leaves_out(run, monkeypatch):
    """Six tasks in twos: whoever is left out, the others stay together as they were."""
    cuts, fit, equal = [], dpo.fit, set()

    def watch(accelerator, model, epochs, *more, **names):
        cuts.append([{g.task for g in minibatch} for minibatch in epochs[0]])
        fit(accelerator, model, epochs, *more, **names)

    def play(run, model, encoder, starts, temperature):
        for t in says_c(encoder, starts):
            t.reward = t.rollout % 2 if t.task[-1] not in equal else 0.0
        return starts

    monkeypatch.setattr(dpo, "fit", watch)
    monkeypatch.setattr(mutual, "play_with", play)
    for n, equal in enumerate(({}, {"0"}, {"1", "2", "4"}, {"0", "1", "2", "3"})):
        run("grpo", f"run{n}", start_from="train", start_tasks=6, step_tasks=6, grpo_steps=1)
        kept = [{task for task in minibatch if task[-1] not in equal} for minibatch in cuts[0]]
        assert cuts[n] == [minibatch for minibatch in kept if minibatch]
    assert [len(minibatch) for minibatch in cuts[0]] == [2, 2, 2]


@pytest.mark.parametrize("changed", [
    dict(method="evolve"), dict(method="grpo"),
    dict(method="grpo", start_from="train", solve_check=4)])
def test_a_world_without_new_tasks_is_refused_before_anything_runs(run, changed, monkeypatch, tmp_path):
    monkeypatch.setattr(Letters, "task_generator", World.task_generator)
    with pytest.raises(envs.Refused, match="letters: nobody makes new tasks in this world"):
        run(**changed)
    assert not (tmp_path / "run/experts.jsonl").exists()


def test_without_new_tasks_evolution_is_grpo_bit_for_bit(run):
    a, b = run("evolve", "a", add_most=0), run("grpo", "b")
    assert weights(a, 3) == weights(b, 3)
    kl = [e["kl"] for e in events(b, "grpo")]
    assert kl[0] == pytest.approx(0, abs=1e-5) and abs(kl[-1]) > 1e-6  # it starts at the reference


def test_a_run_goes_on_in_the_precision_that_it_was_begun_in(run, monkeypatch):
    few = dict(start_from="train", grpo_steps=1)
    r = run("grpo", **few)
    assert json.loads((r.folder.path / "config.json").read_text())["precision"] == "no"
    monkeypatch.setattr(Accelerator, "mixed_precision", property(lambda self: "bf16"))
    with pytest.raises(SettingsError, match=r"precision \(no -> bf16\); give another --out"):
        run("grpo", **few)


def test_start_tasks_that_the_training_split_lacks_are_counted(run):
    r = run("grpo", start_from="train", start_tasks=8, step_tasks=6, grpo_steps=1)
    done, = (e for e in r.folder.read_jsonl("metrics.jsonl")
             if e["event"] == "phase" and e["phase"] == "iter0/tasks.jsonl")
    assert (done["tasks"], done["missing"]) == (6, 2)


def test_random_exploration_has_no_signal_and_as_many_episodes(run):
    a, b = run("evolve", "a", start_from="train"), run("evolve", "b", guide="random", verify=False,
                                                       start_from="train")
    counts = [[e["episodes"] for e in events(r, "explored")] for r in (a, b)]
    assert counts[0][0] == counts[1][0]
    assert {t.agent for t in b.folder.trajectories("iter1/explored.jsonl")} == {"random"}
    for r, odd in ((a, False), (b, True)):  # without verification proposals join as they come
        sizes = [len(mutual.task_set(r, i)) for i in range(3)]
        assert sizes[0] == 5 and sizes[2] > 5 and len(r.tasks.added()) == sizes[2] - 5
        assert any(row["task"]["number"] % 2 for row in r.tasks.added()) == odd


def test_aimed_tasks_vary_what_was_picked_and_nobody_explores(run):
    r = run("evolve", explorer="aimed", rare_below=60.0, rare_min=2)
    assert [e["iteration"] for e in events(r, "explored")] == [0]  # the start tasks
    assert not (r.folder.path / "iter1/explored.jsonl").exists()
    patterns = set()
    for i in (1, 2):
        rows = r.folder.read_jsonl(f"iter{i}/signals.jsonl")
        picked = {(row["task"], row["signal"], str(row.get("pattern"))) for row in rows if row["picked"]}
        proposals = r.folder.read_jsonl(f"iter{i}/proposals.jsonl")
        assert Counter((row["source"], row["signal"], row["text"].rsplit(", ", 1)[1])
                       for row in proposals) == dict.fromkeys(picked, 2)  # --explorer-episodes
        patterns |= {(row["pattern"], row["episodes"]) for row in rows if row["signal"] == "rare"}
    assert patterns and all(p != "4 letters" and n > 1 for p, n in patterns)
    assert len(mutual.task_set(r, 2)) > len(mutual.task_set(r, 0))
    assert "episodes" in report.table(r.folder.path)


@pytest.mark.parametrize("tasks, share, of_start", [  # a step has 4 tasks, D_0 has 3
    (8, 0.75, 3), (8, 0.5, 2), (1, 0.5, 3), (0, 0.5, 3), (8, 1.0, 3), (8, 0.0, None)])
def test_each_pass_visits_every_task_and_no_step_one_twice(monkeypatch, tasks, share, of_start):
    """With --start-share the start tasks have so much of each step, and passes of their own."""
    start, added = ["s0", "s1", "s2"], [f"a{n}" for n in range(tasks)]
    monkeypatch.setattr(mutual, "task_set", lambda run, i: start + added[:tasks if i else 0])
    run = SimpleNamespace(rng=lambda *key: random.Random(repr(key)), settings=Settings(
        start_share=share, step_tasks=4, evolve_every=1))
    first, *later = itertools.islice(mutual.batches_of(run), 45)
    assert len(first) == 3
    for batch in later:
        assert len({*batch}) == len(batch) == min(4, 3 + tasks)
        assert of_start is None or sum(task in start for task in batch) == of_start
    visits = Counter(task for batch in later for task in batch)
    for pool in (start, added) if share else (start + added,):
        counts = [visits[task] for task in pool]
        assert not counts or max(counts) - min(counts) <= 1


def test_added_tasks_that_are_mastered_leave_for_good(run, monkeypatch):
    """The agent here solves what has an even id, all of it; start tasks stay all the same."""
    def play(run, model, encoder, starts, temperature):
        for t in says_c(encoder, starts):
            t.reward = 1.0 if int(t.task[-1]) % 2 == 0 else t.rollout % 2
        return starts

    monkeypatch.setattr(mutual, "play_with", play)
    r = run("evolve", explorer="aimed", mastered="leave", step_tasks=30, grpo_steps=8, picks=4)
    start, gone = mutual.task_set(r, 0), set()
    for i in (1, 2, 3):
        before = set(mutual.task_set(r, i - 1))
        left = {row["id"] for row in r.folder.read_jsonl(f"iter{i}/tasks.jsonl") if "left" in row}
        assert left == {task for task in before if task not in start and int(task[-1]) % 2 == 0}
        gone |= left
        assert not gone & {*mutual.task_set(r, i)} and {*start} <= {*mutual.task_set(r, i)}
        assert not gone & {t.task for t in r.folder.trajectories(
            f"iter{i + 1}/target-agent/episodes.jsonl")}
    assert len(gone) > 2
    phases = {e["phase"]: e.get("left") for e in events(r, "phase")}
    assert sum(phases[f"iter{i}/tasks.jsonl"] for i in (1, 2, 3)) == len(gone)


def test_what_is_always_or_never_solved_does_not_join(run, monkeypatch):
    """The agent solves number n in n % 5 of its four plays."""
    asked = []

    def play(run, folder, starts, temperature):
        with run.tasks.make_env() as env:
            for t in starts:
                t.reward = float(t.rollout < env.find(t.task) % 5)
        asked.append((str(folder), Counter(t.task for t in starts), temperature))
        return starts

    monkeypatch.setattr(envs.Repaired, "__enter__", lambda env: env, raising=False)
    monkeypatch.setattr(envs.Repaired, "__exit__", lambda env, *_: env.close(), raising=False)
    monkeypatch.setattr(mutual, "play", play)
    r = run("evolve", explorer="aimed", solve_check=4, start_from="train", add_most=2, picks=4,
            explorer_episodes=5, step_tasks=5)
    rows = [row for i in (1, 2) for row in r.folder.read_jsonl(f"iter{i}/proposals.jsonl")]
    tried = [row for row in rows if "solved" in row]
    assert len(tried) > 5 and all(row["solved"] == row["task"]["number"] % 5 for row in tried)
    for row in tried:
        assert row["reason"] == {0: "the agent never solves it", 4: "the agent always solves it"}.get(
            row["solved"])
        assert row["verdict"] == ("added" if row["reason"] is None else "refused")
    assert {row["solved"] for row in tried} >= {0, 4}
    assert all(row["verdict"] == "refused" for row in rows if "solved" not in row)
    added = [row["task"] for row in tried if row["verdict"] == "added"]
    assert [row["task"] for row in r.tasks.added()] == added and len(added) == 4
    logged = events(r, "proposals")
    assert sum(e["tried"] for e in logged) == 4 * len(tried) == sum(
        n for _, tasks, _ in asked for n in tasks.values())
    assert {folder[-19:] for folder, _, _ in asked} == {"/iter1/target-agent", "/iter2/target-agent"}
    assert {temperature for _, _, temperature in asked} == {1.5}  # as in training


def test_an_address_or_key_that_cannot_be_is_said_before_anything_runs(run, endpoint, monkeypatch,
                                                                       tmp_path):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for url, faults, message in ((endpoint.url, [(401, "no such key", {})], "401: no such key"),
                                 ("http://127.0.0.1:9/v1", [], "ConnectionError")):
        endpoint.faults = faults
        with pytest.raises(envs.EnvError, match=message):
            run("evolve", explorer=url, explorer_model="m")
        assert not (tmp_path / "run/iter0").exists()


class Vowels(Letters):
    """Pays the share of vowels among eight letters."""

    def step(self, reply):
        return Step("thanks", sum(letter in "aeiou" for letter in reply[:8]) / 8, True)


def test_forty_steps_teach_a_policy_what_pays(run):
    r = run("grpo", world=Vowels, start_from="train", start_tasks=4, grpo_steps=40, evolve_every=40, step_tasks=4,
            step_rollouts=6, max_new_tokens=6, slots=24, grpo_lr=3e-3,
            grpo_temperature=1.0, checkpoint_minutes=10)
    rewards = [e["reward"] for e in events(r, "grpo")]
    assert np.mean(rewards[:5]) < 0.2 and np.mean(rewards[-5:]) > 0.6


def test_an_explorer_at_an_endpoint_makes_the_start_tasks_too(run, endpoint, monkeypatch):
    """One episode a start task; what becomes of it is checked as any other proposal."""
    monkeypatch.setattr(Smith, "form", "A number.", raising=False)
    monkeypatch.setattr(Smith, "actions", "letters", raising=False)
    monkeypatch.setattr(Smith, "written", lambda smith, task, proposal: dict(
        text=proposal["query"], task=dict(number=int(proposal["query"])),
        solution=proposal["action_sequence"]), raising=False)
    numbers = iter(range(10, 99))
    endpoint.answer = lambda messages: (
        json.dumps(dict(query=str(next(numbers)), action_sequence=["a"]))
        if "Write new tasks" in messages[0]["content"] else "c")
    r = run("grpo", explorer=endpoint.url, explorer_model="m")
    asked = [body["messages"][0]["content"] for _, _, body in endpoint.seen]
    assert sum("You explore" in text for text in asked) == 5 == len(asked[1:]) / 2
    assert {row["task"]["number"] for row in r.tasks.added()} == {10, 12}  # 14 is a split's
    assert events(r, "explored")[0]["requests"] == 10


def test_evolution_from_end_to_end_in_the_databases(tmp_path):
    """The tiny model; what joins is solved by its own solution and the scripted expert elsewhere."""
    flags = ("--env intercodesql --method evolve --train-tasks 60 --eval-tasks 2 --sft-epochs 2 "
             "--start-tasks 20 --grpo-steps 4 --evolve-every 2 --step-tasks 8 --step-rollouts 4 "
             f"--picks 4 --explorer-episodes 3 --threads 1 --out {tmp_path / 'run'}").split()
    work, said = lambda: start.start(flags, mutual.loop_of, None), tmp_path / "said"
    assert ended(fork(work, said)) == 0, said.read_text()[-3000:]
    proposals = [json.loads(line) for line in (tmp_path / "run/iter1/proposals.jsonl").open()]
    tasks = [json.loads(line) for line in (tmp_path / "run/iter1/tasks.jsonl").open()]
    added = [row for row in proposals if row["verdict"] == "added"]
    assert [row["task"] for row in added] == [row["task"] for row in tasks] != []
    env = envs.make("intercodesql", "short")
    trained = {env.find(task)["db"] for task in env.tasks("train")[:60]}
    for row in added:
        task = env.add(row["task"])
        assert row["task"]["db"] in trained and row["text"] in env.reset(task)
        assert [env.step(reply) for reply in row["solution"]][-1].reward == 1
        assert envs.converse(env, env.reset(task), env.expert())[1] == 1
    env.close()
    episodes = [json.loads(line) for line in (tmp_path / "run/iter2/target-agent/episodes.jsonl").open()]
    assert any("added" in t["task"] for t in episodes)  # they are trained on


def evolving(small_model, out, **changed):
    """What runs CoEvolve on letters, in a process of its own."""
    values = dict(FEW, method="evolve", model=small_model, out=out, **changed)

    def work():
        sys.argv = ["coevolve.py"]
        envs.make = lambda *_, **__: envs.Repaired(Letters())
        start.start([x for name, value in values.items() for x in (f"--{name}", str(value))],
                    mutual.loop_of, None)

    return work


def files_of(run):
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()
            and (p.suffix in (".jsonl", ".safetensors") or p.name == "trained_on.json")
            and p.name != "metrics.jsonl"}


@pytest.mark.parametrize("more", [dict(max_tokens=28, too_long="cut"), dict(
    explorer="aimed", solve_check=3, mastered="leave", start_share=0.5, grpo_temperature=1.5)])
def test_a_killed_run_goes_on_to_the_same_bits(small_model, tmp_path, more):
    def finish(out, kills=0):
        rng = random.Random(5)
        work = evolving(small_model, out, grpo_steps=6, grpo_lr=1e-4, checkpoint_minutes=0, **more)
        for _ in range(kills):
            process = fork(work, tmp_path / "said")
            wait_until((out / "metrics.jsonl").exists)
            time.sleep(rng.uniform(0.1, 1))
            os.kill(process, signal.SIGKILL)
            ended(process)
        assert ended(fork(work, tmp_path / "said")) == 0, (tmp_path / "said").read_text()[-3000:]
        return files_of(out), events(out, "grpo"), events(out, "full")

    killed, whole = finish(tmp_path / "killed", kills=4), finish(tmp_path / "whole")
    assert killed == whole and bool(whole[2]) == ("too_long" in more)


def test_a_state_before_the_first_update_has_no_moments(tmp_path):
    """Empty ones would be kept for the next segment, whose AdamW would then begin at step 1."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = partial(Checkpoint, Accelerator(cpu=True), tmp_path / "checkpoint", "inputs", 0)
    state().save(model, optimizer, 3, [])
    assert not optimizer.state
    assert state().restore(model, optimizer) == (3, []) and not optimizer.state


def test_two_sharded_processes_evolve_like_one(small_model, tmp_path):
    said = tmp_path / "said"
    for ranks, more in ((1, {}), (2, dict(shard="on"))):
        work = evolving(small_model, tmp_path / str(ranks), start_from="train", grpo_steps=4,
                        grpo_lr=1e-5, **more)
        assert [ended(process) for process in fork_ranks(ranks, work, said)] == [0] * ranks, said.read_text()[-3000:]
    steps = [[(e["loss"], e["kl"]) for e in events(tmp_path / out, "grpo")] for out in "12"]
    assert torch.tensor(steps[0]).sub(torch.tensor(steps[1])).abs().max() < 1e-6
    assert len(steps[0]) == 4 and abs(steps[0][3][1]) > 1e-4  # it has learnt something
    one, two = ((tmp_path / out / "iter1/tasks.jsonl").read_text() for out in "12")
    assert one == two != ""
