"""The method: pairs by hand, the training data of each agent, and losses of whole runs."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import transformers
from conftest import make_tokenizer, plain_log_probs
from engine.records import read_pairs, write_pairs

import coevolve
from coevolve import Agent, Settings
from common.files import read_json, read_jsonl, write_jsonl
from common.settings import UsageError
from dpo import Group, Pair, Trajectory, pair_weight
from engine.chat import Encoder

FF = "failure>failure"

# --------------------------------------------------------------------------------- pairs by hand


def rollouts(agent, rewards):
    return [Trajectory(agent=agent, rollout=n, reward=reward, ids=[ord(agent[0]), n], action_mask=[1, 1])
            for n, reward in enumerate(rewards)]


def brief(pair):
    """Returns a pair as "t0 > f1  1, 0": the target's rollout 0 is chosen, the failure agent's
    rollout 1 is rejected, the weight is 1 in the DPO term and 0 in the SFT term."""
    agents = pair.chosen.agent, pair.rejected.agent
    assert pair.kind == (">".join(agents) if "expert" in agents else FF)
    assert pair.chosen.reward > pair.rejected.reward
    sides = [f"{t.agent[0]}{t.rollout}" for t in (pair.chosen, pair.rejected)]
    return f"{' > '.join(sides)}  {pair.weight:.2g}, {pair.sft_weight:.2g}"


@pytest.mark.parametrize("expert, own, others, settings, pairs", [
    # The two expert pairs have a total weight of 1. The failure pair has no SFT term.
    (1.0, [0.5], [0.75], {}, ["e0 > t0  0.5, 0.5", "e0 > f0  0.5, 0.5", "f0 > t0  1, 0"]),
    # Equal failures make no failure pair, also if they differ by rounding.
    (1.0, [0.1 + 0.2], [0.3], {}, ["e0 > t0  0.5, 0.5", "e0 > f0  0.5, 0.5"]),
    # The target succeeds: a tie with the expert, and no failure pair.
    (1.0, [1.0], [0.25], {}, ["e0 > f0  1, 1"]),
    # ETO: there is no other agent.
    (1.0, [0.5], [], {}, ["e0 > t0  1, 1"]),
    # An expert at 0.75 loses to a success, and to a better failure, which gets no SFT weight.
    (0.75, [1.0], [0.8], {}, ["t0 > e0  0.5, 0.5", "f0 > e0  0.5, 0"]),
    # A failure with the expert's reward makes no expert pair, but makes failure pairs.
    (0.75, [0.75], [0.5], {}, ["e0 > f0  1, 1", "t0 > f0  1, 0"]),
    # Two rollouts each, one a success. Failures are paired across agents only.
    (1.0, [0.5, 0.25], [0.5, 1.0], {}, ["e0 > t0  0.33, 0.33", "e0 > t1  0.33, 0.33",
                                        "e0 > f0  0.33, 0.33", "f0 > t1  0.25, 0"]),
    # Each of the 2 x 1 comparisons of failures weighs 1/2, or 1.
    (1.0, [0.5, 0.25], [0.75], dict(pair_weights="none"), [
        "e0 > t0  1, 1", "e0 > t1  1, 1", "e0 > f0  1, 1", "f0 > t0  0.5, 0", "f0 > t1  0.5, 0"]),
    (1.0, [0.5, 0.25], [0.75], dict(failure_pair_weights="none", pair_weights="none"), [
        "e0 > t0  1, 1", "e0 > t1  1, 1", "e0 > f0  1, 1", "f0 > t0  1, 0", "f0 > t1  1, 0"]),
    # Other settings. As in ETO, each pair weighs 1.
    (0.75, [1.0], [0.5], dict(expert_beaten="drop"), ["e0 > f0  1, 1"]),
    (0.75, [1.0], [0.5], dict(pair_weights="none"), ["t0 > e0  1, 1", "e0 > f0  1, 1"]),
    (0.75, [0.5], [0.25], dict(d_tgt_failures="none"), ["e0 > t0  0.5, 0.5", "e0 > f0  0.5, 0.5"]),
    (0.75, [0.5], [0.25], dict(d_tgt_failures="hard"), ["e0 > t0  0.5, 0.5", "e0 > f0  0.5, 0.5"]),
    (0.75, [0.6], [0.25], dict(d_tgt_failures="hard"), [
        "e0 > t0  0.5, 0.5", "e0 > f0  0.5, 0.5", "t0 > f0  1, 0"]),
])
def test_d_tgt_by_hand(expert, own, others, settings, pairs):
    dropped = Counter()
    found = coevolve.d_tgt(*rollouts("expert", [expert]), rollouts("target", own),
                           rollouts("failure", others), replace(Settings(), **settings), dropped)
    assert [brief(pair) for pair in found] == pairs
    # Every comparison makes a pair, or is counted.
    if settings.get("d_tgt_failures") != "none":
        comparisons = len(own) + len(others) + len(own) * len(others)
        assert len(found) + dropped.total() == comparisons


@pytest.mark.parametrize("own, others, setting, pairs", [
    ([0.75], [0.5], "all", ["f0 > t0  1, 0"]),
    ([0.5], [0.5, 1.0, 1 - 1e-16], "all", []),  # a success is no failure
    # Pairs within an agent are included, except with "cross", the literal Eq. (6).
    ([0.75, 1.0], [0.5, 0.25], "all", ["t0 > t1  1, 0", "f0 > t0  1, 0", "f0 > t1  1, 0"]),
    ([0.75, 1.0], [0.5, 0.25], "cross", ["f0 > t0  1, 0", "f0 > t1  1, 0"]),
    ([0.75, 1.0], [0.5, 0.25], "none", []),
])
def test_d_fail_by_hand(own, others, setting, pairs):
    dropped = Counter()
    found = coevolve.d_fail(rollouts("failure", own), rollouts("target", others),
                            replace(Settings(), d_fail=setting), dropped)
    assert [brief(pair) for pair in found] == pairs
    if setting == "all":
        assert len(found) + dropped.total() == math.comb(len(own) + len(others), 2)


def test_pairs_are_made_of_usable_trajectories_and_only_a_buffer_has_earlier_ones(tmp_path):
    def written(name, *trajectories):
        write_jsonl(tmp_path / name, [*trajectories])
        return tmp_path / name

    acts = dict(action_mask=[0, 1], ended="done")
    e = Trajectory("a", "expert", reward=1.0, ids=[1, 2], **acts)
    t = Trajectory("a", "target", 2, 0, reward=0.5, ids=[1, 3], **acts)
    full = replace(t, rollout=1, reward=0.3, ended="context_limit")
    silent = replace(t, rollout=2, reward=0.2, action_mask=[0, 0])
    f = Trajectory("a", "failure", 2, 0, reward=0.25, ids=[1, 4], **acts)
    experts = written("experts", e)
    played = dict(target=written("target", t, full, silent), failure=written("failure", f))
    earlier = [written("earlier", replace(f, iteration=1, reward=0.1, ids=[1, 5]), replace(full, iteration=1))]
    for trains, role, setting, expected in [
            ("target", "D_tgt", "buffer", [(1.0, 0.5), (1.0, 0.25), (0.5, 0.25)]),
            ("failure", "D_fail", "all", [(0.5, 0.25)]),
            ("failure", "D_fail", "buffer", [(0.5, 0.25), (0.5, 0.1), (0.25, 0.1)]),
            ("target", "own", "all", [(1.0, 0.5)])]:
        run = SimpleNamespace(settings=replace(Settings(), d_fail=setting), main=True, name="")
        numbers = coevolve.make_pairs(run, tmp_path / "out", experts, played, earlier, trains, role)
        pairs = read_pairs(tmp_path / "out", [experts, *played.values(), *earlier])
        assert [(pair.chosen.reward, pair.rejected.reward) for pair in pairs] == expected
        assert numbers == dict(pairs=Counter(pair.kind for pair in pairs),
                               dropped={"too long": 2})


@pytest.mark.parametrize("n", [1, 4])
def test_the_balance_of_section_4_3_does_not_depend_on_the_number_of_rollouts(n):
    """A task whose rollouts all fail: the expert pairs have a total weight of 1, the failure pairs
    too, and the SFT term has half of the weights, lambda_SFT x 1 / 2 of the batch loss. A rollout
    that reached the context limit makes no pair, and the others do not get its weight."""
    e = Trajectory("a", "expert", reward=1.0, ids=[0], action_mask=[1])
    own, others = [[Trajectory("a", agent, 1, k, reward=(k + half) / 10, ids=[k, part], action_mask=[0, 1])
                    for k in range(n)] for agent, half, part in (("target", 0, 1), ("failure", 0.5, 2))]
    pairs = coevolve.d_tgt(e, own, others, Settings(), Counter())
    weights = Counter()
    for pair in pairs:
        weights[pair.kind == FF] += pair.weight
    assert len(pairs) == 2 * n + n * n
    assert weights == {False: pytest.approx(1), True: pytest.approx(1)}
    assert sum(pair.sft_weight for pair in pairs) == pytest.approx(1)
    assert pair_weight([Group(pairs=pairs)]) == pytest.approx(2)
    assert Settings().denominator == "weights"
    own[0].ended = "context_limit"
    of_failures = [p.weight for p in coevolve.d_tgt(e, own, others, Settings(), Counter()) if p.kind == FF]
    assert of_failures == [1 / n ** 2] * (n * (n - 1))


def test_a_failure_agent_that_plays_after_it_has_learned_plays_twice(toy_run):
    """The target's pairs have the rollouts of the trained failure agent, and D_fail has those from
    before. Their seeds and indices differ."""
    out = toy_run("--failure-plays", "after", "--temperature", 2)
    phases = list(read_json(out / "phases.json"))
    order = ["pairs-failure.jsonl", "failure-agent", "failure-again.jsonl", "pairs-target.jsonl"]
    assert [phase for phase in phases if phase in {f"iter1/{name}" for name in order}] == [
        f"iter1/{name}" for name in order]
    before, again = (read_jsonl(out / f"iter1/{name}.jsonl") for name in ("failure", "failure-again"))
    assert {row["rollout"] for row in before} == {0} and {row["rollout"] for row in again} == {1}
    assert len({row["seed"] for row in before + again}) == len(before + again)
    for name, indices in dict(failure={0}, target={1}).items():
        sides = [row[side] for row in read_jsonl(out / f"iter1/pairs-{name}.jsonl")
                 for side in ("chosen", "rejected")]
        assert {side["rollout"] for side in sides if side["agent"] == "failure"} == indices


def test_one_text_with_two_rewards_makes_no_pair():
    """For example if a goal's price limit is random. The weights leave out such comparisons."""
    e, same, other, copy = (Trajectory(agent=agent, reward=reward, ids=ids, action_mask=[1, 1]) for agent, reward, ids in (
        ("expert", 1.0, [1, 2]), ("target", 0.5, [1, 2]), ("target", 0.25, [1, 3]),
        ("failure", 0.75, [1, 3])))
    dropped = Counter()
    found = coevolve.d_tgt(e, [same, other], [copy], Settings(), dropped)
    assert [(pair.chosen, pair.rejected, pair.weight) for pair in found] == [
        (e, other, 0.5), (e, copy, 0.5), (copy, same, 0.5)]
    assert dropped == {"the same text": 2}


# ------------------------------------------------------------------- from pairs to training data


@pytest.fixture(scope="module")
def encoder():
    return Encoder(make_tokenizer("chatml"))


def played(encoder, agent, reward, replies, task="a", iteration=1, ended="done"):
    """Returns a trajectory of some replies. Each has two or more tokens and an end of turn."""
    messages = [dict(role="user", content="find a mug")]
    for n in range(replies):
        messages.append(dict(role="assistant", content=f"click[{agent} {n}]"))
        messages.append(dict(role="user", content="Page 1"))
    ids, mask = encoder.encode(messages[:-1], 1)
    return Trajectory(task, agent, iteration, ids=ids, action_mask=mask, reward=reward,
                      turns=replies, ended=ended)


def replies_in(t):
    """Returns the number of replies, counted as spans of the mask."""
    return sum(now > before for before, now in zip(t.action_mask, t.action_mask[1:]))


def test_groups_have_each_trajectory_once_and_truncate_rejected_ones(encoder):
    s = Settings()
    e = played(encoder, "expert", 1.0, 2, iteration=0)
    t = played(encoder, "target", 0.5, 9)
    f = played(encoder, "failure", 0.7, 8)
    other = played(encoder, "target", 0.5, 3, task="b")
    another = played(encoder, "failure", 0.25, 2, task="b")
    of_other = played(encoder, "expert", 1.0, 2, task="b")
    pairs = coevolve.d_tgt(e, [t], [f], s, Counter()) + [Pair(FF, other, another)]
    group, alone = coevolve.preference_groups(pairs, [e, of_other], s, encoder, Counter())
    assert alone.trajectories == [other, another]
    # Rejected trajectories have 7 replies, the expert's 2 and 5 more. The chosen f is whole.
    assert [replies_in(x) for x in group.trajectories] == [2, 7, 7, 8]
    own, short, shorter, whole = group.trajectories
    assert short.ids == t.ids[:len(short.ids)] and short.ids[-1] == encoder.end_of_turn
    assert (short.turns, short.ended, encoder.cut(t, 9)) == (7, "turn_limit", t)
    assert [(pair.chosen, pair.rejected) for pair in group.pairs] == [
        (own, short), (own, shorter), (whole, short)]
    assert [pair.weight for pair in group.pairs] == [pair.weight for pair in pairs[:3]]
    for pair in group.pairs:  # the same objects, which get references
        assert {id(pair.chosen), id(pair.rejected)} <= {id(x) for x in group.trajectories}
    uncut = replace(s, cut_turns=-1)
    [group, _] = coevolve.preference_groups(pairs, [e, of_other], uncut, encoder, Counter())
    assert group.trajectories == [e, t, f]  # f occurs once, chosen or rejected
    # Ends of turns and of the episode are left out of the rejected trajectories only.
    left_out = replace(uncut, rejected_ends="leave out")
    [group, _] = coevolve.preference_groups(pairs, [e, of_other], left_out, encoder, Counter())
    assert group.trajectories == [e, encoder.without_ends(t), encoder.without_ends(f), f]

    # Another agent's trajectory may be the expert. It has the agent's name.
    e = played(encoder, "target", 1.0, 3, iteration=4)
    pairs = coevolve.d_tgt(e, [replace(t, iteration=5)], [], s, Counter())
    [group] = coevolve.preference_groups(pairs, [e], replace(s, cut_turns=1), encoder, Counter())
    assert [replies_in(x) for x in group.trajectories] == [3, 4]


def test_failures_that_are_equal_once_the_rejected_one_is_truncated_are_dropped(encoder):
    """The first 2 of 3 replies stay, the expert's 1 and 1 more. They equal the other's 2."""
    e = played(encoder, "expert", 1.0, 1)
    short, long = played(encoder, "target", 0.5, 2), played(encoder, "target", 0.25, 3)
    pairs = [Pair(FF, short, long), Pair(FF, long, short)]
    for cut_turns, ends, left, counts in [
            (1, "count", pairs[1:], {"equal once truncated": 1}),
            (1, "leave out", pairs[1:], {"equal once truncated": 1}), (2, "count", pairs, {})]:
        dropped = Counter()
        s = Settings(cut_turns=cut_turns, rejected_ends=ends)
        [group] = coevolve.preference_groups(pairs, [e], s, encoder, dropped)
        assert [pair.chosen for pair in group.pairs] == [pair.chosen for pair in left]
        assert dropped == counts
    s = Settings(cut_turns=1)
    assert coevolve.preference_groups(pairs[:1], [e], s, encoder, dropped) == []


def test_ends_of_turns_and_of_the_episode_can_be_left_out(encoder):
    """The content of all replies stays, except of the reply that ended the episode."""
    for ended_by, kept in dict(
            done="click[target 0]click[target 1]",
            turn_limit="click[target 0]click[target 1]click[target 2]").items():
        t = played(encoder, "target", 0.5, 3, ended=ended_by)
        mask = encoder.without_ends(t).action_mask
        acting = [i for i, acts in zip(t.ids, mask) if acts]
        assert encoder.decode(acting) == kept and encoder.end_of_turn not in acting
    only = replace(t, ids=[1, encoder.end_of_turn], action_mask=[0, 1], turns=1)
    assert encoder.without_ends(only) == only  # otherwise nothing would be left
    # An end of turn that the agent did not write is not an action token.
    added = replace(t, ids=[1, 7, 8, encoder.end_of_turn], action_mask=[0, 1, 1, 0], turns=1)
    assert encoder.without_ends(added) == added


def test_a_file_of_pairs_identifies_trajectories(encoder, tmp_path):
    e = played(encoder, "expert", 1.0, 1, iteration=0)
    t = played(encoder, "target", 0.5, 2)
    files = [tmp_path / "e", tmp_path / "t"]
    for file, trajectory in zip(files, [e, t]):
        write_jsonl(file, [trajectory])
    pairs = coevolve.d_tgt(e, [t], [], Settings(), Counter())
    write_pairs(SimpleNamespace(main=True), tmp_path / "pairs", pairs)
    assert read_pairs(tmp_path / "pairs", files) == pairs
    write_jsonl(files[0], [e, replace(t, reward=0.25)])
    with pytest.raises(UsageError, match="two trajectories have the name .*'target', 1, 0"):
        read_pairs(tmp_path / "pairs", files)


# ------------------------------------------------------------------------------------ whole runs


@lru_cache(2)
def model_in(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def log_p(folder, t):
    """Returns log pi(e|u) of a row of a trajectory file, by transformers alone."""
    return plain_log_probs(model_in(folder), t["ids"], t["action_mask"]).sum().item()


def test_sft_is_the_mean_over_the_experts_action_tokens(toy, small_model):
    """Eight experts are in one batch, so the agents differ only by rounding, which is printed."""
    run, said = toy
    experts = read_jsonl(run / "experts.jsonl")
    total = sum(log_p(small_model, row) for row in experts)
    tokens = sum(sum(row["action_mask"][1:]) for row in experts)
    for agent in "sft-target", "sft-failure":
        [line] = read_jsonl(run / f"{agent}/train.jsonl")
        assert line["loss"] == pytest.approx(-total / tokens, rel=1e-5)
    assert said.count("failure and target are identical after SFT, up to rounding, because all") == 1


def kinds_of(run, agents, agent):
    """Returns kind -> number of pairs by Eq. (6) and (8), counted from rewards alone."""
    played = defaultdict(list)  # (task, name) -> rewards
    for other in agents:
        for row in read_jsonl(run / f"iter1/{other.name}.jsonl"):
            played[row["task"], other.name].append(row["reward"])
    expected = Counter()
    for expert in read_jsonl(run / "experts.jsonl"):
        task, e = expert["task"], expert["reward"]
        own = played[task, agent.name]
        others = []
        for other in agents:
            if other != agent:
                others += played[task, other.name]
            if agent.role == "D_tgt" or other == agent and agent.role == "own":
                expected[f"expert>{other.name}"] += sum(r < e for r in played[task, other.name])
        compared = dict(D_tgt=product(own, others), D_fail=combinations(own + others, 2), own=[])
        for a, b in compared[agent.role]:
            expected[FF] += a != b and a < 1 and b < 1
    return +expected


def test_the_phases_of_a_run_have_distinct_rollouts_and_their_pairs(small_run):
    phases = read_json(small_run / "phases.json")
    tasks = [row["task"] for row in read_jsonl(small_run / "experts.jsonl")]
    for agent in coevolve.AGENTS["coevolve"]:
        played = read_jsonl(small_run / f"iter1/{agent.name}.jsonl")
        assert [(row["task"], row["rollout"]) for row in played] == [*product(tasks, [0, 1])]
        assert len({row["seed"] for row in played}) == len(played)
        expected = kinds_of(small_run, coevolve.AGENTS["coevolve"], agent)
        assert phases[f"iter1/pairs-{agent.name}.jsonl"]["pairs"] == expected
        assert len(expected) == dict(D_tgt=3, D_fail=1)[agent.role]
    evaluated = read_jsonl(small_run / "eval-1-target-test.jsonl")
    assert not any(row["log_probs"] for row in evaluated)  # it is greedy
    mean = sum(row["reward"] for row in evaluated) / 2
    assert phases["eval-1-target-test.jsonl"]["reward"] == pytest.approx(mean)


# Four agents with names that do not match their roles.
FOUR = [Agent("failure", "D_tgt"), Agent("b", "D_fail"), Agent("target", "own"),
        Agent("c", "D_tgt")]


def test_the_role_of_an_agent_and_not_its_name_determines_its_training(toy_run, monkeypatch):
    monkeypatch.setitem(coevolve.AGENTS, "coevolve", FOUR)
    out = toy_run("--temperature", 2, "--dpo-steps", 5, "--dpo-epochs", 3, "--lambda-dpo", 0.5,
                  "--lambda-sft", 0, "--pair-weights", "none")
    for agent in FOUR:
        pairs = read_jsonl(out / f"iter1/pairs-{agent.name}.jsonl")
        assert Counter(row["kind"] for row in pairs) == kinds_of(out, FOUR, agent)
        # --dpo-steps applies to D_tgt only. Eq. (7) has no lambdas.
        steps = read_jsonl(out / f"iter1/{agent.name}-agent/train.jsonl")
        trained = sum(kind["count"] for step in steps for kind in step["kinds"].values())
        lambda_dpo = dict(D_tgt=0.5, D_fail=1.0, own=1.0)[agent.role]
        assert steps[0]["loss"] == pytest.approx(lambda_dpo * math.log(2), abs=1e-4)
        assert len(steps) == 5 if agent.role == "D_tgt" else trained == 3 * len(pairs)


def first_loss(out, i, agent, policy, reference, beta, lambda_dpo=1.0, lambda_sft=0.0,
               by_weights=True):
    """Returns Eq. (9) of all pairs of an agent in iteration i, with forward passes of transformers.
    `policy` and `reference` are folders in `out`. Without a reference, pi_ref is 1."""
    logs, ratios = {}, {}  # of each trajectory
    for file in [out / "experts.jsonl", *out.glob("iter*/*.jsonl")]:
        if "pairs" not in file.name:
            for t in read_jsonl(file):
                name = t["task"], t["agent"], t["iteration"], t["rollout"]
                logs[name] = log_p(out / policy, t)
                ratios[name] = logs[name] - (log_p(out / reference, t) if reference else 0.0)
    total = weights = 0.0
    rows = read_jsonl(out / f"iter{i}/pairs-{agent}.jsonl")
    for row in rows:
        w, l = [(row["task"], row[side]["agent"], row[side]["iteration"], row[side]["rollout"])
                for side in ("chosen", "rejected")]
        margin = beta * (ratios[w] - ratios[l])
        total += lambda_dpo * row["weight"] * math.log1p(math.exp(-margin))
        total -= lambda_sft * row["sft_weight"] * logs[w]
        weights += row["weight"]
    return total / (weights if by_weights else len(rows))


ALONE = dict(lambda_dpo=1.0, lambda_sft=0.0)  # DPO alone, Eq. (7)


@pytest.mark.parametrize("method, lambdas, kinds", [
    # Section 5.1: "a DPO-only baseline".
    ("eto", dict(target=ALONE), dict(target={"expert>target"})),
    # The control learns as in ETO, and the target from both.
    ("positive", dict(target=dict(lambda_sft=0.1), positive=ALONE),
     dict(target={"expert>target", "expert>positive", FF}, positive={"expert>positive"}))])
def test_eto_and_the_control_are_dpo_alone(method, lambdas, kinds, toy_run):
    """The loss of one batch. pi_ref is 1, so that margins are not 0."""
    out = toy_run("--temperature", 2, "--reference", "none", "--dpo-batch", 100, "--method", method)
    for agent, wanted in lambdas.items():
        pairs = read_jsonl(out / f"iter1/pairs-{agent}.jsonl")
        assert {row["kind"] for row in pairs} == kinds[agent]
        assert wanted != ALONE or {row["weight"] for row in pairs} == {1.0}
        [line] = read_jsonl(out / f"iter1/{agent}-agent/train.jsonl")
        assert line["loss"] == pytest.approx(
            first_loss(out, 1, agent, f"sft-{agent}", None, 0.1, **wanted), rel=1e-4)
        # margins.jsonl has the values of each pair, and the log has their means.
        margins = read_jsonl(out / f"iter1/{agent}-agent/margins.jsonl")
        for kind, row in line["kinds"].items():
            seen = [m["first"] for m in margins if m["kind"] == kind]
            means = [sum(column) / len(seen) for column in zip(*seen)]
            assert [row[name] for name in ("chosen", "rejected", "margin")] == pytest.approx(means)


def test_two_iterations_have_their_own_rates_betas_and_pairs(toy_run):
    """With a buffer, the second D_fail has the failures of both iterations. Each iteration starts
    from the agent of the last one. --reference sets pi_ref."""
    out = toy_run(*"--iterations 2 --reference sft --d-fail buffer --temperature 2 --dpo-batch 100 "
                  "--beta 0.2 --beta-later 0.7 --dpo-lr-later 3e-4 --lambda-dpo 0.5 --lambda-sft "
                  "0.3 --denominator pairs".split())
    for name, iterations in dict(failure={1, 2}, target={0, 2}).items():  # 0 is the expert's
        rows = read_jsonl(out / f"iter2/pairs-{name}.jsonl")
        assert {row[side]["iteration"] for row in rows for side in ("chosen", "rejected")} == iterations
        lambdas = dict(lambda_dpo=0.5, lambda_sft=0.3) if name == "target" else ALONE
        for i, policy, beta, lr in [(1, f"sft-{name}", 0.2, 1e-3),
                                    (2, f"iter1/{name}-agent", 0.7, 3e-4)]:
            [line] = read_jsonl(out / f"iter{i}/{name}-agent/train.jsonl")
            loss = first_loss(out, i, name, policy, f"sft-{name}", beta, by_weights=False, **lambdas)
            assert (line["loss"], line["lr"]) == (pytest.approx(loss, rel=1e-4), lr)


def test_by_default_preference_training_begins_with_ln_2_in_each_iteration(toy_run, small_run):
    """pi_ref is the agent at the start of the iteration."""
    out = toy_run("--method", "eto", "--iterations", 2, "--temperature", 2)
    for agent in [out / "iter1/target-agent", out / "iter2/target-agent",
                  small_run / "iter1/failure-agent"]:
        first = read_jsonl(agent / "train.jsonl")[0]
        [kind] = first["kinds"].values()
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-4) and abs(kind["margin"]) < 1e-4


def test_a_fixed_failure_agent_from_a_folder(toy_run, small_model):
    """It is not trained, stays as it is, and its training log is not copied."""
    given = {path.name: path.read_bytes() for path in small_model.iterdir()}
    (small_model / "train.jsonl").write_text("{}\n")
    out = toy_run("--failure-from", small_model, "--d-fail", "none")
    (small_model / "train.jsonl").unlink()
    assert read_jsonl(out / "iter1/pairs-failure.jsonl") == [] and not (out / "sft-failure").exists()
    assert given == {path.name: path.read_bytes() for path in (out / "iter1/failure-agent").iterdir()}
