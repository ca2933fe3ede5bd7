"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

Read this file from the top, then `dpo.py` (tokens in, gradients out) and `envs.py` (text in, text
out: the episode). They are the method; what they run on is in `engine/`, and need not be read. From
there comes a run: `run.load` reads a model in fp32, `run.fit` trains it by `dpo.train` with a fresh
AdamW and saves it, `run.log_probs` is `dpo.token_log_probs` shared by all ranks, `run.play` lets a
copy of a model play, in bf16 on a GPU, and `run.once` does a phase.

    task        the paper's instruction u
    episode     one play of a task; its record is a trajectory e
    expert      the trajectory of a task that agents imitate
    rollout     one of the episodes that an agent plays of a task in an iteration; its number
    agent       a model that plays and learns; its role says from which pairs
    phase       a function of the loop: it reads files of a run and writes one, which you may edit

    python coevolve.py --env webshop            # --help lists the settings
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, Optional

import dpo
from common import settings as types
from common.files import seed_of
from dpo import Group, Pair, Trajectory, better, equal
from engine.command import main
from engine.experts import collect_experts
from engine.machine import MachineSettings
from engine.records import read, read_pairs, write, write_pairs
from engine.run import Run
from environments import ENVIRONMENTS

# ------------------------------------------------------------------------------------ the loop


@dataclass(frozen=True)
class Agent:
    """One of the agents of a method; phases get the folder of its model. What it learns is up to
    its role, whatever its name."""
    name: str  # in files and tables
    # What it learns from: D_tgt of Eq. (8), by Eq. (9); D_fail of Eq. (6), by Eq. (7); or its own
    # trajectories against the expert's, by Eq. (7), as in ETO.
    role: Literal["D_tgt", "D_fail", "own"]


# A new method is a line here and one in METHODS below; a new role also a branch in make_pairs.
TARGET = Agent("target", "D_tgt")
AGENTS = {"sft": [TARGET],
          # "a DPO-only baseline" [Section 5.1]: with no other agent, D_tgt is ETO's pairs. The
          # preset "--method eto" takes Section 4.3's weights and SFT term away.
          "eto": [TARGET],
          "coevolve": [TARGET, Agent("failure", "D_fail")],
          # The control, "trained in the same manner as ETO" [Section 5.4]. The target pairs its
          # failures with the positive agent's, as it does with a failure agent's [ours].
          "positive": [TARGET, Agent("positive", "own")]}


def coevolve(run: Run) -> None:
    """The method, Sections 4.1 to 4.3. ETO is this loop with the target alone, SFT its beginning.

    `once(output, phase, *files, **values)` does a phase, unless its output is there and was made
    from the same files, which follow in order, and the same values, which follow by name. It
    returns the output's path. It does not see that code has changed: give another --out, or
    --branch RUN@OUTPUT. A phase that was stopped begins anew.
    """
    s = run.settings
    once = run.once
    agents = AGENTS[s.method]

    # All agents begin by imitation of the experts, Eq. (3)-(5), each in an order of its own.
    experts = once("experts.jsonl", collect_experts, *given_experts(s))
    models = {}  # name of an agent -> its folder
    for agent in agents:
        if agent.role == "D_fail" and s.failure_from:
            models[agent.name] = Path(s.failure_from)
        else:
            models[agent.name] = once(f"sft-{agent.name}", train_sft, run.base, experts,
                                      name=agent.name)
    after_sft = dict(models)
    evaluations(run, models, 0)
    if s.method == "sft":
        return

    earlier = []  # files of trajectories of earlier iterations
    for i in range(1, s.iterations + 1):
        # All agents play every task that has an expert.
        played = {}  # name of an agent -> the file of its trajectories
        for agent in agents:
            played[agent.name] = once(f"iter{i}/{agent.name}.jsonl", explore,
                                      models[agent.name], experts, name=agent.name, i=i)

        # Each agent learns from its pairs, Eq. (6) and (7), or Eq. (8) and (9). Section 4 trains
        # them "in alternating phases" and does not say whether the failure agent plays before or
        # after it learns. With "before", the order of learning makes no difference, and the first
        # failure agent that plays is one after SFT. With "after", the failure agent learns first
        # and plays again, so that the target learns from its newest hard negatives.
        failure_first = s.failure_plays == "after"
        learners = agents
        if failure_first:
            learners = sorted(agents, key=lambda agent: agent.role != "D_fail")
        for agent in learners:
            name = agent.name
            pairs = once(f"iter{i}/pairs-{name}.jsonl", make_pairs, experts, played, earlier,
                         trains=name, role=agent.role)
            reference = after_sft[name] if s.reference == "sft" else models[name]
            models[name] = once(f"iter{i}/{name}-agent", train_preferences, models[name],
                                reference, pairs, experts, [*played.values(), *earlier],
                                name=name, role=agent.role, i=i)
            if failure_first and agent.role == "D_fail":
                if s.d_fail == "buffer":
                    earlier.append(played[name])
                played[name] = once(f"iter{i}/{name}-again.jsonl", explore, models[name], experts,
                                    name=name, i=i, first_rollout=s.rollouts)

        evaluations(run, models, i)
        if s.d_fail == "buffer":  # otherwise D_fail forgets them
            earlier += played.values()


def given_experts(s: Settings) -> list[Path]:
    """The file of experts, if one is given; else a script plays them."""
    return [Path(s.experts)] if s.experts else []


def evaluations(run: Run, models: dict[str, Path], i: int) -> None:
    """Evaluates all agents on all evaluated splits."""
    for name, model in models.items():
        for split in run.splits:
            run.once(f"eval-{i}-{name}-{split}.jsonl", evaluate, model, name=name, i=i,
                     split=split)


# ---------------------------------------------------------------------------------- the phases
# phase(run, out, *files, **values) writes `out`, a temporary path, and returns numbers, which stand
# in phases.json then. Every rank runs it, and one of them writes. The first, `collect_experts` of
# engine/experts.py, encodes experts, and drops those of low reward and of evaluated tasks.


def train_sft(run: Run, out: Path, base: Path, experts: Path, name: str) -> dict:
    """Trains a model on the experts' action tokens, Eq. (3)-(5). name: the agent's; it draws the
    order of the experts, which is all in which agents differ then."""
    s = run.settings
    rng = random.Random(seed_of(s.seed, "sft", name))
    groups = [Group([expert]) for expert in read(experts)]
    if len(groups) <= s.sft_batch and name != TARGET.name:
        run.say(f"{name} is the target after SFT, but for rounding: all experts fit one batch, so "
                f"that their order changes nothing; lower --sft-batch {s.sft_batch}")
    steps = dpo.batches(groups, s.sft_batch, rng, s.sft_epochs)
    rates = dpo.learning_rates(len(steps), s.sft_lr, s.sft_warmup, cosine=True)
    # Eq. (5) does not say over what a batch is averaged: here over its action tokens [ours].
    return run.fit(run.load(base), out, steps, rates, dpo.sft_loss, dpo.action_count)


def explore(
    run: Run,
    out: Path,
    agent: Path,
    experts: Path,
    name: str,
    i: int,
    first_rollout: int = 0,
) -> dict:
    """Samples `rollouts` episodes of the task of every expert trajectory. Their indices begin with
    `first_rollout`, so that an agent that plays twice in an iteration samples anew."""
    s = run.settings
    begun = []
    for expert in read(experts):
        for rollout in range(first_rollout, first_rollout + s.rollouts):
            seed = seed_of(s.seed, name, i, expert.task, rollout)
            begun.append(Trajectory(expert.task, name, i, rollout, seed))
    trajectories = run.play(agent, begun, s.temperature)
    write(run, out, trajectories)
    return outcomes(trajectories, s.hard_threshold)


def evaluate(run: Run, out: Path, agent: Path, name: str, i: int, split: str) -> dict:
    """Lets an agent play the tasks of a split, greedily."""
    s = run.settings
    tasks = run.env.tasks(split)
    if s.eval_tasks:
        tasks = tasks[:s.eval_tasks]
    trajectories = run.play(agent, [Trajectory(task, name, i) for task in tasks], 0.0)
    write(run, out, trajectories)
    return outcomes(trajectories, s.hard_threshold)


def outcomes(trajectories: list[Trajectory], hard: float) -> dict:
    """Means over trajectories. Table 2 has the shares `success`, `hard`, and of other failures the
    rest; `idle` is that of replies that changed nothing, `budget` of episodes out of turns."""
    n = len(trajectories)
    replies = sum(t.steps for t in trajectories)
    return dict(episodes=n,
                reward=fmean(t.reward for t in trajectories),
                success=sum(not t.is_failure for t in trajectories) / n,
                hard=sum(t.is_failure and t.reward >= hard for t in trajectories) / n,
                turns=replies / n,
                idle=sum(t.idle for t in trajectories) / max(1, replies),
                budget=sum(t.ended == "budget" for t in trajectories) / n)


def make_pairs(
    run: Run,
    out: Path,
    experts: Path,
    played: dict[str, Path],
    earlier: list[Path],
    trains: str,
    role: str,
) -> dict:
    """Makes the pairs that one agent learns from.

    Args:
        run: The run.
        out: The file of pairs, which gets a row for each.
        experts: The file of experts.
        played: name of an agent -> the file of its trajectories of this iteration.
        earlier: Files of all agents' trajectories of earlier iterations.
        trains: The name of the agent that learns.
        role: Its role, see `Agent`.

    Returns:
        How many pairs there are of each kind, and how many comparisons made none, by reason.
    """
    s = run.settings
    dropped = Counter()
    own = by_task(read(played[trains]))
    others = by_task(read(*[played[name] for name in played if name != trains]))
    if role == "D_fail" and s.d_fail == "buffer":
        # Trajectories of all agents. Those that cannot train were counted in their own iteration.
        for task, trajectories in by_task(usable(read(*earlier), Counter())).items():
            own[task] += trajectories

    pairs = []
    for expert in read(experts):
        task = expert.task
        if role == "D_tgt":
            pairs += d_tgt(expert, own[task], others[task], s, dropped)
        elif role == "D_fail":
            pairs += d_fail(own[task], others[task], s, dropped)
        elif role == "own":
            pairs += against_expert(expert, usable(own[task], dropped), s, dropped)
        else:
            raise ValueError(f"{trains}: make_pairs has no branch for the role {role!r}")

    write_pairs(run, out, pairs)
    if dropped and not pairs:
        run.say(f"{run.name}: no pairs, since {dict(dropped)}; give more --rollouts, another "
                "--temperature or more --max-tokens")
    return dict(pairs=Counter(pair.kind for pair in pairs), dropped=dropped)


def by_task(trajectories: list[Trajectory]) -> defaultdict:
    """Returns task -> its trajectories."""
    groups = defaultdict(list)
    for t in trajectories:
        groups[t.task].append(t)
    return groups


def usable(trajectories: list[Trajectory], dropped: Counter) -> list[Trajectory]:
    """Returns the trajectories that can train, and counts the others in `dropped`. An episode that
    filled the context has no final reward, so it makes no pair, not as the rejected side either
    [ours]."""
    kept = []
    for t in trajectories:
        if t.ended == "context" or not any(t.action_mask):
            dropped["too long"] += 1
        else:
            kept.append(t)
    return kept


def train_preferences(
    run: Run,
    out: Path,
    agent: Path,
    reference: Path,
    pairs: Path,
    experts: Path,
    others: list[Path],
    name: str,
    role: str,
    i: int,
) -> dict:
    """Trains an agent on its pairs: one with D_tgt by weighted DPO + SFT, Eq. (9); others by DPO
    alone, Eq. (7).

    Args:
        run: The run.
        out: The folder of the trained agent.
        agent: The folder of the agent as the iteration begins.
        reference: The folder of pi_ref.
        pairs: A file of `make_pairs`.
        experts: The file of experts.
        others: The files of the other trajectories that pairs name.
        name: What the agent is called.
        role: Its role, see `Agent`.
        i: The iteration.

    Returns:
        The number of steps, and the losses of the first and the last with their terms.
    """
    s = run.settings
    dropped = Counter()
    groups = preference_groups(read_pairs(pairs, [experts, *others]), read(experts), s,
                               run.encoder, dropped)
    counts = dict(dropped=dropped) if dropped else {}
    if not groups:
        return run.keep(agent, out) | counts

    # log pi_ref(e|u) of all trajectories. One model is in memory at a time.
    model = run.load(reference)
    if s.reference == "none":  # pi_ref is 1
        for t in dpo.trajectories_of(groups):
            t.reference = 0.0
    else:
        dpo.add_references(model, groups, run.log_probs, run.fits)
    if reference != agent:
        del model
        model = run.load(agent)

    # App. B gives ranges of both. ETO's scripts take the first value in iteration 1. Eq. (7) has no
    # lambdas.
    lr = s.dpo_lr if i == 1 else s.dpo_lr_later
    beta = s.beta if i == 1 else s.beta_later
    lambda_dpo, lambda_sft = s.lambda_dpo, s.lambda_sft
    if role != "D_tgt":
        lambda_dpo, lambda_sft = 1.0, 0.0
    loss = partial(dpo.preference_loss, beta=beta, lambda_dpo=lambda_dpo, lambda_sft=lambda_sft,
                   log_prob=s.log_prob)
    size = dpo.pair_count if s.denominator == "pairs" else dpo.pair_weight
    steps = preference_steps(groups, name, role, i, s)
    rates = dpo.learning_rates(len(steps), lr, s.dpo_warmup)
    return run.fit(model, out, steps, rates, loss, size) | counts


def preference_groups(
    pairs: list[Pair],
    experts: list[Trajectory],
    s: Settings,
    encoder,
    dropped: Counter,
) -> list[Group]:
    """Puts the pairs of a task, and the trajectories that they compare, into a group.

    Args:
        pairs: The pairs.
        experts: The experts, whose lengths say how long a rejected trajectory may be.
        s: The settings, which say what is left out of rejected trajectories.
        encoder: Of the trajectories.
        dropped: Gets the number of pairs whose sides are equal once the rejected one is truncated.

    Returns:
        A group for each task that has pairs. A trajectory is in it once, in however many pairs it
        is; twice if it is whole as the chosen one, and cut as the rejected one.
    """
    replies = {expert.task: expert.steps for expert in experts}
    groups = defaultdict(Group)  # task -> group
    for pair in pairs:
        task = pair.chosen.task
        rejected = pair.rejected
        # As in ETO, not in the paper: of a rejected trajectory that wanders on long after the
        # expert was done, its first replies stand for the whole.
        if s.cut_turns >= 0:
            rejected = encoder.cut(rejected, replies[task] + s.cut_turns)
        if same_text(pair.chosen, rejected):
            dropped["equal once truncated"] += 1
            continue
        if s.rejected_ends == "leave out":
            rejected = encoder.without_ends(rejected)

        group = groups[task]
        group.pairs.append(Pair(pair.kind, group.add(pair.chosen), group.add(rejected),
                                pair.weight, pair.sft_weight))
    return list(groups.values())


def preference_steps(
    groups: list[Group],
    name: str,
    role: str,
    i: int,
    s: Settings,
) -> list[list[Group]]:
    """The batches of a phase, one a step: as many as some passes over the pairs make, or, for a
    comparison of targets at equal steps, so many."""
    rng = random.Random(seed_of(s.seed, "dpo", name, i))
    if role != "D_tgt" or s.dpo_steps == 0:
        return dpo.batches(groups, s.dpo_batch, rng, s.dpo_epochs)
    return dpo.batches(groups, s.dpo_batch, rng, epochs=s.dpo_steps)[:s.dpo_steps]


# ----------------------------------------------------------------------------------- the pairs


def d_tgt(
    expert: Trajectory,
    own: list[Trajectory],
    others: list[Trajectory],
    s: Settings,
    dropped: Counter,
) -> list[Pair]:
    """Makes the pairs of one task that the target learns from, Eq. (8), weighted as in Section 4.3.

    Args:
        expert: The task's expert.
        own: All rollouts of the agent that learns, of this iteration; the paper's e_tgt.
        others: All rollouts of the other agents; the paper's e_fail.
        s: The settings.
        dropped: Gets, by reason, the number of comparisons that make no pair.
    """
    comparisons = len(own) * len(others)  # of a rollout of the target with one of another agent
    own = usable(own, dropped)
    others = usable(others, dropped)

    # Eq. (8): D_tgt = {(e_exp, e_tgt), (e_exp, e_fail)} u F_tgt x F_fail, the first one chosen.
    pairs = against_expert(expert, own + others, s, dropped)

    # Section 4.3: "the total weight of all expert-prediction pairs generated for a given
    # instruction sums to 1.0"; in the SFT term, too [ours]. A failure that an agent played is never
    # imitated, "to avoid introducing misleading supervision from incorrect trajectories", not where
    # it earned more than its expert either.
    for pair in pairs:
        if s.pair_weights == "instruction":
            pair.weight = 1.0 / len(pairs)
        if pair.chosen is expert or not pair.chosen.is_failure:
            pair.sft_weight = pair.weight

    # Section 4.3: "For failure-failure pairs, we apply DPO exclusively by setting lambda_SFT = 0".
    # The weights are to keep expert pairs "from dominating the training signal, while ensuring that
    # failure pairs receive full emphasis": in the paper, where each agent plays a task once, the
    # expert pairs of a task weigh 1 together, and its failure pair weighs 1. With R rollouts per
    # agent there are up to R x R failure pairs, so each weighs 1 / (R x R) [ours]. The balance of
    # the two kinds of pairs, and of the SFT term, is then that of the paper, whatever R is.
    # Eq. (8) always chooses the target's failure; we choose by reward, as Eq. (6) does [ours].
    if s.d_tgt_failures == "none":
        return pairs
    for pair in ordered_failures(itertools.product(own, others), dropped):
        if s.failure_pair_weights == "rollouts":
            pair.weight = 1.0 / comparisons
        if s.d_tgt_failures == "hard" and pair.chosen.reward < s.hard_threshold:
            dropped["no hard failure"] += 1
        else:
            pairs.append(pair)
    return pairs


def against_expert(
    expert: Trajectory,
    trajectories: list[Trajectory],
    s: Settings,
    dropped: Counter,
) -> list[Pair]:
    """Pairs each trajectory of a task with its expert. As in ETO's construct_preference, who earns
    more is chosen, also over the expert, and equals make no pair; Eq. (8) has no condition."""
    pairs = []
    for t in trajectories:
        if equal(expert.reward, t.reward):
            dropped["as good as the expert"] += 1
        elif same_text(expert, t):
            dropped["the same text"] += 1
        elif better(expert.reward, t.reward):
            pairs.append(Pair(f"expert>{t.agent}", expert, t))
        elif s.expert_beaten == "swap":
            pairs.append(Pair(f"{t.agent}>expert", t, expert))
        else:
            dropped["better than the expert"] += 1
    return pairs


def d_fail(
    own: list[Trajectory],
    others: list[Trajectory],
    s: Settings,
    dropped: Counter,
) -> list[Pair]:
    """Makes the pairs of one task that the failure agent learns from, Eq. (6): of two failures the
    better one is chosen. Arguments are those of `d_tgt`; `own` is the paper's e_fail."""
    if s.d_fail == "none":  # the failure agent stays as it is
        return []
    own = usable(own, dropped)
    others = usable(others, dropped)
    # Eq. (6): D_fail = {e_w > e_l in F_tgt x F_fail}. By default it also has the pairs within one
    # agent, since it is to learn from failures "from both the target and itself" (Section 4.2).
    # With one rollout of a task, as in the paper, there are none.
    candidates = itertools.combinations(others + own, 2)
    if s.d_fail == "cross":
        candidates = itertools.product(others, own)
    return list(ordered_failures(candidates, dropped))


def ordered_failures(candidates: Iterable[tuple], dropped: Counter) -> Iterator[Pair]:
    """Yields a pair of those candidates that are two failures with different rewards."""
    for a, b in candidates:
        if not a.is_failure or not b.is_failure:
            dropped["not both failures"] += 1
        elif equal(a.reward, b.reward):
            dropped["equal failures"] += 1
        elif same_text(a, b):
            dropped["the same text"] += 1
        elif better(a.reward, b.reward):
            yield Pair("failure>failure", a, b)
        else:
            yield Pair("failure>failure", b, a)


def same_text(a: Trajectory, b: Trajectory) -> bool:
    """Whether nothing tells one from the other but what it earned, which no policy can learn."""
    return a.ids == b.ids


# ------------------------------------------------------------------------------------ settings
# The comment above a setting is its help; in brackets is the source of its default: the paper; ETO,
# the scripts of Song et al.; or ours. Its type says which values it may have. A run goes on with
# another value of a Free setting, on which nothing but rounding depends, and with a larger one of a
# Growing one; another value of any other setting is refused.


@dataclass(frozen=True)
class Data:
    """What is trained, on which tasks, and how long an episode may be"""
    # The environment in which agents play [ours]
    env: Literal[ENVIRONMENTS] = "webshop"
    # Which agents are trained, and how [the paper]
    method: str = "coevolve"
    # The model that training starts from: tiny, which is shipped, or a causal language model with a
    # chat template, by its folder or its name on the hub [ours]
    model: str = "tiny"
    # The seed of all that is random in a run [ours]
    seed: types.Whole = 0
    # The folder that gets all that a run makes [runs/ENV-METHOD-sSEED]
    out: types.Free[Optional[str]] = None
    # RUN@OUTPUT: begin with what that run made before this output, under today's settings [none]
    branch: types.Free[Optional[str]] = None
    # The same path, cut to about a minute with tiny [ours]
    quick: bool = False
    # A tracker of accelerate that gets all numbers, such as tensorboard or wandb [none]
    track: types.Free[Optional[str]] = None
    # A file of experts: ETO's or IPR's list, or trajectories of a run, of which the best one of a
    # task is its expert [scripted experts]
    experts: types.OldFile = None
    # Experts with this reward or less are left out, unless they solve their task [App. A]
    expert_min_reward: float = 0.7
    # How many training tasks are used; 0 is all [Table 1]
    train_tasks: types.Whole = 0
    # How many tasks of each evaluated split are used; 0 is all [Table 1]
    eval_tasks: types.Whole = 0
    # The splits that agents are evaluated on; validation is for the choice of settings, and of an
    # iteration [Table 1]
    eval_splits: Literal["test", "validation", "all"] = "test"
    # How much an observation says; short, for small models, leaves out what is repeated [ours]
    view: Literal["full", "short"] = "full"
    # The tokens that a trajectory may have; an episode ends there [ours]
    max_tokens: types.Count = 4096
    # The tokens that a reply may have [ours]
    max_new_tokens: types.Count = 256


@dataclass(frozen=True)
class Sft:
    """Imitation of the experts (Section 4.1), and what all training has in common"""
    # Passes over the experts [App. B]
    sft_epochs: types.Count = 3
    # Experts in a step of SFT [App. B]
    sft_batch: types.Count = 48
    # The highest learning rate of SFT [App. B]
    sft_lr: types.Rate = 1e-5
    # The share of the steps of SFT in which the rate rises; then it falls as a cosine [App. B]
    sft_warmup: types.Share = 0.03
    # The weight decay of AdamW, in all training [ETO]
    weight_decay: types.Weight = 0.0
    # The norm that gradients are clipped to, in all training [transformers' default]
    max_grad_norm: types.Rate = 1.0


@dataclass(frozen=True)
class Common(MachineSettings, Sft, Data):
    """What every method reads"""


@dataclass(frozen=True)
class Preferences:
    """Exploration and preference training (Sections 4.2 and 4.3)"""
    # The number K of iterations of exploration and preference training [App. B; 5 on InterCodeSQL]
    iterations: types.Growing[types.Count] = 3
    # How often an agent plays a task, in each iteration if there are some [Section 5.2.1]
    rollouts: types.Count = 1
    # The temperature of rollouts; what a run trains is evaluated greedily [ours; ETO: 0]
    temperature: types.Temperature = 0.7
    # Passes over the pairs of an iteration [App. B]
    dpo_epochs: types.Count = 3
    # Steps of the target in an iteration; 0 is as many as --dpo-epochs make [ours]
    dpo_steps: types.Whole = 0
    # Pairs in a step; those of a task stay together, so that each trajectory is read once [App. B]
    dpo_batch: types.Count = 32
    # The learning rate of preference training in iteration 1 [App. B; ETO]
    dpo_lr: types.Rate = 1e-6
    # The learning rate of preference training in later iterations [App. B; ETO]
    dpo_lr_later: types.Rate = 5e-7
    # The share of an iteration's steps in which the rate rises; then it is constant [ETO]
    dpo_warmup: types.Share = 0.1
    # Beta of DPO, Eq. (7), in iteration 1 [App. B; ETO]
    beta: types.Rate = 0.1
    # Beta of DPO, Eq. (7), in later iterations [App. B; ETO]
    beta_later: types.Rate = 0.5
    # The weight of the DPO term of Eq. (9) [Section 4.3]
    lambda_dpo: types.Weight = 1.0
    # The weight of the SFT term of Eq. (9); ETO has none [Section 4.3; ETO: Section 5.1]
    lambda_sft: types.Weight = 0.1
    # How the DPO term makes log pi of a trajectory of those of its action tokens [Eq. 2, 5, 7]
    log_prob: Literal["sum", "mean"] = "sum"
    # The reference pi_ref: the agent as the iteration begins, the agent after SFT, or none [ETO]
    reference: Literal["phase", "sft", "none"] = "phase"
    # Denominator of the batch loss, SFT term included: the sum of the pairs' weights, with which
    # the size of the SFT term does not depend on --rollouts, or the number of pairs [ours]
    denominator: Literal["weights", "pairs"] = "weights"
    # What becomes of a pair whose expert has the lower reward: it is swapped, or dropped [ETO]
    expert_beaten: Literal["swap", "drop"] = "swap"
    # Whether the pairs of a task with the expert weigh 1 together, or each, as in ETO [Section 4.3;
    # ETO: Section 5.1]
    pair_weights: Literal["instruction", "none"] = "instruction"
    # Weight of a pair of two failures in D_tgt: "rollouts" is 1 / (the target's rollouts of the
    # task x the other agents' rollouts), which is 1 with one rollout each; "none" is 1 [ours]
    failure_pair_weights: Literal["rollouts", "none"] = "rollouts"
    # Which pairs of two failures D_tgt has: cross, all of one by the target and one by another
    # agent; hard, those of them whose better one has --hard-threshold at least; or none [Eq. 8]
    d_tgt_failures: Literal["cross", "hard", "none"] = "cross"
    # The reward from which on a failure is hard [Section 5.2.1]
    hard_threshold: types.Weight = 0.6
    # The replies that a rejected trajectory may have beyond the expert's number, before it is cut;
    # below 0 it never is [ETO]
    cut_turns: int = 5
    # Whether log pi of a rejected trajectory counts ends of turns and of the episode [Eq. 7]
    rejected_ends: Literal["count", "leave out"] = "count"


@dataclass(frozen=True)
class FailureAgent:
    """The failure agent (Section 4.2)"""
    # The pairs of failures in D_fail: all; cross, which are the literal Eq. (6), of the target with
    # the failure agent; buffer, of all iterations so far; none, so that it never learns
    # [Section 4.2]
    d_fail: Literal["all", "cross", "buffer", "none"] = "all"
    # When the failure agent plays the rollouts that the target learns from: before it learns, or
    # after, for which it plays twice in each iteration [before: the paper's summary; after: its
    # introduction]
    failure_plays: Literal["before", "after"] = "before"
    # The folder of a model from which the failure agent starts, in place of SFT [its own SFT]
    failure_from: types.OldFile = None


@dataclass(frozen=True)
class Settings(FailureAgent, Preferences, Common, types.Stated):
    """Every setting of a run"""
    # What --help lists; --help all lists the rest.
    essential = ("env", "method", "model", "seed", "out", "branch", "quick", "experts",
                 "train_tasks", "eval_tasks", "eval_splits", "max_tokens", "max_new_tokens",
                 "sft_epochs", "sft_lr", "iterations", "rollouts", "temperature", "dpo_epochs",
                 "dpo_lr", "beta", "lambda_sft", "pair_weights", "d_tgt_failures", "d_fail")
    # What replaces defaults, by the name of a model, a protocol ("eto") or "--method NAME"; the
    # last that applies wins. Environments have more.
    presets = {"tiny": dict(view="short", sft_batch=16, dpo_batch=16, beta_later=0.1,
                            lambda_sft=0.5),
               "eto": dict(max_new_tokens=512, temperature=0.0, sft_lr=2e-5),
               "--method eto": dict(lambda_sft=0.0, pair_weights="none"),  # DPO alone
               "quick": dict(train_tasks=120, eval_tasks=40, iterations=1, sft_epochs=1,
                             dpo_epochs=1),
               "quick tiny": dict(train_tasks=60, eval_tasks=60, rollouts=2, iterations=2,
                                  dpo_epochs=2, sft_epochs=3)}

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [(self.max_new_tokens >= self.max_tokens, f"--max-new-tokens {self.max_new_tokens}",
                 f"must be below --max-tokens {self.max_tokens}"),
                (self.rollouts > 1 and self.temperature == 0, "--temperature 0",
                 "all rollouts of a task would be the same; raise it")]


METHODS = {
    "coevolve": types.Method(
        coevolve, (Common, Preferences, FailureAgent),
        "a target learns from experts, and from a failure agent that learns too"),
    "eto": types.Method(
        coevolve, (Common, Preferences),
        "the target alone, by DPO: experts over its failures (Song et al. 2024)"),
    "positive": types.Method(
        coevolve, (Common, Preferences),
        "the control: a second agent as ETO's in place of the failure agent"),
    "sft": types.Method(coevolve, (Common,), "imitation of the experts alone"),
}


if __name__ == "__main__":
    main(sys.argv[1:], Settings, Run, METHODS, "python coevolve.py")
