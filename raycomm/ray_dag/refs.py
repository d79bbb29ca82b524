"""A ref that `ray.get` accepts: Ray looks for instances of its own compiled-graph ref class and calls their `get`."""

from __future__ import annotations

from ray.experimental.compiled_dag_ref import CompiledDAGRef

from raycomm.runtime.refs import Ref


class RayRef(Ref, CompiledDAGRef):
    """`Ref` under Ray's type. Everything of Ray's class is overridden."""
