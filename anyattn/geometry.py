"""Earlier import path of ``anyattn.sequences``: ``anyattn.geometry.seqlen_info`` and its siblings are aliases of the modules there.

>>> from anyattn.geometry.seqlen_info import SeqlenInfo
>>> SeqlenInfo.__module__
'anyattn.sequences.seqlen_info'
"""

from __future__ import annotations

import sys

from anyattn.sequences import block_info, integers, seqlen_info, split_kv

__all__ = ["block_info", "integers", "seqlen_info", "splits"]

splits = split_kv
for _name, _module in (("block_info", block_info), ("integers", integers), ("seqlen_info", seqlen_info), ("splits", split_kv)):
    sys.modules[f"{__name__}.{_name}"] = _module
