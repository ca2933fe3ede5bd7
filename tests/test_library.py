"""docs/library.md: its script as it stands, its numbers against plain torch and transformers."""

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


@pytest.fixture(scope="module")
def script(small_model, tmp_path_factory):
    """(what the script's names are after it has run, where its model is)."""
    folder = tmp_path_factory.mktemp("library")
    [code] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
    (folder / "script.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", str(small_model), str(folder / "saved")])
        return runpy.run_path(str(folder / "script.py")), folder / "saved"


def said(tokenizer, n, first, last):
    """A conversation's ids as the template has them, and which of them are the assistant's."""
    talk = [f"What is {n} + {n}?", first, "And?", last]
    talk = [dict(role=("user", "assistant")[k % 2], content=text) for k, text in enumerate(talk)]
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    render = lambda k, go_on: ids(tokenizer.apply_chat_template(
        talk[:k], tokenize=False, add_generation_prompt=go_on))
    mask = [0] * len(render(4, False))
    for k in (1, 3):  # up to the end of turn, which ends the reply; the newline after it does not
        for at in range(len(render(k, True)), len(render(k + 1, False)) - len(ids("\n"))):
            mask[at] = 1
    return render(4, False), mask


def test_the_script_is_short_and_says_what_is_trained_on(script, small_model):
    names, tokenizer = script[0], AutoTokenizer.from_pretrained(small_model)
    assert len(DOCUMENT.splitlines()) <= 60 and len(names["rows"]) == 4
    for n, (e, t) in enumerate(zip(names["experts"], names["played"], strict=True)):
        for trajectory, texts in ((e, ("I add.", f"It is {2 * n}.")), (t, ("I guess.", f"It is {n}."))):
            ids, mask = said(tokenizer, n, *texts)
            assert trajectory.ids == ids[:len(trajectory.ids)] and trajectory.action_mask == (
                mask[:len(trajectory.ids)]) and not any(mask[len(trajectory.ids):])


def test_its_training_is_plain_adamw_on_the_equations(script, small_model):
    """Every step repeated by a loop of one's own, which has the log's losses and its weights."""
    names, saved = script
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    number = lambda group: int(group.sequences[0].task.split()[1])
    log_prob = lambda n, *replies: plain_log_probs(
        model, *said(tokenizer, n, *replies)).double().sum()
    expert = lambda n: log_prob(n, "I add.", f"It is {2 * n}.")
    other = lambda n: log_prob(n, "I guess.", f"It is {n}.")
    tokens = lambda n: sum(said(tokenizer, n, "I add.", f"It is {2 * n}.")[1])
    log, steps = names["log"], names["steps"]
    assert len(log) == 6 + 1 and {number(g) for batch in steps[:2] for g in batch} == {0, 1, 2, 3}

    def step(optimizer, loss, lr):
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    adamw = lambda: torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    optimizer = adamw()
    for k, (batch, event) in enumerate(zip(steps, log)):
        ns = [number(g) for g in batch]
        loss = -sum(map(expert, ns)) / sum(map(tokens, ns))
        assert event["loss"] == pytest.approx(loss.item(), abs=1e-4)
        step(optimizer, loss, 1e-3 * 0.5 * (1 + math.cos(math.pi * k / 6)))
    assert log[5]["loss"] < log[0]["loss"]
    # One pair an instruction, of weight 1: ln 2 and lambda_SFT = 0.1 of the expert's loss.
    references = [(expert(n).item(), other(n).item()) for n in range(4)]
    for group in names["groups"]:
        assert group.reference == pytest.approx(references[number(group)], abs=1e-2)
    loss = sum(-F.logsigmoid(0.1 * (expert(n) - e - other(n) + o)) - 0.1 * expert(n)
               for n, (e, o) in enumerate(references)) / 4
    assert log[6]["loss"] == pytest.approx(loss.item(), abs=1e-3)
    assert log[6]["kinds"]["expert>target"]["count"] == 4
    step(adamw(), loss, 1e-3)
    after = AutoModelForCausalLM.from_pretrained(saved)
    start = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    for a, b, c in zip(after.parameters(), model.parameters(), start.parameters(), strict=True):
        assert ((a - b).abs() < 1e-4).float().mean() > 0.99 and (a - c).abs().max() > 1e-3

    asked = tokenizer.apply_chat_template([dict(role="user", content="What is 2 + 2?")],
                                          add_generation_prompt=True, return_dict=True)["input_ids"]
    reply = []
    while len(reply) < 16 and names["encoder"].end_of_turn not in reply:
        logits = after(torch.tensor([asked + reply])).logits[0, -1]
        logits[[*names["never"]]] = -torch.inf
        reply.append(int(logits.argmax()))
    assert names["ids"] == reply
