"""A rank's part in export: whether it exports, and that the exporter process of its node runs. Light: no SDK."""

from __future__ import annotations

import logging

from lens_auto.config import NemoLensConfig
from lens_auto.export.launch import ExporterKeeper, register
from lens_auto.strategies import get_export_strategy

logger = logging.getLogger("lens_auto")


class Exporting:
    """One rank's part.

    Args:
        run_folder: the spool's folder of this run.
        inherit_output: an exporter prints on standard output.
        local_rank: ranks look after the exporter at different times.
    """

    def __init__(self, run_folder: str, inherit_output: bool, local_rank: int) -> None:
        self.keeper = ExporterKeeper(run_folder, inherit_output, local_rank)
        self._run_folder = run_folder
        self._registered: str | None = None
        self._told = False

    def register(self, writer: str, run_dir: str | None) -> None:
        """Tell the exporter of this writer, and of its run directory once that is known."""
        if self._registered != (run_dir or ""):
            self._registered = run_dir or ""
            register(self._run_folder, writer, self._registered)

    def decide(self, rank: int, world_size: int) -> bool | None:
        """What the export strategy says of this rank; None: a strategy that the program has not registered (yet)."""
        config = NemoLensConfig.from_env()
        try:
            return bool(get_export_strategy(config.export_strategy)(config, rank, world_size))
        except ValueError as error:
            if not self._told:
                self._told = True
                logger.warning(
                    "lens-auto: NEMO_LENS_EXPORT_STRATEGY: %s; nothing is exported before it is registered, the records"
                    " are kept in the run directory",
                    error,
                )
            return None
