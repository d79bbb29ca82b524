"""What the actors of a graph have for moving tensors. Each looks for itself; the driver asks where a hint makes it matter."""

from __future__ import annotations

from raycomm.device.found import Found, look_around, look_for_gpu
from raycomm.graph.model import Graph
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.options import DeviceKind
from raycomm.plan.places import NO_GPU, Missing, Place, no_cupy, no_nccl
from raycomm.plan.transfer import Backend
from raycomm.runtime.conversation import Conversation

# Several ranks on one GPU: what is older does not take them.
_SHARES_GPU_FROM = 23000


def places_of(graph: Graph, device: DeviceKind, actors: Conversation) -> dict[int, Place]:
    """By index of the process. Asks the actors, and blocks for it, if there are hints that depend on what they have.

    Raises:
        What `Conversation.ask` raises.
    """
    if device is DeviceKind.SIMULATED:
        return {actor.index + 1: Place.simulated(f"simulated device of {actor.label}") for actor in graph.actors}
    wanted = {hint.transport for _, hint in graph.hints} | {whole.transport for whole in graph.collectives}
    wanted |= {TensorTransport.NCCL for _, hint in graph.hints if hint.device is TensorDevice.GPU}
    wanted.discard(TensorTransport.OWN)  # whose business it is
    if wanted <= {TensorTransport.SHM}:
        return {}
    found: dict[int, Found] = actors.ask(look_for_gpu if wanted <= {TensorTransport.SHM, TensorTransport.AUTO} else look_around)
    return {process: place_of(here) for process, here in found.items()}


def place_of(found: Found) -> Place:
    """What an actor can take part in, and why not in the rest."""
    if found.torch is not None:
        return Place.without(Missing(f"torch cannot be imported there ({found.torch})", "pip install torch"))
    gloo = Backend.GLOO if found.gloo else Missing("its torch is built without gloo", "use 'shm', or another build of torch")
    missing = _lacks(found)
    if missing is not None:
        return Place(found.device, found.hardware, missing, gloo)
    # A rank of its own for each process, if NCCL takes them.
    apart = found.shares_gpu and found.nccl >= _SHARES_GPU_FROM
    return Place(found.device, f"{found.hardware} in {found.pid}" if apart else found.hardware, Backend.NCCL, gloo)


def _lacks(found: Found) -> Missing | None:
    """What keeps NCCL from working there."""
    if found.device is None:
        if found.driver and found.cuda is None:
            return Missing("its torch is built without CUDA", "install torch for CUDA there, or use 'auto' or 'shm'")
        return NO_GPU
    if found.cuda is None:  # its GPU is one of AMD
        text = "its torch is built for something other than CUDA, and NCCL is used through cupy for CUDA"
        return Missing(text, "install torch for CUDA there, or use 'auto' or 'shm'")
    if found.cupy is not None:
        return no_cupy(found.cuda)
    if found.cupy_cuda != found.cuda:
        text = f"its torch is built for CUDA {found.cuda} and its cupy for CUDA {found.cupy_cuda}, and they share its GPU"
        return Missing(text, f"pip install cupy-cuda{found.cuda}x")
    if not found.nccl:
        return no_nccl(found.cuda)
    if len(found.nccl_files) > 1:
        text = f"torch and cupy have loaded two NCCL libraries there, {' and '.join(found.nccl_files)}"
        return Missing(text, f"leave one of them, that of `pip install nvidia-nccl-cu{found.cuda}`")
    return None
