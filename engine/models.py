"""Loads causal language models for training and for inference, and saves them.

A model is trained on one process, or sharded over several with FSDP2. On a GPU, RMSNorms are
replaced with fused kernels, and large models are trained with compiled layers.
"""

import gc
import itertools
import math
import os
import re
from collections import Counter
from contextlib import contextmanager
from copy import deepcopy
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

from common import ROOT
from common.files import read_json, share_weights, write_json
from common.settings import UsageError
from engine.chat import Encoder, first_line

# The minimum number of parameters for torch.compile. With compiled layers, DPO of a 1.7 B model is
# 1.35 times as fast on an H200 (docs/large_models.md). Compiling takes 45 s in the first phase that
# trains a model, and later phases reuse the compiled code. Smaller models gain little: at 0.6 B,
# compiled forward and backward passes are only 1.07 times as fast.
COMPILED = 1_000_000_000
# Short names for --model. Maps a name to a folder, or to a function that returns a folder.
MODELS = {"tiny": ROOT / "tiny"}
# Matches the names of weights that do not affect the log-probabilities of text: heads for
# multi-token prediction, value heads, and image and audio encoders of multimodal models.
UNUSED_WEIGHTS = re.compile(
    r"(^|\.)(mtp|v_head|value_head|vision|visual|vq|image|audio|multi_modal)")


def folder_of(model: str) -> Path:
    """Returns the folder of a model, or Path(name) for a model on the Hugging Face Hub."""
    folder = MODELS.get(model, model)
    return Path(folder() if callable(folder) else folder)


def read(kind, folder, **options):
    """Returns `kind.from_pretrained(folder, **options)`. Raises UsageError if this fails.

    Python code in the folder is never executed (trust_remote_code=False). If `folder` is a name on
    the Hub, this process reads all files from the same commit.
    """
    options |= dict(trust_remote_code=False, revision=commit_of(str(folder)) or "main")
    try:
        return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # safetensors and tokenizers define their own exception classes
        for file in Path(folder).glob("*"):
            if not os.access(file, os.R_OK):
                raise PermissionError(f"{file}: this user may not read it; ask its owner for "
                                      f"chmod a+r {file}") from None
        raise UsageError(f"--model {folder}: {first_line(error)}; give a name on the Hub that can "
                         "be reached, or a folder with the config, weights and tokenizer of a "
                         "causal LM") from None


@contextmanager
def naming_flag(flag: str):
    """Replaces "--model" with another flag, such as --failure-from, in a UsageError's message."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--model", flag, 1)) from None


@cache
def print_once(text: str) -> None:
    """Prints a line on the main rank, once in a process."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(text)


def file_of(folder, name: str) -> str | None:
    """Returns the local path of a model's file, downloaded from the Hub if necessary, or None."""
    return cached_file(str(folder), name, _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)


@cache
def commit_of(name: str) -> str | None:
    """Returns the commit hash of a model on the Hub, or None for a folder or an unknown model.

    The result is cached, so this process uses one commit even if the model on the Hub is updated.
    """
    if Path(name).is_dir():
        return None
    try:
        return extract_commit_hash(file_of(name, "config.json"), None)
    except (OSError, ValueError):  # no such model on the Hub; `read` raises the UsageError later
        return None


def read_tokenizer(folder):
    """Returns the tokenizer that is defined by the tokenizer.json in a folder.

    AutoTokenizer is not used, because it may build a different tokenizer, based on the class name
    in tokenizer_config.json. Special tokens in a text are always encoded as special tokens, even if
    the folder's config sets split_special_tokens.
    """
    if not file_of(folder, "tokenizer.json"):
        raise UsageError(f"--model {folder}: tokenizer.json is missing; copy it from the base "
                         "model, or write it with "
                         "AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    tokenizer = read(transformers.PreTrainedTokenizerFast, folder)
    tokenizer.split_special_tokens = False
    tokenizer.init_kwargs.pop("split_special_tokens", None)
    return tokenizer


def read_encoder(folder, kind: type[Encoder] = Encoder) -> Encoder:
    vocabulary_size = read_config(folder).get_text_config().vocab_size
    return kind(read_tokenizer(folder), vocabulary_size)


def is_causal_lm(config) -> bool:
    return type(config) in transformers.AutoModelForCausalLM._model_mapping


def read_full_config(folder):
    """Returns the config in a folder, without generation options and extra outputs.

    For a multimodal model, the result includes the configs of its image and audio encoders.
    """
    config = read(transformers.AutoConfig, folder)
    reset_options(config)
    return config


def reset_options(config) -> None:
    """Removes generation options from a config and its nested configs, and turns off extra outputs.

    For example, `temperature` is removed, and `output_attentions` is set to False. With such
    options, transformers would refuse to save the model after training.
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
    """Returns the config of the causal LM in a folder.

    For a multimodal model, this is the nested config of its language model.
    """
    check_folder(Path(folder))
    config = read_full_config(folder)
    # For a multimodal model, get_text_config returns the config of its language model, which has a
    # different type. For some text-only models, such as BART, it returns a modified copy of the
    # same type. This copy is not used.
    text = config.get_text_config(decoder=True)
    if type(text) is not type(config) and is_causal_lm(text):
        text.tie_word_embeddings |= config.tie_word_embeddings
        text.name_or_path = config.name_or_path
        return text
    if not is_causal_lm(config):
        raise UsageError(f"--model {folder}: {config.model_type} is not a causal language model "
                         "of transformers; give one, such as a Llama or a Qwen")
    return config


def check_folder(folder: Path) -> None:
    """Raises UsageError if a folder contains a run instead of a model, or contains an adapter.

    Without this error, adapter weights, such as LoRA, would be silently ignored.
    """
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
    """Returns max_position_embeddings of a config, or infinity if it is not set."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return positions if positions > 0 else math.inf


def read_model(folder, dtype=torch.float32, device="cpu"):
    """Loads the causal LM in a folder, with its weights. On a GPU, its RMSNorms are fused.

    transformers initialises missing weights at random and ignores unexpected weights. This function
    raises UsageError in both cases, except for unexpected weights that match UNUSED_WEIGHTS.
    """
    # 1. Read the weights, and check that they are complete.
    collect()
    model, report = read(transformers.AutoModelForCausalLM, folder, dtype=dtype,
                         config=read_full_config(folder), device_map={"": device},
                         output_loading_info=True)
    missing = report["missing_keys"]
    if missing:
        raise UsageError(f"--model {folder}: {len(missing)} weights are missing, such as "
                         f"{min(missing)}; give a complete checkpoint")
    unused = {name for name in report["unexpected_keys"] if UNUSED_WEIGHTS.search(name)}
    unknown = report["unexpected_keys"] - unused
    if unknown:
        raise UsageError(f"--model {folder}: {len(unknown)} weights are not used by the model that "
                         f"its config.json describes, such as {min(unknown)}; give the config.json "
                         "that belongs to the weights, or a checkpoint without them")
    if unused:
        print_once(f"--model {folder}: {len(unused)} weights are not used, such as {min(unused)}; "
                   "no log-probability of text depends on them")

    # 2. If the model is multimodal, such as Gemma 3, extract its language model.
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
        # The checkpoint has separate weights for the output head, although the config may tie the
        # head to the input embeddings.
        model.config.tie_word_embeddings = False

    # 3. Keep only the special tokens of the generation config. Its other options, such as a
    #    repetition penalty, would change the sampling distribution.
    base = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=base.bos_token_id, eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id)
    if torch.device(device).type == "cuda":
        fuse_norms(model)
    return model


class FusedRMSNorm(torch.nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight, as a single kernel on a GPU.

    The RMSNorm of transformers launches eight fp32 kernels. In a Qwen3 model, half of all kernel
    launches come from norms.

    Args:
        weight: The weight of the norm, (d,).
        keeps_dtype: Whether the output has the dtype of x. If False, the output has the dtype of
            the product x * weight.
    """

    def __init__(self, weight: torch.nn.Parameter, eps: float, keeps_dtype: bool):
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.keeps_dtype = keeps_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The kernel requires that x and the weight have the same dtype.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        y = F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return y.to(x.dtype) if self.keeps_dtype else y


def fuse_norms(model) -> int:
    """Replaces each RMSNorm that has the formula of `FusedRMSNorm`, and returns the count."""
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
    """Returns True if two norms give the same outputs for random weights and inputs.

    Some model families use a different formula. For example, Gemma multiplies by 1 + weight. The
    dtype of the output also differs between model families.
    """
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(fused.weight.shape, generator=rng)
    # Compare the outputs for small, usual and large inputs. eps affects only small inputs.
    x = torch.stack([scale * torch.randn(fused.weight.shape, generator=rng)
                     for scale in (fused.eps ** 0.5, 1.0, 100.0)])
    for dtype, x_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        expected, actual = (
            torch.func.functional_call(module, dict(weight=weight.to(dtype)), (x.to(x_dtype),))
            for module in (norm, fused))
        # bf16 needs a larger tolerance: rounding twice to bf16 changes a value by up to 0.8 %.
        tolerance = 1e-5 if dtype == x_dtype == torch.float32 else 0.02
        if actual.dtype != expected.dtype or not torch.allclose(
                actual.float(), expected.float(), tolerance, tolerance):
            return False
    return True


def collect() -> None:
    """Frees the memory of models that are no longer used.

    The hooks and the checkpointed layers of a model form reference cycles, so the model is not
    freed until the garbage collector runs.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def empty_model(config, dtype):
    """Returns a model whose parameters are on the meta device, without values.

    Its buffers are initialised as usual, because checkpoints do not contain all buffers.
    """
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def parameter_count(config) -> int:
    model = empty_model(config, torch.float32)
    model.tie_weights()
    return model.num_parameters()


def layers(model) -> torch.nn.ModuleList:
    """Returns the transformer layers of a model: its ModuleList with the most parameters."""
    largest = None
    most = -1
    for module in model.modules():
        count = sum(p.numel() for p in module.parameters())
        if isinstance(module, torch.nn.ModuleList) and count > most:
            largest = module
            most = count
    return largest


def unshared_layers(model) -> list[torch.nn.Module]:
    """Returns the layers that share no parameters with other layers.

    Some layers of Zamba share parameters.
    """
    uses = Counter()
    for layer in layers(model):
        uses.update(layer.parameters())
    unshared = []
    for layer in layers(model):
        if all(uses[p] == 1 for p in layer.parameters()):
            unshared.append(layer)
    return unshared


def compiles(accelerator, model) -> bool:
    """Returns True if the layers of a model are compiled for training.

    Layers are not compiled in an fp32 run. Such a run also uses the model for inference (see
    `make_inference_copy`), and torch would recompile the layers for every new length of the KV
    cache.
    """
    return (accelerator.device.type == "cuda" and accelerator.mixed_precision == "bf16"
            and model.num_parameters() >= COMPILED and has_compiler(accelerator.device))


@cache
def has_compiler(device) -> bool:
    """Returns True if torch.compile works. It needs triton, a C compiler and Python's C headers."""
    try:
        torch.compile(F.gelu)(torch.ones(8, device=device))
    except Exception as error:
        print_once(f"layers are not compiled, which makes training slower: {first_line(error)}")
        return False
    return True


def compile_layers(model) -> None:
    """Compiles the layers of a model for training, with torch.compile.

    Layers of the same class share their compiled graphs, and models that are loaded later reuse
    these graphs. A layer that cannot be compiled runs without compilation. The environment variable
    TORCH_COMPILE_DISABLE=1 turns compilation off.
    """
    torch._dynamo.config.suppress_errors = True
    # torch compiles several versions of a layer class: with and without gradients, with and without
    # an attention mask, and for batch size 1 and larger batches. recompile_limit has to allow all
    # combinations.
    torch._dynamo.config.recompile_limit = 64
    for layer in layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def prepare(model, recompute: bool):
    """Prepares a model for training in place, and returns it.

    The model is trained in evaluation mode, which turns dropout off. With dropout, the policy would
    differ from the reference before the first step, so the first DPO loss would not be ln 2. If
    `recompute` is true, the activations of each layer are recomputed in the backward pass instead
    of stored (gradient checkpointing).
    """
    if recompute:
        for layer in layers(model):
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                    use_reentrant=False)
    return model.eval()


def load(accelerator, folder, recompute: bool, shard: bool):
    """Loads a model with fp32 weights, and returns it ready for training.

    Weights in bf16 are not precise enough for training. At a learning rate of 1e-6, most updates of
    a weight are smaller than the rounding step of bf16, so the weight would not change.

    Args:
        shard: Whether to shard the model over the ranks with FSDP2. If False, each rank holds the
            full model.
    """
    if shard:
        return load_sharded(accelerator, folder, recompute)
    model = read_model(folder, device=accelerator.device)
    if compiles(accelerator, model):
        compile_layers(model)
    return prepare(model, recompute)


def load_sharded(accelerator, folder, recompute: bool):
    """Loads a model, shards it over the ranks with FSDP2, and returns it ready for training.

    Only the main rank reads the weights. It broadcasts them, and every rank stores its shards.
    """
    # 1. Build the model without weights (on the meta device) on all ranks.
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

    # 2. Shard the model. In a bf16 run, forward and backward passes use bf16. The parameters and
    #    the reduction of gradients over the ranks stay in fp32.
    precision = MixedPrecisionPolicy()
    if accelerator.mixed_precision == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for module in [*unshared_layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    # 3. Copy the weights of the main rank into the sharded model.
    weights = {} if unsharded is None else unsharded.state_dict()
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, weights, options=options)
    model.tie_weights()  # tie weights again, because sharding has separated them
    return model


def make_inference_copy(model, dtype):
    """Returns an unsharded version of the model that is being trained, for inference.

    It is the model itself if the model is unsharded and `dtype` is fp32. Otherwise it is a full
    copy in `dtype` on every rank.
    """
    if dtype == torch.float32 and not isinstance(model, FSDPModule):
        return model.eval()
    inference_copy = empty_model(model.config, dtype)
    # Gather and copy one tensor at a time to save memory. Buffers keep their own dtypes.
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
    """Saves a trained model, unsharded, and its tokenizer in the format of transformers.

    Every rank has to call this function.
    """
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)
    if accelerator.is_main_process:
        for name in model.all_tied_weights_keys or {}:  # FSDP would save each tied weight twice
            weights.pop(name, None)
        write_model(model, encoder, folder, weights)


def save_tensors(tensors: dict, file) -> None:
    """Saves a dict of tensors, for example the moments of an optimiser, to a .pt file."""
    try:
        torch.save(tensors, file)
    except RuntimeError as error:  # torch raises this if the disk is full
        raise OSError(f"{file}: {first_line(error)}; free some space on its disk") from None


def check_can_be_saved(model, encoder: Encoder) -> None:
    """Raises UsageError if transformers cannot save this model.

    Without this check, a run could fail after hours of training, when it saves its first agent.
    """
    with TemporaryDirectory() as folder:
        try:
            write_model(model, encoder, folder, {})
        except OSError:  # a problem with the disk, not with the model
            raise
        except Exception as error:  # transformers raises exceptions of various classes
            raise UsageError(f"--model {model.name_or_path}: an agent trained from it could not be "
                             f"saved: {first_line(error)}; correct its config.json") from None


def write_model(model, encoder: Encoder, folder, weights: dict) -> None:
    """Writes a model, whose unsharded state dict is `weights`, and its tokenizer to a folder."""
    model.generation_config = saved_generation_config(model.generation_config, encoder)
    model.config.pad_token_id = model.generation_config.pad_token_id
    model.config.eos_token_id = encoder.end_of_turn
    model.save_pretrained(folder, state_dict=weights)
    tokenizer = encoder.tokenizer
    tokenizer.pad_token_id = model.generation_config.pad_token_id
    # Save the chat template that the agent was trained with. It may differ from the base model's
    # template, because today's date is replaced with a fixed date.
    if encoder.template.text != tokenizer.get_chat_template():
        tokenizer.chat_template = encoder.template.text
    tokenizer.save_pretrained(folder)
    folder = Path(folder)
    write_json(folder / "config.json", saved_config(model))
    write_json(folder / "tokenizer_config.json", saved_tokenizer_config(folder))
    share_weights(folder)


def saved_config(model) -> dict:
    """Returns the config.json of an agent: that of its base model, with the changed fields updated.

    Every program that can read the base model can then also read the agent. If this version of
    transformers wrote all fields itself, other versions would not know some of them, and would
    silently use defaults instead, for example for RoPE. If the base model is multimodal, the result
    contains the fields of its language model.
    """
    config = model.config
    base = config.name_or_path
    content = read_json(Path(cached_file(base, "config.json", revision=commit_of(base))))
    if "text_config" not in config.sub_configs:
        content = content.get("text_config", content)
    before = type(config).from_dict(deepcopy(content), name_or_path=base).to_dict()
    changed = {}
    for name, value in config.to_dict().items():
        if value != before.get(name) and name not in config.sub_configs:
            changed[name] = value
    if "dtype" in changed and "torch_dtype" in content:  # the name in transformers 4
        changed["torch_dtype"] = changed.pop("dtype")
    content |= changed | dict(model_type=config.model_type)
    content.pop("auto_map", None)  # it names Python files, which are not saved
    content.pop("quantization_config", None)  # the saved weights are fp32
    return content


def saved_tokenizer_config(folder: Path) -> dict:
    """Returns the tokenizer_config.json in a folder, in a form that transformers 4 can also read.

    Many inference servers still use transformers 4.
    """
    content = read_json(folder / "tokenizer_config.json")
    for name in ("is_local", "local_files_only", "auto_map"):
        content.pop(name, None)
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    return content


def saved_generation_config(base, encoder: Encoder) -> transformers.GenerationConfig:
    """Returns the generation config of an agent, based on the generation config `base`.

    Generation stops at the end-of-turn token and at the EOS tokens of the base model. The tokens
    that are suppressed during a run are never sampled. Token ids outside the vocabulary are left
    out.
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
