"""Encoding, log-probabilities, losses and the optimiser loop, each against brute force."""

import math
import random
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from conftest import CHATML, CONVERSATION, LLAMA2, adamw, make_model, make_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM

from lab import tokens as dpo
from lab.engine import packing, ranks, sharding

VOCABULARY = 50


def sequence(ids, action_mask):
    return dpo.Trajectory(ids=ids, action_mask=action_mask)


def sequences(*lengths, seed=0, vocabulary=VOCABULARY):
    """Random ids with alternating stretches of observation and action tokens."""
    rng = random.Random(seed)
    result = []
    for n in lengths:
        mask, action = [0, 0], False
        while len(mask) < n:
            action = not action
            mask += [int(action)] * rng.randint(1, 5)
        result.append(sequence([rng.randrange(vocabulary) for _ in range(n)], mask[:n]))
    return result


def brute_force_log_prob(model, s, never=()):
    """Eq. (2) literally: one full forward pass per action token, transformers' own attention."""
    drawn = [i for i in range(model.config.vocab_size) if i not in never]
    model.set_attn_implementation("sdpa")
    total = torch.zeros((), dtype=torch.float64)
    for k in range(1, len(s.ids)):
        if s.action_mask[k]:
            logits = model(torch.tensor([s.ids[:k]])).logits[0, -1]
            total = total + logits[s.ids[k]] - torch.logsumexp(logits[drawn], 0)
    model.set_attn_implementation("ragged")
    return total


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_turn_by_turn_ids_are_the_templates_own(tokenizer):
    ids, mask = dpo.Encoder(tokenizer).encode(CONVERSATION)
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    # The text after the last end of turn ("\n" in ChatML) opens the next observation.
    assert ids == expected[:len(ids)] and len(expected) - len(ids) <= 1
    assert len(mask) == len(ids)


def test_a_system_message_opens_the_conversation_where_the_template_has_one(tokenizer):
    rules = [{"role": "system", "content": "You buy what is asked for."}]
    ids, mask = dpo.Encoder(tokenizer).encode(rules + CONVERSATION)
    whole = tokenizer.apply_chat_template(rules + CONVERSATION, tokenize=False)
    assert rules[0]["content"] in whole
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert ids == expected[:len(ids)] and len(expected) - len(ids) <= 1
    assert sum(mask) == sum(dpo.Encoder(tokenizer).encode(CONVERSATION)[1])


def test_mask_covers_replies_and_their_end_of_turn_and_nothing_else(tokenizer):
    encoder = dpo.Encoder(tokenizer)
    ids, mask = encoder.encode(CONVERSATION)
    runs, run = [], []
    for i, m in zip(ids + [None], mask + [0]):
        if m:
            run.append(i)
        elif run:
            runs.append(run)
            run = []
    replies = [m["content"] for m in CONVERSATION if m["role"] == "assistant"]
    assert len(runs) == len(replies)
    for run, reply in zip(runs, replies):
        assert run[-1] == tokenizer.eos_token_id and run.count(tokenizer.eos_token_id) == 1
        assert tokenizer.decode(run[:-1]).strip() == reply


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace(  # as thinking models do
        "{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        dpo.Encoder(tokenizer)
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif %}",
                                             "assistant\n<think>{% endif %}")
    with pytest.raises(ValueError, match="rewrites a turn"):
        dpo.Encoder(tokenizer)
    tokenizer.chat_template = CHATML + (  # as Phi-3's
        "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}")
    with pytest.raises(ValueError, match=r"ends a conversation with '<\|im_end\|>' and takes that"):
        dpo.Encoder(tokenizer)


def test_a_template_without_an_end_of_turn_token_is_refused():
    tokenizer = make_tokenizer("llama2")
    tokenizer.chat_template = LLAMA2.replace("' ' + eos_token", "'\n'")
    with pytest.raises(ValueError, match="no special token"):
        dpo.Encoder(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        dpo.Encoder(tokenizer)


def tree():
    """Sequences that begin alike: after 12 tokens, after 5, one inside another, one alone."""
    a, b, alone = sequences(20, 9, 15)
    return [a, sequence(a.ids[:12] + b.ids, a.action_mask[:12] + b.action_mask),
            sequence(a.ids[:5] + b.ids[3:], [0] * 5 + b.action_mask[3:]), alone,
            sequence(a.ids[:14], a.action_mask[:14]), sequence(a.ids[:12] + b.ids[:4], [1] * 16)]


def test_shared_beginnings_change_neither_log_probs_nor_gradient():
    model, batch = make_model(VOCABULARY), tree()
    assert len(packing.lay_out(batch)[1]) == 20 + 9 + 6 + 15  # the last two lie in the first two
    weight = torch.tensor([0.3, -1.7, 0.9, 1.1, -0.4, 0.6], dtype=torch.float64)
    together = dpo.action_log_probs(model, batch)
    ours = gradients(model, (together * weight).sum())
    apart = torch.stack([brute_force_log_prob(model, s) for s in batch])
    torch.testing.assert_close(together, apart, atol=1e-9, rtol=0)
    torch.testing.assert_close(ours, gradients(model, (apart * weight).sum()), atol=1e-9, rtol=1e-9)


def test_a_row_that_predicts_several_tokens_is_projected_once(monkeypatch):
    """Three sequences part at one token: gradients added to its row in any order would not be
    the same bits each time."""
    model, kept = make_model(VOCABULARY), []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, logits_to_keep=0, **more: (
        kept.append(logits_to_keep), forward(self, logits_to_keep=logits_to_keep, **more))[1])
    begun = [sequence([7, 8, 9, last, 4], [0, 0, 0, 1, 1]) for last in (1, 2, 3)]
    log_probs = dpo.action_log_probs(model, begun)
    assert len(kept[0]) == len(set(kept[0].tolist())) == 4  # the common row, and one for each 4
    monkeypatch.undo()
    for found, s in zip(log_probs, begun):
        assert found.item() == pytest.approx(brute_force_log_prob(model, s).item(), abs=1e-9)


def test_observation_tokens_get_no_gradient():
    """The logit of an observation token, as a target, has exactly no influence on the loss."""
    model = make_model(VOCABULARY)
    unseen = VOCABULARY - 1  # appears only as the last token, an observation
    ids, mask = [3, 4, 5, 6, unseen], [0, 1, 1, 0, 0]
    dpo.action_log_probs(model, [sequence(ids, mask)]).sum().backward()
    assert model.model.embed_tokens.weight.grad[unseen].abs().max() == 0
    changed = sequence([3, 4, 5, 6, 7], mask)
    with torch.no_grad():
        a, b = (dpo.action_log_probs(model, [s]) for s in (sequence(ids, mask), changed))
    assert torch.equal(a, b)


def group(task="a", seed=0, pairs=None):
    pairs = pairs or [dpo.Pair("expert>target", 0, 1, 0.5, 0.5),
                      dpo.Pair("expert>failure", 0, 2, 0.5, 0.5),
                      dpo.Pair("failure>failure", 2, 1, 1.0, 0.0)]
    g = dpo.Group(task, sequences(11, 16, 7, seed=seed), pairs)
    g.reference = [-20.0 - i for i in range(3)]
    return g


def test_identical_policy_and_reference_give_ln2():
    model, g = make_model(VOCABULARY), group()
    [g.reference] = dpo.log_probs_of(Accelerator(cpu=True), model, [g], tokens_per_forward=20)
    loss, statistics = dpo.preference_loss(model, [g], beta=0.1)
    assert loss.item() == pytest.approx(math.log(2) * (0.5 + 0.5 + 1.0), abs=1e-12)
    assert statistics["failure>failure"][3] == pytest.approx(0, abs=1e-12)


def test_dpo_loss_by_hand():
    # margin = 0.5 * ((-10 + 12) - (-9 + 8)) = 1.5; -log sigmoid(1.5) = log(1 + e^-1.5)
    loss, margin = dpo.dpo_loss(*(torch.tensor([x]) for x in (-10.0, -9.0, -12.0, -8.0)), beta=0.5)
    assert margin.item() == 1.5
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1.5)), abs=1e-7)


@pytest.mark.parametrize("log_prob", ["sum", "mean"])
@pytest.mark.parametrize("sft_term", ["sum", "mean"])
def test_equation_9_and_its_gradient_equal_brute_force(log_prob, sft_term):
    model, groups = make_model(VOCABULARY), [group("a", 1), group("b", 2)]
    beta, lambda_dpo, lambda_sft = 0.3, 0.7, 0.2
    ours, _ = dpo.preference_loss(model, groups, beta, lambda_dpo, lambda_sft, log_prob,
                                       sft_term)

    theirs = 0.0
    for g in groups:
        for p in g.pairs:
            w, l = g.sequences[p.chosen], g.sequences[p.rejected]
            n_w, n_l = sum(w.action_mask[1:]), sum(l.action_mask[1:])
            scale_w, scale_l = (n_w, n_l) if log_prob == "mean" else (1, 1)
            pi_w, pi_l = brute_force_log_prob(model, w), brute_force_log_prob(model, l)
            z = beta * ((pi_w - g.reference[p.chosen]) / scale_w
                        - (pi_l - g.reference[p.rejected]) / scale_l)
            theirs = theirs + lambda_dpo * p.weight * torch.log(1 + torch.exp(-z))
            theirs = theirs - lambda_sft * p.sft_weight * pi_w / (n_w if sft_term == "mean" else 1)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-9)
    torch.testing.assert_close(gradients(model, ours), gradients(model, theirs),
                               atol=1e-9, rtol=1e-9)


def test_statistics_are_sums_over_pairs():
    model, g = make_model(VOCABULARY), group()
    _, statistics = dpo.preference_loss(model, [g], beta=0.1)
    logs = [brute_force_log_prob(model, s).item() for s in g.sequences]
    pairs, chosen, rejected, margin, correct = statistics["failure>failure"]
    assert (pairs, chosen, rejected) == (1, pytest.approx(logs[2]), pytest.approx(logs[1]))
    assert margin == pytest.approx(0.1 * ((logs[2] + 22) - (logs[1] + 21)))
    assert correct == (margin > 0)


def trained(groups, epochs, tokens_per_forward, loss=dpo.sft_loss, **settings):
    model, log = make_model(VOCABULARY, seed=3), []
    divisor = dpo.count_action_tokens if loss is dpo.sft_loss else dpo.count_pairs
    dpo.fit(Accelerator(cpu=True), model, epochs, dpo.Objective(loss, divisor),
            adamw(tokens_per_forward=tokens_per_forward, **settings), log.append)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), log


@pytest.mark.parametrize("tokens", [1, 20, 45])
def test_micro_batches_give_the_full_batch_step(tokens):
    objective = partial(dpo.preference_loss, beta=0.1, lambda_sft=0.1)
    groups = [group(str(i), seed=i) for i in range(4)]
    epochs = [[groups[:3], groups[3:]]]
    whole, log = trained(groups, epochs, 10_000, objective)
    parts, log_parts = trained(groups, epochs, tokens, objective)
    torch.testing.assert_close(whole, parts, atol=1e-9, rtol=0)
    for a, b in zip(log, log_parts):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-10)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], abs=1e-9)


def test_the_first_step_is_adamw_on_the_mean_gradient():
    """One step by hand: AdamW's first step moves each weight by lr * g / (|g| + eps)."""
    batch = [dpo.Group("t", [s]) for s in sequences(9, 13)]
    after, log = trained(batch, [[batch]], 10_000, lr=1e-3, max_grad_norm=1e9)
    model = make_model(VOCABULARY, seed=3)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    tokens = sum(sum(s.action_mask[1:]) for g in batch for s in g.sequences)
    g = gradients(model, -sum(brute_force_log_prob(model, b.sequences[0]) for b in batch) / tokens)
    torch.testing.assert_close(after, before - 1e-3 * g / (g.abs() + 1e-8), atol=1e-7, rtol=0)
    assert log[0]["gradient_norm"] == pytest.approx(g.norm().item(), rel=1e-6)


def test_learning_rate_schedules():
    groups = [dpo.Group("t", [s]) for s in sequences(*[6] * 10)]
    epochs = [[[g] for g in groups]]
    _, log = trained(groups, epochs, 100, lr=1.0, warmup=0.2, schedule="constant")
    assert [e["lr"] for e in log] == [0.0, 0.5] + [1.0] * 8
    _, log = trained(groups, epochs, 100, lr=1.0, warmup=0.2, schedule="cosine")
    expected = [0.0, 0.5] + [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert [e["lr"] for e in log] == pytest.approx(expected)


def test_a_phase_of_one_step_trains():
    before = torch.cat([p.detach().flatten() for p in make_model(VOCABULARY, seed=3).parameters()])
    batch = [dpo.Group("t", sequences(9))]
    for schedule in ("constant", "cosine"):
        after, _ = trained(batch, [[batch]], 100, warmup=0.1, schedule=schedule)
        assert not torch.equal(after, before)


def test_training_drops_nothing_whatever_the_models_config_says():
    """Else log pi and log pi_ref of the same weights differ, and the first loss is not ln 2."""
    options = dict(router_jitter_noise=0.3, attention_dropout=0.3, num_local_experts=3)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
        **options)
    torch.manual_seed(0)
    model = MixtralForCausalLM._from_config(config, attn_implementation="ragged")
    accelerator, g, log = Accelerator(cpu=True), group(), []
    model = sharding.shard_model(accelerator, model, shard=False).train()
    with torch.no_grad():
        once, again = (dpo.action_log_probs(model, g.sequences) for _ in range(2))
    assert torch.equal(once, again)
    assert vars(model.config).items() >= options.items()  # which is saved with the agent
    [g.reference] = dpo.log_probs_of(accelerator, model, [g], tokens_per_forward=100)
    dpo.fit(accelerator, model, [[[g]]],
            dpo.Objective(partial(dpo.preference_loss, beta=0.1), dpo.sum_weights), adamw(),
            log.append)
    assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-9)


def test_attention_of_another_form_is_refused():
    model = make_model(VOCABULARY)
    model.model.layers[0].self_attn.sliding_window = 4
    with pytest.raises(ValueError, match="Qwen3Attention sees only the last 4 of 9 tokens"):
        dpo.action_log_probs(model, sequences(9))


def test_a_loss_that_is_not_finite_names_the_tasks():
    bad = dpo.Group("webshop-train-7", sequences(8), [dpo.Pair("expert>target", 0, 0)])
    bad.reference = [math.nan]
    with pytest.raises(FloatingPointError, match="webshop-train-7"):
        trained([bad], [[[bad]]], 100, partial(dpo.preference_loss, beta=0.1))


def test_batches_hold_every_group_once_and_keep_instructions_whole():
    groups = [dpo.Group(str(i), [], [dpo.Pair("k", 0, 1)] * n)
              for i, n in enumerate([3, 1, 2, 3, 9, 1, 1, 2])]
    for seed in range(5):
        made = dpo.batches(groups, 4, "pairs", random.Random(seed))
        assert sorted(g.task for b in made for g in b) == sorted(g.task for g in groups)
        for b in made:
            assert sum(len(g.pairs) for g in b) <= 4 or len(b) == 1
        made = dpo.batches(groups, 3, "instructions", random.Random(seed))
        assert [len(b) for b in made] == [3, 3, 2]


def test_packs_keep_order_and_fit():
    groups = [dpo.Group(str(i), sequences(n)) for i, n in enumerate([5, 5, 30, 4, 6, 9])]
    made = ranks.fill(groups, 12, lambda g: g.tokens)
    assert [[g.task for g in p] for p in made] == [["0", "1"], ["2"], ["3", "4"], ["5"]]
