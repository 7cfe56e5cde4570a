"""Models of torchvision, timm and transformers in tiny configurations, with random weights; imported when built."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .base import Batch, NotInstalled, Spec, image


def versions() -> str:
    """The libraries that are there, with their versions."""
    found = []
    for name in ("torchvision", "timm", "transformers"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalled(f"{name}: {error}") from error
    except RuntimeError as error:  # torchvision's compiled part belongs to another build of torch
        raise NotInstalled(f"{name} does not work with this torch: {error}") from error


def _torchvision(name: str, **options: Any) -> nn.Module:
    _library("torchvision")
    module: nn.Module = _library("torchvision.models").get_model(name, weights=None, **options)
    return module


def _timm(name: str, **options: Any) -> nn.Module:
    module: nn.Module = _library("timm").create_model(name, pretrained=False, num_classes=10, **options)
    return module


def _transformers(model: str, config: str, options: Callable[[Any], dict[str, Any]] | dict[str, Any]) -> nn.Module:
    library = _library("transformers")
    try:
        settings = options(library) if callable(options) else options
        made = getattr(library, model)(getattr(library, config)(**settings))
    except (AttributeError, ImportError) as error:  # a version without it, or a part that needs another library
        raise NotInstalled(f"transformers {library.__version__}: {error}") from error
    if getattr(made, "loss_type", "") is None:  # named unlike the others: it would warn, which breaks a graph in two
        made.loss_type = "ForCausalLM"
    module: nn.Module = made.train()
    return module


VOCABULARY = 64
_BODY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_ENCODER = {**_BODY, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}


def _language() -> Batch:
    ids = torch.randint(1, VOCABULARY, (2, 12))
    return (), {"input_ids": ids, "labels": ids.clone(), "return_dict": True}


def _masked() -> Batch:
    (), arguments = _language()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return (), {**arguments, "attention_mask": mask}


def _sequences() -> Batch:
    make = functools.partial(torch.randint, 1, VOCABULARY)
    return (), {"input_ids": make((2, 12)), "labels": make((2, 8)), "return_dict": True}


def _speech() -> Batch:
    return (), {"input_features": torch.randn(2, 16, 64), "labels": torch.randint(1, VOCABULARY, (2, 8))}


def _picture_and_text() -> Batch:
    ids = torch.randint(1, VOCABULARY, (2, 8))
    return (), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def _pictures() -> Batch:
    return (), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(2, (2,))}


def _segmented() -> Batch:
    return (), {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(2, (2, 64, 64))}


_SIDE = (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))


def _whisper() -> dict[str, Any]:
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 32}
    return {**layers, **special, **sizes, "max_target_positions": 32, "use_cache": False}


def _clip(library: Any) -> dict[str, Any]:
    common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**common, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2}
    seen = {**common, "image_size": 32, "patch_size": 8}
    text["projection_dim"] = seen["projection_dim"] = 16
    return {"text_config": text, "vision_config": seen, "projection_dim": 16}


_LAYERS = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
_DISTILLED = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
_MIXTRAL = {**_DECODER, "num_local_experts": 4}
_STATES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
_OPT = {**_ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}
_BART = {
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE},
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_SEGFORMER = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
_PATCHES = {**_BODY, "image_size": 32, "patch_size": 8}

_TRANSFORMERS: list[tuple[str, str, Any, Callable[[], Batch]]] = [
    ("BertForMaskedLM", "BertConfig", _ENCODER, _masked),
    ("DistilBertForMaskedLM", "DistilBertConfig", _DISTILLED, _masked),
    ("AlbertForMaskedLM", "AlbertConfig", {**_ENCODER, "embedding_size": 16}, _masked),
    ("GPT2LMHeadModel", "GPT2Config", _LAYERS, _language),
    ("LlamaForCausalLM", "LlamaConfig", _DECODER, _language),
    ("MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 4}, _language),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_ENCODER, "use_cache": False}, _language),
    ("Qwen2ForCausalLM", "Qwen2Config", _DECODER, _language),
    ("MixtralForCausalLM", "MixtralConfig", _MIXTRAL, _language),
    ("MixtralForCausalLM:eager-experts", "MixtralConfig", {**_MIXTRAL, "experts_implementation": "eager"}, _language),
    ("MambaForCausalLM", "MambaConfig", _STATES, _language),
    ("GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 8}, _language),
    ("OPTForCausalLM", "OPTConfig", _OPT, _language),
    ("BartForConditionalGeneration", "BartConfig", _BART, _sequences),
    ("T5ForConditionalGeneration", "T5Config", {**_T5, "use_cache": False, "decoder_start_token_id": 0}, _sequences),
    ("WhisperForConditionalGeneration", "WhisperConfig", _whisper(), _speech),
    ("CLIPModel", "CLIPConfig", _clip, _picture_and_text),
    ("ViTForImageClassification", "ViTConfig", _PATCHES, _pictures),
    ("SegformerForSemanticSegmentation", "SegformerConfig", _SEGFORMER, _segmented),
]

_TORCHVISION: list[tuple[str, dict[str, Any], Callable[[], Batch]]] = [
    ("resnet18", {}, image(64)),
    ("efficientnet_b0", {}, image(64)),
    ("convnext_tiny", {}, image(64)),
    ("swin_t", {}, image(64)),
    ("densenet121", {}, image(64)),
    ("mobilenet_v3_small", {}, image(64)),
    ("shufflenet_v2_x0_5", {}, image(64)),
    ("squeezenet1_1", {}, image(64)),
    ("regnet_x_400mf", {}, image(64)),
    ("lraspp_mobilenet_v3_large", {"weights_backbone": None}, image(64)),
]

_TIMM: list[tuple[str, dict[str, Any], Callable[[], Batch]]] = [
    ("resnet10t", {}, image(64)),
    ("efficientnet_lite0", {}, image(64)),
    ("convnext_atto", {}, image(64)),
    ("vit_tiny_patch16_224", {"img_size": 64}, image(64)),
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1, 1, 1), "embed_dim": 24}, image(56)),
    ("mixer_s32_224", {"img_size": 64}, image(64)),
    ("mobilevit_xxs", {}, image(64)),
    ("ghostnet_100", {}, image(64)),
    ("edgenext_xx_small", {"drop_path_rate": 0.1}, image(64)),
]

SPECS = [
    *(Spec(f"torchvision:{n}", functools.partial(_torchvision, n, **options), b) for n, options, b in _TORCHVISION),
    *(Spec(f"timm:{n}", functools.partial(_timm, n, **options), b) for n, options, b in _TIMM),
    *(
        Spec(f"transformers:{m}", functools.partial(_transformers, m.partition(":")[0], c, o), b)
        for m, c, o, b in _TRANSFORMERS
    ),
]
