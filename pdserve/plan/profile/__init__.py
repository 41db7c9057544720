"""Profiles: the step times of one engine on one kind of GPU. There are measured points, step times
fitted to them, and a way to scale them to degrees and models that were not measured.

`shipped/` has profiles. This package knows no cluster, and no times other than seconds of steps.
"""
