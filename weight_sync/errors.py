"""Every error this library raises on purpose.

A user's mistake and a failed transfer are both reported once, by one of these, and say what was found, where, what was
expected and what would be legal. Nothing here is ever caught to be logged and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable


class WeightSyncError(Exception):
    """Base of all errors of this library."""


class ConfigError(WeightSyncError):
    """A configuration value is unknown, of the wrong type, or impossible. Raised before any process is started."""


class FamilyError(ConfigError):
    """A model-family file, or its match with a model, is wrong: unmatched, doubly matched or leftover names."""


class ParallelError(ConfigError):
    """Parallel sizes do not multiply to the world, or do not divide the model."""


class PlanError(WeightSyncError):
    """A plan that does not write every destination element exactly once, or two ranks that computed different plans."""


class BindError(WeightSyncError):
    """A plan does not fit the live processes: other shapes, too little memory, a moved or restarted peer."""


class WitnessError(BindError):
    """What is declared is not what a witness saw: the engine's own loader, the trainer's own export. It stays so until the
    declaration, or the job, is another."""


class RolloutError(WeightSyncError):
    """An inference engine refused or failed a control request (pause, begin, finish, resume)."""


class WeightsError(WeightSyncError):
    """The trainer's weights hold values that must not be sent (NaN, infinities). Nothing was paused or sent."""


class SessionError(WeightSyncError):
    """A session verb was called in a state that does not allow it."""


class VerifyError(WeightSyncError):
    """Bytes at the destination are not the bytes of the source.

    rollout_ranks: where, as far as it was found out.
    """

    def __init__(self, text: str, rollout_ranks: Iterable[int] = ()) -> None:
        self.rollout_ranks = tuple(rollout_ranks)
        super().__init__(text)


class DeltaError(WeightSyncError):
    """Encoded changes that may not be applied: malformed, of another session or base, or out of range. Nothing of them was."""


class DeadlineExceeded(WeightSyncError):
    """A blocking call ran past the deadline it was given."""


class TransportError(WeightSyncError):
    """A write or read did not provably complete: the bytes that its whole batch was to fill are suspect from now on.

    Attributes:
        endpoint: the peer, as the transport prints it.
        tensor: the HF name the failing range belongs to, or a summary when the transport does not say which of a batch.
        byte_range: (first, one past last) remote address of the failing range.
        code: the transport's own status code or word.
    """

    def __init__(self, reason: str, *, endpoint: str, tensor: str, byte_range: tuple[int, int], code: int | str) -> None:
        self.endpoint = endpoint
        self.tensor = tensor
        self.byte_range = byte_range
        self.code = code
        super().__init__(
            f"{reason}: endpoint {endpoint}, tensor {tensor}, "
            f"remote bytes [{byte_range[0]:#x}, {byte_range[1]:#x}), code {code}"
        )

    def __reduce__(
        self,
    ) -> tuple[object, ...]:  # keyword-only arguments do not survive default pickling (Ray does that)
        return (_rebuild_transport_error, (str(self), self.endpoint, self.tensor, self.byte_range, self.code))


def _rebuild_transport_error(
    text: str, endpoint: str, tensor: str, byte_range: tuple[int, int], code: int | str
) -> TransportError:
    error = TransportError.__new__(TransportError)
    Exception.__init__(error, text)
    error.endpoint, error.tensor, error.byte_range, error.code = endpoint, tensor, byte_range, code
    return error


def listed(names: Iterable[object], limit: int = 8) -> str:
    """Join names for an error message, with a count of what was left out."""
    items = [str(name) for name in names]
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} (and {len(items) - limit} more)"
