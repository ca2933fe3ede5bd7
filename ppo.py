"""PPO on whole episodes, a baseline of the paper; in a file of its own, as the method needs none.

The paper says only that PPO "directly optimizes the SFT policy" for the reward (Section 5.1). Here:
the reward comes at the end of an episode, all its action tokens share one advantage, and there is
no value network. The baseline is leave-one-out: an episode is compared with the mean reward of the
other rollouts of its instruction (Kool et al. 2019; Ahmadian et al. 2024), which is unbiased.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object

import dpo
import scale


@dataclass
class Rollouts(dpo.Group):
    """One instruction's episodes: `sequences`, and what follows for each of them."""

    advantages: list[float] = field(default_factory=list)
    old: list[torch.Tensor] = field(default_factory=list)  # (a,) log pi of its action tokens when
    sft: list[torch.Tensor] = field(default_factory=list)  # it was sampled, and after SFT; nats


def groups(rollouts: dict[str, list[dict]], dropped: Counter) -> list[Rollouts]:
    """Trajectories by task as groups with advantages; counts those without another beside them."""
    found = []
    for task, rows in rollouts.items():
        if len(rows) < 2:
            dropped["the only rollout of its instruction"] += len(rows)
            continue
        found.append(Rollouts(task, [dpo.Sequence(r["ids"], r["action_mask"]) for r in rows],
                              advantages=leave_one_out([r["reward"] for r in rows])))
    return found


def leave_one_out(rewards: list[float]) -> list[float]:
    """Each reward minus the mean of the others; two rewards at least."""
    total, n = sum(rewards), len(rewards)
    return [r - (total - r) / (n - 1) for r in rewards]


def token_log_probs(model, sequences: list[dpo.Sequence], temperature: float) -> torch.Tensor:
    """log pi(t_k | t_<k) of every action token, laid end to end, (A,) in nats.

    Of the policy that sampled, whose logits are divided by the temperature.
    """
    device = next(model.parameters()).device
    lengths = [len(s.ids) for s in sequences]
    ids = torch.tensor([i for s in sequences for i in s.ids], device=device)             # (N,)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])             # (N,)
    keep, offset = [], 0
    for s in sequences:  # the logits at k - 1 predict token k
        keep += [offset + k - 1 for k in range(1, len(s.ids)) if s.mask[k]]
        offset += len(s.ids)
    keep = torch.tensor(keep, dtype=torch.long, device=device)                           # (A,)
    logits = model(input_ids=ids[None], position_ids=positions[None], lengths=lengths,
                   logits_to_keep=keep, use_cache=False).logits[0]                       # (A, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return -F.cross_entropy(logits, ids[keep + 1], reduction="none")                     # (A,)


@torch.no_grad()
def add_log_probs(accelerator, model, groups: list[Rollouts], name: str, temperature: float,
                  tokens_per_forward: int, progress=None) -> None:
    """Sets the field `name` (old or sft) of every group by `model`, as `dpo.add_reference` does."""
    model.eval()
    rank, ranks = accelerator.process_index, accelerator.num_processes
    work = [dpo.packs(share, tokens_per_forward) for share in dpo.share_out(groups, ranks)]
    found = {}
    for i in range(max(len(share) for share in work)):
        pack = work[rank][i] if i < len(work[rank]) else groups[:1]  # as in `fit`, all ranks meet
        sequences = [s for g in pack for s in g.sequences]
        with scale.precision(accelerator, model):
            values = token_log_probs(model, sequences, temperature).cpu()
        values = iter(values.split([s.action_tokens for s in sequences]))
        found.update({g.task: [next(values) for _ in g.sequences] for g in pack})
        if progress is not None:
            progress.update(ranks * sum(g.tokens for g in pack))
    for part in gather_object([found]):
        found.update(part)
    for g in groups:
        setattr(g, name, found[g.task])


def kl_of(groups: list[Rollouts]) -> float:
    """The sampling policy's divergence from the SFT policy, in nats per episode, as sampled."""
    episodes = [(old - sft).sum().item() for g in groups for old, sft in zip(g.old, g.sft)]
    return sum(episodes) / max(len(episodes), 1)


def objective(model, groups: list[Rollouts], temperature: float, clip: float, kl: float):
    """PPO's clipped objective and the KL term, summed over all action tokens; no statistics.

        L = sum_k  -min(rho_k A, clip(rho_k, 1 - clip, 1 + clip) A) + kl/2 (log pi/pi_SFT)^2
        rho_k = pi(t_k | t_<k) / pi_old(t_k | t_<k)

    The gradient of the squared term over the policy's own samples is that of KL(pi || pi_SFT).
    """
    sequences = [s for g in groups for s in g.sequences]
    new = token_log_probs(model, sequences, temperature)                                 # (A,)
    old, sft = (torch.cat([x for g in groups for x in getattr(g, name)]).to(new)
                for name in ("old", "sft"))                                              # (A,)
    tokens = torch.tensor([s.action_tokens for s in sequences], device=new.device)
    advantage = new.new_tensor([a for g in groups for a in g.advantages]).repeat_interleave(tokens)
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return (kl * (new - sft) ** 2 / 2 - surrogate).sum(), {}
