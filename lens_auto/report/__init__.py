"""Where the time of a run went: `load` reads the files, `summary` computes, `text` prints."""
