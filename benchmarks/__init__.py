"""What lens-auto costs, beside its budgets: `python -m benchmarks`, or `make bench`. How to read it: README.md."""
