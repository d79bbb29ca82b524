"""What is said where a value should have been a node, or a node is not what it is taken for."""

from __future__ import annotations

from typing import Final, NoReturn

# What users of Ray's graphs look for on a node.
_OF_RAYS_NODES: Final = ("execute", "execute_async", "experimental_compile")

RESULTS_REMEDY: Final = "list nodes only, and unpack what bind returns for several values"


def kind_of(value: object) -> str:
    """`value` in words: its type, for its text may be pages long, and of what a call gave, what to write instead."""
    kind = type(value)
    text = f"a value of type {kind.__name__}"
    # By name: this package does not import Ray.
    if kind.__name__ in ("ObjectRef", "ObjectRefGenerator") and kind.__module__.partition(".")[0] == "ray":
        return f"{text} (did you call .remote instead of .bind?)"
    return text


def looks_foreign(value: object) -> bool:
    """Whether `value` may be a node of `ray.dag`; an adapter knows for certain, when the graph is compiled.

    Its class is asked, for Ray's input node takes any attribute for a part of itself.
    """
    return hasattr(type(value), "with_tensor_transport")


def no_attribute(kind: type, name: str) -> str:
    """The text of an AttributeError of a node."""
    text = f"{kind.__name__} has no attribute {name!r}"
    if name in _OF_RAYS_NODES:
        return f"{text}; compile the graph first: raycomm.compile(node) gives what has execute and execute_async"
    return text


def refuse_unpickling(label: str) -> NoReturn:
    """What a pickled node becomes, in another process or a copy. Named in pickles; keep the name and the signature."""
    raise TypeError(
        f"{label} is a node of a raycomm graph: it cannot leave its process or be copied. Where it was bound with Ray's own "
        ".bind, run the graph with raycomm.compile(node); Ray's execute and experimental_compile need ray.dag.InputNode. "
        "Elsewhere pass it to bind directly, not inside of something else and not to .remote"
    )
