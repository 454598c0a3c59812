"""Reading ledgers."""


def entries_of(ledger):
    """All charges of a ledger, read in a separate transaction."""
    with ledger.transaction():
        return ledger.entries()
