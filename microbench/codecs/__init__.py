"""One adapter per codec compared; each module has a function `calls_for(value)`. `base` says what that has to give."""

from microbench.codecs.base import Calls, Codec

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raycomm", "raycomm_native", "raycomm", "raycomm._core.encode and decode: the channel's encoder, to bytes"),
        Codec("raycomm_channel", "raycomm_channel", "raycomm", "write to and read from a shared-memory channel in one process"),
        Codec("raycomm_python", "raycomm_python", "raycomm", "raycomm.codec: for what the native encoder does not know"),
        Codec("msgpack", "msgpack_packer", "msgpack", "msgpack.Packer().pack, reused, and msgpack.unpackb"),
        Codec("msgspec", "msgspec_msgpack", "msgspec", "msgspec.msgpack.Encoder and Decoder, reused; the decoder knows the type"),
        Codec("pickle5", "pickle_in_band", None, "pickle.dumps, protocol 5, in band, and pickle.loads"),
        Codec("cloudpickle", "cloudpickle_in_band", "cloudpickle", "cloudpickle.dumps, protocol 5, in band, and pickle.loads"),
    )
}

__all__ = ["CODECS", "Calls", "Codec"]
