"""The tasks of a run with their trajectories and pairs, for the task browser of a page."""

import json
import math
import re
import zlib
from collections import Counter
from pathlib import Path

from lab.harness.files import RunError, read_jsonl, read_object
from lab.harness.report import config_of, events
from lab.play_env import SUCCESS, first_reply

# Of a trajectory, what the page has: token ids stay behind.
KEPT = ("agent", "iteration", "rollout", "reward", "raw_reward", "steps", "cut_replies", "ended",
        "messages")
# Episodes of the phase that is running, an endpoint's; those that have ended are in it in full.
RUNNING = "playing/endpoint.jsonl"


def conversations(run_dir, megabytes: float = math.inf, tasks: int | None = None,
                  first=()) -> dict:
    """Everything that the task browser shows, as JSON takes it: the most telling tasks first.

    megabytes: how much it may be as `look.page` packs it; later tasks come without conversations.
    tasks: how many there may be. first: ids of those that come before the others.
    """
    run_dir = Path(run_dir)
    settings, found = config_of(run_dir)["settings"], {}  # task -> its trajectories and pairs
    rows_of = {name: read_jsonl(run_dir / name, growing=name == RUNNING)
               for name in outputs(run_dir)}
    for name, rows in rows_of.items():
        for row in (row for row in rows if "messages" in row):
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
    # (phase, when, task) -> what the log has of its pairs, one after another
    margins = {(event["phase"], event["when"], task): iter(pairs)
               for event in events(run_dir, growing=True)["margins"]
               for task, pairs in event["pairs"].items()}
    for name, rows in rows_of.items():
        for row in rows if rows and "chosen" in rows[0] else ():
            task = found[row["task"]]
            task["pairs"].append(_pair(row, name, [*task["runs"]], margins))
    if unknown := [task for task in first if task not in found]:
        raise RunError(f"{', '.join(unknown)}: no trajectory in {run_dir}; it has {len(found)} "
                       f"tasks, such as {', '.join([*found][:3])}")
    ranked = sorted(found, key=lambda task: (task not in first,
                                             _interest(found[task]["runs"].values())))
    says = _instructions({task: here["runs"] for task, here in found.items()})
    packer, room, listed = zlib.compressobj(), 1e6 * megabytes, []
    for task in ranked[:tasks]:
        runs = [*found[task]["runs"].values()]
        if room <= 0 and task not in first:
            runs = [{**run, "messages": None} for run in runs]
        listed.append(dict(id=task, split=task.removeprefix(f"{settings['env']}-").split("-")[0],
                           say=says[task], runs=runs, pairs=found[task]["pairs"]))
        packed = packer.compress(json.dumps(listed[-1]).encode())
        room -= 4 / 3 * len(packed + packer.flush(zlib.Z_SYNC_FLUSH))
    return dict(tasks=listed, success=SUCCESS, hard=settings.get("hard_threshold", SUCCESS),
                cut_turns=settings.get("cut_turns", -1))


def outputs(run_dir: Path) -> list[str]:
    """Names of the .jsonl files of finished phases, in order."""
    phases = run_dir / "phases.json"
    names = [name for phase in (read_object(phases) if phases.exists() else ())
             for name in (phase, f"{phase}/episodes.jsonl")  # those that GRPO learned from
             if name.endswith(".jsonl")]
    # RUNNING is last: its episodes are in their phase's file too, once that is finished.
    return [name for name in [*names, RUNNING] if (run_dir / name).is_file()]


def _pair(row: dict, name: str, runs: list[tuple], margins: dict) -> dict:
    """A row of pairs-*.jsonl; chosen and rejected are numbers of the task's trajectories, `runs`,
    before and after [chosen and rejected log-probability, margin], None where not measured."""
    iteration = name.split("/")[0]
    phase = f"{iteration}/{row['trains']}-agent"
    return {**row, "iteration": int(iteration.removeprefix("iter")),
            **{side: runs.index(tuple(row[side][part] for part in ("agent", "iteration",
                                                                   "rollout")))
               for side in ("chosen", "rejected")},
            **{when: next(margins.get((phase, when, row["task"]), iter(())), None)
               for when in ("before", "after")}}


def _interest(runs) -> tuple:
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
    failures = [reward for reward in others or targets if reward < SUCCESS]
    if not failures:
        return (2, 0.0, 0.0)
    target, hardest = max(targets, default=0.0), max(failures)
    return (int(bool(others) and target >= hardest), -hardest, target)


def _instructions(runs: dict[str, dict]) -> dict[str, str]:
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
