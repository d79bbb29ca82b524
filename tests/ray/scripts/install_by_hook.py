"""Every worker of this job runs `raycomm.install` as it starts; code that knows nothing of raycomm then gets its graphs."""

from __future__ import annotations

import ray
from ray.dag import DAGNode, InputNode

from tests.ray.install_actors import Replica
from tests.ray.workers import Worker

ray.init(log_to_driver=False, runtime_env={"worker_process_setup_hook": "raycomm.install"})
replica = Replica.remote(install=False)
print(ray.get(replica.kind.remote()), ray.get(replica.call.remote(1)))
print(DAGNode.experimental_compile.__globals__["__name__"], "in the driver")
worker = Worker.remote()
with InputNode() as inp:
    theirs = worker.echo.bind(inp).experimental_compile()
print(type(theirs).__name__, ray.get(theirs.execute(5)))
theirs.teardown()
ray.shutdown()
