"""CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution (arXiv 2604.15840), in raw PyTorch.

The second system, on the core's phases: an agent is trained by GRPO on a set of tasks D, and D
grows out of what the agent's own episodes show to be weak. After every segment of E steps:

    signals    where the agent forgets, hesitates, or hardly ever goes
    picks      the signals that the explorer goes back to
    finds      what the explorer's episodes become: a task, and actions that solve it
    proposals  the finds with a verdict; those that an environment can prove join D

What a pattern of actions is, how an episode becomes a task and how a solution is proved belongs to
an environment: `tasks.py` in its folder of `environments/`.

    task       what is asked for in an environment, known by its id; D is a set of them
    step       GRPO's iteration: it plays some tasks of D, and trains on what it played
    visit      a task's trajectories in one step, K of them
    segment    E steps; its files are in iter<i>/
    evolution  what stands between two segments; `i` is that of the segment before it

We had public notes on the paper, neither its code nor its full text: what they leave open is a
setting, marked so. Two departures: the explorer is the agent itself, where the paper has Qwen3-Max
(`lab/chat/explorer.py`), and D evolves after every E steps.

    python evolve.py --env webshop              # --method grpo trains on the start tasks alone
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states

import coevolve
import dpo
from coevolve import Common, by_task, evaluations, given_experts, outcomes, train_sft, usable
from common import settings as types
from common.files import read_jsonl, seed_of
from common.settings import Refused
from dpo import Group, Trajectory, action_count, better
from engine.chat import first_line
from engine.command import main
from engine.experts import collect_experts, evaluated_tasks
from engine.models import save
from engine.records import read, write
from engine.run import Run
from environments.expert_files import read_experts, tasks_of
from envs import Environment

# Numbers that the notes and the summary leave open. The source of each is in brackets, as below
# at the settings.
MINIBATCH = 8  # tasks of one update; a task without any advantage counts, too [AgentEvolver; ours]
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the ratio to the sampling policy is clipped to 1 - and 1 + this
#                                  [AgentEvolver]
EXPLORER_TEMPERATURE = 1.1  # [ours; AgentEvolver: 1]
EXPLORER_EPISODES = 6  # of the explorer for each pick [ours]
WINDOW = 5  # W, the number of earlier visits of a task that forgetting looks back on [ours]
RARE_BELOW = 2.0  # theta: a pattern is rare in less than this percentage of a segment's episodes
#                   [ours]
MOST_NEW_TASKS = 20  # of one evolution, at most [ours]

# ------------------------------------------------------------------------------------ the loop
# Phases read and write files, as in coevolve.py: phase(run, out, *files, **values) writes `out`
# and returns numbers that are recorded. `task_set` is the file of D, and `signals` that of the
# signals, a list of one; or an empty list before there is a D, or where no signal leads. `i` is the
# number of the segment, or of the evolution; evolution 0 makes D_0.
Files = list[Path]


def evolve(run: Run, find: Callable | None = None) -> None:
    """Trains an agent by GRPO on tasks that evolve with it. GRPO is this loop without evolution.

    Args:
        run: The run.
        find: The explorer, in place of `find_tasks`, with the same arguments and result.
    """
    s = run.settings
    once = run.once
    if find is None:
        find = find_tasks
    if s.method == "evolve" or s.start_from == "explore":
        run.env.task_generator()  # raises Refused before anything runs if there is none

    # The agent before its first step; it is pi_ref in all segments.
    reference = run.base
    if s.warm_start == "sft":
        experts = once("experts.jsonl", collect_experts, *given_experts(s))
        reference = once("sft-target", train_sft, run.base, experts, name="target")
    evaluations(run, {"target": reference}, 0)

    # D_0 is a part of the training split, or is found by exploration that no signal leads.
    if s.start_from == "train":
        task_set = [once("iter0/tasks.jsonl", first_tasks, i=0)]
    else:
        task_set = [evolution(run, find, reference, task_set=[], signals=[], i=0)]

    agent = reference
    plans = []   # the file of the last plan, with what is left of its pass
    played = []  # a file of trajectories for each segment so far
    segments = math.ceil(s.grpo_steps / s.evolve_every)
    for i in range(1, segments + 1):
        steps = min(s.evolve_every, s.grpo_steps - (i - 1) * s.evolve_every)
        plans = [once(f"iter{i}/batches.jsonl", plan, task_set, plans, i=i, steps=steps)]
        agent = once(f"iter{i}/target-agent", train, agent, reference, task_set, plans[0],
                     i=i)
        played.append(agent / "episodes.jsonl")
        if i % s.evaluate_every == 0 or i == segments:
            evaluations(run, {"target": agent}, i)
        if s.method == "evolve" and i < segments:
            signals = [once(f"iter{i}/signals.jsonl", find_signals, task_set, played, i=i)]
            task_set = [evolution(run, find, agent, task_set, signals, i=i)]


def evolution(
    run: Run,
    find: Callable,
    agent: Path,
    task_set: Files,
    signals: Files,
    i: int,
) -> Path:
    """Changes D: tasks are found by `find`, which does phases, judged, and join. The file of the
    new D."""
    finds = find(run, i, agent, task_set, signals)
    proposals = run.once(f"iter{i}/proposals.jsonl", judge, finds, task_set, i=i)
    return run.once(f"iter{i}/tasks.jsonl", join, task_set, proposals, i=i)


def find_tasks(run: Run, i: int, agent: Path, task_set: Files, signals: Files) -> Path:
    """Lets the agent itself explore, and makes tasks of its episodes. The file of finds."""
    explored = run.once(f"iter{i}/explored.jsonl", explore, agent, task_set, signals, i=i)
    return run.once(f"iter{i}/finds.jsonl", abstract, task_set, explored, i=i)


def by_one_rank(phase: Callable) -> Callable:
    """Lets the main rank alone do a phase, and gives all ranks its numbers. An environment may
    answer ranks differently, and they have to go the same way."""
    @wraps(phase)
    def done_by_one(run, *inputs, **named):
        numbers = [phase(run, *inputs, **named)] if run.main else []
        return run.machine.gather(numbers)[0]
    return done_by_one


def rng_of(run: Run, *names) -> random.Random:
    """Random numbers that are the same in every run with this seed, for these names."""
    return random.Random(seed_of(run.settings.seed, *names))


def rows_of(files: Files) -> list[dict]:
    """The rows of all these files."""
    rows = []
    for file in files:
        rows += read_jsonl(file)
    return rows


def mean(values: list[float]) -> float:
    """The mean, of no values 0."""
    return sum(values) / max(1, len(values))


# ---------------------------------------------------------------------------------------- GRPO
# Shapes: A action tokens of all visits end to end, a action tokens of one, K episodes.

FARTHEST = 20.0  # nats between two policies, up to which exp is taken; it overflows at 88 [verl]
# AdamW's moments are written whole, however the model is split over the ranks.
WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Visit(Group):
    """A task's episodes in one step, with what GRPO asks of them. The tensors have a value for
    each of their action tokens: log pi(t_j|.), in nats."""
    advantages: list[float] = field(default_factory=list)  # (K,); empty: the visit teaches nothing
    old: Tensor | None = None    # (a,) pi_old, the policy that played them, in a training pass
    ref: Tensor | None = None    # (a,) pi_ref, the policy before the first step
    drawn: Tensor | None = None  # (a,) pi_old again, as its sampler computed it; for the log alone


def advantages_of(rewards: list[float]) -> list[float]:
    """Computes the advantage A_k of each of K episodes; there are none if all rewards are equal."""
    if not better(max(rewards), min(rewards)):  # they are equal, but for rounding
        return []
    reward = torch.tensor(rewards, dtype=torch.float64)                           # (K,)
    # A_k = (R_k - mean R) / (std R + 1e-6), std with K - 1
    advantage = reward - reward.mean()
    advantage = advantage / (reward.std() + 1e-6)
    return advantage.tolist()


def grpo_loss(
    policy: Tensor,
    visits: list[Visit],
    clip_low: float,
    clip_high: float,
    kl: float,
) -> tuple[Tensor, dict]:
    """Computes GRPO's loss, summed over the action tokens t_j of some visits:

        rho_j = pi(t_j|.) / pi_old(t_j|.)        d_j = log pi_ref(t_j|.) - log pi(t_j|.)
        L = - sum_j [ min(rho_j A, clip(rho_j, 1 - low, 1 + high) A) - beta (exp(d_j) - d_j - 1) ]

    Args:
        policy: log pi(t_j|.), (A,), in nats.
        visits: The visits, with advantages.
        clip_low, clip_high: How far a ratio may go below 1, and above.
        kl: beta.

    Returns:
        The loss, (), and sums of statistics: `action` counts the tokens and those whose ratio was
        out of its range; `far`, where there are any, counts those that k3 is bounded for.
    """
    old = torch.cat([visit.old for visit in visits]).to(policy)                   # (A,)
    ref = torch.cat([visit.ref for visit in visits]).to(policy)                   # (A,)
    advantage = policy.new_tensor(advantage_of_tokens(visits))                    # (A,)

    # min(rho A, clip(rho, 1 - low, 1 + high) A)
    ratio = (policy - old).clamp(max=FARTHEST).exp()                              # (A,) rho
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)

    # k3 = exp(d) - d - 1 estimates KL(pi || pi_ref) from samples of pi. Beyond FARTHEST exp(d)
    # goes on as its tangent: it stays finite, and its gradient still points to pi_ref.
    d = ref - policy                                                              # (A,)
    near = d.clamp(max=FARTHEST)
    exp_d = near.exp() * (1 + (d - near))
    k3 = exp_d - d - 1

    loss = -(surrogate - kl * k3).sum()
    clipped = (ratio != clipped_ratio).sum().item()
    statistics = {"action": dict(count=len(ratio), clipped=clipped)}
    far = (d > FARTHEST).sum().item()
    if far:
        statistics["far"] = dict(count=far)
    return loss, statistics


def advantage_of_tokens(visits: list[Visit]) -> list[float]:
    """The advantage of each action token, (A,): that of its episode."""
    found = []
    for visit in visits:
        for t, advantage in zip(visit.trajectories, visit.advantages):
            found += [advantage] * t.action_count
    return found


def train(
    run: Run,
    out: Path,
    agent: Path,
    reference: Path,
    task_set: Files,
    planned: Path,
    i: int,
) -> dict:
    """Trains the agent for the E steps of a segment; the episodes are played by its live weights.

    Args:
        run: The run.
        out: The folder of the trained agent. Beside the model it has AdamW's moments, which go on
            from segment to segment, the log, and the segment's trajectories.
        agent: The agent that the segment begins with.
        reference: The agent that is pi_ref.
        task_set: D.
        planned: The tasks of each step, see `plan`.
        i: The number of the segment.

    Returns:
        What the segment took, and the last step's reward, KL and size of D.
    """
    s = run.settings
    model = run.load(agent)
    pi_ref = run.load(reference)
    optimizer = dpo.adamw(model, s.weight_decay)
    if i > 1:
        load_moments(model, optimizer, agent / "moments.pt")
    d = rows_of(task_set)
    make_env = partial(env_with, run, d)

    log = []
    episodes = []
    rows = read_jsonl(planned)
    with run.bar(len(rows)) as progress:
        for row in rows:
            trajectories = play_step(run, model, row, make_env)
            line = learn(run, model, pi_ref, optimizer, row, trajectories)
            log.append(line | dict(D=len(d)))
            episodes += trajectories
            run.tracking.log("train", run.name, log[-1])
            progress.update()

    save(run.machine.accelerator, model, run.encoder, out)
    save_moments(run, model, optimizer, out / "moments.pt")
    write(run, out / "train.jsonl", log)
    write(run, out / "episodes.jsonl", episodes)
    far = sum(line.get("far", 0) for line in log)
    if far:
        run.say(f"{run.name}: {far} times the policy was {FARTHEST:.0f} nats and more from pi_ref "
                "at a token; k3 is bounded there; lower --grpo-lr or raise --grpo-kl")
    return dict(
        episodes=len(episodes),
        reward=log[-1]["reward"],
        kl=log[-1]["kl"],
        tasks=len(d),
        steps=sum(line["updates"] for line in log),
        tokens=sum(line["tokens"] for line in log))


def load_moments(model, optimizer, file: Path) -> None:
    """Gives AdamW the moments of the segment before, if it has made an update by then."""
    moments = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if moments:
        states.set_optimizer_state_dict(model, optimizer, moments, options=WHOLE)


def save_moments(run: Run, model, optimizer, file: Path) -> None:
    """Writes AdamW's moments. Every rank has to call it."""
    moments = {}
    if optimizer.state:  # asked before the first update, torch would make one
        moments = states.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if run.main:
        try:
            torch.save(moments, file)
        except RuntimeError as error:  # as torch says it of a full disk
            raise OSError(f"{file}: {first_line(error)}; make room on its disk") from None


def play_step(run: Run, model, row: dict, make_env: Callable) -> list[Trajectory]:
    """Plays the episodes of a step, K of each of its tasks.

    Args:
        run: The run.
        model: The policy.
        row: The plan of the step, {step, tasks}.
        make_env: Makes an environment that knows the tasks.

    Returns:
        The trajectories, task by task.
    """
    s = run.settings
    step = row["step"]
    begun = []
    for task in row["tasks"]:
        for k in range(s.step_rollouts):
            seed = seed_of(s.seed, "grpo", step, task, k)
            begun.append(Trajectory(task, "target", step, k, seed))
    return run.play(model, begun, s.grpo_temperature, make_env)


def learn(
    run: Run,
    model,
    pi_ref,
    optimizer,
    row: dict,
    trajectories: list[Trajectory],
) -> dict:
    """Trains the policy, in place, on the trajectories that it has just played.

    Args:
        run: The run.
        model: The policy.
        pi_ref: The reference.
        optimizer: AdamW of the model.
        row: The plan of the step, {step, tasks}.
        trajectories: What was played.

    Returns:
        The step's line of the log.
    """
    s = run.settings
    # What filled the context is left out [ours]: fewer than K episodes are compared then.
    dropped = Counter()
    played = [visit_of(episodes) for episodes in by_task(usable(trajectories, dropped)).values()]
    batches = teaching_batches(played, MINIBATCH, rng_of(run, "grpo", row["step"]))
    visits = list(itertools.chain(*batches))  # those that teach

    # pi is what the sampler draws from: the softmax at its temperature, without some tokens.
    log_probs = partial(run.log_probs, scores=run.encoder.sampler(s.grpo_temperature).scores)
    if visits:
        note_log_probs(visits, "ref", pi_ref, log_probs)
        note_log_probs(visits, "old", model, log_probs)
    # A minibatch is one update. Its loss is the mean over its action tokens.
    loss = partial(grpo_loss, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, kl=s.grpo_kl)
    updates = list(dpo.train(model, optimizer, batches, [s.grpo_lr] * len(batches), loss,
                             action_count, log_probs, s.max_grad_norm, run.tokens_at_once))
    return log_line(run, row, trajectories, visits, updates, dropped["too long"])


def log_line(
    run: Run,
    row: dict,
    trajectories: list[Trajectory],
    visits: list[Visit],
    updates: list[dict],
    too_long: int,
) -> dict:
    """Makes the line of the log of one step.

    Args:
        run: The run.
        row: The plan of the step, {step, tasks}.
        trajectories: All that was played.
        visits: Those that trained.
        updates: The log of the optimiser, a row for each minibatch.
        too_long: How many trajectories could not train.

    Returns:
        The line; `far` is in it only if k3 was bounded for some tokens.
    """
    scored = outcomes(trajectories, run.settings.hard_threshold)
    kl = 0.0  # log pi_old - log pi_ref of all that trained, which estimates KL(pi_old || pi_ref)
    for visit in visits:
        kl += (visit.old - visit.ref).sum().item()
    line = dict(
        step=row["step"],
        tasks=len(row["tasks"]),
        skipped=len(row["tasks"]) - len(visits),
        updates=len(updates),
        reward=scored["reward"],
        too_long=too_long,
        success=scored["success"],
        tokens=sum(len(t.ids) for t in trajectories),
        loss=mean([update["loss"] for update in updates]),
        norm=mean([update["norm"] for update in updates]),
        sampler=sampler_gap(visits, run.settings),
        clipped=mean([update["kinds"]["action"]["clipped"] for update in updates]),
        kl=kl / max(1, len(dpo.trajectories_of(visits))))  # nats an episode
    far = [update["kinds"]["far"]["count"] for update in updates if "far" in update["kinds"]]
    if far:
        line["far"] = sum(far)
    return line


def visit_of(episodes: list[Trajectory]) -> Visit:
    """The visit that these trajectories of a task make."""
    rewards = []
    drawn = []
    for t in episodes:
        rewards.append(t.reward)
        drawn += t.log_probs
    return Visit(episodes, advantages=advantages_of(rewards), drawn=torch.tensor(drawn))


def teaching_batches(visits: list[Visit], size: int, rng: random.Random) -> list[list[Visit]]:
    """Shuffles visits into minibatches of so many. Then those without advantages are taken out, so
    that a minibatch may be smaller."""
    batches = []
    for batch in dpo.batches(visits, size, rng):
        teaching = [visit for visit in batch if visit.advantages]
        if teaching:
            batches.append(teaching)
    return batches


@torch.no_grad()
def note_log_probs(visits: list[Visit], name: str, policy, log_probs: Callable) -> None:
    """Puts a policy's log pi of all action tokens, as a training pass has them, into each visit, as
    `ref` or `old`."""
    values = log_probs(policy, dpo.trajectories_of(visits)).cpu()                 # (A,)
    counts = [action_count([visit]) for visit in visits]
    for visit, part in zip(visits, values.split(counts)):
        setattr(visit, name, part)


def sampler_gap(visits: list[Visit], s: Grpo) -> dict:
    """How far the training pass is from the sampler, in nats a token: the mean, the root of the
    mean square, and the share of tokens whose ratio is beyond the clip by that alone."""
    if not visits:
        return {}
    differences = [visit.old - visit.drawn for visit in visits]
    difference = torch.cat(differences).double()                                  # (A,)
    ratio = difference.exp()
    beyond = ratio != ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return dict(
        mean=difference.mean().item(),
        rms=difference.square().mean().sqrt().item(),
        beyond=beyond.double().mean().item())


# ------------------------------------------------------------------------ the tasks of each step


def plan(run: Run, out: Path, task_set: Files, plans: Files, i: int, steps: int) -> dict:
    """Plans the tasks of each step of a segment: passes over D, shuffled by the run's seed.

    What is left of a pass waits for the next segment; tasks that join enter the next pass. No task
    is twice in a step.

    Args:
        run: The run.
        out: The file, with a row for each step: its tasks, and what waits after it.
        task_set: D.
        plans: The plan of the segment before; none for the first.
        i: The number of the segment.
        steps: How many it has, which in the last one of a run may be less than E.
    """
    s = run.settings
    d = [row["task"] for row in rows_of(task_set)]
    waiting = rows_of(plans)[-1]["waiting"] if plans else []  # the rest of a pass, reversed
    rows = []
    first = (i - 1) * s.evolve_every + 1
    for step in range(first, first + steps):
        tasks = []
        while len(tasks) < min(s.step_tasks, len(d)):
            if not waiting:
                # A new pass begins. What is in this step already comes last.
                shuffled = rng_of(run, "pass", step).sample(d, len(d))
                waiting = sorted(shuffled, key=tasks.count, reverse=True)
            tasks.append(waiting.pop())
        rows.append(dict(step=step, tasks=tasks, waiting=list(waiting)))
    write(run, out, rows)
    return dict(tasks=len(d))


# ----------------------------------------------------------------------------------- the signals
# s(x) of a visit is the mean of y over its episodes; y = 1 if an episode succeeds, else 0. A signal
# yields rows of signals.jsonl: the task at which it lies, and conversations as evidence.


@dataclass
class History:
    """What the signals look at after a segment."""
    visits: dict[str, list[list[Trajectory]]]  # task of the segment -> its last visits, in order
    episodes: list[Trajectory]                 # of the segment
    patterns: list[set[str]] = field(default_factory=list)  # of each of these, of its actions


def score(visit: list[Trajectory]) -> float:
    """s(x) of a visit."""
    return mean([not t.is_failure for t in visit])


def evidence(episodes: list[Trajectory]) -> dict:
    """The conversations of the first failure and of the first success."""
    found = dict(failure=None, success=None)
    for t in reversed(episodes):
        found["failure" if t.is_failure else "success"] = t.messages
    return found


def look_back(segments: Iterable[list[Trajectory]], window: int) -> History:
    """Finds the visits that the signals look at.

    Args:
        segments: The trajectories of all segments so far, in the order in which they were played.
        window: How many visits before the last one count.

    Returns:
        The history of the last segment's tasks.
    """
    visits = defaultdict(dict)  # task -> step -> its trajectories
    last = []
    for last in segments:
        for t in last:
            visits[t.task].setdefault(t.iteration, []).append(t)
            if len(visits[t.task]) > window + 1:
                del visits[t.task][min(visits[t.task])]
    visited = {}
    for t in last:
        visited[t.task] = list(visits[t.task].values())
    return History(visited, last)


def forgetting(history: History, s: Evolution) -> Iterator[dict]:
    """F: tasks visited in the segment with s_now < 0.5, and s >= 0.5 among the W visits before;
    with the number of visits since that success."""
    for task, (*before, now) in history.visits.items():
        if score(now) >= 0.5:
            continue
        for ago, visit in enumerate(reversed(before), start=1):
            if score(visit) >= 0.5:
                then = evidence(visit)["success"]
                yield dict(task=task, visits_ago=ago, **evidence(now), success_then=then)
                break


def boundary(history: History, s: Evolution) -> Iterator[dict]:
    """B: tasks with 0 < sum of y < K at their last visit, which one policy played; the sum."""
    for task, (*_, now) in history.visits.items():
        if 0 < score(now) < 1:
            successes = sum(not t.is_failure for t in now)
            yield dict(task=task, successes=successes, **evidence(now))


def rare(history: History, s: Evolution) -> Iterator[dict]:
    """P: patterns p of executed actions with 0 < c_p / N < theta / 100, where c_p of the segment's
    N episodes hold p; c_p is at least --rare-min. The evidence is of those, failures first."""
    counts = Counter(itertools.chain(*history.patterns))
    for pattern, count in counts.items():
        if count >= s.rare_min and 100 * count < RARE_BELOW * len(history.episodes):
            holding = []
            for t, patterns in zip(history.episodes, history.patterns):
                if pattern in patterns:
                    holding.append(t)
            holding.sort(key=lambda t: t.reward)
            yield dict(task=holding[0].task, pattern=pattern, episodes=count,
                       **evidence(holding))


SIGNALS = {"forgetting": forgetting, "boundary": boundary, "rare": rare}


@by_one_rank
def find_signals(run: Run, out: Path, task_set: Files, played: Files, i: int) -> dict:
    """Finds every signal of a segment, with its evidence, and picks those that are explored. With
    --guide random each random pick is a row of the file, too. played: the files of trajectories of
    all segments so far."""
    s = run.settings
    d = rows_of(task_set)
    generator = env_with(run, d).task_generator()
    history = look_back(map(read, played), WINDOW)
    for t in history.episodes:
        history.patterns.append(generator.patterns(t.task, replies(t)))

    rows = []
    shuffled = []  # of each kind its rows, in an order of their own
    numbers = {}
    for kind in SIGNALS:
        if kind in s.signals.split(","):
            found = [dict(signal=kind, picked=False, **row) for row in SIGNALS[kind](history, s)]
            found.sort(key=lambda row: (row["task"], row.get("pattern", "")))
            rows += found
            rng = rng_of(run, "picks", i, kind)
            shuffled.append(rng.sample(found, len(found)))
            numbers[kind] = len(found)

    picked = pick(shuffled, s.picks)
    if s.guide == "random":  # the control: as many tasks of D, drawn without the signals
        pool = [row["task"] for row in d]
        tasks = rng_of(run, "random", i).sample(pool, len(picked))
        picked = [dict(signal="random", task=task) for task in tasks]
        rows += picked
    picks = Counter()
    for row in picked:
        row["picked"] = True
        picks[row["signal"]] += 1
    write(run, out, rows)
    patterns = set().union(*history.patterns)
    return numbers | dict(picks=picks, patterns=len(patterns))


def pick(kinds: list[list[dict]], most: int) -> list[dict]:
    """Picks the first rows of each kind of signal, which take turns, at most so many of a kind. A
    task is picked once."""
    picked = {}  # task -> its row
    queues = [iter(rows) for rows in kinds]
    for _ in range(most):
        for queue in queues:
            for row in queue:  # from where this kind's last turn ended
                if row["task"] not in picked:
                    picked[row["task"]] = row
                    break
    return list(picked.values())


# ----------------------------------------------------------------------- from signals to tasks
# A row of tasks.jsonl is a task of D, in the order in which they joined. `d` is these rows.

START_EPISODES = 6   # that the agent explores for each task that D_0 asks for [ours]
LONGEST_TEXT = 1000  # characters of a new task's: a template copies an agent's arguments [ours]


@dataclass
class Explored(Trajectory):
    """An episode of an explorer. Its agent is `explorer`, its iteration the evolution."""
    signal: str = ""  # what led the explorer to the task: a kind of signal, `random` or `start`


def env_with(run: Run, d: list[dict]) -> Environment:
    """Makes an environment that knows the tasks of D; Refused where their order was changed."""
    env = run.make_env()
    for row in d:
        if "definition" in row:  # it is in no split
            task = env.add(row["definition"])
            if task != row["task"]:
                raise Refused(f"tasks.jsonl: {row['task']} is {task} here; keep its rows in order")
    return env


def training_tasks(run: Run) -> list[str]:
    """The ids of the training split, or of the tasks of --experts, without what is evaluated."""
    s = run.settings
    env = run.env
    evaluated = evaluated_tasks(env, run.splits)
    if s.experts:
        tasks = tasks_of(read_experts(s.experts, env))
    else:
        tasks = env.tasks("train")
    if s.train_tasks:
        tasks = tasks[:s.train_tasks]
    left = [task for task in tasks if repr(env.find(task)) not in evaluated]
    if not left:
        raise Refused(f"of {len(tasks)} training tasks none is left to train on, since all are "
                      "evaluated; give other --experts, more --train-tasks or other --eval-splits")
    return left


def first_tasks(run: Run, out: Path, i: int) -> dict:
    """Makes D_0 of training tasks, in their order, for --start-from train."""
    asked = run.settings.start_tasks
    tasks = training_tasks(run)[:asked]
    write(run, out, [dict(task=task, joined=0) for task in tasks])
    return dict(tasks=len(tasks), missing=asked - len(tasks))


def begin_exploring(run: Run, signals: Files, each: int, i: int) -> list[Explored]:
    """Begins the episodes of an explorer: EXPLORER_EPISODES for each pick; where there are no
    signals so many as `each` says for each task of D_0."""
    s = run.settings
    begun = []
    if signals:
        for row in picks_of(signals):
            task = row["task"]
            for rollout in range(EXPLORER_EPISODES):
                begun.append(Explored(task, "explorer", i, rollout, signal=row["signal"]))
    else:
        known = training_tasks(run)
        for n in range(each * s.start_tasks):  # round after round of all of them
            rollout, place = divmod(n, len(known))
            begun.append(Explored(known[place], "explorer", i, rollout, signal="start"))
    return begun


def explore(run: Run, out: Path, agent: Path, task_set: Files, signals: Files, i: int) -> dict:
    """Lets the agent explore: it plays what was picked, at a higher temperature than in training.
    """
    s = run.settings
    begun = begin_exploring(run, signals, START_EPISODES, i)
    for t in begun:
        t.seed = seed_of(s.seed, "explore", i, t.task, t.rollout)
    make_env = partial(env_with, run, rows_of(task_set))
    explored = run.play(agent, begun, EXPLORER_TEMPERATURE, make_env)
    write(run, out, explored)
    if not explored:
        return dict(episodes=0)
    return outcomes(explored, s.hard_threshold)


@by_one_rank
def abstract(run: Run, out: Path, task_set: Files, explored: Path, i: int) -> dict:
    """Makes finds of what the explorer did, in random order: {signal, source, text, task,
    solution}. `source` is the id of the task that was explored. `task` is the definition of the new
    one, from which an environment makes it, and `text` is what it says."""
    generator = env_with(run, rows_of(task_set)).task_generator()
    rng = rng_of(run, "propose", i)
    episodes = [Explored(**row) for row in read_jsonl(explored)]
    rows = []
    for t in rng.sample(episodes, len(episodes)):
        for found in generator.finds(t.task, replies(t), rng):
            rows.append(dict(signal=t.signal, source=t.task, **found))
    write(run, out, rows)
    return dict(finds=len(rows))


def picks_of(signals: Files) -> list[dict]:
    return [row for row in rows_of(signals) if row["picked"]]


def replies(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "assistant"]


@by_one_rank
def judge(run: Run, out: Path, finds: Path, task_set: Files, i: int) -> dict:
    """Judges the finds, in their order, until as many have passed as may join. They become
    proposals, with `verdict`, `reason` (null for one that joins) and whether the solution was
    `replayed`."""
    s = run.settings
    d = rows_of(task_set)
    env = env_with(run, d)
    generator = env.task_generator()
    keys = {generator.key(env.find(row["task"])) for row in d}
    texts = [words(row["text"]) for row in d if "text" in row]
    room = MOST_NEW_TASKS if i > 0 else s.start_tasks

    judged = []
    for row in read_jsonl(finds):
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
        judged.append(row | dict(verdict=verdict, reason=reason, replayed=replayed))
    write(run, out, judged)
    return counts(judged)


def counts(proposals: list[dict]) -> dict:
    """How many proposals there are, and were replayed; those that join by signal, others by why."""
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
    proposal: dict,
    keys: set[str],
    texts: list[set[str]],
    near_text: float,
) -> str | None:
    """Finds out why a proposal cannot join, before its solution is played.

    Args:
        generator: The task generator of the environment.
        proposal: A find.
        keys: The keys of the tasks of D: tasks of one key are the same.
        texts: The sets of words of D's new tasks.
        near_text: The share of common words from which on a text is refused.

    Returns:
        The reason; None if the proposal may join.
    """
    definition = proposal["task"]
    if definition is None:
        return "not of the form that was asked for"
    if len(proposal["text"]) > LONGEST_TEXT:
        return "its text is too long"
    tells = getattr(generator, "tells", None)  # which not every generator has
    if tells and tells(proposal["text"], proposal["solution"]):
        return "its text tells the solution"
    reason = generator.refusal(definition)
    if reason:
        return reason
    if generator.key(definition) in keys:
        return "known already"
    said = words(proposal["text"])
    for other in texts:
        if len(said & other) >= near_text * len(said | other):  # Jaccard's share
            return "a text that is there already"
    return None


def words(text: str) -> set[str]:
    return set(text.lower().split())


def join(run: Run, out: Path, task_set: Files, proposals: Path, i: int) -> dict:
    """Makes the new D, which the proposals join that were added."""
    d = rows_of(task_set)
    env = env_with(run, d)
    joined = 0
    for proposal in read_jsonl(proposals):
        if proposal["reason"] is None:
            definition = proposal["task"]
            joined += 1
            d.append(dict(task=env.add(definition), joined=i, signal=proposal["signal"],
                          text=proposal["text"], definition=definition))
    if not d:
        raise Refused("no start task came of the unguided exploration; give --start-from train and "
                      "another --out, or a --model that finds something")
    write(run, out, d)
    return dict(tasks=len(d), joined=joined)


# ------------------------------------------------------------------------------------ settings
# In brackets the source: the summary of the paper; notes on it; AgentEvolver's configuration, the
# likeliest for the rest of it; ours.

Signals = types.limited(str, f"must be some of {','.join(SIGNALS)}",
                        lambda text: set(text.split(",")) <= set(SIGNALS))
Several = types.limited(int, "must be at least 2", lambda n: n >= 2)  # else there is no advantage
# Else all episodes of a task would be equal.
Hot = types.limited(float, "must be at least 0.001", lambda x: x >= 0.001)
UpToOne = types.limited(float, "must be at least 0 and at most 1", lambda x: 0 <= x <= 1)


@dataclass(frozen=True)
class Grpo:
    """Training by GRPO on the task set D"""
    # What training starts from: the agent after SFT, or the model as it is [ours; notes: none]
    warm_start: Literal["sft", "none"] = "sft"
    # Steps T of training [notes]
    grpo_steps: types.Growing[types.Count] = 120
    # Steps E of a segment, after which the tasks evolve [notes]
    evolve_every: types.Count = 10
    # Segments between two evaluations [notes: 20 steps]
    evaluate_every: types.Count = 2
    # Tasks B in a step [notes; AgentEvolver]
    step_tasks: types.Count = 32
    # Episodes K of a task in a step [notes; AgentEvolver]
    step_rollouts: Several = 8
    # The learning rate, which is constant [notes; AgentEvolver]
    grpo_lr: types.Rate = 1e-6
    # The temperature of training episodes [notes; AgentEvolver]
    grpo_temperature: Hot = 0.9
    # Beta, the weight of the KL divergence from the first policy [notes; AgentEvolver]
    grpo_kl: types.Weight = 1e-3


@dataclass(frozen=True)
class NewTasks(Grpo):
    """How tasks are found, and which of them join D"""
    # Where D_0 is from: unguided exploration, or the training split [summary; train: ours]
    start_from: Literal["explore", "train"] = "explore"
    # Tasks of D_0, at most [notes]
    start_tasks: types.Count = 100
    # A text that shares this much of its words with a known one is refused [AgentEvolver]
    near_text: UpToOne = 0.8
    # Whether new tasks join only if their solution is proved by playing it [summary]
    verify: bool = True


@dataclass(frozen=True)
class Evolution(NewTasks, types.Stated):
    """What leads exploration, and how D changes"""
    # The kinds of signals that lead exploration, with commas between them [summary]
    signals: Signals = ",".join(SIGNALS)
    # A rare pattern is a signal in so many episodes at least [summary; notes: 2]
    rare_min: types.Count = 1
    # Picks of each kind of signal, at most [ours]
    picks: types.Count = 8
    # What the explorer goes back to: picked signals, or as many random tasks [summary; random:
    # notes]
    guide: Literal["signals", "random"] = "signals"

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        never = s.method == "evolve" and s.grpo_steps <= s.evolve_every
        problem = f"the tasks would never evolve; give more than --evolve-every {s.evolve_every}"
        return [*super().conflicts(s), (never, "--grpo-steps", problem)]


@dataclass(frozen=True)
class Settings(Evolution, coevolve.Settings):
    """Every setting of a run"""
    # Which tasks are trained on; the list above says it of each method [the paper]
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
                           "GRPO on tasks that grow out of the weaknesses of the agent",
                           beside=True),
    "grpo": types.Method(evolve, (Common, NewTasks), "GRPO on the start tasks alone", beside=True),
}


if __name__ == "__main__":
    main(sys.argv[1:], Settings, Run, METHODS, "python evolve.py")
