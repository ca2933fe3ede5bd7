"""Groups dealt to ranks and cut into forward passes. A group is anything with `task`,
`sequences` and `tokens`, the sum of its sequences' lengths; it stays whole.
"""

import torch
from accelerate.utils import broadcast_object_list, gather_object

from engine import sharding


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


def split_over_ranks(groups: list, ranks: int) -> list[list]:
    """The groups dealt to ranks, longest first to the rank with the fewest tokens; order is kept.

    At every step all ranks wait for the one with the most tokens.
    """
    shares, tokens = [[] for _ in range(ranks)], [0] * ranks
    for n in sorted(range(len(groups)), key=lambda n: -groups[n].tokens):
        rank = tokens.index(min(tokens))
        shares[rank].append(n)
        tokens[rank] += groups[n].tokens
    return [[groups[n] for n in sorted(share)] for share in shares]


def micro_batches(accelerator, groups: list, tokens: int) -> list[tuple[list, bool]]:
    """This rank's (pack, idle) over its share of `groups`, as many as any other rank has.

    A pack has at most `tokens` tokens, or is one larger group. A rank with fewer packs runs one
    group more, whose result does not count, so that all meet.
    """
    work = [fill(share, tokens, lambda g: g.tokens)
            for share in split_over_ranks(groups, accelerator.num_processes)]
    mine = work[accelerator.process_index]
    missing = max(len(share) for share in work) - len(mine)
    return [(pack, False) for pack in mine] + [(groups[:1], True)] * missing


@torch.no_grad()
def over_sequences(accelerator, model, groups: list, tokens_per_forward: int, read,
                   progress=None) -> list[list]:
    """read(model, sequences) -> a value for each; those of each group, found on all ranks.

    model: of `sharding.shard_model`. All ranks get all values.
    """
    model.eval()
    values_of = {}
    for pack, _ in micro_batches(accelerator, groups, tokens_per_forward):
        with sharding.precision(accelerator, model):
            values = iter(read(model, [s for g in pack for s in g.sequences]))
        values_of.update({g.task: [next(values) for _ in g.sequences] for g in pack})
        if progress is not None:
            progress.update(accelerator.num_processes * sum(g.tokens for g in pack))
    for part in gather_object([values_of]):
        values_of.update(part)
    return [values_of[g.task] for g in groups]
