"""Instrumentors for distributed PyTorch: one file per thing that is patched.

Each is a `BaseInstrumentor` with an entry point. They register post-import hooks, so that torch is never imported on
their account, and put everything back by identity.
"""
