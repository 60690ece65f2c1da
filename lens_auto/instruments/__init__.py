"""Metrics: one module for each kind of program, each with one function that records what is given and nothing else."""

from __future__ import annotations

from lens_auto.instruments.inference import record_inference_metrics

__all__ = ["record_inference_metrics"]
