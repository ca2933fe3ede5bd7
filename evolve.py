"""CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution (arXiv 2604.15840), in raw PyTorch.

The agent is trained by GRPO, group relative policy optimisation, on a task set D that grows from
the agent's weaknesses. This is the method in pseudocode, where an assignment is written `<-`:

    pi   <- the agent after SFT, supervised fine-tuning;   pi_ref <- pi
    D    <- tasks from unguided exploration, whose solutions are verified, or training tasks
    for step = 1..T:
        X <- the next B tasks of a shuffled epoch over D
        for each task x in X: play K episodes with pi, and let R_1..R_K be their rewards
            A_k = (R_k - mean R) / (std R + 1e-6)      the advantages; skip x if all R_k are equal
        for each minibatch of X:                       one update by AdamW
            L = - mean over action tokens [ min(rho A, clip(rho, 1 - low, 1 + high) A) - beta k3 ]
        after every E steps, unless training ends:     one evolution of D
            signals    <- weaknesses: tasks that the agent used to solve (forgetting), tasks that it
                          solves only sometimes (boundary), and action patterns that it rarely
                          uses (rare)
            picks      <- a few signals of each kind, chosen at random
            candidates <- new tasks with solutions, made from exploration of the picked tasks
            D          <- D and the candidates that are new, and whose solution replays to reward 1

rho is the ratio of pi to the policy that played the episodes, clip limits it to the range from
1 - low to 1 + high, and k3 estimates the KL divergence from pi_ref, which has the weight beta (see
`grpo_loss`). T, B, K, E and beta are settings. low and high are the constants CLIP_LOW and
CLIP_HIGH.

    task        a request to the agent in an environment, known by its id
    D           the task set that the agent is trained on; D_0 is the set at the start
    step        one iteration of GRPO: the agent plays tasks of D, then it is trained on them
    update      one step of the optimiser, on one minibatch of a step's tasks
    task group  the K trajectories of one task in one step, which GRPO compares to each other
    segment     E steps; its files are in the folder iter<i>/
    evolution   the growth of D between two segments; it has the number i of the segment before it
    candidate   a new task with its solution, made from an explorer's episode (finds.jsonl)
    proposal    a candidate with a verdict (proposals.jsonl)

The environment defines what an action pattern is, how an episode becomes a task, and how a solution
is verified. This code is in `tasks.py` in the environment's folder in `environments/`.

We only had a summary of the paper and public notes on it, neither its code nor its full text. What
they leave open is a setting or a named constant, and brackets such as [summary], [notes],
[AgentEvolver] or [ours] name the source of each value. AgentEvolver is the public code base that
the paper's code is most likely based on. `docs/mutual.md` lists all departures. The largest are the
explorer and the time of evolution. The paper's explorer is Qwen3-Max, and reflects on each signal
first. Here, the explorer is the agent itself, which does not reflect (`lab/chat/explorer.py` has an
explorer that does). And D evolves after every E steps, not after each training iteration.

    python evolve.py --env webshop              # --method grpo trains on the start tasks only
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
from coevolve import Common, by_task, evaluate_all, expert_paths, summarise, train_sft, usable
from common import settings as types
from common.files import read_jsonl, seed_of
from common.settings import UsageError
from dpo import Group, Trajectory, action_count, better
from engine.chat import first_line
from engine.command import main
from engine.experts import collect_experts, evaluated_tasks
from engine.models import save
from engine.records import read, write
from engine.run import Run
from environments.expert_files import read_experts, tasks_of
from envs import Environment

# Neither the summary of the paper nor the notes have these numbers. The brackets name the source of
# each, as they do for the settings at the end of this file.

# The number of tasks in a minibatch, on which one update is run. Tasks without an advantage count,
# but are left out of the update [AgentEvolver; ours].
MINIBATCH = 8
# The distances below and above 1 at which the ratio of pi to pi_old is clipped [AgentEvolver].
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
EXPLORER_TEMPERATURE = 1.1  # sampling temperature of the explorer [ours; AgentEvolver: 1]
EXPLORER_EPISODES = 6       # number of explorer episodes for each pick [ours]
WINDOW = 5                  # W, the number of earlier groups that forgetting looks at [ours]
# The percentage theta of a segment's episodes below which an action pattern is rare [ours].
RARE_BELOW = 2.0
MOST_NEW_TASKS = 20         # maximum number of tasks that join D in one evolution [ours]

# ------------------------------------------------------------------------------------ the loop
# Phases read and write files, as in coevolve.py: phase(run, out, *files, **values) writes its
# output to `out`, a temporary path, and returns numbers for phases.json. In all phases, `task_set`
# is a list with the file of D, or an empty list before D exists. `signals` is a list with the file
# of the signals, or an empty list if exploration is unguided. `i` is the number of the segment or
# of the evolution; evolution 0 makes D_0.
Files = list[Path]


def evolve(run: Run, find: Callable | None = None) -> None:
    """Trains an agent by GRPO on a task set that evolves with it.

    The method "grpo" is the same loop without evolution.

    Args:
        run: The run.
        find: The explorer, a function with the arguments and the result of `find_tasks`, which is
            the default.
    """
    s = run.settings
    once = run.once
    if find is None:
        find = find_tasks
    if s.method == "evolve" or s.start_from == "explore":
        run.env.task_generator()  # raises Refused before the first phase if there is none

    # 1. Make the agent that training starts from. It is pi_ref in all segments.
    reference = run.base
    if s.warm_start == "sft":
        experts = once("experts.jsonl", collect_experts, *expert_paths(s))
        reference = once("sft-target", train_sft, run.base, experts, name="target")
    evaluate_all(run, {"target": reference}, 0)

    # 2. Make D_0 from the training split, or by exploration that no signal guides.
    if s.start_from == "train":
        task_set = [once("iter0/tasks.jsonl", first_tasks, i=0)]
    else:
        task_set = [evolution(run, find, reference, task_set=[], signals=[], i=0)]

    # 3. Train for E steps at a time. After each segment but the last, D evolves.
    agent = reference
    plans = []   # the file of the previous plan, which also has the rest of its epoch over D
    played = []  # one file of trajectories for each segment so far
    segments = math.ceil(s.grpo_steps / s.evolve_every)
    for i in range(1, segments + 1):
        steps = min(s.evolve_every, s.grpo_steps - (i - 1) * s.evolve_every)
        plans = [once(f"iter{i}/batches.jsonl", plan, task_set, plans, i=i, steps=steps)]
        agent = once(f"iter{i}/target-agent", train, agent, reference, task_set, plans[0],
                     i=i)
        played.append(agent / "episodes.jsonl")
        if i % s.evaluate_every == 0 or i == segments:
            evaluate_all(run, {"target": agent}, i)
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
    """Makes the next D: finds candidates, judges them, and adds those that pass.

    Args:
        run: The run.
        find: The explorer, see `evolve`.
        agent: The folder of the agent.
        task_set, signals, i: The files and the number described at the top of this section.

    Returns:
        The file of the new D.
    """
    candidates = find(run, i, agent, task_set, signals)
    proposals = run.once(f"iter{i}/proposals.jsonl", judge, candidates, task_set, i=i)
    return run.once(f"iter{i}/tasks.jsonl", join, task_set, proposals, i=i)


def find_tasks(run: Run, i: int, agent: Path, task_set: Files, signals: Files) -> Path:
    """Lets the agent itself explore, and makes candidates from its episodes.

    Returns the file of candidates.
    """
    explored = run.once(f"iter{i}/explored.jsonl", explore, agent, task_set, signals, i=i)
    return run.once(f"iter{i}/finds.jsonl", abstract, task_set, explored, i=i)


def by_one_rank(phase: Callable) -> Callable:
    """Decorates a phase so that only the main rank runs it, and all ranks return its numbers.

    An environment may return different results to different ranks, but all ranks must continue in
    the same way.
    """
    @wraps(phase)
    def run_on_main_rank(run, *inputs, **named):
        numbers = [phase(run, *inputs, **named)] if run.main else []
        return run.machine.gather(numbers)[0]
    return run_on_main_rank


def rng_of(run: Run, *names) -> random.Random:
    """Returns a random number generator that depends on the run's seed and these names only."""
    return random.Random(seed_of(run.settings.seed, *names))


def rows_of(files: Files) -> list[dict]:
    """Returns the rows of several .jsonl files as one list."""
    rows = []
    for file in files:
        rows += read_jsonl(file)
    return rows


def mean(values: list[float]) -> float:
    """Returns the mean of the values, or 0 if there are none."""
    return sum(values) / max(1, len(values))


# ---------------------------------------------------------------------------------------- GRPO
# Shapes: several task groups have A action tokens in total. One group has K trajectories with a
# action tokens. Tokens are concatenated in the order of groups and trajectories.

# The largest log-ratio of two policies, in nats, that is passed to exp [verl]. In fp32, exp
# overflows at 88.
MAX_LOG_RATIO = 20.0
# AdamW's moments are saved unsharded, even if the model is sharded over the ranks.
UNSHARDED = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class TaskGroup(Group):
    """The trajectories of one task in one step, with the tensors that the GRPO loss needs.

    Each tensor contains the log-probability log pi(t_j|.) of each action token t_j, in nats.
    """
    # (K,) The advantage of each trajectory. The list is empty if all rewards are equal, and then
    # the group has no gradient.
    advantages: list[float] = field(default_factory=list)
    old_log_probs: Tensor | None = None      # (a,) of pi_old, the policy that played the episodes
    ref_log_probs: Tensor | None = None      # (a,) of pi_ref, the policy before the first step
    # (a,) These are of pi_old, too, but as the sampler computed them during the episodes. They are
    # only logged (see `sampler_mismatch`).
    sampler_log_probs: Tensor | None = None


def advantages_of(rewards: list[float]) -> list[float]:
    """Computes the advantage A_k of each of K trajectories.

    Returns an empty list if all rewards are equal.
    """
    if not better(max(rewards), min(rewards)):  # they are equal up to rounding
        return []
    reward = torch.tensor(rewards, dtype=torch.float64)                           # (K,)
    # A_k = (R_k - mean R) / (std R + 1e-6), where std divides by K - 1, as in verl
    advantage = reward - reward.mean()
    advantage = advantage / (reward.std() + 1e-6)
    return advantage.tolist()


def grpo_loss(
    policy: Tensor,
    groups: list[TaskGroup],
    clip_low: float,
    clip_high: float,
    kl: float,
) -> tuple[dict, dict]:
    """Computes the GRPO loss, summed over the action tokens t_j of the groups.

        rho_j = pi(t_j|.) / pi_old(t_j|.)        d_j = log pi_ref(t_j|.) - log pi(t_j|.)
        L = - sum_j [ min(rho_j A_j, clip(rho_j, 1 - low, 1 + high) A_j)
                      - beta (exp(d_j) - d_j - 1) ]

    A_j is the advantage of the trajectory that contains t_j.

    Args:
        policy: log pi(t_j|.) of the policy that is trained, (A,), in nats.
        groups: The task groups, which all have advantages.
        clip_low, clip_high: The distances low and high from 1 at which rho_j is clipped.
        kl: The factor beta of the KL term.

    Returns:
        {loss: ()}, and statistics as a dict {name: sums}. `action` contains the number of action
        tokens, `count`, and how many of them had a clipped ratio. `far` is present only if d_j
        exceeds MAX_LOG_RATIO at some tokens, and contains their number.
    """
    old = torch.cat([group.old_log_probs for group in groups]).to(policy)         # (A,)
    ref = torch.cat([group.ref_log_probs for group in groups]).to(policy)         # (A,)
    advantage = policy.new_tensor(token_advantages(groups))                       # (A,)

    # min(rho_j A_j, clip(rho_j, 1 - low, 1 + high) A_j)
    ratio = (policy - old).clamp(max=MAX_LOG_RATIO).exp()                         # (A,) rho
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)

    # k3 = exp(d) - d - 1 estimates KL(pi || pi_ref) from samples of pi. Above MAX_LOG_RATIO, we
    # replace exp(d) by its tangent. It stays finite, and its gradient still pulls pi to pi_ref.
    d = ref - policy                                                              # (A,)
    bounded = d.clamp(max=MAX_LOG_RATIO)
    exp_d = bounded.exp() * (1 + (d - bounded))
    k3 = exp_d - d - 1

    loss = -(surrogate - kl * k3).sum()
    clipped = (ratio != clipped_ratio).sum().item()
    statistics = {"action": dict(count=len(ratio), clipped=clipped)}
    far = (d > MAX_LOG_RATIO).sum().item()
    if far:
        statistics["far"] = dict(count=far)
    return dict(loss=loss), statistics


def token_advantages(groups: list[TaskGroup]) -> list[float]:
    """Returns the advantage of each action token, (A,), which is that of its trajectory."""
    advantages = []
    for group in groups:
        for t, advantage in zip(group.trajectories, group.advantages):
            advantages += [advantage] * t.action_count
    return advantages


def train(
    run: Run,
    out: Path,
    agent: Path,
    reference: Path,
    task_set: Files,
    planned: Path,
    i: int,
) -> dict:
    """Trains the agent for the steps of a segment. Each step plays with the current weights.

    Args:
        run: The run.
        out: The folder of the trained agent. Apart from the model, it contains AdamW's moments,
            which the next segment continues with, the log, and the segment's trajectories.
        agent: The folder of the agent at the start of the segment.
        reference: The folder of the agent that is pi_ref.
        task_set: The file of D.
        planned: The file with the tasks of each step, see `plan`.
        i: The number of the segment.

    Returns:
        The totals of the segment, and the last step's reward and KL and the size of D.
    """
    # 1. Load the policy, pi_ref and the optimiser.
    s = run.settings
    model = run.load(agent)
    pi_ref = run.load(reference)
    optimizer = dpo.adamw(model, s.weight_decay)
    if i > 1:
        load_moments(model, optimizer, agent / "moments.pt")
    task_rows = rows_of(task_set)
    make_env = partial(env_with, run, task_rows)

    # 2. In each step, play and then train.
    log = []
    episodes = []
    rows = read_jsonl(planned)
    with run.bar(len(rows)) as progress:
        for row in rows:
            trajectories = play_step(run, model, row, make_env)
            line = train_step(run, model, pi_ref, optimizer, row, trajectories)
            log.append(line | dict(D=len(task_rows)))
            episodes += trajectories
            run.tracking.log("train", run.name, log[-1])
            progress.update()

    # 3. Save the agent, the moments, the log and the trajectories.
    save(run.machine.accelerator, model, run.encoder, out)
    save_moments(run, model, optimizer, out / "moments.pt")
    write(run, out / "train.jsonl", log)
    write(run, out / "episodes.jsonl", episodes)
    far = sum(line.get("far", 0) for line in log)
    if far:
        run.print(f"{run.name}: log pi_ref exceeded log pi by more than {MAX_LOG_RATIO:.0f} nats "
                  f"at {far} tokens, where the KL term is linear; lower --grpo-lr or raise "
                  "--grpo-kl")
    return dict(
        episodes=len(episodes),
        reward=log[-1]["reward"],
        kl=log[-1]["kl"],
        tasks=len(task_rows),
        steps=sum(line["updates"] for line in log),
        tokens=sum(line["tokens"] for line in log))


def load_moments(model, optimizer, file: Path) -> None:
    """Loads AdamW's moments from the previous segment.

    There are none if no step had an advantage so far, and AdamW then starts from zero moments.
    """
    moments = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if moments:
        states.set_optimizer_state_dict(model, optimizer, moments, options=UNSHARDED)


def save_moments(run: Run, model, optimizer, file: Path) -> None:
    """Saves AdamW's moments. All ranks must call this, because each may have a shard of them."""
    moments = {}
    # If there was no update yet, get_optimizer_state_dict would run one, to create the moments.
    if optimizer.state:
        moments = states.get_optimizer_state_dict(model, optimizer, options=UNSHARDED)
    if run.main:
        try:
            torch.save(moments, file)
        except RuntimeError as error:  # torch raises this if the disk is full
            raise OSError(f"{file}: {first_line(error)}; free some space on its disk") from None


def play_step(run: Run, model, row: dict, make_env: Callable) -> list[Trajectory]:
    """Plays the episodes of a step, K for each of its tasks.

    Args:
        run: The run.
        model: The policy.
        row: The plan of the step, {step, tasks}.
        make_env: A function that makes an environment in which all tasks of D can be played.

    Returns:
        The trajectories, ordered by task.
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
    trajectories: list[Trajectory],
) -> dict:
    """Trains the policy in place on the trajectories that it has just played.

    Args:
        run: The run.
        model: The policy.
        pi_ref: The reference model.
        optimizer: The AdamW optimiser of the policy.
        row: The plan of the step, {step, tasks}.
        trajectories: All trajectories of the step.

    Returns:
        The step's line of the log, see `log_line`.
    """
    # 1. Group the trajectories by task. Those that filled the context are left out [ours], so a
    # group may have fewer than K.
    s = run.settings
    dropped = Counter()
    played = [make_group(episodes) for episodes in by_task(usable(trajectories, dropped)).values()]
    batches = minibatches(played, MINIBATCH, rng_of(run, "grpo", row["step"]))
    groups = list(itertools.chain(*batches))  # those with advantages

    # 2. Compute log pi_ref and log pi_old. All log-probabilities, also those in training, are under
    # the distribution that the sampler draws from: the softmax at its temperature, without the
    # tokens that it never draws. If these counted, each negative advantage would raise them.
    sampler = run.encoder.sampler(s.grpo_temperature)
    log_probs = partial(run.log_probs, logits_processor=sampler.process_logits)
    if groups:
        store_log_probs(groups, "ref_log_probs", pi_ref, log_probs)
        store_log_probs(groups, "old_log_probs", model, log_probs)

    # 3. Run one update for each minibatch. The loss is the mean over the minibatch's action tokens.
    loss = partial(grpo_loss, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, kl=s.grpo_kl)
    updates = list(dpo.train(model, optimizer, batches, [s.grpo_lr] * len(batches), loss,
                             action_count, log_probs, s.max_grad_norm, run.fits))
    return log_line(run, row, trajectories, groups, updates, dropped["too long"])


def log_line(
    run: Run,
    row: dict,
    trajectories: list[Trajectory],
    groups: list[TaskGroup],
    updates: list[dict],
    too_long: int,
) -> dict:
    """Makes the line of the log for one step.

    Args:
        run: The run.
        row: The plan of the step, {step, tasks}.
        trajectories: All trajectories of the step.
        groups: The task groups that the policy was trained on.
        updates: The lines that `dpo.train` yielded, one for each minibatch.
        too_long: The number of trajectories that filled the context.

    Returns:
        The line. It contains `far` only if the KL term was linear at some tokens.
    """
    scored = summarise(trajectories, run.settings.hard_threshold)
    # The sum of log pi_old - log pi_ref over all trained tokens estimates KL(pi_old || pi_ref).
    kl = 0.0
    for group in groups:
        kl += (group.old_log_probs - group.ref_log_probs).sum().item()
    line = dict(
        step=row["step"],
        tasks=len(row["tasks"]),
        skipped=len(row["tasks"]) - len(groups),
        updates=len(updates),
        reward=scored["reward"],
        too_long=too_long,
        success=scored["success"],
        tokens=sum(len(t.ids) for t in trajectories),
        loss=mean([update["loss"] for update in updates]),
        norm=mean([update["norm"] for update in updates]),
        sampler=sampler_mismatch(groups, run.settings),
        clipped=mean([update["kinds"]["action"]["clipped"] for update in updates]),
        kl=kl / max(1, len(dpo.trajectories_of(groups))))  # nats per trajectory
    far = [update["kinds"]["far"]["count"] for update in updates if "far" in update["kinds"]]
    if far:
        line["far"] = sum(far)
    return line


def make_group(episodes: list[Trajectory]) -> TaskGroup:
    """Makes the task group of these trajectories, with their advantages."""
    rewards = []
    sampled = []
    for t in episodes:
        rewards.append(t.reward)
        sampled += t.log_probs
    return TaskGroup(episodes, advantages=advantages_of(rewards),
                     sampler_log_probs=torch.tensor(sampled))


def minibatches(groups: list[TaskGroup], size: int, rng: random.Random) -> list[list[TaskGroup]]:
    """Shuffles groups into minibatches of `size` groups, and then removes those without advantages.

    A minibatch may therefore be smaller than `size`. One that would be empty is left out.
    """
    batches = []
    for batch in dpo.batches(groups, size, rng):
        informative = [group for group in batch if group.advantages]
        if informative:
            batches.append(informative)
    return batches


@torch.no_grad()
def store_log_probs(
    groups: list[TaskGroup],
    name: str,
    policy,
    log_probs: Callable,
) -> None:
    """Computes a policy's log pi of all action tokens, and stores it in each group.

    Args:
        groups: The task groups.
        name: The field that takes the values, "ref_log_probs" or "old_log_probs".
        policy: The model.
        log_probs: A function log_probs(model, trajectories) -> (A,), the same as in training.
    """
    values = log_probs(policy, dpo.trajectories_of(groups)).cpu()                 # (A,)
    counts = [action_count([group]) for group in groups]
    for group, part in zip(groups, values.split(counts)):
        setattr(group, name, part)


def sampler_mismatch(groups: list[TaskGroup], s: Grpo) -> dict:
    """Measures how much log-probabilities in training differ from those of the sampler.

    Both are of the same policy, so they differ by rounding alone, which is larger in bf16.

    Returns:
        The mean and the root mean square of the difference, in nats per token, and the fraction of
        tokens whose ratio this difference alone would clip. The dict is empty without groups.
    """
    if not groups:
        return {}
    differences = [group.old_log_probs - group.sampler_log_probs for group in groups]
    difference = torch.cat(differences).double()                                  # (A,)
    ratio = difference.exp()
    beyond = ratio != ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return dict(
        mean=difference.mean().item(),
        rms=difference.square().mean().sqrt().item(),
        beyond=beyond.double().mean().item())


# ------------------------------------------------------------------------ the tasks of each step


def plan(run: Run, out: Path, task_set: Files, plans: Files, i: int, steps: int) -> dict:
    """Plans the tasks of each step of a segment, from epochs over D that the run's seed shuffles.

    The rest of an epoch continues in the next segment. Tasks that join D enter the next epoch. A
    step never contains a task twice.

    Args:
        run: The run.
        out: The file to write, with one row per step: its tasks, and the rest of the epoch after
            it (`waiting`).
        task_set: The file of D.
        plans: The file of the previous segment's plan, or an empty list in the first segment.
        i: The number of the segment.
        steps: The number of steps in the segment. It is E, or less in the last segment of a run.

    Returns:
        The number of tasks in D.
    """
    s = run.settings
    tasks_of_d = [row["task"] for row in rows_of(task_set)]
    remaining = rows_of(plans)[-1]["waiting"] if plans else []  # of the epoch, in reverse order
    rows = []
    first = (i - 1) * s.evolve_every + 1
    for step in range(first, first + steps):
        tasks = []
        while len(tasks) < min(s.step_tasks, len(tasks_of_d)):
            if not remaining:
                # A new epoch starts. Tasks that are in this step already are moved to its end.
                shuffled = rng_of(run, "pass", step).sample(tasks_of_d, len(tasks_of_d))
                remaining = sorted(shuffled, key=tasks.count, reverse=True)
            tasks.append(remaining.pop())
        rows.append(dict(step=step, tasks=tasks, waiting=list(remaining)))
    write(run, out, rows)
    return dict(tasks=len(tasks_of_d))


# ----------------------------------------------------------------------------------- the signals
# s(x), the success rate of a task x in one step, is the mean of y over its task group: y is 1 for a
# success and 0 for a failure. Each signal is a function that yields rows of signals.jsonl: the
# task, and conversations as evidence, which an explorer may reflect on.


@dataclass
class History:
    """The trajectories that the signals of a segment are computed from."""
    # Each task that was played in the segment, with its latest groups in the order of their steps.
    # They may come from earlier segments.
    groups: dict[str, list[list[Trajectory]]]
    episodes: list[Trajectory]  # all trajectories of the segment
    # The action patterns in each trajectory of `episodes`.
    patterns: list[set[str]] = field(default_factory=list)


def success_rate(group: list[Trajectory]) -> float:
    """Computes s(x), the fraction of successes in a task group."""
    return mean([not t.is_failure for t in group])


def evidence(episodes: list[Trajectory]) -> dict:
    """Returns the conversations of the first failure and the first success.

    If the list has no failure, or no success, the entry is None.
    """
    first = dict(failure=None, success=None)
    for t in reversed(episodes):
        first["failure" if t.is_failure else "success"] = t.messages
    return first


def collect_history(segments: Iterable[list[Trajectory]], window: int) -> History:
    """Collects the trajectories that the signals are computed from.

    Args:
        segments: The trajectories of each segment so far, in the order in which they were played.
        window: The number W of groups to keep for each task in addition to the latest one.

    Returns:
        The history of the tasks in the last segment.
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

    In the latest group of such a task, s(x) < 0.5. In at least one of the W groups before it,
    s(x) >= 0.5. `visits_ago` is the number of groups since the latest of these.
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
    """Yields the boundary tasks B, which the same policy both solves and fails.

    In the latest group of such a task, some of the K episodes succeed, but not all.
    """
    for task, (*_, now) in history.groups.items():
        if 0 < success_rate(now) < 1:
            successes = sum(not t.is_failure for t in now)
            yield dict(task=task, successes=successes, **evidence(now))


def rare(history: History, s: Evolution) -> Iterator[dict]:
    """Yields the rare action patterns P. A pattern p is rare if 0 < c_p / N < theta / 100.

    N is the number of episodes in the segment, and c_p is the number of those that contain p. c_p
    must also be at least --rare-min. Only actions that the environment executed form patterns. The
    episodes that contain p are sorted by reward, lowest first. The first one determines the task,
    and the evidence is their first failure and their first success.
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
def find_signals(run: Run, out: Path, task_set: Files, played: Files, i: int) -> dict:
    """Finds all signals of a segment, and picks those that are explored.

    With --guide random, random tasks are picked instead, and each is a row of the file as well.

    Args:
        run: The run.
        out: The file to write, with one row per signal: its kind, the task, the evidence, and
            whether it is `picked`.
        task_set: The file of D.
        played: The files with the trajectories of each segment so far.
        i: The number of the segment.

    Returns:
        The number of signals and of picks of each kind, and the number of action patterns.
    """
    # 1. Collect the trajectories, and their action patterns.
    s = run.settings
    task_rows = rows_of(task_set)
    generator = env_with(run, task_rows).task_generator()
    history = collect_history(map(read, played), WINDOW)
    for t in history.episodes:
        history.patterns.append(generator.patterns(t.task, replies(t)))

    # 2. Find the signals of each kind, and shuffle a copy of them, from which they are picked.
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

    # 3. Pick signals, or as a control the same number of tasks of D, without the signals.
    picked = pick(shuffled, s.picks)
    if s.guide == "random":
        pool = [row["task"] for row in task_rows]
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


def pick(kinds: list[list[dict]], limit: int) -> list[dict]:
    """Picks signals of all kinds, which take turns. No task is picked twice.

    Args:
        kinds: The signals of each kind, in the order in which they should be picked.
        limit: The maximum number of picks of each kind.
    """
    picked = {}  # task -> its signal
    queues = [iter(rows) for rows in kinds]
    for _ in range(limit):
        for queue in queues:
            for row in queue:  # continues after this kind's last pick
                if row["task"] not in picked:
                    picked[row["task"]] = row
                    break
    return list(picked.values())


# ----------------------------------------------------------------------- from signals to tasks
# Each row of tasks.jsonl is a task of D, in the order in which the tasks joined. In this file,
# `task_rows` are the rows of D.

START_EPISODES = 6   # episodes of unguided exploration for each task that D_0 should have [ours]
LONGEST_TEXT = 1000  # characters in the text of a new task; templates copy agents' words [ours]


@dataclass
class Explored(Trajectory):
    """A trajectory of an explorer.

    Its agent is "explorer", and its iteration is the number of the evolution.
    """
    # The kind of signal for which the task was picked, "random" for a random pick, or "start" in
    # unguided exploration.
    signal: str = ""


def env_with(run: Run, task_rows: list[dict]) -> Environment:
    """Makes an environment in which all tasks of D can be played.

    Raises Refused if a task would get a different id from the one in the file of D. This happens if
    somebody has reordered the rows of the file.
    """
    env = run.make_env()
    for row in task_rows:
        if "definition" in row:  # a new task, which is in no split
            task = env.add(row["definition"])
            if task != row["task"]:
                raise UsageError(f"tasks.jsonl: task {row['task']} would get the id {task}; "
                                 "restore the order of the rows")
    return env


def training_tasks(run: Run) -> list[str]:
    """Returns the ids of the training tasks, without those that the run also evaluates on.

    The training tasks are those of the file --experts if it is given, and otherwise those of the
    training split. Raises Refused if none is left.
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


def first_tasks(run: Run, out: Path, i: int) -> dict:
    """Makes D_0 from the first training tasks, for --start-from train.

    Returns the number of tasks, and how many are missing from --start-tasks.
    """
    limit = run.settings.start_tasks
    tasks = training_tasks(run)[:limit]
    write(run, out, [dict(task=task, joined=0) for task in tasks])
    return dict(tasks=len(tasks), missing=limit - len(tasks))


def begin_exploring(
    run: Run,
    signals: Files,
    episodes_per_task: int,
    i: int,
) -> list[Explored]:
    """Returns the episodes that an explorer should play, as trajectories that are still empty.

    Args:
        run: The run.
        signals: The file of signals. There are EXPLORER_EPISODES episodes for each picked signal.
            If the list is empty, exploration is unguided and cycles through the training tasks.
        episodes_per_task: In unguided exploration, the number of episodes for each task of D_0.
        i: The number of the evolution.
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


def explore(run: Run, out: Path, agent: Path, task_set: Files, signals: Files, i: int) -> dict:
    """Lets the agent play the picked tasks again, at a higher temperature than in training.

    The agent is not shown why a task was picked. In evolution 0, it plays training tasks instead.
    """
    s = run.settings
    episodes = begin_exploring(run, signals, START_EPISODES, i)
    for t in episodes:
        t.seed = seed_of(s.seed, "explore", i, t.task, t.rollout)
    make_env = partial(env_with, run, rows_of(task_set))
    explored = run.play(agent, episodes, EXPLORER_TEMPERATURE, make_env)
    write(run, out, explored)
    if not explored:
        return dict(episodes=0)
    return summarise(explored, s.hard_threshold)


@by_one_rank
def abstract(run: Run, out: Path, task_set: Files, explored: Path, i: int) -> dict:
    """Makes candidates from the explorer's episodes, in random order.

    Each row of the file `out` is {signal, source, text, task, solution}. `source` is the id of the
    explored task, `task` the definition from which the environment makes the new task, `text` the
    words of its request, and `solution` the replies that solve it.
    """
    generator = env_with(run, rows_of(task_set)).task_generator()
    rng = rng_of(run, "propose", i)
    episodes = [Explored(**row) for row in read_jsonl(explored)]
    rows = []
    for t in rng.sample(episodes, len(episodes)):
        for candidate in generator.finds(t.task, replies(t), rng):
            rows.append(dict(signal=t.signal, source=t.task, **candidate))
    write(run, out, rows)
    return dict(finds=len(rows))


def picks_of(signals: Files) -> list[dict]:
    return [row for row in rows_of(signals) if row["picked"]]


def replies(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "assistant"]


@by_one_rank
def judge(run: Run, out: Path, candidates: Path, task_set: Files, i: int) -> dict:
    """Judges the candidates in their order, until the maximum number of them has been accepted.

    The maximum is MOST_NEW_TASKS, or --start-tasks in evolution 0. A candidate becomes a proposal
    with a `verdict` ("added" or "refused"), its `reason` (null if it was added), and whether its
    solution was `replayed`.

    Args:
        run: The run.
        out: The file of proposals to write.
        candidates: The file of candidates.
        task_set: The file of D.
        i: The number of the evolution.

    Returns:
        The counts that `counts` returns.
    """
    # 1. Collect the keys and the texts of the tasks in D, which no new task may repeat.
    s = run.settings
    task_rows = rows_of(task_set)
    env = env_with(run, task_rows)
    generator = env.task_generator()
    keys = {generator.key(env.find(row["task"])) for row in task_rows}
    texts = [words(row["text"]) for row in task_rows if "text" in row]
    room = MOST_NEW_TASKS if i > 0 else s.start_tasks

    # 2. Judge each candidate. Its solution is replayed only if nothing else refuses it.
    proposals = []
    for row in read_jsonl(candidates):
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
    write(run, out, proposals)
    return counts(proposals)


def counts(proposals: list[dict]) -> dict:
    """Counts proposals: all, replayed ones, added ones by signal, and refused ones by reason."""
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
    """Checks whether a candidate may join D, apart from the replay of its solution.

    Args:
        generator: The environment's TaskGenerator.
        candidate: The row of the candidate, see `abstract`.
        keys: The keys of the tasks in D. Two tasks with the same key are the same task.
        texts: The set of words of each new task in D.
        near_text: The threshold for near-duplicates. A candidate is refused if the Jaccard
            similarity of its words to those of another text, |intersection| / |union|, is at least
            this high.

    Returns:
        The reason why the candidate is refused, or None.
    """
    definition = candidate["task"]
    if definition is None:  # an explorer model wrote something else
        return "not of the form that was asked for"
    if len(candidate["text"]) > LONGEST_TEXT:
        return "its text is too long"
    tells = getattr(generator, "tells", None)  # only some generators have it
    if tells and tells(candidate["text"], candidate["solution"]):
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


def words(text: str) -> set[str]:
    return set(text.lower().split())


def join(run: Run, out: Path, task_set: Files, proposals: Path, i: int) -> dict:
    """Makes the new D, which consists of the old D and the added proposals.

    Returns the number of tasks in D, and of those that joined. Raises Refused if D is empty.
    """
    task_rows = rows_of(task_set)
    env = env_with(run, task_rows)
    joined = 0
    for proposal in read_jsonl(proposals):
        if proposal["reason"] is None:
            definition = proposal["task"]
            joined += 1
            task_rows.append(dict(task=env.add(definition), joined=i, signal=proposal["signal"],
                                  text=proposal["text"], definition=definition))
    if not task_rows:
        raise UsageError("unguided exploration found no start task; give --start-from train and "
                      "another --out, or a --model whose episodes yield some")
    write(run, out, task_rows)
    return dict(tasks=len(task_rows), joined=joined)


# ------------------------------------------------------------------------------------ settings
# The comment above a setting is its --help text. The brackets at its end name the source of the
# default: the summary of the paper, notes on the paper, the configuration of AgentEvolver, or
# ourselves.

SignalNames = types.limited(str, f"must be a comma-separated list of {','.join(SIGNALS)}",
                            lambda text: set(text.split(",")) <= set(SIGNALS))
# A single episode of a task would have no advantage.
AtLeastTwo = types.limited(int, "must be at least 2", lambda n: n >= 2)
# At temperature 0, all episodes of a task would be equal.
PositiveTemperature = types.limited(float, "must be at least 0.001", lambda x: x >= 0.001)
Fraction = types.limited(float, "must be at least 0 and at most 1", lambda x: 0 <= x <= 1)


@dataclass(frozen=True)
class Grpo:
    """Training by GRPO on the task set D"""
    # The agent that GRPO starts from: the agent after SFT ("sft"), or the model that --model names
    # ("none") [ours; notes: none]
    warm_start: Literal["sft", "none"] = "sft"
    # The number T of training steps [notes]
    grpo_steps: types.Growing[types.Count] = 120
    # The number E of steps in a segment, after which D evolves [notes; summary: each iteration]
    evolve_every: types.Count = 10
    # The number of segments between two evaluate_all [notes: 20 steps]
    evaluate_every: types.Count = 2
    # The number B of tasks per training step [notes; AgentEvolver]
    step_tasks: types.Count = 32
    # The number K of episodes per task in a step [notes; AgentEvolver]
    step_rollouts: AtLeastTwo = 8
    # The learning rate of GRPO, which is constant [notes; AgentEvolver]
    grpo_lr: types.Rate = 1e-6
    # The sampling temperature of training episodes [notes; AgentEvolver]
    grpo_temperature: PositiveTemperature = 0.9
    # The factor beta of the KL divergence from the agent before the first step [notes;
    # AgentEvolver]
    grpo_kl: types.Weight = 1e-3


@dataclass(frozen=True)
class NewTasks(Grpo):
    """The start tasks, and the check of new tasks"""
    # The source of D_0, the task set at the start: unguided exploration ("explore"), or the
    # training split ("train") [summary; train: ours]
    start_from: Literal["explore", "train"] = "explore"
    # The maximum number of tasks in D_0 [notes]
    start_tasks: types.Count = 100
    # The threshold for near-duplicates: a new task is refused if the Jaccard similarity of its
    # words to those of another new task is at least this high [AgentEvolver]
    near_text: Fraction = 0.8
    # Whether a new task must be verified, which means that its solution is replayed in the
    # environment and earns the full reward [summary]
    verify: bool = True


@dataclass(frozen=True)
class Evolution(NewTasks, types.Stated):
    """Signals that guide exploration, and the growth of D"""
    # The kinds of signals that guide exploration, separated by commas [summary]
    signals: SignalNames = ",".join(SIGNALS)
    # The minimum number of episodes of a segment in which a rare pattern must occur [summary;
    # notes: 2]
    rare_min: types.Count = 1
    # The maximum number of signals of each kind that are picked for exploration [ours]
    picks: types.Count = 8
    # The tasks that the explorer plays again: those of picked signals ("signals"), or the same
    # number of random tasks ("random") [summary; random: notes]
    guide: Literal["signals", "random"] = "signals"

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        never = s.method == "evolve" and s.grpo_steps <= s.evolve_every
        problem = f"the tasks would never evolve; give more than --evolve-every {s.evolve_every}"
        return [*super().conflicts(s), (never, "--grpo-steps", problem)]


@dataclass(frozen=True)
class Settings(Evolution, coevolve.Settings):
    """All settings of a run"""
    # The training method, one of those listed above [the paper]
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
                           beside=True, group=lambda s: s.step_rollouts),
    "grpo": types.Method(evolve, (Common, NewTasks), "GRPO on the start tasks only", beside=True,
                         group=lambda s: s.step_rollouts),
}


if __name__ == "__main__":
    main(sys.argv[1:], Settings, Run, METHODS, "python evolve.py")
