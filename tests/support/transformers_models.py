"""Tiny Transformers models with random weights, and their logits, gradients and tokens beside those of eager attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from anyattn.integrations.transformers import NAME, register
from anyattn.testing import budget
from anyattn.testing.rounding import Noise
from tests.support.model_rounding import KeepsFloat64, sampled

DEFINITION = "definition"
VOCABULARY = 96
IS_FIVE = int(transformers.__version__.split(".")[0]) >= 5

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_GPT_OSS: dict[str, Any] = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 7,
    "layer_types": _TWO_KINDS,
    "rope_parameters" if IS_FIVE else "rope_scaling": {"rope_type": "default", "rope_theta": 1e4} if IS_FIVE else None,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "layer_types": _TWO_KINDS}),
    "gemma3": ("Gemma3", {"sliding_window": 7, "query_pre_attn_scalar": 12, "layer_types": _TWO_KINDS}),
    "gpt_oss": ("GptOss", _GPT_OSS),
}


def decoder(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal language model of two layers, weights large enough that attention is not flat."""
    _register()
    family, settings = DECODERS[name]
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config_name, model_name = names.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config = getattr(transformers, config_name)(**{**_COMMON, **settings, **changes})
    model = getattr(transformers, model_name)(config)
    if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    return made(model, dtype)


def _register() -> None:
    register()
    AttentionInterface.register(DEFINITION, definition)
    AttentionMaskInterface.register(DEFINITION, _dense_mask)


def made(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the test's own with spread weights, in evaluation mode; the same weights for every one of its kind."""
    _register()
    return spread(model).to(dtype).eval()


def spread(model: Any) -> Any:
    """The model with weight matrices at unit gain, and sinks that matter; initial ones give scores near 0, which any mask survives."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            elif "sink" in name:
                weight.normal_(0.0, 1.0, generator=generator)
            elif "bias" in name:
                weight.normal_(0.0, 0.1, generator=generator)  # some are left uninitialised where a model is made, not loaded
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Token numbers without the padding's."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def packed(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """One row of texts, whose positions begin anew with each."""
    return {"input_ids": tokens(1, sum(lengths)), "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


def padded(batch: int, length: int, lengths: list[int], side: str = "left") -> Tensor:
    """The 2-D attention mask of sequences of these lengths."""
    places = torch.arange(length)
    rows = [places >= length - n if side == "left" else places < n for n in lengths]
    assert len(rows) == batch
    return torch.stack(rows).long()


def logits(model: Any, implementation: str, **inputs: Any) -> Tensor:
    """The first output of a forward pass without gradients."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs)[0]


def gradients(model: Any, implementation: str, keep: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
    """The first output, and the gradients of each module's own parameters for a weighted sum of it. keep: the positions that count."""
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    out = model(**inputs)[0]
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float32, device=out.device).to(out.dtype).view(out.shape)
    if keep is not None:
        weights = weights * keep[..., None]
    (out * weights).sum().backward()
    return by_module(model, out.detach() if keep is None else out.detach()[keep.bool()])


def by_module(model: Any, shown: Tensor) -> dict[str, Tensor]:
    """``shown`` as "out", and the gradients of each module's own parameters."""
    # by module: biases of keys and sinks have gradients of next to nothing, which their layer's errors measure better than their own
    modules: dict[str, list[Tensor]] = {"out": [shown.flatten()]}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer, attention, _ = name.partition("self_attn")
            modules.setdefault(layer + attention if attention else name.rpartition(".")[0], []).append(parameter.grad.flatten())
    return {name: torch.cat(parts) for name, parts in modules.items()}


class Alone:
    """A model that computes texts of ``lengths``, packed in one row, one after the other: no neighbour is seen, whatever the masks say."""

    def __init__(self, model: Any, lengths: tuple[int, ...]):
        self.model, self.lengths = model, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, **named: Any) -> tuple[Tensor]:
        parts = zip(input_ids.split(self.lengths, 1), position_ids[-3:].split(self.lengths, -1), strict=True)
        return (torch.cat([self.model(input_ids=text, position_ids=at, **named)[0] for text, at in parts], 1),)


class Judge:
    """Judges float32 results of a model by the definition's in float64, in units of the definition's errors in float32.

    What these errors, one sample, leave in doubt is settled by the noise of many (``tests.support.model_rounding``).
    """

    def __init__(self, run: Callable[[str, torch.dtype], dict[str, Tensor]]):
        """run: a model's results by an attention implementation's name and a dtype."""
        with KeepsFloat64():
            self.expected = run(DEFINITION, torch.float64)
        self.plain = run(DEFINITION, torch.float32)
        self.run = run

    @functools.cached_property
    def noise(self) -> dict[str, Noise]:
        with KeepsFloat64():
            return sampled(lambda: self.run(DEFINITION, torch.float64), self.expected)

    def check(self, title: str, got: dict[str, Tensor]) -> None:
        """Raises ``AssertionError`` if one of the results exceeds its budget."""
        assert got.keys() == self.expected.keys() == self.plain.keys()
        for name in got:
            # a tensor is one row: errors of two layers have met in every element
            rows = (t[name][None] for t in (got, self.expected, self.plain))
            budget.check(f"{title} {name}", *rows, lambda name=name: self.noise[name])


def check_like_eager(run: Callable[[str, torch.dtype], dict[str, Tensor]], *, has_eager: bool = True) -> None:
    """Judges anyattn's results in float32 by the definition's in float64.

    Eager attention is judged by the same rule, so that the definition means what eager means. It is no oracle itself: its
    softmax is float32 whatever the model's dtype.
    """
    judge = Judge(run)
    for implementation in (NAME, "eager") if has_eager else (NAME,):
        judge.check(implementation, run(implementation, torch.float32))


def check_packed(made: Callable[[torch.dtype], Any], lengths: tuple[int, ...], **inputs: Any) -> None:
    """Judges gradients of a row of texts by those of each alone: eager attention itself leaks in gpt-oss of Transformers 5.23."""

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = made(dtype)
        return gradients(model if how == NAME else Alone(model, lengths), how, use_cache=False, **inputs)

    check_like_eager(run)


def definition(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    """Attention by its definition in the inputs' dtype; a row that sees nothing gives 0."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if others.get("softcap") is not None:
        scores = others["softcap"] * torch.tanh(scores / others["softcap"])
    if others.get("position_bias") is not None:
        scores = scores + others["position_bias"]
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    elif attention_mask is not None:
        scores = scores + attention_mask
    if others.get("s_aux") is not None:
        scores = torch.cat((scores, others["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        weights = weights.masked_fill(~attention_mask.any(-1, keepdim=True), 0.0)
    return (weights @ value).transpose(1, 2), None


def check_attention(
    got: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, noise: Noise | None = None, **others: Any
) -> None:
    """Judges the output of one layer, (B, Sq, H, D), by the definition's. seen: bool (B or 1, H or 1, Sq, Sk). noise: of the output, which
    rows of few rounding errors need."""
    wide = {name: t.double() if isinstance(t, Tensor) else t for name, t in others.items()}
    expected = definition(None, query.double(), key.double(), value.double(), seen, **wide)[0]
    budget.check("out", got, expected, definition(None, query, key, value, seen, **others)[0], noise)


def _dense_mask(**asked: Any) -> Tensor | None:
    return sdpa_mask(**{**asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def generated(model: Any, implementation: str, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Greedy continuation of fixed length; the model's argmax decides, so equal tokens mean equal masks at every step."""
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=options.pop("new", 12), **options)
