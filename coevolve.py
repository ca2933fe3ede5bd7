"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

Two agents play the same tasks. The target agent learns from expert trajectories, from its own
failures, and from those of the failure agent. After SFT on the expert trajectories, the failure
agent learns only from failures: it learns to prefer the better of two failures, so that its
failures come close to success. Why should the target learn from another agent's failures? The paper
argues that an agent's own failures "offer only weak contrast" to the expert, so that DPO overfits
to the experts. A failure that nearly succeeds differs from a success only in what matters, so it
teaches the target this difference.

    failure        a trajectory with a reward below 1
    hard negative  a failure that is close to success: its reward is at least --hard-threshold, 0.6
    pair           two trajectories of one task; a > b means that a is the chosen one

This is the method in pseudocode, in the order of the code. SFT is supervised fine-tuning, and DPO
is direct preference optimisation. Both losses are in `dpo.py`.

    target  = SFT(base model, experts)                                           Eq. (3)-(5)
    failure = SFT(base model, experts in a different order)
    for K iterations:
        e_tgt, e_fail = episodes of both agents, on every expert task
        D_fail  = better failure > worse failure, any two failures of a task     Eq. (6), 4.2
        failure = DPO(failure, D_fail)                                           Eq. (7)
        D_tgt   = expert > e_tgt, expert > e_fail, and                           Eq. (8)
                  better failure > worse failure, one failure of each agent
        target  = weighted DPO(target, D_tgt)                                    Eq. (9)
                  + lambda_SFT x SFT(chosen trajectories that are not failures of agents)

Three files contain the method. Read this file first, then `dpo.py` (losses and training loop), and
then `envs.py` (environments and episodes). Agents and environments exchange only text. The folder
`engine/` contains the code that loads models, runs them and saves results. You can treat this code
as a black box.

    task        an instruction for the agent, u in the paper
    episode     one attempt at a task, recorded as a trajectory e
    expert      the expert trajectory (demonstration) of a task; agents learn to imitate it
    rollout     an episode that an agent plays for training
    ETO         the method of Song et al. (2024), a baseline in the paper

A bracket names the source of a value or a design choice: the paper (for example [App. B]), the code
of ETO [ETO], or our own choice [ours].

    python coevolve.py --env webshop            # --help lists the settings
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, Optional

import common.settings as types
import dpo
from common.files import seed_of
from dpo import Group, Pair, Trajectory, better, equal
from engine.command import run_program
from engine.experts import collect_experts
from engine.machine import MachineSettings
from engine.phases import Trained
from engine.run import Run
from environments import ENVIRONMENTS

Trajectories = list[Trajectory]
Pairs = list[Pair]
# A model is given by its folder. A model that has been trained again is a changed input.
Model = Path

# ------------------------------------------------------------------------------------ the loop


def coevolve(run: Run) -> None:
    """Runs the co-evolution method (Sections 4.1 to 4.3).

    `once(output, phase, *inputs, **parameters)` returns the value of phase(run, *inputs,
    **parameters), and saves it in the run's folder under the name `output`. If the run is started
    again, `once` skips the phase and returns the saved value, unless its inputs or parameters have
    changed. Values are trajectories, pairs and models. You may change them between two phases, for
    example:

        pairs = [pair for pair in pairs if pair.chosen.reward > 0.5]

    Such a line runs at each start, and the next phase runs again only if its input has changed.
    Changes in the code of a phase are not detected. After such a change, start a new run with a
    different --out or with --branch RUN@OUTPUT.
    """
    s = run.settings
    once = run.once

    # Fine-tune both agents on the expert trajectories, Eq. (3)-(5). They differ only because each
    # agent sees these trajectories in a different order.
    experts = once("experts.jsonl", collect_experts, run.expert_file)
    target_sft = once("sft-target", train_sft, run.base, experts, name="target")
    if s.failure_from:
        failure_sft = Path(s.failure_from)
    else:
        failure_sft = once("sft-failure", train_sft, run.base, experts, name="failure")
    target, failure = target_sft, failure_sft
    evaluate_all(run, 0, target=target, failure=failure)

    buffer = []  # earlier rollouts, which the failure agent also learns from with --d-fail buffer
    for i in range(1, s.iterations + 1):
        # Let both agents play --rollouts episodes of every task that has an expert trajectory.
        e_tgt = once(f"iter{i}/target.jsonl", explore, target, experts, name="target", i=i)
        e_fail = once(f"iter{i}/failure.jsonl", explore, failure, experts, name="failure", i=i)

        # The failure agent learns from failures "from both the target and itself" [Section 4.2].
        pairs = once(f"iter{i}/pairs-failure.jsonl", failure_pairs, experts, e_tgt, e_fail, *buffer)
        failure = once(f"iter{i}/failure-agent", train_dpo, failure, failure_sft, pairs, experts,
                       name="failure", i=i)

        # The target learns from the same rollouts [the paper's summary]. With "after", the failure
        # agent first plays again, because it has been trained [the paper's introduction].
        if s.failure_plays == "after":
            buffer.append(e_fail)
            e_fail = once(f"iter{i}/failure-again.jsonl", explore, failure, experts,
                          name="failure", i=i, first_rollout=s.rollouts)
        pairs = once(f"iter{i}/pairs-target.jsonl", target_pairs, experts, e_tgt, e_fail)
        target = once(f"iter{i}/target-agent", train_target, target, target_sft, pairs, experts,
                      name="target", i=i)
        evaluate_all(run, i, target=target, failure=failure)
        buffer = [*buffer, e_tgt, e_fail] if s.d_fail == "buffer" else []


# ----------------------------------------------------------------------------------- the pairs
# d_fail and d_tgt make the pairs of one task. They return the pairs, and a list of strings: the
# reasons why trajectories or comparisons were dropped.


def d_fail(e_tgt: Trajectories, e_fail: Trajectories, s: Settings) -> tuple[Pairs, list[str]]:
    """Makes the failure agent's pairs for one task, Eq. (6).

    A pair compares two failures. The failure with the higher reward is chosen.
    """
    if s.d_fail == "none":  # without pairs, the failure agent is not trained after SFT
        return [], []
    # Eq. (6): D_fail = {e_w > e_l in F_tgt x F_fail}, where the failure e_w is preferred to the
    # failure e_l. Each of these pairs contains one failure of the target and one of the failure
    # agent. By default, we also use pairs of two failures from the same agent, because the failure
    # agent learns from failures "from both the target and itself" (Section 4.2). Pairs from one
    # agent exist only with several rollouts per task. The paper samples one rollout per task.
    candidates = itertools.combinations(usable(e_tgt) + usable(e_fail), 2)
    if s.d_fail == "cross":
        candidates = itertools.product(usable(e_tgt), usable(e_fail))
    pairs, dropped = separate(better_failure(a, b) for a, b in candidates)
    return pairs, too_long(e_tgt + e_fail) + dropped


def d_tgt(
    expert: Trajectory,
    e_tgt: Trajectories,
    e_fail: Trajectories,
    s: Settings,
) -> tuple[Pairs, list[str]]:
    """Makes the target's pairs for one task, Eq. (8), and sets their weights as in Section 4.3."""
    # Eq. (8): D_tgt is the union of {(e_exp, e_tgt), (e_exp, e_fail)} and F_tgt x F_fail. The first
    # trajectory of each pair is the chosen trajectory. e_exp is the expert trajectory. F_tgt and
    # F_fail are the failures of the target and of the failure agent.
    pairs, dropped = expert_pairs(expert, e_tgt + e_fail, s)

    # Section 4.3: "the total weight of all expert-prediction pairs generated for a given
    # instruction sums to 1.0". We use these weights in the SFT term as well [ours]. The SFT weight
    # stays 0 if the chosen trajectory is an agent's failure, even if the failure has a higher
    # reward than the expert trajectory. The paper does this "to avoid introducing misleading
    # supervision from incorrect trajectories".
    for pair in pairs:
        if s.pair_weights == "instruction":
            pair.weight = 1.0 / len(pairs)
        if pair.chosen is expert or not pair.chosen.is_failure:
            pair.sft_weight = pair.weight

    # Section 4.3: "For failure-failure pairs, we apply DPO exclusively by setting lambda_SFT = 0".
    # About expert pairs, it says: "This prevents these pairs from dominating the training signal",
    # and later: "This design prevents over-counting of expert signals while ensuring that failure
    # pairs receive full emphasis". In the paper, each agent plays each task once. The expert pairs
    # of a task have a total weight of 1, and the only failure pair of the task has weight 1. If the
    # target has M rollouts of a task and the other agent has N, the task has up to M x N failure
    # pairs. Here, each of them has weight 1 / (M x N), so the failure pairs of a task have a total
    # weight of at most 1 [ours]. The total is lower if some comparisons make no pair.
    #
    # In Eq. (8), the target's failure is always the chosen trajectory. In this code, the chosen
    # trajectory is the failure with the higher reward, as in Eq. (6) [ours].
    if s.d_tgt_failures == "none":
        return pairs, dropped
    candidates = itertools.product(usable(e_tgt), usable(e_fail))
    failures, reasons = separate(better_failure(a, b) for a, b in candidates)
    if s.d_tgt_failures == "hard":
        hard = [pair for pair in failures if pair.chosen.reward >= s.hard_threshold]
        reasons += ["not a hard negative"] * (len(failures) - len(hard))
        failures = hard
    if s.failure_pair_weights == "rollouts":
        for pair in failures:
            pair.weight = 1.0 / (len(e_tgt) * len(e_fail))
    return pairs + failures, dropped + reasons


def expert_pairs(
    expert: Trajectory,
    trajectories: Trajectories,
    s: Settings,
) -> tuple[Pairs, list[str]]:
    """Pairs each trajectory of a task with the task's expert trajectory, as in ETO.

    Each pair has weight 1 in the DPO term and 0 in the SFT term.
    """
    pairs, dropped = separate(against_expert(expert, t, s) for t in usable(trajectories))
    return pairs, too_long(trajectories) + dropped


# A comparison of two trajectories returns a pair, or a string with the reason why there is no pair.
# Two trajectories with the same tokens make no pair, because every policy gives both of them the
# same log-probability. Their rewards can differ only if different texts have the same tokens.
SAME_TOKENS = "equal tokens with different rewards"


def better_failure(a: Trajectory, b: Trajectory) -> Pair | str:
    """Compares two failures. The failure with the higher reward is chosen."""
    if not a.is_failure or not b.is_failure:
        return "not both failures"
    if equal(a.reward, b.reward):
        return "equal failures"
    if a.ids == b.ids:
        return SAME_TOKENS
    if better(a.reward, b.reward):
        return Pair("failure>failure", a, b)
    return Pair("failure>failure", b, a)


def against_expert(expert: Trajectory, t: Trajectory, s: Settings) -> Pair | str:
    """Compares an agent's trajectory with the expert trajectory of the task.

    The rules are those of ETO's function construct_preference. The trajectory with the higher
    reward is chosen, even if it is the agent's trajectory (see --expert-beaten). In Eq. (8), by
    contrast, the expert trajectory is always chosen.
    """
    if equal(expert.reward, t.reward):
        return "as good as the expert"
    if expert.ids == t.ids:
        return SAME_TOKENS
    if better(expert.reward, t.reward):
        return Pair(f"expert>{t.agent}", expert, t)
    if s.expert_beaten == "swap":
        return Pair(f"{t.agent}>expert", t, expert)
    return "better than the expert"


def separate(comparisons: Iterable[Pair | str]) -> tuple[Pairs, list[str]]:
    """Splits comparisons into the pairs, and the reasons why the others are no pairs."""
    pairs = []
    reasons = []
    for result in comparisons:
        if isinstance(result, Pair):
            pairs.append(result)
        else:
            reasons.append(result)
    return pairs, reasons


def is_usable(t: Trajectory) -> bool:
    """Returns True if a trajectory can be used for training.

    An episode that fills the context is interrupted, so it has no final reward. Its trajectory is
    therefore not used in any pair, not even as the rejected side [ours]. Trajectories without
    action tokens are not used either.
    """
    return t.ended != "context_limit" and any(t.action_mask)


def usable(trajectories: Trajectories) -> Trajectories:
    return [t for t in trajectories if is_usable(t)]


def too_long(trajectories: Trajectories) -> list[str]:
    """Returns the reason "too long" for each trajectory that is not usable."""
    return ["too long" for t in trajectories if not is_usable(t)]


# ---------------------------------------------------------------------------------- the phases
# A phase is a function phase(run, *inputs, **parameters). It returns a value: trajectories, pairs
# or a trained model. A phase may also return a dict of numbers for phases.json, as a second value.
# In distributed runs, all ranks run the phase, and one rank writes the value to a file.
#
#     run         the folder, the settings, the environment and the machine of the run. Its method
#                 `load` loads a model with fp32 weights, `fit` trains it with a new AdamW optimiser
#                 (`dpo.train`), `log_probs` runs `dpo.token_log_probs` in parallel on all ranks,
#                 and `play` runs episodes with an inference copy of a model.
#     experts     the expert trajectories. The first phase, `collect_experts` in engine/experts.py,
#                 tokenises them, and drops those with a low reward and those of evaluated tasks.
#     name        the agent's name in files, tables and seeds. After SFT, two agents differ only
#                 because their seeds differ.
#     i           the iteration, or 0 after SFT
#
# By default, training on a GPU computes forward passes in bf16, and the inference copy on a GPU has
# bf16 weights. On a CPU, and for the included model tiny, the default is fp32 (see --bf16).

# Fractions of the optimiser steps used for linear warmup. After warmup, SFT's learning rate follows
# a cosine decay [App. B], and that of preference training stays constant [ETO].
SFT_WARMUP = 0.03
DPO_WARMUP = 0.1


def failure_pairs(
    run: Run,
    experts: Trajectories,
    e_tgt: Trajectories,
    e_fail: Trajectories,
    *buffer: Trajectories,
) -> tuple[Pairs, dict]:
    """Makes the failure agent's pairs of all tasks.

    The unusable trajectories of the buffer were counted in an earlier iteration, so they are not
    counted again.
    """
    made = []
    for _, of_target, of_failure, *earlier in by_task(experts, e_tgt, e_fail, *buffer):
        of_failure += usable(itertools.chain(*earlier))
        made.append(d_fail(of_target, of_failure, run.settings))
    return joined(run, experts, made)


def target_pairs(
    run: Run,
    experts: Trajectories,
    e_tgt: Trajectories,
    e_fail: Trajectories,
) -> tuple[Pairs, dict]:
    """Makes the target's pairs of all tasks."""
    made = [d_tgt(*lists, run.settings) for lists in by_task(experts, e_tgt, e_fail)]
    return joined(run, experts, made)


def eto_pairs(run: Run, experts: Trajectories, rollouts: Trajectories) -> tuple[Pairs, dict]:
    """Makes ETO's pairs of all tasks. Each pair contains the expert trajectory of its task."""
    made = [expert_pairs(*lists, run.settings) for lists in by_task(experts, rollouts)]
    return joined(run, experts, made)


def by_task(experts: Trajectories, *rollouts: Trajectories) -> Iterator[tuple]:
    """Yields the trajectories of all tasks, one task at a time.

    Each item is a tuple: the expert trajectory of a task, and for each list in `rollouts`, the list
    of its trajectories of this task.
    """
    lists = defaultdict(lambda: [[] for _ in rollouts])  # task id -> lists of trajectories
    for n, trajectories in enumerate(rollouts):
        for t in trajectories:
            lists[t.task][n].append(t)
    for expert in experts:
        yield expert, *lists[expert.task]


def joined(
    run: Run,
    experts: Trajectories,
    made: list[tuple[Pairs, list[str]]],
) -> tuple[Pairs, dict]:
    """Joins the pairs of all tasks.

    Also returns the number of pairs of each kind, and the number of drops for each reason.
    """
    pairs = []
    dropped = Counter()
    for expert, (of_task, reasons) in zip(experts, made, strict=True):
        pairs += of_task
        if SAME_TOKENS in reasons and SAME_TOKENS not in dropped:
            run.print(f"{run.name}: {SAME_TOKENS}, first in task {expert.task}; check that the "
                      "tokenizer writes the actions as the environment reads them")
        dropped.update(reasons)
    if dropped and not pairs:
        run.print(f"{run.name}: no pairs, since {dict(dropped)}; give more --rollouts, another "
                  "--temperature or a larger --max-tokens")
    return pairs, dict(pairs=Counter(pair.kind for pair in pairs), dropped=dropped)


def explore(
    run: Run,
    model: Model,
    experts: Trajectories,
    name: str,
    i: int,
    first_rollout: int = 0,
) -> tuple[Trajectories, dict]:
    """Samples --rollouts episodes of each task that has an expert trajectory.

    If an agent explores twice in an iteration, the second exploration must use new rollout indices,
    because the index is part of each episode's seed.
    """
    s = run.settings
    episodes = []
    for expert in experts:
        for rollout in range(first_rollout, first_rollout + s.rollouts):
            seed = seed_of(s.seed, name, i, expert.task, rollout)
            episodes.append(Trajectory(expert.task, name, i, rollout, seed))
    trajectories = run.play(model, episodes, s.temperature)
    return trajectories, summarise(trajectories, s.hard_threshold)


def evaluate(run: Run, model: Model, name: str, i: int, split: str) -> tuple[Trajectories, dict]:
    """Plays one episode of each task in a split, with greedy decoding."""
    s = run.settings
    tasks = run.env.tasks(split)
    if s.eval_tasks:
        tasks = tasks[:s.eval_tasks]
    trajectories = run.play(model, [Trajectory(task, name, i) for task in tasks], 0.0)
    return trajectories, summarise(trajectories, s.hard_threshold)


def evaluate_all(run: Run, i: int, **models: Model) -> None:
    """Evaluates each agent on each evaluation split of the run (see --eval-splits)."""
    for name, model in models.items():
        for split in run.splits:
            run.once(f"eval-{i}-{name}-{split}.jsonl", evaluate, model, name=name, i=i,
                     split=split)


def summarise(trajectories: Trajectories, hard_threshold: float) -> dict:
    """Returns the mean reward and other metrics of a non-empty list of trajectories.

    The fractions `success`, `hard_negative` and `other_failure` are the three rates of Table 2.
    They sum to 1. `turns` is the mean number of replies per episode. `idle` is the fraction of
    replies that changed nothing in the environment. `turn_limit` is the fraction of episodes that
    reached the maximum number of turns.
    """
    n = len(trajectories)
    turns = sum(t.turns for t in trajectories)
    failures = [t for t in trajectories if t.is_failure]
    hard = sum(t.reward >= hard_threshold for t in failures)
    return dict(episodes=n,
                reward=fmean(t.reward for t in trajectories),
                success=(n - len(failures)) / n,
                hard_negative=hard / n,
                other_failure=(len(failures) - hard) / n,
                turns=turns / n,
                idle=sum(t.idle for t in trajectories) / max(1, turns),
                turn_limit=sum(t.ended == "turn_limit" for t in trajectories) / n)


def train_sft(run: Run, model: Model, experts: Trajectories, name: str) -> tuple[Trained, dict]:
    """Fine-tunes a model on the action tokens of the expert trajectories (SFT), Eq. (3)-(5)."""
    s = run.settings
    rng = random.Random(seed_of(s.seed, "sft", name))
    groups = [Group([expert]) for expert in experts]
    if len(groups) <= s.sft_batch and name != "target":
        run.print(f"{name} and target are identical after SFT, up to rounding, because all experts "
                  "fit in one batch and their order makes no difference; lower --sft-batch "
                  f"{s.sft_batch}")
    steps = dpo.batches(groups, s.sft_batch, rng, s.sft_epochs)
    rates = dpo.learning_rates(len(steps), s.sft_lr, SFT_WARMUP, cosine=True)
    # The paper does not define how the loss of Eq. (5) is averaged over a batch. We average over
    # all action tokens of the batch [ours].
    return run.fit(run.load(model, groups), steps, rates, dpo.sft_loss, dpo.action_count)


def train_dpo(
    run: Run,
    model: Model,
    after_sft: Model,
    pairs: Pairs,
    experts: Trajectories,
    name: str,
    i: int,
    lambda_dpo: float = 1.0,
    lambda_sft: float = 0.0,
    steps: int = 0,
) -> tuple[Trained | Model, dict]:
    """Trains an agent on its pairs with DPO, Eq. (7), or with Eq. (9) if the lambdas are given.

    Without pairs, the model is left unchanged. `after_sft` is the agent after SFT, which
    --reference sft uses as the reference model. `steps` is the number of optimiser steps. If it is
    0, --dpo-epochs determines the number.
    """
    s = run.settings
    groups, dropped = preference_groups(pairs, experts, s, run.encoder)
    counts = dict(dropped=Counter(dropped)) if dropped else {}
    if not groups:
        return model, dict(steps=0) | counts

    # Before training, compute the log-probability log pi_ref(e|u) of each trajectory e given its
    # task u. By default, the reference model is the agent itself at the start of the iteration, so
    # the same model is then trained. With --reference sft, the reference model is freed before the
    # agent is loaded, so that only one model is in memory at a time.
    pi_ref = after_sft if s.reference == "sft" else model
    policy = run.load(pi_ref, groups)  # has the weights of pi_ref so far
    if s.reference == "none":  # pi_ref = 1
        for t in dpo.trajectories_of(groups):
            t.ref_log_prob = 0.0
    else:
        dpo.add_references(policy, groups, run.log_probs, run.fits)
    if pi_ref != model:
        del policy
        policy = run.load(model, groups)

    # App. B gives a range for the learning rate and a range for beta. As in ETO's scripts, we use
    # the first value of each range in iteration 1, and the last value in all later iterations.
    lr = s.dpo_lr if i == 1 else s.dpo_lr_later
    beta = s.beta if i == 1 else s.beta_later
    loss = partial(dpo.preference_loss, beta=beta, lambda_dpo=lambda_dpo, lambda_sft=lambda_sft,
                   log_prob_reduction=s.log_prob_reduction)
    denominator = dpo.pair_count if s.denominator == "pairs" else dpo.total_weight

    # Each epoch has at least one batch, so `steps` epochs have at least `steps` batches.
    rng = random.Random(seed_of(s.seed, "dpo", name, i))
    batches = dpo.batches(groups, s.dpo_batch, rng, epochs=steps or s.dpo_epochs)
    batches = batches[:steps or None]
    rates = dpo.learning_rates(len(batches), lr, DPO_WARMUP)
    trained, numbers = run.fit(policy, batches, rates, loss, denominator)
    # If pi_ref is the policy itself, all margins are 0 at first, and Eq. (7) gives ln 2 per pair.
    expected = lambda_dpo * math.log(2) * dpo.total_weight(batches[0]) / denominator(batches[0])
    first = numbers.get("first_dpo", expected)
    if pi_ref == model and s.reference != "none" and not run.is_close(first, expected):
        run.print(f"{run.name}: the first DPO loss is {first:.3f}, and Eq. (7) gives "
                  f"{expected:.3f}")
    return trained, numbers | counts


def train_target(run: Run, *inputs, **parameters) -> tuple[Trained | Model, dict]:
    """Trains the target with weighted DPO plus SFT, Eq. (9), with the arguments of `train_dpo`.

    --dpo-steps applies only to the target. It makes the targets of different runs comparable.
    Without it, the number of optimiser steps depends on the number of pairs.
    """
    s = run.settings
    return train_dpo(run, *inputs, **parameters, lambda_dpo=s.lambda_dpo, lambda_sft=s.lambda_sft,
                     steps=s.dpo_steps)


def preference_groups(
    pairs: Pairs,
    experts: Trajectories,
    s: Settings,
    encoder,
) -> tuple[list[Group], list[str]]:
    """Groups pairs by task. Depending on the settings, truncates or masks rejected trajectories.

    Returns:
        One group for each task with pairs, and the reasons why pairs were dropped. A group stores
        each trajectory only once, even if several pairs use it. If a trajectory is chosen in one
        pair and rejected in another pair, a group may store two versions of it: the original, and
        the truncated or masked one.
    """
    expert_turns = {expert.task: expert.turns for expert in experts}
    groups = defaultdict(Group)  # the group of each task, by task id
    dropped = []
    for pair in pairs:
        task = pair.chosen.task
        rejected = pair.rejected
        # Truncate the rejected trajectory so that it has at most `cut_turns` more replies than the
        # expert trajectory. ETO truncates in the same way. The paper does not mention truncation.
        if s.cut_turns >= 0:
            rejected = encoder.cut(rejected, expert_turns[task] + s.cut_turns)
        if pair.chosen.ids == rejected.ids:
            dropped.append("equal once truncated")
            continue
        if s.rejected_ends == "leave out":
            rejected = encoder.without_ends(rejected)

        group = groups[task]
        group.pairs.append(Pair(pair.kind, group.add(pair.chosen), group.add(rejected),
                                pair.weight, pair.sft_weight))
    return list(groups.values()), dropped


# ----------------------------------------------------------------------------- other training loops


def sft(run: Run) -> None:
    """Runs only SFT on the expert trajectories, Eq. (3)-(5)."""
    experts = run.once("experts.jsonl", collect_experts, run.expert_file)
    target = run.once("sft-target", train_sft, run.base, experts, name="target")
    evaluate_all(run, 0, target=target)


def eto(run: Run) -> None:
    """Runs ETO, "a DPO-only baseline" [Section 5.1]: the loop without the failure agent.

    The pairs and the loss are computed as in co-evolution, so --lambda-sft can add the SFT term. By
    default, this method sets lambda_sft to 0 and the weights of all pairs to 1, which gives ETO's
    pairs and loss.
    """
    s = run.settings
    once = run.once
    experts = once("experts.jsonl", collect_experts, run.expert_file)
    target = target_sft = once("sft-target", train_sft, run.base, experts, name="target")
    evaluate_all(run, 0, target=target)
    for i in range(1, s.iterations + 1):
        e_tgt = once(f"iter{i}/target.jsonl", explore, target, experts, name="target", i=i)
        pairs = once(f"iter{i}/pairs-target.jsonl", target_pairs, experts, e_tgt, [])
        target = once(f"iter{i}/target-agent", train_target, target, target_sft, pairs, experts,
                      name="target", i=i)
        evaluate_all(run, i, target=target)


def positive(run: Run) -> None:
    """Runs a control experiment: a positive agent replaces the failure agent.

    The positive agent is "trained in the same manner as ETO" [Section 5.4]. The target's failure
    pairs compare its failures with the positive agent's failures [ours].
    """
    s = run.settings
    once = run.once
    experts = once("experts.jsonl", collect_experts, run.expert_file)
    target = target_sft = once("sft-target", train_sft, run.base, experts, name="target")
    other = other_sft = once("sft-positive", train_sft, run.base, experts, name="positive")
    evaluate_all(run, 0, target=target, positive=other)
    for i in range(1, s.iterations + 1):
        e_tgt = once(f"iter{i}/target.jsonl", explore, target, experts, name="target", i=i)
        e_pos = once(f"iter{i}/positive.jsonl", explore, other, experts, name="positive", i=i)
        pairs = once(f"iter{i}/pairs-positive.jsonl", eto_pairs, experts, e_pos)
        other = once(f"iter{i}/positive-agent", train_dpo, other, other_sft, pairs, experts,
                     name="positive", i=i)
        pairs = once(f"iter{i}/pairs-target.jsonl", target_pairs, experts, e_tgt, e_pos)
        target = once(f"iter{i}/target-agent", train_target, target, target_sft, pairs, experts,
                      name="target", i=i)
        evaluate_all(run, i, target=target, positive=other)


# ------------------------------------------------------------------------------------ settings
# The model and the environment change many of these defaults. The values of a run are in its
# config.json, and --help prints those that a command would use.
#
# The comment above a setting is its --help text. The bracket at the end of the comment names the
# source of the default: a section of the paper, the scripts of ETO (Song et al.), or our own choice
# [ours]. If the default is None, the bracket describes what is used instead.
#
# The type of a setting restricts its values. The type also determines whether the setting can
# change when a run is resumed. A setting of type Free can change, because it does not affect the
# results, or only by rounding errors. A setting of type Growing can only be increased. Changing any
# other setting raises an error.


@dataclass(frozen=True)
class Data:
    """Method, model, tasks and lengths"""
    # Environment in which the agents act [ours]
    env: Literal[ENVIRONMENTS] = "webshop"
    # Training method, one of the methods listed at the top of --help [the paper]
    method: str = "coevolve"
    # Base model: "tiny" (included in this repository), or any causal language model with a chat
    # template, given by its local folder or its name on the Hugging Face Hub [ours]
    model: str = "tiny"
    # Random seed of the run [ours]
    seed: types.Whole = 0
    # Output folder [runs/ENV-METHOD-sSEED; runs/ENV-METHOD-quick-sSEED with --quick]
    out: types.Free[Optional[str]] = None
    # Start from another run. In RUN@OUTPUT, RUN is the folder of that run, and OUTPUT is one of its
    # outputs. The outputs before OUTPUT are reused, and OUTPUT and all later outputs are computed.
    # The settings of RUN are the defaults of this run [none]
    branch: types.Free[Optional[str]] = None
    # Run all phases on only a few tasks, in about a minute with the model tiny [ours]
    quick: bool = False
    # Experiment tracker for logging: tensorboard, wandb, or any other tracker that accelerate
    # supports [none]
    track: types.Free[Optional[str]] = None
    # File of expert trajectories: the data of ETO, the data of IPR, or a trajectory file of another
    # run. From a trajectory file, each task's trajectory with the highest reward is used [scripted
    # experts]
    experts: types.OldFile = None
    # Drop expert trajectories whose reward is not above this value; expert trajectories that solve
    # their task are always kept [App. A]
    expert_min_reward: float = 0.7
    # Maximum number of training tasks; 0 uses all training tasks [Table 1]
    train_tasks: types.Whole = 0
    # Maximum number of tasks per evaluation split; 0 uses all tasks [Table 1]
    eval_tasks: types.Whole = 0
    # Splits to evaluate on; use "validation" to tune settings or to choose an iteration [Table 1]
    eval_splits: Literal["test", "validation", "all"] = "test"
    # Minimum reward of a hard negative; a failure with a lower reward is not hard [Section 5.2.1]
    hard_threshold: types.Weight = 0.6
    # Format of the text that the agent sees; "short" is for small models, and leaves out repeated
    # text. With "short", scripted expert trajectories also contain no thoughts [ours]
    view: Literal["full", "short"] = "full"
    # Maximum number of tokens in a trajectory (context length); a longer episode is stopped [ours]
    max_tokens: types.Count = 4096
    # Maximum number of tokens in a reply [ours]
    max_new_tokens: types.Count = 256


@dataclass(frozen=True)
class Sft:
    """SFT on expert trajectories (Section 4.1), and training settings for all methods"""
    # Number of epochs over the expert trajectories [App. B]
    sft_epochs: types.Count = 3
    # Batch size of SFT, in expert trajectories [App. B]
    sft_batch: types.Count = 48
    # Peak learning rate of SFT [App. B]
    sft_lr: types.Rate = 1e-5
    # Weight decay of AdamW, for SFT and all other training [ETO]
    weight_decay: types.Weight = 0.0
    # Maximum gradient norm (gradient clipping), for SFT and all other training [transformers'
    # default]
    max_grad_norm: types.Rate = 1.0


@dataclass(frozen=True)
class Common(MachineSettings, Sft, Data):
    """Settings that every method uses"""


@dataclass(frozen=True)
class Preferences:
    """Exploration and preference training (Sections 4.2 and 4.3)"""
    # Number K of iterations; each consists of exploration and preference training [App. B; 5 on
    # InterCodeSQL]
    iterations: types.Growing[types.Count] = 3
    # Number of rollouts that an agent samples per task, in each iteration [Section 5.2.1]
    rollouts: types.Count = 1
    # Sampling temperature of rollouts; trained agents are always evaluated with greedy decoding
    # [ours; ETO: 0]
    temperature: types.Temperature = 0.7
    # Number of epochs over the pairs of an iteration [App. B]
    dpo_epochs: types.Count = 3
    # Number of optimiser steps that train the target in each iteration. If it is 0, --dpo-epochs
    # determines the number of steps [ours]
    dpo_steps: types.Whole = 0
    # Batch size: maximum number of pairs per optimiser step. All pairs of a task are in the same
    # batch, so that each trajectory needs only one forward pass. A task with more pairs than the
    # maximum gets its own batch [App. B]
    dpo_batch: types.Count = 32
    # Learning rate of preference training in iteration 1 [App. B; ETO]
    dpo_lr: types.Rate = 1e-6
    # Learning rate in later iterations; equals --dpo-lr if only --dpo-lr is given [App. B; ETO]
    dpo_lr_later: types.following(types.Rate, "dpo_lr") = 5e-7
    # Factor beta of DPO, Eq. (7), in iteration 1 [App. B; ETO]
    beta: types.Rate = 0.1
    # Factor beta in later iterations; equals --beta if only --beta is given [App. B; ETO]
    beta_later: types.following(types.Rate, "beta") = 0.5
    # Weight of the DPO term in Eq. (9) [Section 4.3]
    lambda_dpo: types.Weight = 1.0
    # Weight of the SFT term in Eq. (9); ETO has no SFT term [Section 4.3; ETO: Section 5.1]
    lambda_sft: types.Weight = 0.1
    # Log-probability of a trajectory in the DPO term: the "sum" or the "mean" of the
    # log-probabilities of its action tokens [Eq. 2, 5, 7]
    log_prob_reduction: Literal["sum", "mean"] = "sum"
    # Reference model pi_ref of DPO: "iteration" is the agent at the start of the iteration, "sft"
    # is the agent after SFT, and "none" means no reference model (pi_ref = 1) [ETO; IPR: sft]
    reference: Literal["iteration", "sft", "none"] = "iteration"
    # Denominator of the batch loss, for both the DPO term and the SFT term: "weights" is the sum of
    # the weights of all pairs in the batch, and "pairs" is the number of these pairs [ours]
    denominator: Literal["weights", "pairs"] = "weights"
    # What to do if an agent's trajectory has a higher reward than the expert trajectory: "swap"
    # makes the agent's trajectory the chosen one, and "drop" makes no pair [ETO]
    expert_beaten: Literal["swap", "drop"] = "swap"
    # Weights of the target's expert pairs: "instruction" normalises them, so that the weights of
    # each task sum to 1; "none" gives each pair weight 1, as in ETO [Section 4.3]
    pair_weights: Literal["instruction", "none"] = "instruction"
    # Weight of each failure pair of the target: "rollouts" is 1 / (M x N), where the target has M
    # rollouts of the task and the other agents have N; "none" gives each pair weight 1 [ours]
    failure_pair_weights: Literal["rollouts", "none"] = "rollouts"
    # Failure pairs of the target: "cross" compares each failure of the target with each failure of
    # another agent; "hard" is the same, but drops a pair if its chosen trajectory is not a hard
    # negative; "none" uses no failure pairs [Eq. 8]
    d_tgt_failures: Literal["cross", "hard", "none"] = "cross"
    # Maximum number of additional replies in a rejected trajectory, compared with the expert
    # trajectory. Longer rejected trajectories are truncated; a negative value turns truncation off
    # [ETO]
    cut_turns: int = 5
    # Whether log pi of a rejected trajectory includes the end-of-turn tokens and the reply that
    # ended the episode: "count" includes them, and "leave out" masks them, so that the DPO loss
    # does not make them less likely [Eq. 7]
    rejected_ends: Literal["count", "leave out"] = "count"


@dataclass(frozen=True)
class FailureAgent:
    """The failure agent (Section 4.2)"""
    # Failure pairs of the failure agent: "all" compares any two failures of a task in the current
    # iteration; "cross" compares only failures of different agents, as in Eq. (6); "buffer" is
    # "all" with the failures of both agents in all iterations so far; "none" trains the failure
    # agent only with SFT [Section 4.2]
    d_fail: Literal["all", "cross", "buffer", "none"] = "all"
    # When the failure agent samples the rollouts that the target is trained on: "before" or "after"
    # the failure agent's own training in this iteration. With "after", the failure agent plays
    # twice per iteration [before: the paper's summary; after: the paper's introduction]
    failure_plays: Literal["before", "after"] = "before"
    # Folder of a trained model to use as the initial failure agent; the failure agent's SFT is then
    # skipped [its own SFT]
    failure_from: types.OldFile = None


@dataclass(frozen=True)
class Settings(FailureAgent, Preferences, Common, types.Stated):
    """All settings of a run"""
    # The most important settings. --help lists only these, and `--help all` lists all settings.
    essential = ("env", "method", "model", "seed", "out", "branch", "quick", "experts",
                 "train_tasks", "eval_tasks", "eval_splits", "max_tokens", "max_new_tokens",
                 "sft_epochs", "sft_lr", "iterations", "rollouts", "temperature", "dpo_epochs",
                 "dpo_lr", "beta", "lambda_sft", "pair_weights", "d_tgt_failures", "d_fail")
    # Presets change the defaults of settings. "tiny" applies if --model is tiny. "--protocol eto"
    # and "--method eto" apply to runs with these settings. "quick" applies with --quick, and "quick
    # tiny" applies with both --quick and --model tiny. If several presets change the same setting,
    # the last one in this order has priority. Environments define more presets. A value on the
    # command line has priority over all presets.
    presets = {"tiny": dict(view="short", sft_batch=16, dpo_batch=16, beta_later=0.1),
               "--protocol eto": dict(max_new_tokens=512, temperature=0.0, sft_lr=2e-5),
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
        "a target learns from experts and from a failure agent, which learns as well"),
    "eto": types.Method(
        eto, (Common, Preferences),
        "the target alone learns by DPO to prefer experts to its failures (Song et al. 2024)"),
    "positive": types.Method(
        positive, (Common, Preferences),
        "a control: a second agent, trained as in ETO, replaces the failure agent"),
    "sft": types.Method(sft, (Common,), "only imitation of the experts"),
}


if __name__ == "__main__":
    run_program(sys.argv[1:], Settings, Run, METHODS, "python coevolve.py")
