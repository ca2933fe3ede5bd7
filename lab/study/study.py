"""A study: arms x seeds as ordinary runs, then one report on what differs between them.

    bash run.sh study webshop                              the first system's arms, five seeds
    bash run.sh study webshop --methods eto coevolve --beta 0.2 --out runs/study-beta-0.2
    bash run.sh study webshop --report                     the report on what is there so far

A run is in `STUDY/METHOD-sSEED`, its output in `METHOD-sSEED.log`: a study that was stopped goes on
where it was. Settings that are not the study's own are given to every run that reads them.
"""

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.settings import UsageError, flag, names_in, parse
from environments import ENVIRONMENTS, environment
from lab.runfiles import command, count
from lab.settings import METHODS, Settings
from lab.study.compare import write_report
from lab.study.methods import ARMS, COMPARED, FIRST, finished, flags, method_of, needed_by

ROOT = Path(__file__).parents[2]
GPU = shutil.which("nvidia-smi") is not None
running = set()  # processes of `launch`


def make_runs(
    env: str,
    arms: list[str],
    seeds: list[int],
    folder: Path,
    more: list[str],
    jobs: int,
) -> None:
    """Makes the runs that are missing; finished ones say so themselves and end.

    Args:
        env: The environment.
        arms: In such an order that a run comes after those that it takes something from.
        seeds: Each arm has a run of each.
        folder: The study's.
        more: Settings for all runs that read them.
        jobs: How many runs go side by side.
    """
    given = {arm: read_by(arm, arms, more) for arm in arms}
    for arm in arms:  # what one of them refuses is said before all
        parse(["--env", env, *given[arm], "--method", method_of(arm)], Settings, METHODS,
              environment)
    folder.mkdir(parents=True, exist_ok=True)  # for the logs
    started = {}

    def one(seed: int, arm: str) -> None:
        for other in needed_by(arm):
            started[seed, other].result()
        if any(run.done() and run.exception() for run in list(started.values())):
            return  # the study ends
        name = f"{arm}-s{seed}"
        words = [*given[arm], *flags(arm, folder, seed), "--seed", str(seed),
                 "--out", str(folder / name)]
        print(f"study: {' '.join(words)}", flush=True)
        launch(env, words, folder / f"{name}.log")
        finished(folder)  # refuses runs of different settings

    with ThreadPoolExecutor(jobs) as pool:
        for seed, arm in itertools.product(seeds, arms):
            started[seed, arm] = pool.submit(one, seed, arm)
    for run in started.values():
        run.result()


def read_by(arm: str, arms: list[str], more: list[str]) -> list[str]:
    """Of some flags and values those that an arm reads, and those that none of the arms reads, to
    be refused."""
    reads = {}  # arm -> its flags
    for other in arms:
        reads[other] = {flag(name) for name in names_in(METHODS[method_of(other)].reads)}
    others = set.union(*reads.values()) - reads[arm]
    kept = []
    mine = True
    for word in more:  # a flag, or what is given with the one before it
        if word.startswith("--"):
            mine = word.split("=")[0] not in others
        if mine:
            kept.append(word)
    return kept


def launch(env: str, words: list[str], log: Path) -> None:
    """`run.sh ENV WORDS`, its output in `log`. Refused unless it ends with 0."""
    with open(log, "a") as to:
        child = subprocess.Popen(["bash", str(ROOT / "run.sh"), env, *words], stdout=to, stderr=to,
                                 env=os.environ | {"PYTHON": sys.executable})
        running.add(child)
        status = child.wait()
        running.remove(child)
    if status:
        raise UsageError(f"{words[-1]} ended with status {status} ({log} says why); once its reason "
                      "is gone, the same command goes on from here")


def stop(number: int, _) -> None:
    """Ctrl-C and SIGTERM end the runs too; each goes on from where it was."""
    for child in list(running):
        child.terminate()
    os.write(2, b"study: stopped; the same command goes on from here\n")
    os._exit(128 + number)


def main(argv: list[str]) -> None:
    made_by = "\n".join(f"  {arm:24} {given}" for arm, given in ARMS.items())
    parser = argparse.ArgumentParser(
        prog="run.sh study", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="methods, and their settings; {...} is what co-evolution, or evolution, took or had "
               f"on the seed, whose runs are made, too:\n{made_by}")
    parser.add_argument("env", metavar="ENV", choices=ENVIRONMENTS, help=", ".join(ENVIRONMENTS))
    parser.add_argument("--methods", nargs="+", choices=[*ARMS], metavar="METHOD",
                        default=list(FIRST), help="some of those below [those of the first system]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5, 6, 7],
                        help="defaults were chosen with seeds 0 to 2 [3 4 5 6 7]")
    parser.add_argument("--out", type=Path, help="the study's folder [runs/study-ENV]")
    parser.add_argument("--jobs", type=count, help="runs side by side [of the tiny model without a "
                        "GPU one a core, at most 8; else 1]")
    parser.add_argument("--report", action="store_true", help="no run, only the report")
    asked, more = parser.parse_known_args(argv)
    folder = asked.out or Path(f"runs/study-{asked.env}")
    if {"--method", "--seed"} & {word.split("=")[0] for word in more}:
        raise UsageError("a study takes --methods and --seeds, not --method and --seed")
    if not asked.report:
        wanted = {*asked.methods, *itertools.chain(*map(needed_by, asked.methods))}
        small = not GPU and not any(word.startswith("--model") for word in more)
        if small:  # the cores of a machine must not change what a study finds
            os.environ["OMP_NUM_THREADS"] = "1"
        make_runs(asked.env, [arm for arm in ARMS if arm in wanted],
                  list(dict.fromkeys(asked.seeds)), folder, more,
                  asked.jobs or (min(os.cpu_count(), 8) if small else 1))
    runs = finished(folder)
    if not runs:
        raise UsageError(f"{folder}: no finished run in it (METHOD-sSEED with result.json)")
    print(write_report(f"Study on {asked.env}", runs, folder / "report", COMPARED))
    print(f"study: {folder / 'report'} holds this, the numbers and the figures")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    command("study", main)
