"""Runs AppWorld's episodes and judgements in isolated processes, which child.py forks."""

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

# All limits are our own choice [ours].
SECONDS = 20          # time limit of the code in one reply, in seconds
MEGABYTES = 3000      # maximum address space of an isolated process, in MiB
GRACE_SECONDS = 5     # time to stop code that has reached its time limit, in seconds
START_SECONDS = 900   # time limit for starting the server, a forked process or an episode
JUDGE_SECONDS = 120   # time limit of a judgement, which executes SQL that an episode has saved
MAX_ANSWER = 16 << 20  # maximum size of an answer in bytes, such as all changes of an episode
MAX_OUTPUT = 20_000   # maximum number of characters of an observation


class ProcessEnded(Exception):
    """Raised if the code in an isolated process ends the process or exceeds the time limit."""


class Server:
    """The server process that has imported the package appworld (see child.py).

    Args:
        python: Path of the Python interpreter that has the package appworld.
        root: Folder that contains AppWorld's `data`.
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
                # HOME is set because some users have no home folder.
                env={"TZ": "UTC", "PYTHONHASHSEED": "0", "HOME": "/"})
        answer = self.run_once("check", None)  # returns after the server has imported the package
        if "error" in answer:
            self.end()
            raise UsageError(
                f"appworld: this machine cannot isolate the code of a model ({answer['error']}), "
                "so no code is run; use Linux with user namespaces (on Ubuntu 24.04: sysctl "
                "kernel.apparmor_restrict_unprivileged_userns=0), or as root with CAP_SYS_ADMIN, "
                "which a container's root may lack")

    def begin(self, request: dict, files: list[int]) -> int:
        """Makes the server fork a process, and returns a pidfd of the new process.

        Args:
            request: The job of the new process. It must fit into one packet.
            files: File descriptors that are passed to the new process.
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
        """Runs one job in a new isolated process, and returns its answer, or {"error": ...}."""
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
    """An isolated process that runs the job `do`, see `run_fork` in child.py."""

    def __init__(self, server: Server, do: str, task: str | None):
        self._line, line = socket.socketpair()
        self._report, report = socket.socketpair()
        with line, report:
            files = [line.fileno(), report.fileno()]
            self._process = server.begin(dict(do=do, task=task), files)

    def request(self, seconds: float, **request) -> dict:
        """Sends a request to the process, and returns its answer.

        Without a valid answer within `seconds`, the process is killed.

        Raises:
            ProcessEnded: The process has ended by itself, or has not answered in time.
            EnvError: The process was killed from outside, for example because the machine ran out
                of memory.
        """
        try:
            answer = json.loads(self._exchange(seconds, request))
            if not isinstance(answer, dict):
                raise ValueError
            # Files and tokenizers reject lone surrogates.
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
        """Returns True if the process was killed from outside, so `jail.enter` sent no report."""
        self._report.settimeout(1.0)
        try:
            return not self._report.recv(100)
        except TimeoutError:
            return False

    def end(self) -> None:
        if self._line.fileno() < 0:
            return  # `end` was called before
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)  # also kills its child process
        os.close(self._process)
        self._line.close()
        self._report.close()


@dataclass
class CodeResult:
    """The result of the code in one reply."""
    output: str
    done: bool   # True if the task is completed
    calls: list  # the API calls of the code, each as ["APP.API", arguments]
    changed: bool = False  # True if the code changed the apps, set only in a `judging.Trace`

    @property
    def failed(self) -> bool:
        return self.output.startswith("Execution failed")  # the package's text for an exception


class Episode(IsolatedProcess):
    """An episode, which runs in an isolated process.

    Args:
        start: Id of the AppWorld task in whose start state the episode begins.
        text: The instruction of a task that was created during training, or None for the AppWorld
            task's own instruction.

    Attributes:
        owner: Name, email address and phone number of the person who gives the instruction.
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
        """Executes code in the episode, and returns the result or raises ProcessEnded."""
        answer = self.request(self.seconds, code=code)
        # The output is missing if the agent's code has damaged the package in its process.
        if "output" not in answer:
            self.end()
            raise ProcessEnded(str(answer.get("error"))[:500])
        # The agent's code could have sent this answer itself, so check the type of each value.
        calls = answer.get("calls")
        rows = calls if isinstance(calls, list) else []
        return CodeResult(str(answer["output"])[:MAX_OUTPUT], answer.get("done") is True,
                          [row for row in rows if is_call(row)])

    def changes(self) -> dict[str, str]:
        """Returns all changes made in the apps so far, {file name: file content}."""
        changes = self.request(self.seconds, save=True).get("changes")
        files = changes if isinstance(changes, dict) else {}
        return {file: str(text) for file, text in files.items()}


def is_call(row) -> bool:
    if not isinstance(row, list) or len(row) != 2:
        return False
    return isinstance(row[0], str) and isinstance(row[1], dict)


_servers = {}  # maps (id of this process, python, root) to the server
_lock = threading.Lock()


def server(python: str, root: Path) -> Server:
    """Returns the server that all environments of this process share for a data folder.

    The server starts on first use, and restarts if it has exited.
    """
    key = os.getpid(), python, root
    with _lock:
        if key not in _servers or _servers[key].process.poll() is not None:
            _servers[key] = Server(python, root)
        return _servers[key]
