"""cloudpickle, protocol 5, everything in one string of bytes. Ray uses it too, with large buffers out of band."""

from __future__ import annotations

import pickle
from functools import partial

import cloudpickle

from microbench.codecs.base import Calls, each, each_of
from microbench.codecs.pickle_in_band import PROTOCOL
from microbench.serialized import Value


def calls_for(value: Value) -> Calls:
    return Calls(each(partial(cloudpickle.dumps, protocol=PROTOCOL)), each_of(pickle.loads))
