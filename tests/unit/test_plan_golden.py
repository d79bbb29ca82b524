"""Graph to plan: golden texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raycomm.graph.model import Graph
from raycomm.plan.lowering import lower
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify
from tests.unit.sample_graphs import chain, collectives, diamond, fan_out, two_returns

CHAIN = """\
plan "chain"
signature whole
process 0 "driver"
process 1 "W1"
process 2 "W2"
channel 0 "input" 0 -> 1
channel 1 "W1.forward#0" 1 -> 2
channel 2 "W2.forward#1" 2 -> 0
input whole -> channel 0
output channel 2
returns one
actor 1 registers 2
  r0 = read 0
  r1 = 0:forward(r0)
  write 1 from r1
  release r0, r1
actor 2 registers 2
  r0 = read 1
  r1 = 1:forward(r0)
  write 2 from r1
  release r0, r1
"""

DIAMOND = """\
plan "diamond"
signature 1 b
process 0 "driver"
process 1 "W1"
process 2 "W2"
process 3 "W3"
channel 0 "input[0]" 0 -> 1
channel 1 "input.b" 0 -> 3
channel 2 "W1.forward#0" 1 -> 2, 3
channel 3 "W2.scale#1" 2 -> 1
channel 4 "W3.scale#2" 3 -> 1
channel 5 "W1.join#3" 1 -> 0
input position 0 -> channel 0
input key "b" -> channel 1
output channel 5
returns one
actor 1 registers 4
  r0 = read 0
  r1 = 0:forward(r0)
  write 2 from r1
  release r0
  r0 = read 3
  r2 = read 4
  r3 = 3:join(r0, r2, local=r1)
  write 5 from r3
  release r0, r1, r2, r3
actor 2 registers 2
  r0 = read 2
  r1 = 1:scale(r0, c0)
  write 3 from r1
  release r0, r1
actor 3 registers 3
  r0 = read 2
  r1 = read 1
  r2 = 2:scale(r0, offset=r1)
  write 4 from r2
  release r0, r1, r2
"""

FAN_OUT = """\
plan "fan out"
signature whole
process 0 "driver"
process 1 "W1"
process 2 "W2"
process 3 "W3"
channel 0 "input" 0 -> 1, 2, 3
channel 1 "W1.forward#0" 1 -> 0
channel 2 "W2.forward#1" 2 -> 0
channel 3 "W3.forward#2" 3 -> 0
channel 4 "W2.forward#3" 2 -> 0
input whole -> channel 0
output channel 1
output channel 2
output channel 3
output channel 4
output channel 1
output input whole
returns list
actor 1 registers 2
  r0 = read 0
  r1 = 0:forward(r0)
  write 1 from r1
  release r0, r1
actor 2 registers 2
  r0 = read 0
  r1 = 1:forward(r0)
  write 2 from r1
  release r1
  r1 = 3:forward(r0)
  write 4 from r1
  release r0, r1
actor 3 registers 2
  r0 = read 0
  r1 = 2:forward(r0)
  write 3 from r1
  release r0, r1
"""

TWO_RETURNS = """\
plan "two returns"
signature 0 "odd key"
process 0 "driver"
process 1 "W1"
process 2 "W2"
channel 0 "input[\\"odd key\\"]" 0 -> 1
channel 1 "W1.split#0[0]" 1 -> 0, 2
channel 2 "W1.split#0[1]" 1 -> 2
channel 3 "W1.split#1[0]" 1 -> 0
channel 4 "W2.join#2" 2 -> 0
input key "odd key" -> channel 0
output channel 4
output channel 1
output channel 3
returns list
actor 1 registers 3
  r0 = read 0
  r1, r2 = 0:split(r0)
  write 1, 2 from r1, r2
  release r0, r1
  r0, r1 = 1:split(r2)
  write 3 from r0
  release r0, r1, r2
actor 2 registers 3
  r0 = read 2
  r1 = read 1
  r2 = 2:join(r0, r1)
  write 4 from r2
  release r0, r1, r2
"""


COLLECTIVE = """\
plan "collectives"
signature whole
process 0 "driver"
process 1 "W1"
process 2 "W2"
process 3 "W3"
process 4 "W4"
channel 0 "input" 0 -> 1, 2, 3, 4 slots 64
channel 1 "W1.reducescatter#12" 1 -> 0 inline_bytes 4096 slots 2 share_tensors yes
channel 2 "W2.broadcast#13" 2 -> 0
channel 3 "W4.broadcast#14" 4 -> 0 allow_pickle no
channel 4 "W1.join#15" 1 -> 0
channel 5 "part of W1.allreduce#4" 1 -> 2, 3, 4
channel 6 "part of W2.allreduce#5" 2 -> 1, 3, 4
channel 7 "part of W3.allreduce#6" 3 -> 1, 2, 4
channel 8 "part of W4.allreduce#7" 4 -> 1, 2, 3
channel 9 "slice of W1.allreduce#4" 1 -> 2, 3, 4
channel 10 "slice of W2.allreduce#5" 2 -> 1, 3, 4
channel 11 "slice of W3.allreduce#6" 3 -> 1, 2, 4
channel 12 "slice of W4.allreduce#7" 4 -> 1, 2, 3
channel 13 "part of W1.allgather#8" 1 -> 2, 3, 4
channel 14 "part of W2.allgather#9" 2 -> 1, 3, 4
channel 15 "part of W3.allgather#10" 3 -> 1, 2, 4
channel 16 "part of W4.allgather#11" 4 -> 1, 2, 3
channel 17 "part of W2.broadcast#13" 2 -> 4
channel 18 "part of W4.broadcast#14" 4 -> 2
input whole -> channel 0
output channel 4
output channel 1
output channel 2
output channel 3
returns list
actor 1 registers 4
  r0 = read 0
  r1, r2 = 0:split(r0)
  release r0
  r0, r3 = collective 4 allreduce avg rank 0 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2
  r1 = collective 8 allgather rank 0 from r0 parts 13, 14, 15, 16
  r2 = collective 12 reducescatter sum rank 0 from r1
  write 1 from r2
  release r1, r2
  r1 = 15:join(r0, r3)
  write 4 from r1
  release r0, r1, r3
actor 2 registers 4
  r0 = read 0
  r1, r2 = 1:split(r0)
  release r0
  r0, r3 = collective 5 allreduce avg rank 1 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2, r3
  r1 = collective 9 allgather rank 1 from r0 parts 13, 14, 15, 16
  release r0
  r0 = collective 13 broadcast root 1 rank 0 from r1 parts 17, 18
  write 2 from r0
  release r0, r1
actor 3 registers 4
  r0 = read 0
  r1, r2 = 2:split(r0)
  release r0
  r0, r3 = collective 6 allreduce avg rank 2 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2, r3
  r1 = collective 10 allgather rank 2 from r0 parts 13, 14, 15, 16
  release r0, r1
actor 4 registers 4
  r0 = read 0
  r1, r2 = 3:split(r0)
  release r0
  r0, r3 = collective 7 allreduce avg rank 3 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2
  r1 = collective 11 allgather rank 3 from r0 parts 13, 14, 15, 16
  release r0, r1
  r0 = collective 14 broadcast root 1 rank 1 from r3 parts 17, 18
  write 3 from r0
  release r0, r3
"""


GOLDEN = [
    ("chain", chain, CHAIN),
    ("diamond", diamond, DIAMOND),
    ("fan out", fan_out, FAN_OUT),
    ("two returns", two_returns, TWO_RETURNS),
    ("collectives", collectives, COLLECTIVE),
]


@pytest.mark.parametrize(("name", "make", "text"), GOLDEN, ids=[name for name, _, _ in GOLDEN])
def test_golden_text(name: str, make: Callable[[], Graph], text: str) -> None:
    plan = lower(make(), name)
    assert plan.to_text() == text
    assert str(plan) == text
    assert parse_plan(text) == plan
    verify(plan)
