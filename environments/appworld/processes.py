"""The client of the isolated processes that run AppWorld's episodes and judgements.

`child.py` is the other side.
"""

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

SECONDS = 20          # time limit of one reply's code [ours]
MEGABYTES = 3000      # address space of an episode's process [ours]
GRACE_SECONDS = 5     # time after that limit until the process is killed [ours]
START_SECONDS = 900   # time limit for anything that runs no code of a model [ours]
JUDGE_SECONDS = 120   # time limit of a judgement, which runs SQL saved by an episode [ours]
MAX_ANSWER = 16 << 20  # bytes of an answer, which may hold all changes of an episode [ours]
MAX_OUTPUT = 20_000   # characters of an observation [ours]


class ProcessEnded(Exception):
    """A process has ended, or exceeded its time limit, because of the code that it ran."""


class Server:
    """The process that has the package imported. All environments of this process share it.

    Args:
        python: The interpreter that has the package.
        root: The folder that holds AppWorld's `data`.

    Raises:
        UsageError: This machine cannot isolate processes.
        EnvError: The server did not start.
    """

    def __init__(self, python: str, root: Path):
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_SECONDS)
        command = [python, "-I", str(Path(__file__).with_name("child.py")), str(root),
                   str(SECONDS), str(MEGABYTES), str(MAX_OUTPUT)]
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd="/", start_new_session=True,
                env={"TZ": "UTC", "PYTHONHASHSEED": "0", "HOME": "/"})  # a user may have no home
        answer = self.run_once("check", None)  # it waits until the package is imported
        if "error" in answer:
            self.end()
            raise UsageError(
                f"appworld: this machine cannot isolate the code of a model ({answer['error']}), "
                "so no code is run; use Linux with user namespaces, or as root with CAP_SYS_ADMIN, "
                "which a container's root may lack")

    def begin(self, request: dict, files: list[int]) -> int:
        """Starts a fork of the server.

        Args:
            request: The job, which fits into one packet.
            files: File descriptors that the fork gets.

        Returns:
            A pidfd of the fork.
        """
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                _, (process,), _, _ = socket.recv_fds(self._socket, 100, 1)
            except (OSError, ValueError):
                raise EnvError("appworld: the process that has the package does not start, or has "
                               "ended") from None
        return process

    def run_once(self, do: str, task: str | None, **request) -> dict:
        """Returns the answer of a process that does one job. The answer has `error` if the job
        failed."""
        isolated = IsolatedProcess(self, do, task)
        try:
            return isolated.request(JUDGE_SECONDS, **request)
        except ProcessEnded as error:
            return dict(error=str(error))
        finally:
            isolated.end()

    def end(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


class IsolatedProcess:
    """An isolated process with one job.

    Args:
        server: The server that it is forked from.
        do: The job: "play", "judge", "compare" or "check".
        task: Id of a task, or None for "check".
    """

    def __init__(self, server: Server, do: str, task: str | None):
        self._line, line = socket.socketpair()
        self._report, report = socket.socketpair()
        with line, report:
            files = [line.fileno(), report.fileno()]
            self._process = server.begin(dict(do=do, task=task), files)

    def request(self, seconds: float, **request) -> dict:
        """Sends a request and returns the answer.

        If there is no answer, the process is ended and an exception is raised.

        Raises:
            ProcessEnded: The process has ended by itself, or has not answered in `seconds`.
            EnvError: Something outside killed the process, for example for memory.
        """
        try:
            answer = json.loads(self._exchange(seconds, request))
            if not isinstance(answer, dict):
                raise ValueError
            # The answer may hold lone surrogates, which no file or tokenizer takes.
            valid = json.dumps(answer, ensure_ascii=False).encode(errors="replace")
            return json.loads(valid)
        except TimeoutError:
            self.end()
            raise ProcessEnded(f"no answer in {seconds:.0f} seconds") from None
        except (OSError, ValueError, RecursionError):
            killed = self._was_killed()
            self.end()
            if killed:
                raise EnvError("appworld: the process of an episode was killed; give it more "
                               "memory, or fewer --slots") from None
            raise ProcessEnded("its process has ended") from None

    def _exchange(self, seconds: float, request: dict) -> bytes:
        """Sends a line of JSON and returns the line that answers it."""
        deadline = time.monotonic() + seconds
        self._line.settimeout(seconds)
        self._line.sendall(json.dumps(request).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._line.recv(1 << 20)
            answer += part
            if not part or len(answer) > MAX_ANSWER:
                raise OSError
        return answer

    def _was_killed(self) -> bool:
        """Returns True if the process has ended without the report of `jail.enter`."""
        self._report.settimeout(1.0)
        try:
            return not self._report.recv(100)
        except TimeoutError:
            return False

    def end(self) -> None:
        if self._line.fileno() < 0:
            return  # it has been ended before
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)  # which also ends its children
        os.close(self._process)
        self._line.close()
        self._report.close()


@dataclass
class CodeResult:
    """The result of a reply's code."""
    output: str
    done: bool   # True if the task is completed
    calls: list  # the calls of APIs, each [APP.API, arguments]


class Episode(IsolatedProcess):
    """An episode on a task's start state.

    Args:
        server: The server that it is forked from.
        start: Id of the task whose start state is used.
        text: Instruction of a task made in training, or None for the task's own.

    Attributes:
        text: The instruction.
        owner: Name, email address and phone number of the person.
    """
    seconds = SECONDS + GRACE_SECONDS

    def __init__(self, server: Server, start: str, text: str | None):
        super().__init__(server, "play", start)
        try:
            answer = self.request(START_SECONDS, text=text)
        except ProcessEnded as error:
            answer = dict(error=str(error))
        if "error" in answer:
            self.end()
            raise EnvError(f"appworld: task {start} does not start: {answer['error']}")
        self.text = answer["text"]
        self.owner = answer["owner"]

    def run(self, code: str) -> CodeResult:
        """Executes code and returns its result. Raises ProcessEnded if the code ends the process or
        exceeds the time limit."""
        answer = self.request(self.seconds, code=code)
        if "output" not in answer:  # the code has broken the package's own state
            self.end()
            raise ProcessEnded(str(answer.get("error"))[:500])
        # The code may have forged the answer, so any value can have any type.
        calls = answer.get("calls")
        rows = calls if isinstance(calls, list) else []
        return CodeResult(str(answer["output"])[:MAX_OUTPUT], answer.get("done") is True,
                          [row for row in rows if is_call(row)])

    def changes(self) -> dict[str, str]:
        """Returns what the episode has changed in the apps, file -> text, as the package saves
        it."""
        changes = self.request(self.seconds, save=True).get("changes")
        files = changes if isinstance(changes, dict) else {}
        return {file: str(text) for file, text in files.items()}


def is_call(row) -> bool:
    """Returns True if a value has the form [APP.API, arguments]."""
    if not isinstance(row, list) or len(row) != 2:
        return False
    return isinstance(row[0], str) and isinstance(row[1], dict)


_servers = {}  # (process id, python, root) -> the server of that process
_lock = threading.Lock()


def server(python: str, root: Path) -> Server:
    """Returns this process's server for a folder of data. It starts on first use."""
    key = os.getpid(), python, root
    with _lock:
        if key not in _servers or _servers[key].process.poll() is not None:
            _servers[key] = Server(python, root)
        return _servers[key]
