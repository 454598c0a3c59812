"""Reports: pages, tables and figures of runs, deployments and sweeps.

Knows results that others have read and computed: scores, costs, epsilons and predictions, and in a
simulation exact diagnostics. Knows no site, network or record, and computes no epsilon.
"""

REPORTED = (
    "a table of `fed-dpsd sweep`, or the folder that a sweep, a run or a rehearsal has written"
)
