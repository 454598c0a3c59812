"""The private side of a federation: everything here may hold private data of one client.

This page is for a privacy reviewer. A `Site` is the private side of one client, simulated or a
hospital's: its records, teachers and ledger; methods see it through methods/method.py. A hospital's
own file, site.yaml, becomes a `Hospital`, which builds its `Site`. `Hospital` decides which
requests are allowed, and `Site` charges them.

Input, and the file that checks it:

- The client's records: records.py reads a hospital's files; a simulation passes partitions.
- The hospital's own file: hospital.py takes the budget, delta, trust, limits and all paths from it,
  never from a message. Noise that a hospital draws follows its own secret, never a seed.
- A message: `protocol.Request` has images, the student's predictions, weights to train from, a
  query id, and the charges that the coordinator knows of. It checks its own types and shapes, and
  `Site.check` compares them with the client's. A request holds no epsilon and no import path.
- The coordinator's configuration, which comes with a message: `Hospital.experiment` checks it
  before any class is looked up. Its method and mechanism must be classes that the hospital's file
  allows by name. The mechanism's noise is the coordinator's choice, so the budget bounds its cost.
- Steps of a secure sum: secure_sum.py confirms one set of names for each sum.

Output, and the file that checks it:

- Answers: only `Site.release` (site.py) makes one, after it has charged the ledger. With
  `noise_at: server` it holds bounded sums without noise, for a hospital that trusts the server.
- Masked answers, and the proofs and secret shares of secure sums: secure_sum.py.
- Refusals, each a public line, and statements of the run's charges: site.py, hospital.py
  and accounts/account.py. An error is sent as "see its log" outside a simulation.
- Exact diagnostics, in simulations only: `Site.diagnose` refuses them otherwise, unless training
  was private, and flower/client.py refuses them for every hospital.
- Public facts: the client's number, and a digest of the installed code (flower/client.py).
- The time that an answer takes: it is not hidden, and the privacy card says so.

Names that begin with `sensitive` hold private values before noise. Records and teachers are private
too. The client halves of methods (fed_dpsd/methods) and the mechanisms (fed_dpsd/privacy) handle
sensitive values as well, between `Site.sensitive_probabilities` and the like and `Site.release`.

client/ and server/ never import each other, at any distance: tests/test_architecture.py.
"""
