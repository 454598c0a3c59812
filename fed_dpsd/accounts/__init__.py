"""Privacy accounts: the charges of each client, kept for life, and the card that reports them.

A ledger (ledger.py) holds every charge (entry.py) of a data set over all runs in an SQLite file
(database.py). Next to it lies the secret that the client's noise follows (secret.py). An account
decides whether a run may make another charge (account.py), and the card turns plans and charges
into proven epsilons (card.py). The coordinator's log of what clients state is in server/.

This room lies below both client/ and server/, which must not import each other: a simulation's
server reads its clients' ledgers, and a hospital prints the card of a plan before it takes part.
"""
