"""A rank's part in export: whether it exports, and that the exporter process of its node runs. Light: no SDK."""

from __future__ import annotations

import logging

from lens_auto.config import NemoLensConfig
from lens_auto.destinations import CONSOLE
from lens_auto.export.exporters import LOCAL
from lens_auto.export.launch import ExporterKeeper, register
from lens_auto.strategies import get_export_strategy

logger = logging.getLogger("lens_auto")


class Exporting:
    """One rank's part.

    Args:
        run_folder: the spool's folder of this run.
        names: of the exporters of spans.
        metrics: of those of metrics.
        local_rank: ranks look after the exporter at different times.

    Attributes:
        keeps_records: nothing leaves this node, so the records stay in the run directory.
    """

    def __init__(self, run_folder: str, names: list[str], metrics: list[str], local_rank: int) -> None:
        self.keeper = ExporterKeeper(run_folder, CONSOLE in (*names, *metrics), local_rank)
        self.keeps_records = LOCAL.issuperset(names)
        self._run_folder = run_folder
        self._registered: str | None = None
        self._told = local_rank > 0  # one rank of a node says what all find

    def register(self, writer: str, run_dir: str | None) -> None:
        """Tell the exporter of this writer, and of its run directory once that is known."""
        if self._registered != (run_dir or ""):
            register(self._run_folder, writer, run_dir or "")
            self._registered = run_dir or ""

    def decide(self, rank: int, world_size: int) -> bool | None:
        """What the export strategy says of this rank; None: a strategy that the program has not registered (yet)."""
        try:
            config = NemoLensConfig.for_strategy()
            return bool(get_export_strategy(config.export_strategy)(config, rank, world_size))
        except Exception as error:  # a strategy may be the program's own
            if not self._told:
                self._told = True
                logger.warning(
                    "lens-auto: which ranks export cannot be told: %s; nothing is exported of this rank until it can"
                    " (a strategy of the program's own is looked up again), its records are kept in the run directory",
                    error,
                )
            return None
