"""``python -m dl2gpu``: the same as the command ``dl2gpu``."""

from dl2gpu.cli import main

main()
