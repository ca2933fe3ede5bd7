"""AppWorld: processes that are shut in, with a child that has no package; then the small world,
where the package is (run.sh puts it into .venv-appworld), by the package's own judgement."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import types

import psutil
import pytest
from conftest import ROOT, wait_until

import evolve
from common.settings import Refused
from envs import EnvError, environment, make
from worlds import converse
from worlds.appworld import data, judging, processes
from worlds.appworld.data import MOST_REPLIES, calls_in, parts, small_world
from worlds.appworld.tasks import TaskGenerator
from worlds.appworld.world import FORM, block, code_of

NOBODY = 1234  # any user but root


# ---------------------------------------------------------------------------------- the jail alone

# What a process tries there; its source, run where it is shut in, and what it must come to.
TRIES = {
    "its root": ("sorted(os.listdir('/'))", "['etc', 'own']"),
    "a file that it is shown": ("bool(open('/etc/hostname').read())", "True"),
    "a full folder": ("[open(f'/own/{n}', 'wb').write(bytes(1 << 24)) for n in range(9)]", "No space"),
    "a file that it is not shown": ("open('/etc/passwd').read()", "FileNotFoundError"),
    "what processes there are": ("os.listdir('/proc')", "FileNotFoundError"),
    "to write what it is shown": ("open('/etc/hostname', 'w')", "Read-only|Permission"),
    "to write its own": ("open('/own/a', 'w').write('abc')", "3"),
    "a large file": ("open('/own/b', 'wb').truncate(200 << 20)", "too large"),
    "memory": ("bytearray(2 << 30)", "MemoryError"),
    "a fork": ("os.fork()", "not permitted"),
    "a program": ("os.posix_spawn('/bin/true', ['true'], {})", "not permitted"),
    "a program in its place": ("os.execv('/bin/true', ['true'])", "not permitted"),
    "another namespace": ("jail.call('unshare', jail.NEW_USER)", "not permitted"),
    "a mount": ("jail.call('mount', 'none', '/own', 'tmpfs', 0, None)", "not permitted"),
    "to mount for writing": ("jail.call('mount', None, '/etc/hostname', None, 32 | 4096, None)",
                             "not permitted"),
    "the other root": ("jail.call('umount2', '/', jail.DETACH)", "not permitted"),
    "rights of root": ("os.setuid(0), os.chown('/own', 5, 5)", "not permitted|Invalid argument"),
    "a device": ("os.mknod('/own/c', 0o60000, 1)", "not permitted"),
    "another process": ("os.kill({pid}, 9)", "No such process"),
    "this machine": ("socket.create_connection(('127.0.0.1', {port}), 5)", "not permitted"),
    "a machine that holds this one": ("socket.socket(40).connect((2, 5000))", "not permitted"),
    "the kernel's table of networks": ("socket.socket(16, socket.SOCK_RAW)", "not permitted"),
    "a socket without a file": ("socket.socket(socket.AF_UNIX).connect('\\0{name}')", "refused"),
    "a thread": ("[t.start() or t.join() for t in [threading.Thread(target=int)]]", r"\[None\]"),
    "a group of its own": ("os.getpgrp() == os.getsid(0) == os.getpid()", "True"),
    "to outlive its parent": ("jail.call('prctl', 1, 0, 0, 0, 0)", "not permitted"),
    "to be killed by a limit": ("resource.setrlimit(resource.RLIMIT_CPU, (1, 1))", "not allowed"),
    "what its limits are": ("resource.getrlimit(resource.RLIMIT_CORE)", r"\(0, 0\)"),
    "memory as a file": ("jail.call('memfd_create', 'a', 0)", "not permitted"),
    "memory of two": ("jail.call('shmget', 0, 1 << 28, 0o1600)", "not permitted"),
    "a key that stays": ("jail.LIBC.syscall(key, b'user', b'a', b'b', 1, -4), why()", "-1, .*not permitted"),
    "a queue of calls": ("jail.LIBC.syscall(425, 8, bytes(200)), why()", "-1, .*not implemented"),
    "a mount by its newer calls": ("jail.LIBC.syscall(430, b'tmpfs', 0), why()", "-1, .*not implemented"),
    "many files": ("[os.mkdir(f'/own/{n} of many') for n in range(20_000)]", "No space"),
    "many threads": ("threading.stack_size(1 << 16), [threading.Thread(target=stop.wait, daemon=True).start()"
                     " for _ in range(400)]", "can't start"),
    "many open files": ("[os.dup(0) for _ in range(400)]", "Too many open"),
}


# A process of one thread that is shut in and tries them; a fork of this one could wait for ever for
# a lock that another thread of it holds.
TRYING = """
import ctypes, encodings.idna, json, os, resource, socket, sys, threading
folder, user, tries = json.loads(sys.argv[1])
sys.path.insert(0, folder)
import jail
found, stop = {}, threading.Event()
key = 248 if os.uname().machine == "x86_64" else 217
why = lambda: os.strerror(ctypes.get_errno())
try:
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        jail.call("prctl", 4, 1, 0, 0, 0)  # its /proc/self is its own again
    jail.enter(["/etc/hostname"], ["/own"], 3000)
except OSError as error:
    found = str(error)
for name, source in tries.items() if found == {} else ():
    try:
        found[name] = repr(eval(source))
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
sys.__stdout__.write(json.dumps(found))
sys.__stdout__.flush()
"""


def shut_in(user: int | None) -> dict[str, str]:
    """What each of TRIES comes to in a process that is shut in; OSError if none can be."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as other:
        told = dict(pid=os.getpid(), port=server.getsockname()[1], name=f"appworld-{os.getpid()}")
        other.bind(f"\0{told['name']}")
        other.listen()
        tries = {}
        for name, (source, _) in TRIES.items():
            for key, value in told.items():
                source = source.replace(f"{{{key}}}", str(value))
            tries[name] = source
        given = json.dumps([str(ROOT / "worlds/appworld"), user, tries])
        done = subprocess.run([sys.executable, "-I", "-c", TRYING, given], capture_output=True,
                              text=True, timeout=300)
    said = json.loads(done.stdout)
    if isinstance(said, str):
        raise OSError(said)
    return said


@pytest.mark.parametrize("user", [None, NOBODY], ids=["as we are", "not as root"])
def test_who_is_shut_in_reaches_nothing_with_rights_of_root_and_without(user):
    if user is not None and os.geteuid():
        pytest.skip("only root becomes another user; the other case is not root's")
    try:
        found = shut_in(user)
    except OSError as error:
        pytest.skip(f"this machine does not shut in: {error}")
    for name, (_, wanted) in TRIES.items():
        assert re.search(wanted, found[name]), (name, found[name])


# Begins a process that is shut in and sleeps, and waits.
WAITING = """
import os, sys, time
folder, user = sys.argv[1:]
sys.path.insert(0, folder)
import jail
if not os.fork():
    if user:
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
        jail.call("prctl", 4, 1, 0, 0, 0)
    jail.enter([], ["/own"], 3000)
    print("shut in", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("user", [None, NOBODY], ids=["as we are", "not as root"])
def test_who_waits_for_one_that_is_shut_in_ends_with_its_parent(user):
    if user is not None and os.geteuid():
        pytest.skip("only root becomes another user; the other case is not root's")
    command = [sys.executable, "-I", "-c", WAITING, str(ROOT / "worlds/appworld"), str(user or "")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        said = run.stdout.readline()
        inside = psutil.Process(run.pid).children(recursive=True)
        run.kill()
        if "shut in" not in said:
            pytest.skip("this machine does not shut in")
        assert len(inside) == 2
        wait_until(lambda: gone(inside))


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
child.shown = lambda task, truth: [sysconfig.get_paths()["stdlib"]]
child.play = play
{more}
child.serve()
"""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """served(more="") -> a server whose child plays by executing what comes, after that source."""
    servers = []

    def start(more=""):
        source = CHILD.format(folder=str(ROOT / "worlds/appworld"), more=more)
        (tmp_path / "child.py").write_text(source)
        monkeypatch.setattr(processes, "__file__", str(tmp_path / "processes.py"))
        try:
            servers.append(processes.Server(sys.executable, tmp_path, 20, 20_000))
        except Refused as error:
            if more:
                raise
            pytest.skip(str(error))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def processes_of(server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def gone(found) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in found)


@pytest.mark.parametrize("code, reason", [
    ("os._exit(1)", "process has ended"), ("import ctypes; ctypes.string_at(0)", "has ended"),
    ("os.close(3)", "process has ended"), ("os.write(3, b'not json\\n')", "process has ended"),
    ("os.write(3, b'[' * 100_000 + b'\\n')", "process has ended"), ("os.write(3, b'5\\n')", "process has ended"),
    ("1 / 0", "ZeroDivision"),
    ("while True: os.write(3, b'x' * 65536)", "process has ended"), ("pass", "no answer in"),
    ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", "no answer in"),
    ("sum(range(10 ** 12))", "no answer in"),
    ("import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nwhile True: pass", "no answer in"),
    ("import resource; resource.setrlimit(0, (1, 1))\nwhile True: pass", "not allowed"),
    ("send(error='\\ud800' * 9999)", r"\?{500}"),
])
def test_code_that_ends_or_blocks_its_process_ends_the_episode_alone(served, code, reason):
    server = served()
    episode = processes.Episode(server, "a", "do it")
    episode._seconds = 0.3 if "no answer" in reason else 60
    inside = processes_of(server)
    with pytest.raises(processes.Gone, match=reason) as caught:
        episode.run(code)
    assert len(str(caught.value).encode()) <= 500
    wait_until(lambda: gone(inside))
    again = processes.Episode(server, "a", "do it again")
    assert again.run("send(output='yes', done=True, calls=[])") == processes.Ran("yes", True, [])
    again.end()


def test_an_episode_that_somebody_else_kills_is_an_environment_that_broke(served):
    server = served()
    for which in (0, -1):  # the one that waits, the one that is shut in
        episode = processes.Episode(server, "a", "x")
        inside = processes_of(server)
        inside[which].kill()
        wait_until(lambda: gone(inside))
        with pytest.raises(EnvError, match="was killed"):
            episode.run("send(output='')")
        episode.end()  # once more; the server goes on, and it can be played again
    episode = processes.Episode(server, "a", "x")
    inside = processes_of(server)
    server.process.kill()
    wait_until(lambda: gone(inside))
    with pytest.raises(EnvError, match="was killed"):
        episode.run("send(output='')")
    episode.end()
    with pytest.raises(EnvError, match="has ended"):
        processes.Episode(server, "a", "x")


@pytest.mark.parametrize("text", ["word " * 15_000, "\u00e9" * 200_000])
def test_a_task_with_a_long_text_begins_and_other_episodes_go_on(served, text):
    """Whatever a message between two processes may hold; in JSON the second has 1.2 MB."""
    server = served()
    other = processes.Episode(server, "a", "do it")
    episode = processes.Episode(server, "a", text)
    assert episode.text == text
    for each in (episode, other):
        assert each.run("send(output='yes', done=True, calls=[])").done
        each.end()


def test_an_episode_that_does_not_start_leaves_no_process(served):
    server = served("child.play = lambda *given: 1 / 0")
    for _ in range(2):
        with pytest.raises(EnvError, match="task a does not start: ZeroDivisionError"):
            processes.Episode(server, "a", "x")
    wait_until(lambda: not processes_of(server))  # nor one that nobody has waited for


def test_a_judgement_that_does_not_end_is_one_that_failed(served, monkeypatch):
    server = served("child.judge = lambda task, changes: [0 for _ in iter(int, 1)]")
    monkeypatch.setattr(processes, "JUDGING", 0.3)
    assert "no answer in" in server.once("judge", "a", changes={})["error"]


def test_no_code_is_run_where_the_machine_does_not_isolate(served, tmp_path):
    mark = tmp_path / "ran"
    more = f"""
def refused(*given):
    raise OSError("unshare: Operation not permitted")

jail.separate = refused
child.play = lambda *given: open({str(mark)!r}, "w").close()
"""
    with pytest.raises(Refused, match=r"does not shut in the code of a model \(OSError: unshare"):
        served(more)
    assert not mark.exists()


def test_a_killed_run_leaves_no_process(served, tmp_path):
    served()  # it skips where nothing can be shut in
    source = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from worlds.appworld import processes
        processes.__file__ = {str(tmp_path / "processes.py")!r}
        server = processes.Server(sys.executable, {str(tmp_path)!r}, 20, 20_000)
        episodes = [processes.Episode(server, "a", "x") for _ in range(2)]
        print(server.process.pid, flush=True)
        episodes[0].run("while True: pass")"""
    run = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    server = psutil.Process(int(run.stdout.readline()))
    inside = [server, *server.children(recursive=True)]
    assert len(inside) == 5  # a waiting and a shut one for each episode
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    wait_until(lambda: gone(inside))


# A child that changes something, by a line of a log, with each part of a solution but the last.
LOGS = """
def play(task, text, lines, send):
    send(text=text, owner={})
    log = ""
    for line in lines:
        asked = json.loads(line)
        if "code" in asked:
            done = asked["code"] == "done"
            log += "" if done else asked["code"] + "\\n"
            send(output="", done=done, calls=[])
        else:
            send(changes={"phone.jsonl": log})

child.play = play
child.compare = lambda task, changes: dict(answer=True, apps=changes[0] == changes[1])
"""


@pytest.fixture
def judge(served, monkeypatch, tmp_path):
    """A judge of what the child logs; and which of its next replies are late, the next one last."""
    server = served()
    server.end()
    server = served(LOGS)
    monkeypatch.setattr(judging, "server", lambda *made_with: server)
    late = []
    run = processes.Episode.run

    def slow(episode, code):
        if late and late.pop():
            episode.end()
            raise processes.Gone("no answer in 25 seconds")
        return run(episode, code)

    monkeypatch.setattr(processes.Episode, "run", slow)
    return judging.Judge(sys.executable, tmp_path, 20, 20_000), late


def test_an_episode_is_void_where_the_code_of_its_task_is_not_played_to_its_end(judge):
    judge, late = judge
    task = dict(start="a", text="x", code=["one", "done"])
    changes = {"phone.jsonl": "one\n"}
    late[:] = [True, False]
    with pytest.raises(EnvError, match="made on a is not played to its end: no answer in 25 seconds"):
        judge.share(task, changes)
    assert judge.share(task, changes) == 1  # the next episode on it
    assert judge.share(task, {"phone.jsonl": "other"}) == 0.5
    never = dict(start="a", text="x", code=["one"])  # nobody has verified it
    assert judge.share(never, changes) == 0


def test_a_replay_that_is_late_or_not_compared_proves_nothing(judge, monkeypatch):
    judge, late = judge
    generator = TaskGenerator.__new__(TaskGenerator)
    generator.env = types.SimpleNamespace(judge=judge)
    proposal = dict(task=dict(start="a", text="x", code=["one", "two", "done"]), template=True)
    last = "without its last change"
    for replies, reason in ((6, f"{last} it is not played to its end"), (2, "does not complete it")):
        late[:] = [True] + [False] * replies
        assert reason in generator.verify(proposal)
    late.clear()
    compare = judge.compare
    monkeypatch.setattr(judge, "compare", lambda start, one, other: compare(
        start, one, other) if one == other else dict(error="no answer in 120 seconds"))
    assert generator.verify(proposal) == f"its end {last} cannot be compared"


# ------------------------------------------------------------------------------- texts and solutions


@pytest.mark.parametrize("reply, code", [
    ("```python\nprint(1)\n```", "print(1)"), ("I look.\n```python\na\n```\n```python\nb\n```", "a"),
    ("```python\nprint(1)", "print(1)"), ("print(1)", None), ("```\nprint(1)\n```", None), ("", None),
    ("<think>```python\n1\n```</think>", "1")])
def test_the_code_of_a_reply(reply, code):
    assert code_of(reply) == code


def test_a_solution_becomes_replies_of_one_call_and_loops_stay_whole():
    source = '''# a comment
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
'''
    found = parts(source)
    assert found == [
        "a = 1\nrows = apis.phone.show_alarms(access_token=a,\n"
        "                              page_limit=5)\nprint(rows)",
        "for row in rows:\n    apis.phone.delete_alarm(alarm_id=row)\n    apis.phone.show_alarms()\n"
        "b = 2", "apis.supervisor.complete_task(answer=apis.phone.show_alarm(alarm_id=b))"]
    import ast
    assert calls_in(ast.parse(found[2])) == ["supervisor.complete_task", "phone.show_alarm"]
    long = "def solution(apis, requester):\n" + "    apis.a.b()\n" * 70
    assert [part.count("apis") for part in parts(long)] == [3] * 23 + [1] and MOST_REPLIES == 30


def test_scenarios_are_tasks_without_their_last_number():
    scenario = environment("appworld").scenario
    assert scenario("appworld-test_normal-82e2fac_1") == "appworld-test_normal-82e2fac"
    assert scenario("appworld-added-3") is None and environment("webshop").scenario("webshop-test-1") is None


def test_a_folder_that_the_package_takes_for_memory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "PROJECT", tmp_path / "memory-of-agents")
    with pytest.raises(Refused, match="memory-of-agents.*has 'memory' in its path.*move it"):
        small_world()


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "VENV", tmp_path)
    with pytest.raises(Refused, match=r"appworld==0.1.3.post1 is not in .*; bash run.sh appworld"):
        make("appworld")


# --------------------------------------------------------------------------- where the package is


@pytest.fixture(scope="module")
def world():
    """The small world's environment; a skip where the package is not, or nothing is shut in."""
    try:
        env = make("appworld", appworld_seconds=5)
        env.reset(env.tasks("train")[0])
    except Refused as error:
        pytest.skip(str(error))
    yield env
    env.close()
    for server in processes._servers.values():
        server.end()
    processes._servers.clear()


def of_family(env, split: str, family: str) -> str:
    return next(task for task in env.tasks(split) if f"-{family}-{split}-" in task)


def play(env, task: str, code: list[str]):
    """The last step of an episode."""
    env.reset(task)
    for part in code:
        step = env.step(block(part))
        if step.done:
            break
    return step


def alarm(env) -> tuple[str, list[str]]:
    """A task that asks for an alarm, and its solution."""
    task = of_family(env, "test", "alarm-new")
    return task, env.solution(env.find(task))


# Around the package's own guard, which goes by names: code, and what it prints.
GOT = "import os, pathlib; P = pathlib.Path; got = __import__\n"
PROBES = {
    "P('/etc/passwd').read_text()": "FileNotFoundError",
    "got('_io').FileIO('/etc/passwd').read()": "FileNotFoundError",
    "got('_io').FileIO('/etc/hostname').read()": "FileNotFoundError",
    "P('/proc/self/environ').read_text()": "FileNotFoundError",
    "P('{root}/data/tasks/{task}/ground_truth/answer.json').read_text()": "FileNotFoundError",
    "P('{root}/data/tasks/{task}/ground_truth/evaluation.py').read_text()": "FileNotFoundError",
    "[e.name for e in os.scandir('{root}/data/tasks')]": r"\[\s*'?\"?{task}'?\"?\s*\]",
    "sorted(e.name for e in os.scandir('{root}/data/tasks/{task}'))": r"\W+dbs\W+specs.json\W+$",
    "P('{root}/data/tasks/{other}/specs.json').read_text()": "FileNotFoundError",
    "P('{root}/data/datasets/test.txt').read_text()": "FileNotFoundError",
    "got('appworld.task', fromlist=['Task']).Task.load('{task}').ground_truth.answer": "doesn't exist",
    "got('appworld.ground_truth', fromlist=['x']).GroundTruth.load('{task}').answer": "doesn't exist",
    "got('appworld.evaluator', fromlist=['x']).evaluate_task('{task}', 'episode').passes": "doesn't exist",
    "P('{project}/README.md').read_text()": "FileNotFoundError",
    "sorted(os.environ)": r"^\W+APPWORLD_CACHE\W+APPWORLD_ROOT\W+$",
    "got('_io').FileIO('{root}/data/base_dbs/phone.db', 'r+')": "Read-only|Permission",
    "got('_io').FileIO('{library}/appworld/own.py', 'w')": "Read-only|Permission",
    "os.posix_spawn('/bin/true', ['true'], dict())": "not permitted",
    "got('_posixsubprocess').fork_exec": "built-in",
    "got('pty').fork()": "not permitted|None",
    "got('ctypes').CDLL(None).fork()": "-1",
    "got('ctypes').CDLL(None).system(b'id')": "^(-1|32512)$",
    "got('ctypes').CDLL(None).setuid(0), os.getuid()": "-1|0, 0",
    "got('ctypes').CDLL(None).unshare(0x10000000)": "-1",
    "got('ctypes').CDLL(None).ptrace(16, 1, 0, 0)": "-1",
    "got('socket').create_connection(('127.0.0.1', {port}), 5)": "not permitted",
    "got('socket').socket(40)": "not permitted",
    "got('ctypes').CDLL(None).prctl(1, 0, 0, 0, 0)": "^-1$",
    "got('requests').get('http://127.0.0.1:{port}')": "Error",
    "got('socket').getaddrinfo('example.com', 80)": "gaierror|resolution",
    "os.getppid()": "^0$",
    "len(bytearray(6 * 10 ** 9))": "MemoryError",
    "get_ipython().getoutput('id')": "not permitted|Error|\\[\\]|None",
    "'a' * 10 ** 7": "^a{{20000}}$",
    "all(True for _ in iter(int, 1))": "timed out after 5 seconds",
}


def test_thirty_probes_reach_no_answer_no_file_no_network_and_no_process(world, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "a secret")
    task = of_family(world, "test", "contact-number")
    start, root = world.find(task)["start"], small_world()
    answer = json.loads((root / "data/tasks" / start / "ground_truth/answer.json").read_text())
    secrets = [str(answer), "root:x:", socket.gethostname(), "SECRET_OF_THE_RUN"]
    library, = data.VENV.glob("lib/python3*/site-packages")
    world.reset(task)
    world.step(block("import json\njson.leak = 2\nleak = 3\ngot = __import__('_io')\n"
                     "got.FileIO('/tmp/leak', 'w').close()"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = dict(root=root, task=start, port=server.getsockname()[1], project=ROOT, library=library,
                    other=world.find(world.tasks("train")[0])["start"])
        for probe, wanted in PROBES.items():
            step = world.step(block(f"{GOT}print({probe.format(**told)})"))
            world._replies = 1  # one episode for all
            said = step.observation.strip()
            assert not step.done and re.search(wanted.format(**told), said), (probe, said[-500:])
            assert not any(secret in said for secret in secrets), (probe, said[-500:])
    assert len(PROBES) >= 28
    world.reset(task)
    leaks = "import json\nprint(hasattr(json, 'leak'), 'leak' in globals(), __import__('os').access('/tmp/leak', 0))"
    assert world.step(block(leaks)).observation.strip() == "False False False"
    assert converse(world, world.reset(task), world.expert())[1] == 1


def test_the_expert_of_each_family_solves_its_tasks_and_no_part_of_it_does(world):
    splits = {"test": {}, "unseen": {}}
    for split, found in splits.items():
        for task in world.tasks(split):
            found.setdefault(task.split(f"-{split}-")[1], task)
    assert [len(found) for found in splits.values()] == [4, 2]
    messages = {}
    for task in (*splits["test"].values(), *splits["unseen"].values()):
        messages[task], reward = converse(world, world.reset(task), world.expert())
        assert reward == 1, messages[task]
    first = [*messages][0]
    assert converse(world, world.reset(first), world.expert())[0] == messages[first]  # it repeats
    for task in [*messages][1:3]:
        code = world.solution(world.find(task))
        for less in ([code[-1]], [*code[:-2], code[-1]], ["apis.supervisor.complete_task()"]):
            step = play(world, task, less)
            assert not step.done or step.reward == 0


def test_more_than_was_asked_for_is_not_what_was_asked_for(world):
    task, code = alarm(world)
    more = 'apis.phone.create_alarm(access_token=token, time="01:01", label="more")'
    reading = "print(apis.phone.show_alarms(access_token=token))"
    assert play(world, task, [*code[:-1], reading, *code[-1:]]).reward == 1
    assert play(world, task, [*code[:-1], more, *code[-1:]]).reward == 0
    later = re.sub(r'time="\d\d', 'time="23', code[2])
    assert play(world, task, [*code[:2], later, *code[3:]]).reward == 0
    move = of_family(world, "unseen", "alarm-move")
    renamed = 'apis.phone.update_alarm(access_token=token, alarm_id=alarm["alarm_id"], label="other")'
    *found, done = world.solution(world.find(move))
    assert play(world, move, [*found, renamed, done]).reward == 0
    world.share_of_tests = True
    try:
        assert play(world, task, code[-1:]).reward == pytest.approx(1 / 3)
        assert play(world, task, [*code[:2], later, *code[3:]]).reward == pytest.approx(2 / 3)
    finally:
        world.share_of_tests = False


def test_a_reply_without_code_is_told_so_and_thirty_end_an_episode(world):
    world.reset(world.tasks("train")[0])
    steps = [world.step("I think.") for _ in range(MOST_REPLIES)]
    assert [step.done for step in steps] == [False] * 29 + [True]
    assert {step.observation for step in steps} == {FORM} and steps[-1].reward == 0


def test_code_that_kills_its_own_process_earns_nothing_and_the_next_episode_plays(world):
    task, code = alarm(world)
    world.reset(task)
    step = world.step(block("__import__('ctypes').CDLL(None)._exit(0)"))
    assert (step.reward, step.done) == (0, True) and "The episode is over" in step.observation
    assert play(world, task, code).reward == 1


def test_changes_that_are_none_fail_the_episode_alone(world, monkeypatch):
    task, _ = alarm(world)
    changes = data.start_changes(small_world(), world.find(task)["start"])
    for bad in ("not json", '["ATTACH DATABASE \'/etc/x\' AS x", [], false]', "[" * 100_000):
        assert world.judge.share(world.find(task), {**changes, "phone.jsonl": bad}) == 0
    assert world.judge.share(world.find(task), {}) == 0
    monkeypatch.setattr(world.judge, "_tests", lambda task, changes: dict(error="no tests"))
    with pytest.raises(EnvError, match="can't be judged: no tests"):
        world.judge.share(world.find(task), changes)


def test_splits_repeat_nothing_and_the_official_layout_plays(world, tmp_path):
    root = small_world()
    assert {split: len(tasks) for split, tasks in world.splits.items()} == {
        "train": 72, "validation": 36, "test": 36, "unseen": 42}
    keys = [key for tasks in world.splits.values() for key in tasks]
    assert len({*keys}) == len(keys) and world.test_splits == ("test", "unseen")
    asked = [(root / "data/tasks" / key / "specs.json").read_text() for key in keys]
    assert len({*asked}) == len(asked)

    (tmp_path / "data/datasets").mkdir(parents=True)
    for name in ("base_dbs", "api_docs", "tasks"):
        (tmp_path / "data" / name).symlink_to(root / "data" / name)
    with pytest.raises(Refused, match="train.txt is not there; appworld download data"):
        make("appworld", appworld_root=str(tmp_path))
    for n, name in enumerate(("train", "dev", "test_normal", "test_challenge")):
        (tmp_path / "data/datasets" / f"{name}.txt").write_text("\n".join(keys[3 * n:3 * n + 3]))
    (tmp_path / "data/datasets/dev.txt").write_text("none_1")
    with pytest.raises(Refused, match=r"tasks/none_1/specs.json is not there; appworld download data"):
        make("appworld", appworld_root=str(tmp_path))
    (tmp_path / "data/datasets/dev.txt").write_text("\n".join(keys[3:6]))
    (tmp_path / "data/api_docs").rename(tmp_path / "documents")
    with pytest.raises(Refused, match=r"api_docs/standard/phone.json is not there; appworld download"):
        make("appworld", appworld_root=str(tmp_path))
    (tmp_path / "documents").rename(tmp_path / "data/api_docs")
    official = make("appworld", appworld_root=str(tmp_path))
    assert official.test_splits == ("test_normal", "test_challenge")
    assert official.tasks("validation") == [f"appworld-validation-{key}" for key in keys[3:6]]


def test_what_was_done_becomes_a_task_that_verifies_and_is_judged_exactly(world):
    generator, rng = world.task_generator(), random.Random(0)
    task = of_family(world, "train", "note-more")
    code = world.solution(world.find(task))
    replies = ["I look.", *map(block, code[:2]), block("apis.none.nothing()"), *map(block, code[2:])]
    patterns = generator.patterns(task, replies)
    assert {"simple_note.login", "simple_note.search_notes, simple_note.add_content_to_note"} <= patterns
    assert "none.nothing" in patterns and "python" not in patterns
    found, = generator.finds(task, replies, rng)
    assert found["template"] and found["solution"] == [*map(block, [*code[:-1], "apis.supervisor.complete_task()"])]
    assert 'added_content = "' in found["text"] and "token" not in found["text"]
    assert generator.refusal(found["task"]) is None and generator.verify(found) is None
    assert json.loads(json.dumps(found)) == found

    made = world.add(found["task"])
    page = world.reset(made)
    assert found["text"] in page and converse(world, page, world.expert())[1] == 1
    shown = play(world, made, ["print(apis.supervisor.show_active_task()['instruction'])"])
    assert shown.observation.strip() == found["text"]
    for wrong in ([*code[:-2], code[-1]], [*code[:-1], code[-2], code[-1]]):
        assert play(world, made, wrong).reward == 0
    assert play(world, made, [*code[:-1], "apis.supervisor.complete_task(answer=3)"]).reward == 0

    start = world.find(of_family(world, "train", "alarm-new"))["start"]
    code = world.solution(dict(start=start))
    made = world.add(dict(start=start, text="An alarm, please.", code=code))
    later = re.sub(r'time="\d\d', 'time="23', code[2])
    assert play(world, made, code).reward == 1
    assert play(world, made, [*code[:2], later, *code[3:]]).reward == 0  # as many changes, but others


def test_a_find_with_a_long_argument_can_be_played_and_does_not_join(world):
    generator = world.task_generator()
    task = of_family(world, "train", "note-more")
    code = world.solution(world.find(task))
    long = [re.sub(r'content=".*?"', "content='word ' * 15_000", part) for part in code]
    found, = generator.finds(task, [*map(block, long)], random.Random(0))
    assert len(found["text"]) > 75_000
    assert found["text"] in world.reset(world.add(found["task"]))
    assert evolve.refusal(generator, found, set(), [], 1.0) == "its text is too long"


def test_planted_proposals_are_refused_or_prove_nothing(world):
    generator = world.task_generator()
    train, test = (of_family(world, split, "alarm-count") for split in ("train", "test"))
    start, code = world.find(train)["start"], world.solution(world.find(train))
    new = dict(start=start, text="How many alarms have I after or before 8:00, 10:00, 12:00, 15:00, 18:00, 20:00?", code=code)
    assert generator.refusal(new) is None
    for wrong, named in [
            ({"start": world.find(test)["start"]}, "no start state of a training task"),
            ({"text": data.specs(small_world(), world.find(test)["start"])["instruction"]}, "a task of a split"),
            ({"code": code[-1:]}, "has 1 parts"), ({"code": code * 8}, "parts, not 2 to 30"),
            ({"code": ["a b", *code[1:]]}, "no Python"), ({"code": code[:-1]}, "does not end by")]:
        assert named in generator.refusal({**new, **wrong})

    def verdict(code):
        return generator.verify(dict(task={**new, "code": code}))

    assert verdict(code) is None  # it asks, and the answer tells
    done = "apis.supervisor.complete_task()"
    assert verdict([*code[:-1], done]) == "it is solved without its last change"
    assert verdict([*code[:2], "1 / 0", *code[2:]]) == "a part of its solution fails"
    drawn = "import random\nrandom.seed()\nanswer = random.random()"
    assert verdict([*code[:-1], drawn, code[-1]]) == "its replays differ"
    later = [code[0], code[1], 'import random\nrandom.seed()\nprint(apis.phone.create_alarm(access_token=token, '
             'label="one", time=f"{random.randint(10, 23)}:{random.randint(10, 59)}"))', done]
    assert verdict(later) == "its replays differ"  # in what has changed, not in how much
    twice = 'apis.phone.update_alarm(access_token=token, alarm_id=alarms[0]["alarm_id"], time="05:05")'
    assert verdict([*code[:-1], twice, twice, done]) == "it is solved without its last change"
    written = generator.written(train, dict(query="Count them.", action_sequence=[*map(block, code[:-1])]))
    assert written["task"] == dict(start=start, text="Count them.", code=[*code[:-1], done])
    assert generator.written(train, dict(query="x", action_sequence=["a b"])) is None
