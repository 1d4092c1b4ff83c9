"""Text positions of packed sequences, from positions of several axes (M-RoPE: time, height, width)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["text_positions"]


def text_positions(position_ids: Tensor) -> Tensor:
    """Positions (B or 1, S) that are not the previous one plus 1 where a packed sequence begins, as Transformers' masks read them.

    position_ids: integers (S,), (B or 1, S), which are those positions, or (axes, B or 1, S). Nothing is read, also on a GPU.

    Tokens of text have equal positions on all axes. A row of them alone has positions of text. In a row with images a sequence begins where
    positions return to the row's first, or where text lies before the text that it follows: inside one sequence, positions of images repeat
    and jump back, and the text after them may lie before some of them, but never before the text in front of them.
    """
    if position_ids.ndim < 3:
        return position_ids if position_ids.ndim == 2 else position_ids[None]
    low, high = position_ids.amin(0), position_ids.amax(0)
    is_text = low == high
    begins = torch.where(is_text.all(1, keepdim=True), ~_continues(high), _begins_beside_images(position_ids, low, high))
    rows = torch.arange(high.shape[1], device=high.device).expand_as(high)
    return rows - torch.where(begins, rows, 0).cummax(1).values


def _continues(positions: Tensor) -> Tensor:
    """Whether a position is the previous one plus 1; True for the first."""
    return positions.diff(dim=1, prepend=positions[:, :1] - 1) == 1


def _begins_beside_images(position_ids: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Whether a token begins a sequence, bool (B, S). low, high: the least and greatest position of a token on all axes."""
    is_text = low == high
    follows_text = is_text & _previous(is_text, False) & _continues(high)
    is_before_text = _next(follows_text, True)
    has_text_before = _previous(follows_text.cumsum(1) > 0, False)
    step = _next(position_ids.flatten(0, 1), 0).view_as(position_ids) - position_ids
    # the first token of an image, unless height comes last, as in HunYuan-VL, whose images have positions of their own
    is_before_image = (step[-1] == 1) & (step[:-1] == 0).all(0) & is_text
    returns = high <= _previous(low.cummin(1).values, -1)
    # MiniCPM-V's images have several tokens at their origin, which is the row's first position if no text is before them
    returns = returns & (is_before_text | has_text_before & (is_before_image | _next(returns, False)))
    # tokens of images can have equal positions too
    is_surely_text = follows_text | is_before_text & is_text | returns
    falls = is_text & (is_before_text | is_before_image)
    falls_behind = falls & (high < _last_before(high, is_surely_text))
    # the image that begins a sequence is compared with its first token, not with the text of the sequence before
    return returns | falls & (high < _last_before(high, is_surely_text | falls_behind))


def _previous(values: Tensor, first: int | bool) -> Tensor:
    return torch.nn.functional.pad(values[:, :-1], (1, 0), value=first)


def _next(values: Tensor, last: int | bool) -> Tensor:
    return torch.nn.functional.pad(values[:, 1:], (0, 1), value=last)


def _last_before(positions: Tensor, counts: Tensor) -> Tensor:
    """The position of the last token before each one that ``counts``; -1 where there is none."""
    rows = torch.arange(1, positions.shape[1] + 1, device=positions.device)
    last = _previous(torch.where(counts, rows, 0).cummax(1).values, 0)
    return torch.nn.functional.pad(positions, (1, 0), value=-1).gather(1, last)
