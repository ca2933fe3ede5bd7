"""Each change of docs/changing.md applies to a copy of the program, with the documented effect."""

import importlib
import math
import re
import shutil
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import conftest
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT
from safetensors.torch import load_file

from common.files import read_json
from common.files import read_jsonl as rows
from lab.page import page, report

FILES, FOLDERS = ("coevolve", "dpo", "envs", "evolve"), ("common", "engine", "environments")
# Each agent takes one step, without truncation.
SMALL = ("--env webshop --train-tasks 8 --eval-tasks 1 --eval-splits validation --rollouts 2 "
         "--temperature 0.8 --iterations 1 --sft-epochs 1 --sft-batch 4 --dpo-epochs 1 "
         "--dpo-batch 1000 --cut-turns -1").split()
LN2 = math.log(2)


def changes(page):
    """Returns title -> [(file, old text, new text)] of a page's diffs. Dots continue a title."""
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


def ours():
    return {name: m for name, m in sys.modules.items() if name.split(".")[0] in FILES + FOLDERS}


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """changed(title) -> the module coevolve of a copy of the program with this change."""
    before = ours()

    def start(title):
        folder = tmp_path / title.replace(" ", "-")
        folder.mkdir()
        for name in FILES:
            shutil.copy(ROOT / f"{name}.py", folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name)
        (folder / "tiny").symlink_to(ROOT / "tiny")
        for file, old, new in CHANGES[title]:
            path = folder / file
            text = path.read_text() if old else ""
            assert text.count(old) == 1 or not old and not path.exists(), (file, old)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace(old, new) if old else new)
            assert all(len(line) <= 100 for line in new.splitlines())
        for name in ours():
            del sys.modules[name]
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module("coevolve")

    yield start
    for name in ours():
        del sys.modules[name]
    sys.modules.update(before)


def train(core, flags, until=None):
    """Runs a changed program until the phase of the output `until` has ended."""
    class Enough(Exception):
        pass

    class Run(core.Run):
        def once(self, output, *inputs, **parameters):
            path = super().once(output, *inputs, **parameters)
            if output == until:
                raise Enough
            return path

    command = importlib.import_module("engine.command")  # of this program
    command.end = lambda line, status: pytest.fail(line)  # in place of the end of this process
    command.signal = Mock()  # pytest keeps its own handlers
    try:
        with suppress(Enough):
            command.main([*map(str, flags)], core.Settings, Run, core.METHODS, "coevolve.py")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a run of the unchanged program."""
    out = tmp_path_factory.mktemp("changing") / "base"
    conftest.program(*SMALL, "--out", out)
    return out


@pytest.fixture
def fork(base, changed, tmp_path):
    """fork(title, OUTPUT) -> the changed program, and the folder of its branch at OUTPUT."""
    def start(title, output, flags="", until=None):
        core = changed(title)
        begun = ["--branch", f"{base}@{output}", "--out", tmp_path / "fork"]
        train(core, [*SMALL, *begun, *flags.split()], until)
        return core, tmp_path / "fork"
    return start


def phases(run):
    return read_json(run / "phases.json")


def first_step(run, agent):
    return rows(run / f"iter1/{agent}-agent/train.jsonl")[0]


def pairs_by(core, run, name, role="D_fail"):
    """Returns the rows that the program's `make_pairs` makes of iteration 1 of a run."""
    stub = SimpleNamespace(settings=core.Settings(), main=True, name="")
    files = [run / "iter1/target.jsonl", *run.glob("iter1/failure*.jsonl")]
    played = {file.stem: file for file in files}
    core.make_pairs(stub, run / "made.jsonl", run / "experts.jsonl", played, [], name, role)
    return rows(run / "made.jsonl")


def test_names_and_outputs_of_the_page_exist_and_each_change_has_a_test(base):
    assert all(f'"{title}"' in Path(__file__).read_text() for title in CHANGES)
    text = (ROOT / "docs/changing.md").read_text()
    index = re.findall(r"^\| (?!what)(?:.*) \| (.*) \|(.*)\|$", text, re.M)
    assert len(index) > 15
    for where, output in index:
        of_loop = ""
        for file, names in re.findall(r"`(\S+\.py)`: ((?:`\w+`(?:, )?)+)", where):
            of_loop = (ROOT / file).read_text()
            for name in re.findall(r"\w+", names):
                assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", of_loop, re.M), name
        for name in re.findall(r"`(.*)`", output):
            assert name in phases(base) or name.replace("iter1", "iter{i}") in of_loop, name


def test_ipo(base, fork):
    _, run = fork("IPO", "iter1/target-agent", "--lambda-dpo 0.005", until="iter1/failure-agent")
    first, of_dpo = first_step(run, "failure"), first_step(base, "failure")
    assert (first["loss"], of_dpo["loss"]) == pytest.approx((1 / (4 * 0.1 ** 2), LN2))
    assert first["norm"] / of_dpo["norm"] == pytest.approx(2 / 0.1 ** 2, rel=1e-4)
    # lambda_dpo is beta^2 / 2: the target begins with DPO's gradient, and with other losses.
    first, of_dpo = first_step(run, "target"), first_step(base, "target")
    assert first["norm"] == pytest.approx(of_dpo["norm"], rel=1e-4)
    assert first["loss"] - of_dpo["loss"] == pytest.approx(
        0.005 * 25 - LN2, abs=1e-5)


def test_cdpo(base, fork):
    _, run = fork("cDPO", "iter1/target-agent", until="iter1/failure-agent")
    first, of_dpo = first_step(run, "failure"), first_step(base, "failure")
    assert first["loss"] == first["dpo"] == pytest.approx(LN2) and first["sft"] == 0
    assert first["norm"] / of_dpo["norm"] == pytest.approx(0.8, rel=1e-4)


def test_lora(fork):
    pytest.importorskip("peft")
    _, run = fork("LoRA", "iter1/pairs-failure.jsonl", "--dpo-lr 1e-4 --dpo-epochs 2 "
                  "--dpo-warmup 0", until="iter1/failure-agent")
    first, last = rows(run / "iter1/failure-agent/train.jsonl")
    assert first["loss"] == pytest.approx(LN2) and last["loss"] < LN2
    assert not [*(run / "iter1/failure-agent").glob("adapter*")]
    before, after = (load_file(run / agent / "model.safetensors")
                     for agent in ("sft-failure", "iter1/failure-agent"))
    assert before.keys() == after.keys()
    changed = 0
    for name, weight in before.items():
        moved = after[name] - weight
        if "norm" in name or "embed" in name:
            assert not moved.any(), name
        elif moved.any():
            s = torch.linalg.svdvals(moved)
            assert s[8] < 1e-2 * s[0]  # of rank 8, but for the rounding of the merged weights
            changed += 1
    assert changed > 5


def test_simpo(fork):
    _, run = fork("SimPO", "iter1/pairs-failure.jsonl", until="iter1/failure-agent",
                  flags="--reference none --log-prob-reduction mean --beta 2 --beta-later 2")
    margins = [row["first"][2] for row in rows(run / "iter1/failure-agent/margins.jsonl")]
    losses = [math.log(1 + math.exp(1 - margin)) for margin in margins]
    first = first_step(run, "failure")["loss"]
    assert first == pytest.approx(sum(losses) / len(losses), rel=1e-5) and abs(first - LN2) > 0.1


def test_infonca(fork):
    core, run = fork("InfoNCA", "iter1/pairs-target.jsonl", "--method eto",
                     until="iter1/target-agent")
    played = rows(run / "experts.jsonl") + rows(run / "iter1/target.jsonl")
    counts = Counter(e["task"] for e in played if e["ended"] != "context_limit")
    logs = [math.log(n) for n in counts.values()]
    assert first_step(run, "target")["loss"] == pytest.approx(sum(logs) / len(logs), abs=1e-5)

    # Two rewards differ by 0.1: softmax of (1, 0). Log-ratios 0.5 and 0.1, beta 2.
    group = core.Group()
    for reward, reference in (1.0, -2.0), (0.9, -3.0):
        group.add(core.Trajectory(ids=[0, 0], action_mask=[0, 1], reward=reward))
        group.trajectories[-1].reference = reference
    terms, _ = core.dpo.infonca_loss(torch.tensor([-1.5, -2.9]), [group], beta=2.0)
    p, log_q = 1 / (1 + math.exp(-1)), -math.log(1 + math.exp(-0.8))
    assert terms["loss"].item() == pytest.approx(-p * log_q - (1 - p) * (log_q - 0.8))


def test_weights_by_hardness(base, changed):
    core = changed("expert pairs weigh more, the harder their negative is")
    of_task = defaultdict(list)
    for row in pairs_by(core, base, "target", "D_tgt"):
        if row["kind"] == "failure>failure":
            assert row["sft_weight"] == 0
        else:
            of_task[row["task"]].append(row)
            imitated = row["chosen"]["agent"] == "expert" or row["chosen"]["reward"] == 1
            assert row["sft_weight"] == imitated * row["weight"]
    for pairs in of_task.values():
        parts = [0.5 + row["rejected"]["reward"] for row in pairs]
        assert [row["weight"] for row in pairs] == pytest.approx([x / sum(parts) for x in parts])
    assert sum(len({row["weight"] for row in pairs}) > 1 for pairs in of_task.values()) >= 3


def test_a_filter_and_a_reversed_failure_agent(base, changed):
    before = rows(base / "iter1/pairs-failure.jsonl")
    core = changed("the failure agent learns from pairs whose better failure is hard")
    hard = pairs_by(core, base, "failure")
    assert hard == [row for row in before if row["chosen"]["reward"] >= 0.6]
    assert 5 < len(hard) < len(before) - 5
    after = pairs_by(changed("a reversed failure agent"), base, "failure")
    assert after == [row | dict(chosen=row["rejected"], rejected=row["chosen"]) for row in before]


@pytest.mark.parametrize("i", [1, 2])
def test_a_curriculum(base, changed, i):
    core = changed("a curriculum")
    settings = core.Settings(iterations=2, reference="none", cut_turns=-1)
    run = SimpleNamespace(settings=settings, encoder=None, load=lambda agent: None,
                          fit=lambda model, out, steps, *_: dict(steps=steps))
    played = [base / f"iter1/{name}.jsonl" for name in ("target", "failure")]
    steps = core.train_preferences(
        run, None, "agent", "agent", base / "iter1/pairs-target.jsonl",
        base / "experts.jsonl", played, "target", "D_tgt", i)["steps"]
    nearest = defaultdict(float)  # task -> the best reward of a rejected trajectory
    for row in rows(base / "iter1/pairs-target.jsonl"):
        nearest[row["task"]] = max(nearest[row["task"]], row["rejected"]["reward"])
    trained = {group.pairs[0].chosen.task for step in steps for group in step}
    assert len(trained) == {1: 1 + len(nearest) // 2, 2: len(nearest)}[i]
    left = [nearest[task] for task in {*nearest} - trained]
    assert min(nearest[task] for task in trained) >= max(left, default=0)
    assert len({*nearest.values()}) > 2


def test_two_failure_agents(base, fork):
    core, run = fork("two failure agents", "iter1/pairs-target.jsonl",
                     until="iter1/pairs-target.jsonl")
    assert rows(run / "iter1/failure.jsonl") == rows(base / "iter1/failure.jsonl")
    assert rows(run / "sft-failure/train.jsonl") != rows(run / "sft-failure2/train.jsonl")
    assert "eval-0-failure2-validation.jsonl" in phases(run)

    kinds = phases(run)["iter1/pairs-target.jsonl"]["pairs"]
    played = [e for e in rows(run / "iter1/failure2.jsonl") if e["ended"] != "context_limit"]
    experts = {e["task"]: e["reward"] for e in rows(run / "experts.jsonl")}
    worse = [e for e in played if e["reward"] < experts[e["task"]]]
    assert kinds["expert>failure2"] == len(worse) > 5
    for agent in core.AGENTS["coevolve"][1:]:
        pairs = pairs_by(core, run, agent.name, agent.role)
        sides = {row[side]["agent"] for row in pairs for side in ("chosen", "rejected")}
        assert sides == {"target", "failure", "failure2"}


def test_a_new_phase_is_printed_and_shown_on_the_page(base, fork, capsys):
    _, run = fork("a judge of pairs", "iter1/target-agent")
    row = phases(run)["iter1/judged-target.jsonl"]
    before, after = (rows(run / f"iter1/{name}-target.jsonl") for name in ("pairs", "judged"))
    assert after == [row for row in before
                     if row["chosen"]["reward"] - row["rejected"]["reward"] > 0.4]
    assert row["function"] == "judge" and row["kept"] == len(after) > 5
    assert row["refused"] == len(before) - len(after) > 5
    assert len(rows(run / "iter1/target-agent/margins.jsonl")) == len(after)

    said = capsys.readouterr().out
    assert f"{len(after)} kept, {row['refused']} refused" in said
    report.close(run)
    assert "iter1/judged-target.jsonl" in page.page(run)


def test_grpo(changed):
    changed("GRPO without the standard deviation")
    evolve = importlib.import_module("evolve")
    assert evolve.advantages_of([0.0, 0.0, 0.0, 1.0]) == [-0.25, -0.25, -0.25, 0.75]


def test_a_new_environment(changed, tmp_path):
    core, run = changed("an environment"), tmp_path / "run"
    train(core, ["--env", "echo", "--words", 3, "--rollouts", 2, "--iterations", 1, "--out", run,
                 "--train-tasks", 12, "--eval-tasks", 12, "--sft-epochs", 4])
    solved = Counter()
    for name, phase in phases(run).items():
        if phase["function"] in ("explore", "evaluate"):
            for e in rows(run / name):
                (_, *asked), said = (m["content"].split() for m in e["messages"])
                right = sum(a == b for a, b in zip(asked, said))
                assert len(asked) == 3 and e["reward"] == pytest.approx(right / 3)
                solved[name, right] += 1
            assert phase["success"] == solved[name, 3] / phase["episodes"]
    assert any(right == 2 for _, right in solved)
