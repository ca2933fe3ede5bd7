"""A run as a page: `python -m look.page RUN` (run.sh page) writes RUN/run.html.

One file without anything from elsewhere: page.css and page.js stand in it, and a policy that lets
the browser load nothing. What a run's files say is text in it, never markup.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.files import ROOT, RunError, command, read_object, write_text
from harness.report import columns, events, headline, reading, result, sections
from look import charts
from look.conversations import conversations

MEGABYTES = 4.5  # of text in a page, if not said otherwise
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--headless --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --hide-scrollbars").split()


def write_page(run_dir, megabytes: float = MEGABYTES) -> Path:
    """Writes RUN/run.html, also of a run that is going on; RunError if it is not a run."""
    path = Path(run_dir) / "run.html"
    write_text(path, page(run_dir, megabytes))
    return path


def make_page(run_dir, megabytes: float = MEGABYTES) -> str:
    """`write_page`, and a line that says so."""
    path = write_page(run_dir, megabytes)
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser"


def page(run_dir, megabytes: float = MEGABYTES) -> str:
    config = Path(run_dir) / "config.json"
    with reading(Path(run_dir) / "metrics.jsonl"):
        found, log = result(run_dir, growing=True), events(run_dir, growing=True)
        tables = [(title, columns(header), rows)
                  for title, header, rows in sections(run_dir, growing=True)]
        made, made_legend = charts.pair_bars(found["pairs"])
        times, times_legend = charts.time_bars(log["phase"])
        shown = dict(
            heading=headline(found["settings"]), figures=figures(found["evaluations"]),
            curves=charts.evaluation_curves(found["evaluations"]),
            mixes=charts.exploration_bars(found["exploration"]), made=made,
            made_legend=made_legend, tables=tables, times=times, times_legend=times_legend,
            training=charts.training_curves(log["train"], log["grpo"]), status=status(run_dir, log))
    data = conversations(run_dir, letters=1e6 * megabytes)
    lacking = sum(any(row[-1] is None for row in task["runs"]) for task in data["tasks"])
    settings = {**found["settings"], **read_object(config).get("versions", {})}
    settings["commit"] = read_object(config).get("commit")
    return render(
        "page.html.j2", data, title=f"{Path(run_dir).name}: {shown['heading']}",
        name=Path(run_dir).name, has_tasks=bool(data["tasks"]), settings=list(settings.items()),
        left_out=f"The page has no room for the conversations of {lacking} of {len(data['tasks'])} "
                 "tasks, the least telling ones; page --megabytes makes more." * bool(lacking),
        **shown)


def figures(evaluations: list[dict]) -> list[dict]:
    """For each split the target's last evaluation, and where it came from."""
    found = {}
    for e in evaluations:
        if e["agent"] == "target":
            found.setdefault(e["split"], []).append(e)
    return [dict(split=f"target, {split}", reward=f"{es[-1]['reward']:.3f}",
                 interval=f"[{es[-1]['reward_low']:.3f}, {es[-1]['reward_high']:.3f}]",
                 success=f"{es[-1]['success']:.1%}", first=len(es) > 1 and
                 f"at the start {es[0]['reward']:.3f}, success {es[0]['success']:.1%}")
            for split, es in found.items()]


def status(run_dir, log: dict) -> str:
    """Whether the run has ended, or how far it is."""
    if (Path(run_dir) / "result.json").exists():
        return "finished"
    done = [e["phase"] for e in log["phase"]]
    running = [e for e in log["train"] if e["phase"] not in done]
    return (f"not finished: {len(done)} phase{'s' * (len(done) != 1)} so far"
            + (f", the last {done[-1]}" if done else "")
            + (f"; in {running[-1]['phase']} at step {running[-1]['step']}" if running else ""))


# -------------------------------------------------------------------------------- the file


def render(template: str, data: dict, **shown) -> str:
    """The page that a template makes, in ASCII: style, script and data stand in it."""
    env = Environment(loader=FileSystemLoader([ROOT / "look", ROOT / "study"]), autoescape=True,
                      undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["id"] = lambda text: re.sub(r"\W+", "-", text.lower()).strip("-")
    style, script = ((ROOT / "look" / name).read_text(encoding="utf-8")
                     for name in ("page.css", "page.js"))
    policy = "; ".join(["default-src 'none'", f"style-src {_allowed(style)}",
                        f"script-src {_allowed(script)}", "img-src data:", "base-uri 'none'",
                        "form-action 'none'"])
    html = env.get_template(template).render(
        policy=policy, style=Markup(style), script=Markup(script), data=embedded(data), **shown)
    return html.encode("ascii", "xmlcharrefreplace").decode()


def embedded(data) -> Markup:
    """JSON that stands in a <script> and cannot end it, in ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text))


def _allowed(source: str) -> str:
    """How a policy allows exactly this style or script."""
    digest = hashlib.sha256(source.encode("ascii")).digest()  # ASCII: nothing is replaced in it
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def picture(path: Path, image: Path, size: str) -> None:
    """A PNG of a page's tasks, at 3/4 of its size; RunError without a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        raise RunError(f"--picture {image}: there is no Chromium here; on Debian or Ubuntu: "
                       "apt-get install chromium")
    with tempfile.TemporaryDirectory() as home:
        copy = Path(home, "picture.html")
        copy.write_text(path.read_text().replace("<body>", '<body class="picture">', 1))
        root = ["--no-sandbox"] * (os.geteuid() == 0)  # for whom it refuses to start otherwise
        done = subprocess.run(
            [browser, *QUIET, *root, f"--user-data-dir={home}/profile", f"--window-size={size}",
             "--force-device-scale-factor=0.75", f"--screenshot={image.resolve()}", copy.as_uri()],
            capture_output=True, text=True, timeout=120)
    if done.returncode or not image.exists():
        raise RunError(f"--picture {image}: {browser} ended with status {done.returncode}: "
                       f"{done.stderr.strip().splitlines()[-1:]}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh page", description=write_page.__doc__)
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES,
                        help="of conversations; those of the least telling tasks are left out "
                        "[%(default)s]")
    parser.add_argument("--picture", type=Path, help="also a PNG of it, made by Chromium")
    parser.add_argument("--size", default="1440,1240", help="of the window [%(default)s]")
    asked = parser.parse_args(argv)
    print(make_page(asked.run, asked.megabytes))
    if asked.picture:
        picture(Path(asked.run) / "run.html", asked.picture, asked.size)


if __name__ == "__main__":
    command("page", main)
