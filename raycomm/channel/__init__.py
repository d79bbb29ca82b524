"""Channels: how values move between the processes of a graph. Imports neither Ray nor torch; works between plain processes
too."""

from raycomm.channel.base import NO_LIMIT, Deadline, Reader, Writer
from raycomm.channel.shm import Address, RingLayout, ShmArena, ShmReader, ShmWriter

__all__ = ["NO_LIMIT", "Address", "Deadline", "Reader", "RingLayout", "ShmArena", "ShmReader", "ShmWriter", "Writer"]
