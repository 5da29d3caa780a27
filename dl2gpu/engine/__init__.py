"""Where the analysis runs."""
