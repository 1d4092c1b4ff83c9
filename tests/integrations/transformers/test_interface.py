"""Registration, switching between implementations, and refusals with their cures."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import sliding_window_causal_mask_function

from anyattn.integrations.transformers import NAME, attention_forward, describe_mask, register
from tests.support.transformers_models import IS_FIVE, check_attention, decoder, generated, logits, made, tokens


def test_both_registries_know_the_name() -> None:
    register()
    register()
    assert AttentionInterface()[NAME] is attention_forward
    assert AttentionMaskInterface()[NAME] is describe_mask


@pytest.mark.parametrize("name", ["", "flash_anyattn", "paged|anyattn", "me/anyattn"])
def test_names_that_transformers_reads_a_meaning_into(name: str) -> None:
    with pytest.raises(ValueError, match="wanted another"):
        register(name)


def test_a_transformers_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.56.2")
    with pytest.raises(ImportError, match=r"transformers 4.56.2 is installed; wanted 4.57 or newer"):
        register()


def test_a_model_is_made_with_the_name(tmp_path: object) -> None:
    from transformers import AutoModelForCausalLM

    decoder("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    assert model(input_ids=tokens(1, 5)).logits.shape == (1, 5, 96)


def test_switching_there_and_back() -> None:
    model, ids = decoder("mistral"), tokens(2, 12)
    before = logits(model, "eager", input_ids=ids)
    ours = logits(model, NAME, input_ids=ids)
    assert torch.equal(logits(model, "eager", input_ids=ids), before)
    assert logits(model, "sdpa", input_ids=ids).shape == ours.shape
    assert torch.equal(generated(model, "sdpa", ids), generated(model, NAME, ids))


@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])}], ids=["plain", "padded"])
def test_dropout_in_training_alone(given: dict) -> None:
    """The layer's rate reaches attention in training: the seed repeats it, and its mean over seeds is the result without."""
    model, ids = decoder("llama", attention_dropout=0.5), tokens(2, 6)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        without = model.eval()(input_ids=ids, **given).logits
        assert torch.equal(without, model(input_ids=ids, **given).logits)
        model.train()

        def run(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return model(input_ids=ids, **given).logits

        runs = [run(seed) for seed in (0, 0, 1)]
    assert torch.equal(*runs[:2]) and not torch.equal(*runs[1:]) and not torch.equal(runs[0], without)


def test_weights_are_refused_with_the_cure() -> None:
    model = decoder("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="eager"):
        model.config.output_attentions = True
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"set_attn_implementation\('eager'\)"):
        attention_forward(nn.Module(), q, q, q, None, output_attentions=True)


def test_weights_asked_of_a_call() -> None:
    model = decoder("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="eager"):
        model(input_ids=tokens(1, 5), output_attentions=True)


def test_a_mask_for_other_lengths_is_refused() -> None:
    mask = describe_mask(batch_size=1, q_length=4, kv_length=4)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"4 queries and 6 keys, its mask is for \(4, 4\)"):
        attention_forward(nn.Module(), q, k, k, mask)


EDITS: dict[str, Any] = {
    "slice": lambda mask: mask[:, :, :, :3],
    "assign": lambda mask: mask.__setitem__(0, 1),
    "add": lambda mask: torch.ones(2) + mask,
    "add from the left": lambda mask: mask + torch.ones(2),
    "number": lambda mask: 1.0 - mask,
    "invert": lambda mask: ~mask,
    "compare": lambda mask: mask == 0,
    "truth": lambda mask: bool(mask),
    "where": lambda mask: torch.where(mask, 0.0, 1.0),
    "masked fill": lambda mask: torch.ones(4).masked_fill(mask, 0.0),
    "in a list": lambda mask: torch.cat([mask, mask]),
    "dtype": lambda mask: mask.to(torch.bool),
    "method": lambda mask: mask.expand(2, -1, -1, -1),
    "attribute": lambda mask: mask.dtype,
    "length": lambda mask: len(mask),
    "rows": lambda mask: list(mask),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_model_that_edits_its_mask_is_refused_with_the_cure(edit: str) -> None:
    mask = describe_mask(batch_size=1, q_length=4, kv_length=4, config=LlamaConfig())
    with pytest.raises((TypeError, AttributeError), match=r"^Llama .*its mask.*use attn_implementation='sdpa' or 'eager'"):
        EDITS[edit](mask)


def test_what_a_model_may_do_with_its_mask() -> None:
    mask = describe_mask(batch_size=1, q_length=4, kv_length=4)
    assert mask.shape == (1, 1, 4, 4) and mask.ndim == mask.dim() == 4 and mask.size(3) == 4
    assert not hasattr(mask, "__array__") and mask == mask and mask != "none"
    assert mask.to("cpu").shape == copy.copy(mask).shape and mask.contiguous() is mask
    assert describe_mask(batch_size=1, q_length=4, kv_length=4, attention_mask=mask) is mask


def test_a_dropped_mask_is_refused() -> None:
    """A model that makes a mask, or none, in place of the description loses its causality."""
    q = torch.randn(1, 2, 4, 8)
    window = sliding_window_causal_mask_function(2)
    for given, message in ((torch.zeros(1, 1, 4, 4), "a Tensor"), (None, "no mask")):
        mask = describe_mask(batch_size=1, q_length=4, kv_length=4, mask_function=window)
        with pytest.raises(TypeError, match=f"drops the mask .*passes {message} to attention.*use attn_implementation='sdpa'"):
            attention_forward(nn.Module(), q, q, q, given)
        attention_forward(nn.Module(), q, q, q, mask)
        attention_forward(nn.Module(), q, q, q, given)  # the mask of another layer
    del mask
    described = describe_mask(batch_size=1, q_length=4, kv_length=4)
    attention_forward(nn.Module(), q, q, q, None)  # the same as the description
    attention_forward(nn.Module(), q[:, :, :3], q, q, torch.zeros(1, 1, 3, 4))  # of other lengths
    assert not described.is_used


def test_what_a_models_own_attention_reads_and_this_one_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inkling 2's sinks, one for each query; before, they were dropped silently."""
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"^Module passes sinks to attention.*use attn_implementation='eager'"):
        attention_forward(nn.Module(), q, q, q, sinks=torch.zeros(1, 2, 4, 1))

    def eager_attention_forward(module: object, query: Tensor, temperature: float | None = None, **kwargs: object) -> None: ...

    class Layer(nn.Module):
        pass

    monkeypatch.setitem(globals(), "eager_attention_forward", eager_attention_forward)
    attention_forward(Layer(), q, q, q, temperature=None, layer=3)
    with pytest.raises(ValueError, match="Layer passes temperature to attention"):
        attention_forward(Layer(), q, q, q, temperature=2.0)


_OWN = """
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

class OwnAttention(nn.Module):
    pass
{more}
class OwnModel(PreTrainedModel):
    config_class = LlamaConfig
"""


@pytest.mark.parametrize("more", ["", "# ALL_ATTENTION_FUNCTIONS\nOWN_CLASSES = {'eager': OwnAttention}\n"])
def test_a_model_without_the_interface_is_refused_when_it_is_made(more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPT-J, whose attention is its own, and SAM, which chooses classes of attention by the implementation's name."""
    name = f"own_model_{len(more)}"
    (tmp_path / f"{name}.py").write_text(_OWN.format(more=more))
    monkeypatch.syspath_prepend(str(tmp_path))
    register()
    own = importlib.import_module(name)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    own.OwnModel._from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match=r"^OwnModel does not use Transformers' attention interface.*attn_implementation='eager'\."):
        own.OwnModel._from_config(config, attn_implementation=NAME)


def test_a_model_of_a_users_own_source_is_not_refused() -> None:
    """Attention of a notebook, whose source cannot be read, or that calls the interface through a base class."""

    class Own(LlamaForCausalLM):
        pass

    Own.__module__ = "__notebook__"
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    assert Own._from_config(config, attn_implementation=NAME).config._attn_implementation == NAME


def test_a_static_cache_of_gpt2() -> None:
    """GPT-2 looks at the dimensions of the mask that ``generate`` makes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": None}
    model = made(GPT2LMHeadModel(GPT2Config(**sizes)))
    ours, eager = (generated(model, how, tokens(2, 9), cache_implementation="static", disable_compile=True) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


def test_no_mask_means_what_the_layer_says() -> None:
    q = torch.randn(1, 2, 5, 8)
    layer = nn.Module()
    layer.is_causal = False  # type: ignore[assignment]
    at = torch.arange(5)
    causal = (at[:, None] >= at)[None, None]
    check_attention(attention_forward(layer, q, q, q)[0], q, q, q, None)
    check_attention(attention_forward(layer, q, q, q, is_causal=True)[0], q, q, q, causal)
    check_attention(attention_forward(nn.Module(), q, q, q)[0], q, q, q, causal)
    with pytest.raises(ValueError, match="leaves open where the queries lie"):
        attention_forward(nn.Module(), q[:, :, :3], q, q)


def _ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_by_keywords(is_causal: bool, window: int | None) -> None:
    q = torch.randn(1, 4, 12, 8, requires_grad=True)
    k = torch.randn(1, 2, 12, 8, requires_grad=True)
    ends = _ends(5, 0, 7)
    sink = torch.randn(4)
    out, _ = attention_forward(
        nn.Module(), q, k, k, None, is_causal=is_causal, sliding_window=window, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7,
        max_length_k=7, s_aux=sink,
    )  # fmt: skip
    at = torch.arange(12)
    ids = torch.bucketize(at, ends[1:].long(), right=True)
    seen = ids[:, None] == ids[None]
    if is_causal:
        seen &= at[:, None] >= at[None]
    if window is not None:
        seen &= (at[:, None] - at[None]).abs() < window
    check_attention(out, q, k, k, seen[None, None], s_aux=sink)


def test_packed_sequences_beside_a_mask_that_says_otherwise() -> None:
    q = torch.randn(2, 4, 12, 8)
    ends = _ends(5, 7)
    with pytest.raises(ValueError, match="packed into a batch of 1"):
        attention_forward(nn.Module(), q, q, q, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    padding = torch.ones(1, 12, dtype=torch.bool)
    padding[0, 0] = False
    mask = describe_mask(batch_size=1, q_length=12, kv_length=12, attention_mask=padding)
    with pytest.raises(ValueError, match="use_cache=False"):
        attention_forward(nn.Module(), q[:1], q[:1], q[:1], mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    with pytest.raises(ValueError, match="position_bias"):
        attention_forward(nn.Module(), q[:1], q[:1], q[:1], cu_seq_lens_q=ends, position_bias=torch.zeros(1, 4, 12, 12))


def test_continuous_batching_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="continuous batching"):
        attention_forward(nn.Module(), q, q, q, None, cache=object())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_half_precision_generates(name: str, dtype: torch.dtype) -> None:
    model, ids = decoder(name, dtype), tokens(2, 9)
    assert generated(model, NAME, ids, cache_implementation="static").shape == (2, 21)


@pytest.mark.parametrize("width", [4, 20, 512])
def test_any_head_dim(width: int) -> None:
    model, ids = decoder("llama", head_dim=width), tokens(2, 9)
    assert torch.equal(generated(model, NAME, ids), generated(model, "eager", ids))
    if IS_FIVE:
        assert model.config.head_dim == width
