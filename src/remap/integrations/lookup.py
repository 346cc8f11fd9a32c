"""Look-ups: which buffer a tensor lies in, a segment of a pool or the memory of an `ElasticTensor`."""

from __future__ import annotations

from typing import Any

from remap.buffers.base import Buffer
from remap.integrations.elastic_tensor import ElasticTensor, elastic_at
from remap.integrations.memory import segment_at
from remap.integrations.tensors import check_tensor, device_of, span_of
from remap.lifetime import epoch


def buffer_at(tensor: Any, asked: str) -> Buffer:
    """Return the buffer that a tensor lies in, or that an `ElasticTensor` stands on.

    Raises `InvalidValueError` for memory of others, `ForkedError` for that of the process that this one was forked
    from, and `TypeError` for what has no memory; `asked` says for messages what is wanted of it.
    """
    if isinstance(tensor, ElasticTensor):
        tensor.buffer._check()
        return tensor.buffer
    check_tensor(tensor, asked)
    start, _ = span_of(tensor)
    found = elastic_at(start)
    if found is None or found._epoch != epoch():
        return segment_at(start, device_of(tensor), asked, found)
    return found
