"""What can go wrong. Each message says what happened, where, and what to do next."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "BytePSError",
    "ConfigError",
    "CorruptionError",
    "ForkedError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "NotInitializedError",
    "PeerDiedError",
    "StallError",
    "StartError",
    "TensorError",
    "UsageError",
    "WaitTimeoutError",
]


class BytePSError(RuntimeError):
    """The base of all errors of this package.

    The attributes hold what the message says, for programs that act on it. One that does not apply,
    or is not known, is None, and ``ranks`` and ``frameworks`` are empty.

    ====================  ==========================================================================
    ``rank``, ``ranks``   the rank that died, failed or is waited for; all of them, in rising order.
                          Of a mismatch the two that disagree; of a broken path those at its ends
    ``frameworks``        of a mismatch, by rank: the framework that it speaks, such as ``'JAX'``,
                          where it had imported one of this package's modules by ``init()``
    ``server``            index of the server that died, failed or is at an end of the path
    ``host``, ``pid``     where the process that died or failed ran, or ``rank`` runs, if that is
                          waited for
    ``tensor``,           name of the tensor that was waited for and its round, from 1; where a
    ``round``             process died, what was open on this rank then, or the last that was over
    ``waited_s``          seconds for which it was waited for, or silent, when that was noticed
    ====================  ==========================================================================
    """

    rank: int | None = None
    ranks: tuple[int, ...] = ()
    frameworks: Mapping[int, str] = MappingProxyType({})
    server: int | None = None
    host: str | None = None
    pid: int | None = None
    tensor: str | None = None
    round: int | None = None
    waited_s: float | None = None


# By this TensorFlow's AutoGraph knows that a text makes one, and keeps the class of what is raised
# while it traces a function.
BytePSError.__init__ = Exception.__init__  # type: ignore[method-assign]


class ConfigError(BytePSError, ValueError):
    """A setting or an argument that cannot be."""


class StartError(BytePSError):
    """The job did not come together: a node is missing, unreachable or of another release."""


class HorovodInternalError(BytePSError):
    """What can stop a collective that is under way, under the name that Horovod gave it."""


class HostsUpdatedInterrupt(BytePSError):
    """New nodes wait to be let into an elastic job: raised by ``state.commit()`` on every rank."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class MismatchError(HorovodInternalError):
    """Two ranks, or two calls, disagree about what a name stands for. Raised on every rank."""


def _mismatch(message: str, ranks: tuple[int, ...], tensor: str | None = None) -> MismatchError:
    """A mismatch with its attributes: of these ranks, about this tensor if it is about one."""
    error = MismatchError(message)
    error.ranks = tuple(sorted(set(ranks)))
    error.rank, error.tensor = error.ranks[0], tensor
    return error


class PeerDiedError(HorovodInternalError):
    """A worker, server or scheduler of the job is gone."""


class CorruptionError(HorovodInternalError):
    """Bytes changed on their way between two nodes; nothing was made of them."""


class StallError(HorovodInternalError):
    """Some ranks have waited for others for longer than ``BPS_STALL_TIMEOUT``."""


class WaitTimeoutError(BytePSError, TimeoutError):
    """A wait with a timeout ran out. What was waited for goes on."""


class NotInitializedError(BytePSError, ValueError):
    """``init()`` has not been called, or ``shutdown()`` has."""


class ForkedError(BytePSError):
    """A call in a forked child of a process whose engine was running."""


class TensorError(BytePSError, ValueError, TypeError):
    """A tensor or an object that cannot be sent: its type, its device, its layout or its name."""


class UsageError(BytePSError, AssertionError):
    """Calls in an order that cannot give a right result."""
