"""The Flower engine, in the only files of the library that import Flower."""

import contextlib
import os

# The environment of Flower's processes: no telemetry, no packages installed at run time.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Flower's actors have an environment of their own, so prestarted workers would stay idle.
    "RAY_prestart_worker_first_driver": "0",
}
LOOKS_FOR = "RAY_raylet_start_wait_time_s"  # for this long, once a second


def quieten() -> None:
    """Set the environment of `QUIET`, except what is set already."""
    os.environ.update({name: QUIET[name] for name in QUIET.keys() - os.environ.keys()})


def import_ray() -> None:
    """Import Ray so that it starts in a third of the time.

    Ray then has no dashboard and no autoscaler, which are of use only to its tools and to clusters,
    and does not wait a second before it looks for its own new node again.
    """
    quieten()
    os.environ[LOOKS_FOR] = "0"  # for this process, which reads it now, and not for Ray's
    import ray

    del os.environ[LOOKS_FOR]
    with contextlib.suppress(AttributeError):  # in another Ray, it starts more slowly
        services, node = ray._private.services, ray._private.node.Node
        services.start_api_server, node.start_monitor = lambda *_, **__: ("", None), lambda _: None
