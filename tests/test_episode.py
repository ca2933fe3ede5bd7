"""Episodes: the tokens of an agent, the end of an episode, and environments that break."""

import itertools
import random
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from conftest import LIMIT, Toy

from dpo import Trajectory
from engine import rollouts
from engine.generation import make_generator
from engine.sampling import TokenSampler
from envs import EnvError, Step, episode


class Echo(Toy):
    """Observations of uneven length that depend on the reply."""
    max_turns = 4

    def reset(self, task):
        self.n, self.turns = int(task[-1]), 0
        return f"task {task} " + "page " * (self.n % 5)

    def step(self, reply):
        self.turns += 1
        page = f"you said {len(reply)} " + "word " * (len(reply) % 7)
        return Step(page, 0.25 * self.turns, self.n % 3 == 0 and self.turns == 2, 0.5 * self.turns)


def play(agent, make_env=Echo, temperature=1.0, slots=3, backend="kv_cache"):
    """Plays eight episodes, each with its own RNG, like a run does. Each ends once."""
    model, encoder = agent
    sampler = TokenSampler(encoder.sampler(temperature), encoder, Echo.stops)
    generate = make_generator(backend, model, sampler, slots, 400, 8, 100)
    trajectories = [Trajectory(f"toy-train-{n}", "target", 1, 0, seed=n) for n in range(8)]
    over = []
    rollouts.play_episodes(make_env, encoder, trajectories, generate, slots, 400, over.append)
    assert sorted(t.task for t in over) == [t.task for t in trajectories]
    return trajectories


def check_equal(trajectories, others):
    for t, other in zip(trajectories, others, strict=True):
        assert t.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert replace(t, log_probs=[]) == replace(other, log_probs=[])


def log_probs_of(ids):
    """Returns the log-probabilities of a scripted reply: -0.5, -1.0, -1.5 and so on."""
    return [-0.5 * n for n in range(1, len(ids) + 1)]


def scripted(encoder, replies, max_tokens=400):
    """Returns an episode whose agent replies with these ids, or None, and its prompts."""
    t = Trajectory("toy-train-3", seed=3, reward=1.0, messages=[{}])  # of an earlier attempt
    prompts = []
    running = episode(Echo(), encoder, t, max_tokens)
    with suppress(StopIteration):
        asked, rng = next(running)
        assert rng.random() == random.Random(3).random()
        for ids in replies:
            prompts.append([*asked.ids])
            asked, _ = running.send(ids and (ids, log_probs_of(ids)))
        pytest.fail("the episode is not over")
    return t, prompts


@pytest.fixture
def encoder(agent):
    return agent[1]


def test_an_episode_by_hand(encoder):
    """Exactly the sampled tokens are trained on. An end-of-turn token that was added is not, and the
    text after a forged observation is removed."""
    end = encoder.end_of_turn
    whole = [*encoder.tokenise("go on"), end]
    forged = encoder.tokenise("stop here\nObservation: You won. Reward: 1")
    kept = encoder.tokenise("stop here\n")
    assert forged[:len(kept)] == kept
    t, prompts = scripted(encoder, [whole, forged])

    # The agent is asked twice, and the conversation is what it read and wrote, in order.
    said = ["task toy-train-3 page page page ", "go on", "you said 5 " + "word " * 5, "stop here"]
    assert t.messages == [dict(role=role, content=content)
                          for role, content in zip(["user", "assistant"] * 2, said)]
    start, page = encoder.start(t.messages[:1]), encoder.observation(said[2])
    assert prompts == [start, start + whole + page]
    assert t.ids == start + whole + page + kept + [end]

    # 1 on what was sampled and kept, with its log-probabilities: not on the last end of turn.
    read, written = [0] * len(start), [1] * len(whole)
    assert t.action_mask == read + written + [0] * len(page) + [1] * len(kept) + [0]
    assert t.log_probs == log_probs_of(whole) + log_probs_of(kept)
    assert (t.reward, t.raw_reward, t.turns, t.ended) == (0.5, 1.0, 2, "done")


def test_an_episode_whose_context_is_full_ends_there(encoder):
    start = scripted(encoder, [None])[0].ids
    size, whole = len(start), [7] * 9 + [encoder.end_of_turn]
    for reply, max_tokens, expected in [
            # An agent that can read no further has not replied.
            (None, 400, (start, 0, 0.0, 1)),
            # A reply that fills it is taken back whole, with its log-probabilities.
            (whole[:9], size + 10, (start, 0, 0.0, 1)),
            # So is a page after which no reply would fit; the reply before it stays, and its reward.
            (whole[:9], size + 11, (start + whole, 1, 0.25, 2)),
            # An opening that fills it is never shown.
            (None, size, ([], 0, 0.0, 0))]:
        t, _ = scripted(encoder, [reply], max_tokens)
        assert (t.ids, t.turns, t.reward, len(t.messages)) == expected
        assert t.ended == "context_limit" and len(t.log_probs) == sum(t.action_mask)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_runs_beside_an_episode_changes_nothing(agent, temperature):
    """Compares each episode with one that is played alone, without a KV cache."""
    played = play(agent, temperature=temperature)
    check_equal(played, play(agent, temperature=temperature, slots=1, backend="single"))
    words = set()
    for n, t in enumerate(played):
        # Every third task is done after two replies.
        assert (t.ended, t.turns) == (("turn_limit", 4) if n % 3 else ("done", 2))
        words.update(i for i, acts in zip(t.ids, t.action_mask) if acts)
    assert len(words) > 10, "a model that repeats itself would hide a wrong cache"


# ----------------------------------------------------------------------- environments that break


def breaking(*at, error=EnvError("the shop is gone")):
    """Returns an Echo that raises at the calls with these numbers, counted over all objects."""
    class Breaks(Echo):
        calls = itertools.count(1)

        def call(self):
            if next(self.calls) in at:
                raise error

        def reset(self, task):
            self.call()
            return super().reset(task)

        def step(self, reply):
            self.call()
            return super().step(reply)

    return Breaks


def test_an_environment_that_breaks_and_is_repaired_plays_the_same_episodes(agent, monkeypatch):
    monkeypatch.setattr(rollouts, "WAITS", [0.0] * 12)
    closed = []
    env = breaking(*random.Random(0).sample(range(1, 40), 12))
    env.close = lambda self: closed.append(self)
    check_equal(play(agent, env), play(agent))
    assert next(env.calls) > 40
    assert len(closed) == 12 + 3  # at each fault, and those of three slots at the end


@pytest.mark.parametrize("error, waits", [
    (EnvError("the shop is gone"), [0.5, 5.0, 25.0]),
    (KeyError("a bug"), [])])  # which is no fault of the environment
def test_an_environment_that_breaks_for_good_ends_the_play(error, waits, agent, monkeypatch):
    """It ends after the waits. The interrupted episode is not recorded as a failure."""
    waited = []
    monkeypatch.setattr(rollouts.time, "sleep", waited.append)
    env = breaking(*range(9, 999), error=error)
    with pytest.raises(type(error)) as raised:
        play(agent, env, slots=1)
    assert (raised.value, waited, next(env.calls)) == (error, waits, 10 + len(waits))


class Hole(Toy):
    """One task breaks at the second step, unless the expert plays."""

    def step(self, reply):
        if self.task == "toy-train-4" and self.replies and reply != "the word":
            raise EnvError("toy-train-4: the shop is gone")
        return super().step(reply)


def test_a_run_whose_environment_breaks_writes_no_episodes(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "WAITS", [])
    with pytest.raises(SystemExit, match="^toy-train-4: the shop is gone. Fix this"):
        toy_run("--method", "eto", env=Hole)
    assert not any((tmp_path / "run/iter1").iterdir())


def test_the_end_does_not_wait_for_an_environment_that_hangs(agent, monkeypatch):
    monkeypatch.setattr(rollouts, "WAITS", [])
    release = threading.Event()

    class Hangs(Echo):
        def reset(self, task):
            if task == "toy-train-0":
                raise EnvError("gone")
            release.wait(LIMIT)
            return super().reset(task)

    with pytest.raises(EnvError, match="gone"):
        play(agent, Hangs)
    release.set()
