"""Training: batches, token log-probabilities, reference models, losses and the optimiser loop.

This file is raw PyTorch, and imports nothing else from this project. It is in the order in which
training runs. Equation numbers refer to arXiv 2511.22254. The notation is:

    u        a task
    e        a trajectory
    t_k      the k-th action token of a trajectory; t_<k are all tokens before t_k
    pi       the policy, which is the model being trained
    pi_ref   the reference model; DPO (direct preference optimisation) compares the policy to it
    SFT      supervised fine-tuning

Precision: weights, gradients and AdamW states are fp32. Logits are cast to fp32. Losses, and sums
over tokens, are computed in fp64.

Shapes:

    B        trajectories in a forward pass
    L        tokens in the longest of these trajectories, and l in a single one
    K        positions at which a forward pass computes logits
    V        tokens in the vocabulary
    T        trajectories in a list of groups
    A        action tokens in a list of groups, or in a batch of trajectories
    P        pairs in a list of groups

Log-probabilities are in nats.
"""

import inspect
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# ------------------------------------------------------------------------- trajectories and pairs

Ids = list[int]   # token ids, or a mask with one entry per token
ROUNDING = 1e-9   # the largest difference between two rewards that count as equal


@dataclass
class Trajectory:
    """The trajectory e of an episode of task u. The episode may still be running.

    A trajectory file (.jsonl) contains one trajectory per line.
    """
    task: str = ""
    agent: str = ""                  # name of the agent that acted
    iteration: int = 0               # iteration of the training loop
    rollout: int = 0                 # rollout index for this task, agent and iteration
    seed: int = 0                    # seed of the episode's random number generator
    messages: list[dict] = field(default_factory=list)    # the conversation, {role, content}
    ids: Ids = field(default_factory=list)  # (l,) token ids of prompt, replies and observations
    # (l,) The mask is 1 for action tokens, and 0 for all other tokens. The action tokens are the
    # tokens that the agent sampled. In an expert trajectory, the action tokens are the tokens of
    # all replies, including the end-of-turn tokens.
    action_mask: Ids = field(default_factory=list)
    # Log-probabilities of the sampled tokens, as recorded by the sampler. They are used only for
    # logging.
    log_probs: list[float] = field(default_factory=list)
    reward: float = 0.0              # reward in [0, 1]; in [-1, 1] with --protocol eto
    raw_reward: float | None = None  # reward before clipping, or None if there is no clipping
    turns: int = 0                   # number of replies
    idle: int = 0                    # number of replies that changed nothing in the environment
    # The reason why the episode ended, or "" while it is running:
    #     "done"           the environment ended the episode
    #     "turn_limit"     the agent reached the maximum number of replies
    #     "context_limit"  the trajectory has no room for another reply or observation
    #     "refused"        an API endpoint refused a request (only if an endpoint is evaluated)
    ended: str = ""

    # `ref_log_prob` is log pi_ref(e|u), which `add_references` computes. This attribute has no type
    # annotation, so it is not a dataclass field. It is therefore not saved to files, and
    # dataclasses.replace resets it to None.
    ref_log_prob = None

    def extend(self, ids: Ids, is_action: bool) -> None:
        self.ids += ids
        self.action_mask += [int(is_action)] * len(ids)

    @property
    def action_count(self) -> int:
        """The number of action tokens that the model predicts.

        The first token of the trajectory is not counted. The model cannot predict this token,
        because there is no token before it.
        """
        return sum(self.action_mask[1:])

    @property
    def is_failure(self) -> bool:
        """True if the trajectory is a failure, which means that its reward is below 1.

        The paper writes the set of failures as F = {e : r(u, e) < 1}, where r is the reward.
        """
        return better(1.0, self.reward)


def better(reward: float, other: float) -> bool:
    """Returns True if `reward` is higher than `other` by more than a rounding error."""
    return reward - other > ROUNDING


def equal(reward: float, other: float) -> bool:
    """Returns True if two rewards are equal up to a rounding error."""
    return abs(reward - other) <= ROUNDING


@dataclass
class Pair:
    """A preference between two trajectories of the same task."""
    kind: str                # the chosen and the rejected side, for example "expert>target"
    chosen: Trajectory
    rejected: Trajectory
    weight: float = 1.0      # weight of the pair in the DPO term
    sft_weight: float = 0.0  # weight of the chosen trajectory in the SFT term
    # The history contains one entry for each optimiser step on this pair. An entry consists of
    # three numbers: log pi(e|u) of the chosen and of the rejected trajectory, and the margin (see
    # `dpo_loss`).
    history: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass
class Group:
    """The trajectories of one task, and the pairs that compare them.

    Each trajectory is stored only once, even if it is in several pairs. In an optimiser step, each
    trajectory therefore needs one forward pass, not one per pair.
    """
    trajectories: list[Trajectory] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def add(self, t: Trajectory) -> Trajectory:
        """Adds a trajectory to the group, unless the group already contains an identical one.

        Returns the stored trajectory, which is either `t` or the identical one.
        """
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


# ---------------------------------------------------------------------------------------- batches


def batches(
    groups: list[Group],
    size: int,
    rng: random.Random,
    epochs: int = 1,
) -> list[list[Group]]:
    """Shuffles the groups in each epoch, and splits them into batches.

    A batch has at most `size` pairs. Groups are not split, so a group with more pairs gets its own
    batch. A group without pairs, as in SFT, counts as one pair. The last batch of an epoch may be
    smaller.
    """
    filled = []
    for _ in range(epochs):
        shuffled = rng.sample(groups, len(groups))
        costs = [max(1, len(group.pairs)) for group in shuffled]
        filled += chunk_by_cost(shuffled, costs, size)
    return filled


def micro_batches(groups: list[Group], fits: Callable) -> list[list[Group]]:
    """Splits a batch into micro-batches for gradient accumulation.

    The groups are sorted by length to reduce padding. A group is never split. A group that does not
    fit in memory gets its own micro-batch. `fits(trajectories)` returns True if one forward and
    backward pass over these trajectories fits in memory.
    """
    packed = []
    for group in sorted(groups, key=longest, reverse=True):
        if not packed or not fits(trajectories_of([*packed[-1], group])):
            packed.append([])
        packed[-1].append(group)
    return packed


def fits_in_pass(trajectories: list[Trajectory], tokens: int = 4096) -> bool:
    """Returns True if a padded batch of the trajectories contains at most `tokens` tokens.

    All trajectories are padded to the length of the longest one.
    """
    return len(trajectories) * max(len(t.ids) for t in trajectories) <= tokens


def longest(group: Group) -> int:
    return max(len(t.ids) for t in group.trajectories)


def chunk_by_cost(items: list, costs: list[float], limit: float) -> list[list]:
    """Splits items into consecutive chunks, each with a total cost of at most `limit`.

    If a single item costs more than `limit`, it gets its own chunk.
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

    During warmup (the fraction `warmup` of the steps), the learning rate rises linearly from 0 to
    `peak`. The number of warmup steps is rounded down. (transformers rounds up. If training has
    only one step, rounding up would give this step a learning rate of 0.) After warmup, the
    learning rate follows a cosine decay, or stays constant.
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


# ------------------------------------------------------------------------------ log-probabilities


def in_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_log_probs(
    model,
    trajectories: list[Trajectory],
    logits_processor: Callable[[Tensor], Tensor] = in_fp32,
) -> Tensor:
    """Computes log pi(t_k | t_<k) of every action token t_k in a single forward pass.

    Returns the log-probabilities of all action tokens, (A,), in the order of the trajectories.

    The policy pi is the softmax of the processed logits, (A, V). By default, `logits_processor`
    only casts logits to fp32. GRPO in evolve.py trains the sampling distribution. Its logits
    processor therefore applies the sampling temperature, and masks tokens that the sampler never
    samples.
    """
    device = next(model.parameters()).device
    # No attention mask is needed. The padding is on the right, and attention is causal, so the
    # tokens of a trajectory never attend to the padding.
    ids = pad_right([t.ids for t in trajectories]).to(device)                     # (B, L)
    mask = pad_right([t.action_mask for t in trajectories]).to(device)            # (B, L)

    # The logits at a position predict the next token.
    targets = ids[:, 1:]                                                          # (B, L-1)
    is_action = mask[:, 1:].bool()                                                # (B, L-1)

    # Most tokens belong to the prompt or to observations. To save memory, we compute logits only at
    # the K positions that predict an action token in at least one trajectory of the batch.
    positions = is_action.any(0).nonzero()[:, 0]                                  # (K,)
    logits = logits_at(positions, model, input_ids=ids)                           # (B, K, V)
    logits = logits[is_action[:, positions]]                                      # (A, V)

    # log pi(t_k | t_<k) = log softmax(logits)[t_k]
    return -F.cross_entropy(logits_processor(logits), targets[is_action], reduction="none")


def pad_right(sequences: list[Ids]) -> Tensor:
    """Stacks sequences into one tensor, (B, L), and pads them with zeros on the right."""
    sequences = [torch.tensor(sequence) for sequence in sequences]
    return pad_sequence(sequences, batch_first=True, padding_value=0)


def logits_at(positions: Tensor, model, **inputs) -> Tensor:
    """Computes the logits at the given positions of each sequence in a batch, (B, K, V).

    The argument `logits_to_keep` makes the model compute only these logits, which saves memory.
    Some models do not have this argument, and some wrappers, such as peft's, hide it. For these
    models, the logits of all positions are computed, and those of other positions are discarded.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(**inputs, use_cache=False, logits_to_keep=positions).logits
    return model(**inputs, use_cache=False).logits[:, positions]


def trajectory_log_probs(per_token: Tensor, trajectories: list[Trajectory]) -> Tensor:
    """Computes log pi(e|u) of each trajectory, (T,), in float64.

    `per_token` contains the log-probabilities of all their action tokens, (A,).
    """
    # For each action token, the index of its trajectory: 0, 0, 0, 1, 1, ...
    counts = torch.tensor([t.action_count for t in trajectories], dtype=torch.long)
    owners = torch.arange(len(counts)).repeat_interleave(counts).to(per_token.device)  # (A,)
    # Eq. (2), (5): log pi(e|u) = sum_k log pi(t_k | t_<k) over the action tokens t_k. Tokens of the
    # prompt and of observations are context, and are not part of the sum. The sum is computed in
    # fp64, because it can be hundreds of nats. In fp32, its rounding error would be larger than the
    # change of the sum in a late optimiser step.
    zeros = per_token.new_zeros(len(trajectories), dtype=torch.float64)
    return zeros.index_add(0, owners, per_token.double())


@torch.no_grad()
def add_references(
    model,
    groups: list[Group],
    log_probs: Callable = token_log_probs,
    fits: Callable = fits_in_pass,
) -> None:
    """Computes log pi_ref(e|u) of each trajectory, and stores it in `t.ref_log_prob`.

    In bf16, the log-probabilities of a trajectory depend slightly on the other trajectories in its
    batch. If the policy starts from pi_ref, its first margins are therefore close to 0, but not
    exactly 0.
    """
    for micro_batch in micro_batches(groups, fits):
        trajectories = trajectories_of(micro_batch)
        per_token = log_probs(model, trajectories)                                # (A,)
        values = trajectory_log_probs(per_token, trajectories).tolist()           # (T,)
        for t, value in zip(trajectories, values):
            t.ref_log_prob = value


def references_of(trajectories: list[Trajectory]) -> list[float]:
    """Returns log pi_ref(e|u) of each trajectory, (T,).

    Raises ValueError if the attribute `ref_log_prob` of a trajectory is not set.
    """
    for t in trajectories:
        if t.ref_log_prob is None:
            raise ValueError(f"a trajectory of task {t.task!r}, agent {t.agent!r}, has no "
                             "ref_log_prob; call dpo.add_references on the training groups, or set "
                             "it to 0 for pi_ref = 1")
    return [t.ref_log_prob for t in trajectories]


# ----------------------------------------------------------------------------------------- losses
# A loss function is called as loss(policy, groups) for each micro-batch, so it must not use
# statistics of the batch: the size of a micro-batch depends on memory and on the number of ranks.
# The tensor `policy`, (A,), contains log pi of all action tokens in the groups. A loss function
# returns two dicts:
# - Losses: scalar tensors, each summed over the groups. The entry `loss` is minimised. All other
#   entries are only logged, for example the terms of the loss.
# - Statistics: a dict {kind of pair: {name: sum}}, for logging. The sum named `count` is the number
#   of pairs of this kind. All other sums are divided by `count` to compute means.
#
# Losses are sums, so `train` divides them by denominator(batch). The denominator function is
# `action_count` for SFT, and `total_weight` or `pair_count` for Eq. (9).


def sft_loss(policy: Tensor, groups: list[Group]) -> tuple[dict, dict]:
    """Computes the SFT loss, Eq. (3)-(5), summed over all trajectories in the groups."""
    # Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A). In the paper, A is the set of thought and
    # action tokens. The tensor `policy` contains log pi of only these tokens.
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

    The arguments are log pi(e|u) and log pi_ref(e|u) of the chosen and of the rejected trajectory
    of each pair, (P,) each. Returns the losses and the margins, (P,) each. The margin is the
    argument of sigma in Eq. (7).
    """
    # Eq. (7): L = -log sigma( beta log [pi(e_w|u) / pi_ref(e_w|u)]
    #                          - beta log [pi(e_l|u) / pi_ref(e_l|u)] ),
    # where e_w is the chosen trajectory, and e_l is the rejected trajectory.
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

    Eq. (9) is weighted DPO plus SFT on the chosen trajectories. Eq. (7), the loss of the failure
    agent, is the special case in which lambda_dpo and all DPO weights are 1, and lambda_sft is 0.

    Args:
        policy: log pi of all action tokens, (A,).
        groups: The groups, one per task. Each trajectory needs its `ref_log_prob`.
        log_prob_reduction: "sum" or "mean". In the DPO term, the log-probability of a trajectory is
            the sum or the mean of its token log-probabilities.

    Returns:
        A tuple of two dicts. The first dict contains the `loss` and its terms `dpo` and `sft`,
        where loss = dpo + sft. The terms already include the lambdas and the weights of the pairs.
        The second dict is the result of `pair_statistics`.
    """
    trajectories = trajectories_of(groups)
    pi = trajectory_log_probs(policy, trajectories)                               # (T,)
    ref = pi.new_tensor(references_of(trajectories))                              # (T,)
    counts = pi.new_tensor([t.action_count for t in trajectories])                # (T,)

    # Find the index of each pair's chosen and rejected trajectory.
    pairs = pairs_of(groups)
    index = {id(t): n for n, t in enumerate(trajectories)}
    chosen = [index[id(pair.chosen)] for pair in pairs]                           # (P,)
    rejected = [index[id(pair.rejected)] for pair in pairs]                       # (P,)

    # Compute the DPO term from the sums or the means of the token log-probabilities.
    pi_scored = pi
    ref_scored = ref
    if log_prob_reduction == "mean":
        pi_scored = pi / counts
        ref_scored = ref / counts
    rewards = beta * (pi_scored - ref_scored)  # the implicit rewards of DPO        # (T,)
    preference, margin = dpo_loss(pi_scored[chosen], pi_scored[rejected],
                                  ref_scored[chosen], ref_scored[rejected], beta)  # (P,) each

    # Eq. (9): L = lambda_DPO L_DPO + lambda_SFT E[-log pi(e_w|u)]. `train` later divides both terms
    # by the same denominator. The denominator of the SFT term therefore also counts failure pairs,
    # although failure pairs have no SFT term.
    imitation = -pi[chosen]                                                       # (P,)
    weight = pi.new_tensor([pair.weight for pair in pairs])                       # (P,)
    sft_weight = pi.new_tensor([pair.sft_weight for pair in pairs])               # (P,)
    dpo = lambda_dpo * weight * preference                                        # (P,)
    sft = lambda_sft * sft_weight * imitation                                     # (P,)
    for column in preference, margin, weight, sft_weight:
        # torch would broadcast a scalar or a column, so weights would act on the wrong pairs.
        if column.shape != (len(pairs),):
            raise ValueError(f"{len(pairs)} pairs have a loss, margin or weight of shape "
                             f"{tuple(column.shape)}; give one number per pair")
    losses = dict(loss=(dpo + sft).sum(), dpo=dpo.sum(), sft=sft.sum())
    return losses, pair_statistics(pairs, pi[chosen], pi[rejected], rewards[chosen],
                                  rewards[rejected], margin)


def pair_count(groups: list[Group]) -> int:
    return len(pairs_of(groups))


def total_weight(groups: list[Group]) -> float:
    return sum(pair.weight for pair in pairs_of(groups))


def pair_statistics(pairs: list[Pair], *columns: Tensor) -> dict:
    """Sums statistics over the pairs of each kind, and appends an entry to each pair's history.

    The columns are five tensors, (P,) each: log pi(e|u) of the chosen trajectory and of the
    rejected trajectory, their two implicit rewards (beta log pi/pi_ref), and the margin from
    `dpo_loss`.

    Returns a dict {kind of pair: {name: sum}}. The sum named `accuracy` is the number of pairs with
    a positive margin. The sum named `count` is the number of pairs.
    """
    sums = defaultdict(Counter)
    rows = torch.stack(columns, 1).tolist()                                       # (P, 5)
    for pair, (w, l, reward_w, reward_l, m) in zip(pairs, rows):
        pair.history.append((w, l, m))
        # Counter.update adds to the existing values. It does not replace them.
        sums[pair.kind].update(chosen=w, rejected=l, reward_chosen=reward_w,
                               reward_rejected=reward_l, margin=m, count=1, accuracy=m > 0)
    return sums


def means(sums: dict[str, Counter]) -> dict:
    """Divides the sums of each kind of pair by the number of its pairs (`count`).

    The entry `count` itself is not divided.
    """
    kinds = {}
    for kind, row in sums.items():
        kinds[kind] = {name: total / row["count"] for name, total in row.items()}
        kinds[kind]["count"] = row["count"]
    return kinds


# --------------------------------------------------------------------------------------- training


def adamw(model, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """Creates an AdamW optimiser for the model's trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, fused=True)


def clip_gradients(model, max_norm: float) -> float:
    """Clips the gradient to a total norm of at most `max_norm`.

    Returns the total norm before clipping.
    """
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()


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
    clip: Callable = clip_gradients,
    on_step: Callable = lambda line: None,
) -> list[dict]:
    """Trains a model in place, and returns a log with one line per optimiser step.

    Args:
        model: A causal language model in fp32 and in evaluation mode.
        steps, rates: The batch and the learning rate of each step.
        loss: A function loss(policy, groups), as described above `sft_loss`.
        denominator: A function denominator(batch) -> number. The loss of a batch is divided by this
            number. The number is computed for the whole batch. If the mean were computed for each
            micro-batch instead, pairs in small micro-batches would get larger weights.
        log_probs, fits, clip: Functions that a distributed run replaces with its own, with the same
            arguments as `token_log_probs`, `fits_in_pass` and `clip_gradients`.
        on_step: A function that is called with the line of each step.

    Returns:
        A dict for each step with the entries `step`, `loss`, the terms of the loss, `lr`, `norm`
        and `kinds`. `norm` is the norm of the gradient before clipping. `kinds` maps each kind of
        pair to a dict with the number of pairs (`count`) and the mean of each statistic.

    Raises:
        ValueError: The model or the data is unsuitable for training (see `check_trainable`).
        FloatingPointError: The loss or the gradient is not finite. The error is raised before the
            optimiser changes the weights.
    """
    check_trainable(model, steps)
    for module in model.modules():
        # In some models, the pad token is also the end-of-turn token. PyTorch computes no gradient
        # for the embedding at padding_idx, so padding_idx must be None.
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    log = []
    for step, (batch, rate) in enumerate(zip(steps, rates, strict=True), 1):
        # Accumulate gradients over micro-batches.
        total = Counter()  # the loss and its terms
        sums = defaultdict(Counter)
        divisor = denominator(batch)
        for groups in micro_batches(batch, fits):
            policy = log_probs(model, trajectories_of(groups))                    # (A,)
            losses, statistics = loss(policy, groups)
            (losses["loss"] / divisor).backward()
            for name, value in losses.items():
                total[name] += value.item() / divisor
            for kind, row in statistics.items():
                sums[kind].update(row)
        norm = clip(model, max_grad_norm)
        if not math.isfinite(total["loss"] + norm):
            tasks = ", ".join(dict.fromkeys(t.task for t in trajectories_of(batch)))
            raise FloatingPointError(
                f"loss {total['loss']}, gradient norm {norm} at step {step} on tasks {tasks}")

        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        line = dict(step=step, **total, lr=rate, norm=norm, kinds=means(sums))
        log.append(line)
        on_step(line)
    return log


def check_trainable(model, steps: list[list[Group]]) -> None:
    """Checks the model and the data for mistakes that would go unnoticed during training.

    Raises ValueError if the model is in training mode, which turns on dropout, if trainable weights
    have a lower precision than fp32, or if a trajectory contains no action tokens.
    """
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
