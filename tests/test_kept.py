"""A phase that is stopped plays on from what had ended, on a CPU to the same bits."""

import shutil

import pytest
import torch
from conftest import Toy, make_model, make_tokenizer
from test_coevolve import contents
from test_rollout import Ruled

from lab import tokens as dpo
from lab.engine.cache import next_token_logits
from lab.harness.files import read_jsonl, seed_of
from lab.playing.kept import Kept
from lab.playing.rollout import Sampling, rollout


@pytest.fixture(scope="module")
def agent():
    """A model in float32, whose logits depend on what is computed beside them."""
    tokenizer = make_tokenizer("chatml")
    return make_model(len(tokenizer), seed=1, dtype=torch.float32), dpo.Encoder(tokenizer)


def begin():
    return [dpo.Trajectory(str(t), "target", 1, 0, seed_of("x", t)) for t in range(20)]


@pytest.fixture
def play(agent, monkeypatch):
    """play(episodes, chunk) -> their records, the passes of the model, and what ended, in order."""
    def run(episodes, chunk):
        def forward(model, cache, segments):
            logits = next_token_logits(model, cache, segments)
            passes.append((segments, logits.clone()))
            return logits

        passes, ended = [], []
        monkeypatch.setattr("lab.playing.rollout.next_token_logits", forward)
        rollout(*agent, Ruled, episodes, Sampling(0.7, 400, 12, 100, slots=3, chunk=chunk),
                ended=ended.append)
        return [e.record() for e in episodes], passes, ended

    return run


def test_the_passes_of_a_chunk_depend_on_no_other_to_the_bit(play):
    """Of 20 episodes in chunks of 6 (the last has 2) some have ended before."""
    episodes = begin()
    records, whole, ended = play(episodes, 6)
    assert sorted(int(e.task) for e in ended) == [*range(20)] and all(e.ended for e in ended)
    assert records == play(begin(), 0)[0]
    for before in ({1}, {0, 2}, {3}):
        again = [e if n // 6 in before else t for n, (e, t) in enumerate(zip(episodes, begin()))]
        found, rest, _ = play(again, 6)
        assert found == records
        # The logits of the passes of the others, in their order, are found in the whole series.
        expected = iter(whole)
        for segments, logits in rest:
            assert any(segments == now and torch.equal(logits, then) for now, then in expected)


class Stopped(Exception):
    """The process ends."""


def stopping(after):
    """An environment whose step number `after`, of all that it makes, is never answered."""
    class Stopping(Toy):
        steps = 0

        def step(self, reply):
            Stopping.steps += 1
            if Stopping.steps == after:
                raise Stopped
            return super().step(reply)

    return Stopping


@pytest.fixture
def stopped(toy_run, tmp_path, monkeypatch):
    """stopped(env): a run of 16 episodes a phase in chunks of 6, in that environment."""
    monkeypatch.setattr("lab.playing.episodes.CHUNK", 2)

    def run(env=Toy):
        try:
            toy_run(env, "--rollouts", 2)
        except Stopped:
            pass
        return tmp_path / "run"

    return run


def test_a_run_that_is_stopped_again_and_again_ends_in_the_undisturbed_ones_files(stopped, capsys):
    """Every process takes 17 steps and ends; a chunk is 12, the experts are 16. What was half
    written is played again."""
    run = stopped()
    expected = contents(run)
    shutil.rmtree(run)
    capsys.readouterr()
    for processes in range(1, 99):
        if (stopped(stopping(17)) / "result.json").exists():
            break
    assert processes > 8 and contents(run) == expected
    said = capsys.readouterr().out
    assert "iter1/target.jsonl goes on after 6 of 16 episodes" in said
    assert "iter1/target.jsonl goes on after 12 of 16 episodes" in said
    shutil.rmtree(run)
    partial = stopped(stopping(16 + 14)) / "playing/rank-0.jsonl"
    text = partial.read_text()
    assert len(text.splitlines()) >= 7
    partial.write_text(text[:900] + "\0" * 100 + text[1000:] + '{"task": "toy')
    assert contents(stopped()) == expected


def test_episodes_of_a_world_that_is_another_now_are_played_again(stopped):
    run = stopped(stopping(16 + 14))
    assert (run / "playing/rank-0.jsonl").exists()

    class Changed(Toy):
        def reset(self, task):
            return super().reset(task) + ", please"

    stopped(Changed)
    rows = read_jsonl(run / "eval-0-target-test.jsonl")
    assert len(rows) == 8
    assert all(row["messages"][0]["content"].endswith(", please") for row in rows)


def test_whole_chunks_of_the_same_start_are_kept_and_what_requests_took(tmp_path):
    """Of two chunks of two and one of one the second has one episode; a lost one is none."""
    path, share = tmp_path / "playing/file.jsonl", [dpo.Trajectory(n) for n in "abcde"]
    kept = Kept(path, ["inputs"])
    assert not path.parent.exists()
    for name, ended in zip("dbaecx", ("done", "done", "budget", "done", "lost", "done")):
        kept.spend(dict(requests=1))
        kept.add(dpo.Trajectory(name, ended=ended))
    kept = Kept(path, ["inputs"])
    assert [t.task + t.ended for t in kept.fill(share, 2)] == ["abudget", "bdone", "c", "d", "edone"]
    assert [t.task + t.ended for t in kept.fill(share)][2:] == ["c", "ddone", "edone"]
    assert kept.spent == [dict(requests=1)] * 6
    assert Kept(path, ["others"]).rows == {} == Kept(path, ["inputs"]).rows and not path.exists()


def test_settings_may_not_change_once_an_episode_is_kept(toy_run, stopped, tmp_path):
    """Or episodes of another model would be taken for this one's; before, they may."""
    from lab.harness.settings import SettingsError
    flags = ["--method", "evaluate", "--max-new-tokens"]
    for env, tokens in ((stopping(1), 3), (stopping(14), 6)):
        with pytest.raises(Stopped):
            toy_run(env, *flags, tokens)
    with pytest.raises(SettingsError, match="max_new_tokens"):
        toy_run(Toy, *flags, 5)
