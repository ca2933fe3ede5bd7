"""The page of a run: `bash run.sh page RUN` writes RUN/run.html.

The page is a single file with page.css and page.js inside. Its content security policy forbids the
browser to load or run anything else. All content from a run's files is escaped, so that it is shown
as text and never interpreted as HTML.
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

# jinja2 is not listed in requirements.txt, because it is a dependency of torch.
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from engine.console import counted, headline
from environments import first_reply
from lab.page import figures, report
from lab.runfiles import (
    SOLVED,
    command,
    config_of,
    is_finished,
    phases_of,
    phases_with,
    rows_in,
    target_of,
)

FILES = Path(__file__).parent / "files"
MEGABYTES = 4.5  # default maximum size of the compressed conversations in a page, in MB
# Keys of a trajectory that the page includes
KEPT = ("agent", "iteration", "rollout", "reward", "raw_reward", "turns", "ended", "messages")
# A row with all keys in EPISODE is a trajectory, and a row with all keys in PAIR is a pair.
EPISODE = {"task", *KEPT} - {"raw_reward"}
PAIR = {"task", "kind", "chosen", "rejected"}


def make_page(run: Path, megabytes: float = MEGABYTES) -> str:
    """Writes RUN/run.html. Returns a line to print, with the path and size of the file."""
    path = run / "run.html"
    path.write_text(page(run, megabytes), encoding="ascii")
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run: Path, megabytes: float = MEGABYTES) -> str:
    """Returns the page as ASCII-only HTML, with up to about `megabytes` MB of compressed
    conversations."""
    s = config_of(run)["settings"]
    curves = figures.run_figure(run)
    data = conversations(run, megabytes)
    style = (FILES / "page.css").read_text(encoding="ascii")
    script = (FILES / "page.js").read_text(encoding="ascii")
    policy = ["default-src 'none'", f"style-src {hash_source(style)}",
              f"script-src {hash_source(script)}",
              "img-src data:", "base-uri 'none'", "form-action 'none'"]
    # Conversations shrink to about a fifth of their size, with zlib compression and base64.
    deflated = zlib.compress(json.dumps(data, allow_nan=False).encode())
    env = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)
    html = env.get_template("page.html.j2").render(
        heading=headline(s), name=run.name, status=status_of(run), policy="; ".join(policy),
        style=Markup(style), script=Markup(script), data=base64.b64encode(deflated).decode(),
        curves=curves and figures.address(curves), settings=list(s.items()),
        lacking=sum(task["runs"][0]["messages"] is None for task in data["tasks"]),
        count=len(data["tasks"]), hard=data["hard"], tables=report.tables(run),
        training=[(phase, figures.address(drawing))
                  for phase, drawing in figures.training_figures(run)])
    return html.encode("ascii", "xmlcharrefreplace").decode()


def status_of(run: Path) -> str:
    """Returns "finished", or the number of finished phases of a run, and the name of the last."""
    if is_finished(run):
        return "finished"
    phases = [*phases_of(run)]
    last = f", the last {phases[-1]}" if phases else ""
    return f"{counted(len(phases), 'phases')} so far{last}"


def hash_source(source: str) -> str:
    """Returns the entry of the content security policy that allows this style or script."""
    digest = hashlib.sha256(source.encode("ascii")).digest()  # the page contains the same bytes
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# ------------------------------------------------------------- the data of the task browser


def conversations(run: Path, megabytes: float) -> dict:
    """Returns the data of the page's task browser: a list of tasks with their trajectories and
    preference pairs, the most interesting tasks first. Beyond a compressed size of `megabytes` MB,
    trajectories contain no messages."""
    s = config_of(run)["settings"]
    phases = phases_of(run)
    runs = defaultdict(dict)  # task -> (agent, iteration, rollout) -> trajectory
    for file, row in episodes_of(run, phases):
        kept = {name: row[name] for name in KEPT if name in row}
        kept["from"] = file.removesuffix(".jsonl")
        kept["opening"] = first_reply(row["messages"], row["turns"])
        runs[row["task"]].setdefault(name_of(row), kept)
    pairs = defaultdict(list)  # task -> preference pairs, with indices into its trajectories
    trainings = margins_of(run, phases)
    for recorded in phases_with(phases, "pairs"):
        for row in pairs_in(run, recorded, trainings):
            names = [*runs.get(row["task"], {})]
            sides = name_of(row["chosen"]), name_of(row["rejected"])
            if {*sides} <= {*names}:  # a trajectory file that is being recomputed may lack a side
                chosen, rejected = map(names.index, sides)
                pairs[row["task"]].append(row | dict(chosen=chosen, rejected=rejected))

    texts = instructions(runs)
    tasks = []
    room = 5e6 * megabytes  # in bytes before compression, which shrinks the data to about a fifth
    target = target_of(phases)
    for task in sorted(runs, key=lambda task: interest(runs[task].values(), target)):
        shown = list(runs[task].values())
        size = len(json.dumps(shown))
        if room <= 0:
            shown = [trajectory | dict(messages=None) for trajectory in shown]
        room -= size
        tasks.append(dict(id=task, say=texts[task], runs=shown, pairs=pairs[task]))
    return dict(tasks=tasks, target=target, success=SOLVED, hard=s["hard_threshold"],
                cut_turns=s.get("cut_turns", -1))


def episodes_of(run: Path, phases: dict) -> Iterator[tuple[str, dict]]:
    """Yields (file, trajectory) for each trajectory of the finished phases, phase by phase."""
    for output in phases:
        # GRPO writes its episodes into the agent's folder.
        file = output if output.endswith(".jsonl") else f"{output}/episodes.jsonl"
        for row in rows_in(run / file):
            if EPISODE <= row.keys():
                yield file, row


def name_of(row: dict) -> tuple:
    """Returns the key by which a pair refers to a trajectory of its task."""
    return row["agent"], row["iteration"], row["rollout"]


def margins_of(run: Path, phases: dict) -> list[tuple[str, dict]]:
    """Returns (agent, rows of margins.jsonl by pair) for each training phase."""
    trainings = []
    for phase in phases_with(phases, "name", "steps"):
        logged = rows_in(run / phase["output"] / "margins.jsonl")
        trainings.append((phase["name"], {name_of_pair(row): row for row in logged}))
    return trainings


def pairs_in(run: Path, recorded: dict, trainings: list[tuple[str, dict]]) -> Iterator[dict]:
    """Yields the rows of the pairs file of a phase with the record `recorded`.

    In a row, `trains` is the agent that was trained on the pair, or "". `first` and `last` are the
    log-probabilities and the margin in the first and the last training step that used the pair, if
    a step has used it.
    """
    rows = {}
    for row in rows_in(run / recorded["output"]):
        if PAIR <= row.keys():
            rows[name_of_pair(row)] = row
    # Find the first training that used the most of these pairs. A modified copy of the loop may
    # have filtered them, or trained on other pairs as well.
    agent, margins = max(trainings, default=("", {}),
                         key=lambda training: len(training[1].keys() & rows.keys()))
    for name, row in rows.items():
        trains = agent if name in margins else ""
        yield row | margins.get(name, {}) | dict(trains=trains, iteration=recorded["i"])


def name_of_pair(row: dict) -> tuple:
    return row["task"], row["kind"], name_of(row["chosen"]), name_of(row["rejected"])


def interest(runs, target: str) -> tuple:
    """Returns the sort key of a task. Interesting tasks come first:

    1. Explored tasks come before tasks that were only evaluated.
    2. Tasks with a lower best reward of the target agent in the last iteration come first. Tasks
       that this agent has not played are sorted like solved tasks.
    3. Among tasks that are still tied, those whose best failure has a higher reward come first.
    """
    played = [r for r in runs if r["agent"] != "expert"]
    explored = [r for r in played if not r["from"].startswith("eval")]
    iteration = max((r["iteration"] for r in explored or played), default=0)
    last = [r for r in explored or played if r["iteration"] == iteration]
    of_target = [r["reward"] for r in last if r["agent"] == target]
    failures = [r["reward"] for r in last if r["reward"] < SOLVED]
    return not explored, max(of_target, default=1.0), -max(failures, default=0.0)


def instructions(runs: dict[str, dict]) -> dict[str, str]:
    """Returns a short text for each task: the parts of its opening messages that occur in at most
    half of the tasks, or the end of these messages if all parts are more common."""
    openings = {}  # task -> pieces of the task's opening messages
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
