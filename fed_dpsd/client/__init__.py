"""The private side: everything that reads a client's records, for a reviewer to read in one go.

A `Site` is this side of a client, simulated or a hospital; the word means nothing else.

Records come in (`records.py`), a hospital's own file (`hospital.py`), and messages: images, the
student's predictions, a query id, or weights to start from. The rest of an experiment comes with a
message too, and `Hospital.experiment` takes of it only what the hospital's own file allows. Budget,
trust, noise and paths are never a message's.

Only these go out: answers, which `Site.release` returns after it has charged the ledger and drawn
the noise; the masked values and opened shares of secure sums (`secure_sum.py`); refusals, with a
public reason; and statements of what the run has cost. In a simulation, exact diagnostics too.

Variables named `sensitive_...` hold private values before noise. Methods (`fed_dpsd/methods`) see
them in their `client` halves; mechanisms (`fed_dpsd/privacy`) bound them and add the noise. This
folder and `fed_dpsd/server` never import each other; tests/test_architecture.py checks it.
"""
