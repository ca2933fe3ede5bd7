"""The server process, which imports the package appworld and runs episodes and judgements.

    python child.py ROOT SECONDS MEGABYTES MAX_OUTPUT

Its client is processes.py, which starts it with a socket as standard input. The server runs with
the Python interpreter that has the package installed, so it imports no module of this project
except jail.py.

The server imports all apps once. Then it forks a process for each episode and for each judgement.
The forked process isolates itself (see jail.py) and exchanges lines of JSON with the client. The
process of an episode can read the task, but not its ground truth. The process of a judgement can
read the ground truth, but runs no code written by a model.
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
os.environ["APPWORLD_ROOT"] = ROOT  # must be set before the package is imported
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import jail  # noqa: E402

MAX_CALLS = 50  # maximum number of API calls that are reported per reply (our choice)


# ------------------------------------------------------------------------------- inside an episode


def play(task: str, text: str | None, lines, send) -> None:
    """Runs an episode until there are no more requests.

    First it sends the instruction and the person's name, email address and phone number. Then it
    answers requests. A request with code executes the code and returns its output. A request to
    save returns all changes that the episode has made in the apps.

    Args:
        task: Id of an AppWorld task. The episode begins in its start state.
        text: Instruction that replaces the task's own instruction, for a task made in training.
            None keeps the task's own.
        lines: Iterator over requests. Each is a line of JSON, {"code": ...} or {"save": true}.
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
    """Records all later API calls of a requester of the package.

    Returns:
        A list, empty at first. Each later call appends ["APP.API", arguments] to it.
    """
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
    """Runs the task's own tests on the changes of an episode.

    Returns:
        A dict with `passed`, the number of tests that pass, and `tests`, the number of all tests.
    """
    from appworld.evaluator import evaluate_task
    write_changes(task, "episode", changes)
    result = evaluate_task(task, "episode", save_report=False)
    return dict(passed=result.pass_count, tests=result.num_tests)


def compare(task: str, changes: list[dict]) -> dict:
    """Compares the final states of two episodes.

    Args:
        task: Id of the task in whose start state both episodes began.
        changes: The changes of the two episodes. Each is a dict that maps file names to texts.

    Returns:
        A dict with `apps` (True if the apps hold the same records after both episodes) and `answer`
        (True if the two answers match).
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
    """Returns the records in the given apps and the answer, both at the end of an episode.

    The records are a dict that maps each table to a Counter of its rows. The package has a
    comparison of its own, but it only compares the number of changes and the hashes saved by the
    episode. Two episodes with the same number of different changes can therefore look the same.
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
    records.pop("supervisor.Task", None)  # this table holds the answer, which is returned below
    return records, json.loads(models.supervisor.Task.first().answer)


def write_changes(task: str, name: str, changes: dict) -> str:
    """Writes the changes of an episode to files in the folder where the package expects them.

    Returns the path of the folder.
    """
    folder = Path(ROOT, "experiments/outputs", name, "tasks", task, "dbs")
    folder.mkdir(parents=True)
    for file, text in changes.items():
        (folder / Path(file).name).write_text(text)
    return str(folder)


# ---------------------------------------------------------------------------- the server, and forks


def warm() -> None:
    """Imports all modules that a forked process needs, and fills the caches of the package.

    The forked processes share this memory with the server, so they start quickly.
    """
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
    # Set and unset the date once. The first time, this inspects all modules and caches the result.
    frozen = api_lib.set_local_date_and_time(datetime(2024, 1, 1))
    api_lib.unset_local_date_and_time(frozen)
    # Without this, the first garbage collection in a forked process would write to all objects, so
    # the kernel would copy all of the shared memory.
    gc.freeze()


def visible_paths(task: str | None, truth: bool) -> list[str]:
    """Returns the paths that a forked process can read.

    Every process can read Python's libraries. With a task, the process can also read the data that
    all tasks share and the data of this task.

    Args:
        task: Id of the task, or None.
        truth: True if the process can also read the task's ground truth.
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
    """Does one job in a forked process.

    The process keeps only two sockets to its client, isolates itself, and then does its job.

    Args:
        line: File descriptor of the socket for requests and answers.
        report: File descriptor of the socket on which `jail.enter` reports the end of the process.
        do: The job: "play" (an episode), "judge", "compare" or "check".
        task: Id of the task, or None for "check".
    """
    # 1. Move `line` to file descriptor 3 and `report` to 4. Connect 0, 1 and 2 to /dev/null.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    jail.die_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for file, target in ((line, 100), (report, 101), (nothing, 0), (100, 3), (101, 4)):
        os.dup2(file, target)
    os.closerange(5, 1 << 16)
    lines = socket.socket(fileno=3).makefile("rw")
    # Read the whole request before anything can fail, because the client cannot receive an error
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
    """Forks a process for each job that the client requests. Exits when the client has exited.

    A request is one short packet with the job, and two sockets are attached to the packet. Longer
    texts are sent over the first of these sockets, because a packet is truncated if it is longer
    than the receiver's buffer.
    """
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
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
