"""The parts of the core on a device, as numbers, which are the same on all devices but for rounding."""

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

import dpo

WORD = range(300, 2000)  # ids of words
LOSS = SimpleNamespace(beta=0.1, lambda_dpo=1.0, lambda_sft=0.1, log_prob="sum", sft_term="sum")


def accelerator(device, bf16: bool):
    return SimpleNamespace(num_processes=1, process_index=0, device=device, is_main_process=True,
                           mixed_precision="bf16" if bf16 else "no")


def played(model, encoder, way) -> list[dpo.Trajectory]:
    """Three conversations of one reply each, which begin at different lengths."""
    rng = random.Random(0)
    texts = [rng.choices(WORD, k=n) for n in (30, 17, 23)]
    asked = [(ids, random.Random(n)) for n, ids in enumerate(texts)]
    trajectories = []
    for ids, (reply, log_probs) in zip(texts, dpo.replies(
            model, encoder, encoder.sampler(0.7), 12, ("ing",), asked, False, way)):
        mask = [0] * len(ids) + [1] * len(reply)
        trajectories.append(dpo.Trajectory(ids=ids + reply, action_mask=mask, log_probs=log_probs))
    return trajectories


def parts(device: str, folder: str, out: str) -> dict:
    """What load, replies, log_probs, training, save and trial make of the model in a folder."""
    device = torch.device(device)
    encoder = dpo.Encoder(dpo.read(transformers.AutoTokenizer, folder))
    way = "static" if device.type == "cuda" else True
    whole = accelerator(device, bf16=False)
    model = dpo.load(whole, folder, recompute=True, shard=False)
    places = {p.device.type for p in model.parameters()}
    trajectories = played(model, encoder, way)
    found = dict(devices=sorted(places), ids=[t.ids for t in trajectories],
                 sampled=[t.log_probs for t in trajectories])

    # In bf16 as on a GPU: autocast, and layers that run again in the backward pass.
    half = dpo.log_probs_in_passes(accelerator(device, bf16=True), model, trajectories, 100)
    half.sum().backward()
    found["half"] = half.tolist()
    found["half_gradient"] = sum(p.grad.double().norm().item() for p in model.parameters())
    model.zero_grad()

    groups = [dpo.Group(trajectories, [dpo.Pair("a>b", 0, 1, 1.0, 0.5), dpo.Pair("a>b", 0, 2)])]
    log_probs_of = partial(dpo.log_probs_in_passes, whole, tokens=100)
    dpo.add_references(model, groups, log_probs_of, 200)
    found["reference"] = groups[0].reference
    objective = dpo.Objective(partial(dpo.preference_loss, s=LOSS), lambda g: 2, 1e-3, tokens=200)
    steps = dpo.training(model, dpo.adamw(model, objective), [groups] * 2, objective, log_probs_of)
    found["losses"] = [line["loss"] for line in steps]

    Path(out).mkdir()
    dpo.save(whole, model, encoder, out)
    found["after"] = dpo.log_probs_in_passes(whole, dpo.read_model(out, device=device), trajectories,
                                   100).tolist()
    found["ways"] = dpo.trial(dpo.read_model(out, torch.bfloat16, device), encoder)
    return found
