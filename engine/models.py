"""Reads causal language models, prepares them for training, sharded or unsharded, and saves them.

`Run.load` calls `load`, `Run.inference_copy` calls `read_model` and `make_inference_copy`, and
`Run.fit` calls `save`. On a GPU, norms are fused, and the layers of large models are compiled.
"""

import gc
import itertools
import math
import os
import re
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

# Models with at least this many parameters train with compiled layers. On an H200, DPO at 1.7 B
# processes 33,772 tokens/s with fused norms and compiled layers, 25,080 with fused norms alone, and
# 20,318 with neither. Compiling makes the first phase 45 s longer. A second phase, which loads a
# model anew, compiles nothing. At 0.6 B, compiled forward and backward passes are only 1.07 times
# as fast.
COMPILED = 1_000_000_000
MODELS = {"tiny": Path(__file__).parents[1] / "tiny"}  # name -> folder, or a function returning it
# Names of weights that the log-probabilities of text do not depend on. They belong to heads for
# multi-token prediction, to value heads, and to the image and audio encoders of multimodal models.
UNUSED_WEIGHTS = re.compile(
    r"(^|\.)(mtp|v_head|value_head|vision|visual|vq|image|audio|multi_modal)")


def folder_of(model: str) -> Path:
    """Returns the folder of a model, or its name on the Hugging Face Hub as a path."""
    folder = MODELS.get(model, model)
    return Path(folder() if callable(folder) else folder)


def read(kind, folder, **options):
    """Returns kind.from_pretrained(folder, **options). Raises UsageError if that fails.

    Code in the folder is never run. If `folder` is a name on the Hub, all reads of a process use
    the same commit.
    """
    options |= dict(trust_remote_code=False, revision=commit_of(str(folder)) or "main")
    try:
        return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # safetensors and tokenizers raise classes of their own
        raise UsageError(f"--model {folder}: {first_line(error)}; give a name on the Hub that can "
                         "be reached, or a folder with the config, weights and tokenizer of a "
                         "causal LM") from None


@contextmanager
def named(flag: str):
    """Replaces --model by another flag in the message of a UsageError."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--model", flag, 1)) from None


@cache
def print_once(text: str) -> None:
    """Prints a line once per process, on the main rank only."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(text)


def file_of(folder, name: str) -> str | None:
    """Returns the path of a model's file, or None if neither the folder nor the Hub has it."""
    return cached_file(str(folder), name, _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)


@cache
def commit_of(name: str) -> str | None:
    """Returns the commit of a model on the Hub when it was first read, or None for a folder."""
    if Path(name).is_dir():
        return None
    try:
        return extract_commit_hash(file_of(name, "config.json"), None)
    except (OSError, ValueError):  # the Hub does not have it either; `read` raises an error
        return None


def read_tokenizer(folder):
    """Returns the tokenizer that a folder's tokenizer.json defines.

    AutoTokenizer would rebuild it from the name of its class instead. Special tokens are recognised
    in a text even if the folder turns this off.
    """
    if not file_of(folder, "tokenizer.json"):
        raise UsageError(f"--model {folder}: tokenizer.json is missing; copy it from the base "
                         "model, or write it with "
                         "AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    tokenizer = read(transformers.PreTrainedTokenizerFast, folder)
    tokenizer.split_special_tokens = False
    tokenizer.init_kwargs.pop("split_special_tokens", None)
    return tokenizer


def read_encoder(folder) -> Encoder:
    """Returns the encoder of the model in a folder, which turns messages into token ids."""
    vocabulary_size = read_config(folder).get_text_config().vocab_size
    return Encoder(read_tokenizer(folder), vocabulary_size)


def is_causal_lm(config) -> bool:
    return type(config) in transformers.AutoModelForCausalLM._model_mapping


def read_full_config(folder):
    """Returns the config in a folder, without options for generation and additional outputs."""
    config = read(transformers.AutoConfig, folder)
    reset_options(config)
    return config


def reset_options(config) -> None:
    """Resets options for generation and additional outputs in a config and in its nested configs.

    A model could not be saved with a temperature or with output_attentions, for example.
    """
    config.return_dict = True
    for name in config._get_generation_parameters():
        delattr(config, name)
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            reset_options(value)
        elif name.lstrip("_").startswith("output_") and value is True:
            setattr(config, name, False)


def read_config(folder):
    """Returns the config in a folder. For a multimodal model, it is the config of the causal LM."""
    check_folder(Path(folder))
    config = read_full_config(folder)
    text = config.get_text_config(decoder=True)  # for BART, for example, a copy with other names
    if type(text) is not type(config) and is_causal_lm(text):
        text.tie_word_embeddings |= config.tie_word_embeddings
        return text
    if not is_causal_lm(config):
        raise UsageError(f"--model {folder}: {config.model_type} is not a causal language model "
                         "of transformers; give one, such as a Llama or a Qwen")
    return config


def check_folder(folder: Path) -> None:
    """Raises UsageError if a folder is a run, or has an adapter, which would silently be lost."""
    if (folder / "phases.json").exists():
        agents = [str(file.parent.relative_to(folder)) for file in folder.glob("**/config.json")
                  if file.parent != folder]
        raise UsageError(f"--model {folder}: this is a run; give one of its agents: "
                         f"{', '.join(sorted(agents)) or 'it has none yet'}")
    adapters = sorted(file.name for file in folder.glob("adapter_*"))
    if adapters:
        raise UsageError(f"--model {folder}: adapters such as {adapters[0]} are not "
                         "supported; merge the adapter into its base model with peft's "
                         "merge_and_unload, and give the folder of the result")


def positions_of(config) -> float:
    """Returns the number of positions in a model's config, or infinity if it sets no number."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return positions if positions > 0 else math.inf


def read_model(folder, dtype=torch.float32, device="cpu"):
    """Reads the causal LM in a folder.

    On a GPU, its norms are fused.

    Raises:
        UsageError: There is no causal LM, its file lacks weights, which transformers would
            initialise at random, or has weights that the model does not use, which transformers
            would drop.
    """
    # 1. Read the weights, and check that they are complete.
    collect()
    model, report = read(transformers.AutoModelForCausalLM, folder, dtype=dtype,
                         config=read_full_config(folder), device_map={"": device},
                         output_loading_info=True)
    missing = {*report["missing_keys"], *report["mismatched_keys"]}
    if missing:
        raise UsageError(f"--model {folder}: {len(missing)} weights are missing, such as "
                         f"{min(map(str, missing))}; give a complete checkpoint")
    unused = {name for name in report["unexpected_keys"] if UNUSED_WEIGHTS.search(name)}
    unknown = report["unexpected_keys"] - unused
    if unknown:
        raise UsageError(f"--model {folder}: {len(unknown)} weights are not used by the model that "
                         f"its config.json describes, such as {min(unknown)}; give the config.json "
                         "that belongs to the weights, or a checkpoint without them")
    if unused:
        print_once(f"--model {folder}: {len(unused)} weights are not used, such as {min(unused)}; "
                   "no log-probability of text depends on them")

    # 2. Extract the language model from a multimodal model, such as Gemma 3.
    config = read_config(folder)
    if type(model.config) is not type(config):
        text = empty_model(config, dtype)
        setattr(text, text.base_model_prefix, model.get_decoder())
        text.set_output_embeddings(model.get_output_embeddings())
        text.generation_config = model.generation_config
        model = text.eval()
    if not is_causal_lm(model.config):
        raise UsageError(f"--model {folder}: a saved copy of it could not be read; use a "
                         "text model")
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        # The checkpoint has an output head of its own, even if its config ties the two.
        model.config.tie_word_embeddings = False

    # 3. Keep only the special tokens of the generation config. A repetition penalty, for example,
    #    would change the sampling distribution.
    base = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=base.bos_token_id, eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id)
    if torch.device(device).type == "cuda":
        fuse_norms(model)
    return model


class FusedRMSNorm(torch.nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight, as a single kernel on a GPU.

    In transformers it takes eight fp32 kernels, so that norms are half of all kernels of a Qwen3.

    Args:
        weight: The weight of the norm, (d,).
        eps: The constant eps of the norm.
        keeps_dtype: Whether the output has the dtype of x. Otherwise it has that of x * weight.
    """

    def __init__(self, weight: torch.nn.Parameter, eps: float, keeps_dtype: bool):
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.keeps_dtype = keeps_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)  # the kernel needs equal dtypes
        y = F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return y.to(x.dtype) if self.keeps_dtype else y


def fuse_norms(model) -> int:
    """Replaces each RMSNorm of a model by a `FusedRMSNorm` that computes the same, if there is one.

    Returns the number of replaced norms.
    """
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
    """Compares two norms on random weights and inputs, since model families differ.

    Gemma multiplies by 1 + weight, and some families return the dtype of x, others that of
    x * weight.
    """
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(fused.weight.shape, generator=rng)
    # Compare small, usual and large inputs. Only the small ones depend on eps.
    x = torch.stack([scale * torch.randn(fused.weight.shape, generator=rng)
                     for scale in (fused.eps ** 0.5, 1.0, 100.0)])
    for dtype, x_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        expected, actual = (
            torch.func.functional_call(module, dict(weight=weight.to(dtype)), (x.to(x_dtype),))
            for module in (norm, fused))
        # Two roundings to bf16 change a value by at most 0.8 %.
        tolerance = 1e-5 if dtype == x_dtype == torch.float32 else 0.02
        if actual.dtype != expected.dtype or not torch.allclose(
                actual.float(), expected.float(), tolerance, tolerance):
            return False
    return True


def collect() -> None:
    """Frees the memory of unused models.

    The hooks of a model and its checkpointed layers form reference cycles, which only the garbage
    collector frees.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def empty_model(config, dtype):
    """Returns a model with parameters on the meta device.

    Its buffers are initialised, since some of them are in no checkpoint.
    """
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameter_count(config) -> int:
    """Returns the number of parameters of a causal LM, without reading its weights."""
    model = empty_model(config, torch.float32)
    model.tie_weights()
    return model.num_parameters()


def layers(model) -> torch.nn.ModuleList:
    """Returns the layers of a model, which are the ModuleList with the most parameters."""
    largest = None
    most = -1
    for module in model.modules():
        count = sum(p.numel() for p in module.parameters())
        if isinstance(module, torch.nn.ModuleList) and count > most:
            largest = module
            most = count
    return largest


def unshared_layers(model) -> list[torch.nn.Module]:
    """Returns the layers that share no parameter with another layer, as some of Zamba's do."""
    uses = Counter()
    for layer in layers(model):
        uses.update(layer.parameters())
    unshared = []
    for layer in layers(model):
        if all(uses[p] == 1 for p in layer.parameters()):
            unshared.append(layer)
    return unshared


def compiles(accelerator, model) -> bool:
    """Returns True if a model trains with compiled layers: a large one, in bf16, on a GPU.

    In fp32 the same model is used for inference, see `make_inference_copy`. The changing length of
    the KV cache would then compile its layers again and again.
    """
    return (accelerator.device.type == "cuda" and accelerator.mixed_precision == "bf16"
            and model.num_parameters() >= COMPILED and has_compiler(accelerator.device))


@cache
def has_compiler(device) -> bool:
    """Returns True if torch.compile works on this machine, and prints the reason if not.

    It needs triton, a C compiler and the headers of Python.
    """
    try:
        torch.compile(F.gelu)(torch.ones(8, device=device))
    except Exception as error:
        print_once(f"layers are not compiled, which makes training slower: {first_line(error)}")
        return False
    return True


def compile_layers(model) -> None:
    """Compiles the layers of a model for training.

    Layers of the same kind share their graphs, also with models that are loaded later. A layer that
    cannot be compiled runs uncompiled. TORCH_COMPILE_DISABLE=1 turns compilation off.
    """
    torch._dynamo.config.suppress_errors = True
    # Each kind of layer has graphs with and without gradients, with and without a mask, and for
    # batches of one row and of several rows.
    torch._dynamo.config.recompile_limit = 64
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def prepare(model, recompute: bool):
    """Prepares a model for training, and returns it.

    Evaluation mode turns dropout off. With dropout, the first DPO loss would not be ln 2.

    Args:
        model: The model.
        recompute: Whether to use gradient checkpointing, which saves memory by recomputing the
            activations of each layer in the backward pass.
    """
    if recompute:
        for layer in layers(model):
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                    use_reentrant=False)
    return model.eval()


def load(accelerator, folder, recompute: bool, shard: bool):
    """Returns the model in a folder, in fp32 and ready to train.

    At a learning rate of 1e-6, most updates are too small to change a weight in bf16.

    Args:
        accelerator: The Accelerator of the run.
        folder: The folder of the model, or its name on the Hub.
        recompute: Whether to use gradient checkpointing.
        shard: Whether to shard the model over the ranks (FSDP2). Otherwise each rank holds it
            unsharded.
    """
    if shard:
        return load_sharded(accelerator, folder, recompute)
    model = read_model(folder, device=accelerator.device)
    if compiles(accelerator, model):
        compile_layers(model)
    return prepare(model, recompute)


def load_sharded(accelerator, folder, recompute: bool):
    """Returns the model in a folder, sharded over the ranks (FSDP2) and ready to train.

    Only the main rank reads the weights. All others get their shards from it by broadcast.
    """
    # 1. Build the model without data on all ranks.
    collect()
    unsharded = read_model(folder) if accelerator.is_main_process else None
    broadcast = [None, None]
    if unsharded is not None:
        broadcast = [unsharded.generation_config, unsharded.config.tie_word_embeddings]
    torch.distributed.broadcast_object_list(broadcast)
    config = read_config(folder)
    config.tie_word_embeddings = broadcast[1]
    model = empty_model(config, torch.float32)
    model.generation_config = broadcast[0]
    model.tie_weights()
    if accelerator.device.type == "cuda":
        fuse_norms(model)
    if compiles(accelerator, model):
        compile_layers(model)
    prepare(model, recompute)

    # 2. Shard it. Parameters and reduced gradients stay in fp32, while forward passes use bf16.
    precision = MixedPrecisionPolicy()
    if accelerator.mixed_precision == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in [*unshared_layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    # 3. Fill it with the weights of the main rank.
    weights = {} if unsharded is None else unsharded.state_dict()
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    model.tie_weights()  # sharding has split tied weights
    return model


def make_inference_copy(model, dtype):
    """Returns the model that is being trained, ready for inference.

    It is the model itself if it is unsharded and `dtype` is fp32. Otherwise it is an unsharded copy
    on every rank.
    """
    if dtype == torch.float32 and not isinstance(model, FSDPModule):
        return model.eval()
    inference_copy = empty_model(model.config, dtype)
    # Gather and copy one tensor at a time. Buffers keep their dtypes.
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        tensor = value.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        new_dtype = dtype if isinstance(value, torch.nn.Parameter) else None
        set_module_tensor_to_device(inference_copy, name, tensor.device, tensor.clone(), new_dtype)
    inference_copy.tie_weights()
    inference_copy.generation_config = model.generation_config
    if model.device.type == "cuda":
        fuse_norms(inference_copy)
    return inference_copy.eval()


def save(accelerator, model, encoder: Encoder, folder) -> None:
    """Saves a model from `load`, unsharded and with its tokenizer, in the format of transformers.

    Programs that generate with it stop at the end of a turn. Every rank has to call this function.
    """
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)
    if accelerator.is_main_process:
        for name in model.all_tied_weights_keys or {}:  # FSDP would save tied weights twice
            weights.pop(name, None)
        write(model, encoder, folder, weights)


def check_can_be_saved(model, encoder: Encoder) -> None:
    """Raises UsageError if transformers could not save the model after training."""
    with TemporaryDirectory() as folder:
        try:
            write(model, encoder, folder, {})
        except OSError:  # a problem of the disk, not of the model
            raise
        except Exception as error:  # from any check of transformers
            raise UsageError(f"--model {model.name_or_path}: an agent trained from it could not be "
                             f"saved: {first_line(error)}; correct its config.json") from None


def write(model, encoder: Encoder, folder, weights: dict) -> None:
    """Writes the files of a model with these weights, and those of its tokenizer."""
    model.generation_config = saved_generation_config(model.generation_config, encoder)
    model.config.pad_token_id = model.generation_config.pad_token_id
    model.save_pretrained(folder, state_dict=weights)
    tokenizer = encoder.tokenizer
    tokenizer.pad_token_id = model.generation_config.pad_token_id
    if encoder.template.text != tokenizer.get_chat_template():  # the date is fixed
        tokenizer.chat_template = encoder.template.text
    tokenizer.save_pretrained(folder)
    write_for_transformers_4(Path(folder))


# Parameters of RoPE that transformers 4 reads outside of `rope_scaling`.
OUTSIDE_SCALING = ("rope_theta", "partial_rotary_factor")


def write_for_transformers_4(folder: Path) -> None:
    """Adds the names that transformers 4 uses to the files of a saved model.

    Released servers and converters depend on that version. Without rope_theta under its old name,
    transformers 4 would silently use a default.
    """
    config = read_json(folder / "config.json")
    config.pop("auto_map", None)  # it refers to code that is not saved
    rope = config.get("rope_parameters") or {}
    if config["model_type"].startswith("gemma3"):  # the only such family with two thetas
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        for name in OUTSIDE_SCALING:
            if name in rope:
                config[name] = rope[name]
        kind = rope.get("rope_type", "default")
        scaling = {name: value for name, value in rope.items() if name not in OUTSIDE_SCALING}
        if kind == "longrope":  # transformers 4 accepts only these three fields
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
    """Returns the generation config of a saved model.

    The end-of-turn token ends generation, as do the tokens that end it in the base model. Tokens
    that are not in the vocabulary are left out, and those that an agent never samples are
    suppressed.
    """
    ends = base.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    ends = [token for token in [*ends, encoder.end_of_turn] if is_in_vocabulary(token, encoder)]
    pads = [base.pad_token_id, encoder.tokenizer.pad_token_id, encoder.end_of_turn]
    pads = [token for token in pads if is_in_vocabulary(token, encoder)]
    return transformers.GenerationConfig(
        bos_token_id=base.bos_token_id, eos_token_id=list(dict.fromkeys(ends)),
        pad_token_id=pads[0], suppress_tokens=list(encoder.sampler().suppressed_ids))


def is_in_vocabulary(token: int | None, encoder: Encoder) -> bool:
    return token is not None and 0 <= token < encoder.vocabulary_size
