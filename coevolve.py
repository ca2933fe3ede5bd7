"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

Read this file first: the loop, its phases, the pairs. `dpo.py` turns tokens into gradients,
`envs.py` turns text into text, `rollout.py` plays episodes, `settings.py` holds every number,
`runner.py` keeps a run's folder. Each phase reads files and writes one file or folder of the run,
so every stage can be looked at, and a run that was stopped goes on where it was.

A task is the paper's instruction u. An episode is one play of it, and its record is a trajectory e.

    python coevolve.py --env webshop          train and evaluate (run.sh does this)
    python coevolve.py show RUN               read trajectories of a run side by side
    python coevolve.py compare RUN RUN ...    means over seeds, by method
"""

import argparse
import gc
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

# Threads that wait must sleep: spinning, they take a shared machine's cores from their own team.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import chat
import dpo
import envs
import ppo
import report
from experts import play_expert, read_experts
from plan import dry_run
from rollout import LOST, Episode, check_lost, play
from runner import (Run, check_model, end, make_accelerator, make_env, one_line, stop, write_text,
                    writing)
from settings import Settings, SettingsError, agents_of, parse


# ----------------------------------------------------------------------------------- the loop


def coevolve(run: Run) -> None:
    """The method, Sections 4.1-4.3, and the paper's baselines: the same phases, fewer or others."""
    s = run.settings
    # The parameter-matched baseline of Section 5.4 has a second positive agent as its auxiliary.
    agents = agents_of(s.method)

    if s.method in ("chat", "evaluate"):  # nothing is trained
        return evaluate(run, "target", 0)
    if s.failure_from and "sft-failure" not in run.phases:
        find_failure_agent(run)  # if it cannot be used, it is said now

    collect_experts(run)
    for agent in agents:  # the same experts, another seed each
        if agent == "failure" and s.failure_from:
            take_failure_agent(run)
        else:
            train_sft(run, agent)                                                # Eq. (3)-(5)
        evaluate(run, agent, 0)
    if s.method == "sft":
        return

    if s.method in ("rft", "dart"):  # successes join the experts
        explore(run, "target", 1, s.samples)
        if s.method == "dart":
            explore_hard(run)
        join_successes(run)
        train_sft(run, "target", 1)
        return evaluate(run, "target", 1)

    if s.method == "ppo":
        for i in range(1, s.iterations + 1):
            explore(run, "target", i, s.ppo_rollouts)
            train_ppo(run, i)
            evaluate(run, "target", i)
        return

    for i in range(1, s.iterations + 1):  # ETO is this loop with the target alone
        for agent in agents:
            explore(run, agent, i, s.rollouts)
        for agent in reversed(agents):  # the failure agent first
            make_pairs(run, agents, agent, i)                                    # Eq. (6), (8)
            train_preferences(run, agent, i)                                     # Eq. (7), (9)
            if s.explore_again and agent != "target":
                explore_again(run, agent, i)
        for agent in agents:
            evaluate(run, agent, i)


# ---------------------------------------------------------------------------------- the phases


def collect_experts(run: Run) -> None:
    """experts.jsonl: expert trajectories of the training tasks, kept above expert_min_reward.

    They are the scripted expert's, or those of --experts FILE.
    """
    s = run.settings

    def work(out: Path) -> dict:
        tokenizer, env = AutoTokenizer.from_pretrained(run.base), run.make_env()
        encoder, rows = dpo.Encoder(tokenizer), []
        dropped = {"reward": [], "too long": [], LOST: []}

        def played(tasks):
            for task in tasks:
                try:
                    yield task, *play_expert(env, task)
                except envs.EnvError as error:
                    dropped[LOST].append(task)
                    check_lost(len(dropped[LOST]), len(tasks), error)

        found = (read_experts(s.experts, env)[:s.train_tasks or None] if s.experts else
                 played(env.tasks("train")[:s.train_tasks or None]))
        for task, messages, reward in found:
            ids, mask = encoder.encode(messages)
            if reward <= s.expert_min_reward and reward < envs.SUCCESS:
                dropped["reward"].append(task)
            elif len(ids) > s.max_tokens:
                dropped["too long"].append(task)
            else:
                turns = sum(m["role"] == "assistant" for m in messages)
                rows.append(dict(task=task, agent="expert", iteration=0, rollout=0, seed=0,
                                 messages=messages, ids=ids, action_mask=mask, reward=reward,
                                 steps=turns, cut_replies=0, ended="done"))
        env.close()
        for reason, names in dropped.items():
            run.log_dropped("experts", reason, names)
        if not rows:
            raise SettingsError(
                f"no expert trajectory is left: {len(dropped['reward'])} at or below "
                f"--expert-min-reward {s.expert_min_reward}, {len(dropped['too long'])} longer than "
                f"--max-tokens {s.max_tokens}; lower the one, raise the other or give better "
                "--experts")
        run.write_jsonl(out, rows)
        return dict(episodes=len(rows), tokens=sum(len(r["ids"]) for r in rows))

    run.phase("experts", "experts.jsonl", work)


def train_sft(run: Run, agent: str, i: int = 0) -> None:
    """sft-AGENT: the base model fine-tuned on the experts' action tokens, Eq. (3)-(5).

    With i, iter<i>/AGENT-agent: the same from the base again, on the experts of iteration i.
    """
    s = run.settings
    if i == 0:
        phase, experts, output = f"sft-{agent}", "experts.jsonl", f"sft-{agent}"
        seeds = ("sft", agent)
    else:
        phase, experts, output = f"iter{i}-sft", f"iter{i}/experts.jsonl", f"iter{i}/{agent}-agent"
        seeds = ("sft", agent, i)

    def work(out: Path) -> dict:
        groups = [dpo.Group(e["task"], [dpo.Sequence(e["ids"], e["action_mask"])])
                  for e in run.read_jsonl(experts)]
        rng = random.Random(seed_of(s.seed, *seeds))
        epochs = [dpo.batches(groups, s.sft_batch, "instructions", rng)
                  for _ in range(s.sft_epochs)]
        return run.train(phase, run.base, out, epochs, dpo.sft_objective, dpo.count_action_tokens,
                         lr=s.sft_lr, warmup=s.sft_warmup, schedule="cosine")

    run.phase(phase, output, work)


def take_failure_agent(run: Run) -> None:
    """sft-failure: the last failure agent of the run --failure-from, in place of Eq. (3)-(5)."""
    def work(out: Path) -> dict:
        if run.main:
            shutil.copytree(find_failure_agent(run), out)
        return {}

    run.phase("sft-failure", "sft-failure", work)


def find_failure_agent(run: Run) -> Path:
    """The last failure agent of the run --failure-from.

    SettingsError if that run has none or if its tokenizer is another: its tokens train the target.
    """
    source = Path(run.settings.failure_from)
    found = sorted(source.glob("iter*/failure-agent"), key=lambda p: int(p.parent.name[4:]))
    if not found:
        raise SettingsError(f"--failure-from {source}: no iter<i>/failure-agent in it; give "
                            "the folder of a run of --method coevolve")
    theirs, ours = (AutoTokenizer.from_pretrained(folder) for folder in (found[-1], run.base))
    if (theirs.get_vocab(), theirs.chat_template) != (ours.get_vocab(), ours.chat_template):
        raise SettingsError(f"--failure-from {source}: its tokenizer is not that of --model "
                            f"{run.settings.model}; give a run that started from this model")
    return found[-1]


def explore(run: Run, agent: str, i: int, rollouts: int) -> None:
    """iter<i>/AGENT.jsonl: so many sampled episodes of an agent on every training task."""
    play_tasks(run, agent, agent, i, run.agent(agent, i - 1), lambda task: range(rollouts))


def explore_again(run: Run, agent: str, i: int) -> None:
    """iter<i>/AGENT-more.jsonl: as many more, by the agent as this iteration trained it."""
    n = run.settings.rollouts
    play_tasks(run, f"{agent}-more", agent, i, run.agent(agent, i), lambda task: range(n, 2 * n))


def explore_hard(run: Run) -> None:
    """iter1/target-more.jsonl: DART's additional episodes, more of them where the first failed.

    Section 5.3: n rollouts estimate the difficulty "based on the fraction of successful rollouts",
    which is multiplied by the budget N. So we read: N (1 - successes / n), rounded; an instruction
    that always succeeds gets none.
    """
    s, played, successes = run.settings, Counter(), Counter()
    for row in run.read_jsonl("iter1/target.jsonl"):
        played[row["task"]] += 1
        successes[row["task"]] += row["reward"] >= envs.SUCCESS

    def extra(task: str) -> range:
        n = dart_rollouts(successes[task], played[task], s.dart_budget)
        return range(s.samples, s.samples + n)

    play_tasks(run, "target-more", "target", 1, run.agent("target", 0), extra)


def dart_rollouts(successes: int, n: int, budget: int) -> int:
    return round(budget * (1 - successes / n)) if n else budget  # n = 0: all were lost


def play_tasks(run: Run, name: str, agent: str, i: int, policy: Path, rollouts) -> None:
    """iter<i>/NAME.jsonl: sampled episodes of `policy`; rollouts(task) are their numbers."""
    s = run.settings

    def work(out: Path) -> dict:
        tasks = [e["task"] for e in run.read_jsonl("experts.jsonl")]
        episodes = [Episode(task, agent, i, r, seed_of(s.seed, agent, i, task, r))
                    for task in tasks for r in rollouts(task)]
        rows = play(run, f"explore-{name} {i}", policy, episodes, s.temperature)
        run.write_jsonl(out, rows)
        hard = mean(s.hard_threshold <= r["reward"] < envs.SUCCESS for r in rows)
        won = mean(r["reward"] >= envs.SUCCESS for r in rows)
        reward = mean(r["reward"] for r in rows)
        run.log("exploration", agent=name, iteration=i, trajectories=len(rows), success=won,
                negative=1 - won - hard if rows else 0.0, hard_negative=hard, reward=reward)
        return dict(episodes=len(rows), tokens=sum(len(r["ids"]) for r in rows), reward=reward,
                    hard_negative=hard)

    run.phase(f"iter{i}-explore-{name}", f"iter{i}/{name}.jsonl", work)


def join_successes(run: Run) -> None:
    """iter1/experts.jsonl: the experts and the sampled successes, for RFT and DART.

    Of an instruction's trajectories with equal actions, whatever the thoughts before them, the
    first is kept, the expert before all.
    """
    s = run.settings

    def work(out: Path) -> dict:
        experts, sampled, dropped = run.read_jsonl("experts.jsonl"), {}, Counter()
        for name in ("target", "target-more") if s.method == "dart" else ("target",):
            dropped.update(usable_rollouts(run, name, 1, sampled))
        rows = join(experts, sampled, dropped)
        run.write_jsonl(out, rows)
        run.log("joined", experts=len(experts), successes=len(rows) - len(experts), dropped=dropped)
        return dict(experts=len(experts), successes=len(rows) - len(experts))

    run.phase("iter1-experts", "iter1/experts.jsonl", work)


def join(experts: list[dict], sampled: dict, dropped: Counter) -> list[dict]:
    """`experts` followed by the new successes in `sampled` (task -> trajectories)."""
    def actions(row):
        return row["task"], *(" ".join(envs.parse_reply(m["content"]).split())
                              for m in row["messages"] if m["role"] == "assistant")

    rows, known = list(experts), {actions(e) for e in experts}
    for row in itertools.chain.from_iterable(sampled.values()):
        if row["reward"] < envs.SUCCESS:
            dropped["failure"] += 1
        elif actions(row) in known:
            dropped["known already"] += 1
        else:
            known.add(actions(row))
            rows.append(row)
    return rows


def evaluate(run: Run, agent: str, i: int) -> None:
    """eval-<i>-AGENT-SPLIT.jsonl: greedy episodes on the evaluated splits after iteration i."""
    s = run.settings
    for split in run.splits:
        def work(out: Path) -> dict:
            env = run.make_env()
            tasks = env.tasks(split)[:s.eval_tasks or None]
            env.close()
            rows = play(run, f"evaluate-{agent} {i}", run.agent(agent, i),
                            [Episode(task, agent, i, 0, 0) for task in tasks], temperature=0)
            run.write_jsonl(out, rows)
            rewards = [r["reward"] for r in rows]
            low, high = report.bootstrap_interval(rewards)
            scores = dict(reward=mean(rewards), reward_low=low, reward_high=high,
                          success=mean(r >= envs.SUCCESS for r in rewards),
                          steps=mean(r["steps"] for r in rows))
            if len(rows) < len(tasks):  # a mean over fewer tasks says so
                scores["lost"] = len(tasks) - len(rows)
            if full := sum(r["ended"] == "context" for r in rows):
                scores["out_of_context"] = full
            if cut_off := sum(r.get("cut_replies", 0) > 0 for r in rows):
                scores["with_cut_replies"] = cut_off
            if s.method == "chat":
                scores.update(chat.cost(rows, s))
            run.log("evaluation", agent=agent, iteration=i, split=split, tasks=len(rows), **scores)
            return dict(episodes=len(rows), tokens=sum(len(r["ids"]) for r in rows), **scores)

        run.phase(f"evaluate-{i}-{agent}-{split}", f"eval-{i}-{agent}-{split}.jsonl", work)


def make_pairs(run: Run, agents: tuple[str, ...], trains: str, i: int) -> None:
    """iter<i>/pairs-TRAINS.jsonl: the pairs that one agent learns from, D_fail or D_tgt.

    What makes no pair is counted.
    """
    s = run.settings

    def work(out: Path) -> dict:
        dropped = Counter()
        target, second, earlier = {}, {}, {}  # task -> usable trajectories
        for agent, rollouts in zip(agents, (target, second)):
            again = s.explore_again and trains == "target" and agent != "target"
            name = f"{agent}-more" if again else agent
            dropped.update(usable_rollouts(run, name, i, rollouts))
        if trains == "failure" and s.d_fail == "buffer":  # also failures of earlier iterations
            for j, agent in itertools.product(range(1, i), agents):
                usable_rollouts(run, agent, j, earlier)
        rows = []
        for expert in run.read_jsonl("experts.jsonl"):
            task = expert["task"]
            e_tgt, e_second, old = (found.get(task, []) for found in (target, second, earlier))
            if trains == "target":
                pairs = d_tgt(expert, e_tgt, e_second, s, dropped)
            elif trains == "positive":
                # Section 5.4: "trained in the same manner as ETO using only expert and the agent's
                # own failures". What the target then learns from is not said; here both agents'
                # trajectories, as beside a failure agent, so that nothing else differs.
                pairs = d_tgt(expert, e_second, [], s, dropped)
            else:
                pairs = d_fail(e_tgt, e_second, old, s, dropped)
            rows += [dict(task=task, trains=trains, **pair) for pair in pairs]
        run.write_jsonl(out, rows)
        run.log("pairs", iteration=i, trains=trains, kept=Counter(row["kind"] for row in rows),
                dropped=dropped)
        return dict(pairs=len(rows))

    run.phase(f"iter{i}-pairs-{trains}", f"iter{i}/pairs-{trains}.jsonl", work)


def usable_rollouts(run: Run, name: str, i: int, rollouts: dict[str, list]) -> Counter:
    """Adds the trajectories of iter<i>/NAME.jsonl to `rollouts` by task; counts those left out."""
    left_out = Counter()
    for row in run.read_jsonl(f"iter{i}/{name}.jsonl"):
        if row["ended"] == "context" and run.settings.too_long == "drop":
            left_out["too long"] += 1
        elif not any(row["action_mask"]):
            left_out["no whole turn"] += 1
        else:
            rollouts.setdefault(row["task"], []).append(row)
    return left_out


def train_preferences(run: Run, agent: str, i: int) -> None:
    """iter<i>/AGENT-agent: the agent after DPO on its pairs of this iteration, Eq. (7) or (9)."""
    s, first = run.settings, i == 1
    beta, lr = (s.beta, s.dpo_lr) if first else (s.beta_later, s.dpo_lr_later)

    def work(out: Path) -> dict:
        before = run.agent(agent, i - 1)
        groups = preference_groups(run, agent, i)
        if not groups:
            return stay(run, before, out,
                        f"iter{i}: no pairs for the {agent} agent, which stays as it is")
        rng = random.Random(seed_of(s.seed, "dpo", agent, i))
        steps = s.dpo_steps if agent == "target" else 0
        epochs = preference_epochs(groups, s, rng, steps)
        # Eq. (9), which is Eq. (7) for the failure agent: its pairs have no SFT weight.
        objective = partial(dpo.preference_objective, beta=beta,
                            lambda_dpo=1.0 if agent == "failure" else s.lambda_dpo,
                            lambda_sft=s.lambda_sft, log_prob=s.log_prob, sft_term=s.sft_term)

        divisor = dpo.count_pairs if s.normalise == "pairs" else dpo.sum_weights
        reference = before if s.reference == "phase" else run.agent(agent, 0)
        return run.train(f"iter{i}-{agent}", before, out, epochs, objective, divisor, lr=lr,
                         warmup=s.dpo_warmup, schedule=s.dpo_schedule, reference=reference,
                         groups=groups)

    run.phase(f"iter{i}-{agent}", f"iter{i}/{agent}-agent", work)


def stay(run: Run, before: Path, out: Path, why: str) -> dict:
    """A training phase that has nothing to learn from: the agent is copied."""
    run.say(why)
    if run.main:
        shutil.copytree(before, out)
    return dict(steps=0)


def preference_epochs(groups: list[dpo.Group], s: Settings, rng: random.Random, steps: int) -> list:
    """dpo_epochs passes over the pairs, shuffled anew each, or as many as hold `steps` batches."""
    epochs = []
    while sum(map(len, epochs)) < steps if steps else len(epochs) < s.dpo_epochs:
        batches = dpo.batches(groups, s.dpo_batch, s.batch_unit, rng)
        epochs.append(batches[:steps - sum(map(len, epochs))] if steps else batches)
    return epochs


def train_ppo(run: Run, i: int) -> None:
    """iter<i>/target-agent: the target after PPO on its own episodes of this iteration (ppo.py)."""
    s = run.settings

    def work(out: Path) -> dict:
        before, rollouts = run.agent("target", i - 1), {}
        dropped = usable_rollouts(run, "target", i, rollouts)
        groups = ppo.groups(rollouts, dropped)
        if not groups:
            run.log("ppo", iteration=i, episodes=0, kl=0.0, dropped=dropped)
            return stay(run, before, out, f"iter{i}: no two rollouts of a task to compare; the "
                                          "target stays as it is")
        for policy, name in ((before, "old"), (run.agent("target", 0), "sft")):
            model = run.load_to_train(policy)  # the same arithmetic as in training
            with run.bar(f"ppo {i} {name}", sum(g.tokens for g in groups), "token") as progress:
                ppo.add_log_probs(run.accelerator, model, groups, name, s.temperature,
                                  s.tokens_per_forward, progress)
            del model
            run.accelerator.free_memory()
        run.log("ppo", iteration=i, episodes=sum(len(g.sequences) for g in groups),
                kl=ppo.kl_of(groups), dropped=dropped)
        rng = random.Random(seed_of(s.seed, "ppo", i))
        epochs = [dpo.batches(groups, s.ppo_batch, "instructions", rng)
                  for _ in range(s.ppo_epochs)]
        objective = partial(ppo.objective, temperature=s.temperature, clip=s.ppo_clip, kl=s.ppo_kl)
        return run.train(f"iter{i}-target", before, out, epochs, objective,
                         dpo.count_action_tokens, lr=s.ppo_lr, warmup=s.dpo_warmup,
                         schedule="constant")

    run.phase(f"iter{i}-target", f"iter{i}/target-agent", work)


# ----------------------------------------------------------------------------------- the pairs


def d_tgt(expert: dict, target: list[dict], failure: list[dict], s: Settings,
          dropped: Counter) -> list[dict]:
    """The target's pairs for one instruction, Eq. (8), with the weights of Section 4.3.

    expert, and this iteration's rollouts of the target and of the failure agent, are trajectories
    with a reward in [0, 1]. Returns rows of pairs-*.jsonl without task and trains; counts in
    `dropped`, by reason, the comparisons that make no pair.
    """
    # Eq. (8): D_tgt = {e_exp > e_tgt} u {e_exp > e_fail} u {e_w > e_l in F_tgt x F_fail}, by reward
    pairs = []
    for prediction in target + failure:
        kind = f"expert>{prediction['agent']}"
        if prediction["reward"] < expert["reward"]:
            pairs.append((kind, expert, prediction))
        elif prediction["reward"] == expert["reward"]:
            dropped["as good as the expert"] += 1
        elif s.expert_beaten == "swap":
            pairs.append((kind, prediction, expert))
        else:
            dropped["better than the expert"] += 1
    # All expert-prediction pairs of an instruction weigh 1.0 together.
    weight = 1.0 / len(pairs) if pairs and s.pair_weights == "instruction" else 1.0
    rows = [pair_row(kind, w, l, weight, sft_weight=weight) for kind, w, l in pairs]
    if s.d_tgt_failures == "none":
        return rows
    # F_tgt x F_fail: DPO alone, lambda_SFT = 0.
    for w, l in ordered_failures(itertools.product(target, failure), dropped):
        if s.d_tgt_failures == "hard" and w["reward"] < s.hard_threshold:
            dropped["no hard failure"] += 1
        else:
            rows.append(pair_row("failure>failure", w, l, 1.0, sft_weight=0.0))
    return rows


def d_fail(target: list[dict], failure: list[dict], earlier: list[dict], s: Settings,
           dropped: Counter) -> list[dict]:
    """The failure agent's pairs for one instruction, Eq. (6): the better failure is preferred.

    target, failure: this iteration's rollouts of the two agents; earlier: both agents' rollouts of
    earlier iterations. Result and `dropped` as for `d_tgt`.
    """
    if s.d_fail == "none":  # the failure agent stays as it is
        return []
    # Eq. (6): D_fail = {e_w > e_l in F_tgt x F_fail}; "all" has the pairs within one agent too,
    # since the failure agent learns from failures "from both the target and itself" (Section 4.2).
    candidates = (itertools.product(target, failure) if s.d_fail == "cross" else
                  itertools.combinations(target + failure + earlier, 2))
    return [pair_row("failure>failure", w, l, 1.0, sft_weight=0.0)
            for w, l in ordered_failures(candidates, dropped)]


def ordered_failures(candidates, dropped: Counter):
    """Of two failures with different rewards, the better one first."""
    for a, b in candidates:
        if max(a["reward"], b["reward"]) >= envs.SUCCESS:
            dropped["not both failures"] += 1
        elif a["reward"] == b["reward"]:
            dropped["equal failures"] += 1
        else:
            yield (a, b) if a["reward"] > b["reward"] else (b, a)


def pair_row(kind: str, chosen: dict, rejected: dict, weight: float, sft_weight: float) -> dict:
    """A row of pairs-*.jsonl, which names its trajectories instead of repeating them."""
    chosen, rejected = ({key: side[key] for key in ("agent", "iteration", "rollout", "reward")}
                        for side in (chosen, rejected))
    return dict(kind=kind, chosen=chosen, rejected=rejected, weight=weight, sft_weight=sft_weight)


def preference_groups(run: Run, agent: str, i: int) -> list[dpo.Group]:
    """pairs-AGENT.jsonl as groups: an instruction's distinct trajectories, once each, its pairs."""
    s = run.settings
    pairs = run.read_jsonl(f"iter{i}/pairs-{agent}.jsonl")
    files = {"experts"}
    for side in (p[side] for p in pairs for side in ("chosen", "rejected")):
        if side["agent"] != "expert":
            again = s.explore_again and side["rollout"] >= s.rollouts  # as `explore_again` counts
            files.add(f"iter{side['iteration']}/{side['agent']}{'-more' if again else ''}")
    trajectories = {}
    for file in files:
        for row in run.read_jsonl(f"{file}.jsonl"):
            trajectories[row["task"], row["agent"], row["iteration"], row["rollout"]] = row

    groups, places, shortened = {}, {}, []
    for p in pairs:
        task = p["task"]
        group = groups.setdefault(task, dpo.Group(task, []))
        # A rejected trajectory that wanders on long after the expert was done teaches little.
        longest = math.inf
        if s.cut_turns >= 0:
            longest = trajectories[task, "expert", 0, 0]["steps"] + s.cut_turns
        indices = []
        for side in ("chosen", "rejected"):
            key = (task, p[side]["agent"], p[side]["iteration"], p[side]["rollout"])
            row = trajectories[key]
            turns = longest if side == "rejected" and row["steps"] > longest else None
            if (key, turns) not in places:
                places[key, turns] = len(group.sequences)
                group.sequences.append(cut(row["ids"], row["action_mask"], turns))
                shortened += [task] if turns is not None else []
            indices.append(places[key, turns])
        group.pairs.append(dpo.Pair(p["kind"], *indices, p["weight"], p["sft_weight"]))
    run.log_dropped(f"iter{i}-{agent}", "end of a rejected trajectory, --cut-turns", shortened)
    return list(groups.values())


def cut(ids: list[int], mask: list[int], turns: int | None) -> dpo.Sequence:
    """The trajectory up to the end of its turn number `turns` (None: whole)."""
    ends = [k + 1 for k in range(len(mask)) if mask[k] and (k + 1 == len(mask) or not mask[k + 1])]
    end = len(ids) if turns is None or turns >= len(ends) else ends[turns - 1]
    return dpo.Sequence(ids[:end], mask[:end])


# ------------------------------------------------------------------------------ start and end


def seed_of(*parts) -> int:
    """A 48-bit seed from names and numbers: the same parts give the same seed anywhere."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:6], "big")


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def main(argv: list[str]) -> None:
    if argv[:1] == ["compare"]:
        return print(report.compare(argv[1:]))
    if argv[:1] == ["show"]:
        parser = argparse.ArgumentParser(prog="coevolve.py show", description=report.show.__doc__)
        parser.add_argument("run", help="a run's folder")
        parser.add_argument("tasks", nargs="*", help="task ids; none: the hardest negatives")
        parser.add_argument("--count", type=int, default=3, help="how many, where none is named")
        asked = parser.parse_args(argv[1:])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet when a pager closes early
        return print(report.show(asked.run, asked.tasks or None, asked.count))
    settings = parse(argv)
    disable_progress_bar()  # one bar per phase is ours; those of loading and saving are noise
    if settings.dry_run:
        if os.environ.get("RANK", "0") != "0":
            return
        check_model(settings.model, settings.max_tokens, weights=False)
        return dry_run(settings, partial(make_env, settings))
    accelerator = make_accelerator(settings)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(settings.threads or max(1, cores // accelerator.num_processes))
    run = Run(settings, accelerator)
    coevolve(run)
    accelerator.end_training()  # of trackers
    if not run.main:
        return
    result, curves = run.path / "result.json", run.path / "curves.png"
    found = json.dumps(report.result(run.path), indent=1)
    if not (result.exists() and result.read_bytes() == found.encode() and curves.exists()):
        with writing(curves):
            report.figure(run.path, curves)
        write_text(result, found)
    else:
        run.say(f"{run.path} was finished before; what it holds:")
    run.say(report.table(run.path))
    run.lock.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    gc.freeze()  # else each freeing of memory between phases walks all that was imported, 0.2 s
    try:
        main(sys.argv[1:])
    except Exception as error:
        if one_line(error) is None:
            raise
        if os.environ.get("RANK", "0") != "0":  # what all ranks say is said once, by the first
            time.sleep(5)
        end(one_line(error), 2)
