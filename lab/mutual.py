"""CoEvolve: Training LLM Agents via Agent-Data Mutual Evolution (arXiv 2604.15840), in raw PyTorch.

The second system, beside `loop.py`: an agent is trained by GRPO on a set of tasks D, and D
grows out of what its own episodes show to be weak. Every E steps: signals -> picks ->
re-exploration -> new tasks with a solution -> verification by replay -> D. What a pattern of
actions is, how a find becomes a task and how it is verified belongs to an environment: its task
generator, beside it in `worlds/`.

`--method evolve` is all of it, `--method grpo` trains on the start tasks alone. No code of the
paper could be had: what the notes on it leave open is a setting, marked so.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from lab import loop as coevolve
from lab import play_env as envs
from lab import tokens as dpo
from lab.engine import sharding
from lab.harness.files import mean
from lab.harness.scores import played as played_of
from lab.harness.settings import EVOLVING, SIGNALS, SettingsError, segments_of, start_episodes
from lab.playing import explorer
from lab.playing.episodes import log_full, play, play_with, unusable
from lab.program.run import Run
from lab.tokens import Rollouts, Trajectory

# ----------------------------------------------------------------------------------- the loop


def loop_of(method: str):
    """The loop that a method runs: loop(run)."""
    return mutual if method in EVOLVING else coevolve.coevolve


def mutual(run: Run) -> None:
    """The agent changes its tasks, and they change it. Iteration i is a segment of E steps."""
    s, phase = run.settings, run.phase
    if s.warm_start == "sft":
        phase("experts.jsonl", coevolve.collect_experts)
        phase("sft-target", coevolve.train_sft, "target")
    coevolve.evaluations(run, "target", 0)

    if s.start_from == "train":
        phase("iter0/tasks.jsonl", first_tasks)
    else:
        evolve(run, 0)  # unguided: what becomes of it is D_0
    segments = segments_of(s)
    for i in range(1, segments + 1):
        phase(f"iter{i}/target-agent", train, i)
        if i % s.evaluate_every == 0 or i == segments:
            coevolve.evaluations(run, "target", i)
        if s.method == "evolve" and i < segments:
            phase(f"iter{i}/signals.jsonl", find_signals, i)
            evolve(run, i)


def evolve(run: Run, i: int) -> None:
    if not aimed(run, i):
        run.phase(f"iter{i}/explored.jsonl", explore, i)
    run.phase(f"iter{i}/proposals.jsonl", propose, i)
    run.phase(f"iter{i}/tasks.jsonl", join, i)


def task_set(run: Run, i: int) -> list[str]:
    """D after the evolution of segment i: ids, in the order in which they joined."""
    rows = rows_of(run, "tasks", i + 1)
    left = {row["id"] for row in rows if "left" in row}
    return [row["id"] for row in rows if row["id"] not in left]


# ------------------------------------------------------------------------------------- GRPO


def advantages(rewards: list[float]) -> list[float]:
    """A_k = (R_k - mean R) / (std R + 1e-6) of a group, std with K - 1; empty if all are equal."""
    rewards = torch.tensor(rewards, dtype=torch.float64)                                     # (K,)
    if len(rewards) < 2 or (rewards == rewards[0]).all():
        return []
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()


def grpo_loss(model, groups: list[Rollouts], sampler: dpo.Sampler, low: float, high: float,
              beta: float):
    """GRPO's loss summed over all action tokens of the groups: (); tokens, and those clipped.

        rho_j = pi(t_j|.) / pi_old(t_j|.)        d_j = log pi_ref(t_j|.) - log pi(t_j|.)
        L = - sum_j [ min(rho_j A, clip(rho_j, 1 - low, 1 + high) A) - beta (exp(d_j) - d_j - 1) ]

    k3 = exp(d) - d - 1 estimates KL(pi || pi_ref) from samples of pi.
    """
    surrogate, ratio, new, ref = dpo.clipped_surrogate(model, groups, sampler, low, high)    # (A,)
    d = ref - new
    clipped = ((ratio < 1 - low) | (ratio > 1 + high)).sum().item()
    return -(surrogate - beta * (d.exp() - d - 1)).sum(), {"action": [len(ratio), clipped]}


def train(run: Run, out: Path, i: int) -> dict:
    """Segment i: E steps of GRPO, played from the live weights; also moments and episodes."""
    s, trainer, tasks = run.settings, run.trainer, task_set(run, i - 1)
    before = run.agent_folder("target", i - 1)
    reference, model = trainer.load(run.agent_folder("target", 0)), trainer.load(before)
    trainer.check_saving(model, before)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=s.weight_decay, fused=True)
    moments = Path(before) / "moments.pt"
    if moments.exists():  # they are kept over the run, from its first update on
        sharding.load_moments(model, optimizer, moments)
    first, last = (i - 1) * s.evolve_every + 1, min(i * s.evolve_every, s.grpo_steps)
    batches = itertools.islice(batches_of(run), first - 1, last)
    checkpoint, episodes = trainer.checkpoint(), []
    _, done = checkpoint.restore(model, optimizer)  # what the steps made before logged and played
    for event in done:
        episodes += [Trajectory(**row) for row in event["episodes"]]
        run.log.dropped(run.folder.running, envs.LOST, event["lost"])
        log_full(run, event["log"]["too_long"], len(event["episodes"]) + len(event["lost"]))
        run.log("grpo", **event["log"])
    for step, batch in enumerate(batches, first):
        if step < first + len(done):
            continue
        played, lost, log = grpo_step(run, model, reference, optimizer, step, batch)
        log = dict(step=step, tasks=len(batch), D=len(tasks), **log)
        run.log("grpo", **log)
        episodes += played
        done.append(dict(log=log, episodes=[t.record() for t in played], lost=lost))
        if run.folder.on_main(checkpoint.due):
            checkpoint.save(model, optimizer, step, done)
    trainer.save(model, before, out)
    if optimizer.state:
        sharding.save_moments(run.accelerator, model, optimizer, out / "moments.pt")
    run.folder.write_jsonl(out / "episodes.jsonl", episodes)
    return dict(**played_of(episodes), steps=sum(event["log"]["updates"] for event in done),
                reward=done[-1]["log"]["reward"], tasks=len(tasks))


def grpo_step(run: Run, model, reference, optimizer, step: int, batch: list[str]):
    """Plays a batch's episodes and trains on them: the episodes, tasks of lost ones, numbers."""
    s, trainer = run.settings, run.trainer
    sampler = trainer.sampler(s.grpo_temperature)
    starts = [Trajectory(task, "target", step, k, run.seed("grpo", step, task, k))
              for task in batch for k in range(s.step_rollouts)]
    played = play_with(run, trainer.whole(model), trainer.encoder(), starts, s.grpo_temperature)
    # Equal rewards have no advantage: their tasks are left out of the minibatch that they are in.
    minibatches = [[g for g in minibatch if g.advantages] for minibatch in dpo.batches(
        groups_of(run, played), s.grpo_batch, "instructions", run.rng("grpo", step))]
    groups, updates = [g for minibatch in minibatches for g in minibatch], []
    for policy, name in ((reference, "ref"), (model, "old")):
        for g, log_probs in zip(groups, trainer.log_probs(policy, groups, sampler)):
            setattr(g, name, log_probs)
    loss = partial(grpo_loss, sampler=sampler, low=s.clip_low, high=s.clip_high, beta=s.grpo_kl)
    dpo.fit(run.accelerator, model, [[m for m in minibatches if m]],
            dpo.Objective(loss, dpo.count_action_tokens, ("tokens", "clipped")),
            trainer.optimisation(s.grpo_lr), updates.append, optimizer=optimizer)
    lost = list((Counter(t.task for t in starts) - Counter(t.task for t in played)).elements())
    return played, lost, dict(
        skipped=len(batch) - len(groups), kl=dpo.kl_of(groups), updates=len(updates),
        reward=mean(t.reward for t in played),
        success=mean(t.reward >= envs.SUCCESS for t in played),
        too_long=sum(t.ended == "context" for t in played),
        tokens=sum(len(t.ids) for t in played), loss=mean(update["loss"] for update in updates),
        clipped=mean(update["kinds"]["action"]["clipped"] for update in updates))


def batches_of(run: Run) -> Iterator[list[str]]:
    """The tasks of step 1, 2, ...: passes over D as it then is, shuffled by the run's seed.

    Tasks that join enter the next pass. No task is twice in a step, so one of a small D is smaller.
    With --start-share D_0 and the tasks added have passes of their own.
    """
    s, queues = run.settings, ([], [])
    for step in itertools.count(1):
        tasks, batch = task_set(run, (step - 1) // s.evolve_every), []
        size = most = min(s.step_tasks, len(tasks))
        pools = [tasks]
        if s.start_share:
            start = task_set(run, 0)  # none of them ever leaves
            pools = [start, tasks[len(start):]]
            most = min(len(start), max(math.ceil(s.start_share * size), size - len(pools[1])))
        for queue, pool, until in zip(queues, pools, (most, size)):
            queue[:] = [task for task in queue if task in pool]
            while len(batch) < until:
                if not queue:
                    queue += run.rng("pass", step).sample(pool, len(pool))
                    queue.sort(key=lambda task: task in batch, reverse=True)  # they come last
                batch.append(queue.pop())
        yield batch


def groups_of(run: Run, played: list[Trajectory]) -> list[Rollouts]:
    """The episodes that can train by task, with advantages, none where rewards are equal."""
    by_task = defaultdict(list)
    for t in played:
        if not unusable(t, run.settings):
            by_task[t.task].append(t)
    return [Rollouts(task, found, advantages=advantages([t.reward for t in found]))
            for task, found in by_task.items()]


# ----------------------------------------------------------------------------------- the signals
# A visit of a task is a step whose batch has it; y = 1 for an episode of reward 1, else 0.


def forgetting(scores: dict[str, list[float]], visited: set[str], window: int) -> dict[str, int]:
    """F: tasks visited since the last evolution with s_now < 0.5, and s >= 0.5 among the `window`
    scores before; with the number of scores since that success.

    scores: of each task, visit by visit the mean y of its group, or episode by episode y.
    """
    found = {}
    for task in visited:
        *before, now = scores[task]
        wins = [n for n, score in enumerate(reversed(before[-window:]), 1) if score >= 0.5]
        if now < 0.5 and wins:
            found[task] = wins[0]
    return found


def boundary(latest: dict[str, list[int]]) -> dict[str, int]:
    """B: tasks with 0 < sum of y < K in their latest group, one step and one policy; the sum."""
    return {task: sum(y) for task, y in latest.items() if 0 < sum(y) < len(y)}


def rare(patterns: list[set[str]], below: float, least: int) -> dict[str, int]:
    """P: patterns of executed actions in at least `least` episodes, but below `below` percent.

    patterns: those of each episode since the last evolution. With the number of episodes.
    """
    counts = Counter(p for held in patterns for p in held)
    return {p: n for p, n in counts.items() if n >= least and 100 * n < below * len(patterns)}


def visits(run: Run, i: int) -> Iterator[tuple[str, list[Trajectory]]]:
    """The visits of segment i: a task and its group of episodes, step by step."""
    for (_, task), visit in itertools.groupby(
            run.folder.trajectories(f"iter{i}/target-agent/episodes.jsonl"),
            key=lambda t: (t.iteration, t.task)):
        yield task, list(visit)


def find_signals(run: Run, out: Path, i: int) -> dict:
    """Every signal of segment i with its evidence, and which of them are picked."""
    s, generator, asked = run.settings, run.tasks.task_generator(), run.settings.signals.split(",")
    # Of earlier segments' episodes stay the scores and, of a task, the last visit's success.
    scores, won, groups, window = defaultdict(list), {}, {}, []
    for j in range(1, i + 1):
        for task, visit in visits(run, j):
            scores[task].append(mean(t.reward >= envs.SUCCESS for t in visit))
            if scores[task][-1] >= 0.5:
                won[task] = evidence(visit)["success"]
            if j == i:
                groups[task] = visit  # the latest
                window += visit
    held = [generator.patterns(t.task, explorer.replies(t)) for t in window]

    rows = [dict(signal="forgetting", task=task, scores_ago=n, **evidence(groups[task]),
                 success_then=won[task])
            for task, n in forgetting(scores, set(groups), s.window).items()]
    rows += [dict(signal="boundary", task=task, successes=n, **evidence(groups[task]))
             for task, n in boundary({task: [int(t.reward >= envs.SUCCESS) for t in visit]
                                      for task, visit in groups.items()}).items()]
    for pattern, n in rare(held, s.rare_below, s.rare_min).items():
        if aimed(run, i) and not generator.parses(pattern):
            continue
        holding = sorted((t for t, p in zip(window, held) if pattern in p), key=lambda t: t.reward)
        rows.append(dict(signal="rare", pattern=pattern, episodes=n, task=holding[0].task,
                         **evidence(holding)))
    rows = [row | dict(picked=False) for row in rows if row["signal"] in asked]
    rows.sort(key=lambda row: (SIGNALS.index(row["signal"]), row["task"], row.get("pattern", "")))
    picked = set()
    for kind in SIGNALS:
        found = [row for row in rows if row["signal"] == kind]
        for row in run.rng("picks", i, kind).sample(found, len(found)):
            own = sum(r["picked"] for r in found)
            if own < s.picks and row["task"] not in picked:  # one in several signals is picked once
                picked.add(row["task"])
                row["picked"] = True
    counts = {kind: sum(row["signal"] == kind for row in rows) for kind in SIGNALS}
    run.folder.write_jsonl(out, rows)
    run.log("signals", iteration=i, **counts, picked=len(picked), patterns=len(set().union(*held)))
    return dict(**counts, picked=len(picked))


def evidence(episodes: list[Trajectory]) -> dict:
    """A failure among the episodes, and a success, as the conversations that they were."""
    return {name: next((t.messages for t in episodes if (t.reward >= envs.SUCCESS) == won), None)
            for name, won in (("failure", False), ("success", True))}


# ----------------------------------------------------------------------- from signals to tasks


def aimed(run: Run, i: int) -> bool:
    """Whether evolution i varies the picked tasks by script, without an explorer."""
    return i > 0 and run.settings.explorer == "aimed"


def places(run: Run, i: int) -> list[dict]:
    """The signals picked in segment i, or of --guide random as many tasks without a signal."""
    picks = [row for row in run.folder.read_jsonl(f"iter{i}/signals.jsonl") if row["picked"]]
    if run.settings.guide == "signals":
        return picks
    pool = task_set(run, i - 1)
    return [dict(task=task, signal="random") for task in run.rng("random", i).sample(
        pool, min(len(picks), len(pool)))]


def explore(run: Run, out: Path, i: int) -> dict:
    """Episodes of the explorer, who goes back to what was picked; for D_0 unguided."""
    s, picks = run.settings, []
    if i == 0:  # of training tasks
        tasks = run.tasks.training
        starts = [(tasks[n % len(tasks)], "start", n // len(tasks))
                  for n in range(start_episodes(s))]
    else:
        picks = places(run, i)
        starts = [(pick["task"], pick["signal"], n) for pick in picks
                  for n in range(s.explorer_episodes)]
    episodes = [Trajectory(task, kind, i, n, run.seed("explore", i, task, n))
                for task, kind, n in starts]
    known = [row["text"] for row in proposed(run, i)]
    played, taken = explorer.explore(run, episodes, picks if s.guide == "signals" else [], known,
                                     run.agent_folder("target", i))
    run.folder.write_jsonl(out, played)
    run.log("explored", iteration=i, episodes=len(played), **taken,
            tokens=sum(len(t.ids) for t in played), cut_replies=sum(t.cut_replies for t in played))
    return played_of(played)


def propose(run: Run, out: Path, i: int) -> dict:
    """Proposals of the explored episodes, or aimed ones, each with its verdict and its reason."""
    s, generator, rng = run.settings, run.tasks.task_generator(), run.rng("propose", i)
    if aimed(run, i):
        rows = [dict(signal=pick["signal"], source=pick["task"], **proposal)
                for pick in places(run, i) for _ in range(s.explorer_episodes)
                for proposal in generator.vary(pick["task"], pick.get("pattern"), rng)]
        rows = rng.sample(rows, len(rows))
    else:
        explored = run.folder.trajectories(f"iter{i}/explored.jsonl")
        rows = [dict(signal=t.agent, source=t.task, **proposal)
                for t in rng.sample(explored, len(explored))
                for proposal in explorer.abstract(generator, t, rng)]
    counts = judge(run, generator, rows, i)
    run.folder.write_jsonl(out, rows)
    run.log("proposals", iteration=i, proposals=len(rows), **counts,
            kinds=Counter(row["signal"] for row in rows if not row["reason"]),
            refused=Counter(row["reason"] for row in rows if row["reason"]))
    return dict(proposals=len(rows), added=counts["added"])


def judge(run: Run, generator, rows: list[dict], i: int) -> dict:
    """Adds verdict and reason to each proposal; how many were replayed, tried and added."""
    s, joined = run.settings, [row["id"] for row in rows_of(run, "tasks", i)]
    known = {generator.key(task) for task in run.tasks.definitions(joined)}
    texts = [set(row["text"].lower().split()) for row in proposed(run, i)]
    most, waiting = s.add_most if i else s.start_tasks, []
    counts = dict(replayed=0, added=0, **dict(tried=0) if s.solve_check else {})
    for row in rows:
        reason = (refusal(generator, row, known, texts, s.near_text) or
                  ("enough were added" if counts["added"] == most else None))
        if s.verify and not reason:
            counts["replayed"] += 1
            reason = generator.verify(row)
        row |= dict(verdict="refused" if reason else "added", reason=reason)
        if reason is None:
            known.add(generator.key(row["task"]))
            texts.append(set(row["text"].lower().split()))
            counts["added"] += 1
            waiting.append(row)
        if s.solve_check and waiting and (counts["added"] == most or row is rows[-1]):
            counts["tried"] += try_to_solve(run, waiting, i)
            counts["added"] -= sum(row["verdict"] == "refused" for row in waiting)
            waiting = []
    run.tasks.tried_on = []
    return counts


def try_to_solve(run: Run, rows: list[dict], i: int) -> int:
    """The agent plays each proposal `solve_check` times, and those never or always solved are
    refused; the number of episodes."""
    s, tasks = run.settings, [row["task"] for row in rows]
    run.tasks.tried_on += tasks
    with closing(run.tasks.make_env()) as env:
        ids = [env.add(task) for task in tasks]
    episodes = [Trajectory(task, "target", i, n, run.seed("solve", i, task, n))
                for task in ids for n in range(s.solve_check)]
    played = play(run, run.agent_folder("target", i), episodes, s.grpo_temperature)
    for row, task in zip(rows, ids):
        won = [t.reward >= envs.SUCCESS for t in played if t.task == task]
        row["solved"] = sum(won)
        if not 0 < sum(won) < len(won):
            row |= dict(verdict="refused",
                        reason=f"the agent {'always' if any(won) else 'never'} solves it")
    return len(played)


def proposed(run: Run, i: int) -> list[dict]:
    """The proposals that were added before evolution i."""
    return [row for row in rows_of(run, "proposals", i) if row["verdict"] == "added"]


def rows_of(run: Run, name: str, before: int) -> list[dict]:
    """Rows of iter<j>/NAME.jsonl, j < before; those of training tasks were never proposed."""
    files = [f"iter{j}/{name}.jsonl" for j in range(before)]
    return [row for f in files if f in run.folder.phases for row in run.folder.read_jsonl(f)]


def refusal(generator, proposal: dict, known: set[str], texts: list[set[str]],
            near_text: float) -> str | None:
    """Why a proposal cannot join, before its solution is played; None if it may."""
    task, words = proposal["task"], set(proposal["text"].lower().split())
    if task is None:
        return "not of the form that was asked for"
    if reason := generator.refusal(task):
        return reason
    if generator.key(task) in known:
        return "known already"
    if any(len(words & other) >= near_text * len(words | other) for other in texts):  # Jaccard
        return "a text that is there already"
    return None


def join(run: Run, out: Path, i: int) -> dict:
    """The tasks that join D, and the mastered ones that leave it."""
    numbers, left = {}, []
    if i and run.settings.mastered == "leave":
        start, latest = task_set(run, 0), dict(visits(run, i))
        left = [task for task, visit in latest.items() if task not in start
                and all(t.reward >= envs.SUCCESS for t in visit)]
        numbers = dict(left=len(left))
    ids = run.tasks.add(out, [row["task"] for row in run.folder.read_jsonl(
        f"iter{i}/proposals.jsonl") if row["verdict"] == "added"], left)
    if i == 0 and not ids:
        raise SettingsError("no start task came of the unguided exploration; give --start-from "
                            "train and another --out, or a --model that finds something")
    return dict(tasks=len(ids), **numbers)


def first_tasks(run: Run, out: Path) -> dict:
    """D_0 of --start-from train: tasks of the training split, in their order."""
    tasks = run.tasks.training[:run.settings.start_tasks]
    run.folder.write_jsonl(out, [dict(id=task) for task in tasks])
    missing = run.settings.start_tasks - len(tasks)
    return dict(tasks=len(tasks), **dict(missing=missing) if missing else {})
