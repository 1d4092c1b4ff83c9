"""Results by tensors' contents: what makes two tensors equal, and how many results are kept."""

import pytest
import torch

from anyattn.tensors import by_contents
from anyattn.tensors.by_contents import kept


@pytest.fixture(autouse=True)
def _fresh():
    by_contents.forget()


def test_tensors_are_equal_by_dtype_shape_and_bytes():
    first = torch.tensor([[0.0, float("nan")], [1.5, 2.0]], dtype=torch.bfloat16)
    result = kept((first, None), "facts", object)
    assert kept((first.clone(), None), "facts", object) is result
    assert kept((first.t().contiguous().t(), None), "facts", object) is result
    for other in (first.float(), first.view(4), first.t(), first.abs().neg(), None):
        assert kept((other, None), "facts", object) is not result
    assert kept((first, None), "others", object) is not result
    assert kept((torch.tensor(3), torch.ones(0)), "facts", object) is kept((torch.tensor(3), torch.ones(0)), "facts", object)


def test_the_oldest_results_are_removed():
    first = kept((torch.tensor(-1),), "facts", object)
    for number in range(by_contents._MOST - 1):
        kept((torch.tensor(number),), "facts", object)
    assert kept((torch.tensor(-1),), "facts", object) is first
    kept((torch.tensor(-2),), "facts", object)
    assert len(by_contents._results) == by_contents._MOST
    assert kept((torch.tensor(-1),), "facts", object) is first
