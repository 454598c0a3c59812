"""Reports of sweeps: tables of means over seeds, and figures."""
