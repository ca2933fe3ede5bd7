"""The tasks of a run with their trajectories and pairs, for the task browser of a page."""

import json
import re
from collections import Counter
from pathlib import Path

from lab.runfiles import agents_of, config_of, phases_of
from worlds import World, first_reply
from worlds.files import read_jsonl

# Of a trajectory, what the page has: token ids stay behind.
KEPT = ("agent", "iteration", "rollout", "reward", "raw_reward", "steps", "ended", "messages")


def conversations(run: Path, megabytes: float) -> dict:
    """Everything that the task browser shows, as JSON takes it: the most telling tasks first.
    megabytes: about how much it may be as `page.packed` packs it, a fifth; later tasks come without
    conversations."""
    settings, phases, found = config_of(run)["settings"], phases_of(run), {}
    for name, row in episodes_of(run, phases):  # task -> its trajectories and pairs
        task = found.setdefault(row["task"], dict(runs={}, pairs=[]))
        task["runs"].setdefault((row["agent"], row["iteration"], row["rollout"]), {
            **{field: row[field] for field in KEPT if field in row},
            "from": name.removesuffix(".jsonl"),
            "opening": first_reply(row["messages"], row["steps"])})
    for name, row in phases.items():
        if "pairs" in row and (run / name).is_file():
            add_pairs(found, run, name, row)
    says, tasks, room = instructions(found), [], 5e6 * megabytes
    for task in sorted(found, key=lambda task: interest(found[task]["runs"].values())):
        runs = [{**one, "messages": one["messages"] if room > 0 else None}
                for one in found[task]["runs"].values()]
        tasks.append(dict(id=task, split=task.removeprefix(f"{settings['env']}-").split("-")[0],
                          say=says[task], runs=runs, pairs=found[task]["pairs"]))
        room -= len(json.dumps(runs))
    return dict(tasks=tasks, success=World.success, agents=agents_of(phases),
                hard=settings["hard_threshold"], cut_turns=settings["cut_turns"])


def episodes_of(run: Path, phases: dict):
    """(name, trajectory) of the files of finished phases, in order."""
    names = [name for phase in phases for name in (phase, f"{phase}/episodes.jsonl")]  # GRPO's
    for name in names:
        if name.endswith(".jsonl") and (run / name).is_file():
            yield from ((name, row) for row in read_jsonl(run / name) if "messages" in row)


def add_pairs(found: dict, run: Path, name: str, recorded: dict) -> None:
    """Adds the rows of a file of pairs to their tasks. Chosen and rejected become numbers of the
    task's trajectories; before and after are [log-probability of the chosen one, of the rejected
    one, margin], None where they were not measured."""
    margins = run / name.split("/")[0] / f"{recorded['trains']}-agent/margins.jsonl"
    measured = {row["task"]: row for row in read_jsonl(margins)} if margins.is_file() else {}
    counts = Counter()  # task -> how many of its pairs came before
    for row in read_jsonl(run / name):
        task, n, of = row["task"], counts[row["task"]], measured.get(row["task"], {})
        counts[task] += 1
        places = [*found[task]["runs"]]
        sides = {side: places.index(tuple(row[side][part] for part in (
            "agent", "iteration", "rollout"))) for side in ("chosen", "rejected")}
        found[task]["pairs"].append({
            **row, **sides, "trains": recorded["trains"], "iteration": recorded["i"],
            **{when: of[when][n] if of else None for when in ("before", "after")}})


def interest(runs) -> tuple:
    """Sort key, most telling first: explored tasks by the target's best reward in the last
    iteration, of equal ones those with the hardest failure; then the evaluated ones."""
    explored = [r for r in runs if r["agent"] != "expert" and not r["from"].startswith("eval")]
    last = [r for r in explored if r["iteration"] == max(r["iteration"] for r in explored)]
    return (not explored,
            max((r["reward"] for r in last if r["agent"] == "target"), default=0.0),
            -max((r["reward"] for r in last if r["reward"] < World.success), default=0.0))


def instructions(found: dict[str, dict]) -> dict[str, str]:
    """task -> what its opening says that most others do not."""
    openings = {}
    for task in found:
        run = next(iter(found[task]["runs"].values()))
        openings[task] = list(dict.fromkeys(
            piece.strip() for message in run["messages"][:run["opening"]]
            for piece in re.split(r" \[SEP\] | \| |\n+", message["content"]) if piece.strip()))
    counts = Counter(piece for pieces in openings.values() for piece in pieces)
    common = {piece for piece, n in counts.items() if len(found) > 2 and n > len(found) / 2}
    return {task: " ".join(piece for piece in pieces if piece not in common)[:400]
            or " ".join(pieces)[-400:] for task, pieces in openings.items()}
