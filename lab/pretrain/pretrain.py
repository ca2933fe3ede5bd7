"""Makes a tiny model such as the shipped one: it reads what it is shown, and learns on a laptop.

A Llama of two layers with a tokenizer and chat template of its own. It is trained on random tokens
said twice, which forms the heads that copy (a norm on queries and keys, as in Qwen3, keeps them
from forming), and then on practice texts, with copying kept in each batch. It never sees an expert
of a task or an evaluated task, nor anybody who asks for what is held out for the split "unseen".

    python -m lab.pretrain.pretrain [--env NAME ...] [--width N] [--out FOLDER]

An environment's texts are of a recipe, lab/pretrain/recipes/NAME.py, with `conversations` and
`exchanged`. The shipped tiny/ was made by longer recipes, which are in commit 81b13cf.
"""

import argparse
import importlib
import random
import re
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

import dpo
from dpo import Group, Trajectory, action_count
from engine.chat import Encoder
from engine.models import prepare, save
from engine.passes import log_probs_in_passes
from lab.pretrain.practice import exchange
from lab.runfiles import count

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}")
TEXTS = {"webshop": (12_000, 4), "intercodesql": (16_000, 2), "scienceworld": (600, 6)}
LONGEST = 2048  # tokens of a text
OBSERVED = 0.3  # of a text's other tokens than replies, the share that is trained on
BATCH = 16      # texts
RATE = 2e-3
# Batches of sequences said twice come first; then some are in each batch of texts.
COPY_BATCHES = 1000
COPY_RATE = 3e-3
FIRST, BESIDE = 40, 12  # sequences
TOKENS = 4096   # of a pass, with padding


def make(out: Path, texts: dict[str, tuple[int, int]], width: int = 128) -> None:
    """Pretrains a model: on one machine with one version of the packages the same bits each time.

    Args:
        out: The folder of the model.
        texts: environment -> how many conversations it reads, and how often.
        width: Of the model, a multiple of 8. Layers and heads are as many in each.
    """
    torch.set_num_threads(1)
    transformers.set_seed(0)
    rng = random.Random(0)
    read = []  # (conversations, passes over them, what is exchanged in them)
    said = []
    for env, (n, passes) in texts.items():
        recipe = importlib.import_module(f"lab.pretrain.recipes.{env}")
        read.append((recipe.conversations(0, n), passes, recipe.exchanged()))
        for conversation in read[-1][0]:
            said += [m["content"] for m in conversation]
        for kind in read[-1][2]:
            said += kind.pool
    tokenizer = make_tokenizer(said)
    model = prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=width // 4,
        max_position_embeddings=LONGEST, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id)), recompute=False)
    accelerator = Accelerator(cpu=True)

    train(accelerator, model, [copies(rng, len(tokenizer), FIRST) for _ in range(COPY_BATCHES)],
          COPY_RATE)
    anything = [word for word in sorted(tokenizer.get_vocab()) if re.fullmatch("[a-z]{3,}", word)]
    groups = []
    for conversations, passes, kinds in read:
        for conversation in passes * conversations:
            groups.append(text(rng, exchange(rng, conversation, kinds, anything), tokenizer))
    batches = dpo.batches(groups, BATCH, rng)
    for batch in batches:
        batch += copies(rng, len(tokenizer), BESIDE)
    train(accelerator, model, batches, RATE)
    save(accelerator, model, Encoder(tokenizer), out)
    (out / "README.md").write_text(card(model, texts), encoding="utf-8")


def train(accelerator, model, batches: list[list[Group]], rate: float) -> None:
    """Trains on the replies of texts, and on what can be known of copies."""
    rates = dpo.learning_rates(len(batches), rate, warmup=0.05, cosine=True)
    log_probs = partial(log_probs_in_passes, accelerator, tokens=TOKENS)
    lines = dpo.train(model, dpo.adamw(model, 0.01), batches, rates, dpo.sft_loss, action_count,
                      log_probs, fits=partial(dpo.fits_in_pass, tokens=TOKENS))
    losses = []
    for line in tqdm(lines, total=len(batches), unit=" steps", mininterval=10, disable=None):
        losses.append(line["loss"])
    print(f"loss {losses[0]:.2f} -> {sum(losses[-50:]) / len(losses[-50:]):.3f} nats per token")


def text(rng: random.Random, conversation: list[dict], tokenizer) -> Group:
    """A conversation, trained on its replies and a random share of the rest."""
    ids = tokenizer.apply_chat_template(conversation)["input_ids"][:LONGEST]
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    mask = []
    replies = False
    for i in ids:
        mask.append(int(replies or rng.random() < OBSERVED))
        replies = i == begin or replies and i != end
    return Group([Trajectory(ids=ids, action_mask=mask)])


def copies(rng: random.Random, vocabulary: int, n: int) -> list[Group]:
    """n texts of random tokens, said twice; trained on what can be known, from the second said
    again."""
    groups = []
    for _ in range(n):
        once = [rng.randrange(vocabulary) for _ in range(rng.randint(3, 60))]
        mask = [0] * (len(once) + 1) + [1] * (len(once) - 1)
        groups.append(Group([Trajectory(ids=once * 2, action_mask=mask)]))
    return groups


@torch.no_grad()
def copy_loss(model, length: int, n: int = 256) -> float:
    """Nats per token of random tokens of the whole vocabulary said again, after the first."""
    vocabulary = model.config.vocab_size
    random_tokens = torch.Generator().manual_seed(length)
    ids = torch.randint(vocabulary, (n, length), generator=random_tokens).repeat(1, 2)
    logits = model(input_ids=ids[:, :-1]).logits[:, length:]        # (n, length - 1, V)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1:].flatten()).item()


def card(model, texts: dict) -> str:
    """The README of the model."""
    read = ", ".join(f"{n:,} of {env} {passes} times" for env, (n, passes) in texts.items())
    losses = ", ".join(f"{copy_loss(model, n):.2f} at length {n}" for n in (6, 20, 60))
    return f"""\
---
license: mit
---
`lab/pretrain/` made this Llama of {model.num_parameters():,} parameters, with torch
{torch.__version__}. It has read random tokens said twice, and conversations of noisy players, who
make mistakes, recover and often fail: {read}.
Names, numbers and values are exchanged at random in each conversation. It has never read an expert
or an evaluated task, and nobody in its texts asks for, opens or queries what is held out for the
split "unseen".

Copy loss, in nats per token, on random tokens of the whole vocabulary said twice:
{losses}.
"""


def make_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """One token per word, quoted word, number or mark of `texts`; others are spelled out. A noun is
    the same token in its plural and in "doctor_info"."""
    pattern = Regex(r"'[^\W_]+'|[^\W_]+(?:\.[^\W_]+)?|_|[^\w\s]")
    split = pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    words = set()
    for said in texts:
        words |= {word for word, _ in split.pre_tokenize_str(said)}
    words -= {word for word in words if len(word) > 3 and word.endswith("s") and word[:-1] in words}
    letters = {chr(c) for c in range(33, 127)}
    special = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|unknown|>"]
    pieces = special + sorted(words | letters) + sorted("##" + c for c in letters)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = split
    # "search [ red mug ]" back to "search[red mug]", the form that environments read.
    tokenizer.decoder = decoders.Sequence([
        decoders.WordPiece(cleanup=False), decoders.Fuse(), decoders.Replace(" [", "["),
        decoders.Replace("[ ", "["), decoders.Replace(" ]", "]"), decoders.Replace(" _ ", "_")])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|unknown|>", eos_token="<|end|>",
        additional_special_tokens=special[:3], chat_template=CHAT_TEMPLATE)


def main(flags: list[str]) -> None:
    parser = argparse.ArgumentParser("pretrain", description="Makes a tiny model.")
    parser.add_argument("--env", nargs="+", default=list(TEXTS), choices=sorted(TEXTS),
                        help="whose texts it reads [all]")
    parser.add_argument("--width", type=count, default=128,
                        help="of the model, a multiple of 8 [%(default)s]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default="runs/pretrained",
                        help="where it goes [%(default)s]")
    given = parser.parse_args(flags)
    make(given.out, {env: TEXTS[env] for env in given.env}, width=given.width)


if __name__ == "__main__":
    main(sys.argv[1:])
