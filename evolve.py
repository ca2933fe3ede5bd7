"""CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution (arXiv 2604.15840), in raw PyTorch.

The agent is trained with GRPO (group relative policy optimisation) on a task set D. D evolves: new
tasks are added that target the agent's weaknesses. This is the method in pseudocode, where `<-` is
an assignment:

    pi   <- the agent after SFT (supervised fine-tuning);   pi_ref <- pi
    D    <- verified tasks from unguided exploration, or tasks of the training split
    for step = 1..T:
        X <- the next B tasks of a shuffled epoch over D
        for each task x in X: play K episodes with pi, and let R_1..R_K be their rewards
            A_k = (R_k - mean R) / (std R + 1e-6)      advantages; x is skipped if all R_k are equal
        for each minibatch of X:                       one AdamW update
            L = - mean over action tokens [ min(rho A, clip(rho, 1 - low, 1 + high) A) - beta k3 ]
        after every E steps, but not after the last:   one evolution of D
            signals    <- weaknesses: tasks that the agent used to solve (forgetting), tasks that it
                          solves only sometimes (boundary), and action patterns that it rarely
                          uses (rare)
            picks      <- a few random signals of each kind
            candidates <- new tasks with solutions, made from exploration of the picked tasks
            D          <- D plus each new candidate whose solution earns reward 1 when replayed

rho is the probability of an action token under pi, divided by its probability under pi_old, the
policy that played the episodes. clip limits rho to the range from 1 - low to 1 + high. k3 estimates
the KL divergence of pi from pi_ref, and beta is the weight of this KL term. The loss and the update
are in `grpo.py`, and low and high are its constants. T, B, K, E and beta are settings.

    task        a request to the agent in an environment, identified by its id
    D           the task set that the agent is trained on; D_0 is the initial set
    step        one GRPO iteration: the agent plays some tasks of D, and is then trained on these
                episodes
    update      one optimiser step, on one minibatch of the step's tasks
    task group  the K trajectories of one task in one step; GRPO compares them to each other
    segment     E steps; segment i writes its files to the folder iter<i>/
    evolution   the growth of D between two segments; evolution i follows segment i
    candidate   a new task with its solution, made from an explorer's episode (finds.jsonl)
    proposal    a candidate with the verdict "added" or "refused" (proposals.jsonl)

The environment defines what an action pattern is, how an episode becomes a task, and how a solution
is verified. This code is in the file `environments/NAME/tasks.py` of the environment NAME.

This program was written from a summary of the paper and public notes about the paper. The full text
and the code of the paper were not available. Each choice that the summary and the notes leave open
is a setting or a named constant here. A bracket such as [summary], [notes], [AgentEvolver] or
[ours] names the source of a value. AgentEvolver is the public code base that the paper's code is
most likely based on.

`docs/mutual.md` lists all differences from the paper. There are two main differences. First, the
paper's explorer is Qwen3-Max, which reflects on each signal before it explores. Here the explorer
is the agent itself, without reflection. (`lab/chat/explorer.py` contains an explorer that
reflects.) Second, D evolves after every E steps here, and after each training iteration in the
paper.

    python evolve.py --env webshop              # --method grpo trains on the start tasks only
"""

from __future__ import annotations

import itertools
import math
import random
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Literal

import common.settings as types

# isort: split
import torch
from torch.distributed.checkpoint import state_dict as states

import coevolve
import dpo
import grpo
from coevolve import (
    Common,
    Model,
    Trajectories,
    evaluate_all,
    summarise,
    too_long,
    train_sft,
    usable,
)
from common.files import seed_of
from common.settings import UsageError
from dpo import Group, Trajectory
from engine.command import run_program
from engine.experts import collect_experts, evaluated_tasks
from engine.forward_passes import average_and_clip
from engine.phases import Trained
from engine.run import Run
from engine.trajectories import read
from environments.expert_files import read_experts, tasks_of
from envs import Environment

# Neither the paper's summary nor the notes give the following numbers. The bracket in each comment
# names the source, as in the settings at the end of this file.

# The number of tasks in a minibatch. There is one update per minibatch. A task without advantages
# counts towards this number, but the agent is not trained on it [AgentEvolver; ours].
MINIBATCH = 8
EXPLORER_TEMPERATURE = 1.1  # sampling temperature of the explorer [ours; AgentEvolver: 1]
EXPLORER_EPISODES = 6       # number of explorer episodes for each picked signal [ours]
WINDOW = 5                  # W, number of earlier groups per task that `forgetting` checks [ours]
# The percentage theta. An action pattern is rare if less than theta percent of the episodes in a
# segment contain the pattern [ours].
RARE_BELOW = 2.0
MOST_NEW_TASKS = 20         # maximum number of tasks that join D in one evolution [ours]

# ------------------------------------------------------------------------------------ the loop
# Phases work as in coevolve.py. All phases use these names for their arguments:
#     task_set    D, one row (a dict) per task; an empty list before D exists
#     signals     the rows of the signals; an empty list in unguided exploration
#     i           the number of the segment or of the evolution; evolution 0 makes D_0
Rows = list[dict]


def evolve(run: Run, find: Callable | None = None) -> None:
    """Trains an agent with GRPO on a task set that evolves during training.

    The method "grpo" uses the same loop, but the task set does not evolve. `find` is the explorer,
    a function like `find_tasks`, which is the default.
    """
    s = run.settings
    once = run.once
    if find is None:
        find = find_tasks
    if s.method == "evolve" or s.start_from == "explore":
        run.env.task_generator()  # raises UsageError early if the environment makes no new tasks

    # 1. Make the initial agent. It also serves as pi_ref in all segments.
    reference = run.base
    if s.warm_start == "sft":
        experts = once("experts.jsonl", collect_experts, run.expert_file)
        reference = once("sft-target", train_sft, run.base, experts, name="target")
    evaluate_all(run, 0, target=reference)

    # 2. Make D_0 from the training split, or by unguided exploration (without signals).
    if s.start_from == "train":
        task_set = once("iter0/tasks.jsonl", first_tasks, i=0)
    else:
        task_set = evolution(run, find, reference, task_set=[], signals=[], i=0)

    # 3. Train one segment of E steps at a time. D evolves after each segment except the last.
    agent = reference
    planned = []  # the latest plan, which also lists the unused tasks of the epoch
    played = []  # the trajectory files of the segments so far, one file per segment
    segments = math.ceil(s.grpo_steps / s.evolve_every)
    for i in range(1, segments + 1):
        steps = min(s.evolve_every, s.grpo_steps - (i - 1) * s.evolve_every)
        planned = once(f"iter{i}/batches.jsonl", plan, task_set, planned, i=i, steps=steps)
        agent = once(f"iter{i}/target-agent", train, agent, reference, task_set, planned, i=i)
        played.append(agent / "episodes.jsonl")
        if i % s.evaluate_every == 0 or i == segments:
            evaluate_all(run, i, target=agent)
        if s.method == "evolve" and i < segments:
            signals = once(f"iter{i}/signals.jsonl", find_signals, task_set, played, i=i)
            task_set = evolution(run, find, agent, task_set, signals, i=i)


def evolution(
    run: Run,
    find: Callable,
    agent: Model,
    task_set: Rows,
    signals: Rows,
    i: int,
) -> Rows:
    """Makes the next D: finds candidates, judges them, and adds the accepted candidates to D."""
    candidates = find(run, i, agent, task_set, signals)
    proposals = run.once(f"iter{i}/proposals.jsonl", judge, candidates, task_set, i=i)
    return run.once(f"iter{i}/tasks.jsonl", join, task_set, proposals, i=i)


def find_tasks(run: Run, i: int, agent: Model, task_set: Rows, signals: Rows) -> Rows:
    """Runs the default explorer, and returns the candidates.

    The agent itself explores, and candidates are made from its episodes.
    """
    explored = run.once(f"iter{i}/explored.jsonl", explore, agent, task_set, signals, i=i)
    return run.once(f"iter{i}/finds.jsonl", abstract, task_set, explored, i=i)


def by_one_rank(phase: Callable) -> Callable:
    """Decorates a phase so that only the main rank runs it, and all ranks return its result.

    If every rank ran the phase, the environment could give different results on different ranks.
    """
    @wraps(phase)
    def run_on_main_rank(run, *inputs, **named):
        return run.on_main(lambda: phase(run, *inputs, **named))
    return run_on_main_rank


def rng_of(run: Run, *names) -> random.Random:
    """Returns a random number generator seeded with the run's seed and the given names."""
    return random.Random(seed_of(run.settings.seed, *names))


def mean(values: list[float]) -> float:
    """Returns the mean of the values, or 0 if the list is empty."""
    return sum(values) / max(1, len(values))


# ------------------------------------------------------------------------------- the GRPO steps

# Options for saving and loading AdamW's moments. With these options, the checkpoint is unsharded,
# even if the model is sharded over the ranks.
UNSHARDED = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def train(
    run: Run,
    agent: Model,
    reference: Model,
    task_set: Rows,
    planned: Rows,
    i: int,
) -> tuple[Trained, dict]:
    """Trains the agent for the steps of one segment.

    In each step, the agent first plays episodes with its current weights, and is then trained on
    these episodes. The model's folder also contains AdamW's moments (moments.pt, loaded by the next
    segment), the training log (train.jsonl) and the segment's trajectories (episodes.jsonl). The
    numbers `reward` and `kl` are those of the last step.
    """
    # 1. Load the policy, pi_ref and the optimiser.
    s = run.settings
    largest = Group([Trajectory(ids=[0] * s.max_tokens)] * s.step_rollouts)
    model = run.load(agent, [largest])
    pi_ref = run.load(reference)
    optimizer = dpo.adamw(model, s.weight_decay)
    if i > 1:
        load_moments(model, optimizer, agent / "moments.pt")
    make_env = partial(env_with, run, task_set)

    # 2. In each step, play episodes with the current policy, and then train on these episodes.
    log = []
    episodes = []
    with run.bar(len(planned)) as progress:
        for row in planned:
            trajectories = play_step(run, model, row, make_env)
            line = train_step(run, model, pi_ref, optimizer, row, trajectories)
            log.append(line | dict(D=len(task_set)))
            episodes += trajectories
            run.tracking.log("train", run.name, log[-1])
            progress.update()

    # 3. Return the agent, the moments, the log and the trajectories.
    trained = Trained(model, {"train.jsonl": log, "episodes.jsonl": episodes},
                      {"moments.pt": moments_of(model, optimizer)})
    return trained, dict(
        episodes=len(episodes),
        reward=log[-1]["reward"],
        kl=log[-1]["kl"],
        tasks=len(task_set),
        steps=sum(line["updates"] for line in log),
        tokens=sum(line["tokens"] for line in log))


def load_moments(model, optimizer, file: Path) -> None:
    """Loads AdamW's moments from the previous segment.

    The saved dict is empty if no update has been run so far. In that case, AdamW starts with zero
    moments.
    """
    moments = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if moments:
        states.set_optimizer_state_dict(model, optimizer, moments, options=UNSHARDED)


def moments_of(model, optimizer) -> dict:
    """Returns AdamW's moments. All ranks must call this, because the moments may be sharded."""
    # Before the first update, there are no moments to save. get_optimizer_state_dict would then run
    # an extra optimiser step to create moments, so it is not called.
    if not optimizer.state:
        return {}
    return states.get_optimizer_state_dict(model, optimizer, options=UNSHARDED)


def play_step(run: Run, model, row: dict, make_env: Callable) -> list[Trajectory]:
    """Plays the episodes of one step, K episodes per task, and returns them ordered by task.

    `row` is a row of the plan, {step, tasks}, and `make_env` creates an environment with all tasks
    in D.
    """
    s = run.settings
    step = row["step"]
    episodes = []
    for task in row["tasks"]:
        for k in range(s.step_rollouts):
            seed = seed_of(s.seed, "grpo", step, task, k)
            episodes.append(Trajectory(task, "target", step, k, seed))
    return run.play(model, episodes, s.grpo_temperature, make_env)


def train_step(
    run: Run,
    model,
    pi_ref,
    optimizer,
    row: dict,
    trajectories: Trajectories,
) -> dict:
    """Trains the policy in place on the trajectories that it played in this step.

    Trajectories that filled the context are left out [ours], so a group may have fewer than K
    trajectories. Returns the line of the training log for this step.
    """
    s = run.settings
    step = row["step"]
    # Log-probabilities are those of the sampling distribution: the softmax at the sampling
    # temperature, with probability 0 for suppressed tokens. The sampler never samples suppressed
    # tokens, for example special tokens. If they had a probability above 0 in training, a negative
    # advantage would raise it, because each decrease in the probability of a sampled token
    # increases the probabilities of other tokens.
    sampler = run.encoder.sampler(s.grpo_temperature)
    log_probs = partial(run.log_probs, logits_processor=sampler.process_logits)
    loss = partial(grpo.clipped_loss, clip_low=grpo.CLIP_LOW, clip_high=grpo.CLIP_HIGH,
                   kl=s.grpo_kl, kl_term=grpo.k3)
    numbers = grpo.update(model, pi_ref, optimizer, usable(trajectories), MINIBATCH,
                          rng_of(run, "grpo", step), s.grpo_lr, loss, log_probs,
                          max_grad_norm=s.max_grad_norm, fits=run.fits, clip=average_and_clip)
    updates = numbers["updates"]
    scored = summarise(trajectories, s.hard_threshold)
    return dict(
        step=step,
        tasks=len(row["tasks"]),
        skipped=len(row["tasks"]) - numbers["groups"],
        updates=len(updates),
        reward=scored["reward"],
        too_long=len(too_long(trajectories)),
        success=scored["success"],
        tokens=sum(len(t.ids) for t in trajectories),
        loss=mean([update["loss"] for update in updates]),
        norm=mean([update["norm"] for update in updates]),
        sampler=numbers["sampler"],
        clipped=mean([update["kinds"]["action"]["clipped"] for update in updates]),
        kl=numbers["kl"])  # in nats per trajectory


# ------------------------------------------------------------------------ the tasks of each step


def plan(run: Run, task_set: Rows, planned: Rows, i: int, steps: int) -> tuple[Rows, dict]:
    """Plans which tasks are played in each step of a segment.

    Tasks are drawn from shuffled epochs over D. An epoch may continue in the next segment. Tasks
    that joined D during an epoch are first used in the next epoch. A step never contains the same
    task twice.

    `planned` is the plan of the previous segment. A row contains the tasks of the step (`tasks`),
    and the tasks of the epoch that are still unused after the step (`waiting`).
    """
    s = run.settings
    tasks_of_d = [row["task"] for row in task_set]
    remaining = list(planned[-1]["waiting"]) if planned else []  # unused tasks, in reverse order
    rows = []
    first = (i - 1) * s.evolve_every + 1
    for step in range(first, first + steps):
        tasks = []
        while len(tasks) < min(s.step_tasks, len(tasks_of_d)):
            if not remaining:
                # Start a new epoch. Tasks that are already in this step are moved to the end of the
                # epoch, so that the step does not contain a task twice.
                shuffled = rng_of(run, "pass", step).sample(tasks_of_d, len(tasks_of_d))
                remaining = sorted(shuffled, key=tasks.count, reverse=True)
            tasks.append(remaining.pop())
        rows.append(dict(step=step, tasks=tasks, waiting=list(remaining)))
    return rows, dict(tasks=len(tasks_of_d))


# ----------------------------------------------------------------------------------- the signals
# s(x) is the success rate of a task x in one step: the fraction of successes in its task group. For
# each kind of signal, a function yields rows of signals.jsonl. A row contains the task, and some
# conversations as evidence. The evidence is used only by an explorer that reflects on signals
# (lab/chat/explorer.py).


@dataclass
class History:
    """The trajectories that the signals of a segment are computed from."""
    # A dict {task: list of the latest groups of this task, oldest first}, with all tasks that were
    # played in this segment. The older groups of a task may be from earlier segments.
    groups: dict[str, list[list[Trajectory]]]
    episodes: list[Trajectory]  # all trajectories of the segment
    # The set of action patterns of each trajectory in `episodes`, in the same order.
    patterns: list[set[str]] = field(default_factory=list)


def success_rate(group: list[Trajectory]) -> float:
    """Computes s(x), the fraction of successes in a task group."""
    return mean([not t.is_failure for t in group])


def evidence(episodes: list[Trajectory]) -> dict:
    """Returns the conversations of the first failure and the first success among the episodes.

    An entry is None if there is no such episode.
    """
    first = dict(failure=None, success=None)
    for t in reversed(episodes):
        first["failure" if t.is_failure else "success"] = t.messages
    return first


def collect_history(segments: Iterable[list[Trajectory]], window: int) -> History:
    """Collects the trajectories that the signals are computed from.

    A task group consists of the trajectories of one task in one training step. For each task, the
    history contains the latest group and up to `window` earlier groups. Tasks that were not played
    in the last segment are left out. `segments` are the trajectories of each segment so far, oldest
    first.
    """
    groups = defaultdict(dict)  # task -> step -> its trajectories
    last = []
    for last in segments:
        for t in last:
            groups[t.task].setdefault(t.iteration, []).append(t)
            if len(groups[t.task]) > window + 1:
                del groups[t.task][min(groups[t.task])]
    latest = {}
    for t in last:
        latest[t.task] = list(groups[t.task].values())
    return History(latest, last)


def forgetting(history: History, s: Evolution) -> Iterator[dict]:
    """Yields the forgotten tasks F, which the agent used to solve.

    A task x is forgotten if its success rate s(x) is below 0.5 in its latest group, and was at
    least 0.5 in one or more of the W groups before. `visits_ago` is the distance, in groups, from
    the latest group to the most recent group with s(x) >= 0.5. For example, `visits_ago` is 1 if
    the group directly before the latest group has s(x) >= 0.5.
    """
    for task, (*before, now) in history.groups.items():
        if success_rate(now) >= 0.5:
            continue
        for ago, group in enumerate(reversed(before), start=1):
            if success_rate(group) >= 0.5:
                then = evidence(group)["success"]
                yield dict(task=task, visits_ago=ago, **evidence(now), success_then=then)
                break


def boundary(history: History, s: Evolution) -> Iterator[dict]:
    """Yields the boundary tasks B, which the agent solves only sometimes.

    In the latest group of a boundary task, some of the K episodes succeed, but not all.
    """
    for task, (*_, now) in history.groups.items():
        if 0 < success_rate(now) < 1:
            successes = sum(not t.is_failure for t in now)
            yield dict(task=task, successes=successes, **evidence(now))


def rare(history: History, s: Evolution) -> Iterator[dict]:
    """Yields one signal for each rare action pattern of the segment.

    A pattern is rare if less than theta percent of the segment's episodes contain it, but at least
    --rare-min episodes do. Patterns consist only of actions that the environment executed.

    To make the signal of a pattern, its episodes are sorted by reward, lowest first. The first
    episode's task becomes the signal's task. The first failure and the first success in the sorted
    list become the signal's evidence.
    """
    counts = Counter(itertools.chain(*history.patterns))
    for pattern, count in counts.items():
        if count >= s.rare_min and 100 * count < RARE_BELOW * len(history.episodes):
            episodes = []
            for t, patterns in zip(history.episodes, history.patterns):
                if pattern in patterns:
                    episodes.append(t)
            episodes.sort(key=lambda t: t.reward)
            yield dict(task=episodes[0].task, pattern=pattern, episodes=count,
                       **evidence(episodes))


SIGNALS = {"forgetting": forgetting, "boundary": boundary, "rare": rare}


@by_one_rank
def find_signals(run: Run, task_set: Rows, played: list[Path], i: int) -> tuple[Rows, dict]:
    """Finds all signals of a segment, and picks some of them for exploration.

    With --guide random, the same number of random tasks is picked instead of signals. Each picked
    task is then an additional row of the output file, with the signal "random".

    `played` contains the trajectory file of each segment so far. Only one of them is in memory at a
    time. A row contains the kind of the signal (`signal`), the task, the evidence, and the flag
    `picked`. The second return value contains the number of signals of each kind, the number of
    picks of each kind (`picks`), and the number of distinct action patterns in the segment
    (`patterns`).
    """
    # 1. Collect the trajectories of the segment and their action patterns.
    s = run.settings
    generator = env_with(run, task_set).task_generator()
    history = collect_history(map(read, played), WINDOW)
    for t in history.episodes:
        history.patterns.append(generator.patterns(t.task, replies(t)))

    # 2. Find the signals of each kind. `rows` contains the signals in sorted order, for the output
    # file. `shuffled` contains the same signals in random order, for picking.
    rows = []
    shuffled = []
    numbers = {}
    for kind in SIGNALS:
        if kind in s.signals.split(","):
            signals = [dict(signal=kind, picked=False, **row) for row in SIGNALS[kind](history, s)]
            signals.sort(key=lambda row: (row["task"], row.get("pattern", "")))
            rows += signals
            rng = rng_of(run, "picks", i, kind)
            shuffled.append(rng.sample(signals, len(signals)))
            numbers[kind] = len(signals)

    # 3. Pick signals. As a control, --guide random picks the same number of random tasks of D.
    picked = pick(shuffled, s.picks)
    if s.guide == "random":
        pool = [row["task"] for row in task_set]
        tasks = rng_of(run, "random", i).sample(pool, len(picked))
        picked = [dict(signal="random", task=task) for task in tasks]
        rows += picked
    picks = Counter()
    for row in picked:
        row["picked"] = True
        picks[row["signal"]] += 1
    patterns = set().union(*history.patterns)
    return rows, numbers | dict(picks=picks, patterns=len(patterns))


def pick(kinds: list[list[dict]], limit: int) -> list[dict]:
    """Picks at most `limit` signals of each kind in turn (round-robin), at most one per task.

    `kinds` contains one list of signals for each kind. Earlier signals of a list are picked first.
    """
    picked = {}  # the picked signal of each task, by task id
    queues = [iter(rows) for rows in kinds]
    for _ in range(limit):
        for queue in queues:
            for row in queue:  # `queue` is an iterator: the loop resumes after the previous pick
                if row["task"] not in picked:
                    picked[row["task"]] = row
                    break
    return list(picked.values())


# ----------------------------------------------------------------------- from signals to tasks
# The file tasks.jsonl contains D, with one row per task, in the order in which the tasks joined D.
# The variable `task_rows` always contains the rows of this file.

# The number of episodes in unguided exploration is START_EPISODES times --start-tasks [ours].
START_EPISODES = 6
# The maximum number of characters in the text of a new task. A limit is needed because the text may
# be copied from the agent's replies, which can be very long [ours].
LONGEST_TEXT = 1000


@dataclass
class Explored(Trajectory):
    """A trajectory of an explorer.

    The field `agent` is "explorer", and the field `iteration` is the number of the evolution.
    """
    # The reason why the task is explored: the kind of the picked signal, "random" for a randomly
    # picked task, or "start" in unguided exploration.
    signal: str = ""


def env_with(run: Run, task_rows: list[dict]) -> Environment:
    """Returns an environment with all tasks of D.

    Raises UsageError if a new task would get a different id than in tasks.jsonl. The usual cause is
    a tasks.jsonl with reordered rows.
    """
    env = run.make_env()
    for row in task_rows:
        if "definition" in row:  # a new task, which is not part of any split
            task = env.add(row["definition"])
            if task != row["task"]:
                raise UsageError(f"tasks.jsonl: task {row['task']} would get the id {task}; "
                                 "restore the order of the rows")
    return env


def training_tasks(run: Run) -> list[str]:
    """Returns the ids of the training tasks, without tasks that are also used for evaluation.

    With --experts, the training tasks are the tasks of the expert file. Otherwise the training
    tasks are those of the training split. Raises UsageError if no task is left.
    """
    s = run.settings
    env = run.env
    evaluated = evaluated_tasks(env, run.splits)
    if s.experts:
        tasks = tasks_of(read_experts(s.experts, env))
    else:
        tasks = env.tasks("train")
    if s.train_tasks:
        tasks = tasks[:s.train_tasks]
    remaining = [task for task in tasks if repr(env.find(task)) not in evaluated]
    if not remaining:
        raise UsageError(f"no training task is left, because all {len(tasks)} are evaluated as "
                         "well; give other --experts, more --train-tasks or other --eval-splits")
    return remaining


def first_tasks(run: Run, i: int) -> tuple[Rows, dict]:
    """Makes D_0 from at most --start-tasks of the first training tasks, for --start-from train.

    The number `missing` in the returned dict is --start-tasks minus the number of `tasks`.
    """
    limit = run.settings.start_tasks
    tasks = training_tasks(run)[:limit]
    rows = [dict(task=task, joined=0) for task in tasks]
    return rows, dict(tasks=len(tasks), missing=limit - len(tasks))


def begin_exploring(
    run: Run,
    signals: Rows,
    episodes_per_task: int,
    i: int,
) -> list[Explored]:
    """Returns empty trajectories, one for each episode that the explorer should play.

    With signals, the explorer plays EXPLORER_EPISODES episodes for each of them. Without signals,
    exploration is unguided: there are `episodes_per_task` times --start-tasks episodes, which cycle
    through the training tasks.
    """
    s = run.settings
    episodes = []
    if signals:
        for row in picks_of(signals):
            task = row["task"]
            for rollout in range(EXPLORER_EPISODES):
                episodes.append(Explored(task, "explorer", i, rollout, signal=row["signal"]))
    else:
        tasks = training_tasks(run)
        for n in range(episodes_per_task * s.start_tasks):
            rollout, index = divmod(n, len(tasks))
            episodes.append(Explored(tasks[index], "explorer", i, rollout, signal="start"))
    return episodes


def explore(
    run: Run,
    agent: Model,
    task_set: Rows,
    signals: Rows,
    i: int,
) -> tuple[list[Explored], dict]:
    """Explores: the agent plays episodes of the picked tasks, at EXPLORER_TEMPERATURE.

    The prompt does not contain the reason why a task was picked. In evolution 0, no tasks are
    picked, and the agent plays training tasks.
    """
    s = run.settings
    episodes = begin_exploring(run, signals, START_EPISODES, i)
    for t in episodes:
        t.seed = seed_of(s.seed, "explore", i, t.task, t.rollout)
    make_env = partial(env_with, run, task_set)
    explored = run.play(agent, episodes, EXPLORER_TEMPERATURE, make_env)
    if not explored:
        return [], dict(episodes=0)
    return explored, summarise(explored, s.hard_threshold)


@by_one_rank
def abstract(run: Run, task_set: Rows, explored: list[Explored], i: int) -> tuple[Rows, dict]:
    """Creates candidate tasks from the explorer's episodes, in random order.

    Each row is one candidate with these entries:
        signal: The `signal` of the explored trajectory (see `Explored`).
        source: The id of the explored task.
        text: The request to the agent, as text.
        task: The definition from which the environment creates the task.
        solution: The replies that solve the new task.
    """
    generator = env_with(run, task_set).task_generator()
    rng = rng_of(run, "propose", i)
    rows = []
    for t in rng.sample(explored, len(explored)):
        for candidate in generator.finds(t.task, replies(t), rng):
            rows.append(dict(signal=t.signal, source=t.task, **candidate))
    return rows, dict(finds=len(rows))


def picks_of(signals: Rows) -> Rows:
    return [row for row in signals if row["picked"]]


def replies(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "assistant"]


@by_one_rank
def judge(run: Run, candidates: Rows, task_set: Rows, i: int) -> tuple[Rows, dict]:
    """Judges each candidate in order, and returns it as a proposal.

    At most MOST_NEW_TASKS candidates are added, or --start-tasks candidates in evolution 0. All
    later candidates are refused. A proposal contains the candidate's entries and three more:
        verdict: "added" or "refused".
        reason: The reason for refusing the candidate, or null if the candidate is added.
        replayed: True if the solution was replayed in the environment.
    """
    # 1. Collect the keys and the words of the tasks in D, to find candidates that are duplicates.
    s = run.settings
    env = env_with(run, task_set)
    generator = env.task_generator()
    keys = {generator.key(env.find(row["task"])) for row in task_set}
    texts = [words(row["text"]) for row in task_set if "text" in row]
    room = MOST_NEW_TASKS if i > 0 else s.start_tasks

    # 2. Judge each candidate. The solution is replayed last, and only if all other checks pass.
    proposals = []
    for row in candidates:
        reason = refusal(generator, row, keys, texts, s.near_text)
        if reason is None and room == 0:
            reason = "enough were added"
        replayed = s.verify and reason is None
        if replayed:
            reason = generator.verify(row)
        if reason is None:
            keys.add(generator.key(row["task"]))
            texts.append(words(row["text"]))
            room -= 1
        verdict = "added" if reason is None else "refused"
        proposals.append(row | dict(verdict=verdict, reason=reason, replayed=replayed))
    return proposals, counts(proposals)


def counts(proposals: list[dict]) -> dict:
    """Returns the number of proposals, the number of replayed solutions, the number of added
    proposals by signal, and the number of refused proposals by reason."""
    replayed = 0
    refused = Counter()
    added = Counter()
    for row in proposals:
        replayed += row["replayed"]
        if row["reason"] is None:
            added[row["signal"]] += 1
        else:
            refused[row["reason"]] += 1
    return dict(proposals=len(proposals), replayed=replayed, added=added, refused=refused)


def refusal(
    generator,
    candidate: dict,
    keys: set[str],
    texts: list[set[str]],
    near_text: float,
) -> str | None:
    """Runs all checks of a candidate except the replay of its solution.

    Returns the reason for refusing the candidate, or None if it passes.

    Args:
        keys: The keys of the tasks in D. Two tasks with the same key are the same task.
        texts: The words of each new task in D, as one set per task.
        near_text: A candidate is refused if the Jaccard similarity between its words and those of a
            new task in D reaches this threshold. The similarity is the number of words in both
            texts, divided by the number of words in at least one of them.
    """
    definition = candidate["task"]
    if definition is None:  # the explorer model's output could not be parsed as a task
        return "not of the form that was asked for"
    if not 0 < len(candidate["text"].strip()) <= LONGEST_TEXT:
        return "its text is empty or too long"
    if tells(candidate["text"], candidate["solution"]):
        return "its text tells the solution"
    reason = generator.refusal(definition)
    if reason:
        return reason
    if generator.key(definition) in keys:
        return "known already"
    text = words(candidate["text"])
    for other in texts:
        if len(text & other) >= near_text * len(text | other):
            return "a text that is there already"
    return None


def tells(text: str, solution: list[str]) -> bool:
    """Returns True if the text of a task contains a line of its solution, such as an action with
    its argument. Only letters and digits are compared. Short lines like "submit" are ignored."""
    squeezed = squeeze(text)
    lines = [squeeze(line.removeprefix("Action:")) for reply in solution
             for line in reply.splitlines()]
    return any(len(line) >= 8 and line in squeezed for line in lines)


def squeeze(text: str) -> str:
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", text).lower())


def words(text: str) -> set[str]:
    return set(text.lower().split())


def join(run: Run, task_set: Rows, proposals: Rows, i: int) -> tuple[Rows, dict]:
    """Returns the new task set D: the old task set, and each proposal with the verdict "added".

    Raises UsageError if the new task set is empty.
    """
    task_rows = list(task_set)
    env = env_with(run, task_rows)
    joined = 0
    for proposal in proposals:
        if proposal["reason"] is None:
            definition = proposal["task"]
            joined += 1
            task_rows.append(dict(task=env.add(definition), joined=i, signal=proposal["signal"],
                                  text=proposal["text"], definition=definition))
    if not task_rows:
        raise UsageError("unguided exploration found no start task; give --start-from train and "
                      "another --out, or a --model whose episodes yield some")
    return task_rows, dict(tasks=len(task_rows), joined=joined)


# ------------------------------------------------------------------------------------ settings
# The comment above a setting is its --help text. The bracket at the end of the comment names the
# source of the default: the summary of the paper [summary], the public notes about the paper
# [notes], the configuration of AgentEvolver [AgentEvolver], or our own choice [ours].

SignalNames = types.limited(str, f"must be a comma-separated list of {','.join(SIGNALS)}",
                            lambda text: set(text.split(",")) <= set(SIGNALS))
# A task needs at least two episodes, because the advantage of an episode is its reward relative to
# the mean reward of the task's episodes.
AtLeastTwo = types.limited(int, "must be at least 2", lambda n: n >= 2)
# The temperature must be above 0. With greedy decoding, all episodes of a task would be identical.
PositiveTemperature = types.limited(float, "must be at least 0.001", lambda x: x >= 0.001)
Fraction = types.limited(float, "must be at least 0 and at most 1", lambda x: 0 <= x <= 1)


@dataclass(frozen=True)
class Grpo:
    """Training with GRPO on the task set D"""
    # Initial agent of GRPO: "sft" first fine-tunes --model on expert trajectories, and "none"
    # starts from --model directly [ours; notes: none]
    warm_start: Literal["sft", "none"] = "sft"
    # Number T of training steps [notes]
    grpo_steps: types.Growing[types.Count] = 120
    # Number E of training steps between consecutive evolutions of the task set D. A segment has E
    # steps [notes; summary: each iteration]
    evolve_every: types.Count = 10
    # Number of segments between consecutive evaluations [notes: 20 steps]
    evaluate_every: types.Count = 2
    # Number B of tasks per training step [notes; AgentEvolver]
    step_tasks: types.Count = 32
    # Number K of episodes per task in a step [notes; AgentEvolver]
    step_rollouts: AtLeastTwo = 8
    # Constant learning rate of GRPO [notes; AgentEvolver]
    grpo_lr: types.Rate = 1e-6
    # Sampling temperature of training episodes [notes; AgentEvolver]
    grpo_temperature: PositiveTemperature = 0.9
    # Weight beta of the KL term; a larger weight makes the policy stay closer to the initial agent
    # [notes; AgentEvolver]
    grpo_kl: types.Weight = 1e-3


@dataclass(frozen=True)
class NewTasks(Grpo):
    """The initial task set, and the checks of new tasks"""
    # Source of the initial task set D_0: unguided exploration ("explore"), or the training split
    # ("train") [summary; train: ours]
    start_from: Literal["explore", "train"] = "explore"
    # Maximum number of tasks in D_0 [notes]
    start_tasks: types.Count = 100
    # Threshold for near-duplicates: a new task is refused if the Jaccard similarity between its
    # words and those of a new task in D reaches this value [AgentEvolver]
    near_text: Fraction = 0.8
    # Verify each new task before it joins D; the solution of the task is replayed in the
    # environment, and must earn the full reward [summary]
    verify: bool = True


@dataclass(frozen=True)
class Evolution(NewTasks, types.Stated):
    """Signals that guide exploration, and the growth of D"""
    # Kinds of weakness signals that guide exploration, separated by commas [summary]
    signals: SignalNames = ",".join(SIGNALS)
    # Minimum number of episodes of a segment in which a rare action pattern occurs; rarer patterns
    # are ignored [summary; notes: 2]
    rare_min: types.Count = 1
    # At most this many randomly chosen signals of each kind are explored per evolution [ours]
    picks: types.Count = 8
    # Tasks that the agent explores: those that the chosen signals name ("signals"), or the same
    # number of random tasks of the task set ("random") [summary; random: notes]
    guide: Literal["signals", "random"] = "signals"

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        never = s.method == "evolve" and s.grpo_steps <= s.evolve_every
        problem = f"the tasks would never evolve; give more than --evolve-every {s.evolve_every}"
        return [*super().conflicts(s), (never, "--grpo-steps", problem)]


@dataclass(frozen=True)
class Settings(Evolution, coevolve.Settings):
    """All settings of a run"""
    # Training method, one of the methods listed at the top of --help [the paper]
    method: str = "evolve"

    essential = (*coevolve.Settings.essential, "warm_start", "grpo_steps", "evolve_every",
                 "step_tasks", "step_rollouts", "grpo_lr", "grpo_kl", "start_from", "start_tasks",
                 "signals", "guide")
    presets = coevolve.Settings.presets | {
        "tiny": coevolve.Settings.presets["tiny"] | dict(step_tasks=16, near_text=1.0),
        "quick": coevolve.Settings.presets["quick"] | dict(
            grpo_steps=4, evolve_every=2, evaluate_every=1, start_tasks=12)}


METHODS = {
    "evolve": types.Method(evolve, (Common, Evolution),
                           "GRPO on a task set that grows from the agent's weaknesses",
                           beside=True),
    "grpo": types.Method(evolve, (Common, NewTasks), "GRPO on the start tasks only", beside=True),
}


if __name__ == "__main__":
    run_program(sys.argv[1:], Settings, Run, METHODS, "python evolve.py")
