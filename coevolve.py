"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

This is the method in pseudocode. SFT is supervised fine-tuning, and DPO is direct preference
optimisation. a > b means that trajectory a is preferred to trajectory b, and `agent <- LOSS` means
that the agent is trained with this loss:

    target, failure = SFT(experts, one order), SFT(experts, another order)         Eq. (3)-(5)
    for K iterations:
        both agents play episodes of every training task
        failure <- DPO(better failure > worse failure, any two failures of a task) Eq. (6), (7)
        target  <- weighted DPO(expert > own rollout, expert > failure agent's rollout,
                                better failure > worse failure, one of each agent) Eq. (8), (9)
                   + lambda_SFT x SFT(chosen trajectories that are not failures)

Three files contain the method. Read this file first, then `dpo.py` (losses and training loop), and
then `envs.py` (environments and episodes). Agents and environments exchange only text. The folder
`engine/` has the code that loads models, runs them and saves results. You can treat this code as a
black box.

    task        an instruction for the agent, u in the paper
    episode     one attempt at a task, recorded as a trajectory e
    expert      the expert trajectory (demonstration) of a task; agents learn to imitate it
    rollout     an episode that an agent plays for training; the rollout index counts the episodes
                of the same task, agent and iteration
    agent       a model that acts in the environment and learns from preference pairs; the agent's
                role determines the kinds of its pairs
    phase       a function that the training loop calls; a phase reads files of the run, and writes
                one output file or folder
    ETO         the method of Song et al. (2024), a baseline in the paper

A bracket names the source of a value or a design choice: the paper (for example [App. B]), the code
of ETO [ETO], or our own choice [ours].

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
    """An agent that a training method trains, for example the target agent.

    Only the agent's role determines its preference pairs and its loss. The name can be any name.
    """
    name: str  # the agent's name in file names, tables and random seeds
    # "D_tgt" is the role of the target, with the pairs of Eq. (8) and the loss of Eq. (9).
    # "D_fail" is the role of the failure agent, with the pairs of Eq. (6) and the loss of Eq. (7).
    # "own" is the role of an agent that is trained as in ETO. Its pairs compare its own rollouts
    # with the expert trajectories, and its loss is Eq. (7).
    role: Literal["D_tgt", "D_fail", "own"]


# To add a method, add an entry to AGENTS, and an entry to METHODS at the end of this file. To add a
# role, add a branch to make_pairs. train_preferences uses Eq. (9) for the role D_tgt, and Eq. (7)
# for all other roles. To add a loss, write a function like dpo.preference_loss, and pass it to
# run.fit in train_preferences.
TARGET = Agent("target", "D_tgt")
AGENTS = {"sft": [TARGET],
          # ETO is "a DPO-only baseline" [Section 5.1]. If the target is the only agent, the role
          # D_tgt makes the same pairs as ETO, because there is no other agent to make pairs with.
          # The preset "--method eto" sets lambda_sft to 0, and the weights of all pairs to 1.
          "eto": [TARGET],
          "coevolve": [TARGET, Agent("failure", "D_fail")],
          # A control experiment replaces the failure agent with a positive agent, which is "trained
          # in the same manner as ETO" [Section 5.4]. The target's failure pairs compare its
          # failures with the positive agent's failures [ours].
          "positive": [TARGET, Agent("positive", "own")]}


def coevolve(run: Run) -> None:
    """Runs the co-evolution method (Sections 4.1 to 4.3), or one of its baselines.

    The method "eto" runs the same loop, with the target as the only agent. The method "sft" returns
    before the loop starts.

    The function `once` makes a run resumable. `once(output, phase, *files, **values)` calls
    phase(run, out, *files, **values), and returns the path of the output. If the output already
    exists and was made from the same files and values, the phase is skipped. If the content of an
    input file has changed, the phase runs again. An interrupted phase restarts from its beginning.

    Settings cannot be changed when a run is resumed, with a few exceptions (see the section on
    settings below). If the code has changed, the program prints a warning, but it does not run
    finished phases again. After a change of the code, start a new run with another --out, or with
    --branch RUN@OUTPUT.
    """
    s = run.settings
    once = run.once
    agents = AGENTS[s.method]

    # First, fine-tune each agent on the expert trajectories, Eq. (3)-(5). The trained agents differ
    # only because each agent sees the expert trajectories in a different order.
    experts = once("experts.jsonl", collect_experts, *expert_paths(s))
    models = {}  # the folder of each agent's model, by agent name
    for agent in agents:
        if agent.role == "D_fail" and s.failure_from:
            models[agent.name] = Path(s.failure_from)
        else:
            models[agent.name] = once(f"sft-{agent.name}", train_sft, run.base, experts,
                                      name=agent.name)
    after_sft = dict(models)
    evaluate_all(run, models, 0)
    if s.method == "sft":
        return

    earlier = []  # the buffer, a list of earlier trajectory files; empty without --d-fail buffer
    for i in range(1, s.iterations + 1):
        # Let each agent play --rollouts episodes of every task that has an expert trajectory.
        played = {}  # each agent's trajectory file of this iteration, by agent name
        for agent in agents:
            played[agent.name] = once(f"iter{i}/{agent.name}.jsonl", explore,
                                      models[agent.name], experts, name=agent.name, i=i)

        # Then train each agent on its preference pairs. Section 4 trains the agents "in alternating
        # phases". The paper does not say whether the target's pairs use the failure agent's
        # rollouts from before or after the failure agent's training. --failure-plays selects one:
        # - "before": All agents learn from the rollouts sampled above. The order in which the
        #   agents are trained makes no difference. In iteration 1, the failure agent's rollouts
        #   come from its SFT model.
        # - "after": The failure agent is trained first, and then plays the tasks again. The target
        #   learns from these new rollouts.
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

        evaluate_all(run, models, i)
        if s.d_fail == "buffer":  # other --d-fail values use only rollouts of this iteration
            earlier += played.values()


def expert_paths(s: Settings) -> list[Path]:
    """Returns a list with the path of --experts, or an empty list without --experts.

    If the list is empty, the environment's scripted expert makes the expert trajectories.
    """
    return [Path(s.experts)] if s.experts else []


def evaluate_all(run: Run, models: dict[str, Path], i: int) -> None:
    """Evaluates each agent on each evaluation split of the run (see --eval-splits).

    Args:
        run: The run.
        models: A dict that maps each agent's name to the folder of its model.
        i: The iteration, or 0 for the evaluation after SFT.
    """
    for name, model in models.items():
        for split in run.splits:
            run.once(f"eval-{i}-{name}-{split}.jsonl", evaluate, model, name=name, i=i,
                     split=split)


# ---------------------------------------------------------------------------------- the phases
# A phase is a function phase(run, out, *files, **values). The phase reads the input files `files`,
# writes its output to the temporary path `out`, and returns a dict of numbers for phases.json. In
# distributed runs, all ranks run the phase, but only one rank writes files.
#
# The first phase is `collect_experts` in engine/experts.py. It tokenizes the expert trajectories.
# It drops expert trajectories with a low reward, and expert trajectories of tasks that are also in
# an evaluation split.
#
# Phases use four methods of the object `run`:
#     run.load        loads a model with fp32 weights
#     run.fit         trains a model with a new AdamW optimiser (`dpo.train`), and saves it
#     run.log_probs   runs `dpo.token_log_probs` in parallel on all ranks
#     run.play        runs episodes with an inference copy of a model
# By default, training on a GPU computes forward passes in bf16, and the inference copy on a GPU has
# bf16 weights. On a CPU, and for the included model tiny, the default is fp32 (see --bf16).


def train_sft(run: Run, out: Path, base: Path, experts: Path, name: str) -> dict:
    """Fine-tunes a model on the action tokens of the expert trajectories (SFT), Eq. (3)-(5).

    Args:
        run: The run.
        out: The folder of the trained model.
        base: The folder of the model to start from.
        experts: The file of expert trajectories.
        name: The agent's name. It is part of the seed for shuffling the expert trajectories. If two
            agents start from the same model, they differ only in the order of these trajectories.

    Returns:
        The result of `Run.fit`, a dict of numbers.
    """
    s = run.settings
    rng = random.Random(seed_of(s.seed, "sft", name))
    groups = [Group([expert]) for expert in read(experts)]
    if len(groups) <= s.sft_batch and name != TARGET.name:
        run.print(f"{name} and target are identical after SFT, up to rounding, because all experts "
                "fit in one batch and their order makes no difference; lower --sft-batch "
                f"{s.sft_batch}")
    steps = dpo.batches(groups, s.sft_batch, rng, s.sft_epochs)
    rates = dpo.learning_rates(len(steps), s.sft_lr, s.sft_warmup, cosine=True)
    # The paper does not define how the loss of Eq. (5) is averaged over a batch. We average over
    # all action tokens of the batch [ours].
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
    """Samples --rollouts episodes of each task that has an expert trajectory.

    Args:
        run: The run.
        out: The trajectory file to write.
        agent: The folder of the agent's model.
        experts: The file of expert trajectories.
        name: The agent's name.
        i: The iteration.
        first_rollout: The first rollout index of each task. If an agent explores twice in an
            iteration, the second exploration must use new indices, because the index is part of
            each episode's seed.

    Returns:
        The metrics of the trajectories, see `summarise`.
    """
    s = run.settings
    episodes = []
    for expert in read(experts):
        for rollout in range(first_rollout, first_rollout + s.rollouts):
            seed = seed_of(s.seed, name, i, expert.task, rollout)
            episodes.append(Trajectory(expert.task, name, i, rollout, seed))
    trajectories = run.play(agent, episodes, s.temperature)
    write(run, out, trajectories)
    return summarise(trajectories, s.hard_threshold)


def evaluate(run: Run, out: Path, agent: Path, name: str, i: int, split: str) -> dict:
    """Evaluates an agent: plays one episode of each task in a split, with greedy decoding.

    Args:
        run, out, agent, name, i: The same as in `explore`.
        split: The name of the split, one of `run.splits`.

    Returns:
        The metrics of the trajectories, see `summarise`.
    """
    s = run.settings
    tasks = run.env.tasks(split)
    if s.eval_tasks:
        tasks = tasks[:s.eval_tasks]
    trajectories = run.play(agent, [Trajectory(task, name, i) for task in tasks], 0.0)
    write(run, out, trajectories)
    return summarise(trajectories, s.hard_threshold)


def summarise(trajectories: list[Trajectory], hard_threshold: float) -> dict:
    """Returns a dict with the mean reward and other metrics of trajectories.

    The fractions `success`, `hard_negative` and `other_failure` are the three rates of Table 2.
    They sum to 1. `turns` is the mean number of replies per episode. `idle` is the fraction of
    replies that changed nothing in the environment. `turn_limit` is the fraction of episodes that
    reached the maximum number of turns.

    Args:
        trajectories: The trajectories. There must be at least one.
        hard_threshold: The minimum reward of a hard negative, see --hard-threshold.
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


def make_pairs(
    run: Run,
    out: Path,
    experts: Path,
    played: dict[str, Path],
    earlier: list[Path],
    trains: str,
    role: str,
) -> dict:
    """Makes the preference pairs that one agent learns from.

    Args:
        run: The run.
        out: The path of the pairs file to write.
        experts: The file of expert trajectories.
        played: A dict that maps each agent's name to its trajectory file of this iteration.
        earlier: The buffer, a list of earlier trajectory files of all agents. The list is empty
            unless --d-fail is "buffer". With --failure-plays after, the list may also have the
            failure agent's first trajectory file of this iteration.
        trains: The name of the agent that learns from the pairs.
        role: The role of this agent, see `Agent`.

    Returns:
        A dict with two counters. `pairs` counts the pairs of each kind. `dropped` counts the
        unusable trajectories and the comparisons that made no pair, by reason.
    """
    s = run.settings
    dropped = Counter()
    own = by_task(read(played[trains]))
    others = by_task(read(*[played[name] for name in played if name != trains]))
    if role == "D_fail" and s.d_fail == "buffer":
        # Add the buffer, which has trajectories of all agents. Unusable trajectories of the buffer
        # were already counted in an earlier phase, so they are not counted in `dropped` again.
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
        run.print(f"{run.name}: no pairs, since {dict(dropped)}; give more --rollouts, another "
                "--temperature or a larger --max-tokens")
    return dict(pairs=Counter(pair.kind for pair in pairs), dropped=dropped)


def by_task(trajectories: list[Trajectory]) -> defaultdict:
    """Groups trajectories by task. Returns a dict that maps each task id to its trajectories."""
    groups = defaultdict(list)
    for t in trajectories:
        groups[t.task].append(t)
    return groups


def usable(trajectories: list[Trajectory], dropped: Counter) -> list[Trajectory]:
    """Returns the trajectories that can be used for training, and counts the others in `dropped`.

    An episode that fills the context is interrupted, so it has no final reward. Its trajectory is
    therefore not used in any pair, not even as the rejected side [ours]. Trajectories without
    action tokens are not used either.
    """
    kept = []
    for t in trajectories:
        if t.ended == "context_limit" or not any(t.action_mask):
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
    """Trains an agent on its preference pairs.

    For the role D_tgt, the loss is weighted DPO plus SFT, Eq. (9). For all other roles, the loss is
    only DPO, Eq. (7).

    Args:
        run: The run.
        out: The folder of the trained model.
        agent: The folder of the agent's model at the start of the iteration.
        reference: The folder of pi_ref, the reference model of DPO.
        pairs: The pairs file from `make_pairs`.
        experts: The file of expert trajectories.
        others: The trajectory files of the rollouts. They are needed because the pairs file refers
            to each trajectory only by its task, agent, iteration and rollout index.
        name: The agent's name.
        role: The agent's role, see `Agent`.
        i: The iteration.

    Returns:
        The result of `Run.fit`. If pairs were dropped, the dict also has their number by reason
        (`dropped`). If there are no pairs, `out` is an unchanged copy of the agent.
    """
    s = run.settings
    dropped = Counter()
    groups = preference_groups(read_pairs(pairs, [experts, *others]), read(experts), s,
                               run.encoder, dropped)
    counts = dict(dropped=dropped) if dropped else {}
    if not groups:
        return run.copy_agent(agent, out) | counts

    # Before training, compute the log-probability log pi_ref(e|u) of each trajectory e given its
    # task u. By default, the reference model is the agent itself at the start of the iteration, so
    # the same model is then trained. Otherwise the reference model is freed before the agent is
    # loaded, so that only one model is in memory at a time.
    model = run.load(reference)
    if s.reference == "none":  # pi_ref = 1
        for t in dpo.trajectories_of(groups):
            t.reference = 0.0
    else:
        dpo.add_references(model, groups, run.log_probs, run.fits)
    if reference != agent:
        del model
        model = run.load(agent)

    # App. B gives a range for the learning rate and a range for beta. As in ETO's scripts, we use
    # the first value of each range in iteration 1, and the last value in all later iterations.
    # The target is trained with Eq. (9), which has the weights lambda_DPO and lambda_SFT. All other
    # agents are trained with Eq. (7), which is Eq. (9) with lambda_DPO = 1 and lambda_SFT = 0.
    lr = s.dpo_lr if i == 1 else s.dpo_lr_later
    beta = s.beta if i == 1 else s.beta_later
    lambda_dpo, lambda_sft = s.lambda_dpo, s.lambda_sft
    if role != "D_tgt":
        lambda_dpo, lambda_sft = 1.0, 0.0
    loss = partial(dpo.preference_loss, beta=beta, lambda_dpo=lambda_dpo, lambda_sft=lambda_sft,
                   log_prob_reduction=s.log_prob_reduction)
    denominator = dpo.pair_count if s.denominator == "pairs" else dpo.pair_weight
    steps = preference_steps(groups, name, role, i, s)
    rates = dpo.learning_rates(len(steps), lr, s.dpo_warmup)
    return run.fit(model, out, steps, rates, loss, denominator) | counts


def preference_groups(
    pairs: list[Pair],
    experts: list[Trajectory],
    s: Settings,
    encoder,
    dropped: Counter,
) -> list[Group]:
    """Groups pairs by task, and truncates rejected trajectories.

    Args:
        pairs: The pairs.
        experts: The expert trajectories. The number of replies of a task's expert trajectory
            determines where rejected trajectories of the task are truncated, see --cut-turns.
        s: The settings.
        encoder: An `engine.chat.Encoder`.
        dropped: A counter of dropped pairs. A pair is dropped if its two sides are equal after the
            rejected side has been truncated.

    Returns:
        One group for each task with pairs. A group stores each trajectory only once, even if
        several pairs use it. If a trajectory is chosen in one pair and rejected in another pair, a
        group may store two versions: the full trajectory and the truncated trajectory.
    """
    expert_turns = {expert.task: expert.turns for expert in experts}
    groups = defaultdict(Group)  # the group of each task, by task id
    for pair in pairs:
        task = pair.chosen.task
        rejected = pair.rejected
        # Truncate the rejected trajectory so that it has at most `cut_turns` more replies than the
        # expert trajectory. ETO truncates in the same way. The paper does not mention truncation.
        if s.cut_turns >= 0:
            rejected = encoder.cut(rejected, expert_turns[task] + s.cut_turns)
        if same_tokens(pair.chosen, rejected):
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
    """Returns the batches of preference training, one batch per optimiser step.

    By default, an agent is trained for --dpo-epochs epochs over its pairs. If --dpo-steps is set,
    the target agent is trained on exactly --dpo-steps batches. This makes the targets of different
    runs comparable, because all of them are trained for the same number of steps. Without
    --dpo-steps, the number of steps depends on the number of pairs.

    Args:
        groups: The groups, one for each task with pairs.
        name: The agent's name, which is part of the seed for shuffling.
        role: The agent's role. --dpo-steps applies only to the target agent's role, "D_tgt".
        i: The iteration, which is part of the seed for shuffling.
        s: The settings.
    """
    rng = random.Random(seed_of(s.seed, "dpo", name, i))
    if role != "D_tgt" or s.dpo_steps == 0:
        return dpo.batches(groups, s.dpo_batch, rng, s.dpo_epochs)
    # Each epoch has at least one batch, so --dpo-steps epochs have at least --dpo-steps batches.
    # The slice at the end drops all further batches.
    return dpo.batches(groups, s.dpo_batch, rng, epochs=s.dpo_steps)[:s.dpo_steps]


# ----------------------------------------------------------------------------------- the pairs


def d_tgt(
    expert: Trajectory,
    own: list[Trajectory],
    others: list[Trajectory],
    s: Settings,
    dropped: Counter,
) -> list[Pair]:
    """Makes the target's pairs for one task, Eq. (8), and sets their weights as in Section 4.3.

    Args:
        expert: The expert trajectory of the task.
        own: The target's rollouts of the task in this iteration, e_tgt in the paper.
        others: The other agents' rollouts of the task in this iteration, e_fail in the paper.
        s: The settings.
        dropped: A counter of unusable trajectories and of comparisons that make no pair, by reason.
    """
    comparisons = len(own) * len(others)  # M x N, including successes and unusable trajectories
    own = usable(own, dropped)
    others = usable(others, dropped)

    # Eq. (8): D_tgt is the union of {(e_exp, e_tgt), (e_exp, e_fail)} and F_tgt x F_fail. The first
    # trajectory of each pair is the chosen trajectory. e_exp is the expert trajectory. F_tgt and
    # F_fail are the failures of the target and of the failure agent.
    pairs = against_expert(expert, own + others, s, dropped)

    # Section 4.3: "the total weight of all expert-prediction pairs generated for a given
    # instruction sums to 1.0". We use these weights in the SFT term as well [ours]. The SFT weight
    # stays 0 if the chosen trajectory is an agent's failure, even if the failure has a higher
    # reward than the expert trajectory. The reason for the SFT weight 0 is "to avoid introducing
    # misleading supervision from incorrect trajectories".
    for pair in pairs:
        if s.pair_weights == "instruction":
            pair.weight = 1.0 / len(pairs)
        if pair.chosen is expert or not pair.chosen.is_failure:
            pair.sft_weight = pair.weight

    # Section 4.3: "For failure-failure pairs, we apply DPO exclusively by setting lambda_SFT = 0".
    # The weights keep expert pairs "from dominating the training signal, while ensuring that
    # failure pairs receive full emphasis".
    #
    # In the paper, each agent plays each task once. The expert pairs of a task have a total weight
    # of 1, and the only failure pair of the task has the weight 1. If the target has M rollouts of
    # a task and the other agents have N, the task has up to M x N failure pairs. Here, each of them
    # has the weight 1 / (M x N), so the failure pairs of a task have a total weight of at most 1
    # [ours]. The total is lower if some rollouts are successes.
    #
    # In Eq. (8), the target's failure is always the chosen trajectory. In this code, the chosen
    # trajectory is the failure with the higher reward, as in Eq. (6) [ours].
    if s.d_tgt_failures == "none":
        return pairs
    for pair in ordered_failures(itertools.product(own, others), dropped):
        if s.failure_pair_weights == "rollouts":
            pair.weight = 1.0 / comparisons
        if s.d_tgt_failures == "hard" and pair.chosen.reward < s.hard_threshold:
            dropped["not a hard negative"] += 1
        else:
            pairs.append(pair)
    return pairs


def against_expert(
    expert: Trajectory,
    trajectories: list[Trajectory],
    s: Settings,
    dropped: Counter,
) -> list[Pair]:
    """Pairs each trajectory of a task with the expert trajectory of the task.

    The rules are those of the function construct_preference of ETO. Two trajectories with the same
    reward make no pair. Otherwise the trajectory with the higher reward is chosen, even if this is
    the agent's trajectory (see --expert-beaten). In Eq. (8), by contrast, the expert trajectory is
    always chosen.

    Args:
        expert: The expert trajectory of the task.
        trajectories: Trajectories of the task, from any agent.
        s: The settings.
        dropped: A counter of comparisons that make no pair, by reason.

    Returns:
        The pairs. Each pair has the weight 1 in the DPO term and 0 in the SFT term.
    """
    pairs = []
    for t in trajectories:
        if equal(expert.reward, t.reward):
            dropped["as good as the expert"] += 1
        elif same_tokens(expert, t):
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
    """Makes the failure agent's pairs for one task, Eq. (6).

    A pair compares two failures. The failure with the higher reward is chosen.

    Args:
        own: The failure agent's rollouts of the task, e_fail in the paper. With --d-fail buffer,
            this list also has the earlier trajectories of all agents.
        others: The other agents' rollouts of the task in this iteration.
        s: The settings.
        dropped: A counter of unusable trajectories and of comparisons that make no pair, by reason.
    """
    if s.d_fail == "none":  # without pairs, the failure agent is not trained after SFT
        return []
    own = usable(own, dropped)
    others = usable(others, dropped)
    # Eq. (6): D_fail = {e_w > e_l in F_tgt x F_fail}, where the failure e_w is preferred to the
    # failure e_l. Each of these pairs has one failure of the target and one failure of the failure
    # agent. By default, we also use pairs of two failures from the same agent, because the failure
    # agent learns from failures "from both the target and itself" (Section 4.2). Pairs from one
    # agent exist only with several rollouts per task. The paper samples one rollout per task.
    candidates = itertools.combinations(others + own, 2)
    if s.d_fail == "cross":
        candidates = itertools.product(others, own)
    return list(ordered_failures(candidates, dropped))


def ordered_failures(candidates: Iterable[tuple], dropped: Counter) -> Iterator[Pair]:
    """Makes pairs of two failures. The failure with the higher reward is the chosen trajectory.

    Args:
        candidates: Tuples of two trajectories of the same task.
        dropped: A counter of candidates that make no pair, by reason.

    Yields:
        One pair for each candidate whose two trajectories are failures with different rewards and
        different tokens.
    """
    for a, b in candidates:
        if not a.is_failure or not b.is_failure:
            dropped["not both failures"] += 1
        elif equal(a.reward, b.reward):
            dropped["equal failures"] += 1
        elif same_tokens(a, b):
            dropped["the same text"] += 1
        elif better(a.reward, b.reward):
            yield Pair("failure>failure", a, b)
        else:
            yield Pair("failure>failure", b, a)


def same_tokens(a: Trajectory, b: Trajectory) -> bool:
    """Returns True if two trajectories have the same tokens.

    Such trajectories are not used as a pair, because every policy gives both of them the same
    log-probability.
    """
    return a.ids == b.ids


# ------------------------------------------------------------------------------------ settings
# The comment above a setting is its --help text. The bracket at the end of the comment names the
# source of the default: a section of the paper, the scripts of ETO (Song et al.), or our own choice
# [ours]. If the default is None, the bracket describes what is used instead.
#
# The type of a setting restricts its values. The type also determines whether the setting can
# change when a run is resumed. A setting of type Free can change, because it affects the results
# only by rounding errors. A setting of type Growing can only be increased. Changing any other
# setting raises an error.


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
    # Output folder [runs/ENV-METHOD-sSEED]
    out: types.Free[Optional[str]] = None
    # Start from another run. In RUN@OUTPUT, RUN is the folder of that run, and OUTPUT is one of its
    # outputs. The outputs before OUTPUT are reused. OUTPUT and all later outputs are computed with
    # the settings of this run [none]
    branch: types.Free[Optional[str]] = None
    # Run all phases on only a few tasks, in about a minute with the model tiny [ours]
    quick: bool = False
    # Experiment tracker for logging: tensorboard, wandb, or any other tracker that accelerate
    # supports [none]
    track: types.Free[Optional[str]] = None
    # File of expert trajectories: the data of ETO, the data of IPR, or a trajectory file of another
    # run. From a trajectory file, the trajectory with the highest reward of each task is used
    # [scripted experts]
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
    # Format of the text that the agent sees; "short" is for small models, and leaves out repeated
    # text. With "short", scripted expert trajectories also have no ReAct thoughts [ours]
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
    # Fraction of the SFT steps used for linear warmup; after warmup, the learning rate follows a
    # cosine decay [App. B]
    sft_warmup: types.Share = 0.03
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
    # Number K of iterations; each iteration has exploration and preference training [App. B; 5 on
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
    # Learning rate of preference training in later iterations [App. B; ETO]
    dpo_lr_later: types.Rate = 5e-7
    # Fraction of the optimiser steps in an iteration used for linear warmup; after warmup, the
    # learning rate stays constant [ETO]
    dpo_warmup: types.Share = 0.1
    # Factor beta of DPO, Eq. (7), in iteration 1 [App. B; ETO]
    beta: types.Rate = 0.1
    # Factor beta of DPO, Eq. (7), in later iterations [App. B; ETO]
    beta_later: types.Rate = 0.5
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
    # each task sum to 1; "none" gives each pair the weight 1, as in ETO [Section 4.3]
    pair_weights: Literal["instruction", "none"] = "instruction"
    # Weight of each failure pair of the target: "rollouts" is 1 / (M x N), where the target has M
    # rollouts of the task and the other agents have N; "none" gives each pair the weight 1 [ours]
    failure_pair_weights: Literal["rollouts", "none"] = "rollouts"
    # Failure pairs of the target: "cross" compares each failure of the target with each failure of
    # another agent; "hard" is the same, but drops a pair if its chosen trajectory is not a hard
    # negative; "none" uses no failure pairs [Eq. 8]
    d_tgt_failures: Literal["cross", "hard", "none"] = "cross"
    # Minimum reward of a hard negative; a failure with a lower reward is not hard [Section 5.2.1]
    hard_threshold: types.Weight = 0.6
    # Maximum number of replies that a rejected trajectory may have in addition to the expert
    # trajectory's number of replies. Longer rejected trajectories are truncated; a negative value
    # turns truncation off [ETO]
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
    # Presets change the defaults of settings. The preset "tiny" applies to runs with the model
    # tiny, "eto" to runs with --protocol eto, "--method eto" to runs with this method, "quick" to
    # runs with --quick, and "quick tiny" to runs with both --quick and the model tiny. If several
    # presets change the same setting, the last preset in this order has priority. Environments
    # define additional presets.
    presets = {"tiny": dict(view="short", sft_batch=16, dpo_batch=16, beta_later=0.1),
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


def largest_group(s: Settings) -> int:
    """Returns the number of trajectories of a task: one expert trajectory and all rollouts."""
    return 1 + len(AGENTS[s.method]) * s.rollouts


METHODS = {
    "coevolve": types.Method(
        coevolve, (Common, Preferences, FailureAgent),
        "a target learns from experts and from a failure agent, which learns as well",
        group=largest_group),
    "eto": types.Method(
        coevolve, (Common, Preferences),
        "the target alone learns by DPO to prefer experts to its failures (Song et al. 2024)",
        group=largest_group),
    "positive": types.Method(
        coevolve, (Common, Preferences),
        "a control: a second agent, trained as in ETO, replaces the failure agent",
        group=largest_group),
    "sft": types.Method(coevolve, (Common,), "only imitation of the experts"),
}


if __name__ == "__main__":
    main(sys.argv[1:], Settings, Run, METHODS, "python coevolve.py")
