"""Runs any method in any environment: `bash run.sh ENV` starts `python -m lab --env ENV`.

Methods of coevolve.py give the same results as with `python coevolve.py`. This program supports
more methods and models, and writes an HTML page about the run at its end.
"""

import sys
from pathlib import Path

from common.files import run_of
from common.settings import Parser, flag
from engine import command, models
from engine.run import Run
from lab import smollm2
from lab.chat.evaluate import is_endpoint
from lab.page import page, report
from lab.runfiles import way_of
from lab.settings import METHODS, Settings


def main(argv: list[str]) -> None:
    first = Parser(add_help=False, allow_abbrev=False)
    for name in ("env", "method", "model"):
        first.add_argument(flag(name), default=getattr(Settings, name))
    args, _ = first.parse_known_args(argv)
    models.MODELS["smollm2"] = smollm2.base
    # Every run loads a tokenizer. A run with an endpoint loads tiny's tokenizer, but never uses it.
    if is_endpoint(args.model):
        models.MODELS[args.model] = models.MODELS["tiny"]
    trained_in = run_of(Path(args.model).expanduser()) if args.method == "evaluate" else None
    flags = way_of(trained_in, args.env) if trained_in else []
    if flags and command.rank() == 0:
        print(f"{args.model} plays with the settings of its training, unless you set them: "
              f"{' '.join(flags)}")
    command.run_program([*flags, *argv], Settings, Run, METHODS, "bash run.sh ENV", finish)


def finish(run: Run) -> str:
    """Writes result.json and the HTML page of a finished run. Returns a line to print, with the
    path of the page."""
    report.close(run.folder)
    return page.make_page(run.folder)


if __name__ == "__main__":
    main(sys.argv[1:])
