"""Looks into ledgers."""


def entries_of(ledger):
    """All charges of a ledger, read in a transaction of its own."""
    with ledger.transaction():
        return ledger.entries()
