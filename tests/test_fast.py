"""Fast is the same, sooner: packed passes and the cache against the core's plain ones."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

import coevolve
import dpo
from common.files import read_jsonl
from lab.fast import cache, check, packing

TINY = coevolve.MODELS["tiny"]


@pytest.fixture(scope="module")
def plain():
    return dpo.read_model(TINY).eval()


@pytest.fixture(scope="module")
def ragged():
    model = dpo.read_model(TINY).eval()
    model.set_attn_implementation("ragged")
    return model


@pytest.fixture(scope="module")
def encoder():
    return dpo.Encoder(dpo.read(dpo.transformers.AutoTokenizer, TINY))


def settings(**values):
    return SimpleNamespace(tokens_per_forward=0, **values)


def trajectories(seed: int = 0, shared: int = 20) -> list[dpo.Trajectory]:
    """Five that begin alike, two that do not; some tokens of each are actions."""
    rng = random.Random(seed)

    def draw(n):
        return [rng.randrange(4, 2000) for _ in range(n)]

    begin, rows = draw(shared), []
    for n in (30, 4, 17, 60, 1):
        rows.append(begin + draw(n))
    rows += [draw(9), draw(33), rows[0][:25] + draw(7)]
    return [dpo.Trajectory(task=str(k), ids=ids, action_mask=[
        int(n > 0 and rng.random() < 0.4) for n in range(len(ids))]) for k, ids in enumerate(rows)]


@pytest.mark.parametrize("sampler", [dpo.Sampler(), dpo.Sampler(0.7, (0, 1, 5))])
def test_packed_passes_have_the_log_probabilities_of_single_ones(plain, ragged, sampler):
    found = trajectories()
    expected = torch.cat([dpo.token_log_probs(plain, [t], sampler) for t in found])
    packed = packing.token_log_probs(ragged, found, sampler)
    several = packing.log_probs(ragged, found, 90, sampler)
    for values in packed, several:  # some are below -30 nats
        assert torch.allclose(values, expected, atol=1e-5, rtol=1e-6)


def test_packed_gradients_are_those_of_padded_passes(monkeypatch):
    """Those of logits in pieces too, of 2,394 words: two rows at a time."""
    gradients = []
    for attention, log_probs, piece in (("sdpa", dpo.token_log_probs, 0),
                                        ("ragged", packing.token_log_probs, 2 ** 24),
                                        ("ragged", packing.token_log_probs, 5000)):
        monkeypatch.setattr(packing, "PIECE", piece)
        model = dpo.read_model(TINY)
        model.set_attn_implementation(attention)
        log_probs(model, trajectories()).double().pow(2).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    scale = gradients[0].abs().max()
    assert all((gradients[0] - other).abs().max() < 1e-5 * scale for other in gradients[1:])


def test_what_begins_alike_stands_once_in_the_row():
    a, b = (dpo.Trajectory(ids=ids, action_mask=[0] * 3) for ids in ([1, 2, 3], [1, 2, 4]))
    assert packing.lay_out([a, b]) == ([0, 1, 2, 0, 1, 3], [0, 1, 2, 5])
    rows, first = packing.lay_out(trajectories())
    total = sum(len(t.ids) for t in trajectories())
    assert len(rows) == total and len(first) <= total - 4 * 20  # five share their first twenty


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cached_replies_are_those_of_generate(plain, ragged, encoder, temperature):
    """Four episodes of three turns, of which one ends and another begins in its slot."""
    sampler = encoder.sampler(temperature)
    s, rng = settings(slots=3, max_tokens=400, max_new_tokens=12), random.Random(1)
    answer = cache.Cached(ragged, encoder, sampler, ("Observation:",), s)
    page = [rng.randrange(4, 2000) for _ in range(45)]
    episodes = [(dpo.Trajectory(ids=page + [rng.randrange(4, 2000) for _ in range(n)]),
                 random.Random(n), random.Random(n)) for n in (3, 20, 8)]
    for turn in range(4):
        if turn == 2:
            episodes[1] = (dpo.Trajectory(ids=page[:40] + [9] * 6), random.Random(9),
                           random.Random(9))
        replies = answer([(t, rng) for t, rng, _ in episodes])
        expected = dpo.replies(plain, encoder, sampler, 12, ("Observation:",),
                               [(t.ids, rng) for t, _, rng in episodes])
        for (t, *_), (ids, values), (others, plain_values) in zip(episodes, replies, expected):
            assert ids == others
            assert values == pytest.approx(plain_values, abs=1e-4)
            t.ids += ids + [rng.randrange(4, 2000) for _ in range(rng.choice((1, 6)))]


def test_a_stop_text_ends_a_cached_reply(ragged, encoder):
    sampler, s = dpo.Sampler(0.0), settings(slots=1, max_tokens=200, max_new_tokens=30)
    t = dpo.Trajectory(ids=encoder.start([dict(role="user", content="find a red mug")]))
    whole = cache.Cached(ragged, encoder, sampler, (), s)([(t, random.Random(0))])[0][0]
    text = encoder.decode(whole)
    stop = text[len(text) // 2:][:4]
    cut = cache.Cached(ragged, encoder, sampler, (stop,), s)([(t, random.Random(0))])[0][0]
    assert stop in encoder.decode(cut) and len(cut) < len(whole) and cut == whole[:len(cut)]


def test_a_model_of_other_attention_stays_plain_and_says_why(plain, encoder):
    s = settings(slots=2, max_tokens=300, max_new_tokens=8)
    assert check.why_not(plain, encoder, s) is None
    # Neither one episode at a time nor short ones are another kind of attention.
    assert check.why_not(plain, encoder, settings(slots=1, max_tokens=300, max_new_tokens=8)) is None
    assert check.why_not(plain, encoder, settings(slots=2, max_tokens=30, max_new_tokens=8)) is None
    assert plain.config._attn_implementation != "ragged"  # it is as it was
    torch.manual_seed(0)
    sliding = AutoModelForCausalLM.from_config(MistralConfig(
        vocab_size=len(encoder.tokenizer), hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, sliding_window=8))
    assert check.why_not(sliding.eval(), encoder, s)
    assert "positions" in check.why_not(plain, encoder, settings(slots=2, max_tokens=9999,
                                                                max_new_tokens=8))


def test_a_careful_run_makes_the_plain_runs_episodes_pairs_and_losses(small_run, careful_run):
    """What one reads in the core is what runs: `Run` and the run that extends it."""
    same = ["task", "agent", "rollout", "ids", "action_mask", "reward", "ended", "kind", "weight"]
    files = sorted(file.relative_to(small_run) for file in small_run.rglob("*.jsonl"))
    assert len(files) == 1 + 4 + 2 + 2 + 4 + 4
    for file in files:
        one, other = read_jsonl(small_run / file), read_jsonl(careful_run / file)
        for name in same:
            assert [row.get(name) for row in one] == [row.get(name) for row in other], file
        if file.name == "train.jsonl":
            assert [row["loss"] for row in other] == pytest.approx(
                [row["loss"] for row in one], abs=1e-5)


def test_fp32_attention_on_a_gpu_never_asks_for_grouped_heads(monkeypatch):
    """For those CUDA has no fused kernel in fp32. Alone a text has no mask, in a batch it has."""
    torch.manual_seed(0)
    model = dpo.transformers.AutoModelForCausalLM.from_config(dpo.transformers.Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2)).eval()
    batches = [dict(input_ids=torch.arange(9)[None]),
               dict(input_ids=torch.arange(18).reshape(2, 9),
                    attention_mask=torch.tensor([[1] * 9, [1] * 6 + [0] * 3]))]
    expected = [model(**batch).logits for batch in batches]
    attention, asked = torch.nn.functional.scaled_dot_product_attention, []

    def cuda_in_fp32(query, key, value, *args, enable_gqa=False, **how):
        asked.append(enable_gqa)
        return attention(query, key, value, *args, enable_gqa=enable_gqa, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", cuda_in_fp32)
    model.set_attn_implementation("repeated")
    for batch, logits in zip(batches, expected):
        kept = batch.get("attention_mask", torch.ones(1, 9)).bool()
        assert torch.allclose(model(**batch).logits[kept], logits[kept], atol=1e-6)
    assert len(asked) == 4 and not any(asked)
