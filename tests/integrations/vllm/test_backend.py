"""Registration, what the back end says it supports, and the metadata of a step."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anyattn.integrations import vllm as plugin
from tests.integrations.vllm.batches import batch_of, builder_of
from tests.support.limits import HANG
from tests.support.processes import ROOT

CONFIGURATION: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": SimpleNamespace(major=9, minor=0),
    "attn_type": "decoder",
}


def test_without_vllm_nothing_is_imported_and_nothing_fails() -> None:
    code = """
import sys
sys.modules["vllm"] = None  # even where it is installed
import anyattn
from anyattn.integrations.vllm import register
register()
print([name for name in sys.modules if name.startswith("vllm.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_plugin_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nanyattn = "anyattn.integrations.vllm:register"' in text


def test_registering(vllm: Any) -> None:
    custom = vllm.registry.AttentionBackendEnum.CUSTOM
    custom.clear_override()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.register()
        plugin.register()
    assert custom.get_class() is vllm.backend.AnyAttentionBackend
    assert vllm.registry.AttentionBackendEnum[custom.get_class().get_name()] is custom
    vllm.registry.register_backend(custom, "theirs.Backend")
    with pytest.warns(UserWarning, match="VLLM_PLUGINS=anyattn"):
        plugin.register()
    assert custom.get_path() == "theirs.Backend"
    custom.clear_override()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_size": 80},
        {"head_size": 512},
        {"dtype": torch.float32},
        {"has_sink": True, "has_sliding_window": True},
        {"use_mm_prefix": True, "use_rswa": True, "use_non_causal": True},
        {"block_size": 48},
        {"block_size": None, "kv_cache_dtype": None},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
        {"kv_cache_dtype": "fp8_e5m2", "device_capability": SimpleNamespace(major=8, minor=0)},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "fp8_per_token_head"},
        *({"attn_type": kind} for kind in ("encoder", "encoder_only", "encoder_decoder")),
    ],
)
def test_supported(vllm: Any, change: dict[str, Any]) -> None:
    assert vllm.backend.AnyAttentionBackend.validate_configuration(**CONFIGURATION | change) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 520}, "head_size not supported"),
        ({"head_size": 100}, "head_size not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "a KV cache of float16 for a model of torch.bfloat16 not supported: --kv-cache-dtype auto"),
        (
            {"kv_cache_dtype": "fp8", "device_capability": SimpleNamespace(major=8, minor=0)},
            "a KV cache of fp8 needs compute capability 8.9: --kv-cache-dtype fp8_e5m2",
        ),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
    ],
)
def test_refused(vllm: Any, change: dict[str, Any], reason: str) -> None:
    assert vllm.backend.AnyAttentionBackend.validate_configuration(**CONFIGURATION | change) == [reason]


def test_the_cache_is_written_before_it_is_read(vllm: Any) -> None:
    """By a call of its own, so that a compiled model may fuse it."""
    backend = vllm.backend.AnyAttentionBackend
    assert not backend.forward_includes_kv_cache_update and backend.supports_kv_cache_update_bypass
    assert backend.supported_kv_cache_layouts() is None, "any layout is read"


@pytest.mark.parametrize("mode", ["FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD", "FP8_PER_TENSOR", "NONE"])
def test_room_for_inline_scales(vllm: Any, mode: str) -> None:
    dtype = torch.bfloat16 if mode == "NONE" else torch.uint8
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": dtype}
    spec = vllm.cache.AttentionSpec(**sizes, kv_quant_mode=vllm.cache.KVQuantMode[mode])
    changed = vllm.backend.AnyAttentionBackend.customize_spec(spec)
    extra = 8 if mode.endswith("TOKEN_HEAD") else 0
    assert changed.state_content_size_bytes == 128 * dtype.itemsize + extra
    assert vllm.backend.AnyAttentionBackend.customize_spec(changed) == changed


# ---- metadata


def test_metadata_refers_to_vllms_buffers(vllm: Any) -> None:
    """A CUDA graph that has captured a step reads what the next step writes to them."""
    common = batch_of(vllm).common
    builder = builder_of(vllm)
    metadata = builder.build(0, common)
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        assert getattr(metadata, name).data_ptr() == getattr(common, name).data_ptr()
    assert metadata.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert builder.supports_draft_decode_metadata_update
    builder.update_draft_decode_metadata(metadata)


def test_the_block_table_has_the_columns_in_use(vllm: Any) -> None:
    common = batch_of(vllm, [(1, 5), (3, 600)]).common
    common.block_table_tensor = torch.zeros(4, 1000, dtype=torch.int32)
    builder = builder_of(vllm)
    widths = {}
    for longest in (1, 256, 257, 600, 1024, 1025, 16000):
        common.max_seq_len = longest
        widths[longest] = builder.build(0, common).block_table.shape[1]
    assert widths == {1: 16, 256: 16, 257: 32, 600: 64, 1024: 64, 1025: 128, 16000: 1000}
    assert builder.build_for_cudagraph_capture(common).block_table.shape[1] == 1000
    common.max_seq_len = 3
    assert builder.build_for_cudagraph_capture(common).block_table.shape[1] == 1000, "a graph is replayed for longer requests"
    assert builder.build(0, common).block_table.shape[1] == 16


def test_another_groups_block_table(vllm: Any) -> None:
    """It has as many columns as the first group's."""
    builder, common = builder_of(vllm), batch_of(vllm).common
    common.block_table_tensor = torch.zeros(8, 1000, dtype=torch.int32)
    for build, columns in ((builder.build, 16), (lambda _, given: builder.build_for_cudagraph_capture(given), 1000)):
        metadata = build(0, common)
        table, slots = torch.ones(8, 1000, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
        other = builder.update_block_table(metadata, table, slots)
        assert other.block_table.data_ptr() == table.data_ptr() and other.block_table.shape == (8, columns)
        assert other.slot_mapping is slots and other.seq_lens is metadata.seq_lens
        assert metadata.block_table.data_ptr() == common.block_table_tensor.data_ptr()


@pytest.mark.parametrize("images", [False, True])
def test_cuda_graphs(vllm: Any, images: bool) -> None:
    """Where images see themselves a prefill's mask changes, and only decoding steps are captured whole."""
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=images))
    found = vllm.backend.AnyAttentionBackend.get_builder_cls().get_cudagraph_support(config, None)
    assert found is (vllm.api.AttentionCGSupport.UNIFORM_BATCH if images else vllm.api.AttentionCGSupport.ALWAYS)


def test_layers_with_one_window_share_a_mask(vllm: Any) -> None:
    """So that its trace is made once a step."""
    metadata = builder_of(vllm).build(0, batch_of(vllm, causal=torch.ones(8, dtype=torch.int32)).common)
    assert metadata.visible(9, None, False) is metadata.visible(9, None, False)
    assert metadata.visible(9, None, False) is not metadata.visible(None, None, False)
