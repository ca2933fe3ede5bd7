"""An inference server, as a process that lives as long as it is needed and never longer."""

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import requests

KEEPER = Path(__file__).with_name("keeper.py")
START = 1800  # seconds in which a server has to answer; a large model is read meanwhile [ours]
LOOK = 0.2    # seconds between two looks whether it does
ENDING = 15   # seconds in which one that has dropped a connection may still end [ours]
# What the launcher tells a rank of training is not for its server: it would join the run's group,
# import the run's modules, and take the threads and the allocator that suit training.
NOT_FOR_SERVERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_",
                   "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "OMP_", "PYTORCH_", "PYTHONPATH",
                   "PYTHONSAFEPATH")


class ServerError(OSError):
    """A server does not start, has ended, or answers wrongly; one line with the remedy."""


class Server:
    """A server with one agent, between `start` and `end`; of one that runs already the address."""

    def __init__(self, serve: str, agent: Path | str, log: Path, card: int | None = None):
        """Nothing is started yet.

        Args:
            serve: A command with {agent} and {port}, or the address of a running server.
            agent: The folder or hub name that takes the place of {agent}.
            log: The file to which what the server prints is appended.
            card: The number of this rank's card among those of its machine; None without a GPU.
        """
        self.serve, self.agent, self.log, self.card = serve, agent, log, card
        self.process, self.url, self.name, self.longest = None, "", "", 0
        self.checked = set()  # temperatures at which its distribution was found right

    def start(self) -> None:
        """Returns when the server answers; ServerError where it does not."""
        if self.name:
            return
        if is_address(self.serve):
            self.url = self.serve.rstrip("/").removesuffix("/v1")
        else:
            self.run_command()
        try:
            self.wait_until_it_answers()
        except BaseException:
            self.end()
            raise

    def run_command(self) -> None:
        port = free_port()
        agent = Path(self.agent).resolve() if Path(self.agent).exists() else self.agent
        words = [word.replace("{agent}", str(agent)).replace("{port}", str(port))
                 for word in shlex.split(self.serve)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            # A session of its own: Ctrl-C is for the run, which ends the server then.
            self.process = subprocess.Popen(
                [sys.executable, str(KEEPER), *words], stdin=subprocess.PIPE, stdout=log,
                stderr=log, env=environment(self.card), start_new_session=True)
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_it_answers(self) -> None:
        """Asks for the model's name and length until there is an answer."""
        until = time.monotonic() + START
        while (answer := self.models()) is None:
            self.check_alive()
            if not self.process:
                raise ServerError(f"--serve {self.url}: no server answers there; start it first")
            if time.monotonic() > until:
                raise ServerError(f"--serve: the server has not answered within {START} seconds; "
                                  f"{self.log} has what it printed")
            time.sleep(LOOK)
        try:
            model = answer["data"][0]
            self.name, self.longest = str(model["id"]), int(model["max_model_len"])
        except (LookupError, TypeError, ValueError):
            raise ServerError(f"--serve: {self.url}/v1/models does not say how long a text the "
                              "server reads (max_model_len); give one like vLLM") from None

    def models(self) -> dict | None:
        """What the server says of its models; None where it says nothing yet."""
        try:
            answer = plain_session().get(f"{self.url}/v1/models", timeout=10)
            return answer.json() if answer.ok else None
        except (requests.RequestException, ValueError):
            return None

    def check_alive(self, seconds: float = 0) -> None:
        """ServerError where the process has ended or ends within some seconds, with the last that
        it printed."""
        process = self.process
        if process is None:
            return
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise ServerError(f"--serve: the server ended with status {status}: {last_line(self.log)} "
                          f"({self.log} has the rest)")

    def end(self) -> None:
        """Returns when the server and all that it started are gone."""
        self.name = ""
        self.checked.clear()
        if self.process:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def is_address(serve: str) -> bool:
    return serve.startswith(("http://", "https://"))


def plain_session() -> requests.Session:
    """One that takes no proxy or password from the environment or a file."""
    session = requests.Session()
    session.trust_env = False
    return session


def environment(card: int | None) -> dict[str, str]:
    """What a server gets of this process's environment, with one card."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(NOT_FOR_SERVERS)}
    if card is not None:
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        kept["CUDA_VISIBLE_DEVICES"] = cards.split(",")[card] if cards else str(card)
    return kept


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else "it printed nothing"
