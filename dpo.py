"""Learning: from the tokens of trajectories to log-probabilities, to a loss, to steps of AdamW.

Raw PyTorch, and nothing else. Equations are those of arXiv 2511.22254: a task u, a trajectory e of
it with its action tokens t_k, the policy pi that is trained, and the reference pi_ref, from which
DPO measures how far pi has moved.

Precision: weights, gradients and AdamW are in fp32. On a GPU a forward is in bf16 (`engine.passes`,
`engine.models`); its logits become fp32, sums over tokens and losses are in fp64.

Shapes: a pass is one forward of the model; it reads B trajectories of L tokens, and makes logits
over V words at K places. Some groups have T trajectories in all, with A action tokens, and P pairs.
Log-probabilities are in nats.
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

# ------------------------------------------------------------------------- what is learned from

Ids = list[int]   # token ids, or a mask beside them
ROUNDING = 1e-9   # rewards that differ by less are equal


@dataclass
class Trajectory:
    """A trajectory e of a task u, whole or as far as it has come; a line of a .jsonl file."""
    task: str = ""
    agent: str = ""                  # the name of who played it
    iteration: int = 0               # of the loop, in which it was played
    rollout: int = 0                 # its number among those of one task, agent and iteration
    seed: int = 0                    # of its own random numbers
    messages: list[dict] = field(default_factory=list)    # the conversation, {role, content}
    ids: Ids = field(default_factory=list)          # (l,) read and written, in order
    # (l,) 1: the agent wrote it; an expert's reply is all its own, with its end of turn
    action_mask: Ids = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of what was sampled; for logs
    reward: float = 0.0              # in [0, 1]; by ETO's protocol from -1
    raw_reward: float | None = None  # before clipping, where the environment clips
    steps: int = 0                   # how many replies it has
    idle: int = 0                    # how many of them changed nothing
    ended: str = ""                  # done, budget (of replies) or context (of tokens)

    # log pi_ref(e|u), once it has been computed. It is no field: in no file, and in no copy.
    reference = None

    def extend(self, ids: Ids, is_action: bool) -> None:
        self.ids += ids
        self.action_mask += [int(is_action)] * len(ids)

    @property
    def action_count(self) -> int:
        """The number of action tokens that are predicted, which the very first token is not."""
        return sum(self.action_mask[1:])

    @property
    def is_failure(self) -> bool:
        """Whether it is in F = {e : r(u, e) < 1}."""
        return better(1.0, self.reward)


def better(reward: float, other: float) -> bool:
    """Whether a reward is above another by more than rounding."""
    return reward - other > ROUNDING


def equal(reward: float, other: float) -> bool:
    """Whether two rewards differ by no more than rounding."""
    return abs(reward - other) <= ROUNDING


@dataclass
class Pair:
    """A preference between two trajectories of a task."""
    kind: str                # who is chosen over whom, such as expert>target
    chosen: Trajectory
    rejected: Trajectory
    weight: float = 1.0      # of the DPO term
    sft_weight: float = 0.0  # of the SFT term on the chosen trajectory
    # What each step that trained on it saw: log pi(e|u) of both sides, and the margin.
    seen: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass
class Group:
    """A task: its distinct trajectories, each of which the model reads once, and its pairs."""
    trajectories: list[Trajectory] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def add(self, t: Trajectory) -> Trajectory:
        """Adds a trajectory, unless an equal one is there; returns the one that is kept."""
        for known in self.trajectories:
            if known == t:
                return known
        self.trajectories.append(t)
        return t


def trajectories_of(groups: list[Group]) -> list[Trajectory]:
    """All trajectories of the groups, in order, (T,)."""
    found = []
    for group in groups:
        found += group.trajectories
    return found


def pairs_of(groups: list[Group]) -> list[Pair]:
    """All pairs of the groups, in order, (P,)."""
    found = []
    for group in groups:
        found += group.pairs
    return found


# --------------------------------------------------------------------------- log-probabilities


def in_fp32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_log_probs(
    model,
    trajectories: list[Trajectory],
    scores: Callable[[Tensor], Tensor] = in_fp32,
) -> Tensor:
    """Computes log pi(t_k | t_<k) of every action token t_k by one pass.

    Args:
        model: A causal LM.
        trajectories: Those that are run side by side.
        scores: What pi is: logits, (A, V) -> those whose softmax is pi. DPO takes the model's own,
            in fp32; GRPO its sampler's, with a temperature and without some tokens.

    Returns:
        (A,) nats, of the trajectories laid end to end.
    """
    device = next(model.parameters()).device
    # Padding stands behind all that matters. A causal model needs no attention mask to ignore it.
    ids = padded([t.ids for t in trajectories]).to(device)                        # (B, L)
    mask = padded([t.action_mask for t in trajectories]).to(device)               # (B, L)

    # The logits at one place are for the token at the next.
    targets = ids[:, 1:]                                                          # (B, L-1)
    is_action = mask[:, 1:].bool()                                                # (B, L-1)

    # Logits are made only where the next token of some row is an action; most tokens are read.
    places = is_action.any(0).nonzero()[:, 0]                                     # (K,)
    logits = logits_at(places, model, input_ids=ids)                              # (B, K, V)
    logits = logits[is_action[:, places]]                                         # (A, V)

    # log pi(t_k | t_<k) = log softmax(logits)[t_k]
    return -F.cross_entropy(scores(logits), targets[is_action], reduction="none")


def padded(rows: list[Ids]) -> Tensor:
    """Rows as one tensor, (B, L), with 0 where they are shorter than the longest."""
    rows = [torch.tensor(row) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=0)


def logits_at(places: Tensor, model, **inputs) -> Tensor:
    """A model's logits at some places of each row, (B, K, V). It makes no others, if it can; one
    inside a wrapper that hides how, such as peft's, takes the memory of all of them."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(**inputs, use_cache=False, logits_to_keep=places).logits
    return model(**inputs, use_cache=False).logits[:, places]


def action_log_probs(per_token: Tensor, trajectories: list[Trajectory]) -> Tensor:
    """Adds up log pi(e|u) of each trajectory, (T,) float64, from those of its tokens, (A,)."""
    # The trajectory of each action token: 0, 0, 0, 1, 1, ...
    counts = torch.tensor([t.action_count for t in trajectories], dtype=torch.long)
    owners = torch.arange(len(counts)).repeat_interleave(counts).to(per_token.device)  # (A,)
    # Eq. (2), (5): log pi(e|u) = sum_k log pi(t_k | t_<k) over action tokens t_k. What the agent
    # reads only conditions. In fp32 a sum of hundreds of nats is rounded by more than a late step
    # changes it.
    zeros = per_token.new_zeros(len(trajectories), dtype=torch.float64)
    return zeros.index_add(0, owners, per_token.double())


# -------------------------------------------------------------------------------------- losses
# loss(policy, groups) -> sums over the groups, (), by name, and statistics: kind of pair -> {name:
# sum}. The sum `loss` is trained on; its terms, if it has several, are logged beside it.
# policy: log pi of all action tokens of the groups, (A,). `train` divides the sums over a batch by
# size(batch), which makes them means: `action_count` for SFT, `pair_count` for Eq. (9).


def sft_loss(policy: Tensor, groups: list[Group]) -> tuple[dict, dict]:
    """Eq. (3)-(5), summed over the groups' trajectories."""
    # Eq. (5): L = - sum_k log pi(t_k | t_<k) 1(t_k in A), A the tokens of thoughts and actions
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
    """Eq. (7) of each pair, from log pi(e|u) and log pi_ref(e|u) of its two trajectories. All are
    (P,), as are the loss and the margin that are returned."""
    # Eq. (7): L = -log sigma( beta log pi(e_w)/ref(e_w) - beta log pi(e_l)/ref(e_l) )
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return -F.logsigmoid(margin), margin


def preference_loss(
    policy: Tensor,
    groups: list[Group],
    beta: float,
    lambda_dpo: float = 1.0,
    lambda_sft: float = 0.1,
    log_prob: str = "sum",
) -> tuple[dict, dict]:
    """Eq. (9), summed over the groups' pairs: weighted DPO plus SFT on the chosen trajectory.

    With lambda_dpo 1 and every sft_weight 0 it is Eq. (7), the failure agent's loss. The sums `dpo`
    and `sft`, with their lambdas and weights, add up to `loss`.

    Args:
        policy: log pi of all action tokens, (A,).
        groups: What it is summed over. Their trajectories have a reference.
        beta: Of Eq. (7).
        lambda_dpo, lambda_sft: The weights of the two terms.
        log_prob: How the DPO term makes log pi of a trajectory of its tokens': sum, or mean.
    """
    trajectories = trajectories_of(groups)
    pi = action_log_probs(policy, trajectories)                                   # (T,)
    ref = pi.new_tensor(references_of(trajectories))                              # (T,)
    counts = pi.new_tensor([t.action_count for t in trajectories])                # (T,)

    # Where the two sides of each pair stand among the trajectories.
    pairs = pairs_of(groups)
    place = {id(t): n for n, t in enumerate(trajectories)}
    chosen = [place[id(pair.chosen)] for pair in pairs]                           # (P,)
    rejected = [place[id(pair.rejected)] for pair in pairs]                       # (P,)

    # The preference, of log-probabilities that are sums over action tokens, or means.
    pi_scored = pi
    ref_scored = ref
    if log_prob == "mean":
        pi_scored = pi / counts
        ref_scored = ref / counts
    rewards = beta * (pi_scored - ref_scored)                                     # (T,)
    preference, margin = dpo_loss(pi_scored[chosen], pi_scored[rejected],
                                  ref_scored[chosen], ref_scored[rejected], beta)  # (P,) each

    # Eq. (9): L = lambda_DPO L_DPO + lambda_SFT E[-log pi(e_w|u)]
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
    """log pi_ref(e|u) of each, (T,); ValueError where it has not been computed."""
    for t in trajectories:
        if t.reference is None:
            raise ValueError(f"a trajectory of task {t.task!r}, agent {t.agent!r} has no reference;"
                             " call dpo.add_references on what is trained on, or set it to 0, "
                             "with which pi_ref is 1")
    return [t.reference for t in trajectories]


def pair_statistics(pairs: list[Pair], *sides: Tensor) -> dict:
    """Returns sums over the pairs of each kind. `accuracy` counts the pairs with a margin above 0.

    Args:
        pairs: P pairs, whose `seen` gets log pi(e|u) of both sides and the margin.
        sides: log pi(e|u) of the chosen and of the rejected side; the implicit rewards of both,
            beta log pi/pi_ref; and their margin. (P,) each.
    """
    sums = defaultdict(Counter)
    rows = torch.stack(sides, 1).tolist()                                         # (P, 5)
    for pair, (w, l, reward_w, reward_l, m) in zip(pairs, rows):
        pair.seen.append((w, l, m))
        # A Counter's update adds.
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
    """The groups, shuffled in each epoch, in batches of at most `size` pairs, or tasks without
    pairs. A group stays whole: one with more pairs is a batch by itself. The last batch of an epoch
    may be small, and is divided by its own size."""
    found = []
    for _ in range(epochs):
        shuffled = rng.sample(groups, len(groups))
        costs = [max(1, len(group.pairs)) for group in shuffled]
        found += fill(shuffled, costs, size)
    return found


def fits_in_pass(trajectories: list[Trajectory], tokens: int = 4096) -> bool:
    """Returns True if trajectories have at most `tokens` tokens, padded to the longest one."""
    return len(trajectories) * max(len(t.ids) for t in trajectories) <= tokens


def micro_batches(groups: list[Group], fits: Callable) -> list[list[Group]]:
    """Splits a batch into micro-batches (gradient accumulation), whose activations are in memory
    together. Their trajectories satisfy `fits`. A group that does not is a micro-batch by itself,
    and needs that memory. The longest groups come first, so that lengths are similar."""
    parts = []
    for group in sorted(groups, key=longest, reverse=True):
        if not parts or not fits(trajectories_of([*parts[-1], group])):
            parts.append([])
        parts[-1].append(group)
    return parts


def longest(group: Group) -> int:
    return max(len(t.ids) for t in group.trajectories)


def fill(things: list, costs: list[float], size: float) -> list[list]:
    """Consecutive things in parts that cost at most `size`, or that are one thing that costs more.
    """
    parts = []
    room = 0
    for thing, cost in zip(things, costs):
        if not parts or cost > room:
            parts.append([])
            room = size
        parts[-1].append(thing)
        room -= cost
    return parts


def learning_rates(
    steps: int,
    peak: float,
    warmup: float = 0.0,
    cosine: bool = False,
) -> list[float]:
    """Returns the learning rate of each step. It rises linearly from 0 in the first share of steps,
    `warmup`, then is constant or falls as a cosine. The number of warm-up steps is rounded down,
    where transformers rounds it up, so that a phase of one step trains."""
    rising = int(warmup * steps)
    rates = []
    for step in range(steps):
        rate = peak
        if step < rising:
            rate = peak * step / rising
        elif cosine:
            angle = math.pi * (step - rising) / (steps - rising)
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
    size: Callable,
    log_probs: Callable = token_log_probs,
    max_grad_norm: float = 1.0,
    fits: Callable = fits_in_pass,
) -> Iterator[dict]:
    """Trains a model in place, one batch a step. It takes a step when it is asked for the next line
    of the log: `for line in dpo.train(...)`.

    Args:
        model: A causal LM in fp32 and in evaluation mode.
        optimizer: Such as that of `adamw`.
        steps: The batch of each step.
        rates: The learning rate of each step.
        loss: loss(policy, groups), as above.
        size: size(batch) -> what the sum of the batch's losses is divided by. Means of its parts
            would weigh pairs unequally.
        log_probs: log_probs(model, trajectories) -> (A,).
        max_grad_norm: What gradients are clipped to.
        fits: fits(trajectories) -> whether their activations fit in memory together.

    Yields:
        {step, loss and its terms, lr, norm, kinds}; kinds: kind of pair -> {count, and means over
        its pairs}.

    Raises:
        ValueError: Model or trajectories cannot be trained on as they are.
        FloatingPointError: Loss or gradient is not finite; the weights are as before the step.
    """
    check_trainable(model, steps)
    for module in model.modules():
        # A token that pads may end turns, too; torch would give its embedding no gradient.
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    for step, (batch, rate) in enumerate(zip(steps, rates, strict=True), 1):
        # The gradient of the batch's loss, part by part.
        total = Counter()  # loss and its terms
        sums = defaultdict(Counter)
        divisor = size(batch)
        for groups in micro_batches(batch, fits):
            policy = log_probs(model, trajectories_of(groups))                    # (A,)
            terms, statistics = loss(policy, groups)
            (terms["loss"] / divisor).backward()
            for name, term in terms.items():
                total[name] += term.item() / divisor
            for kind, row in statistics.items():
                sums[kind].update(row)
        # Each rank has the loss of the whole batch, and the gradient of its own passes, times the
        # number of ranks: see `engine.passes`.
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
    """Refuses what would silently train to no effect, or to a wrong one."""
    if model.training:
        raise ValueError("the model is in training mode, in which dropout makes each pass another, "
                         "so that the first DPO loss is not ln 2; use model.eval()")
    for name, p in model.named_parameters():
        if p.requires_grad and p.element_size() < 4:
            raise ValueError(f"the weights {name} are {p.dtype}, which steps at a rate of 1e-6 do "
                             "not change; read the model with dtype=torch.float32")
    for batch in steps:
        for t in trajectories_of(batch):
            if t.action_count == 0:
                raise ValueError(f"a trajectory of task {t.task!r}, agent {t.agent!r} has no "
                                 "action tokens to learn from; leave it out")


def adamw(model, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """The optimiser of those of the model's parameters that are trained."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, fused=True)


def average_gradients(model) -> None:
    """Averages gradients over ranks that have the whole model each; FSDP does so by itself. Weights
    that no text uses, such as those for pictures, get the gradient 0, as all ranks have to reduce
    the same ones."""
    whole = torch.distributed.is_initialized() and not isinstance(model, FSDPModule)
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if whole:
            p.grad /= torch.distributed.get_world_size()
            torch.distributed.all_reduce(p.grad)


def clip_gradients(model, most: float) -> float:
    """Scales the gradient down to a norm of at most so much; the norm that it had."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    if isinstance(norm, DTensor):  # of a model in parts
        norm = norm.full_tensor()
    return norm.item()


def means(sums: dict[str, Counter]) -> dict:
    """kind -> means over its pairs, and their count."""
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
    """Notes log pi_ref(e|u) of each trajectory of the groups; pi_ref is the model as it is now. In
    bf16 the policy differs from it by rounding before the first step, too.

    Args:
        model: pi_ref.
        groups: Whose trajectories get it.
        log_probs: log_probs(model, trajectories) -> (A,), such as `token_log_probs`.
        fits: fits(trajectories) -> whether they fit in memory together.
    """
    for some in micro_batches(groups, fits):
        trajectories = trajectories_of(some)
        per_token = log_probs(model, trajectories)                                # (A,)
        values = action_log_probs(per_token, trajectories).tolist()               # (T,)
        for t, value in zip(trajectories, values):
            t.reference = value
