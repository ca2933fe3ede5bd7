"""Log-probabilities, losses, batches and optimiser steps, against brute force and by hand."""

import math
import random
from collections import Counter
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from conftest import make_model, plain_log_probs

import dpo
from dpo import Group, Pair, Trajectory
from engine.forward_passes import distributed_log_probs
from engine.sampling import Sampler
from engine.tracking import flatten

VOCABULARY = 50


def random_trajectories(*lengths, seed=0, task="t"):
    """Returns trajectories of random ids, with a random action mask that ends with an action."""
    rng = random.Random(seed)
    return [Trajectory(task, ids=rng.choices(range(VOCABULARY), k=length),
                       action_mask=[0, 0, *rng.choices([0, 1], k=length - 3), 1])
            for length in lengths]


def log_p(model, t):
    """Returns log pi(e|u) = sum_k log pi(t_k | t_<k), Eq. (2)."""
    return plain_log_probs(model, t.ids, t.action_mask).sum()


def gradients(model, loss):
    found = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def model():
    """A model in float64, so that tolerances are small. It is not trained."""
    return make_model(VOCABULARY).eval()


# ----------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("tokens, passes", [(0, 5), (45, 3)])
def test_log_probs_of_padded_forward_passes_are_those_of_plain_ones(tokens, passes, model):
    one = Accelerator(cpu=True)
    batch = random_trajectories(20, 9, 15, 33, 4)
    batch[2].action_mask = [0] * 15  # a trajectory without action tokens
    never = (batch[0].ids[-1], 11)
    shapes = []
    hook = model.register_forward_pre_hook(
        lambda _, given, options: shapes.append(options["input_ids"].shape), with_kwargs=True)
    found = distributed_log_probs(one, model, batch, tokens, Sampler(0.7, never).process_logits)
    hook.remove()
    # Only a forward pass of one trajectory may have more tokens than the limit.
    assert len(shapes) == passes and sum(rows for rows, _ in shapes) == 5
    assert all(rows * length <= tokens or rows == 1 for rows, length in shapes)

    expected = torch.cat([plain_log_probs(model, t.ids, t.action_mask, never, 0.7)
                          for t in batch])                                        # (A,)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert 0 < found.isinf().sum() < len(found)


# ---------------------------------------------------------------------------------------- losses


def group(task="a", seed=0):
    """Returns an expert of 11 tokens and two failures of 16 and 7, with a pair of each kind."""
    e, t, f = random_trajectories(11, 16, 7, seed=seed, task=task)
    e.ref_log_prob, t.ref_log_prob, f.ref_log_prob = -20.0, -21.0, -22.0
    return Group([e, t, f], [Pair("expert>target", e, t, 0.5, 0.5),
                             Pair("expert>failure", e, f, 0.5, 0.5),
                             Pair("failure>failure", f, t, 1.0, 0.0)])


def loss_of(model, groups, **changed):
    policy = dpo.token_log_probs(model, dpo.trajectories_of(groups))
    return dpo.preference_loss(policy, groups, **dict(beta=0.1) | changed)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_equation_9_and_its_gradient_equal_brute_force(reduction):
    model = make_model(VOCABULARY)
    groups = [group("a", 1), group("b", 2)]
    beta, lambda_dpo, lambda_sft = 0.3, 0.7, 0.2
    losses, statistics = loss_of(model, groups, beta=beta, lambda_dpo=lambda_dpo,
                                 lambda_sft=lambda_sft, log_prob_reduction=reduction)

    of_dpo = of_sft = 0.0
    sums = Counter()  # statistics of the failure pairs
    for pair in dpo.pairs_of(groups):
        w, l = log_p(model, pair.chosen), log_p(model, pair.rejected)
        ratio_w, ratio_l = w - pair.chosen.ref_log_prob, l - pair.rejected.ref_log_prob
        if reduction == "mean":
            ratio_w = ratio_w / sum(pair.chosen.action_mask[1:])
            ratio_l = ratio_l / sum(pair.rejected.action_mask[1:])
        # Eq. (7): L_DPO = -log sigma(z) = log(1 + exp(-z)), z = beta (ratio_w - ratio_l)
        z = beta * (ratio_w - ratio_l)
        of_dpo = of_dpo + lambda_dpo * pair.weight * torch.log(1 + torch.exp(-z))
        # Eq. (9): + lambda_SFT times -log pi(e_w|u)
        of_sft = of_sft - lambda_sft * pair.sft_weight * w
        assert pair.history == [pytest.approx((w.item(), l.item(), z.item()), abs=1e-9)]
        if pair.kind == "failure>failure":
            sums.update(chosen=w.item(), rejected=l.item(), margin=z.item(), count=1,
                        reward_chosen=beta * ratio_w.item(),
                        reward_rejected=beta * ratio_l.item(), accuracy=z.item() > 0)
    expected = of_dpo + of_sft
    by_hand = dict(loss=expected.item(), dpo=of_dpo.item(), sft=of_sft.item())
    assert {name: value.item() for name, value in losses.items()} == pytest.approx(by_hand, abs=1e-9)
    assert gradients(model, losses["loss"] - expected).abs().max() < 1e-9
    assert statistics["failure>failure"] == pytest.approx(sums)


@pytest.mark.parametrize("losses, margin, shape", [
    (torch.tensor(0.7), torch.ones(3), r"\(\)"), (torch.ones(3), torch.ones(1), r"\(1,\)")])
def test_a_loss_needs_one_number_per_pair(losses, margin, shape, model, monkeypatch):
    """Otherwise it would be broadcast, and the weights of the pairs would have no effect."""
    monkeypatch.setattr(dpo, "dpo_loss", lambda *_: (losses, margin))
    with pytest.raises(ValueError, match=f"3 pairs have .* of shape {shape}; give one number per"):
        loss_of(model, [group()])


# ------------------------------------------------------------------------------ optimiser steps


def trained(steps, tokens=10_000, model=None):
    """Returns weights and log after these steps on pairs. A given model is trained in place."""
    model = model or make_model(VOCABULARY, seed=3).eval()
    log = dpo.train(model, dpo.adamw(model), steps, [1e-3] * len(steps),
                    partial(dpo.preference_loss, beta=0.1), dpo.pair_count,
                    fits=partial(dpo.fits_in_pass, tokens=tokens))
    return weights(model), log


def test_micro_batches_give_the_step_of_the_whole_batch():
    """A group has 48 tokens, with padding."""
    def steps():
        groups = [group(str(i), seed=i) for i in range(4)]
        return [groups[:3], groups[3:]]

    for tokens, sizes in (95, [1, 1, 1]), (96, [2, 1]):
        made = dpo.micro_batches(steps()[0], partial(dpo.fits_in_pass, tokens=tokens))
        assert [*map(len, made)] == sizes
    whole, log = trained(steps())
    parts, log_of_parts = trained(steps(), tokens=96)
    torch.testing.assert_close(whole, parts, atol=1e-9, rtol=0)
    for a, b, batch in zip(log, log_of_parts, steps(), strict=True):
        assert flatten("", b) == pytest.approx(flatten("", a), abs=1e-9)
        assert sum(means["count"] for means in a["kinds"].values()) == dpo.pair_count(batch)


@pytest.mark.parametrize("most, decay", [(1e9, 0.1), (0.01, 0.0)])
def test_steps_are_adamw_on_the_mean_gradient(most, decay):
    """AdamW's state after step 1 has the clipped gradient. The learning rate applies to all parameter
    groups. The embedding of the pad token is trained, since it may also end turns."""
    trajectories = random_trajectories(9, 13)
    batch = [Group([t]) for t in trajectories]
    rates = [1e-3, 5e-4]
    model = make_model(VOCABULARY, seed=3).eval()
    model.get_input_embeddings().padding_idx = trajectories[0].ids[3]
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([dict(params=[first], lr=9.0), dict(params=others)],
                                  weight_decay=decay)
    if decay:
        optimizer = dpo.adamw(model, decay)
    log = dpo.train(model, optimizer, [batch] * 2, rates, dpo.sft_loss, dpo.action_count,
                    max_grad_norm=most)
    after = weights(model)
    model = make_model(VOCABULARY, seed=3)
    adamw = torch.optim.AdamW(model.parameters(), weight_decay=decay)
    tokens = sum(sum(t.action_mask[1:]) for t in trajectories)
    for line, rate in zip(log, rates, strict=True):
        # Eq. (5), as a mean over the batch's action tokens
        loss = -sum(log_p(model, t) for t in trajectories) / tokens
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most).item()
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-9)
        assert (line["norm"], line["lr"]) == (pytest.approx(norm, rel=1e-6), rate)
        assert norm > 0.1
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    torch.testing.assert_close(after, weights(model), atol=1e-7, rtol=0)


@pytest.mark.parametrize("steps, warmup, cosine, expected", [
    # A warmup of 0.2 of ten steps takes two of them.
    (10, 0.2, False, [0.0, 0.5] + [1.0] * 8),
    (10, 0.2, True, [0.0, 0.5] + [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]),
    (1, 0.1, True, [1.0])])  # a phase of one step trains
def test_learning_rates(steps, warmup, cosine, expected):
    assert dpo.learning_rates(steps, 1.0, warmup, cosine) == pytest.approx(expected)


@pytest.mark.parametrize("change, good_steps, says", [
    # Errors of the last step are found before the first one.
    (lambda model, t, pairs: model.train(), 1, "training mode, .* use model.eval()"),
    (lambda model, t, pairs: model.bfloat16(), 1, "torch.bfloat16, .*; load the model with dtype="),
    # The first token has no log-probability.
    (lambda model, t, pairs: setattr(t, "action_mask", [1] + [0] * 10), 1,
     "task 'b', .* no action tokens .*; leave it out"),
    (lambda model, t, pairs: setattr(t, "ref_log_prob", None), 0,
     "task 'b', .* no ref_log_prob; call dpo.add_references"),
    (lambda model, t, pairs: setattr(t, "ref_log_prob", math.nan), 0, "nan, .* at step 1 on tasks b"),
    (lambda model, t, pairs: [setattr(pair, "weight", [0.5]) for pair in pairs], 0,
     r"margin or weight of shape \(3, 1\)")])
def test_training_that_would_be_wrong_or_without_effect_is_refused(change, good_steps, says):
    model = make_model(VOCABULARY).eval()
    broken = group("b")
    change(model, broken.trajectories[0], broken.pairs)
    before = weights(model)
    with pytest.raises((ValueError, FloatingPointError), match=says):
        trained([[group()]] * good_steps + [[broken]], model=model)
    assert torch.equal(weights(model), before)


def test_weights_that_are_not_trained_may_be_bf16():
    dpo.check_trainable(make_model(VOCABULARY, dtype=torch.bfloat16).eval().requires_grad_(False), [])


# --------------------------------------------------------------------------------------- batches


def test_batches_have_every_group_once_in_each_epoch_and_keep_tasks_whole():
    groups = [Group([Trajectory(str(i))], [None] * pairs)
              for i, pairs in enumerate([3, 1, 2, 3, 9, 1, 1, 2])]
    made = dpo.batches(groups, 4, random.Random(0), epochs=5)
    assert all(dpo.pair_count(batch) <= 4 or len(batch) == 1 for batch in made)
    order = "".join(t.task for batch in made for t in dpo.trajectories_of(batch))
    epochs = {order[n:n + 8] for n in range(0, len(order), 8)}
    assert len(epochs) == 5 and all(sorted(epoch) == [*"01234567"] for epoch in epochs)
    # A batch is from one epoch. Tasks without pairs count as 1 each, as in SFT.
    for group in groups:
        group.pairs = []
    made = dpo.batches(groups, 3, random.Random(0), epochs=2)
    assert [len(batch) for batch in made] == [3, 3, 2] * 2
