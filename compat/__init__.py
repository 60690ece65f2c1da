"""Whether real programs run, and end, the same with lens-auto as without it: `python -m compat` (`make compat`)."""
