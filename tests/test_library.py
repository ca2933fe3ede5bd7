"""docs/library.md: its script as it stands, its numbers against plain torch and transformers."""

import json
import math
import re
import runpy
import sys

import pytest
import torch
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


EXPERT = 0  # the first who says what follows; the target's rollouts are 1 and 2


def said(tokenizer, n, who):
    """A conversation's ids as the template has them, and which of them are the assistant's."""
    first, last = [("I add.", f"It is {2 * n}."), ("I guess.", f"It is {n}."),
                   ("I guess.", "It is nothing.")][who]
    talk = [dict(role="user", content=f"What is {n} + {n}?"), dict(role="assistant", content=first),
            dict(role="user", content="And?"), dict(role="assistant", content=last)]

    def size(messages, add_generation_prompt):
        return len(ids_of(tokenizer, messages, add_generation_prompt))

    ids = ids_of(tokenizer, talk, False)
    mask = [0] * len(ids)
    for reply in [1, 3]:
        # Up to the end of turn, which ends the reply; the line break after it is no part of it.
        begin = size(talk[:reply], True)
        end = size(talk[:reply + 1], False) - 1
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def ids_of(tokenizer, messages, add_generation_prompt):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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


def test_its_training_begins_at_the_losses_of_its_model(script, small_model):
    """Eq. (5) over the first batch's action tokens; then Eq. (9) at margin 0, a mean over weights."""
    names, saved = script
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    start = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    *sft, preferences = names["log"]
    texts = [said(tokenizer, int(g.trajectories[0].task.split()[1]), EXPERT) for g in names["sft"][0]]
    nats = sum(plain_log_probs(start, *text).sum().item() for text in texts)
    assert len(sft) == 6 and sft[5]["loss"] < sft[0]["loss"]
    assert sft[0]["loss"] == pytest.approx(-nats / sum(sum(mask) for _, mask in texts), abs=1e-4)
    [(kind, pairs)] = preferences["kinds"].items()
    assert (kind, pairs["count"], pairs["margin"]) == ("expert>target", 8, pytest.approx(0, abs=1e-4))
    assert preferences["loss"] == pytest.approx(math.log(2) - 0.1 * pairs["chosen"], abs=1e-3)
    for a, b in zip(AutoModelForCausalLM.from_pretrained(saved).parameters(), start.parameters(), strict=True):
        assert (a - b).abs().max() > 1e-3


def test_its_reply_is_the_greedy_one_of_the_saved_model(script):
    names, saved = script
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved)
    encoder = names["encoder"]
    asked = ids_of(tokenizer, [dict(role="user", content="What is 2 + 2?")], True)
    reply = []
    while len(reply) < 16 and encoder.end_of_turn not in reply:
        logits = model(torch.tensor([asked + reply])).logits[0, -1]
        logits[list(encoder.sampler().suppressed_ids)] = -torch.inf
        reply.append(int(logits.argmax()))
    assert names["ids"] == reply
    generation = json.loads((saved / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [encoder.end_of_turn]
