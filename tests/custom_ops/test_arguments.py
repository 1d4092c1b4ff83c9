"""Operators keep their schemas, which exported programs name."""

from __future__ import annotations

import pytest
import torch

from anyattn.custom_ops import flash, flex
from anyattn.custom_ops.arguments import Arguments, Results
from anyattn.custom_ops.block_lists import block_lists
from tests.support.operands import flash_operands

_SCORE = "str score_program, SymInt[] score_numbers, Tensor[] score_tensors"
_ATTEND = (
    f"Tensor q, Tensor k, Tensor v, Tensor? sink, {_SCORE}, str mask_programs, SymInt[] mask_numbers, Tensor[] mask_tensors, "
    "Tensor[] block_lists, SymInt[] block_size, SymInt exactness, float scale"
)
_OPTIONS = (
    f"Tensor? alibi_slopes, Tensor? sink, {_SCORE}, str mask_program, SymInt[] mask_numbers, Tensor[] mask_tensors, float? softmax_scale, "
    "float softcap, bool causal, SymInt[] window_size, SymInt num_splits, bool? pack_gqa"
)
_FLASH = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? page_table, "
    f"{_OPTIONS}, bool deterministic, SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool? validate, str backend"
)
_RESULTS = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool[] wants"
_DECODE = (
    "Tensor q, Tensor(a1!) k_cache, Tensor(a2!) v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? page_table, Tensor? cu_seqlens_q, "
    f"{_OPTIONS}, bool rotary_interleaved, SymInt? max_seqlen_q, bool? validate, str backend"
)
_DECODE_READING = _DECODE.replace("(a1!)", "").replace("(a2!)", "")
_DESCALES = "Tensor? k_descale, Tensor? v_descale"
_LISTS = (
    "Tensor like, str program, SymInt[] numbers, Tensor[] tensors, SymInt batch, SymInt heads, SymInt q_len, SymInt kv_len, "
    "SymInt block_m, SymInt block_n, bool separate_full"
)
SCHEMAS = {
    flex.attend: f"({_ATTEND}, bool wants_max, bool deterministic, str options, str backend) -> (Tensor, Tensor, Tensor)",
    flex.attend_backward: f"({_ATTEND}, bool deterministic, str options, str backend, {_RESULTS}) -> Tensor[]",
    flash.flash: f"({_FLASH}) -> (Tensor, Tensor)",
    flash.flash_backward: f"({_FLASH}, {_RESULTS}) -> Tensor[]",
    flash.decode: f"({_DECODE}) -> (Tensor, Tensor)",
    flash.flash_8_bits: f"({_FLASH}, {_DESCALES}) -> (Tensor, Tensor)",
    flash.decode_8_bits: f"({_DECODE_READING}, {_DESCALES}) -> (Tensor, Tensor)",
    block_lists: f"({_LISTS}) -> Tensor[]",
}


@pytest.mark.parametrize("operator", SCHEMAS, ids=lambda o: o.__name__)
def test_schemas(operator) -> None:
    """An exported program holds an operator's name and its arguments by name: they stay what they were."""
    name = operator._schema.name
    assert str(operator._schema) == name + SCHEMAS[operator] and getattr(torch.ops.anyattn, name.partition("::")[2]).default is operator


def test_arguments_there_and_back() -> None:
    """Records of an operator's arguments are what they were made of."""
    q = torch.zeros(1, 2, 4, 8)
    given = flash_operands(*(q.transpose(1, 2),) * 3)
    arguments = Arguments(flash.Flash)
    (record,) = arguments.records(given)
    assert record.shared.score.score_program == given[10] and record.backend == given[-1]
    assert all(a is b for a, b in zip(arguments.flat(record), given, strict=True))


def test_a_left_out_argument_has_its_value() -> None:
    arguments = Arguments(flex.Attend, Results, left_out={"wants_max": False})
    assert "wants_max" not in arguments.names and len(arguments.names) == 22
    given, results = arguments.records(tuple(range(22)))
    assert given.wants_max is False and given.deterministic == 14 and results.out == 17


def test_writes_to_a_cache_are_counted() -> None:
    """A graph that keeps a cache for its backward pass must notice that a step has appended to it."""
    k_cache, v_cache = (torch.zeros(1, 8, 2, 8) for _ in range(2))
    q = k = torch.randn(1, 1, 2, 8)
    lengths = torch.zeros(1, dtype=torch.int32)
    mods = ("", [0], [q.new_empty(0)])
    tables = (None, None, lengths, None, None, None, None)
    given = (q, k_cache, v_cache, k, k, *tables, None, None, *mods, *mods, None, 0.0, True, [-1, -1], 1, None, True, None, None, "")
    flash.decode(*given)
    assert min(k_cache._version, v_cache._version) > 0 and torch.equal(k_cache[0, 0], k[0, 0])
    kept = (torch.ones(1, 8, 2, 8, requires_grad=True) * k_cache).sum()
    flash.decode(*given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    required = (q.clone().requires_grad_(), *given[1:])
    with pytest.raises(RuntimeError, match=r"Trying to backward through anyattn\.decode\.default"):
        flash.decode(*required)[0].sum().backward()
