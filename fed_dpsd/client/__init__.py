"""The private side of a federation: everything here may hold one client's private data.

This page is for privacy reviewers. A `Site` is the private side of one client, either simulated or
a hospital: its records, teachers and ledger. Methods see it through methods/method.py. A hospital's
own file, site.yaml, becomes a `Hospital`, which builds its `Site`. `Hospital` decides which
requests are allowed, and `Site` charges them. Nothing here may know server/, not even indirectly.

Input, and the file that checks it:

- The client's records: records.py reads a hospital's files; a simulation passes partitions.
- The hospital's own file: hospital.py takes the budget, delta, trust, limits and all paths from
  this file, never from a message. A hospital draws noise from its own secret, never from a seed.
- A message: `protocol.Request` has images, the student's predictions, weights to train from, a
  query id, and the charges that the coordinator knows of. It checks its own types and shapes, and
  `Site.check` compares them with the client's. A request contains no epsilon and no import path.
- The coordinator's configuration, which accompanies a message: `Hospital.experiment` checks it
  before looking up any class. The hospital's file must allow the classes of the method and
  mechanism by name. The coordinator chooses the mechanism's noise, so the budget bounds its cost.
- Steps of a secure sum: secure_sum.py confirms only one set of names for each sum.

Output, and the file that checks it:

- Answers: only `Site.release` (site.py) makes them, after it has charged the ledger. With
  `noise_at: server`, an answer holds bounded sums without noise, for a hospital that trusts the
  server.
- Masked answers, and the proofs and secret shares of secure sums: secure_sum.py.
- Refusals, each a public line, and statements of the run's charges: site.py, hospital.py and
  accounts/account.py. Outside a simulation, an error is sent as "see its log".
- Exact diagnostics, in simulations only: `Site.diagnose` refuses them otherwise, unless training
  was private, and engines/flower/client.py refuses them for every hospital.
- Public facts: the client's number, a hospital's class names, and a digest of the installed code
  (engines/flower/client.py).
- The time that an answer takes: it is not hidden, as the privacy card states.

Names that begin with `sensitive` hold private values before noise is added. Records and teachers
are private too. The client halves of methods (fed_dpsd/methods) and the mechanisms
(fed_dpsd/privacy) also handle sensitive values, from functions such as
`Site.sensitive_probabilities` up to `Site.release`. tests/test_architecture.py checks the imports.
"""
