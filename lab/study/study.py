"""Runs a study: several methods with several seeds each, and a report on their differences.

    bash run.sh study webshop                              all methods of coevolve.py, five seeds
    bash run.sh study webshop --methods eto coevolve --beta 0.2 --out runs/study-beta-0.2
    bash run.sh study webshop --report                     only the report on the finished runs

Each run is written to the folder STUDY/METHOD-sSEED, and its printed output to the file
STUDY/METHOD-sSEED.log. To resume a study that was stopped, repeat its command. Other settings, such
as --beta, are passed to every run whose method uses them.
"""

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT
from common.settings import UsageError, flag, names_in, parse
from environments import ENVIRONMENTS, environment
from lab.runfiles import command, count
from lab.settings import METHODS, Settings
from lab.study.compare import write_report
from lab.study.methods import ARMS, COMPARED, FIRST, filled, finished, method_of, needed_by

GPU = shutil.which("nvidia-smi") is not None
running = set()  # processes that `launch` started
starting = threading.Lock()  # held while a process is started; afterwards it is in `running`


def make_runs(
    env: str,
    arms: dict[str, str],
    seeds: list[int],
    folder: Path,
    more: list[str],
    jobs: int,
) -> None:
    """Starts the runs of a study and waits for them. Runs that are already finished end at once.

    Args:
        arms: The flags of each arm. An arm that needs results of another arm must come after it.
        more: Further settings, as flags and values. A run gets those that its method uses.
    """
    settings = {arm: read_by(arm, [*arms], more) for arm in arms}
    for arm, flags in arms.items():  # report errors in settings before any run starts
        words = flags.format(steps=1, tasks=1, lambda_sft=1).split()
        parse(["--env", env, *settings[arm], *words], Settings, METHODS, environment)
    folder.mkdir(parents=True, exist_ok=True)  # the logs need this folder
    started = {}  # (seed, arm) -> future

    def make_run(seed: int, arm: str) -> None:
        for other in needed_by(arms[arm]):
            started[seed, other].result()
        if any(run.done() and run.exception() for run in list(started.values())):
            return  # another run failed, so no further run is started
        name = f"{arm}-s{seed}"
        words = [*settings[arm], *filled(arms[arm], folder, seed), "--seed", str(seed),
                 "--out", str(folder / name)]
        print(f"study: {' '.join(words)}", flush=True)
        launch(env, words, folder / f"{name}.log")
        finished(folder)  # raises UsageError if runs have different settings

    with ThreadPoolExecutor(jobs) as pool:
        for seed, arm in itertools.product(seeds, arms):
            started[seed, arm] = pool.submit(make_run, seed, arm)
        # Python can miss a signal that arrives as it starts to wait for threads, so poll instead.
        while not all(run.done() for run in started.values()):
            time.sleep(0.5)
    for run in started.values():
        run.result()


def read_by(arm: str, arms: list[str], more: list[str]) -> list[str]:
    """Returns the flags in `more` that an arm's method uses, with their values. Flags that no arm
    of the study uses are also returned, so that parsing them raises an error."""
    others = set.union(*map(reads_of, arms)) - reads_of(arm)
    kept = []
    is_kept = True
    for word in more:  # a flag, or a value of the flag before it
        if word.startswith("--"):
            is_kept = word.split("=")[0] not in others
        if is_kept:
            kept.append(word)
    return kept


def reads_of(arm: str) -> set[str]:
    return {flag(name) for name in names_in(METHODS[method_of(arm)].reads)}


def launch(env: str, words: list[str], log: Path) -> None:
    """Runs `run.sh ENV WORDS` in a subprocess, and appends its output to the file `log`. Raises
    UsageError if the exit status is not 0."""
    with open(log, "a") as output:
        with starting:
            child = subprocess.Popen(["bash", ROOT / "run.sh", env, *words], stdout=output,
                                     stderr=output, env=os.environ | {"PYTHON": sys.executable})
            running.add(child)
        status = child.wait()
        running.remove(child)
    if status:
        raise UsageError(f"{words[-1]} ended with status {status}; {log} has the reason. Fix it "
                         "and rerun the same command to resume")


def stop(number: int, _) -> None:
    """Handles Ctrl-C and SIGTERM by ending the study and its runs, which can be resumed."""
    with starting:
        for child in list(running):
            child.terminate()
        os.write(2, b"study: stopped; rerun the same command to resume\n")
        os._exit(128 + number)


def main(argv: list[str]) -> None:
    arms = "\n".join(f"  {arm:24} {words}" for arm, words in ARMS.items())
    parser = argparse.ArgumentParser(
        prog="run.sh study", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Methods and their settings. A value in {...} is taken from the run of coevolve or "
               f"evolve with the same seed, which is then made, too:\n{arms}")
    parser.add_argument("env", metavar="ENV", choices=ENVIRONMENTS, help=", ".join(ENVIRONMENTS))
    parser.add_argument("--methods", nargs="+", choices=ARMS, metavar="METHOD",
                        default=FIRST,
                        help="methods from the list below [all methods of the first system]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5, 6, 7],
                        help="seeds; 0 to 2 were used to choose the default settings "
                        "[3 4 5 6 7]")
    parser.add_argument("--eto-lambda-sft", type=float, metavar="X",
                        help="--lambda-sft of the arms eto-sft, eto-sft-steps and eto-sft-one; "
                        "choose it on validation splits, as for coevolve [that of coevolve]")
    parser.add_argument("--out", type=Path, help="the study's folder [runs/study-ENV]")
    parser.add_argument("--jobs", type=count, help="number of runs at the same time [one per core, "
                        "at most 8, for the tiny model without a GPU; else 1]")
    parser.add_argument("--report", action="store_true", help="only write the report, run nothing")
    args, more = parser.parse_known_args(argv)
    folder = args.out or Path(f"runs/study-{args.env}")
    if {"--method", "--seed"} & {word.split("=")[0] for word in more}:
        raise UsageError("a study takes --methods and --seeds, not --method and --seed")
    if not args.report:
        arms = dict(ARMS)
        if args.eto_lambda_sft is not None:
            for arm, flags in arms.items():
                arms[arm] = flags.replace("{lambda_sft}", str(args.eto_lambda_sft))
        wanted = {*args.methods}
        for arm in args.methods:
            wanted.update(needed_by(arms[arm]))
        small = not GPU and not any(word.startswith("--model") for word in more)
        if small:  # on a CPU, rounding depends on the number of threads, and so may the results
            os.environ["OMP_NUM_THREADS"] = "1"
        make_runs(args.env, {arm: flags for arm, flags in arms.items() if arm in wanted},
                  list(dict.fromkeys(args.seeds)), folder, more,
                  args.jobs or (min(os.cpu_count(), 8) if small else 1))
    runs = finished(folder)
    if not runs:
        raise UsageError(f"{folder}: it has no finished run (METHOD-sSEED with result.json)")
    write_report(f"Study on {args.env}", runs, folder / "report", COMPARED)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    command("study", main)
