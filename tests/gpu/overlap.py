"""A transfer beside a computation: together they have to take clearly less time than one after the other."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.profiler

from tests.gpu import ranks
from tests.gpu.ranks import PATIENCE_S, Meeting, finish, on
from tests.gpu.setting import Figures, Setting, StepFailed

BOUND = 0.75
_ROUNDS = 7
# Seconds of the transfer: long against a launch, short against the limit. The size is doubled until it takes as long.
_TRANSFER_S = 8e-3
_SIZES = tuple(64 << 20 << doubled for doubled in range(5))
# Computation for each second of transfer. Two ranks on one GPU take turns at it, unless they share a context (MPS): half of the
# transfer's time is then all that a computation can get beside it.
_SHARES = (0.5, 1.0)
_MATRIX = 2048
_NCCL = "nccl"


def overlap(setting: Setting) -> Figures:
    """Rank 0 sends on the link's stream and multiplies matrices on its compute stream; rank 1 receives."""
    figures, _ = ranks.pair(setting, _Sender(setting), _Receiver(setting), setting.limit_s - 5.0)
    figures["ranks"] = setting.sharing
    figures["trace"] = setting.trace
    if setting.stand_in:
        note = "ran; not measured on a stand-in"
        return {**figures, "ratio": note, "seconds beside each other in the trace": note, "summary": note}
    ratio, beside = figures["ratio"], figures["seconds beside each other in the trace"]
    if ratio >= BOUND:
        raise StepFailed(f"together they take {ratio} of the sum of both alone, and have to take less than {BOUND}", figures)
    if not beside:
        raise StepFailed(f"in the trace {setting.trace} no transfer runs beside a computation", figures)
    summary = f"{ratio} of the sum of both alone (below {BOUND}); {1e3 * beside:.1f} ms beside each other in the trace"
    return {**figures, "summary": summary}


class _Rank:
    """What both ranks do: the same measurements, in the same order."""

    def __init__(self, setting: Setting) -> None:
        self._stand_in = setting.stand_in
        self._trace = setting.trace
        self._sizes: Sequence[int] = (1 << 16,) if setting.stand_in else _SIZES
        self._rounds = 2 if setting.stand_in else _ROUNDS

    def __call__(self, place: Any) -> Any:
        self._device = place.device
        self._link = place.link("link")
        self._link.warm_up(PATIENCE_S)
        self._stream, self._compute = place.device.stream("transfers"), place.device.stream("compute")
        self._meeting = Meeting(place)
        return self._measure()

    def _measure(self) -> Any:
        raise NotImplementedError

    def _buffer(self, size: int) -> Any:
        buffer = self._device.allocate((size,), torch.uint8, self._stream)
        self._device.run(self._stream, lambda: buffer.fill_(1))
        finish(self._stream)
        return buffer


class _Receiver(_Rank):
    def _measure(self) -> None:
        for size in self._sizes:
            buffer = self._buffer(size)
            while (what := self._ask()) == "transfer":
                self._meeting.wait()
                self._link.recv((size,), torch.uint8, 0, stream=self._stream, into=buffer)
                finish(self._stream)
            if what == "end":
                return

    def _ask(self) -> str:
        self._asked = getattr(self, "_asked", 0) + 1
        return self._meeting.ask(str(self._asked))


class _Sender(_Rank):
    _told = 0

    def _measure(self) -> Figures:
        for size in self._sizes:
            self._buffer_sent = self._buffer(size)
            self._transfer()  # the first one of a size connects
            alone = statistics.median(self._transfer() for _ in range(3))
            if alone >= _TRANSFER_S or size == self._sizes[-1]:
                break
            self._tell("larger")
        side = 64 if self._stand_in else _MATRIX
        dtype = torch.float32 if self._stand_in else torch.float16
        with on(self._compute):
            self._left = torch.ones(side, side, dtype=dtype, device=self._device.torch)
            self._product = torch.empty_like(self._left)
        self._multiply(10)
        per_product = self._multiply(100) / 100
        shares = [self._share(share, max(1, round(share * alone / per_product))) for share in _SHARES]
        best = min(shares, key=lambda figures: float(figures["ratio"]))
        products = best["products"]
        beside = self._traced(products)
        self._tell("end")
        return {
            "bytes": size,
            "ratio": best["ratio"],
            "by share of computation": shares,
            "seconds beside each other in the trace": beside,
        }

    def _share(self, share: float, products: int) -> Figures:
        """Rounds of each alone and of both, in turn; medians, in milliseconds."""
        times: dict[str, list[float]] = {"transfer": [], "computation": [], "both": []}
        for _ in range(self._rounds):
            times["transfer"].append(self._transfer())
            times["computation"].append(self._multiply(products))
            times["both"].append(self._both(products))
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = medians["both"] / (medians["transfer"] + medians["computation"])
        figures = {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in medians.items()}
        return {"share": share, "products": products, **figures, "ratio": round(ratio, 3)}

    def _transfer(self) -> float:
        return self._timed(self._launch_transfer, lambda: None)

    def _multiply(self, products: int) -> float:
        begin = time.perf_counter()
        self._launch_products(products)
        finish(self._compute)
        return time.perf_counter() - begin

    def _both(self, products: int) -> float:
        return self._timed(self._launch_transfer, lambda: self._launch_products(products))

    def _timed(self, *launches: Callable[[], None]) -> float:
        self._tell("transfer")
        self._meeting.wait()
        begin = time.perf_counter()
        for launch in launches:
            launch()
        finish(self._stream)
        finish(self._compute)
        return time.perf_counter() - begin

    def _launch_transfer(self) -> None:
        self._link.send(self._buffer_sent, 1, stream=self._stream)

    def _launch_products(self, products: int) -> None:
        with on(self._compute):
            for _ in range(products):
                torch.matmul(self._left, self._left, out=self._product)

    def _traced(self, products: int) -> float:
        """How long a transfer and a product ran at the same time, by the trace of one round of both, in seconds."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not self._stand_in:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities):  # the first use of the profiler takes seconds
            self._multiply(1)
        with torch.profiler.profile(activities=activities) as profile:
            self._both(products)
        profile.export_chrome_trace(self._trace)
        return beside_each_other(self._trace)

    def _tell(self, what: str) -> None:
        self._told += 1
        self._meeting.tell(str(self._told), what)


def beside_each_other(trace: str) -> float:
    """Seconds during which a kernel of NCCL and another kernel run, in a trace of `torch.profiler`."""
    events = json.loads(Path(trace).read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    transfers, others = (
        [(event["ts"], event["ts"] + event["dur"]) for event in kernels if (_NCCL in event["name"].lower()) is wanted]
        for wanted in (True, False)
    )
    # Kernels of one stream do not overlap each other, so nothing is counted twice.
    shared = sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in transfers for start, stop in others)
    return float(shared) / 1e6
