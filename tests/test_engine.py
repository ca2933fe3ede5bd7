"""The engine: models, sampling, replies, prefix sharing, and the numerical self-check."""

import json
import math
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import make_model, make_tokenizer, plain_log_probs
from family_models import tiny_model
from test_dpo import VOCABULARY, gradients, random_trajectories
from transformers import MptConfig, XLNetConfig

from common.settings import UsageError
from dpo import Trajectory
from engine import kv_cache, models, prefix_sharing, self_check
from engine.chat import Encoder
from engine.kv_cache import CachedGenerator
from engine.sampling import Reply, Sampler, TokenSampler, generate_replies

# ---------------------------------------------------------------------------------------- models


END, PAD = 1, 2  # <|im_end|> and <|pad|> of the small model's tokenizer
ONE_PROCESS = SimpleNamespace(is_main_process=True)  # its Accelerator
PENALTIES = dict(repetition_penalty=5.0, no_repeat_ngram_size=1, suppress_tokens=[1, 2, 3])


@pytest.mark.parametrize("ends, pad, ends_saved, pad_saved", [
    # The end-of-text tokens of the base stay, and the end of turn is added once.
    ([7, 9], 5, [7, 9, END], 5), (None, None, [END], PAD), (END, 5, [END], 5)])
def test_a_saved_agent_stops_at_the_end_tokens_of_its_base_and_at_the_end_of_turn(
        small_model, tmp_path, ends, pad, ends_saved, pad_saved):
    """None of the base's penalties applies, neither to episodes nor to `generate` of users."""
    base = shutil.copytree(small_model, tmp_path / "base")
    generation = dict(PENALTIES, eos_token_id=ends, pad_token_id=pad)
    (base / "generation_config.json").write_text(json.dumps(generation))
    model = models.read_model(base)
    assert not {*PENALTIES} & {*model.generation_config.to_diff_dict()}
    models.save(ONE_PROCESS, model, Encoder(make_tokenizer("chatml")), tmp_path / "agent")
    written = json.loads((tmp_path / "agent/generation_config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == (ends_saved, pad_saved)
    assert {*PENALTIES} & {*written} == {"suppress_tokens"}
    assert written["suppress_tokens"] == [0, PAD]  # <|im_start|> and <|pad|>, not those of the base


# Two config.json as on the Hub: in the form of transformers 4, and in that of 5.
HUB = [("llama", dict(rope_parameters=None, rope_theta=3e6, rope_scaling=dict(type="linear", factor=4.0),
                      torch_dtype="bfloat16", dtype=None)),
       ("gemma3_text", dict(rope_parameters=dict(
           full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
           sliding_attention=dict(rope_type="default", rope_theta=777.0))))]


@pytest.mark.parametrize("family, form", HUB)
def test_a_saved_agent_keeps_the_config_of_its_base(family, form, tmp_path):
    """Also if it was trained from a saved agent."""
    tokenizer = make_tokenizer("chatml")
    base = tmp_path / "base"
    tiny_model(family, len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    of_base = json.loads((base / "config.json").read_text()) | form | dict(a_field=[1])  # nobody's
    of_base = {name: value for name, value in of_base.items() if value is not None}
    # As in Phi-3, whose code in its repository is old
    remote = dict(auto_map=dict(AutoModelForCausalLM="modeling.Model", AutoTokenizer=["code.T", None]))
    (base / "config.json").write_text(json.dumps(of_base | remote))
    of_tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(of_tokenizer | remote))

    folder = base
    for name in ("first", "second"):  # the second one is loaded from the first
        agent, encoder = models.read_model(folder).eval(), models.read_encoder(folder)
        folder = tmp_path / name
        models.save(ONE_PROCESS, agent, encoder, folder)
    found = json.loads((folder / "config.json").read_text())
    dtype = "torch_dtype" if "torch_dtype" in of_base else "dtype"
    assert found == of_base | {dtype: "float32", "eos_token_id": encoder.end_of_turn,
                               "pad_token_id": agent.generation_config.pad_token_id}
    of_tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert of_tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert of_tokenizer["additional_special_tokens"] == ["<|im_start|>"]
    assert not {"auto_map", "is_local", "local_files_only", "extra_special_tokens"} & {*of_tokenizer}


# ------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("words", [3, 256, 1500])
def test_sampling_inverts_the_cumulative_distribution_function(words):
    """Compared with float64. Also at its ends no token with probability 0 is sampled. Greedy
    decoding reads no random number."""
    torch.manual_seed(words)
    logits = 3 * torch.randn(400, words)
    never = (0, words - 1)
    draws = torch.rand(400, dtype=torch.float64)
    draws[:100] = torch.tensor([0.0, 1 - 2 ** -53], dtype=torch.float64).repeat(50)
    p = logits.double().index_fill(1, torch.tensor(never), -torch.inf).div(0.7).softmax(-1)

    made = [Reply(SimpleNamespace(random=iter([u]).__next__)) for u in draws.tolist()]
    encoder = SimpleNamespace(end_of_turn=-1, decode=lambda ids: "a")
    found = TokenSampler(Sampler(0.7, never), encoder, ())(made, logits)[:, 0].tolist()
    assert all(0 < word < words - 1 for word in found)
    # The first token at which the distribution function exceeds the draw. At the ends p may be 1e-9.
    total = p.cumsum(-1)
    assert found[100:] == (total <= draws[:, None] * total[:, -1:]).sum(-1)[100:].tolist()
    values = torch.tensor([reply.log_probs[0] for reply in made], dtype=torch.float64)
    torch.testing.assert_close(values, p[range(400), found].log(), atol=1e-4, rtol=0)
    greedy = [Reply(None) for _ in draws]
    likeliest = TokenSampler(Sampler(0.0, never), encoder, ())(greedy, logits)[:, 0]
    assert likeliest.equal(p.argmax(-1)) and not any(reply.log_probs for reply in greedy)


def test_logits_that_are_not_finite_raise_an_error():
    draw = TokenSampler(Sampler(), SimpleNamespace(end_of_turn=3), ())
    with pytest.raises(FloatingPointError):
        draw([Reply(random.Random(0))], torch.tensor([[0.0, math.nan, 1.0]]))


# --------------------------------------------------------------------------------------- replies


@pytest.mark.parametrize("temperature, stops", [(0.0, ()), (0.7, ()), (2.0, ("e",))])
@torch.no_grad()
def test_replies_are_those_of_one_conversation_at_a_time(agent, temperature, stops):
    """Prompts of different lengths form a batch. A finished reply draws no more random numbers."""
    model, encoder = agent
    prompts = [t.ids for t in random_trajectories(23, 4, 61, 9, 30, 12)]
    draw = TokenSampler(encoder.sampler(temperature), encoder, stops)
    expected = []
    for n, ids in enumerate(prompts):
        alone = Reply(random.Random(n))
        while not alone.done and len(alone.ids) < 40:
            draw([alone], model(torch.tensor([ids + alone.ids])).logits[:, -1])
            stopped = any(stop in encoder.decode(alone.ids) for stop in stops)
            assert alone.done == (stopped or alone.ids[-1] == encoder.end_of_turn)
        expected.append((alone.ids, pytest.approx(alone.log_probs, abs=1e-5), alone.rng.random()))
    assert temperature == 0 or len({len(new) for new, *_ in expected}) > 1
    for backend in self_check.REPLY_BACKENDS:
        asked = [(Trajectory(ids=ids), random.Random(n)) for n, ids in enumerate(prompts)]
        found = self_check.make_generator(backend, model, draw, 6, 200, 40, 60)(asked)
        assert [(*reply, rng.random()) for reply, (_, rng) in zip(found, asked)] == expected


def tokens_read(model) -> list[int]:
    """Returns a list that gets the number of tokens of each later forward pass."""
    read = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: read.append(given[0].numel()))
    return read


def conversations(answer, order=list) -> dict[int, Trajectory]:
    """Returns seed -> trajectory, of conversations that begin and end at different turns."""
    rng = random.Random(0)
    found = {}
    asked = []
    for turn in range(4):
        asked = [(t, own) for t, own in asked if (t.seed + turn) % 3]  # a third ends in each turn
        for _ in range(2):
            t = Trajectory(seed=len(found))
            t.extend(rng.choices(range(10, 2000), k=rng.randint(5, 40)), is_action=False)
            found[t.seed] = t
            asked.append((t, random.Random(t.seed)))
        asked = [*order(asked)]
        for (t, _), (ids, log_probs) in zip(asked, answer(asked)):
            size = max(0, len(ids) - t.seed % 3)  # two thirds are cut, as by a stop
            t.extend(ids[:size], is_action=True)
            t.log_probs += log_probs[:size]
        for t, own in sorted(asked, key=lambda one: one[0].seed):
            t.extend(rng.choices(range(10, 2000), k=rng.randint(1, 12)), is_action=False)
    return found


@pytest.mark.parametrize("family, temperature, tokens, chunk", [
    ("llama", 0.0, 4096, 1024), ("llama", 0.7, 1, 1), ("gemma3_text", 0.7, 60, 7)])
@pytest.mark.parametrize("order", [list, reversed])
def test_a_cache_that_is_kept_across_turns_gives_the_replies_of_a_new_cache(
        family, temperature, tokens, chunk, order, words, monkeypatch):
    """Episodes begin and end at any turn, in any order, with prefill chunks of any size, and with
    windows shorter than the sequences."""
    model = tiny_model(family, words.vocabulary_size)
    draw = TokenSampler(words.sampler(temperature), words, ())
    expected = conversations(
        lambda asked: generate_replies(model, draw, 9, [(t.ids, rng) for t, rng in asked]))
    monkeypatch.setattr(kv_cache, "PREFILL_CHUNK", chunk)
    read = tokens_read(model)
    answer = CachedGenerator(model, draw, 8, 200, 9, tokens)
    found = conversations(answer, order)
    for seed, t in found.items():
        assert t.ids == expected[seed].ids
        assert t.log_probs == pytest.approx(expected[seed].log_probs, abs=1e-4)
    if tokens == 1:  # no padding, and at most two tokens of a cut reply are prefilled again
        total = sum(len(t.ids) for t in found.values())
        assert total - 13 * len(found) <= sum(read) <= total + 2 * 4 * len(found)


def test_a_cached_reply_ends_if_the_context_is_full(agent):
    model, encoder = agent
    draw = TokenSampler(encoder.sampler(), encoder, ())
    t = Trajectory(ids=[*range(10, 35)])
    [(reply, _)] = CachedGenerator(model, draw, 1, 30, 20, 100)([(t, random.Random(0))])
    assert len(t.ids) + len(reply) == 30


# ------------------------------------------------------------------------------ prefix sharing


def branches():
    """Returns trajectories that branch at several positions, one that is a prefix of another, one
    with the ids of another, and one without a common prefix. Their action masks differ."""
    a, b = random_trajectories(70, 12, seed=1)
    some = [a, b, Trajectory(ids=a.ids[:40], action_mask=a.action_mask[:40]),
            replace(a, action_mask=[0] + [1] * 69), replace(b, action_mask=[0] * 12)]
    for n, shared in enumerate([30, 30, 55, 1]):
        [rest] = random_trajectories(20, seed=2 + n)
        some.append(Trajectory(ids=a.ids[:shared] + rest.ids,
                               action_mask=a.action_mask[:shared] + rest.action_mask))
    return some


@pytest.mark.parametrize("tokens, part", [(10_000, 50), (150, 512), (1, 1)])
def test_prefix_sharing_changes_neither_log_probs_nor_gradients(tokens, part, monkeypatch):
    model = make_model(VOCABULARY).eval()
    some = branches()
    logits_processor = Sampler(0.7, (3, 11)).process_logits
    expected = torch.cat([plain_log_probs(model, t.ids, t.action_mask, (3, 11), 0.7) for t in some])
    wanted = gradient_of(model, expected)
    models.prepare(model, recompute=True).set_attn_implementation("prefix_sharing")
    monkeypatch.setattr(prefix_sharing, "ATTENTION_TOKENS", part)
    read = tokens_read(model)
    found = prefix_sharing.log_probs(model, some, tokens, logits_processor)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient_of(model, found), wanted, atol=1e-5, rtol=1e-5)
    if tokens == 10_000:  # each distinct prefix once
        assert read == [len({tuple(t.ids[:k]) for t in some for k in range(1, len(t.ids) + 1)})]


def gradient_of(model, log_probs):
    """Returns the gradient of a weighted sum of the finite log-probabilities."""
    finite = log_probs[log_probs.isfinite()]
    return gradients(model, (finite * torch.linspace(-1, 2, len(finite))).sum())


# --------------------------------------------------------------------------------- self-check


LONGEST = 64  # tokens of a test sequence: four times the models' window
BOTH = ["prefix_sharing", "padded"]


def later_windows(real):
    return lambda config: {kind: window + 1 for kind, window in real(config).items()}


def earlier_masks(real):
    return lambda self, positions: real(self, positions - 1)


def longer_prefixes(real):
    return lambda ids, others: real(ids, others) + bool(ids)


def nan_at_the_end(real):
    def log_probs(*given):
        values = real(*given)
        values[-1] = torch.nan
        return values
    return log_probs


@pytest.mark.parametrize("family, holder, name, wrong, answer, passes", [
    ("gemma3_text", kv_cache, "window_sizes", later_windows, "batched", ["padded"]),
    ("llama", CachedGenerator, "attention_masks", earlier_masks, "batched", BOTH),
    ("gpt2", prefix_sharing, "common_prefix_length", longer_prefixes, "kv_cache", ["padded"]),
    ("gpt2", prefix_sharing, "log_probs", nan_at_the_end, "kv_cache", ["padded"])])
def test_the_self_check_finds_off_by_one_errors_and_nan(
        family, holder, name, wrong, answer, passes, words, monkeypatch):
    monkeypatch.setattr(holder, name, wrong(getattr(holder, name)))
    found = self_check.select_backends(tiny_model(family, words.vocabulary_size), words, LONGEST)
    assert found == dict(replies=answer, passes=passes)


@pytest.mark.parametrize("raised, seen, says", [
    (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
    (torch.AcceleratorError("an illegal access"), torch.AcceleratorError, "illegal"),
    (RuntimeError("DefaultCPUAllocator: can't allocate"), MemoryError, "can't allocate"),
    (OSError("No space left on device"), OSError, "No space left"),
    (RuntimeError("no such kernel\nand where"), UsageError, "cannot be used: no such kernel; use another"),
    (KeyError("past_key_values"), UsageError, "cannot be used: KeyError 'past_key_values'; use another")])
def test_the_self_check_separates_faults_of_the_model_from_those_of_the_machine(raised, seen, says, words, monkeypatch):
    """An error of the machine is raised by the first backend that meets it."""
    model = tiny_model("llama", words.vocabulary_size)
    forward = Mock(side_effect=raised)
    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(seen, match=says):
        self_check.select_backends(model, words)
    assert forward.call_count == 1 or seen is UsageError


def test_the_self_check_has_a_sequence_between_the_shortest_and_the_longest(words):
    """72, 72 and 24 tokens, and a third of 96, which grows by 24 tokens to 56."""
    assert [*map(len, self_check.random_sequences(words, 96))] == [72, 72, 24, 32]


def test_a_model_with_fewer_positions_than_max_tokens_is_refused(words):
    model = tiny_model("gpt2", words.vocabulary_size, max_position_embeddings=64)
    assert self_check.select_backends(model, words, 64)["passes"]
    with pytest.raises(UsageError, match="it has 64 positions, lower --max-tokens 128$"):
        self_check.select_backends(model, words, 128)
    assert models.positions_of(MptConfig()) == models.positions_of(XLNetConfig()) == math.inf
