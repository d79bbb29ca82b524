"""Values to bytes and back, exactly. `message` draws the format; `values` reads and writes all of it, and the native
path must write the same bytes.

Importing this package imports neither torch nor numpy; a message that holds no tensor never does.
"""

from __future__ import annotations

from raycomm.codec.failure import Failure, cancelled, decode_failure, encode_failure, undecodable
from raycomm.codec.message import DEPTH_LIMIT, VERSION
from raycomm.codec.values import decode, encode, encode_counted

__all__ = [
    "DEPTH_LIMIT",
    "VERSION",
    "Failure",
    "cancelled",
    "decode",
    "decode_failure",
    "encode",
    "encode_counted",
    "encode_failure",
    "undecodable",
]
