"""The method: pairs by hand, the training data of each agent, and losses of whole runs. Values that
the loop passes from phase to phase, and the settings."""

import filecmp
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

import pytest
import transformers
from conftest import Toy, make_tokenizer, plain_log_probs, table

import coevolve
import dpo
from coevolve import Settings
from common.files import read_json, read_jsonl
from common.settings import UsageError, settings_of, values_of
from dpo import Pair, Trajectory
from engine.chat import Encoder
from engine.experts import collect_experts
from engine.trajectories import read
from environments import environment

FF = "failure>failure"
SAME = "equal tokens with different rewards"

# --------------------------------------------------------------------------------- pairs by hand


def rollouts(agent, rewards):
    return [Trajectory("a", agent, rollout=n, reward=reward, ids=[ord(agent[0]), n], action_mask=[1, 1])
            for n, reward in enumerate(rewards)]


def brief(pairs):
    """Returns pairs as "t0 > f1  1, 0; ...": the target's rollout 0 is chosen, the failure agent's
    rollout 1 is rejected, the weight is 1 in the DPO term and 0 in the SFT term."""
    texts = []
    for pair in pairs:
        agents = pair.chosen.agent, pair.rejected.agent
        assert pair.kind == (">".join(agents) if "expert" in agents else FF)
        assert pair.chosen.reward > pair.rejected.reward
        sides = " > ".join(f"{t.agent[0]}{t.rollout}" for t in (pair.chosen, pair.rejected))
        texts.append(f"{sides}  {pair.weight:.2g}, {pair.sft_weight:.2g}")
    return "; ".join(texts)


@pytest.mark.parametrize("expert, own, others, settings, pairs", table("""
    # expert -> rewards of the target -> of the failure agent -> settings -> pairs
    # Section 4.3: the expert pairs of a task have a total weight of 1, and its failure pairs at most
    # 1, whatever the number of rollouts. A failure pair has no SFT term.
    1.0 -> 0.5 -> 0.75 -> -> e0 > t0  0.5, 0.5; e0 > f0  0.5, 0.5; f0 > t0  1, 0
    # Equal failures make no failure pair, also if they differ by rounding.
    1.0 -> 0.30000000000000004 -> 0.3 -> -> e0 > t0  0.5, 0.5; e0 > f0  0.5, 0.5
    # The target succeeds: a tie with the expert, and no failure pair.
    1.0 -> 1.0 -> 0.25 -> -> e0 > f0  1, 1
    # ETO: there is no other agent.
    1.0 -> 0.5 -> -> -> e0 > t0  1, 1
    # An expert at 0.75 loses to a success, and to a better failure, which gets no SFT weight.
    0.75 -> 1.0 -> 0.8 -> -> t0 > e0  0.5, 0.5; f0 > e0  0.5, 0
    # A failure with the expert's reward makes no expert pair, but makes failure pairs.
    0.75 -> 0.75 -> 0.5 -> -> e0 > f0  1, 1; t0 > f0  1, 0
    # Two rollouts each, one a success. Failures are paired across agents only.
    1.0 -> 0.5 0.25 -> 0.5 1.0 -> -> e0 > t0  0.33, 0.33; e0 > t1  0.33, 0.33; e0 > f0  0.33, 0.33; f0 > t1  0.25, 0
    # Each of the 2 x 1 comparisons of failures weighs 1/2, or 1.
    1.0 -> 0.5 0.25 -> 0.75 -> pair_weights=none -> e0 > t0  1, 1; e0 > t1  1, 1; e0 > f0  1, 1; f0 > t0  0.5, 0; f0 > t1  0.5, 0
    1.0 -> 0.5 0.25 -> 0.75 -> failure_pair_weights=none pair_weights=none -> e0 > t0  1, 1; e0 > t1  1, 1; e0 > f0  1, 1; f0 > t0  1, 0; f0 > t1  1, 0
    # Other settings. As in ETO, each pair weighs 1.
    0.75 -> 1.0 -> 0.5 -> expert_beaten=drop -> e0 > f0  1, 1
    0.75 -> 1.0 -> 0.5 -> pair_weights=none -> t0 > e0  1, 1; e0 > f0  1, 1
    0.75 -> 0.5 -> 0.25 -> d_tgt_failures=none -> e0 > t0  0.5, 0.5; e0 > f0  0.5, 0.5
    0.75 -> 0.5 -> 0.25 -> d_tgt_failures=hard -> e0 > t0  0.5, 0.5; e0 > f0  0.5, 0.5
    0.75 -> 0.6 -> 0.25 -> d_tgt_failures=hard -> e0 > t0  0.5, 0.5; e0 > f0  0.5, 0.5; t0 > f0  1, 0
    # Without an expert: the failure agent's pairs. A success is no failure, also but for rounding.
    -> 0.5 -> 0.75 -> -> f0 > t0  1, 0
    -> 0.5 1.0 0.9999999999999999 -> 0.5 -> ->
    # Pairs within an agent are included, except with "cross", the literal Eq. (6).
    -> 0.5 0.25 -> 0.75 1.0 -> -> t0 > t1  1, 0; f0 > t0  1, 0; f0 > t1  1, 0
    -> 0.5 0.25 -> 0.75 1.0 -> d_fail=cross -> f0 > t0  1, 0; f0 > t1  1, 0
    -> 0.5 0.25 -> 0.75 1.0 -> d_fail=none ->
"""))
def test_pairs_by_hand(expert, own, others, settings, pairs):
    """Every comparison makes a pair or a reason."""
    s = Settings(**dict(word.split("=") for word in settings.split()))
    expert, own, others = (
        rollouts(agent, [*map(float, rewards.split())])
        for agent, rewards in [("expert", expert), ("target", own), ("failure", others)])
    comparisons = 0 if "none" in (s.d_tgt_failures, s.d_fail) else len(own) * len(others)
    if expert:
        found, reasons = coevolve.d_tgt(*expert, own, others, s)
        comparisons += len(own) + len(others)
    else:
        found, reasons = coevolve.d_fail(own, others, s)
        if s.d_fail == "all":
            comparisons = math.comb(len(own + others), 2)
    assert brief(found) == pairs
    assert len(found) + len(reasons) == comparisons and None not in reasons


def made(phase, *lists):
    """Returns the pairs and the numbers of a phase that makes pairs, and the lines that it prints."""
    said = []
    run = SimpleNamespace(settings=Settings(), name="pairs.jsonl", print=said.append)
    return *phase(run, *lists), said


def test_pairs_are_made_of_usable_trajectories():
    """A rollout that reached the context limit makes no pair, and the other failure pairs do not get
    its weight. Those of the buffer were counted in an earlier iteration."""
    e, own = rollouts("expert", [1.0]), rollouts("target", [0.5, 0.3, 0.2])
    others, buffer = rollouts("failure", [0.25]), rollouts("before", [0.1, 0.3])
    own[1].ended = buffer[1].ended = "context_limit"
    own[2].action_mask = [0, 0]
    for phase, lists, expected in [
            (coevolve.target_pairs, [own, others],
             "e0 > t0  0.5, 0.5; e0 > f0  0.5, 0.5; t0 > f0  0.33, 0"),
            (coevolve.failure_pairs, [own, others], "t0 > f0  1, 0"),
            (coevolve.failure_pairs, [own, others, buffer],
             "t0 > f0  1, 0; t0 > b0  1, 0; f0 > b0  1, 0"),
            (coevolve.eto_pairs, [own], "e0 > t0  1, 0")]:
        pairs, numbers, said = made(phase, e, *lists)
        assert brief(pairs) == expected
        kinds = Counter(pair.kind for pair in pairs)
        assert (numbers, said) == (dict(pairs=kinds, dropped={"too long": 2}), [])


def test_equal_tokens_with_different_rewards_make_no_pair_and_are_named():
    """For example if a goal's price limit is random."""
    [e], own, others = (rollouts("same", [reward]) for reward in (1.0, 0.5, 0.75))
    _, numbers, (same, none) = made(coevolve.target_pairs, [e], own, others)
    assert numbers["dropped"] == {SAME: 3}
    assert same.startswith(f"pairs.jsonl: {SAME}, first in task a; check that the tokenizer")
    assert none.startswith("pairs.jsonl: no pairs, since {'equal tokens")


# ------------------------------------------------------------------- from pairs to training data


@pytest.fixture(scope="module")
def encoder():
    return Encoder(make_tokenizer("chatml"))


def played(encoder, agent, reward, replies, task="a", ended="done"):
    """Returns a trajectory of some replies. Each has two or more tokens and an end of turn."""
    messages = [dict(role="user", content="find a mug")]
    for n in range(replies):
        messages += [dict(role="assistant", content=f"click[{agent} {n}]"),
                     dict(role="user", content="Page 1")]
    ids, mask = encoder.encode(messages[:-1], 1)
    return Trajectory(task, agent, 1, ids=ids, action_mask=mask, reward=reward, turns=replies,
                      ended=ended)


def test_groups_have_each_trajectory_once_and_truncate_rejected_ones(encoder):
    e = played(encoder, "expert", 1.0, 2)
    t, f = played(encoder, "target", 0.5, 9), played(encoder, "failure", 0.7, 8)
    other, another = (played(encoder, "target", 0.5, n, task="b") for n in (3, 2))
    experts = [e, replace(e, task="b")]
    pairs = [*coevolve.d_tgt(e, [t], [f], Settings())[0], Pair(FF, other, another)]
    [group, alone], _ = coevolve.preference_groups(pairs, experts, Settings(), encoder)
    own, short, shorter, whole = group.trajectories
    assert (own, whole, alone.trajectories) == (e, f, [other, another])
    for cut, given in (short, t), (shorter, f):  # 7 replies, the expert's 2 and 5 more
        assert cut.ids == given.ids[:len(cut.ids)] and cut.ids[-1] == encoder.end_of_turn
        assert encoder.decode(cut.ids).count("click") == cut.turns == 7
        assert cut.ended == "turn_limit"
    # Pairs have the same objects, which get references.
    assert [(id(pair.chosen), id(pair.rejected), pair.weight) for pair in group.pairs] == [
        (id(own), id(short), 0.5), (id(own), id(shorter), 0.5), (id(whole), id(short), 1.0)]
    # Without truncation, f occurs once, chosen or rejected. Ends of turns and of the episode are
    # left out of the rejected trajectories only.
    left_out = [e, encoder.without_ends(t), encoder.without_ends(f), f]
    for ends, trajectories in {"count": [e, t, f], "leave out": left_out}.items():
        uncut = Settings(cut_turns=-1, rejected_ends=ends)
        [group, _], _ = coevolve.preference_groups(pairs, experts, uncut, encoder)
        assert group.trajectories == trajectories


@pytest.mark.parametrize("cut_turns, ends, dropped", [
    (1, "count", 1), (1, "leave out", 1), (2, "count", 0)])
def test_failures_that_are_equal_once_the_rejected_one_is_truncated_are_dropped(
        cut_turns, ends, dropped, encoder):
    """With cut_turns 1, the first 2 of 3 replies stay. They equal the other's 2."""
    e = played(encoder, "expert", 1.0, 1)
    short, long = played(encoder, "target", 0.5, 2), played(encoder, "target", 0.25, 3)
    s = Settings(cut_turns=cut_turns, rejected_ends=ends)
    groups, reasons = coevolve.preference_groups([Pair(FF, short, long)], [e], s, encoder)
    assert (len(groups), reasons) == (1 - dropped, ["equal once truncated"] * dropped)


@pytest.mark.parametrize("ended, content", [
    ("done", "click[target 0]click[target 1]"),
    ("turn_limit", "click[target 0]click[target 1]click[target 2]")])
def test_ends_of_turns_and_of_the_episode_can_be_left_out(ended, content, encoder):
    """The content of all replies stays, except of the reply that ended the episode."""
    t = played(encoder, "target", 0.5, 3, ended=ended)
    mask = encoder.without_ends(t).action_mask
    acting = [i for i, acts in zip(t.ids, mask) if acts]
    assert encoder.decode(acting) == content and encoder.end_of_turn not in acting
    # Otherwise nothing would be left.
    only_end = replace(t, ids=[1, encoder.end_of_turn], action_mask=[0, 1], turns=1)
    assert encoder.without_ends(only_end) == only_end


# ------------------------------------------------------------------------------------ whole runs


@lru_cache(2)
def model_in(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def log_p(folder, t):
    """Returns log pi(e|u) of a trajectory, by transformers alone."""
    return plain_log_probs(model_in(folder), t.ids, t.action_mask).sum().item()


def test_sft_is_the_mean_over_the_experts_action_tokens(toy, small_model):
    """Eight experts are in one batch, so the agents differ only by rounding, which is printed."""
    run, said = toy
    experts = read(run / "experts.jsonl")
    total = sum(log_p(small_model, t) for t in experts)
    tokens = sum(t.action_count for t in experts)
    for agent in "sft-target", "sft-failure":
        [line] = read_jsonl(run / f"{agent}/train.jsonl")
        assert line["loss"] == pytest.approx(-total / tokens, rel=1e-5)
    assert said.count("failure and target are identical after SFT, up to rounding, because all") == 1


def test_the_numbers_of_episodes_by_hand():
    """The three rates of Table 2, and the means."""
    episodes = [Trajectory(reward=reward, turns=turns, idle=1, ended=ended) for reward, turns, ended in [
        (1.0, 2, "done"), (0.6, 4, "done"), (0.5, 10, "turn_limit"), (0.0, 4, "done")]]
    assert coevolve.summarise(episodes, hard_threshold=0.6) == pytest.approx(dict(
        episodes=4, reward=0.525, success=0.25, hard_negative=0.25, other_failure=0.5, turns=5.0,
        idle=0.2, turn_limit=0.25))


def sides(out, pairs):
    """Returns the sides of the pairs in a file, such as "t10": the target, iteration 1, rollout 0."""
    return {"{agent:.1}{iteration}{rollout}".format(**row[side])
            for row in read_jsonl(out / f"{pairs}.jsonl") for side in ("chosen", "rejected")}


def first_loss(out, agent, i, beta, reference=None, lambda_dpo=1.0, lambda_sft=0.0):
    """Returns Eq. (9) of all pairs of an agent in iteration i, with forward passes of transformers,
    as a mean over the pairs. `reference` is a folder in `out`. Without it, pi_ref is 1, and log pi
    is a mean in the DPO term."""
    policy = f"sft-{agent}" if i == 1 else f"iter{i - 1}/{agent}-agent"
    files = [out / "experts.jsonl", *out.glob("iter*/*.jsonl")]
    played = [read(file) for file in files if "pairs" not in file.name]
    pairs = read(out / f"iter{i}/pairs-{agent}.jsonl", played)
    total = 0.0
    for pair in pairs:
        w, l = (log_p(out / policy, t) for t in (pair.chosen, pair.rejected))
        ref_w, ref_l = (log_p(out / reference, t) if reference else 0.0
                        for t in (pair.chosen, pair.rejected))
        margin = beta * ((w - ref_w) - (l - ref_l))
        if not reference:
            margin = beta * (w / pair.chosen.action_count - l / pair.rejected.action_count)
        total += lambda_dpo * pair.weight * math.log1p(math.exp(-margin))
        total -= lambda_sft * pair.sft_weight * w
    return total / len(pairs)


@pytest.mark.parametrize("method, agent, kinds, lambda_sft", [
    ("eto", "target", {"expert>target"}, 0.0),  # Section 5.1: "a DPO-only baseline"
    # The control learns as in ETO, and the target from both.
    ("positive", "positive", {"expert>positive"}, 0.0),
    ("positive", "target", {"expert>target", "expert>positive", FF}, 0.1)])
def test_eto_and_the_control_are_dpo_alone(method, agent, kinds, lambda_sft, toy_run):
    """The loss of one batch. pi_ref is 1, so that margins are not 0."""
    out = toy_run("--method", method, *"--temperature 2 --reference none --dpo-batch 100 "
                  "--rollouts 2 --dpo-epochs 2 --denominator pairs --log-prob-reduction mean".split())
    pairs = read_jsonl(out / f"iter1/pairs-{agent}.jsonl")
    assert {row["kind"] for row in pairs} == kinds
    assert lambda_sft or {row["weight"] for row in pairs} == {1.0}
    assert {f"eval-{i}-{agent}-test.jsonl" for i in (0, 1)} <= read_json(out / "phases.json").keys()
    first, _ = read_jsonl(out / f"iter1/{agent}-agent/train.jsonl")
    loss = first_loss(out, agent, 1, 0.1, lambda_sft=lambda_sft)
    assert first["loss"] == pytest.approx(loss, rel=1e-4)
    margins = [row["first"][-1] for row in read_jsonl(out / f"iter1/{agent}-agent/margins.jsonl")]
    sums = Counter()
    for row in first["kinds"].values():
        sums.update(margin=row["count"] * row["margin"], above=row["count"] * row["accuracy"])
    assert sums == pytest.approx(dict(margin=sum(margins), above=sum(m > 0 for m in margins)))


def test_two_iterations_have_their_own_rollouts_rates_betas_and_pairs(toy_run, encoder):
    """With --failure-plays after, the target's pairs have the rollouts of the trained failure agent,
    and D_fail has those from before. With a buffer, the next D_fail has both. Eq. (7), the failure
    agent's loss, has no lambdas, and --dpo-steps applies only to the target."""
    out = toy_run(*"--iterations 2 --reference sft --failure-plays after --d-fail buffer "
                  "--temperature 2 --dpo-batch 100 --beta 0.2 --beta-later 0.7 --dpo-lr-later 3e-4 "
                  "--lambda-dpo 0.5 --lambda-sft 0.3 --denominator pairs --dpo-epochs 2 "
                  "--dpo-steps 3 --sft-epochs 3".split())
    outputs = "experts.jsonl sft-target sft-failure".split()
    for i in range(3):
        if i:
            outputs += [f"iter{i}/{name}" for name in (
                "target.jsonl failure.jsonl pairs-failure.jsonl failure-agent failure-again.jsonl "
                "pairs-target.jsonl target-agent").split()]
        outputs += [f"eval-{i}-{agent}-test.jsonl" for agent in ("target", "failure")]
    assert [*read_json(out / "phases.json")] == outputs
    rates = [line["lr"] for line in read_jsonl(out / "sft-target/train.jsonl")]
    assert rates == pytest.approx([rates[0] * x for x in (1, 0.75, 0.25)])  # half of a cosine
    never = encoder.sampler().suppressed_ids
    for agent, played in {"sft-failure": "failure", "iter1/failure-agent": "failure-again"}.items():
        for t in read(out / f"iter1/{played}.jsonl"):
            logs = plain_log_probs(model_in(out / agent), t.ids, t.action_mask, never, 2)
            assert t.log_probs == pytest.approx(logs.tolist(), abs=1e-4)
    for pairs, expected in {
            "iter1/pairs-failure": "t10 f10", "iter1/pairs-target": "e00 t10 f11",
            "iter2/pairs-failure": "t10 f10 f11 t20 f20", "iter2/pairs-target": "e00 t20 f21"}.items():
        assert sides(out, pairs) == {*expected.split()}
    for i, beta, lr in (1, 0.2, 1e-3), (2, 0.7, 3e-4):
        for agent, lambdas, steps in ("failure", (1.0, 0.0), 2), ("target", (0.5, 0.3), 3):
            line, *more = read_jsonl(out / f"iter{i}/{agent}-agent/train.jsonl")
            loss = first_loss(out, agent, i, beta, f"sft-{agent}", *lambdas)
            assert (line["loss"], line["lr"]) == (pytest.approx(loss, rel=1e-4), lr)
            assert 1 + len(more) == steps


def test_by_default_preference_training_begins_with_ln_2_in_each_iteration(toy_run, capsys):
    """pi_ref is the agent at the start of the iteration."""
    out = toy_run("--iterations", 2, "--temperature", 2)
    for agent in "iter1/target", "iter1/failure", "iter2/target", "iter2/failure":
        first = read_jsonl(out / f"{agent}-agent/train.jsonl")[0]
        assert first["dpo"] == pytest.approx(math.log(2), abs=1e-4)
    said = capsys.readouterr().out
    assert "first DPO loss" not in said and "gradient was 0" not in said


def test_another_first_loss_and_a_gradient_of_0_are_named(toy_run, monkeypatch, capsys):
    """A loss without a gradient leaves the failure agent as it is. The target has an SFT term."""
    def detached(*arguments, whole=dpo.dpo_loss):
        loss, margin = whole(*arguments)
        return 2 * loss.detach(), margin

    monkeypatch.setattr(dpo, "dpo_loss", detached)
    toy_run("--temperature", 2)
    said = capsys.readouterr().out
    assert said.count("-agent: the first DPO loss is 1.386, and Eq. (7) gives 0.693") == 2
    assert said.count("gradient was 0") == 1
    assert "iter1/failure-agent: the gradient was 0 in all steps" in said


def test_a_fixed_failure_agent_from_a_folder(toy_run, toy):
    """It is not trained, stays as it is, and its training log is not copied."""
    given = toy[0] / "sft-failure"
    out = toy_run("--failure-from", given, "--d-fail", "none")
    assert not (out / "sft-failure").exists()
    assert read_json(out / "phases.json")["iter1/failure-agent"]["steps"] == 0
    compared = filecmp.dircmp(given, out / "iter1/failure-agent")
    assert compared.left_only == ["train.jsonl"] and not compared.right_only + compared.diff_files


# --------------------------------------------------------------------------- experts and settings


class Commas(Toy):
    """The tokenizer of the model tiny writes a space before a comma. Tasks from number 4 on ignore
    spaces."""
    max_turns = 1

    def expert(self):
        return lambda observation: "small tea, sugar"

    def reward(self):
        [reply] = self.replies
        if self.task[-1] >= "4":
            reply = reply.replace(" ,", ",")
        return float(reply == "small tea, sugar")


def test_an_expert_that_the_tokenizer_misspells_is_dropped(new_run, capsys):
    run = new_run(Commas, model="tiny")
    experts = run.once("experts.jsonl", collect_experts, None)
    assert [t.task for t in experts] == [f"toy-train-{n}" for n in range(4, 8)]
    assert run.done["experts.jsonl"]["dropped"] == {"misread once decoded": 4}
    said = capsys.readouterr().out
    assert said.count("the tokenizer turns") == 1
    assert ("experts.jsonl: the tokenizer turns the expert's reply 'small tea, sugar' into 'small tea "
            ", sugar', which changes the reward of toy-train-0; use another model") in said


def test_a_setting_without_a_type_is_refused():
    @dataclass(frozen=True)
    class Untyped(Settings):
        min_gap = 0.1

    with pytest.raises(UsageError, match=r"Untyped.min_gap = 0.1 has no type.*write min_gap: float = 0"):
        settings_of(Untyped)


@pytest.mark.parametrize("given, inherited, expected", table("""
    # The paper's schedule, and one value for all iterations
    {"model": "a"} -> {} -> beta 0.1 None; beta_later 0.5 None
    {"model": "a", "beta": 0.3} -> {} -> beta 0.3 given; beta_later 0.3 given
    {"model": "a", "beta_later": 0.3} -> {} -> beta 0.1 None; beta_later 0.3 given
    {"dpo_lr": 1.0, "dpo_lr_later": 2.0} -> {} -> dpo_lr 1.0 given; dpo_lr_later 2.0 given
    # A later preset has priority, and a value that is given has more.
    {"quick": true, "sft_batch": 4} -> {} -> beta_later 0.1 preset tiny; train_tasks 60 preset quick tiny; sft_batch 4 given
    # A run's values are defaults, except of those that may change when it is resumed.
    {"seed": 7} -> {"seed": 3, "beta": 0.2, "out": "a", "slots": 5, "mine": 1} -> model other --branch; sft_batch 48 None; seed 7 given; beta 0.2 --branch; beta_later 0.2 --branch; out None None; slots 0 None
    {"beta": 0.3} -> {"beta_later": 0.7} -> beta 0.3 given; beta_later 0.3 given
    # The preset of another method has priority over the run's values.
    {"method": "eto"} -> {"lambda_sft": 0.2, "rollouts": 5} -> method eto given; lambda_sft 0.0 preset --method eto; rollouts 5 --branch
    {} -> {"method": "eto", "lambda_sft": 0.2} -> method eto --branch; lambda_sft 0.2 --branch
"""))
def test_the_values_of_settings_and_their_origins_by_hand(given, inherited, expected):
    inherited = json.loads(inherited)
    if inherited:  # of a run that --branch names
        inherited = dict(env="webshop", model="other", method="coevolve") | inherited
    values, origins = values_of(json.loads(given), inherited, Settings, environment("webshop"))
    names = [line.split()[0] for line in expected.split("; ")]
    assert "; ".join(f"{name} {values[name]} {origins.get(name)}" for name in names) == expected
    assert "mine" not in values
