"""The careful run: nothing is lost, nothing is made twice, nobody else is in the folder."""

import ast
import json
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from conftest import SMALL_RUN, Toy, ended, fork, wait_until

import coevolve
import dpo
import envs
from common.files import known_by, read_jsonl, write_jsonl
from common.settings import Refused
from lab import __main__ as program
from lab.careful import kept, overlap, stand_in, store, tracking
from lab.careful.kept import Checkpoint
from lab.careful.margins import margins
from lab.careful.run import Run, keep_reads, read_before, say_what_a_fork_changed
from lab.settings import METHODS, Settings

KILLS = int(os.environ.get("KILLS", 3))


def lab(said, *more, first=lambda: None, flags=(*SMALL_RUN, "--threads", 1)):
    """The number of a fork that is `python -m lab` with these flags; `said` has what it prints."""
    def work():
        first()
        sys.argv = ["lab", *map(str, (*flags, *more))]
        runpy.run_module("lab", run_name="__main__")

    return fork(work, said)


def finish(out, *flags, status=0, **how):
    """What such a run prints, once it has ended."""
    said = out.with_suffix(".said")
    assert ended(lab(said, "--out", out, *flags, **how)) == status, said.read_text()[-2000:]
    return said.read_text()


def outputs(folder: Path) -> dict[str, bytes]:
    """What the phases of a run wrote."""
    names = json.loads((folder / "phases.json").read_text())
    return {str(file.relative_to(folder)): file.read_bytes() for name in names
            for file in (folder / name, *sorted((folder / name).rglob("*"))) if file.is_file()}


def test_killed_at_random_moments_a_run_ends_with_the_same_files(careful_run, tmp_path):
    """`KILLS=40 bash run.sh test tests/test_careful.py` kills it more often."""
    out, rng, killed = tmp_path / "run", random.Random(0), 0
    phases = json.loads((careful_run / "phases.json").read_text())
    seconds = sum(row["seconds"] for row in phases.values())
    for _ in range(KILLS):
        process = lab(tmp_path / "said", "--out", out, "--checkpoint-minutes", 0)
        time.sleep(rng.uniform(0.2, seconds / 2))  # so that it is not done before
        os.kill(process, signal.SIGKILL)
        killed += ended(process) == -signal.SIGKILL
    finish(out, "--checkpoint-minutes", 0)
    assert killed and outputs(out) == outputs(careful_run)
    assert not (out / "playing").exists() and not (out / "checkpoint").exists()
    expected = {name: row["made"] for name, row in phases_of(careful_run).items()}
    assert {name: row["made"] for name, row in phases_of(out).items()} == expected


def test_the_same_command_again_makes_nothing_anew(careful_run):
    times = {p: p.stat().st_mtime_ns for p in map(careful_run.joinpath, outputs(careful_run))}
    finish(careful_run)
    assert times == {p: p.stat().st_mtime_ns for p in times}


def test_a_second_process_in_a_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    first = lab(tmp_path / "said", "--out", out)
    wait_until((out / "config.json").exists)
    said = finish(out, status=2)
    os.kill(first, signal.SIGKILL)
    ended(first)
    assert "another process is running in this folder" in said and said.strip().count("\n") == 0


def phases_of(run: Path) -> dict[str, dict]:
    return json.loads((run / "phases.json").read_text())


def test_an_equal_run_makes_nothing(careful_run, tmp_path):
    """Also in another folder, and what follows the first trained agents."""
    out = tmp_path / "equal"
    finish(out, "--reuse", careful_run.parent, "--checkpoint-minutes", 3)
    assert [name for name, row in phases_of(out).items() if "reused" not in row] == []
    assert outputs(out) == outputs(careful_run)


# The settings of the preference phases alone, and phases that do not depend on any of them.
@pytest.mark.parametrize("name, value", [("--dpo-lr", 3e-5), ("--beta", 0.3)])
def test_what_does_not_depend_on_a_setting_is_taken_over(careful_run, tmp_path, name, value):
    out = tmp_path / "other"
    finish(out, name, value, "--reuse", careful_run.parent)
    made = {name for name, row in phases_of(out).items() if "reused" not in row}
    assert made == {name for name in phases_of(careful_run)
                    if name.startswith("eval-1-") or name.endswith("-agent")}


def test_equal_phases_are_taken_over_and_others_made(careful_run, tmp_path):
    """Another weight of the DPO term is read by the target's preferences alone."""
    out = tmp_path / "other"
    finish(out, "--lambda-dpo", 0.7, "--reuse", careful_run.parent)
    phases = phases_of(out)
    made = {name for name, row in phases.items() if "reused" not in row}
    assert made == {"iter1/target-agent", "eval-1-target-test.jsonl", "eval-1-target-unseen.jsonl"}
    ours, theirs = outputs(out), outputs(careful_run)
    assert all(ours[name] == theirs[name] for name in ours
               if name in phases and name not in made or name.startswith("sft-"))
    model = "iter1/target-agent/model.safetensors"
    assert ours[model] != theirs[model]


def test_a_phase_that_goes_on_has_read_what_it_read_before(tmp_path):
    """Also what nothing reads again, since a kept state is past it."""
    first = SimpleNamespace(main=True, folder=tmp_path, state="of-a-phase", reads={"beta", "env"})
    keep_reads(first)
    again = SimpleNamespace(folder=tmp_path, state="of-a-phase")
    assert set(read_before(again)) == {"beta", "env"}
    assert read_before(SimpleNamespace(folder=tmp_path, state="of-another")) == []


def made_elsewhere(folder, name, log=0, **more):
    """A run that asks for a phase of seed 1, and what another one in `folder` has made of it."""
    run = SimpleNamespace(name=name, recipe="r", folder=folder / "mine", ranks=1, shard=False,
                          recompute=False, fast=True, slots=32, tokens_per_forward=4096,
                          settings=SimpleNamespace(seed=1, save_every=0),
                          options=SimpleNamespace(), accelerator=SimpleNamespace(mixed_precision="no"))
    output = folder / "other" / name
    (output if "." not in name else output.parent).mkdir(parents=True)
    file = output if "." in name else output / "model.safetensors"
    file.write_text("as it was made")
    if log:
        write_jsonl(output / "train.jsonl", [dict(step=n) for n in range(1, log + 1)])
    made = dict(reads=dict(seed=1), code="c", machine=store.machine(run),
                output=known_by(output, {}))
    row = dict(recipe="r", made=made) | more
    (folder / "other/phases.json").write_text(json.dumps({name: row}))
    run.folder.mkdir()
    return run, file


def test_what_somebody_has_edited_is_not_taken(tmp_path, capsys):
    """Nor does an edit of what was taken change the other run's."""
    run, file = made_elsewhere(tmp_path, "pairs.jsonl")
    out = run.folder / "pairs.jsonl.tmp"
    assert store.take(run, out, "c", tmp_path)["reused"] == str(tmp_path / "other")
    with open(out, "w") as mine:
        mine.write("edited here")
    assert file.read_text() == "as it was made"
    assert store.take(run, out, "another", tmp_path) is None
    file.write_text("edited there")
    assert store.take(run, out, "c", tmp_path) is None
    said = capsys.readouterr().out
    assert "since the code of its phase differs" in said and "since it has been changed since" in said


@pytest.mark.parametrize("name, value, shown", [
    ("fast", False, "fast True, here False"),
    ("slots", 3, "slots 32, here 3"),
    ("tokens_per_forward", 1024, "tokens_per_forward 4096, here 1024"),
    ("recompute", True, "gradient_checkpointing False, here True"),
    ("shard", True, "shard False, here True")])
def test_what_was_drawn_or_rounded_otherwise_is_not_taken(name, value, shown, tmp_path, capsys):
    """By what is in force, which no phase reads: a server draws others than a plain rollout."""
    run, _ = made_elsewhere(tmp_path, "target.jsonl")
    out = run.folder / "target.jsonl.tmp"
    assert store.take(run, out, "c", tmp_path)
    setattr(run, name, value)
    assert store.take(run, out, "c", tmp_path) is None
    assert f"since it was made otherwise: {shown}" in capsys.readouterr().out


def test_what_an_older_version_made_is_not_taken(tmp_path, capsys):
    run, _ = made_elsewhere(tmp_path, "target.jsonl")
    phases = json.loads((tmp_path / "other/phases.json").read_text())
    phases["target.jsonl"]["made"]["machine"] = ["2.0", 1, "no"]
    (tmp_path / "other/phases.json").write_text(json.dumps(phases))
    assert store.take(run, run.folder / "out", "c", tmp_path) is None
    assert "since an older version made it" in capsys.readouterr().out


def test_an_agent_without_those_on_the_way_is_not_taken_where_they_are_asked_for(tmp_path, capsys):
    """GRPO's `steps` are updates, of which a step has several; it saves an agent after a step."""
    run, file = made_elsewhere(tmp_path, "sft-target", log=5, steps=20)
    out = run.folder / "sft-target.tmp"
    assert store.take(run, out, "c", tmp_path)
    run.settings.save_every = 2
    assert store.take(run, out, "c", tmp_path) is None
    assert "it has no agents of --save-every 2" in capsys.readouterr().out
    for step in (2, 4):
        shutil.copytree(file.parent, tmp_path / f"other/sft-target-step{step}")
    assert store.take(run, out, "c", tmp_path)
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "sft-target-step2", "sft-target-step4", "sft-target.tmp"]


def test_what_the_plain_core_made_and_a_damaged_run_are_named(tmp_path, capsys):
    run, _ = made_elsewhere(tmp_path, "pairs.jsonl")
    phases = tmp_path / "other/phases.json"
    row = dict(recipe="r", settings=dict(seed=1), code="c")
    phases.write_text(json.dumps({"pairs.jsonl": row}))
    assert store.take(run, run.folder / "out", "c", tmp_path) is None
    assert "since the plain core made it" in capsys.readouterr().out
    row["settings"]["seed"] = 2  # another phase, of which nobody wants to hear
    phases.write_text(json.dumps({"pairs.jsonl": row}))
    assert store.take(run, run.folder / "out", "c", tmp_path) is None
    assert capsys.readouterr().out == ""
    phases.write_text('{"pairs.jsonl": {')
    with pytest.raises(Refused, match="other/phases.json: .* restore the file"):
        store.take(run, run.folder / "out", "c", tmp_path)


def test_the_code_of_a_phase_is_what_it_runs(monkeypatch):
    def codes():
        return [store.code_of(work, "webshop") for work in (coevolve.train_sft,
                                                            coevolve.train_preferences)]

    (sft, preferences), definitions = codes(), store.definitions
    changed = {"preference_loss": [("def preference_loss(): return 0", frozenset())]}
    monkeypatch.setattr(store, "definitions", lambda *files: definitions(*files) | changed)
    assert codes()[0] == sft and codes()[1] != preferences
    changed["sft_loss"] = [("def sft_loss(): return 0", frozenset())]
    assert codes()[0] != sft


class Stopped(Exception):
    pass


def test_a_phase_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    accelerator, rng = Accelerator(cpu=True), random.Random(0)
    steps = [[dpo.Group([dpo.Trajectory(ids=[rng.randrange(4, 2000) for _ in range(12)],
                                        action_mask=[0] * 6 + [1] * 6)])] for _ in range(8)]
    objective = dpo.Objective(dpo.sft_loss, lambda group: 6, lr=1e-3, warmup=0.3, weight_decay=0.1)

    def train(folder, stop=None):
        model, lines = dpo.read_model(coevolve.MODELS["tiny"]), []
        optimizer = dpo.adamw(model, objective)
        checkpoint = Checkpoint(accelerator, folder, 0, lines)
        done = checkpoint.restore(model, optimizer)
        for line in dpo.training(model, optimizer, steps, objective, dpo.token_log_probs, done):
            if line["step"] == stop:
                raise Stopped
            lines.append(line)
            checkpoint.keep(model, optimizer, line["step"])
        return torch.cat([p.detach().flatten() for p in model.parameters()]), lines

    expected, events = train(tmp_path / "whole")
    for stop in (1, 4, 8):
        with pytest.raises(Stopped):
            train(tmp_path / "stopped", stop)
    found, again = train(tmp_path / "stopped")
    assert torch.equal(found, expected) and again == events
    state = next((tmp_path / "stopped").glob("step-*"))
    next(state.glob("*.distcp")).write_bytes(b"torn")
    with pytest.raises(OSError, match="damaged .*; delete"):
        train(tmp_path / "stopped")


def test_kept_episodes_are_whole_and_of_the_same_world(tmp_path):
    class World:
        page = "a page"

        def reset(self, task):
            return self.page

        def opening(self, page, playing):
            return [dict(role="user", content=page)]

        def close(self):
            pass

    episodes = [dpo.Trajectory(str(n), "target", 1, 0, n, messages=[
        dict(role="user", content="a page")], ended="done") for n in range(3)]
    kept.Kept(tmp_path / "rows", World).add(episodes[:2])
    with open(tmp_path / "rows", "a") as file:
        file.write('{"task": "2", "ag\n{"ta')  # the process was killed
    again = kept.Kept(tmp_path / "rows", World)
    assert again.of(episodes[:2]) == episodes[:2] and again.of(episodes) is None
    again.add(episodes[2:])
    assert kept.Kept(tmp_path / "rows", World).of(episodes) == episodes
    World.page = "another page"
    assert kept.Kept(tmp_path / "rows", World).of(episodes[:1]) is None


# ---------------------------------------------------------- what a fork changes, and what stands in


def test_lab_knows_what_it_stands_in_for():
    """Where the core's text is another on purpose: compare what lab does in its place, then put
    these into `stand_in.KNOWN`."""
    assert stand_in.texts() == stand_in.KNOWN


def siblings():
    """Two functions that differ by what stands in a branch, and by the end of a slice; and the
    first one, laid out and explained otherwise."""
    def f(x, y, n):
        if x:
            y.clear()
        else:
            y.pop()
        return y[n:]

    inside = f

    def f(x, y, n):
        if x:
            y.clear()
        y.pop()
        return y[:n]

    behind = f

    def f(x, y, n):
        """Explained."""
        if x:  # so it is

            y.clear()
        else: y.pop()  # noqa: E701
        return (y[n:])

    return inside, behind, f


def test_a_function_is_known_by_its_structure_and_not_by_how_it_is_laid_out():
    inside, behind, explained = map(stand_in.text_of, siblings())
    assert inside == explained != behind


def test_the_text_of_a_function_is_the_same_in_every_python():
    """Fields that later ones have alone say nothing where they are empty; values keep their types."""
    tree = ast.parse("def f(x): return x")
    known = stand_in.shape_of(tree)
    function, = tree.body
    function.type_params = []
    assert stand_in.shape_of(tree) == known
    function._fields = [name for name in function._fields if name != "type_params"]
    assert stand_in.shape_of(tree) == known
    texts = ["[None, 1, True]", "[None, 1.0, True]", "[None, '1', True]", "[]", "[None]", "x[:1]",
             "x[1:]", "x[::1]", "return", "return None", "{**x}", "{None: x}", "async def f(): 0"]
    assert len({stand_in.shape_of(ast.parse(text)) for text in texts}) == len(texts)


SHORT = ("--method", "sft", "--sft-epochs", "1", "--max-tokens", "256", "--max-new-tokens", "9",
         "--slots", "3")


@pytest.fixture
def forked(monkeypatch):
    """forked(kind, name, function) puts it in the place of a method or function of the core."""
    def fork(kind, name, function):
        monkeypatch.setattr(kind, name, function)
        for table in (stand_in.FOR,):
            for method, functions in table.items():
                found = [getattr(kind, name) if other.__name__ == name else other
                         for other in functions]
                monkeypatch.setitem(table, method, tuple(found))
        stand_in.changed.cache_clear()

    yield fork
    monkeypatch.undo()
    stand_in.changed.cache_clear()


def test_a_vote_in_the_cores_answer_acts(forked, small_model, tmp_path, monkeypatch, capsys):
    """Of a fork that always answers the same; lab's cache knows nothing of it."""
    def answer(self, model, temperature):
        def reply(asked):
            return [(self.encoder.reply("the word"), [0.0] * len(self.encoder.reply("the word")))
                    for _ in asked]
        return reply

    monkeypatch.setattr(envs, "make", lambda *_, **__: Toy())
    flags = [*SHORT, "--model", str(small_model)]
    coevolve.main([*flags, "--out", str(tmp_path / "own")], Settings, Run, METHODS)
    assert "is not as lab knows it" not in capsys.readouterr().out
    forked(coevolve.Run, "answer", answer)
    coevolve.main([*flags, "--out", str(tmp_path / "fork")], Settings, Run, METHODS)
    assert "answer is not as lab knows it: it runs as it is" in capsys.readouterr().out
    rows = read_jsonl(tmp_path / "fork/eval-0-target-test.jsonl")
    assert rows and all(row["reward"] == 1.0 for row in rows)


def test_what_a_fork_does_in_fit_and_training_acts(forked, small_model, tmp_path, monkeypatch):
    """A second file beside the log; another optimiser, which here never steps."""
    fit = coevolve.Run.fit

    def fit_and_more(self, model, out, steps, objective):
        numbers = fit(self, model, out, steps, objective)
        (out / "more.txt").write_text(self.name)
        return numbers

    def training(self, model, steps, objective):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for line in dpo.training(model, optimizer, steps, replace(objective, lr=0.0), self.log_probs):
            yield line

    monkeypatch.setattr(envs, "make", lambda *_, **__: Toy())
    forked(coevolve.Run, "fit", fit_and_more)
    forked(coevolve.Run, "training", training)
    out = tmp_path / "run"
    coevolve.main([*SHORT, "--model", str(small_model), "--out", str(out)], Settings, Run, METHODS)
    assert (out / "sft-target/more.txt").read_text() == "sft-target"
    before, after = (dpo.read_model(folder).state_dict() for folder in (small_model, out / "sft-target"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_method_of_a_fork_that_lab_hides_is_named(small_model, tmp_path, monkeypatch, capsys):
    """lab has a `checkpoint` of its own; one of the core's would never be called."""
    assert stand_in.hidden(Run) == []
    monkeypatch.setattr(coevolve.Run, "checkpoint", lambda self: 0, raising=False)
    monkeypatch.setattr(envs, "make", lambda *_, **__: Toy())
    flags = [*SHORT, "--model", str(small_model), "--out", str(tmp_path / "run")]
    coevolve.main(flags, Settings, Run, METHODS)
    assert "Run.checkpoint of the core does nothing here" in capsys.readouterr().out


@pytest.mark.parametrize("code, goes_on_at", [("the same", 3), ("other code", 0)])
def test_a_phase_goes_on_from_a_state_of_its_own_code(code, goes_on_at, small_model, tmp_path,
                                                      monkeypatch, capsys):
    """Half of an agent by one loss and half by another is an agent of neither."""
    class RunThatStops(Run):
        def training(self, *given):
            for line in super().training(*given):
                if line["step"] == 3:
                    raise Stopped
                yield line

    monkeypatch.setattr(envs, "make", lambda *_, **__: Toy())
    monkeypatch.setattr(store, "code_of", lambda work, env: "the same")
    flags = [*SHORT, "--sft-epochs", "4", "--checkpoint-minutes", "0", "--model", str(small_model),
             "--out", str(tmp_path / "run")]
    with pytest.raises(Stopped):
        coevolve.main(flags, Settings, RunThatStops, METHODS)

    training, begun = dpo.training, []
    monkeypatch.setattr(store, "code_of", lambda work, env: code)
    monkeypatch.setattr(dpo, "training", lambda *given: begun.append(given[-1]) or training(*given))
    coevolve.main(flags, Settings, Run, METHODS)
    assert begun == [goes_on_at]
    assert ("sft-target begins again" in capsys.readouterr().out) == (goes_on_at == 0)


@pytest.fixture
def bare_run(tmp_path, monkeypatch):
    """A run that does the phases it is given, without a model."""
    monkeypatch.setattr(store, "code_of", lambda work, env: "code")
    run = object.__new__(Run)
    vars(run).update(folder=tmp_path, main=True, ranks=1, recipe="recipe", name="a phase", reads=set(),
                     settings=SimpleNamespace(env="webshop", reuse=str(tmp_path)))
    return run


def test_what_was_stopped_and_then_taken_over_leaves_no_states(bare_run, monkeypatch):
    monkeypatch.setattr(store, "take", lambda *_: dict(reused="another run"))
    for name in ("checkpoint", "playing", "reads"):
        (bare_run.folder / name).mkdir()
    row = bare_run.make(bare_run.folder / "experts.jsonl.tmp", coevolve.collect_experts)
    assert row == dict(reused="another run")
    assert not any((bare_run.folder / name).exists() for name in ("checkpoint", "playing", "reads"))


def test_a_finished_run_that_goes_on_is_not_finished_until_it_ends_again(bare_run):
    """It may be stopped in a phase, when pages and reports ask for its result.json."""
    (bare_run.folder / "result.json").write_text("{}")

    def phase(run, out):
        raise Stopped

    with pytest.raises(Stopped):
        bare_run.settings.reuse = None
        bare_run.make(bare_run.folder / "iter4/target.jsonl.tmp", phase)
    assert not (bare_run.folder / "result.json").exists()


# --------------------------------------------------------- one folder, either program; agents in it


def test_a_folder_of_the_plain_core_is_taken_and_the_other_way_round(small_run, careful_run, tmp_path):
    """Nothing is made again, neither by one nor by the other."""
    for name, source, kinds in (("plain", small_run, (Settings, Run, METHODS)),
                                ("careful", careful_run, ())):
        out = shutil.copytree(source, tmp_path / name)
        before = outputs(out)
        (out / "result.json").write_text("{}")
        coevolve.main([*SMALL_RUN, "--out", str(out)], *kinds)
        assert outputs(out) == before and (out / "result.json").exists()
        assert phases_of(out).keys() == phases_of(source).keys()
        if not kinds:  # a table of what it has not made itself
            assert {name: row["made"] for name, row in phases_of(out).items()}


def test_agents_on_the_way_are_agents(careful_run, tmp_path):
    """--save-every 2: the same weights as a run of so many steps would have; nothing else changes."""
    out = tmp_path / "run"
    finish(out, "--save-every", 2, "--method", "eto", "--checkpoint-minutes", 0)
    saved = sorted(path.name for path in out.glob("sft-target-step*"))
    assert list(out.glob("iter1/target-agent-step2"))
    steps = len(read_jsonl(out / "sft-target/train.jsonl"))
    assert saved == [f"sft-target-step{n}" for n in range(2, steps + 1, 2)] and steps == 4
    last, whole = (dpo.read_model(out / name).state_dict() for name in (saved[-1], "sft-target"))
    assert all(torch.equal(last[name], whole[name]) for name in whole)
    first = dpo.read_model(out / saved[0]).state_dict()
    assert any(not torch.equal(first[name], whole[name]) for name in whole)
    assert outputs(out)["sft-target/model.safetensors"] == (
        outputs(careful_run)["sft-target/model.safetensors"])
    said = tmp_path / "said"
    assert ended(lab(said, "--method", "evaluate", "--model", out / saved[0], "--out", tmp_path / "evaluated",
                     flags=["--env", "webshop", "--eval-tasks", 1])) == 0, said.read_text()
    assert read_jsonl(tmp_path / "evaluated/eval-0-target-test.jsonl")


def test_a_stop_while_an_agent_on_the_way_is_saved_loses_none(small_model, tmp_path, monkeypatch):
    """Half of the second one's folder is there, and the state of the step before."""
    monkeypatch.setattr(envs, "make", lambda *_, **__: Toy())
    flags = [*SHORT, "--sft-epochs", "4", "--train-tasks", "2", "--eval-tasks", "1", "--save-every",
             "2", "--checkpoint-minutes", "0", "--model", str(small_model), "--out"]
    coevolve.main([*flags, str(tmp_path / "whole")], Settings, Run, METHODS)

    save = dpo.save

    def stopped(accelerator, model, encoder, folder):
        save(accelerator, model, encoder, folder)
        if "step4" in folder.name:
            (folder / "model.safetensors").unlink()
            (folder / "of-the-stopped").touch()
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(dpo, "save", stopped)
        with pytest.raises(Stopped):
            coevolve.main([*flags, str(tmp_path / "run")], Settings, Run, METHODS)
    coevolve.main([*flags, str(tmp_path / "run")], Settings, Run, METHODS)

    def files(folder):
        """What the run's agents and those on the way to them are."""
        return {str(file.relative_to(folder)): file.read_bytes()
                for file in folder.glob("sft-target*/*")}

    assert files(tmp_path / "run") == files(tmp_path / "whole")
    assert {name.split("/")[0] for name in files(tmp_path / "run")} == {
        "sft-target", "sft-target-step2", "sft-target-step4"}


@pytest.mark.parametrize("by", ["plain", "careful"])
def test_an_agent_plays_as_it_was_trained(by, small_run, careful_run, tmp_path, monkeypatch, capsys):
    """The view and the lengths of tiny's preset, which another model's name does not bring."""
    agent = (small_run if by == "plain" else careful_run) / "iter1/target-agent"
    if by == "careful":  # wherever it is
        agent = shutil.copytree(agent, tmp_path / "an agent")
    argv = ["--env", "webshop", "--method", "evaluate", "--model", str(agent)]
    s, _ = program.settings_of(argv)
    assert (s.view, s.max_tokens, s.max_new_tokens) == ("short", 768, 32)
    assert "--view=short" in capsys.readouterr().out
    s, _ = program.settings_of([*argv, "--view", "full", "--max-tokens", "999"])
    assert (s.view, s.max_tokens, s.max_new_tokens) == ("full", 999, 32)
    s, _ = program.settings_of(["--env", "intercodesql", *argv[2:]])
    assert s.view == "full"  # of another environment it says nothing


@pytest.fixture
def agent_of(tmp_path, monkeypatch):
    """agent_of(*flags) -> the settings of such a run, its environment's, and an agent of it."""
    monkeypatch.setenv("MYSQL_PWD", "")  # which an address with a password sets

    def make(*flags):
        settings, options = program.settings_of([*flags])
        run = SimpleNamespace(settings=settings, options=options, make_env=lambda: None)
        folder = tmp_path / "an agent"
        folder.mkdir()
        overlap.record(run, folder)
        return settings, options, folder

    return make


@pytest.mark.parametrize("env, model, name, trained, otherwise", [
    ("scienceworld", "tiny", "task_types", "short", "all"),
    ("bfcl", "smollm2", "bfcl_reward", "turns", "all"),
    ("appworld", "smollm2", "appworld_seconds", 20, 7)])
def test_an_agent_plays_in_the_world_that_it_was_trained_in(env, model, name, trained, otherwise,
                                                            agent_of):
    s, options, folder = agent_of("--env", env, "--model", model)
    assert vars(options)[name] == trained
    argv = ["--env", env, "--method", "evaluate", "--model", str(folder)]
    now, found = program.settings_of(argv)
    assert found == options
    assert (now.view, now.max_tokens, now.max_new_tokens) == (s.view, s.max_tokens, s.max_new_tokens)
    _, found = program.settings_of([*argv, f"--{name.replace('_', '-')}", str(otherwise)])
    assert vars(found)[name] == otherwise


def test_files_and_addresses_do_not_stand_in_an_agents_folder(agent_of, tmp_path, capsys):
    """Whoever evaluates it is told which to give again, as long as they are not given."""
    data, address = str(tmp_path), "mysql://me:secret@a-host:3306"
    *_, folder = agent_of("--env", "intercodesql", "--model", "a model", "--intercode-data", data,
                          "--mysql-url", address)
    written = (folder / overlap.FILE).read_text()
    assert not any(text in written for text in (data, "secret", "a-host"))
    argv = ["--env", "intercodesql", "--method", "evaluate", "--model", str(folder)]
    program.settings_of(argv)
    assert "not say with which --intercode-data and --mysql-url it was trained" in capsys.readouterr().out
    program.settings_of([*argv, "--intercode-data", data, "--mysql-url", address])
    assert "not say with which" not in capsys.readouterr().out


def test_what_would_not_be_used_is_not_refused(agent_of):
    """The default of --max-new-tokens, 256, is above these --max-tokens; the agent's 24 are not."""
    *_, folder = agent_of("--env", "scienceworld")
    s, _ = program.settings_of(["--env", "scienceworld", "--method", "evaluate", "--model", str(folder),
                                "--max-tokens", "200"])
    assert (s.max_tokens, s.max_new_tokens) == (200, 24)
    with pytest.raises(Refused, match="--max-new-tokens 24: must be below --max-tokens 20"):
        program.settings_of(["--env", "scienceworld", "--method", "evaluate", "--model", str(folder),
                             "--max-tokens", "20"])


@pytest.mark.parametrize("played, view", [
    (dict(env="webshop", protocol="ours", view="short", max_tokens=768), "short"),  # an older version's
    (dict(env="webshop", view="short", gone="a setting that is not there any more"), "short"),
    (None, "full")])
def test_an_agent_of_another_version_can_be_evaluated(played, view, tmp_path):
    found = dict(tasks=[], marks=[]) | (dict(played=played) if played else {})
    (tmp_path / overlap.FILE).write_text(json.dumps(found))
    s, _ = program.settings_of(["--env", "webshop", "--method", "evaluate", "--model", str(tmp_path)])
    assert s.view == view


# ------------------------------------------------------------------------------- margins, trackers


def test_margins_are_those_of_the_loss_that_trained(small_model):
    """Of a loss of one's own: each pair's margin, as the loss states it; of one without, none."""
    model = dpo.read_model(small_model)
    trajectories = [dpo.Trajectory("t", ids=[5, 6, 7, 8 + n], action_mask=[0, 0, 1, 1], reward=n / 4)
                    for n in range(3)]
    group = dpo.Group(trajectories, [dpo.Pair("a", 2, 0), dpo.Pair("b", 1, 0)], [-1.0, -2.0, -3.0])
    group.scale = 7  # as a fork's objective leaves something on a batch's groups

    def loss(policy, groups):
        pi = dpo.action_log_probs(policy, groups[0].trajectories)
        pair, = groups[0].pairs
        chosen, rejected = pi[pair.chosen].item(), pi[pair.rejected].item()
        return policy.sum(), {pair.kind: dict(count=1, chosen=chosen, rejected=rejected,
                                              margin=groups[0].scale * (chosen - rejected))}

    run = SimpleNamespace(settings=SimpleNamespace(reference="phase", margins=9), tokens_per_forward=99,
                          log_probs=dpo.token_log_probs)
    pi = [dpo.token_log_probs(model, [t]).sum().item() for t in trajectories]
    row, = margins(run, model, [group], SimpleNamespace(loss=loss))
    assert row["task"] == "t"
    assert row["before"] == [[-3.0, -1.0, 0.0], [-2.0, -1.0, 0.0]]
    assert [x[2] for x in row["after"]] == pytest.approx(
        [7 * (pi[2] - pi[0]), 7 * (pi[1] - pi[0])], abs=1e-3)
    assert margins(run, model, [group], SimpleNamespace(loss=lambda policy, groups: (0, {}))) == []


class Tracker(GeneralTracker):
    name, requires_logging_directory, logged, started = "mine", True, [], []

    def __init__(self, run_name, logging_dir, **_):
        super().__init__()
        self.started.append(logging_dir)

    tracker = None

    def start(self):
        pass

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        self.logged.append((step, values))

    def finish(self):
        pass


def test_a_tracker_gets_numbers_by_phase_and_goes_on_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "filter_trackers", lambda name, folder: ["mine"])
    monkeypatch.setitem(accelerate.accelerator.LOGGER_TYPE_TO_CLASS, "mine", Tracker)
    monkeypatch.setattr(Tracker, "logged", []), monkeypatch.setattr(Tracker, "started", [])
    for steps in ((1, 2), (3,)):  # a process each
        accelerator = Accelerator(cpu=True)
        log = tracking.Tracking(accelerator, tmp_path, "mine", dict(seed=1, out=None))
        for n in steps:
            log.log("train", f"iter{n}/target-agent", dict(loss=n / 2, kinds={"a>b": dict(margin=n)}))
        log.log("phase", f"eval-{n}-failure-unseen.jsonl", dict(name="failure", split="unseen", reward=n))
    assert Tracker.started[0] == str(tmp_path / "tracking")
    assert [step for step, _ in Tracker.logged] == [1, 2, 3, 4, 5]
    assert Tracker.logged[0][1] == {"iter1/target-agent/loss": 0.5,
                                    "iter1/target-agent/kinds/a>b/margin": 1}
    assert Tracker.logged[2][1] == {"eval-2-failure-unseen/reward": 2,
                                    "evaluate/failure/unseen/reward": 2}
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 5


@pytest.mark.parametrize("name, why", [("tensorbroad", "--track tensorbroad: Unsupported"),
                                       ("wandb", "--track wandb: it is not installed; pip install wandb")])
def test_a_tracker_that_is_not_there_is_refused(name, why, tmp_path):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(Refused, match=why):
        tracking.Tracking(Accelerator(cpu=True), tmp_path, name, {})


def test_a_full_disk_is_one_line(tmp_path):
    def limit():  # bytes of a file, as a full disk ends it
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    said = finish(tmp_path / "run", status=2, first=limit).replace("\r", "\n")
    error, = [line for line in said.splitlines() if line.startswith("run.sh: ")]
    assert "Traceback" not in said and "goes on from here" in error


@pytest.mark.parametrize("name, text", [
    ("phases.json", '{"experts.jsonl": {'), ("config.json", "[]")])
def test_a_damaged_folder_is_one_line(name, text, careful_run, tmp_path):
    out = shutil.copytree(careful_run, tmp_path / "run")
    (out / name).write_text(text)
    said = finish(out, status=2)
    assert "Traceback" not in said and name in said


def test_the_log_has_a_line_for_each_phase_and_step(careful_run):
    events = read_jsonl(careful_run / "metrics.jsonl")
    phases = [e["phase"] for e in events if e["event"] == "phase"]
    assert phases == [*json.loads((careful_run / "phases.json").read_text())]
    steps = [e for e in events if e["event"] == "train" and e["phase"] == "sft-target"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    margins = read_jsonl(careful_run / "iter1/target-agent/margins.jsonl")
    pairs = read_jsonl(careful_run / "iter1/pairs-target.jsonl")
    assert sum(len(row["after"]) for row in margins) == len(pairs)
    assert all(m == 0 for row in margins for *_, m in row["before"])
