"""CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution (arXiv 2604.15840), in raw PyTorch.

The second system, on the core's phases: an agent is trained by GRPO on a set of tasks D, and D
grows out of what its own episodes show to be weak. Every E steps: signals -> picks ->
re-exploration -> finds -> verdicts -> D. What a pattern of actions is, how a find becomes a task
and how its solution is verified belongs to an environment: `tasks.py` in its folder of `worlds/`.

No code of the paper could be had: what the notes on it leave open is a setting, marked so.

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
import transformers
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FSDPModule

import coevolve
import dpo
import envs
from coevolve import Common, by_task, collect_experts, evaluations, read, scores, train_sft, write
from common.files import read_jsonl, seed_of
from common.settings import Count, Method, Rate, Share, Stated, Weight, Whole, limited
from dpo import Group, Trajectory
from worlds.expert_files import read_experts

# ------------------------------------------------------------------------------------ the loop


def evolve(run: Run, find: Callable | None = None) -> None:
    """The agent changes its tasks, and they change it. Segment i has E steps; GRPO is this loop
    without evolution. find(run, i, agent, tasks, signals): another explorer, see `find_tasks`."""
    s, once, agent, played, batches = run.settings, run.once, run.base, [], []
    if s.method == "evolve" or s.start_from == "explore":
        run.env.task_generator()  # a world without new tasks is refused at once

    def evolution(i, tasks=(), signals=()):  # D_0 comes of no tasks and no signals
        finds = (find or find_tasks)(run, i, agent, tasks, signals)
        proposals = once(f"iter{i}/proposals.jsonl", judge, finds, tasks, i=i)
        if s.solve_check:
            proposals = once(f"iter{i}/solved.jsonl", try_to_solve, proposals, tasks, agent, i=i)
        return once(f"iter{i}/tasks.jsonl", join, tasks, proposals, played[-1:], i=i)

    if s.warm_start == "sft":
        experts = once("experts.jsonl", collect_experts, *map(Path, filter(None, [s.experts])))
        agent = once("sft-target", train_sft, run.base, experts, name="target")
    evaluations(run, dict(target=agent), 0)
    first, segments = agent, math.ceil(s.grpo_steps / s.evolve_every)
    tasks = once("iter0/tasks.jsonl", first_tasks, i=0) if s.start_from == "train" else evolution(0)
    for i in range(1, segments + 1):
        batches = [once(f"iter{i}/batches.jsonl", plan, tasks, batches, i=i)]
        agent = once(f"iter{i}/target-agent", train, agent, first, tasks, *batches, i=i)
        played.append(agent / "episodes.jsonl")
        if i % s.evaluate_every == 0 or i == segments:
            evaluations(run, dict(target=agent), i)
        if s.method == "evolve" and i < segments:
            signals = once(f"iter{i}/signals.jsonl", find_signals, tasks, played, i=i)
            tasks = evolution(i, [tasks], [signals])


def find_tasks(run: Run, i: int, agent: Path, tasks: list[Path], signals: list[Path]) -> Path:
    """Proposals without verdicts: the agent's finds where signals lie, or variations of picks."""
    if signals and run.settings.explorer == "aimed":
        return run.once(f"iter{i}/finds.jsonl", vary, tasks, signals, i=i)
    explored = run.once(f"iter{i}/explored.jsonl", explore, agent, tasks, signals, i=i)
    return run.once(f"iter{i}/finds.jsonl", abstract, tasks, explored, i=i)


def by_one_rank(work: Callable) -> Callable:
    """work(run, ...) by the main rank, whose result all get: an environment may answer ranks
    differently, and they have to go the same way."""
    @wraps(work)
    def work_once(run, *given, **how):
        result = [work(run, *given, **how) if run.main else None]
        if run.ranks > 1:
            torch.distributed.broadcast_object_list(result, src=0, group=run.patient)
        return result[0]
    return work_once


def rng_of(run: Run, *names) -> random.Random:
    return random.Random(seed_of(run.settings.seed, *names))


# ---------------------------------------------------------------------------------------- GRPO


@dataclass
class Rollouts(Group):
    """The episodes of a task in one step, an advantage each; of all their action tokens, end to
    end, (a,), log pi of the policy that sampled them and of the first policy, in nats."""
    advantages: list[float] = field(default_factory=list)
    old: Tensor | None = None
    ref: Tensor | None = None
    drawn: Tensor | None = None  # as `old`, but as the sampler computed it

    @property
    def action_tokens(self) -> int:
        return sum(t.action_tokens for t in self.sequences)


def advantages(rewards: list[float]) -> list[float]:
    """The advantage A_k of each episode of a group; none if all rewards are equal."""
    rewards = torch.tensor(rewards, dtype=torch.float64)                          # (K,)
    if (rewards == rewards[0]).all():
        return []
    # A_k = (R_k - mean R) / (std R + 1e-6), std with K - 1
    advantage = rewards - rewards.mean()
    advantage = advantage / (rewards.std() + 1e-6)
    return advantage.tolist()


def grpo_loss(policy: Tensor, groups: list[Rollouts], s: Grpo) -> tuple[Tensor, dict]:
    """GRPO's loss summed over the groups' action tokens t_j; policy: log pi(t_j|.), (A,), in nats.

        rho_j = pi(t_j|.) / pi_old(t_j|.)        d_j = log pi_ref(t_j|.) - log pi(t_j|.)
        L = - sum_j [ min(rho_j A, clip(rho_j, 1 - low, 1 + high) A) - beta (exp(d_j) - d_j - 1) ]
    """
    old, ref, drawn = (torch.cat([getattr(g, name) for g in groups]).to(policy)
                       for name in ("old", "ref", "drawn"))                       # (A,) each
    advantage = policy.new_tensor([a for g in groups for t, a in zip(g.sequences, g.advantages)
                                   for _ in range(t.action_tokens)])              # (A,)
    ratio = (policy - old).exp()                                                  # (A,) rho
    bounded = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    surrogate = torch.minimum(ratio * advantage, bounded * advantage)
    if s.importance_cap:  # min(pi_old / pi_sampler, C), Yao et al. 2025
        surrogate = surrogate * (old - drawn).exp().clamp(max=s.importance_cap)
    # exp(d) - d - 1, k3, estimates KL(pi || pi_ref) from samples of pi.
    d = ref - policy
    k3 = d.exp() - d - 1
    loss = -(surrogate - s.grpo_kl * k3).sum()
    return loss, {"action": dict(count=len(ratio), clipped=(ratio != bounded).sum().item())}


def apart(groups: list[Rollouts], s: Grpo) -> dict:
    """The training forward minus the sampler's, in nats a token: mean, rms, share to be clipped."""
    if not groups:
        return {}
    d = torch.cat([g.old - g.drawn for g in groups]).double()                     # (A,)
    beyond = (d.exp() < 1 - s.clip_low) | (d.exp() > 1 + s.clip_high)
    return dict(mean=d.mean().item(), rms=d.square().mean().sqrt().item(),
                beyond=beyond.double().mean().item())


def train(run: Run, out: Path, agent: Path, first: Path, tasks: Path, batches: Path,
          i: int) -> dict:
    """The agent after the E steps of segment i, played from the live weights, with its episodes and
    AdamW's moments, which are kept from segment to segment. first: the agent that is pi_ref."""
    s, steps = run.settings, []  # of each step its line of the log, and its episodes
    model, reference = run.load(agent), run.load(first)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=s.weight_decay, fused=True)
    if (moments := agent / "moments.pt").exists():
        states.set_optimizer_state_dict(
            model, optimizer, torch.load(moments, map_location="cpu", weights_only=True, mmap=True),
            options=states.StateDictOptions(full_state_dict=True))
    checkpoint, planned = run.checkpoint(steps), read_jsonl(batches)
    done = checkpoint.restore(model, optimizer) if checkpoint else 0
    make_env = partial(world, run, d := read_jsonl(tasks))
    for n, row in enumerate(planned[done:], done + 1):
        played, line = grpo_step(run, model, reference, optimizer, make_env, **row)
        steps.append(dict(log=line | dict(D=len(active(d))), episodes=[vars(t) for t in played]))
        if checkpoint:
            checkpoint.keep(model, optimizer, n)
    dpo.save(run.accelerator, model, run.tokenizer, out)
    if optimizer.state:  # asked before the first update, torch would count one
        kept = states.get_optimizer_state_dict(model, optimizer, options=states.StateDictOptions(
            full_state_dict=True, cpu_offload=True))
        if run.main:
            torch.save(kept, out / "moments.pt")
    log = [step["log"] for step in steps]
    write(run, out / "train.jsonl", log)
    write(run, out / "episodes.jsonl", [t for step in steps for t in step["episodes"]])
    return dict(episodes=sum(len(step["episodes"]) for step in steps),
                **{name: log[-1][name] for name in ("reward", "kl", "D")},
                steps=sum(line["updates"] for line in log), tokens=sum(l["tokens"] for l in log))


def grpo_step(run: Run, model, reference, optimizer, make_env: Callable, step: int,
              tasks: list[str], **_) -> tuple[list[Trajectory], dict]:
    """Plays a step's episodes and trains on them: the episodes, and the step's line of the log."""
    s, dropped, updates = run.settings, Counter(), []
    played = run.play(model, [
        Trajectory(task, "target", step, k, seed_of(s.seed, "grpo", step, task, k))
        for task in tasks for k in range(s.step_rollouts)], s.grpo_temperature, make_env)
    groups = [Rollouts(found, advantages=advantages([t.reward for t in found]), drawn=torch.tensor(
        [x for t in found for x in t.log_probs])) for found in by_task(played, dropped).values()]
    # Equal rewards have no advantage: their tasks are left out of the minibatch that they are in.
    minibatches = [[g for g in minibatch if g.advantages] for minibatch in dpo.batches(
        groups, s.grpo_batch, "instructions", rng_of(run, "grpo", step))]
    groups = [g for minibatch in minibatches for g in minibatch]
    vocabulary = model.config.get_text_config().vocab_size
    log_probs = partial(run.log_probs, sampler=dpo.Sampler(
        s.grpo_temperature, run.encoder.never(vocabulary)))
    for policy, name in ((reference, "ref"), (model, "old")) if groups else ():
        with torch.no_grad():
            values = log_probs(policy, dpo.trajectories(groups)).cpu()
        for g, part in zip(groups, values.split([g.action_tokens for g in groups])):
            setattr(g, name, part)
    dpo.fit(model, [m for m in minibatches if m], log_probs, dpo.Objective(
        partial(grpo_loss, s=s), lambda g: g.action_tokens, s.grpo_lr,
        max_grad_norm=s.max_grad_norm, tokens=run.tokens_per_forward * run.ranks),
        updates.append, optimizer=optimizer)
    kl = [(g.old - g.ref).sum().item() for g in groups]  # in nats, of the episodes as sampled
    return played, dict(
        step=step, tasks=len(tasks), skipped=len(tasks) - len(groups), updates=len(updates),
        reward=mean(t.reward for t in played), too_long=dropped["too long"],
        success=mean(t.reward >= run.env.success for t in played),
        tokens=sum(len(t.ids) for t in played), loss=mean(u["loss"] for u in updates),
        norm=mean(u["norm"] for u in updates), sampler=apart(groups, s),
        clipped=mean(u["kinds"]["action"]["clipped"] for u in updates),
        kl=sum(kl) / max(1, len(dpo.trajectories(groups))))


def mean(values) -> float:
    values = [*values]
    return sum(values) / max(1, len(values))


def plan(run: Run, out: Path, tasks: Path, before: list[Path], i: int) -> dict:
    """The tasks of each step of segment i: passes over D, shuffled by the run's seed; what is left
    of a pass is `waiting` for the next segment. Tasks that join enter the next pass. No task is
    twice in a step. With --start-share D_0 and the tasks added have passes of their own."""
    s, rows, d = run.settings, [], active(read_jsonl(tasks))
    pool = [row["task"] for row in d]
    start = [row["task"] for row in d if row["joined"] == 0]  # none of them ever leaves
    size = most = min(s.step_tasks, len(pool))
    pools = [pool, []]
    if s.start_share:
        pools = [start, [task for task in pool if task not in start]]
        most = min(len(start), max(math.ceil(s.start_share * size), size - len(pools[1])))
    waiting = read_jsonl(before[0])[-1]["waiting"] if before else [[], []]
    waiting = [[task for task in queue if task in pool] for queue, pool in zip(waiting, pools)]
    for step in range((i - 1) * s.evolve_every + 1, min(i * s.evolve_every, s.grpo_steps) + 1):
        batch = []
        for queue, pool, until in zip(waiting, pools, (most, size)):
            while len(batch) < until:
                if not queue:
                    queue += rng_of(run, "pass", step).sample(pool, len(pool))
                    queue.sort(key=lambda task: task in batch, reverse=True)  # they come last
                batch.append(queue.pop())
        rows.append(dict(step=step, tasks=batch, waiting=[[*queue] for queue in waiting]))
    write(run, out, rows)
    return dict(D=len(d))


# ----------------------------------------------------------------------------------- the signals
# A visit of a task is a step whose batch has it; y = 1 for an episode that succeeds, else 0. A
# signal gives rows of signals.jsonl: the task at which it lies, and conversations as evidence.


@dataclass
class Seen:
    """What the signals look at after a segment."""
    success: float                             # the reward from which y = 1
    visits: dict[str, list[list[Trajectory]]]  # of its tasks the last visit and the W before it
    episodes: list[Trajectory]                 # all of the segment
    patterns: list[set[str]] = field(default_factory=list)  # of actions, in each of these

    def score(self, episodes: list[Trajectory]) -> float:
        return mean(t.reward >= self.success for t in episodes)

    def evidence(self, episodes: list[Trajectory]) -> dict:
        """A failure among the episodes, and a success, as the conversations that they were."""
        won, lost = (next((t.messages for t in episodes if (t.reward >= self.success) == y), None)
                     for y in (True, False))
        return dict(failure=lost, success=won)


def look_back(segments: Iterable[list[Trajectory]], success: float, window: int) -> Seen:
    visits = defaultdict(list)
    for episodes in segments:
        for (_, task), visit in itertools.groupby(episodes, lambda t: (t.iteration, t.task)):
            visits[task] = [*visits[task][-window:], [*visit]]
    return Seen(success, {t.task: visits[t.task] for t in episodes}, episodes)


def forgetting(seen: Seen, s: Grpo) -> Iterator[dict]:
    """F: tasks visited since the last evolution with s_now < 0.5, and s >= 0.5 among the W visits
    before; with the number of visits since that success."""
    for task, (*before, now) in seen.visits.items():
        wins = [n for n, visit in enumerate(reversed(before), 1) if seen.score(visit) >= 0.5]
        if seen.score(now) < 0.5 and wins:
            yield dict(task=task, visits_ago=wins[0], **seen.evidence(now),
                       success_then=seen.evidence(before[-wins[0]])["success"])


def boundary(seen: Seen, s: Grpo) -> Iterator[dict]:
    """B: tasks with 0 < sum of y < K at their latest visit, one step and one policy; the sum."""
    for task, (*_, now) in seen.visits.items():
        if 0 < seen.score(now) < 1:
            yield dict(task=task, successes=sum(t.reward >= seen.success for t in now),
                       **seen.evidence(now))


def rare(seen: Seen, s: Grpo) -> Iterator[dict]:
    """P: patterns of executed actions in less than theta percent of the episodes since the last
    evolution, in --rare-min at least; with the number of episodes, of which failures come first."""
    counts = Counter(pattern for held in seen.patterns for pattern in held)
    for pattern, n in counts.items():
        if n >= s.rare_min and 100 * n < s.rare_below * len(seen.episodes):
            holding = [t for t, held in zip(seen.episodes, seen.patterns) if pattern in held]
            holding.sort(key=lambda t: t.reward)
            yield dict(task=holding[0].task, pattern=pattern, episodes=n, **seen.evidence(holding))


SIGNALS = {"forgetting": forgetting, "boundary": boundary, "rare": rare}


@by_one_rank
def find_signals(run: Run, out: Path, tasks: Path, played: list[Path], i: int) -> dict:
    """Every signal of segment i with its evidence, and which are picked; with --guide random as
    many tasks without a signal. played: episodes of all segments so far."""
    s, d, found = run.settings, read_jsonl(tasks), {}
    seen = look_back(map(read, played), run.env.success, s.window)
    generator = world(run, d).task_generator()
    seen.patterns = [generator.patterns(t.task, replies(t)) for t in seen.episodes]
    for kind in filter(s.signals.split(",").__contains__, SIGNALS):
        rows = (dict(signal=kind, picked=False, **row) for row in SIGNALS[kind](seen, s))
        found[kind] = sorted((row for row in rows if s.explorer != "aimed" or "pattern" not in row
                              or generator.parses(row["pattern"])),
                             key=lambda row: (row["task"], row.get("pattern", "")))
    picked = pick([rng_of(run, "picks", i, kind).sample(rows, len(rows))
                   for kind, rows in found.items()], s.picks)
    rows = [row for of_kind in found.values() for row in of_kind]
    if s.guide == "random":
        pool = [row["task"] for row in active(d)]
        picked = [dict(signal="random", task=task) for task in rng_of(run, "random", i).sample(
            pool, min(len(picked), len(pool)))]
        rows += picked
    for row in picked:
        row["picked"] = True
    write(run, out, rows)
    return dict(**{kind: len(of_kind) for kind, of_kind in found.items()}, picked=len(picked),
                picks=Counter(f"picked {row['signal']}" for row in picked),
                patterns=len(set().union(*seen.patterns)))


def pick(found: list[list[dict]], most: int) -> list[dict]:
    """The first rows of each signal, which pick in turn, at most so many each, a task once."""
    picked, queues = {}, [iter(rows) for rows in found]
    for _ in range(most):
        for queue in queues:
            if row := next((row for row in queue if row["task"] not in picked), None):
                picked[row["task"]] = row
    return [*picked.values()]


# ----------------------------------------------------------------------- from signals to tasks
# A row of tasks.jsonl is a task of D, in the order in which they joined, also one that has `left`:
# ids of new tasks count all that ever joined. `tasks`, where it is a list: none before D_0.


def active(d: list[dict]) -> list[dict]:
    return [row for row in d if "left" not in row]


def world(run: Run, d: list[dict]):
    """An environment that knows the tasks of D."""
    env = run.make_env()
    for row in d:
        if "definition" in row and (task := env.add(row["definition"])) != row["task"]:
            raise envs.Refused(f"tasks.jsonl: {row['task']} is {task} here; keep its rows in order")
    return env


def with_added(run: Run, d: list[dict], proposals: Path, i: int) -> list[dict]:
    """D and the proposals that join."""
    env = world(run, d)
    return d + [dict(task=env.add(row["task"]), joined=i, signal=row["signal"], text=row["text"],
                     definition=row["task"]) for row in read_jsonl(proposals) if not row["reason"]]


def training_tasks(run: Run) -> list[str]:
    """The training split, or the tasks of --experts, without what is evaluated."""
    s, env = run.settings, run.env
    evaluated = {repr(env.find(task)) for split in run.splits for task in env.tasks(split)}
    tasks = [task for task, *_ in read_experts(s.experts, env)] if s.experts else env.tasks("train")
    return [task for task in tasks[:s.train_tasks or None] if repr(env.find(task)) not in evaluated]


def first_tasks(run: Run, out: Path, i: int) -> dict:
    """D_0 of --start-from train: training tasks, in their order."""
    tasks = training_tasks(run)[:run.settings.start_tasks]
    write(run, out, [dict(task=task, joined=0) for task in tasks])
    return dict(tasks=len(tasks), missing=run.settings.start_tasks - len(tasks))


def starts(run: Run, signals: list[Path], each: int) -> list[tuple[str, str, int]]:
    """(task, signal, rollout) of each exploration: of the picks, or `each` for a task of D_0."""
    s, known = run.settings, training_tasks(run)
    return [(pick["task"], pick["signal"], n) for pick in picks_of(signals)
            for n in range(s.explorer_episodes)] if signals else [
        (known[n % len(known)], "start", n // len(known)) for n in range(each * s.start_tasks)]


def explore(run: Run, out: Path, agent: Path, tasks: list[Path], signals: list[Path],
            i: int) -> dict:
    """Episodes of the agent, hotter than in training; six for a task of D_0 [ours]."""
    played = run.play(agent, [
        Trajectory(task, signal, i, n, seed_of(run.settings.seed, "explore", i, task, n))
        for task, signal, n in starts(run, signals, 6)],
        run.settings.explorer_temperature, partial(world, run, rows_of(tasks)))
    write(run, out, played)
    return scores(played, run) if played else dict(episodes=0)


@by_one_rank
def abstract(run: Run, out: Path, tasks: list[Path], explored: Path, i: int) -> dict:
    """What the explored episodes become: {signal, source, text, task, solution}, at random."""
    rng, generator = rng_of(run, "propose", i), world(run, rows_of(tasks)).task_generator()
    episodes = read(explored)
    rows = [dict(signal=t.agent, source=t.task, **found)
            for t in rng.sample(episodes, len(episodes))
            for found in generator.finds(t.task, replies(t), rng)]
    write(run, out, rows)
    return dict(finds=len(rows))


@by_one_rank
def vary(run: Run, out: Path, tasks: list[Path], signals: list[Path], i: int) -> dict:
    """Variations of the picked tasks by a script, in the form of `abstract`."""
    rng, generator = rng_of(run, "propose", i), world(run, rows_of(tasks)).task_generator()
    rows = [dict(signal=pick["signal"], source=pick["task"], **found)
            for pick in picks_of(signals) for _ in range(run.settings.explorer_episodes)
            for found in generator.vary(pick["task"], pick.get("pattern"), rng)]
    write(run, out, rng.sample(rows, len(rows)))
    return dict(finds=len(rows))


def rows_of(files: list[Path]) -> list[dict]:
    return [row for file in files for row in read_jsonl(file)]


def picks_of(signals: list[Path]) -> list[dict]:
    return [row for row in rows_of(signals) if row["picked"]]


def replies(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "assistant"]


@by_one_rank
def judge(run: Run, out: Path, finds: Path, tasks: list[Path], i: int) -> dict:
    """The finds with their verdicts. As many may join as are asked for."""
    s, d, rows = run.settings, rows_of(tasks), read_jsonl(finds)
    env = world(run, d)
    generator, room = env.task_generator(), s.add_most if i else s.start_tasks
    known = {generator.key(env.find(row["task"])) for row in d}
    texts = [words(row["text"]) for row in d if "text" in row]
    for n, row in enumerate(rows):
        reason = refusal(generator, row, known, texts, s.near_text) or (
            None if room else "enough were added")
        replayed = s.verify and not reason
        reason = generator.verify(row) if replayed else reason
        rows[n] = row | dict(verdict="refused" if reason else "added", reason=reason,
                             replayed=replayed)
        if not reason:
            known.add(generator.key(row["task"]))
            texts.append(words(row["text"]))
            room -= 1
    write(run, out, rows)
    return counts(rows)


def counts(rows: list[dict]) -> dict:
    refused = Counter(row["reason"] for row in rows if row["reason"])
    return dict(proposals=len(rows), replayed=sum(row["replayed"] for row in rows),
                added=len(rows) - refused.total(), refused=refused,
                kinds=Counter(f"added {row['signal']}" for row in rows if not row["reason"]))


def refusal(generator, proposal: dict, known: set[str], texts: list[set[str]],
            near_text: float) -> str | None:
    """Why a proposal cannot join, before its solution is played; None if it may."""
    task, said = proposal["task"], words(proposal["text"])
    if task is None:
        return "not of the form that was asked for"
    if reason := generator.refusal(task):
        return reason
    if generator.key(task) in known:
        return "known already"
    if any(len(said & other) >= near_text * len(said | other) for other in texts):  # Jaccard
        return "a text that is there already"
    return None


def words(text: str) -> set[str]:
    return set(text.lower().split())


def try_to_solve(run: Run, out: Path, proposals: Path, tasks: list[Path], agent: Path,
                 i: int) -> dict:
    """The proposals; those are refused that the agent, who plays them, always or never solves."""
    s, rows, before = run.settings, read_jsonl(proposals), rows_of(tasks)
    d = with_added(run, before, proposals, i)
    new = [row["task"] for row in d[len(before):]]
    played = run.play(agent, [
        Trajectory(task, "target", i, n, seed_of(s.seed, "solve", i, task, n))
        for task in new for n in range(s.solve_check)], s.grpo_temperature, partial(world, run, d))
    for task, row in zip(new, [row for row in rows if not row["reason"]]):
        row["solved"] = sum(t.reward >= run.env.success for t in played if t.task == task)
        if how := {0: "never", s.solve_check: "always"}.get(row["solved"]):
            row |= dict(verdict="refused", reason=f"the agent {how} solves it")
    write(run, out, rows)
    return counts(rows) | dict(tried=len(played))


def join(run: Run, out: Path, tasks: list[Path], proposals: Path, played: list[Path],
         i: int) -> dict:
    """D after an evolution: with the proposals that join, and, with --mastered leave, without the
    new tasks whose last visit's episodes were all solved. played: the episodes since the last."""
    before = d = rows_of(tasks)
    if i and run.settings.mastered == "leave":
        seen = look_back(map(read, played), run.env.success, 1)
        d = [row | dict(left=i) if row["joined"] and row["task"] in seen.visits
             and seen.score(seen.visits[row["task"]][-1]) == 1 else row for row in d]
    d = with_added(run, d, proposals, i)
    if not d:
        raise envs.Refused("no start task came of the unguided exploration; give --start-from "
                           "train and another --out, or a --model that finds something")
    write(run, out, d)
    return dict(tasks=len(d) - len(before), left=sum(row.get("left") == i for row in d),
                D=len(active(d)))


# ------------------------------------------------------------------------------------ settings
# In brackets the source: S, D, a summary of the paper and notes on it; AE, AgentEvolver's config,
# the likeliest for the rest of it; ours.

Signals = limited(str, f"must be some of {','.join(SIGNALS)}",
                        lambda text: {*text.split(",")} <= {*SIGNALS})
Plays = limited(int, "one play is solved never or always; give 0, or 2 and more",
                      lambda n: n == 0 or n >= 2)
Several = limited(int, "must be at least 2", lambda n: n >= 2)  # else no advantage
UpToOne = limited(float, "must be at least 0 and at most 1", lambda x: 0 <= x <= 1)


@dataclass(frozen=True)
class Steps:
    warm_start: Literal["sft", "none"] = "sft"  # starts after SFT, or as it is [D: none]
    # of unguided exploration [S], or of the training split [ours]
    start_from: Literal["explore", "train"] = "explore"
    start_tasks: Count = 100         # tasks of D_0, at most [D]
    grpo_steps: Count = 120          # T [D]
    evolve_every: Count = 10         # E, steps of a segment [D]
    evaluate_every: Count = 2        # segments between two evaluations [D: 20 steps]
    step_tasks: Count = 32           # B, tasks a step [D, AE]
    step_rollouts: Several = 8             # K, episodes of a task in a step [D, AE]
    grpo_batch: Count = 8            # tasks of an update, with those left out [AE; ours]
    grpo_lr: Rate = 1e-6             # constant [D, AE]
    grpo_temperature: Rate = 0.9     # of training episodes [D, AE]
    grpo_kl: Weight = 1e-3           # beta, weight of the KL to the first policy [D, AE]
    clip_low: Share = 0.2            # the ratio is clipped to 1 - this [AE]
    clip_high: Weight = 0.28         # and to 1 + this [AE]
    importance_cap: Weight = 0.0     # C, of pi_old / pi_sampler; 0: unweighted [Yao 2025]
    # the agent itself [ours]; aimed: later nobody, what is picked is varied by script [ours]
    explorer: Literal["policy", "aimed"] = "policy"
    explorer_temperature: Rate = 1.1  # [ours; AE: 1]
    near_text: UpToOne = 0.8               # a new text's largest Jaccard share with another [AE]
    verify: bool = True                    # new tasks join only if their solution replays [S]
    solve_check: Plays = 0                 # and if the agent solves some of so many plays [ours]


@dataclass(frozen=True)
class Grpo(Steps, Stated):
    signals: Signals = ",".join(SIGNALS)   # that lead exploration [S]
    window: Count = 5                # W, visits that forgetting looks back on [ours]
    rare_below: Rate = 2.0           # theta, percent of the episodes [ours]
    rare_min: Count = 1              # episodes that hold a rare pattern [S; D: 2]
    picks: Count = 8                 # of each signal, at most [ours]
    # what the explorer goes back to: picks [S], or as many tasks at random [D]
    guide: Literal["signals", "random"] = "signals"
    explorer_episodes: Count = 6     # of the explorer for a pick, or variations [ours]
    add_most: Whole = 20             # tasks that join in one evolution, at most [ours]
    start_share: UpToOne = 0.0             # of a step's tasks from D_0; 0: one pass over D [ours]
    # new tasks whose last visit's episodes were all solved stay, or leave for good [ours]
    mastered: Literal["keep", "leave"] = "keep"

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (s.method == "evolve" and s.grpo_steps <= s.evolve_every, "--grpo-steps",
                 f"the tasks would never evolve; give more than --evolve-every {s.evolve_every}")]


@dataclass(frozen=True)
class Settings(Grpo, coevolve.Settings):
    method: str = "evolve"                 # evolve, or grpo on the start tasks alone

    presets = coevolve.Settings.presets | {
        "tiny": coevolve.Settings.presets["tiny"] | dict(step_tasks=16, near_text=1.0),
        "aimed": dict(rare_min=2, start_share=0.5, mastered="leave")}

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        return [*coevolve.Settings.preset_names(values), values["explorer"]]


METHODS = {
    "evolve": Method(evolve, (Common, Grpo),
                     "GRPO on tasks that grow out of what the agent's episodes show to be weak"),
    "grpo": Method(evolve, (Common, Steps), "GRPO on the start tasks alone"),
}


# --------------------------------------------------------------------------------------- a run


class Run(coevolve.Run):
    """A run whose agent also plays while it is trained."""

    def replica(self, agent):
        """The model in a folder, or one that is being trained, as it plays, whole on each rank."""
        if isinstance(agent, (str, Path)):
            return super().replica(agent)
        if not self.bf16 and not isinstance(agent, FSDPModule):
            return agent.eval()  # itself
        with init_empty_weights():
            copy = transformers.AutoModelForCausalLM.from_config(
                agent.config, dtype=torch.bfloat16 if self.bf16 else torch.float32)
        for name, p in itertools.chain(agent.named_parameters(), agent.named_buffers()):
            whole = getattr(p.detach(), "full_tensor", lambda: p.detach())()  # one at a time
            set_module_tensor_to_device(copy, name, self.accelerator.device, whole.clone(),
                                        copy.dtype if isinstance(p, torch.nn.Parameter) else None)
        copy.tie_weights()
        copy.generation_config = transformers.GenerationConfig()
        return copy.eval()

    def checkpoint(self, steps: list[dict]):
        """What keeps states inside a segment, and `steps` with them; None: nothing does."""


if __name__ == "__main__":
    coevolve.main(sys.argv[1:], Settings, Run, METHODS)
