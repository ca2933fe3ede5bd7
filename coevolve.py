"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

Read this file from the top, then `dpo.py` (tokens in, gradients or tokens out) and `envs.py` (text
in, text out: the episode).

    task        the paper's instruction u
    episode     one play of a task; its record is a trajectory e
    expert      the trajectory of a task that agents imitate
    rollout     the number of an episode among those of one agent, task and iteration
    agent       a model that plays and learns; its role says from which pairs
    phase       a function that reads files of a run and writes one, to be looked at, or edited
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, Optional

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors import SafetensorError
from tqdm import tqdm

import dpo
import envs
from common import files, machine
from common.files import hashed, read_json, read_jsonl, seed_of, write_jsonl
from common.settings import (
    FREE,
    Count,
    Free,
    Growing,
    Instead,
    Method,
    OldFile,
    Rate,
    Share,
    Stated,
    Temperature,
    Weight,
    Whole,
    check_same,
    has_mark,
    noting,
    parse,
)
from dpo import Group, Pair, Trajectory

# ------------------------------------------------------------------------------------ the loop


@dataclass(frozen=True)
class Agent:
    """One of the agents of a method. What it learns is up to its role, whatever its name."""
    name: str  # in files and tables
    # What it learns from: D_tgt of Eq. (8), by Eq. (9); D_fail of Eq. (6), by Eq. (7); or its own
    # trajectories against the expert's, by Eq. (7), as in ETO.
    role: Literal["D_tgt", "D_fail", "own"]


TARGET = Agent("target", "D_tgt")
AGENTS = {"sft": [TARGET],
          # "a DPO-only baseline" [Section 5.1]: where nobody else plays, D_tgt is ETO's pairs, and
          # the method's preset takes Section 4.3's weights and SFT term away.
          "eto": [TARGET],
          "coevolve": [TARGET, Agent("failure", "D_fail")],
          # The control, "trained in the same manner as ETO" [Section 5.4].
          "positive": [TARGET, Agent("positive", "own")]}


def coevolve(run: Run) -> None:
    """The method, Sections 4.1 to 4.3. ETO is this loop with the target alone, SFT its beginning.

    once(output, phase, inputs ..., parameters ...) does a phase, unless its output was made from
    these before, and returns the output's path."""
    s = run.settings
    once = run.once
    agents = AGENTS[s.method]

    # All agents begin by imitation of the experts, Eq. (3)-(5).
    experts = experts_of(run)
    models = imitation(run, experts)  # name of an agent -> its folder
    after_sft = dict(models)
    evaluations(run, models, 0)
    if s.method == "sft":
        return

    earlier = []  # files of trajectories of earlier iterations
    for i in range(1, s.iterations + 1):
        # All agents play every task that has an expert.
        played = {}
        for agent in agents:
            played[agent.name] = once(f"iter{i}/{agent.name}.jsonl", explore,
                                      models[agent.name], experts, name=agent.name, i=i)

        # Each learns from its pairs, Eq. (6) and (7) or (8) and (9); the target is the last, which
        # makes no difference, since all have played before.
        for agent in reversed(agents):
            pairs = once(f"iter{i}/pairs-{agent.name}.jsonl", make_pairs, experts, played, earlier,
                         trains=agent.name, role=agent.role)
            start = dict(agent=models[agent.name], after_sft=after_sft[agent.name])
            trajectories = dict(experts=experts, others=[*played.values(), *earlier])
            models[agent.name] = once(f"iter{i}/{agent.name}-agent", train_preferences, start,
                                      pairs, trajectories, name=agent.name, role=agent.role, i=i)

        evaluations(run, models, i)
        if s.d_fail == "buffer":
            earlier += played.values()


def experts_of(run: Run) -> Path:
    """The file of the run's experts."""
    given = run.settings.experts
    if given:
        return run.once("experts.jsonl", collect_experts, Path(given))
    return run.once("experts.jsonl", collect_experts)


def imitation(run: Run, experts: Path) -> dict[str, Path]:
    """Trains each agent on the experts, in an order of its own. name -> its folder."""
    s = run.settings
    models = {}
    for agent in AGENTS[s.method]:
        if agent.role == "D_fail" and s.failure_from:
            models[agent.name] = Path(s.failure_from)
        else:
            models[agent.name] = run.once(f"sft-{agent.name}", train_sft, run.base, experts,
                                          name=agent.name)

    trained = [name for name in models if f"sft-{name}" in run.done]
    if len(trained) > 1 and len(read_jsonl(experts)) <= s.sft_batch:
        say(run, f"{' and '.join(trained)} are one model after SFT, but for rounding: all experts "
                 f"fit one batch, so that their order changes nothing; lower --sft-batch "
                 f"{s.sft_batch}")
    return models


def evaluations(run: Run, models: dict[str, Path], i: int) -> None:
    """Evaluates all agents on all evaluated splits."""
    for name, model in models.items():
        for split in run.splits:
            run.once(f"eval-{i}-{name}-{split}.jsonl", evaluate, model, name=name, i=i,
                     split=split)


# ---------------------------------------------------------------------------------- the phases
# phase(run, out, inputs ..., parameters ...) writes `out`, a temporary path, and returns numbers
# that are recorded. Every rank runs it, and one of them writes.


def collect_experts(run: Run, out: Path, file: Path | None = None) -> dict:
    """Collects an expert for each training task, from a file or from the scripted expert. Where a
    file has several of a task, as an agent's own trajectories are, the best is its expert."""
    s = run.settings
    env = run.make_env()
    evaluated = set()  # what the evaluated tasks are, since a task may have several ids
    for split in splits_of(env, s):
        evaluated |= {repr(env.find(task)) for task in env.tasks(split)}

    opening = len(env.opening(""))  # turns before an expert's first reply
    kept = []
    dropped = Counter()
    for task, messages, reward in envs.experts(env, file, s.train_tasks, dropped):
        ids, mask = run.encoder.encode(messages, opening)
        if repr(env.find(task)) in evaluated:
            dropped["evaluated too"] += 1
        elif not may_be_expert(reward, s.expert_min_reward, env.success):
            dropped["reward"] += 1
        elif len(ids) > s.max_tokens:
            dropped["too long"] += 1
        else:
            replies = sum(turn["role"] == "assistant" for turn in messages[opening:])
            kept.append(Trajectory(task, "expert", messages=messages, ids=ids, action_mask=mask,
                                   reward=reward, steps=replies, ended="done"))
    env.close()
    if not kept:
        raise envs.Refused(f"no expert is left: {dict(dropped)}; lower what dropped it")

    best = best_of_tasks(kept)
    if len(best) < len(kept):
        dropped["not the best of its task"] = len(kept) - len(best)
    say_what_cannot_be_written(run, best)
    write(run, out, best)
    return dict(experts=len(best), dropped=dropped)


def may_be_expert(reward: float, least: float, success: float) -> bool:
    """Whether a trajectory of this reward is imitated: it has more than the least, or solves its
    task."""
    return reward > least or not better(success, reward)


def best_of_tasks(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Of each task the trajectory with the most reward, of equal ones the first."""
    best = {}  # task -> trajectory
    for t in trajectories:
        if t.task not in best or better(t.reward, best[t.task].reward):
            best[t.task] = t
    return list(best.values())


def splits_of(env: envs.World, s: Settings) -> tuple[str, ...]:
    """The splits that agents are evaluated on."""
    return {"test": env.test_splits, "validation": ("validation",),
            "all": ("validation", *env.test_splits)}[s.eval_splits]


def say_what_cannot_be_written(run: Run, experts: list[Trajectory]) -> None:
    """Says which replies of experts a tokenizer changes. No agent that writes by it can do what
    they did."""
    changed = []  # (reply, what an environment would get)
    for expert in experts:
        for turn in expert.messages:
            reply = run.encoder.plain(turn["content"])
            if turn["role"] == "assistant" and run.encoder.read_back(reply) != reply:
                changed.append((reply, run.encoder.read_back(reply)))
    if changed:
        reply, back = changed[0]
        say(run, f"{run.name}: the tokenizer changes {len(changed)} replies of experts, so that no "
                 f"agent can write them; the first, {reply!r}, becomes {back!r}; use a --model "
                 "whose tokenizer keeps such texts")


def train_sft(run: Run, out: Path, base: Path, experts: Path, name: str) -> dict:
    """Trains a model on the experts' action tokens, Eq. (3)-(5). name: whose order they have."""
    steps = sft_steps(read(experts), name, run.settings)
    return run.fit(run.load(base), out, steps, sft_objective(run.settings))


def sft_steps(experts: list[Trajectory], name: str, s: Settings) -> list[list[Group]]:
    """The batches of SFT, one a step: some passes over the experts, in an order of the name's."""
    rng = random.Random(seed_of(s.seed, "sft", name))
    groups = [Group([expert]) for expert in experts]
    steps = []
    for _ in range(s.sft_epochs):
        steps += dpo.batches(groups, s.sft_batch, "instructions", rng)
    return steps


def sft_objective(s: Settings) -> dpo.Objective:
    """The loss of a batch is its mean over action tokens, as in ETO's trainer."""
    return dpo.Objective(dpo.sft_loss, action_count, s.sft_lr, s.sft_warmup, "cosine")


def action_count(group: Group) -> int:
    return sum(t.action_count for t in group.trajectories)


def explore(run: Run, out: Path, agent: Path, experts: Path, name: str, i: int) -> dict:
    """Lets an agent play the task of every expert, some rollouts each, by sampling."""
    s = run.settings
    begun = []
    for expert in read(experts):
        for rollout in range(s.rollouts):
            seed = seed_of(s.seed, name, i, expert.task, rollout)
            begun.append(Trajectory(expert.task, name, i, rollout, seed))
    trajectories = run.play(agent, begun, s.temperature)
    write(run, out, trajectories)
    return scores(trajectories, run)


def evaluate(run: Run, out: Path, agent: Path, name: str, i: int, split: str) -> dict:
    """Lets an agent play the tasks of a split, greedily."""
    tasks = run.env.tasks(split)
    if run.settings.eval_tasks:
        tasks = tasks[:run.settings.eval_tasks]
    trajectories = run.play(agent, [Trajectory(task, name, i) for task in tasks], 0.0)
    write(run, out, trajectories)
    return scores(trajectories, run)


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
    success = run.env.success
    dropped = Counter()
    own = by_task(read(played[trains]), dropped)
    others = by_task(read(*[played[name] for name in played if name != trains]), dropped)
    if role == "D_fail" and s.d_fail == "buffer":
        for task, trajectories in by_task(read(*earlier), Counter()).items():
            own[task] += trajectories  # those that were dropped were counted then

    rows = []
    for expert in read(experts):
        task = expert.task
        if role == "D_tgt":
            pairs = d_tgt(expert, own[task], others[task], s, dropped, success)
        elif role == "D_fail":
            pairs = d_fail(own[task], others[task], s, dropped, success)
        else:
            pairs = d_tgt(expert, own[task], [], Instead(s, pair_weights="none"), dropped, success)
        rows += [dict(task=task, **pair) for pair in pairs]

    write(run, out, rows)
    if dropped and not rows:
        say(run, f"{run.name}: no pairs, since {dict(dropped)}; raise --temperature or --rollouts")
    return dict(pairs=Counter(row["kind"] for row in rows), dropped=dropped)


def by_task(trajectories: list[Trajectory], dropped: Counter) -> dict[str, list[Trajectory]]:
    """task -> its trajectories that can train; the others are counted in `dropped`."""
    found = defaultdict(list)
    for t in trajectories:
        if t.ended == "context" or not any(t.action_mask):
            dropped["too long"] += 1
        else:
            found[t.task].append(t)
    return found


def train_preferences(
    run: Run,
    out: Path,
    start: dict[str, Path],
    pairs: Path,
    trajectories: dict,
    name: str,
    role: str,
    i: int,
) -> dict:
    """Trains an agent on its pairs: one with D_tgt by weighted DPO + SFT, Eq. (9); others by DPO
    alone, Eq. (7).

    Args:
        run: The run.
        out: The folder of the trained agent.
        start: The folders of the `agent` as the iteration begins, and of the same one `after_sft`.
        pairs: A file of `make_pairs`.
        trajectories: The files of trajectories that pairs name: `experts`, and a list of `others`.
        name: What the agent is called.
        role: Its role, see `Agent`.
        i: The iteration.

    Returns:
        The number of steps, and the losses of the first and the last.
    """
    s = run.settings
    groups = preference_groups(read_jsonl(pairs), read(trajectories["experts"]),
                               read(*trajectories["others"]), s, run.encoder)
    if not groups:  # the agent stays as it is; the log in its folder is of what it learned before
        if run.main:
            shutil.copytree(start["agent"], out, ignore=shutil.ignore_patterns("*.jsonl"))
        return dict(steps=0)
    steps = preference_steps(groups, name, role, i, s)

    # log pi_ref(e|u) of all trajectories. One model is in memory at a time.
    reference = start["after_sft"] if s.reference == "sft" else start["agent"]
    model = run.load(reference)
    if s.reference != "none":  # else log pi_ref is 0
        dpo.add_references(model, groups, run.log_probs, run.tokens_per_forward * run.ranks)
    if reference != start["agent"]:
        del model
        model = run.load(start["agent"])

    # The first iteration has a rate and a beta of its own. Eq. (7) has no lambdas.
    lr = s.dpo_lr if i == 1 else s.dpo_lr_later
    beta = s.beta if i == 1 else s.beta_later
    terms = Instead(s, beta=beta)
    if role != "D_tgt":
        terms = Instead(s, beta=beta, lambda_dpo=1.0, lambda_sft=0.0)
    loss = partial(dpo.preference_loss, s=terms)
    divisor = pair_count if s.normalise == "pairs" else pair_weight
    return run.fit(model, out, steps, dpo.Objective(loss, divisor, lr, s.dpo_warmup))


def preference_steps(
    groups: list[Group],
    name: str,
    role: str,
    i: int,
    s: Settings,
) -> list[list[Group]]:
    """The batches of a phase, one a step: as many as some passes over the pairs make, or, of an
    agent with D_tgt, so many steps."""
    rng = random.Random(seed_of(s.seed, "dpo", name, i))
    steps = []
    if role == "D_tgt" and s.dpo_steps:
        while len(steps) < s.dpo_steps:
            steps += dpo.batches(groups, s.dpo_batch, s.batch_unit, rng)
        return steps[:s.dpo_steps]

    epochs = s.dpo_epochs
    if role == "D_fail" and s.failure_epochs:
        epochs = s.failure_epochs
    for _ in range(epochs):
        steps += dpo.batches(groups, s.dpo_batch, s.batch_unit, rng)
    return steps


def pair_count(group: Group) -> int:
    return len(group.pairs)


def pair_weight(group: Group) -> float:
    return sum(pair.weight for pair in group.pairs)


# ----------------------------------------------------------------------------------- the pairs


def d_tgt(
    expert: Trajectory,
    own: list[Trajectory],
    others: list[Trajectory],
    s: Settings,
    dropped: Counter,
    success: float = 1.0,
) -> list[dict]:
    """Makes the pairs of one task that the target learns from, Eq. (8), weighted as in Section 4.3.

    Args:
        expert: The task's expert.
        own: The trajectories of the agent that learns, of this iteration; the paper's e_tgt.
        others: Those of the other agents; the paper's e_fail.
        s: The settings.
        dropped: Gets, by reason, the number of comparisons that make no pair.
        success: The reward from which on a trajectory is no failure.

    Returns:
        Rows of a file of pairs, without the task.
    """
    # Eq. (8): D_tgt = {(e_exp, e_tgt), (e_exp, e_fail)} u F_tgt x F_fail, the first one chosen.
    # Eq. (8) has no condition on rewards. As in ETO's construct_preference, who earns more is
    # chosen, also over an expert, and equals make no pair.
    pairs = []
    for t in own + others:
        if better(expert.reward, t.reward):
            pairs.append((f"expert>{t.agent}", expert, t))
        elif not better(t.reward, expert.reward):
            dropped["as good as the expert"] += 1
        elif s.expert_beaten == "swap":
            pairs.append((f"{t.agent}>expert", t, expert))
        else:
            dropped["better than the expert"] += 1

    # Section 4.3: "the total weight of all expert-prediction pairs generated for a given
    # instruction sums to 1.0"; in the SFT term, too [ours]. A failure is not imitated, "to avoid
    # introducing misleading supervision from incorrect trajectories", also if it beat its expert.
    weight = 1.0
    if pairs and s.pair_weights == "instruction":
        weight = 1.0 / len(pairs)
    rows = []
    for kind, chosen, rejected in pairs:
        is_failure = chosen is not expert and better(success, chosen.reward)
        rows.append(pair_row(kind, chosen, rejected, weight, 0.0 if is_failure else weight))

    # "For failure-failure pairs, we apply DPO exclusively by setting lambda_SFT = 0": they weigh 1
    # each. Who is chosen goes by reward, as in Eq. (6) [ours]; in Eq. (8) it is the target's.
    if s.d_tgt_failures == "none":
        return rows
    for chosen, rejected in ordered_failures(itertools.product(own, others), dropped, success):
        if s.d_tgt_failures == "hard" and chosen.reward < s.hard_threshold:
            dropped["no hard failure"] += 1
        else:
            rows.append(pair_row("failure>failure", chosen, rejected, 1.0, sft_weight=0.0))
    return rows


def d_fail(
    own: list[Trajectory],
    others: list[Trajectory],
    s: Settings,
    dropped: Counter,
    success: float = 1.0,
) -> list[dict]:
    """Makes the pairs of one task that the failure agent learns from, Eq. (6): of two failures the
    better one is chosen. Arguments and result are those of `d_tgt`; `own` is the paper's e_fail."""
    if s.d_fail == "none":  # the failure agent stays as it is
        return []
    # Eq. (6): D_fail = {e_w > e_l in F_tgt x F_fail}. By default it also has the pairs within one
    # agent, since it is to learn from failures "from both the target and itself" (Section 4.2).
    if s.d_fail == "cross":
        candidates = itertools.product(others, own)
    else:
        candidates = itertools.combinations(others + own, 2)
    rows = []
    for chosen, rejected in ordered_failures(candidates, dropped, success):
        rows.append(pair_row("failure>failure", chosen, rejected, 1.0, sft_weight=0.0))
    return rows


def ordered_failures(
    candidates: Iterable[tuple],
    dropped: Counter,
    success: float,
) -> Iterator[tuple]:
    """Yields (better, worse) of those candidates that are two failures with different rewards."""
    for a, b in candidates:
        if not better(success, a.reward) or not better(success, b.reward):
            dropped["not both failures"] += 1
        elif better(a.reward, b.reward):
            yield a, b
        elif better(b.reward, a.reward):
            yield b, a
        else:
            dropped["equal failures"] += 1


def better(reward: float, other: float) -> bool:
    """Whether a reward is above another by more than rounding."""
    return reward - other > 1e-9


def pair_row(
    kind: str,
    chosen: Trajectory,
    rejected: Trajectory,
    weight: float,
    sft_weight: float,
) -> dict:
    """A row of a file of pairs. It names trajectories, which are in files of their own."""
    return dict(kind=kind, chosen=side_of_pair(chosen), rejected=side_of_pair(rejected),
                weight=weight, sft_weight=sft_weight)


def side_of_pair(t: Trajectory) -> dict:
    return dict(agent=t.agent, iteration=t.iteration, rollout=t.rollout, reward=t.reward)


def preference_groups(
    rows: list[dict],
    experts: list[Trajectory],
    others: list[Trajectory],
    s: Settings,
    encoder: dpo.Encoder,
) -> list[Group]:
    """Puts the pairs of a task, and the trajectories that they name, into a group.

    Args:
        rows: The rows of a file of pairs.
        experts: The experts, whose lengths say how long a rejected trajectory may be.
        others: The other trajectories that rows may name.
        s: The settings, which say what is left out of rejected trajectories.
        encoder: Of the trajectories.

    Returns:
        A group for each task that has pairs. A trajectory is in it once, in however many pairs it
        is; twice if it is whole as the chosen one, and cut as the rejected one.
    """
    known = by_name(experts + others)
    replies = {expert.task: expert.steps for expert in experts}
    groups = {}  # task -> group
    for row in rows:
        task = row["task"]
        chosen = trajectory_of(known, task, row["chosen"])
        rejected = trajectory_of(known, task, row["rejected"])
        # A rejected trajectory that wanders on long after the expert was done teaches little.
        if s.cut_turns >= 0 and task in replies:
            rejected = cut(rejected, replies[task] + s.cut_turns, encoder)
        if s.rejected_ends == "leave out":
            rejected = without_ends(rejected, encoder)

        group = groups.setdefault(task, Group([]))
        for t in [chosen, rejected]:
            if t not in group.trajectories:
                group.trajectories.append(t)
        group.pairs.append(Pair(row["kind"], group.trajectories.index(chosen),
                                group.trajectories.index(rejected), row["weight"],
                                row["sft_weight"]))
    return list(groups.values())


def by_name(trajectories: list[Trajectory]) -> dict[tuple, Trajectory]:
    """What pairs call a trajectory -> the trajectory. Refused where two are called the same."""
    known = {}
    for t in trajectories:
        name = (t.task, t.agent, t.iteration, t.rollout)
        if name in known and known[name] != t:
            raise envs.Refused(f"two trajectories are called {name}; give one another rollout")
        known[name] = t
    return known


def trajectory_of(known: dict[tuple, Trajectory], task: str, side: dict) -> Trajectory:
    """The trajectory that one side of a pair names."""
    name = (task, side["agent"], side["iteration"], side["rollout"])
    if name not in known:
        raise envs.Refused(f"a pair names {name}, which is no trajectory of this run; mend the "
                           "pairs file, or delete it to make it again")
    return known[name]


def cut(t: Trajectory, replies: int, encoder: dpo.Encoder) -> Trajectory:
    """The trajectory up to the end of its reply number `replies`."""
    if replies >= t.steps:
        return t
    size = encoder.reply_ends(t)[replies - 1] + 1
    return replace(t, ids=t.ids[:size], action_mask=t.action_mask[:size], steps=replies,
                   ended="budget")


def without_ends(t: Trajectory, encoder: dpo.Encoder) -> Trajectory:
    """The trajectory with a mask that leaves out what ends turns and what ended the episode, which
    is all of its last reply; unless nothing would be left."""
    ends = encoder.reply_ends(t)
    mask = list(t.action_mask)
    for end in ends:
        mask[end] = 0
    if t.ended == "done" and len(ends) > 1:
        last = ends[-2] + 1
        mask[last:] = [0] * len(mask[last:])
    return replace(t, action_mask=mask) if any(mask) else t


# ------------------------------------------------------------------------------------ settings
# The comment above a setting is its help; in brackets is the source of its default: the paper; ETO,
# the scripts of Song et al.; or ours. Its type says which values it may have, and whether it may
# change when a run goes on: what is Free changes nothing but rounding, what is Growing adds to it.

AUTO = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Data:
    """What is trained, on which tasks, and how long an episode may be"""
    # The environment in which agents play [ours]
    env: Literal[envs.ENVIRONMENTS] = "webshop"
    # Which agents are trained, and how; the list above says it of each method [the paper]
    method: str = "coevolve"
    # The model that training starts from: tiny, which is shipped, or a causal language model with a
    # chat template, by its folder or its name on the hub [ours]
    model: str = "tiny"
    # The seed of all that is random in a run [ours]
    seed: Whole = 0
    # The folder that gets all that a run makes [runs/ENV-METHOD-sSEED]
    out: Free[Optional[str]] = None
    # A file of experts: ETO's or IPR's list, or trajectories of a run, of which the best one of a
    # task is its expert [scripted experts]
    experts: OldFile = None
    # Experts with this reward or less are left out, unless they solve their task [App. A]
    expert_min_reward: float = 0.7
    # How many training tasks are used; 0 is all [Table 1]
    train_tasks: Whole = 0
    # How many tasks of each evaluated split are used; 0 is all [Table 1]
    eval_tasks: Whole = 0
    # The splits that agents are evaluated on; validation is for the choice of settings, and of an
    # iteration [Table 1]
    eval_splits: Literal["test", "validation", "all"] = "test"
    # How much an observation says; short, for small models, leaves out what is repeated [ours]
    view: Literal["full", "short"] = "full"
    # The tokens that a trajectory may have; an episode ends there [ours]
    max_tokens: Count = 4096
    # The tokens that a reply may have [ours]
    max_new_tokens: Count = 256


@dataclass(frozen=True)
class Sft:
    """Imitation of the experts (Section 4.1), and what all training has in common"""
    # Passes over the experts [App. B]
    sft_epochs: Count = 3
    # Experts in a step of SFT [App. B]
    sft_batch: Count = 48
    # The highest learning rate of SFT [App. B]
    sft_lr: Rate = 1e-5
    # The share of the steps of SFT in which the rate rises; then it falls as a cosine [App. B]
    sft_warmup: Share = 0.03
    # The weight decay of AdamW, in all training [ETO]
    weight_decay: Weight = 0.0
    # The norm that gradients are clipped to, in all training [transformers' default]
    max_grad_norm: Rate = 1.0


@dataclass(frozen=True)
class Machine:
    """How the work is laid out on the machine"""
    # Episodes that are played side by side; 0 is what fits a GPU's memory, else 8 [ours]
    slots: Free[Whole] = 0
    # Tokens of a pass on one rank; 0 is 8,192 on a GPU, else 1,024 [ours]
    tokens_per_forward: Free[Whole] = 0
    # Whether passes and episodes are in bf16; auto is on a GPU, except for tiny [ours]
    bf16: AUTO = "auto"
    # Whether a model that trains is split over the ranks (FSDP2); auto is if there are several
    # [ours]
    shard: Free[AUTO] = "auto"
    # Whether the backward pass computes layers again, which saves memory; auto is on a GPU, except
    # for tiny [ours]
    gradient_checkpointing: Free[AUTO] = "auto"


@dataclass(frozen=True)
class Common(Machine, Sft, Data):
    """What every method reads"""


@dataclass(frozen=True)
class Preferences:
    """Exploration and preference training (Sections 4.2 and 4.3)"""
    # The number K of iterations of exploration and preference training [App. B; 5 on InterCodeSQL]
    iterations: Growing[Count] = 3
    # Rollouts of a task by each agent in an iteration [Section 5.2.1]
    rollouts: Count = 1
    # The temperature of exploration; evaluation is greedy [ours; ETO explores greedily]
    temperature: Temperature = 0.7
    # Passes over the pairs of an iteration [App. B]
    dpo_epochs: Count = 3
    # Steps of the target in an iteration; 0 is as many as --dpo-epochs make [ours]
    dpo_steps: Whole = 0
    # Pairs in a step; or tasks, see --batch-unit [App. B]
    dpo_batch: Count = 32
    # What --dpo-batch counts; the pairs of a task stay together in either case [ETO]
    batch_unit: Literal["pairs", "instructions"] = "pairs"
    # The learning rate of preference training in iteration 1 [App. B; ETO]
    dpo_lr: Rate = 1e-6
    # The learning rate of preference training in later iterations [App. B; ETO]
    dpo_lr_later: Rate = 5e-7
    # The share of an iteration's steps in which the rate rises; then it is constant [ETO]
    dpo_warmup: Share = 0.1
    # Beta of DPO, Eq. (7), in iteration 1 [App. B; ETO]
    beta: Rate = 0.1
    # Beta of DPO, Eq. (7), in later iterations [App. B; ETO]
    beta_later: Rate = 0.5
    # The weight of the DPO term of Eq. (9) [Section 4.3]
    lambda_dpo: Weight = 1.0
    # The weight of the SFT term of Eq. (9); ETO has none [Section 4.3; ETO: Section 5.1]
    lambda_sft: Weight = 0.1
    # How the DPO term makes log pi of a trajectory from those of its action tokens [Eq. 2, 5, 7]
    log_prob: Literal["sum", "mean"] = "sum"
    # How the SFT term of Eq. (9) makes log pi of a trajectory from those of its action tokens [as
    # written]
    sft_term: Literal["sum", "mean"] = "sum"
    # The reference pi_ref: the agent as the iteration begins, the agent after SFT, or none [ETO]
    reference: Literal["phase", "sft", "none"] = "phase"
    # What the sum of a batch's losses is divided by: its pairs, or their weights [ours]
    normalise: Literal["pairs", "weights"] = "pairs"
    # What becomes of a pair whose expert has the lower reward: it is swapped, or dropped [ETO]
    expert_beaten: Literal["swap", "drop"] = "swap"
    # Whether the pairs of a task with the expert weigh 1 together, or each, as in ETO [Section 4.3;
    # ETO: Section 5.1]
    pair_weights: Literal["instruction", "none"] = "instruction"
    # The pairs of failures in D_tgt: all, those whose chosen one is hard, or none [Eq. 8]
    d_tgt_failures: Literal["cross", "hard", "none"] = "cross"
    # The reward from which on a failure is hard [Table 2]
    hard_threshold: Weight = 0.6
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
    # Passes of the failure agent over its pairs of an iteration; 0 is as --dpo-epochs [ours]
    failure_epochs: Whole = 0
    # The folder of a model from which the failure agent starts, in place of SFT [after SFT]
    failure_from: OldFile = None


@dataclass(frozen=True)
class Settings(FailureAgent, Preferences, Common, Stated):
    """Every setting of a run"""
    # What replaces defaults, by the model's or the protocol's name; environments have more.
    presets = {"tiny": dict(view="short", sft_batch=16, dpo_batch=16, beta_later=0.1,
                            lambda_sft=0.5),
               "eto": dict(max_new_tokens=512, temperature=0.0, sft_lr=2e-5),
               "--method eto": dict(lambda_sft=0.0, pair_weights="none")}  # DPO alone

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [(self.max_new_tokens >= self.max_tokens, f"--max-new-tokens {self.max_new_tokens}",
                 f"must be below --max-tokens {self.max_tokens}"),
                (self.rollouts > 1 and self.temperature == 0, "--temperature 0",
                 "all rollouts of a task would be the same; raise it")]


METHODS = {
    "coevolve": Method(coevolve, (Common, Preferences, FailureAgent),
                       "a target learns from experts, and from a failure agent that learns too"),
    "eto": Method(coevolve, (Common, Preferences),
                  "the target alone, by DPO: experts over its failures (Song et al. 2024)"),
    "positive": Method(coevolve, (Common, Preferences),
                       "the control: a second agent as ETO's in place of the failure agent"),
    "sft": Method(coevolve, (Common,), "imitation of the experts alone"),
}


# --------------------------------------------------------------------------------------- a run

MODELS = {"tiny": Path(__file__).parent / "tiny"}  # name -> folder
FASTEST = [False, False, True]  # how a model is asked with which nothing is wrong, see `dpo.trial`
ALL_READ = {"env", "view", "bf16"}  # the settings that every phase reads


class Run:
    """A run's folder, machine and models. A run that was stopped goes on after its last phase."""
    trains_while_it_plays = ()  # methods whose agent plays while it is being trained
    keeps_states = False           # whether a phase writes states to go on from

    def __init__(self, settings: Settings, options):
        s = settings
        self.options = options  # of the environment
        self.folder = Path(s.out or f"runs/{s.env}-{s.method}-s{s.seed}")
        self.base = MODELS.get(s.model, Path(s.model))
        self.done = {}          # output -> what is recorded of it
        self.recorded = {}      # the same by an earlier process, until the output is asked for
        self.name = ""          # the output of the running phase
        self.recipe = ""        # what it is made from, hashed
        here = Path(__file__).parent
        self.sources = [here / "coevolve.py", here / "dpo.py", here / "envs.py", here / "common",
                        here / "worlds" / "__init__.py", here / "worlds" / s.env]
        self.code_was_said = False  # that some of it is other code than an earlier process ran

        # The machine.
        gpu = torch.cuda.is_available()
        large = gpu and s.model != "tiny"
        self.bf16 = is_on(s.bf16, auto=large)
        timeout = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
        if "PYTORCH_ALLOC_CONF" not in os.environ:  # blocks of fixed size would leave gaps
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        self.accelerator = Accelerator(cpu=not gpu, kwargs_handlers=[timeout],
                                       mixed_precision="bf16" if self.bf16 else "no")
        # cuDNN would plan its attention for each shape that it has not met, 0.1 s and more. Lengths
        # vary, and nearly every training pass and every third token written have a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.main = self.accelerator.is_main_process
        self.ranks = self.accelerator.num_processes
        self.patient = None     # a group of ranks that wait where one plays for hours longer
        if self.ranks > 1:
            self.patient = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
        self.shard = self.ranks > 1 and is_on(s.shard, auto=True)
        self.recompute = is_on(s.gradient_checkpointing, auto=large)
        self.tokens_per_forward = s.tokens_per_forward
        if s.tokens_per_forward == 0:
            self.tokens_per_forward = 8192 if gpu else 1024

        # The environment, and how the model writes.
        self.make_env = partial(envs.make, s.env, s.view, **vars(options))
        self.env = self.make_env()
        self.splits = splits_of(self.env, s)
        self.tokenizer = dpo.read(transformers.AutoTokenizer, self.base)
        self.config = dpo.read_config(self.base)
        self.parameters = dpo.parameter_count(self.config)
        self.encoder = dpo.Encoder(self.tokenizer, self.config.get_text_config().vocab_size)
        self.fingerprint = self.encoder.fingerprint()
        if s.failure_from:
            check_reads_alike(self, Path(s.failure_from))

        self.reads = set()      # the names of the settings that the running phase has read
        self.settings = noting(s, self.reads)
        self.slots = s.slots or slots_of(self)
        self.open()

    def open(self) -> None:
        """Opens the folder, which is new or that of a run with the same settings; else Refused."""
        config = self.folder / "config.json"
        phases = self.folder / "phases.json"
        now = vars(self.settings) | vars(self.options)

        # A new run tries how the model has to be asked; it is the same when the run goes on.
        if self.main and not config.exists():
            check_folder(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            files.write_json(config, dict(settings=now, ways=ways_of(self)))
        if self.ranks > 1:  # the first may fetch a model for longer than the others' patience
            torch.distributed.barrier(self.patient)
        begun = read_json(config)
        if "settings" not in begun:
            raise envs.Refused(f"--out {self.folder}: its config.json is no run's; give another "
                               "folder")
        check_same(begun["settings"], now, type(self.settings))
        self.passes_alone, *self.ways = begun["ways"]  # of replies: alone, with a cache
        if begun["ways"] != FASTEST:
            say(self, f"{self.base}: passes alone, replies alone, with a cache: {begun['ways']}")

        # What is gone is not recorded any more.
        if phases.exists():
            for output, row in read_json(phases).items():
                if (self.folder / output).exists():
                    self.recorded[output] = row
        self.accelerator.wait_for_everyone()
        if self.main:
            check_disk(self)
            self.lock = files.lock(self.folder)
            begun["settings"].update(now)
            files.write_json(config, begun | dict(success=self.env.success))
            files.write_json(phases, self.recorded)

    def once(self, output: str, phase, *inputs, **parameters) -> Path:
        """Does a phase, unless its output is there and was made alike: by the same phase, with the
        same parameters, settings and encoder, from files of the same bytes and agents made alike.

        Args:
            output: The name of the file or folder in the run's folder.
            phase: phase(run, temporary path, *inputs, **parameters) writes it; returns numbers.
            inputs: Paths, or lists or dictionaries of them.
            parameters: Numbers and names.

        Returns:
            The path of the output.
        """
        path = self.folder / output
        self.name = output
        agents = {self.folder / name: files.made_by(row) for name, row in self.done.items()}
        made_from = files.known_by(inputs, agents)
        self.recipe = hashed([phase.__name__, made_from, parameters, self.fingerprint])
        code = files.code_of(Path(inspect.getfile(phase)), *self.sources)
        if has_been_done(self, code):
            return path

        started = time.perf_counter()
        temporary = path.with_name(f"{path.name}.tmp")
        self.accelerator.wait_for_everyone()
        if self.main:
            path.parent.mkdir(exist_ok=True)
            files.remove(temporary)
        self.accelerator.wait_for_everyone()
        self.reads.clear()
        numbers = self.make(temporary, phase, *inputs, **parameters)
        self.accelerator.wait_for_everyone()

        # The output appears by renaming, so that a run that is stopped leaves none half made.
        read = settings_read(self)
        known = dict(recipe=self.recipe, made_by=hashed([self.recipe, read]), settings=read)
        seconds = round(time.perf_counter() - started, 1)
        self.done[output] = dict(work=phase.__name__, **known, code=code, **parameters,
                                 seconds=seconds) | numbers
        if self.main:
            self.done[output]["weights"] = files.sizes_of_weights(temporary)
            files.remove(path)
            os.replace(temporary, path)
            self.record(output)
        self.accelerator.wait_for_everyone()
        return path

    def make(self, out: Path, phase, *inputs, **parameters) -> dict:
        """Does a phase."""
        return phase(self, out, *inputs, **parameters)

    def record(self, output: str) -> None:
        """Writes down, and says, that a phase is done."""
        files.write_json(self.folder / "phases.json", self.done | self.recorded)
        say(self, files.sentence(output, self.done[output]))

    def agents_kept(self) -> int:
        """How many agents the folder has at the end: each name's after SFT and each iteration."""
        s = self.settings
        names = len(AGENTS.get(s.method, ()))
        return names if s.method == "sft" else names * (1 + s.iterations)

    def load(self, agent: Path):
        """The model in a folder, ready to train."""
        with agents_of(self, agent):
            return dpo.load(self.accelerator, agent, self.recompute, self.shard)

    def replica(self, agent: Path):
        """The model in a folder as it plays, whole on each rank."""
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        with agents_of(self, agent):
            return dpo.read_model(agent, dtype, self.accelerator.device).eval()

    def log_probs(
        self,
        model,
        trajectories: list[Trajectory],
        sampler=dpo.Sampler(),
    ) -> torch.Tensor:
        """log pi of all action tokens of some trajectories, (A,), in nats."""
        tokens = 0 if self.passes_alone else self.tokens_per_forward
        return dpo.log_probs_in_passes(self.accelerator, model, trajectories, tokens, sampler)

    def fit(self, model, out: Path, steps: list[list[Group]], objective: dpo.Objective) -> dict:
        """Trains a model of `load`, and writes it, with a line for each step in train.jsonl."""
        objective = replace(objective, weight_decay=self.settings.weight_decay,
                            max_grad_norm=self.settings.max_grad_norm,
                            tokens=self.tokens_per_forward * self.ranks)
        lines = []
        with bar(self, len(steps)) as progress:
            for line in self.training(model, steps, objective):
                lines.append(line)
                progress.update()
        dpo.save(self.accelerator, model, self.encoder, out)
        write(self, out / "train.jsonl", lines)
        return dict(steps=len(lines), first_loss=lines[0]["loss"], loss=lines[-1]["loss"])

    def training(
        self,
        model,
        steps: list[list[Group]],
        objective: dpo.Objective,
    ) -> Iterator[dict]:
        """Trains a model, and yields the log's line of each step."""
        optimizer = dpo.adamw(model, objective)
        return dpo.training(model, optimizer, steps, objective, self.log_probs)

    def answer(self, model, temperature: float):
        """What replies to conversations: [(trajectory, random numbers)] -> [(ids, log_probs)]."""
        sampler = self.encoder.sampler(temperature)

        def reply(asked):
            conversations = [(t.ids, rng) for t, rng in asked]
            return dpo.replies(model, self.encoder, sampler, self.settings.max_new_tokens,
                               self.env.stops, conversations, *self.ways)

        return reply

    def play(
        self,
        agent,
        begun: list[Trajectory],
        temperature: float,
        make_env=None,
    ) -> list[Trajectory]:
        """Plays episodes, each rank a share of them.

        Args:
            agent: The folder of the model that plays.
            begun: Trajectories with task, agent, iteration, rollout and seed, which get the rest.
            temperature: That of sampling; 0 is greedy.
            make_env: Makes environments that know other tasks than the run's.

        Returns:
            The trajectories in the order given; all ranks have all of them.
        """
        answer = self.answer(self.replica(agent), temperature)
        share = begun[self.accelerator.process_index::self.ranks]
        played = self.play_share(share, answer, make_env or self.make_env)
        if self.ranks > 1:
            shares = [None] * self.ranks
            torch.distributed.all_gather_object(shares, (played, sorted(self.reads)), self.patient)
            played = []
            for of_rank, read in shares:
                played += of_rank
                self.reads.update(read)  # a rank without episodes knows the phase as others do
        order = {(t.task, t.rollout): n for n, t in enumerate(begun)}
        return sorted(played, key=lambda t: order[t.task, t.rollout])

    def play_share(self, share: list[Trajectory], answer, make_env) -> list[Trajectory]:
        """Plays the episodes of this rank."""
        with bar(self, len(share)) as progress:
            envs.play(make_env, self.encoder, share, answer, self.slots, self.settings.max_tokens,
                      ended=lambda t: progress.update())
        return share


# What Run.__init__, open and once ask.


def is_on(setting: str, auto: bool) -> bool:
    """What on, off or auto means."""
    return auto if setting == "auto" else setting == "on"


def check_folder(folder: Path) -> None:
    """Refused where a folder has something else than a run, whose outputs would replace it."""
    if not folder.exists() or (folder / "phases.json").exists():
        return
    if not folder.is_dir():
        raise envs.Refused(f"--out {folder}: it is a file; give a folder")
    others = {path.name for path in folder.iterdir()}
    others -= {"lock", "config.json.tmp"}  # of a run that was stopped before it had a config
    if others:
        raise envs.Refused(f"--out {folder}: {min(others)} is in it, and no run; give another "
                           "folder")


def check_reads_alike(run: Run, agent: Path) -> None:
    """Refused where an agent of a folder has other tokens than the run, which writes its ids."""
    tokens = dpo.read(transformers.AutoTokenizer, agent).get_vocab()
    rows = dpo.read_config(agent).get_text_config().vocab_size
    if rows != run.encoder.rows or tokens != run.tokenizer.get_vocab():
        raise envs.Refused(f"--failure-from {agent}: its tokens are not those of --model {run.base}"
                           ", in which episodes are written; give an agent of that model")


def ways_of(run: Run) -> list[bool]:
    """How the model has to be asked, see `dpo.trial`."""
    if run.base == MODELS["tiny"]:
        return FASTEST
    device = run.accelerator.device
    longest = run.settings.max_tokens
    positions = dpo.positions_of(run.config)
    if longest > positions:
        say(run, f"{run.base} has {positions:,} positions: longer episodes are read as it never "
                 f"learned to; lower --max-tokens {longest}")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        if not machine.fits_in_fp32(run.config, run.parameters, free, longest):
            device = "cpu"
    return list(dpo.trial(dpo.read_model(run.base, device=device).eval(), run.encoder, longest))


def slots_of(run: Run) -> int:
    """How many episodes are played side by side on a rank: on a GPU those that fit its memory."""
    if run.accelerator.device.type != "cuda":
        return 8
    free, _ = torch.cuda.mem_get_info()
    longest = run.settings.max_tokens + run.settings.max_new_tokens
    training_ranks = 0
    if run.settings.method in run.trains_while_it_plays:
        training_ranks = run.ranks if run.shard else 1
    return machine.slots_that_fit(run.config, run.parameters, free, longest, training_ranks,
                                  run.bf16)


def check_disk(run: Run) -> None:
    """Refused where the disk has no room for the agents that the run keeps."""
    agents = run.agents_kept()
    if agents == 0:
        return
    # An agent that plays while it trains keeps AdamW's moments, from which its training goes on.
    moments = agents if run.settings.method in run.trains_while_it_plays else 0
    needed = machine.disk_needed(run.parameters, agents, moments, run.keeps_states)
    for output in run.recorded:  # in a folder that goes on
        for file in (run.folder / output).glob("*"):
            if file.suffix in (".safetensors", ".pt"):
                needed -= file.stat().st_size
    free = shutil.disk_usage(run.folder).free
    if needed > free:
        raise envs.Refused(f"--out {run.folder}: {free / 1e9:.1f} GB are free, and the run "
                           f"writes {needed / 1e9:.1f} GB more, of {agents} agents; give a folder "
                           "on another disk")


def has_been_done(run: Run, code: str) -> bool:
    """Whether an earlier process has made the running phase's output as it would be made now; else
    it says why not. code: what the phase is done by now, hashed."""
    row = run.recorded.pop(run.name, None)
    if row is None:
        return False
    now = vars(run.settings) | vars(run.options)
    why = files.why_again(run.folder / run.name, row, run.recipe, now)
    if why:
        say(run, f"{run.name} is made again: {why}")
        return False
    if row.get("code") != code and not run.code_was_said:
        run.code_was_said = True
        say(run, f"{run.name}, and perhaps more of this folder, was made by other code than this "
                 "is; delete what the change concerns, and it is made again")
    run.done[run.name] = row
    return True


def settings_read(run: Run) -> dict:
    """The settings that the phase that has just ended has read, but for those that are free."""
    now = vars(run.settings)
    read = dict(vars(run.options))
    for name in sorted(run.reads | ALL_READ):
        if not has_mark(type(run.settings), name, FREE):
            read[name] = now[name]
    return read


@contextmanager
def agents_of(run: Run, agent):
    """Says of an agent of the run that cannot be read what can be done; another model's error
    stays as it is."""
    try:
        yield
    except dpo.Unusable as error:
        if run.folder not in Path(agent).parents:
            raise
        raise envs.Refused(f"{agent}: this agent of the run is damaged; delete the folder, and the "
                           "same command makes it again") from error


def close(run: Run) -> None:
    """Leaves the folder of a run that has ended. What an earlier process recorded of phases that
    this run has not asked for is forgotten: another loop has made them."""
    if run.main:
        files.write_json(run.folder / "phases.json", run.done)
        run.lock.close()


def table(run: Run) -> str:
    return files.table(f"\n{run.folder}: {files.headline(vars(run.settings))}", run.done)


def say(run: Run, text: str) -> None:
    if run.main:
        tqdm.write(text)


def bar(run: Run, total: int):
    """A progress bar of the running phase, where somebody looks at it."""
    hidden = None if run.main else True  # None: where the output is no terminal
    return tqdm(total=total, desc=run.name, leave=False, disable=hidden, delay=2)


def read(*paths: Path) -> list[Trajectory]:
    """The trajectories in some files, one after another."""
    trajectories = []
    known = {field.name for field in fields(Trajectory)}
    for path in paths:
        for n, row in enumerate(read_jsonl(path), 1):
            other = row.keys() - known
            if other:
                raise envs.Refused(f"{path}, line {n}: a trajectory has no {min(other)!r}; take it "
                                   "out")
            trajectories.append(Trajectory(**row))
    return trajectories


def write(run: Run, file: Path, rows: list) -> None:
    if run.main:
        write_jsonl(file, rows)


def scores(trajectories: list[Trajectory], run: Run) -> dict:
    """Means over trajectories; `success` and `hard` are the shares in Table 2."""
    hard = run.settings.hard_threshold
    success = run.env.success
    rewards = [t.reward for t in trajectories]
    n = len(trajectories)
    return dict(episodes=n,
                reward=sum(rewards) / n,
                success=sum(reward >= success for reward in rewards) / n,
                hard=sum(hard <= reward < success for reward in rewards) / n,
                turns=sum(t.steps for t in trajectories) / n,
                budget=sum(t.ended == "budget" for t in trajectories) / n)


# Errors that are the user's or the machine's, and no bug.
EXPECTED = (envs.Refused, envs.EnvError, dpo.Unusable, FloatingPointError, OSError, SafetensorError,
            torch.OutOfMemoryError, MemoryError)


def one_line(error: Exception) -> str:
    """What is said of an error that is EXPECTED."""
    text = " ".join(str(error).split())
    if "No space left on device" in text:
        text += "; make room on the disk of --out, and the same command goes on"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        text = ("out of memory; lower --tokens-per-forward or --slots, and the same command goes "
                "on; or lower --max-tokens, with another --out")
    return text


def main(
    argv: list[str],
    settings_class=Settings,
    run_class=Run,
    methods: dict = METHODS,
    program: str = "coevolve.py",
) -> None:
    """Runs the loop of a method. Another class of settings or run, or other methods, extends it."""
    transformers.utils.logging.disable_progress_bar()
    try:
        settings, options = parse(argv, settings_class, methods, envs.environment,
                                  f"python {program} [--env ENV]")
        run = run_class(settings, options)
        methods[settings.method].loop(run)
        close(run)
    except EXPECTED as error:
        sys.exit(f"{program}: {one_line(error)}")
    if run.main:
        print(table(run))
    run.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
