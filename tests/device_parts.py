"""The parts of the core on a device, as numbers, which are the same on all devices but for rounding."""

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

import dpo
from dpo import Group, Pair, Trajectory
from engine import models, trial
from engine.chat import Encoder
from engine.passes import log_probs_in_passes
from engine.sampling import Draw

WORD = range(300, 2000)  # ids of words


def accelerator(device, bf16: bool):
    return SimpleNamespace(num_processes=1, process_index=0, device=device, is_main_process=True,
                           mixed_precision="bf16" if bf16 else "no")


def played(model, encoder) -> list[Trajectory]:
    """Three conversations of two replies each, which begin at different lengths."""
    rng = random.Random(0)
    draw = Draw(encoder.sampler(0.7), encoder, ("ing",))
    answer = trial.answer_of("kept", model, draw, 3, 100, 12, 60)
    asked = [(Trajectory(), random.Random(n)) for n in range(3)]
    for lengths in (30, 17, 23), (4, 9, 6):
        for (t, _), length in zip(asked, lengths):
            t.extend(rng.choices(WORD, k=length), is_action=False)
        for (t, _), (ids, log_probs) in zip(asked, answer(asked)):
            t.extend(ids, is_action=True)
            t.log_probs += log_probs
    return [t for t, _ in asked]


def parts(device: str, folder: str, out: str) -> dict:
    """What load, replies, log_probs, training, save and trial make of the model in a folder."""
    device = torch.device(device)
    encoder = Encoder(models.read(transformers.AutoTokenizer, folder))
    whole = accelerator(device, bf16=False)
    model = models.load(whole, folder, recompute=True, shard=False)
    places = {p.device.type for p in model.parameters()}
    trajectories = played(model, encoder)
    found = dict(devices=sorted(places), ids=[t.ids for t in trajectories],
                 sampled=[t.log_probs for t in trajectories])

    # In bf16 as on a GPU: autocast, and layers that run again in the backward pass.
    half = log_probs_in_passes(accelerator(device, bf16=True), model, trajectories, 100)
    half.sum().backward()
    found["half"] = half.tolist()
    found["half_gradient"] = sum(p.grad.double().norm().item() for p in model.parameters())
    model.zero_grad()

    a, b, c = trajectories
    group = Group(trajectories, [Pair("a>b", a, b, 1.0, 0.5), Pair("a>b", a, c)])
    log_probs = partial(log_probs_in_passes, whole, tokens=100)
    dpo.add_references(model, [group], log_probs, 200)
    found["reference"] = [t.reference for t in trajectories]
    steps = dpo.train(model, dpo.adamw(model), [[group]] * 2, [1e-3] * 2,
                      partial(dpo.preference_loss, beta=0.1), dpo.pair_count, log_probs, tokens=200)
    found["losses"] = [line["loss"] for line in steps]

    Path(out).mkdir()
    models.save(whole, model, encoder, out)
    after = models.read_model(out, device=device)
    found["after"] = log_probs_in_passes(whole, after, trajectories, 100).tolist()
    found["ways"] = trial.trial(models.read_model(out, torch.bfloat16, device).eval(), encoder)
    return found
