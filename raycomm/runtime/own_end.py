"""An end that a class of the user's made, held to what the interface promises as far as that can be seen from here.

What it raises is an error of the link. What it receives has the shape, the dtype and the place that were asked for, or is one. A
send that failed is noticed, also where its `poll` says nothing of it. Its `abort` may take its time, and may fail.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from raycomm.device import Communicator, Device, Event, Received, Tensor
from raycomm.device.base import OwnStream, Shape, shape_text
from raycomm.device.checks import about, who
from raycomm.errors import CommunicatorClosedError, CommunicatorError, TensorMismatchError, WrongDeviceError

logger = logging.getLogger("raycomm")


class OwnEnd:
    """See `raycomm.device.Communicator`.

    Args:
        end: of the user's class.
        kind: what that is called.
        name: of the link or group.
        before_abort: called with the reason, perhaps more than once, before its transfers are ended: the peer sees that, and
            would be the first to say that something is wrong, and not what.
    """

    def __init__(self, end: Communicator, kind: str, name: str, before_abort: Callable[[CommunicatorError], object]) -> None:
        self.name = name
        self.rank = end.rank
        self.size = end.size
        self.device: Device = end.device
        self._end = end
        self._kind = kind
        self._sent: deque[Event] = deque()
        self._looking = threading.Lock()  # held while code of the user's looks; so `abort` has one of its own
        self._ending = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._before_abort = before_abort
        self._failure: CommunicatorError | None = None

    def warm_up(self, limit_s: float) -> None:
        """See the interface."""
        self._called("warm_up", self._end.warm_up, limit_s)

    def send(self, tensor: Tensor, peer: int, *, stream: OwnStream | None = None) -> Event:
        """See the interface."""
        event: Event = self._called("send", self._end.send, tensor, peer, stream=stream)
        self._sent.append(event)
        return event

    def recv(
        self, shape: Shape, dtype: Any, peer: int, *, stream: OwnStream | None = None, into: Tensor | None = None
    ) -> Received:
        """See the interface."""
        return self._checked(self._called("recv", self._end.recv, shape, dtype, peer, stream=stream, into=into), shape, dtype)

    def allreduce(self, tensor: Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """See the interface."""
        came = self._called("allreduce", self._end.allreduce, tensor, op, stream=stream)
        return self._checked(came, tensor.shape, tensor.dtype)

    def allgather(self, tensor: Tensor, *, stream: OwnStream | None = None) -> Received:
        """See the interface."""
        came = self._called("allgather", self._end.allgather, tensor, stream=stream)
        return self._checked(came, (tensor.shape[0] * self.size, *tensor.shape[1:]), tensor.dtype)

    def reducescatter(self, tensor: Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """See the interface."""
        came = self._called("reducescatter", self._end.reducescatter, tensor, op, stream=stream)
        return self._checked(came, (tensor.shape[0] // self.size, *tensor.shape[1:]), tensor.dtype)

    def broadcast(self, tensor: Tensor, root: int, *, stream: OwnStream | None = None) -> Received:
        """See the interface."""
        came = self._called("broadcast", self._end.broadcast, tensor, root, stream=stream)
        if root == self.rank:
            self._sent.append(came.event)
        return self._checked(came, tensor.shape, tensor.dtype)

    def poll(self) -> None:
        """See the interface. Also of sends that have ended badly."""
        self._called("poll", self._end.poll)
        with self._looking:
            while self._sent and self._sent[0].complete:
                self._called("send", self._sent.popleft().synchronize, 0.0)

    def abort(self, limit_s: float) -> None:
        """See the interface."""
        self._before_abort(self._failure or CommunicatorClosedError(f"{who(self)} aborted the communicator", **about(self)))
        with self._ending:
            if self._aborting is None:
                self._aborting = threading.Thread(target=self._abort, name=f"raycomm abort {self.name}", daemon=True)
                self._aborting.start()
        self._aborting.join(limit_s)

    def _abort(self) -> None:
        try:
            self._end.abort(1.0)
        except BaseException:
            logger.exception("%s: abort of %s failed; what it holds may stay until its process ends", self.name, self._kind)

    def _called(self, method: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except CommunicatorError as error:
            self._failure = self._failure or error
            raise
        except BaseException as error:  # sys.exit, too: it would end a thread, and nobody would know
            text = f"{who(self)}: {self._kind}.{method} failed with {type(error).__name__}: {error}"
            raise self._broke(CommunicatorError(text, **about(self))) from error

    def _broke(self, error: CommunicatorError) -> CommunicatorError:
        self._failure = self._failure or error
        return error

    def _checked(self, came: Received, shape: Shape, dtype: Any) -> Received:
        tensor = came.tensor
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            expected, given = shape_text(shape, dtype), shape_text(tensor.shape, tensor.dtype)
            text = f"{who(self)}: {self._kind} was to receive {expected} and gives {given}"
            raise self._broke(TensorMismatchError(text, expected=expected, given=given, **about(self)))
        if not self.device.holds(tensor):
            text = f"{who(self)}: {self._kind} gives a tensor of {tensor.device}, which is not on its device"
            raise self._broke(WrongDeviceError(text, expected=self.device.name, given=str(tensor.device), **about(self)))
        return came
