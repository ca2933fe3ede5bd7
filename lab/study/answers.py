"""Three questions about hard negatives, each a study of several arms over seeds, at equal steps.

    bash run.sh answers near-misses webshop              run it, or go on with it
    bash run.sh answers near-misses webshop --report     what is there so far

An arm's runs are in OUT/ARM-sSEED. Validation chooses the iteration, whose agent then plays the
test splits. What two runs make alike is made once. Settings that are not the study's own, such as
--iterations 3, are given to every run.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from accelerate.state import AcceleratorState

import coevolve
import envs
from common.settings import Refused, parse
from lab.careful.run import Run
from lab.runfiles import command, phases_of
from lab.settings import METHODS, Settings
from lab.study.numbers import interval, paired

# Of every run: short, and the target takes 30 steps an iteration whatever the method.
SHORT = ("--iterations 2 --rollouts 2 --dpo-steps 30 --eval-tasks 150 --eval-splits validation "
         "--margins 0 --threads 1")
# What the study itself says to every run, or what does nothing in its one process.
OWN = {"--env", "--method", "--seed", "--reuse", "--eval-splits", "--threads", "--serve"}
ETO = "--method eto"
POSITIVE = "--method positive"
COEVOLVE = "--method coevolve --failure-epochs 1"


@dataclass(frozen=True)
class Study:
    arms: dict[str, str]                # name -> its settings
    compared: tuple[tuple[str, str], ...]  # a report says by how much the first is ahead
    seeds: range


STUDIES = {
    "near-misses": Study(
        {"eto": ETO, "positive": POSITIVE, "coevolve": COEVOLVE, "designed": "--method designed"},
        (("designed", "eto"), ("designed", "positive"), ("designed", "coevolve"),
         ("coevolve", "eto")), range(13, 23)),
    "threshold": Study(
        {"coevolve": COEVOLVE,
         **{f"hard-{least}": f"{COEVOLVE} --d-tgt-failures hard --hard-threshold {least}"
            for least in ("0.6", "0.7", "0.8")}},
        (("hard-0.6", "coevolve"), ("hard-0.7", "coevolve"), ("hard-0.8", "coevolve"),
         ("hard-0.8", "hard-0.6")), range(13, 18)),
    "size": Study(
        {"eto": ETO, "coevolve": COEVOLVE, "frozen": f"{COEVOLVE} --d-fail none"},
        (("eto", "sft"), ("coevolve", "sft"), ("coevolve", "eto"), ("coevolve", "frozen")),
        range(13, 18)),
}


# ------------------------------------------------------------------------------------ the runs


class Brief(Run):
    """A run that evaluates the target alone."""

    def once(self, output: str, work, *inputs, **how) -> Path | None:
        if work is coevolve.evaluate and how["name"] != "target":
            return None
        return super().once(output, work, *inputs, **how)


def check(study: Study, env: str, more: list[str]) -> None:
    """Refused where an arm would be, or where `more` says what the study itself says."""
    own = set(OWN)
    for settings in study.arms.values():
        own |= {word for word in settings.split() if word.startswith("--")}
    found = [word for word in more if word.split("=")[0] in own]
    if found:
        names = ", ".join(word.split("=")[0] for word in found)
        raise Refused(f"{names}: the study sets this itself, or it would do nothing; leave it out")
    for settings in study.arms.values():
        parse(flags_of(env, settings, more), Settings, METHODS, envs.environment)


def flags_of(env: str, settings: str, more: list[str]) -> list[str]:
    """The flags of an arm's runs, but for what tells them apart."""
    return ["--env", env, *settings.split(), *SHORT.split(), *more]


def make(env: str, arm: str, settings: str, seed: int, out: Path, more: list[str]) -> None:
    """One run; its chosen agent, and the one after SFT, play the test splits."""
    flags = [*flags_of(env, settings, more), "--seed", str(seed), "--out",
             str(out / f"{arm}-s{seed}"), "--reuse", str(out)]
    own, options = parse(flags, Settings, METHODS, envs.environment)
    AcceleratorState._reset_state(reset_partial_state=True)  # a process makes many runs
    run = Brief(own, options)
    METHODS[own.method][0](run)
    best = chosen(run.done)
    for split in run.env.test_splits:
        run.once(f"sft-{split}.jsonl", coevolve.evaluate, run.folder / "sft-target",
                 name="target", i=0, split=split)
        run.once(f"chosen-{split}.jsonl", coevolve.evaluate,
                 run.folder / f"iter{best}/target-agent", name="target", i=best, split=split)
    coevolve.close(run)


def chosen(done: dict[str, dict]) -> int:
    """The iteration whose target has most reward on validation, of equal ones the first."""
    rewards = {row["i"]: row["reward"] for output, row in done.items()
               if re.fullmatch(r"eval-[1-9]\d*-target-validation.jsonl", output)}
    return max(rewards, key=rewards.get)


# ---------------------------------------------------------------------------------- the report


def report(study: Study, seeds: list[int], out: Path) -> str:
    """Reward and success of each arm on each split, and the differences that the study asks for,
    over the seeds on which every arm has ended."""
    found = {arm: {seed: measured(out / f"{arm}-s{seed}") for seed in seeds}
             for arm in study.arms}
    seeds = [seed for seed in seeds if all(found[arm][seed] for arm in study.arms)]
    found["sft"] = found["coevolve"]  # all arms begin with the same agent
    lines = [f"seeds {seeds}"]
    for split in splits_of(out):
        for measure in ("reward", "success"):
            values = {}
            for arm in found:
                key = f"{'sft' if arm == 'sft' else 'chosen'}-{split}"
                values[arm] = {seed: found[arm][seed][key][measure] for seed in seeds}
            lines += [f"{split} {measure} {arm}: {text(interval(values[arm].values()))}"
                      for arm in found]
            lines += [f"{split} {measure} {a} - {b}: {text(paired(values[a], values[b]))}"
                      for a, b in study.compared]
    return "\n".join([*lines, *explored(study, seeds, out)])


def measured(run: Path) -> dict[str, dict]:
    """What is recorded of the evaluations on the test splits, by `chosen-SPLIT` and `sft-SPLIT`;
    nothing of a run that has not ended."""
    if not (run / "phases.json").exists():
        return {}
    rows = {output.removesuffix(".jsonl"): row for output, row in phases_of(run).items()
            if re.match("chosen-|sft-.*jsonl", output)}
    return rows if len(rows) > 2 and len(rows) % 2 == 0 else {}


def splits_of(out: Path) -> list[str]:
    return sorted({file.stem.removeprefix("chosen-") for file in out.glob("*/chosen-*.jsonl")})


def explored(study: Study, seeds: list[int], out: Path) -> list[str]:
    """Of each arm and agent: successes and hard negatives among what it played, pairs and steps."""
    lines = []
    for arm in study.arms:
        rows = [row for seed in seeds for row in phases_of(out / f"{arm}-s{seed}").values()]
        for work in ("explore", "make_near_misses"):
            for name in ("target", "failure", "positive", "designed"):
                of = [row for row in rows if row["work"] == work and row["name"] == name]
                if of:
                    means = {key: sum(row[key] for row in of) / len(of)
                             for key in ("episodes", "reward", "success", "hard")}
                    lines.append(f"{arm}, {name} played: {means}")
        pairs = [row["pairs"] for row in rows if row.get("trains") == "target"]
        kinds = sorted({kind for row in pairs for kind in row})
        counts = {kind: sum(row.get(kind, 0) for row in pairs) / len(pairs) for kind in kinds}
        lines.append(f"{arm}, target's pairs an iteration: {counts}")
    return lines


def text(x: dict | None) -> str:
    """An interval or a paired difference in words."""
    if x is None or x["half"] is None:
        return str(x)
    ahead = f", ahead on {x['ahead']} of {x['n']}" if "ahead" in x else ""
    sure = " *" if x.get("sure") else ""
    return f"{x['mean']:+.4f} ± {x['half']:.4f}{ahead}{sure}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh answers", description=__doc__,
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("env", choices=["webshop", "intercodesql"])
    parser.add_argument("--seeds", nargs="+", type=int, help="[those decided beforehand]")
    parser.add_argument("--out", type=Path, help="the study's folder [runs/STUDY-ENV]")
    parser.add_argument("--base", type=Path, help="a model's folder, in place of the tiny model "
                        "and with its presets [the shipped model]")
    parser.add_argument("--report", action="store_true", help="no run, only the report")
    asked, more = parser.parse_known_args(argv)
    study, out = STUDIES[asked.study], asked.out or Path(f"runs/{asked.study}-{asked.env}")
    seeds = asked.seeds or [*study.seeds]
    check(study, asked.env, more)
    if asked.base:
        if not (asked.base / "config.json").is_file():
            raise Refused(f"--base {asked.base}: no model is in it; give a folder with config, "
                          "weights and tokenizer of a causal LM")
        coevolve.MODELS["tiny"] = asked.base
    if not asked.report:
        out.mkdir(parents=True, exist_ok=True)
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        for seed in seeds:
            for arm, settings in study.arms.items():
                make(asked.env, arm, settings, seed, out, more)
    print(report(study, seeds, out))


if __name__ == "__main__":
    command("answers", main)
