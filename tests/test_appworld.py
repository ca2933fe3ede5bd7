"""AppWorld: isolated processes, with a child that does not need the package. Then the small
AppWorld with the package, which run.sh installs into .venv-appworld."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import types

import psutil
import pytest
from conftest import ROOT, refusal, table, wait_for_end, wait_until

from common.settings import UsageError
from environments import converse, environment, make, replay
from environments.appworld import data, judging, processes
from environments.appworld.data import parts, small_appworld
from environments.appworld.environment import FORM
from environments.appworld.python_code import block, calls_of, code_of
from environments.appworld.tasks import DONE, TaskGenerator
from envs import EnvError, Step

NOBODY = 1234  # any user but root


# ---------------------------------------------------------------------------------- the jail alone

# What the isolated process evaluates -> a pattern of the result
TRIES = table(r"""
    its root -> sorted(os.listdir('/')) -> ^\['etc', 'own'\]$
    a file that it is shown -> bool(open('/etc/hostname').read()) -> True
    a full folder -> [open(f'/own/{n}', 'wb').write(bytes(1 << 24)) for n in range(9)] -> No space
    a file that it is not shown -> open('/etc/passwd').read() -> FileNotFoundError
    to write what it is shown -> open('/etc/hostname', 'w') -> Read-only|Permission
    to write its own -> open('/own/a', 'w').write('abc') -> 3
    a large file -> open('/own/b', 'wb').truncate(200 << 20) -> too large
    memory -> bytearray(4 << 30) -> MemoryError
    a fork -> os.fork() -> not permitted
    a program -> os.execv('/bin/true', ['true']) -> not permitted
    another namespace -> jail.call('unshare', jail.NEW_USER) -> not permitted
    a mount -> jail.call('mount', 'none', '/own', 'tmpfs', 0, None) -> not permitted
    rights of root -> os.setuid(0), os.chown('/own', 5, 5) -> not permitted|Invalid argument
    a device -> os.mknod('/own/c', 0o60000, 1) -> not permitted
    another process -> os.kill(pid, 9) -> No such process
    this machine -> socket.create_connection(('127.0.0.1', port), 5) -> not permitted
    a machine that holds this one -> socket.socket(40).connect((2, 5000)) -> not permitted
    a socket without a file -> socket.socket(socket.AF_UNIX).connect(address) -> refused
    a thread -> [t.start() or t.join() for t in [threading.Thread(target=int)]] -> \[None\]
    a group of its own -> os.getpgrp() == os.getsid(0) == os.getpid() -> True
    to outlive its parent -> jail.call('prctl', 1, 0, 0, 0, 0) -> not permitted
    to be killed by a limit -> resource.setrlimit(resource.RLIMIT_CPU, (1, 1)) -> not allowed
    what its limits are -> resource.getrlimit(resource.RLIMIT_CORE) -> \(0, 0\)
    a strict mode of its own -> jail.call('prctl', 22, 1, 0, 0, 0) -> not permitted
    a filter of its own -> jail.LIBC.syscall(seccomp, 1, 0, 0), why() -> -1, .*not permitted
    memory as a file -> jail.call('memfd_create', 'a', 0) -> not permitted
    memory of two -> jail.call('shmget', 0, 1 << 28, 0o1600) -> not permitted
    a key that stays -> jail.LIBC.syscall(key, b'user', b'a', b'b', 1, -4), why() -> -1, .*not permitted
    a mount by its newer calls -> jail.LIBC.syscall(430, b'tmpfs', 0), why() -> -1, .*not implemented
    many files -> [os.mkdir(f'/own/{n} of many') for n in range(20_000)] -> No space
    many threads -> threading.stack_size(1 << 16), [threading.Thread(target=stop.wait, daemon=True).start() for _ in range(400)] -> can't start
    many open files -> [os.dup(0) for _ in range(400)] -> Too many open
""")


# An isolated process of one thread that evaluates them and sleeps, like its parent. A fork of the
# test process could wait for a lock of another thread.
TRYING = """
import ctypes, encodings.idna, json, os, resource, socket, sys, threading, time
folder, user, outside, tries = json.loads(sys.argv[1])
globals().update(outside)
sys.path.insert(0, folder)
import jail
if os.fork():
    time.sleep(600)
found, stop = [], threading.Event()
key, seccomp = (248, 317) if os.uname().machine == "x86_64" else (217, 277)
why = lambda: os.strerror(ctypes.get_errno())
try:
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        jail.call("prctl", 4, 1, 0, 0, 0)  # its /proc/self is its own again
    jail.enter(["/etc/hostname"], ["/own"], 3000, os.open(os.devnull, os.O_WRONLY))
except OSError as error:
    found, tries = str(error), []
for source in tries:
    try:
        found.append(repr(eval(source)))
    except BaseException as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("user", [None, NOBODY], ids=["as we are", "not as root"])
def test_an_isolated_process_reaches_nothing_and_ends_with_its_parent(user):
    if user is not None and os.geteuid():
        pytest.skip("only root becomes another user; the other case is not root's")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0appworld-{os.getpid()}")
        other.listen()
        outside = dict(pid=os.getpid(), port=server.getsockname()[1], address=other.getsockname().decode())
        given = json.dumps([str(ROOT / "environments/appworld"), user, outside, [source for _, source, _ in TRIES]])
        with subprocess.Popen([sys.executable, "-I", "-c", TRYING, given],
                              stdout=subprocess.PIPE, text=True) as run:
            found = json.loads(run.stdout.readline())
            inside = psutil.Process(run.pid).children(recursive=True)
            run.kill()
    if isinstance(found, str):
        pytest.skip(f"this machine cannot isolate processes: {found}")
    for (name, _, wanted), result in zip(TRIES, found, strict=True):
        assert re.search(wanted, result), (name, result)
    assert len(inside) == 2
    wait_for_end(inside)


# ------------------------------------------------------- this side, with a child without the package

CHILD = """
import sys
sys.path.insert(0, {folder!r})
import child, json, jail, os, sysconfig

def play(task, text, lines, send):
    send(text=text, owner={{}})
    for line in lines:
        exec(json.loads(line)["code"])

child.warm = lambda: None
child.visible_paths = lambda task, truth: [sysconfig.get_paths()["stdlib"]]
child.play = play
{more}
child.serve()
"""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """served(more="") starts a server whose child executes the source `more`, and then the code
    that it receives."""
    servers = []

    def start(more=""):
        source = CHILD.format(folder=str(ROOT / "environments/appworld"), more=more)
        (tmp_path / "child.py").write_text(source)
        monkeypatch.setattr(processes, "__file__", str(tmp_path / "processes.py"))
        try:
            servers.append(processes.Server(sys.executable, tmp_path))
        except UsageError as error:
            if more:
                raise
            pytest.skip(str(error))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def processes_of(server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


ENDS = dict(table(r"""
    os._exit(1) -> process has ended
    import ctypes; ctypes.string_at(0) -> has ended
    os.close(3) -> process has ended
    os.write(3, b'not json\n') -> process has ended
    os.write(3, b'[' * 100_000 + b'\n') -> process has ended
    os.write(3, b'5\n') -> process has ended
    1 / 0 -> ZeroDivision
    while True: os.write(3, b'x' * 65536) -> process has ended
    import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); [0 for _ in iter(int, 1)] -> no answer in
    send(error='\ud800' * 9999) -> \?{500}
"""))  # code that ends its process, or does not end -> pattern of the error
ENDS["while True:\n    try:\n        while True: pass\n    except BaseException: pass"] = "no answer in"
if os.uname().machine == "x86_64":  # calls by x32's numbers kill all threads, whichever makes them
    X32 = "import ctypes, threading; bad = lambda call=ctypes.CDLL(None).syscall: call(0x40000027)\n"
    ENDS[f"{X32}threading.Thread(target=bad).start()\nwhile True: pass"] = "process has ended"


def test_code_that_ends_or_blocks_its_process_ends_the_episode_alone(served):
    server = served()
    other = processes.Episode(server, "a", "x" * 100_000)  # more than a message between two holds
    outside = processes_of(server)
    for code, reason in ENDS.items():
        episode = processes.Episode(server, "a", "\u00e9" * 200_000)  # 1.2 MB in JSON
        assert episode.text == "\u00e9" * 200_000
        episode.seconds = 0.3 if "no answer" in reason else 60
        inside = [process for process in processes_of(server) if process not in outside]
        with pytest.raises(processes.ProcessEnded, match=reason) as caught:
            episode.run(code)
        assert len(inside) == 2 and len(str(caught.value).encode()) <= 500
        wait_for_end(inside)
    assert other.run("send(output='yes', done=True, calls=[])") == processes.CodeResult("yes", True, [])
    other.end()
    wait_until(lambda: not processes_of(server), "the server's processes to end")


def test_a_killed_episode_is_a_failure_of_the_environment(served):
    server = served()
    for which in (0, -1, None):  # the one that waits, the one that is shut in, the server
        episode = processes.Episode(server, "a", "x")
        inside = processes_of(server)
        (server.process if which is None else inside[which]).kill()
        wait_for_end(inside)
        with pytest.raises(EnvError, match="was killed"):
            episode.run("send(output='')")
        episode.end()  # once more
    with pytest.raises(EnvError, match="has ended"):
        processes.Episode(server, "a", "x")


def test_a_child_that_does_not_start_or_end_leaves_no_process(served, monkeypatch):
    server = served("child.play = lambda *given: 1 / 0\n"
                    "child.judge = lambda task, changes: [0 for _ in iter(int, 1)]")
    for _ in range(2):
        with pytest.raises(EnvError, match="task a does not start: ZeroDivisionError"):
            processes.Episode(server, "a", "x")
    monkeypatch.setattr(processes, "JUDGE_SECONDS", 0.3)
    assert "no answer in" in server.run_once("judge", "a", changes={})["error"]
    wait_until(lambda: not processes_of(server), "the server's processes to end")
    with pytest.raises(EnvError, match="does not start"):
        served("child.serve = lambda: None")


def test_no_code_is_run_if_the_machine_cannot_isolate_processes(served, tmp_path):
    more = f"""
def refused(*given):
    raise OSError("unshare: Operation not permitted")

jail.separate = refused
child.play = lambda *given: open({str(tmp_path / "ran")!r}, "w").close()
"""
    with pytest.raises(UsageError, match=r"cannot isolate .*\(OSError: unshare.*container's root may lack"):
        served(more)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- new tasks, without the package

# A child with one interface that changes something, one that shows something, and the answer.
NOTES = """
import types
def play(task, text, lines, send):
    send(text=text, owner={})
    kept, told, calls, said = [], [], [], []
    def create_note(**given):
        kept.append(given)
        calls.append(["notes.create_note", given])
    def show_hour(**given):
        said.append("it is 17:45")
        calls.append(["notes.show_hour", given])
    apis = types.SimpleNamespace(
        notes=types.SimpleNamespace(create_note=create_note, show_hour=show_hour),
        supervisor=types.SimpleNamespace(complete_task=lambda answer=None: told.append(answer)))
    names = dict(apis=apis, os=os)
    for line in lines:
        asked = json.loads(line)
        if "code" not in asked:
            send(changes={"notes.jsonl": repr(kept), "answer": repr(told)})
            continue
        calls.clear(), said.clear()
        try:
            exec(asked["code"], names)
        except Exception as error:
            said.append(f"Execution failed: {error}")
        send(output=" ".join(said), done=bool(told), calls=calls)

child.play = play
child.compare = lambda task, changes: dict(
    apps=changes[0]["notes.jsonl"] == changes[1]["notes.jsonl"],
    answer=changes[0]["answer"] == changes[1]["answer"])
"""
DOCUMENTS = {"notes.show_hour": dict(method="GET"), "notes.create_note": dict(
    app_name="notes", api_name="create_note", method="POST", description="Create a note. It stays.")}
NOTE = 'apis.notes.create_note(title="Milk")'


@pytest.fixture
def generator(served, monkeypatch, tmp_path):
    """A task generator with a training task "a". `late` has True for each of the next replies that
    is late, in reverse order."""
    served().end()
    server = served(NOTES)
    monkeypatch.setattr(judging, "server", lambda *made_with: server)
    monkeypatch.setattr(data, "documents", lambda root: DOCUMENTS)
    (tmp_path / "data/tasks/a").mkdir(parents=True)
    (tmp_path / "data/tasks/a/specs.json").write_text(
        json.dumps(dict(instruction="Count my notes.", supervisor=dict(first_name="Ada"))))
    late, run = [], processes.Episode.run

    def slow(episode, code):
        if late and late.pop():
            episode.end()
            raise processes.ProcessEnded("no answer in 25 seconds")
        return run(episode, code)

    monkeypatch.setattr(processes.Episode, "run", slow)
    judge = judging.Judge(sys.executable, tmp_path)
    found = TaskGenerator(types.SimpleNamespace(
        judge=judge, splits={"train": {"a": dict(start="a")}, "test": {}}, find=lambda task: dict(start="a")))
    found.late = late
    return found


@pytest.mark.parametrize("code, reason", table(f"""
    {NOTE}; {DONE} -> None
    {NOTE} -> its solution does not complete it
    {NOTE}; 1 / 0; {DONE} -> a part of its solution fails
    apis.notes.create_note(title=os.urandom(8).hex()); {DONE} -> its replays differ
    apis.notes.show_hour(); {DONE} -> it is solved without its last change
    apis.notes.show_hour(); apis.supervisor.complete_task(answer='Milk') -> None
    apis.notes.create_note(title='Milk', access_token='x1', note_id=9); {DONE} -> None
"""))
def test_a_solution_that_does_not_prove_its_task_is_refused(generator, code, reason):
    task = dict(start="a", text="A note called Milk, please.", code=code.split("; "))
    assert str(generator.verify(dict(task=task))) == reason


def test_a_replay_that_is_late_or_not_compared_proves_nothing(generator, monkeypatch):
    judge, late = generator.env.judge, generator.late
    task = dict(start="a", text="A note called Milk", code=["apis.notes.show_hour()", NOTE, DONE])
    for replies, reason in ((7, "without its last change it does not run to its end"), (2, "its solution does not complete it")):
        late[:] = [True] + [False] * replies
        assert generator.verify(dict(task=task)) == reason
    late.clear()
    left = judge.trace(task, task["code"]).changes
    late[:] = [True, False]
    with pytest.raises(EnvError, match="made on a did not run to its end: no answer in 25 seconds"):
        judge.share(task, left)
    assert judge.share(task, left) == 1  # the next episode on it
    assert judge.share(task, {**left, "notes.jsonl": "other"}) == 0.5
    assert judge.share(dict(start="a", text="x", code=[NOTE]), left) == 0  # nobody has verified it
    compare = judge.compare
    monkeypatch.setattr(judge, "compare", lambda start, one, other: compare(
        start, one, other) if one == other else dict(error="no answer in 120 seconds"))
    assert generator.verify(dict(task=task)) == "its end without its last change cannot be compared"


def test_an_episode_becomes_a_task_with_what_ran_and_changed_something(generator):
    """Calls that were not executed are ignored."""
    replies = ["I look.", *map(block, ["apis.notes.show_hour()", "apis.none.nothing()", NOTE])]
    assert generator.patterns("a", [*replies, block("1 / 0\napis.notes.show_hour()")]) == {
        "notes.show_hour", "notes.create_note", "notes.show_hour, notes.create_note"}
    found, = generator.finds("a", replies, random.Random(0))
    assert found["text"] == 'Create a note (notes), title = "Milk".' and found["template"]
    assert found["solution"] == [*map(block, ["apis.notes.show_hour()", NOTE, DONE])]
    assert generator.finds("a", replies[:2], random.Random(0)) == []


NEW = dict(start="a", text="Make a note that is called Milk.", code=[NOTE, DONE])


def test_what_an_explorer_wrote_becomes_a_task_or_is_refused(generator):
    def written(*actions):
        return generator.written("a", dict(query=NEW["text"], action_sequence=actions))

    assert written(block(NOTE))["task"] == NEW and generator.refusal(NEW) is None
    assert written("a b") is written("-" * 9000 + "1") is None
    for wrong, reason in table("""
            {"start": "b"} -> 'b' is no start state of a training task
            {"text": "count my notes"} -> a task of a split
            {"code": ["x"]} -> its solution has 1 parts, not 2 to 30
            {"code": ["a b", "x"]} -> a part of its solution is no Python"""):
        assert generator.refusal(NEW | json.loads(wrong)) == reason


@pytest.mark.parametrize("one, other, same", table("""
    t = 'Milk'  # it; apis.notes.create_note(title=(t)) -> x = "Milk"; apis.notes.create_note(title=x) -> True
    t = 'Milk'; apis.notes.create_note(title=t) -> apis.notes.create_note(title="Milk") -> False
    len('a') -> int('a') -> False
    a = b -> a = a -> False
"""))
def test_tasks_have_one_key_if_their_code_differs_by_names_alone(generator, one, other, same):
    first, second = (generator.key(NEW | dict(code=code.split("; "))) for code in (one, other))
    assert str(first == second) == same


# ------------------------------------------------------------------------------- texts and solutions


@pytest.mark.parametrize("reply, code", table("""
    ```python⏎print(1)⏎``` -> print(1)
    I look.⏎```python⏎a⏎```⏎```python⏎b⏎``` -> a
    ```python⏎print(1) -> print(1)
    print(1) -> None
    ```⏎print(1)⏎``` -> None
"""))
def test_the_code_of_a_reply(reply, code):
    assert str(code_of(reply.replace("⏎", "\n"))) == code


def test_a_solution_becomes_replies_of_one_call_and_loops_stay_whole():
    source = """# a comment
def solution(apis, requester):
    a = 1
    rows = apis.phone.show_alarms(access_token=a,
                                  page_limit=5)
    print(rows)
    for row in rows:
        apis.phone.delete_alarm(alarm_id=row)
        apis.phone.show_alarms()
    b = 2
    apis.supervisor.complete_task(answer=apis.phone.show_alarm(alarm_id=b))
"""
    found = parts(source)
    assert found == [
        "a = 1\nrows = apis.phone.show_alarms(access_token=a, page_limit=5)\nprint(rows)",
        "for row in rows:\n    apis.phone.delete_alarm(alarm_id=row)\n    apis.phone.show_alarms()\n"
        "b = 2", "apis.supervisor.complete_task(answer=apis.phone.show_alarm(alarm_id=b))"]
    assert calls_of(found[2]) == {"supervisor.complete_task", "phone.show_alarm"}
    long = "def solution(apis, requester):\n" + "    apis.a.b()\n" * 70
    assert [part.count("apis") for part in parts(long)] == [3] * 23 + [1]


def test_scenarios_are_tasks_without_their_last_number():
    scenario = environment("appworld").scenario
    assert scenario("appworld-test_normal-82e2fac_1") == "appworld-test_normal-82e2fac"
    assert scenario("appworld-added-3") is None and environment("webshop").scenario("webshop-test-1") is None


def test_a_missing_package_or_an_unusable_path_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "ROOT", tmp_path / "memory-of-agents")
    with pytest.raises(UsageError, match="memory-of-agents.*has 'memory' in its path.*move it"):
        small_appworld()
    monkeypatch.setattr(data, "VENV", tmp_path)
    with pytest.raises(UsageError, match=r"appworld==0.1.3.post1 is not in .*; bash run.sh appworld"):
        make("appworld")


# --------------------------------------------------------------------------- where the package is


@pytest.fixture(scope="module")
def env():
    """The small AppWorld; skips if the package is missing or the machine cannot isolate processes."""
    try:
        env = make("appworld")
        env.reset(env.tasks("train")[0])
    except UsageError as error:
        pytest.skip(str(error))
    yield env
    env.close()


def of_family(env, split: str, family: str) -> str:
    return next(task for task in env.tasks(split) if f"-{family}-{split}-" in task)


def play(env, task: str, code: list[str]):
    """Returns the last step of an episode."""
    return replay(env, env.find(task), [*map(block, code)])[-1]


GOT = "import os, pathlib; P = pathlib.Path; got = __import__\n"
# Code that avoids the package's own guard, which checks names -> a pattern of its output
PROBES = r"""
    P('/etc/passwd').read_text() -> FileNotFoundError
    [e.name for e in os.scandir('{root}/data/tasks')] -> \[\s*'?"?{task}'?"?\s*\]
    sorted(e.name for e in os.scandir('{root}/data/tasks/{task}')) -> \W+dbs\W+specs.json\W+$
    P('{root}/data/datasets/test.txt').read_text() -> FileNotFoundError
    got('appworld.task', fromlist=['Task']).Task.load('{task}').ground_truth.answer -> doesn't exist
    got('appworld.evaluator', fromlist=['x']).evaluate_task('{task}', 'episode').passes -> doesn't exist
    P('{project}/README.md').read_text() -> FileNotFoundError
    sorted(os.environ) -> ^\W+APPWORLD_CACHE\W+APPWORLD_ROOT\W+$
    got('_io').FileIO('{root}/data/base_dbs/phone.db', 'r+') -> Read-only|Permission
    got('_io').FileIO('{library}/appworld/own.py', 'w') -> Read-only|Permission
    P('/proc/self/environ').read_text() -> FileNotFoundError
    os.posix_spawn('/bin/true', ['true'], dict()) -> not permitted
    got('socket').create_connection(('127.0.0.1', 9), 5) -> not permitted
    len(bytearray(6 * 10 ** 9)) -> MemoryError
    'a' * 10 ** 7 -> ^a{{20000}}$
    all(True for _ in iter(int, 1)) -> timed out after 20 seconds
"""


def test_probes_reach_no_answer_and_no_file_but_those_of_their_episode(env, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "a secret")
    task = of_family(env, "test", "contact-number")
    start, root = env.find(task)["start"], small_appworld()
    answer = json.loads((root / "data/tasks" / start / "ground_truth/answer.json").read_text())
    secrets = [str(answer), "root:x:", socket.gethostname(), "SECRET_OF_THE_RUN"]
    library, = data.VENV.glob("lib/python3*/site-packages")
    env.reset(task)
    env.step(block("import json\njson.leak = 2\nleak = 3\ngot = __import__('_io')\n"
                     "got.FileIO('/tmp/leak', 'w').close()"))
    for probe, wanted in table(PROBES.format(root=root, task=start, project=ROOT, library=library)):
        step = env.step(block(f"{GOT}print({probe})"))
        env._replies = 1  # one episode for all
        said = step.observation.strip()
        assert not step.done and re.search(wanted, said), (probe, said[-500:])
        assert not any(secret in said for secret in secrets), (probe, said[-500:])
    env.reset(task)
    leaks = "import json\nprint(hasattr(json, 'leak'), 'leak' in globals(), __import__('os').access('/tmp/leak', 0))"
    assert env.step(block(leaks)).observation.strip() == "False False False"
    assert converse(env, env.reset(task), env.expert())[1] == 1


def test_additional_changes_fail_the_task(env, monkeypatch):
    task = of_family(env, "test", "alarm-new")
    code = env.solution(env.find(task))
    other_time = [re.sub(r"time='\d\d", "time='23", part) for part in code]
    more = 'apis.phone.create_alarm(access_token=token, time="01:01", label="more")'
    reading = "print(apis.phone.show_alarms(access_token=token))"
    assert play(env, task, [*code[:-1], reading, code[-1]]).reward == 1
    assert play(env, task, [*code[:-1], more, code[-1]]).reward == 0
    assert play(env, task, other_time).reward == 0
    move = of_family(env, "unseen", "alarm-move")
    renamed = 'apis.phone.update_alarm(access_token=token, alarm_id=alarm["alarm_id"], label="other")'
    *found, done = env.solution(env.find(move))
    assert play(env, move, [*found, renamed, done]).reward == 0
    monkeypatch.setattr(env, "share_of_tests", True)
    assert play(env, task, code[-1:]).reward == pytest.approx(1 / 3)
    assert play(env, task, other_time).reward == pytest.approx(2 / 3)


def test_an_episode_ends_after_thirty_replies_or_with_its_process(env):
    task = env.tasks("train")[0]
    steps = replay(env, env.find(task), ["I think."] * 99)
    assert [step.done for step in steps] == [False] * 29 + [True]
    assert {step.observation for step in steps} == {FORM} and steps[-1].reward == 0
    step = play(env, task, ["__import__('ctypes').CDLL(None)._exit(0)"])
    assert step == Step("The episode is over: its process has ended.", 0.0, True)


def test_malformed_changes_fail_only_the_episode(env, monkeypatch):
    task = env.find(of_family(env, "test", "alarm-new"))
    changes = data.start_changes(small_appworld(), task["start"])
    for bad in ("not json", '["ATTACH DATABASE \'/etc/x\' AS x", [], false]', "[" * 100_000):
        assert env.judge.share(task, {**changes, "phone.jsonl": bad}) == 0
    assert env.judge.share(task, {}) == 0
    monkeypatch.setattr(env.judge, "_run_tests", lambda task, changes: dict(error="no tests"))
    with pytest.raises(EnvError, match="can't be judged: no tests"):
        env.judge.share(task, changes)


def test_official_data_are_read_or_what_is_missing_is_named(env, tmp_path):
    def official():
        return make("appworld", appworld_root=str(tmp_path))

    root, keys, folder = small_appworld() / "data", [*env.splits["train"]], tmp_path / "data"
    (folder / "datasets").mkdir(parents=True)
    for name in ("base_dbs", "tasks"):
        (folder / name).symlink_to(root / name)
    assert "train.txt is missing; download the official data" in refusal(official)
    for name, key in zip(("train", "dev", "test_normal", "test_challenge"), ["none_1", *keys]):
        (folder / f"datasets/{name}.txt").write_text(key)
    assert "tasks/none_1/specs.json is missing" in refusal(official)
    (folder / "datasets/train.txt").write_text(keys[3])
    assert "standard/phone.json is missing" in refusal(official)
    (folder / "api_docs").symlink_to(root / "api_docs")
    assert official().test_splits == ("test_normal", "test_challenge")
    assert official().tasks("validation") == [f"appworld-validation-{keys[0]}"]


def test_a_new_task_is_judged_exactly(env):
    task = of_family(env, "train", "note-more")
    *code, done = env.solution(env.find(task))
    found, = env.task_generator().finds(task, ["I look.", *map(block, [*code, done])], random.Random(0))
    assert 'added_content = "' in found["text"] and "token" not in found["text"]

    made = env.add(found["task"])
    assert found["text"] in env.reset(made)
    shown = play(env, made, ["print(apis.supervisor.show_active_task()['instruction'])"])
    assert shown.observation.strip() == found["text"]
    other = code[-1].replace("added_content='", "added_content='not ")  # as many changes, but others
    for wrong in ([*code[:-1], done], [*code, code[-1], done], [*code[:-1], other, done],
                  [*code, "apis.supervisor.complete_task(answer=3)"]):
        assert play(env, made, wrong).reward == 0
