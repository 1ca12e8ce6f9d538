"""`python -m seqpar`: the same as the console script."""

from seqpar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
