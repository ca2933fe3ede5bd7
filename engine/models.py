"""Models: reading a causal LM, making it ready to train, whole or in parts, copying and saving it.

`Run.load`, `Run.inference_copy` and `Run.fit` call `load`, `read_model` and `save`.
"""

import copy
import gc
import itertools
import math
import os
import re
import sys
from collections import Counter
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from common.files import read_json, write_json
from common.settings import UsageError
from engine.chat import Encoder, first_line

# The number of parameters from which on layers are compiled. At 1.7 B compiling takes 38 s, and
# forward and backward passes are then 1.27 times as fast; at 0.6 B 1.07 times [one H200].
COMPILED = 1_000_000_000
MODELS = {"tiny": Path(__file__).parents[1] / "tiny"}  # name -> folder, or what makes it
# Weights on which no log-probability of text depends: of heads for multi-token prediction, of value
# heads, and of the parts of a multimodal model that encode pictures and sound.
BESIDE = re.compile(r"(^|\.)(mtp|v_head|value_head|vision|visual|vq|image|audio|multi_modal)")


def folder_of(model: str) -> Path:
    """The folder of a model, or its name on the hub as a path."""
    found = MODELS.get(model, model)
    return Path(found() if callable(found) else found)


def read(kind, folder, **options):
    """What kind.from_pretrained makes of a folder or hub name; Refused where it makes nothing. Code
    in the folder is never run. All reads of a process are of the same commit on the hub."""
    options |= dict(trust_remote_code=False, revision=commit_of(str(folder)) or "main")
    try:
        return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # of safetensors, too, and of tokenizers
        raise UsageError(f"--model {folder}: {first_line(error)}; give a hub name within reach, or a "
                       "folder with config, weights and tokenizer of a causal LM") from None


@contextmanager
def named(flag: str):
    """Puts another flag than --model in front of what is refused of a model."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--model", flag, 1)) from None


@cache
def say_once(text: str) -> None:
    """Prints a line the first time that it is called with it; of several ranks the first does."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(text)


def file_of(folder, name: str) -> str | None:
    """Returns the path of a file of a model, or None if the folder or the hub has none."""
    return cached_file(str(folder), name, _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)


@cache
def commit_of(name: str) -> str | None:
    """Returns the commit of a model on the hub when it was first read, and None for a folder."""
    if Path(name).is_dir():
        return None
    try:
        return extract_commit_hash(file_of(name, "config.json"), None)
    except (OSError, ValueError):  # it is not on the hub either, as `read` says
        return None


def read_tokenizer(folder):
    """The tokenizer in a folder, as its tokenizer.json says; transformers would make it anew by its
    class's name. Control tokens are found in a text, whatever the folder says."""
    if not file_of(folder, "tokenizer.json"):
        raise UsageError(f"--model {folder}: tokenizer.json is missing; copy it from the base, or "
                      "write it by AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    tokenizer = read(transformers.PreTrainedTokenizerFast, folder)
    tokenizer.split_special_tokens = False
    tokenizer.init_kwargs.pop("split_special_tokens", None)
    return tokenizer


def read_encoder(folder) -> Encoder:
    """What writes the ids of the model in a folder."""
    rows = read_config(folder).get_text_config().vocab_size
    return Encoder(read_tokenizer(folder), rows)


def is_causal_lm(config) -> bool:
    return type(config) in transformers.AutoModelForCausalLM._model_mapping


def read_whole_config(folder):
    """Returns the config in a folder, in which a forward pass returns the logits alone."""
    config = read(transformers.AutoConfig, folder)
    reset(config)
    return config


def reset(config) -> None:
    """Resets what a config and the configs in it say of generation, and add to the outputs of a
    forward pass. A model with a temperature or output_attentions, for example, cannot be saved."""
    config.return_dict = True
    for name in config._get_generation_parameters():
        delattr(config, name)
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            reset(value)
        elif name.lstrip("_").startswith("output_") and value is True:
            setattr(config, name, False)


def read_config(folder):
    """The config in a folder; of a model that also reads pictures that of the causal LM in it."""
    check_folder(Path(folder))
    config = read_whole_config(folder)
    text = config.get_text_config(decoder=True)  # of BART, say, a copy that names sizes otherwise
    if type(text) is not type(config) and is_causal_lm(text):
        text.tie_word_embeddings |= config.tie_word_embeddings
        return text
    if not is_causal_lm(config):
        raise UsageError(f"--model {folder}: {config.model_type} is no causal language model of "
                       "transformers; give one, such as a Llama or a Qwen")
    return config


def check_folder(folder: Path) -> None:
    """Refused where a folder is a run's, or holds an adapter, which would be left out silently."""
    if (folder / "phases.json").exists():
        agents = [str(file.parent.relative_to(folder)) for file in folder.glob("**/config.json")
                  if file.parent != folder]
        raise UsageError(f"--model {folder}: this is a run; give one of its agents: "
                      f"{', '.join(sorted(agents)) or 'it has none yet'}")
    adapters = sorted(file.name for file in folder.glob("adapter_*"))
    if adapters:
        raise UsageError(f"--model {folder}: {adapters[0]} is not read; merge the adapter into its "
                      "base (peft's merge_and_unload), and give the folder of that")


def positions_of(config) -> float:
    """How many tokens a model has positions for; infinity where its config does not say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return positions if positions > 0 else math.inf


def read_model(folder, dtype=torch.float32, device="cpu"):
    """Reads the causal LM in a folder.

    Raises:
        Refused: There is none, or it lacks weights, which transformers would draw at random, or it
            has weights that the model does not use, which transformers would drop.
    """
    collect()
    model, found = read(transformers.AutoModelForCausalLM, folder, dtype=dtype,
                        config=read_whole_config(folder), device_map={"": device},
                        output_loading_info=True)
    missing = {*found["missing_keys"], *found["mismatched_keys"]}
    if missing:
        raise UsageError(f"--model {folder}: {len(missing)} weights are missing, such as "
                       f"{min(map(str, missing))}; give a whole checkpoint")
    beside = {name for name in found["unexpected_keys"] if BESIDE.search(name)}
    unread = found["unexpected_keys"] - beside
    if unread:
        raise UsageError(f"--model {folder}: {len(unread)} weights are not used by the model that its "
                      f"config.json describes, such as {min(unread)}; give the config.json that "
                      "belongs to the weights, or a checkpoint without them")
    if beside:
        say_once(f"--model {folder}: {len(beside)} weights are not used, such as {min(beside)}; no "
                 "log-probability of text depends on them")

    # Of a model that reads pictures too, such as Gemma 3, the part that reads text is taken.
    config = read_config(folder)
    if type(model.config) is not type(config):
        text = empty_model(config, dtype)
        setattr(text, text.base_model_prefix, model.get_decoder())
        text.set_output_embeddings(model.get_output_embeddings())
        text.generation_config = model.generation_config
        model = text.eval()
    if not is_causal_lm(model.config):
        raise UsageError(f"--model {folder}: what is saved of it cannot be read; use a text model")
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # as transformers has read it, whatever it says

    # Of the base's ways of generating only what ends a text stays: a penalty would change draws.
    own = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    if torch.device(device).type == "cuda":
        fuse_norms(model)
    return model


class FusedRMSNorm(torch.nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight, which is one kernel on a GPU.

    In transformers it is eight fp32 kernels, which makes norms half of all kernels of a Qwen3.
    """

    def __init__(self, weight: torch.nn.Parameter, eps: float, keeps_dtype: bool):
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.keeps_dtype = keeps_dtype  # the output has the dtype of x, else that of x * weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)  # the kernel takes a single one
        y = F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return y.to(x.dtype) if self.keeps_dtype else y


def fuse_norms(model) -> int:
    """Replaces each RMSNorm of a model by a `FusedRMSNorm`, if that computes the same, and returns
    the number of replaced norms."""
    count = 0
    for parent in [*model.modules()]:
        for name, norm in parent.named_children():
            eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            tensors = [*dict(norm.named_parameters()), *dict(norm.named_buffers())]
            if not type(norm).__name__.endswith("RMSNorm") or tensors != ["weight"] or not eps:
                continue
            for keeps_dtype in True, False:
                fused = FusedRMSNorm(norm.weight, eps, keeps_dtype)
                if computes_the_same(fused, norm):
                    setattr(parent, name, fused)
                    count += 1
                    break
    return count


@torch.no_grad()
def computes_the_same(fused: FusedRMSNorm, norm) -> bool:
    """Compares both norms on random numbers, since families differ: Gemma multiplies by 1 + weight,
    and some families return the dtype of x, others that of x * weight."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(fused.weight.shape, generator=rng)
    # Small, usual and large inputs: eps shows in the small ones.
    x = torch.stack([scale * torch.randn(fused.weight.shape, generator=rng)
                     for scale in (fused.eps ** 0.5, 1.0, 100.0)])
    modules = [copy.deepcopy(norm), copy.deepcopy(fused)]
    for dtype, x_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        for module in modules:
            module.weight = torch.nn.Parameter(weight.to(dtype))
        expected, found = (module(x.to(x_dtype)) for module in modules)
        # Two roundings of bf16 are at most 0.008 of a value.
        tolerance = 1e-5 if dtype == x_dtype == torch.float32 else 0.02
        if found.dtype != expected.dtype or not torch.allclose(
                found.float(), expected.float(), tolerance, tolerance):
            return False
    return True


def collect() -> None:
    """Frees models that nobody holds any more: hooks and recomputed layers hold each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def empty_model(config, dtype):
    """A model with parameters without data, and buffers with theirs, some of which no file has."""
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameter_count(config) -> int:
    """The number of parameters of a causal LM, which is not read."""
    model = empty_model(config, torch.float32)
    model.tie_weights()
    return model.num_parameters()


def layers(model) -> torch.nn.ModuleList:
    """The model's layers, its largest list of modules."""
    largest = None
    most = -1
    for module in model.modules():
        size = sum(p.numel() for p in module.parameters())
        if isinstance(module, torch.nn.ModuleList) and size > most:
            largest = module
            most = size
    return largest


def unshared_layers(model) -> list[torch.nn.Module]:
    """The layers that share no parameter with another one, as some of Zamba's do."""
    of_model = layers(model)
    users = Counter()
    for layer in of_model:
        users.update(layer.parameters())
    found = []
    for layer in of_model:
        if all(users[p] == 1 for p in layer.parameters()):
            found.append(layer)
    return found


def compiles(accelerator, model) -> bool:
    """Returns True if a model trains with compiled layers: a large one in bf16 on a GPU. In fp32 it
    also plays (`make_inference_copy`), and the KV cache's widths would compile its layers anew."""
    return (accelerator.device.type == "cuda" and accelerator.mixed_precision == "bf16"
            and model.num_parameters() >= COMPILED
            and has_compiler(accelerator.device, accelerator.is_main_process))


@cache
def has_compiler(device, says: bool) -> bool:
    """Returns True if torch.compile works here, which needs triton, a C compiler and the headers of
    Python. says: print a line if it does not."""
    try:
        torch.compile(F.gelu)(torch.ones(8, device=device))
    except Exception as error:
        if says:
            print(f"Layers are not compiled, which makes training slower: {first_line(error)}",
                  file=sys.stderr)
        return False
    return True


def compile_layers(model) -> None:
    """Compiles the layers of a model for training. Layers of a kind share their graphs, also with
    those of models that are loaded later. A layer that cannot be compiled runs as it is.
    TORCH_COMPILE_DISABLE=1 switches this off."""
    torch._dynamo.config.suppress_errors = True
    # Graphs: kinds of layers, with and without gradients and a mask, for one row and for more.
    torch._dynamo.config.recompile_limit = 64
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def prepare(model, recompute: bool):
    """Makes a model ready to train: without dropout, with which the first DPO loss is not ln 2.
    recompute: layers run again in the backward pass, which saves memory (checkpointing)."""
    if recompute:
        for layer in layers(model):
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                    use_reentrant=False)
    return model.eval()


def load(accelerator, folder, recompute: bool, shard: bool):
    """Reads the model in a folder, ready to train, in fp32: bf16 weights do not move at 1e-6.

    Args:
        accelerator: accelerate's.
        folder: Of the model, or its hub name.
        recompute: As for `prepare`.
        shard: In parts over the ranks (FSDP2); else whole on each.
    """
    if shard:
        return load_sharded(accelerator, folder, recompute)
    model = read_model(folder, device=accelerator.device)
    if compiles(accelerator, model):
        compile_layers(model)
    return prepare(model, recompute)


def load_sharded(accelerator, folder, recompute: bool):
    """Reads a model over the ranks: one of them reads the file, each gets its parts from it."""
    collect()
    whole = read_model(folder) if accelerator.is_main_process else None
    facts = [None, None]
    if whole is not None:
        facts = [whole.generation_config, whole.config.tie_word_embeddings]
    torch.distributed.broadcast_object_list(facts)
    config = read_config(folder)
    config.tie_word_embeddings = facts[1]
    model = empty_model(config, torch.float32)
    model.generation_config = facts[0]
    model.tie_weights()
    if accelerator.device.type == "cuda":
        fuse_norms(model)
    if compiles(accelerator, model):
        compile_layers(model)
    prepare(model, recompute)

    precision = MixedPrecisionPolicy()
    if accelerator.mixed_precision == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for part in [*unshared_layers(model), model]:
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    weights = {} if whole is None else whole.state_dict()
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    model.tie_weights()  # which makes two of one again
    return model


def make_inference_copy(model, dtype):
    """A model that is being trained as it plays: itself, if it is whole and has this type; else a
    copy, whole on each rank."""
    if dtype == torch.float32 and not isinstance(model, FSDPModule):
        return model.eval()
    inference_copy = empty_model(model.config, dtype)
    # Values are made whole and copied one at a time. Buffers keep their types.
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        whole = value.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        own = dtype if isinstance(value, torch.nn.Parameter) else None
        set_module_tensor_to_device(inference_copy, name, whole.device, whole.clone(), own)
    inference_copy.tie_weights()
    inference_copy.generation_config = model.generation_config
    if model.device.type == "cuda":
        fuse_norms(inference_copy)
    return inference_copy.eval()


def save(accelerator, model, encoder: Encoder, folder) -> None:
    """Writes a model of `load`, whole, with its tokenizer, as `from_pretrained` and other programs
    read it: one that generates with it stops at the end of a turn. Every rank has to call it."""
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)
    if accelerator.is_main_process:
        for name in model.all_tied_weights_keys or {}:  # which would stand in the file twice
            weights.pop(name, None)
        write(model, encoder, folder, weights)


def check_can_be_saved(model, encoder: Encoder) -> None:
    """Raises Refused if transformers would refuse to save the model once it has been trained."""
    with TemporaryDirectory() as folder:
        try:
            write(model, encoder, folder, {})
        except OSError:  # of the disk
            raise
        except Exception as error:  # of transformers' checks, whichever fails
            raise UsageError(f"--model {model.name_or_path}: an agent trained from it could not be "
                          f"saved: {first_line(error)}; correct its config.json") from None


def write(model, encoder: Encoder, folder, weights: dict) -> None:
    """Writes the files of a model with these weights."""
    model.generation_config = saved_generation_config(model.generation_config, encoder)
    model.config.pad_token_id = model.generation_config.pad_token_id
    model.save_pretrained(folder, state_dict=weights)
    tokenizer = encoder.tokenizer
    tokenizer.pad_token_id = model.generation_config.pad_token_id
    if encoder.template.text != tokenizer.get_chat_template():  # by its fixed date
        tokenizer.chat_template = encoder.template.text
    tokenizer.save_pretrained(folder)
    write_for_transformers_4(Path(folder))


# Parameters of RoPE that transformers 4 reads beside `rope_scaling`.
OUTSIDE_SCALING = ("rope_theta", "partial_rotary_factor")


def write_for_transformers_4(folder: Path) -> None:
    """Adds the names of transformers 4 to the files of a saved model. Released servers and
    converters pin it. It would silently take its default for a rope_theta that it does not find."""
    config = read_json(folder / "config.json")
    config.pop("auto_map", None)  # names code that is not saved
    rope = config.get("rope_parameters") or {}
    if config["model_type"].startswith("gemma3"):  # the one family with two that it reads
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        for name in OUTSIDE_SCALING:
            if name in rope:
                config[name] = rope[name]
        kind = rope.get("rope_type", "default")
        scaling = {name: value for name, value in rope.items() if name not in OUTSIDE_SCALING}
        if kind == "longrope":  # of which it accepts three fields alone
            scaling = dict(type=kind, short_factor=rope["short_factor"],
                           long_factor=rope["long_factor"])
            positions = rope["original_max_position_embeddings"]
            config["original_max_position_embeddings"] = positions
        config["rope_scaling"] = None if kind == "default" else scaling
    write_json(folder / "config.json", config)

    config = read_json(folder / "tokenizer_config.json")
    for name in ("is_local", "local_files_only", "auto_map"):
        config.pop(name, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    write_json(folder / "tokenizer_config.json", config)


def saved_generation_config(base, encoder: Encoder) -> transformers.GenerationConfig:
    """What ends and what pads a text: as the base has it, if the embedding has a row for it, and
    the end of a turn. Tokens that an agent never samples are suppressed."""
    ends = base.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    ends = [token for token in [*ends, encoder.end_of_turn] if has_row(token, encoder)]
    pads = [base.pad_token_id, encoder.tokenizer.pad_token_id, encoder.end_of_turn]
    pads = [token for token in pads if has_row(token, encoder)]
    return transformers.GenerationConfig(
        bos_token_id=base.bos_token_id, eos_token_id=list(dict.fromkeys(ends)),
        pad_token_id=pads[0], suppress_tokens=list(encoder.sampler().suppressed_ids))


def has_row(token: int | None, encoder: Encoder) -> bool:
    return token is not None and 0 <= token < encoder.vocabulary_size
