"""Models and the machine they run on: what can be used, and loading it."""

import hashlib
import json
import re
import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS
from transformers.utils.hub import cached_file, extract_commit_hash

from lab import tokens as dpo
from lab.harness.files import ROOT, digest, run_path
from lab.harness.settings import Settings, SettingsError
from lab.training import probe

TINY = ROOT / "tiny"  # what --model tiny means


def make_accelerator(s: Settings) -> Accelerator:
    """The processes, device and precision that this machine offers; SettingsError if not usable."""
    gpu = torch.cuda.is_available()  # not MPS: log-probabilities are summed in float64
    if torch.cuda.device_count() and not gpu and s.model != "tiny" and s.method != "chat":
        raise SettingsError(f"{torch.cuda.device_count()} GPUs are here, but torch "
                            f"{torch.__version__} cannot use them; update their driver, or set "
                            "CUDA_VISIBLE_DEVICES= to train on the CPU")
    # cuDNN, which torch prefers on Hopper, makes a plan for each exact size and stride, in up to a
    # second, and lengths of texts hardly repeat; flash attention needs none. bench/gpu.py has both.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        accelerator = Accelerator(
            cpu=not gpu, mixed_precision="bf16" if in_bf16(s) else "no", log_with=s.track,
            project_dir=run_path(s),
            # One rank may play for hours longer than another. The launcher sees it if one dies.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=7))])
    except ValueError as error:
        if not s.track:
            raise
        raise SettingsError(f"--track {s.track}: {error}") from None  # there is no such tracker
    if s.track and not accelerator.log_with:
        raise SettingsError(f"--track {s.track}: its package is not installed; "
                            f"{sys.executable} -m pip install {s.track}")
    if accelerator.distributed_type not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise SettingsError(f"accelerate is configured for {accelerator.distributed_type}; run "
                            "`accelerate config` without it: --shard shards the weights")
    return accelerator


def in_bf16(s: Settings) -> bool:
    """Whether passes compute in bf16 here, and rollouts hold their weights in it; the tiny model
    computes alike everywhere."""
    if s.bf16 != "auto" or s.model == "tiny" or s.method == "chat":
        return s.bf16 == "on"
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bf16_is_faster() and (s.model == "smollm2" or not is_small(s.model))


def bf16_is_faster() -> bool:
    """Whether the CPU trains faster in bf16 than in fp32 [measured]: AVX512-BF16 is no faster than
    AVX512 in fp32, which torch's MKL has for Intel's CPUs alone."""
    cpu = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch do not say
    intel = "Intel" in cpu.get("cpu_name", "")
    return bool(cpu.get("amx_bf16") or cpu.get("avx512_bf16") and not intel)


def is_small(folder) -> bool:
    """Whether a folder holds a model of less than 10 M parameters, such as a tiny one's agent."""
    return Path(folder).is_dir() and sum(
        file.stat().st_size for file in Path(folder).glob("*.safetensors")) < 40_000_000


def config_of(folder):
    """The config in a folder or on the hub, with known values where it says what passes return."""
    config = AutoConfig.from_pretrained(
        folder, trust_remote_code=False, return_dict=True, output_attentions=False,
        output_hidden_states=False)
    if quantised := getattr(config, "quantization_config", None):
        raise ValueError(f"its weights are quantised ({quantised.get('quant_method')}), and "
                         "training needs them whole; give the model that it was made from")
    return config


def load_model(folder, dtype=torch.float32, data=True):
    """A causal LM from a folder or hub name; fp32 to train: bf16 weights would not move at 1e-6.
    Without its data it is on meta, and takes no memory. ValueError where some are missing."""
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, config=config_of(folder), dtype=dtype, attn_implementation="ragged",
        device_map=None if data else "meta", output_loading_info=True, use_safetensors=True)
    if lacking := sorted(found["missing_keys"]) + sorted(map(str, found["mismatched_keys"])):
        raise ValueError(f"{len(lacking)} of its weights are missing or of another size, such as "
                         f"{lacking[0]}")
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != "ragged":
            raise ValueError(f"{type(part).__name__} takes no attention but its own; {probe.OTHER}")
    return model


def check_model(folder, max_tokens: int, weights: bool = True) -> None:
    """SettingsError if the model in `folder` (or on the hub) cannot be used. No code but
    transformers' own is loaded, and no weights. weights: whether it has to have them."""
    local = Path(folder).is_dir()
    try:
        if not local and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(folder)):  # of the hub
            raise ValueError("there is no such folder")
        for name in ("config.json", "tokenizer_config.json") if local else ():
            if "auto_map" in json.loads((Path(folder) / name).read_text(encoding="utf-8")):
                raise ValueError(f"its {name} has an auto_map, which names code to be run with it; "
                                 "use a model without code of its own")
        config = config_of(folder)
        if not {*CAUSAL_LMS.values()} & {*(config.architectures or [])}:
            raise ValueError(f"its architecture is {config.architectures}, not a causal LM")
        probe.check_config(config, max_tokens)
        probe.check_layers(config, max_tokens)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        encoder = dpo.Encoder(tokenizer)
        used = max(tokenizer.vocab_size, encoder.end_of_turn + 1)  # others beyond are never used
        if used > config.vocab_size:
            raise ValueError(f"its tokenizer has {used:,} tokens, its model "
                             f"{config.vocab_size:,}; they do not belong together")
        if not weights:
            return
        if local and not any(Path(folder).glob("*.safetensors")):
            raise ValueError("no *.safetensors file with weights in it (files of other kinds may "
                             "hold code and are not read)")
        load_model(folder, data=False)
    # What a file that is not what it says makes of the libraries that read it.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError,
            TemplateError, SafetensorError, StrictDataclassError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        problem = said[0]
        if isinstance(error, StrictDataclassError):  # whose first line only says that it is one
            problem = f"{said[-1].strip()}; correct that entry of its config.json"
        remedy = "" if "; " in problem else (
            "; `git checkout` of it restores it, `bash run.sh pretrain` makes it again"
            if str(folder) == str(TINY) else
            "; give tiny, smollm2, a hub name within reach, or a folder with config, weights and "
            "tokenizer; where --model smollm2 made this folder, delete this folder")
        raise SettingsError(f"--model {folder}: {problem}{remedy}") from None


def digests(weights: dict) -> dict[str, bytes]:
    """A hash of each tensor of a state dict."""
    return {key: hashlib.sha256(tensor.contiguous().numpy()).digest()
            for key, tensor in weights.items()}


def check_copy(saved: dict[str, bytes], folder, copy) -> None:
    """SettingsError unless what was saved in `copy` is read back as it was. saved: `digests` of the
    weights; folder: where the tokenizer came from."""
    again = digests(load_model(copy).state_dict())
    wrong = [key for key in saved if saved[key] != again.get(key)]
    conversation = [{"role": "user", "content": "find a mug"},
                    {"role": "assistant", "content": "Action: search[mug]"}]
    said = [dpo.Encoder(AutoTokenizer.from_pretrained(name)).encode(conversation)
            for name in (folder, copy)]
    if wrong or said[0] != said[1]:
        raise SettingsError(f"--model {folder}: saved and loaded again, "
                            f"{wrong[0] if wrong else 'its tokenizer'} is not the same; use "
                            "another model, or another version of transformers")


def identity(folder) -> str:
    """A hash of a model's files, or the commit of one on the hub."""
    if Path(folder).is_dir():
        return digest(Path(folder))
    return f"{folder} {extract_commit_hash(cached_file(folder, 'config.json'), None)}"
