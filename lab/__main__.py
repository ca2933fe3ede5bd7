"""`python -m lab --env webshop ...`: any method, as `bash run.sh ENV` starts it. The run is that of
`python coevolve.py`; beside it are more methods and models, and a page in the end.
"""

import sys
from contextlib import suppress
from pathlib import Path

from common.files import read_json
from common.settings import Parser, flag, settings_of
from engine import command, models
from engine.run import Run
from lab.chat.evaluate import is_endpoint
from lab.page import page, report
from lab.pretrain import smollm2
from lab.settings import METHODS, Settings
from worlds import environment

# How an agent was trained to play, beside its environment's own settings.
PLAYED_WITH = ("view", "max_tokens", "max_new_tokens")


def main(argv: list[str]) -> None:
    first = Parser(add_help=False, allow_abbrev=False)
    for name in ("env", "method", "model"):
        first.add_argument(flag(name), default=getattr(Settings, name))
    asked, _ = first.parse_known_args(argv)
    models.MODELS["smollm2"] = smollm2.base
    if is_endpoint(asked.model):  # in no folder; its run has this tokenizer, and no use for it
        models.MODELS[asked.model] = models.MODELS["tiny"]
    flags = []
    if asked.method == "evaluate":
        flags = way_of(Path(asked.model), asked.env)
    if flags and command.rank() == 0:
        print(f"{asked.model} plays as it was trained, unless told otherwise: {' '.join(flags)}")
    run = command.main([*flags, *argv], Settings, Run, METHODS, "bash run.sh ENV")
    if run.main:
        report.close(run.folder)
        with suppress(KeyboardInterrupt):
            print(page.make_page(run.folder))


def way_of(agent: Path, env: str) -> list[str]:
    """The flags with which an agent plays as in the run that it lies in; none if it lies in none,
    or in another environment's. Files and addresses, which are somewhere else for somebody else,
    are left out."""
    for folder in agent.resolve().parents[:2]:
        if not (folder / "phases.json").exists():
            continue
        settings = read_json(folder / "config.json")["settings"]
        if settings["env"] != env:
            return []
        own = settings_of(environment(env))
        names = [*PLAYED_WITH, *(name for name in own if own[name].default is not None)]
        return [f"{flag(name)}={settings[name]}" for name in names if name in settings]
    return []


if __name__ == "__main__":
    main(sys.argv[1:])
