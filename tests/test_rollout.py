"""The slot engine against episode-by-episode generation with transformers' own forward pass."""

import random
import time

import pytest
import torch
from conftest import make_tokenizer

from lab import play_env as envs
from lab import tokens as dpo
from lab.engine.cache import SlotCache, next_token_logits, sample
from lab.harness.files import seed_of
from lab.playing.rollout import Sampling, Slot, rollout


class Echo(envs.World):
    """An environment whose pages depend on what the agent wrote, of uneven length."""

    max_steps = 4

    def reset(self, task):
        self.task, self.turns = task, 0
        return f"task {task} " + "page " * (int(task) % 5)

    def step(self, reply):
        self.turns += 1
        done = int(self.task) % 3 == 0 and self.turns == 2
        observation = f"you said {len(reply)} " + "word " * (len(reply) % 7)
        return envs.Step(observation, 0.25 * self.turns, done)


class Ruled(Echo):
    """The same after rules that all episodes begin with."""

    rules = "you shop " * 20


def play(agent, tasks=range(7), temperature=0.0, slots=3, max_tokens=400, max_new_tokens=12,
         tokens_per_forward=10_000, env=Echo):
    model, encoder = agent
    episodes = [dpo.Trajectory(str(t), "target", 1, 0, seed=seed_of("x", t)) for t in tasks]
    return rollout(model, encoder, env, episodes, Sampling(
        temperature, max_tokens, max_new_tokens, tokens_per_forward, slots))


def watch(monkeypatch, note):
    """Calls note(segments) before each pass of the model: (slot, past, new ids) of each."""
    monkeypatch.setattr("lab.playing.rollout.next_token_logits", lambda model, cache, segments: (
        note(segments), next_token_logits(model, cache, segments))[1])


@torch.no_grad()
def one_by_one(agent, task, temperature, max_new_tokens=12):
    """The same episode with a full forward pass over the whole history for each token."""
    model, encoder = agent
    model.set_attn_implementation("sdpa")
    env, dice = Echo(), random.Random(seed_of("x", task))
    ids = encoder.start([{"role": "user", "content": env.reset(str(task))}])
    mask = [0] * len(ids)
    for turn in range(Echo.max_steps):
        reply = []
        while True:
            logits = model(torch.tensor([ids])).logits[0, -1]
            logits[[*encoder.suppress_tokens(len(logits))]] = -torch.inf
            if temperature == 0:
                token = int(logits.argmax())
            else:
                u, token = dice.random(), -1
                for p in torch.softmax(logits / temperature, 0).tolist():
                    token, u = token + 1, u - p
                    if u < 0:
                        break
            ids.append(token)
            mask.append(1)
            reply.append(token)
            if token == encoder.end_of_turn:
                break
            if len(reply) == max_new_tokens:
                ids.append(encoder.end_of_turn)
                mask.append(0)
                break
        step = env.step(encoder.decode(reply))
        if step.done or turn == Echo.max_steps - 1:
            model.set_attn_implementation("ragged")
            return ids, mask, step.reward
        new = encoder.observation(step.observation)
        ids, mask = ids + new, mask + [0] * len(new)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_slots_sample_the_tokens_of_one_episode_at_a_time(agent, temperature):
    episodes = play(agent, temperature=temperature)
    for task, e in enumerate(episodes):
        assert (e.ids, e.action_mask, e.reward) == one_by_one(agent, task, temperature)
    sampled = [i for e in episodes for i, m in zip(e.ids, e.action_mask) if m]
    assert len(set(sampled)) > 10, "a model that repeats itself would hide a wrong cache"


def test_pages_longer_than_a_pass_hold_up_nobody(agent, monkeypatch):
    """Single tokens of all slots go together, whatever --tokens-per-forward is."""
    passes = []
    watch(monkeypatch, lambda segments: passes.append([len(new) for _, _, new in segments]))
    wide = play(agent, range(8), slots=4)
    many = len(passes)
    narrow = play(agent, range(8), slots=4, tokens_per_forward=1)
    assert [e.ids for e in narrow] == [e.ids for e in wide]
    pages = sum(n > 1 for new in passes for n in new) / 2
    assert len(passes) - many < many + pages + 5  # one pass more a page, not one a token
    assert all(sum(n > 1 for n in new) <= 1 for new in passes[many:])


def test_control_tokens_beyond_the_models_vocabulary_are_no_harm(agent, monkeypatch):
    model, encoder = agent
    expected = play(agent)
    monkeypatch.setattr(encoder.pieces, "suppress_tokens", [
        *encoder.pieces.suppress_tokens, model.config.vocab_size + 3])
    assert [e.ids for e in play(agent)] == [e.ids for e in expected]


def test_slots_read_side_by_side_give_the_logits_of_full_forward_passes(agent):
    model, _ = agent
    cache, rng = SlotCache(model, 6, 200), random.Random(0)
    held = [[] for _ in range(5)]
    # The cache is read in blocks of 64 positions: within one, over its end, over two ends.
    for n in ([9, 63, 64, 1, 150], [1] * 5, [1, 1, 5, 1, 1], [1, 3, 1, 1, 2], [1] * 5):
        # Pages of several tokens beside single ones, which come first.
        segments = sorted(((slot, len(held[slot]), [
            rng.randrange(model.config.vocab_size) for _ in range(more)])
            for slot, more in enumerate(n)), key=lambda s: (len(s[2]), s[0]))
        with torch.inference_mode():
            ours = next_token_logits(model, cache, segments)
            model.set_attn_implementation("sdpa")
            for row, (slot, _, new) in zip(ours, segments):
                held[slot] += new
                theirs = model(torch.tensor([held[slot]])).logits[0, -1].float()
                torch.testing.assert_close(row, theirs, atol=1e-5, rtol=0)
            model.set_attn_implementation("ragged")


@pytest.mark.parametrize("other", [dict(slots=1), dict(slots=7), dict(tokens_per_forward=5)])
def test_what_runs_beside_an_episode_changes_nothing(agent, other):
    for a, b in zip(play(agent, temperature=1.0), play(agent, temperature=1.0, **other)):
        assert a.record() == b.record()


@pytest.mark.parametrize("slots, tokens_per_forward", [(9, 10_000), (4, 60), (2, 1)])
def test_what_prompts_begin_alike_is_read_once_by_all_slots(agent, monkeypatch, slots,
                                                            tokens_per_forward):
    """Three rollouts of each of three tasks: the rules are read once, and each task's page."""
    read, at_once = [], []
    watch(monkeypatch, lambda segments: (
        at_once.append(sum(past == 0 for _, past, _ in segments)),
        read.append(sum(len(new) for _, _, new in segments if len(new) > 1))))
    tasks, env = [3, 3, 3, 4, 4, 4, 5, 5, 5], Ruled()
    starts = [agent[1].start(envs.opening(env, env.reset(str(task)))) for task in (3, 4, 5)]
    shared = play(agent, tasks, 1.0, slots, tokens_per_forward=tokens_per_forward, env=Ruled)
    ours, largest = sum(read), max(at_once)
    read.clear()
    monkeypatch.setattr("lab.playing.rollout.shared_beginning", lambda a, b: 0)
    alone = play(agent, tasks, 1.0, slots, tokens_per_forward=tokens_per_forward, env=Ruled)
    assert [e.record() for e in shared] == [e.record() for e in alone]
    once = len(starts[0]) + sum(len(s) - 60 for s in starts[1:])  # 60: less than they share
    assert min(len(s) for s in starts) > 70 and largest == 1
    pages = sum(read) - 3 * sum(map(len, starts))  # what is read later, the same in both
    assert ours - pages <= once


def test_a_slow_environment_changes_neither_episodes_nor_the_passes_of_the_model(agent, monkeypatch):
    shapes, found = [], []
    watch(monkeypatch, lambda segments: shapes.append([(slot, past + len(new))
                                                       for slot, past, new in segments]))
    for longest in (0, 0.03):
        class Slow(Echo):
            latency = 2

            def step(self, reply):
                time.sleep(random.random() * longest)
                return super().step(reply)

        episodes = play(agent, temperature=1.0, env=Slow)
        found.append(([e.record() for e in episodes], list(shapes)))
        shapes.clear()
    assert found[0] == found[1] and len(found[0][1]) > 20
    assert found[0][0] == [e.record() for e in play(agent, temperature=1.0, slots=1)]


def test_episodes_end_done_or_at_the_budget(agent):
    for e in play(agent):
        assert (e.ended, e.steps) == (("done", 2) if int(e.task) % 3 == 0 else ("budget", 4))
        assert [m["role"] for m in e.messages] == ["user", "assistant"] * e.steps
        assert e.reward == 0.25 * e.steps


def test_an_end_of_turn_that_was_not_sampled_is_not_an_action(agent):
    _, encoder = agent
    for e in play(agent, max_new_tokens=3):
        cut = 0
        for k, (i, m) in enumerate(zip(e.ids, e.action_mask)):
            if i == encoder.end_of_turn and m == 0 and e.action_mask[k - 1]:
                assert e.action_mask[k - 3:k] == [1, 1, 1]
                cut += 1
        assert cut == e.cut_replies > 0
        longest = run = 0
        for m in e.action_mask:
            run = run + 1 if m else 0
            longest = max(longest, run)
        assert longest <= 3


def test_an_episode_that_fills_the_context_ends_and_says_so(agent):
    episodes = play(agent, max_tokens=60, max_new_tokens=8)
    assert any(e.ended == "context" for e in episodes)
    for e in episodes:
        assert len(e.ids) <= 60 and len(e.ids) == len(e.action_mask)


def test_a_reply_that_plays_the_environment_is_cut():
    """Ids up to "Observation:" stay as sampled; the end of turn that follows was not sampled."""
    tokenizer = make_tokenizer("chatml")
    encoder = dpo.Encoder(tokenizer)
    slot = Slot(0, encoder, Sampling(1.0, 100, 50, 100, slots=1))
    e = slot.playing = dpo.Trajectory(ids=[5, 6], action_mask=[0, 0])
    slot.past = slot.reply_at = 2
    text = tokenizer("click[a]\nObservation: You won")["input_ids"]
    for token in text:
        if (reply := slot.write(token)) is not None:
            break
    assert reply == encoder.decode(e.ids[2:]) == "click[a]"
    assert e.ids[-1] == encoder.end_of_turn and e.action_mask[-1] == 0
    assert e.ids[2:-1] == text[:len(e.ids) - 3] and slot.past <= len(e.ids) - 1


@pytest.mark.parametrize("words", [3, 256, 1500])
def test_sampling_is_the_inverse_of_the_distribution_function(words):
    """As in float64 over all words at once; at its ends too no word without probability."""
    torch.manual_seed(words)
    logits = 3 * torch.randn(400, words)
    logits[:, [0, -1]] = -torch.inf
    draws = [0.0, 1 - 2 ** -53] * 50 + torch.rand(300, dtype=torch.float64).tolist()
    cdf = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    expected = [int((row <= u * row[-1]).sum()) for row, u in zip(cdf, draws)]
    found = sample(logits, 0.7, draws).tolist()
    assert found[100:] == expected[100:]  # at the ends there are words of probability 1e-9
    assert all(0 < word < words - 1 for word in found)
