"""Reports: pages, tables and figures of runs, deployments and sweeps."""
