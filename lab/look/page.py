"""A run as a page: `python -m lab.look.page RUN` (run.sh page) writes RUN/run.html and its curves.

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

from lab.harness.files import ROOT, command, write_text
from lab.harness.report import columns, config_of, events, headline, sections
from lab.look import figures
from lab.look.conversations import conversations

MEGABYTES = 4.5  # of conversations in a page, if not said otherwise


def make_page(run_dir, megabytes: float = MEGABYTES, tasks=()) -> str:
    """Writes RUN/run.html, curves.svg and curves.png, also of a run that is going on; says so."""
    path = Path(run_dir) / "run.html"
    write_text(path, page(Path(run_dir), megabytes, tasks))
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run_dir: Path, megabytes: float = MEGABYTES, tasks=()) -> str:
    config, of = config_of(run_dir), events(run_dir, growing=True)
    s, curves = config["settings"], figures.run_figure(config["settings"], of)
    data = conversations(run_dir, megabytes, first=tasks)
    lacking = sum(not all(run["messages"] for run in task["runs"]) for task in data["tasks"])
    about = {**s, **config.get("versions", {}), "commit": config.get("commit")}
    return render(
        "page.html.j2", data, title=f"{run_dir.name}: {headline(s)}", heading=headline(s),
        name=run_dir.name, status=status(run_dir, of),
        curves=curves and figures.svg(curves, run_dir / "curves"),
        has_tasks=bool(data["tasks"]), settings=list(about.items()),
        tables=[(title, columns(header), rows) for title, header, rows in sections(s, of)],
        training=[(phase, figures.svg(made)) for phase, made in figures.training_figures(of)],
        left_out=f"The page has no room for the conversations of {lacking} of {len(data['tasks'])} "
                 "tasks, the least telling ones; page --megabytes makes more." * bool(lacking))


def status(run_dir: Path, log: dict) -> str:
    """Whether the run has ended, or how far it is."""
    if (run_dir / "result.json").exists():
        return "finished"
    done = [e["phase"] for e in log["phase"]]
    running = [e for e in log["train"] if e["phase"] not in done]
    return (f"not finished: {len(done)} phase{'s' * (len(done) != 1)} so far"
            + (f", the last {done[-1]}" if done else "")
            + (f"; in {running[-1]['phase']} at step {running[-1]['step']}" if running else ""))


def render(template: str, data: dict, **shown) -> str:
    """The page that a template makes, in ASCII: style, script and data stand in it."""
    env = Environment(loader=FileSystemLoader([ROOT / "lab/look", ROOT / "lab/study"]),
                      autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                      lstrip_blocks=True)
    style, script = ((ROOT / "lab/look" / name).read_text(encoding="utf-8")
                     for name in ("page.css", "page.js"))
    policy = "; ".join(["default-src 'none'", f"style-src {_allowed(style)}",
                        f"script-src {_allowed(script)}", "img-src data:", "base-uri 'none'",
                        "form-action 'none'"])
    html = env.get_template(template).render(
        policy=policy, style=Markup(style), script=Markup(script), data=packed(data), **shown)
    return html.encode("ascii", "xmlcharrefreplace").decode()


def packed(data) -> str:
    """JSON, deflated and in base64: a page of conversations takes a fifth of its text."""
    return base64.b64encode(zlib.compress(json.dumps(data, allow_nan=False).encode())).decode()


def _allowed(source: str) -> str:
    """How a policy allows exactly this style or script."""
    digest = hashlib.sha256(source.encode("ascii")).digest()  # ASCII: nothing is replaced in it
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh page", description=make_page.__doc__)
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--tasks", nargs="+", default=(), metavar="ID",
                        help="tasks that come first, whatever room their conversations take")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES,
                        help="of conversations; those of the least telling tasks are left out "
                        "[%(default)s]")
    asked = parser.parse_args(argv)
    print(make_page(asked.run, asked.megabytes, asked.tasks))


if __name__ == "__main__":
    command("page", main)
