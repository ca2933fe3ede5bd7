"""The page of a run: `bash run.sh page RUN` writes RUN/run.html.

The page contains page.css and page.js, and a content security policy that keeps the browser from
loading anything else. Content of a run's files becomes text of the page, never markup.
"""

import argparse
import base64
import hashlib
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

# jinja2 is not in requirements.txt: torch requires it, and chat templates need it.
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common.files import read_jsonl
from engine.console import counted, headline
from environments import first_reply
from lab.page import figures, report
from lab.runfiles import SOLVED, agents_of, command, config_of, pairs_in, phases_of

FILES = Path(__file__).parent / "files"
MEGABYTES = 4.5  # default limit for the conversations in a page, after compression
# Keys of a trajectory that the page includes. Token ids are left out.
KEPT = ("agent", "iteration", "rollout", "reward", "raw_reward", "turns", "ended", "messages")
EPISODE = {"task", *KEPT} - {"raw_reward"}  # a row with these keys is a trajectory


def make_page(run: Path, megabytes: float = MEGABYTES) -> str:
    """Writes RUN/run.html for a finished or unfinished run. Returns a line about the file."""
    path = run / "run.html"
    path.write_text(page(run, megabytes), encoding="ascii")
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run: Path, megabytes: float = MEGABYTES) -> str:
    """Returns the page as HTML in ASCII, with about `megabytes` of conversations."""
    s = config_of(run)["settings"]
    curves = figures.run_figure(run)
    data = conversations(run, megabytes)
    lacking = sum(task["runs"][0]["messages"] is None for task in data["tasks"])
    style = (FILES / "page.css").read_text(encoding="ascii")
    script = (FILES / "page.js").read_text(encoding="ascii")
    policy = ["default-src 'none'", f"style-src {hash_source(style)}",
              f"script-src {hash_source(script)}",
              "img-src data:", "base-uri 'none'", "form-action 'none'"]
    # Compression with zlib, followed by base64, leaves a fifth of the size of conversations.
    deflated = zlib.compress(json.dumps(data, allow_nan=False).encode())
    env = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)
    html = env.get_template("page.html.j2").render(
        heading=headline(s), name=run.name, status=status_of(run), policy="; ".join(policy),
        style=Markup(style), script=Markup(script), data=base64.b64encode(deflated).decode(),
        curves=curves and figures.address(curves), settings=list(s.items()),
        lacking=lacking, count=len(data["tasks"]), tables=report.tables(run),
        training=[(phase, figures.address(drawing))
                  for phase, drawing in figures.training_figures(run)])
    return html.encode("ascii", "xmlcharrefreplace").decode()


def status_of(run: Path) -> str:
    """Returns the progress of a run."""
    if (run / "result.json").exists():
        return "finished"
    phases = phases_of(run)
    last = f", the last {[*phases][-1]}" if phases else ""
    return f"{counted(len(phases), 'phases')} so far{last}"


def hash_source(source: str) -> str:
    """Returns the entry of the policy that allows exactly this style or script."""
    digest = hashlib.sha256(source.encode("ascii")).digest()  # ASCII bytes are equal in the page
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# ------------------------------------------------------------- the data of the task browser


def conversations(run: Path, megabytes: float) -> dict:
    """Returns the data of the task browser: tasks with their trajectories and pairs, the most
    interesting tasks first.

    Conversations are added until they take about `megabytes` in the page, where they are
    compressed. The remaining tasks have no conversations.
    """
    s = config_of(run)["settings"]
    phases = phases_of(run)
    runs = defaultdict(dict)  # task -> (agent, iteration, rollout) -> trajectory
    for file, row in episodes_of(run, phases):
        kept = {name: row[name] for name in KEPT if name in row}
        kept["from"] = file.removesuffix(".jsonl")
        kept["opening"] = first_reply(row["messages"], row["turns"])
        runs[row["task"]].setdefault(name_of(row), kept)
    pairs = defaultdict(list)  # task -> its pairs
    for row in pairs_in(phases):
        if (run / row["output"]).is_file():
            add_pairs(pairs, runs, run, row)

    texts = instructions(runs)
    tasks = []
    room = 5e6 * megabytes  # in bytes before compression, which leaves a fifth
    for task in sorted(runs, key=lambda task: interest(runs[task].values())):
        shown = list(runs[task].values())
        size = len(json.dumps(shown))
        if room <= 0:
            shown = [trajectory | dict(messages=None) for trajectory in shown]
        room -= size
        tasks.append(dict(id=task, split=split_of(task, s["env"]), say=texts[task], runs=shown,
                          pairs=pairs[task]))
    return dict(tasks=tasks, success=SOLVED, agents=agents_of(phases), hard=s["hard_threshold"],
                cut_turns=s["cut_turns"])


def episodes_of(run: Path, phases: dict) -> Iterator[tuple[str, dict]]:
    """Yields (file, trajectory) from the files of finished phases, in order."""
    for output in phases:
        file = output if output.endswith(".jsonl") else f"{output}/episodes.jsonl"  # GRPO's
        if (run / file).is_file():
            for row in read_jsonl(run / file):
                if EPISODE <= row.keys():
                    yield file, row


def name_of(row: dict) -> tuple:
    """Returns the name of a trajectory among those of its task. Files of pairs use this name."""
    return row["agent"], row["iteration"], row["rollout"]


def add_pairs(pairs: dict[str, list], runs: dict[str, dict], run: Path, recorded: dict) -> None:
    """Adds the rows of a file of pairs to their tasks.

    `chosen` and `rejected` become indices of the task's trajectories. `first` and `last` are the
    log-probabilities and the margin of the pair in the first and in the last training step that
    used it, or None if there was none.
    """
    folder = (run / recorded["output"]).parent
    margins = margins_in(folder / f"{recorded['trains']}-agent/margins.jsonl")
    for row in read_jsonl(run / recorded["output"]):
        names = [*runs.get(row["task"], {})]
        sides = {side: name_of(row[side]) for side in ("chosen", "rejected")}
        if not {*sides.values()} <= {*names}:
            continue  # a file of trajectories is being recomputed
        measured = margins.get(name_of_pair(row), dict(first=None, last=None))
        row |= {side: names.index(name) for side, name in sides.items()}
        pairs[row["task"]].append(row | measured | dict(trains=recorded["trains"],
                                                        iteration=recorded["i"]))


def margins_in(file: Path) -> dict[tuple, dict]:
    """Returns the numbers in margins.jsonl: name of a pair -> its log-probabilities and margin in
    the first and in the last training step that used it."""
    rows = read_jsonl(file) if file.is_file() else []
    return {name_of_pair(row): dict(first=row["first"], last=row["last"]) for row in rows}


def name_of_pair(row: dict) -> tuple:
    return row["task"], row["kind"], name_of(row["chosen"]), name_of(row["rejected"])


def split_of(task: str, env: str) -> str:
    """Returns the split in a task's id. The tasks of a user's own trajectories have any name."""
    if task.startswith(f"{env}-"):
        return task.removeprefix(f"{env}-").split("-")[0]
    return "own"


def interest(runs) -> tuple:
    """Returns the sort key of a task by its trajectories, for the most interesting tasks first.

    Explored tasks come first: those with a low best reward of the target agent in the last
    iteration, and of equal ones those with the failure of the highest reward. Tasks that were only
    evaluated follow.
    """
    explored = [r for r in runs if r["agent"] != "expert" and not r["from"].startswith("eval")]
    if not explored:
        return True, 0.0, 0.0
    iteration = max(r["iteration"] for r in explored)
    last = [r for r in explored if r["iteration"] == iteration]
    of_target = [r["reward"] for r in last if r["agent"] == "target"]
    failures = [r["reward"] for r in last if r["reward"] < SOLVED]
    return False, max(of_target, default=0.0), -max(failures, default=0.0)


def instructions(runs: dict[str, dict]) -> dict[str, str]:
    """Returns the text of each task: the parts of its opening that occur in at most half of the
    tasks, or the end of the opening if there are none."""
    openings = {}  # task -> pieces of its opening
    counts = Counter()
    for task, of_task in runs.items():
        first = next(iter(of_task.values()))
        messages = first["messages"][:first["opening"]]
        text = "\n".join(message["content"] for message in messages)
        pieces = [piece.strip() for piece in re.split(r" \[SEP\] | \| |\n", text)]
        openings[task] = [piece for piece in dict.fromkeys(pieces) if piece]
        counts.update(openings[task])
    texts = {}
    for task, pieces in openings.items():
        own = [piece for piece in pieces if len(runs) <= 2 or counts[piece] <= len(runs) / 2]
        texts[task] = " ".join(own)[:400] or " ".join(pieces)[-400:]
    return texts


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh page",
                                     description="Writes the page RUN/run.html of a finished or "
                                     "unfinished run.")
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES,
                        help="maximum size of the conversations; those of the least interesting "
                        "tasks are left out [%(default)s]")
    args = parser.parse_args(argv)
    print(make_page(args.run, args.megabytes))


if __name__ == "__main__":
    command("page", main)
