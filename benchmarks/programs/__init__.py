"""The programs whose cost is measured, each run in processes of its own, with lens-auto and without."""
