"""pickle, protocol 5, everything in one string of bytes."""

from __future__ import annotations

import pickle
from functools import partial

from microbench.codecs.base import Calls, each, each_of
from microbench.serialized import Value

PROTOCOL = 5


def calls_for(value: Value) -> Calls:
    return Calls(each(partial(pickle.dumps, protocol=PROTOCOL)), each_of(pickle.loads))
