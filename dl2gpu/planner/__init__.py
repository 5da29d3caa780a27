"""Parallel schemes: described by SBP, priced by a model, searched, and lowered to programs.

After AutoDDL (Chen, Li, Guo, Yuan, Hoefler, arXiv 2301.06813v3), which searches schemes in the
terms of OneFlow's split, broadcast and partial sum. Lowering a scheme to each rank's communication,
and proving that free of deadlock, is this package's own.
"""
