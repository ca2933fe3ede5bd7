"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

This is the method in pseudocode, where SFT is supervised fine-tuning, DPO is direct preference
optimisation, and a > b means that a is preferred to b:

    target, failure = SFT(experts, one order), SFT(experts, another order)         Eq. (3)-(5)
    for K iterations:
        both agents run episodes of every training task
        failure <- DPO(better failure > worse failure, any two failures of a task) Eq. (6), (7)
        target  <- weighted DPO(expert > own rollout, expert > failure agent's rollout,
                                better failure > worse failure, one of each agent) Eq. (8), (9)
                   + lambda_SFT x SFT(chosen experts and successful rollouts)

Read this file from the top, then `dpo.py`, which turns tokens into gradients, and `envs.py`, which
runs an episode with text in and text out. These three files are the method. The code in `engine/`
runs it, and you can treat it as a black box.

    task        an instruction for the agent, u in the paper
    episode     one attempt at a task, recorded as a trajectory e
    expert      the expert trajectory (demonstration) of a task, which agents learn to imitate
    rollout     an agent's episode of a task, numbered within each task, agent and iteration
    agent       a model that acts in the environment and learns from the pairs of its role
    phase       a function of the loop that reads files of a run and writes one
    ETO         the method of Song et al. (2024), a baseline in the paper

Brackets such as [App. B], [ETO] or [ours] name the source of a choice.

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
    """An agent of a method. Its role, not its name, determines its pairs and its loss."""
    name: str  # used in files and tables
    # The target, D_tgt, learns from the pairs of Eq. (8) with the loss of Eq. (9). The failure
    # agent, D_fail, learns from the pairs of Eq. (6) with the loss of Eq. (7). An agent with the
    # role "own" compares its own trajectories with the experts' and uses the loss of Eq. (7), as in
    # ETO.
    role: Literal["D_tgt", "D_fail", "own"]


# To add a method, add a line here and one to METHODS below. To add a role, add a branch to
# make_pairs. train_preferences uses the loss of Eq. (7) for every role but D_tgt.
TARGET = Agent("target", "D_tgt")
AGENTS = {"sft": [TARGET],
          # ETO is "a DPO-only baseline" [Section 5.1]. With a single agent, D_tgt has the pairs of
          # ETO. The preset "--method eto" sets lambda_sft to 0 and the weights of all pairs to 1.
          "eto": [TARGET],
          "coevolve": [TARGET, Agent("failure", "D_fail")],
          # The control experiment has a positive agent, "trained in the same manner as ETO"
          # [Section 5.4]. Its failures are paired with the target's, as a failure agent's would be
          # [ours].
          "positive": [TARGET, Agent("positive", "own")]}


def coevolve(run: Run) -> None:
    """Runs the method of Sections 4.1 to 4.3.

    ETO is the same loop with the target as the only agent, and SFT is the part before the loop.

    `once(output, phase, *files, **values)` calls phase(run, out, *files, **values), unless the
    output already exists and was made from the same files and values. It returns the path of the
    output. If an input file of a phase has other bytes, the phase runs again. A resumed run refuses
    changed settings, see `settings` below. It prints a line if the code has changed, but recomputes
    nothing for that reason: after a change to the code, use another --out, or --branch RUN@OUTPUT.
    A phase that was interrupted starts again from its beginning.
    """
    s = run.settings
    once = run.once
    agents = AGENTS[s.method]

    # All agents first learn to imitate the experts, Eq. (3)-(5). Each sees them in another order.
    experts = once("experts.jsonl", collect_experts, *expert_paths(s))
    models = {}  # agent name -> folder of its model
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

    earlier = []  # the buffer: trajectory files that D_fail keeps, see --d-fail
    for i in range(1, s.iterations + 1):
        # All agents run episodes of every task that has an expert.
        played = {}  # agent name -> its trajectory file
        for agent in agents:
            played[agent.name] = once(f"iter{i}/{agent.name}.jsonl", explore,
                                      models[agent.name], experts, name=agent.name, i=i)

        # Each agent then learns from its pairs, by Eq. (6) and (7) or by Eq. (8) and (9). Section 4
        # trains the agents "in alternating phases", but does not say whether the failure agent
        # plays before or after it learns. With "before", all agents learn from the same rollouts,
        # so their order makes no difference, and in iteration 1 the failure agent's rollouts come
        # from its SFT model. With "after", the failure agent learns first and plays again, and the
        # target learns from these newest hard negatives.
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
        if s.d_fail == "buffer":  # otherwise D_fail has only the failures of one iteration
            earlier += played.values()


def expert_paths(s: Settings) -> list[Path]:
    """Returns the file given by --experts, or an empty list if expert trajectories are scripted."""
    return [Path(s.experts)] if s.experts else []


def evaluate_all(run: Run, models: dict[str, Path], i: int) -> None:
    """Evaluates all agents on each split that the run evaluates.

    Args:
        run: The run.
        models: The folder of each agent's model, by agent name.
        i: The iteration, or 0 after SFT.
    """
    for name, model in models.items():
        for split in run.splits:
            run.once(f"eval-{i}-{name}-{split}.jsonl", evaluate, model, name=name, i=i,
                     split=split)


# ---------------------------------------------------------------------------------- the phases
# A phase has the form phase(run, out, *files, **values). It writes its output to `out`, a temporary
# path, and returns numbers for phases.json. All ranks run it, but only one of them writes. The
# first phase is `collect_experts` in engine/experts.py, which encodes the experts as tokens, and
# drops those whose reward is low or whose task is in an evaluated split. Phases use four methods of
# the run:
#     run.load        loads a model's fp32 weights (forward passes are in bf16 on a GPU, see dpo.py)
#     run.fit         trains a model with a new AdamW optimiser (`dpo.train`), and saves it
#     run.log_probs   runs `dpo.token_log_probs` in parallel on all ranks
#     run.play        runs episodes with an inference copy of a model, which is in bf16 on a GPU
#                     (except for the included model tiny)


def train_sft(run: Run, out: Path, base: Path, experts: Path, name: str) -> dict:
    """Trains a model on the action tokens of the experts, Eq. (3)-(5).

    Args:
        run, out: The run and the output path, as for every phase.
        base: The folder of the model to start from.
        experts: The file of experts.
        name: The agent's name. It seeds the shuffling of the experts, which is the only difference
            between agents after SFT.

    Returns:
        The numbers that `Run.fit` returns.
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
    # Eq. (5) does not say how to average over a batch. We average over its action tokens [ours].
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
        run, out: The run and the output path, as for every phase.
        agent: The folder of the agent's model.
        experts: The file of expert trajectories.
        name: The agent's name.
        i: The iteration.
        first_rollout: The index of the first rollout of each task. An agent that plays twice in an
            iteration needs other indices the second time, which seed other samples.

    Returns:
        The averages over the trajectories, see `summarise`.
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
    """Runs one episode of each task in a split, with greedy decoding.

    Args:
        run, out, agent, name, i: The same as in `explore`.
        split: The name of the split, one of `run.splits`.

    Returns:
        The averages over the trajectories, see `summarise`.
    """
    s = run.settings
    tasks = run.env.tasks(split)
    if s.eval_tasks:
        tasks = tasks[:s.eval_tasks]
    trajectories = run.play(agent, [Trajectory(task, name, i) for task in tasks], 0.0)
    write(run, out, trajectories)
    return summarise(trajectories, s.hard_threshold)


def summarise(trajectories: list[Trajectory], hard_threshold: float) -> dict:
    """Averages rewards and other numbers over trajectories.

    `success`, `hard_negative` and `other_failure` are the three rates of Table 2. `idle` is the
    fraction of replies that changed nothing, and `turn_limit` that of episodes that ran out of
    turns.

    Args:
        trajectories: The trajectories.
        hard_threshold: The lowest reward of a hard negative, see --hard-threshold.
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
        experts: The file of experts.
        played: Each agent's trajectory file of this iteration, by agent name.
        earlier: The trajectory files of the buffer, from all agents. They are of earlier iterations
            and, with --failure-plays after, of the failure agent's first play in this one.
        trains: The name of the agent that learns from the pairs.
        role: The role of that agent, see `Agent`.

    Returns:
        The number of pairs of each kind, and of comparisons skipped for each reason.
    """
    s = run.settings
    dropped = Counter()
    own = by_task(read(played[trains]))
    others = by_task(read(*[played[name] for name in played if name != trains]))
    if role == "D_fail" and s.d_fail == "buffer":
        # The buffer holds trajectories of all agents. Its unusable ones were already counted in
        # the iteration that they come from.
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
    """Returns a dict {task: its trajectories}."""
    groups = defaultdict(list)
    for t in trajectories:
        groups[t.task].append(t)
    return groups


def usable(trajectories: list[Trajectory], dropped: Counter) -> list[Trajectory]:
    """Returns the trajectories that can be trained on, and counts the others in `dropped`.

    An episode that fills the context has no final reward. It is therefore not used in any pair, not
    even as the rejected trajectory [ours].
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

    For the role D_tgt, the loss is weighted DPO plus SFT, Eq. (9). For all other roles, it is DPO
    alone, Eq. (7).

    Args:
        run: The run.
        out: The folder of the trained model.
        agent: The folder of the agent's model at the start of the iteration.
        reference: The folder of pi_ref, the reference model to which DPO compares the agent.
        pairs: The pairs file from `make_pairs`.
        experts: The file of experts.
        others: The files of rollouts that the pairs refer to by task, agent, iteration and index.
        name: The agent's name.
        role: The agent's role, see `Agent`.
        i: The iteration.

    Returns:
        The numbers that `Run.fit` returns.
    """
    s = run.settings
    dropped = Counter()
    groups = preference_groups(read_pairs(pairs, [experts, *others]), read(experts), s,
                               run.encoder, dropped)
    counts = dict(dropped=dropped) if dropped else {}
    if not groups:
        return run.copy_agent(agent, out) | counts

    # Compute log pi_ref(e|u), the log-probability of a trajectory e given its task u, for all
    # trajectories before training, so that only one model is in memory at a time.
    model = run.load(reference)
    if s.reference == "none":  # pi_ref = 1
        for t in dpo.trajectories_of(groups):
            t.reference = 0.0
    else:
        dpo.add_references(model, groups, run.log_probs, run.fits)
    if reference != agent:
        del model
        model = run.load(agent)

    # App. B gives ranges for the learning rate and beta. As in ETO's scripts, we use the first
    # value of each range in iteration 1 and the other one later. Eq. (7) has no lambdas.
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
    """Groups pairs by task, together with the trajectories that they compare.

    Args:
        pairs: The pairs.
        experts: The experts. Their lengths limit the lengths of rejected trajectories.
        s: The settings.
        encoder: An `engine.chat.Encoder`.
        dropped: The counter of pairs whose two sides are equal once the rejected one is truncated.

    Returns:
        One group for each task that has pairs. Each trajectory occurs in it once, however many
        pairs use it. If it is chosen in one pair and truncated as rejected in another, both forms
        occur.
    """
    expert_turns = {expert.task: expert.turns for expert in experts}
    groups = defaultdict(Group)  # task -> group
    for pair in pairs:
        task = pair.chosen.task
        rejected = pair.rejected
        # As in ETO, but not in the paper, a rejected trajectory is truncated so that it has only a
        # few more replies than the expert.
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
    """Returns the batches of preference training, one per step.

    The batches cover --dpo-epochs epochs over the pairs. With --dpo-steps, there are exactly that
    many batches, so that targets can be compared after the same number of steps.

    Args:
        groups: The tasks with their pairs.
        name, i: The agent's name and the iteration. Both seed the shuffling.
        role: The agent's role. Only D_tgt uses --dpo-steps.
        s: The settings.
    """
    rng = random.Random(seed_of(s.seed, "dpo", name, i))
    if role != "D_tgt" or s.dpo_steps == 0:
        return dpo.batches(groups, s.dpo_batch, rng, s.dpo_epochs)
    # An epoch has at least one batch, so --dpo-steps epochs have enough batches.
    return dpo.batches(groups, s.dpo_batch, rng, epochs=s.dpo_steps)[:s.dpo_steps]


# ----------------------------------------------------------------------------------- the pairs


def d_tgt(
    expert: Trajectory,
    own: list[Trajectory],
    others: list[Trajectory],
    s: Settings,
    dropped: Counter,
) -> list[Pair]:
    """Makes the target's pairs for one task, Eq. (8), with the weights of Section 4.3.

    Args:
        expert: The expert of the task.
        own: All rollouts of the target in this iteration, e_tgt in the paper.
        others: All rollouts of the other agents, e_fail in the paper.
        s: The settings.
        dropped: The counter of skipped comparisons by reason.
    """
    comparisons = len(own) * len(others)  # each rollout of the target with each of the others
    own = usable(own, dropped)
    others = usable(others, dropped)

    # Eq. (8): D_tgt = {(e_exp, e_tgt), (e_exp, e_fail)} u F_tgt x F_fail. The first trajectory of a
    # pair is the chosen one, e_exp is the expert, and F_tgt and F_fail are the agents' failures.
    pairs = against_expert(expert, own + others, s, dropped)

    # Section 4.3: "the total weight of all expert-prediction pairs generated for a given
    # instruction sums to 1.0". We use these weights in the SFT term as well [ours]. An agent's
    # failure is never imitated, "to avoid introducing misleading supervision from incorrect
    # trajectories", even if it has a higher reward than the expert.
    for pair in pairs:
        if s.pair_weights == "instruction":
            pair.weight = 1.0 / len(pairs)
        if pair.chosen is expert or not pair.chosen.is_failure:
            pair.sft_weight = pair.weight

    # Section 4.3: "For failure-failure pairs, we apply DPO exclusively by setting lambda_SFT = 0".
    # The weights keep expert pairs "from dominating the training signal, while ensuring that
    # failure pairs receive full emphasis". In the paper each agent plays a task once: the expert
    # pairs of a task weigh 1 together, and its failure pair weighs 1. With R rollouts per agent a
    # task has up to R x R failure pairs. Each gets the weight 1 / (R x R), so that they weigh at
    # most 1 together, like the expert pairs [ours]. Eq. (8) always chooses the target's failure.
    # We choose the failure with the higher reward, as in Eq. (6) [ours].
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
    """Pairs each trajectory of a task with the task's expert.

    As in ETO's construct_preference, the trajectory with the higher reward is chosen, even if it is
    not the expert, and equal rewards make no pair. Eq. (8) has no such conditions.

    Args:
        expert: The expert of the task.
        trajectories: Trajectories of the task, from any agent.
        s: The settings.
        dropped: The counter of skipped comparisons by reason.

    Returns:
        The pairs, each with weight 1 and without an SFT term.
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

    Of two failures, the one with the higher reward is chosen.

    Args:
        own: The failure agent's rollouts, e_fail in the paper. With --d-fail buffer, they include
            the earlier trajectories of all agents.
        others: The other agents' rollouts of this iteration.
        s: The settings.
        dropped: The counter of skipped comparisons by reason.
    """
    if s.d_fail == "none":  # the failure agent is not trained any further
        return []
    own = usable(own, dropped)
    others = usable(others, dropped)
    # Eq. (6): D_fail = {e_w > e_l in F_tgt x F_fail}, where the failure e_w is preferred to e_l.
    # By default, we add pairs of two failures from the same agent, since the failure agent learns
    # from failures "from both the target and itself" (Section 4.2). With one rollout per task, as
    # in the paper, there are no such pairs.
    candidates = itertools.combinations(others + own, 2)
    if s.d_fail == "cross":
        candidates = itertools.product(others, own)
    return list(ordered_failures(candidates, dropped))


def ordered_failures(candidates: Iterable[tuple], dropped: Counter) -> Iterator[Pair]:
    """Yields a pair for each candidate that consists of two failures with different rewards."""
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
    """Returns True if two trajectories have the same tokens. No policy can prefer one of them."""
    return a.ids == b.ids


# ------------------------------------------------------------------------------------ settings
# The comment above a setting is its --help text. The brackets at its end name the source of the
# default: the paper, ETO (the scripts of Song et al.) or ourselves. If the default is no value,
# they describe it. The type of a setting limits its values. When you resume a run, you may change a
# setting of type Free, on which no number depends but by rounding, and increase one of type
# Growing. Changing any other setting is refused.


@dataclass(frozen=True)
class Data:
    """Method, model, tasks and lengths"""
    # Environment that the agents act in [ours]
    env: Literal[ENVIRONMENTS] = "webshop"
    # Training method, one of the methods listed at the top of --help [the paper]
    method: str = "coevolve"
    # Model to start from: "tiny", which is included, or a causal language model with a chat
    # template, by its folder or its name on the Hugging Face Hub [ours]
    model: str = "tiny"
    # Seed of all random numbers [ours]
    seed: types.Whole = 0
    # Output folder [runs/ENV-METHOD-sSEED]
    out: types.Free[Optional[str]] = None
    # RUN@OUTPUT: reuse the outputs of RUN that come before OUTPUT, then continue with these
    # settings [none]
    branch: types.Free[Optional[str]] = None
    # Run the same phases on fewer tasks, which takes about a minute with the model tiny [ours]
    quick: bool = False
    # Experiment tracker of accelerate that logs all numbers, such as tensorboard or wandb [none]
    track: types.Free[Optional[str]] = None
    # File of expert trajectories: ETO's list, IPR's list, or trajectories of a run, of which the
    # best one of each task becomes its expert trajectory [scripted experts]
    experts: types.OldFile = None
    # Drop expert trajectories with a reward of at most this value, unless they solve their task
    # [App. A]
    expert_min_reward: float = 0.7
    # Number of training tasks; 0 for all [Table 1]
    train_tasks: types.Whole = 0
    # Number of tasks in each evaluated split; 0 for all [Table 1]
    eval_tasks: types.Whole = 0
    # Splits to evaluate on; use validation to choose settings or an iteration [Table 1]
    eval_splits: Literal["test", "validation", "all"] = "test"
    # Form of the observations; "short" leaves out repeated text and, in the scripted expert
    # trajectories, ReAct thoughts, for small models [ours]
    view: Literal["full", "short"] = "full"
    # Maximum number of tokens in a trajectory; the episode ends there [ours]
    max_tokens: types.Count = 4096
    # Maximum number of tokens in a reply [ours]
    max_new_tokens: types.Count = 256


@dataclass(frozen=True)
class Sft:
    """SFT on expert trajectories (Section 4.1), and settings for all training"""
    # Number of epochs over the expert trajectories [App. B]
    sft_epochs: types.Count = 3
    # Number of expert trajectories per SFT step [App. B]
    sft_batch: types.Count = 48
    # Peak learning rate of SFT [App. B]
    sft_lr: types.Rate = 1e-5
    # Fraction of the SFT steps used for linear warmup, before cosine decay [App. B]
    sft_warmup: types.Share = 0.03
    # Weight decay of AdamW, in all training [ETO]
    weight_decay: types.Weight = 0.0
    # Norm that gradients are clipped to, in all training [transformers' default]
    max_grad_norm: types.Rate = 1.0


@dataclass(frozen=True)
class Common(MachineSettings, Sft, Data):
    """Settings that every method uses"""


@dataclass(frozen=True)
class Preferences:
    """Exploration and preference training (Sections 4.2 and 4.3)"""
    # Number K of iterations of exploration and preference training [App. B; 5 on InterCodeSQL]
    iterations: types.Growing[types.Count] = 3
    # Number of rollouts per task, in each iteration if the method iterates [Section 5.2.1]
    rollouts: types.Count = 1
    # Sampling temperature of rollouts; trained agents are evaluated greedily [ours; ETO: 0]
    temperature: types.Temperature = 0.7
    # Number of epochs over the pairs of an iteration [App. B]
    dpo_epochs: types.Count = 3
    # Number of optimiser steps of the target per iteration; 0 to use --dpo-epochs [ours]
    dpo_steps: types.Whole = 0
    # Maximum number of pairs per step; the pairs of a task stay together, so that one forward pass
    # per trajectory serves all of them, and a task with more pairs is a step by itself [App. B]
    dpo_batch: types.Count = 32
    # Learning rate of preference training in iteration 1 [App. B; ETO]
    dpo_lr: types.Rate = 1e-6
    # Learning rate of preference training in later iterations [App. B; ETO]
    dpo_lr_later: types.Rate = 5e-7
    # Fraction of an iteration's steps used for linear warmup, before a constant rate [ETO]
    dpo_warmup: types.Share = 0.1
    # Factor beta of DPO, Eq. (7), in iteration 1 [App. B; ETO]
    beta: types.Rate = 0.1
    # Factor beta of DPO, Eq. (7), in later iterations [App. B; ETO]
    beta_later: types.Rate = 0.5
    # Weight of the DPO term in Eq. (9) [Section 4.3]
    lambda_dpo: types.Weight = 1.0
    # Weight of the SFT term in Eq. (9), which ETO does not have [Section 4.3; ETO: Section 5.1]
    lambda_sft: types.Weight = 0.1
    # Reduction of a trajectory's token log-probabilities in the DPO term [Eq. 2, 5, 7]
    log_prob_reduction: Literal["sum", "mean"] = "sum"
    # Reference model pi_ref, to which DPO compares the agent: "iteration" is the agent at the start
    # of the iteration, "sft" is the agent after SFT, and "none" sets pi_ref = 1 [ETO; IPR: sft]
    reference: Literal["iteration", "sft", "none"] = "iteration"
    # Denominator of the batch loss, SFT term included: "weights" is the sum of the weights of all
    # pairs, failure pairs included, and "pairs" is their number [ours]
    denominator: Literal["weights", "pairs"] = "weights"
    # Swap or drop a pair in which the expert has the lower reward [ETO]
    expert_beaten: Literal["swap", "drop"] = "swap"
    # Weights of the expert pairs of a task: "instruction" makes them sum to 1, "none" gives each of
    # them 1, as in ETO [Section 4.3; ETO: Section 5.1]
    pair_weights: Literal["instruction", "none"] = "instruction"
    # Weight of each failure pair of the target: "rollouts" is 1 / (the target's rollouts of the
    # task x the other agents' rollouts), which is 1 with one rollout each; "none" is 1 [ours]
    failure_pair_weights: Literal["rollouts", "none"] = "rollouts"
    # Failure pairs that the target learns from: "cross" compares each of its failures with each
    # failure of another agent, "hard" keeps the pairs whose chosen reward is at least
    # --hard-threshold [Eq. 8]
    d_tgt_failures: Literal["cross", "hard", "none"] = "cross"
    # Lowest reward of a hard negative [Section 5.2.1]
    hard_threshold: types.Weight = 0.6
    # Truncate a rejected trajectory to this many replies more than the expert's; negative: never
    # [ETO]
    cut_turns: int = 5
    # Count or leave out, in log pi of a rejected trajectory, its end-of-turn tokens and the reply
    # that ended its episode [Eq. 7]
    rejected_ends: Literal["count", "leave out"] = "count"


@dataclass(frozen=True)
class FailureAgent:
    """The failure agent (Section 4.2)"""
    # Failure pairs that the failure agent learns from: "all" pairs of the iteration; "cross", the
    # literal Eq. (6), those of a failure of the target with one of its own; "buffer", all pairs of
    # this and earlier iterations; "none", so that it never learns [Section 4.2]
    d_fail: Literal["all", "cross", "buffer", "none"] = "all"
    # Whether the target learns from rollouts that the failure agent played before or after it
    # learned in the iteration; "after" makes it play twice [before: the paper's summary; after: its
    # introduction]
    failure_plays: Literal["before", "after"] = "before"
    # Folder of a model that the failure agent starts from, instead of SFT [its own SFT]
    failure_from: types.OldFile = None


@dataclass(frozen=True)
class Settings(FailureAgent, Preferences, Common, types.Stated):
    """All settings of a run"""
    # These are the settings that --help lists. All others appear only in --help all.
    essential = ("env", "method", "model", "seed", "out", "branch", "quick", "experts",
                 "train_tasks", "eval_tasks", "eval_splits", "max_tokens", "max_new_tokens",
                 "sft_epochs", "sft_lr", "iterations", "rollouts", "temperature", "dpo_epochs",
                 "dpo_lr", "beta", "lambda_sft", "pair_weights", "d_tgt_failures", "d_fail")
    # Presets change the defaults: "tiny" for a model, "eto" for ETO's protocol, "--method eto" for
    # a method. If several presets apply, the last one wins. Environments define further presets.
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
    """Returns the number of trajectories of a task: the expert's and all rollouts."""
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
