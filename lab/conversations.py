"""The tasks of a run with their trajectories and pairs, for the task browser of a page."""

import json
import math
import re
import zlib
from collections import Counter
from pathlib import Path

from lab.runfiles import agents_of, config_of, phases_of
from worlds import World, first_reply
from worlds.files import read_jsonl
from worlds.flags import Refused

# Of a trajectory, what the page has: token ids stay behind.
KEPT = ("agent", "iteration", "rollout", "reward", "raw_reward", "steps", "ended", "messages")


def conversations(run: Path, megabytes: float = math.inf, tasks: int | None = None,
                  first=()) -> dict:
    """Everything that the task browser shows, as JSON takes it: the most telling tasks first.

    megabytes: how much it may be as `page.packed` packs it; later tasks come without conversations.
    tasks: how many there may be. first: ids of those that come before the others.
    """
    settings, phases, found = config_of(run)["settings"], phases_of(run), {}
    for name, rows in episodes_of(run, phases):  # task -> its trajectories and pairs
        for row in rows:
            runs = found.setdefault(row["task"], dict(runs={}, pairs=[]))["runs"]
            key = row["agent"], row["iteration"], row["rollout"]
            if name.startswith("iter") and Path(name).stem == "experts":
                if key in runs:
                    runs[key]["joined"] = True  # the experts, as an example of success
            else:
                runs.setdefault(key, {
                    **{field: row[field] for field in KEPT if field in row}, "joined": False,
                    "from": name.removesuffix(".jsonl"),
                    "opening": first_reply(row["messages"], row["steps"])})
    for name, row in phases.items():
        if "pairs" in row and (run / name).is_file():
            add_pairs(found, run, name, row)
    if unknown := [task for task in first if task not in found]:
        raise Refused(f"{', '.join(unknown)}: no trajectory in {run}; it has {len(found)} "
                      f"tasks, such as {', '.join([*found][:3])}")
    ranked = sorted(found, key=lambda task: (task not in first,
                                             interest(found[task]["runs"].values())))
    says = instructions({task: here["runs"] for task, here in found.items()})
    packer, room, listed = zlib.compressobj(), 1e6 * megabytes, []
    for task in ranked[:tasks]:
        runs = [*found[task]["runs"].values()]
        if room <= 0 and task not in first:
            runs = [{**run, "messages": None} for run in runs]
        listed.append(dict(id=task, split=task.removeprefix(f"{settings['env']}-").split("-")[0],
                           say=says[task], runs=runs, pairs=found[task]["pairs"]))
        packed = packer.compress(json.dumps(listed[-1]).encode())
        room -= 4 / 3 * len(packed + packer.flush(zlib.Z_SYNC_FLUSH))
    return dict(tasks=listed, success=World.success, agents=agents_of(phases),
                hard=settings.get("hard_threshold", World.success),
                cut_turns=settings.get("cut_turns", -1))


def episodes_of(run: Path, phases: dict):
    """(name, trajectories) of the files of finished phases, in order; then of what the phase that
    is running has played so far, which are in its own file too once it is finished."""
    names = [name for phase in phases for name in (phase, f"{phase}/episodes.jsonl")]  # GRPO's
    growing = sorted(path.relative_to(run).as_posix() for path in run.glob("playing/*.jsonl"))
    for name in [*names, *growing]:
        if name.endswith(".jsonl") and (run / name).is_file():
            rows = read_jsonl(run / name, growing=name in growing)
            yield name, [row for row in rows if "messages" in row]


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
        here = found.get(task, dict(runs={}))
        places = {key: at for at, key in enumerate(here["runs"])}
        sides = {side: places.get(tuple(row[side][part] for part in (
            "agent", "iteration", "rollout"))) for side in ("chosen", "rejected")}
        if None not in sides.values():  # else episodes are being played again
            here["pairs"].append({**row, **sides, "trains": recorded["trains"],
                                  "iteration": recorded["i"],
                                  **{when: of[when][n] if of else None
                                     for when in ("before", "after")}})


def interest(runs) -> tuple:
    """Sort key, most telling first: a hard failure, above the target's, of the last iteration;
    then the other explored tasks, then the evaluated ones, by how much the target changed."""
    explored = [r for r in runs if not r["from"].startswith(("eval", "playing"))
                and r["agent"] != "expert"]
    if not explored:
        rewards = [r["reward"] for r in runs if r["agent"] == "target"] or [0.0]
        return (9, -abs(rewards[-1] - rewards[0]), rewards[-1])
    last = max(r["iteration"] for r in explored)
    targets, others = ([r["reward"] for r in explored if r["iteration"] == last
                        and (r["agent"] == "target") == is_target] for is_target in (True, False))
    failures = [reward for reward in others or targets if reward < World.success]
    if not failures:
        return (2, 0.0, 0.0)
    target, hardest = max(targets, default=0.0), max(failures)
    return (int(bool(others) and target >= hardest), -hardest, target)


def instructions(runs: dict[str, dict]) -> dict[str, str]:
    """task -> what its opening says that most others do not."""
    openings = {}
    for task, found in runs.items():
        run = next(iter(found.values()))
        openings[task] = list(dict.fromkeys(
            piece.strip() for message in run["messages"][:run["opening"]]
            for piece in re.split(r" \[SEP\] | \| |\n+", message["content"]) if piece.strip()))
    counts = Counter(piece for pieces in openings.values() for piece in pieces)
    common = {piece for piece, n in counts.items() if len(runs) > 2 and n > len(runs) / 2}
    return {task: " ".join(piece for piece in pieces if piece not in common)[:400]
            or " ".join(pieces)[-400:] for task, pieces in openings.items()}
