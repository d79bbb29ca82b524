"""A ref that `ray.get` accepts: Ray looks for instances of its own compiled-graph ref class and calls their `get`.

What Ray does with it elsewhere: `ray.get` refuses lists that mix it with other things, `ray.wait` and `.remote(...)` refuse it.
"""

from __future__ import annotations

from typing import NoReturn

from ray.experimental.compiled_dag_ref import CompiledDAGRef

from raycomm.runtime.refs import Ref


class NotPicklable(ValueError, TypeError):
    """A ref was pickled. `pickle.dumps` and `copy` raise ValueError in Ray; `ray.put` makes its report of TypeErrors only."""


class _NamedForUsers(type):
    """`ray.wait` refuses what is no ObjectRef by printing its class; so the class says what to use."""

    def __repr__(cls) -> str:
        return "<class 'raycomm.Ref'> (wait for these with raycomm.wait, or call ref.get)"


class RayRef(Ref, CompiledDAGRef, metaclass=_NamedForUsers):
    """`Ref` under Ray's type. Everything of Ray's class is overridden."""

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> NoReturn:
        raise NotPicklable("a Ref cannot be pickled: results are fetched in the process that compiled the graph. Send ref.get()")
