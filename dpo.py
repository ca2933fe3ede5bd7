"""Learning: token log-probabilities, losses, micro-batches and the optimiser loop.

This file is raw PyTorch and depends on nothing else. Equation numbers refer to arXiv 2511.22254,
which writes u for a task, e for a trajectory, t_k for its action tokens, pi for the policy (the
model being trained) and pi_ref for the reference. DPO, direct preference optimisation, compares the
policy to the reference. SFT is supervised fine-tuning.

Precision: weights, gradients and AdamW states are fp32. On a GPU, forward passes run in bf16,
except for the included model tiny (see `engine.forward_passes` and `engine.models`). Logits are
cast to fp32, and sums over tokens and losses are computed in fp64.

Shapes: a forward pass runs B trajectories of up to L tokens, and returns logits over a vocabulary
of V tokens at K positions. A list of groups has T trajectories, A action tokens and P pairs in
total. Log-probabilities are in nats.
"""

import inspect
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

# ----------------------------------------------------------------------- trajectories and pairs

Ids = list[int]   # token ids, or a mask over them
ROUNDING = 1e-9   # rewards that differ by at most this much are equal


@dataclass
class Trajectory:
    """The trajectory e of an episode of task u, which may still be running.

    In a .jsonl file, each line is one trajectory.
    """
    task: str = ""
    agent: str = ""                  # name of the agent that acted
    iteration: int = 0               # iteration of the training loop
    rollout: int = 0                 # index among the rollouts of this task, agent and iteration
    seed: int = 0                    # seed of the episode's random number generator
    messages: list[dict] = field(default_factory=list)    # the conversation, {role, content}
    ids: Ids = field(default_factory=list)          # (l,) prompt, replies and observations
    # (l,) 1 for action tokens, which the agent sampled, and 0 for all others. In an expert
    # trajectory the action tokens are the replies, including their end-of-turn tokens.
    action_mask: Ids = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of the sampled tokens, for logging
    reward: float = 0.0              # in [0, 1], or in [-1, 1] with the protocol of ETO
    raw_reward: float | None = None  # reward before clipping, if the environment clips it
    turns: int = 0                   # number of replies
    idle: int = 0                    # number of replies that changed nothing
    # The reason for the end: "done" if the environment ended the episode, "turn_limit" if the agent
    # ran out of replies, "context_limit" if it ran out of tokens, and "refused" if an API endpoint
    # refused a request (endpoints are only evaluated).
    ended: str = ""

    # log pi_ref(e|u), once `add_references` has computed it. It is no dataclass field, so it is
    # neither saved nor kept by dataclasses.replace.
    reference = None

    def extend(self, ids: Ids, is_action: bool) -> None:
        self.ids += ids
        self.action_mask += [int(is_action)] * len(ids)

    @property
    def action_count(self) -> int:
        """The number of action tokens that the model predicts.

        The first token of a sequence is never predicted.
        """
        return sum(self.action_mask[1:])

    @property
    def is_failure(self) -> bool:
        """True if the trajectory is a failure, in F = {e : r(u, e) < 1} with the reward r."""
        return better(1.0, self.reward)


def better(reward: float, other: float) -> bool:
    """Returns True if a reward exceeds another by more than a rounding error."""
    return reward - other > ROUNDING


def equal(reward: float, other: float) -> bool:
    """Returns True if two rewards are equal up to rounding."""
    return abs(reward - other) <= ROUNDING


@dataclass
class Pair:
    """A preference between two trajectories of the same task."""
    kind: str                # which trajectories are compared, for example "expert>target"
    chosen: Trajectory
    rejected: Trajectory
    weight: float = 1.0      # weight of the pair in the DPO term
    sft_weight: float = 0.0  # weight of the chosen trajectory in the SFT term
    # Each optimiser step on this pair appends log pi(e|u) of the chosen and of the rejected
    # trajectory, and the margin (see `dpo_loss`).
    history: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass
class Group:
    """The distinct trajectories of a task, and the pairs among them. A step runs one forward pass
    on each trajectory, however many pairs it is in."""
    trajectories: list[Trajectory] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def add(self, t: Trajectory) -> Trajectory:
        """Adds a trajectory unless an equal one is stored already, and returns the stored one."""
        for stored in self.trajectories:
            if stored == t:
                return stored
        self.trajectories.append(t)
        return t


def trajectories_of(groups: list[Group]) -> list[Trajectory]:
    """Returns all trajectories in the groups, in order, as a list of length T."""
    trajectories = []
    for group in groups:
        trajectories += group.trajectories
    return trajectories


def pairs_of(groups: list[Group]) -> list[Pair]:
    """Returns all pairs in the groups, in order, as a list of length P."""
    pairs = []
    for group in groups:
        pairs += group.pairs
    return pairs


# --------------------------------------------------------------------------- log-probabilities


def in_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_log_probs(
    model,
    trajectories: list[Trajectory],
    logits_processor: Callable[[Tensor], Tensor] = in_fp32,
) -> Tensor:
    """Computes log pi(t_k | t_<k) of every action token t_k in a single forward pass.

    Args:
        model: A causal language model.
        trajectories: The batch of trajectories.
        logits_processor: A function (A, V) -> (A, V). The softmax of its result is the policy pi.
            By default it only casts the logits to fp32. Methods that train on the sampling
            distribution, such as GRPO in evolve.py, apply a temperature and a token mask here.

    Returns:
        The log-probabilities of all trajectories, concatenated, (A,), in nats.
    """
    device = next(model.parameters()).device
    # With causal attention, no token sees the padding to its right, so no attention mask is needed.
    ids = pad_right([t.ids for t in trajectories]).to(device)                     # (B, L)
    mask = pad_right([t.action_mask for t in trajectories]).to(device)            # (B, L)

    # The logits at a position predict the next token.
    targets = ids[:, 1:]                                                          # (B, L-1)
    is_action = mask[:, 1:].bool()                                                # (B, L-1)

    # Most tokens belong to the prompt or to observations, so we compute logits only at positions
    # that predict an action token in at least one trajectory.
    positions = is_action.any(0).nonzero()[:, 0]                                  # (K,)
    logits = logits_at(positions, model, input_ids=ids)                           # (B, K, V)
    logits = logits[is_action[:, positions]]                                      # (A, V)

    # log pi(t_k | t_<k) = log softmax(logits)[t_k]
    return -F.cross_entropy(logits_processor(logits), targets[is_action], reduction="none")


def pad_right(sequences: list[Ids]) -> Tensor:
    """Stacks sequences into one tensor, (B, L), padded with zeros on the right."""
    sequences = [torch.tensor(sequence) for sequence in sequences]
    return pad_sequence(sequences, batch_first=True, padding_value=0)


def logits_at(positions: Tensor, model, **inputs) -> Tensor:
    """Computes a model's logits at the same positions in each sequence, (B, K, V).

    Some wrappers, such as peft's, hide the option `logits_to_keep`. In that case the logits of all
    positions take up memory.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(**inputs, use_cache=False, logits_to_keep=positions).logits
    return model(**inputs, use_cache=False).logits[:, positions]


def action_log_probs(per_token: Tensor, trajectories: list[Trajectory]) -> Tensor:
    """Sums token log-probabilities, (A,), into log pi(e|u) of each trajectory, (T,), in float64."""
    # The index of the trajectory that each action token belongs to: 0, 0, 0, 1, 1, ...
    counts = torch.tensor([t.action_count for t in trajectories], dtype=torch.long)
    owners = torch.arange(len(counts)).repeat_interleave(counts).to(per_token.device)  # (A,)
    # Eq. (2), (5): log pi(e|u) = sum_k log pi(t_k | t_<k) over the action tokens t_k. The prompt
    # and the observations are only conditioned on. We sum in fp64, because the rounding error of
    # hundreds of nats in fp32 is larger than the effect of a late optimiser step.
    zeros = per_token.new_zeros(len(trajectories), dtype=torch.float64)
    return zeros.index_add(0, owners, per_token.double())


# -------------------------------------------------------------------------------------- losses
# A loss function has the form loss(policy, groups), where `policy` is log pi of all action tokens
# in the groups, (A,). It returns a dict of sums over the groups, () each, and statistics as a dict
# {kind of pair: {name: sum}}. The sum named `loss` is trained on. Other sums, such as its terms,
# are logged. Each row of statistics has a sum named `count`, by which its means are divided.
# To get means of the losses, `train` divides the sums over a batch by denominator(batch), which is
# `action_count` for SFT, and `pair_weight` or `pair_count` for Eq. (9).


def sft_loss(policy: Tensor, groups: list[Group]) -> tuple[dict, dict]:
    """Computes the SFT loss, Eq. (3)-(5), summed over all trajectories in the groups."""
    # Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A), where the set A contains the tokens of
    # thoughts and actions.
    return dict(loss=-policy.double().sum()), {}


def action_count(groups: list[Group]) -> int:
    return sum(t.action_count for t in trajectories_of(groups))


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Computes the DPO loss, Eq. (7), of each pair.

    Args:
        policy_chosen, policy_rejected: log pi(e|u) of both sides of each pair, (P,) each.
        reference_chosen, reference_rejected: log pi_ref(e|u) of both sides, (P,) each.
        beta: The factor beta in Eq. (7).

    Returns:
        The losses and the margins, (P,) each. The margin is the argument of sigma in Eq. (7).
    """
    # Eq. (7): L = -log sigma( beta log pi(e_w)/ref(e_w) - beta log pi(e_l)/ref(e_l) ), where e_w is
    # chosen and e_l is rejected.
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def preference_loss(
    policy: Tensor,
    groups: list[Group],
    beta: float,
    lambda_dpo: float = 1.0,
    lambda_sft: float = 0.1,
    log_prob_reduction: str = "sum",
) -> tuple[dict, dict]:
    """Computes Eq. (9), summed over all pairs in the groups.

    Eq. (9) is weighted DPO plus SFT on the chosen trajectories. If lambda_dpo is 1 and every
    sft_weight is 0, it becomes Eq. (7), the loss of the failure agent.

    Args:
        policy: log pi of all action tokens, (A,).
        groups: The tasks. Each of their trajectories must have a reference.
        beta: The factor beta in Eq. (7).
        lambda_dpo, lambda_sft: The weights of the two terms.
        log_prob_reduction: "sum" or "mean", the reduction of a trajectory's token
            log-probabilities in the DPO term.

    Returns:
        The sums `loss` and its terms `dpo` and `sft`, which include their lambdas and weights, and
        the statistics from `pair_statistics`.
    """
    trajectories = trajectories_of(groups)
    pi = action_log_probs(policy, trajectories)                                   # (T,)
    ref = pi.new_tensor(references_of(trajectories))                              # (T,)
    counts = pi.new_tensor([t.action_count for t in trajectories])                # (T,)

    # Find the index of each pair's chosen and rejected trajectory.
    pairs = pairs_of(groups)
    index = {id(t): n for n, t in enumerate(trajectories)}
    chosen = [index[id(pair.chosen)] for pair in pairs]                           # (P,)
    rejected = [index[id(pair.rejected)] for pair in pairs]                       # (P,)

    # Compute the DPO term from sums or means over action tokens.
    pi_scored = pi
    ref_scored = ref
    if log_prob_reduction == "mean":
        pi_scored = pi / counts
        ref_scored = ref / counts
    rewards = beta * (pi_scored - ref_scored)  # the implicit rewards of DPO        # (T,)
    preference, margin = dpo_loss(pi_scored[chosen], pi_scored[rejected],
                                  ref_scored[chosen], ref_scored[rejected], beta)  # (P,) each

    # Eq. (9): L = lambda_DPO L_DPO + lambda_SFT E[-log pi(e_w|u)]. Both terms are divided by the
    # same denominator later, to which failure pairs contribute although their SFT term is 0.
    imitation = -pi[chosen]                                                       # (P,)
    weight = pi.new_tensor([pair.weight for pair in pairs])                       # (P,)
    sft_weight = pi.new_tensor([pair.sft_weight for pair in pairs])               # (P,)
    dpo = lambda_dpo * weight * preference                                        # (P,)
    sft = lambda_sft * sft_weight * imitation                                     # (P,)
    terms = dict(loss=(dpo + sft).sum(), dpo=dpo.sum(), sft=sft.sum())
    return terms, pair_statistics(pairs, pi[chosen], pi[rejected], rewards[chosen],
                                  rewards[rejected], margin)


def pair_count(groups: list[Group]) -> int:
    return len(pairs_of(groups))


def pair_weight(groups: list[Group]) -> float:
    return sum(pair.weight for pair in pairs_of(groups))


def references_of(trajectories: list[Trajectory]) -> list[float]:
    """Returns log pi_ref(e|u) of each trajectory, (T,).

    Raises:
        ValueError: A trajectory has no reference.
    """
    for t in trajectories:
        if t.reference is None:
            raise ValueError(f"a trajectory of task {t.task!r}, agent {t.agent!r}, has no "
                             "reference; call dpo.add_references on the training groups, or set "
                             "the reference to 0 for pi_ref = 1")
    return [t.reference for t in trajectories]


def pair_statistics(pairs: list[Pair], *columns: Tensor) -> dict:
    """Sums statistics over the pairs of each kind, and appends an entry to each pair's history.

    Args:
        pairs: The pairs.
        columns: Five tensors, (P,) each: log pi(e|u) of the chosen and of the rejected side, the
            implicit rewards of both, beta log pi/pi_ref, and the margin from `dpo_loss`.

    Returns:
        A dict {kind of pair: {name: sum}}. The sum named `accuracy` is the number of positive
        margins.
    """
    sums = defaultdict(Counter)
    rows = torch.stack(columns, 1).tolist()                                       # (P, 5)
    for pair, (w, l, reward_w, reward_l, m) in zip(pairs, rows):
        pair.history.append((w, l, m))
        # The update method of a Counter adds to its values.
        sums[pair.kind].update(chosen=w, rejected=l, reward_chosen=reward_w,
                               reward_rejected=reward_l, margin=m, count=1, accuracy=m > 0)
    return sums


# ------------------------------------------------------------------------------------- batches


def batches(
    groups: list[Group],
    size: int,
    rng: random.Random,
    epochs: int = 1,
) -> list[list[Group]]:
    """Shuffles the groups in each epoch, and splits them into batches.

    Args:
        groups: The tasks. A task is never split. A task without pairs counts as one pair.
        size: The maximum number of pairs in a batch. A group with more pairs forms a batch by
            itself.
        rng: The random number generator for shuffling.
        epochs: The number of epochs.

    Returns:
        The batches of all epochs. The last batch of an epoch may be smaller.
    """
    filled = []
    for _ in range(epochs):
        shuffled = rng.sample(groups, len(groups))
        costs = [max(1, len(group.pairs)) for group in shuffled]
        filled += chunk_by_cost(shuffled, costs, size)
    return filled


def fits_in_pass(trajectories: list[Trajectory], tokens: int = 4096) -> bool:
    """Returns True if trajectories have at most `tokens` tokens, padded to the longest of them."""
    return len(trajectories) * max(len(t.ids) for t in trajectories) <= tokens


def micro_batches(groups: list[Group], fits: Callable) -> list[list[Group]]:
    """Splits a batch into micro-batches for gradient accumulation.

    Args:
        groups: The batch. A group is never split, so one that does not fit forms a micro-batch by
            itself. Sorting the groups by length keeps the padding small.
        fits: A function fits(trajectories) -> bool. It returns True if the activations of these
            trajectories fit in memory together.
    """
    packed = []
    for group in sorted(groups, key=longest, reverse=True):
        if not packed or not fits(trajectories_of([*packed[-1], group])):
            packed.append([])
        packed[-1].append(group)
    return packed


def longest(group: Group) -> int:
    return max(len(t.ids) for t in group.trajectories)


def chunk_by_cost(items: list, costs: list[float], limit: float) -> list[list]:
    """Splits items into chunks with a total cost of at most `limit`.

    An item that costs more than that forms a chunk by itself.
    """
    chunks = []
    left = 0
    for item, cost in zip(items, costs):
        if not chunks or cost > left:
            chunks.append([])
            left = limit
        chunks[-1].append(item)
        left -= cost
    return chunks


def learning_rates(
    steps: int,
    peak: float,
    warmup: float = 0.0,
    cosine: bool = False,
) -> list[float]:
    """Returns the learning rate of each step.

    Args:
        steps: The number of optimiser steps.
        peak: The highest learning rate.
        warmup: The fraction of steps in which the rate rises linearly from 0. The number of these
            steps is rounded down. transformers rounds it up, with which a phase of one step would
            have the rate 0.
        cosine: If true, the rate decays along a cosine after warmup. Otherwise it stays constant.
    """
    warmup_steps = int(warmup * steps)
    rates = []
    for step in range(steps):
        rate = peak
        if step < warmup_steps:
            rate = peak * step / warmup_steps
        elif cosine:
            angle = math.pi * (step - warmup_steps) / (steps - warmup_steps)
            rate = peak * 0.5 * (1 + math.cos(angle))
        rates.append(rate)
    return rates


# ------------------------------------------------------------------------------------ training


def train(
    model,
    optimizer: torch.optim.Optimizer,
    steps: list[list[Group]],
    rates: list[float],
    loss: Callable,
    denominator: Callable,
    log_probs: Callable = token_log_probs,
    max_grad_norm: float = 1.0,
    fits: Callable = fits_in_pass,
) -> Iterator[dict]:
    """Trains a model in place.

    This is a generator that takes one optimiser step per item: `for line in dpo.train(...)`.

    Args:
        model: A causal language model in fp32 and in evaluation mode.
        optimizer: The optimiser, for instance `adamw(model)`.
        steps: The batches, one per step.
        rates: The learning rates, one per step.
        loss: A function loss(policy, groups), as described above `sft_loss`.
        denominator: A function that returns the divisor of a batch's summed loss. It is applied to
            the whole batch, because means of micro-batches would weight pairs unequally.
        log_probs: A function such as `token_log_probs`, log_probs(model, trajectories) -> (A,).
        max_grad_norm: The norm that gradients are clipped to.
        fits: The limit of a micro-batch, see `micro_batches`.

    Yields:
        A dict {step, loss, terms of the loss, lr, norm, kinds}, where `kinds` maps each kind of
        pair to {count, means over its pairs}.

    Raises:
        ValueError: `check_trainable` found a problem.
        FloatingPointError: The loss or the gradient is not finite. The step has not changed the
            weights.
    """
    check_trainable(model, steps)
    for module in model.modules():
        # The pad token may also be the one that ends turns. With padding_idx, it would get no
        # gradient.
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    for step, (batch, rate) in enumerate(zip(steps, rates, strict=True), 1):
        # Accumulate gradients over micro-batches.
        total = Counter()  # the loss and its terms
        sums = defaultdict(Counter)
        divisor = denominator(batch)
        for groups in micro_batches(batch, fits):
            policy = log_probs(model, trajectories_of(groups))                    # (A,)
            terms, statistics = loss(policy, groups)
            (terms["loss"] / divisor).backward()
            for name, term in terms.items():
                total[name] += term.item() / divisor
            for kind, row in statistics.items():
                sums[kind].update(row)
        # In data-parallel training each rank backpropagates through its own forward passes only,
        # and its gradient is multiplied by the number of ranks. Averaging over the ranks then gives
        # the gradient of the whole batch (see `engine.forward_passes`).
        average_gradients(model)
        norm = clip_gradients(model, max_grad_norm)
        if not math.isfinite(total["loss"] + norm):
            tasks = ", ".join(dict.fromkeys(t.task for t in trajectories_of(batch)))
            raise FloatingPointError(
                f"loss {total['loss']}, gradient norm {norm} at step {step} on tasks {tasks}")

        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        yield dict(step=step, **total, lr=rate, norm=norm, kinds=means(sums))


def check_trainable(model, steps: list[list[Group]]) -> None:
    """Raises ValueError if training would silently have no effect or the wrong effect."""
    if model.training:
        raise ValueError("the model is in training mode, so dropout changes each forward pass and "
                         "the first DPO loss is not ln 2; use model.eval()")
    for name, p in model.named_parameters():
        if p.requires_grad and p.element_size() < 4:
            raise ValueError(f"the weights {name} are {p.dtype}, so a step with a learning rate of "
                             "1e-6 would not change them; load the model with dtype=torch.float32")
    for batch in steps:
        for t in trajectories_of(batch):
            if t.action_count == 0:
                raise ValueError(f"a trajectory of task {t.task!r}, agent {t.agent!r}, has no "
                                 "action tokens to train on; leave it out")


def adamw(model, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """Creates an AdamW optimiser for the model's trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, fused=True)


def average_gradients(model) -> None:
    """Averages the gradients over data-parallel ranks, unless FSDP has already done so.

    Weights that play no part in text, such as those of an image encoder, get a gradient of 0,
    because all ranks have to reduce the same set of tensors.
    """
    unsharded = torch.distributed.is_initialized() and not isinstance(model, FSDPModule)
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if unsharded:
            p.grad /= torch.distributed.get_world_size()
            torch.distributed.all_reduce(p.grad)


def clip_gradients(model, max_norm: float) -> float:
    """Clips the gradient to the norm `max_norm`, and returns its norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if isinstance(norm, DTensor):  # the model is sharded
        norm = norm.full_tensor()
    return norm.item()


def means(sums: dict[str, Counter]) -> dict:
    """Returns a dict that maps each kind of pair to its means and its number of pairs."""
    kinds = {}
    for kind, row in sums.items():
        kinds[kind] = {name: total / row["count"] for name, total in row.items()}
        kinds[kind]["count"] = row["count"]
    return kinds


@torch.no_grad()
def add_references(
    model,
    groups: list[Group],
    log_probs: Callable,
    fits: Callable = fits_in_pass,
) -> None:
    """Computes log pi_ref(e|u) of each trajectory, and stores it there as `reference`.

    In bf16, log pi depends slightly on how trajectories are batched, so the first margins are not
    exactly 0.

    Args:
        model: The reference pi_ref, with its current weights.
        groups: The tasks. Each of their trajectories gets a `reference`.
        log_probs: A function such as `token_log_probs`, log_probs(model, trajectories) -> (A,).
        fits: The limit of a micro-batch, see `micro_batches`.
    """
    for micro_batch in micro_batches(groups, fits):
        trajectories = trajectories_of(micro_batch)
        per_token = log_probs(model, trajectories)                                # (A,)
        values = action_log_probs(per_token, trajectories).tolist()               # (T,)
        for t, value in zip(trajectories, values):
            t.reference = value
