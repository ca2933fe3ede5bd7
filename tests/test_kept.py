"""A rollout phase that is stopped plays on from the chunks that had ended, to the same bits."""

import json
import shutil

import pytest
import torch
from conftest import Toy, make_model, make_tokenizer
from test_coevolve import contents
from test_rollout import Ruled

import dpo
from engine.cache import next_token_logits
from harness.files import read_jsonl, seed_of
from harness.kept import Kept, whole_lines
from harness.play import rollout


@pytest.fixture(scope="module")
def agent():
    """A model in float32, whose logits depend on what is computed beside them."""
    tokenizer = make_tokenizer("chatml")
    return make_model(len(tokenizer), seed=1, dtype=torch.float32), dpo.Encoder(tokenizer)


def play(agent, episodes, passes=None, chunk=6, keep=None, monkeypatch=None):
    def forward(model, cache, segments):
        logits = next_token_logits(model, cache, segments)
        passes.append((segments, logits.clone()))
        return logits

    if passes is not None:
        monkeypatch.setattr("harness.play.next_token_logits", forward)
    return rollout(*agent, Ruled, episodes, temperature=0.7, slots=3, max_tokens=400,
                   max_new_tokens=12, tokens_per_forward=100, chunk=chunk, keep=keep)


def begin(n=20):
    return [dpo.Trajectory(str(t), "target", 1, 0, seed_of("x", t)) for t in range(n)]


@pytest.mark.parametrize("ended", [{1}, {0, 1}, {0, 2}, {0, 1, 2}, {3}])
def test_the_passes_of_a_chunk_depend_on_no_other_to_the_bit(agent, monkeypatch, ended):
    """Of 20 episodes in chunks of 6 (the last has 2) some have ended before."""
    whole, rest = [], []
    episodes = play(agent, begin(), whole, monkeypatch=monkeypatch)
    again = [e if n // 6 in ended else t for n, (e, t) in enumerate(zip(episodes, begin()))]
    assert [e.record() for e in play(agent, again, rest, monkeypatch=monkeypatch)] == [
        e.record() for e in episodes]
    # The logits of the passes of the others, one after another, are found in the whole series.
    expected = iter(whole)
    for segments, logits in rest:
        assert any(segments == now and torch.equal(logits, then) for now, then in expected)


def test_without_chunks_the_passes_differ_in_rounding(agent, monkeypatch):
    """Or the test above would say little."""
    whole, rest = [], []
    episodes = play(agent, begin(), whole, chunk=0, monkeypatch=monkeypatch)
    play(agent, episodes[:7] + begin()[7:], rest, chunk=0, monkeypatch=monkeypatch)
    rows = [{(tuple(new), past): row for segments, logits in passes
             for (_, past, new), row in zip(segments, logits)} for passes in (whole, rest)]
    both = rows[0].keys() & rows[1].keys()
    assert both and not all(torch.equal(rows[0][key], rows[1][key]) for key in both)


def test_chunks_play_what_one_row_of_episodes_does(agent):
    kept = []
    expected = [e.record() for e in play(agent, begin(), chunk=0)]
    assert [e.record() for e in play(agent, begin(), keep=kept.append)] == expected
    assert sorted(int(e.task) for e in kept) == [*range(20)] and all(e.ended for e in kept)


class Stopped(Exception):
    """The process ends."""


def stopping(after):
    """An environment whose step number `after`, of all that it makes, is never answered."""
    class Stopping(Toy):
        steps, begun = 0, 0

        def reset(self, task):
            Stopping.begun += 1
            return super().reset(task)

        def step(self, reply):
            Stopping.steps += 1
            if Stopping.steps == after:
                raise Stopped
            return super().step(reply)

    return Stopping


@pytest.fixture
def stopped(toy_run, tmp_path, monkeypatch):
    """stopped(env): a run of 16 episodes a phase in chunks of 6, in that environment."""
    monkeypatch.setattr("harness.play.CHUNK", 2)

    def run(env=Toy, *flags):
        try:
            toy_run(env, "--rollouts", 2, *flags)
        except Stopped:
            pass
        return tmp_path / "run"

    return run


def test_a_run_that_is_stopped_again_and_again_ends_in_the_undisturbed_ones_files(stopped, capsys):
    """Every process takes 17 steps and ends; a chunk is 12, the experts are 16."""
    run = stopped()
    expected = contents(run)
    shutil.rmtree(run)
    capsys.readouterr()
    begun = 0
    for processes in range(1, 99):
        env = stopping(17)
        run = stopped(env)
        begun += env.begun
        if (run / "result.json").exists():
            break
        partial = run / "playing/rank-0.jsonl"
        assert partial.exists()
    assert processes > 8 and contents(run) == expected
    said = capsys.readouterr().out
    assert "iter1/target.jsonl goes on after 6 of 16 episodes" in said
    assert "iter1/target.jsonl goes on after 12 of 16 episodes" in said


def test_what_was_half_written_is_played_again(stopped):
    run = stopped()
    expected = contents(run)
    for damage in (lambda text: text[:-30], lambda text: text + '{"task": "toy', lambda text: "",
                   lambda text: text.replace("1", "2", 1),  # of another start
                   lambda text: text[:900] + "\0" * 100 + text[1000:]):
        shutil.rmtree(run)
        stopped(stopping(16 + 14))
        partial = run / "playing/rank-0.jsonl"
        text = partial.read_text()
        assert len(text.splitlines()) >= 7
        partial.write_text(damage(text))
        assert contents(stopped()) == expected


def test_episodes_of_a_world_that_is_another_now_are_played_again(stopped):
    run = stopped(stopping(16 + 14))
    assert (run / "playing/rank-0.jsonl").exists() and not (
        run / "eval-0-target-test.jsonl").exists()

    class Changed(Toy):
        def reset(self, task):
            return super().reset(task) + ", please"

    stopped(Changed)
    rows = read_jsonl(run / "eval-0-target-test.jsonl")
    assert len(rows) == 8
    assert all(row["messages"][0]["content"].endswith(", please") for row in rows)


def test_whole_lines(tmp_path):
    file = tmp_path / "file"
    for text, found in (("1\n[2]\n", [1, [2]]), ("1\n[2]", [1]), ("1\n[2\n3\n", [1]), ("", []),
                        ("\n", [])):
        file.write_text(text)
        assert whole_lines(file) == found
        assert file.read_text() == "".join(json.dumps(x) + "\n" for x in found)


def test_a_chunk_that_is_not_whole_leaves_the_file(tmp_path):
    """Of two chunks of two and one of one the second has one episode; another phase step has one."""
    path, share = tmp_path / "playing/rank-0.jsonl", [dpo.Trajectory(n) for n in "abcde"]
    kept = Kept(path, ["inputs"])
    rows = [dpo.Trajectory(n, messages=[dict(role="user", content="task toy")], ended="done")
            for n in "dbaex"]
    for row in rows:
        kept.add(row)

    class World(Toy):
        def reset(self, task):
            return "task toy"

    filled = Kept(path, ["inputs"]).fill(share, 2, World)
    assert [t.task + t.ended for t in filled] == ["adone", "bdone", "c", "d", "edone"]
    assert sorted(name[0] for name in Kept(path, ["inputs"]).rows) == ["a", "b", "e", "x"]


def test_a_lost_episode_is_tried_again(tmp_path):
    kept = Kept(tmp_path / "playing/rank-0.jsonl", ["inputs"])
    kept.add(dpo.Trajectory("a", "target", ended="lost"))
    kept.add(dpo.Trajectory("b", "target", ended="done"))
    assert [row["task"] for row in Kept(kept.path, ["inputs"]).rows.values()] == ["b"]
    assert Kept(kept.path, ["others"]).rows == {} == Kept(kept.path, ["inputs"]).rows
