"""The process of a Flower simulation, which simulation.py starts.

Ray takes seconds to start and to stop. So it starts while this process imports the rest, and it is
not stopped after a run: simulation.py kills what is left. A Ray cluster is left to Flower.
"""

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def start_ray(backend: Mapping[str, Any]) -> None:
    """Start Ray on this machine as Flower would; Flower then finds it started.

    Flower gives its actors an environment of their own, for which prestarted workers are of no use.
    Here the actors inherit this process's environment, so that prestarted workers become actors.
    """
    from fed_dpsd.engines.flower import import_ray

    import_ray()
    import ray

    os.environ.pop("RAY_prestart_worker_first_driver", None)
    ray.init(include_dashboard=False, **backend.get("init_args", {}))


def end_with_parent(parent: int) -> None:
    """End this process, and Ray's with it, when its parent has been killed."""
    while os.getppid() == parent:
        time.sleep(0.2)
    _end(1)


def main() -> None:
    """Run the simulation that the arguments describe; the summary and the log report a failure."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder, nodes, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    threading.Thread(target=end_with_parent, args=[parent], daemon=True).start()
    backend = json.loads(sys.argv[3])
    own_ray = os.environ.get("RAY_ADDRESS", "") in ("", "local")
    gc.disable()  # imported objects are never garbage
    failed: Exception | None = None
    if own_ray:
        rest = ["fed_dpsd.engines.flower.grid"]
        threading.Thread(target=importlib.import_module, args=rest).start()
        try:
            start_ray(backend)  # in this thread, since Ray's processes end with the thread
        except Exception as error:
            failed = error

    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from fed_dpsd.engines.flower import client
    from fed_dpsd.engines.flower.grid import GridFederation
    from fed_dpsd.engines.flower.simulation import ENGINE
    from fed_dpsd.server.run import run
    from fed_dpsd.server.run_folder import open_run_folder
    from fed_dpsd.server.summary import write_failure

    gc.freeze()
    gc.enable()
    experiment, server = open_run_folder(folder), ServerApp()

    @server.main()
    def serve(grid: Grid, _: Context) -> None:
        run(experiment, GridFederation(experiment, grid, folder), folder, lambda line: None)
        if own_ray:
            _end(0)

    status = 1
    try:
        if failed:
            raise failed
        run_simulation(server, client.app, nodes, backend_config=backend)
        status = 0
    except Exception as error:
        traceback.print_exc()
        if not (folder / "summary.json").exists():
            write_failure(experiment, folder, ENGINE, error)
    finally:
        _end(status)  # the server's thread may still wait for replies


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
