"""Each change of docs/changing.md applies to a copy of the program, and does what the page says."""

import importlib
import math
import re
import shutil
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT, plain_log_probs
from transformers import AutoModelForCausalLM

from common.files import read_json
from common.files import read_jsonl as rows
from lab.page import page, report

FILES, FOLDERS = ("coevolve", "dpo", "envs", "evolve"), ("common", "engine", "worlds")
# A step for each agent, and whole trajectories in it.
SMALL = ("--env webshop --train-tasks 8 --eval-tasks 1 --eval-splits validation --rollouts 2 "
         "--temperature 0.8 --iterations 1 --sft-epochs 1 --sft-batch 4 --dpo-epochs 1 "
         "--dpo-batch 1000 --cut-turns -1").split()
LN2 = pytest.approx(math.log(2), abs=1e-6)
PAGE = (ROOT / "docs/changing.md").read_text()


def changes(page):
    """title -> [(file, old text, new text)] of a page's diffs; dots go on with the title before."""
    found = {}
    for change in re.findall(r"^--- (.*?)(?=^---|^```)", (ROOT / page).read_text(), re.S | re.M):
        head, *lines = change.splitlines()
        file, title = head.split(": ")
        old, new = ("".join(line[1:] + "\n" for line in lines if line[:1] in (" ", sign))
                    for sign in "-+")
        title = [*found][-1] if title.startswith("...") else title
        found.setdefault(title, []).append((file, old, new))
    return found


CHANGES = changes("docs/changing.md") | changes("docs/environments.md")


@contextmanager
def program(folder, *titles):
    """coevolve.py of a copy of the program with these changes, imported anew."""
    for name in FILES:
        shutil.copy(ROOT / f"{name}.py", folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tiny").symlink_to(ROOT / "tiny")
    for file, old, new in (change for title in titles for change in CHANGES[title]):
        path = folder / file
        text = path.read_text() if old else ""
        assert text.count(old) == 1 or not old and not path.exists(), (file, old)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace(old, new) if old else new)
        assert all(len(line) <= 100 for line in new.splitlines())

    def ours():
        return {name: m for name, m in sys.modules.items() if name.split(".")[0] in FILES + FOLDERS}

    before = ours()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("coevolve")
    finally:
        sys.path.remove(str(folder))
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture
def changed(tmp_path):
    """changed(*titles) -> coevolve.py of the program, changed, until the test ends."""
    (tmp_path / "program").mkdir()
    open_ = []

    def start(*titles):
        open_.append(program(tmp_path / "program", *titles))
        return open_[-1].__enter__()

    yield start
    for one in open_:
        one.__exit__(None, None, None)


def train(core, flags, until=None):
    """Runs a program, to the end of the phase that makes `until`."""
    class Enough(Exception):
        pass

    class Run(core.Run):
        def once(self, output, *inputs, **parameters):
            path = super().once(output, *inputs, **parameters)
            if output == until:
                raise Enough
            return path

    command = importlib.import_module("engine.command")  # of this program
    command.signal = SimpleNamespace(signal=lambda *_: None, SIGINT=0, SIGTERM=0)
    try:
        with suppress(Enough):
            command.main([*map(str, flags)], core.Settings, Run, core.METHODS, "coevolve.py")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a run of the program as it is."""
    out = tmp_path_factory.mktemp("changing") / "base"
    conftest.program(*SMALL, "--out", out)
    return out


@pytest.fixture
def fork(base, changed, tmp_path):
    """fork(*titles, at=OUTPUT) -> the program, changed, and the folder of its run, which begins as
    the page says."""
    def start(*titles, at, until=None, flags=""):
        core = changed(*titles)
        train(core, [*SMALL, "--branch", f"{base}@{at}", "--out", tmp_path / "fork",
                     *flags.split()], until)
        return core, tmp_path / "fork"
    return start


def phases(run):
    return read_json(run / "phases.json")


def steps(run, agent):
    return rows(run / f"iter1/{agent}-agent/train.jsonl")


def pairs_by(core, run, name, role):
    """The rows that the program's `make_pairs` makes of a run's first iteration."""
    stub = SimpleNamespace(settings=core.Settings(), main=True, name="")
    played = {path.stem: path for path in [run / "iter1/target.jsonl",
                                           *run.glob("iter1/failure*.jsonl")]}
    core.make_pairs(stub, run / "made.jsonl", run / "experts.jsonl", played, [], name, role)
    return rows(run / "made.jsonl")


def contents(path):
    """name -> bytes of a file, or of the files of a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


# ---------------------------------------------------------------------------------- the page itself


def test_every_change_has_a_test_and_the_readme_has_changes_of_the_page():
    assert all(f'"{title}"' in Path(__file__).read_text() for title in CHANGES)
    assert all(CHANGES[title] == parts for title, parts in changes("README.md").items())


def test_the_index_names_what_there_is(base):
    lines = re.findall(r"^\| (?!what)(.*) \| (.*) \|(.*)\|$", PAGE, re.M)
    assert len(lines) > 15
    for _, where, output in lines:
        for file, names in re.findall(r"`(\S+\.py)`: ((?:`\w+`(?:, )?)+)", where):
            for name in re.findall(r"\w+", names):
                assert re.search(rf"^ *(def|class) {name}\b|^{name} = ",
                                 (ROOT / file).read_text(), re.M), (file, name)
        for name in re.findall(r"`(.*)`", output):
            assert name in phases(base) or "evolve.py" in where, name
    for anchor in re.findall(r"\]\(#(.*?)\)", PAGE):
        assert f"\n## {anchor.replace('-', ' ')}\n" in PAGE.lower()


# ------------------------------------------------------------------------------------------- losses


def test_ipo_and_that_a_branch_takes_what_was_made_before_it(base, fork):
    _, run = fork("IPO", at="iter1/pairs-failure.jsonl", until="iter1/failure-agent")
    first, of_dpo = (steps(folder, "failure")[0] for folder in (run, base))
    assert first["loss"] == pytest.approx(1 / (4 * 0.1 ** 2)) and of_dpo["loss"] == LN2
    assert first["norm"] / of_dpo["norm"] == pytest.approx(2 / 0.1 ** 2, rel=1e-4)

    # What came before is the base's, byte for byte; what follows, the new code's, is another.
    before, after = phases(base), phases(run)
    taken = [*before][:[*before].index("iter1/pairs-failure.jsonl")]
    assert "iter1/target-agent" in taken and [*after] == [*taken, *[*before][len(taken):][:2]]
    for name in taken:
        assert contents(run / name) == contents(base / name)
        assert after[name] == before[name] | {"from": str(base)}
    assert contents(run / "iter1/pairs-failure.jsonl") == contents(base / "iter1/pairs-failure.jsonl")
    ours, its = (contents(folder / "iter1/failure-agent") for folder in (run, base))
    assert ours["model.safetensors"] != its["model.safetensors"]
    assert read_json(run / "config.json")["branch"]["settings"] == []


def test_ipo_with_the_gradient_of_dpo(base, fork):
    _, run = fork("IPO", at="iter1/target-agent", until="iter1/target-agent",
                  flags="--lambda-dpo 0.005")
    first, of_dpo = (steps(folder, "target")[0] for folder in (run, base))
    assert first["norm"] == pytest.approx(of_dpo["norm"], rel=1e-4)
    # lambda times 25, in place of ln 2, for each unit of weight.
    weight = sum(row["weight"] for row in rows(base / "iter1/pairs-target.jsonl"))
    weight /= len(rows(base / "iter1/pairs-target.jsonl"))
    assert first["loss"] - of_dpo["loss"] == pytest.approx(
        weight * (0.005 * 25 - math.log(2)), abs=1e-5)
    assert read_json(run / "config.json")["branch"]["settings"] == ["lambda_dpo (1.0 -> 0.005)"]


def test_simpo(fork):
    _, run = fork("SimPO", at="iter1/pairs-failure.jsonl", until="iter1/failure-agent",
                  flags="--reference none --log-prob mean --beta 2 --beta-later 2")
    model = AutoModelForCausalLM.from_pretrained(run / "sft-failure")
    mean = {}
    for e in rows(run / "iter1/target.jsonl") + rows(run / "iter1/failure.jsonl"):
        nats = plain_log_probs(model, e["ids"], e["action_mask"])
        mean[e["task"], e["agent"], e["rollout"]] = nats.mean().item()
    losses = []
    for row in rows(run / "iter1/pairs-failure.jsonl"):
        w, l = (mean[row["task"], row[side]["agent"], row[side]["rollout"]]
                for side in ("chosen", "rejected"))
        losses.append(math.log(1 + math.exp(1 - 2 * (w - l))))
    first = steps(run, "failure")[0]["loss"]
    assert first == pytest.approx(sum(losses) / len(losses), rel=1e-5) and abs(first - 0.693) > 0.1


def test_infonca(fork):
    core, run = fork("InfoNCA", at="iter1/pairs-target.jsonl", until="iter1/target-agent",
                     flags="--method eto")
    counts = Counter(e["task"] for e in rows(run / "experts.jsonl") + rows(run / "iter1/target.jsonl")
                     if e["ended"] != "context")
    logs = [math.log(n) for n in counts.values()]
    assert steps(run, "target")[0]["loss"] == pytest.approx(sum(logs) / len(logs), abs=1e-5)

    # One of two trajectories earns 0.1 more: softmax of (1, 0); log-ratios 0.5 and 0.1, beta 2.
    group = core.Group([core.Trajectory(ids=[0, 0], action_mask=[0, 1], reward=reward)
                        for reward in (1.0, 0.9)])
    for t, reference in zip(group.trajectories, (-2.0, -3.0)):
        t.reference = reference
    loss, _ = core.dpo.infonca_loss(torch.tensor([-1.5, -2.9]), [group], beta=2.0)
    p, log_q = 1 / (1 + math.exp(-1)), -math.log(1 + math.exp(-0.8))
    assert loss.item() == pytest.approx(-p * log_q - (1 - p) * (log_q - 0.8))


# -------------------------------------------------------------------------------------------- pairs


def test_weights_by_hardness(base, changed):
    core = changed("expert pairs weigh more, the harder their negative is")
    of_task = defaultdict(list)
    for row in pairs_by(core, base, "target", "D_tgt"):
        assert row["weight"] == 1 or row["kind"] != "failure>failure"
        if row["kind"] != "failure>failure":
            of_task[row["task"]].append(row)
    for pairs in of_task.values():
        parts = [0.5 + row["rejected"]["reward"] for row in pairs]
        assert [row["weight"] for row in pairs] == pytest.approx([x / sum(parts) for x in parts])
        assert [row["sft_weight"] for row in pairs] == [
            row["weight"] * (row["chosen"]["agent"] == "expert" or row["chosen"]["reward"] == 1)
            for row in pairs]
    assert sum(len({row["weight"] for row in pairs}) > 1 for pairs in of_task.values()) >= 3


def test_a_filter(base, changed):
    core = changed("the failure agent learns from pairs whose better failure is hard")
    before, after = rows(base / "iter1/pairs-failure.jsonl"), pairs_by(core, base, "failure", "D_fail")
    assert after == [row for row in before if row["chosen"]["reward"] >= 0.6]
    assert 5 < len(after) < len(before) - 5


def test_a_reversed_failure_agent(base, changed):
    core = changed("a reversed failure agent")
    before, after = rows(base / "iter1/pairs-failure.jsonl"), pairs_by(core, base, "failure", "D_fail")
    assert after == [row | dict(chosen=row["rejected"], rejected=row["chosen"]) for row in before]
    assert after and all(row["chosen"]["reward"] < row["rejected"]["reward"] for row in after)


def test_a_curriculum(base, changed):
    core = changed("a curriculum")
    nearest = defaultdict(float)
    for row in rows(base / "iter1/pairs-target.jsonl"):
        nearest[row["task"]] = max(nearest[row["task"]], row["rejected"]["reward"])

    def trained(i):
        run = SimpleNamespace(encoder=None, load=lambda _: None, fit=lambda *given: given[2],
                              settings=core.Settings(iterations=2, reference="none", cut_turns=-1))
        files = [base / name for name in ("experts.jsonl", "iter1/target.jsonl", "iter1/failure.jsonl")]
        made = core.train_preferences(run, None, "a", "a", base / "iter1/pairs-target.jsonl", files,
                                      "target", "D_tgt", i)
        return {group.pairs[0].chosen.task for step in made for group in step}

    first = trained(1)
    assert len(first) == 1 + len(nearest) // 2 and trained(2) == {*nearest}
    left = [nearest[task] for task in {*nearest} - first]
    assert min(nearest[task] for task in first) >= max(left) and len({*nearest.values()}) > 2


# ------------------------------------------------------------------------------- agents and phases


def test_two_failure_agents(base, fork):
    core, run = fork("two failure agents", at="iter1/pairs-target.jsonl",
                     until="iter1/pairs-target.jsonl")
    assert contents(run / "iter1/failure.jsonl") == contents(base / "iter1/failure.jsonl")
    one, two = (contents(run / f"sft-{name}")["model.safetensors"] for name in ("failure", "failure2"))
    assert one != two and "eval-0-failure2-validation.jsonl" in phases(run)

    experts = {e["task"]: e["reward"] for e in rows(run / "experts.jsonl")}
    expected, sums = Counter(), Counter()
    for name in ("target", "failure", "failure2"):
        for e in rows(run / f"iter1/{name}.jsonl"):
            if e["ended"] != "context" and e["reward"] != experts[e["task"]]:
                better = e["reward"] > experts[e["task"]]
                expected[f"{name}>expert" if better else f"expert>{name}"] += 1
    made = rows(run / "iter1/pairs-target.jsonl")
    for row in made:
        sums[row["task"]] += row["weight"] * (row["kind"] != "failure>failure")
    assert expected["expert>failure2"] > 5 and {round(x, 9) for x in sums.values()} <= {0.0, 1.0}
    assert Counter(row["kind"] for row in made if "expert" in row["kind"]) == expected
    of_both = {row[side]["agent"] for row in pairs_by(core, run, "failure2", "D_fail")
               for side in ("chosen", "rejected")}
    assert of_both == {"target", "failure", "failure2"}


def test_a_phase_of_ones_own_passes_through_the_table_and_the_page(base, fork, capsys):
    _, run = fork("a judge of pairs", at="iter1/target-agent")
    row = phases(run)["iter1/judged-target.jsonl"]
    before, after = (rows(run / f"iter1/{name}-target.jsonl") for name in ("pairs", "judged"))
    assert after == [row for row in before if row["chosen"]["reward"] - row["rejected"]["reward"] > 0.4]
    assert row["work"] == "judge" and row["kept"] == len(after) > 5
    assert row["refused"] == len(before) - len(after) > 5
    assert len(rows(run / "iter1/target-agent/margins.jsonl")) == len(after)

    said, table = capsys.readouterr().out.split(f"\n{run}: coevolve on webshop")
    assert f"{len(after)} kept, {row['refused']} refused" in said
    assert "target, validation: reward" in table and "s in all" in table
    report.close(run)
    assert "iter1/judged-target.jsonl" in page.page(run)


def test_grpo(changed):
    changed("GRPO without the standard deviation")
    evolve = importlib.import_module("evolve")
    assert evolve.advantages([0.0, 0.0, 0.0, 1.0]) == [-0.25, -0.25, -0.25, 0.75]


def test_an_environment_of_ones_own(changed, tmp_path, capsys):
    core, run = changed("an environment"), tmp_path / "run"
    train(core, ["--env", "echo", "--words", 3, "--rollouts", 2, "--iterations", 1, "--out", run,
                 "--train-tasks", 12, "--eval-tasks", 12, "--sft-epochs", 4])
    solved = Counter()
    for name, phase in phases(run).items():
        if phase["work"] in ("explore", "evaluate"):
            for e in rows(run / name):
                (_, *asked), said = (m["content"].split() for m in e["messages"])
                right = sum(a == b for a, b in zip(asked, said))
                assert len(asked) == 3 and e["reward"] == pytest.approx(right / 3)
                solved[name, right] += 1
            assert phase["success"] == solved[name, 3] / phase["episodes"]
    assert any(right == 2 for _, right in solved)
    assert "target, test: reward" in capsys.readouterr().out
