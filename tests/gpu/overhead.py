"""What the channel between devices costs: a bare send and receive against the same with a control record, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from raycomm.channel.device import Arriving, DeviceReader, DeviceWriter
from tests.gpu import ranks
from tests.gpu.channel import channels
from tests.gpu.ranks import PATIENCE_S, Meeting
from tests.gpu.setting import Figures, Setting

SHAPES = ((1, 1), (4, 24576), (50_000,))  # float16: 2, 196 608 and 100 000 bytes
_ROUNDS = 5
_TURN_S = 0.6  # for one system and shape in one round, at the speed of the warm-up
_LEAST = 5
_BARE, _CHANNEL = "send/recv", "channel"


def overhead(setting: Setting) -> Figures:
    """There and back between two ranks, half of it: microseconds. Hosts wait for each tensor before they send the next."""
    samples, _ = ranks.pair(setting, _Rank(setting), _Rank(setting), setting.limit_s - 5.0)
    rows = []
    for shape in SHAPES:
        for system in (_BARE, _CHANNEL):
            times = samples[f"{system} {shape}"]
            figures = {"mean_us": statistics.fmean(times), "p50_us": statistics.median(times), "p99_us": _percentile(times, 99)}
            rows.append({"system": system, "shape": str(shape), **{name: round(value, 2) for name, value in figures.items()}})
    added = [
        f"{channel['shape']} {channel['p50_us'] - bare['p50_us']:+.1f} us"
        for bare, channel in zip(rows[::2], rows[1::2], strict=True)
    ]
    note = " (of a stand-in: no figures of a GPU)" if setting.stand_in else ""
    summary = f"channel against bare send/recv, p50: {', '.join(added)}{note}"
    return {"ranks": setting.sharing, "dtype": "float16", "rows": rows, "summary": summary}


class _Rank:
    """Rank 0 begins and measures, rank 1 sends back what came."""

    _turn = 0

    def __init__(self, setting: Setting) -> None:
        self._most, self._warm = (5, 2) if setting.stand_in else (200, 20)
        self._rounds = 2 if setting.stand_in else _ROUNDS

    def __call__(self, place: Any) -> dict[str, list[float]]:
        self._place = place
        links = [place.link(name) for name in ("0->1", "1->0")]
        for link in links:
            link.warm_up(PATIENCE_S)
        self._out, self._into = links[place.rank], links[1 - place.rank]
        self._sending, self._receiving = place.device.stream("out"), place.device.stream("in")
        meeting = Meeting(place)
        writer, reader = channels(place, meeting)
        peer = 1 - place.rank
        # The values are never written to, so the bare send and the channel both send them as they lie.
        self._write = DeviceWriter(writer, self._out, peer, self._sending, name="value", keeps=True).write
        self._read = DeviceReader(reader, self._into, peer, self._receiving, name="value").read
        ways: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
            _BARE: (self._bare_send, self._bare_recv),
            _CHANNEL: (self._channel_send, self._channel_recv),
        }
        samples: dict[str, list[float]] = {f"{system} {shape}": [] for shape in SHAPES for system in ways}
        for _ in range(self._rounds):
            for shape in SHAPES:
                value = place.device.to_device(torch.ones(shape, dtype=torch.float16), self._sending)
                for system, (send, receive) in ways.items():
                    meeting.wait()
                    warm = self._there_and_back(value, send, receive, self._warm)
                    count = self._agreed(meeting, warm)
                    samples[f"{system} {shape}"] += self._there_and_back(value, send, receive, count)
        return samples

    def _agreed(self, meeting: Meeting, warm: list[float]) -> int:
        """How often rank 0 will go on: processes that share a GPU take turns at it, and may be a hundred times slower."""
        self._turn += 1
        key = f"count {self._turn}"
        if not self._place.rank:
            often = int(_TURN_S * 1e6 / (2 * statistics.fmean(warm)))
            meeting.tell(key, str(min(self._most, max(_LEAST, often))))
        return int(meeting.ask(key))

    def _there_and_back(self, value: Any, send: Callable[[Any], None], receive: Callable[[Any], Any], count: int) -> list[float]:
        times = []
        for _ in range(count):
            if self._place.rank:
                send(receive(value))
                continue
            begin = time.perf_counter()
            send(value)
            receive(value)
            times.append((time.perf_counter() - begin) / 2 * 1e6)
        return times

    def _bare_send(self, value: Any) -> None:
        self._out.send(value, 1 - self._place.rank, stream=self._sending)

    def _bare_recv(self, like: Any) -> Any:
        came = self._into.recv(tuple(like.shape), like.dtype, 1 - self._place.rank, stream=self._receiving)
        came.event.synchronize(PATIENCE_S)
        return came.tensor

    def _channel_send(self, value: Any) -> None:
        self._write(value, PATIENCE_S)

    def _channel_recv(self, like: Any) -> Any:
        arriving = self._read(PATIENCE_S)
        assert isinstance(arriving, Arriving)
        for event in arriving.events:
            event.synchronize(PATIENCE_S)
        return arriving.value()


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]
