"""The tasks of a run with their trajectories and pairs, small enough to stand in a page.

Texts repeat: an observation comes again in many episodes, a product on many pages. A text is a list
of pieces, a trajectory a list of texts, and each is kept once. Token ids stay behind.
"""

import math
import re
from collections import Counter
from itertools import takewhile
from pathlib import Path

from envs import SUCCESS, first_reply
from harness.files import read_jsonl, read_object
from harness.report import events, reading, result

# What a trajectory is in the page, in this order; `messages`: numbers of texts, -1 - n where the
# agent wrote text n, and null where the page has no room for them.
FIELDS = ("agent", "iteration", "rollout", "reward", "raw", "steps", "cut", "ended", "from",
          "joined", "messages")
PIECES = re.compile(r".+?(?: \[SEP\] | \| |\n+|$)", re.S)


def conversations(run_dir, letters: float = math.inf, tasks: float = math.inf) -> dict:
    """Everything the task browser shows, as JSON takes it: the most telling tasks first.

    letters: how much text there may be; later tasks come without their conversations. tasks: how
    many there may be at all. RunError, naming the file, where one is not what a run writes.
    """
    run_dir = Path(run_dir)
    with reading(run_dir / "config.json"):
        settings = result(run_dir, growing=True)["settings"]
        env = settings["env"]
    found = {}  # task -> {"runs": trajectories, "pairs": pairs}
    rows_of = {name: read_jsonl(run_dir / name, growing=name == "chat.jsonl")
               for name in outputs(run_dir)}
    for name, rows in rows_of.items():
        with reading(run_dir / name):
            for row in rows if rows and "messages" in rows[0] else ():
                here = found.setdefault(text(row["task"]), dict(runs={}, pairs=[]))
                key = (text(row["agent"]), int(row["iteration"]), int(row["rollout"]))
                if name.startswith("iter") and Path(name).stem == "experts":
                    if key in here["runs"]:
                        here["runs"][key]["joined"] = True  # the experts, as an example of success
                    continue
                here["runs"].setdefault(key, trajectory(row, key, name))
    margins = _margins(run_dir)
    for name, rows in rows_of.items():
        with reading(run_dir / name):
            for row in rows if rows and "chosen" in rows[0] else ():
                found[row["task"]]["pairs"].append(_pair(row, name, found, margins))
    ranked = sorted(found, key=lambda task: _interest(found[task]["runs"].values()))
    says = _instructions({task: here["runs"] for task, here in found.items()})
    store, listed = Texts(letters - sum(80 * len(here["runs"]) + 80 * len(here["pairs"])
                                        for here in found.values())), []
    for task in ranked[:int(min(tasks, len(ranked)))]:
        runs = list(found[task]["runs"].values())
        told = store.left > 0
        listed.append(dict(
            id=task, split=task.removeprefix(f"{env}-").split("-")[0], say=says[task],
            runs=[[*(run[f] for f in FIELDS[:-1]),
                   [store.add(m) for m in run["messages"]] if told else None] for run in runs],
            pairs=found[task]["pairs"]))
    return dict(fields=FIELDS, pieces=list(store.pieces), texts=[*store.texts.values()],
                tasks=listed, success=SUCCESS, hard=settings.get("hard_threshold", SUCCESS),
                cut_turns=settings.get("cut_turns", -1))


def outputs(run_dir: Path) -> list[str]:
    """Names of the .jsonl files of finished phases, in order.

    A file that no finished phase wrote is left from before something was deleted.
    """
    phases = run_dir / "phases.json"
    names = [name for phase in (read_object(phases) if phases.exists() else ())
             for name in (phase, f"{phase}/episodes.jsonl")  # those that GRPO learned from
             if name.endswith(".jsonl")]
    # Last, for the episodes of a phase that is running; the others are in its phase's file too.
    return [name for name in [*names, "chat.jsonl"] if (run_dir / name).is_file()]


def text(value) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def number(value) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return round(value, 4)


def trajectory(row: dict, key: tuple, name: str) -> dict:
    agent, iteration, rollout = key
    raw = row.get("raw_reward")
    first = first_reply(row["messages"], int(row["steps"]))
    messages = [(text(m["role"]) == "assistant" and n >= first, text(m["content"]))
                for n, m in enumerate(row["messages"])]
    return dict(agent=agent, iteration=iteration, rollout=rollout, reward=number(row["reward"]),
                raw=None if raw is None else number(raw), steps=int(row["steps"]),
                cut=int(row.get("cut_replies", 0)), ended=text(row["ended"]), joined=False,
                messages=messages, **{"from": name.removesuffix(".jsonl")})


def _pair(row: dict, name: str, found: dict, margins: dict) -> list:
    """[iteration, trains, kind, chosen, rejected, weight, SFT weight, before, after] of a pair.

    chosen, rejected: numbers of the task's trajectories; before, after: [chosen and rejected
    log-probability, margin], or null where that was not measured.
    """
    keys = [*found[row["task"]]["runs"]]
    sides = [keys.index((side["agent"], side["iteration"], side["rollout"]))
             for side in (row["chosen"], row["rejected"])]
    iteration = int(re.match(r"iter(\d+)/", name)[1])
    phase = f"iter{iteration}/{row['trains']}-agent"
    measured = [next(margins.get((phase, when, row["task"]), iter(())), None)
                for when in ("before", "after")]
    return [iteration, text(row["trains"]), text(row["kind"]), *sides, number(row["weight"]),
            number(row["sft_weight"]), *measured]


def _margins(run_dir: Path) -> dict:
    """(phase, "before" or "after", task) -> what the log has of its pairs, one after another."""
    found = {}
    with reading(run_dir / "metrics.jsonl"):
        for event in events(run_dir, growing=True)["margins"]:
            for task, pairs in event["pairs"].items():
                found[event["phase"], event["when"], task] = iter(
                    [[number(x) for x in pair] for pair in pairs])
    return found


def _interest(runs) -> tuple:
    """Sort key, most telling first: a hard failure, above the target's, of the last iteration.

    Then the other explored tasks, then the evaluated ones, by how much the target changed.
    """
    explored = [r for r in runs if not r["from"].startswith(("eval", "chat"))
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
        first = next(iter(found.values()))
        told = takewhile(lambda message: not message[0], first["messages"])  # before it acts
        spoken = [piece.strip(" \n|") for _, content in told
                  for piece in PIECES.findall(content.replace(" [SEP] ", " | "))]
        openings[task] = list(dict.fromkeys(filter(None, spoken)))
    counts = Counter(piece for pieces in openings.values() for piece in pieces)
    common = {piece for piece, n in counts.items() if len(runs) > 2 and n > len(runs) / 2}
    return {task: " ".join(piece for piece in pieces if piece not in common)[:400]
            or " ".join(pieces)[-400:] for task, pieces in openings.items()}


class Texts:
    """Texts by number, each as the numbers of its pieces."""

    def __init__(self, letters: float):
        self.left, self.pieces, self.texts, self.numbers = letters, {}, {}, {}

    def add(self, message: tuple[bool, str]) -> int:
        acts, content = message
        if content not in self.numbers:
            found = []
            for piece in PIECES.findall(content):
                if piece not in self.pieces:
                    self.pieces[piece] = len(self.pieces)
                    self.left -= len(piece.encode("unicode_escape")) + 3
                found.append(self.pieces[piece])
            self.numbers[content] = len(self.numbers)
            self.texts[content] = found
            self.left -= 6 * len(found) + 3
        self.left -= 6
        n = self.numbers[content]
        return -1 - n if acts else n
