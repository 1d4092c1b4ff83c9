"""All model families of the installed Transformers as tiny random models: their configs shrunk by the names of the fields."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import configuration_auto, modeling_auto

from anyattn.integrations.transformers import NAME
from anyattn.testing import budget
from anyattn.testing.rounding import Noise
from tests.support.model_rounding import KeepsFloat64, sampled
from tests.support.transformers_models import DEFINITION, generated, gradients, logits, made, padded, tokens

VOCABULARY = 96
LENGTH = 13
IMAGE = 32

# every field of one of these names, in a config or in one within it, gets this value
_SIZES: dict[int, str] = {
    1: "num_hidden_layers_mtp num_nextn_predict_layers mtp_num_hidden_layers n_group topk_group router_group_size pretraining_tp "
    "num_attention_head_groups first_k_dense_replace moe_layer_start_index num_dense_layers",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth depths_per_stage num_key_value_heads "
    "multi_query_group_num num_kv_heads n_kv_heads num_experts_per_tok moe_topk moe_k top_k_experts num_decoder_layers "
    "num_encoder_layers num_experts_per_token num_cross_attention_layers encoder_num_hidden_layers "
    "decoder_num_hidden_layers num_labels spatial_merge_size temporal_patch_size num_selected_experts "
    "vision_num_key_value_heads cross_num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads moe_num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_local_experts num_experts "
    "n_routed_experts moe_num_experts encoder_num_attention_heads decoder_num_attention_heads vision_num_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads index_n_heads num_swa_attention_heads",
    8: "head_dim d_kv patch_size kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim rotary_dim index_head_dim "
    "attention_chunk_size global_head_dim head_size swa_head_dim swa_v_head_dim mamba_n_heads mamba_d_head mamba_d_state",
    12: "index_topk",
    16: "q_lora_rank kv_lora_rank moe_intermediate_size qk_head_dim o_lora_rank q_rank kv_rank",
    IMAGE: "hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size projection_dim image_size word_embed_proj_dim d_embed "
    "hidden_size_per_layer_input encoder_hidden_size decoder_hidden_size cross_attention_hidden_size emb_dim out_hidden_size "
    "vision_embed_dim text_embed_dim block_size lru_width input_embedding_size width model_dim encoder_hidden_dim "
    "mamba_d_ssm query_dim vision_dim proj_size",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size mlp_dim ffn_size feed_forward_size "
    "shared_expert_intermediate_size intermediate_size_mlp moe_shared_expert_intermediate_size dense_intermediate_size "
    "dim_feedforward feedforward_dim encoder_intermediate_size decoder_intermediate_size inner_dim shared_intermediate_size "
    "expert_ffn_hidden_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length max_sequence_length",
    VOCABULARY: "vocab_size text_vocab_size vocab_size_per_layer_input encoder_vocab_size decoder_vocab_size tgt_vocab_size src_vocab_size",
}  # fmt: skip
_VALUES: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()} | {
    "sliding_window": 6, "local_attention": 6, "window_size": 6, "attention_window": 6, "pad_token_id": 0, "bos_token_id": 1,
    "decoder_start_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None, "forced_bos_token_id": None,
    "cls_token_id": 2, "sep_token_id": 3, "mask_token_id": 4, "suppress_tokens": None, "begin_suppress_tokens": None,
    "query_pre_attn_scalar": 8, "keep_window_size": 8,
}  # fmt: skip


# what the names do not decide: fields of one family
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"intermediate_size": 48, "num_kv_shared_layers": 0, "activation_sparsity_pattern": 0.0},
    "roformer": {"embedding_size": 32},
}

# (kind, names of models by model type), the first that has the type decides; models of several inputs get text alone
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("decoder", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("seq2seq", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ("decoder", getattr(modeling_auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", {})),
    ("encoder", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("encoder", modeling_auto.MODEL_MAPPING_NAMES),
)


class NotTinyError(Exception):
    """A family that has no tiny model of text or images: it needs other inputs, another package, or sizes that depend on one another."""


def kinds() -> dict[str, str]:
    """ "decoder", "seq2seq" or "encoder" by model type, for all that the installed Transformers knows."""
    return {family: kind for kind, names in reversed(_KINDS) for family in names if family in configuration_auto.CONFIG_MAPPING_NAMES}


def tiny_model(family: str, implementation: str = "eager") -> Any:
    """A random model, always the same, in evaluation mode."""
    with _not_tiny():
        kind = kinds()[family]
        name = next(names[family] for which, names in _KINDS if which == kind and family in names)
        cls = getattr(transformers, name[0] if isinstance(name, (tuple, list)) else name)
        config = _shrunk(configuration_auto.CONFIG_MAPPING[family], **_OF_FAMILY.get(family, {}))
        with torch.device("meta"):
            count = sum(p.numel() for p in cls._from_config(copy.deepcopy(config), attn_implementation="eager").parameters())
        if count > 3e6:
            raise NotTinyError(f"{count} parameters")
    torch.manual_seed(0)
    model = made(cls._from_config(config, attn_implementation=implementation))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    return model


@contextlib.contextmanager
def _not_tiny() -> Iterator[None]:
    try:
        yield
    except NotTinyError:
        raise
    except Exception as error:
        raise NotTinyError(f"{type(error).__name__}: {error}") from error


def _shrunk(cls: type, default: Any = None, **changes: Any) -> Any:
    default = cls() if default is None else default
    fields = {name: _tiny(name, value, default) for name, value in vars(default).items()}
    fields = {name: value for name, value in fields.items() if value is not _SAME} | changes
    try:
        return cls(**fields | _layers(default))
    except Exception:  # layer_types are a property of some configs
        return cls(**fields)


_SAME = object()


def _tiny(name: str, value: Any, default: Any) -> Any:
    if isinstance(value, transformers.PretrainedConfig):
        return _shrunk(type(value), value)
    if name == "head_dim" and hasattr(default, "qk_rope_head_dim"):  # computed from it
        return _SAME
    is_rope = name in ("rope_parameters", "rope_scaling") and isinstance(value, dict)
    if is_rope and ("mrope_section" in value or _has_mrope(type(default).__module__)):
        half = int(4 * value.get("partial_rotary_factor", 1.0))
        return value | {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
    if name in _VALUES and (value is not None or name == "vocab_size") and not isinstance(value, (bool, str, dict)):
        many = isinstance(value, (list, tuple)) and not name.endswith("_id")
        return [_VALUES[name]] * len(value) if many else _VALUES[name]
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if type(value) is int and value >= VOCABULARY and name.endswith(("_token_id", "_token_index", "_index", "_token")):
        return 5
    return _SAME


@functools.cache
def _has_mrope(configs: str) -> bool:
    """Whether the models of a module of configs have positions of time, height and width, in shares that a config need not name."""
    try:
        module = importlib.import_module(configs.replace("configuration_", "modeling_"))
    except ImportError:
        return False
    return "mrope_section" in inspect.getsource(module)


def _layers(default: Any) -> dict[str, Any]:
    """Two layers or more, so that every kind of layer occurs."""
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)} if kinds else {}


def inputs_of(model: Any, mask: Tensor | None = None) -> dict[str, Tensor]:
    """What a forward pass takes: token numbers, or pixels."""
    name = model.main_input_name
    if name == "pixel_values":
        shape = (2, getattr(model.config, "num_channels", 3), IMAGE, IMAGE)
        return {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)}
    if name != "input_ids":
        raise NotTinyError(f"needs {name}")
    found = {"input_ids": tokens(2, LENGTH) if mask is None else tokens(*mask.shape)}
    if mask is not None:
        found["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = tokens(2, 7, seed=1)
    if "use_cache" in inspect.signature(model.forward).parameters:
        found["use_cache"] = False
    return found


def is_refusal(error: BaseException) -> bool:
    """Whether an error is the one that names the cure."""
    return isinstance(error, (ValueError, TypeError, AttributeError)) and "use attn_implementation=" in str(error)


class Family:
    """One family's tiny model by eager attention and by anyattn. Each check returns "right" or "refused", or raises."""

    def __init__(self, family: str):
        self.family = family
        self.eager = tiny_model(family)
        self.kind = "decoder" if kinds()[family] != "encoder" and not self.eager.config.is_encoder_decoder else kinds()[family]
        with _not_tiny(), torch.no_grad():
            first = self.eager(**inputs_of(self.eager))[0]
            if not isinstance(first, Tensor) or not bool(torch.isfinite(first).all()):
                raise NotTinyError("its first output is no finite tensor")

        self.takes_text = self.eager.main_input_name == "input_ids"

    def loads(self) -> str:
        return _outcome(lambda: tiny_model(self.family, NAME))

    def forward(self, mask: Tensor | None = None) -> str:
        """Outputs and gradients, at the positions that are not padding."""
        keep = None if mask is None or self.kind == "seq2seq" else mask

        def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
            model = copy.deepcopy(self.eager).to(dtype)
            torch.manual_seed(0)  # ViT-MAE hides patches at random
            return gradients(model, how, keep=keep, **inputs_of(model, mask))

        return self._judged(run, run)

    def _judged(self, eager: Callable, ours: Callable) -> str:
        """eager, ours: results by an implementation's name and a dtype; float32 is judged by eager attention's float64."""
        with _not_tiny():
            plain = eager("eager", torch.float32)
            with KeepsFloat64():
                expected = eager("eager", torch.float64)

        @functools.cache
        def noise() -> dict[str, Noise]:
            # of the definition: eager attention's masks of the least float64 overflow when they are rounded
            with KeepsFloat64():
                return sampled(lambda: eager(DEFINITION, torch.float64), eager(DEFINITION, torch.float64))

        def check() -> None:
            got = ours(NAME, torch.float32)
            assert got.keys() == expected.keys()
            for name in got:
                rows = (t[name].flatten()[None] for t in (got, expected, plain))
                budget.check(f"{self.family} {name}", *rows, lambda name=name: noise()[name])

        return _outcome(check)

    def padding(self, side: str) -> str:
        return self.forward(padded(2, LENGTH, [LENGTH, 6], side))

    def generate(self, **options: Any) -> str:
        ids, mask = tokens(2, 9), padded(2, 9, [9, 5])
        options = {"new": 8, "eos_token_id": -1, "pad_token_id": 0, "disable_compile": True} | options
        with _not_tiny():
            expected = generated(copy.deepcopy(self.eager), "eager", ids, mask, **options)

        def check() -> None:
            got = generated(copy.deepcopy(self.eager), NAME, ids, mask, **options)
            assert torch.equal(got, expected), f"{self.family}: {got.tolist()} instead of {expected.tolist()}"

        return _outcome(check)

    def packed(self) -> str:
        """Logits of texts packed by their positions, judged by each text alone."""
        model, config = self.eager, self.eager.config.get_text_config()
        if "position_ids" not in inspect.signature(model.forward).parameters or not getattr(config, "is_decoder", True):
            raise NotTinyError("it takes no positions, or is no decoder")
        has_state = any(word in str(getattr(config, "layer_types", "")) for word in ("linear", "conv", "mamba", "recurrent"))
        if has_state or model._is_stateful or any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
            raise NotTinyError("its state passes from text to text beside attention")
        lengths = (7, 1, 5)
        ids, positions = tokens(1, sum(lengths)), torch.cat([torch.arange(n) for n in lengths])[None]
        if "mrope_section" in str(getattr(config, "rope_parameters", None)):
            positions = positions.expand(3, 1, -1)  # of time, height and width, without the row of the text

        def alone(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
            model = copy.deepcopy(self.eager).to(dtype)
            parts = zip(ids.split(lengths, 1), positions.split(lengths, -1), strict=True)
            texts = [logits(model, how, input_ids=text, position_ids=at, use_cache=False) for text, at in parts]
            return {"packed": torch.cat(texts, 1).flatten()}

        def together(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
            model = copy.deepcopy(self.eager).to(dtype)
            return {"packed": logits(model, how, input_ids=ids, position_ids=positions, use_cache=False).flatten()}

        with _not_tiny():
            together("eager", torch.float32)
        return self._judged(alone, together)


def _outcome(check: Callable[[], Any]) -> str:
    try:
        check()
    except Exception as error:
        if is_refusal(error):
            return "refused"
        raise
    return "right"
