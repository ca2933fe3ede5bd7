"""Co-Evolving Agents: Learning from Failures as Hard Negatives (arXiv 2511.22254), in raw PyTorch.

Read this first: the loop, its phases, the pairs. Then `tokens.py` (tokens in, gradients out) and
`play_env.py` (text in, text out). A phase reads files of the run and writes one file or folder of
it, named in the loop: every stage can be looked at; a run that was stopped goes on where it was.

A task is the paper's instruction u. An episode is one play of it, and its record is a trajectory e.

    python lab/loop.py --env webshop          train and evaluate (run.sh does this)
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # run as a file, it finds the package that it belongs to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab import play_env as envs
from lab import tokens as dpo
from lab.baselines import chat, ppo, rft
from lab.harness.scores import played, scores, table2
from lab.harness.settings import Settings, SettingsError, agents_of
from lab.playing.episodes import play, usable_rollouts
from lab.program.run import Run
from lab.tokens import Trajectory
from lab.training import margins
from lab.training.pairs import preference_groups

# ----------------------------------------------------------------------------------- the loop


def coevolve(run: Run) -> None:
    """The method, Sections 4.1-4.3, and the paper's baselines: the same phases, fewer or others."""
    s, phase = run.settings, run.phase
    # The parameter-matched baseline of Section 5.4 has a second positive agent as its auxiliary.
    agents = agents_of(s.method)

    if s.method in ("chat", "evaluate"):  # nothing is trained
        return evaluations(run, "target", 0)

    phase("experts.jsonl", collect_experts)
    for agent in agents:  # the same experts, another seed each
        phase(f"sft-{agent}", train_sft, agent)                                  # Eq. (3)-(5)
        evaluations(run, agent, 0)
    if s.method == "sft":
        return

    if s.method in ("rft", "dart"):  # successes join the experts
        phase("iter1/target.jsonl", explore, "target", 1, lambda task: range(s.samples))
        if s.method == "dart":
            phase("iter1/target-more.jsonl", explore, "target", 1, rft.more_where_hard(run))
        phase("iter1/experts.jsonl", rft.join_successes)
        phase("iter1/target-agent", train_sft, "target", 1)
        return evaluations(run, "target", 1)

    for i in range(1, s.iterations + 1):  # ETO is this loop with the target alone
        n = s.ppo_rollouts if s.method == "ppo" else s.rollouts
        for agent in agents:
            phase(f"iter{i}/{agent}.jsonl", explore, agent, i, lambda task: range(n))
        if s.method == "ppo":
            phase(f"iter{i}/target-agent", ppo.train, i)
            evaluations(run, "target", i)
            continue
        for agent in reversed(agents):  # the failure agent first
            phase(f"iter{i}/pairs-{agent}.jsonl", make_pairs, agent, i)          # Eq. (6), (8)
            phase(f"iter{i}/{agent}-agent", train_preferences, agent, i)         # Eq. (7), (9)
            if s.explore_again and agent != "target":
                phase(f"iter{i}/{agent}-more.jsonl", explore, agent, i,
                      lambda task: range(n, 2 * n), trained=True)
        for agent in agents:
            evaluations(run, agent, i)


def evaluations(run: Run, agent: str, i: int) -> None:
    for split in run.tasks.splits:
        run.phase(f"eval-{i}-{agent}-{split}.jsonl", evaluate, agent, i, split)


# ---------------------------------------------------------------------------------- the phases
# phase(run, out, ...) writes `out`, a temporary path, and returns numbers for the log.


def collect_experts(run: Run, out: Path) -> dict:
    """Expert trajectories of the training tasks, kept above expert_min_reward.

    They are the scripted expert's, or those of --experts FILE.
    """
    s, env, encoder = run.settings, run.tasks.make_env(), run.trainer.encoder()
    experts, dropped = [], {"reward": [], "too long": [], "evaluated too": [], envs.LOST: []}
    first = len(envs.opening(env, ""))  # turns before an expert's first reply
    for task, messages, reward in envs.experts(env, s.experts, s.train_tasks, dropped[envs.LOST]):
        ids, mask = encoder.encode(messages, first)
        if task in run.tasks.left_out:
            dropped["evaluated too"].append(task)
        elif reward <= s.expert_min_reward and reward < envs.SUCCESS:
            dropped["reward"].append(task)
        elif len(ids) > s.max_tokens:
            dropped["too long"].append(task)
        else:
            steps = sum(m["role"] == "assistant" for m in messages[first:])
            experts.append(Trajectory(task, "expert", messages=messages, ids=ids, action_mask=mask,
                                      reward=reward, steps=steps, ended="done"))
    env.close()
    for reason, tasks in dropped.items():
        run.log.dropped("experts.jsonl", reason, tasks)
    if not experts:
        raise SettingsError(
            f"no expert trajectory is left: {len(dropped['reward'])} at or below "
            f"--expert-min-reward {s.expert_min_reward}, {len(dropped['too long'])} longer than "
            f"--max-tokens {s.max_tokens}; lower the one, raise the other or give better --experts")
    run.folder.write_jsonl(out, experts)
    return played(experts)


def train_sft(run: Run, out: Path, agent: str, i: int = 0) -> dict:
    """The base model fine-tuned on the experts' action tokens, Eq. (3)-(5)."""
    s, rng = run.settings, run.rng("sft", agent, *([i] if i else []))
    if agent == "failure" and s.failure_from:
        run.trainer.copy(run.trainer.failure_agent(), out)
        return {}
    groups = [dpo.Group(e.task, [e]) for e in run.folder.trajectories(
        f"iter{i}/experts.jsonl" if i else "experts.jsonl")]
    epochs = [dpo.batches(groups, s.sft_batch, "instructions", rng) for _ in range(s.sft_epochs)]
    if agent != "target" and len(epochs[0]) == 1:  # another seed orders batches; one has no order
        run.log("equal agents", phase=run.folder.running, experts=len(groups))
        run.log.say(f"{run.folder.running}: all {len(groups)} experts are in one batch, so that "
                    "this agent is the target but for rounding; raise --train-tasks, or give a "
                    f"--sft-batch below {len(groups)}")
    return run.trainer.fit(run.trainer.load(run.trainer.base), run.trainer.base, out, epochs,
                           dpo.Objective(dpo.sft_loss, dpo.count_action_tokens),
                           run.trainer.optimisation(s.sft_lr, s.sft_warmup, "cosine"))


def explore(run: Run, out: Path, agent: str, i: int, rollouts: Callable[[str], range],
            trained: bool = False) -> dict:
    """Sampled episodes on every expert's task; rollouts(task) are their numbers.

    trained: by the agent as this iteration trained it, else as the one before left it.
    """
    s = run.settings
    episodes = [Trajectory(e.task, agent, i, n, run.seed(agent, i, e.task, n))
                for e in run.folder.trajectories("experts.jsonl") for n in rollouts(e.task)]
    episodes = play(run, run.agent_folder(agent, i if trained else i - 1), episodes, s.temperature)
    run.folder.write_jsonl(out, episodes)
    shares = table2(episodes, s.hard_threshold)  # success, negative, hard negative, mean reward
    run.log("exploration", agent=Path(run.folder.running).stem, iteration=i,
            trajectories=len(episodes), **shares)
    return dict(**played(episodes), reward=shares["reward"], hard_negative=shares["hard_negative"])


def make_pairs(run: Run, out: Path, trains: str, i: int) -> dict:
    """The pairs that one agent learns from, D_fail or D_tgt. What makes no pair is counted."""
    s, dropped, rows, before = run.settings, Counter(), [], Counter()
    agents = agents_of(s.method)
    again = "-more" if s.explore_again and trains == "target" else ""
    buffered = range(1, i) if trains == "failure" and s.d_fail == "buffer" else ()
    target = usable_rollouts(run, [f"iter{i}/target.jsonl"], dropped)
    second = usable_rollouts(run, [f"iter{i}/{a}{again}.jsonl" for a in agents[1:]], dropped)
    earlier = usable_rollouts(run, [f"iter{j}/{a}.jsonl" for j in buffered for a in agents],
                              before)  # what was dropped in its own iteration is counted there
    for expert in run.folder.trajectories("experts.jsonl"):
        e_tgt, e_second, old = (found.get(expert.task, []) for found in (target, second, earlier))
        if trains == "target":
            pairs = d_tgt(expert, e_tgt, e_second, s, dropped)
        elif trains == "positive":
            # Section 5.4: "trained in the same manner as ETO using only expert and the agent's own
            # failures". What the target then learns from is not said; here both agents'
            # trajectories, as beside a failure agent, so that nothing else differs.
            pairs = d_tgt(expert, e_second, [], s, dropped)
        else:
            pairs = d_fail(e_tgt, e_second, old, s, dropped)
        rows += [dict(task=expert.task, trains=trains, **pair) for pair in pairs]
    run.folder.write_jsonl(out, rows)
    run.log("pairs", iteration=i, trains=trains, kept=Counter(row["kind"] for row in rows),
            dropped=dropped)
    return dict(pairs=len(rows))


def train_preferences(run: Run, out: Path, agent: str, i: int) -> dict:
    """The agent after DPO on its pairs of this iteration, Eq. (7) or (9)."""
    s, rng, trainer = run.settings, run.rng("dpo", agent, i), run.trainer
    before, first = run.agent_folder(agent, i - 1), run.agent_folder(agent, 0)
    beta, lr = (s.beta, s.dpo_lr) if i == 1 else (s.beta_later, s.dpo_lr_later)
    groups = preference_groups(run, agent, i)
    if not groups:
        run.log.say(f"iter{i}: no pairs for the {agent} agent, which stays as it is")
        trainer.copy(before, out)
        return dict(steps=0)
    epochs = (preference_epochs(groups, s, rng, s.dpo_epochs, s.dpo_steps) if agent == "target" else
              preference_epochs(groups, s, rng, s.failure_epochs or s.dpo_epochs))
    # log pi_ref(e|u) of every trajectory, once, by the same forward pass as log pi
    reference = before if s.reference == "phase" else first
    model = trainer.load(reference)
    for g, log_probs in zip(groups, trainer.log_probs(model, groups)):
        g.reference = log_probs
    if reference != before:
        del model  # one at a time in memory
        model = trainer.load(before)
    watched = margins.hardest(groups, s.margins)
    entered = ([g.reference for g in watched] if s.reference == "phase" else
               trainer.log_probs(model, watched))
    # Eq. (9), which is Eq. (7) for the failure agent: its pairs have no SFT weight.
    loss = partial(dpo.preference_loss, beta=beta, lambda_sft=s.lambda_sft, log_prob=s.log_prob,
                   lambda_dpo=1.0 if agent == "failure" else s.lambda_dpo, sft_term=s.sft_term)
    divisor = dpo.count_pairs if s.normalise == "pairs" else dpo.sum_weights
    numbers = trainer.fit(model, before, out, epochs, dpo.Objective(loss, divisor),
                          trainer.optimisation(lr, s.dpo_warmup, s.dpo_schedule))
    for when, policy in (("before", entered), ("after", None)) if watched else ():
        policy = policy or trainer.log_probs(model, watched)
        run.log("margins", phase=run.folder.running, when=when,
                pairs=margins.of_pairs(watched, policy, beta, s.log_prob))
    return numbers


def preference_epochs(groups: list[dpo.Group], s: Settings, rng, passes: int,
                      steps: int = 0) -> list:
    """Passes over the pairs, shuffled anew each: so many, or as many as hold `steps` batches."""
    epochs = []
    while sum(map(len, epochs)) < steps if steps else len(epochs) < passes:
        epoch = dpo.batches(groups, s.dpo_batch, s.batch_unit, rng)
        epochs.append(epoch[:steps - sum(map(len, epochs))] if steps else epoch)
    return epochs


def evaluate(run: Run, out: Path, agent: str, i: int, split: str) -> dict:
    """Greedy episodes on a split, by the agent after iteration i."""
    tasks = run.tasks.of_split(split)
    episodes = [Trajectory(task, agent, i) for task in tasks]
    if run.settings.method == "chat":
        episodes, taken = chat.play(run, episodes)
    else:
        episodes, taken = play(run, run.agent_folder(agent, i), episodes, temperature=0), {}
    run.folder.write_jsonl(out, episodes)
    found = {**scores(episodes, tasks), **taken}  # reward, its interval, success ...
    run.log("evaluation", agent=agent, iteration=i, split=split, tasks=len(episodes), **found)
    return dict(**played(episodes), **found)


# ----------------------------------------------------------------------------------- the pairs


def d_tgt(expert: Trajectory, target: list[Trajectory], failure: list[Trajectory], s: Settings,
          dropped: Counter) -> list[dict]:
    """The target's pairs for one instruction, Eq. (8), with the weights of Section 4.3.

    target, failure: this iteration's rollouts of the two agents; rewards are in [0, 1]. Returns
    rows of pairs-*.jsonl without task and trains; counts in `dropped`, by reason, the comparisons
    that make no pair.
    """
    # Eq. (8): D_tgt = {e_exp > e_tgt} u {e_exp > e_fail} u {e_w > e_l in F_tgt x F_fail}, by reward
    pairs = []
    for prediction in target + failure:
        kind = f"expert>{prediction.agent}"
        if prediction.reward < expert.reward:
            pairs.append((kind, expert, prediction))
        elif prediction.reward == expert.reward:
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
        if s.d_tgt_failures == "hard" and w.reward < s.hard_threshold:
            dropped["no hard failure"] += 1
        else:
            rows.append(pair_row("failure>failure", w, l, 1.0, sft_weight=0.0))
    return rows


def d_fail(target: list[Trajectory], failure: list[Trajectory], earlier: list[Trajectory],
           s: Settings, dropped: Counter) -> list[dict]:
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
        if max(a.reward, b.reward) >= envs.SUCCESS:
            dropped["not both failures"] += 1
        elif a.reward == b.reward:
            dropped["equal failures"] += 1
        else:
            yield (a, b) if a.reward > b.reward else (b, a)


def pair_row(kind: str, chosen: Trajectory, rejected: Trajectory, weight: float,
             sft_weight: float) -> dict:
    """A row of pairs-*.jsonl, which names its trajectories by file and rollout."""
    chosen, rejected = (
        dict(file=t.file, agent=t.agent, iteration=t.iteration, rollout=t.rollout, reward=t.reward)
        for t in (chosen, rejected))
    return dict(kind=kind, chosen=chosen, rejected=rejected, weight=weight, sft_weight=sft_weight)


if __name__ == "__main__":
    from lab.look.page import make_page
    from lab.mutual import loop_of  # the second system's file, which imports this one
    from lab.program.start import start  # parses, locks, resumes, reports

    start(sys.argv[1:], loop_of, make_page)
