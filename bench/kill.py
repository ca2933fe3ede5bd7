"""Kills a small run again and again and compares what it ends in with an undisturbed one.

    python bench/kill.py --kills 50 --env webshop [--dir FOLDER] [settings of the run]

The run has few slots, so that its rollouts have chunks; it says how often one went on inside them.

Half of the kills (SIGKILL) come at a random moment, half within 30 ms of a change in the run's
folder, so that they meet a checkpoint, a trajectory file or the log half written. Each hits either
all processes of the run or one of them. A run that ends is compared file by file, and another
begins. Exit status 1 if anything but the times differs, or a process of the run outlives it.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_coevolve import contents

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--quick", "--train-tasks", "30", "--eval-tasks", "6", "--sft-epochs", "2", "--seed", "5",
         "--threads", "1", "--slots", "1"]


def start(out: Path, flags: list[str]) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "coevolve.py"), *SMALL, *flags, "--out", str(out)]
    with open(out.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command, start_new_session=True, stdout=log,
                                stderr=subprocess.PIPE, text=True)


def state(out: Path) -> list:
    """Names and sizes of what is in the folder: it changes when the run writes."""
    found = []
    for path in sorted(out.rglob("*")):
        try:
            found.append((path, path.stat().st_size))
        except FileNotFoundError:  # it has just been renamed
            continue
    return found


def wait(process: subprocess.Popen, seconds: float, out: Path | None = None) -> None:
    """Until the process ends, the time is over or (with `out`) the folder changes."""
    deadline, before = time.monotonic() + seconds, state(out) if out else None
    while process.poll() is None and time.monotonic() < deadline:
        if out and state(out) != before:
            return
        time.sleep(0.001 if out else 0.02)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    for each in processes:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--random-seed", type=int, default=0, help="of the moments")
    parser.add_argument("--dir", type=Path, help="where the runs go [a temporary folder]")
    asked, flags = parser.parse_known_args()
    folder = asked.dir or Path(tempfile.mkdtemp())
    rng, seen, kills, runs, wrong = random.Random(asked.random_seed), [], 0, 0, []

    process = start(folder / "undisturbed", flags)  # which also makes the tiny model, once
    if process.wait():
        sys.exit(process.stderr.read())
    expected, out = contents(folder / "undisturbed"), folder / "killed"
    started = time.monotonic()
    shutil.rmtree(folder / "undisturbed")
    if start(folder / "undisturbed", flags).wait() or contents(folder / "undisturbed") != expected:
        sys.exit("two undisturbed runs differ")
    usual = time.monotonic() - started
    print(f"undisturbed: {len(expected[0])} files, {usual:.1f} s")

    while not runs or kills < asked.kills:
        shutil.rmtree(out, ignore_errors=True)
        in_this_run, process = 0, start(out, flags)
        while True:
            moment = "random"
            wait(process, rng.uniform(0, usual) if kills < asked.kills else 9999)
            if rng.random() < 0.5 and kills < asked.kills:
                moment = "writing"
                wait(process, usual, out)
                time.sleep(rng.uniform(0, 0.03))
            if process.poll() is not None:
                break
            processes = family(process)
            seen += processes
            alone = rng.random() < 0.5
            victims = [rng.choice(processes)] if alone and processes else processes
            kill(victims)
            kills, in_this_run = kills + 1, in_this_run + 1
            newest = max(state(out), key=lambda x: x[0].stat().st_mtime if x[0].exists() else 0,
                         default=("nothing", 0))[0]
            print(f"kill {kills}, run {runs + 1}, {moment} moment, {len(victims)} of "
                  f"{len(processes)} processes, last written {Path(newest).name}", flush=True)
            if process.pid in [each.pid for each in victims]:
                process.wait()
                process = start(out, flags)
        runs += 1
        if process.returncode:
            wrong.append(f"run {runs} ended with {process.returncode}: {process.stderr.read()}")
        else:
            files, events = contents(out)
            wrong += [f"run {runs}: {name} differs" for name in files.keys() | expected[0].keys()
                      if files.get(name) != expected[0].get(name)]
            wrong += [f"run {runs}: metrics.jsonl differs"] * (events != expected[1])
        print(f"run {runs} ended after {in_this_run} kills: {'equal' if not wrong else wrong[-1]}",
              flush=True)
    orphans = psutil.wait_procs(seen, timeout=20)[1]
    wrong += [f"process {each.pid} runs on" for each in orphans]
    log = out.with_suffix(".log").read_text()
    print(f"went on inside a phase: rollouts {log.count(' goes on after ')} times, "
          f"training {log.count(' went on after step ')} times")
    print(f"{kills} kills in {runs} runs; " + ("; ".join(wrong) if wrong else
          "every run ended in the undisturbed one's files, bit for bit; no process ran on"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
