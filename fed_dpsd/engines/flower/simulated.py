"""The process of a Flower simulation, which simulation.py starts.

Flower starts and stops Ray. The run is served as for `flwr run`; what is printed is the log.
"""

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fed_dpsd.engines.flower import client
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.flower.server import serve
from fed_dpsd.server.run_folder import open_run_folder
from fed_dpsd.server.summary import write_failure
from fed_dpsd.storage import print_any_text


def end_with_parent(parent: int) -> None:
    """End this process, and Ray's with it, when its parent has been killed."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main() -> None:
    """Run the simulation that the arguments describe; the summary and the log report a failure."""
    folder, nodes, backend, parent = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
    print_any_text()
    threading.Thread(target=end_with_parent, args=[parent], daemon=True).start()
    experiment, server = open_run_folder(folder), ServerApp()

    @server.main()
    def _(grid: Grid, _: Context) -> None:
        serve(experiment, grid, folder)

    try:
        run_simulation(server, client.app, nodes, backend_config=backend)
    except Exception as error:
        traceback.print_exc()
        if not (folder / "summary.json").exists():
            write_failure(experiment, folder, GridFederation.engine, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the server's thread may still wait for replies


if __name__ == "__main__":
    main()
