"""The server process that has the package appworld: `python child.py ROOT SECONDS MEGABYTES
MAX_OUTPUT`, with a socket as its standard input. See `processes.py` for the other side.

It runs under the interpreter of the package and imports nothing of this project but `jail.py`.

It imports all apps once. Each episode and each judgement is a fork of it that isolates itself
(`jail.py`) and exchanges lines of JSON with its client. The fork of an episode has its task without
the ground truth. The fork of a judgement has the ground truth, and runs no code of a model.
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
SECONDS, MEGABYTES, MAX_OUTPUT = map(int, sys.argv[2:])
os.environ["APPWORLD_ROOT"] = ROOT  # the package reads it when it is imported
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import jail  # noqa: E402

MAX_CALLS = 50  # calls of one reply that are reported [ours]


# ------------------------------------------------------------------------------- inside an episode


def play(task: str, text: str | None, lines, send) -> None:
    """Runs an episode.

    It sends the instruction and the person's data. Then it executes the code of each request, or
    sends what the episode has changed in the apps.

    Args:
        task: Id of the task whose start state is used.
        text: Instruction of a task made in training, or None for the task's own.
        lines: Requests, one line of JSON each: {"code": ...} or {"save": true}.
        send: Function that sends its keyword arguments as a line of JSON.
    """
    from appworld import AppWorld
    env = AppWorld(task, "episode", load_ground_truth=False, timeout_seconds=SECONDS,
                   max_interactions=1000)
    if text is not None:
        active = env.models.supervisor.Task.all()[0]
        active.instruction = text
        active.save()
    calls = record_calls(env.requester)
    owner = env.task.supervisor
    shown = ("first_name", "last_name", "email", "phone_number")
    send(text=text or env.task.instruction, owner={name: owner[name] for name in shown})
    for line in lines:
        request = json.loads(line)
        if "code" in request:
            calls.clear()
            output = env.execute(request["code"])[:MAX_OUTPUT]
            send(output=output, done=env.task_completed(), calls=calls[:MAX_CALLS])
        else:
            saved = Path(env.output_db_home_path_on_disk)
            send(changes={file.name: file.read_text() for file in saved.iterdir()})


def record_calls(requester) -> list:
    """Returns a list to which each later call of the requester is added as [APP.API, arguments]."""
    calls = []
    request = requester._request

    def recorded(_app_name: str, _api_name: str, client=None, raise_on_failure=None, track=True,
                 **arguments):
        if track:  # the package makes untracked calls of its own
            copied = json.loads(json.dumps(arguments, default=str))
            calls.append([f"{_app_name}.{_api_name}", copied])
        return request(_app_name, _api_name, client, raise_on_failure, track, **arguments)

    requester._request = recorded
    return calls


# ------------------------------------------------------------------------------- inside a judgement


def judge(task: str, changes: dict) -> dict:
    """Returns how many of the task's own tests pass on an episode's changes, and how many tests
    there are."""
    from appworld.evaluator import evaluate_task
    write_changes(task, "episode", changes)
    result = evaluate_task(task, "episode", save_report=False)
    return dict(passed=result.pass_count, tests=result.num_tests)


def compare(task: str, changes: list[dict]) -> dict:
    """Compares how two episodes of a task end.

    Args:
        task: Id of the task whose start state both episodes have.
        changes: The changes of the two episodes, file -> text.

    Returns:
        `apps`: True if the records in the apps are the same. `answer`: True if the answers match.
    """
    from appworld.apps import get_all_apps
    from appworld.common.utils import do_answers_match
    first, second = changes
    apps = [app for app in get_all_apps()
            if first.get(f"{app}.jsonl") != second.get(f"{app}.jsonl")]
    first_records, first_answer = final_state(task, "end0", first, apps)
    second_records, second_answer = final_state(task, "end1", second, apps)
    return dict(apps=first_records == second_records,
                answer=do_answers_match(first_answer, second_answer))


def final_state(task: str, name: str, changes: dict, apps: list[str]) -> tuple[dict, object]:
    """Returns the records in the given apps at the end of an episode, and the answer.

    The records are counted, table -> Counter of rows. The package's own comparison uses the number
    of changes and the hashes that the episode has saved, so it takes an equal number of different
    changes for the same.
    """
    from appworld.apps import get_all_apps
    from appworld.collections.models import ModelCollection
    folder = write_changes(task, name, changes)
    models = ModelCollection.load(f":memory:{name}", folder, get_all_apps())
    records = {}
    for app in apps:
        for table, model in models[app].SQLModel.name_to_model().items():
            columns = {column.name for column in model.__table__.columns} - {"id", "record_hash"}
            selected = ", ".join(f'"{column}"' for column in sorted(columns))
            rows = model.db.connection.execute(f'SELECT {selected} FROM "{model.__tablename__}"')
            records[f"{app}.{table}"] = Counter(rows)
    records.pop("supervisor.Task", None)  # the answer in it is compared separately
    return records, json.loads(models.supervisor.Task.first().answer)


def write_changes(task: str, name: str, changes: dict) -> str:
    """Writes the changes of an episode to the folder that the package reads, and returns it."""
    folder = Path(ROOT, "experiments/outputs", name, "tasks", task, "dbs")
    folder.mkdir(parents=True)
    for file, text in changes.items():
        (folder / Path(file).name).write_text(text)
    return str(folder)


# ---------------------------------------------------------------------------- the server, and forks


def warm() -> None:
    """Imports every module that a fork needs, and fills the package's caches, which forks share."""
    import pytest  # noqa: F401  the tasks' own tests compare numbers with it
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
    # The first freeze of the time inspects all modules and caches the result.
    frozen = api_lib.set_local_date_and_time(datetime(2024, 1, 1))
    api_lib.unset_local_date_and_time(frozen)
    gc.freeze()  # otherwise the first garbage collection of each fork copies all of the memory


def visible_paths(task: str | None, truth: bool) -> list[str]:
    """Returns the paths that a fork sees.

    These are Python's libraries and, if there is a task, the data that all tasks share and the
    task's own data, with its ground truth only if `truth` is True.
    """
    paths = sysconfig.get_paths()
    libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if task is None:
        return sorted(libraries)
    data = f"{ROOT}/data"
    folder = f"{data}/tasks/{task}"
    of_task = [folder] if truth else [f"{folder}/specs.json", f"{folder}/dbs"]
    return [*sorted(libraries), f"{data}/base_dbs", f"{data}/api_docs", *of_task]


def run_fork(line: int, report: int, do: str, task: str | None) -> None:
    """Runs in a fork: keeps two sockets to its client, isolates itself, and does its job.

    Args:
        line: File descriptor of the socket for requests and answers.
        report: File descriptor of the socket for `jail.enter`'s report of the end.
        do: The job: "play", "judge", "compare" or "check".
        task: Id of a task, or None for "check".
    """
    # 1. Keep line as file 3 and report as file 4, with nothing behind 0, 1 and 2.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    jail.die_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for file, target in ((line, 100), (report, 101), (nothing, 0), (100, 3), (101, 4)):
        os.dup2(file, target)
    os.closerange(5, 1 << 16)
    lines = socket.socket(fileno=3).makefile("rw")
    # Read the request before anything can fail: a client that is still writing a long request
    # would not read the error.
    request = json.loads(lines.readline())

    def send(**answer) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    try:
        # 2. Enter the jail.
        paths = visible_paths(task, truth=do != "play")
        jail.enter(paths, [f"{ROOT}/experiments", "/tmp"], MEGABYTES, 4)
        os.environ.clear()
        os.environ["APPWORLD_ROOT"] = ROOT
        # 3. Do the job.
        if do == "play":
            play(task, request["text"], lines, send)
        if do == "judge":
            send(**judge(task, **request))
        if do == "compare":
            send(**compare(task, **request))
        if do == "check":
            send(ready=True)
    except BaseException as error:
        send(error=f"{type(error).__name__}: {error}"[:500])


def serve() -> None:
    """Forks for each job that the client requests, until the client has ended.

    A request is one short packet, with the two sockets of the fork attached. Longer texts go over
    the fork's own socket, since a packet that is longer than the receiver's buffer would be cut.
    """
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    client = socket.socket(fileno=0)
    while True:
        request, files, _, _ = socket.recv_fds(client, 1 << 16, 2)
        if not request:  # the client has ended
            os._exit(0)
        process = os.fork()
        if not process:
            try:
                run_fork(*files, **json.loads(request))
            finally:
                os._exit(0)
        files.append(os.pidfd_open(process))
        socket.send_fds(client, [b"begun"], files[2:])
        for file in files:
            os.close(file)


if __name__ == "__main__":
    serve()
