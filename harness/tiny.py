"""A language model small enough to learn on a laptop, made like any hub model.

It stands in for Llama-2-7B-Chat: a Qwen3-architecture causal LM with a tokenizer and chat template
of its own, saved to a folder that `from_pretrained` loads, so that nothing else knows it is tiny.
Its pretraining takes minutes: repeated random sequences, which form the heads that copy, then an
environment's practice text (`env.practice`, noisy shoppers for one), which shows its pages,
mistakes and recoveries. It never sees an expert, and nobody in it asks for what is held out for
the split "unseen".
"""

import os
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, set_seed

import dpo
from engine import sharding
from harness.files import ROOT, hashed, held, replace

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}")

MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, head_dim=32, max_position_embeddings=2048,
             tie_word_embeddings=True)
# Batches of random tokens said over and over, then an environment's practice text read `epochs`
# times. Short ones teach to copy sooner (the loss falls from 7.5 to 4.5 nats in the databases, of
# long ones to 6.7), which is worth it where nouns are new; the shop's SFT agent is better without:
# 0.694 against 0.621 on `test` [ours, one seed each].
LONG = dict(copy_tokens=(10, 60), copy_times=2, copy_batch=16, copy_lr=2e-3, copy_steps=500)
SHORT = dict(copy_tokens=(3, 12), copy_times=4, copy_batch=32, copy_lr=5e-3, copy_steps=500)
FULL = {"webshop": dict(LONG, conversations=8000, epochs=2, batch=16, lr=2e-3),
        "scienceworld": dict(LONG, conversations=4000, epochs=1, batch=16, lr=2e-3),
        "intercodesql": dict(SHORT, conversations=24000, epochs=1, batch=16, lr=2e-3)}
FEW = dict(LONG, copy_batch=8, copy_lr=4e-3, copy_steps=150)
QUICK = {"webshop": dict(FEW, conversations=1200, epochs=1, batch=8, lr=4e-3),
         "scienceworld": dict(FEW, conversations=200, epochs=1, batch=8, lr=4e-3),
         "intercodesql": dict(SHORT, copy_steps=150, conversations=6000, epochs=1, batch=8,
                              lr=2e-3)}


SAMPLE = 8  # conversations of practice text that say if it is still the same


def base(folder, tasks) -> Path:
    """The pretrained tiny model's folder; made once and kept under the hash of what made it.

    That is the recipe, and a sample of the text; an edit that changes neither costs nothing.
    """
    s, on_main = folder.settings, folder.on_main
    recipe = (QUICK if s.quick else FULL)[s.env]
    made_by = [recipe, MODEL, CHAT_TEMPLATE, s.env, s.view, torch.__version__,
               on_main(lambda: practice(tasks, SAMPLE))]
    name = hashed(made_by)[:16]
    path = ROOT / ".cache" / f"tiny-{name}"
    if on_main(path.exists):
        return path
    path.parent.mkdir(exist_ok=True)
    # Of runs that start together one makes it, and the others wait here.
    lock = held(Path(f"{path}.lock"), wait=True) if folder.main else None
    if not on_main(path.exists):
        for left in path.parent.glob(f"{path.name}.*.tmp") if folder.main else ():
            shutil.rmtree(left)  # by one that was killed
        pretrain(folder.log, tasks, recipe, path)
    if lock:
        lock.release()
    return path


def practice(tasks, n: int) -> list[list[dict]]:
    """n conversations of the environment's practice text."""
    env = tasks.make_env()
    conversations = env.practice(0, n, tasks.make_env)
    env.close()
    return conversations


def pretrain(log, tasks, recipe: dict, folder: Path) -> None:
    """Makes the tokenizer of the environment's practice text and a model that has read it."""
    accelerator = log.accelerator
    set_seed(0)
    rng = random.Random(0)
    conversations = practice(tasks, recipe["conversations"])
    tokenizer = make_tokenizer([m["content"] for c in conversations for m in c])
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                         bos_token_id=None, pad_token_id=None, **MODEL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32,
                                             attn_implementation="ragged")
    model = sharding.shard_model(accelerator, model, shard=False)
    copies = [[copy_group(rng, len(tokenizer), recipe) for _ in range(recipe["copy_batch"])]
              for _ in range(recipe["copy_steps"])]
    encoder = dpo.Encoder(tokenizer)
    texts = [encoder.encode(c)[0] for c in conversations]
    groups = [text_group("text", ids, [1] * len(ids)) for ids in texts]
    rounds = [dpo.batches(groups, recipe["batch"], "instructions", rng)
              for _ in range(recipe["epochs"])]
    for part, epochs, lr in (("copying", [copies], recipe["copy_lr"]),
                             ("practice", rounds, recipe["lr"])):
        losses = []
        tokens = sum(g.tokens for epoch in epochs for batch in epoch for g in batch)
        how = dpo.Optimisation(lr, 0.05, "cosine", 0.01, 1.0, tasks.settings.tokens_per_forward)
        with log.bar(f"base: {part}", tokens, "token"):
            dpo.fit(accelerator, model, epochs,
                    dpo.Objective(dpo.sft_loss, dpo.count_action_tokens), how,
                    lambda event: losses.append(event["loss"]))
        log.say(f"base: {part:8} loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token")
    temporary = folder.with_suffix(f".{os.getpid()}.tmp")
    sharding.save(accelerator, model, temporary)
    if log.main:
        tokenizer.save_pretrained(temporary)
        replace(temporary, folder)
    accelerator.wait_for_everyone()


def text_group(name: str, ids: list[int], action_mask: list[int]) -> dpo.Group:
    return dpo.Group(name, [dpo.Trajectory(ids=ids, action_mask=action_mask)])


def copy_group(rng: random.Random, vocabulary: int, recipe: dict) -> dpo.Group:
    """Random tokens, said over and over; the first time does not count in the loss."""
    once = [rng.randrange(vocabulary) for _ in range(rng.randint(*recipe["copy_tokens"]))]
    times = recipe["copy_times"]
    return text_group("copy", once * times, [0] * len(once) + [1] * (times - 1) * len(once))


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token per word, quoted word, number or mark of `texts`; others are spelled out."""
    pattern = Regex(r"'\w+'|\w+(?:\.\w+)?|[^\w\s]")
    split = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    letters = {chr(c) for c in range(33, 127)}
    special = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|unknown|>"]
    pieces = special + sorted(words | letters) + sorted("##" + c for c in letters)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = split
    # "search [ red mug ]" back to "search[red mug]", the form that environments read.
    tokenizer.decoder = decoders.Sequence([
        decoders.WordPiece(cleanup=False), decoders.Fuse(), decoders.Replace(" [", "["),
        decoders.Replace("[ ", "["), decoders.Replace(" ]", "]")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|unknown|>", eos_token="<|end|>",
        additional_special_tokens=special[:3], chat_template=CHAT_TEMPLATE)
