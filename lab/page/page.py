"""A run as a page: `bash run.sh page RUN` writes RUN/run.html.

page.css and page.js stand in it, and a policy that lets the browser load nothing. What a run's
files say is text in it, never markup.
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

# In no line of requirements.txt: torch brings it, and chat templates need it.
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common.files import read_jsonl
from engine.console import counted, headline
from environments import first_reply
from lab.page import figures, report
from lab.runfiles import SOLVED, agents_of, command, config_of, pairs_in, phases_of

FILES = Path(__file__).parent / "files"
MEGABYTES = 4.5  # of conversations in a page, if not said otherwise
# Of a trajectory, what the page has: token ids stay behind.
KEPT = ("agent", "iteration", "rollout", "reward", "raw_reward", "turns", "ended", "messages")
EPISODE = {"task", *KEPT} - {"raw_reward"}  # what tells a trajectory from other rows


def make_page(run: Path, megabytes: float = MEGABYTES) -> str:
    """Writes RUN/run.html, also of a run that is going on; says so."""
    path = run / "run.html"
    path.write_text(page(run, megabytes), encoding="ascii")
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run: Path, megabytes: float = MEGABYTES) -> str:
    s = config_of(run)["settings"]
    curves = figures.run_figure(run)
    data = conversations(run, megabytes)
    lacking = sum(task["runs"][0]["messages"] is None for task in data["tasks"])
    style = (FILES / "page.css").read_text(encoding="ascii")
    script = (FILES / "page.js").read_text(encoding="ascii")
    policy = ["default-src 'none'", f"style-src {allowed(style)}", f"script-src {allowed(script)}",
              "img-src data:", "base-uri 'none'", "form-action 'none'"]
    # Deflated and in base64 a page of conversations takes a fifth of its text.
    deflated = zlib.compress(json.dumps(data, allow_nan=False).encode())
    env = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)
    html = env.get_template("page.html.j2").render(
        heading=headline(s), name=run.name, status=status_of(run), policy="; ".join(policy),
        style=Markup(style), script=Markup(script), data=base64.b64encode(deflated).decode(),
        curves=curves and figures.address(curves), settings=list(s.items()),
        lacking=lacking, count=len(data["tasks"]), tables=report.tables(run),
        training=[(phase, figures.address(made)) for phase, made in figures.training_figures(run)])
    return html.encode("ascii", "xmlcharrefreplace").decode()


def status_of(run: Path) -> str:
    """How far the run has come."""
    if (run / "result.json").exists():
        return "finished"
    phases = phases_of(run)
    last = f", the last {[*phases][-1]}" if phases else ""
    return f"{counted(len(phases), 'phases')} so far{last}"


def allowed(source: str) -> str:
    """How a policy allows exactly this style or script."""
    digest = hashlib.sha256(source.encode("ascii")).digest()  # ASCII: nothing is replaced in it
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# The tasks of a run with their trajectories and pairs, for the task browser.


def conversations(run: Path, megabytes: float) -> dict:
    """All that the task browser shows, the most telling tasks first. megabytes: about how much it
    may be once it is deflated, a fifth; later tasks come without conversations."""
    s = config_of(run)["settings"]
    phases = phases_of(run)
    runs = defaultdict(dict)  # task -> what pairs call a trajectory -> the trajectory
    for file, row in episodes_of(run, phases):
        kept = {name: row[name] for name in KEPT if name in row}
        kept["from"] = file.removesuffix(".jsonl")
        kept["opening"] = first_reply(row["messages"], row["turns"])
        runs[row["task"]].setdefault(name_of(row), kept)
    pairs = defaultdict(list)  # task -> its pairs
    for row in pairs_in(phases):
        if (run / row["output"]).is_file():
            add_pairs(pairs, runs, run, row)

    says = instructions(runs)
    tasks = []
    room = 5e6 * megabytes
    for task in sorted(runs, key=lambda task: interest(runs[task].values())):
        shown = list(runs[task].values())
        size = len(json.dumps(shown))
        if room <= 0:
            shown = [one | dict(messages=None) for one in shown]
        room -= size
        tasks.append(dict(id=task, split=split_of(task, s["env"]), say=says[task], runs=shown,
                          pairs=pairs[task]))
    return dict(tasks=tasks, success=SOLVED, agents=agents_of(phases), hard=s["hard_threshold"],
                cut_turns=s["cut_turns"])


def episodes_of(run: Path, phases: dict) -> Iterator[tuple[str, dict]]:
    """(file, trajectory) of the files of finished phases, in order."""
    for output in phases:
        file = output if output.endswith(".jsonl") else f"{output}/episodes.jsonl"  # GRPO's
        if (run / file).is_file():
            for row in read_jsonl(run / file):
                if EPISODE <= row.keys():
                    yield file, row


def name_of(row: dict) -> tuple:
    """What a file of pairs calls a trajectory of a task."""
    return row["agent"], row["iteration"], row["rollout"]


def add_pairs(pairs: dict[str, list], runs: dict[str, dict], run: Path, recorded: dict) -> None:
    """Adds the rows of a file of pairs to their tasks. Chosen and rejected become numbers of the
    task's trajectories; first and last are what training saw of a pair, None where it saw none."""
    folder = (run / recorded["output"]).parent
    seen = margins_in(folder / f"{recorded['trains']}-agent/margins.jsonl")
    for row in read_jsonl(run / recorded["output"]):
        places = [*runs.get(row["task"], {})]
        sides = {side: name_of(row[side]) for side in ("chosen", "rejected")}
        if not {*sides.values()} <= {*places}:
            continue  # a file of trajectories is being made again
        known = seen.get(name_of_pair(row), dict(first=None, last=None))
        row |= {side: places.index(name) for side, name in sides.items()}
        pairs[row["task"]].append(row | known | dict(trains=recorded["trains"],
                                                     iteration=recorded["i"]))


def margins_in(file: Path) -> dict[tuple, dict]:
    """Pair -> what training saw of it, by margins.jsonl."""
    rows = read_jsonl(file) if file.is_file() else []
    return {name_of_pair(row): dict(first=row["first"], last=row["last"]) for row in rows}


def name_of_pair(row: dict) -> tuple:
    return row["task"], row["kind"], name_of(row["chosen"]), name_of(row["rejected"])


def split_of(task: str, env: str) -> str:
    """The split in a task's id; trajectories of one's own have tasks of any name."""
    if task.startswith(f"{env}-"):
        return task.removeprefix(f"{env}-").split("-")[0]
    return "own"


def interest(runs) -> tuple:
    """Sort key, most telling first: explored tasks by the target's best reward in the last
    iteration, of equal ones those with the hardest failure; then the evaluated ones."""
    explored = [r for r in runs if r["agent"] != "expert" and not r["from"].startswith("eval")]
    if not explored:
        return True, 0.0, 0.0
    iteration = max(r["iteration"] for r in explored)
    last = [r for r in explored if r["iteration"] == iteration]
    of_target = [r["reward"] for r in last if r["agent"] == "target"]
    failures = [r["reward"] for r in last if r["reward"] < SOLVED]
    return False, max(of_target, default=0.0), -max(failures, default=0.0)


def instructions(runs: dict[str, dict]) -> dict[str, str]:
    """task -> what its opening says that most others do not."""
    openings = {}  # task -> pieces of its opening
    counts = Counter()
    for task, of_task in runs.items():
        one = next(iter(of_task.values()))
        text = "\n".join(turn["content"] for turn in one["messages"][:one["opening"]])
        pieces = [piece.strip() for piece in re.split(r" \[SEP\] | \| |\n", text)]
        openings[task] = [piece for piece in dict.fromkeys(pieces) if piece]
        counts.update(openings[task])
    says = {}
    for task, pieces in openings.items():
        own = [piece for piece in pieces if len(runs) <= 2 or counts[piece] <= len(runs) / 2]
        says[task] = " ".join(own)[:400] or " ".join(pieces)[-400:]
    return says


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh page",
                                     description="Writes RUN/run.html, also of a run that goes on.")
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES,
                        help="of conversations; those of the least telling tasks are left out "
                        "[%(default)s]")
    asked = parser.parse_args(argv)
    print(make_page(asked.run, asked.megabytes))


if __name__ == "__main__":
    command("page", main)
