"""A run as a page: `python -m lab.page RUN` (run.sh page) writes RUN/run.html.

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
from lab.report import columns, sections
from lab.runfiles import command, config_of, phases_of
from worlds.files import headline

FILES = Path(__file__).parent / "page_files"
MEGABYTES = 4.5  # of conversations in a page, if not said otherwise


def make_page(run: Path, megabytes: float = MEGABYTES) -> str:
    """Writes RUN/run.html, also of a run that is going on; says so."""
    path = run / "run.html"
    path.write_text(page(run, megabytes))
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run: Path, megabytes: float = MEGABYTES) -> str:
    """In ASCII; style, script and data stand in it."""
    s, phases, curves = config_of(run)["settings"], phases_of(run), figures.run_figure(run)
    data = conversations(run, megabytes)
    lacking = sum(not all(one["messages"] for one in task["runs"]) for task in data["tasks"])
    style, script = ((FILES / name).read_text(encoding="utf-8")
                     for name in ("page.css", "page.js"))
    env = Environment(loader=FileSystemLoader(FILES), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)
    html = env.get_template("page.html.j2").render(
        title=f"{run.name}: {headline(s)}", heading=headline(s), name=run.name,
        status="finished" if (run / "result.json").exists() else f"{len(phases)} phases so far"
               + f", the last {[*phases][-1]}" * bool(phases),
        policy="; ".join(["default-src 'none'", f"style-src {allowed(style)}",
                          f"script-src {allowed(script)}", "img-src data:", "base-uri 'none'",
                          "form-action 'none'"]),
        style=Markup(style), script=Markup(script), data=packed(data),
        curves=curves and figures.address(curves), settings=list(s.items()),
        tables=[(title, columns(header), rows) for title, header, rows in sections(run)],
        training=[(phase, figures.address(made)) for phase, made in figures.training_figures(run)],
        left_out=f"The page has no room for the conversations of {lacking} of {len(data['tasks'])} "
                 "tasks, the least telling ones; page --megabytes makes more." * bool(lacking))
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
    parser.add_argument("--megabytes", type=float, default=MEGABYTES,
                        help="of conversations; those of the least telling tasks are left out "
                        "[%(default)s]")
    asked = parser.parse_args(argv)
    print(make_page(asked.run, asked.megabytes))


if __name__ == "__main__":
    command("page", main)
