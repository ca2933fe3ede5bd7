"""Agent and tasks that evolve together: advantages, objective, signals, new tasks, the whole loop."""

import copy
import itertools
import json
import math
import random
import re
from collections import Counter
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ended, fork_ranks

import coevolve
import dpo
import envs
import evolve
from coevolve import read
from dpo import Trajectory
from worlds import Step, World, converse, fields_of
from worlds.files import read_jsonl, seed_of
from worlds.intercodesql.world import InterCodeSQL


@pytest.mark.parametrize("rewards, expected", [
    # mean 0.5, squares 4 x 0.25, over K - 1 = 3: std 0.57735
    ([0.0, 1.0, 0.0, 1.0], [-0.866024, 0.866024, -0.866024, 0.866024]),
    ([1.0, 0.0], [0.707106, -0.707106]),
    ([0.5, 0.5, 0.5], []),  # equals teach nothing
    ([0.7], []), ([], []),
])
def test_advantages_by_hand(rewards, expected):
    assert evolve.advantages(rewards) == pytest.approx(expected, abs=2e-6)


def sampled(encoder, n, seed=0, length=9):
    """n trajectories of random words after one prompt, as the sampler may draw them."""
    rng, never = random.Random(seed), set(encoder.never(len(encoder.tokenizer)))
    free = [i for i in range(len(encoder.tokenizer)) if i not in never]
    start = encoder.start([dict(role="user", content="find a mug")])
    return [Trajectory("task", ids=start + (reply := rng.choices(free, k=length)),
                       action_mask=[0] * len(start) + [1] * len(reply)) for _ in range(n)]


def policies(agent, n=4):
    """A group with log-probabilities of three other models as old, ref and drawn; the sampler."""
    model, encoder = agent
    sampler = dpo.Sampler(0.9, encoder.never(model.config.vocab_size))
    group = evolve.Rollouts(sampled(encoder, n), advantages=[1.0, -2.0, 0.5, 0.0][:n])
    for seed, name in enumerate(("old", "ref", "drawn"), 2):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed),
                                        dtype=p.dtype)
            setattr(group, name, dpo.token_log_probs(other, group.sequences, sampler))
    return model, group, sampler


def by_hand(model, group, sampler, s):
    """The loss as one loop over tokens in float64, from plain passes over whole sequences; and how
    many ratios are out of bounds."""
    total, outside, k = torch.zeros((), dtype=torch.float64), 0, 0
    for t, advantage in zip(group.sequences, group.advantages):
        logits = model(input_ids=torch.tensor([t.ids])).logits[0].double() / sampler.temperature
        allowed = [i for i in range(logits.shape[1]) if i not in sampler.never]
        for j in range(1, len(t.ids)):
            if not t.action_mask[j]:
                continue
            old, ref, drawn = group.old[k], group.ref[k], group.drawn[k]
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
    model, group, sampler = policies(agent)
    s = evolve.Settings(clip_low=low, clip_high=high, grpo_kl=beta, importance_cap=cap)
    policy = dpo.token_log_probs(model, group.sequences, sampler)
    loss, statistics = evolve.grpo_loss(policy, [group], s)
    expected, outside = by_hand(model, group, sampler, s)
    assert statistics == {"action": dict(count=36, clipped=outside)} and outside > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = [torch.autograd.grad(x, model.lm_head.weight, retain_graph=True)[0]
                 for x in (loss, expected)]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


def test_how_far_sampler_and_training_are_apart_is_measured():
    """Of four tokens one is 0.5 nats off (its ratio 1.65 is beyond 1.28), one -0.1."""
    group = evolve.Rollouts([], old=torch.tensor([-1.0, -2.0, -3.0, -1.1]),
                            drawn=torch.tensor([-1.0, -2.0, -3.5, -1.0]))
    assert evolve.apart([group], evolve.Settings()) == pytest.approx(dict(
        mean=0.1, rms=math.sqrt((0.25 + 0.01) / 4), beyond=0.25), rel=1e-5)
    assert evolve.apart([], evolve.Settings()) == {}


def test_the_mask_is_in_the_kl_by_hand():
    """Token 2 is never drawn: of the other two pi is (2/3, 1/3) and pi_ref (1/2, 1/2).

    Drawn 0: d = ln 1/2 - ln 2/3 = ln 3/4, k3 = 3/4 - ln 3/4 - 1. Drawn 1: d = ln 3/2. Weighted by
    pi that is KL(pi || pi_ref) = 2/3 ln 4/3 + 1/3 ln 2/3, however likely token 2 is.
    """
    def policy(*weights):
        def forward(input_ids, use_cache, logits_to_keep):
            return SimpleNamespace(logits=torch.tensor([[weights]]).log())

        class Model:
            def __call__(self, **given):
                return forward(**given)

            def parameters(self):
                return iter([torch.zeros(1)])
        model = Model()
        model.forward = forward
        return model

    sampler, k3 = dpo.Sampler(1.0, (2,)), []
    for token in (0, 1):
        t = Trajectory(ids=[0, token], action_mask=[0, 1])
        ref = dpo.token_log_probs(policy(1.0, 1.0, 9.0), [t], sampler)
        group = evolve.Rollouts([t], advantages=[0.0], old=ref, ref=ref, drawn=ref)
        now = dpo.token_log_probs(policy(2.0, 1.0, 0.1), [t], sampler)
        k3.append(evolve.grpo_loss(now, [group], evolve.Settings(grpo_kl=1.0))[0])
    assert k3 == pytest.approx([0.75 - math.log(0.75) - 1, 1.5 - math.log(1.5) - 1])
    kl = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert (2 * k3[0] + k3[1]) / 3 == pytest.approx(kl)


def segment(task, y, step=1):
    return [Trajectory(task, "target", step, n, reward=float(won)) for n, won in enumerate(y)]


@pytest.mark.parametrize("scores, window, found", [
    ([1.0, 0.0], 5, 1), ([0.5, 0.0], 5, 1),      # 0.5 counts as solved
    ([1.0, 0.5], 5, None),                       # and so it is not forgotten at 0.5
    ([1.0, 0.25], 5, 1), ([0.0, 0.0], 5, None),  # never solved
    ([0.0], 5, None), ([1.0], 5, None),          # one visit
    ([1.0, 0, 0, 0, 0, 0], 5, 5), ([1.0, 0, 0, 0, 0, 0, 0], 5, None),  # outside the window
    ([1.0, 0, 0, 0], 2, None), ([1.0, 0.0, 1.0, 0.0], 5, 1),
])
def test_forgetting(scores, window, found):
    """The last visit is in this segment, those before in the one before; b is not visited now."""
    visits = [segment("a", [n < 4 * score for n in range(4)], step)
              for step, score in enumerate(scores)]
    seen = evolve.Seen(1.0)
    seen.add_segment([t for visit in visits[:-1] for t in visit]
                     + segment("b", [1], 90) + segment("b", [0], 91))
    seen.add_segment(visits[-1])
    rows = {row["task"]: row["visits_ago"]
            for row in evolve.forgetting(seen, evolve.Settings(window=window))}
    assert rows == ({} if found is None else {"a": found})


@pytest.mark.parametrize("y, found", [([0, 0, 0], None), ([1, 0, 0], 1), ([1, 1, 0], 2),
                                      ([1, 1, 1], None)])
def test_boundary(y, found):
    seen = evolve.Seen(1.0)
    seen.add_segment(segment("a", y))
    assert {row["task"]: row["successes"] for row in evolve.boundary(seen, None)} == (
        {} if found is None else {"a": found})


def test_rare():
    def found(below, least, held=[{"p"}] * 2 + [{"q"}] * 3 + [{"r"}] * 95):
        seen = evolve.Seen(1.0, window=segment("t", [1] * len(held)), patterns=held)
        s = evolve.Settings(rare_below=below, rare_min=least)
        return {row["pattern"]: row["episodes"] for row in evolve.rare(seen, s)}

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
            messages, reward = converse(env, page := env.reset(id), env.expert())
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

