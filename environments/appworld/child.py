"""The server process, which imports the package appworld and forks processes for episodes and
judgements.

    python child.py ROOT SECONDS MEGABYTES MAX_OUTPUT

The client, processes.py, starts the server with a socket as its standard input. The server runs in
the virtual environment of the package, so it imports only jail.py of this project.

The server imports all apps once, and then forks a process for each job. Each forked process
isolates itself (see jail.py) and exchanges lines of JSON with the client. The process of an episode
can read the task, but not the task's ground truth. The process of a judgement can read the ground
truth, but runs no code written by a model.
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
os.environ["APPWORLD_ROOT"] = ROOT  # the package reads this variable when it is imported
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import jail  # noqa: E402

MAX_CALLS = 50  # maximum number of API calls that are reported per reply [ours]


# ------------------------------------------------------------------------------- inside an episode


def play(task: str, text: str | None, lines, send) -> None:
    """Runs an episode in the start state of an AppWorld task, until there are no more requests.

    The function first sends the instruction and the person's name, email address and phone number.
    For a request {"code": ...}, it executes the code and sends the output. For {"save": true}, it
    sends all changes that the episode has made in the apps.

    Args:
        text: The instruction of a task that was created during training, or None for the AppWorld
            task's own instruction.
        lines: Iterator over the requests. Each request is a line of JSON.
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
    """Patches the package's `Requester`, so that each call appends ["APP.API", arguments] to the
    list that this function returns."""
    calls = []
    request = requester._request

    def recorded(_app_name: str, _api_name: str, client=None, raise_on_failure=None, track=True,
                 **arguments):
        if track:  # calls with track=False come from the package itself, not from the agent
            copied = json.loads(json.dumps(arguments, default=str))
            calls.append([f"{_app_name}.{_api_name}", copied])
        return request(_app_name, _api_name, client, raise_on_failure, track, **arguments)

    requester._request = recorded
    return calls


# ------------------------------------------------------------------------------- inside a judgement


def judge(task: str, changes: dict) -> dict:
    """Runs the tests of a task on the changes of an episode, and counts the tests that pass."""
    from appworld.evaluator import evaluate_task
    write_changes(task, "episode", changes)
    result = evaluate_task(task, "episode", save_report=False)
    return dict(passed=result.pass_count, tests=result.num_tests)


def compare(task: str, changes: list[dict]) -> dict:
    """Compares the final states of two episodes that began in the start state of a task.

    Args:
        changes: The changes of the first and of the second episode, each {file name: text}.

    Returns:
        A dict with `apps` (True if the apps contain the same records after both episodes) and
        `answer` (True if the two answers match).
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
    """Returns {table: Counter of its rows} for the given apps, and the answer.

    The package's own comparison skips a table with the same number of changes in both episodes, and
    otherwise compares hashes that the episodes saved. Different changes could thus look identical.
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
    records.pop("supervisor.Task", None)  # this table stores the answer
    return records, json.loads(models.supervisor.Task.first().answer)


def write_changes(task: str, name: str, changes: dict) -> str:
    """Writes the changes of an episode to the folder where the package reads them.

    Returns the path of this folder.
    """
    folder = Path(ROOT, "experiments/outputs", name, "tasks", task, "dbs")
    folder.mkdir(parents=True)
    for file, text in changes.items():
        (folder / Path(file).name).write_text(text)
    return str(folder)


# ---------------------------------------------------------------------------- the server, and forks


def warm() -> None:
    """Imports all modules and fills all caches that the forked processes share with the server."""
    import pytest  # noqa: F401  some tests of the tasks use pytest to compare numbers
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
    # Each episode freezes the clock. The first freeze inspects all imported modules.
    frozen = api_lib.set_local_date_and_time(datetime(2024, 1, 1))
    api_lib.unset_local_date_and_time(frozen)
    # Garbage collection in a forked process would write to all objects, and copy all shared memory.
    gc.freeze()


def visible_paths(task: str | None, truth: bool) -> list[str]:
    """Returns the paths that a forked process can read: Python's libraries and the task's data."""
    paths = sysconfig.get_paths()
    libraries = sorted({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    if task is None:
        return libraries
    data = f"{ROOT}/data"
    folder = f"{data}/tasks/{task}"
    of_task = [folder] if truth else [f"{folder}/specs.json", f"{folder}/dbs"]
    return [*libraries, f"{data}/base_dbs", f"{data}/api_docs", *of_task]


def run_fork(line: int, report: int, do: str, task: str | None) -> None:
    """Runs one job in a forked process.

    Args:
        line: File descriptor of the socket for requests and answers.
        report: File descriptor of the socket on which `jail.enter` reports the end of the process.
        do: The job: "play" (an episode), "judge", "compare" or "check".
        task: Id of the task, or None for "check".
    """
    # 1. Move `line` to file descriptor 3 and `report` to file descriptor 4. Redirect file
    # descriptors 0, 1 and 2 to /dev/null. Close all other file descriptors.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    jail.die_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for file, target in ((line, 100), (report, 101), (nothing, 0), (100, 3), (101, 4)):
        os.dup2(file, target)
    os.closerange(5, 1 << 16)
    lines = socket.socket(fileno=3).makefile("rw")
    # Read the whole request before anything can fail. The client cannot receive an error message
    # while it is still sending a long request.
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
    """Forks a process for each job that the client requests. Exits when the client exits.

    A request is one short packet that contains the job and passes two sockets. Long texts are sent
    over the first socket, because long packets are truncated.
    """
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forked processes that end
    client = socket.socket(fileno=0)
    while True:
        request, files, _, _ = socket.recv_fds(client, 1 << 16, 2)
        if not request:  # the client has closed its socket
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
