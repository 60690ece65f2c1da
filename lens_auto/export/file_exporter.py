"""`OTEL_TRACES_EXPORTER=lens_file`: spans of OpenTelemetry's SDK as OTLP/JSON lines, one `TracesData` message a line.

The Collector's `otlpjsonfile` receiver reads them, as the OpenTelemetry file exporter specification has it. What ranks
record goes there too, through `senders.FileSender`.
"""

from __future__ import annotations

import os
import sys

from lens_auto.export.senders import FILE_VARIABLE
from lens_auto.sdk_exporters import FileSpanExporter, JsonLinesFile


class LensFileSpanExporter(FileSpanExporter):
    """Appends to a file; made by OpenTelemetry's entry points, without arguments.

    Args:
        path: the file; None: the one that `NEMO_LENS_FILE` names, else one of this process in the run directory.
    """

    def __init__(self, path: str | None = None) -> None:
        named = path or os.environ.get(FILE_VARIABLE, "").strip()
        if named:
            super().__init__(JsonLinesFile(lambda: named, sys.maxsize))
            return
        from lens_auto import providers, runtime

        super().__init__(JsonLinesFile(lambda: providers.locate("traces"), runtime.configure().max_run_bytes))
