"""Reports: tables of means over seeds and figures of sweeps, and tables of benches."""
