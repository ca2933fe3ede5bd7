"""Task evolution: the signals, new tasks, the whole loop. The loss is in test_grpo.py."""

import os
import random
import re
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import files_of, in_ranks, kills_until_it_ends, refusal, refused, table

import evolve
import grpo
from common.files import read_json, read_jsonl
from common.settings import parse
from dpo import Trajectory
from engine.trajectories import read
from environments import converse, environment, make
from envs import Environment, Step

# ----------------------------------------------------------------------- signals, picks and plans


def segment(task, y, step=1):
    """Makes the trajectories of a task in one step, one for each digit of `y`, which is its reward.
    Their messages are the step and the index."""
    return [Trajectory(task, "target", step, n, reward=float(won), messages=[step, n])
            for n, won in enumerate(y)]


def test_forgetting_and_boundary():
    """A digit of a task is its successes in a group of four episodes. The last group is in this
    segment. Of three groups before it, the latest with two successes or more is named."""
    won = {" ": "", "0": "0000", "1": "1000", "2": "1100", "4": "1111"}
    segments = [[] for _ in range(5)]
    for task in ("21", "42", "00", "4", "4000", "40000", "4040", "40 "):
        for step, digit in enumerate(task.rjust(5)):
            segments[step] += segment(task, won[digit], step)
    history = evolve.collect_history(segments, 3)
    assert [[*row.values()] for row in evolve.forgetting(history, None)] == [
        ["21", 1, [4, 1], [4, 0], [3, 0]], ["4000", 3, [4, 0], None, [1, 0]],
        ["4040", 1, [4, 0], None, [3, 0]]]
    assert [[*row.values()] for row in evolve.boundary(history, None)] == [
        ["21", 1, [4, 1], [4, 0]], ["42", 2, [4, 2], [4, 0]]]


def test_rare(monkeypatch):
    """Of 100 episodes 1 holds o, 2 hold p, and 3 q, as many as the threshold. The evidence is of
    those that hold it, and the task is that of the worst of them."""
    episodes = segment("t", "0" + "1" * 97, 3) + segment("won", "1") + segment("lost", "0", 2)
    monkeypatch.setattr(evolve, "RARE_BELOW", 3.0)
    history = evolve.History({}, episodes, [{"q"}] * 3 + [{"o"}] + [{"r"}] * 94 + [{"p"}] * 2)
    assert [*evolve.rare(history, evolve.Settings(rare_min=2))] == [
        dict(task="lost", pattern="p", episodes=2, failure=[2, 0], success=[1, 0])]


def test_signals_pick_in_turn_and_a_task_once():
    """By hand: a1, b1; then a has b1 left, which is taken, so a3; b has none but a1; c picks too.
    """
    kinds = [[dict(task=task) for task in text.split()]
             for text in ("a1 b1 a3 a4", "b1 a1", "a1 c2 c3 c4")]
    assert [row["task"] for row in evolve.pick(kinds, 2)] == ["a1", "b1", "c2", "a3", "c3"]


def test_an_epoch_has_every_task_and_no_step_has_one_twice():
    """Four tasks a step; D has six at first, and eight from step 2 on. A small D is played whole."""
    def planned(tasks, before, i, steps):
        run = SimpleNamespace(settings=evolve.Settings(step_tasks=4, evolve_every=1))
        return evolve.plan(run, [dict(task=task) for task in tasks], before, i=i, steps=steps)[0]

    first = planned("abcdef", [], 1, 1)
    steps = [row["tasks"] for row in first + planned("abcdefgh", first, 2, 40)]
    assert {len({*tasks}) for tasks in steps} == {4}
    in_order = sum(steps, [])
    assert sorted(in_order[:6]) == [*"abcdef"]  # the epoch that had started ends
    for start in range(6, len(in_order) - 7, 8):
        assert sorted(in_order[start:start + 8]) == [*"abcdefgh"]
    small = planned("abc", [], 1, 2)
    assert [sorted(row["tasks"]) for row in small] == [[*"abc"]] * 2


# ------------------------------------------------------------------ new tasks of the built-in environments


@cache
def generated(name):
    env = make(name, "short")
    return env, env.task_generator()


def replies_of(env, task):
    messages, _ = converse(env, env.reset(task), env.expert())
    return [m["content"] for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize("name, idle, says", [
    ("webshop", ["click[buy now]", "nonsense", "search[desk"], "not executed"),
    ("intercodesql", ["SELECT nonsense", "SHOW TABLES", "submit"], "fails")])
def test_what_changed_nothing_is_no_pattern_and_no_part_of_a_solution(name, idle, says):
    env, generator = generated(name)
    task = env.tasks("train")[0]
    replies = replies_of(env, task)
    assert generator.patterns(task, idle) == set() != generator.patterns(task, replies)
    [found], [again] = (generator.finds(task, tried, random.Random(3)) for tried in (
        replies, idle[:2] + replies))
    assert found == again and generator.verify(found) is None
    for before, reason in (idle[:1], says), (["SHOW TABLES"] * 11, "longer"):
        assert reason in generator.verify(dict(found, solution=before + found["solution"]))


def test_gold_queries_invert_to_questions_with_the_same_rows():
    env, generator = generated("intercodesql")
    rng = random.Random(0)
    same = 0
    for task in env.tasks("train")[::8]:
        question = env.find(task)
        gold = question["gold"]
        written = re.sub(r"([(),*])", r" \1 ", gold)  # as tiny decodes it
        text, again = generator.question(question["db"], written.replace("SELECT", "select"), rng)
        assert again == gold
        same += text == question["query"]
    assert same > 20  # of 125: a column may be called as stored or by a synonym
    for sql in ("SELECT site FROM farms JOIN farmers USING (farm_id) WHERE grade = 'x'",
                "SELECT AVG(name) FROM farmers", "SELECT name FROM farmers WHERE grade > 20"):
        assert generator.question("farm_1", sql, rng) is None  # of no family


def test_questions_of_a_split_or_without_an_answer_are_refused():
    env, generator = generated("intercodesql")
    train, evaluated = env.find(env.tasks("train")[0]), env.find(env.tasks("test")[0])
    gold, new = train["gold"], dict(train, query="x", gold="SELECT MAX(rooms) FROM farms")
    assert generator.refusal(new) is None
    for field, text, says in table(f"""
        gold -> {gold} -> a question of a split
        gold -> {gold.lower()} -> a question of a split
        gold -> {gold}/* x */ ; -> a question of a split
        query -> {train['query'].upper()} -> a question of a split
        query -> {evaluated['query']}? -> a question of a split
        query -> how many clocks -> a held-out noun
        gold -> SELECT random ( ) -> cannot be run
        gold -> DROP TABLE t -> cannot be run
        gold -> SELECT * FROM nowhere -> cannot be run
        gold -> SELECT 1 WHERE 1 = 0 -> cannot be run
        gold -> select 1 from farms where 1 = 1 -> cannot be run
        # of a hostile explorer
        gold -> SELECT COUNT(*) FROM farms a, farms b, farms c, farms d, farms e, farms f, farms g, farms h, farms i, farms j -> cannot be run
        gold -> SELECT a FROM (SELECT 1 AS a LIMIT 0) WHERE 0 UNION SELECT 1 UNION SELECT 2 -> cannot be run
        gold -> SELECT '\ud800' -> cannot be run
        gold -> SELECT '\0' -> cannot be run"""):
        assert says in generator.refusal(new | {field: text}), text


def test_goals_of_splits_are_refused_in_other_words_and_with_other_limits():
    env, generator = generated("webshop")
    [found] = generator.finds("webshop-train-0", replies_of(env, "webshop-train-0"), random.Random(0))
    new = found["task"]
    assert found["text"] == new["instruction"] and generator.refusal(new) is None
    for split in env.splits:
        higher = 7 * (split != "train")
        for goal in map(env.find, env.tasks(split)[:20]):
            other = dict(goal, instruction="in other words", price_upper=goal["price_upper"] + higher)
            assert generator.refusal(other) == "a goal of a split"
            planted = dict(new, instruction=f" {goal['instruction'].upper()}")
            assert generator.refusal(planted) == "a goal of a split"
            assert generator.refusal(dict(other, goal_options=["mauve"])) == "no product meets it"
    for goal in map(env.find, env.tasks("unseen")):
        vaguer = dict(goal, instruction="in other words", attributes=[])
        assert generator.refusal(vaguer) == "a held-out product meets it"


@pytest.mark.parametrize("text, options", table("""
    I want winter gloves, NON SLIP, in pink, large, lower than $997 -> pink, large
    non slip winter gloves below 997 dollars ->
    non slip winter gloves, pink, large, lower than $1 -> they cost more
    non slip winter gloves, pink, large -> without a limit
    winter gloves, pink, large, lower than $997 -> without an attribute
    noise reducing, non slip winter gloves, pink, large, lower than $997 -> they are not
    non slip winter gloves, pink, navy, large, lower than $997 -> they are not
"""))
def test_an_explorers_goal_is_what_its_words_say(text, options):
    """It is refused if the words say more than what was bought."""
    env, generator = generated("webshop")
    actions = replies_of(env, "webshop-train-0")
    written = generator.written("webshop-train-0", dict(query=text, action_sequence=actions))
    if options not in ("", "pink, large"):
        assert written is None
        return
    new = written["task"]
    assert (new["query"], new["attributes"], new["price_upper"]) == ("winter gloves", ["non slip"], 997)
    assert ", ".join(new["goal_options"]) == options
    assert generator.refusal(new) == (None if options else "no colour chosen")


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


# number of the task -> text -> the reason of a refusal, with and without verification
FINDS = table(f"""
    12 -> 12 12 is it -> added
    12 -> as before -> known already
    13 -> an odd one -> odd, or added
    14 -> 14 -> a number of a split
    16 -> 16 -> known already
    0 -> x -> not of the form that was asked for
    18 -> {"w" * 1001} -> its text is empty or too long
    18 -> {"w" * 1000} -> added
    20 -> So: Search Red-Mugs! -> its text tells the solution
    22 -> is IT 12 so -> a text that is there already
    24 -> is it 12 or more -> added, or enough were added
    26 -> 26 -> enough were added
    28 -> -> its text is empty or too long
""")


@pytest.mark.parametrize("verify", [True, False])
def test_finds_are_judged_in_their_order(verify, monkeypatch):
    """By hand, of tasks of which 16 is in D, and three may join. Of texts, 3 of 4 words are equal
    to those of an earlier one, and 3 of 5."""
    finds = [dict(signal="rare", source="a", text=text, solution=["search[red mugs]"],
                  task=dict(number=int(number)) if int(number) else None)
             for number, text, _ in FINDS]
    reasons = [reason.split(", or ")[0 if verify else -1] for *_, reason in FINDS]
    monkeypatch.setattr(evolve, "MOST_NEW_TASKS", 3)
    s = evolve.Settings(near_text=0.75, verify=verify)
    run = SimpleNamespace(settings=s, on_main=lambda function: function(), make_env=Letters)
    d = [dict(task="letters-added-0", definition=dict(number=16))]
    rows, numbers = evolve.judge(run, finds, d, i=1)
    assert [row["reason"] or "added" for row in rows] == reasons
    assert [row["replayed"] for row in rows] == [verify and r in ("added", "odd") for r in reasons]
    assert dict(numbers["refused"], added=numbers["added"]["rare"]) == Counter(reasons)
    assert numbers["replayed"] == sum(row["replayed"] for row in rows)


@pytest.fixture
def run(new_run, tmp_path, monkeypatch):
    """run(method, out, env, **settings) -> the finished run; method None: one to begin."""
    def start(method="evolve", out="run", env=Letters, **changed):
        values = dict(
            MINIBATCH=2, EXPLORER_TEMPERATURE=1.5, EXPLORER_EPISODES=2, max_new_tokens=4,
            warm_start="none", start_tasks=5, grpo_steps=6, evolve_every=2, evaluate_every=9,
            step_tasks=3, step_rollouts=4, grpo_lr=1e-4, grpo_temperature=1.5, near_text=1.0,
            picks=2) | changed
        for name in filter(str.isupper, [*values]):
            monkeypatch.setattr(evolve, name, values.pop(name))
        r = new_run(env, evolve.Settings, method=method or "grpo", out=str(tmp_path / out), **values)
        if method:
            evolve.METHODS[method].loop(r)
            r.close()
        return r

    return start


def rows(r, name):
    return read_jsonl(r.folder / name)


def test_the_task_set_grows_from_signals(run):
    r = run(RARE_BELOW=60.0)
    first, second, third = (rows(r, f"iter{i}/tasks.jsonl") for i in range(3))
    assert 0 < len(first) <= 5 and len(second) > len(first)
    for i, d in (1, first), (2, second):
        # Its steps are on D as it was; then every pick was explored twice, and each episode has
        # one find.
        log = rows(r, f"iter{i}/target-agent/train.jsonl")
        assert [(row["step"], row["tasks"], row["D"]) for row in log] == [
            (2 * i - 1, 3, len(d)), (2 * i, 3, len(d))]
        picked = Counter((row["task"], row["signal"]) for row in rows(r, f"iter{i}/signals.jsonl")
                         if row["picked"])
        finds = rows(r, f"iter{i}/finds.jsonl")
        assert Counter((row["source"], row["signal"]) for row in finds) == picked + picked
        of_kind = Counter(signal for _, signal in picked)
        assert len(of_kind) > 1 and max(of_kind.values()) == 2
    # D is what joined, as it was proposed. The phases count tokens and tasks.
    proposals = sum((rows(r, f"iter{i}/proposals.jsonl") for i in range(3)), [])
    assert [row["text"] for row in third] == [
        row["text"] for row in proposals if row["verdict"] == "added"]
    phases = read_json(r.folder / "phases.json")
    numbers = phases["iter1/tasks.jsonl"]
    assert (numbers["tasks"], numbers["joined"]) == (len(second), len(second) - len(first))
    assert phases["iter2/finds.jsonl"]["finds"] == len(finds)
    assert phases["iter1/batches.jsonl"]["tasks"] == len(first)
    episodes = rows(r, "iter1/target-agent/episodes.jsonl")
    assert phases["iter1/target-agent"]["tokens"] == sum(len(row["ids"]) for row in episodes)
    # Random exploration follows no signal, with as many episodes of the explorer.
    other = run(out="random", RARE_BELOW=60.0, guide="random", grpo_steps=3)
    of_signals, at_random = (rows(each, "iter1/explored.jsonl") for each in (r, other))
    assert [row["signal"] for row in at_random] == ["random"] * len(of_signals)
    # D is of tasks in an order, by which they have their ids.
    assert "task letters-added-1 would get the id letters-added-0; restore" in refusal(
        evolve.env_with, r, third[1:])


def test_training_uses_the_distribution_that_episodes_are_sampled_from(run):
    """In the first step, the policy equals the sampler's and the reference."""
    r = run("grpo", start_from="train", grpo_steps=2, evolve_every=1, MINIBATCH=9, grpo_lr=1e-2)
    [first], [second] = (rows(r, f"iter{i}/target-agent/train.jsonl") for i in (1, 2))
    episodes = read(r.folder / "iter1/target-agent/episodes.jsonl")
    groups = [grpo.make_group(episodes[n:n + 4]) for n in range(0, len(episodes), 4)]
    advantages = grpo.token_advantages(groups)
    assert first["loss"] == pytest.approx(-sum(advantages) / len(advantages), abs=1e-5)
    assert first["kl"] == pytest.approx(0, abs=1e-4) and abs(second["kl"]) > 1e-3
    assert all(row["sampler"]["rms"] < 1e-4 for row in (first, second))
    assert first["skipped"] == sum(not group.advantages for group in groups)
    assert first["success"] == pytest.approx(sum(not t.is_failure for t in episodes) / len(episodes))
    record = r.done["iter1/target-agent"]
    assert (record["episodes"], record["steps"]) == (len(episodes), 1)


class Fixed(Letters):
    task_generator = Environment.task_generator


def test_tasks_that_cannot_be_had_are_refused(run, tmp_path, monkeypatch):
    """What is evaluated is not trained on. A missing task generator is found before a phase runs."""
    for method, source in ("evolve", "train"), ("grpo", "explore"):
        line = refusal(lambda: run(method, method, Fixed, start_from=source))
        assert line.startswith("letters: this environment makes no new tasks; give --method grpo")
        assert read_json(tmp_path / method / "phases.json") == {}
    monkeypatch.setitem(Letters.splits, "test", {str(n): n for n in range(5)})
    rows, _ = evolve.first_tasks(run(None), i=0)
    assert rows == [dict(task="letters-train-5", joined=0)]
    assert "no training task is left, because all 5 are evaluated" in refusal(
        evolve.training_tasks, run(None, "five", train_tasks=5))


def test_segments_and_an_evolution_without_new_tasks_change_nothing_in_grpo(run):
    """AdamW's moments and the epoch over D continue in the next segment. GRPO needs no environment
    that makes tasks."""
    how = dict(start_from="train", grpo_steps=3)
    three = files_of(run("grpo", "three", env=Fixed, evolve_every=1, **how).folder)
    evolved = files_of(run("evolve", "evolved", evolve_every=1, MOST_NEW_TASKS=0, **how).folder)
    assert three.items() <= evolved.items() and "iter3/target-agent/moments.pt" in three
    one = files_of(run("grpo", "one", evolve_every=3, **how).folder)
    weights = "target-agent/model.safetensors"
    assert one[f"iter1/{weights}"] == three[f"iter3/{weights}"]


# ------------------------------------------------------------------ interrupted, longer, on ranks


def test_a_run_that_is_made_longer_and_killed_at_any_moment_ends_in_the_same_files(run, tmp_path):
    """Optimizer moments, epochs and tasks are resumed from files. The shorter run ends inside its
    second segment, which is recomputed at its full length."""
    whole = files_of(run(out="whole", grpo_steps=5).folder)
    killed = tmp_path / "killed"
    run(out="killed", grpo_steps=3)
    assert kills_until_it_ends(lambda: run(out="killed", grpo_steps=5), killed, tmp_path / "said")
    found = files_of(killed)
    after_three = {name for name in found if name.startswith("eval-2-")}
    assert after_three and found.keys() - whole.keys() == after_three
    assert {name: found[name] for name in whole} == whole


def test_two_sharded_processes_evolve_like_one(run, tmp_path):
    """Both play the tasks that join. Only the first one judges them, see `Letters`."""
    def evolves(accelerator):
        run(out=str(accelerator.num_processes), start_from="train", start_tasks=3, step_tasks=6,
            grpo_steps=2, evolve_every=1, grpo_lr=1e-5, grpo_temperature=0.9, EXPLORER_EPISODES=4)

    for ranks in (1, 2):
        in_ranks(ranks, evolves)

    def both(name):
        return [read_jsonl(tmp_path / out / name) for out in "12"]

    one, two = both("iter1/tasks.jsonl")
    assert one == two != []
    [one], [two] = both("iter2/target-agent/train.jsonl")
    for name in "loss", "kl":
        assert two[name] == pytest.approx(one[name], abs=1e-5)
    assert abs(one["kl"]) > 1e-6  # it has learnt something
    assert any("-added-" in t.task for t in read(tmp_path / "2/iter2/target-agent/episodes.jsonl"))


def test_a_bf16_copy_of_a_live_model_equals_its_saved_agent(run):
    r = run(None)
    model = r.load(r.base)
    assert r.inference_copy(model) is model
    r.machine.bf16 = True
    copied, read_again = r.inference_copy(model), r.inference_copy(r.base)
    ids = torch.tensor([[5, 9, 11]])
    assert copied is not model and copied.dtype == torch.bfloat16
    assert torch.equal(copied(input_ids=ids).logits, read_again(input_ids=ids).logits)


# ------------------------------------------------------------------------------------ settings


def test_settings_that_make_no_sense_are_refused():
    refused(lambda *argv: parse([*argv], evolve.Settings, evolve.METHODS, environment), [
        ("--grpo-steps 10", "the tasks would never evolve; give more than --evolve-every 10"),
        ("--step-rollouts 1", "must be at least 2"), ("--grpo-temperature 0", "at least 0.001"),
        ("--signals forgetting,luck", "must be a comma-separated list of forgetting,boundary,rare")])
