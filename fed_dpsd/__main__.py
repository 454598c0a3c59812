"""`python -m fed_dpsd` is the console script `fed-dpsd`."""

from fed_dpsd.cli import main

if __name__ == "__main__":
    main()
