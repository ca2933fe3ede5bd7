"""What the log says of pairs before and after training is what the agents' checkpoints say."""

import pytest
import torch
from conftest import Toy

import dpo
from harness.files import read_jsonl
from training import margins
from training.models import load_model


class Uneven(Toy):
    """Rewards by how long the replies are, so that many failures differ."""

    def reward(self):
        return 1.0 if self.replies == ["the word"] * 2 else len("".join(self.replies)) % 9 / 10


def log_probs(run, folder, sides):
    model = load_model(run / folder).eval()
    with torch.no_grad():
        return dpo.action_log_probs(model, sides).tolist()


@pytest.mark.parametrize("flags, last", [
    (["--log-prob", "mean"], "iter1/{}-agent"),
    (["--reference", "sft", "--iterations", 2, "--beta-later", 0.3], "iter2/{}-agent")])
def test_margins_are_those_of_the_checkpoints(toy_run, flags, last):
    run = toy_run(Uneven, "--cut-turns", -1, *flags)
    logged = {(e["phase"], e["when"]): e["pairs"] for e in read_jsonl(run / "metrics.jsonl")
              if e["event"] == "margins"}
    i, seen = int(last[4]), 0
    beta = 0.3 if i == 2 else 0.1
    for agent in ("target", "failure"):
        by_task = {}
        for pair in read_jsonl(run / f"iter{i}/pairs-{agent}.jsonl"):
            by_task.setdefault(pair["task"], []).append(pair)
        for task, pairs in by_task.items():
            before, after = (logged[last.format(agent), when][task] for when in ("before", "after"))
            assert len(before) == len(after) == len(pairs)
            for pair, *moved in zip(pairs, before, after):
                sides = [next(dpo.Trajectory(**row) for row in read_jsonl(run / side["file"])
                              if (row["task"], row["rollout"]) == (task, side["rollout"]))
                         for side in (pair["chosen"], pair["rejected"])]
                entered = f"iter{i - 1}/{agent}-agent" if i > 1 else f"sft-{agent}"
                reference = log_probs(run, f"sft-{agent}", sides)
                for folder, found in zip((entered, last.format(agent)), moved):
                    policy = log_probs(run, folder, sides)
                    assert found[:2] == pytest.approx(policy, abs=2e-3)
                    length = [s.action_tokens if "mean" in flags else 1 for s in sides]
                    chosen, rejected = ((p - r) / n for p, r, n in zip(policy, reference, length))
                    assert found[2] == pytest.approx(beta * (chosen - rejected), abs=3e-4)
                seen += 1
    assert seen > 4


def group(task, *rewards):
    sequences = [dpo.Trajectory(task=task, reward=r) for r in rewards]
    return dpo.Group(task, sequences, [dpo.Pair("kind", 0, n) for n in range(1, len(sequences))])


def test_the_hardest_negatives_are_watched_and_copied():
    groups = [group("a", 1, 0.2), group("b", 1, 0.1, 0.9), group("c", 1, 0.5), group("d", 1)]
    found = margins.hardest(groups[:3], 2)
    assert [g.task for g in found] == ["b", "c"]
    found[0].reference = [1.0]
    assert groups[1].reference == []
    assert margins.hardest(groups[:3], 0) == []
