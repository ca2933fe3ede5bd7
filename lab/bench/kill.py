"""Kills a small run again and again and compares what it ends in with an undisturbed one.

    python lab/bench/kill.py --kills 50 --env webshop [--dir FOLDER] [settings of the run]

Half of the kills (SIGKILL) come at a random moment, half within 30 ms of a change in the run's
folder; each hits all processes of the run or one. Exit status 1 if anything but the times differs
where it ends, or a process of the run outlives it.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--quick", "--train-tasks", "30", "--eval-tasks", "6", "--sft-epochs", "2", "--seed", "5",
         "--threads", "1", "--slots", "1"]
TIMES = ("seconds", "tokens_per_second", "resident_mb")  # of an event
OTHERS = ("lock", "config.json", "phases.json", "curves.png", "run.html")  # tell the time or place


def start(out: Path, flags: list[str]) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "lab/loop.py"), *SMALL, *flags, "--out", str(out)]
    with open(out.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)


def contents(out: Path) -> dict:
    """name -> bytes of every file that must be the same; of the log, its events without times."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*")
             if path.is_file() and path.name not in OTHERS}
    files["metrics.jsonl"] = [
        {name: value for name, value in json.loads(line).items() if name not in TIMES}
        for line in files["metrics.jsonl"].splitlines()]
    return files


def sizes(out: Path | None) -> dict:
    """name -> bytes of what is in the folder."""
    found = {}
    for path in out.rglob("*") if out else ():
        with suppress(FileNotFoundError):  # it has just been renamed
            found[path] = path.stat().st_size
    return found


def wait(process: subprocess.Popen, seconds: float, out: Path | None = None) -> None:
    """Until the process ends, the time is over or (with `out`) the folder changes."""
    deadline, before = time.monotonic() + seconds, sizes(out)
    while process.poll() is None and time.monotonic() < deadline and sizes(out) == before:
        time.sleep(0.001 if out else 0.02)


def kill(process: subprocess.Popen, rng: random.Random) -> list[psutil.Process]:
    """Kills all processes of the run or one; returns all that there were."""
    family = []
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    for victim in [rng.choice(family)] if family and rng.random() < 0.5 else family:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    return family


def killed_run(out: Path, flags: list[str], rng: random.Random, usual: float, most: int):
    """(exit status, kills, processes killed) of a run killed at most so often; usual: seconds."""
    shutil.rmtree(out, ignore_errors=True)
    process, kills, killed = start(out, flags), 0, []
    while kills < most and process.poll() is None:
        wait(process, rng.uniform(0, usual / 2))
        if rng.random() < 0.5:
            wait(process, usual, out)
            time.sleep(rng.uniform(0, 0.03))
        family = kill(process, rng) if process.poll() is None else []
        kills, killed = kills + bool(family), killed + family
        wait(process, 1)  # it may have lost a child alone
        if process.poll() == -9:
            process = start(out, flags)
    return process.wait(), kills, killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--dir", type=Path, help="where the runs go [a temporary folder]")
    asked, flags = parser.parse_known_args()
    folder = asked.dir or Path(tempfile.mkdtemp())
    undisturbed, out, started = folder / "undisturbed", folder / "killed", time.monotonic()
    shutil.rmtree(undisturbed, ignore_errors=True)
    if start(undisturbed, flags).wait():
        sys.exit(f"kill.py: the undisturbed run failed, see {undisturbed}.log")
    usual, expected = time.monotonic() - started, contents(undisturbed)

    rng, kills, runs, killed, wrong = random.Random(0), 0, 0, [], []
    while not runs or kills < asked.kills:
        status, more, family = killed_run(out, flags, rng, usual, asked.kills - kills)
        kills, runs, killed = kills + more, runs + 1, killed + family
        files = {} if status else contents(out)
        differ = [name for name in files.keys() | expected.keys()
                  if files.get(name) != expected.get(name)]
        result = f"exit status {status}, see {out}.log" if status else ", ".join(differ)
        wrong += [f"run {runs}: {result}"] if result else []
        print(f"run {runs}, {more} kills: {result or 'equal'}", flush=True)
    wrong += [f"process {each.pid} runs on" for each in psutil.wait_procs(killed, timeout=20)[1]]
    log = out.with_suffix(".log").read_text()
    print(f"went on inside a phase: rollouts {log.count(' goes on after ')} times, "
          f"training {log.count(' went on after step ')} times")
    print(f"{kills} kills in {runs} runs; " + ("; ".join(wrong) if wrong else
          "every run ended in the undisturbed one's files, bit for bit; no process ran on"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
