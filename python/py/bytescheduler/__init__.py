"""ByteScheduler's names, over this engine.

For programs that were written for it::

    import bytescheduler.pytorch.horovod as bsc
    from bytescheduler.mxnet.kvstore import ScheduledKVStore

Its ``BYTESCHEDULER_*`` variables are settings of the engine (docs/env.md). New programs find the
same as :class:`byteps.torch.cross_barrier.CrossBarrier` and in :mod:`byteps.mxnet`.

Where no Horovod is installed, ``import horovod.torch`` is answered by :mod:`byteps.torch` from here
on; ``python -m bytescheduler train.py`` runs a program so from its first line.
"""

from bytescheduler import _horovod

__all__ = ["__version__"]

__version__: str

_horovod.answer(instead=False)


def __getattr__(name: str) -> str:
    if name == "__version__":
        from byteps import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
