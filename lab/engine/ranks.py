"""Groups cut into forward passes, and their sequences dealt to ranks. A group is anything with
`task`, `sequences` and `tokens`, the sum of its sequences' lengths; one pass has all of it.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from accelerate.utils import broadcast_object_list

from lab.engine import sharding

BUSY = 0.9  # of the ranks' time; below it the sequences of a group go to several ranks [ours]


def on_main(accelerator, answer):
    """What answer() is on the main rank, on all ranks."""
    return broadcast_object_list([answer() if accelerator.is_main_process else None])[0]


def fill(groups: list, size: int, cost) -> list[list]:
    """Consecutive groups that cost at most `size` together (or one that costs more)."""
    result, room = [], 0
    for g in groups:
        if not result or cost(g) > room:
            result.append([])
            room = size
        result[-1].append(g)
        room -= cost(g)
    return result


def share_out(sizes: list[int], shares: int) -> list[list[int]]:
    """The numbers of some sizes, largest first to the share that has the least; order is kept."""
    numbers, totals = [[] for _ in range(shares)], [0] * shares
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = totals.index(min(totals))
        numbers[least].append(n)
        totals[least] += sizes[n]
    return [sorted(share) for share in numbers]


def deal(groups: list, ranks: int, tokens: int) -> tuple[list[list[int]], bool]:
    """The sequences that each rank runs, counted over all groups; and whether they fit a pass.

    A group stays on one rank, where what its sequences begin alike runs once, unless ranks would
    idle or a rank would have over `tokens`. A longer sequence fits alone.
    """
    lengths = [len(s.ids) for g in groups for s in g.sequences]
    numbers = iter(range(len(lengths)))
    whole = [[next(numbers) for _ in g.sequences] for g in groups]
    for parts in whole, [[n] for n in range(len(lengths))]:
        shares = [[n for part in share for n in parts[part]] for share in share_out(
            [sum(lengths[n] for n in part) for part in parts], ranks)]
        loads = [sum(lengths[n] for n in share) for share in shares]
        if max(loads) <= tokens and sum(loads) >= BUSY * ranks * max(loads):
            break
    return shares, all(load <= tokens or len(share) == 1 for load, share in zip(loads, shares))


def passes(groups: list, ranks: int, tokens: int) -> list[tuple[list, list[list[int]]]]:
    """(groups, the sequences of each rank, as `deal` counts them) of each pass over `groups`; a
    rank has at most `tokens` tokens in it, but for what does not fit otherwise."""
    if ranks == 1:
        return [(pack, [list(range(sum(len(g.sequences) for g in pack)))])
                for pack in fill(groups, tokens, lambda g: g.tokens)]
    parts = math.ceil(sum(g.tokens for g in groups) / (ranks * tokens))
    if parts == 1 or len(groups) == 1:
        shares, fit = deal(groups, ranks, tokens)
        if fit or len(groups) == 1:
            return [(groups, shares)]
    cut = share_out([g.tokens for g in groups], min(max(parts, 2), len(groups)))
    return [found for part in cut for found in passes([groups[n] for n in part], ranks, tokens)]


@dataclass(frozen=True)
class Together:
    """A model that all ranks run at once: each rank its share of a pass, and all get all of it."""

    accelerator: object
    model: torch.nn.Module  # of `sharding.shard_model`
    shares: list[list[int]]

    def gather(self, sequences: list, read):
        """read(model, sequences), a value of each action token, (A,), in the order of `sequences`;
        with gradients in this rank's share."""
        mine = self.shares[self.accelerator.process_index]
        values = read(self.model, [sequences[n] for n in mine] or sequences[:1])
        tokens = [s.action_tokens for s in sequences]
        first = [0, *itertools.accumulate(tokens)]
        places = [k for n in mine for k in range(first[n], first[n + 1])]
        own = values.new_zeros(first[-1])
        own = (own.index_copy(0, torch.tensor(places, device=values.device), values) if mine else
               own + 0 * values.sum())  # it ran so that all meet
        return own + (self.accelerator.reduce(own.detach()) - own.detach())


def packs(accelerator, model, groups: list, tokens: int) -> list[tuple[list, object]]:
    """(groups, the model to run them with) of each pass over `groups`, alike on all ranks."""
    n = accelerator.num_processes
    return [(pack, Together(accelerator, model, shares) if n > 1 else model)
            for pack, shares in passes(groups, n, tokens)]


@torch.no_grad()
def over_sequences(accelerator, model, groups: list, tokens_per_forward: int, read,
                   progress=None) -> list[list]:
    """read(model, sequences) -> a value for each; those of each group, on all ranks."""
    model.eval()
    values_of = {}
    for pack, together in packs(accelerator, model, groups, tokens_per_forward):
        with sharding.precision(accelerator, model):
            values = iter(read(together, [s for g in pack for s in g.sequences]))
        values_of.update({g.task: [next(values) for _ in g.sequences] for g in pack})
        if progress is not None:
            progress.update(sum(g.tokens for g in pack))
    return [values_of[g.task] for g in groups]
