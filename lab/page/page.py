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
from collections import Counter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common.files import headline, read_jsonl
from lab.page import figures
from lab.page.report import columns, sections
from lab.runfiles import agents_of, command, config_of, phases_of, success_of
from worlds import first_reply

FILES = Path(__file__).parent / "files"
MEGABYTES = 4.5  # of conversations in a page, if not said otherwise
# Of a trajectory, what the page has: token ids stay behind.
KEPT = ("agent", "iteration", "rollout", "reward", "raw_reward", "steps", "ended", "messages")


def make_page(run: Path, megabytes: float = MEGABYTES) -> str:
    """Writes RUN/run.html, also of a run that is going on; says so."""
    path = run / "run.html"
    path.write_text(page(run, megabytes))
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run: Path, megabytes: float = MEGABYTES) -> str:
    s, phases, curves = config_of(run)["settings"], phases_of(run), figures.run_figure(run)
    data = conversations(run, megabytes)
    lacking = sum(not all(one["messages"] for one in task["runs"]) for task in data["tasks"])
    style, script = ((FILES / name).read_text(encoding="utf-8")
                     for name in ("page.css", "page.js"))
    # Deflated and in base64 a page of conversations takes a fifth of its text.
    deflated = zlib.compress(json.dumps(data, allow_nan=False).encode())
    env = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)
    html = env.get_template("page.html.j2").render(
        title=f"{run.name}: {headline(s)}", heading=headline(s), name=run.name,
        status=status_of(run, phases),
        policy="; ".join(["default-src 'none'", f"style-src {allowed(style)}",
                          f"script-src {allowed(script)}", "img-src data:", "base-uri 'none'",
                          "form-action 'none'"]),
        style=Markup(style), script=Markup(script), data=base64.b64encode(deflated).decode(),
        curves=curves and figures.address(curves), settings=list(s.items()),
        tables=[(title, columns(header), rows) for title, header, rows in sections(run)],
        training=[(phase, figures.address(made)) for phase, made in figures.training_figures(run)],
        left_out=f"The page has no room for the conversations of {lacking} of {len(data['tasks'])} "
                 "tasks, the least telling ones; page --megabytes makes more." * bool(lacking))
    return html.encode("ascii", "xmlcharrefreplace").decode()


def status_of(run: Path, phases: dict) -> str:
    """How far the run has come."""
    if (run / "result.json").exists():
        return "finished"
    said = f"{len(phases)} phases so far"
    if phases:
        said += f", the last {[*phases][-1]}"
    return said


def allowed(source: str) -> str:
    """How a policy allows exactly this style or script."""
    digest = hashlib.sha256(source.encode("ascii")).digest()  # ASCII: nothing is replaced in it
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# The tasks of a run with their trajectories and pairs, for the task browser.


def conversations(run: Path, megabytes: float) -> dict:
    """All that the task browser shows, the most telling tasks first. megabytes: about how much it
    may be once it is deflated, a fifth; later tasks come without conversations."""
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
    success = success_of(run)
    for task in sorted(found, key=lambda task: interest(found[task]["runs"].values(), success)):
        runs = [{**one, "messages": one["messages"] if room > 0 else None}
                for one in found[task]["runs"].values()]
        tasks.append(dict(id=task, split=task.removeprefix(f"{settings['env']}-").split("-")[0],
                          say=says[task], runs=runs, pairs=found[task]["pairs"]))
        room -= len(json.dumps(runs))
    return dict(tasks=tasks, success=success, agents=agents_of(phases),
                hard=settings["hard_threshold"], cut_turns=settings["cut_turns"])


def episodes_of(run: Path, phases: dict):
    """(name, trajectory) of the files of finished phases, in order."""
    names = [name for phase in phases for name in (phase, f"{phase}/episodes.jsonl")]  # GRPO's
    for name in names:
        if name.endswith(".jsonl") and (run / name).is_file():
            yield from ((name, row) for row in read_jsonl(run / name) if "messages" in row)


def add_pairs(found: dict, run: Path, name: str, recorded: dict) -> None:
    """Adds the rows of a file of pairs to their tasks. Chosen and rejected become numbers of the
    task's trajectories; before and after are rows of margins.jsonl, None where there is none."""
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


def interest(runs, success: float) -> tuple:
    """Sort key, most telling first: explored tasks by the target's best reward in the last
    iteration, of equal ones those with the hardest failure; then the evaluated ones."""
    explored = [r for r in runs if r["agent"] != "expert" and not r["from"].startswith("eval")]
    last = [r for r in explored if r["iteration"] == max(r["iteration"] for r in explored)]
    return (not explored,
            max((r["reward"] for r in last if r["agent"] == "target"), default=0.0),
            -max((r["reward"] for r in last if r["reward"] < success), default=0.0))


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


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh page", description=make_page.__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES,
                        help="of conversations; those of the least telling tasks are left out "
                        "[%(default)s]")
    asked = parser.parse_args(argv)
    print(make_page(asked.run, asked.megabytes))


if __name__ == "__main__":
    command("page", main)
