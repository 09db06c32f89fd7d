from __future__ import annotations
import contextlib, contextvars
_batch_size = contextvars.ContextVar("forward_batch_size", default=250)
@contextlib.contextmanager
def forward_batches_of(size):
    token = _batch_size.set(size)
    try:
        yield
    finally:
        _batch_size.reset(token)
