"""Tokens in, gradients out: the action mask, log-probabilities, the losses, the optimiser loop.

Nothing here knows an environment, a file or a setting. Equation numbers are those of arXiv
2511.22254. `engine/` has what makes it fast and large, and changes no number: packing (a beginning
that trajectories share runs once), ranks, sharding, checkpoints.
"""

import math
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import lru_cache

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor

from engine import chat_template, packing, ranks, sharding

# ---------------------------------------------------------------------------------- encoding


class Encoder:
    """Conversations as token ids, turn by turn, from the tokenizer's own chat template.

    A conversation grows at its end only: `start` gives the ids up to the agent's first reply,
    `reply` those of a written reply, `observation` those between one reply and the next. The same
    three pieces serve experts and rollouts, so the ids an agent sampled are never tokenised again.
    Control tokens in what others wrote are encoded as plain text. ValueError, naming the template's
    problem, if it rewrites earlier turns or nothing marks the end of a reply.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.pieces = chat_template.Pieces(tokenizer)  # what surrounds a reply, an observation
        self.end_of_turn: int = self.pieces.end_of_turn
        self.forbidden: list[int] = self.pieces.suppress_tokens  # a reply opens no turn
        self.text_of = lru_cache(None)(lambda token: tokenizer.decode([token]))
        self.encode(chat_template.TRIAL)  # a template's faults show at once

    def start(self, messages: list[dict]) -> list[int]:
        """Ids of the opening messages, up to where the agent's first reply begins."""
        return self.pieces.ids_of_opening(messages)

    def reply(self, text: str) -> list[int]:
        """Ids of a reply written by an expert, the end-of-turn token included."""
        return self.pieces.ids_of_reply(text)

    def observation(self, text: str) -> list[int]:
        """Ids that follow a reply's end-of-turn token, up to where the next reply begins."""
        return self.pieces.ids_of_observation(text)

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

    def never_drawn(self, vocabulary: int) -> list[int]:
        """Ids that are not sampled: control tokens, and rows that only pad the embedding."""
        return sorted({i for i in self.forbidden if i < vocabulary}
                      | {*range(len(self.tokenizer), vocabulary)})

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


def token_log_probs(model, sequences: list[Trajectory], temperature: float = 1.0,
                    never: list[int] = ()) -> Tensor:
    """log pi(t_k | t_<k) of every action token of every sequence, laid end to end, (A,), in nats.

    temperature: what the logits were divided by when the tokens were sampled. never: ids that were
    not drawn then (`Encoder.never_drawn`), so that log pi is of the distribution sampled from.
    """
    p = packing.pack(sequences, next(model.parameters()).device)
    logits = model(input_ids=p.ids, position_ids=p.positions, **p.attention,
                   logits_to_keep=p.predicting, use_cache=False).logits[0]                # (K, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits / temperature
    logits = logits.index_fill(1, p.targets.new_tensor(never), -torch.inf) if never else logits
    if p.logits_of is not None:  # index_select, unlike [], adds gradients in a fixed order
        logits = logits.index_select(0, p.logits_of)                                      # (U, V)
    log_probs = -F.cross_entropy(logits, p.targets, reduction="none")                     # (U,)
    return log_probs.index_select(0, p.target_of)                                         # (A,)


def action_log_probs(model, sequences: list[Trajectory], never: list[int] = ()) -> Tensor:
    """log pi(e|u) of each trajectory, (B,) float64, in nats. never: as for `token_log_probs`.

    Eq. (2), (5): the sum over action tokens t_k of log pi(t_k | t_<k); observations only condition.
    Sums are float64, because a few hundred nats in float32 lose more than a late step changes.
    """
    per_token = token_log_probs(model, sequences, never=never)                            # (A,)
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


def sft_objective(model, groups: list[Group], never: list[int] = ()):
    """Eq. (3)-(5) summed over the groups' trajectories: (), and no statistics."""
    # Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A), A the tokens of thoughts and actions
    sequences = [s for g in groups for s in g.sequences]
    return -action_log_probs(model, sequences, never).sum(), {}


def preference_objective(model, groups: list[Group], beta, lambda_dpo=1.0, lambda_sft=0.0,
                         log_prob="sum", sft_term="sum", never: list[int] = ()):
    """Eq. (9) summed over the groups' pairs: (), and statistics per kind of pair.

    With lambda_dpo = 1 and every sft_weight 0 this is Eq. (7), the failure agent's loss.
    Statistics: {kind: [pairs, chosen and rejected log-probability, margin, correct]}, sums.
    """
    sequences = [s for g in groups for s in g.sequences]
    policy = action_log_probs(model, sequences, never)                                    # (T,)
    reference = policy.new_tensor([r for g in groups for r in g.reference])               # (T,)
    tokens = policy.new_tensor([s.action_tokens for s in sequences])                      # (T,)
    chosen, rejected, pairs, first = [], [], [], 0
    for g in groups:
        chosen += [first + p.chosen for p in g.pairs]
        rejected += [first + p.rejected for p in g.pairs]
        pairs += g.pairs
        first += len(g.sequences)
    weight = policy.new_tensor([p.weight for p in pairs])                                 # (P,)
    sft_weight = policy.new_tensor([p.sft_weight for p in pairs])                         # (P,)

    length = tokens if log_prob == "mean" else torch.ones_like(tokens)
    pi, ref = policy / length, reference / length
    preference, margin = dpo_loss(pi[chosen], pi[rejected], ref[chosen], ref[rejected], beta)
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


PAIR_STATISTICS = ("pairs", "chosen_log_prob", "rejected_log_prob", "margin", "accuracy")


def mean_statistics(names: tuple[str, ...], sums: list[float]) -> dict:
    """The first of some sums, a count, and the others' means by it; log-probabilities in nats."""
    count, *rest = sums
    return {names[0]: int(count), **{name: x / count for name, x in zip(names[1:], rest)}}


# ------------------------------------------------------------------------------ optimiser loop


def batches(groups: list[Group], size: int, unit: str, rng: random.Random) -> list[list[Group]]:
    """The groups shuffled and cut into batches of at most `size` pairs (or instructions).

    An instruction stays whole, alone if it has more pairs. Nothing is left out.
    """
    cost = (lambda g: len(g.pairs)) if unit == "pairs" else (lambda g: 1)
    return ranks.fill(rng.sample(groups, len(groups)), size, cost)


def add_reference(accelerator, model, groups: list[Group], tokens_per_forward: int,
                  progress=None, never: list[int] = ()) -> None:
    """Sets every group's reference log-probabilities to those of `model`, once per phase."""
    found = ranks.over_sequences(accelerator, model, groups, tokens_per_forward,
                                 lambda *batch: action_log_probs(*batch, never).tolist(), progress)
    for g, log_probs in zip(groups, found):
        g.reference = log_probs


def schedule_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """The factor of the peak rate at step 0, 1, ...; `warmup` is the share of steps that rise."""
    rising = int(warmup * steps)  # a phase of one step has none
    if step < rising:
        return step / rising  # linearly, from 0
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def fit(accelerator, model, epochs: list[list[list[Group]]], objective, normaliser, *, lr, warmup,
        schedule, weight_decay, max_grad_norm, tokens_per_forward, log, progress=None,
        checkpoint=None, optimizer=None, names=PAIR_STATISTICS) -> None:
    """Trains a model of `sharding.shard_model` in place: AdamW over epochs of batches of groups.

    objective(model, groups) -> (sum of losses, statistics); normaliser(batch) -> the divisor of
    a whole batch's sum, over all accumulation steps and all ranks. log(dict) is called once per
    optimiser step. checkpoint: of engine/, from which a phase that was stopped goes on. optimizer:
    one whose moments go on. names: of what the objective's statistics sum. FloatingPointError,
    naming the tasks, if the loss or the gradient stops being finite.
    """
    steps = [(number, batch) for number, epoch in enumerate(epochs, 1) for batch in epoch]
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), weight_decay=weight_decay,
                                               fused=True)
    model.train()
    done, events = checkpoint.restore(model, optimizer) if checkpoint else (0, [])
    for event in events:
        log(event)
    if progress is not None:
        progress.update(sum(g.tokens for _, batch in steps[:done] for g in batch))
    for step, (epoch, batch) in enumerate(steps[done:], done + 1):
        started = time.perf_counter()
        divisor, total, statistics = normaliser(batch), 0.0, {}
        packs = ranks.micro_batches(accelerator, batch, tokens_per_forward)
        for i, (pack, idle) in enumerate(packs, 1):
            # DDP all-reduces once a step; FSDP reduce-scatters after every pass, so that no rank
            # holds whole gradients.
            with nullcontext() if i == len(packs) else accelerator.no_sync(model):
                with sharding.precision(accelerator, model):
                    loss, sums = objective(model, pack)
                check_finite("loss", loss.item(), step, pack)
                # Both average over ranks, but the divisor counts the pairs of all: undo it.
                accelerator.backward(loss * (0 if idle else accelerator.num_processes / divisor))
            if not idle:
                total += loss.item() / divisor
                add_statistics(statistics, sums)
        norm = sharding.clip_grad_norm(accelerator, model, max_grad_norm)
        check_finite("gradient norm", norm, step, batch)
        rate = lr * schedule_factor(step - 1, len(steps), warmup, schedule)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        due = checkpoint is not None and checkpoint.due()  # the main rank's clock decides
        shares = gather_object([(total, statistics, due)])
        statistics = {}
        for _, sums, _ in shares:
            add_statistics(statistics, sums)
        tokens, seconds = sum(g.tokens for g in batch), time.perf_counter() - started
        events.append(dict(
            step=step, epoch=epoch, loss=sum(share[0] for share in shares), lr=rate,
            gradient_norm=norm, tokens_per_second=round(tokens / seconds),
            kinds={kind: mean_statistics(names, sums) for kind, sums in statistics.items()}))
        log(events[-1])
        if progress is not None:
            progress.update(tokens)
        if shares[0][2]:
            checkpoint.save(model, optimizer, step, events)


def check_finite(what: str, value: float, step: int, groups: list[Group]) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(f"{what} {value} at step {step} on tasks "
                                 f"{', '.join(g.task for g in groups)}")
