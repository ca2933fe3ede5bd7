"""Means over the seeds of methods: `python -m study.compare RUN RUN ...` (run.sh compare)."""

from pathlib import Path

import numpy as np

from harness.files import RunError, command
from harness.report import reading, result, section
from harness.settings import FREE

# Between the seeds of a method: what changes nothing, or rounding only.
MAY_DIFFER = {*FREE, "seed", "threads", "slots", "tokens_per_forward", "shard",
              "gradient_checkpointing"}


def compare(run_dirs) -> str:
    """Mean and standard deviation over runs of reward and success, by method, split, iteration.

    One row per method, agent, split and iteration; `runs` counts the runs (seeds) in it. RunError
    if a folder is not a run, if two runs share method and seed, which would count one twice, or if
    they differ in a setting of both their methods, of which a mean would say nothing.
    """
    if not run_dirs:
        raise RunError("name the folders of two runs or more")
    values, seen, first = {}, {}, {}
    for run_dir in run_dirs:
        with reading(Path(run_dir) / "metrics.jsonl"):
            found = result(run_dir)
            now = found["settings"]
            key = tuple(now[name] for name in ("env", "method", "seed"))
            if key in seen:
                raise RunError(f"{run_dir} and {seen[key]} are both {key}; compare one of them")
            seen[key] = run_dir
            for like in ("", key[1]):  # any run; the first of its method
                other, before = first.setdefault(like, (run_dir, now))
                for name in sorted(now.keys() - MAY_DIFFER if like else ("env", "model", "quick")):
                    if before.get(name) != now.get(name):
                        raise RunError(
                            f"{run_dir} and {other} differ in {name} ({now.get(name)}, "
                            f"{before.get(name)}); compare runs that differ in method and seed")
            for e in found["evaluations"]:
                row = (e["agent"], e["split"], key[1], e["iteration"])
                values.setdefault(row, []).append((float(e["reward"]), float(e["success"])))
    rows = []
    for (agent, split, method, iteration), pairs in sorted(values.items()):
        cells = []
        for column in np.array(pairs).T:  # (2, runs): rewards, success rates
            spread = column.std(ddof=1) if len(column) > 1 else 0.0
            cells.append(f"{column.mean():.3f} ± {spread:.3f}")
        rows.append((agent, split, method, iteration, len(pairs), *cells))
    return section("Mean ± standard deviation over runs",
                   "<agent <split <method iteration runs reward success", rows) if rows else ""


if __name__ == "__main__":
    command("compare", lambda runs: print(compare(runs)))
