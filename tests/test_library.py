"""docs/library.md: its script as it stands, its numbers against plain torch and transformers."""

import json
import math
import re
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, plain_log_probs
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCUMENT = (ROOT / "docs/library.md").read_text()
[SCRIPT] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)


@pytest.fixture(scope="module")
def script(small_model, tmp_path_factory):
    """(what the script's names are after it has run, where its model is)."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "script.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", str(small_model), str(folder / "saved")])
        return runpy.run_path(str(folder / "script.py")), folder / "saved"


EXPERT, TARGET = 0, 1  # who says what follows; the target's rollouts are 1 and 2


def said(tokenizer, n, who):
    """A conversation's ids as the template has them, and which of them are the assistant's."""
    first, last = [("I add.", f"It is {2 * n}."), ("I guess.", f"It is {n}."),
                   ("I guess.", "It is nothing.")][who]
    talk = [dict(role="user", content=f"What is {n} + {n}?"), dict(role="assistant", content=first),
            dict(role="user", content="And?"), dict(role="assistant", content=last)]

    def size(messages, go_on):
        return len(ids_of(tokenizer, messages, go_on))

    ids = ids_of(tokenizer, talk, False)
    mask = [0] * len(ids)
    for reply in [1, 3]:
        # Up to the end of turn, which ends the reply; the line break after it is no part of it.
        begin = size(talk[:reply], True)
        end = size(talk[:reply + 1], False) - 1
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def ids_of(tokenizer, messages, go_on):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=go_on)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def number(group):
    """The n of a task "sum n"."""
    return int(group.trajectories[0].task.split()[1])


def test_the_script_says_what_is_trained_on(script, small_model):
    names, _ = script
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    assert len(names["pairs"]) == 8
    for n in range(4):
        trajectories = [names["experts"][n], *names["played"][2 * n:2 * n + 2]]
        for who, t in enumerate(trajectories):
            ids, mask = said(tokenizer, n, who)
            size = len(t.ids)
            assert (t.ids, t.action_mask) == (ids[:size], mask[:size])
            assert not any(mask[size:])


def step(model, optimizer, loss, lr):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()


def test_its_training_is_plain_adamw_on_the_equations(script, small_model):
    """Every step repeated by a loop of one's own, which has the log's losses and its weights."""
    names, saved = script
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    log, sft = names["log"], names["sft"]
    assert len(log) == 6 + 1
    assert {number(g) for g in sft[0] + sft[1]} == {0, 1, 2, 3}

    def log_prob(n, who):
        return plain_log_probs(model, *said(tokenizer, n, who)).double().sum()

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for k, line in enumerate(log[:6]):
        # Eq. (5), as a mean over the batch's action tokens
        tasks = [number(g) for g in sft[k]]
        tokens = sum(sum(said(tokenizer, n, EXPERT)[1]) for n in tasks)
        loss = -sum(log_prob(n, EXPERT) for n in tasks) / tokens
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-4)
        step(model, optimizer, loss, 1e-3 * 0.5 * (1 + math.cos(math.pi * k / 6)))
    assert log[5]["loss"] < log[0]["loss"]

    references = {}
    for n in range(4):
        references[n] = [log_prob(n, who).item() for who in range(3)]
    for group in names["groups"]:
        found = [t.reference for t in group.trajectories]
        assert found == pytest.approx(references[number(group)], abs=1e-2)

    # Eq. (9): two pairs a task weigh 1/2 each, lambda_SFT is 0.1; the mean over eight pairs.
    loss = 0.0
    for n, (of_expert, *of_target) in references.items():
        for who, of_rejected in enumerate(of_target, TARGET):
            margin = 0.1 * (log_prob(n, EXPERT) - of_expert - log_prob(n, who) + of_rejected)
            loss = loss + 0.5 * (-F.logsigmoid(margin) - 0.1 * log_prob(n, EXPERT)) / 8
    assert log[6]["loss"] == pytest.approx(loss.item(), abs=1e-3)
    assert log[6]["kinds"]["expert>target"]["count"] == 8
    step(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0), loss, 1e-3)

    after = AutoModelForCausalLM.from_pretrained(saved)
    start = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    for a, b, c in zip(after.parameters(), model.parameters(), start.parameters(), strict=True):
        assert ((a - b).abs() < 1e-4).float().mean() > 0.99
        assert (a - c).abs().max() > 1e-3


def test_its_reply_is_the_greedy_one_of_the_saved_model(script):
    names, saved = script
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved)
    encoder = names["encoder"]
    asked = ids_of(tokenizer, [dict(role="user", content="What is 2 + 2?")], True)
    reply = []
    while len(reply) < 16 and encoder.end_of_turn not in reply:
        logits = model(torch.tensor([asked + reply])).logits[0, -1]
        logits[list(encoder.sampler().never)] = -torch.inf
        reply.append(int(logits.argmax()))
    assert names["ids"] == reply
    generation = json.loads((saved / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [encoder.end_of_turn]
