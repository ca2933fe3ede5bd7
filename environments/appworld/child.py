"""Runs where the package appworld is, alone: `python child.py ROOT SECONDS MEGABYTES LONGEST`, its
input a socket; see `processes.py`. It imports nothing of this project but `jail.py`.

It has the apps imported. Each episode and each judgement is a fork of it, shut in (`jail.py`), with
which one speaks in lines of JSON. A player has its task without the ground truth; a judge has the
ground truth, and runs no code of a model.
"""

import gc
import json
import os
import signal
import socket
import sys
import sysconfig
import warnings
from collections import Counter
from datetime import datetime
from functools import cache
from pathlib import Path

ROOT = sys.argv[1]
SECONDS, MEGABYTES, LONGEST = map(int, sys.argv[2:])
os.environ["APPWORLD_ROOT"] = ROOT  # the package reads it when it is imported
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import jail  # noqa: E402

MOST_CALLS = 50  # of a reply that are told [ours]


# ------------------------------------------------------------------------------- inside an episode


def play(task: str, text: str | None, lines, send) -> None:
    """An episode: says what is asked, runs code after code, and hands over what has changed."""
    from appworld import AppWorld
    env = AppWorld(task, "episode", load_ground_truth=False, timeout_seconds=SECONDS,
                     max_interactions=1000)
    if text is not None:  # of a task made in training, on another's start state
        active = env.models.supervisor.Task.all()[0]
        active.instruction = text
        active.save()
    calls = noted(env.requester)
    owner = env.task.supervisor
    known = ("first_name", "last_name", "email", "phone_number")
    send(text=text or env.task.instruction, owner={name: owner[name] for name in known})
    for line in lines:
        asked = json.loads(line)
        if "code" in asked:
            calls.clear()
            output = env.execute(asked["code"])[:LONGEST]
            send(output=output, done=env.task_completed(), calls=calls[:MOST_CALLS])
        else:
            saved = Path(env.output_db_home_path_on_disk)
            send(changes={file.name: file.read_text() for file in saved.iterdir()})


def noted(requester) -> list:
    """A list to which each call from now on is added: APP.API, arguments."""
    calls = []
    request = requester._request

    def note(_app_name: str, _api_name: str, client=None, raise_on_failure=None, track=True,
             **given):
        if track:  # the package asks, too
            told = json.loads(json.dumps(given, default=str))
            calls.append([f"{_app_name}.{_api_name}", told])
        return request(_app_name, _api_name, client, raise_on_failure, track, **given)

    requester._request = note
    return calls


# ------------------------------------------------------------------------------- inside a judgement


def judge(task: str, changes: dict) -> dict:
    """How many of the task's own tests pass on what an episode has changed."""
    from appworld.evaluator import evaluate_task
    place(task, "episode", changes)
    found = evaluate_task(task, "episode", save_report=False)
    return dict(passed=found.pass_count, tests=found.num_tests)


def compare(task: str, changes: list[dict]) -> dict:
    """Whether two episodes on a task leave the same records in the apps, and the same answer."""
    from appworld.apps import get_all_apps
    from appworld.common.utils import do_answers_match
    one, other = changes
    apps = [app for app in get_all_apps() if one.get(f"{app}.jsonl") != other.get(f"{app}.jsonl")]
    records, answer = end_of(task, "end0", one, apps)
    other_records, other_answer = end_of(task, "end1", other, apps)
    return dict(apps=records == other_records, answer=do_answers_match(answer, other_answer))


def end_of(task: str, name: str, changes: dict, apps: list[str]) -> tuple[dict, object]:
    """How often each record stands in the tables of some apps, and the answer, where an episode
    ends. The package's own comparison goes by counts of changes and by hashes that the episode has
    saved: other changes, as many, would be the same."""
    from appworld.apps import get_all_apps
    from appworld.collections.models import ModelCollection
    models = ModelCollection.load(f":memory:{name}", place(task, name, changes), get_all_apps())
    found = {}
    for app in apps:
        for table, model in models[app].SQLModel.name_to_model().items():
            columns = {column.name for column in model.__table__.columns} - {"id", "record_hash"}
            asked = ", ".join(f'"{column}"' for column in sorted(columns))
            rows = model.db.connection.execute(f'SELECT {asked} FROM "{model.__tablename__}"')
            found[f"{app}.{table}"] = Counter(rows)
    found.pop("supervisor.Task", None)  # its answer is compared by itself
    return found, json.loads(models.supervisor.Task.first().answer)


def place(task: str, name: str, changes: dict) -> str:
    """Writes an episode's changes where the package looks for them."""
    folder = Path(ROOT, "experiments/outputs", name, "tasks", task, "dbs")
    folder.mkdir(parents=True)
    for file, text in changes.items():
        (folder / Path(file).name).write_text(text)
    return str(folder)


# ---------------------------------------------------------------------------------------- around it


def warm() -> None:
    """Imports what a fork would import, and fills the package's caches, which forks share."""
    import pytest  # noqa: F401  the tests of tasks compare by it
    from appworld import AppWorld, evaluator, requester  # noqa: F401
    from appworld.apps import api_lib, get_all_apps
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.common.utils import get_name_to_apis, import_models_module
    for app in get_all_apps():
        import_models_module(app)
        get_name_to_apis(app, ignore_private_apis=True)
        requester._get_api_name_to_doc(app, include_private_apis=True)
    requester.build_main_app = cache(requester.build_main_app)
    requester.build_main_app(tuple(sorted(get_all_apps())))
    ApiDocCollection.load(load_apps=tuple(get_all_apps(skip_admin=True)),
                          include_response_schemas=True)
    frozen = api_lib.set_local_date_and_time(datetime(2024, 1, 1))  # it looks at all modules
    api_lib.unset_local_date_and_time(frozen)
    gc.freeze()  # else the first collection of each fork copies all of it


def shown(task: str | None, truth: bool) -> list[str]:
    """What a fork sees: what Python imports from, and of the data what it may know."""
    paths = sysconfig.get_paths()
    libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if task is None:
        return sorted(libraries)
    data = f"{ROOT}/data"
    of_task = f"{data}/tasks/{task}"
    known = [of_task] if truth else [f"{of_task}/specs.json", f"{of_task}/dbs"]
    return [*sorted(libraries), f"{data}/base_dbs", f"{data}/api_docs", *known]


def work(line: int, report: int, do: str, task: str | None) -> None:
    """What a fork does: it keeps two files to the one who asks, is shut in, works."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    jail.die_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for file, place in ((line, 100), (report, 101), (nothing, 0), (100, 3), (101, 4)):
        os.dup2(file, place)  # 1 and 2 hold nothing
    os.closerange(5, 1 << 16)
    lines = socket.socket(fileno=3).makefile("rw")
    given = json.loads(lines.readline())  # who still writes it would not read what goes wrong

    def send(**told) -> None:
        lines.write(json.dumps(told) + "\n")
        lines.flush()

    try:
        jail.enter(shown(task, truth=do != "play"), [f"{ROOT}/experiments", "/tmp"], MEGABYTES, 4)
        os.environ.clear()
        os.environ["APPWORLD_ROOT"] = ROOT
        if do == "play":
            play(task, given["text"], lines, send)
        if do == "judge":
            send(**judge(task, **given))
        if do == "compare":
            send(**compare(task, **given))
        if do == "check":
            send(ready=True)
    except BaseException as error:
        send(error=f"{type(error).__name__}: {error}"[:500])


def serve() -> None:
    """Forks for each thing to do, which comes with two files of the fork's. What is asked here is
    short, since a longer message than is received would be cut; on a fork's own line comes what may
    be long."""
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for a fork
    asks = socket.socket(fileno=0)
    while True:
        asked, files, _, _ = socket.recv_fds(asks, 1 << 16, 2)
        if not asked:  # the one who asks has gone
            os._exit(0)
        process = os.fork()
        if not process:
            try:
                work(*files, **json.loads(asked))
            finally:
                os._exit(0)
        files.append(os.pidfd_open(process))
        socket.send_fds(asks, [b"begun"], files[2:])
        for file in files:
            os.close(file)


if __name__ == "__main__":
    serve()
