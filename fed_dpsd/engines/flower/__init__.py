"""The Flower engine, in the only files of the library that import Flower."""

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
