"""A study: methods x seeds as ordinary runs, then one report on what differs between them.

    bash run.sh study webshop                              the first system's methods, five seeds
    bash run.sh study webshop --methods eto coevolve --beta 0.2 --out runs/study-beta-0.2
    bash run.sh study webshop --report                     the report on what is there so far

A run is in `STUDY/METHOD-sSEED`, its output in `METHOD-sSEED.log`: a study that was stopped goes on
where it was. Settings that are not the study's own are given to every run.
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

import envs
from common.settings import Refused, flag, parse
from lab import settings
from lab.runfiles import command, count
from lab.study.compare import write_report
from lab.study.methods import ALL, METHODS, equals, finished, flags, method_of, unread
from worlds import without_passwords

ROOT = Path(__file__).parents[2]
GPU = shutil.which("nvidia-smi") is not None
running = set()  # processes of `launch`


def make_runs(env: str, methods: list[str], seeds: list[int], folder: Path, more: list[str],
              jobs: int) -> None:
    """Makes the runs that are missing, `jobs` at once; finished ones say so themselves and end."""
    started, own = {}, {method: read_by(method, methods, more) for method in methods}
    for method in methods:  # what one of them refuses is said before all
        parse(["--env", env, *own[method], "--method", method_of(method)], settings.Settings,
              settings.METHODS, envs.environment)
    folder.mkdir(parents=True, exist_ok=True)  # for the logs

    def one(seed, method):
        for other in equals(method):
            started[seed, other].result()
        if any(run.done() and run.exception() for run in list(started.values())):
            return  # the study ends
        name = f"{method}-s{seed}"
        command = ["--reuse", str(folder), *own[method], *flags(method, folder, seed),
                   "--seed", str(seed), "--out", str(folder / name)]
        print(f"study: {without_passwords(' '.join(command))}", flush=True)
        launch(env, command, folder / f"{name}.log")
        finished(folder)  # refuses runs of different settings

    with ThreadPoolExecutor(jobs) as pool:
        for seed, method in itertools.product(seeds, methods):
            started[seed, method] = pool.submit(one, seed, method)
    for run in started.values():
        run.result()


def read_by(method: str, methods: list[str], more: list[str]) -> list[str]:
    """The settings that a method reads, and those that none of the methods reads, to be refused."""
    left = [unread(method_of(name)) for name in methods]
    others = {flag(name) for name in unread(method_of(method)) - set.intersection(*left)}
    kept, mine = [], True
    for word in more:  # a flag, or what is given with the one before it
        if word.startswith("--"):
            mine = word.split("=")[0] not in others
        kept += [word] * mine
    return kept


def launch(env: str, command: list[str], log: Path) -> None:
    """`run.sh ENV COMMAND`, its output in `log`. Refused unless it ends with 0."""
    with open(log, "a") as to:
        child = subprocess.Popen(
            ["bash", str(ROOT / "run.sh"), env, *command], stdout=to, stderr=to,
            env={"OMP_WAIT_POLICY": "passive", **os.environ,  # threads that spin take others' cores
                 "PYTHON": sys.executable, "PART_OF_A_STUDY": "1"})
        running.add(child)
        status = child.wait()
        running.remove(child)
    if status:
        raise Refused(f"{command[-1]} ended with status {status} ({log} says why); once its reason "
                      "is gone, the same command goes on from here")


def stop(number, _) -> None:
    """Ctrl-C and SIGTERM end the runs too; each goes on from where it was."""
    for child in list(running):
        child.terminate()
    os.write(2, b"study: stopped; the same command goes on from here\n")
    os._exit(128 + number)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh study", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", help="webshop, scienceworld, intercodesql, bfcl or appworld")
    parser.add_argument("--methods", nargs="+", choices=[*ALL],
                        default=list(METHODS), help="and those whose steps or tasks "
                        "they take [those of the first system]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5, 6, 7],
                        help="defaults were chosen with seeds 0 to 2 [3 4 5 6 7]")
    parser.add_argument("--out", type=Path, help="the study's folder [runs/study-ENV]")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--jobs", type=count, help="runs side by side [of the tiny model without a "
                        "GPU one a core, at most 8; else 1]")
    parser.add_argument("--report", action="store_true", help="no run, only the report")
    asked, more = parser.parse_known_args(argv)
    folder = asked.out or Path(f"runs/study-{asked.env}")
    if {"--method", "--seed"} & {flag.split("=")[0] for flag in more}:
        raise Refused("a study takes --methods and --seeds, not --method and --seed")
    wanted = {*asked.methods, *itertools.chain(*map(equals, asked.methods))}
    methods = [method for method in ALL if method in wanted]
    if not GPU:  # also, the cores of a machine must not change what a study finds
        more = ["--threads", "1", *more]
    if not asked.report:
        large = GPU or any(word.startswith("--model") for word in more)
        make_runs(asked.env, methods, list(dict.fromkeys(asked.seeds)), folder, more,
                  asked.jobs or (1 if large else min(cores, 8)))
    print(write_report(f"Study on {asked.env}", finished(folder), folder / "report"))
    print(f"study: {folder / 'report'} holds this, the numbers and the figures")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    command("study", main)
