"""A run as a page: `python -m lab.page RUN` (run.sh page) writes RUN/run.html and its curves.

page.css and page.js stand in it, and a policy that lets the browser load nothing. What a run's
files say is text in it, never markup.
"""

import argparse
import base64
import hashlib
import json
import zlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lab import figures
from lab.conversations import conversations
from lab.report import columns, headline, sections
from lab.runfiles import command, config_of, phases_of

FILES = Path(__file__).parent / "page_files"
MEGABYTES = 4.5  # of conversations in a page, if not said otherwise


def make_page(run: Path, megabytes: float = MEGABYTES, tasks=()) -> str:
    """Writes RUN/run.html, curves.svg and curves.png, also of a run that is going on; says so."""
    path = run / "run.html"
    part = path.with_name("run.html.tmp")
    part.write_text(page(run, megabytes, tasks))
    part.replace(path)
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run: Path, megabytes: float = MEGABYTES, tasks=()) -> str:
    s, curves = config_of(run)["settings"], figures.run_figure(run)
    data = conversations(run, megabytes, first=tasks)
    lacking = sum(not all(one["messages"] for one in task["runs"]) for task in data["tasks"])
    return render(
        "page.html.j2", data, title=f"{run.name}: {headline(s)}", heading=headline(s),
        name=run.name, status=status(run), curves=curves and figures.svg(curves, run / "curves"),
        has_tasks=bool(data["tasks"]), settings=list(s.items()),
        tables=[(title, columns(header), rows) for title, header, rows in sections(run)],
        training=[(phase, figures.svg(made)) for phase, made in figures.training_figures(run)],
        left_out=f"The page has no room for the conversations of {lacking} of {len(data['tasks'])} "
                 "tasks, the least telling ones; page --megabytes makes more." * bool(lacking))


def status(run: Path) -> str:
    """Whether the run has ended, or how far it is."""
    phases = phases_of(run)
    if (run / "result.json").exists():
        return "finished"
    running = [f"in {name} at step {steps[-1]['step']}"
               for name, steps in figures.steps_of(run).items() if name not in phases]
    return "; ".join([f"{len(phases)} phase{'s' * (len(phases) != 1)} so far"
                      + f", the last {[*phases][-1]}" * bool(phases), *running])


def render(template: str, data: dict, **shown) -> str:
    """The page that a template makes, in ASCII: style, script and data stand in it."""
    env = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)
    style, script = ((FILES / name).read_text(encoding="utf-8")
                     for name in ("page.css", "page.js"))
    policy = "; ".join(["default-src 'none'", f"style-src {allowed(style)}",
                        f"script-src {allowed(script)}", "img-src data:", "base-uri 'none'",
                        "form-action 'none'"])
    html = env.get_template(template).render(
        policy=policy, style=Markup(style), script=Markup(script), data=packed(data), **shown)
    return html.encode("ascii", "xmlcharrefreplace").decode()


def packed(data) -> str:
    """JSON, deflated and in base64: a page of conversations takes a fifth of its text."""
    return base64.b64encode(zlib.compress(json.dumps(data, allow_nan=False).encode())).decode()


def allowed(source: str) -> str:
    """How a policy allows exactly this style or script."""
    digest = hashlib.sha256(source.encode("ascii")).digest()  # ASCII: nothing is replaced in it
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh page", description=make_page.__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--tasks", nargs="+", default=(), metavar="ID",
                        help="tasks that come first, whatever room their conversations take")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES,
                        help="of conversations; those of the least telling tasks are left out "
                        "[%(default)s]")
    asked = parser.parse_args(argv)
    print(make_page(asked.run, asked.megabytes, asked.tasks))


if __name__ == "__main__":
    command("page", main)
