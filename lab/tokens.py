"""Tokens in, gradients out: the action mask, log-probabilities, the losses, the optimiser loop.

Nothing here knows an environment, a file or a setting. Equation numbers are those of arXiv
2511.22254. `engine/` has what makes it fast and large, and changes no number: packing (a beginning
that trajectories share runs once), ranks, sharding, checkpoints.
"""

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.engine import chat_template, packing, ranks, sharding
from lab.engine.log_softmax import target_log_probs

# ---------------------------------------------------------------------------------- encoding


class Encoder:
    """Conversations as token ids, turn by turn, from the tokenizer's own chat template.

    A conversation grows at its end only: start(messages) gives the ids up to the agent's first
    reply, reply(text) those of a written reply and its end of turn, observation(text) those from
    there to where the next reply begins. The same three pieces serve experts and rollouts, so the
    ids an agent sampled are never tokenised again. Control tokens in what others wrote are encoded
    as plain text. ValueError, naming the template's problem, if it rewrites earlier turns or
    nothing marks the end of a reply.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.pieces = pieces = chat_template.Pieces(tokenizer)  # what surrounds replies
        self.start, self.reply, self.observation = (
            pieces.ids_of_opening, pieces.ids_of_reply, pieces.ids_of_observation)
        self.end_of_turn: int = pieces.end_of_turn
        self.text_of = lru_cache(None)(lambda token: tokenizer.decode([token]))
        self.encode(chat_template.TRIAL)  # a template's faults show at once

    def encode(self, messages: list[dict], first: int = 0) -> tuple[list[int], list[int]]:
        """(ids, action_mask), both (l,): mask 1 on the tokens of each reply and its end of turn.

        The conversation opens with `first` turns (0: those before a reply) and then alternates.
        """
        first = first or next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        ids = self.start(messages[:first])
        action_mask = [0] * len(ids)
        for message in messages[first:]:
            acts = message["role"] == "assistant"
            piece = (self.reply if acts else self.observation)(message["content"])
            ids += piece
            action_mask += [int(acts)] * len(piece)
        self.pieces.check(messages, first)  # the template, given all at once, writes the same text
        return ids, action_mask

    def suppress_tokens(self, vocabulary: int) -> tuple[int, ...]:
        """Ids that are never sampled: control tokens, with which a reply would open a turn, and
        rows that only pad the embedding.
        """
        control = {i for i in self.pieces.suppress_tokens if i < vocabulary}
        return tuple(sorted(control | {*range(len(self.tokenizer), vocabulary)}))

    def decode(self, ids: list[int]) -> str:
        """The text of a sampled reply, without its end-of-turn token."""
        return self.tokenizer.decode([i for i in ids if i != self.end_of_turn]).strip()


@dataclass
class Trajectory:
    """An episode e of a task u, whole or as far as it has come; a line of a .jsonl file."""

    task: str = ""
    agent: str = ""                  # its name; of what an explorer plays, the signal
    iteration: int = 0               # in GRPO the step
    rollout: int = 0
    seed: int = 0
    messages: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)          # (l,) read and written, in order
    action_mask: list[int] = field(default_factory=list)  # (l,) 1 where the agent wrote the token
    reward: float = 0.0              # in [0, 1]; by ETO's protocol from -1
    steps: int = 0
    cut_replies: int = 0             # that filled max_new_tokens
    ended: str = ""                  # done, budget, context or lost
    raw_reward: float | None = None  # before clipping, where the environment clips
    usage: dict | None = None        # what an endpoint took, and as an explorer proposed
    file: str = ""                   # the name of the file it is kept in; not written

    @property
    def action_tokens(self) -> int:
        return sum(self.action_mask[1:])

    def record(self) -> dict:
        """The line's fields, in order; raw_reward and usage only where there is one."""
        row = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "file"}
        return {name: value for name, value in row.items() if value is not None}


# --------------------------------------------------------------------------- log-probabilities


@dataclass(frozen=True)
class Sampler:
    """The distribution that tokens are drawn from: softmax(logits / temperature), without some.

    A log-probability of sampled tokens is of the same distribution: mass on tokens that are never
    drawn would grow with every push down.
    """

    temperature: float = 1.0
    suppress_tokens: tuple[int, ...] = ()  # ids that are never drawn


def token_log_probs(model, sequences: list[Trajectory], sampler: Sampler = Sampler()) -> Tensor:
    """log pi(t_k | t_<k) of every action token of every sequence, laid end to end, (A,), in nats.

    sampler: what pi is; as it stands, the softmax over the whole vocabulary.
    """
    if isinstance(model, ranks.Together):  # this rank runs some of the sequences
        return model.gather(sequences, partial(token_log_probs, sampler=sampler))
    p = packing.pack(sequences, next(model.parameters()).device)
    logits = model(input_ids=p.ids, position_ids=p.positions, **p.attention,
                   logits_to_keep=p.predicting, use_cache=False).logits.squeeze(0)        # (K, V)
    # log pi(t_k | t_<k) = log softmax(logits / temperature)[t_k]
    log_probs = target_log_probs(logits, p.targets, p.logits_of, sampler)                 # (U,)
    return log_probs.index_select(0, p.target_of)                                         # (A,)


def action_log_probs(model, sequences: list[Trajectory]) -> Tensor:
    """log pi(e|u) of each trajectory, (B,) float64, in nats.

    Eq. (2), (5): the sum over action tokens t_k of log pi(t_k | t_<k); observations only condition.
    Sums are float64, because a few hundred nats in float32 lose more than a late step changes.
    """
    per_token = token_log_probs(model, sequences)                                         # (A,)
    owner = torch.tensor([b for b, s in enumerate(sequences) for _ in range(s.action_tokens)],
                         dtype=torch.long, device=per_token.device)
    sums = torch.zeros(len(sequences), dtype=torch.float64, device=per_token.device)
    return sums.index_add(0, owner, per_token.double())                                   # (B,)


# ------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class Pair:
    """A preference between two sequences of a group, by index."""

    kind: str
    chosen: int
    rejected: int
    weight: float = 1.0      # of the DPO term
    sft_weight: float = 0.0  # of the SFT term on the chosen trajectory


@dataclass
class Group:
    """One instruction: its distinct sequences, each run through the model once, and its pairs."""

    task: str
    sequences: list[Trajectory]
    pairs: list[Pair] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)  # log pi_ref of each sequence, nats

    @property
    def tokens(self) -> int:
        return sum(len(s.ids) for s in self.sequences)


def dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
    """Eq. (7), of log-probabilities in nats, each (P,): the loss and the margin of each pair."""
    # Eq. (7): L = -log sigma( beta log pi(e_w)/ref(e_w) - beta log pi(e_l)/ref(e_l) )
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def sft_loss(model, groups: list[Group]):
    """Eq. (3)-(5) summed over the groups' trajectories: (), and no statistics."""
    # Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A), A the tokens of thoughts and actions
    return -action_log_probs(model, [s for g in groups for s in g.sequences]).sum(), {}


def pair_losses(policy: Tensor, groups: list[Group], beta: float, log_prob: str = "sum"):
    """`dpo_loss` of the groups' pairs: loss and margin (P,), and the places in `policy` of the
    chosen and the rejected ones. policy: log pi(e|u) of the groups' sequences, (T,), in nats.
    """
    reference = policy.new_tensor([r for g in groups for r in g.reference])               # (T,)
    if log_prob == "mean":
        tokens = policy.new_tensor([s.action_tokens for g in groups for s in g.sequences])
        policy, reference = policy / tokens, reference / tokens
    firsts = itertools.accumulate((len(g.sequences) for g in groups), initial=0)
    places = [(first + p.chosen, first + p.rejected)
              for first, g in zip(firsts, groups) for p in g.pairs]
    chosen, rejected = map(list, zip(*places))
    return *dpo_loss(policy[chosen], policy[rejected], reference[chosen], reference[rejected],
                     beta), chosen, rejected


def preference_loss(model, groups: list[Group], beta, lambda_dpo=1.0, lambda_sft=0.0,
                    log_prob="sum", sft_term="sum"):
    """Eq. (9) summed over the groups' pairs: (), and statistics per kind of pair.

    With lambda_dpo = 1 and every sft_weight 0 this is Eq. (7), the failure agent's loss.
    Statistics: {kind: [pairs, chosen and rejected log-probability, margin, correct]}, sums.
    """
    sequences = [s for g in groups for s in g.sequences]
    pairs = [p for g in groups for p in g.pairs]
    policy = action_log_probs(model, sequences)                                           # (T,)
    preference, margin, chosen, rejected = pair_losses(policy, groups, beta, log_prob)    # (P,)
    weight = policy.new_tensor([p.weight for p in pairs])                                 # (P,)
    sft_weight = policy.new_tensor([p.sft_weight for p in pairs])                         # (P,)
    tokens = policy.new_tensor([s.action_tokens for s in sequences])                      # (T,)
    # Eq. (9): L = lambda_DPO L_DPO + lambda_SFT E[-log pi(e_chosen|u)], failure pairs without SFT
    sft = -policy[chosen] / (tokens[chosen] if sft_term == "mean" else 1)                 # (P,)
    loss = (lambda_dpo * weight * preference + lambda_sft * sft_weight * sft).sum()

    columns = torch.stack([torch.ones_like(margin), policy[chosen], policy[rejected], margin,
                           (margin > 0).double()], 1).detach()                            # (P, 5)
    statistics = {}
    for pair, row in zip(pairs, columns.tolist()):
        add_statistics(statistics, {pair.kind: row})
    return loss, statistics


def count_action_tokens(batch: list[Group]) -> int:
    """The divisor of the SFT phase: a batch's mean is per action token, as in ETO's trainer."""
    return sum(s.action_tokens for g in batch for s in g.sequences)


def count_pairs(batch: list[Group]) -> int:
    return sum(len(g.pairs) for g in batch)


def sum_weights(batch: list[Group]) -> float:
    return sum(p.weight for g in batch for p in g.pairs)


def add_statistics(total: dict, more: dict) -> None:
    for kind, row in more.items():
        total[kind] = [a + b for a, b in zip(total.get(kind, [0.0] * len(row)), row)]


def mean_statistics(names: tuple[str, ...], sums: list[float]) -> dict:
    """The first of some sums, a count, and the others' means by it; log-probabilities in nats."""
    count, *rest = sums
    return {names[0]: int(count), **{name: x / count for name, x in zip(names[1:], rest)}}


# ------------------------------------------------------------- policy gradients, PPO and GRPO


@dataclass
class Rollouts(Group):
    """One instruction's episodes: `sequences`, and what follows for each of them."""

    advantages: list[float] = field(default_factory=list)
    old: list[Tensor] = field(default_factory=list)  # (a,) log pi of its action tokens when it
    ref: list[Tensor] = field(default_factory=list)  # was sampled, and of the first policy; nats


def clipped_surrogate(model, groups: list[Rollouts], sampler: Sampler, low: float, high: float):
    """min(rho_j A, clip(rho_j, 1 - low, 1 + high) A) of every action token t_j, its ratio rho_j =
    pi(t_j|.) / pi_old(t_j|.), log pi and log pi_ref, each (A,). A is its episode's advantage.
    """
    sequences = [s for g in groups for s in g.sequences]
    new = token_log_probs(model, sequences, sampler)
    old, ref = (torch.cat([x for g in groups for x in xs(g)]).to(new)
                for xs in (lambda g: g.old, lambda g: g.ref))
    tokens = torch.tensor([s.action_tokens for s in sequences], device=new.device)
    advantage = new.new_tensor([a for g in groups for a in g.advantages]).repeat_interleave(tokens)
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return surrogate, ratio, new, ref


def kl_of(groups: list[Rollouts]) -> float:
    """The sampling policy's divergence from the first policy, in nats per episode, as sampled."""
    episodes = [(old - ref).sum().item() for g in groups for old, ref in zip(g.old, g.ref)]
    return sum(episodes) / max(len(episodes), 1)


# ------------------------------------------------------------------- of a policy as it stands


def log_probs_of(accelerator, model, groups: list[Group], tokens_per_forward: int, progress=None,
                 sampler: Sampler | None = None) -> list[list]:
    """log pi(e|u) of each group's sequences, in nats; with a sampler `token_log_probs`, (a,) each.

    All ranks get all of them.
    """
    def read(model, sequences):
        if sampler is None:
            return action_log_probs(model, sequences).tolist()
        return token_log_probs(model, sequences, sampler).cpu().split(
            [s.action_tokens for s in sequences])

    return ranks.over_sequences(accelerator, model, groups, tokens_per_forward, read, progress)


# ------------------------------------------------------------------------------ optimiser loop


def batches(groups: list[Group], size: int, unit: str, rng: random.Random) -> list[list[Group]]:
    """The groups shuffled and cut into batches of at most `size` pairs (or instructions).

    An instruction stays whole, alone if it has more pairs. Nothing is left out.
    """
    cost = (lambda g: len(g.pairs)) if unit == "pairs" else (lambda g: 1)
    return ranks.fill(rng.sample(groups, len(groups)), size, cost)


@dataclass(frozen=True)
class Objective:
    """What a batch is trained on; its loss is a sum over groups, divided by the whole batch's."""

    loss: Callable     # (model, groups) -> sum of losses (), {kind: sums of statistics}
    divisor: Callable  # batch -> what its sum is divided by, over all passes and ranks
    names: tuple[str, ...] = ("pairs", "chosen_log_prob", "rejected_log_prob", "margin",
                              "accuracy")  # of the sums; the first one counts


@dataclass(frozen=True)
class Optimisation:
    """AdamW's rate and its schedule, and how much one pass holds."""

    lr: float
    warmup: float   # share of steps in which the rate rises
    schedule: str   # constant or cosine, after the warm-up
    weight_decay: float
    max_grad_norm: float
    tokens_per_forward: int

    def rate(self, step: int, steps: int) -> float:
        """The learning rate at step 0, 1, ... of so many."""
        rising = int(self.warmup * steps)  # a phase of one step has none
        if step < rising:
            return self.lr * (step / rising)  # linearly, from 0
        if self.schedule == "constant":
            return self.lr
        return self.lr * (0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising))))


def fit(accelerator, model, epochs: list[list[list[Group]]], objective: Objective,
        how: Optimisation, log: Callable, checkpoint=None, optimizer=None) -> None:
    """Trains a model of `sharding.shard_model` in place: AdamW over epochs of batches of groups.

    log(dict) is called once per optimiser step. checkpoint: of engine/, from which a phase that was
    stopped goes on. optimizer: one whose moments go on. FloatingPointError, naming the tasks, if
    the loss or the gradient stops being finite.
    """
    steps = [(number, batch) for number, epoch in enumerate(epochs, 1) for batch in epoch]
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), weight_decay=how.weight_decay,
                                               fused=True)
    model.train()
    done, events = checkpoint.restore(model, optimizer) if checkpoint else (0, [])
    for event in events:
        log(event)
    for step, (epoch, batch) in enumerate(steps[done:], done + 1):
        started, rate = time.perf_counter(), how.rate(step - 1, len(steps))
        loss, statistics = backward(accelerator, model, batch, objective, how, step)
        norm = sharding.clip_grad_norm(accelerator, model, how.max_grad_norm)
        check_finite("gradient norm", norm, step, batch)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        tokens, seconds = sum(g.tokens for g in batch), time.perf_counter() - started
        events.append(dict(
            step=step, epoch=epoch, loss=loss, lr=rate, gradient_norm=norm,
            tokens_per_second=round(tokens / seconds),
            kinds={k: mean_statistics(objective.names, row) for k, row in statistics.items()}))
        log(events[-1])
        if checkpoint and ranks.on_main(accelerator, checkpoint.due):  # by one clock
            checkpoint.save(model, optimizer, step, events)


def backward(accelerator, model, batch: list[Group], objective: Objective, how: Optimisation,
             step: int) -> tuple[float, dict]:
    """Adds up the gradient of a batch's loss; the loss and its statistics."""
    divisor, total, statistics = objective.divisor(batch), 0.0, {}
    packs = ranks.packs(accelerator, model, batch, how.tokens_per_forward)
    for i, (pack, together) in enumerate(packs, 1):
        with sharding.last_reduces(accelerator, model, i == len(packs)):
            with sharding.precision(accelerator, model):
                loss, sums = objective.loss(together, pack)
            value = loss.item()
            check_finite("loss", value, step, pack)
            # Gradients are averaged over ranks, each of which has those of its own sequences.
            accelerator.backward(loss * (accelerator.num_processes / divisor))
        total += value / divisor
        add_statistics(statistics, sums)
    return total, statistics


def check_finite(what: str, value: float, step: int, groups: list[Group]) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(f"{what} {value} at step {step} on tasks "
                                 f"{', '.join(g.task for g in groups)}")
