"""A study: methods x seeds as ordinary runs, then one report on what differs between them.

    bash run.sh study webshop                              all methods, five seeds, then the report
    bash run.sh study webshop --methods eto coevolve --beta 0.2 --out runs/study-beta-0.2
    bash run.sh study webshop --report                     the report on what is there so far

Each run is a folder like any other (`STUDY/METHOD-sSEED`): a study that was stopped goes on where
it was. Seeds come before methods, so that every method has the same seeds at any moment. Settings
that are not the study's own are given to every run; without a GPU a run has one thread. Of several
runs side by side each writes to its own `METHOD-sSEED.log`. The report folder holds report.md,
report.json, the figures and the hardest negatives as conversations.
"""

import argparse
import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np

import report
from settings import SettingsError, parse, without_passwords

# Beside the methods themselves: with as many optimiser steps of the target as co-evolution took on
# the same seed, with as many rollouts too (the positive agent has them anyway), with steps that
# read as many tokens; a failure agent that is not trained; Figure 4's values.
METHODS = ("coevolve", "eto", "sft", "positive", "eto-steps", "eto-steps-rollouts", "eto-tokens",
           "positive-steps", "frozen", "rft", "dart", "ppo", "lambda-0.01", "lambda-0.1",
           "lambda-0.5")
NAMES = {"coevolve": "co-evolution", "eto": "ETO", "sft": "SFT", "positive": "positive agent",
         "eto-steps": "ETO, equal steps", "eto-steps-rollouts": "ETO, equal steps and rollouts",
         "eto-tokens": "ETO, equal tokens", "positive-steps": "positive agent, equal steps",
         "frozen": "co-evolution, failure agent frozen", "rft": "RFT", "dart": "RFT + DART",
         "ppo": "PPO"}
# What the paper says is ahead of what (in Figure 4: alike); and ours, what it does not compare.
CLAIMS = [("coevolve", "eto", "Tables 3, 4"), ("coevolve", "eto-steps", "ours"),
          ("coevolve", "eto-steps-rollouts", "ours"), ("coevolve", "eto-tokens", "ours"),
          ("coevolve", "positive", "Section 5.4"),
          ("coevolve", "positive-steps", "ours"), ("coevolve", "frozen", "ours"),
          ("positive", "eto", "ours"), ("coevolve", "ppo", "Table 3"),
          ("coevolve", "dart", "Section 5.3"), ("coevolve", "rft", "Table 3"),
          ("coevolve", "sft", "Table 3"), ("eto", "sft", "Table 3"), ("ppo", "sft", "Table 3"),
          ("rft", "sft", "Table 3"), ("dart", "rft", "Section 5.3"),
          ("coevolve", "lambda-0.01", "Figure 4: alike"),
          ("coevolve", "lambda-0.1", "Figure 4: alike"),
          ("coevolve", "lambda-0.5", "Figure 4: alike")]
THRESHOLDS = (0.6, 0.7, 0.8)
MEASURES = ("reward", "success")
SECOND = report.AGENTS[2:]
GPU = shutil.which("nvidia-smi") is not None


# --------------------------------------------------------------------------------- the runs


def method_of(method: str) -> str:
    """--method of a run in the study: `positive` of positive-steps."""
    base = method.split("-")[0]
    return "coevolve" if base in ("lambda", "frozen") else base


def flags(method: str, folder: Path, seed: int) -> list[str]:
    """The settings that make a run of `method`; equal steps are those of co-evolution's run."""
    found = ["--method", method_of(method)]
    if method.startswith("lambda-"):
        found += ["--lambda-sft", method.removeprefix("lambda-")]
    if method == "frozen":
        found += ["--d-fail", "none"]
    if likes := equals(method):
        like, *eto = [folder / f"{other}-s{seed}" for other in likes]
        steps, tokens = mean_cost(like)
        if eto:
            eto_steps, eto_tokens = mean_cost(*eto)
            steps = eto_steps * tokens / eto_tokens
        found += ["--dpo-steps", str(max(1, round(steps)))]
        if "-rollouts" in method:
            found += ["--rollouts", str(2 * report.result(like)["settings"]["rollouts"])]
    return found


def equals(method: str) -> tuple[str, ...]:
    """Whose runs say how long the target trains: those at equal cost with co-evolution."""
    return (("coevolve",) if "-steps" in method else
            ("coevolve", "eto") if "-tokens" in method else ())


def mean_cost(run: Path) -> tuple[float, float]:
    """Optimiser steps and tokens of the target's training in an iteration, means over iterations.

    Tokens are those of the trajectories, counted as often as they are read.
    """
    taken = [(e["steps"], e.get("tokens", 0)) for e in of_target(trained(run))]
    if not sum(tokens for _, tokens in taken):
        raise report.RunError(f"{run}: the target was not trained in it; let this run finish "
                              "before those at equal cost")
    return tuple(np.mean(taken, axis=0).tolist())


def play(env: str, methods: list[str], seeds: list[int], folder: Path, more: list[str],
         jobs: int) -> None:
    """Makes the runs that are missing, `jobs` at once; finished ones say so themselves and end."""
    ours, started = parse(["--env", env, *more]).lambda_sft, {}
    for method in methods:  # what one of them refuses is said before all
        parse(["--env", env, *more, "--method", method_of(method)])
    folder.mkdir(parents=True, exist_ok=True)  # for the logs

    def one(seed, method):
        for other in equals(method):
            started[seed, other].result()
        if any(run.done() and run.exception() for run in list(started.values())):
            return  # the study ends
        name = f"{method}-s{seed}"
        command = [*more, *flags(method, folder, seed), "--seed", str(seed),  # the last one counts
                   "--out", str(folder / name)]
        print(f"study: {without_passwords(' '.join(command))}", flush=True)
        launch(env, command, folder / f"{name}.log" if jobs > 1 else None)
        refuse_unlike(finished(folder))

    with ThreadPoolExecutor(jobs) as pool:
        for seed, method in itertools.product(seeds, methods):
            same = method == f"lambda-{ours:g}" and "coevolve" in methods  # it is that run
            if not same:
                started[seed, method] = pool.submit(one, seed, method)
    for run in started.values():
        run.result()


def launch(env: str, command: list[str], log: Path | None) -> None:
    """`run.sh ENV COMMAND`, its output in `log`, if any. SettingsError unless it ends with 0."""
    run_sh, lock = Path(__file__).parent / "run.sh", Path(command[-1]) / "lock"
    if lock.exists():  # held by a run that outlived a study that was killed: that ends first
        with open(lock, "a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"study: waits for the process that runs in {lock.parent}", flush=True)
                fcntl.flock(held, fcntl.LOCK_EX)
    with open(log, "a") if log else nullcontext() as to:
        child = subprocess.Popen(["bash", str(run_sh), env, *command], stdout=to, stderr=to,
                                 env={**os.environ, "PYTHON": sys.executable})
        running.add(child)
        status = child.wait()
        running.remove(child)
    if status:
        said = f" ({log} says why)" if log else ""
        raise SettingsError(f"{command[-1]} ended with status {status}{said}; once its "
                            "reason is gone, the same command goes on from here")


running = set()  # processes of `launch`


def stop(number, _) -> None:
    """Ctrl-C and SIGTERM end the runs too; each goes on from where it was."""
    for child in list(running):
        child.terminate()
    os.write(2, b"study.py: stopped; the same command goes on from here\n")
    os._exit(128 + number)


def finished(folder: Path) -> dict[str, dict[int, Path]]:
    """method -> seed -> folder of the finished runs of a study, methods in the order of METHODS."""
    runs = {}
    for path in folder.glob("*-s*"):
        method, _, seed = path.name.rpartition("-s")
        if method in METHODS and seed.isdigit() and (path / "result.json").exists():
            runs.setdefault(method, {})[int(seed)] = path
    return {method: dict(sorted(runs[method].items())) for method in METHODS if method in runs}


def refuse_unlike(runs: dict[str, dict[int, Path]]) -> None:
    """RunError if runs differ in more than the seed and what the study varies between methods."""
    first = {}
    for method, found in runs.items():
        own = {"method"}  # what `flags` gives this method
        own |= {"lambda_sft"} if method.startswith("lambda-") else set()
        own |= {"d_fail"} if method == "frozen" else set()
        own |= {"rollouts"} if "-rollouts" in method else set()
        for path in found.values():
            config = report.read_object(path / "config.json", settings=dict)
            for name, value in config["settings"].items():
                if name in {"out", *report.MAY_DIFFER} or (name == "dpo_steps" and equals(method)):
                    continue
                key = method if name in own else "", name
                other, before = first.setdefault(key, (path, value))
                if value != before:
                    raise report.RunError(f"{path} and {other} differ in {name} ({value}, "
                                          f"{before}); give each study a folder of its own")


# ------------------------------------------------------------------------------ statistics


def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t distribution.

    With t = sqrt(v) tan(a), the probability of (0, t) is half of the integral of cos^(v-1) from 0
    to a over that from 0 to pi/2.
    """
    angle = np.linspace(0, math.pi / 2, 200_001)
    height = np.cos(angle) ** (degrees - 1)
    area = np.concatenate([[0.0], np.cumsum((height[1:] + height[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(float(np.interp(0.95, area / area[-1], angle)))


def interval(values) -> dict:
    """Mean and half the width of its 95% t interval (None for one value) over seeds."""
    values = np.asarray(list(values), dtype=float)
    n, half = len(values), None
    if n > 1:
        half = float(t_quantile(n - 1) * values.std(ddof=1) / math.sqrt(n))
    return dict(n=n, mean=float(values.mean()), half=half)


def paired(a: dict[int, float], b: dict[int, float]) -> dict | None:
    """a - b on the seeds that both have: interval, on how many a is ahead, and what follows."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    found = interval([a[s] - b[s] for s in seeds])
    sure = found["n"] > 2 and abs(found["mean"]) > found["half"]
    verdict = ("ahead" if found["mean"] > 0 else "behind") if sure else "undecided"
    return dict(found, ahead=sum(a[s] > b[s] for s in seeds), seeds=seeds, verdict=verdict)


# ------------------------------------------------------------------------- what a run holds


def trained(run: Path) -> list[dict]:
    """The training phases after the first SFT."""
    return [e for e in report.read_jsonl(run / "metrics.jsonl") if e["event"] == "phase"
            and e["phase"].startswith("iter") and "steps" in e]


def of_target(phases: list[dict]) -> list[dict]:
    return [e for e in phases if e["phase"].endswith(("-target", "-sft"))]  # -sft: RFT's second


def scores(run: Path, *agents: str) -> dict[str, list[dict]]:
    """split -> an agent's evaluations, by iteration; of the two named no run has both."""
    found = {}
    for e in report.result(run)["evaluations"]:
        if e["agent"] in agents:
            found.setdefault(e["split"], []).append(e)
    return found


def cost(run: Path) -> dict:
    """Steps after the first SFT, the target's and all agents'; the target's tokens; rollouts."""
    of_all = trained(run)
    return dict(target_steps=sum(e["steps"] for e in of_target(of_all)),
                all_steps=sum(e["steps"] for e in of_all),
                target_tokens=sum(e.get("tokens", 0) for e in of_target(of_all)),
                rollouts=sum(e["trajectories"] for e in report.result(run)["exploration"]))


def explored(run: Path, agent: str | None = None) -> list[dict]:
    """All explored trajectories of a run, or one agent's."""
    return [row for path in sorted(run.glob("iter*/*.jsonl")) for row in
            (report.read_jsonl(path) if path.stem.split("-")[0] in report.AGENTS[1:] else ())
            if agent in (None, row["agent"])]


def shares(rewards, threshold: float) -> dict:
    """Table 2: success, negative (below the threshold) and hard negative, which sum to 1."""
    rewards = np.asarray(rewards)
    won, hard = rewards >= 1, (rewards >= threshold) & (rewards < 1)
    return dict(success=float(won.mean()), negative=float((~won & ~hard).mean()),
                hard_negative=float(hard.mean()))


# ------------------------------------------------------------------- Figure 3: how failures differ


def mean_distance(vectors: np.ndarray) -> float:
    """Mean over all pairs of 1 - cos, of vectors (n, d), n >= 2."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    return float(1 - cosines.mean())


def distances(rows: list[dict], embed) -> dict[str, float]:
    """The mean pairwise distance of each instruction's failures, where it has two at least."""
    by_task = {}
    for row in rows:
        if row["reward"] < 1 and any(row["action_mask"]):
            by_task.setdefault(row["task"], []).append(row)
    return {task: mean_distance(np.stack([embed(row) for row in found]))
            for task, found in by_task.items() if len(found) > 1}


def embedder(policy: Path, hub_name: str | None):
    """A function from a trajectory to its embedding (d,): the last layer's mean hidden state.

    By default `policy` reads its own tokens, and the mean is over action tokens; with a hub name,
    that encoder reads the conversation as text, and the mean is over all tokens.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    name = hub_name or policy
    model = (AutoModel.from_pretrained(name, dtype=dtype) if hub_name else
             AutoModelForCausalLM.from_pretrained(name, dtype=dtype).base_model)
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)

    @torch.inference_mode()
    def embed(row: dict) -> np.ndarray:
        if hub_name:
            text = "\n".join(m["content"] for m in row["messages"])
            limit = min(getattr(model.config, "max_position_embeddings", 10 ** 9),
                        tokenizer.model_max_length, 10 ** 9)  # the first holds some it cannot use
            ids = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
            mask = [1] * len(ids)
        else:
            ids, mask = row["ids"], row["action_mask"]
        states = model(input_ids=torch.tensor([ids], device=device)).last_hidden_state[0]  # (l, d)
        chosen = torch.tensor(mask, device=device, dtype=torch.bool)
        return states[chosen].float().mean(0).cpu().numpy()

    return embed


def check_encoder(hub_name: str) -> None:
    """SettingsError, before any run, unless the encoder's configuration and tokenizer are there."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(hub_name), AutoTokenizer.from_pretrained(hub_name)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        problem = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(f"--encoder {hub_name}: {problem[0]}; give a hub name within reach, or "
                            "a folder") from None


# ---------------------------------------------------------------------------------- the report


def write_report(env: str, folder: Path, encoder: str | None) -> str:
    """Writes folder/report from the finished runs; returns its Markdown. RunError without runs."""
    runs = finished(folder)
    if not runs:
        raise report.RunError(f"{folder}: no finished run in it (METHOD-sSEED with result.json)")
    refuse_unlike(runs)
    out = folder / "report"
    out.mkdir(exist_ok=True)
    by_run, second = ({(m, s): scores(path, *agents) for m, found in runs.items()
                       for s, path in found.items()} for agents in (["target"], SECOND))
    splits = list(next(iter(by_run.values())))
    numbers = dict(environment=env, seeds={m: list(found) for m, found in runs.items()},
                   main=main_table(runs, by_run, splits),
                   second_agents=second_agents(runs, second, splits),
                   paired=paired_table(runs, by_run, splits),
                   table2=table2(runs), course=course(runs), curves=curves(runs, by_run, splits),
                   figure3=figure3(runs, encoder), figure4=figure4(runs, by_run, splits))
    (out / "report.json").write_text(json.dumps(numbers, indent=1))
    draw(numbers, splits, out)
    if "coevolve" in runs:
        first = next(iter(runs["coevolve"].values()))
        (out / "conversations.txt").write_text(report.show(first, None, 3))
    text = markdown(numbers, splits)
    (out / "report.md").write_text(text)
    return text


def final(by_run, method: str, split: str, key: str) -> dict[int, float]:
    """seed -> the last evaluation."""
    return {s: found[split][-1][key] for (m, s), found in by_run.items()
            if m == method and split in found}


def finals(by_run, method: str, splits) -> dict:
    """"SPLIT reward" and "SPLIT success" -> interval over seeds."""
    return {f"{split} {key}": interval(final(by_run, method, split, key).values())
            for split in splits for key in MEASURES}


def main_table(runs, by_run, splits) -> dict:
    costs = {m: [cost(path) for path in found.values()] for m, found in runs.items()}
    return {m: {**finals(by_run, m, splits),
                **{key: float(np.mean([c[key] for c in costs[m]]))
                   for key in ("target_steps", "all_steps", "target_tokens", "rollouts")}}
            for m in runs}


def second_agents(runs, second, splits) -> dict:
    """method -> finals of its failure agent or second positive agent, where it has one."""
    return {m: finals(second, m, splits) for m in runs if any(second[m, s] for s in runs[m])}


def paired_table(runs, by_run, splits) -> list[dict]:
    rows = []
    for a, b, source in CLAIMS:
        for split, key in itertools.product(splits, MEASURES):
            found = paired(final(by_run, a, split, key), final(by_run, b, split, key))
            if found:
                rows.append(dict(a=a, b=b, source=source, split=split, measure=key, **found))
    return rows


def table2(runs) -> dict:
    """method -> threshold -> share -> interval over seeds, of all explored trajectories.

    Where both are there, co-evolution's share minus ETO's too, on the same seeds.
    """
    found, names = {}, ("success", "negative", "hard_negative")
    rewards = {m: {seed: [row["reward"] for row in explored(path)]
                   for seed, path in runs[m].items()}
               for m in ("eto", "positive", "coevolve") if m in runs}
    share = lambda m, t, key: {seed: shares(r, t)[key] for seed, r in rewards[m].items()}
    for m in rewards:
        found[m] = {str(t): {key: interval(share(m, t, key).values()) for key in names}
                    for t in THRESHOLDS}
    if {"eto", "coevolve"} <= rewards.keys():
        found["coevolve - eto"] = {str(t): {key: paired(share("coevolve", t, key),
                                                        share("eto", t, key)) for key in names}
                                   for t in THRESHOLDS}
    return found


def course(runs) -> list[dict]:
    """Iteration by iteration of co-evolution: explored rewards, hard negatives, pairs; means."""
    table = {}
    for path in runs.get("coevolve", {}).values():
        found = report.result(path)
        for e in found["exploration"]:
            for key in ("reward", "success", "hard_negative"):
                table.setdefault((e["iteration"], f"{e['agent']} {key}"), []).append(e[key])
        for e in found["pairs"]:
            for kind in report.KINDS:
                if kind in e["kept"]:
                    column = f"pairs of the {e['trains']}: {kind}"
                    table.setdefault((e["iteration"], column), []).append(e["kept"][kind])
    return [dict(iteration=i, **{name: float(np.mean(values)) for (j, name), values in
                                 table.items() if j == i}) for i in sorted({i for i, _ in table})]


def curves(runs, by_run, splits) -> dict:
    """method -> split -> iteration -> interval over seeds of the target's reward."""
    return {m: {split: {e["iteration"]: interval(
        found[split][n]["reward"] for (method, _), found in by_run.items()
        if method == m and len(found.get(split, ())) > n)
        for n, e in enumerate(by_run[m, next(iter(runs[m]))].get(split, ()))} for split in splits}
        for m in runs}


def figure3(runs, encoder) -> dict:
    """Distances of each instruction's failures, by agent, over the seeds that both methods have.

    The failure agent is compared with ETO on the instructions on which both failed twice or more:
    elsewhere the one's are the harder ones.
    """
    if not {"eto", "coevolve"} <= runs.keys():
        return {}
    found = {"ETO": [], "co-evolution: target": [], "co-evolution: failure agent": []}
    seeds = sorted(runs["eto"].keys() & runs["coevolve"].keys())
    for seed in seeds:
        # One encoder for both: the SFT agent, from which both methods start on this seed.
        embed = embedder(runs["coevolve"][seed] / "sft-target", encoder)
        for name, rows in zip(found, (explored(runs["eto"][seed], "target"),
                                      explored(runs["coevolve"][seed], "target"),
                                      explored(runs["coevolve"][seed], "failure"))):
            found[name].append(distances(rows, embed))
    means = {name: {s: float(np.mean([*d.values()])) for s, d in zip(seeds, by_seed) if d}
             for name, by_seed in found.items()}
    if not any(means.values()):  # no instruction on which an agent failed twice
        return {}
    differences = [[b[task] - a[task] for task in a.keys() & b.keys()]
                   for a, b in zip(found["ETO"], found["co-evolution: failure agent"])]
    pair = paired({s: float(np.mean(d)) for s, d in zip(seeds, differences) if d},
                  dict.fromkeys(seeds, 0.0))
    return dict(encoder=encoder or "the SFT agent's hidden states", seeds=seeds,
                distances={name: [x for d in by_seed for x in d.values()]
                           for name, by_seed in found.items()},
                means={name: interval(m.values()) for name, m in means.items() if m},
                failure_agent_minus_eto=pair)


def figure4(runs, by_run, splits) -> dict:
    """lambda_SFT -> split -> interval over seeds of co-evolution's final reward."""
    values = {}
    for m in (m for m in runs if m == "coevolve" or m.startswith("lambda-")):
        for seed, path in runs[m].items():
            weight = report.result(path)["settings"]["lambda_sft"]
            for split in splits:
                values.setdefault(weight, {}).setdefault(split, {})[seed] = (
                    by_run[m, seed][split][-1]["reward"])
    return {str(w): {split: interval(v.values()) for split, v in values[w].items()}
            for w in sorted(values)}


def text_of(x: dict | None, digits: int = 3) -> str:
    if x is None:
        return "-"
    half = "± ?" if x["half"] is None else f"± {x['half']:.{digits}f}"
    return f"{x['mean']:.{digits}f} {half}"


def name_of(method: str) -> str:
    return NAMES.get(method, f"co-evolution, lambda_SFT {method.removeprefix('lambda-')}")


def scores_of(row: dict, splits: list[str]) -> list[str]:
    """Of `finals`, a cell for each split: reward and, in brackets, success rate."""
    return [f"{text_of(row[f'{s} reward'])} ({text_of(row[f'{s} success'])})" for s in splits]


def table_of(header: list[str], rows) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in
            [header, ["---"] * len(header), *([str(c) for c in row] for row in rows)]] + [""]


def markdown(n: dict, splits: list[str]) -> str:
    lines = [f"# Study on {n['environment']}", "",
             "Greedy evaluation of the target after its last iteration: mean over seeds ± half of "
             "the 95% t interval, reward and, in brackets, success rate.", ""]
    lines += table_of(["method", "seeds", *splits, "steps of the target", "steps of all agents",
                       "M tokens in the target's training", "rollouts"],
                      [(name_of(m), " ".join(map(str, n["seeds"][m])), *scores_of(row, splits),
                        f"{row['target_steps']:,.0f}", f"{row['all_steps']:,.0f}",
                        f"{row['target_tokens'] / 1e6:.2f}", f"{row['rollouts']:,.0f}")
                       for m, row in n["main"].items()])
    if n["second_agents"]:
        lines += ["The second agents, the failure agent or the second positive one:", ""]
        lines += table_of(["method", *splits], [
            (name_of(m), *scores_of(row, splits)) for m, row in n["second_agents"].items()])
    lines += ["## Differences on the same seeds", "",
              "Mean ± half of the 95% interval, and on how many seeds the first is ahead. Bold: "
              "three seeds or more, and the interval does not hold 0. Intervals are not corrected "
              f"for their number: were there no differences, {len(n['paired']) / 20:.1f} of these "
              f"{len(n['paired'])} would still not hold it.", ""]
    claims = {}
    for r in n["paired"]:
        cell = text_of(r) if r["verdict"] == "undecided" else f"**{text_of(r)}**"
        claims.setdefault((f"{name_of(r['a'])} - {name_of(r['b'])}", r["source"]), {})[
            r["split"], r["measure"]] = f"{cell} ({r['ahead']} of {r['n']})"
    columns = list(itertools.product(splits, MEASURES))
    lines += table_of(["difference", *(f"{split}: {key}" for split, key in columns), "claimed in"],
                      [(name, *(cells.get(c, "-") for c in columns), source)
                       for (name, source), cells in claims.items()])
    lines += at_equal_cost(n["paired"])
    if n["table2"]:
        lines += ["## Table 2: explored trajectories, all agents and iterations of a method", ""]
        lines += table_of(["method", "threshold", "success", "negative", "hard negative"],
                          [(" - ".join(map(name_of, m.split(" - "))), t,
                            *(text_of(x) for x in row.values()))
                           for m, by in n["table2"].items() for t, row in by.items()])
    if n["course"]:
        lines += ["## Co-evolution, iteration by iteration", ""]
        names = list(dict.fromkeys(name for row in n["course"] for name in row))
        lines += table_of(names, [[f"{row[k]:.3g}" if k in row else "-" for k in names]
                                  for row in n["course"]])
    if n["figure3"]:
        lines += ["## Figure 3: distance between the failures of an instruction, 1 - cos", "",
                  f"Embedded by {n['figure3']['encoder']}.", "", "![](figure3.png)", ""]
        lines += table_of(["agent", "mean of seeds ± 95%", "instructions"],
                          [(name, text_of(x, 4), len(n["figure3"]["distances"][name]))
                           for name, x in n["figure3"]["means"].items()])
        if pair := n["figure3"]["failure_agent_minus_eto"]:
            lines += ["Failure agent - ETO, where both failed at least twice: "
                      f"{text_of(pair, 4)}, {pair['verdict']}.", ""]
    if len(n["figure4"]) > 1:
        lines += ["## Figure 4: lambda_SFT", "", "![](figure4.png)", ""]
        lines += table_of(["lambda_SFT", *splits], [(w, *(text_of(row[s]) for s in splits))
                                                    for w, row in n["figure4"].items()])
    lines += ["## Over iterations", "", "![](curves.png)", ""]
    if "coevolve" in n["main"]:
        lines += ["The hardest negatives beside expert and target: conversations.txt.", ""]
    return "\n".join(lines)


def at_equal_cost(rows: list[dict]) -> list[str]:
    """Which differences survive: for each claim at equal cost the verdict at equal epochs, then."""
    verdict = {(r["a"], r["b"], r["measure"], r["split"]): r["verdict"] for r in rows}
    found = {}
    for (a, b, measure, split), then in verdict.items():
        if equals(b):
            before = verdict.get((a, method_of(b), measure, split), "not compared")
            found.setdefault(f"{name_of(a)} - {name_of(b)}", {}).setdefault(
                f"{before} at equal epochs, then {then}", []).append(f"{measure} on {split}")
    lines = [f"- {name}: " + "; ".join(f"{change} in {', '.join(where)}"
                                       for change, where in changes.items())
             for name, changes in found.items()]
    return ["What survives at equal cost:", "", *lines, ""] if lines else []


def draw(n: dict, splits: list[str], out: Path) -> None:
    """curves.png, figure3.png and figure4.png of the numbers `n`, as far as they are there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    def save(fig, name):
        fig.savefig(out / name, format="png", dpi=150, metadata={"Software": None})
        plt.close(fig)

    size = dict(figsize=(4.6 * len(splits), 4), layout="constrained", squeeze=False)
    fig, axes = plt.subplots(1, len(splits), **size)
    for ax, split in zip(axes[0], splits):
        for k, (m, by) in enumerate(n["curves"].items()):
            x = list(by[split])
            y = np.array([v["mean"] for v in by[split].values()])
            half = np.array([v["half"] or 0 for v in by[split].values()])
            style = dict(color=f"C{k % 10}", linestyle=("-", "--")[k // 10])
            ax.plot(x, y, marker="o", markersize=4, label=name_of(m), **style)
            ax.fill_between(x, y - half, y + half, color=style["color"], alpha=0.1, lw=0)
        ax.set(title=split, xlabel="iteration (0: after SFT)", ylabel="reward, 95% over seeds")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
               frameon=False, fontsize=8)
    save(fig, "curves.png")

    if n["figure3"]:
        found = {name: d for name, d in n["figure3"]["distances"].items() if d}
        fig, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4), layout="constrained")
        edges = np.histogram_bin_edges(sum(found.values(), []), 30)
        for name, values in found.items():
            left.hist(values, edges, histtype="step", label=name)
        left.set(xlabel="mean pairwise distance, 1 - cos", ylabel="instructions x seeds",
                 yscale="log")
        left.legend(frameon=False, fontsize=8)
        right.boxplot(list(found.values()), showmeans=True)
        right.set_xticks(range(1, len(found) + 1), [name.replace(": ", ":\n") for name in found],
                         fontsize=8)
        save(fig, "figure3.png")

    if len(n["figure4"]) > 1:
        fig, ax = plt.subplots(figsize=(4.6, 4), layout="constrained")
        for split in splits:
            rows = [(float(w), row[split]) for w, row in n["figure4"].items() if split in row]
            ax.errorbar([w for w, _ in rows], [v["mean"] for _, v in rows],
                        [v["half"] or 0 for _, v in rows], marker="o", capsize=3, label=split)
        ax.set(xscale="log", xlabel="lambda_SFT", ylabel="reward, 95% over seeds")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
        save(fig, "figure4.png")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh study", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", choices=("webshop", "scienceworld", "intercodesql"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5, 6, 7],
                        help="defaults were chosen with seeds 0 to 2 [3 4 5 6 7]")
    parser.add_argument("--out", type=Path, help="the study's folder [runs/study-ENV]")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--jobs", type=int, default=1 if GPU else min(cores, 8),
                        help="runs side by side [without a GPU one a core, at most 8]")
    parser.add_argument("--report", action="store_true", help="no run, only the report")
    parser.add_argument("--encoder", help="hub name of Figure 3's encoder [the SFT agent]")
    asked, more = parser.parse_known_args(argv)
    folder = asked.out or Path(f"runs/study-{asked.env}")
    if {"--method", "--seed"} & {flag.split("=")[0] for flag in more}:
        raise SettingsError("a study takes --methods and --seeds, not --method and --seed")
    if asked.jobs < 1:
        raise SettingsError(f"--jobs {asked.jobs}: give 1 or more")
    parse(["--env", asked.env, *more])
    if asked.encoder is not None:
        check_encoder(asked.encoder)
    if not asked.report:
        for method, other in ((m, other) for m in asked.methods for other in equals(m)):
            if other not in asked.methods:
                raise SettingsError(f"{method} takes its steps from runs of {other}; add {other} "
                                    "to --methods")
        if not GPU:  # also, the cores of a machine must not change what a study finds
            more = ["--threads", "1", *more]
        methods, seeds = sorted(set(asked.methods), key=METHODS.index), dict.fromkeys(asked.seeds)
        play(asked.env, methods, list(seeds), folder, more, asked.jobs)
    print(write_report(asked.env, folder, asked.encoder))
    print(f"study: {folder / 'report'} holds this, the numbers and the figures")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        main(sys.argv[1:])
    except (SettingsError, report.RunError) as error:
        print(f"study.py: {error}", file=sys.stderr)
        sys.exit(2)
