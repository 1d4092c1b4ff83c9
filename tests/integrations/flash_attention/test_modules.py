"""``replace_flash_attention``: what importing and looking for FlashAttention finds, and what is left when it has ended."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys

import pytest
import torch

import anyattn
from anyattn.integrations import torch_flex
from tests.integrations.test_torch_flex_variable import run  # noqa: F401 - a fixture

TOP_LEVELS = ("flash_attn", "flash_attn_interface", "flash_attn_3")
PUBLIC = {
    "flash_attn": [
        "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
    ],
    "flash_attn.bert_padding": ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"],
    "flash_attn.layers.rotary": ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_qkv_"],
    "flash_attn.ops.triton.rotary": ["apply_rotary"],
    "flash_attn_interface": [
        "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
        "get_scheduler_metadata",
    ],
}  # fmt: skip
PUBLIC["flash_attn.flash_attn_interface"] = [*PUBLIC["flash_attn"], "_wrapped_flash_attn_forward", "_flash_attn_varlen_backward"]
COMMON = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False "
SIGNATURES = {  # names and defaults in FlashAttention's order
    ("flash_attn", "flash_attn_func"): f"q k v {COMMON}return_attn_probs=False",
    ("flash_attn", "flash_attn_qkvpacked_func"): f"qkv {COMMON}return_attn_probs=False",
    ("flash_attn", "flash_attn_kvpacked_func"): f"q kv {COMMON}return_attn_probs=False",
    ("flash_attn", "flash_attn_varlen_func"): (
        f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON}return_attn_probs=False block_table=None"
    ),
    ("flash_attn", "flash_attn_varlen_qkvpacked_func"): f"qkv cu_seqlens max_seqlen {COMMON}return_attn_probs=False",
    ("flash_attn", "flash_attn_varlen_kvpacked_func"): (
        f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON}return_attn_probs=False"
    ),
    ("flash_attn", "flash_attn_with_kvcache"): (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None "
        "block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 rotary_interleaved=True alibi_slopes=None "
        "num_splits=0 return_softmax_lse=False"
    ),
    ("flash_attn_interface", "flash_attn_func"): (
        "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1, -1) "
        "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    ("flash_attn_interface", "flash_attn_qkvpacked_func"): (
        "qkv softmax_scale=None causal=False q_descale=None k_descale=None v_descale=None window_size=(-1, -1) attention_chunk=0 "
        "softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False"
    ),
    ("flash_attn_interface", "flash_attn_varlen_func"): (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None "
        "q_descale=None k_descale=None v_descale=None window_size=(-1, -1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
        "deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    ("flash_attn_interface", "flash_attn_with_kvcache"): (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None q_descale=None "
        "k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1, -1) attention_chunk=0 softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False"
    ),
    ("flash_attn_interface", "flash_attn_combine"): "out_partial lse_partial out=None out_dtype=None",
    ("flash_attn.layers.rotary", "apply_rotary_emb"): (
        "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None max_seqlen=None"
    ),
    ("flash_attn.bert_padding", "unpad_input"): "hidden_states attention_mask unused_mask=None",
    ("flash_attn.bert_padding", "pad_input"): "hidden_states indices batch seqlen",
}


def provided() -> set[str]:
    return {m for m in sys.modules if m.split(".")[0] in TOP_LEVELS}


@pytest.fixture
def nothing_installed():
    assert not provided() and importlib.util.find_spec("flash_attn") is None
    yield
    for module in provided():  # of a test that has installed some
        del sys.modules[module]


@pytest.mark.parametrize("module", PUBLIC)
def test_modules_have_flash_attentions_names(module, nothing_installed):
    with anyattn.replace_flash_attention():
        found = importlib.import_module(module)
        assert found.__name__ == module and importlib.util.find_spec(module) is found.__spec__
        assert all(callable(getattr(found, name)) for name in PUBLIC[module])
        assert not {"torch", "Tensor", "Any", "computed"} & vars(found).keys()
    assert not provided()


@pytest.mark.parametrize(("module", "name"), SIGNATURES)
def test_signatures_are_flash_attentions(module, name):
    with anyattn.replace_flash_attention():
        function = getattr(importlib.import_module(module), name)
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert " ".join(shown) == SIGNATURES[module, name]


def test_versions_and_distributions(nothing_installed):
    with anyattn.replace_flash_attention():
        import flash_attn

        assert flash_attn.__version__ == importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn")
        assert flash_attn.__version__.startswith("2.8.") and importlib.metadata.version("flash_attn_3").startswith("3.")
        by_module = importlib.metadata.packages_distributions()
        assert by_module["flash_attn"] == ["flash-attn"] and by_module["flash_attn_interface"] == ["flash-attn-3"]
        assert importlib.util.find_spec("flash_attn_3") is not None
        assert importlib.util.find_spec("flash_attn.cute") is None
        assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn.flash_attn_func
        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.losses"):
            import flash_attn.losses
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    with pytest.raises(ModuleNotFoundError):
        import flash_attn


def test_sys_modules_is_as_before(nothing_installed):
    before, finders = dict(sys.modules), list(sys.meta_path)
    with anyattn.replace_flash_attention() as outer:
        import flash_attn.layers.rotary  # noqa: F401
        import flash_attn_interface  # noqa: F401

        with anyattn.replace_flash_attention():
            outer.undo()
            outer.undo()
            from flash_attn import flash_attn_func
        assert not provided()
    assert flash_attn_func(*torch.ones(3, 1, 2, 1, 8)).shape == (1, 2, 1, 8)  # what was imported stays
    own = {m for m in sys.modules if m.startswith("anyattn.")}
    assert {m: sys.modules[m] for m in before} == before and sys.modules.keys() - before.keys() <= own and sys.meta_path == finders


@pytest.mark.parametrize(("versions", "wanted"), [((2,), [True, False]), ((3,), [False, True]), ((2, 3, 2), [True, True])])
def test_one_version(versions, wanted, nothing_installed):
    with anyattn.replace_flash_attention(versions):
        assert [importlib.util.find_spec(m) is not None for m in TOP_LEVELS[:2]] == wanted
    assert not provided()


def test_another_version_is_refused():
    with pytest.raises(ValueError, match=r"versions contains 4; wanted 2 \(flash_attn\) and 3"):
        anyattn.replace_flash_attention((2, 4))
    assert importlib.util.find_spec("flash_attn") is None


def test_an_installed_package_is_hidden_but_for_its_other_modules(tmp_path, monkeypatch, nothing_installed):
    (tmp_path / "flash_attn" / "ops").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").write_text("name = 'installed'\n__version__ = '2.5.0'\n")
    (tmp_path / "flash_attn" / "losses.py").write_text("from flash_attn import flash_attn_func as used\n")
    (tmp_path / "flash_attn" / "ops" / "__init__.py").write_text("")
    (tmp_path / "flash_attn" / "ops" / "rms_norm.py").write_text("name = 'installed'\n")
    (tmp_path / "flash_attn-2.5.0.dist-info").mkdir()
    (tmp_path / "flash_attn-2.5.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.5.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import flash_attn

    with anyattn.replace_flash_attention():
        import flash_attn as replaced
        import flash_attn.losses
        import flash_attn.ops.rms_norm

        assert replaced.__version__ == importlib.metadata.version("flash_attn") == "2.8.3"
        assert sys.modules["flash_attn.losses"].used is replaced.flash_attn_func
        assert sys.modules["flash_attn.ops.rms_norm"].name == "installed"
    assert sys.modules["flash_attn"] is not replaced and sys.modules["flash_attn"].name == "installed"
    assert provided() == {"flash_attn"} and importlib.metadata.version("flash_attn") == "2.5.0"
    del flash_attn


# ---- the variable


@pytest.mark.parametrize(("value", "versions"), [("1", (2, 3)), ("2", (2,)), ("3", (3,)), ("0", None), ("", None)])
def test_the_variable(value, versions, monkeypatch):
    found = []
    monkeypatch.setenv(torch_flex.VARIABLE_OF_FLASH, value)
    monkeypatch.setattr("anyattn.integrations.flash_attention.replace_flash_attention", found.append)
    torch_flex.autoload()
    assert found == ([] if versions is None else [versions])


def test_a_wrong_value_warns(monkeypatch):
    monkeypatch.setenv(torch_flex.VARIABLE_OF_FLASH, "yes")
    with pytest.warns(UserWarning, match=r"FlashAttention is not replaced by anyattn's: ANYATTN_REPLACE_FLASH_ATTENTION='yes'; wanted 1"):
        torch_flex.autoload()


@pytest.mark.slow
def test_a_program_runs_replaced(run, monkeypatch):  # noqa: F811
    monkeypatch.setenv("ANYATTN_REPLACE_FLASH_ATTENTION", "2")
    program = """
import sys, importlib.util, torch
print("anyattn.flash" in sys.modules, importlib.util.find_spec("flash_attn_interface"))
from flash_attn import flash_attn_func
print(flash_attn_func(*torch.ones(3, 1, 2, 4, 8), 0.0, None, True).sum().item())
import anyattn
print(anyattn.replaced().taken)
"""
    done = run(program, None)
    assert done.stdout == "False None\n64.0\n1\n", done.stdout + done.stderr


def test_the_table_of_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 5.22 Transformers asks a table that it makes when it is imported, which distribution provides a module."""
    utils = pytest.importorskip("transformers.utils.import_utils")
    installed = {"torch": ["torch"], "flash_attn": ["flash-attn-4"]}
    table = {name: list(names) for name, names in installed.items()}
    monkeypatch.setattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", table, raising=False)
    with anyattn.replace_flash_attention():
        assert table["flash_attn"] == ["flash-attn-4", "flash-attn"] and table["flash_attn_interface"] == ["flash-attn-3"]
        with anyattn.replace_flash_attention():
            pass
        assert table["flash_attn"] == ["flash-attn-4", "flash-attn"]
    assert table == installed
