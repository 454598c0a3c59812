"""Reports: pages of runs, deployments and sweeps, their tables and figures; tables of benches."""
