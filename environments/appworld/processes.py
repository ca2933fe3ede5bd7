"""This side of the processes in which AppWorld's tasks are played and judged; see `child.py`."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.settings import UsageError
from envs import EnvError

SECONDS = 20      # of one reply's code [ours]
MEGABYTES = 3000  # of address space of an episode's process [ours]
GRACE = 5         # seconds beyond those of a reply's code, then its process is killed [ours]
PATIENCE = 900    # seconds for what has nothing of a model in it [ours]
JUDGING = 120     # seconds for a judgement, which runs the SQL that an episode has saved [ours]
MOST = 16 << 20   # characters of an answer: what an episode has changed [ours]
LONGEST = 20_000  # characters of what a reply reads back [ours]


class Gone(Exception):
    """A process has ended or is late, by what it did itself."""


class Server:
    """The process that has the package imported; for all environments of this one.

    Args:
        python: the interpreter that has the package.
        root: the folder of AppWorld's `data`.

    Raises:
        Refused: the machine does not isolate processes.
        EnvError: it did not start.
    """

    def __init__(self, python: str, root: Path):
        self._lock = threading.Lock()
        self._asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asks.settimeout(PATIENCE)
        command = [python, "-I", str(Path(__file__).with_name("child.py")), str(root),
                   str(SECONDS), str(MEGABYTES), str(LONGEST)]
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd="/", start_new_session=True,
                env={"TZ": "UTC", "PYTHONHASHSEED": "0", "HOME": "/"})  # a user may have no home
        told = self.once("check", None)  # it waits until the package is imported
        if "error" in told:
            self.end()
            raise UsageError(
                f"appworld: this machine does not shut in the code of a model ({told['error']}), "
                "so that none is run; it takes Linux, and user namespaces for a user, or for root "
                "CAP_SYS_ADMIN, which a container's root may lack")

    def begin(self, asked: dict, files: list[int]) -> int:
        """A fork that does what is asked, which is short, and keeps these files; as a file."""
        with self._lock:
            try:
                socket.send_fds(self._asks, [json.dumps(asked).encode()], files)
                _, (process,), _, _ = socket.recv_fds(self._asks, 100, 1)
            except (OSError, ValueError):
                raise EnvError("appworld: the process that has the package does not start, or has "
                               "ended") from None
        return process

    def once(self, do: str, task: str | None, **asked) -> dict:
        """The answer of a process that does one thing; `error` in it says what went wrong."""
        shut = Shut(self, do, task)
        try:
            return shut.ask(JUDGING, **asked)
        except Gone as error:
            return dict(error=str(error))
        finally:
            shut.end()

    def end(self) -> None:
        self._asks.close()
        self.process.kill()
        self.process.wait()


class Shut:
    """A process that is shut in, for one thing to do on a task."""

    def __init__(self, server: Server, do: str, task: str | None):
        self._line, line = socket.socketpair()
        self._report, report = socket.socketpair()
        with line, report:
            files = [line.fileno(), report.fileno()]
            self._process = server.begin(dict(do=do, task=task), files)

    def ask(self, seconds: float, **asked) -> dict:
        """Its answer. Gone, or EnvError where it was killed by somebody else, if there is none; it
        has ended then."""
        try:
            told = json.loads(self._said(seconds, asked))
            if not isinstance(told, dict):
                raise ValueError
            # It may say halves of characters, which no file or tokenizer takes.
            whole = json.dumps(told, ensure_ascii=False).encode(errors="replace")
            return json.loads(whole)
        except TimeoutError:
            self.end()
            raise Gone(f"no answer in {seconds:.0f} seconds") from None
        except (OSError, ValueError, RecursionError):
            killed = self._killed()
            self.end()
            if killed:
                raise EnvError("appworld: the process of an episode was killed; give it more "
                               "memory, or fewer --slots") from None
            raise Gone("its process has ended") from None

    def _said(self, seconds: float, asked: dict) -> bytes:
        until = time.monotonic() + seconds
        self._line.settimeout(seconds)
        self._line.sendall(json.dumps(asked).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            self._line.settimeout(max(0.001, until - time.monotonic()))
            part = self._line.recv(1 << 20)
            said += part
            if not part or len(said) > MOST:
                raise OSError
        return said

    def _killed(self) -> bool:
        """Whether it has ended and nobody has reported that, see `jail.enter`."""
        self._report.settimeout(1.0)
        try:
            return not self._report.recv(100)
        except TimeoutError:
            return False

    def end(self) -> None:
        if self._line.fileno() < 0:
            return  # it has ended before
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)  # and with it what it began
        os.close(self._process)
        self._line.close()
        self._report.close()


@dataclass
class Ran:
    """What a reply's code printed, whether the task is completed, what it called."""
    output: str
    done: bool
    calls: list  # of interfaces, [APP.API, arguments]


class Episode(Shut):
    """One on a task's start state, with the text of another task or its own."""
    seconds = SECONDS + GRACE

    def __init__(self, server: Server, start: str, text: str | None):
        super().__init__(server, "play", start)
        try:
            told = self.ask(PATIENCE, text=text)
        except Gone as error:
            told = dict(error=str(error))
        if "error" in told:
            self.end()
            raise EnvError(f"appworld: task {start} does not start: {told['error']}")
        self.text = told["text"]
        self.owner = told["owner"]

    def run(self, code: str) -> Ran:
        """What code did. Gone where it ended the process, or did not end."""
        told = self.ask(self.seconds, code=code)
        if "output" not in told:  # the package cannot go on after what the code did
            self.end()
            raise Gone(str(told.get("error"))[:500])
        # What the process says may be what the code wants it to say: any text, any value.
        calls = told.get("calls")
        rows = calls if isinstance(calls, list) else []
        return Ran(str(told["output"])[:LONGEST], told.get("done") is True,
                   [row for row in rows if is_call(row)])

    def changes(self) -> dict[str, str]:
        """What the episode has left in the apps, as the package saves it: file -> text."""
        found = self.ask(self.seconds, save=True).get("changes")
        kept = found if isinstance(found, dict) else {}
        return {file: str(text) for file, text in kept.items()}


def is_call(row) -> bool:
    """Whether it is of the form [APP.API, arguments]."""
    if not isinstance(row, list) or len(row) != 2:
        return False
    return isinstance(row[0], str) and isinstance(row[1], dict)


_servers = {}  # for which process, python, root -> the server
_lock = threading.Lock()


def server(python: str, root: Path) -> Server:
    """The server of this process for a folder of data, begun on first use."""
    key = os.getpid(), python, root
    with _lock:
        if key not in _servers or _servers[key].process.poll() is not None:
            _servers[key] = Server(python, root)
        return _servers[key]
